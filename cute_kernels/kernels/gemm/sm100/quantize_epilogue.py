"""What an activation makes of rows in tensor memory, to codes and block scales: see
``gemm.quantized``.
"""

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


class Rows(QuantizedRows):
    """What becomes of rows of a tile, each of which a thread has a part of."""

    def store_codes(self, codes: list[Uint32], row: Int32, col: Int32, left: Int32) -> None:
        """Store codes of columns that exist, if the row does: ``left`` is more than 0."""
        out, per_word = self.tensors.out, self.block // self.codec.code_words
        address = out.iterator.toint() + Int64(row) * out.stride[1] + self.codec.code_bytes(col)
        for i in range(0, len(codes), _MOST_WORDS):
            cols = self.cols - col - i * per_word
            self.store_vector(
                address + 4 * i, codes[i : i + _MOST_WORDS], (left, 0), (cols, 0), per_word
            )

    def store_blocks(
        self,
        words: list[Uint32],
        starts: list[Int32],
        row: Int32,
        left: Int32,
        global_scale: GlobalScaleRegisters,
    ) -> Uint32:
        """Store codes of whole blocks, whose parts begin at columns ``starts``; the word of their
        scales.
        """
        size, codes, joined = self.block // 2, [], Uint32(0)
        for i in range(0, len(words), size):
            part = words[i : i + size]
            made, stored = self.encode(part, self.amax(part), global_scale)
            codes += made
            stored = select(starts[0] + 2 * i < self.cols, stored, Uint32(0))
            joined = joined | (stored << (8 * i // size)) if i else stored
        each = len(codes) // len(starts)
        for i, col in enumerate(starts):
            self.store_codes(codes[i * each : (i + 1) * each], row, col, left)
        return joined


class StagedRows(Rows):
    """That of tiles with swapped operands: a lane has a row of 32 columns of the product, of a
    block or less.

    Args:
        amaxes: shared memory of this warp for those of rows of two blocks.
    """

    def __init__(self, config: Sm100GemmConfig, tensors: EpilogueTensors, amaxes: Int32):
        super().__init__(config, tensors)
        self.lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        #: Warps that have a part of a block each, and the barrier between them.
        self.sharing = config.sharing_warps
        self.barrier = NamedBarrierId.FIRST_SHARED + warp // self.sharing
        self.own, self.pitch = amaxes + self.lane * 4, config.staged_bytes // 4
        self.first = self.own - warp % self.sharing * self.pitch

    @cute.jit
    def sync(self) -> None:
        """Wait for the warps that share blocks."""
        if cutlass.const_expr(self.sharing > 1):
            cute.arch.barrier(barrier_id=self.barrier, number_of_threads=self.sharing * WARP_SIZE)

    def shared(self, amax: Float32, place: Int32) -> Float32:
        """The amax of a block from that of this warp's part."""
        if self.sharing > 1:
            store_shared(self.own + place, [f32_as_bits(amax)])
            self.sync()
            parts = (self.first + place + i * self.pitch for i in range(self.sharing))
            amax = functools.reduce(
                self.larger, (bits_as_f32(load_shared(part, 1)[0]) for part in parts)
            )
        return amax

    def store(
        self,
        vectors: list[list[Uint32]],
        row: Int32,
        slot: Int32,
        left: Int32,
        col: Int32,
        step: Int32,
        global_scale: GlobalScaleRegisters,
    ) -> None:
        """Quantize the ``step``-th row of a tile that a lane has, from column ``col`` of the
        product on.
        """
        words, at_once = [], 2 * self.halves
        for i in range(0, len(vectors), at_once):
            words += self.activate(vectors[i : i + at_once])
        size = min(self.block // 2, len(words))
        for i in range(0, len(words), size):
            part, at = words[i : i + size], col // self.halves + 2 * i
            amax = self.shared(self.amax(part), step % 2 * (WARP_SIZE * 4))
            codes, stored = self.encode(part, amax, global_scale)
            self.store_codes(codes, row, at, left)
            self.store_scale(select(left > 0, stored, Uint32(0)), slot, at)

    @cute.jit
    def finish(self, slot: Int32, first: Int32, rows: Int32, col: Int32) -> None:
        """Zeros for the scales of the slots of a group's last tile from the ``first`` on, after
        ``rows`` rows.
        """
        end, cols = rows + ((0 - (slot + rows)) & (TILE_ROWS - 1)), _SWAPPED_COLUMNS // self.halves
        col, warp = col // _SWAPPED_COLUMNS * cols, cute.arch.warp_idx()
        for at in cutlass.range(first + warp * WARP_SIZE, end, _SWAPPED_COLUMNS, unroll=1):
            self.clear(slot + at + self.lane, col, cols)
