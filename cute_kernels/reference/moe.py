"""Routing, gather and combine of a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["combine", "compute_routing", "gather"]


def compute_routing(
    expert_ids: Tensor, offs: Tensor, token: Tensor, pair: Tensor, row: Tensor
) -> None:
    """Sort pairs of a token and an expert by expert, those of one expert in the order of tokens.

    Args:
        expert_ids: (T, k); what is not in [0, E) is no expert.
        offs: (E,) written: the end row of each expert.
        token: (T * k,) written: the token of each row, -1 in the tail.
        pair: (T * k,) written: t * k + j of each row, -1 in the tail.
        row: (T, k) written: the row of each pair, -1 of those without an expert.
    """
    experts, ids = offs.shape[0], expert_ids.flatten().long()
    routed = (ids >= 0) & (ids < experts)
    ids = torch.where(routed, ids, experts)
    order = ids.argsort(stable=True)
    # Not bincount, whose length a compiler would not know.
    counts = ids.new_zeros(experts + 1).scatter_add_(0, ids, torch.ones_like(ids))
    offs.copy_(counts[:-1].cumsum(0))
    in_tail = ~routed[order]
    pair.copy_(order.masked_fill(in_tail, -1))
    token.copy_((order // max(1, expert_ids.shape[1])).masked_fill(in_tail, -1))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    row.copy_(place.masked_fill_(~routed, -1).view_as(row))


def gather(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Write ``x[index[r]]`` to ``out[r]``, zeros where the index is none of a row of ``x``."""
    there = (index >= 0) & (index < x.shape[0])
    if not x.shape[0]:
        out.zero_()
        return
    torch.index_select(x, 0, torch.where(there, index, 0), out=out)
    out.masked_fill_(~there[:, None], 0)


def combine(h: Tensor, row: Tensor, weight: Tensor | None, y: Tensor) -> None:
    """Write the sums over k of ``weight[t, k] * h[row[t, k]]`` to ``y[t]``.

    From 0 on in ascending k, each product and each sum rounded to fp32, one cast at the end. What
    is none of the rows of ``h`` is left out.
    """
    sums = h.new_zeros(y.shape, dtype=torch.float32)
    for k in range(row.shape[1]):
        index = row[:, k]
        term = h.new_empty(y.shape)
        gather(h, index, term)
        term = term.float()
        if weight is not None:
            there = (index >= 0) & (index < h.shape[0])
            term *= torch.where(there, weight[:, k], 0)[:, None]
        sums += term
    y.copy_(sums)
