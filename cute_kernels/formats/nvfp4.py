"""NVFP4: E2M1 codes, E4M3 block scales and a second fp32 level. Source: NVIDIA."""

import dataclasses
from typing import ClassVar, Literal

from ..records import check_choice, check_kind
from .base import E2M1, E4M3, BlockScale, ElementType, Format, GlobalScale, as_block, record

#: The bound of block scales without ``four_over_six``, and its default with it.
_E4M3_MAX = {False: int(E4M3.max), True: 256}
#: By ``row_scaled`` and ``e4m3_max``; made once, for every call of an op asks for it.
_LEVELS = {
    (row_scaled, bound): GlobalScale(
        "row" if row_scaled else "group", ("amax",), 1 / (E2M1.max * bound)
    )
    for row_scaled in (False, True)
    for bound in _E4M3_MAX.values()
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
        e4m3_max: what the second level maps the largest block scale to: 256, the default of
            ``four_over_six``, which leaves room for the scale that maps to 4; or 448, which
            is the only value without it.
        four_over_six_error: which of its two errors decides: the sum of the magnitudes of a
            block's errors ("mae") or of their squares ("mse").
        nan_scales: amaxes keep NaN, of blocks, rows and groups, and so do scales, as in
            ``Format``.

    Raises:
        TypeError: a field of another type.
        ValueError: a combination that has no meaning, such as ``row_scaled`` with 16x16 blocks,
            or a field that does not apply.
    """

    row_scaled: bool = False
    block: tuple[int, int] = (1, 16)
    hadamard: bool = False
    stochastic_rounding: bool = False
    four_over_six: bool = False
    e4m3_max: int | None = None
    four_over_six_error: Literal["mae", "mse"] = "mae"
    nan_scales: bool = False

    name: ClassVar[str] = "nvfp4"
    element: ClassVar[ElementType] = E2M1
    scale: ClassVar[BlockScale] = BlockScale(E4M3, 16, "tiles_128x4")
    columnwise: ClassVar[Literal["transposed"]] = "transposed"
    k_multiple: ClassVar[int] = 16
    #: The scale of a square block is stored once a row.
    encode_only_fields: ClassVar[tuple[str, ...]] = ("block", "four_over_six_error", "nan_scales")
    blocks: ClassVar[tuple[tuple[int, int], ...]] = ((1, 16), (16, 16))

    def __post_init__(self) -> None:
        for flag in (
            "row_scaled",
            "hadamard",
            "stochastic_rounding",
            "four_over_six",
            "nan_scales",
        ):
            check_kind(bool, **{flag: getattr(self, flag)})
        object.__setattr__(self, "block", as_block(self.block, self.blocks))
        if self.row_scaled:
            for flag in ("hadamard", "stochastic_rounding"):
                if getattr(self, flag):
                    raise ValueError(f"row_scaled cannot be combined with {flag}")
            if self.is_2d:
                raise ValueError(
                    f"row_scaled needs block=(1, 16), got block={self.block}: a 16x16 block spans rows of different scales"
                )
        if self.is_2d and self.hadamard:
            raise ValueError("hadamard needs block=(1, 16): 16x16 blocks serve both directions")
        if self.four_over_six and (self.hadamard or self.stochastic_rounding):
            raise ValueError(
                "four_over_six cannot be combined with hadamard or stochastic_rounding"
            )
        self._check_four_over_six()
        super().__post_init__()

    def _check_four_over_six(self) -> None:
        """Whether the fields that say how it works are valid and apply."""
        bound = self.e4m3_max
        if bound is not None:
            check_kind(int, e4m3_max=bound)
        check_choice("e4m3_max", bound, (None, *_E4M3_MAX.values()))
        check_choice("four_over_six_error", self.four_over_six_error, ("mae", "mse"))
        if self.four_over_six:
            return
        if bound not in (None, _E4M3_MAX[False]):
            raise ValueError(f"e4m3_max={bound} needs four_over_six")
        if self.four_over_six_error != "mae":
            raise ValueError(
                f"four_over_six_error={self.four_over_six_error!r} needs four_over_six"
            )

    @property
    def resolved(self) -> dict[str, object]:
        """See ``Format``."""
        return {"e4m3_max": _E4M3_MAX[self.four_over_six]}

    @property
    def for_decoding(self) -> Format:
        """See ``Format``: how codes are chosen is not asked for, but the bound of the scales is."""
        made = super().for_decoding
        if self.e4m3_max != _E4M3_MAX[False]:
            return made
        fields = {"four_over_six": False, "stochastic_rounding": False, "e4m3_max": None}
        return dataclasses.replace(made, **fields)  # type: ignore

    def for_direction(self, columnwise: bool) -> "NVFP4":
        """See ``Format``: only rows have levels of their own, only columns are transformed."""
        name = "row_scaled" if columnwise else "hadamard"
        return dataclasses.replace(self, **{name: False}) if getattr(self, name) else self  # type: ignore[arg-type]

    @property
    def is_stochastic(self) -> bool:
        """Whether codes are rounded by random bits."""
        return self.stochastic_rounding

    @property
    def searches_scale(self) -> bool:
        """See ``Format``."""
        return self.four_over_six

    @property
    def is_transformed(self) -> bool:
        """Whether the columnwise copy is of the Hadamard transform."""
        return self.hadamard

    @property
    def tensor_max(self) -> float:
        """Largest value that codes times block scales stand for: 6 * 448 = 2688, or 6 * 256."""
        assert self.e4m3_max is not None
        return E2M1.max * self.e4m3_max

    @property
    def global_scale(self) -> GlobalScale:
        """The amax of each group or row; a value is code * scale * (amax / tensor_max)."""
        assert self.e4m3_max is not None
        return _LEVELS[self.row_scaled, self.e4m3_max]
