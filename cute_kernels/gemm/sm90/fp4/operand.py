"""Operand M where it comes as codes: views in global memory, and the stages in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutlass import Int32, Int64, cute

from cute_kernels.layout.shapes import PIECE_K, PITCH_ALIGNMENT, SF_TILE_BYTES, SF_TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.sm90.config import Sm90GemmConfig

__all__ = ["codes_stages", "codes_view", "scale_stages", "scale_words_view"]

#: 32-bit words of a scale tile.
_TILE_WORDS = SF_TILE_BYTES // 4


def codes_view(codes: cute.Tensor) -> cute.Tensor:
    """([G,] rows, bytes) codes as (rows, bytes, G or 1)."""
    groups, group_stride = 1, Int64(0)
    if len(codes.shape) == 3:
        groups = codes.shape[0]
        group_stride = cute.assume(Int64(codes.stride[0]), PITCH_ALIGNMENT)
    rows, width = codes.shape[-2:]
    pitch = cute.assume(Int64(codes.stride[-2]), PITCH_ALIGNMENT)
    layout = cute.make_layout((rows, width, groups), stride=(pitch, 1, group_stride))
    return cute.make_tensor(codes.iterator, layout)


def scale_words_view(scales: cute.Tensor) -> cute.Tensor:
    """Scale tiles ([G,] row tiles, K tiles, 512) as 32-bit words (row tiles, K tiles, words, G)."""
    row_tiles, k_tiles, _ = scales.shape[-3:]
    groups = scales.shape[0] if len(scales.shape) == 4 else 1
    row_stride = cute.assume(Int64(k_tiles) * _TILE_WORDS, _TILE_WORDS)
    group_stride = cute.assume(row_stride * row_tiles, _TILE_WORDS)
    layout = cute.make_layout(
        (row_tiles, k_tiles, _TILE_WORDS, groups), stride=(row_stride, _TILE_WORDS, 1, group_stride)
    )
    return cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Int32), layout)


def codes_stages(config: Sm90GemmConfig) -> tuple[tuple[int, int], cute.Layout]:
    """Rows and bytes of codes of a stage, and the stages, (rows, (bytes, pieces), STAGE).

    Lanes read whole rows of a piece, without conflicts as they are.
    """
    rows, width = config.tile.m, PIECE_K * config.kind.bits // 8
    piece = rows * width
    layout = cute.make_layout(
        (rows, (width, config.pieces), config.num_ab_stage),
        stride=(width, (1, piece), piece * config.pieces),
    )
    return (rows, width * config.pieces), layout


def scale_stages(config: Sm90GemmConfig) -> tuple[tuple[int, int, int], cute.Layout]:
    """Row tiles, K tiles and words of the scales of a stage, and the stages of them."""
    tiles, k_tiles = config.tile.m // SF_TILE_ROWS, config.stage_k // config.kind.scale_tile_k
    stage = k_tiles * _TILE_WORDS
    layout = cute.make_layout(
        (tiles, k_tiles, _TILE_WORDS, config.num_ab_stage),
        stride=(stage, _TILE_WORDS, 1, tiles * stage),
    )
    return (tiles, k_tiles, _TILE_WORDS), layout
