"""NVFP4: E2M1 codes, E4M3 block scales and an fp32 global scale. Source: NVIDIA."""

import dataclasses
from typing import ClassVar, Literal

from ..records import check_choice, check_kind
from .base import E2M1, E4M3, BlockScale, ElementType, Format, GlobalScale, parse_block, record

#: Largest block scale by ``four_over_six``: the only value if False, the default if True.
_E4M3_MAX = {False: int(E4M3.max), True: 256}
#: Global scales by ``row_scaled`` and ``e4m3_max``.
_GLOBAL_SCALES = {
    (row_scaled, bound): GlobalScale(
        "row" if row_scaled else "group", ("amax",), 1 / (E2M1.max * bound)
    )
    for row_scaled in (False, True)
    for bound in _E4M3_MAX.values()
}


@record
@dataclasses.dataclass(frozen=True)
class NVFP4(Format):
    """E2M1 codes, two per byte, with one E4M3 scale per block and an fp32 global scale.

    Args:
        row_scaled: Use one global scale (an amax) per row of the rowwise copy instead of one per
            group. The columnwise copy always has one per group.
        block: (1, 16) for activations and gradients, or (16, 16) for weights. With (16, 16) both
            directions hold the same values.
        hadamard: Apply a random 16x16 Hadamard transform to the columnwise copy.
        stochastic_rounding: Round codes stochastically instead of to nearest even.
        four_over_six: Let each block choose the better of the scales that map its amax to 6 or 4.
        e4m3_max: Block scale that the global scale maps the largest block scale to. With
            ``four_over_six`` the default is 256, which leaves room for the scale that maps
            the amax to 4. Without it the only value is 448.
        four_over_six_error: Error that ``four_over_six`` minimizes. It is the sum of the magnitudes
            ("mae") or of the squares ("mse") of a block's errors.
        nan_scales: Propagate NaN through the amaxes of blocks, rows and groups to the scales. See
            ``Format``.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A combination has no meaning, such as ``row_scaled`` with 16x16 blocks, or a
            field does not apply.
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
    #: ``block`` does not affect decoding: the scale of a square block is stored once per row.
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
        object.__setattr__(self, "block", parse_block(self.block, self.blocks))
        if self.row_scaled:
            for flag in ("hadamard", "stochastic_rounding"):
                if getattr(self, flag):
                    raise ValueError(f"row_scaled cannot be combined with {flag}")
            if self.is_2d:
                raise ValueError(
                    f"row_scaled needs block=(1, 16), got block={self.block}: "
                    "a 16x16 block spans rows of different scales"
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
        """Check the fields that configure ``four_over_six``: their values, and that they apply."""
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
        """See ``Format``. Decoding depends on the bound of scales, not on the choice of codes."""
        reset = super().for_decoding
        if self.e4m3_max != _E4M3_MAX[False]:
            return reset
        fields = {"four_over_six": False, "stochastic_rounding": False, "e4m3_max": None}
        return dataclasses.replace(reset, **fields)  # type: ignore

    def for_direction(self, columnwise: bool) -> "NVFP4":
        """Return an equivalent record: only rows are row-scaled, only columns are transformed.

        Args:
            columnwise: True for the columnwise copy, False for the rowwise one.
        """
        name = "row_scaled" if columnwise else "hadamard"
        return dataclasses.replace(self, **{name: False}) if getattr(self, name) else self  # type: ignore[arg-type]

    @property
    def is_stochastic(self) -> bool:
        """True if codes are rounded stochastically."""
        return self.stochastic_rounding

    @property
    def searches_scale(self) -> bool:
        """See ``Format``."""
        return self.four_over_six

    @property
    def is_transformed(self) -> bool:
        """True if the columnwise copy quantizes the Hadamard transform."""
        return self.hadamard

    @property
    def tensor_max(self) -> float:
        """Largest product of a code and a block scale: 6 * 448 = 2688, or 6 * 256."""
        assert self.e4m3_max is not None
        return E2M1.max * self.e4m3_max

    @property
    def global_scale(self) -> GlobalScale:
        """Amax of each group or row. A value is code * scale * (amax / tensor_max)."""
        assert self.e4m3_max is not None
        return _GLOBAL_SCALES[self.row_scaled, self.e4m3_max]
