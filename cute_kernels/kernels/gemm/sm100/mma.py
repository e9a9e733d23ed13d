"""The MMA warp: it copies block scales into tensor memory and issues MMA instructions."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, const_expr, cute, pipeline, range_constexpr

from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_COLS, SF_TILE_ROWS

from ..common.scheduler import TileReader, WorkTile
from . import umma
from .config import K_BLOCKS, TMEM_LANES, Sm100GemmConfig
from .storage import Stages

#: Columns of tensor memory of one tile of block scales.
_TILE_COLUMNS = SF_TILE_ROWS // TMEM_LANES


class _StartedTile(NamedTuple):
    """Values that all stages of a tile share: descriptors of the operands in the first stage.

    Attributes:
        acc: Accumulator in tensor memory.
        m: Descriptor of operand M.
        n: Descriptor of operand N.
        instruction: Descriptor of the instruction.
        blocks: Units from one K block to the next, for operands M and N.
        scales: Block scales in tensor memory, if there are any.
    """

    acc: Int32
    m: Int64
    n: Int64
    instruction: Int32
    blocks: tuple[Int64 | int, Int64 | int]
    scales: tuple[Int32, ...]


class _StagedScales(NamedTuple):
    """The block scales of one operand, in shared memory and in tensor memory.

    Attributes:
        descriptor: Descriptor of the first stage in shared memory.
        column: First column in tensor memory.
        tiles: Number of scale tiles along M or N.
        k_tiles: Number of scale tiles along K of one stage.
    """

    descriptor: Int64
    column: int
    tiles: int
    k_tiles: int

    def copy(self, tmem: Int32, stage: Int32, num_ctas: int) -> None:
        """Copy the block scales of a stage into tensor memory."""
        count, column = self.tiles * self.k_tiles, tmem + self.column
        first_tile = self.descriptor + Int64(stage) * (count * SF_TILE_BYTES // umma.UNIT)
        for index in range(count):
            # In shared memory K runs fastest; in tensor memory the tiles of all rows lie side by
            # side for each step along K.
            target = index % self.k_tiles * self.tiles + index // self.k_tiles
            umma.copy_scales(
                column + target * _TILE_COLUMNS,
                first_tile + index * (SF_TILE_BYTES // umma.UNIT),
                num_ctas,
            )


class StageMma:
    """Instructions that multiply a stage."""

    def __init__(self, config: Sm100GemmConfig, shared: Stages, tmem: cute.Pointer):
        self.config = config
        stages = (shared.m, shared.n)
        self.m, self.n = map(
            umma.ElementStages.describe, config.multiplied, stages, config.mn_major
        )
        self.tmem = Int32(tmem.toint())
        #: Columns from the first accumulator in tensor memory to the second. Block scales follow
        #: both.
        self.acc_stride = config.tile.n - config.acc_overlap
        scale_column = self.acc_stride + config.tile.n
        columns = (scale_column, scale_column + config.sf_columns[0])
        self.scales: tuple[_StagedScales, ...] = ()
        if config.mma_kind.is_block_scaled:
            self.scales = tuple(
                _StagedScales(
                    umma.scale_descriptor(x.iterator), column, tiles, config.k_scale_tiles
                )
                for x, column, tiles in zip(
                    (shared.m_scales, shared.n_scales), columns, config.scale_tiles, strict=True
                )
            )

    @cute.jit
    def start(self, tile: WorkTile, acc_index: Int32) -> _StartedTile:
        """Return the descriptors of a tile that goes into accumulator ``acc_index``."""
        config = self.config
        m, n = self.m.start, self.n.start
        blocks = self.m.block, self.n.block
        cols = Int32(config.tile.n)
        if const_expr(config.tile.swap_ab):
            cols = config.instruction_n(cutlass.min(tile.rows, config.tile.n))
        instruction = umma.instruction_descriptor((self.m, self.n), config.tile.m, cols)
        if const_expr(config.tile.swap_partial):
            fitted_n = config.instruction_n(tile.rows)
            swapped = umma.instruction_descriptor((self.n, self.m), config.tile.m, fitted_n)
            m_first, n_first = self.m.start, self.n.start
            if tile.rows < config.tile.rows:
                m, n, instruction = n_first, m_first, swapped
            if const_expr(self.m.block != self.n.block):
                # Another choice of values is more than CuTe DSL 4.8 compiles.
                more = Int64(tile.rows < config.tile.rows) * (self.n.block - self.m.block)
                blocks = self.m.block + more, self.n.block - more
        scales = tuple(self.tmem + x.column for x in self.scales)
        if const_expr(config.mma_kind.is_block_scaled and config.tile.n < SF_TILE_ROWS):
            # A scale tile has four columns of 32 rows each.
            scales = (scales[0], scales[1] + ((tile.n_sf_row & (SF_TILE_ROWS - 1)) >> 5))
        acc = self.tmem + acc_index * self.acc_stride
        return _StartedTile(acc, m, n, instruction, blocks, scales)

    @cute.jit
    def multiply(self, tile: _StartedTile, stage: Int32, k_tile: Int32, blocks_left: Int32) -> None:
        """Add the product of stage ``k_tile`` of a tile, which has ``blocks_left`` K blocks left.

        The first stage overwrites the accumulator.
        """
        # If partial tiles are swapped, stages of both operands have one size.
        m = tile.m + Int64(stage) * self.m.stage
        n = tile.n + Int64(stage) * self.n.stage
        with cute.arch.elect_one():
            for scales in self.scales:
                scales.copy(self.tmem, stage, self.config.tile.num_ctas)
            for k_block in range_constexpr(K_BLOCKS):
                self.issue(tile, m, n, k_block, k_tile, blocks_left)

    def issue(
        self,
        tile: _StartedTile,
        m: Int64,
        n: Int64,
        k_block: int,
        k_tile: Int32,
        blocks_left: Int32,
    ) -> None:
        """Issue the instruction of one K block."""
        instruction, scales = tile.instruction, ()
        if self.scales:
            per_tile = self.config.mma_kind.k_blocks_of_scale_tile
            k_scale_tile, number = divmod(k_block, per_tile)
            instruction += umma.scale_id(number * SF_TILE_COLS // per_tile) if number else 0
            scales = tuple(
                column + k_scale_tile * x.tiles * _TILE_COLUMNS
                for column, x in zip(tile.scales, self.scales, strict=True)
            )
        # The first instruction of a tile overwrites. Instructions past the tile's last do nothing.
        flags = {"more_than": (blocks_left, k_block)} if k_block else {"accumulate": k_tile}
        umma.multiply(
            self.config.mma_kind,
            tile.acc,
            tuple(x + k_block * step for x, step in zip((m, n), tile.blocks, strict=True)),
            instruction,
            scales,
            self.config.tile.num_ctas,
            **flags,
        )


class MmaWarp:
    """The MMA warp. In a pair of CTAs only the warp of the leading CTA issues instructions."""

    def __init__(
        self,
        mma: StageMma,
        is_leader: Boolean,
        tiles: TileReader,
        ab_pipeline: pipeline.PipelineTmaUmma,
        acc_pipeline: pipeline.PipelineUmmaAsync,
    ):
        self.mma = mma
        self.is_leader = is_leader
        self.tiles = tiles
        self.ab_pipeline = ab_pipeline
        self.acc_pipeline = acc_pipeline

    @cute.jit
    def run(self) -> None:
        """Multiply all tiles of this CTA."""
        tile_state = self.tiles.new_state()
        ab_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.ab_pipeline.num_stages
        )
        acc_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.acc_pipeline.num_stages
        )
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            if const_expr(self.mma.config.promotes):
                if tile.k_blocks > 0 and self.is_leader:
                    ab_state, acc_state = self.multiply_promoted(tile, ab_state, acc_state)
            elif tile.k_blocks > 0 and self.is_leader:
                self.acc_pipeline.producer_acquire(acc_state)
                # Overlapping accumulators have one barrier and take turns with its phase.
                acc_index = acc_state.index
                if const_expr(self.acc_pipeline.num_stages == 1):
                    acc_index = acc_state.phase ^ 1
                started = self.mma.start(tile, acc_index)
                for k_tile in cutlass.range(self.k_tiles(tile), unroll=1):
                    ab_state = self.multiply(started, tile, ab_state, k_tile, k_tile)
                self.acc_pipeline.producer_commit(acc_state)
                acc_state.advance()
            tile, tile_state = self.tiles.next(tile_state)
        self.acc_pipeline.producer_tail(acc_state)

    @cute.jit
    def multiply_promoted(self, tile: WorkTile, ab_state: Any, acc_state: Any) -> Any:
        """Multiply each stage of a tile into its own accumulator, and return the next states."""
        for k_tile in cutlass.range(self.k_tiles(tile), unroll=1):
            self.acc_pipeline.producer_acquire(acc_state)
            started = self.mma.start(tile, acc_state.index)
            ab_state = self.multiply(started, tile, ab_state, k_tile, Int32(0))
            self.acc_pipeline.producer_commit(acc_state)
            acc_state.advance()
        return ab_state, acc_state

    def k_tiles(self, tile: WorkTile) -> Int32:
        """Return the number of stages of a tile.

        It uses a shift: a division of a signed number takes more instructions.
        """
        return (tile.k_blocks + (K_BLOCKS - 1)) >> (K_BLOCKS.bit_length() - 1)

    @cute.jit
    def multiply(
        self, started: _StartedTile, tile: WorkTile, state: Any, k_tile: Int32, accumulate: Int32
    ) -> Any:
        """Wait for a stage, multiply it and free it; return the next state."""
        self.ab_pipeline.consumer_wait(state)
        # Elements after the last K block belong to another group or to no group.
        self.mma.multiply(started, state.index, accumulate, tile.k_blocks - k_tile * K_BLOCKS)
        self.ab_pipeline.consumer_release(state)
        state.advance()
        return state
