"""The mixture-of-experts layer from tokens to tokens: router, dispatch, experts and combine."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

import grouped
from cute_kernels.capability import require
from perf.cases import MODELS
from perf.contender import Task, relative_error
from perf.suites.base import Options, Suite, default_meters
from perf.suites.layer import PASSES, LayerShape, LayerWork, Step

if TYPE_CHECKING:
  from collections.abc import Callable, Iterator, Sequence

  from perf.contender import Contender
  from perf.measure import Meter

#: Models, and whether a rank's share of the experts is measured: all of DeepSeek-V3's fit on no GPU.
_MODELS = {"Qwen3-30B-A3B": 1, "DeepSeek-V3": 8, "gpt-oss-120b": 1, "Mixtral-8x7B": 1}
_TOKENS = (64, 512, 4096, 32768)
_RECIPES = ("BF16", "FP8Block", "NVFP4RowScaled")
ROUTINGS = ("even", "zipf")
#: As for ``perf.suites.layer``; a token near a tie goes elsewhere where logits are rounded.
_BOUND, _BF16_BOUND = 0.4, 0.1


class MoEWork(LayerWork):
  """Tokens, and the weights of a router and of experts with SwiGLU, in bf16.

  ``bias`` (E,) of the logits is 0, or such that experts are chosen as by Zipf's law.
  """

  def __init__(
    self, shape: LayerShape, top_k: int, tokens: int, routing: str, passes: str, device: torch.device, seed: int = 0
  ) -> None:
    self.shape, self.top_k, self.device = shape, top_k, device
    self.backward = passes == PASSES[1]
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
      x = torch.empty(sizes, dtype=torch.bfloat16, device=device)
      return x.normal_(generator=generator).mul_(scale)

    experts, hidden, wide = shape.experts, shape.hidden, shape.intermediate
    self.x, self.router = draw(tokens, hidden), draw(experts, hidden, scale=hidden**-0.5)
    ranks = torch.arange(1, experts + 1, device=device)
    self.bias = -1.2 * ranks.log().to(torch.bfloat16) * (routing == "zipf")
    self.weights = [draw(experts, 2 * wide, hidden, scale=hidden**-0.5), draw(experts, hidden, wide, scale=wide**-0.5)]
    self.dy = draw(tokens, hidden) if self.backward else None

  @property
  def parameters(self) -> list[Tensor]:
    """Router and experts, to be trained or not."""
    return [w.detach().clone().requires_grad_(self.backward) for w in (self.router, *self.weights)]

  @property
  def flops(self) -> float:
    elements = sum(w[0].numel() for w in self.weights)
    return 2.0 * self.x.shape[0] * self.top_k * elements * (3 if self.backward else 1)

  @property
  def bytes(self) -> float:
    values = 2 * self.x.numel() + self.router.numel() + sum(w.numel() for w in self.weights)
    return 2.0 * values * (2 if self.backward else 1)

  def choose(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and ids (T, k) as one writes it in PyTorch."""
    scores = (F.linear(x, router).float() + self.bias.float()).softmax(-1)
    weights, ids = scores.topk(self.top_k)
    return weights / weights.sum(-1, keepdim=True), ids

  def error(self, results: Sequence[Tensor]) -> float:
    """Of the output, against plain PyTorch."""
    return relative_error(results[0], self.expected[0])

  @functools.cached_property
  def expected(self) -> list[Tensor]:
    """The output, expert by expert."""
    with torch.no_grad():
      weights, ids = self.choose(self.x, self.router)
      y = torch.zeros_like(self.x, dtype=torch.float32)
      for expert, (up, down) in enumerate(zip(*self.weights, strict=True)):
        token, k = (ids == expert).nonzero(as_tuple=True)
        gate, value = (self.x[token] @ up.T).float().chunk(2, dim=-1)
        h = (F.silu(gate) * value).to(up.dtype) @ down.T
        y.index_add_(0, token, h.float() * weights[token, k].unsqueeze(1))
      return [y]


def plain_moe(work: MoEWork, experts: Callable[[Tensor, Tensor, Tensor, list[Tensor]], Tensor]) -> Step:
  """The layer of a function of rows sorted by expert, offs, the token of each row, and weights."""
  router, *weights = parameters = work.parameters

  def forward(x: Tensor) -> Tensor:
    p, ids = work.choose(x, router)
    order = ids.flatten().argsort(stable=True)
    counts = torch.zeros(len(router), dtype=torch.int32, device=x.device)
    offs = counts.scatter_add_(0, ids.flatten(), torch.ones_like(order, dtype=torch.int32)).cumsum(0).int()
    h = experts(x, offs, order // work.top_k, weights)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return (h[back].view(*ids.shape, -1).float() * p.unsqueeze(-1)).sum(1).to(x.dtype)

  return work.step(forward, [[p] for p in parameters])


def _ours(work: MoEWork, recipe: grouped.recipes.Recipe, kept: bool, meter: Meter) -> Step:
  """``grouped.nn.MoE``; ``kept``: its weights were quantized in an earlier pass."""
  for role in ("input", "weight", "grad_output"):
    fmt = getattr(recipe, role)
    if fmt is not None:
      require("grouped_gemm", fmt, meter.arch, columnwise=work.backward)
  shape = work.shape
  sizes = (shape.hidden, shape.intermediate, shape.experts, work.top_k)
  moe: Any = grouped.nn.MoE(*sizes, recipe=recipe, router_bias=True, device=work.device, dtype=torch.bfloat16)
  parameters = [moe.router.weight, moe.experts.gate_up.weight, moe.experts.down.weight]
  with torch.no_grad():
    for p, weight in zip((*parameters, moe.router.bias), (work.router, *work.weights, work.bias), strict=True):
      p.copy_(weight)
  call: dict[str, bool] = {}
  if recipe.is_quantized and (kept or not work.backward):
    moe(work.x.detach().clone().requires_grad_(work.backward), is_first_microbatch=True)
    call["is_first_microbatch"] = False
  return work.step(lambda x: moe(x, **call), [[p] for p in parameters])


def _contenders(work: MoEWork, meter: Meter, options: Options) -> Iterator[Contender]:
  for name in _RECIPES:
    recipe = getattr(grouped.recipes, name)()
    bound = _BOUND if recipe.is_quantized else _BF16_BOUND
    for kept in (False, True) if recipe.is_quantized and work.backward else (False,):
      make = functools.partial(_ours, work, recipe, kept, meter)
      yield work.contender(f"ours{', weight kept' * kept}", name, make, bound)
  yield from options.competing(meter, lambda peer: peer.mixtures(work))


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
  def contenders(copy: int, which: tuple[LayerShape, int, int, str, str]) -> list[Contender]:
    return list(_contenders(MoEWork(*which, meter.device, options.seed + 1000 * copy), meter, options))

  small = meter.kind != "gpu" or options.quick
  names = {"tiny": 1} if small else _MODELS
  for name, passes in itertools.product(names, PASSES):
    shape, top_k = LayerShape("tiny", 8, 128, 64), 2
    if not small:
      model = MODELS[name]
      shape = LayerShape(name, model.experts // names[name], model.hidden, model.intermediate)
      top_k = model.top_k
    for tokens, routing in itertools.product((40,) if small else _TOKENS, ROUTINGS):
      if routing == "zipf" and not (options.full or small or tokens == _TOKENS[2]):
        continue
      which = (shape, top_k, tokens, routing, passes)
      case = {**dataclasses.asdict(shape), "top_k": top_k, "tokens": tokens, "routing": routing, "pass": passes}
      yield Task("moe", case, functools.partial(contenders, which=which))


SUITE = Suite("moe", "mixtures of experts from tokens to tokens, forward and backward", _tasks, default_meters, True)
