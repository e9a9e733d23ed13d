"""Block scales in the layout of buffers, and as plain matrices.

Each slot tile of 128 rows has a matrix of linear scales: (128, blocks along K) in a rowwise copy
and (K, blocks along the rows) in a columnwise copy. It has one scale per block for every row or
column; scales of square blocks are repeated. ``tile_view`` finds the tiles in a buffer of any
layout. ``lay_scales`` and ``linear_scales`` convert their contents. No other file of the reference
depends on the layout of scales.
"""

import torch
from torch import Tensor

from ..formats import BlockScale, Format
from ..layout.shapes import SF_TILE_BYTES, SF_TILE_COLS, SF_TILE_ROWS, ceil_div, scale_tiles
from ..layout.slots import TILE_ROWS


def tile_scales(linear: Tensor) -> Tensor:
    """Lay scale bytes (..., 128 R, C) out as 128x4 tiles (..., R, ceil(C / 4), 512)."""
    *batch, rows, cols = linear.shape
    tile_cols = ceil_div(cols, SF_TILE_COLS)
    padded = torch.nn.functional.pad(linear, (0, tile_cols * SF_TILE_COLS - cols))
    # row = 128 r + 32 i + j, column = 4 c + k, byte of the tile = 16 j + 4 i + k
    tiles = padded.view(*batch, rows // 128, 4, 32, tile_cols, SF_TILE_COLS)
    order = [d - 5 for d in (0, 3, 2, 1, 4)]
    return tiles.permute(*range(len(batch)), *order).flatten(-3)


def untile_scales(tiles: Tensor, cols: int) -> Tensor:
    """Invert ``tile_scales``: tiles (..., R, ceil(cols / 4), 512) as bytes (..., 128 R, cols)."""
    *batch, rows, tile_cols, tile_bytes = tiles.shape
    assert tile_bytes == SF_TILE_BYTES and tile_cols == ceil_div(cols, SF_TILE_COLS)
    order = [d - 5 for d in (0, 3, 2, 1, 4)]
    split = tiles.reshape(*batch, rows, tile_cols, 32, 4, SF_TILE_COLS)
    width = tile_cols * SF_TILE_COLS
    return split.permute(*range(len(batch)), *order).reshape(*batch, rows * 128, width)[..., :cols]


def _scale_of(fmt: Format) -> BlockScale:
    assert fmt.scale is not None, f"{fmt.text} has no block scales"
    return fmt.scale


def tile_view(fmt: Format, scales: Tensor, columnwise: bool) -> Tensor:
    """Return a view of a buffer of scales with the slot tile first.

    The view is ([G,] tiles, ...), with G for uniform groups.
    """
    scale = _scale_of(fmt)
    if scale.layout == "tiles_128x4":
        if not columnwise:
            return scales
        # (ceil(K / 128), tiles along the rows, 512)
        return scales.unflatten(-2, (-1, scale_tiles(TILE_ROWS, scale.vec_size))).movedim(-4, -2)
    if not columnwise and not fmt.is_2d:
        # (blocks along K, slots)
        tiles = scales.unflatten(-1, (-1, TILE_ROWS)).movedim(-2, -3)
        return tiles
    # (blocks along the slots, K or blocks along it)
    tiles = scales.unflatten(-2, (-1, TILE_ROWS // scale.vec_size))
    return tiles


def lay_scales(fmt: Format, linear: Tensor, columnwise: bool) -> Tensor:
    """Return linear scales as tiles store them.

    ``linear`` is (t, 128, blocks along K) or (t, K, blocks along the rows). The padding is zero.
    """
    scale = _scale_of(fmt)
    if scale.layout == "tiles_128x4":
        if not columnwise:
            return tile_scales(linear).squeeze(1)
        return tile_scales(
            torch.nn.functional.pad(linear, (0, 0, 0, -linear.shape[1] % SF_TILE_ROWS))
        ).transpose(1, 2)
    if fmt.is_2d:
        linear = linear[:, :: scale.vec_size]
        return linear.mT if columnwise else linear
    return linear.mT


def linear_scales(fmt: Format, tiles: Tensor, columnwise: bool, cols: int) -> Tensor:
    """Undo ``lay_scales`` for tiles that an index selected from ``tile_view``, with K = ``cols``.

    Returns:
        (t, 128, ceil(K / block)) or (t, K, 128 / block).
    """
    scale = _scale_of(fmt)
    vec = scale.vec_size
    if scale.layout == "tiles_128x4":
        if not columnwise:
            return untile_scales(tiles.unsqueeze(1), ceil_div(cols, vec))
        return untile_scales(tiles.transpose(1, 2), TILE_ROWS // vec)[:, :cols]
    if fmt.is_2d:
        turned = tiles.mT if columnwise else tiles
        return turned.repeat_interleave(vec, dim=1)[:, : cols if columnwise else TILE_ROWS]
    return tiles.mT


def linear_row_scales(fmt: Format, scales: Tensor, slots: Tensor, cols: int) -> Tensor:
    """Return scales (R, ceil(cols / block)) of (R,) slot rows of a rowwise copy.

    Slot rows are counted through all groups, also in a uniform tensor.
    """
    tiles = tile_view(fmt, scales, columnwise=False)
    tile, where = torch.unique(slots // TILE_ROWS, return_inverse=True)
    # A tile has two dimensions in every layout; what is before it is the index of a tile.
    index = (tile,) if tiles.dim() == 3 else (tile // tiles.shape[1], tile % tiles.shape[1])
    return linear_scales(fmt, tiles[index], False, cols)[where, slots % TILE_ROWS]


def linear_column_scales(
    fmt: Format, scales_t: Tensor, cols: int, tiles: slice = slice(None)
) -> Tensor:
    """Return scales (cols, blocks along the rows) of slot tiles of a columnwise copy.

    Args:
        fmt: Format.
        scales_t: Columnwise scales of a ragged tensor or of one group of a uniform tensor.
        cols: K.
        tiles: Slot tiles; all by default.
    """
    return (
        linear_scales(fmt, tile_view(fmt, scales_t, columnwise=True)[tiles], True, cols)
        .movedim(0, 1)
        .flatten(1)
    )
