"""Mixtures of experts, from tokens to tokens, and their experts alone.

A mixture has a router, the dispatch of tokens, experts with SwiGLU, and the sum of their results.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import grouped
from cute_kernels import ops
from grouped.functional.experts import ExpertsOptions, Layer, products
from grouped.functional.linear_passes import quantize_weight

from ..cases import MODELS, MOE_OPTIONS
from ..contender import Contender, Task
from ..measure import Meter
from .base import Options, Suite, default_meters
from .layer import PASSES, LayerShape, LayerWork, Step

#: Models, and the number of ranks that share their experts. One rank is measured: all experts of
#: DeepSeek-V3 fit on no GPU.
SLICES = {"Qwen3-30B-A3B": 1, "DeepSeek-V3": 8, "gpt-oss-120b": 1, "Mixtral-8x7B": 1}
_TOKENS = (64, 512, 2048, 4096, 32768)
_RECIPES = ("BF16", "FP8Block", "MXFP8", "NVFP4RowScaled")
#: Bound for peers, which round logits to bf16, so that some tokens go to another expert.
PEER_BOUND = 0.2
#: Factor of the bias of sigmoid scores, relative to that of logits.
_SCORE_BIAS = 0.2
#: Model, pass and numbers of tokens of which the experts alone are measured.
EXPERTS_ONLY = (
    ("Qwen3-30B-A3B", PASSES[0], (64, 4096, 32768)),
    ("Qwen3-30B-A3B", PASSES[1], (4096, 32768)),
    ("DeepSeek-V3", PASSES[0], (4096,)),
    ("DeepSeek-V3", PASSES[1], (512, 2048)),
)


@dataclass(frozen=True)
class MoEShape(LayerShape):
    """Experts of a mixture. Each token goes to ``top_k`` of them."""

    top_k: int

    @classmethod
    def from_model(cls, model: str) -> "MoEShape":
        """Return the experts of one rank of a model."""
        config = MODELS[model]
        return cls(
            model,
            config.experts // SLICES[model],
            config.hidden,
            config.intermediate,
            config.top_k,
        )


TINY = MoEShape("tiny", 16, 128, 64, 2)


def clamped_swiglu(z: Tensor) -> Tensor:
    """Return the SwiGLU of gpt-oss, where gates and values alternate."""
    gate, value = z[..., ::2].float().clamp(max=7.0), z[..., 1::2].float().clamp(-7.0, 7.0)
    return (gate * (1.702 * gate).sigmoid() * (value + 1)).to(z.dtype)


class MoEWork(LayerWork):
    """Tokens, and the weights of a router (E, H) and of experts.

    With the ``options`` of some models there are also biases, and the weights of a shared expert.

    Args:
        *arguments: Arguments of ``LayerWork``.
        options: Options of ``grouped.nn.MoE``, see ``cases.MOE_OPTIONS``.
    """

    shape: MoEShape
    arguments = ()
    recipes, peer_method = _RECIPES, "mixtures"

    def __init__(self, *arguments: Any, options: Mapping[str, Any] | None = None) -> None:
        self.options = options or {}
        super().__init__(*arguments)
        if "activation" in self.options:
            self.activate = clamped_swiglu
        if "router_bias" in self.options and self.bias is not None:
            self.weights[3] = self.bias

    @property
    def weight_sizes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight, by its name in ``grouped.nn.MoE``."""
        (up, down), hidden = super().weight_sizes.values(), self.shape.hidden
        sizes = {
            "router.weight": (up[0], hidden),
            "experts.gate_up.weight": up,
            "experts.down.weight": down,
        }
        if "bias" in self.options:
            sizes |= {
                "router.bias": up[:1],
                "experts.gate_up.bias": up[:2],
                "experts.down.bias": down[:2],
            }
        if intermediate := self.options.get("shared_intermediate_size"):
            sizes |= {
                "shared.gate_up.weight": (1, 2 * intermediate, hidden),
                "shared.down.weight": (1, hidden, intermediate),
            }
        return sizes

    def split_weights(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the weights of router, experts and shared expert; biases come last in each."""
        named = list(zip(self.weight_sizes, weights, strict=True))
        return [
            [w for name, w in named if name.startswith(module)]
            for module in ("router", "experts", "shared")
        ]

    @property
    def case(self) -> dict[str, Any]:
        """Fields of ``Record.case`` on which the work depends."""
        return super().case | {"tokens": self.rows}

    @functools.cached_property
    def bias(self) -> Tensor | None:
        """Bias (E,) of the logits that gives experts about ``sizes`` rows, or None."""
        sizes = torch.tensor(self.sizes, device=self.device)
        return sizes.clamp_min(0.5).log().bfloat16() if self.routing == "zipf" else None

    def module(self, recipe: grouped.recipes.Recipe) -> nn.Module:
        """Return the layer of this package, with other weights."""
        shape, is_biased = self.shape, not self.options and self.bias is not None
        options: dict[str, Any] = {"recipe": recipe, "device": self.device, "dtype": torch.bfloat16}
        sizes = (shape.hidden, shape.intermediate, shape.experts, shape.top_k)
        moe = grouped.nn.MoE(*sizes, **{"router_bias": is_biased, **options, **self.options})
        if is_biased and self.bias is not None:
            moe.router.bias = nn.Parameter(self.bias, False)
        if moe.router.selection_bias is not None and self.bias is not None:
            moe.router.selection_bias.copy_(self.bias).mul_(_SCORE_BIAS)
        return moe

    def choose(
        self, x: Tensor, router: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return routing weights and expert ids, both (T, k), in plain PyTorch."""
        logits, options, k = F.linear(x, router).float(), self.options, self.shape.top_k
        if options.get("score") != "sigmoid":
            bias = self.bias if bias is None else bias
            p, ids = (logits if bias is None else logits + bias).softmax(-1).topk(k)
            return p / p.sum(-1, keepdim=True), ids
        scores = logits.sigmoid()
        biased = scores.detach()
        if self.bias is not None:
            biased = biased + _SCORE_BIAS * self.bias.float()
        groups = biased.unflatten(1, (options["expert_groups"], -1))
        best = groups.topk(2).values.sum(-1).topk(options["top_groups"]).indices
        excluded = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        ids = groups.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(1).topk(k).indices
        p = scores.gather(1, ids)
        return options["routed_scaling_factor"] * p / p.sum(-1, keepdim=True), ids

    def exact(self, x: Tensor, *weights: Tensor) -> Tensor:
        """Return the output, computed expert by expert."""
        router, experts, shared = self.split_weights(weights)
        p, ids = self.choose(x, *router)
        y = torch.zeros_like(x) if not shared else self.expert_output(x, *(w[0] for w in shared))
        for expert, weight in enumerate(zip(*(w.unbind() for w in experts), strict=True)):
            token, k = (ids == expert).nonzero(as_tuple=True)
            output = self.expert_output(x[token], *weight)
            y = y.index_add(0, token, output * p[token, k].unsqueeze(1))
        return y

    def plain(self, experts: Callable[..., Tensor], leaves: Sequence[nn.Parameter] = ()) -> Step:
        """Return the layer with PyTorch's router and shared expert.

        Args:
            experts: Called as ``experts(x, p, ids, up, down)``, with the biases of the experts
                last.
            leaves: Weights; by default those of this work.
        """
        leaves = leaves or self.leaves()
        router, weights, shared = self.split_weights(leaves)
        activate = compiled(self.activate, self.device)

        def forward(x: Tensor) -> Tensor:
            """Route, run the experts, and add the shared expert."""
            y = experts(x, *self.choose(x, *router), *weights)
            if not shared:
                return y
            up, down = (w.squeeze(0) for w in shared)
            return y + F.linear(activate(F.linear(x, up)), down)

        return self.step(forward, [[p] for p in leaves])


def compiled(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """Return a function compiled per shape on a GPU, unchanged elsewhere."""
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


class ExpertsWork(LayerWork):
    """Experts by a given routing, from tokens to rows: gather of x, both products, SwiGLU.

    The backward pass gets dy by row, and computes the gradients of x by row and of both weights.
    The work leaves out the router, the sort, and the sums over the rows of a token.

    Attributes:
        tokens: Tokens (T, H).
        index: Token of each row.
        routed: Routing of the tokens.
    """

    shape: MoEShape
    recipes, peer_method = _RECIPES, "experts"

    def __init__(
        self,
        shape: MoEShape,
        tokens: int,
        routing: str,
        passes: str,
        device: torch.device,
        seed: int = 0,
        copy: int = 0,
    ) -> None:
        rows = tokens * shape.top_k
        super().__init__("experts", shape, rows, routing, passes, device, seed, copy)
        # Random logits, from rows that are not tokens.
        logits = self.x[-tokens:, : shape.experts]
        self.routed = grouped.compute_routing(logits.topk(shape.top_k).indices, shape.experts)
        self.offs, self.index = self.routed.offs, self.routed.token
        self.sizes = self.offs.diff(prepend=self.offs.new_zeros(1)).tolist()
        self.tokens = self.x[:tokens].clone()
        self.x = self.tokens.index_select(0, self.index)

    @property
    def case(self) -> dict[str, Any]:
        """Fields of ``Record.case`` on which the work depends."""
        return super().case | {"tokens": len(self.tokens), "scope": "experts"}

    def step(
        self, forward: Callable[[Tensor], Tensor], parameters: Sequence[Sequence[Tensor]]
    ) -> Step:
        """Return the pass of experts, which gathers the rows first."""
        return replace(
            super().step(forward, parameters),
            gather=functools.partial(self.tokens.index_select, 0, self.index),
        )

    def package_step(
        self, recipe: grouped.recipes.Recipe, weights_cached: bool, compiled: bool = False
    ) -> Step:
        """Return the pass of this package's experts.

        Training is that of ``GroupedMLP`` on gathered rows. The kernels of a forward pass alone
        gather rows themselves, as in ``MoE``.
        """
        if self.backward:
            gather = functools.partial(ops.moe_gather, self.tokens, self.index, self.routed.row)
            return replace(super().package_step(recipe, weights_cached), gather=gather)
        copies = [
            quantize_weight(w, recipe, False) if weights_cached else None for w in self.weights
        ]
        up, down = (Layer([w], None, recipe, c) for w, c in zip(self.weights, copies, strict=True))
        options = ExpertsOptions("swiglu", False, False, self.x.dtype)
        return Step(
            lambda x: products(x, self.routed, (up, down), options).y, self.tokens, None, ()
        )


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    """Yield the tasks of mixtures, of mixtures with their models' options, and of experts."""
    small = meter.kind != "gpu" or options.quick

    def task(
        work: Callable[..., LayerWork],
        model: str,
        passes: str,
        tokens: int,
        routing: str,
        scope: str,
    ) -> Task:
        """Return the task of one case."""
        shape = replace(TINY, model=model) if small else MoEShape.from_model(model)

        def contenders(copy: int) -> list[Contender]:
            if meter.kind == "gpu" and not copy:
                torch._dynamo.reset()  # dynamo compiles a function for few shapes
            return list(
                work(shape, tokens, routing, passes, meter.device, options.seed, copy).contenders(
                    meter, options
                )
            )

        case = {**asdict(shape), "tokens": tokens, "routing": routing, "pass": passes}
        return Task("moe", {**case, "scope": scope} if scope else case, contenders)

    scopes = [("", model) for model in (["tiny"] if small else SLICES)]
    scopes += [("model", model) for model in MOE_OPTIONS]
    for scope, model in scopes:
        work = functools.partial(MoEWork, "moe", options=MOE_OPTIONS[model] if scope else None)
        for passes, tokens in itertools.product(PASSES, (40,) if small else _TOKENS):
            has_zipf = small or options.full or tokens == 4096
            for routing in ("random", "zipf") if has_zipf else ("random",):
                yield task(work, model, passes, tokens, routing, scope)
    experts_only = [("tiny", passes, (40,)) for passes in PASSES] if small else EXPERTS_ONLY
    for model, passes, counts in experts_only:
        for tokens in counts:
            yield task(ExpertsWork, model, passes, tokens, "random", "experts")


SUITE = Suite(_tasks, default_meters, has_peers=True)
