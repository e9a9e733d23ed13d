"""Codes and scales of the activated rows of a product, as ``grouped_quantize`` would compute them.

Rows of scales are in slots. Scales of rows that a group's last tile of 128 lacks are zeros, as the
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

from .activation_epilogue import activation_inputs, apply_activation, store_if
from .config import GemmConfig
from .output_store import EpilogueTensors


class QuantizedRows:
    """Quantizer of the rows of a tile that threads hold in vectors."""

    def __init__(self, config: GemmConfig, tensors: EpilogueTensors):
        self.config = config
        self.tensors = tensors
        self.dtype, self.arch = config.out_dtype, config.arch
        self.codec: Codec = codec_of(config.quantizes_to or "", self.dtype, self.arch)
        self.halves, self.nan = 1 + config.is_gated, self.codec.fmt.amaxes_keep_nan
        self.block, self.is_tiled = self.codec.block, self.codec.fmt.has_scale_tiles
        self.cols = tensors.columns(config)
        #: Columns that the scales of one word cover.
        self.word_columns = self.block * (SF_TILE_COLS if self.is_tiled else 1)

    def activate(self, vectors: list[list[Uint32]]) -> list[Uint32]:
        """Return the words of the activation's rounded result.

        ``vectors`` follow each other in a row of the product.
        """
        return pack_words(
            apply_activation(self.config, activation_inputs(self.config, vectors)), self.dtype
        )

    def amax(self, words: list[Uint32], lanes: int = 1, distance: int = 1) -> Float32:
        """Return the largest magnitude of the vectors of a row that ``lanes`` lanes hold.

        The lanes are ``distance`` lanes from each other.
        """
        packed, mates = absmax_packed(words, self.dtype, self.arch, self.nan), 1
        while mates < lanes:
            received = Uint32(cute.arch.shuffle_sync_bfly(packed, offset=mates * distance))
            packed = absmax_packed([packed, received], self.dtype, self.arch, self.nan)
            mates *= 2
        return unpack_absmax(packed, self.dtype, self.arch, self.nan)

    def larger(self, a: Float32, b: Float32) -> Float32:
        """Return the larger of the amaxes of two vectors of a block."""
        return fmax(a, b, self.nan)

    def global_scale(self, group: Int32) -> GlobalScaleRegisters:
        """Return the registers of the global scale of a group."""
        amax = self.tensors.global_scale
        return () if amax is None else self.codec.global_scale(amax[group])

    def encode(
        self, words: list[Uint32], amax: Float32, global_scale: GlobalScaleRegisters = ()
    ) -> tuple[list[Uint32], Uint32]:
        """Return the words of codes of a block, or a vector of it, and its scale as it is stored.

        ``amax`` is that of the whole block.
        """
        if self.codec.searches_scale:
            amax = self.codec.choose_row(words, amax, global_scale)
        stored, factor = self.codec.block_scale(amax, global_scale)
        return self.codec.encode_row(words, factor), stored

    def store_vector(
        self,
        address: Int64,
        words: list[Uint32],
        rows: tuple[Int32, int],
        cols: tuple[Int32, int],
        per_word: int,
    ) -> None:
        """Store words of codes as ``store_if`` does.

        It stores all of them at once if all exist and the pitch of rows aligns them.
        """
        (num_rows, row), (num_cols, col), at_once = rows, cols, min(4, self.codec.code_words)
        is_whole = ((address & Int64(4 * len(words) - 1)) == 0) & (
            num_cols >= col + len(words) * per_word
        )
        store_if(address, words, (select(is_whole, num_rows, Int32(0)), row), cols)
        separate_rows = select(is_whole, Int32(0), num_rows)
        for j in range(0, len(words), at_once):
            store_if(
                address + 4 * j,
                words[j : j + at_once],
                (separate_rows, row),
                (num_cols, col + j * per_word),
            )

    def scale_address(self, slot: Int32, col: Int32) -> Int64:
        """Return the address of the scale of a slot row, for the block that contains ``col``."""
        # Columns are not negative. A division of signed numbers would test that.
        scales, block = self.tensors.scales, col >> (self.block.bit_length() - 1)
        if not self.is_tiled:
            return scales.iterator.toint() + (Int64(block) * scales.stride[0] + slot) * 4
        return row_scales_at(scales, slot) + (
            Int64(block >> 2) * SF_TILE_BYTES + (block & (SF_TILE_COLS - 1))
        )

    @cute.jit
    def store_scale(self, stored: Uint32, slot: Int32, col: Int32) -> None:
        """Store the scale of a block that begins at ``col``, and zeros after the last block."""
        if ((col & (self.block - 1)) == 0) & (col < self.cols):
            address = self.scale_address(slot, col)
            if cutlass.const_expr(not self.is_tiled):
                store_global(address, [stored])
            else:
                store_global_byte(address, stored)
                if col + self.block == self.cols:
                    for i in cutlass.range(
                        1, SF_TILE_COLS - col // self.block % SF_TILE_COLS, unroll=1
                    ):
                        store_global_byte(address + i, Uint32(0))

    def store_word(
        self, word: Uint32, slot: Int32, col: Int32, rows_left: Int32, in_slots: Int32
    ) -> None:
        """Store the word of scales of a slot row that covers ``col``.

        It is 0 if the row does not exist.
        """
        address = self.scale_address(slot, col) & Int64(-4)
        exists = self.cols - (col & -self.word_columns)
        store_if(address, [select(rows_left > 0, word, Uint32(0))], (in_slots, 0), (exists, 0))

    def clear(self, slot: Int32, col: Int32, cols: int) -> None:
        """Store zeros for the scales of ``cols`` columns of a slot row that does not exist."""
        for after in range(0, cols, self.word_columns):
            self.store_word(Uint32(0), slot, col + after, Int32(0), Int32(1))
