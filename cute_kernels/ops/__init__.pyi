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
    """Take a step of AdamW on an fp32 master weight, and quantize the result. All in place.

    ``numbers`` are lr, power1, power2, scale and found_inf. power1 and power2 are beta1 and beta2
    to the power of the step. scale divides gradients, and is negative to maximize. found_inf = 1
    leaves master and moments unchanged. Let fl() be one rounding to fp32 and fma() one rounding of
    a product and a sum, as nvcc compiles the fused kernel of PyTorch 2.13:

        g = fl(grad / scale)
        p = fma(-fl(lr * weight_decay), p, p), unless weight_decay is 0
        m = fma(beta1, m, fma(-beta1, g, g))
        v = fma(beta2, v, fma(-beta2, fl(g * g), fl(g * g)))
        p = fl(p - fl(fl(fl(lr / fl(1 - power1)) * m)
                      / fl(fl(fl(sqrt(v)) / fl(sqrt(fl(1 - power2)))) + eps)))

    This takes one kernel; two if groups have amaxes, the first of which computes the amaxes of
    the new p.

    Args:
        master: p, (G, N, K) fp32, contiguous.
        exp_avg: m, like ``master``.
        exp_avg_sq: v, like ``master``.
        grad: (G, N, K) bf16, fp16 or fp32. It is not changed.
        numbers: (5,) fp32.
        out: Buffers of the directions, as for ``grouped_quantize_out``.
        format: Text of the format, which is not row-scaled.
        rowwise: As for ``grouped_quantize``.
        columnwise: As for ``grouped_quantize``.
        beta1: Decay rate of the first moment.
        beta2: Decay rate of the second moment.
        eps: Added to the denominator.
        weight_decay: Weight decay coefficient.
        scale: As for ``grouped_quantize``.
        seed: As for ``grouped_quantize``.

    Defined by:
        Op class: ``cute_kernels.ops.optimizer.op.AdamWQuantize``
        Launcher: ``cute_kernels/ops/optimizer/launcher.py:adamw_quantize``
    """

def compute_offsets(
    splits: Tensor,
    multiplier: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the end offset of each group: the inclusive sum of ``splits`` times ``multiplier``.

    Args:
        splits: (G,) int32 or int64 sizes.
        multiplier: Number of elements per unit of ``splits``, at least 1, in the range of
            ``dtype``.
        dtype: Dtype of the offsets: int32 or int64; int32 by default.

    Returns:
        (G,) offsets. Offsets above the largest number of ``dtype`` saturate.

    Defined by:
        Op class: ``cute_kernels.ops.reductions.op.ComputeOffsets``
        Launcher: ``cute_kernels/ops/reductions/launcher.py:compute_offsets``
    """

def compute_routing(
    expert_ids: Tensor,
    num_experts: int,
    expert_map: Tensor | None = None,
) -> list[Tensor]:
    """Sort the rows of tokens by expert, and return the row of each token: a stable counting sort.

    Token t has one row for each of its k experts. Rows of expert 0 come first, in the order of
    tokens, then rows of expert 1, and so on. An id outside [0, E), such as -1 for an expert on
    another rank, has no row. Nothing is read on the host.

    Args:
        expert_ids: (T, k) int32 or int64.
        num_experts: E, at least 1.
        expert_map: (N,) int32. Expert of each id: id i means expert ``expert_map[i]``. An id
            outside [0, N) and an expert outside [0, E) have no row. None maps each id to itself.

    Returns:
        Four int32 tensors. offs (E,): The end row of each expert. token (T * k,): token of each
        row.
        pair (T * k,): t * k + j of each row, whose weight is ``weights.flatten()[pair]``. row (T,
        k), the inverse: row of each of a token's experts. ``row`` is -1 for an id without a row;
        ``token`` and ``pair`` are -1 from row ``offs[-1]`` on.

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
    """Roll the amax history of each slot, and compute its next scale. Both in place.

    A slot is a column of the history: one group of one tensor. For each slot, with fl() one
    rounding to fp32 (TransformerEngine's fused update):

        last = amax if it is given and not 0, else history[0]
        if last != 0:
          history = (history[1], ..., history[L-1], last)
          A = max(history) ignoring NaN, or last for "most_recent"
          if A is finite and A > 0: scale = min(fl(fl(FP8_MAX * 2^-margin) / A), FMAX)
          history[0] = 0

    So the largest of the last L amaxes counts. If ``last`` is 0, the slot was not used in this
    step, and nothing changes. An infinite A keeps the scale until the infinity has left the
    history.

    Args:
        amax_history: (L, n) fp32, contiguous. Row 0 collects the amaxes of this step, row 1 is the
            oldest.
        scale: (n,) fp32, contiguous.
        format: Text of the format. Its element determines FP8_MAX.
        amax: (n,) fp32 to use instead of row 0, such as an amax that was reduced over processes.
            Its sign is dropped.
        margin: FP8_MAX is divided by two to this power.
        algorithm: ``"max"`` or ``"most_recent"``.
        skip_nonfinite: Treat an infinite or NaN ``last`` as 0. Row 0 becomes ``last``.

    Defined by:
        Op class: ``cute_kernels.ops.delayed_scaling.op.DelayedScalingUpdate``
        Launcher: ``cute_kernels/ops/delayed_scaling/launcher.py:delayed_scaling_update``
    """

def grouped_amax(
    x: Tensor,
    offs: Tensor | None = None,
) -> Tensor:
    """Return the largest magnitude of each group, ignoring NaN.

    Args:
        x: (T, K) with ``offs``, else (G, N, K); bf16, fp16 or fp32.
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
    """Return the column sums of each group in fp32, in a fixed order: the gradient of a bias.

    Args:
        dy: (T, N) with ``offs``, else (G, M, N); bf16, fp16 or fp32.
        offs: (G,) int32 end rows.

    Returns:
        (G, N) fp32, the dtype of the sums; zeros for an empty group. Callers cast to the dtype of
        the bias once, after adding other parts of the gradient.

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
        codes: Rowwise or columnwise codes, as ``grouped_quantize`` returns them.
        scales: Other buffers of that direction that decode (``Format.operand_names``): block
            scales, and the first vector of the global scale.
        format: Text of the format.
        rows: T; N if uniform. Or the capacity with ``shapes``.
        dtype: Dtype of the result: bf16, fp16 or fp32.
        offs: (G,) int32. End rows, or None for uniform groups.
        columnwise: True for the columnwise copy.
        shapes: [m0, n0, m1, n1, ...]: rows and columns of groups that have shapes of their own;
            ``codes`` and ``scales`` are then flat.

    Returns:
        (T, K) or (capacity,) with zeros in the tail, or (G, N, K). Each value is rounded to
        ``dtype`` once.

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
        x: (T, K) with ``offs``, (capacity,) with ``shapes``, else (G, N, K); bf16, fp16 or fp32. K
            is a multiple of the format's ``k_multiple``. A gated activation needs (..., 2K).
        format: Text of the format, such as ``"nvfp4:row_scaled"`` (``Format.text``).
        offs: (G,) int32. End rows. Rows past the last one do not affect the result.
        amax: (G,) fp32. Amax of each group, to use instead of computing it. The sign is dropped.
            Elements above it saturate. (2, G), for the rowwise and the columnwise copy, if both are
            requested and the format transforms its columnwise copy (``Format.is_transformed``).
        rowwise: Write the rowwise copy, with blocks along K.
        columnwise: Write the columnwise copy, with blocks along the rows of a group. If the format
            transforms this copy, ``x`` must be bf16.
        scale: (G,) fp32. Finite: scales that multiply the elements of each group, for a format that
            takes them from the caller (FP8 with delayed scaling). It needs ``scale`` and takes no
            ``amax``. If a scale is not finite, zeros and the padding of slots may be NaN. Products
            above the format's largest number saturate. The returned amax is the amax of ``x``,
            whatever the scale.
        seed: (2,) int64. Required by stochastic formats and rejected by others. Codes depend only
            on the seed, the element and the direction (``cute_kernels.reference.random_numbers``).
        activation: Text of an activation that is applied to ``x`` first (``Activation.text``),
            such as ``"swiglu"``. Its result is quantized in fp32, or rounded to the dtype of
            ``x`` if the format's ``rounds_activation`` is True.
            ``cute_kernels.reference.activations`` states the bits.
        shapes: [m0, n0, m1, n1, ...]: rows and columns of each group, if the last dimension varies.
            Each n is a positive multiple of ``k_multiple``. The groups are consecutive and
            contiguous in ``x``. The rest of ``x`` is never read. Each group has the codes and
            scales of a uniform tensor of one group. With an activation these are the shapes of its
            result: a gated activation reads (m, 2n) of ``x`` per group.
        rows: (R,) int32, with ``offs``: gather index. Row r of the quantized tensor of R rows is
            computed from row ``rows[r]`` of ``x``. Rows of an invalid index are unspecified.
        inverse: (T, k) int32: inverse of ``rows``, the rows that each row of ``x`` becomes, with
            invalid numbers for none; ``compute_routing`` returns it as ``row``. The bits do not
            depend on it. With it and k > 1, kernels read each row of ``x`` once instead of k
            times if rows do not share scales.

    Returns:
        The buffers of the requested directions, in the order of ``Format.buffer_names`` and with
        the shapes of ``cute_kernels.layout.buffers``; for NVFP4: codes, scales, amax, codes_t,
        scales_t, amax_t. Slots and padded rows without a group are unspecified.

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
        a: (T, N), bf16, fp16 or fp32. Or the codes of the columnwise copy of a ragged tensor.
        b: (T, K) of the dtype of ``a``. Or the codes of the columnwise copy of a tensor with the
            same offs.
        offs: (G,) int32. End rows.
        alpha: (G,) fp32. Factors.
        out_dtype: As for ``m_grouped_gemm``.
        a_scales: As for ``m_grouped_gemm``.
        b_scales: As for ``m_grouped_gemm``.
        a_format: As for ``m_grouped_gemm``.
        b_format: As for ``m_grouped_gemm``.
        accumulation: As for ``m_grouped_gemm``; "split" by default.
        rows: (T,) int32. The row of ``b`` (S, K) for each row of ``a``, as for ``m_grouped_gemm``.
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
        a: (T, K), bf16, fp16 or fp32. Or the codes of the rowwise copy of a ragged tensor.
        b: (G, N, K) of the dtype of ``a``, or (G, K, N) with ``transpose_b``. Or the codes of a
            uniform tensor: of its rowwise copy (fprop), or with ``transpose_b`` of its columnwise
            copy (dgrad). The rows of a columnwise copy are padded to whole tiles, so that K of
            ``b`` cannot be checked against ``a``.
        offs: (G,) int32. End rows.
        bias: (G, N). Added in fp32.
        alpha: (G,) fp32. Factors.
        transpose_b: Contract over the rows of the groups of ``b`` (dgrad).
        out_dtype: bf16, fp16 or fp32. By default the dtype of a plain ``a``, or bf16 for codes,
            which have no dtype to follow.
        a_scales: The other tensors of the copy of ``a`` (``Format.operand_names``), such as its
            block scales and global scale. None if ``a`` is plain.
        b_scales: The other tensors of the copy of ``b``, as for ``a``.
        a_format: Text of the format of ``a``. None if it is plain.
        b_format: Text of the format of ``b``. None if it is plain.
        prepacked: True if ``b`` has the bit order of ``cute_kernels.prepack``. Kernels for sm_90a
            and the reference support that.
        accumulation: How a tensor core adds products of operands without block scales (FP8). "fast"
            adds all of K in one accumulator. "split" uses a fresh accumulator every 128 of K, and
            adds each to an fp32 sum. The default is "fast" for fprop and "split" for dgrad. The
            bits differ on sm_90a, whose accumulators keep 13 fraction bits of FP8 sums. Elsewhere
            the accumulator is as exact as "split" anyway. Other operands raise ValueError.
        rows: (T,) int32. The row of ``a`` for each row of the product, such as ``token`` of
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
        a: As for ``m_grouped_gemm``.
        b: (G, N, K), or (G, 2 N, K) for a gated activation, whose rows are halves [A | B].
        offs: (G,) int32. End rows.
        bias: (G, N), or (G, 2 N) for a gated activation. Added in fp32.
        alpha: (G,) fp32. Factors.
        transpose_b: Must be False.
        out_dtype: As for ``m_grouped_gemm``.
        a_scales: As for ``m_grouped_gemm``.
        b_scales: As for ``m_grouped_gemm``.
        a_format: As for ``m_grouped_gemm``.
        b_format: As for ``m_grouped_gemm``.
        prepacked: As for ``m_grouped_gemm``.
        accumulation: As for ``m_grouped_gemm``.
        rows: As for ``m_grouped_gemm``.
        inverse: As for ``m_grouped_gemm``.
        epilogue: Text of the activation, as for ``moe_activate``.
        interleaved: Rows of ``b`` (and of ``bias``) for the two inputs of a gated activation
            alternate, A first.
        keeps_z: Return z, too, with columns in the order of the rows of ``b``.
        quantize_to: Text of a format. The activated result, rounded to ``out_dtype``, is quantized
            to it, and z is not returned.
        amax: (G,) fp32. The amaxes of the result, for a format with a global scale, as for
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
    of the GEMM.

    Args:
        a: (T, K), bf16, fp16 or fp32.
        b: Codes of a uniform tensor, as for ``m_grouped_gemm``.
        offs: (G,) int32. End rows.
        b_scales: As for ``m_grouped_gemm``.
        a_format: Text of the format to which ``a`` is quantized.
        b_format: Text of the format of ``b``.
        bias: (G, N). Added in fp32.
        alpha: (G,) fp32. Factors.
        transpose_b: As for ``m_grouped_gemm``.
        out_dtype: bf16, fp16 or fp32; bf16 by default, as in the second of the two ops.
        prepacked: As for ``m_grouped_gemm``.
        seed: As for ``grouped_quantize``.
        accumulation: As for ``m_grouped_gemm``.
        activation: Activation of ``a``, as for ``grouped_quantize``: ``a`` is (T, 2K) if it is
            gated.
        rows: (R,) int32. Rows of ``a``, as for ``grouped_quantize``. Then the product has R rows.
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
        a: As for ``m_grouped_quantize_gemm``.
        b: As for ``m_grouped_gemm_activate``.
        offs: (G,) int32. End rows.
        b_scales: As for ``m_grouped_quantize_gemm``.
        a_format: As for ``m_grouped_quantize_gemm``.
        b_format: As for ``m_grouped_quantize_gemm``.
        bias: As for ``m_grouped_gemm_activate``.
        alpha: (G,) fp32. Factors.
        transpose_b: Must be False.
        out_dtype: As for ``m_grouped_quantize_gemm``.
        prepacked: As for ``m_grouped_quantize_gemm``.
        seed: As for ``m_grouped_quantize_gemm``.
        accumulation: As for ``m_grouped_quantize_gemm``.
        activation: As for ``m_grouped_quantize_gemm``.
        rows: As for ``m_grouped_quantize_gemm``.
        inverse: As for ``m_grouped_quantize_gemm``.
        epilogue: As for ``m_grouped_gemm_activate``.
        interleaved: As for ``m_grouped_gemm_activate``.
        keeps_z: As for ``m_grouped_gemm_activate``.
        quantize_to: As for ``m_grouped_gemm_activate``.
        amax: As for ``m_grouped_gemm_activate``.

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
    """Apply an activation to the rows of experts, in fp32, rounded once to the dtype of ``x``.

    ``cute_kernels.reference.activations`` states the bits.

    Args:
        x: (R, W) bf16, fp16 or fp32; W = 2 N for a gated activation.
        activation: Text of the activation, as for ``grouped_quantize``.
        offs: (G,) int32. End rows: rows from the last one on are neither read nor written.
        interleaved: True if the columns of a gated activation's two inputs alternate, A first,
            instead of forming halves [A | B].

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
    """Return the gradient of ``moe_activate``, and of the weights of rows if they are given.

    A token's output is the sum of its rows of a second GEMM of the result a of ``moe_activate``,
    each with a weight p. ``grad`` is the gradient of that GEMM's input without p. It suffices for
    the gradient of p, which is <grad, a>, so the rows that p multiplied need not be saved
    (SonicMoE, arXiv 2512.14080). ``cute_kernels.reference.moe`` states the bits.

    Args:
        x: As for ``moe_activate``.
        grad: (R, N) of the dtype of ``x``: gradient of its result, without the weight.
        activation: As for ``moe_activate``.
        offs: As for ``moe_activate``.
        interleaved: As for ``moe_activate``.
        weight: (T, k) fp32, p of each pair of a token and an expert.
        pair: (R,) int32. The pair of each row. Required with ``weight``.

    Returns:
        The gradient with respect to ``x``, given ``p * grad``. With weights also ``p * a`` (R, N)
        of the dtype of ``x``, which the gradient of the second GEMM's weight needs, and the
        gradient of ``weight`` (T, k) fp32, 0 for pairs without a row.

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
    """Sum each token's weighted rows: ``y[t] = sum over k of weight[t, k] h[row[t, k]]``.

    The sum is in fp32, in ascending k from 0 on. Each product and each sum is rounded, with one
    cast at the end.

    Args:
        h: (R, H) bf16, fp16 or fp32.
        row: (T, k) int32, without repetitions; invalid rows are skipped.
        weight: (T, k) fp32. None for ones.
        out_dtype: Dtype of ``y``; by default the dtype of ``h``.

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
    """Gather rows of ``x`` by an index: ``out[r] = x[index[r]]``.

    Args:
        x: (T, H) bf16, fp16 or fp32.
        index: (R,) int32. Rows of ``out`` with an invalid index are zeros.
        row: (T, k) int32, the inverse: rows of ``out`` that each row of ``x`` is copied to, -1 for
            none. The gradient needs it. With it and k > 1, kernels read each row of ``x`` once,
            not k times.

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
    """Compute ``moe_activate_gradient``, then ``grouped_quantize``, with the same bits.

    One kernel does both from one read if the shapes allow it. The gradients are rounded to the
    dtype of ``x`` before they are quantized, but need not be written to memory.

    Args:
        x: (R, W). The input of the activation; bf16, fp16 or fp32.
        grad: (R, N) of the dtype of ``x``: gradient of the activation's result, without the
            weight.
        format: Text of the format of the gradient of ``x``: MXFP8, FP8Block, or FP8 with delayed
            scaling.
        scaled_format: Text of the format of ``p * a``, one of the same formats.
        activation: As for ``moe_activate``.
        offs: As for ``moe_activate``.
        interleaved: As for ``moe_activate``.
        weight: As for ``moe_activate_gradient``.
        pair: As for ``moe_activate_gradient``.
        scale: As for ``grouped_quantize``, for the gradient of ``x``, if its format takes it.
        scaled_scale: As for ``grouped_quantize``, for ``p * a``, if its format takes it.

    Returns:
        The buffers of the gradient of ``x`` in both directions and of ``p * a`` columnwise, as
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
    """Choose the best experts of each token by their logits.

    ``cute_kernels.reference.router`` states the bits.

    Args:
        logits: (T, E) fp32.
        selection_bias: (E,) fp32. Added to scores only to choose experts. Or None.
        end: (1,) int32: tokens from this one on have no experts. None for all T tokens.
        top_k: k, the number of experts per token.
        score: ``"softmax"`` or ``"sigmoid"`` of the logits.
        renormalize: Divide a token's weights by their sum.
        expert_groups: Number of groups of equal size that the experts form.
        top_groups: Number of groups with the largest sums of two scores that experts are chosen
            from. They must have at least k experts.
        factor: Factor of the weights, applied last.

    Returns:
        Weights (T, k) fp32; ids (T, k) int64, the best first, -1 for tokens from ``end`` on; and
        scores (T, E) fp32. Differentiable in the logits, given gradients of weights and scores.

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
    """Return the gradient of the logits of ``moe_route``.

    Args:
        dweights: (T, k) fp32. Gradient of the weights.
        dscores: (T, E) fp32. Gradient of the scores, or None for zeros.
        ids: Result of ``moe_route``.
        scores: Result of ``moe_route``.
        score: As for ``moe_route``.
        renormalize: As for ``moe_route``.
        factor: As for ``moe_route``.
        in_parts: Return three bf16 numbers that add up to each fp32 number, for bf16 GEMMs.

    Returns:
        (T, E) fp32; with ``in_parts`` (T, 3 E) bf16, the largest parts first.

    Defined by:
        Op class: ``cute_kernels.ops.moe.router_op.MoeRouteGradient``
        Launcher: ``cute_kernels/ops/moe/launcher.py:route_gradient``
    """
