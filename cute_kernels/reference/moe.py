"""Routing, gather and combine of a mixture of experts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats.activations import Activation
from ..layout.slots import TILE_ROWS
from .activations import activate as activate_elements
from .activations import activate_gradient as gradient_of_elements


def compute_routing(
    expert_ids: Tensor,
    expert_map: Tensor | None,
    offs: Tensor,
    token: Tensor,
    pair: Tensor,
    row: Tensor,
) -> None:
    """Sort pairs of a token and an expert by expert, pairs of one expert in the order of tokens.

    Args:
        expert_ids: (T, k). Ids outside [0, E) mean no expert.
        expert_map: (N,). Expert of each id; ids outside [0, N) mean no expert. Or None.
        offs: (E,) written: end row of each expert.
        token: (T * k,) written: token of each row, -1 in the tail.
        pair: (T * k,) written: t * k + j of each row, -1 in the tail.
        row: (T, k) written: row of each pair, -1 for pairs without an expert.
    """
    experts, ids = offs.shape[0], expert_ids.flatten().long()
    if expert_map is not None:
        ids = _map_ids(ids, expert_map)
    routed = (ids >= 0) & (ids < experts)
    ids = torch.where(routed, ids, experts)
    order = ids.argsort(stable=True)
    # Not bincount, whose length a compiler would not know.
    counts = ids.new_zeros(experts + 1).scatter_add_(0, ids, torch.ones_like(ids))
    offs.copy_(counts[:-1].cumsum(0))
    in_tail = ~routed[order]
    pair.copy_(order.masked_fill(in_tail, -1))
    token.copy_((order // max(1, expert_ids.shape[1])).masked_fill(in_tail, -1))
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    row.copy_(position.masked_fill_(~routed, -1).view_as(row))


def _map_ids(ids: Tensor, expert_map: Tensor) -> Tensor:
    """Return ``expert_map[ids]`` as int64, -1 for ids outside of the map."""
    # One more entry, to which all other ids go; so an empty map can be read, too.
    padded = torch.cat([expert_map.long(), ids.new_full((1,), -1)])
    is_mapped = (ids >= 0) & (ids < len(expert_map))
    return padded[torch.where(is_mapped, ids, len(expert_map))]


def gather(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Write ``x[index[r]]`` to ``out[r]``, or zeros if there is no such row of ``x``."""
    there = (index >= 0) & (index < x.shape[0])
    if not x.shape[0]:
        out.zero_()
        return
    torch.index_select(x, 0, torch.where(there, index, 0), out=out)
    out.masked_fill_(~there[:, None], 0)


def combine(h: Tensor, row: Tensor, weight: Tensor | None, y: Tensor) -> None:
    """Write the sums over k of ``weight[t, k] * h[row[t, k]]`` to ``y[t]``.

    The sum starts from 0 in ascending k. Each product and each sum is rounded to fp32, with one
    cast at the end. Indices of no row of ``h`` are skipped.
    """
    sums = h.new_zeros(y.shape, dtype=torch.float32)
    for k in range(row.shape[1]):
        index = row[:, k]
        term = h.new_empty(y.shape)
        gather(h, index, term)
        term = term.float()
        if weight is not None:
            term *= torch.where((index >= 0) & (index < h.shape[0]), weight[:, k], 0)[:, None]
        sums += term
    y.copy_(sums)


def _halves(x: Tensor, interleaved: bool) -> Tensor:
    """Return [A | B] of columns that alternate."""
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2) if interleaved else x


def _live(x: Tensor, offs: Tensor | None) -> slice:
    """Return the slice of rows that belong to a group."""
    return slice(0, len(x) if offs is None else min(len(x), max(0, int(offs[-1]))))


def activate(
    x: Tensor, act: Activation, offs: Tensor | None, interleaved: bool, out: Tensor
) -> None:
    """Write ``act`` of the rows of ``x`` to ``out``, rounded once from fp32."""
    live = _live(x, offs)
    out[live] = activate_elements(_halves(x[live].float(), interleaved), act).to(out.dtype)


def activate_gradient(
    x: Tensor,
    grad: Tensor,
    act: Activation,
    offs: Tensor | None,
    interleaved: bool,
    weight: Tensor | None,
    pair: Tensor | None,
    outputs: Sequence[Tensor],
) -> None:
    """Write the gradient with respect to ``x`` and, with weights, the results that depend on them.

    Let a be ``act(x)`` rounded to the dtype of ``x``, and p the weight of the row, all in fp32:

      outputs[0] = the gradient of act at x, given fl(p * grad)
      outputs[1] = fl(p * a)
      outputs[2] = sum of fl(grad * a)

    The sum has tiles of 128 columns, added from 0 on in ascending order. In tile i, lane l of 16
    adds columns 128 i + 8 l + j in ascending j from 0 on. The lanes are added as a tree, l and
    l + 8 first.
    """
    live = _live(x, offs)
    numbers, g = _halves(x[live].float(), interleaved), grad[live].float()
    p = None
    if weight is not None and pair is not None:
        _, scaled, dweight = outputs
        index = pair[live].long()
        is_valid = (index >= 0) & (index < weight.numel())
        p = torch.where(is_valid, weight.flatten()[torch.where(is_valid, index, 0)], 0).unsqueeze(1)
        a = activate_elements(numbers, act).to(x.dtype).float()
        scaled[live] = (p * a).to(x.dtype)
        sums = tile_sum(g * a)
        dweight.view(-1)[index[is_valid]] = sums[is_valid]
        g = p * g
    gradient = outputs[0]
    dx = gradient_of_elements(numbers, g, act)
    if interleaved:
        dx = dx.unflatten(-1, (2, -1)).mT.flatten(-2)
    gradient[live] = dx.to(x.dtype)


def tile_sum(terms: Tensor) -> Tensor:
    """Return the sum of each row, in the order of ``activate_gradient``."""
    tiles = torch.nn.functional.pad(terms, (0, -terms.shape[1] % TILE_ROWS)).unflatten(
        1, (-1, 16, 8)
    )
    lanes, sums = torch.zeros_like(tiles[..., 0]), terms.new_zeros(len(terms))
    for j in range(8):
        lanes += tiles[..., j]
    for tile_total in _tree(lanes).unbind(1):
        sums += tile_total
    return sums


def warp_sum(terms: Tensor) -> Tensor:
    """Return row sums in the order of a warp whose lane l adds numbers l, l + 32, ..."""
    strips = torch.nn.functional.pad(terms, (0, -terms.shape[1] % 32)).unflatten(1, (-1, 32))
    lanes = terms.new_zeros(len(terms), 32)
    for i in range(strips.shape[1]):
        lanes += strips[:, i]
    return _tree(lanes)


def _tree(lanes: Tensor) -> Tensor:
    """Return the sum of the last dimension, halves added until one number is left."""
    while lanes.shape[-1] > 1:
        a, b = lanes.chunk(2, -1)
        lanes = a + b
    return lanes[..., 0]
