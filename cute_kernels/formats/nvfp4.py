"""NVFP4: E2M1 codes, E4M3 block scales and a second fp32 level. Source: NVIDIA."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from cute_kernels.formats.base import (
    E2M1,
    E4M3,
    BlockScale,
    ElementType,
    Format,
    SecondLevel,
    check_choice,
    check_flags,
    record,
)

__all__ = ["NVFP4"]


#: By ``row_scaled``; made once, for every call of an op asks for it.
_LEVELS = {
    row_scaled: SecondLevel("row" if row_scaled else "group", ("amax",), 1 / (E2M1.max * E4M3.max))
    for row_scaled in (False, True)
}


@record
@dataclasses.dataclass(frozen=True)
class NVFP4(Format):
    """E2M1 codes, two a byte, with one E4M3 scale a block and a second fp32 scale level.

    Args:
        row_scaled: the second level is one amax per row of the rowwise copy instead of one per
            group. The columnwise copy always carries one per group.
        block: (1, 16) for activations and gradients, or (16, 16) for weights, where both
            directions hold the same values.
        hadamard: a random 16x16 Hadamard transform is applied to the columnwise copy.
        stochastic_rounding: codes are rounded stochastically instead of to nearest even.
        four_over_six: each block picks the better of the scales that map its amax to 6 or to 4.

    Raises:
        ValueError: a combination that has no meaning, such as ``row_scaled`` with 16x16 blocks.
    """

    row_scaled: bool = False
    block: tuple[int, int] = (1, 16)
    hadamard: bool = False
    stochastic_rounding: bool = False
    four_over_six: bool = False

    name: ClassVar[str] = "nvfp4"
    element: ClassVar[ElementType] = E2M1
    scale: ClassVar[BlockScale] = BlockScale(E4M3, 16, "tiles_128x4")
    columnwise: ClassVar[Literal["transposed"]] = "transposed"
    k_multiple: ClassVar[int] = 16
    blocks: ClassVar[tuple[tuple[int, int], ...]] = ((1, 16), (16, 16))
    #: Largest value that codes times block scales represent: 6 * 448 = 2688.
    tensor_max: ClassVar[float] = E2M1.max * E4M3.max

    def __post_init__(self) -> None:
        check_flags(self, "row_scaled", "hadamard", "stochastic_rounding", "four_over_six")
        object.__setattr__(self, "block", tuple(self.block))
        check_choice("block", self.block, self.blocks)
        if self.row_scaled:
            for flag in ("hadamard", "stochastic_rounding"):
                if getattr(self, flag):
                    raise ValueError(f"row_scaled cannot be combined with {flag}")
            if self.is_2d:
                raise ValueError(
                    f"row_scaled needs block=(1, 16), got block={self.block}: a 16x16 block spans "
                    "rows of different scales"
                )
        if self.is_2d and self.hadamard:
            raise ValueError("hadamard needs block=(1, 16): 16x16 blocks serve both directions")
        if self.four_over_six and (self.hadamard or self.stochastic_rounding):
            raise ValueError(
                "four_over_six cannot be combined with hadamard or stochastic_rounding"
            )
        super().__post_init__()

    @property
    def is_transformed(self) -> bool:
        """Whether the columnwise copy is Hadamard-transformed."""
        return self.hadamard

    @property
    def second_level(self) -> SecondLevel:
        """The amax of each group or row; a value is code * scale * (amax / 2688)."""
        return _LEVELS[self.row_scaled]
