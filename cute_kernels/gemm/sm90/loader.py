"""How both operands, and their block scales, get into shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Float32, Int16, Int32, cute
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.memory import store_shared
from cute_kernels.device.ptx import f32_as_bits
from cute_kernels.gemm.loader import LoadWarp
from cute_kernels.gemm.sm90.config import SQUARE_WORDS
from cute_kernels.layout.shapes import SF_TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.loader import TmaSource
    from cute_kernels.gemm.scheduler import WorkTile
    from cute_kernels.gemm.sm90.config import Sm90GemmConfig

__all__ = ["Sm90LoadWarp", "SquareLoad", "StageLoad"]


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


class SquareLoad:
    """How scales of squares get into a stage: the load warp reads those of 32 stages at once.

    Args:
        config: the kernel's configuration.
        squares: the scales, (blocks along rows, blocks along K, groups).
        shared: their stages, (``SQUARE_WORDS``, STAGE).
        first_row: where this CTA's rows begin in the cluster's tile.
    """

    def __init__(
        self, config: Sm90GemmConfig, squares: cute.Tensor, shared: cute.Tensor, first_row: Int32
    ):
        self.config = config
        self.squares = squares
        self.address = shared.iterator.toint()
        self.first_row = first_row
        self.of_m = config.m_kind.has_squares
        #: Whether all groups' rows, or K, are one: only a uniform operand has squares of a group.
        self.is_one = config.grouping == "k_grouped" or self.of_m != config.tile.swap_ab
        #: Row, block along K and group of the tile's first; and each lane's scales.
        self.place = cute.make_rmem_tensor(3, Int32)
        self.values = cute.make_rmem_tensor(config.num_squares, Float32)

    def begin(self, tile: WorkTile) -> None:
        """Begin a tile."""
        row = tile.m_sf_row + self.first_row if self.of_m else tile.n_sf_row
        group = Int32(0) if self.is_one else cutlass.min(tile.group, self.squares.shape[2] - 1)
        for i, x in enumerate((row, tile.k_start // self.config.stage_k, group)):
            self.place[i] = x

    @cute.jit
    def put(self, k_tile: Int32, stage: Int32, barrier: cute.Pointer) -> None:
        """Fill the ``k_tile``-th stage of a tile, and arrive."""
        lane = k_tile % WARP_SIZE
        squares, place, values = self.squares, self.place, self.values
        if lane == 0:
            # Tiles may reach past the last row, end rows that break the rules anywhere, and the
            # tail is a group after the last.
            block = place[1] + k_tile + cute.arch.lane_idx()
            block = cutlass.min(block, squares.shape[1] - 1)
            for i in cutlass.range_constexpr(self.config.num_squares):
                row = place[0] + i * self.config.square_step
                at = cutlass.min(row // self.config.kind.sf_vec_size, squares.shape[0] - 1)
                values[i] = squares[at, block, place[2]]
        scales = [cute.arch.shuffle_sync(values[i], lane) for i in range(cute.size(values))]
        with cute.arch.elect_one():
            for i, scale in enumerate(scales):
                at = self.address + stage * (SQUARE_WORDS * 4) + i * 4
                store_shared(at, [f32_as_bits(scale)])
            cute.arch.mbarrier_arrive(barrier)


class Sm90LoadWarp(LoadWarp):
    """The load warp of sm_90a.

    Args:
        squares: how scales of squares get into stages; None without.
    """

    def __init__(self, *args: Any, squares: SquareLoad | None):
        super().__init__(*args)
        self.squares = squares

    def fill(self, tile: WorkTile, ab_state: Any) -> Any:
        if self.squares is not None:
            self.squares.begin(tile)
        return self.load(tile, ab_state)

    def copy_stage(self, copies: Any, k_tile: Int32, ab_state: Any) -> None:
        super().copy_stage(copies, k_tile, ab_state)
        if self.squares is not None:
            barrier = self.ab_pipeline.producer_get_barrier(ab_state)
            self.squares.put(k_tile, ab_state.index, barrier)
