"""The operands of a product as a GEMM reads them: rows of what it contracts, with their scales."""

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
        codes: (R, K), packed where codes share bytes; or plain values.
        fmt: the format; None if plain.
        scales: (R, ceil(K / block)) block scales as they are stored; None where there are none.
    """

    codes: Tensor
    fmt: Format | None = None
    scales: Tensor | None = None

    @property
    def elements(self) -> Tensor:
        return self.codes if self.fmt is None else self.codes.view(self.fmt.element.dtype)

    @property
    def scale(self) -> BlockScale:
        assert self.fmt is not None and self.fmt.scale is not None
        return self.fmt.scale

    def scale_values(self) -> Tensor:
        assert self.scales is not None
        return decode(self.scale.element, self.scales)

    def values(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """(R, K) plain values, or codes times block scales, in fp32 or fp64.

        They are exact in fp64, and those of NVFP4 in fp32. The last block may have fewer elements
        than the others.
        """
        if self.fmt is None:
            return self.codes.to(dtype)
        values = decode(self.fmt.element, self.codes).to(dtype)
        if self.scales is None:
            return values
        factor = self.scale_values().to(dtype).repeat_interleave(self.scale.vec_size, dim=1)
        return values.mul_(factor[:, : values.shape[1]])


class Operand(NamedTuple):
    """One operand of a product: a plain tensor, or one direction of a quantized one.

    Attributes:
        codes: the plain values, or the codes.
        fmt: the format; None if plain.
        scales: the block scales.
        level: the vector of the second level that decodes.
        columnwise: it is the columnwise copy.
        row_index: which of its rows are the rows of the product, where that is not all of them
            in their order: those of a plain tensor, or of a rowwise copy of one group. One
            that is none of them stands for zeros.
    """

    codes: Tensor
    fmt: Format | None = None
    scales: Tensor | None = None
    level: Tensor | None = None
    columnwise: bool = False
    row_index: Tensor | None = None

    def factor(self, group: int, rows: slice) -> Tensor | None:
        """The second level of a group, or of rows of it, as the epilogue multiplies by it."""
        second = None if self.fmt is None else self.fmt.global_scale_for(self.columnwise)
        if second is None or self.level is None:
            return None
        if second.per != "row":
            level = self.level[group]
        else:
            level = (
                self.level[rows]
                if self.row_index is None
                else _picked(self.level, self.row_index[rows])
            )[:, None]
        return level * f32(second.factor)

    def of_group(self, group: int) -> "Operand":
        """One group of a uniform tensor; its second level stays behind."""
        scales = None if self.scales is None else self.scales[group]
        return Operand(self.codes[group], self.fmt, scales, None, self.columnwise)

    def rows(self, rows: slice, first_slot: int, depth: int) -> Rows:
        """Rows of a rowwise copy, contracted over K = ``depth``.

        ``first_slot`` is the slot row of the first of them, the first one of a tile.
        """
        fmt = self.fmt
        if self.row_index is not None:
            whole, index = (
                self._replace(row_index=None).rows(slice(0, len(self.codes)), 0, depth),
                self.row_index[rows],
            )
            scales = None if whole.scales is None else _picked(whole.scales, index)
            return Rows(_picked(whole.codes, index), fmt, scales)
        codes = self.codes[rows]
        if fmt is None or self.scales is None:
            return Rows(codes, fmt)
        tiles = tile_view(fmt, self.scales, columnwise=False)[_tiles(first_slot, len(codes))]
        scales = linear_scales(fmt, tiles, False, depth).flatten(0, 1)
        return Rows(codes, fmt, scales[: len(codes)])

    def columns(self, first_slot: int, depth: int) -> Rows:
        """Columns of a columnwise copy, contracted over ``depth`` slot rows from the first one of a
        tile on.

        Those of the last block that the group does not fill are included.
        """
        fmt = self.fmt
        assert fmt is not None
        if fmt.columnwise == "untransposed":
            codes = self.codes[first_slot : first_slot + depth].T
        else:
            first = fmt.element.width(first_slot)
            codes = self.codes[:, first : first + fmt.element.width(depth)]
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
    """Rows by an index; zeros where it is none of them."""
    raw = x.view(torch.uint8) if x.itemsize == 1 else x
    padded = torch.cat([raw, raw.new_zeros(1, *raw.shape[1:])])
    return padded[torch.where((index >= 0) & (index < len(x)), index, len(x))].view(x.dtype)


def _tiles(first_slot: int, count: int) -> slice:
    first = first_slot // TILE_ROWS
    return slice(first, first + ceil_div(count, TILE_ROWS))
