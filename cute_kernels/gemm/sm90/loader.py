"""How both operands, and their block scales, get into shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Int16, Int32, cute
from cutlass.cute.nvgpu import cpasync

from cute_kernels.layout.shapes import SF_TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.loader import TmaSource

__all__ = ["StageLoad"]


class StageLoad(NamedTuple):
    """How one tensor gets into shared memory.

    Attributes:
        source: where it comes from, (rows, K, G); of block scales see ``fp4.views``.
        shared: its stages, (rows, K, STAGE), or of scale tiles (row tiles, K tiles, words, STAGE).
        tiler: its extents in one stage, without the last.
        k_divisor: elements of K for one of its own along K.
        first_row: where this CTA's rows begin in the cluster's tile.
        cta: number of this CTA among those that share the rows.
        sharers: how many share them; each loads a part for all.
        is_scale: it holds block scales, whose rows are slots.
    """

    source: TmaSource
    shared: cute.Tensor
    tiler: tuple[int, ...]
    k_divisor: int
    first_row: Int32
    cta: Int32
    sharers: int
    is_scale: bool

    @property
    def mcast_mask(self) -> Int16 | None:
        """Who receives what this CTA loads; None without a cluster."""
        return Int16((1 << self.sharers) - 1) if self.sharers > 1 else None

    @cute.jit
    def copies(self, row: Int32, k_start: Int32, group: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """Source tiles along K from ``k_start`` on, and stages to put them in."""
        k_start = k_start // self.k_divisor
        row += self.first_row
        modes = len(self.tiler)
        if cutlass.const_expr(modes == 3):
            at = (row // SF_TILE_ROWS, k_start, Int32(0), group)
            rest = (0, None, 0, 0)
        else:
            at, rest = (row, k_start, group), (0, None, 0)
        origin = cute.domain_offset(at, self.source.tensor)
        tiles = cute.local_tile(origin, self.tiler, rest)
        to_shared, from_global = cpasync.tma_partition(
            self.source.atom,
            self.cta,
            cute.make_layout(self.sharers),
            cute.group_modes(self.shared, 0, modes),
            cute.group_modes(tiles, 0, modes),
        )
        return from_global, to_shared
