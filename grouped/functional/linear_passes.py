"""The passes of the grouped linear product on plain tensors: forward, and its gradients.

``autograd`` tells PyTorch of them. A quantized operand is a list here, codes and what else a
product reads, in one direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.formats import Format
from cute_kernels.reference.codecs import codec_of

from ..recipes import ROLES, Recipe
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.members import QuantizedCopy
from ..tensor.seeds import draw_seed
from .gemm import w4a16_operands

if TYPE_CHECKING:
    from ..inspect import Probe


class Copies(NamedTuple):
    """A quantized operand: codes and what else a product reads, of each direction that is there.

    Blocks of the columnwise copy run along the rows of each group. ``amax`` is (G,) of what was
    quantized, where its scales were given: the next ones follow from it.
    """

    rowwise: list[Tensor] | None = None
    columnwise: list[Tensor] | None = None
    amax: Tensor | None = None


class Scaling(NamedTuple):
    """The scales of a call under delayed scaling, and where the amaxes that it sees go.

    ``scales`` are (G,) fp32 of input, weight and grad_output, 0 where a group has none yet and
    takes that of its current amax; ``amaxes`` of each the largest of a step so far, written when
    the gradients of the call are computed; None if it does not count. ``may_be_zero`` says of each
    role whether a scale may be 0: else no amax is asked for.
    """

    scales: Sequence[Tensor]
    amaxes: Sequence[Tensor] | None = None
    may_be_zero: Sequence[bool] = (True, True, True)

    def record(self, seen: Sequence[Tensor | None]) -> None:
        """Raise the largest amaxes to those of a call, in the order of roles; None is no call's."""
        for largest, amax in zip(self.amaxes or (), seen, strict=False):
            if amax is not None:
                largest.copy_(torch.maximum(largest, amax))


class GivenScale(NamedTuple):
    """A scale of each group (G,) fp32 for one operand, and whether some may be 0; see ``Scaling``."""

    value: Tensor
    may_be_zero: bool

    def scale(self, x: Tensor, offs: Tensor | None, fmt: Format) -> Tensor:
        """The scales for ``x``: of groups that have none those of ``FP8(scaling="current")``."""
        _, current, _ = codec_of(fmt).level(ops.grouped_amax(x, offs))
        return torch.where(self.value == 0, current, self.value)


class Rows(NamedTuple):
    """Rows that are made where they are read: rows of a tensor by an index, or what becomes of
    them.

    ``at`` (R,) int32 is the row of ``x`` (T, W) of each, None for all in order; ``inverse`` (T, k)
    int32 beside it has the rows of each row of ``x``. ``activation`` is the text of what is done to
    them, None for nothing.
    """

    x: Tensor
    offs: Tensor
    at: Tensor | None = None
    inverse: Tensor | None = None
    activation: str | None = None
    interleaved: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows."""
        return self.x.dtype

    def made(self) -> Tensor:
        """The rows in memory."""
        x = self.x if self.at is None else ops.moe_gather(self.x, self.at, self.inverse)
        return (
            x
            if self.activation is None
            else ops.moe_activate(x, self.activation, self.offs, self.interleaved)
        )

    def read_by(self, fmt: Format) -> Rows:
        """Return rows that a quantizer for ``fmt`` can read; its codes are those of these rows.

        Activations that a quantizer does not round to their dtype, or not at all, are made.
        """
        if self.activation is not None and (self.interleaved or not fmt.rounds_activation):
            return Rows(self.made(), self.offs)
        return self


class Quantized(NamedTuple):
    """Rows that the product before quantized: what a product reads of them, and the dtype that they
    had.
    """

    copy: list[Tensor]
    dtype: torch.dtype


class Epilogue(NamedTuple):
    """What a product does to its result: see ``m_grouped_gemm_activate``."""

    activation: str
    interleaved: bool
    keeps_z: bool
    quantize_to: str | None = None


def made(x: Tensor | Rows | Quantized) -> Tensor:
    """``x`` in memory."""
    return x.made() if isinstance(x, Rows) else cast("Tensor", x)


#: What the gradients read: of x the tensor and of the weight the parameters if plain, all of the
#: columnwise copy if quantized; None where no gradient is wanted.
Kept: TypeAlias = "tuple[list[Tensor] | None, list[Tensor] | None]"


class WgradOperands(NamedTuple):
    """What the gradient of a weight is the product of: columnwise copies, or tensors in a list if
    plain.

    After a plain ``x`` an index of its rows may follow, and its inverse.
    """

    dy: list[Tensor]
    x: list[Tensor]
    offs: Tensor


class Gradients(NamedTuple):
    """What a backward pass found, as far as it was asked for: dx (T, K), dbias (G, N).

    ``amax`` is (G,) of the gradient of the output, where its scales were given.
    """

    dx: Tensor | None
    wgrad: WgradOperands | None
    dbias: Tensor | None
    amax: Tensor | None = None


class LinearCall(NamedTuple):
    """What the gradients of a call need to know besides tensors."""

    recipe: Recipe
    prepacked: bool
    #: The text of the weight's format; None if plain.
    weight_format: str | None
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    #: The weight has one parameter a group.
    discrete: bool
    #: What looks at its operands.
    probe: Probe | None = None
    #: Whether the scale that is given for a role may be 0, by role.
    may_be_zero: tuple[bool, ...] = ()

    @classmethod
    def of(
        cls,
        x: Tensor | Rows | Quantized,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        probe: Probe | None = None,
        scaling: Scaling | None = None,
    ) -> LinearCall:
        """Of the call with these operands, the first parameter of the weight among them."""
        prepacked, weight_format = False, recipe.texts[1]
        if isinstance(weight, GroupedTensor):
            prepacked, weight_format = weight.prepacked, weight.format.text
        dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        may_be_zero = () if scaling is None else tuple(scaling.may_be_zero)
        return cls(recipe, prepacked, weight_format, *dtypes, weight.dim() == 2, probe, may_be_zero)

    def given(self, role: str, scale: Tensor | None) -> GivenScale | None:
        """The scale of a role's operand, if the call has some."""
        return None if scale is None else GivenScale(scale, self.may_be_zero[ROLES.index(role)])

    def weight_gradient(
        self, operands: WgradOperands, out: Tensor | None = None, *, accumulate: bool = False
    ) -> Tensor:
        """The gradient of the weight (G, N, K), of its dtype or written into ``out``."""
        (a, *a_scales), (b, *b_scales), offs = operands
        options: tuple[object, ...] = (None, out.dtype if out is not None else self.weight_dtype)
        if self.recipe.is_quantized:
            _, _, dy_format = self.recipe.texts
            options += (a_scales, b_scales, dy_format, self.recipe.texts[0])
        elif b_scales:
            options += (*(None,) * 5, *b_scales)
        if out is None:
            return ops.k_grouped_gemm(a, b, offs, *options)
        torch.ops.cute_kernels.k_grouped_gemm_out(
            a, b, offs, *options, out=out, accumulate=accumulate
        )
        return out

    def split(self, dweight: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradient of each parameter that needs one, of that of the weight (G, N, K)."""
        parts = dweight.unbind() if self.discrete else (dweight,)
        return [t if need else None for t, need in zip(parts, needs, strict=True)]


def joined(sources: Sequence[Tensor]) -> Tensor:
    """The weight (G, N, K) of its one parameter or of one a group."""
    return sources[0] if sources[0].dim() == 3 else torch.stack(tuple(sources))


def quantize_weight(
    weight: Tensor, recipe: Recipe, columnwise: bool, scaling: Scaling | None = None
) -> Copies:
    """Quantize (G, N, K) weights, rowwise and if asked for columnwise."""
    fmt, scale = _format(recipe, "weight"), _scale(scaling, "weight")
    return _quantize(weight.detach(), None, fmt, True, columnwise, scale)


def _scale(scaling: Scaling | None, role: str) -> GivenScale | None:
    index = ROLES.index(role)
    return (
        None if scaling is None else GivenScale(scaling.scales[index], scaling.may_be_zero[index])
    )


def _format(recipe: Recipe, role: str) -> Format:
    fmt = recipe.formats[ROLES.index(role)]
    if fmt is None:
        raise ValueError(f"recipe has no format for {role}: {recipe}")
    return fmt


def _quantize(
    x: Tensor | Rows,
    offs: Tensor | None,
    fmt: Format,
    rowwise: bool,
    columnwise: bool,
    given: GivenScale | None,
) -> Copies:
    activation = index = inverse = None
    scale = None if given is None else given.value
    if given is not None and given.may_be_zero:
        x = made(x)
        scale = given.scale(x, offs, fmt)
    if isinstance(x, Rows):
        x, _, index, inverse, activation, _ = x.read_by(fmt)
    options = (scale, draw_seed(fmt, x.device), activation, None, index, inverse)
    buffers = ops.grouped_quantize(x, fmt.text, offs, None, rowwise, columnwise, *options)
    return _copies_of_buffers(fmt, _named(fmt, iter(buffers), rowwise, columnwise))


def _named(
    fmt: Format, buffers: Iterator[Tensor], rowwise: bool, columnwise: bool
) -> dict[str, Tensor]:
    """What ``grouped_quantize`` gives of the directions that are asked for, by name."""
    names = [
        name
        for way, asked in ((False, rowwise), (True, columnwise))
        if asked
        for name in fmt.buffer_names(way)
    ]
    return {name: next(buffers) for name in dict.fromkeys(names)}


def _copies_of_buffers(fmt: Format, named: dict[str, Tensor]) -> Copies:
    def copy(way: bool) -> list[Tensor] | None:
        return (
            [named[name] for name in fmt.operand_names(way)]
            if fmt.buffer_names(way)[0] in named
            else None
        )

    return Copies(copy(False), copy(True), named["amax"] if fmt.has_given_scale else None)


def quantized_gradient(
    z: Tensor,
    g: Tensor | None,
    recipes: tuple[Recipe, Recipe],
    scales: Sequence[Tensor | None],
    *rest: Any,
) -> tuple[Copies, Copies, Tensor]:
    """Copies of dz and p a, and dp, by one op: of the formats that the two products have for them."""
    formats = _format(recipes[0], "grad_output"), _format(recipes[1], "input")
    *made, dp = ops.moe_quantize_gradient(z, g, *(fmt.text for fmt in formats), *rest, *scales)
    buffers = iter(made)
    dz, scaled = (
        _copies_of_buffers(fmt, _named(fmt, buffers, not i, True)) for i, fmt in enumerate(formats)
    )
    return dz, scaled, dp


def _quantize_and_multiply(
    role: str,
    x: Tensor | Rows | Quantized,
    weight: list[Tensor],
    offs: Tensor,
    bias: Tensor | None,
    fmt: Format,
    call: LinearCall,
    transpose: bool,
    columnwise: bool,
    scale: GivenScale | None,
    epilogue: Epilogue | None = None,
) -> tuple[list[Tensor], Copies]:
    """What the product of quantized x and the weight gives, and x's columnwise copy if asked for.

    Of activations x (T, K), or gradients of the output where it is dgrad (``transpose``);
    ``weight`` is the copy whose blocks run along K, ``scale`` what the format of x may take.
    """
    codes, *scales = weight
    options = (bias, None, transpose, call.dtype)
    is_seen = call.probe is not None
    if isinstance(x, Quantized):
        copies = Copies(x.copy)
    else:
        if is_seen:
            x = made(x)
        if not columnwise and scale is None and not is_seen:
            texts = (fmt.text, call.weight_format)
            rows = x.read_by(fmt) if isinstance(x, Rows) else Rows(x, offs)
            last = (
                call.prepacked,
                draw_seed(fmt, rows.x.device),
                None,
                rows.activation,
                rows.at,
                rows.inverse,
            )
            return _call(
                "m_grouped_quantize_gemm",
                (rows.x, codes, offs, scales, *texts, *options, *last),
                epilogue,
            ), Copies()
        copies = _quantize(x, offs, fmt, True, columnwise, scale)
        if call.probe is not None:
            call.probe.see(role, made(x), copies, getattr(call.recipe, role), offs)
    a_codes, *a_scales = cast("list[Tensor]", copies.rowwise)
    rest = (a_scales, scales, fmt.text, call.weight_format, call.prepacked, None, None, None)
    return _call("m_grouped_gemm", (a_codes, codes, offs, *options, *rest), epilogue), copies


def _call(name: str, operands: tuple[object, ...], epilogue: Epilogue | None) -> list[Tensor]:
    """What an op of products gives, of all its arguments; or that of its name with an activation."""
    if epilogue is None:
        return [getattr(ops, name)(*operands)]
    return getattr(ops, f"{name}_activate")(*operands, *epilogue)


def _plain_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    transpose: bool,
    out_dtype: torch.dtype,
    index: tuple[Tensor | None, Tensor | None] = (None, None),
    epilogue: Epilogue | None = None,
) -> list[Tensor]:
    operands: tuple[object, ...] = (x, weight, offs, bias, None, transpose, out_dtype, *(None,) * 4)
    if isinstance(weight, GroupedTensor):
        _, operands = w4a16_operands(x, weight, offs, bias, None, transpose, out_dtype)
    return _call("m_grouped_gemm", (*operands, False, None, *index), epilogue)


def low(x: Tensor) -> Tensor:
    """``x`` in the dtype in which plain operands multiply."""
    return x if x.dtype in (torch.bfloat16, torch.float16) else x.to(torch.bfloat16)


def _low_weight(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weight as it multiplies operands of ``dtype``: of that dtype, or quantized as it is."""
    return (
        weights[0]
        if isinstance(weights[0], GroupedTensor)
        else joined([w.to(dtype) for w in weights])
    )


def forward(
    x: Tensor | Rows | Quantized,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    offs: Tensor,
    recipe: Recipe,
    copies: Copies | None,
    needs: Sequence[bool],
    scaling: Scaling | None = None,
    probe: Probe | None = None,
    epilogue: Epilogue | None = None,
) -> tuple[list[Tensor], Kept, list[Tensor | None]]:
    """What the product gives, and what the gradients of x (``needs[0]``) and the weight (``[1]``)
    read.

    That is the product, or what its epilogue makes of it and then the product if that is kept.

    Under delayed scaling also the amaxes of both; that of a weight which was quantized by somebody
    else is None.
    """
    need_dx, need_dweight = needs[:2]
    weight = weights[0]
    if isinstance(weight, GroupedTensor):
        _check_grouped(weight, need_dx)
    if not recipe.is_quantized:
        index: tuple[Tensor | None, Tensor | None] = (None, None)
        if isinstance(x, Rows) and x.activation is None and probe is None and not need_dweight:
            index, x = (x.at, x.inverse), x.x
        x = made(x)
        low_x = low(x)
        low_weight = _low_weight(weights, low_x.dtype)
        y = _plain_product(low_x, low_weight, bias, offs, False, x.dtype, index, epilogue)
        if probe is not None:
            probe.see("input", x, Copies([low_x]), None, offs)
            _see_weight(probe, weights, Copies([low_weight]), None)
        del low_weight
        # Cast and joined again for dx: parameters cost nothing to keep, copies as much as they do.
        of_weight = list(weights)
        if isinstance(weight, GroupedTensor):
            # So that autograd sees a write to one of its parts through another wrapper.
            of_weight += [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
        return y, ([low_x] if need_dweight else None, of_weight if need_dx else None), []
    if isinstance(weight, GroupedTensor):
        copies = _copies_of(weight)
    elif copies is None:
        copies = quantize_weight(joined(weights), recipe, need_dx, scaling)
    if probe is not None:
        _see_weight(probe, weights, copies, recipe.weight)
    rowwise, columnwise, amax = copies
    call, fmt = LinearCall.of(x, weight, bias, recipe, probe, scaling), _format(recipe, "input")
    y, of_x = _quantize_and_multiply(
        *("input", x, rowwise or [], offs, bias, fmt, call),
        transpose=False,
        columnwise=need_dweight,
        scale=_scale(scaling, "input"),
        epilogue=epilogue,
    )
    kept = (of_x.columnwise, columnwise if need_dx else None)
    return y, kept, [] if scaling is None else [of_x.amax, amax]


def _see_weight(
    probe: Probe, weights: Sequence[Tensor], copies: Copies, fmt: Format | None
) -> None:
    weight = weights[0]
    if isinstance(weight, GroupedTensor):
        copies, fmt = _copies_of(weight), weight.format
    probe.see("weight", weight if weight.dim() == 3 else weights, copies, fmt)


def _copies_of(weight: GroupedTensor) -> Copies:
    def operand(copy: QuantizedCopy | None) -> list[Tensor] | None:
        return None if copy is None else [copy.operand[0], *copy.operand[1]]

    return Copies(operand(weight.rowwise), operand(weight.columnwise))


def _check_grouped(weight: GroupedTensor, need_dx: bool) -> None:
    """Whether a weight that is quantized already has what is read of it."""
    if weight.grouping != "uniform":
        raise ValueError(f"weight must be uniform, got {weight!r}")
    level = weight.format.global_scale
    if level is not None and level.per == "row":
        raise ValueError(
            f"weight must have one global scale per group, got {weight.format}: row_scaled is for activations"
        )
    if need_dx and weight.format.is_transformed:
        raise ValueError(
            f"weight is {weight.format}, whose transformed columnwise copy dgrad does not read: "
            "quantize it without hadamard where x requires a gradient"
        )
    if weight.rowwise is None:
        raise RuntimeError(f"weight has no rowwise copy, which fprop reads: {weight!r}")
    if weight.columnwise is None and need_dx:
        raise RuntimeError(
            f"weight has no columnwise copy, which dgrad reads: {weight!r}; make it by "
            "grouped.prepare or grouped.quantize with columnwise=True, or call the layer under torch.no_grad()"
        )


def wgrad_operand(
    call: LinearCall, x: Tensor | Rows | Copies, offs: Tensor, scale: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """What the gradient of the weight reads of the input, and its amax under delayed scaling.

    For calls of which ``forward`` did not keep it. ``x`` is the input (T, K), or its columnwise
    copy, ``scale`` (G,) its scales where its format takes them.
    """
    if isinstance(x, Copies):
        return x.columnwise or [], x.amax
    if not call.recipe.is_quantized:
        if isinstance(x, Rows) and x.activation is None and x.at is not None:
            return [low(x.x), x.at, *([] if x.inverse is None else [x.inverse])], None
        return [low(made(x))], None
    if call.probe is not None:
        x = made(x)
    fmt = _format(call.recipe, "input")
    copies = _quantize(x, offs, fmt, False, True, call.given("input", scale))
    if call.probe is not None:
        call.probe.see("input", made(x), copies, call.recipe.input, offs)
    return copies.columnwise or [], copies.amax


def backward(
    call: LinearCall,
    needs: Sequence[bool],
    dy: Tensor | Rows | Copies,
    offs: Tensor,
    kept: Kept,
    scale: Tensor | None = None,
) -> Gradients:
    """The gradients of x and bias and what that of the weight is made of, as far as needed.

    dy may be quantized already, in both directions, for those of x and the weight alone.
    """
    x, weight = kept
    if isinstance(dy, Copies):
        (a, *a_scales), (b, *b_scales) = dy.rowwise or [], weight or []
        how = (call.recipe.texts[2], call.weight_format, call.prepacked)
        product: Tensor = ops.m_grouped_gemm(
            a, b, offs, None, None, True, call.dtype, a_scales, b_scales, *how
        )
        return Gradients(product, WgradOperands(dy.columnwise or [], x or [], offs), None, dy.amax)
    amax = None
    if needs[2] or call.probe is not None or not call.recipe.is_quantized:
        dy = made(dy)
    if call.recipe.is_quantized:
        dx, copies = _quantized_gradients(call, needs, dy, offs, kept, scale)
        of_dy, amax = copies.columnwise, copies.amax
    else:
        dx, of_dy = _plain_gradients(call, needs, made(dy), offs, kept)
    dbias = ops.grouped_dbias(made(dy), offs).to(call.bias_dtype) if needs[2] else None
    wgrad = None if of_dy is None or x is None else WgradOperands(of_dy, x, offs)
    return Gradients(dx, wgrad, dbias, amax)


def _plain_gradients(
    call: LinearCall, needs: Sequence[bool], dy: Tensor, offs: Tensor, kept: Kept
) -> tuple[Tensor | None, list[Tensor] | None]:
    _, weight = kept
    low_dy = dy.to(torch.float16 if call.dtype == torch.float16 else torch.bfloat16)
    dx = None
    if needs[0] and weight is not None:
        b = _low_weight(weight, low_dy.dtype)
        (dx,) = _plain_product(low_dy, b, None, offs, True, call.dtype)
    if call.probe is not None:
        call.probe.see("grad_output", dy, Copies([low_dy]), None, offs)
    return dx, [low_dy] if needs[1] else None


def _quantized_gradients(
    call: LinearCall,
    needs: Sequence[bool],
    dy: Tensor | Rows,
    offs: Tensor,
    kept: Kept,
    scale: Tensor | None,
) -> tuple[Tensor | None, Copies]:
    """The gradient of x, and quantized dy, whose columnwise copy that of the weight reads."""
    (_, weight), (need_dx, need_dweight) = kept, needs[:2]
    fmt = _format(call.recipe, "grad_output")
    if need_dx and weight is not None:
        (dx,), copies = _quantize_and_multiply(
            *("grad_output", dy, weight, offs, None, fmt, call),
            transpose=True,
            columnwise=need_dweight,
            scale=call.given("grad_output", scale),
        )
        return dx, copies
    if need_dweight:
        copies = _quantize(dy, offs, fmt, False, True, call.given("grad_output", scale))
        if call.probe is not None:
            call.probe.see("grad_output", made(dy), copies, call.recipe.grad_output, offs)
        return None, copies
    return None, Copies()
