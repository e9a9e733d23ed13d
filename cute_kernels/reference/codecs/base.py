"""Arithmetic of a format in the reference backend: how scales and codes are computed."""

import abc
from typing import ClassVar

import torch
from torch import Tensor

from ...formats import Format
from ..conversions import encode, encode_e2m1_stochastic, f32


def scaled(values: Tensor, factors: Tensor, vec: int) -> Tensor:
    """Multiply ``values`` (..., K) by a factor per block of ``vec``. The last may be partial."""
    if values.shape[-1] % vec:
        return values * factors.repeat_interleave(vec, dim=-1)[..., : values.shape[-1]]
    blocks: Tensor = values.unflatten(-1, (-1, vec))
    return (blocks * factors.unsqueeze(-1)).flatten(-2)


class Codec(abc.ABC):
    """Arithmetic of one format, with each step rounded to fp32. It does not know layouts.

    The last dimension of the blocks of ``encode`` is a block; amaxes and scales have the other
    dimensions. If the format has no blocks, all elements of a group in a row are one block.

    Args:
        fmt: Record of the format.
        dtype: Dtype of the elements before they became fp32.
    """

    #: The class of the records that it serves.
    format: ClassVar[type[Format]]

    def __init__(self, fmt: Format, dtype: torch.dtype = torch.float32) -> None:
        self.fmt, self.dtype = fmt, dtype

    def global_scale_vectors(self, amax: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the vectors of the global scale, in the order of the record.

        They follow from amaxes of rows or groups, or from the scales of groups if the caller gives
        them.
        """
        return ()

    @abc.abstractmethod
    def factors(self, a: Tensor, g: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the scales with which blocks of amaxes ``a`` are encoded.

        ``g`` has the amaxes of their rows or groups for the global scale, broadcast to ``a``; or
        the scales of their groups if the caller gives them.

        Returns:
            The stored block scales, None if there are none; and the fp32 factors of the elements.
        """

    def encode(
        self, blocks: Tensor, a: Tensor, g: Tensor, random: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return codes of fp32 ``blocks``, one per element and not packed, and the stored scales.

        Square blocks are (..., K, rows of a block). ``a`` and ``g`` are as for ``factors``.
        ``random`` has random bytes (uint8) of the elements if the format is stochastic.
        """
        stored, enc = self.factors(a, g)
        y = blocks * enc.unsqueeze(-1)
        if random is not None:
            return encode_e2m1_stochastic(y, random), stored
        return encode(self.fmt.element, y), stored

    @abc.abstractmethod
    def scale_values(self, stored: Tensor) -> Tensor:
        """Return exact fp32 values of stored block scales."""

    def decode_factor(self, stored: Tensor | None, vector: Tensor | None) -> Tensor:
        """Return the factors that decode codes.

        ``stored`` has the stored block scales, and ``vector`` the first vector of the global scale,
        broadcast; None if the format has none.
        """
        factor = None if stored is None else self.scale_values(stored)
        if vector is None:
            assert factor is not None
            return factor
        global_scale = self.fmt.global_scale
        assert global_scale is not None
        if factor is not None:
            vector = factor * vector
        return vector if global_scale.factor == 1.0 else vector * f32(global_scale.factor)
