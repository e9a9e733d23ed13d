"""What every format record says, and the one text that stands for a record.

A format says *what* is stored, never *how* it is computed: the element, the block scale, the level
of scaling above the blocks, and how the columnwise copy lies. Whoever handles quantized bytes asks
the record for these facts, so a format is added by its record and its codecs.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import torch

from ..records import Record, check_choice, read


@dataclasses.dataclass(frozen=True)
class ElementType:
    """One number as it is stored.

    Attributes:
        name: its name in kernels and in the text of a record.
        bits: its width.
        max: its largest finite magnitude.
        dtype: the dtype of buffers that hold it; uint8 where several share a byte, the even
            index in the low bits.
    """

    name: str
    bits: int
    max: float
    dtype: torch.dtype

    @property
    def per_byte(self) -> int:
        """Elements packed into one byte, the even index in the low bits."""
        return 8 // self.bits

    @property
    def holds_nan(self) -> bool:
        """Whether one of its codes is NaN: so it is of the numbers that PyTorch has a dtype for."""
        return self.dtype.is_floating_point

    def count(self, width: int) -> int:
        """Numbers in a row of ``width`` entries of the storage dtype."""
        return width * self.dtype.itemsize * 8 // self.bits

    def width(self, count: int) -> int:
        """Entries of the storage dtype that ``count`` numbers take."""
        return -(-count * self.bits // (self.dtype.itemsize * 8))


E2M1 = ElementType("e2m1", 4, 6.0, torch.uint8)
E4M3 = ElementType("e4m3", 8, 448.0, torch.float8_e4m3fn)
E5M2 = ElementType("e5m2", 8, 57344.0, torch.float8_e5m2)
#: A power of two; byte ``e`` is 2^(e - 127).
E8M0 = ElementType("e8m0", 8, 2.0**127, torch.float8_e8m0fnu)
F32 = ElementType("f32", 32, torch.finfo(torch.float32).max, torch.float32)

#: The FP8 element types by the dtype that users name them by.
FP8_ELEMENTS = {e.dtype: e for e in (E4M3, E5M2)}


@dataclasses.dataclass(frozen=True)
class BlockScale:
    """The scale that the elements of one block share.

    Attributes:
        element: the number type of the scale.
        vec_size: elements of a block along the blocked direction.
        layout: ``"tiles_128x4"``, bytes in 512-byte tiles of 128 rows by 4 scales, the order
            that Blackwell's block-scaled MMA reads; or ``"mn_major"``, one row of scales
            for each block along the blocked direction.
    """

    element: ElementType
    vec_size: int
    layout: Literal["tiles_128x4", "mn_major"]

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, ("tiles_128x4", "mn_major"))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the buffer."""
        return torch.uint8 if self.layout == "tiles_128x4" else self.element.dtype


@dataclasses.dataclass(frozen=True)
class GlobalScale:
    """The scaling above the blocks, in fp32: a value is code * block scale * (level * factor).

    Attributes:
        per: whether each group or each row has one.
        buffers: the vectors that are kept for it, the first of which decodes.
        factor: what the first buffer is multiplied by to decode, rounded to fp32.
        is_shared: both directions read the same vectors; otherwise each has its own.
    """

    per: Literal["group", "row"]
    buffers: tuple[str, ...]
    factor: float = 1.0
    is_shared: bool = False

    def __post_init__(self) -> None:
        check_choice("per", self.per, ("group", "row"))


class Format(Record, abc.ABC):
    """Base of the format records: frozen dataclasses, hashable, validated when made.

    Records are safe to use as dictionary keys, ``torch.compile`` guards and members of a recipe.

    Attributes:
        name: the name of the format, the first word of its text.
        scale: the scale of a block; None where there are no blocks.
        columnwise: whether the columnwise copy is the transpose of the rows of each group, in
            slot columns, or keeps their orientation, in slot rows.
        k_multiple: what the last dimension of a tensor must be a multiple of.
        rounds_activation: what an activation makes of a bf16 or fp16 tensor is rounded to that dtype
            before it is quantized, so that it gives the codes of an activation that is
            stored.
        encode_only_fields: fields that say how codes are made, which who decodes them need not know.
        nan_scales: what is not finite decodes to NaN, with all that shares its scale; see
            ``amaxes_keep_nan``. Finite numbers have the same bytes either way. Without it
            an infinity saturates, and E2M1, which has no NaN, makes a number of one.
    """

    name: ClassVar[str]
    words: ClassVar[Mapping[str, Any]] = {e.name: e.dtype for e in FP8_ELEMENTS.values()}
    scale: ClassVar[BlockScale | None]
    columnwise: ClassVar[Literal["transposed", "untransposed"]]
    k_multiple: ClassVar[int]
    rounds_activation: ClassVar[bool] = True
    encode_only_fields: ClassVar[tuple[str, ...]] = ()
    #: A field of records that have it.
    nan_scales: bool = False

    @property
    def element(self) -> ElementType:
        """What a code is: of a record with a ``dtype`` that FP8 element."""
        return FP8_ELEMENTS[self.dtype]  # type: ignore[attr-defined,no-any-return]

    @property
    @abc.abstractmethod
    def global_scale(self) -> GlobalScale | None:
        """The scaling above the blocks of the rowwise copy; None where there is none."""

    @property
    def columnwise_global_scale(self) -> GlobalScale | None:
        """The scaling above the blocks of the columnwise copy, which no row has for itself."""
        level = self.global_scale
        return level and dataclasses.replace(level, per="group")

    def level(self, columnwise: bool) -> GlobalScale | None:
        """The scaling above the blocks of one direction."""
        return self.columnwise_global_scale if columnwise else self.global_scale

    @property
    def has_scale_tiles(self) -> bool:
        """Whether block scales lie in 128x4 tiles, one for each row also of a square block."""
        return self.scale is not None and self.scale.layout == "tiles_128x4"

    @property
    def has_squares(self) -> bool:
        """Whether one number is stored for the scale of a square block."""
        return self.is_2d and self.scale is not None and not self.has_scale_tiles

    @property
    def has_pow2_scales(self) -> bool:
        """Whether every block scale is a power of two."""
        return self.scale is not None and self.scale.element == E8M0

    @property
    def decodes_by(self) -> Literal["nibbles", "bytes"] | None:
        """How kernels make bf16 or fp16 numbers of codes; None where none does.

        ``"nibbles"`` are E2M1 codes with E4M3 scales of 16, ``"bytes"`` codes of a byte with scales
        of any kind.
        """
        if (
            self.element == E2M1
            and self.scale is not None
            and (self.scale.element, self.scale.vec_size) == (E4M3, 16)
        ):
            return "nibbles"
        return "bytes" if self.element.bits == 8 else None

    @property
    def has_given_scale(self) -> bool:
        """Whether the caller gives the scale of each group, which else follows from its amax."""
        return False

    @property
    def amaxes_keep_nan(self) -> bool:
        """True if the amax of a block, row or group that holds a NaN is NaN, and with it the scale.

        This is what ``nan_scales`` asks for if no code is NaN. Codes that hold a NaN need it not:
        amaxes pass over the NaN, and a scale is NaN if its amax is infinite.
        """
        return self.nan_scales and not self.element.holds_nan

    @property
    def without_marks(self) -> "Format":
        """The record without ``nan_scales``, as users of recipes write it."""
        return dataclasses.replace(self, nan_scales=False) if self.nan_scales else self  # type: ignore[type-var]

    @property
    def for_decoding(self) -> "Format":
        """What is said to who decodes: the fields of ``encode_only_fields`` are at their defaults."""
        if not self.encode_only_fields:
            return self
        fields = {f.name: f.default for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        made = {name: fields[name] for name in self.encode_only_fields}
        return dataclasses.replace(self, **made)  # type: ignore[type-var]

    def for_direction(self, columnwise: bool) -> "Format":
        """The record that says the same of one direction, and no more: copies of equal bytes share
        their kernels.
        """
        return self

    @property
    def is_2d(self) -> bool:
        """Whether one scale covers a square block, so that both directions hold equal values."""
        block: tuple[int, int] = getattr(self, "block", (1, 1))
        return block[0] > 1

    @property
    def is_stochastic(self) -> bool:
        """Whether codes are rounded by random bits, so that quantizing takes a seed."""
        return False

    @property
    def searches_scale(self) -> bool:
        """Whether all elements of a block decide its scale, not its amax alone."""
        return False

    @property
    def is_transformed(self) -> bool:
        """Whether the columnwise copy is of a transform of the values along the rows of a group.

        It then has amaxes of its own, holds whole blocks of a group's rows, is made of bf16 values
        only, and is multiplied over those rows by copies with the same transform only.
        """
        return False

    def buffer_names(self, columnwise: bool) -> tuple[str, ...]:
        """The buffers of one direction: codes, block scales, and the vectors of the second level.

        Those of the columnwise copy end in ``_t``, unless both directions share them.
        """
        own = ["codes"] if self.scale is None else ["codes", "scales"]
        level = self.global_scale
        shared = list(level.buffers) if level is not None else []
        if level is not None and not level.is_shared:
            own, shared = own + shared, []
        return (*(f"{name}_t" if columnwise else name for name in own), *shared)

    def operand_names(self, columnwise: bool) -> tuple[str, ...]:
        """The buffers of one direction that a reader needs: of the second level the one it has."""
        names = self.buffer_names(columnwise)
        level = self.global_scale
        return names if level is None else names[: len(names) - len(level.buffers) + 1]


def as_block(value: object, choices: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """``value``, rows and columns of a block, as a tuple.

    Raises:
        TypeError: it is no pair.
        ValueError: it is none of ``choices``.
    """
    if not isinstance(value, (tuple, list)):
        hint = ": a dtype is given as dtype=" if isinstance(value, torch.dtype) else ""
        raise TypeError(f"block must be {' or '.join(map(str, choices))}, got {value!r}{hint}")
    check_choice("block", tuple(value), choices)
    return tuple(value)


F = TypeVar("F", bound=type[Format])
#: The classes of records by the name of their format.
RECORDS: dict[str, type[Format]] = {}


def record(cls: F) -> F:
    """Class decorator: ``parse`` makes records of this class."""
    check_choice("columnwise", cls.columnwise, ("transposed", "untransposed"))
    RECORDS[cls.name] = cls
    return cls


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Format:
    """The record that ``Format.text`` stands for.

    Raises:
        ValueError: there is no such format, it has no such field or value, or its record has
            another text: fields at their defaults are left out, the others in the record's
            order.
    """
    return read("format", RECORDS, text)
