"""Choice of the experts of each token, and their weights, exact to the bit.

All numbers are fp32, and every step is one IEEE operation. Let l be the logits of a token and b the
selection bias:

  softmax   m = max(l), e_j = exp(l_j - m), s_j = e_j / sum(e)
  sigmoid   s_j = 1 / (1 + exp(-l_j))
  chosen    the largest of s_j + b_j, the first of equal ones first; NaN is above all. With groups
            of experts, only experts of the groups whose two largest have the largest sums
  weights   w_k = s of the chosen experts; if renormalized, divided by (w_0 + w_1 + ...) + 1e-20;
            times factor

with exp of ``reference.activations``. Sums over experts have the order of a warp: lane i adds j =
i, i + 32, ... in order from 0 on; lanes are added as a tree, i and i + 16 first. Sums over k go in
order.

The gradient, given the gradients of the weights (d_k) and of the scores (D_j, or 0):

  d_k = factor * d_k; if renormalized, with S the divisor, (d_k - (sum of d_k * w_k) / S) / S
  D_j = D_j + d_k of the chosen experts
  softmax   s_j * (D_j - sum of D_j * s_j)
  sigmoid   (D_j * s_j) * (1 - s_j)
"""

import torch
from torch import Tensor

from ..formats import UnsupportedError
from .activations import exp, sigmoid
from .moe import warp_sum

#: Added to sums of weights before a division by them, as DeepSeek-V3 does.
TINY = 1e-20


def _order(scores: Tensor) -> Tensor:
    """Return the order of descending scores."""
    return scores.sort(stable=True, dim=-1, descending=True).indices


def _in_turn(terms: Tensor) -> Tensor:
    """Return (T, 1) sums over k, in order."""
    total = terms.new_zeros(len(terms), 1)
    for k in range(terms.shape[1]):
        total += terms[:, k : k + 1]
    return total


def route(
    logits: Tensor,
    bias: Tensor | None,
    end: Tensor | None,
    options: tuple[int, str, bool, int, int, float],
    outputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write weights (T, k), ids (T, k) and scores (T, E). Ids from token ``end`` on are -1."""
    top_k, score, renormalize, groups, top_groups, factor = options
    weights, ids, scores = outputs
    if score == "softmax":
        e = exp(logits - logits.amax(-1, keepdim=True))
        scores.copy_(e / warp_sum(e).unsqueeze(1))
    elif score == "sigmoid":
        scores.copy_(sigmoid(logits))
    else:
        raise UnsupportedError(f"no formula of the score {score!r}")
    biased = scores if bias is None else scores + bias
    order = _order(biased)
    if groups > 1:
        two = biased.unflatten(1, (groups, -1)).sort(-1, descending=True).values[..., :2]
        best = _order(two[..., 0] + two[..., 1])[:, :top_groups]
        allowed = torch.zeros(len(best), groups, dtype=torch.uint8, device=best.device).scatter_(
            1, best, 1
        )
        order = order.gather(
            1, _order(allowed.repeat_interleave(logits.shape[1] // groups, 1).gather(1, order))
        )
    chosen = order[:, :top_k]
    w = scores.gather(1, chosen)
    if renormalize:
        w = w / (_in_turn(w) + TINY)
    weights.copy_(w * factor)
    if end is not None:
        chosen = chosen.masked_fill(torch.arange(len(w), device=w.device).unsqueeze(1) >= end, -1)
    ids.copy_(chosen)


def gradient(
    d: Tensor, dscores: Tensor | None, ids: Tensor, scores: Tensor, options: tuple[str, bool, float]
) -> Tensor:
    """Return the gradient of the logits, (T, E) fp32."""
    score, renormalize, factor = options
    is_chosen = ids >= 0
    index = ids.clamp_min(0)
    d = d * factor
    if renormalize:
        w = torch.where(is_chosen, scores.gather(1, index), 0)
        total = _in_turn(w) + TINY
        d = (d - _in_turn(d * w) / total) / total
    # Pairs without an expert add to a column that is dropped.
    into = torch.nn.functional.pad(torch.zeros_like(scores) if dscores is None else dscores, (0, 1))
    into = into.scatter_add(1, torch.where(is_chosen, index, scores.shape[1]), d)[:, :-1]
    if score == "softmax":
        return scores * (into - warp_sum(into * scores).unsqueeze(1))
    if score == "sigmoid":
        return (into * scores) * (1 - scores)
    raise UnsupportedError(f"no formula of the score {score!r}")


def bf16_parts(x: Tensor) -> list[Tensor]:
    """Split fp32 into three bf16 numbers with the same sum, except for underflow of fp32."""
    terms, remainder = [], x.float()
    for _ in range(3):
        term = remainder.bfloat16()
        terms.append(term)
        remainder = remainder - term.float()
    return terms
