"""The low-precision formats: what a quantized tensor's bytes mean.

A format says *what* is stored (element type, block shape, scale type, rounding), never *how* it is
computed. This is the only module that spells out block sizes and maxima; everything else asks a
format record. Records are frozen and hashable, validated when made, and safe to use as dictionary
keys, ``torch.compile`` guards and members of a recipe.

Sources: OCP Microscaling Formats v1.0 for MXFP8 and E2M1; NVIDIA's NVFP4 for 1x16 blocks with E4M3
scales and a second fp32 level.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, TypeAlias

import torch

__all__ = ["FP8", "MXFP8", "NVFP4", "ElementType", "FP8Block", "Format", "E2M1", "E4M3", "E5M2"]


@dataclasses.dataclass(frozen=True)
class ElementType:
    """One storage element: its name, width in bits and largest finite magnitude."""

    name: str
    bits: int
    max: float

    @property
    def per_byte(self) -> int:
        """Elements packed into one byte, the even index in the low bits."""
        return 8 // self.bits


E2M1 = ElementType("e2m1", 4, 6.0)
E4M3 = ElementType("e4m3", 8, 448.0)
E5M2 = ElementType("e5m2", 8, 57344.0)
_FP8_ELEMENTS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        listed = " or ".join(str(c) for c in choices)
        raise ValueError(f"{name} must be {listed}, got {value!r}")


def _check_flags(record: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(record, name), bool):
            raise TypeError(f"{name} must be a bool, got {getattr(record, name)!r}")


@dataclasses.dataclass(frozen=True)
class NVFP4:
    """E2M1 codes, two a byte, with one E4M3 scale a block and a second fp32 scale level.

    Args:
        row_scaled: the second level is one amax per row of the rowwise copy instead of one per
            group. The columnwise copy always carries one per group.
        block: (1, 16) for activations and gradients, or (16, 16) for weights, where both
            directions hold the same values.
        hadamard: a random 16x16 Hadamard transform is applied to the columnwise copy.
        stochastic_rounding: codes are rounded stochastically instead of to nearest even.
        four_over_six: each block picks the better of the scales that map its amax to 6 or to 4.
        prepacked: the bits of every eight codes are in the order of ``cute_kernels.prepack``, which
            the grouped GEMM of sm_90a decodes fastest; for uniform weights, same values and sizes.

    Raises:
        ValueError: a combination that has no meaning, such as ``row_scaled`` with 16x16 blocks.
    """

    row_scaled: bool = False
    block: tuple[int, int] = (1, 16)
    hadamard: bool = False
    stochastic_rounding: bool = False
    four_over_six: bool = False
    prepacked: bool = False

    name: ClassVar[str] = "nvfp4"
    element: ClassVar[ElementType] = E2M1
    #: Elements that share one scale, along the blocked direction.
    sf_vec_size: ClassVar[int] = 16
    scale_element: ClassVar[ElementType] = E4M3
    blocks: ClassVar[tuple[tuple[int, int], ...]] = ((1, 16), (16, 16))

    def __post_init__(self) -> None:
        flags = ("hadamard", "stochastic_rounding", "four_over_six", "prepacked")
        _check_flags(self, "row_scaled", *flags)
        object.__setattr__(self, "block", tuple(self.block))
        _check_choice("block", self.block, self.blocks)
        if self.row_scaled:
            for flag in ("hadamard", "stochastic_rounding", "prepacked"):
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

    @property
    def is_2d(self) -> bool:
        """Whether one scale covers a square block."""
        return self.block[0] > 1

    @property
    def tensor_max(self) -> float:
        """Largest value that codes times block scales represent: 6 * 448 = 2688."""
        return self.element.max * self.scale_element.max


@dataclasses.dataclass(frozen=True)
class MXFP8:
    """FP8 codes with one power-of-two E8M0 scale per 32 values.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        block: (1, 32), or (32, 32) where both directions hold the same codes.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    block: tuple[int, int] = (1, 32)

    name: ClassVar[str] = "mxfp8"
    sf_vec_size: ClassVar[int] = 32
    blocks: ClassVar[tuple[tuple[int, int], ...]] = ((1, 32), (32, 32))

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", tuple(self.block))
        _check_choice("dtype", self.dtype, tuple(_FP8_ELEMENTS))
        _check_choice("block", self.block, self.blocks)

    @property
    def element(self) -> ElementType:
        """The FP8 element type."""
        return _FP8_ELEMENTS[self.dtype]


@dataclasses.dataclass(frozen=True)
class FP8Block:
    """FP8 codes with one fp32 scale per 1x128 or 128x128 block.

    Args:
        block: (1, 128) for activations and gradients, (128, 128) for weights.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scales: scales are rounded down to powers of two.
        amax_epsilon: lower bound of a block's amax.
    """

    block: tuple[int, int] = (1, 128)
    dtype: torch.dtype = torch.float8_e4m3fn
    pow2_scales: bool = True
    amax_epsilon: float = 0.0

    name: ClassVar[str] = "fp8_block"
    sf_vec_size: ClassVar[int] = 128
    blocks: ClassVar[tuple[tuple[int, int], ...]] = ((1, 128), (128, 128))

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", tuple(self.block))
        _check_choice("dtype", self.dtype, tuple(_FP8_ELEMENTS))
        _check_choice("block", self.block, self.blocks)
        _check_flags(self, "pow2_scales")
        if not 0.0 <= self.amax_epsilon < float("inf"):
            raise ValueError(f"amax_epsilon must be finite and >= 0, got {self.amax_epsilon}")

    @property
    def element(self) -> ElementType:
        """The FP8 element type."""
        return _FP8_ELEMENTS[self.dtype]


@dataclasses.dataclass(frozen=True)
class FP8:
    """FP8 codes with one fp32 scale per group.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scaling: ``"current"`` takes the scale from this tensor's amax, ``"delayed"`` from a
            history of earlier ones.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    scaling: Literal["current", "delayed"] = "current"

    name: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, tuple(_FP8_ELEMENTS))
        _check_choice("scaling", self.scaling, ("current", "delayed"))

    @property
    def element(self) -> ElementType:
        """The FP8 element type."""
        return _FP8_ELEMENTS[self.dtype]


#: Any of the format records.
Format: TypeAlias = NVFP4 | MXFP8 | FP8Block | FP8
