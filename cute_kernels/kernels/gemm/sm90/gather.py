"""The gather warps: rows of tokens into the stages by an index, 16 bytes per lane at a time.

A stage has some rows of some bytes each, in panels of 128 bytes with TMA's swizzle. In an m_grouped
product the rows are those of the tile, the same in all its stages, and a stage has their next bytes
along K. In a k_grouped product a stage has the next rows along K.

Rows past the group's last are zeros, and so are rows whose index is out of range. Nothing is read
for them.
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
    """Rows that are gathered.

    Attributes:
        matrix: (rows, width) of any pitch that is a multiple of 16 bytes.
        index: (T,) int32, the row of the matrix for each row of the product.
    """

    matrix: cute.Tensor
    index: cute.Tensor


class GatherWarp:
    """One of the gather warps, which share the rows of a stage."""

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
        #: Rows of a stage: the row of this lane's first copy, and the row whose index it reads.
        self.copied_row = warp * _COPY_ROWS + lane // 8
        self.copied_byte = lane % 8 * _COPY_BYTES
        self.listed_row = warp * _COPY_ROWS + lane // _COPY_ROWS * self.step + lane % _COPY_ROWS
        self.count = self.rows // self.step
        #: Number of copies for the rows of an instruction of each width.
        widths = (self.rows,) if self.along_k else config.widths
        self.ends = [width // self.step for width in widths]
        offset = self.copied_row * _PANEL_BYTES + (
            self.copied_byte ^ (self.copied_row % 8 * _COPY_BYTES)
        )
        self.shared = stages.n.iterator.toint() + offset

    @cute.jit
    def run(self) -> None:
        """Fill the stages of all tiles of this CTA."""
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
        """Fill the stages of one tile and return the next state."""
        config = self.config
        first_row, rows_left, column = tile.n_row, tile.rows, Int32(0)
        if const_expr(self.along_k):
            first_row, column = tile.k_start, tile.n_row
        width = self.matrix.element_type.width // 8
        end = self.matrix.shape[1] * width
        ids = cute.make_rmem_tensor(-(-self.count // 8), Int32)
        vectors = cute.make_rmem_tensor(self.count, Int32)
        self.list_rows(ids, first_row, rows_left)
        if const_expr(not self.along_k):
            self.find_rows(vectors, ids, rows_left)
        for k_tile in cutlass.range(tile.k_tiles(config), unroll=1):
            if const_expr(self.along_k):
                # The next row numbers are loaded while these rows are copied.
                self.find_rows(vectors, ids, rows_left)
                first_row, rows_left = first_row + self.rows, rows_left - self.rows
                self.list_rows(ids, first_row, rows_left)
            self.ab_pipeline.sync_object_empty.wait(state.index, state.phase)
            column_byte = column * width if const_expr(self.along_k) else k_tile * self.row_bytes
            self.copy_rows(vectors, column_byte, end, state.index, rows_left)
            cute.arch.cp_async_mbarrier_arrive_noinc(self.ab_pipeline.producer_get_barrier(state))
            state.advance()
        return state

    @cute.jit
    def list_rows(self, ids: cute.Tensor, first_row: Int32, rows_left: Int32) -> None:
        """Read row numbers to ``ids``: each lane reads one of every 32 of this warp.

        A stage's rows begin at ``first_row`` in the index, and ``rows_left`` rows are left in the
        group.
        """
        for i in range_constexpr(cute.size(ids)):
            local = self.listed_row + i * (8 * self.step)
            address = self.index.iterator.toint() + Int64(first_row + local) * 4
            ids[i] = Int32(load_global_if(address, 4, local, cutlass.min(rows_left, self.rows))[0])

    @cute.jit
    def find_rows(self, vectors: cute.Tensor, ids: cute.Tensor, rows_left: Int32) -> None:
        """Compute where this lane's rows begin, in vectors of 16 bytes; -1 for zeros."""
        pitch = Int32(
            Int64(self.matrix.stride[0]) * (self.matrix.element_type.width // 8) // _COPY_BYTES
        )
        for i in range_constexpr(self.count):
            row = cute.arch.shuffle_sync(ids[i // 8], i % 8 * _COPY_ROWS + self.lane // 8)
            is_there = (
                (row >= 0)
                & (row < self.matrix.shape[0])
                & (self.copied_row + i * self.step < rows_left)
            )
            vectors[i] = Int32(select(is_there, Uint32(row * pitch), Uint32(0xFFFFFFFF)))

    @cute.jit
    def copy_rows(
        self, vectors: cute.Tensor, column_byte: Int32, end: Int32, stage: Int32, rows_left: Int32
    ) -> None:
        """Copy this warp's rows of a stage that are multiplied.

        The copies begin at byte ``column_byte`` of rows of ``end`` bytes.
        """
        base = self.matrix.iterator.toint() + Int64(column_byte + self.copied_byte)
        shared = self.shared + stage * (self.rows * self.row_bytes)
        for panel in range_constexpr(self.row_bytes // _PANEL_BYTES):
            byte = panel * _PANEL_BYTES
            is_inside = column_byte + byte + self.copied_byte < end
            panel_address = shared + panel * self.rows * _PANEL_BYTES
            for first_copy, end_copy in zip((0, *self.ends[:-1]), self.ends, strict=True):
                if const_expr(first_copy == 0):
                    self.copy_some(range(end_copy), vectors, base + byte, panel_address, is_inside)
                else:
                    if rows_left > first_copy * self.step:
                        self.copy_some(
                            range(first_copy, end_copy),
                            vectors,
                            base + byte,
                            panel_address,
                            is_inside,
                        )

    def copy_some(
        self, copies: range, vectors: cute.Tensor, base: Int64, shared: Int32, is_inside: Any
    ) -> None:
        # All addresses first: a copy keeps the register of its address for a while.
        """Copy the vectors of some rows."""
        sources = [base + Int64(vectors[i]) * _COPY_BYTES for i in copies]
        for i, source in zip(copies, sources, strict=True):
            copy_async(shared + i * self.step * _PANEL_BYTES, source, (vectors[i] >= 0) & is_inside)
