"""The epilogue warps: accumulators out of tensor memory, rescaled in fp32, into the output.

The arithmetic is that of ``common.output_store``: packed instructions cannot be contracted into an
FMA.

A thread owns one row of the accumulator and handles 128 bytes of output at a time; a warp owns 32
rows and needs no other. Rows that all belong to the group leave through shared memory by TMA, which
clips them to the output. At a group's end each thread stores its own row, if it has one. A gated
activation makes 64 bytes of 128, and each half of its stored input has as many. Tiles with swapped
operands: ``epilogue_swapped``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import (
    Boolean,
    Float32,
    Int32,
    Int64,
    Uint32,
    const_expr,
    cute,
    pipeline,
    range_constexpr,
)
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.convert import pack_words
from cute_kernels.device.launch import DSL_TYPES
from cute_kernels.layout.slots import TILE_ROWS

from ..common.activation_epilogue import apply_activation
from ..common.output_store import VECTOR_BYTES, EpilogueTensors, OutputStore, out_offset, vector_at
from ..common.problem import N_ALIGN
from ..common.scheduler import WorkTile
from .accumulators import AccReader
from .config import Sm100GemmConfig
from .quantize_epilogue import ThreadRows

_SWIZZLE_ROWS = 8
#: Numbers that are activated at a time: warps that decode leave no registers for more.
_AT_ONCE = 16


def read_vector(tensor: cute.Tensor, offset: Int64, size: int = N_ALIGN) -> cute.Tensor:
    """Return ``size`` elements of ``tensor`` from element ``offset`` on as fp32 registers."""
    narrow = cute.make_rmem_tensor(size, tensor.element_type)
    cute.autovec_copy(vector_at(tensor, offset, size), narrow)
    wide = cute.make_rmem_tensor(size, Float32)
    wide.store(narrow.load().to(Float32))
    return wide


class Block(NamedTuple):
    """Values of a thread's row that are stored together.

    Attributes:
        values: The values, from column ``col`` on.
        store: TMA store of the tensor.
        tensor: The output or the stored preactivation.
        col: First column, in the group or the half.
        last_coordinate: Group or half of the columns.
        end: Number of columns of the group or half.
    """

    values: cute.Tensor
    store: OutputStore
    tensor: cute.Tensor
    col: Int32
    last_coordinate: Any
    end: Int32


def pairwise(
    operation: Callable[..., tuple[Float32, Float32]], target: cute.Tensor, operand: cute.Tensor
) -> None:
    """Compute ``target = operation(target, operand)`` for pairs of fp32 registers, each rounded."""
    for i in range(0, cute.size(target), 2):
        pair = operation((target[i], target[i + 1]), (operand[i], operand[i + 1]), rnd="rn")
        target[i], target[i + 1] = pair


class Epilogue:
    """Epilogue of tiles whose operands are not swapped.

    Args:
        config: Configuration of the kernel.
        tensors: Tensors of the epilogue.
        store: TMA store of the output. None if it is quantized.
        z_store: TMA store of the preactivation. None if it is not stored.
        acc: Accumulators in tensor memory, (MMA, MMA_M, MMA_N, STAGE).
        cta_row: First row of this CTA in the tile.
        acc_pipeline: Pipeline of the accumulators.
    """

    def __init__(
        self,
        config: Sm100GemmConfig,
        tensors: EpilogueTensors,
        store: OutputStore | None,
        z_store: OutputStore | None,
        acc: cute.Tensor,
        cta_row: Int32,
        acc_pipeline: pipeline.PipelineUmmaAsync,
    ):
        self.config = config
        self.tensors = tensors
        self.store = store
        self.z_store = z_store
        self.halves = 1 + config.is_gated
        self.out_type = DSL_TYPES[config.out_dtype]
        if config.result is not None:
            self.quantized = ThreadRows(config, tensors)
        self.cta_row = cta_row
        self.columns = config.store_columns
        load = tcgen05.Ld32x32bOp(tcgen05.Repetition(self.columns))
        self.acc = AccReader(config, acc, self.columns, load, acc_pipeline)
        self.lane = cute.arch.lane_idx()
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.store_pipeline = pipeline.PipelineTmaStore.create(
            num_stages=config.num_store_stage,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARP_SIZE),
        )

    @cute.jit
    def finish(self, tile: WorkTile, acc_state: pipeline.PipelineState, stage: Int32) -> Int32:
        """Rescale and store a tile, and return the number of the next staged block."""
        warp_row = self.cta_row + self.warp * WARP_SIZE
        row = tile.m_row + warp_row + self.lane
        rows_left, is_whole = self.tensors.out.shape[1] - row, Boolean(True)
        if const_expr(self.config.has_partial_tiles):
            rows_left = tile.rows - warp_row - self.lane
            is_whole = warp_row + WARP_SIZE <= tile.rows
        in_group = rows_left > 0
        factor = Float32(1.0)
        if in_group:
            amax_index = row if const_expr(self.config.row_scaled) else tile.group
            factor = self.tensors.factor(self.config, tile.group, amax_index)
        self.acc.wait(acc_state)
        if const_expr(self.config.result is not None):
            self.quantize(tile, acc_state, row, rows_left, factor)
        else:
            num_blocks = self.config.tile.n // self.columns
            for step in cutlass.range(num_blocks, unroll=1):
                col = tile.n_row + self.acc.block_at(step, num_blocks, acc_state) * self.columns
                values = self.acc.read(step, num_blocks, acc_state)
                if col < self.tensors.out.shape[2] * self.halves:
                    rounded = self.rescale(values, factor, tile.group, row, in_group, col)
                    for i in range_constexpr(self.num_blocks):
                        # One after the other: all of them would need too many registers.
                        block = self.block(i, rounded, tile.group, col)
                        if is_whole:
                            self.store_whole(block, tile.m_row + warp_row, stage)
                            stage = (stage + 1) % self.config.num_store_stage
                        elif in_group:
                            self.store_row(block, tile.group, row)
        return stage

    @property
    def num_blocks(self) -> int:
        """Number of blocks per row: the output, after the stored preactivation."""
        if not self.config.stores_preactivation:
            return 1
        return 3 if self.config.interleaves_halves else 2

    def block(self, i: int, rounded: cute.Tensor, group: Int32, col: Int32) -> Block:
        """Return the ``i``-th block of values from column ``col`` of the product on."""
        config, (out, z) = self.config, (self.tensors.out, self.tensors.z)
        is_last, end = i == self.num_blocks - 1, out.shape[2]
        if is_last and config.activation is None:
            return Block(
                rounded, self.store, out, col, group if config.grouping == "k_grouped" else 0, end
            )
        if not (is_last or config.interleaves_halves):
            return Block(rounded, self.z_store, z, col, 0, z.shape[2])
        columns = [range(half, self.columns, self.halves) for half in range(self.halves)]
        words, target = [], (col // self.halves, 0 if is_last else i, end)
        if not is_last:
            words = pack_words([rounded[j].to(Float32) for j in columns[i]], config.out_dtype)
            return Block(self.elements(words), self.z_store, z, *target)
        return Block(self.elements(self.activated(rounded)), self.store, out, *target)

    def activated(self, rounded: cute.Tensor) -> list[Uint32]:
        """Return the words of the activation of neighbours in a row of the product."""
        words, step = [], _AT_ONCE * self.halves
        for first_column in range(0, self.columns, step):
            inputs = [
                [rounded[first_column + j].to(Float32) for j in range(h, step, self.halves)]
                for h in range(self.halves)
            ]
            words += pack_words(apply_activation(self.config, inputs), self.config.out_dtype)
        return words

    @cute.jit
    def quantize(
        self,
        tile: WorkTile,
        acc_state: pipeline.PipelineState,
        row: Int32,
        rows_left: Int32,
        factor: Float32,
    ) -> None:
        """Quantize a tile.

        A thread has whole blocks of its row. Each consists of some blocks of accumulators, or is a
        part of one.
        """
        num_blocks, columns = self.config.tile.n // self.columns, self.columns // self.halves
        global_scale, word = self.quantized.global_scale(tile.group), Uint32(0)
        row_in_tile = row - tile.m_row
        slot = tile.m_sf_row + row_in_tile
        # Positive if the slot's tile has rows of the group.
        in_slots = tile.rows - row_in_tile // TILE_ROWS * TILE_ROWS
        at_once = max(1, self.quantized.block // columns)
        for first_block in cutlass.range(0, num_blocks, at_once, unroll=1):
            starts, scales = [], Uint32(0)
            for step in range_constexpr(at_once):
                starts.append(
                    tile.n_row // self.halves
                    + self.acc.block_at(first_block + step, num_blocks, acc_state) * columns
                )
            if rows_left + self.lane > 0:
                words = []
                for step in range_constexpr(at_once):
                    values = self.acc.read(first_block + step, num_blocks, acc_state)
                    rounded = self.rescale(
                        values, factor, tile.group, row, rows_left > 0, starts[step] * self.halves
                    )
                    words += self.activated(rounded)
                scales = self.quantized.store_blocks(words, starts, row, rows_left, global_scale)
            else:
                for step in range_constexpr(at_once):
                    self.acc.read(first_block + step, num_blocks, acc_state)
            # Number of iterations that fill a word of scales: one fp32 scale, or the bytes of four
            # blocks.
            per_word = max(1, self.quantized.word_columns // columns // at_once)
            position = starts[0] // columns % per_word
            word = word | (scales << (position * (32 // per_word)))
            if first_block // at_once % per_word == per_word - 1:
                self.quantized.store_word(word, slot, starts[0], rows_left, in_slots)
                word = Uint32(0)

    def elements(self, words: list[Uint32]) -> cute.Tensor:
        """Return words as elements of the output's type."""
        out = cute.make_rmem_tensor(len(words), Uint32)
        for i, word in enumerate(words):
            out[i] = word
        return cute.recast_tensor(out, self.out_type)

    @cute.jit
    def rescale(
        self,
        values: cute.Tensor,
        factor: Float32,
        group: Int32,
        row: Int32,
        in_group: Boolean,
        col: Int32,
    ) -> cute.Tensor:
        """Rescale a row's accumulators from ``col`` on, add to them and round the result."""
        tensors, cols = self.tensors, self.tensors.columns(self.config) * self.halves
        if const_expr(tensors.has_factor):
            factors = cute.make_rmem_tensor(self.columns, Float32)
            factors.fill(factor)
            pairwise(cute.arch.mul_packed_f32x2, values, factors)
        for i in range_constexpr(0, self.columns, N_ALIGN):
            vector = cute.make_tensor(values.iterator + i, cute.make_layout(N_ALIGN))
            if const_expr(tensors.bias is not None):
                if col + i < cols:
                    offset = Int64(group) * tensors.bias.stride[0]
                    if const_expr(self.config.interleaves_halves):
                        size = N_ALIGN // 2
                        a = read_vector(tensors.bias, offset + (col + i) // 2, size)
                        b = read_vector(tensors.bias, offset + (col + i + cols) // 2, size)
                        addends = cute.make_rmem_tensor(N_ALIGN, Float32)
                        for j in range_constexpr(size):
                            addends[2 * j], addends[2 * j + 1] = a[j], b[j]
                    else:
                        addends = read_vector(tensors.bias, offset + (col + i))
                    pairwise(cute.arch.add_packed_f32x2, vector, addends)
            if const_expr(self.config.accumulate):
                if in_group and col + i < cols:
                    offset = out_offset(self.config, tensors.out, group, row, col + i)
                    old = read_vector(tensors.out, offset)
                    pairwise(cute.arch.add_packed_f32x2, vector, old)
        rounded = cute.make_rmem_tensor(self.columns, self.out_type)
        rounded.store(values.load().to(self.out_type))
        return rounded

    @cute.jit
    def store_row(self, block: Block, group: Int32, row: Int32) -> None:
        """Store a block of a row without TMA."""
        first_column = block.col
        if const_expr(self.halves > 1):
            first_column += block.last_coordinate * block.end
        for i in range_constexpr(0, cute.size(block.values), N_ALIGN):
            if block.col + i < block.end:
                vector = cute.make_tensor(block.values.iterator + i, cute.make_layout(N_ALIGN))
                offset = out_offset(self.config, block.tensor, group, row, first_column + i)
                target = vector_at(block.tensor, offset, N_ALIGN)
                cute.autovec_copy(vector, target)

    @cute.jit
    def store_whole(self, block: Block, row: Int32, stage: Int32) -> None:
        """Store the rows of a warp, from ``row`` on, by TMA."""
        rounded = block.values
        row_bytes = cute.size(rounded) * rounded.element_type.width // 8
        self.store_pipeline.producer_acquire()
        cute.arch.sync_warp()
        slot = self.warp * self.config.num_store_stage + stage
        # Lanes write the 16-byte chunks of their rows in the order of the swizzle of row_bytes.
        # Eight lanes then touch all banks.
        base = (
            block.store.shared.iterator.toint() + slot * (WARP_SIZE * 128) + self.lane * row_bytes
        )
        per_chunk = VECTOR_BYTES * 8 // rounded.element_type.width
        swizzle = self.lane % _SWIZZLE_ROWS // (128 // row_bytes)
        for chunk in range_constexpr(row_bytes // VECTOR_BYTES):
            address = base + (chunk ^ swizzle) * VECTOR_BYTES
            space = cute.AddressSpace.smem
            pointer = cute.make_ptr(
                rounded.element_type, address, space, assumed_align=VECTOR_BYTES
            )
            vector = cute.make_layout(per_chunk)
            chunk_values = cute.make_tensor(rounded.iterator + chunk * per_chunk, vector)
            cute.autovec_copy(chunk_values, cute.make_tensor(pointer, vector))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        block.store.copy(slot * (128 // row_bytes), row, block.col, block.last_coordinate)
        self.store_pipeline.producer_commit()
