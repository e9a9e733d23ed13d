"""Positions of the rows of each group, in the input and in slot order."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout.slots import TILE_ROWS, num_slot_tiles, uniform_tiles


@dataclasses.dataclass(frozen=True)
class Groups:
    """Rows and slots of G groups in a matrix of ``num_rows`` rows.

    Attributes:
        starts: (G,) int64. First row of each group.
        rows: (G,) int64. Number of rows of each group.
        first_tile: (G,) int64. First slot tile of each group.
        num_rows: Number of rows of the matrix, including the tail.
        num_tiles: Number of tiles of the slot buffer.
        is_uniform: True if all groups have the same number of rows and of tiles.
    """

    starts: Tensor
    rows: Tensor
    first_tile: Tensor
    num_rows: int
    num_tiles: int
    is_uniform: bool

    @classmethod
    def ragged(cls, offs: Tensor, num_rows: int) -> "Groups":
        """Return groups with end rows ``offs``, clamped to the matrix and to be non-decreasing."""
        ends = offs.long().clamp(0, num_rows).cummax(0).values if len(offs) else offs.long()
        starts = torch.cat([ends.new_zeros(1), ends])[:-1]
        first_tile = starts // TILE_ROWS + torch.arange(len(ends), device=offs.device)
        return cls(
            starts,
            ends - starts,
            first_tile,
            num_rows,
            num_slot_tiles(num_rows, len(ends)),
            is_uniform=False,
        )

    @classmethod
    def uniform(cls, num_groups: int, rows: int, device: torch.device) -> "Groups":
        """Return ``num_groups`` consecutive groups of ``rows`` rows each."""
        group = torch.arange(num_groups, device=device)
        tiles = uniform_tiles(rows)
        counts = torch.full_like(group, rows)
        return cls(
            group * rows,
            counts,
            group * tiles,
            num_groups * rows,
            num_groups * tiles,
            is_uniform=True,
        )

    @classmethod
    def from_shape(
        cls, shape: Sequence[int], offs: Tensor | None, device: torch.device
    ) -> "Groups":
        """Return the groups of a ragged (T, ...) tensor, or of a uniform (G, N, ...) one."""
        return (
            cls.uniform(shape[0], shape[1], device) if offs is None else cls.ragged(offs, shape[0])
        )

    def __len__(self) -> int:
        return len(self.starts)

    def group_of_row(self) -> Tensor:
        """Return (num_rows,) int64: the group of each row, G for rows of the tail."""
        row = torch.arange(self.num_rows, device=self.starts.device)
        return torch.searchsorted(self.starts + self.rows, row, right=True)

    def slot_of_row(self) -> tuple[Tensor, Tensor]:
        """Return the live rows and the slot row of each, as int64 vectors."""
        group = self.group_of_row()
        row = torch.nonzero(group < len(self)).squeeze(1)
        group = group[row]
        return row, self.first_tile[group] * TILE_ROWS + row - self.starts[group]

    def used_tiles(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slot tiles that belong to a group.

        Returns:
            Tile (U,), group (U,) and row (U, 128), all int64. ``row`` is the matrix row in each
            slot row, or -1 in the padding of a group's last tile.
        """
        device = self.starts.device
        tiles = (self.rows + TILE_ROWS - 1) // TILE_ROWS
        group = torch.repeat_interleave(torch.arange(len(self), device=device), tiles)
        index = torch.arange(len(group), device=device) - (tiles.cumsum(0) - tiles)[group]
        local = index[:, None] * TILE_ROWS + torch.arange(TILE_ROWS, device=device)
        row = torch.where(local < self.rows[group, None], self.starts[group, None] + local, -1)
        return self.first_tile[group] + index, group, row
