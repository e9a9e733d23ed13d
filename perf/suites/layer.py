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

from ..cases import MODELS, end_rows_of, split_rows
from ..contender import Contender, Task, relative_error
from ..measure import Meter
from ..operands import generator_of
from ..traffic import layer_work
from .base import Options, Suite, default_meters

_LAYERS = ("linear", "mlp")
PASSES = ("forward", "forward+backward")
_TOKENS = (128, 512, 2048)
#: Bounds on the relative errors of results and gradients. With random data a recipe in NVFP4 gives
#: 0.15 for a linear layer and 0.26 for an MLP, one in FP8 a quarter of that.
_BOUND, _BF16_BOUND = 0.4, 0.012


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Experts of one rank. A linear layer is the first product of the MLP."""

    model: str
    experts: int
    hidden: int
    intermediate: int


_SMALL = LayerShape("small", 8, 1024, 512)
_TINY = LayerShape("tiny", 4, 128, 64)


@dataclasses.dataclass
class Step:
    """One pass of a layer.

    Attributes:
        x: Input (T, hidden).
        dy: Gradient of the output. None without a backward pass.
        parameters: The tensors of each weight: one (G, N, K), or G of (N, K).
        gather: Makes ``x`` again in each pass.
    """

    forward: Callable[[Tensor], Tensor]
    x: Tensor
    dy: Tensor | None
    parameters: Sequence[Sequence[Tensor]]
    gather: Callable[[], Tensor] | None = None

    def run(self) -> Tensor:
        """Run the pass and return the output."""
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
        """Run the pass and return output, gradient of ``x`` and gradients of the weights."""
        y = self.run().detach()
        if self.dy is None:
            return [y]
        gradients = [[p.grad for p in weight if p.grad is not None] for weight in self.parameters]
        weights = [g[0] if len(g) == 1 else torch.stack(g) for g in gradients if g]
        return [y, *([] if self.x.grad is None else [self.x.grad]), *weights]


def recipes() -> dict[str, grouped.recipes.Recipe]:
    """Return all recipes by name."""
    return {name: getattr(grouped.recipes, name)() for name in grouped.recipes.NAMES}


def swiglu(z: Tensor) -> Tensor:
    """Return SwiGLU of (..., 2 I): the gates, then the values."""
    gate, value = z.float().chunk(2, dim=-1)
    return (F.silu(gate) * value).to(z.dtype)


class LayerWork:
    """Weights and rows of a layer in bf16, and its exact results.

    Attributes:
        recipes: Recipes of this package to measure.
        peer_method: Method of peers that gives their contenders.
        options: Options that only some models have, see ``cases.MOE_OPTIONS``.
        x: Rows (T, H).
        dy: Gradient of the output. None without a backward pass.
        weights: (G, 2 I, H), and for an MLP also (G, H, I).
        sizes: Rows of each expert.
        offs: End row of each expert.
    """

    recipes: ClassVar[Sequence[str]] = grouped.recipes.NAMES
    peer_method: ClassVar[str] = "layers"
    options: Mapping[str, Any] = MappingProxyType({})

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
        self.layer, self.shape, self.rows = layer, shape, rows
        self.routing, self.device = routing, device
        self.backward, self.seed = passes == PASSES[1], seed
        self.activate = swiglu
        self.sizes = split_rows(routing, shape.experts, rows, seed)
        self.offs = torch.tensor(end_rows_of(self.sizes), dtype=torch.int32, device=device)
        generator = generator_of(device, seed, copy)
        draw = functools.partial(
            torch.randn, dtype=torch.bfloat16, device=device, generator=generator
        )
        self.x = draw(rows, shape.hidden)
        self.weights = [draw(*size).mul_(size[-1] ** -0.5) for size in self.weight_sizes.values()]
        self.dy = draw(rows, self.weights[-1].shape[1]) if self.backward else None

    @property
    def weight_sizes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight, by its name in a layer of this package."""
        experts, hidden = self.shape.experts, self.shape.hidden
        intermediate = self.shape.intermediate
        up = (experts, 2 * intermediate, hidden)
        if self.layer == "linear":
            return {"weight": up}
        return {"gate_up.weight": up, "down.weight": (experts, hidden, intermediate)}

    @property
    def case(self) -> dict[str, Any]:
        """Fields of ``Record.case`` on which the work depends."""
        return dataclasses.asdict(self.shape) | {
            "layer": self.layer,
            "rows": self.rows,
            "routing": self.routing,
            "pass": PASSES[self.backward],
        }

    def leaves(self) -> list[nn.Parameter]:
        """Return the weights as new parameters."""
        return [nn.Parameter(w, self.backward) for w in self.weights]

    def module(self, recipe: grouped.recipes.Recipe) -> nn.Module:
        """Return the layer of this package, with other weights."""
        shape = self.shape
        sizes = (shape.experts, shape.hidden)
        options: dict[str, Any] = {"recipe": recipe, "device": self.device, "dtype": torch.bfloat16}
        if self.layer == "linear":
            return grouped.nn.GroupedLinear(*sizes, 2 * shape.intermediate, bias=False, **options)
        return grouped.nn.GroupedMLP(*sizes, shape.intermediate, bias=False, **options)

    def package_step(
        self, recipe: grouped.recipes.Recipe, weights_cached: bool, compiled: bool = False
    ) -> Step:
        """Return the pass of this package's layer.

        Args:
            recipe: Recipe of the layer.
            weights_cached: True if an earlier pass quantized the weights.
            compiled: True to compile the layer.
        """
        module, leaves = self.module(recipe), self.leaves()
        for name, leaf in zip(self.weight_sizes, leaves, strict=True):
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, leaf)
        call: dict[str, bool] = {}
        if weights_cached:
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
        """Arguments of the layer after ``x``."""
        return (self.offs,)

    def step(
        self, forward: Callable[[Tensor], Tensor], parameters: Sequence[Sequence[Tensor]]
    ) -> Step:
        """Return the pass of a layer on the rows of this work."""
        return Step(
            forward, self.x.detach().clone().requires_grad_(self.backward), self.dy, parameters
        )

    @functools.cached_property
    def expected(self) -> list[Tensor]:
        """Output and gradients in fp32."""
        leaves = [t.detach().float() for t in (self.x, *self.weights)]
        for leaf in leaves:
            leaf.requires_grad_(self.backward)
        y = self.exact(*leaves)
        if self.dy is None:
            return [y]
        y.backward(self.dy.float())
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def exact(self, x: Tensor, *weights: Tensor) -> Tensor:
        """Return the output, computed expert by expert."""
        experts = zip(x.split(self.sizes), *(w.unbind() for w in weights), strict=True)
        return torch.cat([self.expert_output(*operands) for operands in experts])

    def expert_output(
        self, x: Tensor, up: Tensor, down: Tensor | None = None, *biases: Tensor
    ) -> Tensor:
        """Return the output of one expert: of an MLP, or of a linear layer without ``down``."""
        up_bias, down_bias = biases or (None, None)
        y = F.linear(x, up, up_bias)
        return y if down is None else F.linear(self.activate(y), down, down_bias)

    def error(self, results: Sequence[Tensor]) -> float:
        """Return the largest relative error of output and gradients."""
        pairs = zip(results, self.expected, strict=True)
        return float(np.max([relative_error(actual, expected) for actual, expected in pairs]))

    def contender(
        self,
        name: str,
        recipe: str,
        make: Callable[[], Step],
        bound: float = _BOUND,
        *,
        capturable: bool = True,
    ) -> Contender:
        """Return a contender that runs the pass ``make`` returns."""
        # Holds the pass of the newest call of ``prepare``, which the check reads.
        steps: list[Step] = []

        def prepare() -> Callable[[], Any]:
            steps[:] = [make()]
            return steps[0].run

        work = layer_work(self.case, name, recipe, self.seed, self.options)
        return Contender(
            name=name,
            format=recipe,
            prepare=prepare,
            error=lambda result: self.error(steps[0].results()),
            bound=bound,
            bytes=work.bytes,
            flops=work.flops,
            capturable=capturable,
            is_step=True,
        )

    def contenders(self, meter: Meter, options: Options) -> Iterator[Contender]:
        """Yield this package's layer in all recipes, and those of peers."""
        for name in self.recipes:
            recipe = getattr(grouped.recipes, name)()
            bound = _BOUND if recipe.is_quantized else _BF16_BOUND
            yield self.contender(
                "ours", name, functools.partial(self.package_step, recipe, False), bound
            )
            if recipe.is_quantized:
                make = functools.partial(self.package_step, recipe, True)
                yield self.contender("ours, cached weight", name, make, bound)
            if options.full and meter.kind == "gpu" and self.layer != "experts":
                make = functools.partial(self.package_step, recipe, False, compiled=True)
                yield self.contender("ours, compiled", name, make, bound)
        yield from options.competing(meter, self.peer_method, self)


def _cases(options: Options, meter: Meter) -> Iterator[tuple[str, LayerShape, int, str, str]]:
    """Yield layer, shape, rows, routing and pass of each case."""
    if meter.kind != "gpu" or options.quick:
        for layer, passes in itertools.product(_LAYERS, PASSES):
            yield layer, _TINY, 200, "random", passes
        return
    model = MODELS["DeepSeek-V3"]
    local = LayerShape(model.name, model.shape("up").experts, model.hidden, model.intermediate)
    for shape, layer, passes, tokens in itertools.product(
        [local, _SMALL], _LAYERS, PASSES, _TOKENS
    ):
        yield layer, shape, tokens * shape.experts, "balanced", passes
    for routing in ("zipf", "empty"):
        yield "mlp", local, 512 * local.experts, routing, PASSES[1]


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    def contenders(copy: int, arguments: tuple[str, LayerShape, int, str, str]) -> list[Contender]:
        work = LayerWork(*arguments, meter.device, options.seed, copy)
        return list(work.contenders(meter, options))

    for arguments in _cases(options, meter):
        layer, shape, rows, routing, passes = arguments
        case = {"layer": layer, **dataclasses.asdict(shape), "rows": rows, "routing": routing}
        yield Task(
            "layer",
            {**case, "pass": passes},
            functools.partial(contenders, arguments=arguments),
        )


SUITE = Suite(_tasks, default_meters, has_peers=True)
