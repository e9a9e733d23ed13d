"""Which kernels share an m_grouped product among them.

Group sizes are on the device: the host knows their mean. One kernel has tiles of one size, so that
either large groups are multiplied in many narrow tiles or small ones in wide tiles that are mostly
empty. Several kernels in a row, each with the tiles that suit some groups, cost little more than
what they multiply: each starts on the SMs that are done with the one before, and where groups are
even only the first finds something to do.

Only operands that are decoded are shared: what decoding costs does not depend on a tile's columns.
Others wait for memory where groups are small: see ``mixes_groups``.
"""

from __future__ import annotations

import dataclasses

from ..common.problem import GemmProblem, RowPart
from .choose import prefers
from .config import Sm90GemmConfig, Sm90Tile
from .cost_model import estimated_cycles

#: Rows of M of all tiles of parts, and columns of those that are not fitted.
_M = 256
_COLUMNS = (64, 96, 128)
#: Cycles of a product that is shared, at least: the other kernels cost up to 2 us where they find
#: nothing to do (H200). A fitted tile gains less: groups of few rows cost about the same.
_LEAST_CYCLES, _LEAST_CYCLES_FITTED = 200_000, 400_000


def _tiles(config: Sm90GemmConfig) -> dict[int, Sm90Tile]:
    """Tiles of parts by their rows, the widest first."""
    if not config.is_decoded or config.grouping != "m_grouped":
        return {}
    shapes = (
        t
        for t in config.tile_shapes
        if t.swap_ab and t.m == _M and prefers(config, t) and config.has_blocks(t)
    )
    tiles = {t.rows: t for t in shapes if t.fitted or t.n in _COLUMNS}
    return dict(sorted(tiles.items(), reverse=True))


def all_parts(config: Sm90GemmConfig) -> list[Sm90GemmConfig]:
    """Every part that a product like ``config`` may have: as the first one, and as another."""
    tiles = _tiles(config)
    bounds = [*tiles, 0]
    return [
        dataclasses.replace(config, tile=tile, part=RowPart(bounds[0], least, rows, follows))
        for (rows, tile), least in zip(tiles.items(), bounds[1:], strict=True)
        for follows in (False, True)
    ]


def split_launches(
    config: Sm90GemmConfig, problem: GemmProblem, num_sms: int, bandwidth: float | None = None
) -> tuple[Sm90GemmConfig, ...]:
    """Return the kernels that share a product, in the order in which they run.

    The first one takes groups of the mean size. A product that is not shared has one kernel.
    """
    tiles = _tiles(config)
    is_one = config.tile != tiles.get(config.tile.rows) or problem.groups == 1
    if is_one or any(tile.num_ctas > num_sms for tile in tiles.values()):
        return (config,)
    least = _LEAST_CYCLES_FITTED if config.tile.fitted else _LEAST_CYCLES
    if estimated_cycles(config, problem, num_sms, bandwidth) < least:
        return (config,)
    chosen = []
    for part in all_parts(config):
        is_first = part.tile == config.tile
        if part.rows_taken.follows != is_first:
            chosen.append(part)
    return tuple(sorted(chosen, key=lambda part: part.rows_taken.follows))
