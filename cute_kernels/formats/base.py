"""Base class of the format records, and the text that stands for a record.

A format record states *what* is stored, not *how* it is computed: the element type, the block
scale, the global scale above the blocks, and the orientation of the columnwise copy. Code that
handles quantized bytes asks the record for these facts. A format is therefore added by a record and
its codecs.
"""

import abc
import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import torch

from ptx_emulator.host.suggestions import closest

from ..deprecation import DeprecatedAttribute, deprecated_attributes, warn_deprecated
from ..records import Record, check_choice, read, suggest_arguments


@dataclasses.dataclass(frozen=True)
class ElementType:
    """Number type of stored elements.

    Attributes:
        name: Name in kernels and in the text of a record.
        bits: Width in bits.
        max: Largest finite magnitude.
        dtype: Dtype of buffers that hold the elements. It is uint8 if several elements share a
            byte, with the element of even index in the low bits.
    """

    name: str
    bits: int
    max: float
    dtype: torch.dtype

    @property
    def per_byte(self) -> int:
        """Number of elements in one byte. The element of even index is in the low bits."""
        return 8 // self.bits

    @property
    def has_nan(self) -> bool:
        """True if a code stands for NaN, as in every number type that PyTorch has a dtype for."""
        return self.dtype.is_floating_point

    def count(self, width: int) -> int:
        """Return the number of elements in a row of a buffer.

        Args:
            width: Number of entries of ``dtype`` in the row.
        """
        return width * self.dtype.itemsize * 8 // self.bits

    def width(self, count: int) -> int:
        """Return the number of entries of ``dtype`` that a row takes.

        Args:
            count: Number of elements in the row.
        """
        return -(-count * self.bits // (self.dtype.itemsize * 8))


E2M1 = ElementType("e2m1", 4, 6.0, torch.uint8)
E4M3 = ElementType("e4m3", 8, 448.0, torch.float8_e4m3fn)
E5M2 = ElementType("e5m2", 8, 57344.0, torch.float8_e5m2)
#: Powers of two; byte ``e`` stands for 2^(e - 127).
E8M0 = ElementType("e8m0", 8, 2.0**127, torch.float8_e8m0fnu)
F32 = ElementType("f32", 32, torch.finfo(torch.float32).max, torch.float32)

#: FP8 element types by the PyTorch dtype that users name them by.
FP8_ELEMENTS = {e.dtype: e for e in (E4M3, E5M2)}


@dataclasses.dataclass(frozen=True)
class BlockScale:
    """Scale that the elements of one block share.

    Attributes:
        element: Number type of the scale.
        vec_size: Number of elements in a block, along the direction of the blocks.
        layout: ``"tiles_128x4"``, bytes in 512-byte tiles of 128 rows by 4 scales, the order that
            Blackwell's block-scaled MMA reads. Or ``"mn_major"``, one row of scales for each block
            along the direction of the blocks.
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
    """Fp32 scale above the block scales: a value is code * block scale * (global * factor).

    Attributes:
        per: ``"group"`` for one scale per group, ``"row"`` for one scale per row.
        buffers: Names of the vectors that are stored for it. The first one decodes.
        factor: Multiplier of the first vector when it decodes, rounded to fp32.
        is_shared: True if both directions read the same vectors; otherwise each direction has its
            own vectors.
    """

    per: Literal["group", "row"]
    buffers: tuple[str, ...]
    factor: float = 1.0
    is_shared: bool = False

    def __post_init__(self) -> None:
        check_choice("per", self.per, ("group", "row"))


#: Old names of the class attributes of formats, and their replacements.
_OLD_NAMES = {
    "second_level": "global_scale",
    "columnwise_level": "columnwise_global_scale",
    "level": "global_scale_for",
    "truncates": "rounds_activation",
    "how_made": "encode_only_fields",
    "takes_scale": "has_given_scale",
    "as_decoded": "for_decoding",
    "of_copy": "for_direction",
    "chooses_scales": "searches_scale",
    "decodes_by": "decoder_kind",
    "without_marks": "without_nan_scales",
}
#: Attributes that ``Format.__post_init__`` computes; pickles leave them out.
_COMPUTED = ("_global_scales", "_buffer_names", "_operand_names")


class Format(Record, abc.ABC):
    """Base class of the format records, which are frozen, hashable dataclasses.

    A record is validated when it is constructed. It may be a dictionary key, a ``torch.compile``
    guard and a member of a recipe.

    Attributes:
        name: Name of the format, the first word of its text.
        scale: Scale of a block. None if the format has no blocks.
        columnwise: ``"transposed"`` if the columnwise copy is the transpose of the rows of each
            group, in slot columns; ``"untransposed"`` if it keeps their orientation, in slot
            rows.
        k_multiple: Number that must divide the last dimension of a tensor.
        rounds_activation: True if the result of an activation of a bf16 or fp16 tensor is
            rounded to that dtype before it is quantized. The codes then equal those of an
            activation that is stored first.
        encode_only_fields: Names of the fields that affect encoding but not decoding.
        nan_scales: True if NaN and infinity, and all elements that share their scale, decode to
            NaN. See ``amaxes_keep_nan``. Finite tensors have the same bytes either way. If False,
            infinity saturates, and E2M1, which has no NaN, turns NaN into a number.
    """

    name: ClassVar[str]
    words: ClassVar[Mapping[str, Any]] = {e.name: e.dtype for e in FP8_ELEMENTS.values()}
    scale: ClassVar[BlockScale | None]
    columnwise: ClassVar[Literal["transposed", "untransposed"]]
    k_multiple: ClassVar[int]
    rounds_activation: ClassVar[bool] = True
    encode_only_fields: ClassVar[tuple[str, ...]] = ()
    #: A field in the records that support it.
    nan_scales: bool = False
    #: By direction, rowwise first. Every call of an op reads them, so they are computed once.
    _global_scales: tuple[GlobalScale | None, GlobalScale | None]
    _buffer_names: tuple[tuple[str, ...], tuple[str, ...]]
    _operand_names: tuple[tuple[str, ...], tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for old in _OLD_NAMES.keys() & cls.__dict__.keys():
            new = _OLD_NAMES[old]
            warn_deprecated(f"{cls.__name__}.{old}", f"{cls.__name__}.{new}")
            setattr(cls, new, cls.__dict__[old])
            delattr(cls, old)
            # ``dataclass`` reads the attribute of each annotation.
            cls.__dict__.get("__annotations__", {}).pop(old, None)
        if "columnwise" in cls.__dict__:
            check_choice("columnwise", cls.columnwise, ("transposed", "untransposed"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._compute()

    def _compute(self) -> None:
        """Compute the attributes in ``_COMPUTED``."""
        scales = self.global_scale, self.columnwise_global_scale
        names = _buffers(self, columnwise=False), _buffers(self, columnwise=True)
        unread = 0 if scales[0] is None else len(scales[0].buffers) - 1
        operands = tuple(buffers[: len(buffers) - unread] for buffers in names)
        object.__setattr__(self, "_global_scales", scales)
        object.__setattr__(self, "_buffer_names", names)
        object.__setattr__(self, "_operand_names", operands)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _COMPUTED}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._compute()

    @property
    def element(self) -> ElementType:
        """Number type of the codes; by default the FP8 type that the field ``dtype`` names."""
        return FP8_ELEMENTS[self.dtype]  # type: ignore[attr-defined,no-any-return]

    @property
    @abc.abstractmethod
    def global_scale(self) -> GlobalScale | None:
        """Global scale of the rowwise copy, or None if the format has none."""

    @property
    def columnwise_global_scale(self) -> GlobalScale | None:
        """Global scale of the columnwise copy, which is per group also if rows have their own."""
        scale = self.global_scale
        return scale and dataclasses.replace(scale, per="group")

    def global_scale_for(self, columnwise: bool) -> GlobalScale | None:
        """Return the global scale of one direction, or None if the format has none.

        Args:
            columnwise: True for the columnwise copy, False for the rowwise one.
        """
        return self._global_scales[1 if columnwise else 0]

    @property
    def has_scale_tiles(self) -> bool:
        """True if block scales lie in 128x4 tiles, one per row also if blocks are square."""
        return self.scale is not None and self.scale.layout == "tiles_128x4"

    @property
    def has_squares(self) -> bool:
        """True if blocks are square and the scale of a block is stored once."""
        return self.is_2d and self.scale is not None and not self.has_scale_tiles

    @property
    def has_pow2_scales(self) -> bool:
        """True if every block scale is a power of two."""
        return self.scale is not None and self.scale.element == E8M0

    @property
    def decoder_kind(self) -> Literal["nibbles", "bytes"] | None:
        """Decoder that turns codes into bf16 or fp16 numbers in kernels, or None if there is none.

        ``"nibbles"`` decodes E2M1 codes with E4M3 scales of 16 elements, ``"bytes"`` decodes
        one-byte codes with scales of any kind.
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
        """True if the caller gives the scale of each group. Otherwise it follows from the amax."""
        return False

    @property
    def amaxes_keep_nan(self) -> bool:
        """True if the amax of a block, row or group that contains NaN is NaN, and so is its scale.

        ``nan_scales`` needs this if no code stands for NaN. If codes can stand for NaN, amaxes
        ignore NaN, and a scale is NaN if its amax is infinite.
        """
        return self.nan_scales and not self.element.has_nan

    @property
    def without_nan_scales(self) -> "Format":
        """Record without ``nan_scales``, as users write it in recipes."""
        return dataclasses.replace(self, nan_scales=False) if self.nan_scales else self  # type: ignore[type-var]

    @property
    def for_decoding(self) -> "Format":
        """Record with its encode-only fields at their defaults, which decodes the same."""
        if not self.encode_only_fields:
            return self
        defaults = {f.name: f.default for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        changes = {name: defaults[name] for name in self.encode_only_fields}
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def for_direction(self, columnwise: bool) -> "Format":
        """Return an equivalent record that keeps only what matters for one direction.

        Formats whose copies have equal bytes then share a kernel.

        Args:
            columnwise: True for the columnwise copy, False for the rowwise one.
        """
        return self

    @property
    def is_2d(self) -> bool:
        """True if a scale covers a square block, so that both directions hold equal values."""
        block: tuple[int, int] = getattr(self, "block", (1, 1))
        return block[0] > 1

    @property
    def is_stochastic(self) -> bool:
        """True if codes are rounded stochastically, so that quantization takes a seed."""
        return False

    @property
    def searches_scale(self) -> bool:
        """True if the scale of a block depends on all of its elements, not on its amax alone."""
        return False

    @property
    def is_transformed(self) -> bool:
        """True if the columnwise copy quantizes a transform of the values along a group's rows.

        The copy then has its own amaxes, contains whole blocks of a group's rows, and can be
        made from bf16 values only. A GEMM that reduces over these rows needs both operands to have
        the same transform.
        """
        return False

    def buffer_names(self, columnwise: bool) -> tuple[str, ...]:
        """Return the names of one direction's buffers: codes, block scales, global-scale vectors.

        Names of the columnwise copy end in ``_t``, except for vectors that both directions share.

        Args:
            columnwise: True for the columnwise copy, False for the rowwise one.
        """
        return self._buffer_names[1 if columnwise else 0]

    def operand_names(self, columnwise: bool) -> tuple[str, ...]:
        """Return the names of the buffers that decoding reads. It reads one of the global scale.

        Args:
            columnwise: True for the columnwise copy, False for the rowwise one.
        """
        return self._operand_names[1 if columnwise else 0]


for _old, _new in _OLD_NAMES.items():
    setattr(Format, _old, DeprecatedAttribute(_old, _new))


def _buffers(fmt: Format, columnwise: bool) -> tuple[str, ...]:
    """Compute ``Format.buffer_names``."""
    names = ["codes"] if fmt.scale is None else ["codes", "scales"]
    shared: tuple[str, ...] = ()
    if fmt.global_scale is not None:
        if fmt.global_scale.is_shared:
            shared = fmt.global_scale.buffers
        else:
            names.extend(fmt.global_scale.buffers)
    return (*(f"{name}_t" if columnwise else name for name in names), *shared)


def parse_block(value: object, choices: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Return ``value``, the rows and columns of a block, as a tuple.

    Raises:
        TypeError: ``value`` is not a tuple or list.
        ValueError: ``value`` is not one of ``choices``.
    """
    if not isinstance(value, (tuple, list)):
        hint = ": a dtype is given as dtype=" if isinstance(value, torch.dtype) else ""
        raise TypeError(f"block must be {' or '.join(map(str, choices))}, got {value!r}{hint}")
    check_choice("block", tuple(value), choices)
    return tuple(value)


FormatClass = TypeVar("FormatClass", bound=type[Format])
#: Record classes by the name of their format.
RECORDS: dict[str, type[Format]] = {}


def suggest_record(text: object) -> str:
    """Return ``": did you mean NVFP4()?"`` if a text is close to a format's name, else ''."""
    if not isinstance(text, str):
        return ""
    classes = {name: cls.__name__ for name, cls in RECORDS.items()}
    # An option may follow the name, as in "nvfp4_row_scaled" or "nvfp4:row_scaled".
    match = closest(text, classes) or closest(re.split(r"[_:( ]", text)[0], classes)
    return "" if match is None else f": did you mean {classes[match]}()?"


def record(cls: FormatClass) -> FormatClass:
    """Decorate a record class, so that ``parse`` can construct it."""
    check_choice("columnwise", cls.columnwise, ("transposed", "untransposed"))
    RECORDS[cls.name] = cls
    return suggest_arguments(cls)


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Format:
    """Return the record whose ``Format.text`` is ``text``.

    Args:
        text: Text such as ``"nvfp4:row_scaled"``: the name of the format and the fields that
            differ from their defaults.

    Raises:
        ValueError: There is no such format, field or value; or the record has another text,
            which leaves out fields at their defaults and has the others in the record's order.
    """
    return read("format", RECORDS, text)


__getattr__ = deprecated_attributes(
    __name__, {"SecondLevel": "cute_kernels.formats.base:GlobalScale"}
)
