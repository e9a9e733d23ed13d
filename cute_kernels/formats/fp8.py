"""FP8 with one fp32 scale per group: TransformerEngine's current and delayed scaling."""

import dataclasses
from typing import ClassVar, Literal

import torch

from ..records import check_choice, check_kind
from .base import FP8_ELEMENTS, Format, GlobalScale, record


@record
@dataclasses.dataclass(frozen=True)
class FP8(Format):
    """FP8 codes with one fp32 scale per group.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scaling: ``"current"`` computes the scale from this tensor's amax. ``"delayed"`` takes a
            scale that the caller computed from the amaxes of earlier tensors, and returns
            this tensor's amax.
        nan_scales: Make the scale of a group that contains infinity NaN; see ``Format``.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    scaling: Literal["current", "delayed"] = "current"
    nan_scales: bool = False

    name: ClassVar[str] = "fp8"
    scale: ClassVar[None] = None
    #: A value is code * scale_inv.
    global_scale: ClassVar[GlobalScale] = GlobalScale(
        "group", ("scale_inv", "scale", "amax"), is_shared=True
    )
    columnwise: ClassVar[Literal["transposed"]] = "transposed"
    k_multiple: ClassVar[int] = 16
    rounds_activation: ClassVar[bool] = False
    encode_only_fields: ClassVar[tuple[str, ...]] = ("scaling", "nan_scales")

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, tuple(FP8_ELEMENTS))
        check_choice("scaling", self.scaling, ("current", "delayed"))
        check_kind(bool, nan_scales=self.nan_scales)
        super().__post_init__()

    @property
    def has_given_scale(self) -> bool:
        """True if the caller gives the scales."""
        return self.scaling == "delayed"
