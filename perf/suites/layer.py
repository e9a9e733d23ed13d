"""Layers: forward, and forward and backward, of a linear layer and of an MLP of experts."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import grouped

from ..cases import MODELS, ends_of, split_rows
from ..contender import Contender, Task, relative_error
from ..measure import Meter
from ..operands import generator_of
from ..traffic import layer_work
from .base import Options, Suite, default_meters

_LAYERS = ("linear", "mlp")
PASSES = ("forward", "forward+backward")
_TOKENS = (128, 512, 2048)
#: Relative errors of results and gradients that are more than a recipe's: random data gives 0.15
#: for a linear layer and 0.26 for an MLP in NVFP4, a quarter of that in FP8.
_BOUND, _BF16_BOUND = 0.4, 0.012


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Experts of one rank: a linear layer is the first of an MLP."""

    model: str
    experts: int
    hidden: int
    intermediate: int


_SMALL = LayerShape("small", 8, 1024, 512)
_TINY = LayerShape("tiny", 4, 128, 64)


@dataclasses.dataclass
class Step:
    """One pass of a layer, forward only without ``dy``.

    ``parameters`` are of each weight the tensors that it consists of: one (G, N, K), or G of (N,
    K). ``gather`` makes ``x`` anew each time.
    """

    forward: Callable[[Tensor], Tensor]
    x: Tensor
    dy: Tensor | None
    parameters: Sequence[Sequence[Tensor]]
    gather: Callable[[], Tensor] | None = None

    def run(self) -> Tensor:
        if self.gather is not None:
            self.x = self.gather().requires_grad_(self.dy is not None)
        if self.dy is None:
            with torch.no_grad():
                return self.forward(self.x)
        self.x.grad = None
        for parameter in itertools.chain.from_iterable(self.parameters):
            parameter.grad = None
        y = self.forward(self.x)
        y.backward(self.dy)
        return y

    def results(self) -> list[Tensor]:
        y = self.run().detach()
        if self.dy is None:
            return [y]
        gradients = [[p.grad for p in parts if p.grad is not None] for parts in self.parameters]
        weights = [g[0] if len(g) == 1 else torch.stack(g) for g in gradients if g]
        return [y, *([] if self.x.grad is None else [self.x.grad]), *weights]


def recipes() -> dict[str, grouped.recipes.Recipe]:
    return {name: getattr(grouped.recipes, name)() for name in grouped.recipes.NAMES}


def swiglu(z: Tensor) -> Tensor:
    gate, value = z.float().chunk(2, dim=-1)
    return (F.silu(gate) * value).to(z.dtype)


class LayerWork:
    """A layer's weights and rows in bf16, and what it gives.

    ``x`` are (T, hidden) rows, ``dy`` is None without a backward pass, ``weights`` are (G, 2 I, H)
    and of an MLP (G, H, I) as well. ``recipes`` are ours, ``offered`` is what peers call theirs.
    """

    recipes: ClassVar[Sequence[str]] = grouped.recipes.NAMES
    offered: ClassVar[str] = "layers"

    def __init__(
        self,
        layer: str,
        shape: LayerShape,
        rows: int,
        routing: str,
        passes: str,
        device: torch.device,
        seed: int = 0,
        copy: int = 0,
    ) -> None:
        self.layer, self.shape, self.rows, self.routing, self.device = (
            layer,
            shape,
            rows,
            routing,
            device,
        )
        self.backward, self.seed = passes == PASSES[1], seed
        self.activate = swiglu
        self.sizes = split_rows(routing, shape.experts, rows, seed)
        self.offs = torch.tensor(ends_of(self.sizes), dtype=torch.int32, device=device)
        generator = generator_of(device, seed, copy)
        draw = functools.partial(
            torch.randn, dtype=torch.bfloat16, device=device, generator=generator
        )
        self.x = draw(rows, shape.hidden)
        self.weights = [draw(*size).mul_(size[-1] ** -0.5) for size in self.weight_sizes.values()]
        self.dy = draw(rows, self.weights[-1].shape[1]) if self.backward else None

    @property
    def weight_sizes(self) -> dict[str, tuple[int, ...]]:
        """By what a layer of this package calls them."""
        groups, hidden, wide = self.shape.experts, self.shape.hidden, self.shape.intermediate
        up = (groups, 2 * wide, hidden)
        if self.layer == "linear":
            return {"weight": up}
        return {"gate_up.weight": up, "down.weight": (groups, hidden, wide)}

    @property
    def case(self) -> dict[str, Any]:
        """As in ``Record``, as far as the work depends on it."""
        named = {
            "layer": self.layer,
            "rows": self.rows,
            "routing": self.routing,
            "pass": PASSES[self.backward],
        }
        return dataclasses.asdict(self.shape) | named

    #: Options that only some models have, see ``cases.OWN``.
    options: Mapping[str, Any] = MappingProxyType({})

    def leaves(self) -> list[nn.Parameter]:
        return [nn.Parameter(w, self.backward) for w in self.weights]

    def ours(self, recipe: grouped.recipes.Recipe) -> nn.Module:
        shape = self.shape
        sizes = (shape.experts, shape.hidden)
        options: dict[str, Any] = {"recipe": recipe, "device": self.device, "dtype": torch.bfloat16}
        if self.layer == "linear":
            return grouped.nn.GroupedLinear(*sizes, 2 * shape.intermediate, bias=False, **options)
        return grouped.nn.GroupedMLP(*sizes, shape.intermediate, bias=False, **options)

    def own(self, recipe: grouped.recipes.Recipe, kept: bool, compiled: bool = False) -> Step:
        """The layer of this package; ``kept``: its weight was quantized in an earlier pass."""
        module, leaves = self.ours(recipe), self.leaves()
        for name, leaf in zip(self.weight_sizes, leaves, strict=True):
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, leaf)
        call: dict[str, bool] = {}
        if kept:
            with torch.set_grad_enabled(self.backward):
                module(
                    self.x.detach().clone().requires_grad_(self.backward),
                    *self.arguments,
                    is_first_microbatch=True,
                )
            call["is_first_microbatch"] = False
        layer = torch.compile(module, fullgraph=True) if compiled else module
        return self.step(lambda x: layer(x, *self.arguments, **call), [[leaf] for leaf in leaves])

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return (self.offs,)

    def step(
        self, forward: Callable[[Tensor], Tensor], parameters: Sequence[Sequence[Tensor]]
    ) -> Step:
        return Step(
            forward, self.x.detach().clone().requires_grad_(self.backward), self.dy, parameters
        )

    @functools.cached_property
    def expected(self) -> list[Tensor]:
        """Output and gradients, computed in fp32 expert by expert."""
        leaves = [t.detach().float() for t in (self.x, *self.weights)]
        for leaf in leaves:
            leaf.requires_grad_(self.backward)
        y = self.exact(*leaves)
        if self.dy is None:
            return [y]
        y.backward(self.dy.float())
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def exact(self, x: Tensor, *weights: Tensor) -> Tensor:
        parts = zip(x.split(self.sizes), *(w.unbind() for w in weights), strict=True)
        return torch.cat([self.of_expert(*part) for part in parts])

    def of_expert(
        self, x: Tensor, up: Tensor, down: Tensor | None = None, *biases: Tensor
    ) -> Tensor:
        of_up, of_down = biases or (None, None)
        y = F.linear(x, up, of_up)
        return y if down is None else F.linear(self.activate(y), down, of_down)

    def error(self, results: Sequence[Tensor]) -> float:
        return float(
            np.max([relative_error(a, b) for a, b in zip(results, self.expected, strict=True)])
        )

    def contender(
        self,
        name: str,
        recipe: str,
        make: Callable[[], Step],
        bound: float = _BOUND,
        *,
        capturable: bool = True,
    ) -> Contender:
        made: list[Step] = []

        def prepare() -> Callable[[], Any]:
            made[:] = [make()]
            return made[0].run

        work = layer_work(self.case, name, recipe, self.seed, self.options)
        fixed = (
            name,
            recipe,
            prepare,
            lambda got: self.error(made[0].results()),
            bound,
            work.bytes,
            work.flops,
        )
        return Contender(*fixed, capturable=capturable, is_step=True)

    def contenders(self, meter: Meter, options: Options) -> Iterator[Contender]:
        for name in self.recipes:
            recipe = getattr(grouped.recipes, name)()
            bound = _BOUND if recipe.is_quantized else _BF16_BOUND
            for kept in (False, True) if recipe.is_quantized else (False,):
                make = functools.partial(self.own, recipe, kept)
                yield self.contender(f"ours{', weight kept' * kept}", name, make, bound)
            if options.full and meter.kind == "gpu" and self.layer != "experts":
                make = functools.partial(self.own, recipe, False, True)
                yield self.contender("ours, compiled", name, make, bound)
        yield from options.competing(meter, self.offered, self)


def _cases(options: Options, meter: Meter) -> Iterator[tuple[str, LayerShape, int, str, str]]:
    if meter.kind != "gpu" or options.quick:
        for layer, passes in itertools.product(_LAYERS, PASSES):
            yield layer, _TINY, 200, "random", passes
        return
    big = MODELS["DeepSeek-V3"]
    local = LayerShape(big.name, big.shape("up").experts, big.hidden, big.intermediate)
    for shape, layer, passes, tokens in itertools.product(
        [local, _SMALL], _LAYERS, PASSES, _TOKENS
    ):
        yield layer, shape, tokens * shape.experts, "balanced", passes
    for routing in ("zipf", "empty"):
        yield "mlp", local, 512 * local.experts, routing, PASSES[1]


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    def contenders(copy: int, which: tuple[str, LayerShape, int, str, str]) -> list[Contender]:
        return list(LayerWork(*which, meter.device, options.seed, copy).contenders(meter, options))

    for which in _cases(options, meter):
        layer, shape, rows, routing, passes = which
        case = {"layer": layer, **dataclasses.asdict(shape), "rows": rows, "routing": routing}
        yield Task("layer", {**case, "pass": passes}, functools.partial(contenders, which=which))


SUITE = Suite(_tasks, default_meters, True)
