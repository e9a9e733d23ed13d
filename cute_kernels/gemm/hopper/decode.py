"""NVFP4 codes and block scales to exact fp16 values.

The bits ``s ee m`` of a code, put into fp16 as ``s 000ee m000000000``, are its value times 2^-14, a
subnormal number where ee is 0. Times 2^14 and times the block scale, an exact product each, that is
the value: at most 6 significant bits, a multiple of 2^-10 and no more than 2688.

A thread gets four neighbouring elements of a block of 16: k = 4 j to 4 j + 3 in lane j of a quad.
The tensor core takes elements 2 j, 2 j + 1 and 2 j + 8, 2 j + 9 from that lane. So the even k of a
block go first and the odd ones after them, in both operands. The sum of a block does not depend on
their order: one instruction contracts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutlass import Int32, Uint16, Uint32, cute

from cute_kernels.device.memory import load_shared
from cute_kernels.device.ptx import asm
from cute_kernels.gemm.hopper.config import WARPGROUP_M
from cute_kernels.gemm.hopper.loader import SCALE_TILE_K
from cute_kernels.gemm.hopper.warp_schedule import WARPGROUP_SIZE
from cute_kernels.shapes import SF_TILE_BYTES, SF_TILE_COLS, SF_TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.hopper.config import HopperGemmConfig

__all__ = ["FragmentDecoder", "high_bytes", "scales_as_fp16", "times_scale"]

#: Bytes of the codes of one block of 16.
_BLOCK_BYTES = 8
#: What TMA's swizzles move about, and the rows of 128 bytes after which they repeat.
_CHUNK_BYTES = 16
_SWIZZLE_ROWS = 8
#: From a row of a fragment to the second one of the same thread.
_NEXT_ROW = 8
#: Codes in the low nibbles of four bytes, and in the high ones, to bytes ``s 000 eem 0``: the high
#: bytes of fp16. Left shifts are multiplications, which use another unit than the logic.
_EVEN_CODES = """{
    .reg .b32 x, y;
    mul.lo.u32 x, $1, 16;
    mul.lo.u32 y, $1, 2;
    and.b32 y, y, 0x0E0E0E0E;
    lop3.b32 $0, x, 0x80808080, y, 0xEA;
}"""
_ODD_CODES = """{
    .reg .b32 y;
    shr.b32 y, $1, 3;
    and.b32 y, y, 0x0E0E0E0E;
    lop3.b32 $0, $1, 0x80808080, y, 0xEA;
}"""
_SCALE = """{{
    .reg .b32 s, x;
    .reg .b16 lo, hi;
    mov.b32 {{lo, hi}}, $2;
    mov.b32 s, {{{which}, {which}}};
    mul.rn.f16x2 x, $1, $3;
    mul.rn.f16x2 $0, x, s;
}}"""
#: 2^14 as two fp16.
_TWO_TO_14 = 0x74007400


def high_bytes(codes: Uint32, is_odd: bool) -> Uint32:
    """The high byte of fp16, value times 2^-14, of one code in each of four bytes.

    Args:
        codes: bytes of two codes each.
        is_odd: take the second code of each, which is the high nibble.
    """
    return asm(_ODD_CODES if is_odd else _EVEN_CODES, [Uint32], [codes])


def two_halves(high: Uint32, first: int) -> Uint32:
    """Bytes ``first`` and ``first + 2`` of ``high`` as the high bytes of two fp16."""
    if first == 1:
        return high & Uint32(0xFF00FF00)
    return asm("prmt.b32 $0, $1, 0, 0x2404;", [Uint32], [high])


def times_scale(halves: Uint32, scales: Uint32, which: int) -> Uint32:
    """Two fp16 times 2^14 and times one of two block scales in fp16."""
    text = _SCALE.format(which=("lo", "hi")[which])
    return asm(text, [Uint32], [halves, scales, Uint32(_TWO_TO_14)])


def scales_as_fp16(word: Uint32) -> list[Uint32]:
    """Four E4M3 scales as two words of two fp16 each."""
    text = """{
        .reg .b16 lo, hi;
        mov.b32 {lo, hi}, $2;
        cvt.rn.f16x2.e4m3x2 $0, lo;
        cvt.rn.f16x2.e4m3x2 $1, hi;
    }"""
    return list(asm(text, [Uint32, Uint32], [word]))


def _load_u16(address: Int32) -> Uint32:
    pointer = cute.make_ptr(Uint16, address, cute.AddressSpace.smem, assumed_align=2)
    return cute.make_tensor(pointer, cute.make_layout(1))[0].to(Uint32)


class FragmentDecoder:
    """Makes a consumer thread's fragments of operand M.

    Args:
        config: the kernel's configuration.
        codes: stages of codes, (rows, bytes, STAGE).
        scales: stages of scale tiles as words, (row tiles, K tiles, words, STAGE).
    """

    def __init__(self, config: HopperGemmConfig, codes: cute.Tensor, scales: cute.Tensor):
        thread = cute.arch.thread_idx()[0]
        lane = thread % 32
        row = thread // WARPGROUP_SIZE * WARPGROUP_M
        row += thread % WARPGROUP_SIZE // 32 * 16 + lane // 4
        self.stage_bytes = config.m_stage_bytes
        self.step = config.consumers * WARPGROUP_M
        self.repeats = config.tile.m // self.step
        self.blocks = config.k_blocks
        self.group_blocks = config.k_blocks // config.k_groups
        # TMA's swizzle of as many bytes as a row has: 16-byte chunks change places with the row.
        self.row_bytes = config.stage_k * config.kind.bits // 8
        chunks = self.row_bytes // _CHUNK_BYTES
        place = row // (_SWIZZLE_ROWS // chunks) % chunks
        start = codes.iterator.toint() + row * self.row_bytes + lane % 4 * 2
        self.chunk_addresses = [start + (place ^ chunk) * _CHUNK_BYTES for chunk in range(chunks)]
        #: Bytes of scale tiles that follow each other along K in a stage.
        self.scale_row_bytes = config.stage_k // SCALE_TILE_K * SF_TILE_BYTES
        self.scale_address = (
            scales.iterator.toint()
            + row // SF_TILE_ROWS * self.scale_row_bytes
            + row % 32 * 16
            + row % SF_TILE_ROWS // 32 * 4
        )
        self.words = cute.make_rmem_tensor((self.blocks, self.repeats), Uint32)
        self.scales = cute.make_rmem_tensor((self.blocks // 2, 2, self.repeats), Uint32)

    def load(self, stage: Int32) -> None:
        """Read the thread's codes and block scales of a stage."""
        offset = stage * self.stage_bytes[0]
        chunks = [address + offset for address in self.chunk_addresses]
        base = self.scale_address + stage * self.stage_bytes[1]
        for repeat in range(self.repeats):
            for block in range(self.blocks):
                at = chunks[block // 2] + block % 2 * _BLOCK_BYTES
                self.words[block, repeat] = self._load_codes(at, repeat)
            first = base + repeat * (self.step // SF_TILE_ROWS) * self.scale_row_bytes
            for row in range(2):
                for tile in range(self.blocks // SF_TILE_COLS):
                    at = first + row * _NEXT_ROW * 16 + tile * SF_TILE_BYTES
                    for half, pair in enumerate(scales_as_fp16(load_shared(at, 1)[0])):
                        self.scales[tile * 2 + half, row, repeat] = pair

    def _load_codes(self, base: Int32, repeat: int) -> Uint32:
        """Four codes of each of the thread's rows: bytes x0 y0 x1 y1 of rows x and y."""
        at = base + repeat * self.step * self.row_bytes
        x, y = _load_u16(at), _load_u16(at + _NEXT_ROW * self.row_bytes)
        return asm("prmt.b32 $0, $1, $2, 0x5140;", [Uint32], [x, y])

    def decode(self, fragment: cute.Tensor, group: int) -> None:
        """Write the fragment of a group of instructions, ((2, 2, 2), repeats, blocks) fp16."""
        bits = cute.recast_tensor(fragment, Uint32)
        shape = (4, self.repeats, self.group_blocks)
        target = cute.make_tensor(bits.iterator, cute.make_layout(shape))
        for i in range(self.group_blocks):
            block = group * self.group_blocks + i
            for repeat in range(self.repeats):
                x, y = (self.scales[block // 2, row, repeat] for row in range(2))
                word = self.words[block, repeat]
                for is_odd in range(2):
                    high = high_bytes(word, is_odd == 1)
                    for row, scale in enumerate((x, y)):
                        halves = times_scale(two_halves(high, row), scale, block % 2)
                        target[2 * is_odd + row, repeat, i] = halves
