"""The passes of the grouped linear product on plain tensors: forward, and its gradients.

``autograd`` tells PyTorch of them. A quantized operand is a list here, codes and what else a
product reads, in one direction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from cute_kernels import ops
from grouped.products import grouped_gemm
from grouped.seeds import draw_seed
from grouped.tensor import GroupedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cute_kernels.formats import Format
    from grouped.members import QuantizedCopy
    from grouped.recipes import Recipe

__all__ = ["Copies", "Kept", "LinearCall", "backward", "forward", "quantize_weight"]


class Copies(NamedTuple):
    """A quantized operand: codes and what else a product reads, of each direction that is there."""

    rowwise: list[Tensor] | None = None
    columnwise: list[Tensor] | None = None


#: What the gradients read: of x and of the weight the first tensor if plain, all of the columnwise
#: copy if quantized; None where no gradient is wanted.
Kept: TypeAlias = "tuple[list[Tensor] | None, list[Tensor] | None]"


class LinearCall(NamedTuple):
    """What the gradients of a call need to know besides tensors."""

    recipe: Recipe
    prepacked: bool
    #: The text of the weight's format; None if plain.
    weight_format: str | None
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None

    @classmethod
    def of(
        cls, x: Tensor, weight: Tensor | None, bias: Tensor | None, recipe: Recipe
    ) -> LinearCall:
        """Of the call with these operands."""
        prepacked, weight_format = False, recipe.texts[1]
        if isinstance(weight, GroupedTensor):
            prepacked, weight_format = weight.prepacked, weight.format.text
        weight_dtype = None if weight is None else weight.dtype
        bias_dtype = None if bias is None else bias.dtype
        return cls(recipe, prepacked, weight_format, x.dtype, weight_dtype, bias_dtype)


def quantize_weight(weight: Tensor, recipe: Recipe, columnwise: bool) -> Copies:
    """Quantize (G, N, K) weights, rowwise and if asked for columnwise."""
    return _quantize(weight.detach(), None, _format(recipe, "weight"), recipe, True, columnwise)


def _format(recipe: Recipe, role: str) -> Format:
    fmt: Format | None = getattr(recipe, role)
    if fmt is None:
        raise ValueError(f"recipe has no format for {role}: {recipe}")
    return fmt


def _quantize(
    x: Tensor,
    offs: Tensor | None,
    fmt: Format,
    recipe: Recipe,
    rowwise: bool,
    columnwise: bool,
) -> Copies:
    """Quantize rowwise, columnwise or both."""
    seed = draw_seed(fmt, x.device)
    buffers = ops.grouped_quantize(x, fmt.text, offs, None, rowwise, columnwise, seed)
    directions = [way for way, asked in ((False, rowwise), (True, columnwise)) if asked]
    names = [name for way in directions for name in fmt.buffer_names(way)]
    named = dict(zip(dict.fromkeys(names), buffers, strict=True))
    if recipe.propagate_nonfinite:
        _spread_nan(named, x, offs, fmt)

    def copy(way: bool) -> list[Tensor] | None:
        return [named[name] for name in fmt.operand_names(way)] if way in directions else None

    return Copies(copy(False), copy(True))


def _spread_nan(named: dict[str, Tensor], x: Tensor, offs: Tensor | None, fmt: Format) -> None:
    """Make the second level NaN of each row or group that holds one."""
    rows = x.amax(dim=-1).isnan()
    groups = _groups_of(rows, offs)
    for way in (False, True):
        if way and fmt.is_transformed:
            # Where infinities meet in a transform they are NaN then, which an amax passes over.
            groups = _groups_of(~(x.amax(dim=-1).isfinite() & x.amin(dim=-1).isfinite()), offs)
        level = fmt.level(way)
        # The first vector of the second level is what a reader multiplies by.
        name = fmt.operand_names(way)[-1]
        if level is not None and name in named:
            holds_nan = rows if level.per == "row" else groups
            named[name] = named[name].masked_fill(holds_nan, torch.nan)


def _groups_of(rows: Tensor, offs: Tensor | None) -> Tensor:
    """Whether each group holds one of the ``rows`` that are true."""
    if offs is None:
        return rows.any(dim=-1)
    # How many rows before each one do; those of the tail are in no difference.
    before = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
    at_end = before[offs.clamp(0, rows.shape[0]).long()]
    return at_end > torch.nn.functional.pad(at_end[:-1], (1, 0))


def _quantize_and_multiply(
    x: Tensor,
    weight: list[Tensor],
    offs: Tensor,
    bias: Tensor | None,
    fmt: Format,
    call: LinearCall,
    transpose: bool,
    columnwise: bool,
) -> tuple[Tensor, list[Tensor] | None]:
    """The product of quantized x and the weight, and x's columnwise copy if asked for.

    Args:
        x: (T, K) rows: activations, or gradients of the output.
        weight: the copy of the weight whose blocks run along K.
        offs: (G,) end rows.
        bias: (G, N), or None.
        fmt: what x is quantized to.
        call: what else is known of the call.
        transpose: the product is dgrad, and ``weight`` the columnwise copy.
        columnwise: the columnwise copy of x is wanted.
    """
    codes, *scales = weight
    options = (bias, None, transpose, call.dtype)
    if not columnwise and not call.recipe.propagate_nonfinite:
        texts = (fmt.text, call.weight_format)
        last = (call.prepacked, draw_seed(fmt, x.device))
        y = ops.m_grouped_quantize_gemm(x, codes, offs, scales, *texts, *options, *last)
        return y, None
    copies = _quantize(x, offs, fmt, call.recipe, True, columnwise)
    a_codes, *a_scales = cast("list[Tensor]", copies.rowwise)
    operands = (a_scales, scales, fmt.text, call.weight_format, call.prepacked)
    return ops.m_grouped_gemm(a_codes, codes, offs, *options, *operands), copies.columnwise


def _plain_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    transpose: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    if isinstance(weight, GroupedTensor):
        return grouped_gemm(
            *(x, weight), offs=offs, bias=bias, out_dtype=out_dtype, transpose_b=transpose
        )
    y: Tensor = ops.m_grouped_gemm(x, weight, offs, bias, None, transpose, out_dtype)
    return y


def _low(x: Tensor) -> Tensor:
    """``x`` in the dtype in which plain operands multiply."""
    return x if x.dtype == torch.float16 else x.to(torch.bfloat16)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offs: Tensor,
    recipe: Recipe,
    copies: Copies | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Kept]:
    """The product, and what the gradients of x (``needs[0]``) and the weight (``[1]``) read."""
    need_dx, need_dweight = needs[:2]
    if isinstance(weight, GroupedTensor):
        _check_grouped(weight, need_dx)
    elif weight is None and copies is None:
        raise ValueError("weight is missing, and so are its quantized copies")
    if not recipe.is_quantized and weight is not None:
        is_grouped = isinstance(weight, GroupedTensor)
        low = x if is_grouped else _low(x)
        low_weight = weight if is_grouped else weight.to(low.dtype)
        y = _plain_product(low, low_weight, bias, offs, False, x.dtype)
        of_weight = [low_weight]
        if isinstance(weight, GroupedTensor):
            # So that autograd sees a write to one of its parts through another wrapper.
            of_weight += [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
        return y, ([low] if need_dweight else None, of_weight if need_dx else None)
    if isinstance(weight, GroupedTensor):
        copies = _copies_of(weight)
    elif copies is None and weight is not None:
        copies = quantize_weight(weight, recipe, need_dx)
    rowwise, columnwise = copies or Copies()
    call, fmt = LinearCall.of(x, weight, bias, recipe), _format(recipe, "input")
    y, kept = _quantize_and_multiply(
        *(x, rowwise or [], offs, bias, fmt, call), transpose=False, columnwise=need_dweight
    )
    return y, (kept, columnwise if need_dx else None)


def _copies_of(weight: GroupedTensor) -> Copies:
    def operand(copy: QuantizedCopy | None) -> list[Tensor] | None:
        return None if copy is None else [copy.operand[0], *copy.operand[1]]

    return Copies(operand(weight.rowwise), operand(weight.columnwise))


def _check_grouped(weight: GroupedTensor, need_dx: bool) -> None:
    """Whether a weight that is quantized already has what is read of it."""
    if weight.offs is not None:
        raise ValueError(f"weight must be uniform, got {weight!r}")
    level = weight.format.second_level
    if level is not None and level.per == "row":
        raise ValueError(f"weight must have one second-level scale a group, got {weight.format}")
    if weight.rowwise is None:
        raise RuntimeError(f"weight has no rowwise copy, which fprop reads: {weight!r}")
    if weight.columnwise is None and need_dx:
        raise RuntimeError(f"weight has no columnwise copy, which dgrad reads: {weight!r}")


def backward(
    call: LinearCall, needs: Sequence[bool], dy: Tensor, offs: Tensor, kept: Kept
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias, as far as they are needed."""
    gradients = _quantized_gradients if call.recipe.is_quantized else _plain_gradients
    dx, dweight = gradients(call, needs, dy, offs, kept)
    dbias = ops.grouped_dbias(dy, offs).to(call.bias_dtype) if needs[2] else None
    return dx, dweight, dbias


def _plain_gradients(
    call: LinearCall, needs: Sequence[bool], dy: Tensor, offs: Tensor, kept: Kept
) -> tuple[Tensor | None, Tensor | None]:
    x, weight = kept
    low = dy.to(torch.float16 if call.dtype == torch.float16 else torch.bfloat16)
    dx = dweight = None
    if needs[0] and weight is not None:
        b = weight[0] if isinstance(weight[0], GroupedTensor) else weight[0].to(low.dtype)
        dx = _plain_product(low, b, None, offs, True, call.dtype)
    if needs[1] and x is not None:
        dweight = ops.k_grouped_gemm(low, x[0].to(low.dtype), offs, None, call.weight_dtype)
    return dx, dweight


def _quantized_gradients(
    call: LinearCall, needs: Sequence[bool], dy: Tensor, offs: Tensor, kept: Kept
) -> tuple[Tensor | None, Tensor | None]:
    (x, weight), (need_dx, need_dweight) = kept, needs[:2]
    fmt = _format(call.recipe, "grad_output")
    dx = dweight = columnwise = None
    if need_dx and weight is not None:
        dx, columnwise = _quantize_and_multiply(
            *(dy, weight, offs, None, fmt, call), transpose=True, columnwise=need_dweight
        )
    elif need_dweight:
        columnwise = _quantize(dy, offs, fmt, call.recipe, False, True).columnwise
    if need_dweight and x is not None and columnwise is not None:
        (a, *a_scales), (b, *b_scales) = columnwise, x
        formats = (fmt.text, call.recipe.texts[0])
        options = (None, call.weight_dtype, a_scales, b_scales, *formats)
        dweight = ops.k_grouped_gemm(a, b, offs, *options)
    return dx, dweight
