"""MXFP8: FP8 codes with power-of-two block scales. Source: OCP Microscaling Formats v1.0."""

import dataclasses
from typing import ClassVar, Literal

import torch

from ..records import check_choice, check_kind
from .base import E8M0, FP8_ELEMENTS, BlockScale, Format, parse_block, record


@record
@dataclasses.dataclass(frozen=True)
class MXFP8(Format):
    """FP8 codes with one power-of-two E8M0 scale per 32 values.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        block: (1, 32), or (32, 32), so that both directions hold the same codes.
        nan_scales: Make the scale of a block that contains infinity NaN; see ``Format``.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    block: tuple[int, int] = (1, 32)
    nan_scales: bool = False

    name: ClassVar[str] = "mxfp8"
    scale: ClassVar[BlockScale] = BlockScale(E8M0, 32, "tiles_128x4")
    global_scale: ClassVar[None] = None
    columnwise: ClassVar[Literal["untransposed"]] = "untransposed"
    k_multiple: ClassVar[int] = 32
    #: ``block`` does not affect decoding: the scale of a square block is stored once per row.
    encode_only_fields: ClassVar[tuple[str, ...]] = ("block", "nan_scales")
    blocks: ClassVar[tuple[tuple[int, int], ...]] = ((1, 32), (32, 32))

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", parse_block(self.block, self.blocks))
        check_choice("dtype", self.dtype, tuple(FP8_ELEMENTS))
        check_kind(bool, nan_scales=self.nan_scales)
        super().__post_init__()
