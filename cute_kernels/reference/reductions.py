"""Reductions per row and per group, and offsets from counts."""

import torch
from torch import Tensor

from ..layout.slots import TILE_ROWS
from .absmax import absmax
from .copies import slices
from .elements import Elements
from .groups import Groups


def group_amax(per_row: Tensor, groups: Groups) -> Tensor:
    """Return (G,) fp32 maxima of the row maxima (T,), or 0 for an empty group."""
    out = per_row.new_zeros(len(groups) + 1)  # the last takes the tail
    return out.scatter_reduce_(0, groups.group_of_row(), per_row, "amax")[:-1]


def grouped_amax(x: Tensor, groups: Groups, out: Tensor) -> None:
    """Write max |x| of each group to ``out`` (G,) fp32. Empty groups get 0."""
    out.copy_(group_amax(absmax(x).flatten(), groups))


def grouped_dbias(elements: Elements, groups: Groups, out: Tensor) -> None:
    """Write the column sums of each group to ``out`` (G, N) fp32; zeros for an empty group.

    The order is fixed. Within each tile of 128 rows of a group (missing rows count as zero), row i
    is added to row i + 64, then i + 32, and so on. The tiles are added in ascending order.
    """
    _, group, rows = groups.used_tiles()
    out.zero_()
    for tiles in slices(len(group), TILE_ROWS * elements.cols):
        row = rows[tiles]
        sums = elements.take(row.clamp_min(0)).masked_fill_((row < 0).unsqueeze(-1), 0.0)
        while sums.shape[1] > 1:
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
        for i, g in enumerate(group[tiles].tolist()):
            out[g] += sums[i, 0]


def compute_offsets(splits: Tensor, multiplier: int, out: Tensor) -> None:
    """Write the end offset of each group: the inclusive sum of ``splits`` times ``multiplier``.

    Offsets that the dtype of ``out`` cannot represent saturate.
    """
    sums, bounds = splits.long().cumsum(0), torch.iinfo(out.dtype)
    limit = bounds.max // multiplier
    out.copy_((sums * multiplier).masked_fill_(sums > limit, bounds.max))
    out.masked_fill_(sums < -limit, bounds.min)
