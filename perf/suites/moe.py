"""Mixtures of experts, from tokens to tokens: router, dispatch, experts with SwiGLU, combine."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import grouped
from perf.cases import MODELS
from perf.contender import Contender, Task
from perf.measure import Meter

from .base import Options, Suite, default_meters
from .layer import PASSES, SEED_STEP, LayerShape, LayerWork, Step, drawing, of_expert

#: Models, and of how many ranks one has the experts that are measured: all of DeepSeek-V3's fit on no GPU.
SLICES = {"Qwen3-30B-A3B": 1, "DeepSeek-V3": 8, "gpt-oss-120b": 1, "Mixtral-8x7B": 1}
_TOKENS = (64, 512, 2048, 4096, 32768)
_RECIPES = ("BF16", "FP8Block", "NVFP4RowScaled")
ROUTINGS = ("random", "zipf")
#: As those of a layer; peers round logits to bf16, so that some tokens go to another expert.
_BOUND, _BF16_BOUND, PEER_BOUND = 0.4, 0.02, 0.1


class MoEWork(LayerWork):
	"""Tokens, and the weights of a router (E, H) and of experts with SwiGLU, in bf16.

	Logits are normal; by Zipf's law a ``bias`` (E,) is added, so that some experts get many tokens.
	"""

	def __init__(
		self,
		shape: LayerShape,
		top_k: int,
		tokens: int,
		routing: str,
		passes: str,
		device: torch.device,
		seed: int = 0,
		copy: int = 0,
	) -> None:
		self.layer, self.shape, self.rows = "moe", shape, tokens
		self.top_k, self.device, self.backward = top_k, device, passes == PASSES[1]
		draw = drawing(device, seed + SEED_STEP * copy)
		experts, hidden, wide = shape.experts, shape.hidden, shape.intermediate
		self.x = draw(tokens, hidden)
		self.weights = [
			draw(experts, hidden, scale=hidden**-0.5),
			draw(experts, 2 * wide, hidden, scale=hidden**-0.5),
			draw(experts, hidden, wide, scale=wide**-0.5),
		]
		self.bias = None
		if routing == "zipf":
			ranks = draw(experts).argsort() + 1
			self.bias = -1.2 * ranks.log().bfloat16()
		self.dy = draw(tokens, hidden) if self.backward else None

	@property
	def flops(self) -> float:
		router, *experts = (w[0].numel() for w in self.weights)
		elements = router * self.shape.experts + self.top_k * sum(experts)
		return 2.0 * self.rows * elements * (3 if self.backward else 1)

	def parameters(self) -> list[nn.Parameter]:
		"""The weights, to be trained or not, where they are."""
		return [nn.Parameter(w, self.backward) for w in self.weights]

	def choose(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
		"""Weights and ids (T, k) as one writes it in PyTorch."""
		logits = F.linear(x, router).float()
		p, ids = (logits if self.bias is None else logits + self.bias).softmax(-1).topk(self.top_k)
		return p / p.sum(-1, keepdim=True), ids

	def exact(self, x: Tensor, *weights: Tensor) -> Tensor:
		router, *experts = weights
		p, ids = self.choose(x, router)
		y = torch.zeros_like(x)
		for expert, weight in enumerate(zip(*(w.unbind() for w in experts), strict=True)):
			token, k = (ids == expert).nonzero(as_tuple=True)
			y = y.index_add(0, token, of_expert(x[token], *weight) * p[token, k].unsqueeze(1))
		return y


def plain_moe(work: MoEWork, experts: Callable[..., Tensor]) -> Step:
	"""The layer with a router and a sort in PyTorch; ``experts(x, p, ids, *weights)`` does the rest."""
	router, *weights = parameters = work.parameters()

	def forward(x: Tensor) -> Tensor:
		return experts(x, *work.choose(x, router), *weights)

	return work.step(forward, [[p] for p in parameters])


def _ours(work: MoEWork, recipe: grouped.recipes.Recipe, kept: bool) -> Step:
	"""``grouped.nn.MoE``; ``kept``: its weights were quantized in an earlier pass."""
	shape = work.shape
	sizes = (shape.hidden, shape.intermediate, shape.experts, work.top_k)
	options: dict[str, Any] = {"recipe": recipe, "device": "meta", "dtype": torch.bfloat16}
	moe: Any = grouped.nn.MoE(*sizes, router_bias=work.bias is not None, **options)
	parameters = work.parameters()
	moe.router.weight, moe.experts.gate_up.weight, moe.experts.down.weight = parameters
	if work.bias is not None:
		moe.router.bias = nn.Parameter(work.bias, False)
	call: dict[str, bool] = {}
	if kept:
		with torch.set_grad_enabled(work.backward):
			moe(work.x.detach().clone().requires_grad_(work.backward), is_first_microbatch=True)
		call["is_first_microbatch"] = False
	return work.step(lambda x: moe(x, **call), [[p] for p in parameters])


def contenders_of(work: MoEWork, meter: Meter, options: Options) -> Iterator[Contender]:
	"""Who does this pass."""
	for name in _RECIPES:
		recipe = getattr(grouped.recipes, name)()
		bound = _BOUND if recipe.is_quantized else _BF16_BOUND
		for kept in (False, True) if recipe.is_quantized else (False,):
			make = functools.partial(_ours, work, recipe, kept)
			yield work.contender(f"ours{', weight kept' * kept}", name, make, bound)
	yield from options.competing(meter, lambda peer: peer.mixtures(work))


def shape_of(model: str) -> tuple[LayerShape, int]:
	"""The experts of a model that are measured, and how many a token goes to."""
	found = MODELS[model]
	sizes = (found.experts // SLICES[model], found.hidden, found.intermediate)
	return LayerShape(model, *sizes), found.top_k


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
	def contenders(copy: int, which: tuple[LayerShape, int, int, str, str]) -> list[Contender]:
		return list(contenders_of(MoEWork(*which, meter.device, options.seed, copy), meter, options))

	small = meter.kind != "gpu" or options.quick
	shapes = [(LayerShape("tiny", 8, 128, 64), 2)] if small else [shape_of(model) for model in SLICES]
	for (shape, top_k), passes, tokens in itertools.product(shapes, PASSES, (40,) if small else _TOKENS):
		for routing in ROUTINGS if small or options.full or tokens == 4096 else ROUTINGS[:1]:
			case = {**dataclasses.asdict(shape), "top_k": top_k, "tokens": tokens, "routing": routing, "pass": passes}
			which = (shape, top_k, tokens, routing, passes)
			yield Task("moe", case, functools.partial(contenders, which=which))


SUITE = Suite("moe", "mixtures of experts, forward and backward", _tasks, default_meters, True)
