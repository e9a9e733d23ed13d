"""The MMA warp: block scales into tensor memory, then the tensor core's instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.gemm import umma
from cute_kernels.gemm.config import K_BLOCKS, TMEM_LANES
from cute_kernels.gemm.scheduler import WorkTile
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.config import GemmConfig
    from cute_kernels.gemm.scheduler import TileReader

__all__ = ["BlockScaledMma", "MmaWarp", "PlainMma"]


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
        operands: descriptors of operands M and N in the first stage.
        instruction: descriptor of the instruction.
        scale_column: block scales of operand N in tensor memory.
    """

    acc: Int32
    operands: tuple[Int64, Int64]
    instruction: Int32
    scale_column: Int32


class BlockScaledMma:
    """Instructions for block-scaled operands.

    Args:
        config: the kernel's configuration.
        shared: stages of operands M and N and of their block scales.
        tmem: start of tensor memory.
        acc_stride: columns from the first accumulator to the second.
        scale_columns: first columns of the block scales of operands M and N.
    """

    def __init__(
        self,
        config: GemmConfig,
        shared: tuple[cute.Tensor, ...],
        tmem: cute.Pointer,
        acc_stride: int,
        scale_columns: tuple[int, int],
    ):
        self.config = config
        self.elements = tuple(umma.element_descriptor(x.iterator) for x in shared[:2])
        self.scales = tuple(umma.scale_descriptor(x.iterator) for x in shared[2:])
        self.tmem = Int32(tmem.toint())
        self.acc_stride = acc_stride
        self.scale_columns = scale_columns

    @cute.jit
    def start(self, tile: WorkTile, which: Int32) -> _BlockScaledTile:
        """What the stages of a tile have in common, with the accumulator numbered ``which``."""
        config = self.config
        m, n = self.elements
        cols = Int32(config.tile.n)
        if cutlass.const_expr(config.tile.swap_ab):
            cols = config.instruction_n(cutlass.min(tile.rows, config.tile.n))
        if cutlass.const_expr(config.tile.swap_tails):
            if tile.rows < config.tile.rows:
                n, m = self.elements
                cols = config.instruction_n(tile.rows)
        scale_column = self.tmem + self.scale_columns[1]
        if cutlass.const_expr(config.tile.n < SF_TILE_ROWS):
            # A scale tile has four columns of 32 rows each.
            scale_column += (tile.n_sf_row & (SF_TILE_ROWS - 1)) >> 5
        return _BlockScaledTile(
            self.tmem + which * self.acc_stride,
            (m, n),
            umma.instruction_descriptor(config.kind, config.tile.m, cols),
            scale_column,
        )

    @cute.jit
    def multiply(self, tile: _BlockScaledTile, stage: Int32, k_tile: Int32, left: Int32) -> None:
        """Add a stage, the tile's ``k_tile``-th, with ``left`` K blocks to go.

        The first overwrites what the accumulator holds.
        """
        config, num_ctas = self.config, self.config.tile.num_ctas
        scale_columns = (self.tmem + self.scale_columns[0], tile.scale_column)
        operands = tuple(
            x + Int64(stage) * (size // umma.UNIT)
            for x, size in zip(tile.operands, config.element_stage_bytes, strict=True)
        )
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(2):
                tiles = config.scale_tiles[i]
                first = self.scales[i] + Int64(stage) * (
                    tiles * K_BLOCKS * SF_TILE_BYTES // umma.UNIT
                )
                column = self.tmem + self.scale_columns[i]
                for at in cutlass.range_constexpr(tiles * K_BLOCKS):
                    # Of each K block, the tiles of all rows lie side by side in tensor memory.
                    target = at % K_BLOCKS * tiles + at // K_BLOCKS
                    umma.copy_scales(
                        column + target * (SF_TILE_ROWS // TMEM_LANES),
                        first + at * (SF_TILE_BYTES // umma.UNIT),
                        num_ctas,
                    )
            for k_block in cutlass.range_constexpr(K_BLOCKS):
                step = k_block * (umma.ELEMENT_ROW_BYTES // K_BLOCKS // umma.UNIT)
                flags = {"accumulate": k_tile}
                if cutlass.const_expr(k_block > 0):
                    flags = {"more_than": (left, k_block)}
                umma.multiply(
                    tile.acc,
                    tuple(x + step for x in operands),
                    tile.instruction,
                    tuple(
                        column + k_block * tiles * (SF_TILE_ROWS // TMEM_LANES)
                        for column, tiles in zip(scale_columns, config.scale_tiles, strict=True)
                    ),
                    num_ctas,
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
                k_tiles = (tile.k_blocks + (K_BLOCKS - 1)) >> 2
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
