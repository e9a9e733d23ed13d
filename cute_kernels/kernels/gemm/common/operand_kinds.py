"""What a tensor core needs to know of its operands: one kind for each pair of element and scale.

Kernels and configurations ask a kind, never a format: the kind of a format is found by what its
record says. A new one is a record among ``_FORMATS``, the DSL's names of its types, and a row of
``_TCGEN05`` for sm_100a. All instructions, of sm_100a and sm_90a, contract 32 bytes of K. Both
operands of a product have codes of one width and the same block scales; E4M3 may meet E5M2, and
scales of rows those of squares.
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

    ``qualifiers`` are the kind and what follows it; the others are numbers of types in the
    descriptor of an instruction, of the elements and of the block scales.
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
#: Elements that instructions of sm_90a take; others are decoded to these.
_WGMMA = ("bfloat16", "float16", "e4m3", "e5m2")
#: Elements of which tensor cores of sm_90a keep so few bits of a sum that kernels may move it to
#: fp32 registers: ``promotes`` of a configuration.
_SHORT_SUMS = ("e4m3", "e5m2")


@dataclasses.dataclass(frozen=True)
class OperandKind:
    """An operand of a product, as tensor cores see it; without a format it is plain.

    ``name`` is that of configurations: the text of the format, or a dtype.
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
        return self.name if self.fmt is None else self.fmt.element.name

    @property
    def bits(self) -> int:
        return DTYPE_BYTES[self.name] * 8 if self.fmt is None else self.fmt.element.bits

    @property
    def scale(self) -> BlockScale | None:
        return None if self.fmt is None else self.fmt.scale

    @property
    def is_block_scaled(self) -> bool:
        return self.scale is not None

    @property
    def has_row_scales(self) -> bool:
        """Whether block scales are fp32 numbers of rows or squares, which no instruction takes."""
        return self.fmt is not None and self.fmt.scale is not None and not self.fmt.has_scale_tiles

    @property
    def has_squares(self) -> bool:
        return self.fmt is not None and self.fmt.has_squares

    @property
    def sf_vec_size(self) -> int:
        """Elements that share a block scale; 0 without block scales."""
        return 0 if self.scale is None else self.scale.vec_size

    @property
    def global_scale_factor(self) -> float | None:
        """What the second level of scales is multiplied by to decode; None without one."""
        level = None if self.fmt is None else self.fmt.global_scale
        return None if level is None else level.factor

    @property
    def columnwise(self) -> Literal["transposed", "untransposed"] | None:
        """How the copy lies whose blocks run along rows, see ``formats``.

        None if operands are plain: then one tensor serves both directions, and has no slots.
        """
        return None if self.fmt is None else self.fmt.columnwise

    @property
    def has_slots(self) -> bool:
        """Whether each group's rows start at a slot where they are contracted.

        Otherwise K begins and ends at any row.
        """
        return self.columnwise is not None

    @property
    def is_transposed(self) -> bool:
        """Whether operands are contiguous along K whatever is contracted.

        Otherwise those whose rows are contracted are contiguous along M or N.
        """
        return self.columnwise == "transposed"

    @property
    def dsl_types(self) -> tuple[str, str | None]:
        scale = None if self.scale is None else _DSL_TYPES[self.scale.element.name]
        return _DSL_TYPES[self.element], scale

    @property
    def tcgen05(self) -> Tcgen05Kind | None:
        """Instructions of sm_100a; None if it has none for such operands."""
        return _TCGEN05.get(
            (
                self.element,
                None if self.scale is None else self.scale.element.name,
                self.sf_vec_size,
            )
        )

    @property
    def is_decodable(self) -> bool:
        """Whether kernels decode codes, if there are any: ``Format.decoder_kind``."""
        return self.fmt is None or self.fmt.decoder_kind is not None

    @property
    def is_wgmma(self) -> bool:
        """Whether instructions of sm_90a take the elements; otherwise they are decoded."""
        return self.element in _WGMMA

    @property
    def has_short_sums(self) -> bool:
        """Whether tensor cores of sm_90a add its products with fewer bits than fp32 has."""
        return self.element in _SHORT_SUMS

    @property
    def instruction_k(self) -> int:
        return _INSTRUCTION_BYTES * 8 // self.bits

    @property
    def scale_tile_k(self) -> int:
        """Elements of K whose block scales are in one 128x4 tile of them."""
        return self.sf_vec_size * SF_TILE_COLS

    @property
    def k_blocks_of_scale_tile(self) -> int:
        """Instructions along K whose block scales are in one tile; each picks its own by number."""
        return self.scale_tile_k // self.instruction_k

    @property
    def k_align(self) -> int:
        """K must be a multiple of this in an m_grouped product: rows TMA can address."""
        return PITCH_ALIGNMENT * 8 // self.bits if self.fmt is None else self.fmt.k_multiple


#: Operand kinds by name.
OPERANDS = {
    **{fmt.text: OperandKind(fmt.text, fmt) for fmt in _FORMATS},
    **{name: OperandKind(name) for name in _PLAIN},
}


def _facts(fmt: Format) -> tuple[object, ...]:
    """What a kernel sees of a format. Scales of squares in tiles are repeated for each row."""
    level = fmt.global_scale
    copies = fmt.columnwise, fmt.k_multiple
    return fmt.element, fmt.scale, fmt.has_squares, None if level is None else level.factor, copies


_BY_FACTS = {_facts(kind.fmt): kind for kind in OPERANDS.values() if kind.fmt}


def operand_of(fmt: Format) -> OperandKind:
    """The kind of a format's operands.

    Raises:
        UnsupportedError: no kernel multiplies them.
    """
    kind = _BY_FACTS.get(_facts(fmt))
    if kind is None:
        raise UnsupportedError(f"no grouped GEMM kernel multiplies operands of {fmt.text}")
    return kind
