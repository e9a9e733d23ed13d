"""FP8 with fp32 scales of 1x128 or 128x128 blocks, as DeepSeek-V3 trains."""

import dataclasses
from typing import ClassVar, Literal

import torch

from ..records import check_choice, check_kind
from .base import F32, FP8_ELEMENTS, BlockScale, Format, parse_block, record


@record
@dataclasses.dataclass(frozen=True)
class FP8Block(Format):
    """FP8 codes with one fp32 scale per 1x128 or 128x128 block.

    Args:
        block: (1, 128) for activations and gradients, (128, 128) for weights.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scales: Round scales down to powers of two.
        amax_epsilon: Lower bound of a block's amax.
        nan_scales: Make the scale of a block that contains infinity NaN. See ``Format``.
    """

    block: tuple[int, int] = (1, 128)
    dtype: torch.dtype = torch.float8_e4m3fn
    pow2_scales: bool = True
    amax_epsilon: float = 0.0
    nan_scales: bool = False

    name: ClassVar[str] = "fp8_block"
    scale: ClassVar[BlockScale] = BlockScale(F32, 128, "mn_major")
    global_scale: ClassVar[None] = None
    columnwise: ClassVar[Literal["transposed"]] = "transposed"
    k_multiple: ClassVar[int] = 16
    encode_only_fields: ClassVar[tuple[str, ...]] = ("pow2_scales", "amax_epsilon", "nan_scales")
    blocks: ClassVar[tuple[tuple[int, int], ...]] = ((1, 128), (128, 128))

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", parse_block(self.block, self.blocks))
        check_choice("dtype", self.dtype, tuple(FP8_ELEMENTS))
        check_kind(bool, pow2_scales=self.pow2_scales, nan_scales=self.nan_scales)
        check_kind(float, amax_epsilon=self.amax_epsilon)
        if not 0.0 <= self.amax_epsilon <= F32.max:
            raise ValueError(
                f"amax_epsilon must be >= 0 and finite in fp32, got {self.amax_epsilon}"
            )
        super().__post_init__()

    @property
    def has_pow2_scales(self) -> bool:
        """True if every block scale is a power of two."""
        return self.pow2_scales
