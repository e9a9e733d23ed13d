"""The MMA warp: block scales into tensor memory, then the tensor core's instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.gemm.scheduler import WorkTile
from cute_kernels.gemm.sm100 import umma
from cute_kernels.gemm.sm100.config import K_BLOCKS, TMEM_LANES
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.scheduler import TileReader
    from cute_kernels.gemm.sm100.config import Sm100GemmConfig
    from cute_kernels.gemm.sm100.storage import Stages

__all__ = ["BlockScaledMma", "MmaWarp", "PlainMma"]

#: Columns of tensor memory of one tile of block scales.
_TILE_COLUMNS = SF_TILE_ROWS // TMEM_LANES


class PlainMma:
    """Instructions for operands without block scales.

    Args:
        tiled_mma: the instruction and its tile.
        operands: fragments of both operands in shared memory, (MMA, MMA_MN, MMA_K, STAGE).
        acc: accumulators in tensor memory, (MMA, MMA_M, MMA_N, STAGE).
    """

    def __init__(
        self, tiled_mma: cute.TiledMma, operands: tuple[cute.Tensor, cute.Tensor], acc: cute.Tensor
    ):
        self.tiled_mma = tiled_mma
        self.operands = operands
        self.acc = acc

    def start(self, tile: WorkTile, which: Int32) -> cute.Tensor:
        """What the stages of a tile have in common: the accumulator numbered ``which``."""
        return self.acc[None, None, None, which]

    @cute.jit
    def multiply(self, acc: cute.Tensor, stage: Int32, k_tile: Int32, left: Int32) -> None:
        """Add a stage, the tile's ``k_tile``-th, with ``left`` K blocks to go, to ``acc``.

        The first overwrites what the accumulator holds.
        """
        for k_block in cutlass.range_constexpr(K_BLOCKS):
            if k_block < left:
                at = (None, None, k_block, stage)
                # Fields of an MMA are state that must not outlive this branch, so each has its own.
                tiled_mma = cute.make_tiled_mma(self.tiled_mma.op)
                accumulate = k_tile > 0 if cutlass.const_expr(k_block == 0) else True
                tiled_mma.set(tcgen05.Field.ACCUMULATE, accumulate)
                cute.gemm(tiled_mma, acc, self.operands[0][at], self.operands[1][at], acc)


class _BlockScaledTile(NamedTuple):
    """What the stages of a tile have in common.

    Attributes:
        acc: the accumulator.
        m: descriptor of operand M in the first stage.
        n: descriptor of operand N in the first stage.
        instruction: descriptor of the instruction.
        m_scales: block scales of operand M in tensor memory.
        n_scales: block scales of operand N in tensor memory.
    """

    acc: Int32
    m: Int64
    n: Int64
    instruction: Int32
    m_scales: Int32
    n_scales: Int32


class _StagedScales(NamedTuple):
    """The block scales of one operand, in shared and in tensor memory.

    Attributes:
        descriptor: of the first stage in shared memory.
        column: the first in tensor memory, from its start on.
        tiles: tiles of them side by side along M or N.
        k_tiles: tiles of them along K of one stage.
    """

    descriptor: Int64
    column: int
    tiles: int
    k_tiles: int

    def copy(self, tmem: Int32, stage: Int32, num_ctas: int) -> None:
        """Copy those of a stage into tensor memory; one thread issues."""
        count, column = self.tiles * self.k_tiles, tmem + self.column
        first = self.descriptor + Int64(stage) * (count * SF_TILE_BYTES // umma.UNIT)
        for at in range(count):
            # In shared memory K runs fastest; in tensor memory the tiles of all rows lie side by
            # side for each step along K.
            target = at % self.k_tiles * self.tiles + at // self.k_tiles
            umma.copy_scales(
                column + target * _TILE_COLUMNS,
                first + at * (SF_TILE_BYTES // umma.UNIT),
                num_ctas,
            )


class BlockScaledMma:
    """Instructions for block-scaled operands.

    Args:
        config: the kernel's configuration.
        shared: stages of both operands and of their block scales.
        tmem: start of tensor memory.
        acc_stride: columns from the first accumulator to the second.
        scale_columns: first columns of the block scales of operands M and N.
    """

    def __init__(
        self,
        config: Sm100GemmConfig,
        shared: Stages,
        tmem: cute.Pointer,
        acc_stride: int,
        scale_columns: tuple[int, int],
    ):
        self.config = config
        self.m = umma.element_descriptor(shared.m.iterator)
        self.n = umma.element_descriptor(shared.n.iterator)
        self.tmem = Int32(tmem.toint())
        self.acc_stride = acc_stride
        self.m_scales, self.n_scales = (
            _StagedScales(umma.scale_descriptor(x.iterator), column, tiles, config.k_scale_tiles)
            for x, column, tiles in zip(
                (shared.m_scales, shared.n_scales), scale_columns, config.scale_tiles, strict=True
            )
        )

    @cute.jit
    def start(self, tile: WorkTile, which: Int32) -> _BlockScaledTile:
        """What the stages of a tile have in common, with the accumulator numbered ``which``."""
        config = self.config
        m, n = self.m, self.n
        cols = Int32(config.tile.n)
        if cutlass.const_expr(config.tile.swap_ab):
            cols = config.instruction_n(cutlass.min(tile.rows, config.tile.n))
        if cutlass.const_expr(config.tile.swap_partial):
            if tile.rows < config.tile.rows:
                n, m = self.m, self.n
                cols = config.instruction_n(tile.rows)
        n_scales = self.tmem + self.n_scales.column
        if cutlass.const_expr(config.tile.n < SF_TILE_ROWS):
            # A scale tile has four columns of 32 rows each.
            n_scales += (tile.n_sf_row & (SF_TILE_ROWS - 1)) >> 5
        return _BlockScaledTile(
            acc=self.tmem + which * self.acc_stride,
            m=m,
            n=n,
            instruction=umma.instruction_descriptor(config.kind, config.tile.m, cols),
            m_scales=self.tmem + self.m_scales.column,
            n_scales=n_scales,
        )

    @cute.jit
    def multiply(self, tile: _BlockScaledTile, stage: Int32, k_tile: Int32, left: Int32) -> None:
        """Add a stage, the tile's ``k_tile``-th, with ``left`` K blocks to go.

        The first overwrites what the accumulator holds.
        """
        m_bytes, n_bytes = self.config.element_stage_bytes
        m = tile.m + Int64(stage) * (m_bytes // umma.UNIT)
        n = tile.n + Int64(stage) * (n_bytes // umma.UNIT)
        with cute.arch.elect_one():
            self.m_scales.copy(self.tmem, stage, self.config.tile.num_ctas)
            self.n_scales.copy(self.tmem, stage, self.config.tile.num_ctas)
            for k_block in cutlass.range_constexpr(K_BLOCKS):
                self.issue(tile, m, n, k_block, k_tile, left)

    def issue(
        self, tile: _BlockScaledTile, m: Int64, n: Int64, k_block: int, k_tile: Int32, left: Int32
    ) -> None:
        """Multiply one K block of the stage whose elements are at ``m`` and ``n``."""
        kind = self.config.kind
        step = k_block * (umma.ELEMENT_ROW_BYTES // K_BLOCKS // umma.UNIT)
        k_scale_tile, number = divmod(k_block, kind.k_blocks_of_scale_tile)
        # The first instruction of a tile overwrites; those behind the tile's last do nothing.
        flags = {"more_than": (left, k_block)} if k_block else {"accumulate": k_tile}
        umma.multiply(
            kind,
            tile.acc,
            (m + step, n + step),
            tile.instruction + umma.scale_id(number) if number else tile.instruction,
            (
                tile.m_scales + k_scale_tile * self.m_scales.tiles * _TILE_COLUMNS,
                tile.n_scales + k_scale_tile * self.n_scales.tiles * _TILE_COLUMNS,
            ),
            self.config.tile.num_ctas,
            **flags,
        )


class MmaWarp:
    """The MMA warp; only that of the leading CTA of a pair issues.

    Args:
        mma: the instructions.
        is_leader: whether this CTA issues.
        tiles: the tile records.
        ab_pipeline: the stages.
        acc_pipeline: the accumulators.
    """

    def __init__(
        self,
        mma: Any,
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
        tile_state = self.tiles.new_state()
        ab_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.ab_pipeline.num_stages
        )
        acc_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.acc_pipeline.num_stages
        )
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            if tile.k_blocks > 0 and self.is_leader:
                self.acc_pipeline.producer_acquire(acc_state)
                # Overlapping accumulators have one barrier and take turns with its phase.
                which = acc_state.index
                if cutlass.const_expr(self.acc_pipeline.num_stages == 1):
                    which = acc_state.phase ^ 1
                started = self.mma.start(tile, which)
                # A shift: a division of a signed number takes more instructions.
                k_tiles = (tile.k_blocks + (K_BLOCKS - 1)) >> (K_BLOCKS.bit_length() - 1)
                for k_tile in cutlass.range(k_tiles, unroll=1):
                    # What lies behind the last K block belongs to another group or to nobody.
                    left = tile.k_blocks - k_tile * K_BLOCKS
                    self.ab_pipeline.consumer_wait(ab_state)
                    self.mma.multiply(started, ab_state.index, k_tile, left)
                    self.ab_pipeline.consumer_release(ab_state)
                    ab_state.advance()
                self.acc_pipeline.producer_commit(acc_state)
                acc_state.advance()
            tile, tile_state = self.tiles.next(tile_state)
        self.acc_pipeline.producer_tail(acc_state)
