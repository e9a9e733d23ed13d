"""The epilogue of consumer warps: from registers, rescaled in fp32, into the output.

The arithmetic is that of ``cute_kernels.gemm.epilogue``. A warp passes its accumulators through
shared memory in blocks of 16 rows by 16 columns of the output. Then a lane has eight columns of one
row, 16 bytes of 16-bit output, and rows outside of the group are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from cute_kernels.device.ptx import asm
from cute_kernels.gemm.config import N_ALIGN
from cute_kernels.gemm.epilogue import EpilogueTensors, read_vector, vector_at
from cute_kernels.gemm.hopper.config import BLOCK, BLOCK_PITCH, WARPGROUP_M
from cute_kernels.gemm.hopper.warp_schedule import WARPGROUP_SIZE
from cute_kernels.gemm.scheduler import WorkTile

if TYPE_CHECKING:
    from cute_kernels.gemm.hopper.config import HopperGemmConfig

__all__ = ["HopperEpilogue"]


def _each(instruction: str, target: cute.Tensor, operands: cute.Tensor) -> None:
    """``target = instruction(target, operands)`` for fp32 registers; never part of an FMA."""
    for i in range(cute.size(target)):
        target[i] = asm(f"{instruction} $0, $1, $2;", [Float32], [target[i], operands[i]])


class HopperEpilogue:
    """The epilogue of one consumer warp.

    Args:
        config: the kernel's configuration.
        tensors: what is read and written in global memory.
        blocks: blocks of fp32 words in shared memory, one a warp.
        cta: number of the CTA in its cluster.
    """

    def __init__(
        self,
        config: HopperGemmConfig,
        tensors: EpilogueTensors,
        blocks: cute.Tensor,
        cta: Int32,
    ):
        self.config = config
        self.tensors = tensors
        thread = cute.arch.thread_idx()[0]
        self.lane = thread % 32
        warp = thread // 32
        self.block = cute.make_tensor(
            blocks.iterator + warp * (BLOCK * BLOCK_PITCH), cute.make_layout(BLOCK * BLOCK_PITCH)
        )
        #: The row or column of operand M's side at which this warp's blocks begin.
        self.first_m = cta * config.tile.m + thread // WARPGROUP_SIZE * WARPGROUP_M
        self.first_m += thread % WARPGROUP_SIZE // 32 * BLOCK
        self.line = self.lane % BLOCK
        self.column = self.lane // BLOCK * N_ALIGN

    @cute.jit
    def load_factors(self, tile: WorkTile) -> cute.Tensor:
        """What rows are multiplied by; 1 where nothing was multiplied or no row is.

        Loaded ahead of the products, whose time hides the latency. With one factor a row the lanes
        of the warp have one of 32 rows each, and otherwise all have the group's.
        """
        config = self.config
        count = (config.tile.n + 31) // 32 if config.row_scaled else 1
        factors = cute.make_rmem_tensor(count, Float32)
        for i in cutlass.range_constexpr(count):
            factor = Float32(1.0)
            if tile.k_blocks > 0:
                if cutlass.const_expr(config.row_scaled):
                    local = i * 32 + self.lane
                    if local < tile.rows:
                        factor = self.tensors.factor(tile.group, tile.n_row + local)
                else:
                    factor = self.tensors.factor(tile.group, tile.group)
            factors[i] = factor
        return factors

    @cute.jit
    def store(self, acc: cute.Tensor, factors: cute.Tensor, tile: WorkTile) -> None:
        """Store a tile's accumulators, ((2, 2, N / 8), repeats along M, 1) of compact layout."""
        config, tensors = self.config, self.tensors
        step = config.consumers * WARPGROUP_M
        shape = (2, 2, config.tile.n // 8, config.tile.m // step)
        acc = cute.make_tensor(acc.iterator, cute.make_layout(shape))
        num_blocks = (config.tile.n + BLOCK - 1) // BLOCK
        for block in cutlass.range_constexpr(num_blocks):
            factor = factors[0]
            if cutlass.const_expr(config.row_scaled):
                source = block % 2 * BLOCK + self.line
                factor = cute.arch.shuffle_sync(factors[block // 2], source)
            if cutlass.const_expr(config.tile.swap_ab):
                local = block * BLOCK + self.line
                if block * BLOCK < tile.rows:
                    in_group = local < cutlass.min(tile.rows, config.tile.n)
                    row = tile.n_row + local
                    for repeat in cutlass.range_constexpr(config.tile.m // step):
                        values = self.transpose(acc, repeat, block)
                        col = tile.m_row + self.first_m + repeat * step + self.column
                        self.finish(values, factor, tile, row, in_group, col)
            else:
                col = tile.n_row + block * BLOCK + self.column
                for repeat in cutlass.range_constexpr(config.tile.m // step):
                    row = tile.m_row + self.first_m + repeat * step + self.line
                    in_output = row < tensors.out.shape[1]
                    values = self.transpose(acc, repeat, block)
                    self.finish(values, factor, tile, row, in_output, col)

    @cute.jit
    def transpose(self, acc: cute.Tensor, repeat: int, block: int) -> cute.Tensor:
        """Eight accumulators of the lane's row, out of a block of the warp's."""
        row, pair = self.lane // 4, self.lane % 4 * 2
        cute.arch.sync_warp()
        for group in cutlass.range_constexpr(min(2, self.config.tile.n // 8)):
            for half in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    m, n = row + half * 8, pair + group * 8 + i
                    at = m * BLOCK_PITCH + n
                    if cutlass.const_expr(self.config.tile.swap_ab):
                        at = n * BLOCK_PITCH + m
                    self.block[at] = acc[i, half, block * 2 + group, repeat]
        cute.arch.sync_warp()
        values = cute.make_rmem_tensor(N_ALIGN, Float32)
        offset = self.line * BLOCK_PITCH + self.column
        source = cute.make_ptr(
            Float32,
            self.block.iterator.toint() + offset * 4,
            cute.AddressSpace.smem,
            assumed_align=16,
        )
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(N_ALIGN)), values)
        return values

    @cute.jit
    def finish(
        self,
        values: cute.Tensor,
        factor: Float32,
        tile: WorkTile,
        row: Int32,
        exists: Boolean,
        col: Int32,
    ) -> None:
        """Rescale eight accumulators, add to them, cast and store them."""
        tensors, out = self.tensors, self.tensors.out
        if exists and col < out.shape[2]:
            offset = Int64(row) * out.stride[1] + col
            if cutlass.const_expr(self.config.grouping == "k_grouped"):
                offset += Int64(tile.group) * out.stride[0]
            # Zeros of an empty group and of the tail stay exact zeros.
            if tile.k_blocks > 0:
                if cutlass.const_expr(tensors.has_factor):
                    factors = cute.make_rmem_tensor(N_ALIGN, Float32)
                    factors.fill(factor)
                    _each("mul.rn.f32", values, factors)
                if cutlass.const_expr(tensors.bias is not None):
                    at = Int64(tile.group) * tensors.bias.stride[0] + col
                    _each("add.rn.f32", values, read_vector(tensors.bias, at))
                if cutlass.const_expr(self.config.accumulate):
                    _each("add.rn.f32", values, read_vector(out, offset))
            rounded = cute.make_rmem_tensor(N_ALIGN, out.element_type)
            rounded.store(values.load().to(out.element_type))
            cute.autovec_copy(rounded, vector_at(out, offset, N_ALIGN))
