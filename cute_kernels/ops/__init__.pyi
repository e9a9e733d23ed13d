"""Typed signatures of the flat ops: see ``__init__.py``.

``python -m cute_kernels.ops.stub --write`` generates this file from the ``Op`` dataclasses.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

def adamw_quantize(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    numbers: Tensor,
    out: Sequence[Tensor],
    format: str,
    rowwise: bool,
    columnwise: bool,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    scale: Tensor | None = None,
    seed: Tensor | None = None,
) -> None:
    """A step of AdamW on an fp32 master, and ``grouped_quantize`` of what it makes; all is written
    in place.

    ``numbers`` are lr, power1, power2, scale and found_inf: beta1 and beta2 to the power of the
    step, what gradients are divided by, negative to maximize, and 1 to leave master and moments.
    With fl() one rounding to fp32 and fma() one of a product and a sum, as nvcc compiles the fused
    kernel of PyTorch 2.13:

      g = fl(grad / scale) p = fma(-fl(lr * weight_decay), p, p), unless weight_decay is 0 m =
      fma(beta1, m, fma(-beta1, g, g)) v = fma(beta2, v, fma(-beta2, fl(g * g), fl(g * g))) p = fl(p
      - fl(fl(fl(lr / fl(1 - power1)) * m) / fl(fl(fl(sqrt(v)) / fl(sqrt(fl(1 - power2)))) + eps)))

    One kernel; where groups have amaxes two, of which the first takes them of the p that it makes.

    Args:
        master: p, (G, N, K) fp32, contiguous, like ``exp_avg``, m, and ``exp_avg_sq``, v.
        grad: (G, N, K) bf16, fp16 or fp32; it stays as it is.
        numbers: (5,) fp32.
        out: the buffers of the directions, as of ``grouped_quantize_out``.
        format: the text of the format, not a row-scaled one.
        rowwise: as of ``grouped_quantize``, like ``columnwise``, ``scale`` and ``seed``.

    Defined by:
        Op class: ``cute_kernels.ops.optimizer.op.AdamWQuantize``
        Launcher: ``cute_kernels/ops/optimizer/launcher.py:adamw_quantize``
    """

def compute_offsets(
    splits: Tensor,
    multiplier: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """End offset of each group: the inclusive sum of ``splits`` times ``multiplier``.

    Args:
        splits: (G,) int32 or int64 sizes.
        multiplier: elements counted for each unit of ``splits``, at least 1 and in ``dtype``.
        dtype: int32 or int64.

    Returns:
        (G,) offsets. Those that ``dtype`` cannot hold saturate: they are its largest number.

    Defined by:
        Op class: ``cute_kernels.ops.reductions.op.ComputeOffsets``
        Launcher: ``cute_kernels/ops/reductions/launcher.py:compute_offsets``
    """

def compute_routing(
    expert_ids: Tensor,
    num_experts: int,
) -> list[Tensor]:
    """Rows of tokens sorted by expert, and where each token went: a stable counting sort.

    Token t has one row for each of its k experts. Rows of expert 0 come first, in the order of
    tokens, then those of expert 1, and so on. An id that is not in [0, E), such as the -1 of an
    expert on another rank, has no row. Nothing is read on the host.

    Args:
        expert_ids: (T, k) int32 or int64.
        num_experts: E, at least 1.

    Returns:
        offs (E,), the END row of each expert; token (T * k,), the token of each row; pair (T *
        k,), t * k + j of each row, whose weight is ``weights.flatten()[pair]``; row (T, k), the
        inverse: the row of each of a token's experts. All int32. ``row`` is -1 of an id without
        a row, ``token`` and ``pair`` are -1 from row ``offs[-1]`` on.

    Defined by:
        Op class: ``cute_kernels.ops.moe.op.ComputeRouting``
        Launcher: ``cute_kernels/ops/moe/launcher.py:compute_routing``
    """

def delayed_scaling_update(
    amax_history: Tensor,
    scale: Tensor,
    format: str,
    amax: Tensor | None = None,
    margin: int = 0,
    algorithm: str = "max",
    skip_nonfinite: bool = False,
) -> None:
    """Roll the amax history of each slot, and make its next scale; both are written in place.

    A slot is a column of the history: a group of one tensor. For each, with fl() one rounding to
    fp32 (TransformerEngine's fused update):

      last = amax where that is given and not 0, else history[0]
      if last != 0:
        history = (history[1], ..., history[L-1], last)
        A = max(history) passing over NaN, or last for "most_recent"
        if A is finite and A > 0: scale = min(fl(fl(FP8_MAX * 2^-margin) / A), FMAX)
        history[0] = 0

    so the largest of the last L amaxes counts. Where ``last`` is 0 nothing was seen, and nothing
    changes. An infinite A keeps the scale, until the infinity has left the history.

    Args:
        amax_history: (L, n) fp32, contiguous; row 0 takes the amaxes of the present step, row 1
            is the oldest.
        scale: (n,) fp32, contiguous.
        format: the text of the format; its element decides FP8_MAX.
        amax: (n,) fp32 to use instead of row 0, such as one that was reduced over processes;
            its sign is dropped.
        margin: FP8_MAX is divided by two to this power.
        algorithm: ``"max"`` or ``"most_recent"``.
        skip_nonfinite: a ``last`` that is infinite or NaN counts as 0, and row 0 becomes
            ``last``.

    Defined by:
        Op class: ``cute_kernels.ops.delayed_scaling.op.DelayedScalingUpdate``
        Launcher: ``cute_kernels/ops/delayed_scaling/launcher.py:delayed_scaling_update``
    """

def grouped_amax(
    x: Tensor,
    offs: Tensor | None = None,
) -> Tensor:
    """Largest magnitude of each group; NaN is passed over.

    Args:
        x: (T, K) with ``offs``, or (G, N, K) without; bf16, fp16 or fp32.
        offs: (G,) int32 end rows.

    Returns:
        (G,) fp32, 0 for an empty group.

    Defined by:
        Op class: ``cute_kernels.ops.reductions.op.GroupedAmax``
        Launcher: ``cute_kernels/ops/reductions/launcher.py:grouped_amax``
    """

def grouped_dbias(
    dy: Tensor,
    offs: Tensor | None = None,
) -> Tensor:
    """Column sums of each group in fp32, in a fixed order: the gradient of a bias.

    Args:
        dy: (T, N) with ``offs``, or (G, M, N) without; bf16, fp16 or fp32.
        offs: (G,) int32 end rows.

    Returns:
        (G, N) fp32, in which they are summed, zeros for an empty group. Callers cast to the
        dtype of a bias, once, after adding what else belongs to the gradient.

    Defined by:
        Op class: ``cute_kernels.ops.reductions.op.GroupedDbias``
        Launcher: ``cute_kernels/ops/reductions/launcher.py:grouped_dbias``
    """

def grouped_dequantize(
    codes: Tensor,
    scales: Sequence[Tensor],
    format: str,
    rows: int,
    dtype: torch.dtype,
    offs: Tensor | None = None,
    columnwise: bool = False,
    shapes: Sequence[int] | None = None,
) -> Tensor:
    """Decode one direction of a quantized tensor.

    Args:
        codes: as ``grouped_quantize`` returns them, rowwise or columnwise.
        scales: what else that direction needs to be read (``Format.operand_names``): block
            scales, and the vector of the second level that decodes.
        format: the text of the format.
        rows: T, N when uniform, or the capacity with ``shapes``.
        dtype: bf16, fp16 or fp32.
        offs: (G,) int32 end rows, or None for uniform groups.
        columnwise: the copy is the columnwise one.
        shapes: [m0, n0, m1, n1, ...], rows and columns of groups that have shapes of their own;
            ``codes`` and ``scales`` then are flat.

    Returns:
        (T, K), zeros in the tail, (G, N, K), or (capacity,), zeros in the tail. Each value is
        rounded to ``dtype`` once.

    Defined by:
        Op class: ``cute_kernels.ops.dequantize.op.GroupedDequantize``
        Launcher: ``cute_kernels/ops/dequantize/launcher.py:dequantize``
    """

def grouped_quantize(
    x: Tensor,
    format: str,
    offs: Tensor | None = None,
    amax: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    scale: Tensor | None = None,
    seed: Tensor | None = None,
    activation: str | None = None,
    shapes: Sequence[int] | None = None,
    rows: Tensor | None = None,
    inverse: Tensor | None = None,
) -> list[Tensor]:
    """Quantize the groups of ``x``.

    Args:
        x: (T, K) with ``offs``, (capacity,) with ``shapes``, or (G, N, K) without; bf16, fp16
            or fp32; K a multiple of what the format asks for. (..., 2K) of a gated
            activation.
        format: the text of the format, such as ``"nvfp4:row_scaled"`` (``Format.text``).
        offs: (G,) int32 end rows. Rows from the last on change nothing that is written.
        amax: (G,) fp32, the amax of each group, instead of computing it. It is a magnitude: its
            sign is dropped. Elements beyond it saturate. Where both directions of a format
            are asked for whose columnwise copy is transformed (``Format.is_transformed``),
            (2, G): that of the rowwise and that of the columnwise copy.
        rowwise: write the rowwise copy, blocks along K.
        columnwise: write the columnwise copy, blocks along the rows of a group. Of a format
            that transforms it, ``x`` must be bf16.
        scale: (G,) fp32, finite, what the elements of each group are multiplied by, of a format
            that takes its scales from the caller: FP8 with delayed scaling, which needs it
            and takes no ``amax``. Of one that is not finite, zeros and the padding of slots
            may be NaN. Products beyond the format's largest number saturate. The amax that
            is returned is that of ``x``, whatever the scale.
        seed: (2,) int64, which stochastic formats need and others refuse. Codes depend on it,
            on the element and on the direction alone (``cute_kernels.reference.random_numbers``).
        activation: the text of what is done to ``x`` first (``Activation.text``), such as
            ``"swiglu"``: its result is quantized, in fp32 or, where the format truncates,
            rounded to the dtype of ``x``. ``cute_kernels.reference.activations`` states it
            to the bit.
        shapes: [m0, n0, m1, n1, ...], rows and columns of each group, where the last dimension
            varies or both do; each n a positive multiple of what the format asks for. The
            groups lie in ``x`` one after the other, contiguous; what is left of it is never
            read. Each has the codes and scales of a uniform tensor of this one group. With
            an activation these are the shapes of what is quantized: a gated one reads (m,
            2n) of ``x`` for each.
        rows: (R,) int32 with ``offs``: row r of what is quantized, of R rows, is
            row ``rows[r]`` of ``x``, or made of it. What is none of them is unspecified.
        inverse: (T, k) int32, which of these R rows each row of ``x`` is, others than those for
            none: what ``compute_routing`` gives as ``row``. The bits do not depend on it.
            With it and k > 1 rows that share no scale with others are read once, not k
            times (``launch.rows.by_token``).

    Returns:
        The buffers of the directions that are asked for, in the order of
        ``Format.buffer_names`` and of the shapes of ``cute_kernels.layout.buffers``; of NVFP4:
        codes, scales, amax, codes_t, scales_t, amax_t. What a slot or a padded row holds that
        no group has is unspecified.

    Defined by:
        Op class: ``cute_kernels.ops.quantize.op.GroupedQuantize``
        Launcher: ``cute_kernels/ops/quantize/launcher.py:quantize``
    """

def k_grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    a_scales: Sequence[Tensor] | None = None,
    b_scales: Sequence[Tensor] | None = None,
    a_format: str | None = None,
    b_format: str | None = None,
    accumulation: str | None = None,
    rows: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    """Multiply the transposed rows of each group of A by the rows of the group of B.

    The op is differentiable in a and b if both operands are plain.

    Args:
        a: (T, N), bf16, fp16 or fp32; or the codes of the columnwise copy of a ragged tensor.
        b: (T, K) of the dtype of ``a``; or the codes of the columnwise copy of a tensor with the
            same offs.
        offs: (G,) int32 end rows.
        alpha: (G,) fp32 factors.
        out_dtype: As for ``m_grouped_gemm``.
        a_scales: As for ``m_grouped_gemm``.
        b_scales: As for ``m_grouped_gemm``.
        a_format: As for ``m_grouped_gemm``.
        b_format: As for ``m_grouped_gemm``.
        accumulation: As for ``m_grouped_gemm``; "split" by default.
        rows: (T,) int32, the row of ``b`` (S, K) for each row of ``a``, as for ``m_grouped_gemm``.
            Only for plain operands.
        inverse: (S, k) int32, as for ``m_grouped_gemm``.

    Returns:
        (G, N, K); zeros for an empty group. The ``_out`` form does not write empty groups when it
        accumulates.

    Defined by:
        Op class: ``cute_kernels.ops.gemm.op.KGroupedGemm``
        Launcher: ``cute_kernels/ops/gemm/launcher.py:k_grouped``
    """

def m_grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    transpose_b: bool = False,
    out_dtype: torch.dtype | None = None,
    a_scales: Sequence[Tensor] | None = None,
    b_scales: Sequence[Tensor] | None = None,
    a_format: str | None = None,
    b_format: str | None = None,
    prepacked: bool = False,
    accumulation: str | None = None,
    rows: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of each group of A by the group's matrix of B.

    The op is differentiable in a, b and bias if both operands are plain. A plain ``a`` with a
    quantized ``b`` is multiplied by the decoded values of ``b`` (W4A16). Codes of 8 bits with codes
    of 4 bits are multiplied as decoded values, too (W4A8).

    Args:
        a: (T, K), bf16, fp16 or fp32; or the codes of the rowwise copy of a ragged tensor.
        b: (G, N, K) of the dtype of ``a``, or (G, K, N) with ``transpose_b``. Or the codes of a
            uniform tensor: of its rowwise copy (fprop), or with ``transpose_b`` of its columnwise
            copy (dgrad). The rows of a columnwise copy are padded to whole tiles, so that K of
            ``b`` cannot be checked against ``a``.
        offs: (G,) int32 end rows.
        bias: (G, N), added in fp32.
        alpha: (G,) fp32 factors.
        transpose_b: Contract over the rows of the groups of ``b`` (dgrad).
        out_dtype: bf16, fp16 or fp32. By default the dtype of a plain ``a``, or bf16 for codes,
            which have no dtype to follow.
        a_scales: The other tensors of the copy of ``a`` (``Format.operand_names``), such as its
            block scales and global scale; None if ``a`` is plain.
        b_scales: The other tensors of the copy of ``b``, likewise.
        a_format: Text of the format of ``a``; None if it is plain.
        b_format: Text of the format of ``b``; None if it is plain.
        prepacked: ``b`` has the bit order of ``cute_kernels.prepack``. Kernels for sm_90a and the
            reference support that.
        accumulation: How a tensor core adds products of operands without block scales (FP8). "fast"
            adds all of K in one accumulator. "split" uses a fresh accumulator every 128 of K, and
            adds each to an fp32 sum. The default is "fast" for fprop and "split" for dgrad. The
            bits differ on sm_90a, whose accumulators keep 13 fraction bits of FP8 sums. Elsewhere
            the accumulator is as exact as "split" anyway. Other operands raise ValueError.
        rows: (T,) int32, the row of ``a`` for each row of the product, such as ``token`` of
            ``compute_routing``. Then ``a`` (S, K) has any number of rows, and one group if it is
            quantized, to a format with scales of single rows. The result has the bits of the
            product of ``moe_gather(a, rows)``: an index out of range stands for zeros. Kernels of
            two plain operands read rows of ``a`` by the index, on sm_90a if that is faster
            (``ops.gemm.gathered``). Other kernels gather the rows into memory first.
        inverse: (S, k) int32, as for ``grouped_quantize``, for rows that are gathered into memory.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form does not write rows of the tail.

    Defined by:
        Op class: ``cute_kernels.ops.gemm.op.MGroupedGemm``
        Launcher: ``cute_kernels/ops/gemm/launcher.py:m_grouped``
    """

def m_grouped_gemm_activate(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    transpose_b: bool = False,
    out_dtype: torch.dtype | None = None,
    a_scales: Sequence[Tensor] | None = None,
    b_scales: Sequence[Tensor] | None = None,
    a_format: str | None = None,
    b_format: str | None = None,
    prepacked: bool = False,
    accumulation: str | None = None,
    rows: Tensor | None = None,
    inverse: Tensor | None = None,
    epilogue: str = "swiglu",
    interleaved: bool = False,
    keeps_z: bool = False,
    quantize_to: str | None = None,
    amax: Tensor | None = None,
) -> list[Tensor]:
    """Compute ``m_grouped_gemm`` and ``moe_activate`` of the result in one kernel.

    The result has the bits of the two ops: z, the product with its factors and bias, is rounded to
    ``out_dtype`` before the activation.

    Args:
        a: As for ``m_grouped_gemm``, and so are all arguments up to ``accumulation``.
        b: (G, N, K), or (G, 2 N, K) for a gated activation, whose rows are halves [A | B].
        epilogue: Text of the activation, as for ``moe_activate``.
        interleaved: Rows of ``b`` (and of ``bias``) for the two inputs of a gated activation
            alternate, A first.
        keeps_z: Return z, too, with columns in the order of the rows of ``b``.
        quantize_to: Text of a format. The activated result, rounded to ``out_dtype``, is quantized
            to it, and z is not returned.
        amax: (G,) fp32, the amaxes of the result, for a format with a global scale, as for
            ``grouped_quantize``.

    Returns:
        The activated result (T, N), then z (T, N or 2 N) with ``keeps_z``; rows of the tail are
        zeros. The ``_out`` form does not write rows of the tail. With ``quantize_to`` it returns
        the tensors that ``grouped_quantize`` of the activated result with ``offs`` and ``amax``
        returns.

    Defined by:
        Op class: ``cute_kernels.ops.gemm.fused_op.MGroupedGemmActivate``
        Launcher: ``cute_kernels/ops/gemm/launcher.py:m_grouped``
    """

def m_grouped_quantize_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    b_scales: Sequence[Tensor],
    a_format: str,
    b_format: str,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    transpose_b: bool = False,
    out_dtype: torch.dtype | None = None,
    prepacked: bool = False,
    seed: Tensor | None = None,
    accumulation: str | None = None,
    activation: str | None = None,
    rows: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    """Compute ``grouped_quantize`` of ``a`` and ``m_grouped_gemm`` of the result in one op.

    The result has the bits of the two ops. The tensor cores of sm_90a multiply fp16, so there the
    NVFP4 A never exists as codes: the quantizer writes code times block scale, which is the operand
    of the GEMM. Other arguments are those of ``m_grouped_gemm`` with a quantized ``b``.

    Args:
        a: (T, K), bf16, fp16 or fp32.
        a_format: Text of the format to which ``a`` is quantized.
        out_dtype: bf16, fp16 or fp32; bf16 by default, as in the second of the two ops.
        seed: As for ``grouped_quantize``.
        activation: Activation of ``a``, as for ``grouped_quantize``: ``a`` is (T, 2K) if it is
            gated.
        rows: (R,) int32, rows of ``a``, as for ``grouped_quantize``. Then the product has R rows.
        inverse: (S, k) int32, as for ``grouped_quantize``.

    Returns:
        (T, N); rows of the tail are zeros. The ``_out`` form does not write rows of the tail.

    Defined by:
        Op class: ``cute_kernels.ops.gemm.fused_op.MGroupedQuantizeGemm``
        Launcher: ``cute_kernels/ops/gemm/launcher.py:quantize_and_multiply``
    """

def m_grouped_quantize_gemm_activate(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    b_scales: Sequence[Tensor],
    a_format: str,
    b_format: str,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    transpose_b: bool = False,
    out_dtype: torch.dtype | None = None,
    prepacked: bool = False,
    seed: Tensor | None = None,
    accumulation: str | None = None,
    activation: str | None = None,
    rows: Tensor | None = None,
    inverse: Tensor | None = None,
    epilogue: str = "swiglu",
    interleaved: bool = False,
    keeps_z: bool = False,
    quantize_to: str | None = None,
    amax: Tensor | None = None,
) -> list[Tensor]:
    """Compute ``grouped_quantize`` of ``a`` and ``m_grouped_gemm_activate`` in one op.

    Args:
        a: As for ``m_grouped_quantize_gemm``, and so are all arguments up to ``inverse``.
        epilogue: As for ``m_grouped_gemm_activate``, and so are all arguments after it.

    Returns:
        As for ``m_grouped_gemm_activate``.

    Defined by:
        Op class: ``cute_kernels.ops.gemm.fused_op.MGroupedQuantizeGemmActivate``
        Launcher: ``cute_kernels/ops/gemm/launcher.py:quantize_and_multiply``
    """

def moe_activate(
    x: Tensor,
    activation: str,
    offs: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """An activation of the rows of experts, in fp32 and rounded once to the dtype of ``x``.

    ``cute_kernels.reference.activations`` states its bits.

    Args:
        x: (R, W) bf16, fp16 or fp32; W = 2 N of a gated activation.
        activation: its text, as ``grouped_quantize`` takes it.
        offs: (G,) int32 end rows: rows from the last on are neither read nor written.
        interleaved: columns of a gated activation's two inputs alternate, A first, instead of
            being halves [A | B].

    Returns:
        (R, N).

    Defined by:
        Op class: ``cute_kernels.ops.moe.op.MoeActivate``
        Launcher: ``cute_kernels/ops/moe/launcher.py:activate``
    """

def moe_activate_gradient(
    x: Tensor,
    grad: Tensor,
    activation: str,
    offs: Tensor | None = None,
    interleaved: bool = False,
    weight: Tensor | None = None,
    pair: Tensor | None = None,
) -> list[Tensor]:
    """The gradient of ``moe_activate``, and of the weights of rows if there are some.

    A token's output is the sum of its rows, each with a weight p, of a second product of what
    ``moe_activate`` gives. The gradient of that product's input without p, ``grad``, is enough for
    the gradient of p: it is <grad, a>, so that the rows that p multiplied need not be kept
    (SonicMoE, arXiv 2512.14080). ``cute_kernels.reference.moe`` states the bits. Other arguments
    are those of ``moe_activate``.

    Args:
        grad: (R, N) of the dtype of ``x``: the gradient of its result, without the weight.
        weight: (T, k) fp32, p of each pair of a token and an expert.
        pair: (R,) int32, the pair of each row: with ``weight``.

    Returns:
        The gradient with respect to ``x`` of its shape, given ``p * grad``. With weights also
        ``p * a`` (R, N) of the dtype of ``x``, which the gradient of the second product's
        weight reads, and the gradient of ``weight`` (T, k) fp32, 0 where there is no row.

    Defined by:
        Op class: ``cute_kernels.ops.moe.op.MoeActivateGradient``
        Launcher: ``cute_kernels/ops/moe/launcher.py:activate_gradient``
    """

def moe_combine(
    h: Tensor,
    row: Tensor,
    weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The weighted sum of each token's rows: ``y[t] = sum over k of weight[t, k] h[row[t, k]]``.

    In fp32, in ascending k from 0 on, each product and each sum rounded, and one cast at the end.

    Args:
        h: (R, H) bf16, fp16 or fp32.
        row: (T, k) int32, no row twice; what is none of the rows of ``h`` is left out.
        weight: (T, k) fp32; None for ones.
        out_dtype: dtype of ``y``; that of ``h`` by default.

    Returns:
        (T, H).

    Defined by:
        Op class: ``cute_kernels.ops.moe.op.MoeCombine``
        Launcher: ``cute_kernels/ops/moe/launcher.py:combine``
    """

def moe_gather(
    x: Tensor,
    index: Tensor,
    row: Tensor | None = None,
) -> Tensor:
    """Rows of ``x`` by an index: ``out[r] = x[index[r]]``.

    Args:
        x: (T, H) bf16, fp16 or fp32.
        index: (R,) int32; where it is none of the rows of ``x``, ``out`` is zeros.
        row: (T, k) int32, the inverse: the rows of ``out`` that each row of ``x`` went to, -1
            for none. The gradient has to have it, and with it and k > 1 kernels read ``x``
            once, not k times.

    Returns:
        (R, H) of the dtype of ``x``.

    Defined by:
        Op class: ``cute_kernels.ops.moe.op.MoeGather``
        Launcher: ``cute_kernels/ops/moe/launcher.py:gather``
    """

def moe_quantize_gradient(
    x: Tensor,
    grad: Tensor,
    format: str,
    scaled_format: str,
    activation: str,
    offs: Tensor,
    interleaved: bool,
    weight: Tensor,
    pair: Tensor,
    scale: Tensor | None = None,
    scaled_scale: Tensor | None = None,
) -> list[Tensor]:
    """``moe_activate_gradient``, then ``grouped_quantize``, to the bit, where tiles allow it from
    one read.

    What is quantized is rounded to the dtype of ``x`` first, but need not be in memory. The other
    arguments are those of ``moe_activate_gradient``, all given.

    Args:
        x: (R, W), what enters the activation; bf16, fp16 or fp32.
        grad: (R, N) of the dtype of ``x``: the gradient of its result, without the weight.
        format: the text of the format of the gradient of ``x``: MXFP8, FP8Block, or FP8 with
            delayed scaling.
        scaled_format: likewise, of ``p * a``.
        scale: as ``grouped_quantize`` takes it, of the gradient of ``x`` if its format does.
        scaled_scale: likewise, of ``p * a``.

    Returns:
        The buffers of the gradient of ``x`` in both directions and of ``p * a`` columnwise as
        ``grouped_quantize`` returns them, such as codes, scales, codes_t, scales_t, codes_t and
        scales_t; and the gradient of ``weight``.

    Defined by:
        Op class: ``cute_kernels.ops.moe.op.MoeQuantizeGradient``
        Launcher: ``cute_kernels/ops/moe/launcher.py:quantize_gradient``
    """

def moe_route(
    logits: Tensor,
    selection_bias: Tensor | None,
    end: Tensor | None,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = True,
    expert_groups: int = 1,
    top_groups: int = 1,
    factor: float = 1.0,
) -> list[Tensor]:
    """The best experts of each token by their logits;

    ``cute_kernels.reference.router`` states the bits.

    Args:
        logits: (T, E) fp32.
        selection_bias: (E,) fp32, added to scores where experts are chosen and nowhere else, or
            None.
        end: (1,) int32: tokens from there on have no experts; None for all T.
        top_k: k of E.
        score: ``"softmax"`` or ``"sigmoid"`` of the logits.
        renormalize: a token's weights are divided by their sum.
        expert_groups: experts are in so many groups of equal size,
        top_groups: of which the best are those with the largest sum of two scores: k fit into
            them.
        factor: what weights are multiplied by last.

    Returns:
        weights (T, k) fp32, ids (T, k) int64, the best first, -1 of tokens that are not there,
        and scores (T, E) fp32. Differentiable in the logits, given gradients of weights and
        scores.

    Defined by:
        Op class: ``cute_kernels.ops.moe.router_op.MoeRoute``
        Launcher: ``cute_kernels/ops/moe/launcher.py:route``
    """

def moe_route_gradient(
    dweights: Tensor,
    dscores: Tensor | None,
    ids: Tensor,
    scores: Tensor,
    score: str = "softmax",
    renormalize: bool = True,
    factor: float = 1.0,
    in_parts: bool = False,
) -> Tensor:
    """The gradient of the logits of ``moe_route``, whose arguments and results the others are.

    Args:
        dweights: (T, k) fp32.
        dscores: (T, E) fp32, or None for zeros.
        in_parts: as three bf16 numbers that add up to each fp32 number, for products of bf16.

    Returns:
        (T, E) fp32; in parts (T, 3 E) bf16, the largest of all first.

    Defined by:
        Op class: ``cute_kernels.ops.moe.router_op.MoeRouteGradient``
        Launcher: ``cute_kernels/ops/moe/launcher.py:route_gradient``
    """
