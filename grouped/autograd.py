"""The grouped linear product and its gradients, as one autograd function on plain tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cute_kernels import ops
from cute_kernels.formats import NVFP4, Format

if TYPE_CHECKING:
    from grouped.recipes import Recipe

__all__ = ["grouped_linear", "quantize_weight"]

#: Codes, scales and amax, rowwise then columnwise, as the quantize op gives them. Those of a
#: direction that was not asked for are None or empty.
Parts = tuple[Tensor, ...]


def _quantize(
    x: Tensor, offs: Tensor | None, fmt: Format, rowwise: bool, columnwise: bool
) -> Parts:
    assert isinstance(fmt, NVFP4)
    parts: Parts = ops.grouped_quantize_nvfp4(
        x, offs, None, fmt.row_scaled, fmt.is_2d, rowwise, columnwise
    )
    return parts


def quantize_weight(weight: Tensor, fmt: Format, columnwise: bool) -> Parts:
    """Quantize (G, N, K) weights: six tensors, the last three of shape (0,) unless columnwise."""
    return _quantize(weight.detach(), None, fmt, True, columnwise)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    recipe: Recipe,
    weight_parts: Parts | None = None,
    prepacked: bool = False,
) -> Tensor:
    """Rows of each group times its weight, differentiable in x, weight and bias.

    Args:
        x: (T, K) bf16, fp16 or fp32.
        weight: (G, N, K); takes the gradient of its dtype.
        bias: (G, N), or None.
        offs: (G,) int32 end rows.
        recipe: the format of each operand, forward and backward.
        weight_parts: the quantized weight, if there is one already.
        prepacked: it is prepacked.

    Returns:
        (T, N) of the dtype of ``x``; rows of the tail are zeros.
    """
    if not torch.is_grad_enabled():
        # A Function is told which inputs require gradients, not that none are wanted.
        x, weight = x.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    if not recipe.is_quantized:
        return _PlainLinear.apply(x, weight, bias, offs)  # type: ignore[no-any-return,no-untyped-call]
    assert recipe.weight is not None
    if weight_parts is None:
        weight_parts = quantize_weight(weight, recipe.weight, x.requires_grad)
    return _QuantizedLinear.apply(  # type: ignore[no-any-return,no-untyped-call]
        x, weight, bias, offs, recipe.input, recipe.grad_output, prepacked, *weight_parts
    )


def _bias_gradient(ctx: Any, dy: Tensor, offs: Tensor) -> Tensor | None:
    if not ctx.needs_input_grad[2]:
        return None
    dbias: Tensor = ops.grouped_dbias(dy, offs)
    return dbias.to(ctx.bias_dtype)


def _quantize_and_multiply(
    x: Tensor,
    weight_parts: Parts,
    offs: Tensor,
    bias: Tensor | None,
    fmt: Format,
    out_dtype: torch.dtype,
    prepacked: bool,
    columnwise: bool,
) -> tuple[Tensor, Parts | tuple[None, ...]]:
    """The product of quantized x and the weight, and x's columnwise copy if asked for."""
    assert isinstance(fmt, NVFP4)
    options = (offs, bias, None, fmt.row_scaled, out_dtype, prepacked)
    if not columnwise:
        return ops.m_grouped_quantize_gemm_nvfp4(x, *weight_parts, *options), (None,) * 3
    parts = _quantize(x, offs, fmt, True, True)
    return ops.m_grouped_gemm_nvfp4(*parts[:3], *weight_parts, *options), parts[3:]


class _PlainLinear(torch.autograd.Function):
    """Products in bf16, or fp16 if that is what ``x`` is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor) -> Tensor:
        dtype = x.dtype if x.dtype == torch.float16 else torch.bfloat16
        low, low_weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(low, low_weight, offs)
        ctx.dtypes = x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        y: Tensor = ops.m_grouped_gemm(low, low_weight, offs, bias, None, False, x.dtype)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, offs = ctx.saved_tensors
        low = dy.to(x.dtype)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = ops.m_grouped_gemm(low, weight, offs, None, None, True, ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            dweight = ops.k_grouped_gemm(low, x, offs, None, ctx.dtypes[1])
        return dx, dweight, _bias_gradient(ctx, dy, offs), None


class _QuantizedLinear(torch.autograd.Function):
    """Products of quantized operands; the input is kept for the backward pass columnwise only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offs: Tensor,
        input_format: Format,
        grad_format: Format,
        prepacked: bool,
        *parts: Tensor,
    ) -> Tensor:
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        y, kept = _quantize_and_multiply(
            *(x, parts[:3], offs, bias, input_format, x.dtype, prepacked, need_dweight)
        )
        ctx.save_for_backward(offs, *kept, *(parts[3:] if need_dx else (None,) * 3))
        ctx.grad_format, ctx.prepacked = grad_format, prepacked
        ctx.dtypes = x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        offs, *kept = ctx.saved_tensors
        x_parts, weight_parts = kept[:3], kept[3:]
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        dx = dweight = None
        if need_dx:
            dx, dy_parts = _quantize_and_multiply(
                *(dy, weight_parts, offs, None, ctx.grad_format, ctx.dtypes[0], ctx.prepacked),
                need_dweight,
            )
        elif need_dweight:
            dy_parts = _quantize(dy, offs, ctx.grad_format, False, True)[3:]
        if need_dweight:
            dweight = ops.k_grouped_gemm_nvfp4(*dy_parts, *x_parts, offs, None, ctx.dtypes[1])
        return dx, dweight, _bias_gradient(ctx, dy, offs), *(None,) * 10
