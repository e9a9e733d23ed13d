"""Loads into shared memory of codes that no MMA instruction can multiply by the other operand."""

from typing import Any

from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_kernels.layout.shapes import DECODED_CHUNK_K

from ..common.loader import LoadWarp, StageLoad, TmaSource
from ..common.scheduler import TileReader, WorkTile
from ..common.views import (
    codes_view,
    interleaved_rows,
    row_scales_view,
    scale_words_view,
    squares_view,
)
from .config import CODES_STAGES, K_BLOCKS, Sm100GemmConfig
from .storage import Stages

#: Operands M and N.
_SIDES = ("m", "n")


def codes_sources(
    config: Sm100GemmConfig,
    staged: Stages,
    operands: tuple[cute.Tensor, cute.Tensor],
    scales: tuple[cute.Tensor | None, cute.Tensor | None],
    depth: Any,
) -> dict[str, TmaSource]:
    """Return the TMA copies of a stage of codes and block scales, by their names in ``Stages``.

    Args:
        config: Configuration of the kernel.
        staged: Layouts of the stages.
        operands: Operands M and N as the kernel gets them.
        scales: Block scales of operands M and N.
        depth: K in elements, or None for the extent of the codes.
    """

    def copy(name: str, tensor: cute.Tensor, tiler: tuple[Any, ...]) -> TmaSource:
        """Return the TMA copy of one stage of ``tensor``."""
        stage = cute.slice_(getattr(staged, name), (*[None] * len(tiler), 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        return TmaSource(*cpasync.make_tiled_tma_atom(op, tensor, stage, tiler))

    out = {}
    for codes in config.codes:
        name, index = f"{codes.side}_codes", _SIDES.index(codes.side)
        width = None if depth is None else depth * codes.kind.bits // 8
        view = codes_view(operands[index], width)
        out[name] = copy(
            name, interleaved_rows(view) if codes.interleaves_halves else view, codes.tiler
        )
        if codes.scales:
            view_of = row_scales_view if codes.kind.has_row_scales else scale_words_view
            name += "_scales"
            out[name] = copy(name, view_of(scales[index]), codes.scales)
    return out


def decoded_squares(
    config: Sm100GemmConfig, scales: tuple[cute.Tensor | None, cute.Tensor | None]
) -> tuple[cute.Tensor | None, ...]:
    """Return the scales of squares of operands M and N that are decoded, if any."""
    decoded = {codes.side for codes in config.codes if codes.kind.has_squares}
    sides = zip(_SIDES, scales, strict=True)
    return tuple(squares_view(x) if side in decoded else None for side, x in sides)


class CodesLoadWarp(LoadWarp):
    """The load warp of codes and their block scales."""

    def num_k_tiles(self, tile: WorkTile) -> Int32:
        """Return the number of stages of codes of a tile."""
        k_blocks = CODES_STAGES * K_BLOCKS
        return (tile.k_blocks + (k_blocks - 1)) // k_blocks


def codes_load_warp(
    config: Sm100GemmConfig,
    sources: Any,
    shared: Stages,
    cta: Int32,
    tiles: TileReader,
    codes_pipeline: pipeline.PipelineTmaAsync,
) -> CodesLoadWarp:
    """Return the load warp of the CTA with number ``cta`` among those that share a tile."""
    sides: dict[str, tuple[StageLoad, ...]] = dict.fromkeys(_SIDES, ())
    for codes in config.codes:
        name, kind = f"{codes.side}_codes", codes.kind
        loads = [(name, codes.tiler, 8 // kind.bits, False)]
        if codes.scales:
            divisor = DECODED_CHUNK_K if kind.has_row_scales else kind.scale_tile_k
            loads.append((f"{name}_scales", codes.scales, divisor, True))
        cta_fields = (cta * codes.rows, Int32(0), 1)
        sides[codes.side] = tuple(
            StageLoad(
                getattr(sources, name), getattr(shared, name), tiler, step, *cta_fields, is_scale
            )
            for name, tiler, step, is_scale in loads
        )
    return CodesLoadWarp(config, *sides.values(), tiles, codes_pipeline)
