"""The experts of a mixture from tokens to tokens: gather, two products, combine, and gradients.

Or from rows to rows that lie by expert already: then there is no p, and x, z and a are kept for the
backward pass as two linear layers and an activation keep them.

y[t] = sum over k of p[t, k] h[row(t, k)] with h = W2 a + b2 and a = act(z), z = W1 x + b1.

Kept for the backward pass are x, p, z and the routing. Neither the gathered rows nor a nor h are:
rows and a are made again, and nothing reads h, by the formulas of docs/moe.md, Memory and
gradients.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from cute_kernels import ops, support
from cute_kernels.formats.activations import is_gated
from cute_kernels.ops.flops import register_flops
from cute_kernels.ops.gemm.fused_activation import activates
from cute_kernels.runtime.backend import chosen_backend
from cute_kernels.runtime.observers import PLAIN_TENSOR_TYPES
from cute_kernels.runtime.replay import replayed
from grouped import inspect as debug
from grouped.functional.flops import experts_flops

from ..tensor.grouped_tensor import GroupedTensor, handler
from ..tensor.validation import check_is_tensor
from .autocast import in_own_dtypes
from .linear_autograd import recipe_of, scaling_of, without_derivative
from .linear_passes import (
    Copies,
    Epilogue,
    LinearCall,
    Quantized,
    Rows,
    Scaling,
    WgradOperands,
    backward,
    forward,
    joined,
    made,
    quantized_gradient,
    wgrad_operand,
)

if TYPE_CHECKING:
    from ..inspect import Probe
    from ..nn.weight_gradients import ParameterGradients
    from ..recipes import Recipe


class Routing(NamedTuple):
    """Where tokens go: what ``torch.ops.cute_kernels.compute_routing`` gives."""

    offs: Tensor
    token: Tensor
    pair: Tensor
    row: Tensor


class InPlace(NamedTuple):
    """Rows that lie by expert already, up to the end row of each."""

    offs: Tensor
    token: None = None
    pair: None = None
    row: None = None


def compute_routing(expert_ids: Tensor, num_experts: int) -> Routing:
    """Sort tokens by expert: ``torch.ops.cute_kernels.compute_routing``."""
    check_is_tensor("expert_ids", expert_ids)
    if torch.compiler.is_compiling():
        return Routing(*ops.compute_routing(expert_ids, num_experts))
    given, key = [expert_ids], ("routing", num_experts)
    return Routing(
        *replayed(key, given, lambda _: (ops.compute_routing(expert_ids, num_experts), None))[0]
    )


class Style(NamedTuple):
    """What the experts do besides products; ``dtype`` is that of y.

    ``apart``: y is not multiplied by p. Who asks for that does it, and passes back the gradient of
    the product instead of that of y: p times it is what the backward pass makes, as ever.
    """

    activation: str
    interleaved: bool
    recompute: bool
    dtype: torch.dtype
    apart: bool = False


class _Saved(NamedTuple):
    """What a product leaves: what gradients read of x and of the weight, and amaxes."""

    x: list[Tensor]
    weight: list[Tensor]
    amaxes: list[Tensor | None]


class Layer(NamedTuple):
    """One of the two products of a call: see ``grouped.functional.linear_autograd.multiply``."""

    weights: Sequence[Tensor]
    bias: Tensor | None
    recipe: Recipe
    copies: Copies | None = None
    sink: ParameterGradients | None = None
    scaling: Scaling | None = None
    probe: Probe | None = None
    flags: Tensor | None = None

    def forward(
        self,
        x: Tensor | Rows | Quantized,
        offs: Tensor,
        needs: tuple[bool, bool],
        epilogue: Epilogue | None = None,
    ) -> tuple[list[Tensor], _Saved]:
        """What the product gives, and what the gradients of x and the weight (``needs``) read."""
        options = (self.copies, needs, self.scaling, self.probe, epilogue)
        rows = x if self.flags is None else made(x)
        y, (of_x, weight), amaxes = forward(
            rows, self.weights, self.bias, offs, self.recipe, *options
        )
        if self.flags is not None:
            debug.note(self.flags, made(rows), self.weights, y[-1], offs)
        return y, _Saved(of_x or [], weight or [], amaxes)

    def epilogue(
        self, rows: Tensor | Rows, offs: Tensor, style: Style, after: Layer, keeps_z: bool
    ) -> Epilogue | None:
        """How the product of ``rows`` activates, and quantizes for ``after`` where that alone reads
        it.
        """
        weight, (of_x, of_weight, _) = self.weights[0], self.recipe.texts
        if isinstance(weight, GroupedTensor):
            of_weight = weight.format.text
        is_seen, fmt = after.probe is not None, after.recipe.formats[0]
        by_quantizer = (
            fmt is not None and not is_seen and fmt.rounds_activation and not style.interleaved
        )
        if by_quantizer and keeps_z:
            # As many bytes go to memory and back: steps in FP8Block took 2% less to 4% more (H200).
            return None
        x, index = (rows.x, rows.at) if isinstance(rows, Rows) else (rows, None)
        count, groups = (x if index is None else index).shape[0], offs.shape[0]
        # A graph for any number of tokens is one for many.
        mean = max(1, count // max(1, groups)) if type(count) is type(groups) is int else 1 << 20
        act = (style.activation, style.interleaved, 1 << mean.bit_length() - 1)
        facts = (
            x.device,
            x.dtype,
            (of_x, of_weight),
            tuple(map(int, weight.shape[-2:])),
            *act,
            by_quantizer,
        )
        own, choice = (style.activation, style.interleaved), chosen_backend()
        is_seen |= (
            keeps_z
            or after.scaling is not None
            or self.flags is not None
            or after.flags is not None
        )
        is_seen |= (
            fmt is not None and fmt.global_scale is not None
        )  # What it follows from is not known before.
        if fmt is not None and not is_seen and activates(choice, *facts, fmt.text):
            return Epilogue(*own, False, fmt.text)
        return (
            Epilogue(*own, keeps_z or self.flags is not None) if activates(choice, *facts) else None
        )

    def scale(self, role: int) -> Tensor | None:
        """A copy of the scale of a role, which the next step may overwrite."""
        return None if self.scaling is None else self.scaling.scales[role].clone()

    def needs(self, weights: bool, bias: bool) -> tuple[bool, bool]:
        """Whether the gradients of weight and bias are wanted, given autograd's opinion."""
        return (weights, bias) if self.sink is None else self.sink.wanted

    @property
    def anchor(self) -> Tensor | None:
        """What connects the layer to autograd if its parameters do not."""
        return None if self.sink is None else self.sink.anchor

    def cut_off(self) -> Layer:
        """Without autograd's hold on the parameters, where an anchor has it."""
        bias = None if self.bias is None else self.bias.detach()
        return self._replace(weights=[w.detach() for w in self.weights], bias=bias)

    def finish(
        self, call: LinearCall, wgrad: WgradOperands | None, dbias: Tensor | None, wanted: Any
    ) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """The gradients of parameters and bias, as autograd gets them."""
        if self.sink is not None:
            return self.sink.take(call, wgrad, dbias)
        if wgrad is None:
            return [None] * len(wanted), dbias
        return call.split(call.weight_gradient(wgrad), wanted), dbias


def experts(
    x: Tensor,
    p: Tensor | None,
    routing: Routing | InPlace,
    first: Layer,
    second: Layer,
    style: Style,
) -> Tensor:
    """Y (T, H) of ``style.dtype`` for tokens x (T, H) and weights p (T, k) fp32, both None or
    neither.
    """
    if torch.compiler.is_compiling():
        return torch.ops.grouped.experts(
            *(
                x,
                p,
                *routing,
                joined(first.weights),
                first.bias,
                joined(second.weights),
                second.bias,
            ),
            *(*first.recipe.texts, *second.recipe.texts),
            *(first.recipe.propagate_nonfinite, second.recipe.propagate_nonfinite, *style),
            *(part for layer in (first, second) for part in (layer.scaling or (None,) * 2)[:2]),
            *(layer.scaling and layer.scaling.may_be_zero for layer in (first, second)),
        )
    return _differentiable(x, p, routing, (first, second), style)


def without_gradients(
    key: Hashable,
    given: Sequence[Tensor | None],
    layers: tuple[Layer, Layer],
    run: Callable[[], Tensor],
) -> Tensor:
    """``run()``, replayed where no gradients are wanted:

    ``key`` and ``given`` say what it reads besides layers.
    """
    is_scaled = layers[0].scaling or layers[1].scaling
    found = (
        None
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_scaled
        else _facts(layers)
    )
    return run() if found is None else _replayed(key, given, found, run)


def of_quantized_weights(
    key: Hashable,
    given: Sequence[Tensor | None],
    weights: tuple[GroupedTensor, GroupedTensor],
    recipe: Recipe,
    cache: dict[str, Any],
    run: Callable[[tuple[Layer, Layer]], Tensor],
) -> Tensor:
    """``without_gradients`` of layers that are quantized weights alone:

    ``run`` gets them where they are needed.

    ``cache`` keeps, for the same weights and recipe, what of them decides how layers multiply. It
    holds no tensor.
    """
    first, second = weights

    def layers() -> tuple[Layer, Layer]:
        return Layer([first], None, recipe), Layer([second], None, recipe)

    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return run(layers())
    cached = cache.get("_layers_key")
    if (
        cached is None
        or cached[0] is not recipe
        or cached[1] is not first._layout
        or cached[2] is not second._layout
    ):
        facts = _facts(layers())
        assert facts is not None  # Nobody looks on.
        cache["_layers_key"] = cached = (recipe, first._layout, second._layout, facts[0])
    tensors = [None, first, *first._inner().values(), None, second, *second._inner().values()]
    return _replayed(key, given, (cached[3], tensors), lambda: run(layers()))


def _replayed(
    key: Hashable,
    given: Sequence[Tensor | None],
    facts: tuple[Hashable, list[Tensor | None]],
    run: Callable[[], Tensor],
) -> Tensor:
    return replayed((key, facts[0]), [*given, *facts[1]], lambda _: ([run()], None), TAKEN)[0][0]


#: Of each layer whether the gradient of its input is wanted, and that of its weight.
_Needs: TypeAlias = "tuple[tuple[bool, bool], tuple[bool, bool]]"
#: Classes of tensors that kernels take.
TAKEN = PLAIN_TENSOR_TYPES | {GroupedTensor}


_Result: TypeAlias = "tuple[Tensor, Tensor | None, tuple[_Saved, _Saved]]"


def _facts(layers: Sequence[Layer]) -> tuple[Hashable, list[Tensor | None]] | None:
    """What decides how layers multiply, and all tensors that they read;

    None if somebody looks on.
    """
    key: list[Any] = []
    tensors: list[Tensor | None] = []
    for weights, bias, recipe, copies, _, scaling, probe, flags in layers:
        if probe is not None or flags is not None:
            return None
        key += (
            recipe.texts,
            recipe.propagate_nonfinite,
            len(weights),
            scaling and tuple(scaling.may_be_zero),
        )
        tensors += (bias, *weights, *(scaling.scales if scaling else ()))
        weight = weights[0]
        if isinstance(weight, GroupedTensor):
            key += weight._layout
            tensors += weight._inner().values()
        elif copies is not None:
            key += (copy and len(copy) for copy in copies[:2])
            tensors += (*(copies.rowwise or ()), *(copies.columnwise or ()), copies.amax)
    return tuple(key), tensors


def _forward(*given: Any) -> _Result:
    """``_run``, replayed where it can be."""
    x, p, r, layers, *rest = given
    facts = _facts(layers)
    if facts is None:
        return _run(*given)

    def run(_: object) -> tuple[list[Tensor | None], list[int]]:
        y, z, left = _run(*given)
        parts = [part for seen in left for part in seen]
        return [y, z, *(t for part in parts for t in part)], [len(part) for part in parts]

    (y, z, *flat), counts = replayed(
        ("experts", facts[0], *rest), [x, p, *r, *facts[1]], run, TAKEN
    )
    parts = _parted(flat, counts)
    return y, z, (_Saved(*parts[:3]), _Saved(*parts[3:]))


def _parted(flat: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """So many values at a time."""
    rest = iter(flat)
    return [list(itertools.islice(rest, count)) for count in counts]


def _run(
    x: Tensor,
    p: Tensor | None,
    r: Routing | InPlace,
    layers: tuple[Layer, Layer],
    style: Style,
    *how: Any,
) -> _Result:
    """y, z if kept, and what each layer leaves."""
    h, z, left = products(x, r, layers, style, *how)
    return (
        h if r.row is None else ops.moe_combine(h, r.row, None if style.apart else p, style.dtype),
        z,
        left,
    )


def products(
    x: Tensor,
    r: Routing | InPlace,
    layers: tuple[Layer, Layer],
    style: Style,
    needs: _Needs = ((False, False), (False, False)),
    keeps_z: bool = False,
) -> _Result:
    """``_run`` before rows are added up; of tokens that are gathered gradients make it again."""
    (first, second), act = layers, (style.activation, style.interleaved)
    (dx, dw), (da, dw_2) = needs
    if r.token is not None:
        dw = dw_2 = False
    rows: Tensor | Rows = x if r.token is None else Rows(x, r.offs, r.token, r.row)
    epilogue = first.epilogue(rows, r.offs, style, second, keeps_z)
    if epilogue is not None:
        made_of, saved = first.forward(rows, r.offs, (dx, dw), epilogue)
        z = made_of[1] if keeps_z else None
        a = made_of[0] if epilogue.quantize_to is None else Quantized(made_of, x.dtype)
        (h,), saved_2 = second.forward(a, r.offs, (da, dw_2))
    else:
        (z,), saved = first.forward(rows, r.offs, (dx, dw))
        (h,), saved_2 = second.forward(Rows(z, r.offs, None, None, *act), r.offs, (da, dw_2))
    return h, z if keeps_z else None, (saved, saved_2)


def _differentiable(
    x: Tensor,
    p: Tensor | None,
    routing: Routing | InPlace,
    layers: tuple[Layer, Layer],
    style: Style,
) -> Tensor:
    anchors = [layer.anchor for layer in layers]
    first, second = (layer if layer.anchor is None else layer.cut_off() for layer in layers)
    layers = (first, second)
    operands = (x, p, first.bias, second.bias, *anchors, *first.weights, *second.weights)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        return _Experts.apply(*operands[:6], routing, layers, style, *operands[6:])
    y, _, saved = _forward(x, p, routing, layers, style)
    for layer, seen in zip(layers, saved, strict=True):
        if layer.scaling is not None:
            # No backward pass will.
            layer.scaling.record(seen.amaxes)
    return y


#: Where the weights begin among the inputs of ``_Experts``.
_WEIGHTS = 9


class _Experts(torch.autograd.Function):
    """The experts in eager mode, and where a compiler traces what they consist of."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        p: Tensor | None,
        bias_1: Tensor | None,
        bias_2: Tensor | None,
        anchor_1: Tensor | None,
        anchor_2: Tensor | None,
        routing: Routing | InPlace,
        layers: tuple[Layer, Layer],
        style: Style,
        *weights: Tensor,
    ) -> Tensor:
        needed, (first, second) = ctx.needs_input_grad, layers
        split = _WEIGHTS + len(first.weights)
        of_weights = (needed[_WEIGHTS:split], needed[split:])
        of_first = first.needs(any(of_weights[0]), needed[2])
        of_second = second.needs(any(of_weights[1]), needed[3])
        need_dz = needed[0] or any(of_first)
        ctx.needs = (needed[0], needed[1], need_dz, of_first, of_second)
        ctx.of_weights = of_weights
        need_g = need_dz or needed[1]
        needs = (needed[0], of_first[0]), (need_g, of_second[0])
        y, z, left = _forward(x, p, routing, layers, style, needs, not style.recompute)
        # What makes z again; of quantized weights the copies that were given, if there were.
        # Weights are saved once.
        again: list[Tensor | None] = []
        if style.recompute:
            rowwise = first.copies and first.copies.rowwise
            again = [first.bias, first.scale(1), *(rowwise or first.weights)]
            if rowwise is None and first.weights[0] is next(iter(left[0].weight), None):
                del again[2:]
        ctx.has_copies = bool(again) and rowwise is not None
        saved: list[Sequence[Tensor | None]] = [
            # The weight's gradient of the first layer, or z again.
            [x if (of_first[0] and routing.token is not None) or style.recompute else None],
            [p, z, *routing, second.bias],
            *[
                [None if routing.token is None else layer.scale(0), layer.scale(2)]
                for layer in layers
            ],
            *[[*seen.amaxes, None, None][:2] for seen in left],
            *[part for seen in left for part in seen[:2]],
            again,
        ]
        ctx.counts = tuple(len(part) for part in saved)
        ctx.save_for_backward(*(t for part in saved for t in part))
        ctx.layers = [Layer((), None, layer.recipe, None, *layer[4:]) for layer in layers]
        ctx.calls = [
            LinearCall.of(x, layer.weights[0], layer.bias, layer.recipe, layer.probe, layer.scaling)
            for layer in layers
        ]
        ctx.style = style
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        for layer in ctx.layers:
            if layer.sink is not None:
                layer.sink.check()
        given = [dy, *ctx.saved_tensors]
        ctx.maybe_clear_saved_tensors()
        with torch.no_grad():
            gradients = _backward(ctx, given)
        if torch.is_grad_enabled():
            gradients = without_derivative(
                gradients, "grouped.nn.MoE cannot be differentiated twice"
            )
        dx, dp, db_1, db_2, *dweights = gradients
        return dx, dp, db_1, db_2, None, None, None, None, None, *dweights

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("grouped.nn.MoE has no forward-mode derivative; use reverse mode")


def _backward(ctx: Any, given: list[Any]) -> Sequence[Tensor | None]:
    """The gradients of dy and saved tensors, which ``given`` holds no longer; replayed where
    nothing else is written.
    """
    if any(
        layer.sink or layer.scaling or layer.probe or layer.flags is not None
        for layer in ctx.layers
    ):
        return _gradients(ctx, given)
    calls = [(c.recipe.texts, c.recipe.propagate_nonfinite, *c[1:]) for c in ctx.calls]
    key = ("gradients", ctx.style, ctx.needs, ctx.counts, ctx.has_copies, *ctx.of_weights, *calls)
    return replayed(key, given, lambda given: (_gradients(ctx, given), None), TAKEN)[0]


def _gradients(ctx: Any, given: list[Any]) -> Sequence[Tensor | None]:
    """The gradients; what was given is gone then, each once it was read."""
    dy, *flat = given
    given.clear()
    parts = _parted(flat, ctx.counts)
    del flat
    (x,), (p, z, offs, token, pair, row, bias), scales_1, scales_2, *rest = parts
    amaxes_1, amaxes_2, of_x, weight_1, of_a, weight_2, again = rest
    del rest
    parts.clear()
    style: Style = ctx.style
    (first, second), (call_1, call_2) = ctx.layers, ctx.calls
    need_dx, need_dp, need_dz, of_first, of_second = ctx.needs
    dtype, is_gathered = call_1.dtype, token is not None
    if z is None:
        z = _again(ctx, first, Rows(x, offs, token, row), scales_1[0], again, weight_1)
    rows: Tensor | Rows = Rows(dy.to(dtype), offs, token, row)
    if second.flags is not None:
        rows = made(rows)
        debug.note_gradient(second.flags, rows, offs)
    needs = (need_dz or need_dp, of_second[0], of_second[1] and not is_gathered)
    got = backward(call_2, needs, rows, offs, (of_a, weight_2), scales_2[1])
    del rows, weight_2, of_a
    g = got.dx
    if g is None and is_gathered:
        g = z.new_zeros(z.shape[0], z.shape[1] // 2 if is_gated(style.activation) else z.shape[1])
    wgrad, db_2, dp = got.wgrad, got.dbias, None
    act = (style.activation, offs, style.interleaved)
    both = is_gathered and wgrad is not None and need_dx and tuple(of_first) == (True, False)
    is_seen = first.flags is not None or any(one.probe for one in ctx.layers)
    made_of_z: list[Any] = [None]
    # What takes the scales of its current amaxes is made before it is quantized.
    is_seen |= any((*call_1.may_be_zero[2:], *call_2.may_be_zero[:1]))
    if both and not is_seen and _quantizes_gradients(first.recipe, second.recipe):
        both_recipes, scales = (first.recipe, second.recipe), (scales_1[1], scales_2[0])
        made_of_z = [*quantized_gradient(z, g, both_recipes, scales, *act, p, pair)]
    elif g is not None:
        made_of_z = ops.moe_activate_gradient(z, g, *act, p, pair)
    dz, *more = made_of_z
    del z, g, made_of_z
    if is_gathered:
        scaled, dp = more
        del more
        if wgrad is not None:
            operand, amax = wgrad_operand(call_2, scaled, offs, scales_2[0])
            wgrad = wgrad._replace(x=operand)
            if amax is not None:
                amaxes_2[0] = torch.maximum(amaxes_2[0], amax)
        del scaled
        if bias is not None:
            db_2 = _of_bias(dy, p, dp, offs, row, bias, of_second[1])
    dw_2, db_2 = second.finish(call_2, wgrad, db_2, ctx.of_weights[1])
    _record(second, amaxes_2, got.amax)
    del wgrad, got
    dx = db_1 = None
    dw_1: Sequence[Tensor | None] = [None] * len(ctx.of_weights[0])
    if need_dz:
        if first.flags is not None:
            debug.note_gradient(first.flags, dz, offs)
        needs = (need_dx, *of_first)
        got = backward(call_1, needs, dz, offs, (of_x, weight_1), scales_1[1])
        del dz, weight_1, of_x
        wgrad = got.wgrad
        if wgrad is not None and is_gathered:
            operand, _ = wgrad_operand(call_1, Rows(x, offs, token, row), offs, scales_1[0])
            wgrad = wgrad._replace(x=operand)
        dx = got.dx
        if dx is not None and is_gathered:
            dx = ops.moe_combine(dx, row, None, dtype)
        dw_1, db_1 = first.finish(call_1, wgrad, got.dbias, ctx.of_weights[0])
        _record(first, amaxes_1, got.amax)
    return dx, dp if need_dp else None, db_1, db_2, *dw_1, *dw_2


@functools.lru_cache(maxsize=64)
def _quantizes_gradients(first: Recipe, second: Recipe) -> bool:
    """Whether one op makes what is quantized of dz and p a."""
    formats = first.grad_output, second.input
    return all(f is not None and support("moe_quantize_gradient", f, "reference") for f in formats)


def _again(
    ctx: Any, layer: Layer, rows: Rows, scale: Tensor | None, again: list[Any], of_dx: list[Any]
) -> Tensor:
    """z, by the first product of the forward pass."""
    bias, weight_scale, *weights = again
    weights = weights or of_dx[: len(ctx.of_weights[0])]
    copies = Copies(weights) if ctx.has_copies else None
    scaling = None
    if scale is not None:
        scaling = Scaling([scale, weight_scale, scale], may_be_zero=ctx.calls[0].may_be_zero)
    sources = [weights[0].new_empty(())] if ctx.has_copies else weights
    layer = layer._replace(
        weights=sources, bias=bias, copies=copies, scaling=scaling, probe=None, flags=None
    )
    return layer.forward(rows, rows.offs, (False, False))[0][0]


def _record(layer: Layer, of_operands: list[Tensor | None], of_gradient: Tensor | None) -> None:
    """Raise the amaxes of a step to those of a call."""
    if layer.scaling is not None:
        layer.scaling.record((*of_operands, of_gradient))


@in_own_dtypes
def _of_bias(
    dy: Tensor, p: Tensor, dp: Tensor, offs: Tensor, row: Tensor, bias: Tensor, need: bool
) -> Tensor | None:
    """The gradient of the second bias (E, H); adds to that of p what the bias gives."""
    there = row >= 0
    # The tail of a capacity buffer may hold anything.
    dy = dy.float().masked_fill(~there.any(1, keepdim=True), 0)
    expert = torch.searchsorted(offs, row.clamp_min(0), right=True).clamp_max(len(offs) - 1)
    dp += torch.where(there, (dy @ bias.float().T).gather(1, expert), 0)
    if not need:
        return None
    chosen = (
        expert.unsqueeze(-1) == torch.arange(len(offs), device=offs.device)
    ) & there.unsqueeze(-1)
    # 0 * NaN is NaN: what is not finite would reach all experts by the product.
    lost = ~dy.isfinite()
    sums = torch.where(chosen, p.unsqueeze(-1), 0).sum(1).T @ dy.masked_fill(lost, 0)
    return sums.masked_fill_(chosen.any(1).T.bfloat16() @ lost.bfloat16() > 0, torch.nan).to(
        bias.dtype
    )


# ---- as an op

_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_FORMATS = ", ".join(
    f"str? {role}_format_{i}" for i in (1, 2) for role in ("input", "weight", "grad_output")
)
_LIBRARY.define(
    "experts(Tensor x, Tensor? p, Tensor offs, Tensor? token, Tensor? pair, Tensor? row, "
    f"Tensor weight_1, Tensor? bias_1, Tensor weight_2, Tensor? bias_2, {_FORMATS}, "
    "bool propagate_nonfinite_1, bool propagate_nonfinite_2, str activation, bool interleaved, "
    "bool recompute, ScalarType dtype, bool apart, Tensor[]? scales_1, Tensor[]? amaxes_1, "
    "Tensor[]? scales_2, Tensor[]? amaxes_2, bool[]? may_be_zero_1=None, bool[]? may_be_zero_2=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _unpacked(
    arguments: Sequence[Any], records: bool
) -> tuple[Tensor, Tensor | None, Routing | InPlace, tuple[Layer, Layer], Style]:
    """The arguments of ``experts`` of those of the op; ``records``: amaxes may be written."""
    x, p = arguments[:2]
    formats, flags = arguments[10:16], arguments[16:18]
    layers = []
    for i in range(2):
        recipe = recipe_of(*formats[3 * i : 3 * i + 3], flags[i])
        scales, amaxes = arguments[23 + 2 * i : 25 + 2 * i]
        may_be_zero = (*arguments[27:], None, None)[i]
        scaling = scaling_of(scales, amaxes if records else None, may_be_zero)
        weight, bias = arguments[6 + 2 * i : 8 + 2 * i]
        layers.append(Layer([weight], bias, recipe, scaling=scaling))
    routing = InPlace(arguments[2]) if p is None else Routing(*arguments[2:6])
    return x, p, routing, (layers[0], layers[1]), Style(*arguments[18:23])


def _below_autograd(*arguments: Any) -> Tensor:
    # What records amaxes is above: this computes, and writes nothing.
    return _forward(*_unpacked(arguments, False))[0]


def _autograd(*arguments: Any) -> Tensor:
    return _differentiable(*_unpacked(arguments, True))


def _fake(*arguments: Any) -> Tensor:
    row, weight, dtype = arguments[5], arguments[8], arguments[21]
    x: Tensor = arguments[0]
    return x.new_empty((x if row is None else row).shape[0], weight.shape[1], dtype=dtype)


_LIBRARY.impl("experts", _below_autograd, "CompositeExplicitAutograd")
_LIBRARY.impl("experts", _autograd, "Autograd")
torch.library.register_fake("grouped::experts", _fake, lib=_LIBRARY)


@handler(torch.ops.grouped.experts.default)
def _experts_of_grouped(func: Any, *arguments: Any) -> Tensor:
    return _below_autograd(*arguments)


register_flops(torch.ops.grouped, experts_flops, "experts")
