"""Kinds of GEMM operands: each pair of element and scale as a tensor core sees it.

Kernels and configurations ask a kind, never a format. The kind of a format is found by the fields
of its record. A new kind is a record among ``_FORMATS``, the DSL's names of its types, and a row of
``_TCGEN05`` for sm_100a. All instructions of sm_100a and sm_90a contract 32 bytes of K. Both
operands of a product have codes of one width and the same block scales, but E4M3 may be multiplied
by E5M2, and operands with scales of rows by operands with scales of squares.
"""

import dataclasses
from typing import Literal

from cute_kernels.capability import why_unsupported
from cute_kernels.device.constants import DTYPE_BYTES
from cute_kernels.formats import FP8, MXFP8, NVFP4, BlockScale, Format, FP8Block
from cute_kernels.formats.base import FP8_ELEMENTS
from cute_kernels.layout.shapes import PITCH_ALIGNMENT, SF_TILE_COLS
from cute_kernels.records import UnsupportedError

#: Bytes of K that one instruction contracts.
_INSTRUCTION_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Tcgen05Kind:
    """Instructions of sm_100a that kernels write out themselves.

    Attributes:
        qualifiers: The kind, and the qualifiers after it.
        element: Number of the element type in the descriptor of an instruction.
        scale: Number of the type of block scales in the descriptor. None if absent.
    """

    qualifiers: str
    element: int
    scale: int | None = None


#: Formats whose codes tensor cores multiply, or kernels decode on the way to them.
_FORMATS: tuple[Format, ...] = (
    *(NVFP4(), NVFP4(four_over_six=True)),
    *(FP8(dtype) for dtype in FP8_ELEMENTS),
    *(FP8Block(block, dtype) for block in FP8Block.blocks for dtype in FP8_ELEMENTS),
    *(MXFP8(dtype) for dtype in FP8_ELEMENTS),
)
_PLAIN = ("bfloat16", "float16")
#: The DSL's names of types of elements and scales.
_DSL_TYPES = {
    "e2m1": "Float4E2M1FN",
    "e4m3": "Float8E4M3FN",
    "e5m2": "Float8E5M2",
    "e8m0": "Float8E8M0FNU",
    "f32": "Float32",
    "bfloat16": "BFloat16",
    "float16": "Float16",
}
#: Instructions of sm_100a by element, element of the block scale and elements that share one.
_TCGEN05 = {
    ("float16", None, 0): Tcgen05Kind("f16", 0),
    ("bfloat16", None, 0): Tcgen05Kind("f16", 1),
    ("e4m3", None, 0): Tcgen05Kind("f8f6f4", 0),
    ("e5m2", None, 0): Tcgen05Kind("f8f6f4", 1),
    ("e4m3", "e8m0", 32): Tcgen05Kind("mxf8f6f4.block_scale.block32", 0, scale=1),
    ("e5m2", "e8m0", 32): Tcgen05Kind("mxf8f6f4.block_scale.block32", 1, scale=1),
    ("e2m1", "e4m3", 16): Tcgen05Kind("mxf4nvf4.block_scale.block16", 1, scale=0),
}
#: Elements that instructions of sm_90a multiply; others are decoded to these.
_WGMMA = ("bfloat16", "float16", "e4m3", "e5m2")
#: Elements whose sums tensor cores of sm_90a hold with so few bits that kernels may move them to
#: fp32 registers: ``promotes`` of a configuration.
_SHORT_SUMS = ("e4m3", "e5m2")


@dataclasses.dataclass(frozen=True)
class OperandKind:
    """Operand of a product as tensor cores see it; plain without a format.

    Attributes:
        name: Name in configurations: the text of the format, or a dtype.
        fmt: Record of the format. None if plain.
    """

    name: str
    fmt: Format | None = None

    def __post_init__(self) -> None:
        if self.fmt is not None and (reason := why_unsupported(self.fmt)):
            raise UnsupportedError(
                f"no grouped GEMM kernel multiplies operands of {self.name}: {reason}"
            )

    @property
    def element(self) -> str:
        """Name of the element type."""
        return self.name if self.fmt is None else self.fmt.element.name

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return DTYPE_BYTES[self.name] * 8 if self.fmt is None else self.fmt.element.bits

    @property
    def scale(self) -> BlockScale | None:
        """Block scale of the format, if any."""
        return None if self.fmt is None else self.fmt.scale

    @property
    def is_block_scaled(self) -> bool:
        """True if the operand has block scales."""
        return self.scale is not None

    @property
    def has_row_scales(self) -> bool:
        """True if block scales are fp32 numbers of rows or squares, unknown to instructions."""
        return self.fmt is not None and self.fmt.scale is not None and not self.fmt.has_scale_tiles

    @property
    def has_squares(self) -> bool:
        """True if block scales belong to squares."""
        return self.fmt is not None and self.fmt.has_squares

    @property
    def sf_vec_size(self) -> int:
        """Elements that share a block scale, or 0 without block scales."""
        return 0 if self.scale is None else self.scale.vec_size

    @property
    def global_scale_factor(self) -> float | None:
        """Factor of the stored global scale when it is decoded, or None without a global scale."""
        global_scale = None if self.fmt is None else self.fmt.global_scale
        return None if global_scale is None else global_scale.factor

    @property
    def columnwise(self) -> Literal["transposed", "untransposed"] | None:
        """Layout of the copy whose blocks run along rows, see ``formats``.

        None for plain operands: one tensor serves both directions, and it has no slots.
        """
        return None if self.fmt is None else self.fmt.columnwise

    @property
    def has_slots(self) -> bool:
        """True if each group's rows start at a slot where they are contracted.

        Otherwise K begins and ends at any row.
        """
        return self.columnwise is not None

    @property
    def is_transposed(self) -> bool:
        """True if operands are contiguous along K in both directions.

        Otherwise operands whose rows are contracted are contiguous along M or N.
        """
        return self.columnwise == "transposed"

    @property
    def dsl_types(self) -> tuple[str, str | None]:
        """The DSL's names of the types of elements and block scales, or None without scales."""
        scale = None if self.scale is None else _DSL_TYPES[self.scale.element.name]
        return _DSL_TYPES[self.element], scale

    @property
    def tcgen05(self) -> Tcgen05Kind | None:
        """Instructions of sm_100a, or None if it has none for such operands."""
        return _TCGEN05.get(
            (
                self.element,
                None if self.scale is None else self.scale.element.name,
                self.sf_vec_size,
            )
        )

    @property
    def is_decodable(self) -> bool:
        """True if kernels can decode the codes (``Format.decoder_kind``); True if plain."""
        return self.fmt is None or self.fmt.decoder_kind is not None

    @property
    def is_wgmma(self) -> bool:
        """True if instructions of sm_90a multiply the elements. Otherwise they are decoded."""
        return self.element in _WGMMA

    @property
    def has_short_sums(self) -> bool:
        """True if tensor cores of sm_90a add the products with fewer bits than fp32 has."""
        return self.element in _SHORT_SUMS

    @property
    def instruction_k(self) -> int:
        """Elements of K that one instruction contracts."""
        return _INSTRUCTION_BYTES * 8 // self.bits

    @property
    def scale_tile_k(self) -> int:
        """Elements of K whose block scales are in one 128x4 tile."""
        return self.sf_vec_size * SF_TILE_COLS

    @property
    def k_blocks_of_scale_tile(self) -> int:
        """Number of instructions along K whose block scales are in one tile.

        Each instruction picks its scales by their number in the tile.
        """
        return self.scale_tile_k // self.instruction_k

    @property
    def k_align(self) -> int:
        """Multiple that K of an m_grouped product must be, so that TMA can address the rows."""
        return PITCH_ALIGNMENT * 8 // self.bits if self.fmt is None else self.fmt.k_multiple


#: Operand kinds by name.
OPERANDS = {
    **{fmt.text: OperandKind(fmt.text, fmt) for fmt in _FORMATS},
    **{name: OperandKind(name) for name in _PLAIN},
}


def _kernel_fields(fmt: Format) -> tuple[object, ...]:
    """Return the fields of a format that a kernel sees.

    Scales of squares in tiles are repeated for each row.
    """
    factor = None if fmt.global_scale is None else fmt.global_scale.factor
    return fmt.element, fmt.scale, fmt.has_squares, factor, fmt.columnwise, fmt.k_multiple


_KINDS = {_kernel_fields(kind.fmt): kind for kind in OPERANDS.values() if kind.fmt}


def operand_of(fmt: Format) -> OperandKind:
    """Return the kind of a format's operands.

    Raises:
        UnsupportedError: No kernel multiplies them.
    """
    kind = _KINDS.get(_kernel_fields(fmt))
    if kind is None:
        raise UnsupportedError(f"no grouped GEMM kernel multiplies operands of {fmt.text}")
    return kind
