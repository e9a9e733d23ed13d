"""fp32 block scales that are powers of two, as tiles of E8M0, of both operands in one launch.

Rows of the halves of B are interleaved if the GEMM does that. Tiles of B that exist already are
permuted.

Instructions need a scale for every 32 of K, and a scale of 128 is that of four blocks. The tiles
have the layout in which the quantizers of MXFP8 write theirs, so the GEMM after this kernel is that
of MXFP8. The exponent of fp32 has the bias of E8M0; that of 2^-127, a subnormal, is 0 in both.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.launch import compact, env_stream
from cute_kernels.device.memory import store_global
from cute_kernels.device.ptx import f32_as_bits
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_ROWS, row_in_tile

from ..common.views import scale_words_view, squares_view
from .config import ScaleTilesConfig

_WARPS = 8
_CTAS_PER_SM = 4
#: A byte times this is four copies of it.
_FOUR = 0x01010101


class ScaleTilesKernel:
    """The pass of one configuration. See the module's docstring."""

    def __init__(self, config: ScaleTilesConfig):
        self.config = config

    @staticmethod
    def fake_args(config: ScaleTilesConfig) -> tuple[Any, ...]:
        """Return the fake arguments for compilation."""

        def operand(*lead: Any) -> tuple[Any, Any]:
            """Return the fp32 scales of an operand and their tiles."""
            shape = (*lead, cute.sym_int(), cute.sym_int())
            strides = tuple(cute.sym_int64() for _ in shape)
            tiles = (*lead, cute.sym_int(), cute.sym_int(), SF_TILE_BYTES)
            return (
                make_fake_tensor(Float32, shape, strides, assumed_align=4),
                compact(Uint8, *tiles, align=16),
            )

        lead = (cute.sym_int(),) if config.is_b_uniform else ()
        if config.has_tiles:
            tiles = (*lead, cute.sym_int(), cute.sym_int(), SF_TILE_BYTES)
            return (
                None,
                None,
                *(compact(Uint8, *tiles, align=16) for _ in range(2)),
                Int32(1),
                Int32(1),
                env_stream(),
            )
        return (*operand(), *operand(*lead), Int32(1), Int32(1), env_stream())

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor | None,
        a_tiles: cute.Tensor | None,
        b: cute.Tensor,
        b_tiles: cute.Tensor,
        half: Int32,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        """Launch the kernel.

        Args:
            a: (blocks along K, rows) fp32, or (blocks along rows, blocks along K) of squares. None
                if scales are tiles already.
            a_tiles: (ceil(rows / 128), blocks along K, 512) uint8, written. None if
                ``a`` is None.
            b: Like ``a``, with a leading group dimension if uniform; or the tiles of B if its
                scales are tiles already.
            b_tiles: As ``a_tiles``, with the groups first if uniform; written.
            half: Rows of half a matrix of B, if the halves are interleaved.
            num_sms: Number of SMs.
            stream: The stream.
        """
        view = scale_words_view if self.config.has_tiles else squares_view
        self.kernel(None if a is None else view(a), a_tiles, view(b), b_tiles, half).launch(
            grid=[num_sms * _CTAS_PER_SM, 1, 1], block=[WARP_SIZE * _WARPS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor | None,
        a_tiles: cute.Tensor | None,
        b: cute.Tensor,
        b_tiles: cute.Tensor,
        half: Int32,
    ) -> None:
        """Write all tiles of A and B, one per warp and iteration."""
        config = self.config
        a_count, b_count = Int32(0), cute.size(b_tiles) // SF_TILE_BYTES
        if const_expr(a_tiles is not None):
            a_count = cute.size(a_tiles) // SF_TILE_BYTES
        first_item = cute.arch.block_idx()[0] * _WARPS + cute.arch.warp_idx()
        step = cute.arch.grid_dim()[0] * _WARPS
        for item in cutlass.range(first_item, a_count + b_count, step, unroll=1):
            if item < a_count:
                if const_expr(a is not None):
                    self.convert(a, config.a_squares, a_tiles, item, None)
            else:
                self.convert(
                    b,
                    config.b_squares,
                    b_tiles,
                    item - a_count,
                    half if config.interleaves_halves else None,
                )

    @cute.jit
    def convert(
        self,
        scales: cute.Tensor,
        squares: bool,
        tiles: cute.Tensor,
        item: Int32,
        half: Int32 | None,
    ) -> None:
        """Write one tile of ``tiles`` by one warp: lane i has rows i, i + 32, i + 64 and i + 96."""
        lane = cute.arch.lane_idx()
        row_tiles, blocks = tiles.shape[-3], tiles.shape[-2]
        block, outer = item % blocks, item // blocks
        row_tile, group = outer % row_tiles, outer // row_tiles
        words = cute.make_rmem_tensor(4, Uint32)
        for i in range_constexpr(4):
            row, is_there = row_tile * SF_TILE_ROWS + i * WARP_SIZE + lane, True
            if const_expr(half is not None):
                is_there = row < 2 * half
                row = row // 2 + row % 2 * half
            if const_expr(self.config.has_tiles):
                words[i] = Uint32(0)
                if is_there:
                    words[i] = Uint32(
                        scales[row // SF_TILE_ROWS, block, row_in_tile(row) // 4, group]
                    )
            else:
                value = Float32(0.0)
                if const_expr(not squares):
                    is_there = row < scales.shape[1]
                if is_there:
                    if const_expr(squares):
                        value = scales[row // SF_TILE_ROWS, block, group]
                    else:
                        value = scales[block, row, group]
                words[i] = (f32_as_bits(value) >> 23 & 0xFF) * _FOUR
        address = tiles.iterator.toint() + Int64(item) * SF_TILE_BYTES + lane * 16
        store_global(address, [words[i] for i in range(4)])
