"""What the reference backend asks of a format beside its record: how its scales come about."""

import abc
from typing import ClassVar

import torch
from torch import Tensor

from ...formats import Format
from ..conversions import encode, encode_e2m1_stochastic, f32


def scaled(values: Tensor, factors: Tensor, vec: int) -> Tensor:
    """``values`` (..., K) times one factor a block of ``vec``; the last block may be a part."""
    if values.shape[-1] % vec:
        return values * factors.repeat_interleave(vec, dim=-1)[..., : values.shape[-1]]
    blocks: Tensor = values.unflatten(-1, (-1, vec))
    return (blocks * factors.unsqueeze(-1)).flatten(-2)


class Codec(abc.ABC):
    """The arithmetic of one format, each step rounded to fp32; it knows no layout.

    Blocks are the last dimension of what ``encode`` takes; amaxes and scales have the shape of what
    is left. Where the format has no blocks, all elements of a group in a row are one. ``dtype`` is
    what the elements were before they became fp32.
    """

    #: The class of the records that it serves.
    format: ClassVar[type[Format]]

    def __init__(self, fmt: Format, dtype: torch.dtype = torch.float32) -> None:
        self.fmt, self.dtype = fmt, dtype

    def level(self, amax: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        """The vectors of the second level, as the record names them, of amaxes of rows or groups.

        Or of the scales of groups, where the format takes them from the caller.
        """
        return ()

    @abc.abstractmethod
    def factors(self, a: Tensor, g: Tensor) -> tuple[Tensor | None, Tensor]:
        """What blocks of amaxes ``a`` are encoded with.

        ``g`` are amaxes of their rows or groups, for the second level; broadcast to ``a``. Or the
        scales of their groups where the format takes them from the caller.

        Returns:
            The block scales as they are stored, None if there are none; and the fp32 factors
            that elements are multiplied by.
        """

    def encode(
        self, blocks: Tensor, a: Tensor, g: Tensor, draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Codes of fp32 ``blocks``, one an element and not yet packed, and stored scales.

        Square blocks are (..., K, rows of a block). ``a`` and ``g`` are as for ``factors``;
        ``draws`` random bytes (uint8) of the elements, where the format is stochastic.
        """
        stored, enc = self.factors(a, g)
        y = blocks * enc.unsqueeze(-1)
        if draws is not None:
            return encode_e2m1_stochastic(y, draws), stored
        return encode(self.fmt.element, y), stored

    @abc.abstractmethod
    def scale_values(self, stored: Tensor) -> Tensor:
        """Exact fp32 values of stored block scales."""

    def decode_factor(self, stored: Tensor | None, level: Tensor | None) -> Tensor:
        """What codes are multiplied by to decode, of stored block scales where the format has them.

        ``level`` is the first vector of the second level, where it has one, broadcast.
        """
        factor = None if stored is None else self.scale_values(stored)
        if level is None:
            assert factor is not None
            return factor
        second = self.fmt.global_scale
        assert second is not None
        if factor is not None:
            level = factor * level
        return level if second.factor == 1.0 else level * f32(second.factor)
