"""The epilogue warps: accumulators out of tensor memory, rescaled in fp32, into the output.

A thread owns one row of the accumulator. The factors are folded once a tile,
``f = fl(fl(amax_a * c) * fl(amax_b * c))`` with ``c = fl(1/2688)``, times alpha if there is one;
then each element is ``cast(fl(fl(fl(acc * f) + bias) + out))``. Every product and sum is rounded
by itself: the packed instructions used here cannot be contracted into an FMA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.formats import NVFP4
from cute_kernels.gemm.config import N_ALIGN
from cute_kernels.gemm.scheduler import WorkTile

if TYPE_CHECKING:
    from collections.abc import Callable

    from cute_kernels.gemm.config import GemmConfig
    from cute_kernels.gemm.scheduler import TileReader

__all__ = ["Epilogue", "EpilogueTensors"]

#: Columns of the accumulator that a thread holds at a time.
_COLUMNS = 32


class EpilogueTensors(NamedTuple):
    """What the epilogue reads and writes in global memory.

    Attributes:
        out: (T, N), or (G, M, N) of a k_grouped product; rows of any pitch.
        amax_a: (G,) or (T,) fp32, None without a second level.
        amax_b: (G,) fp32, None without a second level.
        alpha: (G,) fp32 or None.
        bias: (G, N) or None.
    """

    out: cute.Tensor
    amax_a: cute.Tensor | None
    amax_b: cute.Tensor | None
    alpha: cute.Tensor | None
    bias: cute.Tensor | None


def _vector(tensor: cute.Tensor, offset: Int64, size: int) -> cute.Tensor:
    """``size`` elements of ``tensor`` from element ``offset`` on, aligned to 16 bytes."""
    width = tensor.element_type.width // 8
    address = tensor.iterator.toint() + offset * width
    space = cute.AddressSpace.gmem
    pointer = cute.make_ptr(
        tensor.element_type, address, space, assumed_align=min(16, size * width)
    )
    return cute.make_tensor(pointer, cute.make_layout(size))


def _pairwise(
    operation: Callable[..., tuple[Float32, Float32]], target: cute.Tensor, operand: cute.Tensor
) -> None:
    """``target = operation(target, operand)`` for fp32 registers, two a time, each rounded."""
    for i in range(0, cute.size(target), 2):
        pair = operation((target[i], target[i + 1]), (operand[i], operand[i + 1]), rnd="rn")
        target[i], target[i + 1] = pair


class Epilogue:
    """The four epilogue warps.

    Args:
        config: the kernel's configuration.
        tensors: what is read and written in global memory.
        acc: accumulators in tensor memory, (MMA, MMA_M, MMA_N, STAGE).
        cta_row: first row of a tile that this CTA holds.
        tiles: the tile records.
        acc_pipeline: the accumulators.
    """

    def __init__(
        self,
        config: GemmConfig,
        tensors: EpilogueTensors,
        acc: cute.Tensor,
        cta_row: Int32,
        tiles: TileReader,
        acc_pipeline: pipeline.PipelineUmmaAsync,
    ):
        self.config = config
        self.tensors = tensors
        self.acc = acc
        self.cta_row = cta_row
        self.tiles = tiles
        self.acc_pipeline = acc_pipeline

    @cute.jit
    def run(self) -> None:
        tile_state = self.tiles.new_state()
        acc_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.acc_pipeline.num_stages
        )
        # (rows, 32, column blocks, STAGE), then by thread (T2R, T2R_M, T2R_N, column blocks, STAGE)
        acc = cute.flat_divide(self.acc[((None, None), 0, 0, None)], (128, _COLUMNS))
        acc = acc[None, None, 0, None, None]
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(_COLUMNS)), Float32)
        load = tcgen05.make_tmem_copy(atom, acc[None, None, 0, 0])
        acc = load.get_slice(cute.arch.thread_idx()[0]).partition_S(acc)
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            if tile.k_blocks > 0:
                self.acc_pipeline.consumer_wait(acc_state)
            self.store_tile(tile, load, acc[None, None, None, None, acc_state.index])
            if tile.k_blocks > 0:
                cute.arch.fence_view_async_tmem_load()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    self.acc_pipeline.consumer_release(acc_state)
                acc_state.advance()
            tile, tile_state = self.tiles.next(tile_state)

    @cute.jit
    def store_tile(self, tile: WorkTile, load: cute.TiledCopy, acc: cute.Tensor) -> None:
        """One tile: this thread's row, 32 columns at a time, with predicated stores."""
        out = self.tensors.out
        row = tile.m_row + self.cta_row + cute.arch.thread_idx()[0]
        in_group = row < out.shape[1]
        offset = Int64(tile.group) * out.stride[0]
        if cutlass.const_expr(self.config.grouping == "m_grouped"):
            in_group = row - tile.m_row < tile.rows
            offset = Int64(0)
        offset += Int64(row) * out.stride[1]
        factor = self.factor(tile.group, row, in_group)
        values = cute.make_rmem_tensor(_COLUMNS, Float32)
        registers = cute.make_tensor(
            values.iterator, cute.make_layout(((_COLUMNS, 1), 1, 1), stride=((1, 0), 0, 0))
        )
        for block in cutlass.range(self.config.mma_tiler_mn[1] // _COLUMNS, unroll=1):
            col = tile.n_row + block * _COLUMNS
            # Rows outside of the group skipped the stores; a load takes the whole warp.
            cute.arch.sync_warp()
            if tile.k_blocks > 0:
                cute.copy(load, acc[None, None, None, block], registers)
                cute.arch.fence_view_async_tmem_load()
            else:
                values.fill(0.0)
            if in_group:
                for i in cutlass.range_constexpr(0, _COLUMNS, N_ALIGN):
                    if col + i < out.shape[2]:
                        part = cute.make_tensor(values.iterator + i, cute.make_layout(N_ALIGN))
                        self.finish(part, factor, tile.group, offset, col + i)

    @cute.jit
    def factor(self, group: Int32, row: Int32, in_group: Boolean) -> Float32:
        """The thread's factor, see the module; anything for a row outside of the group."""
        tensors = self.tensors
        factor = Float32(1.0)
        if in_group:
            if cutlass.const_expr(tensors.amax_a is not None):
                rcp_max = Float32(1.0 / NVFP4().tensor_max)
                at = row if cutlass.const_expr(self.config.row_scaled) else group
                factor = (tensors.amax_a[at] * rcp_max) * (tensors.amax_b[group] * rcp_max)
            if cutlass.const_expr(tensors.alpha is not None):
                factor = factor * tensors.alpha[group]
        return factor

    @cute.jit
    def finish(
        self, values: cute.Tensor, factor: Float32, group: Int32, offset: Int64, col: Int32
    ) -> None:
        """Rescale 8 accumulators of a row, add, cast and store them at ``offset + col``."""
        tensors = self.tensors
        if cutlass.const_expr(tensors.amax_a is not None or tensors.alpha is not None):
            factors = cute.make_rmem_tensor(N_ALIGN, Float32)
            factors.fill(factor)
            _pairwise(cute.arch.mul_packed_f32x2, values, factors)
        if cutlass.const_expr(tensors.bias is not None):
            at = Int64(group) * tensors.bias.stride[0] + col
            _pairwise(cute.arch.add_packed_f32x2, values, self.read(tensors.bias, at))
        target = _vector(tensors.out, offset + col, N_ALIGN)
        if cutlass.const_expr(self.config.accumulate):
            _pairwise(cute.arch.add_packed_f32x2, values, self.read(tensors.out, offset + col))
        rounded = cute.make_rmem_tensor(N_ALIGN, tensors.out.element_type)
        rounded.store(values.load().to(tensors.out.element_type))
        cute.autovec_copy(rounded, target)

    def read(self, tensor: cute.Tensor, offset: Int64) -> cute.Tensor:
        """8 elements as fp32."""
        narrow = cute.make_rmem_tensor(N_ALIGN, tensor.element_type)
        cute.autovec_copy(_vector(tensor, offset, N_ALIGN), narrow)
        wide = cute.make_rmem_tensor(N_ALIGN, Float32)
        wide.store(narrow.load().to(Float32))
        return wide
