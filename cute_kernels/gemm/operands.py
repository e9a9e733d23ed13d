"""What a tensor core needs to know of its operands: one row of a table for each kind of them.

A kind is found by what a format record says, its element and its block scale, never by the format's
name. A kernel asks a kind, never a format. All instructions here contract 32 bytes of K.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from cute_kernels.formats import NVFP4
from cute_kernels.layout.shapes import PITCH_ALIGNMENT, SF_TILE_COLS

__all__ = [
    "DTYPE_BYTES",
    "OPERANDS",
    "BlockScaleKind",
    "OperandKind",
    "Tcgen05Kind",
    "find_operand",
]

#: Bytes of one element, by the dtype names that configurations use.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Bytes of K that one instruction contracts.
_INSTRUCTION_BYTES = 32


@dataclasses.dataclass(frozen=True)
class BlockScaleKind:
    """Block scales beside the elements.

    Attributes:
        element: name of a scale's type, as format records have it.
        dsl_type: the DSL's name of it.
        vec_size: elements that share one.
    """

    element: str
    dsl_type: str
    vec_size: int


@dataclasses.dataclass(frozen=True)
class Tcgen05Kind:
    """Instructions of sm_100a that kernels write out themselves, with N chosen at run time.

    Attributes:
        qualifiers: the kind and what follows it.
        element: number of the elements' type in the descriptor of an instruction.
        scale: number of the block scales' type there.
    """

    qualifiers: str
    element: int
    scale: int


@dataclasses.dataclass(frozen=True)
class OperandKind:
    """Both operands of a product, as tensor cores see them.

    Attributes:
        name: how configurations name it.
        element: name of the elements' type, as format records or torch have it.
        dsl_type: the DSL's name of it.
        bits: of one element.
        scale: the block scales; None without.
        level_factor: what the second level of scales is multiplied by to decode; None without one.
        columnwise: how the copy lies whose blocks run along rows, see ``formats``; None if the
            operands are plain: then one tensor serves both directions, and its rows are in no
            slots.
        tcgen05: the instructions of sm_100a; None for those that the DSL makes, which fix N.
        is_wgmma: instructions of sm_90a take the elements; otherwise they are decoded to others.
    """

    name: str
    element: str
    dsl_type: str
    bits: int
    scale: BlockScaleKind | None = None
    level_factor: float | None = None
    columnwise: Literal["transposed", "untransposed"] | None = None
    tcgen05: Tcgen05Kind | None = None
    is_wgmma: bool = True

    @property
    def is_block_scaled(self) -> bool:
        """Whether block scales are read beside the elements."""
        return self.scale is not None

    @property
    def sf_vec_size(self) -> int:
        """Elements that share a block scale; 0 without block scales."""
        return 0 if self.scale is None else self.scale.vec_size

    @property
    def instruction_k(self) -> int:
        """Elements of K that one instruction contracts."""
        return _INSTRUCTION_BYTES * 8 // self.bits

    @property
    def scale_tile_k(self) -> int:
        """Elements of K whose block scales are in one 128x4 tile of them."""
        return self.sf_vec_size * SF_TILE_COLS

    @property
    def k_blocks_of_scale_tile(self) -> int:
        """Instructions along K whose block scales are in one tile."""
        return self.scale_tile_k // self.instruction_k

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
    def k_align(self) -> int:
        """K must be a multiple of this in an m_grouped product: rows TMA can address."""
        return self.sf_vec_size or PITCH_ALIGNMENT * 8 // self.bits


#: Operand kinds by name; both operands are of the same kind.
OPERANDS = {
    kind.name: kind
    for kind in (
        OperandKind(
            "nvfp4",
            NVFP4.element.name,
            "Float4E2M1FN",
            NVFP4.element.bits,
            BlockScaleKind(NVFP4.scale_element.name, "Float8E4M3FN", NVFP4.sf_vec_size),
            level_factor=1.0 / NVFP4().tensor_max,
            columnwise="transposed",
            tcgen05=Tcgen05Kind("mxf4nvf4.block_scale.block16", element=1, scale=0),
            is_wgmma=False,
        ),
        OperandKind("bfloat16", "bfloat16", "BFloat16", 16),
        OperandKind("float16", "float16", "Float16", 16),
    )
}


def find_operand(element: str, scale: tuple[str, int] | None = None) -> OperandKind | None:
    """The kind of operands by what a format record says of them; None if there is none.

    Args:
        element: name of the element.
        scale: name of the block scale's element, and elements that share one; None without.
    """
    for kind in OPERANDS.values():
        own = None if kind.scale is None else (kind.scale.element, kind.scale.vec_size)
        if (kind.element, own) == (element, scale):
            return kind
    return None
