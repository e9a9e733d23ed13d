"""NVFP4 codes and block scales to exact fp16 or bf16 values.

The bits ``s ee m`` of a code, put into fp16 as ``s 000ee m000000000``, are its value times 2^-14, a
subnormal number if ee is 0. Times the block scale, an exact product, that is the value times 2^-14:
at most 6 significant bits, and a multiple of 2^-24. In bf16, as ``s 000000ee m000000``, they are
the value times 2^-126, and the block scale is multiplied by 2^119 first. The epilogue undoes the
remaining 2^-14 or 2^-7.

A thread has rows r and r + 8 of a fragment, and four elements of each for one instruction. In lane
j of a quad these are elements 2 j, 2 j + 1, 2 j + 8 and 2 j + 9. It reads 32 neighbouring codes of
a row at once, blocks 2 j and 2 j + 1 of the eight blocks of a chunk of K, and feeds them to eight
instructions. So one instruction gets four elements each of four blocks. Operand N has its elements
in the same order, that of ``layout.lane_chunks``: the bits of the sum depend on it.
"""

import itertools

from cutlass import Int32, Uint16, Uint32, cute

from cute_kernels.device.codecs.e2m1_fp16 import high_bytes, scales_as_fp16, times_scale, two_halves
from cute_kernels.device.memory import load_shared
from cute_kernels.device.ptx import asm
from cute_kernels.layout.shapes import (
    DECODED_CHUNK_K,
    SF_TILE_BYTES,
    SF_TILE_COLS,
    SF_TILE_ROWS,
    row_in_tile,
)

from ..config import WARPGROUP_M, Sm90GemmConfig
from ..warp_schedule import WARPGROUP_SIZE

#: Bytes of codes that a lane of a quad reads at once, and of their block scales.
_LANE_BYTES = 16
_LANE_SCALES = 2
#: From a row of a fragment to the second one of the same thread.
_NEXT_ROW = 8
#: Codes t and t + 4 of a prepacked word, t = 0 .. 3, as two fp16: see ``layout.prepack``.
_PREPACKED_PAIRS = (
    "and.b32 $0, $1, 0x8E008E00;",
    "{ .reg .b32 x; and.b32 x, $1, 0x40384038; mul.lo.u32 x, x, 66; and.b32 $0, x, 0x8E008E00; }",
    "{ .reg .b32 x; and.b32 x, $1, 0x20072007; mul.lo.u32 x, x, 516; and.b32 $0, x, 0x8E008E00; }",
    "{ .reg .b32 x; mul.lo.u32 x, $1, 8; and.b32 $0, x, 0x8E008E00; }",
)
#: Codes t and t + 4 of a word, t = 0 .. 3, as two bf16: the bits s, and the bits eem.
_BF16_PAIRS = [
    """{{
    .reg .b32 x, y;
    {0}
    {1}
    and.b32 y, y, 0x01C001C0;
    lop3.b32 $0, x, 0x80008000, y, 0xEA;
}}""".format(*shifts)
    for shifts in (
        ("mul.lo.u32 x, $1, 4096;", "mul.lo.u32 y, $1, 64;"),
        ("mul.lo.u32 x, $1, 256;", "mul.lo.u32 y, $1, 4;"),
        ("mul.lo.u32 x, $1, 16;", "shr.b32 y, $1, 2;"),
        ("mov.b32 x, $1;", "shr.b32 y, $1, 6;"),
    )
]
#: Two block scales to bf16, times 2^119.
_BF16_SCALES = """{
    .reg .b32 pair;
    .reg .b16 codes, high, lo, hi;
    .reg .f32 x, y;
    mov.b32 {codes, high}, $1;
    cvt.rn.f16x2.e4m3x2 pair, codes;
    mov.b32 {lo, hi}, pair;
    cvt.f32.f16 x, lo;
    cvt.f32.f16 y, hi;
    mul.rn.f32 x, x, 0f7B000000;
    mul.rn.f32 y, y, 0f7B000000;
    cvt.rn.bf16x2.f32 $0, y, x;
}"""


def _load_u16(address: Int32) -> Uint32:
    pointer = cute.make_ptr(Uint16, address, cute.AddressSpace.smem, assumed_align=2)
    return cute.make_tensor(pointer, cute.make_layout(1))[0].to(Uint32)


def scales_as_bf16(pair: Uint32) -> Uint32:
    """Return the two E4M3 scales in the low half of ``pair``, times 2^119, as two bf16."""
    return asm(_BF16_SCALES, [Uint32], [pair])


class _Fp16Codes:
    """Decoder of codes in their natural order, to fp16.

    Args:
        words: Number of words in use at a time; ``index`` is the number of a word.
    """

    dtype = "f16"
    scales = staticmethod(scales_as_fp16)

    def __init__(self, words: int):
        #: High bytes of each word, of its even and its odd codes.
        self.high = cute.make_rmem_tensor((2, words), Uint32)

    def pair(self, codes: Uint32, t: int, index: int) -> Uint32:
        """Return codes t and t + 4 of a word, t = 0 .. 3, in ascending order of t."""
        half, is_odd = divmod(t, 2)
        if half == 0:
            self.high[is_odd, index] = high_bytes(codes, is_odd == 1)
        return two_halves(self.high[is_odd, index], half)


class _PrepackedCodes:
    """Decoder of codes in the bit order of ``layout.prepack``, to fp16."""

    dtype = "f16"
    scales = staticmethod(scales_as_fp16)

    def pair(self, codes: Uint32, t: int, index: int) -> Uint32:
        """Return codes t and t + 4 of a word."""
        return asm(_PREPACKED_PAIRS[t], [Uint32], [codes])


class _Bf16Codes:
    """Decoder of codes in their natural order, to bf16."""

    dtype = "bf16"
    scales = staticmethod(scales_as_bf16)

    def pair(self, codes: Uint32, t: int, index: int) -> Uint32:
        """Return codes t and t + 4 of a word."""
        return asm(_BF16_PAIRS[t], [Uint32], [codes])


class FragmentDecoder:
    """Decoder of a consumer thread's fragments of operand M.

    Args:
        config: Configuration of the kernel.
        codes: Stages of codes, (rows, bytes, STAGE).
        scales: Stages of scale tiles as words, (row tiles, K tiles, words, STAGE).
    """

    def __init__(self, config: Sm90GemmConfig, codes: cute.Tensor, scales: cute.Tensor):
        self.stage_bytes = config.m_stage_bytes
        #: Rows from one fragment to the thread's next, and how many it has.
        self.step = config.consumers * WARPGROUP_M
        self.repeats = config.tile.m // self.step
        #: Instructions of a group, and groups of a chunk of K.
        self.group_blocks = config.k_blocks // config.k_groups
        self.groups_per_chunk = config.k_groups // config.chunks_per_stage
        #: Bytes of codes of a row and of all rows of a chunk.
        self.row_bytes = DECODED_CHUNK_K * config.kind.bits // 8
        self.chunk_bytes = config.tile.m * self.row_bytes
        #: Bytes of scale tiles of 128 rows: of a chunk, and of a stage.
        self.chunk_scale_bytes = DECODED_CHUNK_K // config.kind.scale_tile_k * SF_TILE_BYTES
        self.scale_row_bytes = config.chunks_per_stage * self.chunk_scale_bytes
        #: True if rows alternate between two tiles of scales; bytes from a row's scales to the
        #: next's.
        self.interleaves = config.interleaves_halves
        self.next_scales = _NEXT_ROW // (1 + self.interleaves) * 16
        thread = cute.arch.thread_idx()[0]
        lane, quad_lane = thread % 32, thread % 4
        row = thread // WARPGROUP_SIZE * WARPGROUP_M
        row += thread % WARPGROUP_SIZE // 32 * 16 + lane // 4
        self.codes_address = codes.iterator.toint() + self.codes_offset(row, quad_lane)
        self.scale_address = scales.iterator.toint() + self.scale_offset(row, quad_lane)
        self.words = cute.make_rmem_tensor((_LANE_BYTES // 4, 2, self.repeats), Uint32)
        self.scales = cute.make_rmem_tensor((2, self.repeats), Uint32)
        if config.multiplied == "bfloat16":
            self.codes = _Bf16Codes()
        elif config.prepacked:
            self.codes = _PrepackedCodes()
        else:
            self.codes = _Fp16Codes(2 * self.repeats)

    def codes_offset(self, row: Int32, quad_lane: Int32) -> Int32:
        """Return the offset of the thread's first codes in a stage.

        Rows follow each other without a swizzle: eight lanes read 128 neighbouring bytes.
        """
        return row * self.row_bytes + quad_lane * _LANE_BYTES

    def scale_offset(self, row: Int32, quad_lane: Int32) -> Int32:
        """Return the offset of the thread's first scales in a stage."""
        lanes_of_tile = SF_TILE_COLS // _LANE_SCALES
        tile = row // SF_TILE_ROWS
        if self.interleaves:
            tile, row = row % 2, row // 2
        return (
            tile * self.scale_row_bytes
            + quad_lane // lanes_of_tile * SF_TILE_BYTES
            + row_in_tile(row)
            + quad_lane % lanes_of_tile * _LANE_SCALES
        )

    def load(self, stage: Int32, chunk: int) -> None:
        """Load the codes and scales of a chunk of K of a stage into registers."""
        codes = self.codes_address + stage * self.stage_bytes[0] + chunk * self.chunk_bytes
        scales = self.scale_address + stage * self.stage_bytes[1]
        scales += chunk * self.chunk_scale_bytes
        for repeat in range(self.repeats):
            for row in range(2):
                address = codes + (repeat * self.step + row * _NEXT_ROW) * self.row_bytes
                for i, word in enumerate(load_shared(address, _LANE_BYTES // 4)):
                    self.words[i, row, repeat] = word
                address = scales + row * self.next_scales
                if self.interleaves:
                    address += repeat * (self.step // 2 // 32 * SF_TILE_COLS)
                else:
                    address += repeat * (self.step // SF_TILE_ROWS) * self.scale_row_bytes
                self.scales[row, repeat] = self.codes.scales(_load_u16(address))

    def decode(self, fragment: cute.Tensor, stage: Int32, group: int) -> None:
        """Write the fragment of a stage's group of instructions, ((2, 2, 2), repeats, blocks)."""
        chunk, group = divmod(group, self.groups_per_chunk)
        if group == 0:
            self.load(stage, chunk)
        bits = cute.recast_tensor(fragment, Uint32)
        shape = (4, self.repeats, self.group_blocks)
        target = cute.make_tensor(bits.iterator, cute.make_layout(shape))
        for i in range(self.group_blocks):
            # Two instructions for each word of eight codes, four words, two of them a block.
            word, half = divmod(group * self.group_blocks + i, 2)
            for repeat, row, is_odd in itertools.product(range(self.repeats), range(2), range(2)):
                codes = self.words[word, row, repeat]
                pair = self.codes.pair(codes, 2 * half + is_odd, row + 2 * repeat)
                scale = self.scales[row, repeat]
                value = times_scale(pair, scale, word // 2, self.codes.dtype)
                target[2 * is_odd + row, repeat, i] = value
