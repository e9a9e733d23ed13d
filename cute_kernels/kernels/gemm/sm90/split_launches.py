"""The kernels that share an m_grouped product on sm_90a.

Group sizes are on the device: the host knows their mean. One kernel has tiles of one size, so that
either large groups are multiplied in many narrow tiles or small ones in wide tiles that are mostly
empty. Several kernels in a row, each with the tiles that suit some groups, cost little more than
what they multiply. Each starts on the SMs that the one before has left, and where groups are even
only the first one finds tiles.

Only products of decoded operands are shared: the cost of decoding does not depend on the columns of
a tile. Others wait for memory where groups are small: see ``uses_dynamic_scheduling``.
"""

from __future__ import annotations

import dataclasses

from ..common.problem import GemmProblem, RowRange
from .choose import prefers
from .config import Sm90GemmConfig, Sm90Tile
from .cost_model import estimated_cycles

#: Rows of M of all tiles that share a product, and columns of those that are not row-fitted.
_M = 256
_COLUMNS = (64, 96, 128)
#: Least cycles of a product that is shared: the other kernels cost up to 2 us where they find
#: nothing to do (H200). A row-fitted tile gains less: groups of few rows cost about the same.
_LEAST_CYCLES, _LEAST_CYCLES_ROW_FITTED = 200_000, 400_000


def _tiles(config: Sm90GemmConfig) -> dict[int, Sm90Tile]:
    """Return the tiles that share a product by their rows, the widest first."""
    if not config.is_decoded or config.grouping != "m_grouped":
        return {}
    shapes = (
        t
        for t in config.tile_shapes
        if t.swap_ab and t.m == _M and prefers(config, t) and config.has_whole_blocks(t)
    )
    tiles = {t.rows: t for t in shapes if t.row_fitted or t.n in _COLUMNS}
    return dict(sorted(tiles.items(), reverse=True))


def all_split_launches(config: Sm90GemmConfig) -> list[Sm90GemmConfig]:
    """Return every kernel that may share a product like ``config``, as first and as later one."""
    tiles = _tiles(config)
    bounds = [*tiles, 0]
    return [
        dataclasses.replace(
            config, tile=tile, row_range=RowRange(bounds[0], min_rows, max_rows, is_later)
        )
        for (max_rows, tile), min_rows in zip(tiles.items(), bounds[1:], strict=True)
        for is_later in (False, True)
    ]


def split_launches(
    config: Sm90GemmConfig, problem: GemmProblem, num_sms: int, bandwidth: float | None = None
) -> tuple[Sm90GemmConfig, ...]:
    """Return the kernels that share a product, in the order in which they run.

    The first one takes groups of the mean size. A product that is not shared has one kernel.
    """
    tiles = _tiles(config)
    is_single = config.tile != tiles.get(config.tile.rows) or problem.groups == 1
    if is_single or any(tile.num_ctas > num_sms for tile in tiles.values()):
        return (config,)
    threshold = _LEAST_CYCLES_ROW_FITTED if config.tile.row_fitted else _LEAST_CYCLES
    if estimated_cycles(config, problem, num_sms, bandwidth) < threshold:
        return (config,)
    launches = []
    for launch in all_split_launches(config):
        is_first = launch.tile == config.tile
        if launch.handled_rows.is_later != is_first:
            launches.append(launch)
    return tuple(sorted(launches, key=lambda launch: launch.handled_rows.is_later))
