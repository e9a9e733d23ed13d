"""Global addresses of scales in 128x4 tiles."""

from cutlass import Int32, Int64, cute

from ..layout.shapes import SF_TILE_BYTES, SF_TILE_ROWS, row_in_tile


def row_scales_at(scales: cute.Tensor, row: Int32) -> Int64:
    """Return the address of a row's first scales.

    ``scales`` is ([G,] row tiles, tiles along the row, 512) uint8. Further scales of the row are
    one tile further each.
    """
    tile = Int64(row // SF_TILE_ROWS) * scales.shape[len(scales.shape) - 2]
    return scales.iterator.toint() + tile * SF_TILE_BYTES + row_in_tile(row)
