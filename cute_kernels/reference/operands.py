"""Operands of a product as a GEMM reads them: the rows that it contracts, with their scales."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import BlockScale, Format
from ..layout.shapes import ceil_div
from ..layout.slots import TILE_ROWS
from .conversions import decode, f32
from .scales import linear_column_scales, linear_scales, tile_view


class Rows(NamedTuple):
    """Rows that a product contracts.

    Attributes:
        codes: (R, K) codes, packed if they share bytes; or plain values.
        fmt: Format. None if plain.
        scales: (R, ceil(K / block)) stored block scales. None if there are none.
    """

    codes: Tensor
    fmt: Format | None = None
    scales: Tensor | None = None

    @property
    def elements(self) -> Tensor:
        """Codes in the dtype of their elements."""
        return self.codes if self.fmt is None else self.codes.view(self.fmt.element.dtype)

    @property
    def scale(self) -> BlockScale:
        """Block scale of the format."""
        assert self.fmt is not None and self.fmt.scale is not None
        return self.fmt.scale

    def scale_values(self) -> Tensor:
        """Return the fp32 values of the block scales."""
        assert self.scales is not None
        return decode(self.scale.element, self.scales)

    def values(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return (R, K) plain values, or codes times block scales, in fp32 or fp64.

        They are exact in fp64, and those of NVFP4 also in fp32. The last block may have fewer
        elements than the others.
        """
        if self.fmt is None:
            return self.codes.to(dtype)
        values = decode(self.fmt.element, self.codes).to(dtype)
        if self.scales is None:
            return values
        factor = self.scale_values().to(dtype).repeat_interleave(self.scale.vec_size, dim=1)
        return values.mul_(factor[:, : values.shape[1]])


class Operand(NamedTuple):
    """One operand of a product: a plain tensor, or one direction of a quantized tensor.

    Attributes:
        codes: Plain values, or codes.
        fmt: Format. None if plain.
        scales: Block scales.
        level: Vector of the global scale that decodes.
        columnwise: True for a columnwise copy.
        row_index: Index of the product's rows in a plain tensor or in a rowwise copy of one group.
            None for all rows in order. Rows that do not exist count as zeros.
    """

    codes: Tensor
    fmt: Format | None = None
    scales: Tensor | None = None
    level: Tensor | None = None
    columnwise: bool = False
    row_index: Tensor | None = None

    def factor(self, group: int, rows: slice) -> Tensor | None:
        """Return the global scale of a group, or of rows of it, for the epilogue."""
        global_scale = None if self.fmt is None else self.fmt.global_scale_for(self.columnwise)
        if global_scale is None or self.level is None:
            return None
        if global_scale.per != "row":
            level = self.level[group]
        else:
            level = (
                self.level[rows]
                if self.row_index is None
                else _picked(self.level, self.row_index[rows])
            )[:, None]
        return level * f32(global_scale.factor)

    def select_group(self, group: int) -> "Operand":
        """Return one group of a uniform tensor, without its global scale."""
        scales = None if self.scales is None else self.scales[group]
        return Operand(self.codes[group], self.fmt, scales, None, self.columnwise)

    def rows(self, rows: slice, first_slot: int, depth: int) -> Rows:
        """Return rows of a rowwise copy, contracted over K = ``depth``.

        ``first_slot`` is the slot row of the first row, which starts a tile.
        """
        fmt = self.fmt
        if self.row_index is not None:
            all_rows, index = (
                self._replace(row_index=None).rows(slice(0, len(self.codes)), 0, depth),
                self.row_index[rows],
            )
            scales = None if all_rows.scales is None else _picked(all_rows.scales, index)
            return Rows(_picked(all_rows.codes, index), fmt, scales)
        codes = self.codes[rows]
        if fmt is None or self.scales is None:
            return Rows(codes, fmt)
        tiles = tile_view(fmt, self.scales, columnwise=False)[_tiles(first_slot, len(codes))]
        scales = linear_scales(fmt, tiles, False, depth).flatten(0, 1)
        return Rows(codes, fmt, scales[: len(codes)])

    def columns(self, first_slot: int, depth: int) -> Rows:
        """Return columns of a columnwise copy, contracted over ``depth`` slot rows.

        ``first_slot`` is the first of the slot rows and starts a tile. The last block may contain
        rows past the end of the group.
        """
        fmt = self.fmt
        assert fmt is not None
        if fmt.columnwise == "untransposed":
            codes = self.codes[first_slot : first_slot + depth].T
        else:
            first_column = fmt.element.width(first_slot)
            codes = self.codes[:, first_column : first_column + fmt.element.width(depth)]
        if fmt.scale is None or self.scales is None:
            return Rows(codes, fmt)
        blocks = ceil_div(depth, fmt.scale.vec_size)
        return Rows(
            codes,
            fmt,
            linear_column_scales(fmt, self.scales, len(codes), _tiles(first_slot, depth))[
                :, :blocks
            ],
        )


def _picked(x: Tensor, index: Tensor) -> Tensor:
    """Return rows by an index, with zeros for rows that do not exist."""
    raw = x.view(torch.uint8) if x.itemsize == 1 else x
    padded = torch.cat([raw, raw.new_zeros(1, *raw.shape[1:])])
    return padded[torch.where((index >= 0) & (index < len(x)), index, len(x))].view(x.dtype)


def _tiles(first_slot: int, count: int) -> slice:
    """Return the slot tiles of ``count`` slot rows."""
    first_tile = first_slot // TILE_ROWS
    return slice(first_tile, first_tile + ceil_div(count, TILE_ROWS))
