"""Codes and block scales of activated rows in tensor memory: see ``common.quantize_epilogue``."""

import functools

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.device.codecs import GlobalScaleRegisters
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.memory import load_shared, store_shared
from cute_kernels.device.ptx import bits_as_f32, f32_as_bits, select
from cute_kernels.layout.slots import TILE_ROWS

from ..common.output_store import EpilogueTensors
from ..common.quantize_epilogue import QuantizedRows
from .config import Sm100GemmConfig
from .warp_schedule import NamedBarrierId

#: Words of the longest vector that is stored, and columns of the product of a CTA with swapped
#: operands.
_MOST_WORDS, _SWAPPED_COLUMNS = 8, 128


class ThreadRows(QuantizedRows):
    """Quantizer of the rows of a tile. Each thread has some columns of every row."""

    def store_codes(self, codes: list[Uint32], row: Int32, col: Int32, rows_left: Int32) -> None:
        """Store codes of columns that exist, if the row does: ``rows_left`` is more than 0."""
        out, per_word = self.tensors.out, self.block // self.codec.code_words
        address = out.iterator.toint() + Int64(row) * out.stride[1] + self.codec.code_bytes(col)
        for i in range(0, len(codes), _MOST_WORDS):
            cols = self.cols - col - i * per_word
            self.store_vector(
                address + 4 * i, codes[i : i + _MOST_WORDS], (rows_left, 0), (cols, 0), per_word
            )

    def store_blocks(
        self,
        words: list[Uint32],
        starts: list[Int32],
        row: Int32,
        rows_left: Int32,
        global_scale: GlobalScaleRegisters,
    ) -> Uint32:
        """Store codes of whole blocks, and return the word of their scales.

        ``starts`` are the first columns of the words, which are in equal groups.
        """
        size, codes, joined = self.block // 2, [], Uint32(0)
        for i in range(0, len(words), size):
            half_block = words[i : i + size]
            encoded, stored = self.encode(half_block, self.amax(half_block), global_scale)
            codes += encoded
            stored = select(starts[0] + 2 * i < self.cols, stored, Uint32(0))
            joined = joined | (stored << (8 * i // size)) if i else stored
        codes_per_start = len(codes) // len(starts)
        for i, col in enumerate(starts):
            self.store_codes(
                codes[i * codes_per_start : (i + 1) * codes_per_start], row, col, rows_left
            )
        return joined


class StagedRows(ThreadRows):
    """Quantizer of the rows of tiles with swapped operands.

    A lane has a row of 32 columns of the product, which are a block or less.

    Args:
        config: Configuration of the kernel.
        tensors: Tensors of the epilogue.
        amaxes: Shared memory of this warp for the amaxes of rows of two blocks.
    """

    def __init__(self, config: Sm100GemmConfig, tensors: EpilogueTensors, amaxes: Int32):
        super().__init__(config, tensors)
        self.lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        #: Number of warps that share a block, and the barrier between them.
        self.sharing = config.sharing_warps
        self.barrier = NamedBarrierId.FIRST_SHARED + warp // self.sharing
        self.lane_amax, self.pitch = amaxes + self.lane * 4, config.staged_bytes // 4
        self.first = self.lane_amax - warp % self.sharing * self.pitch

    @cute.jit
    def sync(self) -> None:
        """Wait for the warps that share blocks."""
        if cutlass.const_expr(self.sharing > 1):
            cute.arch.barrier(barrier_id=self.barrier, number_of_threads=self.sharing * WARP_SIZE)

    def block_amax(self, amax: Float32, offset: Int32) -> Float32:
        """Return the amax of a block from that of this warp's columns."""
        if self.sharing > 1:
            store_shared(self.lane_amax + offset, [f32_as_bits(amax)])
            self.sync()
            addresses = (self.first + offset + i * self.pitch for i in range(self.sharing))
            amax = functools.reduce(
                self.larger, (bits_as_f32(load_shared(address, 1)[0]) for address in addresses)
            )
        return amax

    def store(
        self,
        vectors: list[list[Uint32]],
        row: Int32,
        slot: Int32,
        rows_left: Int32,
        col: Int32,
        step: Int32,
        global_scale: GlobalScaleRegisters,
    ) -> None:
        """Quantize a row of a tile that a lane has, from column ``col`` of the product on.

        ``step`` is the number of the row block in the tile.
        """
        words, at_once = [], 2 * self.halves
        for i in range(0, len(vectors), at_once):
            words += self.activate(vectors[i : i + at_once])
        size = min(self.block // 2, len(words))
        for i in range(0, len(words), size):
            block_words, block_col = words[i : i + size], col // self.halves + 2 * i
            amax = self.block_amax(self.amax(block_words), step % 2 * (WARP_SIZE * 4))
            codes, stored = self.encode(block_words, amax, global_scale)
            self.store_codes(codes, row, block_col, rows_left)
            self.store_scale(select(rows_left > 0, stored, Uint32(0)), slot, block_col)

    @cute.jit
    def finish(self, slot: Int32, first_row: Int32, rows: Int32, col: Int32) -> None:
        """Store zeros for the scales of slots of a group's last tile that have no row.

        The slots begin at ``first_row`` of the tile, which has ``rows`` rows.
        """
        end, cols = rows + ((0 - (slot + rows)) & (TILE_ROWS - 1)), _SWAPPED_COLUMNS // self.halves
        col, warp = col // _SWAPPED_COLUMNS * cols, cute.arch.warp_idx()
        for row in cutlass.range(first_row + warp * WARP_SIZE, end, _SWAPPED_COLUMNS, unroll=1):
            self.clear(slot + row + self.lane, col, cols)
