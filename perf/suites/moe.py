"""Mixtures of experts, from tokens to tokens: router, dispatch, experts with SwiGLU, combine; and
the experts alone.
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

from ..cases import MODELS, OWN
from ..contender import Contender, Task
from ..measure import Meter
from .base import Options, Suite, default_meters
from .layer import PASSES, LayerShape, LayerWork, Step

#: Models, and of how many ranks one has the experts that are measured: all of DeepSeek-V3's fit on
#: no GPU.
SLICES = {"Qwen3-30B-A3B": 1, "DeepSeek-V3": 8, "gpt-oss-120b": 1, "Mixtral-8x7B": 1}
_TOKENS = (64, 512, 2048, 4096, 32768)
_RECIPES = ("BF16", "FP8Block", "MXFP8", "NVFP4RowScaled")
#: Peers round logits to bf16: some tokens go to another expert.
PEER_BOUND = 0.2
#: Of sigmoid scores, beside logits.
_SPREAD = 0.2
#: Of what the experts alone are measured, and in tokens.
ALONE = (
    ("Qwen3-30B-A3B", PASSES[0], (64, 4096, 32768)),
    ("Qwen3-30B-A3B", PASSES[1], (4096, 32768)),
    ("DeepSeek-V3", PASSES[0], (4096,)),
    ("DeepSeek-V3", PASSES[1], (512, 2048)),
)


@dataclass(frozen=True)
class MoEShape(LayerShape):
    """Experts, of which each token goes to ``top_k``."""

    top_k: int

    @classmethod
    def of(cls, model: str) -> "MoEShape":
        found = MODELS[model]
        return cls(
            model, found.experts // SLICES[model], found.hidden, found.intermediate, found.top_k
        )


TINY = MoEShape("tiny", 16, 128, 64, 2)


def clamped_swiglu(z: Tensor) -> Tensor:
    """That of gpt-oss: gate and value alternate."""
    gate, value = z[..., ::2].float().clamp(max=7.0), z[..., 1::2].float().clamp(-7.0, 7.0)
    return (gate * (1.702 * gate).sigmoid() * (value + 1)).to(z.dtype)


class MoEWork(LayerWork):
    """Tokens, and the weights of a router (E, H) and of experts.

    ``own`` are options of ``OWN``, with which there are more.
    """

    shape: MoEShape
    arguments = ()
    recipes, offered = _RECIPES, "mixtures"

    def __init__(self, *which: Any, own: Mapping[str, Any] | None = None) -> None:
        self.options = own or {}
        super().__init__(*which)
        if "activation" in self.options:
            self.activate = clamped_swiglu
        if "router_bias" in self.options and self.bias is not None:
            self.weights[3] = self.bias

    @property
    def weight_sizes(self) -> dict[str, tuple[int, ...]]:
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
        if wide := self.options.get("shared_intermediate_size"):
            sizes |= {
                "shared.gate_up.weight": (1, 2 * wide, hidden),
                "shared.down.weight": (1, hidden, wide),
            }
        return sizes

    def parts(self, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        """Those of the router, of the experts and of the shared expert, biases last."""
        named = list(zip(self.weight_sizes, weights, strict=True))
        return [
            [w for name, w in named if name.startswith(part)]
            for part in ("router", "experts", "shared")
        ]

    @property
    def case(self) -> dict[str, Any]:
        return super().case | {"tokens": self.rows}

    @functools.cached_property
    def bias(self) -> Tensor | None:
        """(E,) by which experts are chosen about as ``sizes`` says; None if each is as likely."""
        sizes = torch.tensor(self.sizes, device=self.device)
        return sizes.clamp_min(0.5).log().bfloat16() if self.routing == "zipf" else None

    def ours(self, recipe: grouped.recipes.Recipe) -> nn.Module:
        shape, is_biased = self.shape, not self.options and self.bias is not None
        options: dict[str, Any] = {"recipe": recipe, "device": self.device, "dtype": torch.bfloat16}
        sizes = (shape.hidden, shape.intermediate, shape.experts, shape.top_k)
        moe = grouped.nn.MoE(*sizes, **{"router_bias": is_biased, **options, **self.options})
        if is_biased and self.bias is not None:
            moe.router.bias = nn.Parameter(self.bias, False)
        if moe.router.selection_bias is not None and self.bias is not None:
            moe.router.selection_bias.copy_(self.bias).mul_(_SPREAD)
        return moe

    def choose(
        self, x: Tensor, router: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weights and ids (T, k) as one writes it in PyTorch."""
        logits, own, k = F.linear(x, router).float(), self.options, self.shape.top_k
        if own.get("score") != "sigmoid":
            bias = self.bias if bias is None else bias
            p, ids = (logits if bias is None else logits + bias).softmax(-1).topk(k)
            return p / p.sum(-1, keepdim=True), ids
        scores = logits.sigmoid()
        biased = (
            scores.detach() if self.bias is None else scores.detach() + _SPREAD * self.bias.float()
        )
        groups = biased.unflatten(1, (own["expert_groups"], -1))
        best = groups.topk(2).values.sum(-1).topk(own["top_groups"]).indices
        others = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        ids = groups.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(1).topk(k).indices
        p = scores.gather(1, ids)
        return own["routed_scaling_factor"] * p / p.sum(-1, keepdim=True), ids

    def exact(self, x: Tensor, *weights: Tensor) -> Tensor:
        router, experts, shared = self.parts(weights)
        p, ids = self.choose(x, *router)
        y = torch.zeros_like(x) if not shared else self.of_expert(x, *(w[0] for w in shared))
        for expert, weight in enumerate(zip(*(w.unbind() for w in experts), strict=True)):
            token, k = (ids == expert).nonzero(as_tuple=True)
            y = y.index_add(0, token, self.of_expert(x[token], *weight) * p[token, k].unsqueeze(1))
        return y

    def plain(self, experts: Callable[..., Tensor], leaves: Sequence[nn.Parameter] = ()) -> Step:
        """The layer with PyTorch's router and shared expert.

        ``experts(x, p, ids, up, down)``, and of biased ones also their biases, does the rest.
        """
        leaves = leaves or self.leaves()
        router, weights, shared = self.parts(leaves)
        activate = compiled(self.activate, self.device)

        def forward(x: Tensor) -> Tensor:
            y = experts(x, *self.choose(x, *router), *weights)
            if not shared:
                return y
            up, down = (w.squeeze(0) for w in shared)
            return y + F.linear(activate(F.linear(x, up)), down)

        return self.step(forward, [[p] for p in leaves])


def compiled(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """By PyTorch's compiler for each shape, where there is a GPU."""
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


class ExpertsWork(LayerWork):
    """Experts by a given routing, from tokens to rows: gather of x, both products, SwiGLU.

    Of the backward pass, dy is given by row, and in it are the gradients of x by row and of both
    weights. No router, no sort, no sum of a token's rows or of their gradients.
    """

    shape: MoEShape
    recipes, offered = _RECIPES, "experts"

    def __init__(
        self,
        shape: MoEShape,
        tokens: int,
        routing: str,
        passes: str,
        device: torch.device,
        *lots: int,
    ) -> None:
        super().__init__("experts", shape, tokens * shape.top_k, routing, passes, device, *lots)
        lot = self.x[-tokens:, : shape.experts]  # of rows that are no token
        self.routed = grouped.compute_routing(lot.topk(shape.top_k).indices, shape.experts)
        self.offs, self.index = self.routed.offs, self.routed.token
        self.sizes = self.offs.diff(prepend=self.offs.new_zeros(1)).tolist()
        self.tokens = self.x[:tokens].clone()
        self.x = self.tokens.index_select(0, self.index)

    @property
    def case(self) -> dict[str, Any]:
        return super().case | {"tokens": len(self.tokens), "scope": "experts"}

    def step(
        self, forward: Callable[[Tensor], Tensor], parameters: Sequence[Sequence[Tensor]]
    ) -> Step:
        return replace(
            super().step(forward, parameters),
            gather=functools.partial(self.tokens.index_select, 0, self.index),
        )

    def own(self, recipe: grouped.recipes.Recipe, kept: bool, compiled: bool = False) -> Step:
        """Training is that of ``GroupedMLP``, of gathered rows; else its kernels gather, as those
        of ``MoE`` do.
        """
        if self.backward:
            gather = functools.partial(ops.moe_gather, self.tokens, self.index, self.routed.row)
            return replace(super().own(recipe, kept), gather=gather)
        copies = [quantize_weight(w, recipe, False) if kept else None for w in self.weights]
        up, down = (Layer([w], None, recipe, c) for w, c in zip(self.weights, copies, strict=True))
        options = ExpertsOptions("swiglu", False, False, self.x.dtype)
        return Step(
            lambda x: products(x, self.routed, (up, down), options).y, self.tokens, None, ()
        )


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    small = meter.kind != "gpu" or options.quick

    def task(
        work: Callable[..., LayerWork],
        model: str,
        passes: str,
        tokens: int,
        routing: str,
        scope: str,
    ) -> Task:
        shape = replace(TINY, model=model) if small else MoEShape.of(model)

        def contenders(copy: int) -> list[Contender]:
            if meter.kind == "gpu" and not copy:
                torch._dynamo.reset()  # It compiles a function for few shapes.
            return list(
                work(shape, tokens, routing, passes, meter.device, options.seed, copy).contenders(
                    meter, options
                )
            )

        case = {**asdict(shape), "tokens": tokens, "routing": routing, "pass": passes}
        return Task("moe", {**case, "scope": scope} if scope else case, contenders)

    for scope, model in [
        *(("", model) for model in (["tiny"] if small else SLICES)),
        *(("model", model) for model in OWN),
    ]:
        work = functools.partial(MoEWork, "moe", own=OWN[model] if scope else None)
        for passes, tokens in itertools.product(PASSES, (40,) if small else _TOKENS):
            for routing in ("random", "zipf")[
                : 2 if small or options.full or tokens == 4096 else 1
            ]:
                yield task(work, model, passes, tokens, routing, scope)
    for model, passes, counts in [("tiny", passes, (40,)) for passes in PASSES] if small else ALONE:
        for tokens in counts:
            yield task(ExpertsWork, model, passes, tokens, "random", "experts")


SUITE = Suite(_tasks, default_meters, True)
