"""What an activation makes of rows of a product, as ``grouped_quantize`` would read it, to codes
and scales.

Rows of scales lie in slots: those that no row has in a group's last tile of 128 are zeros, as the
quantizer leaves them, and so are those past the last block in a tile of scales.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.device.absmax import absmax_packed, fmax, unpack_absmax
from cute_kernels.device.codecs import Codec, GlobalScaleRegisters, codec_of
from cute_kernels.device.convert import pack_words
from cute_kernels.device.memory import store_global, store_global_byte
from cute_kernels.device.ptx import select
from cute_kernels.device.scales import row_scales_at
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_COLS

from .activation_epilogue import apply, inputs_of, store_if
from .config import GemmConfig
from .output_store import EpilogueTensors


class QuantizedRows:
    """What becomes of rows of a tile, of which threads have parts."""

    def __init__(self, config: GemmConfig, tensors: EpilogueTensors):
        self.config = config
        self.tensors = tensors
        self.dtype, self.arch = config.out_dtype, config.arch
        self.codec: Codec = codec_of(config.quantizes_to or "", self.dtype, self.arch)
        self.halves, self.nan = 1 + config.is_gated, self.codec.fmt.amaxes_keep_nan
        self.block, self.is_tiled = self.codec.block, self.codec.fmt.has_scale_tiles
        self.cols = tensors.columns(config)
        #: Columns of the scales of a word.
        self.word_columns = self.block * (SF_TILE_COLS if self.is_tiled else 1)

    def activate(self, vectors: list[list[Uint32]]) -> list[Uint32]:
        """Words of the activation's rounded result, of vectors that follow each other in a row of
        the product.
        """
        return pack_words(apply(self.config, inputs_of(self.config, vectors)), self.dtype)

    def amax(self, words: list[Uint32], lanes: int = 1, apart: int = 1) -> Float32:
        """The largest magnitude of a row's part that so many lanes have, each so far from the next."""
        packed, mates = absmax_packed(words, self.dtype, self.arch, self.nan), 1
        while mates < lanes:
            other = Uint32(cute.arch.shuffle_sync_bfly(packed, offset=mates * apart))
            packed = absmax_packed([packed, other], self.dtype, self.arch, self.nan)
            mates *= 2
        return unpack_absmax(packed, self.dtype, self.arch, self.nan)

    def larger(self, a: Float32, b: Float32) -> Float32:
        """The larger amax of parts of a block."""
        return fmax(a, b, self.nan)

    def level(self, group: Int32) -> GlobalScaleRegisters:
        """The second level of a group."""
        amax = self.tensors.level
        return () if amax is None else self.codec.global_scale(amax[group])

    def encode(
        self, words: list[Uint32], amax: Float32, level: GlobalScaleRegisters = ()
    ) -> tuple[list[Uint32], Uint32]:
        """Words of codes of a block with that amax, or of a part of it, and its scale as it is
        stored.
        """
        if self.codec.searches_scale:
            amax = self.codec.choose_row(words, amax, level)
        stored, factor = self.codec.block_scale(amax, level)
        return self.codec.encode_row(words, factor), stored

    def store_vector(
        self,
        at: Int64,
        words: list[Uint32],
        rows: tuple[Int32, int],
        cols: tuple[Int32, int],
        per_word: int,
    ) -> None:
        """``store_if`` of words of codes, at once where all exist and are aligned, which the pitch
        of rows decides.
        """
        (left, row), (right, col), at_once = rows, cols, min(4, self.codec.code_words)
        whole = ((at & Int64(4 * len(words) - 1)) == 0) & (right >= col + len(words) * per_word)
        store_if(at, words, (select(whole, left, Int32(0)), row), cols)
        rest = select(whole, Int32(0), left)
        for j in range(0, len(words), at_once):
            store_if(at + 4 * j, words[j : j + at_once], (rest, row), (right, col + j * per_word))

    def scale_at(self, slot: Int32, col: Int32) -> Int64:
        """Where the scale of a slot row goes, of the block of a column."""
        # Columns are not negative, which divisions of signed numbers would ask.
        scales, block = self.tensors.scales, col >> (self.block.bit_length() - 1)
        if not self.is_tiled:
            return scales.iterator.toint() + (Int64(block) * scales.stride[0] + slot) * 4
        return row_scales_at(scales, slot) + (
            Int64(block >> 2) * SF_TILE_BYTES + (block & (SF_TILE_COLS - 1))
        )

    @cute.jit
    def store_scale(self, stored: Uint32, slot: Int32, col: Int32) -> None:
        """Store the scale of a block that begins at a column, and zeros after the last one."""
        if ((col & (self.block - 1)) == 0) & (col < self.cols):
            at = self.scale_at(slot, col)
            if cutlass.const_expr(not self.is_tiled):
                store_global(at, [stored])
            else:
                store_global_byte(at, stored)
                if col + self.block == self.cols:
                    for i in cutlass.range(
                        1, SF_TILE_COLS - col // self.block % SF_TILE_COLS, unroll=1
                    ):
                        store_global_byte(at + i, Uint32(0))

    def store_word(
        self, word: Uint32, slot: Int32, col: Int32, left: Int32, in_slots: Int32
    ) -> None:
        """Store the scales of a slot row of which ``col`` is one of the columns; zeros unless the
        row exists.
        """
        at = self.scale_at(slot, col) & Int64(-4)
        exists = self.cols - (col & -self.word_columns)
        store_if(at, [select(left > 0, word, Uint32(0))], (in_slots, 0), (exists, 0))

    def clear(self, slot: Int32, col: Int32, cols: int) -> None:
        """Zeros for the scales of so many columns of a slot row that does not exist."""
        for after in range(0, cols, self.word_columns):
            self.store_word(Uint32(0), slot, col + after, Int32(0), Int32(1))
