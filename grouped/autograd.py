"""``grouped.linear``: the grouped linear product, an op that has its gradients with it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_kernels import ops
from cute_kernels.capability import UnsupportedError
from cute_kernels.formats import NVFP4, Format
from grouped.functional import grouped_gemm
from grouped.offsets import as_offs
from grouped.recipes import Recipe, parse_format
from grouped.tensor import GroupedTensor, handler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grouped.offsets import Offsets

__all__ = ["Parts", "linear", "multiply", "quantize_weight", "rows_and_ends"]

#: Codes, scales and amax, rowwise then columnwise, as the quantize op gives them. Those of a
#: direction that was not asked for are None or empty.
Parts: TypeAlias = "tuple[Tensor | None, ...]"
_ABSENT: Parts = (None, None, None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, offs: Offsets, recipe: Recipe) -> Tensor:
    """Rows of each group times its weight: ``y = x W_g^T + b_g``, differentiable in the first three.

    What ``grouped.nn.GroupedLinear`` calls. Its gradients are registered with the op that it is, so
    they are there in exported and pipelined modules and under ``torch.func``; there are no second
    derivatives and no forward-mode ones.

    Args:
        x: (..., K) bf16, fp16 or fp32, whose leading dimensions flatten to T rows sorted by group;
            under autocast, cast to its dtype.
        weight: (G, N, K), which takes a gradient of its dtype; or a uniform GroupedTensor, used as
            it is, whose gradient is that of the values that it stands for.
        bias: (G, N), or None.
        offs: (G,) end rows: an integer tensor on the device of ``x``, or a host list.
        recipe: the format of each operand, forward and backward. BF16 multiplies in bf16, or in
            fp16 if that is what ``x`` is.

    Returns:
        (..., N) of the dtype of ``x``. Rows from ``offs[-1]`` on, the tail of a capacity buffer, are
        zeros, and so they are in the gradient of ``x``.

    Raises:
        TypeError: ``recipe`` is no Recipe, or a dtype is not taken.
        ValueError: a shape, a device or offs that break a rule.
        RuntimeError: a GroupedTensor lacks a copy that the product or a gradient reads, or a second
            or forward-mode derivative.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a grouped.recipes.Recipe, got {recipe!r}")
    if weight.dim() != 3:
        raise ValueError(f"weight must have shape (G, N, K), got {tuple(weight.shape)}")
    groups, cols, depth = weight.shape
    rows, ends = rows_and_ends(x, offs, groups, depth)
    y = multiply(rows, weight, bias, ends, recipe)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], cols)


def rows_and_ends(x: Tensor, offs: Offsets, groups: int, depth: int) -> tuple[Tensor, Tensor]:
    """``x`` as (T, K) rows of the dtype of the computation, and ``offs`` as a tensor.

    Args:
        x: (..., K).
        offs: (G,) end rows.
        groups: G.
        depth: K.
    """
    if x.dim() < 2 or x.shape[-1] != depth:
        raise ValueError(
            f"x must have shape (..., {depth}) and at least 2 dimensions, got {tuple(x.shape)}"
        )
    rows = x.reshape(-1, depth)
    kind = x.device.type
    # Not torch.amp.is_autocast_available: torch 2.11 does not trace it.
    if kind != "meta" and torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))
    ends = as_offs(offs, rows.shape[0], x.device)
    if ends.shape[0] != groups:
        raise ValueError(
            f"offs must have one end row for each of the {groups} groups, got "
            f"{ends.shape[0]} entries"
        )
    return rows, ends


def multiply(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offs: Tensor,
    recipe: Recipe,
    parts: Parts | None = None,
) -> Tensor:
    """``linear`` of (T, K) rows and of offs as the kernels take them.

    Args:
        x: (T, K).
        weight: (G, N, K); None if there are ``parts`` and nobody asks for its gradient.
        bias: (G, N), or None.
        offs: (G,) int32.
        recipe: the format of each operand.
        parts: the quantized weight, if there is one already. Not while something traces this.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
        y: Tensor = torch.ops.grouped.linear(
            x, weight, bias, offs, *recipe.texts, recipe.propagate_nonfinite
        )
        return y
    return _differentiable(x, weight, bias, offs, recipe, parts)


# ------------------------------------------------------------------- what runs, on plain tensors


def _quantize(
    x: Tensor,
    offs: Tensor | None,
    fmt: Format | None,
    recipe: Recipe,
    directions: tuple[bool, bool],
) -> Parts:
    """Quantize rowwise, columnwise or both."""
    if not isinstance(fmt, NVFP4):
        raise UnsupportedError(f"a linear layer cannot quantize to {fmt}")
    parts: Parts = ops.grouped_quantize_nvfp4(x, offs, None, fmt.row_scaled, fmt.is_2d, *directions)
    if not recipe.propagate_nonfinite:
        return parts
    rows, groups = _nan_in(x, offs)
    spread = list(parts)
    for index, asked in zip((2, 5), directions, strict=True):
        amax = parts[index]
        if asked and amax is not None:
            holds_nan = rows if index == 2 and fmt.row_scaled else groups
            spread[index] = amax.masked_fill(holds_nan, torch.nan)
    return tuple(spread)


def _nan_in(x: Tensor, offs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Whether each row, and each group, of ``x`` holds a NaN."""
    rows = x.amax(dim=-1).isnan()
    if offs is None:
        return rows, rows.any(dim=-1)
    # How many rows before each one hold a NaN; those of the tail are in no difference.
    before = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
    at_end = before[offs.clamp(0, rows.shape[0]).long()]
    return rows, at_end > torch.nn.functional.pad(at_end[:-1], (1, 0))


def quantize_weight(weight: Tensor, recipe: Recipe, columnwise: bool) -> Parts:
    """Quantize (G, N, K) weights, rowwise and if asked for columnwise."""
    return _quantize(weight.detach(), None, recipe.weight, recipe, (True, columnwise))


def _quantize_and_multiply(
    x: Tensor,
    weight_parts: Parts,
    offs: Tensor,
    bias: Tensor | None,
    fmt: Format | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    prepacked: bool,
    columnwise: bool,
) -> tuple[Tensor, Parts]:
    """The product of quantized x and the weight, and x's columnwise copy if asked for."""
    row_scaled = isinstance(fmt, NVFP4) and fmt.row_scaled
    options = (offs, bias, None, row_scaled, out_dtype, prepacked)
    if isinstance(fmt, NVFP4) and not columnwise and not recipe.propagate_nonfinite:
        return ops.m_grouped_quantize_gemm_nvfp4(x, *weight_parts, *options), _ABSENT
    parts = _quantize(x, offs, fmt, recipe, (True, columnwise))
    kept = parts[3:] if columnwise else _ABSENT
    return ops.m_grouped_gemm_nvfp4(*parts[:3], *weight_parts, *options), kept


def _plain_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    transpose_b: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    if isinstance(weight, GroupedTensor):
        return grouped_gemm(
            *(x, weight), offs=offs, bias=bias, out_dtype=out_dtype, transpose_b=transpose_b
        )
    y: Tensor = ops.m_grouped_gemm(x, weight, offs, bias, None, transpose_b, out_dtype)
    return y


def _low(x: Tensor) -> Tensor:
    """``x`` in the dtype in which plain operands multiply."""
    return x if x.dtype == torch.float16 else x.to(torch.bfloat16)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offs: Tensor,
    recipe: Recipe,
    parts: Parts | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Parts]:
    """The product, and what the gradients of x (``needs[0]``) and the weight (``[1]``) read.

    That is, quantized, the columnwise copies of x and of the weight; else x and the weight.
    """
    need_dx, need_dweight = needs[:2]
    if isinstance(weight, GroupedTensor):
        _check_grouped(weight, need_dx)
    if not recipe.is_quantized:
        assert weight is not None
        is_grouped = isinstance(weight, GroupedTensor)
        low = x if is_grouped else _low(x)
        low_weight = weight if is_grouped else weight.to(low.dtype)
        y = _plain_product(low, low_weight, bias, offs, False, x.dtype)
        return y, (low if need_dweight else None, low_weight if need_dx else None)
    if isinstance(weight, GroupedTensor):
        parts = (*(weight.rowwise or _ABSENT), *(weight.columnwise or _ABSENT))
    elif parts is None:
        assert weight is not None
        parts = quantize_weight(weight, recipe, need_dx)
    y, kept = _quantize_and_multiply(
        *(x, parts[:3], offs, bias, recipe.input, recipe, x.dtype, _is_prepacked(weight)),
        need_dweight,
    )
    return y, (*kept, *(parts[3:] if need_dx else _ABSENT))


def _is_prepacked(weight: Tensor | None) -> bool:
    fmt = getattr(weight, "format", None)
    return isinstance(fmt, NVFP4) and fmt.prepacked


def _check_grouped(weight: GroupedTensor, need_dx: bool) -> None:
    """Whether a weight that is quantized already has what is read of it."""
    if weight.offs is not None:
        raise ValueError(f"weight must be uniform, got {weight!r}")
    if isinstance(weight.format, NVFP4) and weight.format.row_scaled:
        raise ValueError("weight must have one second-level scale a group, got row_scaled=True")
    if weight.rowwise is None:
        raise RuntimeError(f"weight has no rowwise copy, which fprop reads: {weight!r}")
    if weight.columnwise is None and need_dx:
        raise RuntimeError(f"weight has no columnwise copy, which dgrad reads: {weight!r}")


class _Call(NamedTuple):
    """What the gradients of a call need to know besides tensors."""

    recipe: Recipe
    prepacked: bool
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None

    @classmethod
    def of(cls, x: Tensor, weight: Tensor | None, bias: Tensor | None, recipe: Recipe) -> _Call:
        """Of the call with these operands."""
        dtypes = (t if t is None else t.dtype for t in (x, weight, bias))
        return cls(recipe, _is_prepacked(weight), *dtypes)


def _backward(
    call: _Call, needs: Sequence[bool], dy: Tensor, offs: Tensor, kept: Parts
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias, as far as they are needed."""
    gradients = _quantized_gradients if call.recipe.is_quantized else _plain_gradients
    dx, dweight = gradients(call, needs, dy, offs, kept)
    dbias = ops.grouped_dbias(dy, offs).to(call.bias_dtype) if needs[2] else None
    return dx, dweight, dbias


def _plain_gradients(
    call: _Call, needs: Sequence[bool], dy: Tensor, offs: Tensor, kept: Parts
) -> tuple[Tensor | None, Tensor | None]:
    x, weight = kept
    low = dy.to(torch.float16 if call.dtype == torch.float16 else torch.bfloat16)
    dx = dweight = None
    if needs[0]:
        assert weight is not None
        low_weight = weight if isinstance(weight, GroupedTensor) else weight.to(low.dtype)
        dx = _plain_product(low, low_weight, None, offs, True, call.dtype)
    if needs[1]:
        assert x is not None
        dweight = ops.k_grouped_gemm(low, x.to(low.dtype), offs, None, call.weight_dtype)
    return dx, dweight


def _quantized_gradients(
    call: _Call, needs: Sequence[bool], dy: Tensor, offs: Tensor, kept: Parts
) -> tuple[Tensor | None, Tensor | None]:
    x_parts, weight_parts = kept[:3], kept[3:]
    need_dx, need_dweight = needs[:2]
    recipe, fmt = call.recipe, call.recipe.grad_output
    dx = dweight = None
    if need_dx:
        dx, dy_parts = _quantize_and_multiply(
            *(dy, weight_parts, offs, None, fmt, recipe, call.dtype, call.prepacked), need_dweight
        )
    elif need_dweight:
        dy_parts = _quantize(dy, offs, fmt, recipe, (False, True))[3:]
    if need_dweight:
        dweight = ops.k_grouped_gemm_nvfp4(*dy_parts, *x_parts, offs, None, call.weight_dtype)
    return dx, dweight


# ------------------------------------------------------------------------------------- autograd


class _Linear(torch.autograd.Function):
    """The product in eager mode, and where a compiler traces what it consists of."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        offs: Tensor,
        recipe: Recipe,
        parts: Parts | None,
    ) -> Tensor:
        y, kept = _forward(x, weight, bias, offs, recipe, parts, ctx.needs_input_grad)
        ctx.save_for_backward(offs, *kept)
        ctx.call = _Call.of(x, weight, bias, recipe)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        offs, *kept = ctx.saved_tensors
        with torch.no_grad():
            gradients = _backward(ctx.call, ctx.needs_input_grad, dy, offs, tuple(kept))
        if torch.is_grad_enabled():
            gradients = _without_derivative(gradients)
        return *gradients, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_forward_mode()


def _without_derivative(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients, of which a derivative raises.

    ``once_differentiable`` does this only where dy requires a gradient, though that of the weight
    depends on x, too.
    """
    refuse = torch._C._functions.DelayedError(_TWICE.encode(), len(gradients))
    refused: tuple[Tensor | None, ...] = refuse(
        *(t if t is None else t.detach().requires_grad_() for t in gradients)
    )
    return refused


_TWICE = "grouped.linear cannot be differentiated twice"


class _TransformedLinear(torch.autograd.Function):
    """The same in the form that ``torch.func`` takes, where what is kept is an output."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offs: Tensor,
        recipe: Recipe,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, ...]:
        y, kept = _forward(x, _unpacked(weight), bias, offs, recipe, None, needs)
        if not recipe.is_quantized:
            return (y,)  # x and weight are kept.
        return y, *(y.new_empty(0) if part is None else part for part in kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, offs, recipe, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, offs, *output[1:])
        ctx.call = _Call.of(x, weight, bias, recipe)._replace(prepacked=False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs = ctx.needs_input_grad[:3]
        gradients = iter(_TransformedGradients.apply(dy, *ctx.saved_tensors, ctx.call, needs))  # type: ignore[no-untyped-call]
        return *(next(gradients) if need else None for need in needs), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        _refuse_vmap()


class _TransformedGradients(torch.autograd.Function):
    """The gradients under ``torch.func``, which differentiates again to no end."""

    @staticmethod
    def forward(  # type: ignore[override]
        dy: Tensor, x: Tensor, weight: Tensor, offs: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        *kept, call, needs = rest
        if not call.recipe.is_quantized:
            kept = [x, _unpacked(weight)]
        gradients = _backward(call, needs, dy, offs, tuple(kept))
        return tuple(t for t in gradients if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(_TWICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        _refuse_vmap()


def _unpacked(weight: Tensor) -> Tensor:
    return weight.unpack() if isinstance(weight, GroupedTensor) else weight


def _refuse_forward_mode() -> None:
    raise RuntimeError("grouped.linear has no forward-mode derivative; use reverse mode")


def _refuse_vmap() -> None:
    raise RuntimeError(
        "grouped.linear has no vmap: it takes many groups and leading dimensions at once"
    )


def _differentiable(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offs: Tensor,
    recipe: Recipe,
    parts: Parts | None,
) -> Tensor:
    operands = (x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        return _Linear.apply(x, weight, bias, offs, recipe, parts)  # type: ignore[no-any-return,no-untyped-call]
    if forward_ad._current_level >= 0:
        for t in operands:
            if t is not None and forward_ad.unpack_dual(t).tangent is not None:
                _refuse_forward_mode()
    return _forward(x, weight, bias, offs, recipe, parts, (False, False))[0]


# ----------------------------------------------------------------------------------- as an op

_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor offs, str? input_format, "
    "str? weight_format, str? grad_output_format, bool propagate_nonfinite) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@functools.cache
def _recipe(*formats_and_flags: Any) -> Recipe:
    *formats, propagate_nonfinite = formats_and_flags
    return Recipe(*map(parse_format, formats), propagate_nonfinite=propagate_nonfinite)


def _linear_below_autograd(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *recipe: Any
) -> Tensor:
    return _forward(x, weight, bias, offs, _recipe(*recipe), None, (False, False))[0]


def _linear_autograd(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *recipe: Any
) -> Tensor:
    # Not torch.library.register_autograd: torch.func does not go through what it generates, and
    # what is kept depends on which gradients are wanted when it runs, not when it was traced.
    return _differentiable(x, weight, bias, offs, _recipe(*recipe), None)


def _linear_transformed(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *recipe: Any
) -> Tensor:
    needs = x.requires_grad, weight.requires_grad
    y: Tensor = _TransformedLinear.apply(x, weight, bias, offs, _recipe(*recipe), needs)[0]  # type: ignore[no-untyped-call]
    return y


def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, *recipe: Any
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


_LIBRARY.impl("linear", _linear_below_autograd, "CompositeExplicitAutograd")
_LIBRARY.impl("linear", _linear_autograd, "Autograd")
_LIBRARY.impl("linear", _linear_transformed, "FuncTorchDynamicLayerFrontMode")
torch.library.register_fake("grouped::linear", _linear_fake, lib=_LIBRARY)


@handler(torch.ops.grouped.linear.default)
def _linear_of_grouped(func: Any, *arguments: Any) -> Tensor:
    return _linear_below_autograd(*arguments)
