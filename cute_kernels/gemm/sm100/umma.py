"""Block-scaled instructions of the tensor core, with N chosen at run time.

The DSL's MMA atoms fix M and N when they are traced and guard every instruction by itself. Here a
kernel computes the descriptors, which are plain integers, and one thread issues a whole stage.
Bit fields: PTX ISA, "tcgen05 matrix descriptor" and "instruction descriptor".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutlass import Int32, Int64

from cute_kernels.device.ptx import asm_volatile
from cute_kernels.layout.shapes import SF_TILE_BYTES

if TYPE_CHECKING:
    from cutlass import cute

    from cute_kernels.gemm.operands import OperandKind

__all__ = [
    "ELEMENT_ROW_BYTES",
    "UNIT",
    "copy_scales",
    "element_descriptor",
    "instruction_descriptor",
    "multiply",
    "scale_descriptor",
    "scale_id",
]

#: Bytes of the unit in which descriptors of shared memory count.
UNIT = 16
#: Bytes of a row of elements in a stage: one 128-byte swizzle atom along K.
ELEMENT_ROW_BYTES = 128
_ATOM_ROWS = 8
_ADDRESS_MASK = 0x3FFF
_VERSION = 1 << 46
_SWIZZLE_128B = 2 << 61


def _descriptor(start: cute.Pointer, stride_bytes: int, swizzle: int) -> Int64:
    """A K-major matrix in shared memory; ``stride_bytes`` lie between groups of eight rows."""
    leading = 1 << 16  # unused: no matrix is wider than its swizzle atom
    constant = leading | stride_bytes // UNIT << 32 | _VERSION | swizzle
    return Int64((start.toint() >> 4) & _ADDRESS_MASK) | Int64(constant)


def element_descriptor(stages: cute.Pointer) -> Int64:
    """Rows of elements that start at ``stages``, 128 bytes each and swizzled."""
    return _descriptor(stages, _ATOM_ROWS * ELEMENT_ROW_BYTES, _SWIZZLE_128B)


def scale_descriptor(stages: cute.Pointer) -> Int64:
    """Tiles of block scales that start at ``stages``."""
    return _descriptor(stages, SF_TILE_BYTES // 4, 0)


def instruction_descriptor(kind: OperandKind, m: int, n: Int32 | int) -> Int32:
    """Shape and types of an instruction with K-major operands, and the first scales of a tile.

    Args:
        kind: block-scaled operand kind.
        m: 128, or 256 with two CTAs.
        n: a multiple of 8, or of 16 with two CTAs; at most 256.
    """
    types = kind.tcgen05
    if types is None:
        raise ValueError(f"no instruction for operands of kind {kind.name}")
    constant = types.element << 7 | types.element << 10 | types.scale << 23 | m // 16 << 24
    # N / 8 goes to bit 17.
    return Int32(n) << 14 | constant


def scale_id(number: int) -> int:
    """What to add to a descriptor for the ``number``-th of the scales in a tile along K."""
    return number << 4 | number << 29


def copy_scales(tmem: Int32, source: Int64, num_ctas: int) -> None:
    """Copy a tile of block scales to four columns of tensor memory; one thread issues."""
    text = f"tcgen05.cp.cta_group::{num_ctas}.32x128b.warpx4 [$0], $1;"
    asm_volatile(text, (tmem, source))


def multiply(
    kind: OperandKind,
    acc: Int32,
    operands: tuple[Int64, Int64],
    descriptor: Int32,
    scales: tuple[Int32, Int32],
    num_ctas: int,
    *,
    accumulate: Int32 | None = None,
    more_than: tuple[Int32, int] | None = None,
) -> None:
    """One MMA instruction; one thread issues.

    Args:
        kind: of the operands.
        acc: the accumulator in tensor memory.
        operands: descriptors of operands M and N.
        descriptor: see ``instruction_descriptor``.
        scales: their block scales in tensor memory.
        num_ctas: CTAs that share the instruction.
        accumulate: 0 to overwrite the accumulator; None to add to it.
        more_than: two numbers; multiply only if the first is larger. A predicate, because branches
            around single instructions cost more, and CuTe DSL 4.8 fails to compile some.
    """
    assert kind.tcgen05 is not None
    values = [acc, *operands, descriptor, *scales]
    set_up, guard = "mov.pred p, -1;", ""
    if accumulate is not None:
        set_up = f"setp.ne.b32 p, ${len(values)}, 0;"
        values.append(accumulate)
    if more_than is not None:
        set_up += f" setp.gt.s32 q, ${len(values)}, {more_than[1]};"
        values.append(more_than[0])
        guard = "@q "
    asm_volatile(
        f"{{ .reg .pred p, q; {set_up} "
        f"{guard}tcgen05.mma.cta_group::{num_ctas}.kind::{kind.tcgen05.qualifiers} "
        "[$0], $1, $2, $3, [$4], [$5], p; }",
        values,
    )
