"""``grouped_gemm``: products of grouped tensors, quantized and plain."""

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
from grouped.functional.flops import product_flops

from ..tensor.aten_handlers import not_differentiable
from ..tensor.dtensor_parts import is_spread
from ..tensor.grouped_tensor import GroupedTensor, handler
from ..tensor.offsets import Offsets, as_offs
from ..tensor.validation import check_is_tensor

_ops = torch.ops.cute_kernels
#: What a product takes without the dispatcher.
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
    """Multiply the groups of ``a`` by those of ``b``.

    | a | b | result | used for |
    |---|---|---|---|
    | ragged (T, K) | uniform (G, N, K) | (T, N) | fprop |
    | ragged (T, N) | uniform (G, N, K), ``transpose_b=True`` | (T, K) | dgrad |
    | ragged (T, N) | ragged (T, K) with the same offs | (G, N, K) | wgrad |

    That the offs of the last have equal values is checked on the CPU. On a GPU nothing reads them,
    and the product is that of the rows that ``a.offs`` gives.

    Args:
        a: a GroupedTensor, or a plain tensor with ``offs``.
        b: likewise, and of the dtype of ``a`` if both are plain. Quantized weights beside plain
            bf16 or fp16 activations (W4A16) are taken, and NVFP4 weights beside FP8,
            FP8Block or MXFP8 activations (W4A8); quantized activations beside plain weights
            are not.
        offs: (G,) end rows, for a plain ``a``.
        bias: (G, N) for the first two, added in fp32.
        alpha: (G,) fp32 factors.
        out_dtype: dtype of a fresh result; bf16 by default, whatever the operands are:
            quantized ones are products of bf16 layers, even when they were made from fp32
            master copies. (The flat ops of plain ``a`` take its dtype, as ``torch.mm``
            does.)
        out: where to write; rows of empty groups and of the tail are left alone.
        accumulate: add to what ``out`` holds, in fp32 before the one cast.
        transpose_b: contract over the second dimension of ``b``, read from its columnwise copy.
        accumulation: "fast" or "split", of products of FP8 with one scale a group: all sums in
            the accumulator of the tensor core, or moved to fp32 every 128 of the
            contraction. By default "fast" for fprop and "split" for dgrad and wgrad. The
            bits differ on sm_90a, whose accumulator is short.

    Returns:
        The product, accumulated and scaled in fp32 and cast once. In a fresh result the rows of
        the tail (T, N) and the empty groups (G, N, K) are zeros. Differentiable in plain
        operands, and in the bias beside a plain ``a``; the gradient of ``a`` beside quantized
        weights reads their other copy, and theirs is that of the values that they stand for.

    Raises:
        TypeError: ``a`` is quantized and ``b`` is not, or a dtype is not taken.
        ValueError: a shape, a device or a combination of arguments that breaks a rule.
        RuntimeError: an operand lacks the direction that this product reads; or ``out`` is
            given and it or an operand requires a gradient, which would be lost.
        NotImplementedError: an operand has a tangent of forward-mode AD.
        cute_kernels.UnsupportedError: a product that this backend, or no backend, runs.
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
        # Here, where operands are whole: no op sees that the tensor around codes requires one.
        named = (("a", a), ("b", b), ("bias", bias), ("alpha", alpha), ("out", out))
        refuse_derivatives("grouped_gemm(out=)", named, "leave out= away")
    dtype = out.dtype if out is not None else out_dtype or torch.bfloat16
    if isinstance(a, GroupedTensor) and isinstance(b, GroupedTensor):
        if offs is not None:
            raise ValueError("offs is given, but the operands carry their own")
        if out is None and not needs_dispatcher((a, b, bias, alpha), _DIRECT):
            return _call(*_quantized_operands(a, b, bias, alpha, transpose_b, dtype, accumulation))
        pair = (a, b, bias, alpha, transpose_b)
        if out is None:
            return torch.ops.grouped.gemm(*pair, dtype, accumulation)
        torch.ops.grouped.gemm_out(*pair, accumulate, out, accumulation)
        return out
    if (type(a) not in _DIRECT or type(b) not in _DIRECT) and is_spread(a, b):
        if out is not None:
            raise ValueError("out does not go with DTensors")
        from . import dtensor_ops as sharding

        def gemm(a: Tensor, b: Tensor, offs: Tensor | None, *vectors: Tensor | None) -> Tensor:
            given: Any = dict(zip(("bias", "alpha"), vectors, strict=True)) | {
                "out_dtype": out_dtype
            }
            return grouped_gemm(
                a, b, offs=offs, transpose_b=transpose_b, accumulation=accumulation, **given
            )

        return sharding.product(gemm, a, b, offs, bias, alpha, 1 + transpose_b)
    if isinstance(a, GroupedTensor):
        raise TypeError(
            f"b must be quantized if a is, got {type(a).__name__} and {type(b).__name__}"
        )
    check_accumulation(accumulation, None, b.format if isinstance(b, GroupedTensor) else None)
    if offs is None:
        raise ValueError("offs is missing: plain operands are cut into groups by offs")
    if not a.dim():
        check_tensor("a", a, ndim=(2,))
    ends = as_offs(offs, a.shape[0], a.device)
    if isinstance(b, GroupedTensor):
        if out is None:
            return torch.ops.grouped.gemm_w4a16(a, b, ends, bias, alpha, transpose_b, dtype)
        torch.ops.grouped.gemm_w4a16_out(a, b, ends, bias, alpha, transpose_b, accumulate, out)
        return out
    if b.dim() == 2:
        _no_ragged_options(bias, transpose_b)
        return _call("k_grouped_gemm", (a, b, ends, alpha, dtype), out, accumulate)
    return _call("m_grouped_gemm", (a, b, ends, bias, alpha, transpose_b, dtype), out, accumulate)


def _call(
    name: str, operands: tuple[object, ...], out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    if out is None:
        return getattr(ops, name)(*operands)
    getattr(_ops, f"{name}_out")(*operands, out=out, accumulate=accumulate)
    return out


_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_OPERANDS = "Tensor a, Tensor b, Tensor? bias, Tensor? alpha, bool transpose_b"
_LIBRARY.define(f"gemm({_OPERANDS}, ScalarType dtype, str? accumulation=None) -> Tensor")
register_autograd("gemm", not_differentiable, None, _LIBRARY)
_MIXED = _OPERANDS.replace("Tensor b", "Tensor b, Tensor offs")
_LIBRARY.define(f"gemm_w4a16({_MIXED}, ScalarType dtype) -> Tensor")
_LIBRARY.define(f"gemm_w4a16_out({_MIXED}, bool accumulate, Tensor(o!) out) -> ()")
_LIBRARY.define(
    f"gemm_out({_OPERANDS}, bool accumulate, Tensor(o!) out, str? accumulation=None) -> ()"
)


def _save_w4a16(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, offs, bias, alpha, transpose_b, _ = inputs
    # The plain tensors of b so that autograd sees a write to one of them, through another wrapper.
    held = [getattr(b, name) for name in b.__tensor_flatten__()[0]]
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b, offs, alpha, *held)
    ctx.transpose_b, ctx.dtypes = transpose_b, (a.dtype, b.dtype)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _w4a16_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offs, alpha = ctx.saved_tensors[:4]
    if ctx.needs_input_grad[4]:
        raise RuntimeError("alpha has no derivative; detach it")
    dtype, weight_dtype = ctx.dtypes
    low = dy.to(dtype)
    da = db = dbias = None
    if ctx.needs_input_grad[0]:
        da = torch.ops.grouped.gemm_w4a16(low, b, offs, None, alpha, not ctx.transpose_b, dtype)
    if ctx.needs_input_grad[1]:
        # That of the values that b stands for, as dequantize() passes it on.
        pair = (a, low) if ctx.transpose_b else (low, a)
        db = _ops.k_grouped_gemm(*pair, offs, alpha, weight_dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
        dbias = _ops.grouped_dbias(dy, offs).to(ctx.bias_dtype)
    return da, db, None, dbias, None, None, None


register_autograd("gemm_w4a16", _w4a16_gradients, _save_w4a16, _LIBRARY)


@handler(torch.ops.grouped.gemm.default)
def _gemm(func: Any, *arguments: Any) -> Tensor:
    return _call(*_quantized_operands(*arguments))


@handler(torch.ops.grouped.gemm_out.default)
def _gemm_out(func: Any, *arguments: Any) -> None:
    *pair, accumulate, out = arguments[:7]
    # The dispatcher leaves out what has its default.
    _call(*_quantized_operands(*pair, out.dtype, *arguments[7:]), out, accumulate)  # type: ignore[call-arg]


@handler(torch.ops.grouped.gemm_w4a16.default)
def _gemm_w4a16(func: Any, *arguments: Any) -> Tensor:
    return _call(*w4a16_operands(*arguments))


@handler(torch.ops.grouped.gemm_w4a16_out.default)
def _gemm_w4a16_out(func: Any, *arguments: Any) -> None:
    a, b, offs, bias, alpha, transpose_b, accumulate, out = arguments
    _call(*w4a16_operands(a, b, offs, bias, alpha, transpose_b, out.dtype), out, accumulate)


def _no_ragged_options(bias: Tensor | None, transpose_b: bool) -> None:
    if bias is not None:
        raise ValueError("bias has no meaning for a ragged x ragged product")
    if transpose_b:
        raise ValueError("transpose_b has no meaning for a ragged x ragged product")


def _quantized_operands(
    a: GroupedTensor,
    b: GroupedTensor,
    bias: Tensor | None,
    alpha: Tensor | None,
    transpose_b: bool,
    dtype: torch.dtype,
    accumulation: str | None = None,
) -> tuple[str, tuple[object, ...]]:
    if a.offs is None:
        raise ValueError(f"a must be ragged (made with offs), got {a!r}")
    formats = (a.format.text, b.format.text)
    if b.offs is None:
        _check_uniform(b, "ragged or uniform")
        codes, scales = _weights(a, b, transpose_b)
        first, first_scales = _operand(a, "a", "rowwise")
        scaled = (first_scales, scales, *formats)
        return "m_grouped_gemm", (
            first,
            codes,
            a.offs,
            bias,
            alpha,
            transpose_b,
            dtype,
            *scaled,
            b.prepacked,
            accumulation,
        )
    _no_ragged_options(bias, transpose_b)
    if a.num_groups != b.num_groups or a.shape[0] != b.shape[0]:
        raise ValueError(
            f"a and b must be cut alike: {a.num_groups} groups in {a.shape[0]} rows and "
            f"{b.num_groups} groups in {b.shape[0]} rows"
        )
    _check_same_offs(a.offs, b.offs)
    first, first_scales = _operand(a, "a", "columnwise")
    second, second_scales = _operand(b, "b", "columnwise")
    return "k_grouped_gemm", (
        first,
        second,
        a.offs,
        alpha,
        dtype,
        first_scales,
        second_scales,
        *formats,
        accumulation,
    )


def _check_uniform(b: GroupedTensor, kinds: str) -> None:
    """Raise for groups that have shapes of their own, which no product takes."""
    if b.member_shapes is not None:
        raise ValueError(f"b must be {kinds}, got groups that have shapes of their own: {b!r}")


def _check_same_offs(a: Tensor, b: Tensor) -> None:
    """Raise if two ragged operands are cut at other rows, where that is known without a sync."""
    is_known = a.device.type == b.device.type == "cpu" and not needs_dispatcher((a, b))
    if is_known and not torch.equal(a, b):
        raise ValueError(
            f"a and b must be cut at the same rows, but their offs differ: {a.tolist()[:8]} and {b.tolist()[:8]}"
        )


def w4a16_operands(
    a: Tensor,
    b: GroupedTensor,
    offs: Tensor,
    bias: Tensor | None,
    alpha: Tensor | None,
    transpose_b: bool,
    dtype: torch.dtype,
) -> tuple[str, tuple[object, ...]]:
    """The op that multiplies plain activations by quantized weights, and its operands."""
    if b.offs is not None:
        raise ValueError(f"b must be uniform beside a plain a, got {b!r}")
    _check_uniform(b, "uniform")
    # Of the columnwise copy no level is per row.
    level = b.format.global_scale_for(columnwise=transpose_b)
    if b.prepacked or (level is not None and level.per == "row"):
        require("grouped_gemm_w4a16", b.format, "reference", prepacked=b.prepacked)
    codes, scales = _weights(a, b, transpose_b)
    return "m_grouped_gemm", (
        a,
        codes,
        offs,
        bias,
        alpha,
        transpose_b,
        dtype,
        None,
        scales,
        None,
        b.format.text,
    )


def _weights(a: Tensor, b: GroupedTensor, transpose_b: bool) -> tuple[Tensor, list[Tensor]]:
    """The copy of uniform ``b`` whose blocks run along the columns of ``a``."""
    held = _operand(b, "b", "columnwise" if transpose_b else "rowwise")
    depth = b.shape[1 if transpose_b else 2]
    if a.dim() != 2 or a.shape[1] != depth:
        # The columnwise codes of b may be padded to whole tiles, so the op cannot see this.
        raise ValueError(
            f"a must have as many columns as b contracts, {depth}, got {tuple(a.shape)}"
        )
    return held


def _operand(x: GroupedTensor, name: str, direction: str) -> tuple[Tensor, list[Tensor]]:
    held = x.rowwise if direction == "rowwise" else x.columnwise
    if held is None:
        raise RuntimeError(f"{name} has no {direction} copy, which this product reads: {x!r}")
    return held.operand


register_flops(torch.ops.grouped, product_flops, "gemm", "gemm_out", "gemm_w4a16", "gemm_w4a16_out")
