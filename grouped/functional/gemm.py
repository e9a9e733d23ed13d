"""``grouped_gemm``: GEMMs of grouped tensors, quantized and plain."""

from typing import Any

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.capability import require
from cute_kernels.ops.checks import check_tensor
from cute_kernels.ops.derivatives import refuse_derivatives, register_autograd
from cute_kernels.ops.flops import register_flops
from cute_kernels.ops.format_pairs import check_accumulation
from cute_kernels.records import check_kind
from cute_kernels.runtime.observers import needs_dispatcher

from ..tensor.aten_handlers import not_differentiable
from ..tensor.dispatch import handler
from ..tensor.dtensor_parts import is_distributed
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.offsets import Offsets, parse_offs
from ..tensor.validation import check_is_tensor
from .flops import product_flops

_ops = torch.ops.cute_kernels
#: Classes of tensors that a product takes without the dispatcher.
_DIRECT = frozenset({Tensor, torch.nn.Parameter, GroupedTensor})


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    *,
    offs: Offsets | None = None,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    transpose_b: bool = False,
    accumulation: str | None = None,
) -> Tensor:
    """Multiply each group of ``a`` by the same group of ``b``.

    | a | b | result | used for |
    |---|---|---|---|
    | ragged (T, K) | uniform (G, N, K) | (T, N) | fprop |
    | ragged (T, N) | uniform (G, N, K), ``transpose_b=True`` | (T, K) | dgrad |
    | ragged (T, N) | ragged (T, K) with the same offs | (G, N, K) | wgrad |

    For wgrad the offs of ``a`` and ``b`` must have equal values. On a CPU this is checked. On a
    GPU their values are not read, and ``a.offs`` decides.

    Args:
        a: A GroupedTensor, or a plain tensor with ``offs``.
        b: A GroupedTensor, or a plain tensor of the dtype of a plain ``a``. Quantized weights are
            accepted with plain bf16 or fp16 activations (W4A16), and NVFP4 weights with FP8,
            FP8Block or MXFP8 activations (W4A8). Quantized activations with plain weights are
            not.
        offs: (G,). End rows, for a plain ``a``.
        bias: (G, N) for fprop and dgrad, added in fp32.
        alpha: (G,) fp32. Factors.
        out_dtype: Data type of a new result; bf16 by default, for all operands. Quantized operands
            belong to bf16 layers, even if they were quantized from fp32 master weights. (The flat
            ops use the dtype of a plain ``a``, as ``torch.mm`` does.)
        out: Tensor to write the result into. Rows of empty groups and of the tail are not written.
        accumulate: Add to the values of ``out``, in fp32 before the one cast.
        transpose_b: Contract over the second dimension of ``b``, read from its columnwise copy.
        accumulation: "fast" or "split", for products of FP8 with one scale per group. "fast" keeps
            all sums in the accumulator of the tensor core. "split" promotes them to fp32 every 128
            of the contraction. By default "fast" for fprop and "split" for dgrad and wgrad. The
            bits differ on sm_90a, whose accumulator is short.

    Returns:
        The product, accumulated and scaled in fp32 and cast once. In a new result the rows of the
        tail (T, N) and the empty groups (G, N, K) are zeros. It is differentiable in plain
        operands, and in the bias if ``a`` is plain. With quantized weights, the gradient of ``a``
        reads the other copy of the weights; the gradient of the weights is the gradient of their
        decoded values.

    Raises:
        TypeError: ``a`` is quantized and ``b`` is not, or a dtype is not supported.
        ValueError: A shape, a device or a combination of arguments is invalid.
        RuntimeError: An operand lacks the direction that this product reads. Or ``out`` is given
            and an operand or ``out`` requires a gradient, which would be lost.
        NotImplementedError: An operand has a tangent of forward-mode AD.
        cute_kernels.UnsupportedError: This backend, or every backend, lacks the product.
    """
    if not (type(accumulate) is type(transpose_b) is bool):
        check_kind(bool, accumulate=accumulate, transpose_b=transpose_b)
    if accumulate and out is None:
        raise ValueError("accumulate=True adds to out, which is missing")
    check_is_tensor("a", a)
    check_is_tensor("b", b)
    if out is not None:
        check_is_tensor("out", out)
        if out_dtype not in (None, out.dtype):
            raise ValueError(f"out_dtype is {out_dtype}, but out is {out.dtype}")
        # Check here: an op sees codes, and not that the GroupedTensor requires a gradient.
        named = (("a", a), ("b", b), ("bias", bias), ("alpha", alpha), ("out", out))
        refuse_derivatives("grouped_gemm(out=)", named, "leave out= away")
    dtype = out.dtype if out is not None else out_dtype or torch.bfloat16
    if isinstance(a, GroupedTensor) and isinstance(b, GroupedTensor):
        if offs is not None:
            raise ValueError("offs is given, but the operands carry their own")
        if out is None and not needs_dispatcher((a, b, bias, alpha), _DIRECT):
            return _multiply_quantized(a, b, bias, alpha, transpose_b, dtype, accumulation)
        pair = (a, b, bias, alpha, transpose_b)
        if out is None:
            return torch.ops.grouped.gemm(*pair, dtype, accumulation)
        torch.ops.grouped.gemm_out(*pair, accumulate, out, accumulation)
        return out
    if (type(a) not in _DIRECT or type(b) not in _DIRECT) and is_distributed(a, b):
        if out is not None:
            raise ValueError("out does not go with DTensors")
        from . import dtensor_ops

        def local_gemm(
            a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, alpha: Tensor | None
        ) -> Tensor:
            return grouped_gemm(
                a,
                b,
                offs=offs,
                bias=bias,
                alpha=alpha,
                out_dtype=out_dtype,
                transpose_b=transpose_b,
                accumulation=accumulation,
            )

        return dtensor_ops.product(local_gemm, a, b, offs, bias, alpha, columns=1 + transpose_b)
    if isinstance(a, GroupedTensor):
        raise TypeError(
            f"b must be quantized if a is, got {type(a).__name__} and {type(b).__name__}"
        )
    check_accumulation(accumulation, None, b.format if isinstance(b, GroupedTensor) else None)
    if offs is None:
        raise ValueError("offs is missing: plain operands are cut into groups by offs")
    if not a.dim():
        check_tensor("a", a, ndim=(2,))
    end_rows = parse_offs(offs, a.shape[0], a.device)
    if isinstance(b, GroupedTensor):
        if out is None:
            return torch.ops.grouped.gemm_w4a16(a, b, end_rows, bias, alpha, transpose_b, dtype)
        torch.ops.grouped.gemm_w4a16_out(a, b, end_rows, bias, alpha, transpose_b, accumulate, out)
        return out
    if b.dim() == 2:
        _refuse_fprop_options(bias, transpose_b)
        return _k_grouped_gemm((a, b, end_rows, alpha, dtype), out, accumulate)
    operands = (a, b, end_rows, bias, alpha, transpose_b, dtype)
    return _m_grouped_gemm(operands, out, accumulate)


def _m_grouped_gemm(
    operands: tuple[Any, ...], out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """Call ``m_grouped_gemm``, or its ``_out`` form if ``out`` is given."""
    if out is None:
        return ops.m_grouped_gemm(*operands)
    _ops.m_grouped_gemm_out(*operands, out=out, accumulate=accumulate)
    return out


def _k_grouped_gemm(
    operands: tuple[Any, ...], out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """Call ``k_grouped_gemm``, or its ``_out`` form if ``out`` is given."""
    if out is None:
        return ops.k_grouped_gemm(*operands)
    _ops.k_grouped_gemm_out(*operands, out=out, accumulate=accumulate)
    return out


_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_OPERANDS = "Tensor a, Tensor b, Tensor? bias, Tensor? alpha, bool transpose_b"
_LIBRARY.define(f"gemm({_OPERANDS}, ScalarType dtype, str? accumulation=None) -> Tensor")
register_autograd("gemm", not_differentiable, None, _LIBRARY)
_W4A16_OPERANDS = _OPERANDS.replace("Tensor b", "Tensor b, Tensor offs")
_LIBRARY.define(f"gemm_w4a16({_W4A16_OPERANDS}, ScalarType dtype) -> Tensor")
_LIBRARY.define(f"gemm_w4a16_out({_W4A16_OPERANDS}, bool accumulate, Tensor(o!) out) -> ()")
_LIBRARY.define(
    f"gemm_out({_OPERANDS}, bool accumulate, Tensor(o!) out, str? accumulation=None) -> ()"
)


def _save_w4a16(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what the gradients of ``gemm_w4a16`` read."""
    a, b, offs, bias, alpha, transpose_b, _ = inputs
    # Saved so that autograd notices a write to a plain tensor of b through another wrapper.
    plain_tensors = [getattr(b, name) for name in b.__tensor_flatten__()[0]]
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b, offs, alpha, *plain_tensors)
    ctx.transpose_b, ctx.dtypes = transpose_b, (a.dtype, b.dtype)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _w4a16_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``gemm_w4a16``."""
    a, b, offs, alpha = ctx.saved_tensors[:4]
    if ctx.needs_input_grad[4]:
        raise RuntimeError("alpha has no derivative; detach it")
    dtype, weight_dtype = ctx.dtypes
    low_dy = dy.to(dtype)
    da = db = dbias = None
    if ctx.needs_input_grad[0]:
        da = torch.ops.grouped.gemm_w4a16(low_dy, b, offs, None, alpha, not ctx.transpose_b, dtype)
    if ctx.needs_input_grad[1]:
        # The gradient of the decoded values, as dequantize() passes it on.
        pair = (a, low_dy) if ctx.transpose_b else (low_dy, a)
        db = _ops.k_grouped_gemm(*pair, offs, alpha, weight_dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
        dbias = _ops.grouped_dbias(dy, offs).to(ctx.bias_dtype)
    return da, db, None, dbias, None, None, None


register_autograd("gemm_w4a16", _w4a16_gradients, _save_w4a16, _LIBRARY)


@handler(torch.ops.grouped.gemm.default)
def _gemm(func: Any, *arguments: Any) -> Tensor:
    return _multiply_quantized(*arguments)


@handler(torch.ops.grouped.gemm_out.default)
def _gemm_out(
    func: Any,
    a: GroupedTensor,
    b: GroupedTensor,
    bias: Tensor | None,
    alpha: Tensor | None,
    transpose_b: bool,
    accumulate: bool,
    out: Tensor,
    accumulation: str | None = None,
) -> None:
    options = (accumulation, out, accumulate)
    _multiply_quantized(a, b, bias, alpha, transpose_b, out.dtype, *options)


@handler(torch.ops.grouped.gemm_w4a16.default)
def _gemm_w4a16(
    func: Any,
    a: Tensor,
    b: GroupedTensor,
    offs: Tensor,
    bias: Tensor | None,
    alpha: Tensor | None,
    transpose_b: bool,
    dtype: torch.dtype,
) -> Tensor:
    codes, scales, b_format = w4a16_operand(a, b, transpose_b)
    operands = (a, codes, offs, bias, alpha, transpose_b, dtype)
    return ops.m_grouped_gemm(*operands, b_scales=scales, b_format=b_format)


@handler(torch.ops.grouped.gemm_w4a16_out.default)
def _gemm_w4a16_out(
    func: Any,
    a: Tensor,
    b: GroupedTensor,
    offs: Tensor,
    bias: Tensor | None,
    alpha: Tensor | None,
    transpose_b: bool,
    accumulate: bool,
    out: Tensor,
) -> None:
    """Multiply plain activations by the decoded values of a GroupedTensor, into ``out``."""
    codes, scales, b_format = w4a16_operand(a, b, transpose_b)
    operands = (a, codes, offs, bias, alpha, transpose_b, out.dtype)
    options = {"b_scales": scales, "b_format": b_format}
    _ops.m_grouped_gemm_out(*operands, **options, out=out, accumulate=accumulate)


def _refuse_fprop_options(bias: Tensor | None, transpose_b: bool) -> None:
    """Raise for options that a ragged x ragged product does not have."""
    if bias is not None:
        raise ValueError("bias has no meaning for a ragged x ragged product")
    if transpose_b:
        raise ValueError("transpose_b has no meaning for a ragged x ragged product")


def _multiply_quantized(
    a: GroupedTensor,
    b: GroupedTensor,
    bias: Tensor | None,
    alpha: Tensor | None,
    transpose_b: bool,
    dtype: torch.dtype,
    accumulation: str | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Multiply two quantized operands. The arguments are those of ``grouped_gemm``."""
    if a.offs is None:
        raise ValueError(f"a must be ragged (made with offs), got {a!r}")
    formats = (a.format.text, b.format.text)
    if b.offs is None:
        _check_uniform(b, "ragged or uniform")
        if a.num_groups != b.num_groups:
            raise ValueError(
                f"a and b must have equal groups: a has {a.num_groups}, by its offs, and b has "
                f"{b.num_groups}, by its shape {tuple(b.shape)}"
            )
        b_codes, b_scales = _weights(a, b, transpose_b)
        a_codes, a_scales = _operand(a, "a", "rowwise")
        operands = (a_codes, b_codes, a.offs, bias, alpha, transpose_b, dtype, a_scales, b_scales)
        options = (b.prepacked, accumulation)
        return _m_grouped_gemm((*operands, *formats, *options), out, accumulate)
    _refuse_fprop_options(bias, transpose_b)
    if a.num_groups != b.num_groups or a.shape[0] != b.shape[0]:
        raise ValueError(
            f"a and b must have equal groups: {a.num_groups} groups in {a.shape[0]} rows and "
            f"{b.num_groups} groups in {b.shape[0]} rows"
        )
    _check_same_offs(a.offs, b.offs)
    a_codes, a_scales = _operand(a, "a", "columnwise")
    b_codes, b_scales = _operand(b, "b", "columnwise")
    ragged_operands = (a_codes, b_codes, a.offs, alpha, dtype, a_scales, b_scales)
    return _k_grouped_gemm((*ragged_operands, *formats, accumulation), out, accumulate)


def _check_uniform(b: GroupedTensor, kinds: str) -> None:
    """Raise for groups that have shapes of their own, which no product supports."""
    if b.member_shapes is not None:
        raise ValueError(f"b must be {kinds}, got groups that have shapes of their own: {b!r}")


def _check_same_offs(a: Tensor, b: Tensor) -> None:
    """Raise if the offs of two ragged operands differ, if that is known without a sync."""
    is_known = a.device.type == b.device.type == "cpu" and not needs_dispatcher((a, b))
    if is_known and not torch.equal(a, b):
        raise ValueError(
            f"a and b must be cut at the same rows, but their offs differ: {a.tolist()[:8]} and "
            f"{b.tolist()[:8]}"
        )


def w4a16_operand(
    a: Tensor, b: GroupedTensor, transpose_b: bool
) -> tuple[Tensor, list[Tensor], str]:
    """Return codes, scales and format of quantized weights that multiply plain activations."""
    if b.offs is not None:
        raise ValueError(f"b must be uniform if a is plain, got {b!r}")
    _check_uniform(b, "uniform")
    # A columnwise copy never has one global scale per row.
    level = b.format.global_scale_for(columnwise=transpose_b)
    if b.prepacked or (level is not None and level.per == "row"):
        require("grouped_gemm_w4a16", b.format, "reference", prepacked=b.prepacked)
    codes, scales = _weights(a, b, transpose_b)
    return codes, scales, b.format.text


def _weights(a: Tensor, b: GroupedTensor, transpose_b: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the copy of uniform ``b`` whose blocks run along the columns of ``a``."""
    operand = _operand(b, "b", "columnwise" if transpose_b else "rowwise")
    depth = b.shape[1 if transpose_b else 2]
    if a.dim() != 2 or a.shape[1] != depth:
        # The op cannot check this: columnwise codes of b may be padded to whole tiles.
        hint = ""
        if a.dim() == 2 and a.shape[1] == b.shape[2 if transpose_b else 1]:
            hint = (
                f". A weight is (E, N, K), and b of shape {tuple(b.shape)} looks transposed: "
                f"pass transpose_b={not transpose_b}, or quantize the weight as (E, N, K)"
            )
        raise ValueError(
            f"a must have as many columns as b contracts, {depth}, got {tuple(a.shape)}{hint}"
        )
    return operand


def _operand(x: GroupedTensor, name: str, direction: str) -> tuple[Tensor, list[Tensor]]:
    """Return the codes and scales of one direction."""
    copy = x.rowwise if direction == "rowwise" else x.columnwise
    if copy is None:
        raise RuntimeError(f"{name} has no {direction} copy, which this product reads: {x!r}")
    return copy.operand


register_flops(torch.ops.grouped, product_flops, "gemm", "gemm_out", "gemm_w4a16", "gemm_w4a16_out")
