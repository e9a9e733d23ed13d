"""Mixtures of experts, from tokens to tokens: router, dispatch, experts with SwiGLU, combine."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import grouped

from ..cases import MODELS
from ..contender import Contender, Task
from ..measure import Meter
from .base import Options, Suite, default_meters
from .layer import PASSES, LayerShape, LayerWork, Step, contenders_of, of_expert

#: Models, and of how many ranks one has the experts that are measured: all of DeepSeek-V3's fit on no GPU.
SLICES = {"Qwen3-30B-A3B": 1, "DeepSeek-V3": 8, "gpt-oss-120b": 1, "Mixtral-8x7B": 1}
_TOKENS = (64, 512, 2048, 4096, 32768)
_RECIPES = ("BF16", "FP8Block", "NVFP4RowScaled")
#: Peers round logits to bf16: some tokens go to another expert.
PEER_BOUND = 0.2


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

	@property
	def weight_sizes(self) -> list[tuple[int, ...]]:
		return [(self.shape.experts, self.shape.hidden), *super().weight_sizes]

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

	def ours(self, recipe: grouped.recipes.Recipe) -> tuple[nn.Module, list[Any]]:
		shape = self.shape
		options: dict[str, Any] = {"recipe": recipe, "device": self.device, "dtype": torch.bfloat16}
		sizes = (shape.hidden, shape.intermediate, shape.experts, shape.top_k)
		moe = grouped.nn.MoE(*sizes, router_bias=self.bias is not None, **options)
		if self.bias is not None:
			moe.router.bias = nn.Parameter(self.bias, False)
		return moe, [moe.router, moe.experts.gate_up, moe.experts.down]

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

	def contenders(self, meter: Meter, options: Options) -> Iterator[Contender]:
		return contenders_of(self, meter, options, _RECIPES, lambda peer: peer.mixtures(self))


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
	def contenders(copy: int, which: tuple[MoEShape, int, str, str]) -> list[Contender]:
		return list(MoEWork("moe", *which, meter.device, options.seed, copy).contenders(meter, options))

	small = meter.kind != "gpu" or options.quick
	shapes = [TINY] if small else [MoEShape.of(model) for model in SLICES]
	for shape, passes, tokens in itertools.product(shapes, PASSES, (40,) if small else _TOKENS):
		for routing in ("random", "zipf")[: 2 if small or options.full or tokens == 4096 else 1]:
			case = {**dataclasses.asdict(shape), "tokens": tokens, "routing": routing, "pass": passes}
			yield Task("moe", case, functools.partial(contenders, which=(shape, tokens, routing, passes)))


SUITE = Suite("moe", "mixtures of experts, forward and backward", _tasks, default_meters, True)
