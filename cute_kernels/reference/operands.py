"""The operands of a product as a GEMM reads them: rows of what it contracts, with their scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cute_kernels.layout.shapes import TILE_ROWS, ceil_div, scale_tiles
from cute_kernels.reference.conversions import decode, f32
from cute_kernels.reference.groups import untile_scales

if TYPE_CHECKING:
    from cute_kernels.formats import BlockScale, Format

__all__ = ["Operand", "Rows"]


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
        """Codes in the dtype of their element, or plain values."""
        return self.codes if self.fmt is None else self.codes.view(self.fmt.element.dtype)

    @property
    def scale(self) -> BlockScale:
        """What the block scales are."""
        assert self.fmt is not None and self.fmt.scale is not None
        return self.fmt.scale

    def scale_values(self) -> Tensor:
        """Block scales, exact in fp32."""
        assert self.scales is not None
        return decode(self.scale.element, self.scales)

    def values(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """(R, K) plain values, or codes times block scales.

        They are exact in fp64, and those of NVFP4 in fp32. The last block may have fewer elements
        than the others.

        Args:
            dtype: fp32 or fp64.
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
    """

    codes: Tensor
    fmt: Format | None = None
    scales: Tensor | None = None
    level: Tensor | None = None
    columnwise: bool = False

    def factor(self, group: int, rows: slice) -> Tensor | None:
        """The second level of a group, or of rows of it, as the epilogue multiplies by it."""
        second = None if self.fmt is None else self.fmt.level(self.columnwise)
        if second is None or self.level is None:
            return None
        level = self.level[rows, None] if second.per == "row" else self.level[group]
        return level * f32(second.factor)

    def of_group(self, group: int) -> Operand:
        """One group of a uniform tensor; its second level stays behind."""
        scales = None if self.scales is None else self.scales[group]
        return Operand(self.codes[group], self.fmt, scales, None, self.columnwise)

    def rows(self, rows: slice, first_slot: int, depth: int) -> Rows:
        """Rows of a rowwise copy, contracted over K.

        Args:
            rows: which rows.
            first_slot: the slot row of the first of them, the first one of a tile.
            depth: K.
        """
        codes, fmt = self.codes[rows], self.fmt
        scale = None if fmt is None else fmt.scale
        if fmt is None or scale is None or self.scales is None:
            return Rows(codes, fmt)
        count, first = len(codes), first_slot // TILE_ROWS
        if scale.layout == "mn_major":
            if fmt.is_2d:
                return Rows(codes, fmt, _of_each(self.scales, scale, first_slot, count))
            return Rows(codes, fmt, self.scales[:, first_slot : first_slot + count].T)
        tiles = self.scales[first : first + ceil_div(count, TILE_ROWS)].unsqueeze(1)
        linear = untile_scales(tiles, ceil_div(depth, scale.vec_size))
        return Rows(codes, fmt, linear.flatten(0, 1)[:count])

    def columns(self, first_slot: int, depth: int) -> Rows:
        """Columns of a columnwise copy, contracted over its slot rows.

        Args:
            first_slot: the first slot row of the group, the first one of a tile.
            depth: how many of them, those of the last block that the group does not fill included.
        """
        assert self.fmt is not None
        fmt, scale = self.fmt, self.fmt.scale
        if fmt.columnwise == "untransposed":
            codes = self.codes[first_slot : first_slot + depth].T
        else:
            first = fmt.element.width(first_slot)
            codes = self.codes[:, first : first + fmt.element.width(depth)]
        if scale is None or self.scales is None:
            return Rows(codes, fmt)
        blocks = ceil_div(depth, scale.vec_size)
        if scale.layout == "mn_major":
            first = first_slot // scale.vec_size
            scales = self.scales[first : first + blocks].T
            return Rows(codes, fmt, _of_each(scales, scale, 0, len(codes)) if fmt.is_2d else scales)
        first = first_slot // TILE_ROWS * scale_tiles(TILE_ROWS, scale.vec_size)
        tiles = self.scales[:, first : first + scale_tiles(depth, scale.vec_size)]
        return Rows(codes, fmt, untile_scales(tiles, blocks)[: len(codes)])


def _of_each(scales: Tensor, scale: BlockScale, first: int, count: int) -> Tensor:
    """The scales of ``count`` rows from ``first`` on, given those of square blocks of rows."""
    blocks = scales[first // scale.vec_size : ceil_div(first + count, scale.vec_size)]
    return blocks.repeat_interleave(scale.vec_size, dim=0)[:count]
