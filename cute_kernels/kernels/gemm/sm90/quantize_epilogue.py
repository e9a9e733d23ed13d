"""Codes and block scales of the activated rows of a staged tile.

A tile has 256 columns of the product. Either a consumer warpgroup staged them for the warpgroup
that stores, in rows of 64, or four warpgroups have 64 columns each. Warpgroups that share a block
exchange their amaxes.
"""

import functools
from typing import Any

import cutlass
from cutlass import Int32, Uint32, const_expr, cute, range_constexpr

from cute_kernels.device.codecs import GlobalScaleRegisters
from cute_kernels.device.memory import load_shared, store_shared
from cute_kernels.device.ptx import bits_as_f32, f32_as_bits, select
from cute_kernels.layout.slots import TILE_ROWS

from ..common.activation_epilogue import Window, store_if
from ..common.output_store import VECTOR_BYTES
from ..common.quantize_epilogue import QuantizedRows
from ..common.scheduler import WorkTile
from .config import WARPGROUP_M, Sm90GemmConfig
from .warp_schedule import CONSUMERS_BARRIER, WARPGROUP_SIZE

#: Lanes of a staged row of 128 bytes; rows of as many lanes.
_LANES = 8
#: Vectors that a lane activates at once, and words of codes of a store.
_AT_ONCE, _STORE_WORDS = 2, 4


class StagedBlocks(QuantizedRows):
    """Quantizer in a warpgroup's epilogue."""

    def __init__(self, config: Sm90GemmConfig, epilogue: Any):
        super().__init__(config, epilogue.tensors)
        self.epilogue = epilogue
        self.num_threads = config.consumers * WARPGROUP_SIZE
        #: Columns of a staged row's result, and number of staged rows that share a block.
        self.row_cols = WARPGROUP_M // self.halves
        self.sharing = max(1, self.block // self.row_cols)
        #: Columns of a word of codes.
        self.per_word = self.block // self.codec.code_words

    @cute.jit
    def store_tile(self, tile: WorkTile) -> None:
        """Quantize 64 rows that a consumer warpgroup staged as four blocks.

        A lane has a row of one block.
        """
        config, epilogue = self.config, self.epilogue
        warp, lane = epilogue.thread // 32, epilogue.lane
        row, block = warp * _LANES + lane % _LANES, lane // _LANES
        swizzled = lane % _LANES * VECTOR_BYTES
        address = epilogue.blocks + block * config.block_bytes + row * (_LANES * VECTOR_BYTES)
        first_row, global_scale = epilogue.first_m, self.global_scale(tile.group)
        rows = tile.rows - first_row - row
        window = Window.locate(
            config,
            epilogue.tensors,
            tile.group,
            tile.m_row + first_row + row,
            tile.n_row + block * WARPGROUP_M,
            rows,
        )
        slot, col = (
            tile.m_sf_row + first_row + row,
            (tile.n_row >> config.is_gated) + block * self.row_cols,
        )
        for i in cutlass.range(config.tile.m // config.consumers // (4 * _LANES), unroll=1):
            after = i * (4 * _LANES)
            size, codes = min(self.block, self.row_cols), []
            for start in range_constexpr(0, self.row_cols, size):
                words, vectors = (
                    [],
                    range(
                        start * _LANES // self.row_cols, (start + size) * _LANES // self.row_cols
                    ),
                )
                for j in range_constexpr(vectors.start, vectors.stop, _AT_ONCE):
                    addresses = [
                        address
                        + after * (_LANES * VECTOR_BYTES)
                        + (swizzled ^ (j + k) * VECTOR_BYTES)
                        for k in range(_AT_ONCE)
                    ]
                    words += self.activate(
                        [load_shared(store_address, 4) for store_address in addresses]
                    )
                encoded, stored = self.encode(
                    words, self.amax(words, self.sharing, _LANES), global_scale
                )
                live = window.moved(after, Int32(0), 1, self.halves)
                codes += encoded
                if const_expr(len(codes) >= _STORE_WORDS):
                    first_col = start + size - len(codes) * self.per_word
                    limits = (live.rows, 0), (live.cols, first_col * self.halves)
                    for j in range_constexpr(0, len(codes), _STORE_WORDS):
                        store_address = live.out.address_at(
                            0, self.codec.code_bytes(first_col) + 4 * j
                        )
                        if const_expr(self.codec.code_words < _STORE_WORDS):
                            self.store_vector(
                                store_address, codes, *limits, self.per_word * self.halves
                            )
                        else:
                            store_if(store_address, codes[j : j + _STORE_WORDS], *limits)
                    codes = []
                self.store_scale(
                    select(live.rows > 0, stored, Uint32(0)), slot + after, col + start
                )

    def joined(self, words: list[Uint32]) -> list[Uint32]:
        """Return the words of a lane and its neighbours, in order in the first lane.

        There are enough for a word of codes, or for a block if the search for its scale needs all
        of it.
        """
        num_words, min_words = (
            len(words),
            self.block if self.codec.searches_scale else self.per_word,
        )
        while len(words) < min_words // 2:
            words = words + [
                Uint32(cute.arch.shuffle_sync_bfly(word, offset=len(words) // num_words))
                for word in words
            ]
        return words

    @cute.jit
    def begin(self, tile: WorkTile) -> None:
        """Wait until amaxes of the previous tile have been read.

        Then clear the scales of slots of the group's last tile that have no row.
        """
        epilogue = self.epilogue
        cute.arch.barrier(barrier_id=CONSUMERS_BARRIER, number_of_threads=self.num_threads)
        if tile.rows <= self.config.tile.n:
            first_slot = tile.n_sf_row + tile.rows
            if (epilogue.group == 0) & (epilogue.thread < ((0 - first_slot) & (TILE_ROWS - 1))):
                self.clear(
                    first_slot + epilogue.thread,
                    tile.m_row >> self.config.is_gated,
                    self.config.tile.m // self.halves,
                )

    @cute.jit
    def store_block(
        self,
        tile: WorkTile,
        buffer: Int32,
        window: Window,
        slot: Int32,
        first_row: int,
        global_scale: GlobalScaleRegisters,
    ) -> None:
        """Quantize rows from ``first_row`` on, of which four warpgroups have a quarter each.

        A lane has one vector.
        """
        epilogue, sharing, rows = self.epilogue, self.sharing, window.rows
        row, lane = epilogue.thread_row, epilogue.thread % _LANES
        words = self.activate(
            [load_shared(epilogue.element_address(buffer, row, epilogue.thread_col), 4)]
        )
        lanes = min(_LANES, self.block * _LANES // self.row_cols)
        amax = self.amax(words, lanes)
        num_words, words = len(words), self.joined(words)
        if const_expr(len(words) > num_words):
            rows = select(lane % (len(words) // num_words) == 0, rows, Int32(0))
        if const_expr(sharing > 1):
            amax_address = epilogue.amaxes + (slot * epilogue.block_rows + row) * (
                4 * self.config.consumers
            )
            if (lane == 0) & (epilogue.thread < epilogue.vectors):
                store_shared(amax_address + epilogue.group * 4, [f32_as_bits(amax)])
            cute.arch.barrier(barrier_id=CONSUMERS_BARRIER, number_of_threads=self.num_threads)
            if const_expr(sharing < self.config.consumers):
                amax_address += (epilogue.group & -sharing) * 4
            amax = functools.reduce(
                self.larger, map(bits_as_f32, load_shared(amax_address, sharing))
            )
        codes, stored = self.encode(words, amax, global_scale)
        store_if(window.out.address_at(first_row, 0), codes, (rows, first_row), (window.cols, 0))
        if (lane % lanes == 0) & (window.rows > first_row):
            col = (tile.m_row + epilogue.first_m + epilogue.thread_col) >> self.config.is_gated
            self.store_scale(stored, tile.n_sf_row + first_row + row, col)
