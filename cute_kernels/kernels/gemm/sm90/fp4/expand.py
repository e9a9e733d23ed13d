"""NVFP4 codes and block scales to fp16 values in global memory, for operand N of the GEMM.

The values come in the order in which instructions contract them, see ``layout.lane_chunks``: of the
elements e + {0, 4, 1, 5} of four blocks 2 j + p, {0, 4} of j = 0 .. 3 first, then {1, 5}. Missing
elements up to a multiple of 128 are zeros.

A warp handles a row, a quad of lanes 128 elements of it. All four lanes read the codes. Each
decodes the elements of 16 bytes of every 64 that the quad stores together.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.device.codecs.e2m1_fp16 import high_bytes, scales_as_fp16, times_scale
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import GroupCursor, group_start
from cute_kernels.device.launch import GridKernel, compact, env_stream
from cute_kernels.device.memory import load_global_if, store_global
from cute_kernels.device.ptx import asm
from cute_kernels.device.scales import row_scales_at
from cute_kernels.layout.shapes import DECODED_CHUNK_K, PITCH_ALIGNMENT, SF_TILE_BYTES, SF_TILE_COLS
from cute_kernels.layout.slots import TILE_ROWS

from .config import ExpandConfig

_ROWS = 8
#: Bytes of codes of a block.
_BLOCK_BYTES = 8
_CHUNK_BYTES = DECODED_CHUNK_K // 2
_CHUNK_BLOCKS = _CHUNK_BYTES // _BLOCK_BYTES
_CHUNK_TILES = _CHUNK_BLOCKS // SF_TILE_COLS
#: Chunks that a warp handles at once, one per quad.
_CHUNKS = 8
#: 2^14 as two fp16.
_TWO_TO_14 = 0x74007400


class ExpandKernel(GridKernel):
    """The expand pass of one configuration. See the module's docstring."""

    ctas_per_sm, num_threads = 8, WARP_SIZE * _ROWS

    def __init__(self, config: ExpandConfig):
        self.config = config

    @staticmethod
    def fake_args(config: ExpandConfig) -> tuple[Any, ...]:
        """Return the fake arguments for compilation."""
        rows, width, pitch = (cute.sym_int(divisibility=d) for d in (1, 8, PITCH_ALIGNMENT))
        wide = cute.sym_int(divisibility=DECODED_CHUNK_K)
        tiles = (cute.sym_int(), cute.sym_int(), SF_TILE_BYTES)
        return (
            make_fake_tensor(Uint8, (rows, width), (pitch, 1), assumed_align=16),
            compact(Uint8, *tiles, align=16),
            compact(Int32, cute.sym_int(), align=4) if config.is_ragged else None,
            compact(cutlass.Float16, rows, wide, align=16),
            Int32(1),
            env_stream(),
        )

    @cute.kernel
    def kernel(
        self, codes: cute.Tensor, scales: cute.Tensor, offs: cute.Tensor | None, out: cute.Tensor
    ) -> None:
        """Expand codes to values.

        K of ``out`` is padded to a multiple of 128; rows of the tail are not written.

        Args:
            codes: (rows, K / 2) uint8.
            scales: (row tiles, K tiles, 512) uint8.
            offs: (G,) int32 end rows if ragged. None otherwise.
            out: (rows, padded K) fp16, written.
        """
        rows, width = codes.shape
        end_row = rows
        if const_expr(self.config.is_ragged):
            end_row = GroupCursor(offs, offs.shape[0], rows, Int32(0)).end_row()
        item, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        row_items = (end_row + (_ROWS - 1)) // _ROWS
        # Few rows are split along K, so that all CTAs have work.
        spans = (width + (_CHUNKS * _CHUNK_BYTES - 1)) // (_CHUNKS * _CHUNK_BYTES)
        num_splits = cutlass.max(cutlass.min(spans, step // cutlass.max(row_items, 1)), 1)
        for index in cutlass.range(item, row_items * num_splits, step, unroll=1):
            row = index // num_splits * _ROWS + cute.arch.warp_idx()
            if row < end_row:
                slot = self.slot_row(offs, rows, row)
                for span in cutlass.range(index % num_splits, spans, num_splits, unroll=1):
                    self.expand(codes, scales, out, row, slot, span)

    @cute.jit
    def slot_row(self, offs: cute.Tensor | None, rows: Int32, row: Int32) -> Int32:
        """Return the slot row of a row, at which its block scales are."""
        slot = row
        if const_expr(self.config.is_ragged):
            groups = GroupCursor(offs, offs.shape[0], rows, Int32(0))
            group, _ = groups.group_of_row(row, Int32(0))
            start = group_start(offs, group, rows)
            slot = (start // TILE_ROWS + group) * TILE_ROWS + (row - start)
        return slot

    @cute.jit
    def expand(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        out: cute.Tensor,
        row: Int32,
        slot: Int32,
        span: Int32,
    ) -> None:
        """Expand a span of chunks of a row."""
        lane = cute.arch.lane_idx()
        half, odd = lane // 2 % 2, lane % 2
        chunk = span * _CHUNKS + lane // 4
        words = self.load_codes(codes, row, chunk)
        pairs = self.load_scales(scales, slot, chunk)
        target = out.iterator.toint() + Int64(row) * (out.shape[1] * 2)
        target += (chunk * DECODED_CHUNK_K + lane % 4 * 8) * 2
        # This lane's code of each byte as its high nibble, and its two of four high bytes.
        shift = ((1 - odd) * 4).to(Uint32)
        selector = (0x2404 + half * (0x3414 - 0x2404)).to(Uint32)
        if chunk * DECODED_CHUNK_K < out.shape[1]:
            for word in range_constexpr(4):
                values = []
                for j in range_constexpr(4):
                    high = high_bytes(words[j][word] << shift, True)
                    halves = asm("prmt.b32 $0, $1, 0, $2;", [Uint32], [high, selector])
                    small = times_scale(halves, pairs[j], word // 2)
                    values.append(times_scale(small, Uint32(_TWO_TO_14), 0))
                store_global(target + word * 64, values)

    def load_codes(self, codes: cute.Tensor, row: Int32, chunk: Int32) -> list[list[Uint32]]:
        """Return four words per pair of blocks of a chunk; zeros past the end of the row."""
        source = codes.iterator.toint() + Int64(row) * codes.stride[0]
        first_byte = chunk * _CHUNK_BYTES
        words = [
            load_global_if(source + byte, _BLOCK_BYTES, byte, codes.shape[1])
            for byte in (first_byte + block * _BLOCK_BYTES for block in range(_CHUNK_BLOCKS))
        ]
        return [words[2 * j] + words[2 * j + 1] for j in range(_CHUNK_BLOCKS // 2)]

    def load_scales(self, scales: cute.Tensor, slot: Int32, chunk: Int32) -> list[Uint32]:
        """Return the scales of a chunk's four pairs of blocks, two fp16 per word."""
        source, pairs = row_scales_at(scales, slot), []
        for i in range(_CHUNK_TILES):
            tile = chunk * _CHUNK_TILES + i
            (word,) = load_global_if(source + tile * SF_TILE_BYTES, 4, tile, scales.shape[1])
            pairs += [scales_as_fp16(word), scales_as_fp16(word >> 16)]
        return pairs
