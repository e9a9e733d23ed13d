"""The gather warps: rows of tokens into the stages by an index, 16 bytes a lane at a time.

A stage has some rows of some bytes each, in panels of 128 bytes that are swizzled as TMA does. In
an m_grouped product the rows are those of the tile, the same in all its stages, and a stage has
their next bytes along K. In a k_grouped product a stage has the next rows along K.

Rows past the group's last are zeros, and those whose index is none of the rows there are. Nothing
is read there.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute, pipeline, range_constexpr

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.memory import copy_async, load_global_if
from cute_kernels.device.ptx import select

from ..common.scheduler import TileReader, WorkTile
from .config import Sm90GemmConfig
from .storage import Stages

#: Bytes that a lane copies at once, and of a row of a panel.
_COPY_BYTES, _PANEL_BYTES = 16, 128
#: Rows that a warp copies at once, a panel wide.
_COPY_ROWS = WARP_SIZE * _COPY_BYTES // _PANEL_BYTES


class Gathered(NamedTuple):
    """(rows, width) of any pitch of whole 16 bytes, and (T,) int32, which row each row of the
    product is.
    """

    matrix: cute.Tensor
    index: cute.Tensor


class GatherWarp:
    """One of the gather warps, which take rows by turns."""

    def __init__(
        self,
        config: Sm90GemmConfig,
        gathered: Gathered,
        stages: Stages,
        tiles: TileReader,
        ab_pipeline: Any,
        warp: Int32,
    ):
        self.config = config
        self.matrix, self.index = gathered
        self.tiles = tiles
        self.ab_pipeline = ab_pipeline
        self.along_k = config.grouping == "k_grouped"
        self.rows, self.row_bytes = config.tile.n, config.stage_k * config.kind.bits // 8
        if self.along_k:
            self.rows, self.row_bytes = config.stage_k, config.tile.n * config.kind.bits // 8
        self.step = _COPY_ROWS * config.gather_warps
        lane = cute.arch.lane_idx()
        self.lane = lane
        #: Rows of a stage: the first of this lane's copies, and the first that it reads the index
        #: of.
        self.own_row = warp * _COPY_ROWS + lane // 8
        self.own_byte = lane % 8 * _COPY_BYTES
        self.listed_row = warp * _COPY_ROWS + lane // _COPY_ROWS * self.step + lane % _COPY_ROWS
        self.count = self.rows // self.step
        #: After which copies the rows of an instruction of some width end.
        widths = (self.rows,) if self.along_k else config.widths
        self.ends = [width // self.step for width in widths]
        at = self.own_row * _PANEL_BYTES + (self.own_byte ^ (self.own_row % 8 * _COPY_BYTES))
        self.shared = stages.n.iterator.toint() + at

    @cute.jit
    def run(self) -> None:
        tile_state = self.tiles.new_state()
        state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.ab_pipeline.num_stages
        )
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            state = self.fill(tile, state)
            tile, tile_state = self.tiles.next(tile_state)

    @cute.jit
    def fill(self, tile: WorkTile, state: Any) -> Any:
        config = self.config
        first, left, column = tile.n_row, tile.rows, Int32(0)
        if const_expr(self.along_k):
            first, column = tile.k_start, tile.n_row
        width = self.matrix.element_type.width // 8
        end = self.matrix.shape[1] * width
        ids = cute.make_rmem_tensor(-(-self.count // 8), Int32)
        vectors = cute.make_rmem_tensor(self.count, Int32)
        self.list_rows(ids, first, left)
        if const_expr(not self.along_k):
            self.find_rows(vectors, ids, left)
        for k_tile in cutlass.range(tile.k_tiles(config), unroll=1):
            if const_expr(self.along_k):
                # The next ones are on their way while these are copied.
                self.find_rows(vectors, ids, left)
                first, left = first + self.rows, left - self.rows
                self.list_rows(ids, first, left)
            self.ab_pipeline.sync_object_empty.wait(state.index, state.phase)
            at = column * width if const_expr(self.along_k) else k_tile * self.row_bytes
            self.copy_rows(vectors, at, end, state.index, left)
            cute.arch.cp_async_mbarrier_arrive_noinc(self.ab_pipeline.producer_get_barrier(state))
            state.advance()
        return state

    @cute.jit
    def list_rows(self, ids: cute.Tensor, first: Int32, left: Int32) -> None:
        """Read to ``ids`` which rows are copied: of every 32 of this warp each lane reads one.

        A stage's rows are in the index from ``first`` on, where ``left`` are left of the group.
        """
        for i in range_constexpr(cute.size(ids)):
            local = self.listed_row + i * (8 * self.step)
            address = self.index.iterator.toint() + Int64(first + local) * 4
            ids[i] = Int32(load_global_if(address, 4, local, cutlass.min(left, self.rows))[0])

    @cute.jit
    def find_rows(self, vectors: cute.Tensor, ids: cute.Tensor, left: Int32) -> None:
        """Where the rows of this lane's copies begin, in vectors of 16 bytes; -1 of rows of zeros."""
        pitch = Int32(
            Int64(self.matrix.stride[0]) * (self.matrix.element_type.width // 8) // _COPY_BYTES
        )
        for i in range_constexpr(self.count):
            row = cute.arch.shuffle_sync(ids[i // 8], i % 8 * _COPY_ROWS + self.lane // 8)
            is_there = (
                (row >= 0) & (row < self.matrix.shape[0]) & (self.own_row + i * self.step < left)
            )
            vectors[i] = Int32(select(is_there, Uint32(row * pitch), Uint32(0xFFFFFFFF)))

    @cute.jit
    def copy_rows(
        self, vectors: cute.Tensor, at: Int32, end: Int32, stage: Int32, left: Int32
    ) -> None:
        """Copy this warp's rows of a stage, from byte ``at`` of rows of ``end`` bytes on: those
        that are multiplied.
        """
        base = self.matrix.iterator.toint() + Int64(at + self.own_byte)
        shared = self.shared + stage * (self.rows * self.row_bytes)
        for panel in range_constexpr(self.row_bytes // _PANEL_BYTES):
            byte = panel * _PANEL_BYTES
            is_inside = at + byte + self.own_byte < end
            place = shared + panel * self.rows * _PANEL_BYTES
            for first, last in zip((0, *self.ends[:-1]), self.ends, strict=True):
                if const_expr(first == 0):
                    self.copy_some(range(last), vectors, base + byte, place, is_inside)
                else:
                    if left > first * self.step:
                        self.copy_some(range(first, last), vectors, base + byte, place, is_inside)

    def copy_some(
        self, copies: range, vectors: cute.Tensor, base: Int64, shared: Int32, is_inside: Any
    ) -> None:
        # All of them first: what is copied holds on to its address for a while.
        sources = [base + Int64(vectors[i]) * _COPY_BYTES for i in copies]
        for i, source in zip(copies, sources, strict=True):
            copy_async(shared + i * self.step * _PANEL_BYTES, source, (vectors[i] >= 0) & is_inside)
