"""Quantize and multiply grouped tensors."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.capability import require
from cute_kernels.formats import NVFP4
from cute_kernels.ops.derivatives import refuse_derivatives, register_autograd
from cute_kernels.ops.registry import is_observed
from grouped.members import nvfp4
from grouped.offsets import Offsets, as_offs
from grouped.recipes import check_format
from grouped.tensor import GroupedTensor, assemble, handler, not_differentiable

if TYPE_CHECKING:
    from cute_kernels.formats import Format
    from grouped.members import QuantizedCopy

__all__ = ["compute_offsets", "grouped_gemm", "quantize"]

_ops = torch.ops.cute_kernels
#: What a product takes without the dispatcher.
_DIRECT = frozenset({Tensor, torch.nn.Parameter, GroupedTensor})


def compute_offsets(
    splits: Tensor, *, multiplier: int = 1, dtype: torch.dtype = torch.int32
) -> Tensor:
    """End offset of each group from its size: the inclusive sum of ``splits`` times ``multiplier``.

    Args:
        splits: (G,) int32 or int64 sizes, on the device.
        multiplier: elements counted for each unit of ``splits``; an integer of at least 1 that
            ``dtype`` holds.
        dtype: int32 or int64.

    Returns:
        (G,) offsets on the device of ``splits``. Those that ``dtype`` cannot hold saturate: they
        are its largest number, and never wrap around.

    Raises:
        TypeError: a dtype that is not taken, or a multiplier that is no integer.
        ValueError: ``splits`` is not one-dimensional, or the multiplier is out of range.
    """
    # Here, too: 2.0 equals 2, so an op that has checked the one takes the other.
    if not isinstance(multiplier, (int, torch.SymInt)):
        raise TypeError(f"multiplier must be an integer, got {multiplier!r}")
    out: Tensor = ops.compute_offsets(splits, multiplier, dtype)
    return out


@overload
def quantize(
    x: Tensor,
    fmt: Format,
    *,
    offs: Offsets | None = ...,
    rowwise: bool = ...,
    columnwise: bool = ...,
    dbias: Literal[False] = ...,
    amax: Tensor | None = ...,
    out: GroupedTensor | None = ...,
) -> GroupedTensor: ...


@overload
def quantize(
    x: Tensor,
    fmt: Format,
    *,
    offs: Offsets | None = ...,
    rowwise: bool = ...,
    columnwise: bool = ...,
    dbias: Literal[True],
    amax: Tensor | None = ...,
    out: GroupedTensor | None = ...,
) -> tuple[GroupedTensor, Tensor]: ...


def quantize(
    x: Tensor,
    fmt: Format,
    *,
    offs: Offsets | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    dbias: bool = False,
    amax: Tensor | None = None,
    out: GroupedTensor | None = None,
) -> GroupedTensor | tuple[GroupedTensor, Tensor]:
    """Quantize the groups of ``x``.

    Codes hold no NaN and an amax passes over it: a NaN in ``x`` decodes to a finite number. An
    infinity makes its group's amax, or its row's, infinite, and what they decode to not finite.
    ``Recipe(propagate_nonfinite=True)`` and ``grouped.debug.detect_nonfinite`` are for training.

    Args:
        x: (T, K) with ``offs``, or uniform (G, N, K) without; bf16, fp16 or fp32; K % 16 == 0.
        fmt: the format, such as ``grouped.NVFP4(row_scaled=True)``.
        offs: (G,) end row of each group, non-decreasing: an int32 or int64 tensor on the device of
            ``x``, never read on the host, or a host list. Rows from the last on are the tail of a
            capacity buffer: neither read nor written.
        rowwise: make the copy with blocks along K, which fprop and dgrad read.
        columnwise: make the copy with blocks along the rows of each group, which wgrad (ragged) and
            dgrad (weights) read.
        dbias: also return the column sums of each group.
        amax: (G,) fp32 second level of each group, instead of computing it; a magnitude, so that
            its sign is dropped.
        out: a tensor of the same shape, format, groups and directions to quantize into. One that
            requires a gradient only under ``torch.no_grad()``.

    Returns:
        A GroupedTensor, not differentiable; with ``dbias`` also the (G, K) sums: those are the
        gradient of a bias, so of the dtype of ``x``. ``torch.ops.cute_kernels.grouped_dbias`` gives
        them in the fp32 in which they are summed.

    Raises:
        TypeError: ``fmt`` is no format record, or a dtype is not taken.
        ValueError: a shape, a device, offs or a combination of arguments that breaks a rule.
        RuntimeError: ``out`` requires a gradient and gradients are enabled.
        cute_kernels.UnsupportedError: a format that the backend does not run.
    """
    check_format("fmt", fmt)
    x = x.detach()
    # Formats that no backend runs; what this backend runs is checked by the op.
    require("grouped_quantize", fmt, "reference")
    fmt = nvfp4(fmt)
    if x.dim() == 2 and offs is None:
        raise ValueError("offs is missing: x (T, K) is cut into groups by offs; uniform x is 3D")
    if dbias and offs is None:
        raise ValueError("dbias needs offs: it sums over the rows of ragged groups")
    if fmt.prepacked and offs is not None:
        raise ValueError("prepacked weights are uniform: x (G, N, K) without offs")
    ends = None if offs is None else as_offs(offs, x.shape[0], x.device)
    if ends is offs and ends is not None and out is None:
        # The result owns its boundaries: ``out=`` writes them, and the caller may reuse its buffer.
        ends = ends.clone()
    arguments = (x, ends, amax, fmt.row_scaled, fmt.is_2d, rowwise, columnwise)
    if out is None:
        parts = ops.grouped_quantize_nvfp4(*arguments)
        # The block is a constant again where Dynamo took the numbers of ``fmt`` for symbols.
        block = NVFP4.blocks[1 if fmt.is_2d else 0]
        canonical = dataclasses.replace(fmt, block=block, prepacked=False)
        out = assemble(x.shape, x.dtype, canonical, ends, parts, rowwise, columnwise)
        out = out.prepack() if fmt.prepacked else out
    else:
        _check_reused(out, fmt, x, ends, rowwise, columnwise)
        refuse_derivatives("quantize(out=)", [("out", out)], "write it under torch.no_grad()")
        torch.ops.grouped.quantize_out(x, ends, amax, out)
    if not dbias:
        return out
    sums: Tensor = ops.grouped_dbias(x, ends)
    return out, sums.to(x.dtype)


def _check_reused(
    out: GroupedTensor, fmt: NVFP4, x: Tensor, ends: Tensor | None, rowwise: bool, columnwise: bool
) -> None:
    """Check that ``out`` was made by the call that is to write it now."""
    if not isinstance(out, GroupedTensor):
        raise TypeError(f"out must be a GroupedTensor, got {type(out).__name__}")
    for name, got, want in (
        ("format", fmt, out.format),
        ("shape", x.shape, out.shape),
        ("rowwise", rowwise, out.rowwise is not None),
        ("columnwise", columnwise, out.columnwise is not None),
        ("offs", ends is None, out.offs is None),
    ):
        if got != want:
            raise ValueError(f"out was made with another {name}: {want}, not {got}")
    if ends is not None and ends.shape[0] != out.num_groups:
        raise ValueError(f"out has {out.num_groups} groups, offs has {ends.shape[0]} entries")


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
            bf16 or fp16 activations (W4A16) are taken, quantized activations beside plain weights
            are not.
        offs: (G,) end rows, for a plain ``a``.
        bias: (G, N) for the first two, added in fp32.
        alpha: (G,) fp32 factors.
        out_dtype: dtype of a fresh result; bf16 by default, whatever the operands are: quantized
            ones are products of bf16 layers, even when they were made from fp32 master copies. (The
            flat ops of plain ``a`` take its dtype, as ``torch.mm`` does.)
        out: where to write; rows of empty groups and of the tail are left alone.
        accumulate: add to what ``out`` holds, in fp32 before the one cast.
        transpose_b: contract over the second dimension of ``b``, read from its columnwise copy.

    Returns:
        The product, accumulated and scaled in fp32 and cast once. In a fresh result the rows of the
        tail (T, N) and the empty groups (G, N, K) are zeros. Differentiable in plain operands, and
        in the bias beside a plain ``a``; the gradient of ``a`` beside quantized weights reads their
        other copy, and theirs is that of the values that they stand for.

    Raises:
        TypeError: ``a`` is quantized and ``b`` is not, or a dtype is not taken.
        ValueError: a shape, a device or a combination of arguments that breaks a rule.
        RuntimeError: an operand lacks the direction that this product reads; or ``out`` is given
            and it or an operand requires a gradient, which would be lost.
        NotImplementedError: an operand has a tangent of forward-mode AD.
        cute_kernels.UnsupportedError: a product that this backend, or no backend, runs.
    """
    if accumulate and out is None:
        raise ValueError("accumulate=True adds to out, which is missing")
    if out is not None and out_dtype not in (None, out.dtype):
        raise ValueError(f"out_dtype is {out_dtype}, but out is {out.dtype}")
    if out is not None:
        # Here, where operands are whole: no op sees that the tensor around codes requires one.
        named = (("a", a), ("b", b), ("bias", bias), ("alpha", alpha), ("out", out))
        refuse_derivatives("grouped_gemm(out=)", named, "leave out= away")
    dtype = out.dtype if out is not None else out_dtype or torch.bfloat16
    if isinstance(a, GroupedTensor) and isinstance(b, GroupedTensor):
        if offs is not None:
            raise ValueError("offs is given, but the operands carry their own")
        if out is None and not is_observed((a, b, bias, alpha), _DIRECT):
            name, operands = _quantized_operands(a, b, bias, alpha, transpose_b, dtype)
            return _call(name, operands, out=None, accumulate=False)
        if out is None:
            result: Tensor = torch.ops.grouped.gemm(a, b, bias, alpha, transpose_b, dtype)
            return result
        torch.ops.grouped.gemm_out(a, b, bias, alpha, transpose_b, accumulate, out)
        return out
    if isinstance(a, GroupedTensor):
        names = f"{type(a).__name__} and {type(b).__name__}"
        raise TypeError(f"b must be quantized if a is, got {names}")
    if offs is None:
        raise ValueError("offs is missing: plain operands are cut into groups by offs")
    ends = as_offs(offs, a.shape[0], a.device)
    if isinstance(b, GroupedTensor):
        if out is None:
            mixed: Tensor = torch.ops.grouped.gemm_w4a16(
                a, b, ends, bias, alpha, transpose_b, dtype
            )
            return mixed
        torch.ops.grouped.gemm_w4a16_out(a, b, ends, bias, alpha, transpose_b, accumulate, out)
        return out
    if b.dim() == 2:
        _no_ragged_options(bias, transpose_b)
        return _call("k_grouped_gemm", (a, b, ends, alpha, dtype), out, accumulate)
    operands = (a, b, ends, bias, alpha, transpose_b, dtype)
    return _call("m_grouped_gemm", operands, out, accumulate)


def _call(name: str, operands: tuple[object, ...], out: Tensor | None, accumulate: bool) -> Tensor:
    """Call a GEMM op in its functional form, or in its out form if there is an ``out``."""
    if out is None:
        result: Tensor = getattr(ops, name)(*operands)
        return result
    getattr(_ops, f"{name}_out")(*operands, out=out, accumulate=accumulate)
    return out


_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_OPERANDS = "Tensor a, Tensor b, Tensor? bias, Tensor? alpha, bool transpose_b"
_LIBRARY.define(f"gemm({_OPERANDS}, ScalarType dtype) -> Tensor")
register_autograd("gemm", not_differentiable, None, _LIBRARY)
_MIXED = _OPERANDS.replace("Tensor b", "Tensor b, Tensor offs")
_LIBRARY.define(f"gemm_w4a16({_MIXED}, ScalarType dtype) -> Tensor")
_LIBRARY.define(f"gemm_w4a16_out({_MIXED}, bool accumulate, Tensor(o!) out) -> ()")
_LIBRARY.define("quantize_out(Tensor x, Tensor? offs, Tensor? amax, Tensor(o!) out) -> ()")
_LIBRARY.define(f"gemm_out({_OPERANDS}, bool accumulate, Tensor(o!) out) -> ()")


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
        operands = (low, b, offs, None, alpha, not ctx.transpose_b, dtype)
        da = torch.ops.grouped.gemm_w4a16(*operands)
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
    name, operands = _quantized_operands(*arguments)
    return _call(name, operands, out=None, accumulate=False)


@handler(torch.ops.grouped.gemm_out.default)
def _gemm_out(func: Any, *arguments: Any) -> None:
    a, b, bias, alpha, transpose_b, accumulate, out = arguments
    name, operands = _quantized_operands(a, b, bias, alpha, transpose_b, out.dtype)
    _call(name, operands, out=out, accumulate=accumulate)


@handler(torch.ops.grouped.gemm_w4a16.default)
def _gemm_w4a16(func: Any, *arguments: Any) -> Tensor:
    operands = _w4a16_operands(*arguments)
    return _call("m_grouped_gemm_w4a16", operands, out=None, accumulate=False)


@handler(torch.ops.grouped.gemm_w4a16_out.default)
def _gemm_w4a16_out(func: Any, *arguments: Any) -> None:
    a, b, offs, bias, alpha, transpose_b, accumulate, out = arguments
    operands = _w4a16_operands(a, b, offs, bias, alpha, transpose_b, out.dtype)
    _call("m_grouped_gemm_w4a16", operands, out=out, accumulate=accumulate)


@handler(torch.ops.grouped.quantize_out.default)
def _quantize_out(
    func: Any, x: Tensor, offs: Tensor | None, amax: Tensor | None, out: GroupedTensor
) -> None:
    out._quantize_into(x, offs, amax)


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
) -> tuple[str, tuple[object, ...]]:
    """The op that multiplies ``a`` by ``b``, and its operands."""
    if a.offs is None:
        raise ValueError(f"a must be ragged, got {a!r}")
    a_format, b_format = nvfp4(a.format), nvfp4(b.format)
    if b.offs is None:
        held = _weights(a, b, transpose_b)
        first = _operand(a, "a", "rowwise")
        options = (bias, alpha, a_format.row_scaled, dtype, b_format.prepacked)
        return "m_grouped_gemm_nvfp4", (*first, *held, a.offs, *options)
    _no_ragged_options(bias, transpose_b)
    if a.num_groups != b.num_groups or a.shape[0] != b.shape[0]:
        raise ValueError(
            f"a and b must be cut alike: {a.num_groups} groups of {a.shape[0]} rows and "
            f"{b.num_groups} groups of {b.shape[0]} rows"
        )
    _check_same_offs(a.offs, b.offs)
    if a_format.hadamard != b_format.hadamard:
        raise ValueError(
            "a and b must agree on hadamard: the transform only cancels if both have it"
        )
    first, second = _operand(a, "a", "columnwise"), _operand(b, "b", "columnwise")
    return "k_grouped_gemm_nvfp4", (*first, *second, a.offs, alpha, dtype)


def _check_same_offs(a: Tensor, b: Tensor) -> None:
    """Raise if two ragged operands are cut at other rows, where that is known without a sync."""
    is_known = a.device.type == b.device.type == "cpu" and not is_observed((a, b))
    if is_known and not torch.equal(a, b):
        raise ValueError(
            "a and b must be cut at the same rows, but their offs differ: "
            f"{a.tolist()[:8]} and {b.tolist()[:8]}"
        )


def _w4a16_operands(
    a: Tensor,
    b: GroupedTensor,
    offs: Tensor,
    bias: Tensor | None,
    alpha: Tensor | None,
    transpose_b: bool,
    dtype: torch.dtype,
) -> tuple[object, ...]:
    """The operands of the op that multiplies plain activations by quantized weights."""
    if b.offs is not None:
        raise ValueError(f"b must be uniform beside a plain a, got {b!r}")
    b_format = nvfp4(b.format)
    if b_format.prepacked or (b_format.row_scaled and not transpose_b):
        require("grouped_gemm_w4a16", b_format, "reference")
    held = _weights(a, b, transpose_b)
    return a, *held, offs, bias, alpha, dtype


def _weights(a: Tensor, b: GroupedTensor, transpose_b: bool) -> QuantizedCopy:
    """The copy of uniform ``b`` whose blocks run along the columns of ``a``."""
    held = _operand(b, "b", "columnwise" if transpose_b else "rowwise")
    if nvfp4(b.format).row_scaled and not transpose_b:
        raise ValueError("b must have one second-level scale a group, got row_scaled=True")
    depth = b.shape[1 if transpose_b else 2]
    if a.dim() != 2 or a.shape[1] != depth:
        # The columnwise codes of b are padded to whole tiles, so the op cannot see this.
        shape = tuple(a.shape)
        raise ValueError(f"a must have as many columns as b contracts, {depth}, got {shape}")
    return held


def _operand(x: GroupedTensor, name: str, direction: str) -> QuantizedCopy:
    held = x.rowwise if direction == "rowwise" else x.columnwise
    if held is None:
        raise RuntimeError(f"{name} has no {direction} copy, which this product reads: {x!r}")
    return held
