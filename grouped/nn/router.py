"""The router of a mixture of experts: which experts a token goes to, and with what weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cute_kernels import ops
from cute_kernels.ops.derivatives import register_autograd
from cute_kernels.records import check_choice

SCORES = ("softmax", "sigmoid")
#: Added to sums of sigmoids before a division by them, as DeepSeek-V3 does; no softmax shows it.
_TINY = 1e-20


class MoELosses(NamedTuple):
  """What a mixture of experts asks a trainer to look at; none is scaled by a coefficient.

  Attributes:
    balance: E * sum over experts of (share of the routed pairs) * (mean score), scores summing
      to 1: 1 where both are even. Shazeer's and Fedus's loss (arXiv 2101.03961).
    z: mean over the tokens of logsumexp(logits)^2 (arXiv 2202.08906).
    tokens_per_expert: (E,) int32.
  """

  balance: Tensor
  z: Tensor
  tokens_per_expert: Tensor


class Choice(NamedTuple):
  """What a router found for each token.

  Attributes:
    expert_ids: (T, k) int64, the best first; -1 of tokens that are not there.
    weights: (T, k) fp32.
    scores: (T, E) fp32.
    logits: (T, E) fp32.
  """

  expert_ids: Tensor
  weights: Tensor
  scores: Tensor
  logits: Tensor


class Router(nn.Module):
  """Scores the experts for each token and chooses the best.

  Logits have the precision of fp32, and scores are fp32. A token's choice depends on the token
  alone: the first of equal scores wins.

  Attributes:
    weight: (E, H).
    bias: (E,) of the logits, or None.
    selection_bias: (E,) fp32 buffer, added to scores where experts are chosen and nowhere else
      (DeepSeek-V3's ``e_score_correction_bias``), or None.

  The arguments are those of ``grouped.nn.MoE``.
  """

  bias: Tensor | None
  selection_bias: Tensor | None

  def __init__(
    self,
    hidden_size: int,
    num_experts: int,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    bias: bool = False,
    selection_bias: bool = False,
    expert_groups: int = 1,
    top_groups: int = 1,
    scaling_factor: float = 1.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
  ) -> None:
    super().__init__()
    check_choice("score", score, SCORES)
    if not 1 <= top_k <= num_experts:
      raise ValueError(f"top_k must be in [1, num_experts = {num_experts}], got {top_k}")
    if expert_groups < 1 or num_experts % expert_groups:
      raise ValueError(f"expert_groups must divide num_experts = {num_experts}, got {expert_groups}")
    if not 1 <= top_groups <= expert_groups:
      raise ValueError(f"top_groups must be in [1, expert_groups = {expert_groups}], got {top_groups}")
    size = num_experts // expert_groups
    if expert_groups > 1 and (size < 2 or top_k > top_groups * size):
      raise ValueError(
        f"expert_groups of {size} experts must have two or more, and top_groups = {top_groups} of them top_k = {top_k}"
      )
    if not (math.isfinite(scaling_factor) and scaling_factor > 0):
      raise ValueError(f"routed_scaling_factor must be positive, got {scaling_factor}")
    self.num_experts, self.top_k = num_experts, top_k
    self.score, self.renormalize = score, renormalize
    self.expert_groups, self.top_groups = expert_groups, top_groups
    self.scaling_factor = scaling_factor
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, **factory))
    self.register_parameter("bias", nn.Parameter(torch.empty(num_experts, **factory)) if bias else None)
    buffer = torch.zeros(num_experts, dtype=torch.float32, device=device)
    self.register_buffer("selection_bias", buffer if selection_bias else None)
    self.reset_parameters()

  def reset_parameters(self) -> None:
    """Initialize as ``nn.Linear`` does."""
    bound = 1 / math.sqrt(self.weight.shape[1])
    with torch.no_grad():
      for p in (self.weight, self.bias):
        if p is not None:
          p.uniform_(-bound, bound)
      if self.selection_bias is not None:
        self.selection_bias.zero_()

  def _apply(self, fn: Any, recurse: bool = True) -> Router:
    kept = self.selection_bias
    super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
    moved = self.selection_bias
    if kept is not None and moved is not None and moved.dtype != torch.float32:
      self.selection_bias = kept.to(moved.device)
    return self

  def forward(self, x: Tensor, live: Tensor | None = None) -> Choice:
    """Choose the experts of tokens ``x`` (T, H); those that are not ``live`` (T,) get none."""
    logits: Tensor = torch.ops.grouped.router_logits(x, self.weight)
    if self.bias is not None:
      logits = logits + self.bias.float()
    options = (self.top_k, self.score, self.renormalize, self.expert_groups, self.top_groups)
    weights, ids, scores = torch.ops.grouped.router_choice(logits, self.selection_bias, *options, self.scaling_factor)
    if live is not None:
      ids = ids.masked_fill(~live.unsqueeze(1), -1)
    return Choice(ids, weights, scores, logits)

  def losses(self, choice: Choice, offs: Tensor, live: Tensor | None) -> MoELosses:
    """The losses of a choice, whose tokens lie in experts up to ``offs`` (E,)."""
    counts = torch.diff(offs, prepend=offs.new_zeros(1))
    scores, z = choice.scores, choice.logits.logsumexp(-1).square()
    if self.score == "sigmoid":
      scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
    if live is None:
      mean, z = scores.mean(0), z.mean()
    else:
      count = live.sum().clamp_min(1)
      mean = (scores * live.unsqueeze(1)).sum(0) / count
      z = (z * live).sum() / count
    share = counts / counts.sum().clamp_min(1)
    return MoELosses(self.num_experts * (share * mean).sum(), z, counts)

  @torch.no_grad()
  def update_selection_bias(self, tokens_per_expert: Tensor, rate: float = 1e-3) -> None:
    """Balance without a loss, once a step, as DeepSeek-V3 does (arXiv 2408.15664).

    Raises the bias of experts with fewer tokens than the mean by ``rate`` and lowers the
    others'. ``tokens_per_expert`` (E,) are those of the step, over all processes.
    """
    if self.selection_bias is None:
      raise RuntimeError("the router has no selection_bias: make it with selection_bias=True")
    counts = tokens_per_expert.float()
    self.selection_bias += rate * torch.sign(counts.mean() - counts)


# -------------------------------------------------------------------------------------- as ops
#
# So that a compiler, which adds and rounds as it likes, leaves their bits alone.

_LIBRARY = torch.library.Library("grouped", "FRAGMENT")
_LIBRARY.define("router_logits(Tensor x, Tensor weight) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
  "router_choice(Tensor logits, Tensor? selection_bias, int top_k, str score, bool renormalize, "
  "int expert_groups, int top_groups, float factor) -> (Tensor, Tensor, Tensor)",
  tags=(torch.Tag.pt2_compliant_tag,),
)
_HALVES = (torch.bfloat16, torch.float16)
#: N of a product of plain operands is a multiple of it on a GPU.
_MULTIPLE = 8


def _parts(x: Tensor) -> list[Tensor]:
  """Three bf16 numbers that add up to each fp32 number, but for what fp32 does not hold."""
  parts, rest = [], x.float()
  for _ in range(3):
    part = rest.bfloat16()
    parts.append(part)
    rest = rest - part.float()
  return parts


def _logits(x: Tensor, weight: Tensor) -> Tensor:
  experts = weight.shape[0]
  offs = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
  if not (x.dtype == weight.dtype and x.dtype in _HALVES):
    # Products of parts down to 2^-24 of the largest, side by side along K.
    a = [x] if x.dtype == torch.bfloat16 else _parts(x)
    b = [weight] if weight.dtype == torch.bfloat16 else _parts(weight)
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < 3]
    x = torch.cat([a[i] for i, _ in pairs], 1)
    weight = torch.cat([b[j] for _, j in pairs], 1)
  if experts % _MULTIPLE:
    weight = torch.nn.functional.pad(weight, (0, 0, 0, -experts % _MULTIPLE))
  operands = (x, weight.unsqueeze(0), offs, None, None, False, torch.float32)
  logits: Tensor = ops.m_grouped_gemm(*operands)
  return logits[:, :experts].contiguous()


def _logits_fake(x: Tensor, weight: Tensor) -> Tensor:
  return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
  ctx.save_for_backward(*inputs)


def _logits_backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, Tensor | None]:
  x, weight = ctx.saved_tensors
  dx = dweight = None
  if ctx.needs_input_grad[0]:
    dx = (dlogits @ weight.float()).to(x.dtype)
  if ctx.needs_input_grad[1]:
    dweight = (dlogits.T @ x.float()).to(weight.dtype)
  return dx, dweight


_LIBRARY.impl("router_logits", _logits, "CompositeExplicitAutograd")
torch.library.register_fake("grouped::router_logits", _logits_fake, lib=_LIBRARY)
register_autograd("router_logits", _logits_backward, _save, _LIBRARY)


def _order(scores: Tensor) -> Tensor:
  """Columns by falling score, the first of equal ones first."""
  return scores.sort(stable=True, dim=-1, descending=True).indices


def _choice(
  logits: Tensor,
  selection_bias: Tensor | None,
  top_k: int,
  score: str,
  renormalize: bool,
  expert_groups: int,
  top_groups: int,
  factor: float,
) -> tuple[Tensor, Tensor, Tensor]:
  # By way of fp64, so that no bit depends on how many numbers a CPU takes at once.
  is_softmax = score == "softmax"
  scores = logits.softmax(-1) if is_softmax else logits.double().sigmoid().float()
  biased = scores if selection_bias is None else scores + selection_bias
  if expert_groups > 1:
    groups = biased.unflatten(1, (expert_groups, -1))
    of_groups = groups.sort(-1, descending=True).values[..., :2].sum(-1)
    best = _order(of_groups)[:, :top_groups]
    allowed = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, best, True)
    biased = groups.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(1)
  ids = _order(biased)[:, :top_k].contiguous()
  weights = scores.gather(1, ids)
  if renormalize:
    weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
  return weights * factor if factor != 1.0 else weights, ids, scores


def _choice_fake(logits: Tensor, bias: Tensor | None, top_k: int, *_: Any) -> tuple[Tensor, ...]:
  ids = logits.new_empty(logits.shape[0], top_k, dtype=torch.int64)
  return logits.new_empty(ids.shape), ids, torch.empty_like(logits)


def _save_choice(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
  _, ids, scores = output
  ctx.mark_non_differentiable(ids)
  ctx.save_for_backward(ids, scores)
  ctx.score, ctx.renormalize, ctx.factor = inputs[3], inputs[4], inputs[7]


def _choice_backward(ctx: Any, dweights: Tensor, _: Any, dscores: Tensor) -> tuple[Any, ...]:
  ids, scores = ctx.saved_tensors
  of_best = dweights * ctx.factor
  if ctx.renormalize:
    best = scores.gather(1, ids)
    total = best.sum(-1, keepdim=True) + _TINY
    of_best = (of_best - (of_best * best).sum(-1, keepdim=True) / total) / total
  d = dscores + torch.zeros_like(scores).scatter(1, ids, of_best)
  if ctx.score == "softmax":
    d = scores * (d - (d * scores).sum(-1, keepdim=True))
  else:
    d = d * scores * (1 - scores)
  return d, *(None,) * 7


_LIBRARY.impl("router_choice", _choice, "CompositeExplicitAutograd")
torch.library.register_fake("grouped::router_choice", _choice_fake, lib=_LIBRARY)
register_autograd("router_choice", _choice_backward, _save_choice, _LIBRARY)
