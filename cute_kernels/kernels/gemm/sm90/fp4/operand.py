"""Stages in shared memory of operand M if it comes as codes."""

from cutlass import cute

from cute_kernels.layout.shapes import DECODED_CHUNK_K, SF_TILE_ROWS, SF_TILE_WORDS

from ..config import Sm90GemmConfig


def codes_stages(config: Sm90GemmConfig) -> tuple[tuple[int, int], cute.Layout]:
    """Return rows and bytes of codes of a stage, and the stages, (rows, (bytes, chunks), STAGE).

    Lanes read whole rows of a chunk. This causes no bank conflicts, so nothing is swizzled.
    """
    rows, width = config.tile.m, DECODED_CHUNK_K * config.kind.bits // 8
    chunk = rows * width
    layout = cute.make_layout(
        (rows, (width, config.chunks_per_stage), config.num_ab_stage),
        stride=(width, (1, chunk), chunk * config.chunks_per_stage),
    )
    return (rows, width * config.chunks_per_stage), layout


def scale_stages(config: Sm90GemmConfig) -> tuple[tuple[int, int, int], cute.Layout]:
    """Return row tiles, K tiles and words of the scales of a stage, and the stages' layout."""
    tiles, k_tiles = config.tile.m // SF_TILE_ROWS, config.stage_k // config.kind.scale_tile_k
    stage = k_tiles * SF_TILE_WORDS
    layout = cute.make_layout(
        (tiles, k_tiles, SF_TILE_WORDS, config.num_ab_stage),
        stride=(stage, SF_TILE_WORDS, 1, tiles * stage),
    )
    return (tiles, k_tiles, SF_TILE_WORDS), layout
