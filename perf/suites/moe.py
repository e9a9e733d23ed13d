"""Mixtures of experts, from tokens to tokens: router, dispatch, experts with SwiGLU, combine; and the experts alone."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import grouped
from cute_kernels import ops
from grouped.experts import Layer, Style, products
from grouped.passes import quantize_weight

from ..cases import MODELS
from ..contender import Contender, Task
from ..measure import Meter
from .base import Options, Suite, default_meters
from .layer import PASSES, LayerShape, LayerWork, Step, of_expert

#: Models, and of how many ranks one has the experts that are measured: all of DeepSeek-V3's fit on no GPU.
SLICES = {"Qwen3-30B-A3B": 1, "DeepSeek-V3": 8, "gpt-oss-120b": 1, "Mixtral-8x7B": 1}
_TOKENS = (64, 512, 2048, 4096, 32768)
_RECIPES = ("BF16", "FP8Block", "NVFP4RowScaled")
#: Peers round logits to bf16: some tokens go to another expert.
PEER_BOUND = 0.2
#: Of what the experts alone are measured, model, pass and tokens, and goals in us, in BF16 and FP8Block.
ALONE = {
	("Qwen3-30B-A3B", PASSES[0], 64): ("270", "- / 200"),
	("Qwen3-30B-A3B", PASSES[0], 4096): ("720", "- / 520"),
	("Qwen3-30B-A3B", PASSES[0], 32768): ("3750", "- / 2500"),
	("Qwen3-30B-A3B", PASSES[1], 4096): ("1800", "1900 / 1400"),
	("Qwen3-30B-A3B", PASSES[1], 32768): ("11200", "8000 / 7500"),
	("DeepSeek-V3", PASSES[0], 4096): ("4600", "- / 2900"),
	("DeepSeek-V3", PASSES[1], 512): ("2800", "3000 / 1900"),
	("DeepSeek-V3", PASSES[1], 2048): ("7300", "5900 / 4700"),
}


@dataclasses.dataclass(frozen=True)
class MoEShape(LayerShape):
	"""Experts, of which each token goes to ``top_k``."""

	top_k: int

	@classmethod
	def of(cls, model: str) -> "MoEShape":
		found = MODELS[model]
		return cls(model, found.experts // SLICES[model], found.hidden, found.intermediate, found.top_k)


TINY = MoEShape("tiny", 8, 128, 64, 2)


class MoEWork(LayerWork):
	"""Tokens, and the weights of a router (E, H) and of experts."""

	shape: MoEShape
	arguments = ()
	recipes, offered = _RECIPES, "mixtures"

	@property
	def weight_sizes(self) -> dict[str, tuple[int, ...]]:
		experts = {f"experts.{name}": size for name, size in super().weight_sizes.items()}
		return {"router.weight": (self.shape.experts, self.shape.hidden), **experts}

	@functools.cached_property
	def bias(self) -> Tensor | None:
		"""(E,) by which experts are chosen about as ``sizes`` says; None if each is as likely."""
		sizes = torch.tensor(self.sizes, device=self.device)
		return sizes.clamp_min(0.5).log().bfloat16() if self.routing == "zipf" else None

	@property
	def flops(self) -> float:
		router, *experts = (w[0].numel() for w in self.weights)
		elements = router * self.shape.experts + self.shape.top_k * sum(experts)
		return 2.0 * self.rows * elements * (3 if self.backward else 1)

	def ours(self, recipe: grouped.recipes.Recipe) -> nn.Module:
		shape = self.shape
		options: dict[str, Any] = {"recipe": recipe, "device": self.device, "dtype": torch.bfloat16}
		sizes = (shape.hidden, shape.intermediate, shape.experts, shape.top_k)
		moe = grouped.nn.MoE(*sizes, router_bias=self.bias is not None, **options)
		if self.bias is not None:
			moe.router.bias = nn.Parameter(self.bias, False)
		return moe

	def choose(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
		"""Weights and ids (T, k) as one writes it in PyTorch."""
		logits = F.linear(x, router).float()
		p, ids = (logits if self.bias is None else logits + self.bias).softmax(-1).topk(self.shape.top_k)
		return p / p.sum(-1, keepdim=True), ids

	def exact(self, x: Tensor, *weights: Tensor) -> Tensor:
		router, *experts = weights
		p, ids = self.choose(x, router)
		y = torch.zeros_like(x)
		for expert, weight in enumerate(zip(*(w.unbind() for w in experts), strict=True)):
			token, k = (ids == expert).nonzero(as_tuple=True)
			y = y.index_add(0, token, of_expert(x[token], *weight) * p[token, k].unsqueeze(1))
		return y

	def plain(self, experts: Callable[..., Tensor], leaves: Sequence[nn.Parameter] = ()) -> Step:
		"""The layer with PyTorch's router; ``experts(x, p, ids, gate_up, down)`` does the rest."""
		leaves = leaves or self.leaves()
		router, *weights = leaves
		return self.step(lambda x: experts(x, *self.choose(x, router), *weights), [[p] for p in leaves])


def compiled(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
	"""By PyTorch's compiler for each shape, where there is a GPU."""
	return torch.compile(function, dynamic=False) if device.type == "cuda" else function


class ExpertsWork(LayerWork):
	"""Experts by a given routing: x is gathered, dy and dx are by row; no router, no sort, no sums by token."""

	shape: MoEShape
	recipes, offered = _RECIPES, "experts"

	def __init__(self, shape: MoEShape, tokens: int, routing: str, passes: str, device: torch.device, *lots: int) -> None:
		super().__init__("experts", shape, tokens * shape.top_k, routing, passes, device, *lots)
		# By rows that are no token.
		ids = self.x[-tokens:, : shape.experts].topk(shape.top_k).indices
		self.routed = grouped.compute_routing(ids, shape.experts)
		self.offs, self.index = self.routed.offs, self.routed.token
		self.sizes = self.offs.diff(prepend=self.offs.new_zeros(1)).tolist()
		self.tokens = self.x[:tokens].clone()
		self.x = self.tokens.index_select(0, self.index)

	def step(self, forward: Callable[[Tensor], Tensor], parameters: Sequence[Sequence[Tensor]]) -> Step:
		gather = functools.partial(self.tokens.index_select, 0, self.index)
		return dataclasses.replace(super().step(forward, parameters), gather=gather)

	def own(self, recipe: grouped.recipes.Recipe, kept: bool, compiled: bool = False) -> Step:
		"""Training is that of ``GroupedMLP``, of gathered rows; else its kernels gather, as those of ``MoE`` do."""
		if self.backward:
			gather = functools.partial(ops.moe_gather, self.tokens, self.index, self.routed.row)
			return dataclasses.replace(super().own(recipe, kept), gather=gather)
		copies = [quantize_weight(w, recipe, False) if kept else None for w in self.weights]
		up, down = (Layer([w], None, recipe, c) for w, c in zip(self.weights, copies, strict=True))
		style = Style("swiglu", False, False, self.x.dtype)
		return Step(lambda x: products(x, self.routed, (up, down), style)[0], self.tokens, None, ())


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
	small = meter.kind != "gpu" or options.quick

	def task(work: Callable[..., LayerWork], model: str, passes: str, tokens: int, routing: str, **scope: str) -> Task:
		shape = dataclasses.replace(TINY, model=model) if small else MoEShape.of(model)

		def contenders(copy: int) -> list[Contender]:
			if meter.kind == "gpu" and not copy:
				torch._dynamo.reset()  # It compiles a function for few shapes.
			made = work(shape, tokens, routing, passes, meter.device, options.seed, copy)
			return list(made.contenders(meter, options))

		case = {**dataclasses.asdict(shape), "tokens": tokens, "routing": routing, "pass": passes, **scope}
		return Task("moe", case, contenders)

	for model in ("tiny",) if small else SLICES:
		for passes, tokens in itertools.product(PASSES, (40,) if small else _TOKENS):
			for routing in ("random", "zipf")[: 2 if small or options.full or tokens == 4096 else 1]:
				yield task(functools.partial(MoEWork, "moe"), model, passes, tokens, routing)
	for model, passes, tokens in [("tiny", passes, 40) for passes in PASSES] if small else ALONE:
		yield task(ExpertsWork, model, passes, tokens, "random", scope="experts")


SUITE = Suite("moe", "mixtures of experts, forward and backward", _tasks, default_meters, True)
