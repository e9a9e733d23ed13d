"""Instructions of the tensor core with N chosen at run time.

The DSL's MMA atoms fix M and N when they are traced and guard every instruction by itself. Here a
kernel computes the descriptors, which are plain integers, and one thread issues a whole stage. Bit
fields: PTX ISA, "tcgen05 matrix descriptor" and "instruction descriptor".
"""

from typing import NamedTuple

from cutlass import Int32, Int64, cute

from cute_kernels.device.ptx import asm_volatile
from cute_kernels.layout.shapes import SF_TILE_BYTES

from ..common.operand_kinds import OperandKind

#: Bytes of the unit in which descriptors of shared memory count.
UNIT = 16
#: Rows of a swizzle atom, along K or along M or N, across the direction in which it is contiguous.
_ATOM_ROWS = 8
_ADDRESS_MASK = 0x3FFF
_VERSION = 1 << 46
#: Modes of swizzling by the bytes of an atom in the direction in which it is contiguous.
_SWIZZLES = {0: 0, 128: 2, 64: 4, 32: 6}
#: The type of fp32 accumulators in the descriptor of an instruction without block scales.
_F32_ACCUMULATORS = 1 << 4


def _descriptor(start: cute.Pointer, leading: int, stride: int, span: int) -> Int64:
    """Return the descriptor of a matrix in shared memory that starts at ``start``.

    From one atom to the next there are ``leading`` bytes in the direction in which atoms are
    contiguous and ``stride`` bytes across it. An atom has ``span`` bytes in that direction, 0
    without a swizzle.
    """
    fields = leading // UNIT << 16 | stride // UNIT << 32 | _VERSION | _SWIZZLES[span] << 61
    return Int64((start.toint() >> 4) & _ADDRESS_MASK) | Int64(fields)


class ElementStages(NamedTuple):
    """The elements of one operand in the stages.

    Attributes:
        kind: Kind of the operand.
        start: Descriptor of the first K block of the first stage.
        block: Units from one K block to the next.
        stage: Units from one stage to the next.
        mn_major: True if the elements are contiguous along M or N, else along K.
    """

    kind: OperandKind
    start: Int64
    block: int
    stage: int
    mn_major: bool

    @classmethod
    def describe(cls, kind: OperandKind, stages: cute.Tensor, mn_major: bool) -> "ElementStages":
        """Return the description of ``stages``, (MMA, MMA_MN, MMA_K, STAGE)."""

        def distance(row: int = 0, k: int = 0, block: int = 0, stage: int = 0) -> int:
            """Return the bytes between two elements."""
            index = cute.crd2idx(((row, k), 0, block, stage), stages.layout)
            return int(index) * kind.bits // 8

        span, leading, stride = 128, UNIT, distance(row=_ATOM_ROWS)
        if mn_major:
            row_bytes = cute.size(stages, mode=[0, 0]) * kind.bits // 8
            span, stride = min(span, row_bytes), distance(k=_ATOM_ROWS)
            if row_bytes > span:
                leading = distance(row=span * 8 // kind.bits)
        descriptor = _descriptor(stages.iterator, leading, stride, span)
        steps = distance(block=1) // UNIT, distance(stage=1) // UNIT
        return cls(kind, descriptor, *steps, mn_major)


def scale_descriptor(stages: cute.Pointer) -> Int64:
    """Return the descriptor of the stages of block scales."""
    return _descriptor(stages, UNIT, SF_TILE_BYTES // 4, 0)


def instruction_descriptor(
    operands: tuple[ElementStages, ElementStages], m: int, n: Int32 | int
) -> Int32:
    """Return the descriptor of an instruction: shape, types, and first scales of a tile.

    Args:
        operands: Operands M and N.
        m: 128, or 256 with two CTAs.
        n: A multiple of 8, or of 16 with two CTAs, at most 256. With 8-bit elements that are
            contiguous along N, a multiple of 16, or of 32 with two CTAs.
    """
    constant = m // 16 << 24
    for i, operand in enumerate(operands):
        types = operand.kind.tcgen05
        if types is None:
            raise ValueError(f"no instruction for operands of kind {operand.kind.name}")
        constant |= types.element << 7 + 3 * i | operand.mn_major << 15 + i
        constant |= _F32_ACCUMULATORS if types.scale is None else types.scale << 23
    # N / 8 goes to bit 17.
    return Int32(n) << 14 | constant


def scale_id(number: int) -> int:
    """Return what to add to a descriptor for the ``number``-th of the scales in a tile along K."""
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
    scales: tuple[Int32, ...],
    num_ctas: int,
    *,
    accumulate: Int32 | None = None,
    more_than: tuple[Int32, int] | None = None,
) -> None:
    """Issue one MMA instruction; one thread issues.

    Args:
        kind: Kind of the operands.
        acc: Accumulator in tensor memory.
        operands: Descriptors of operands M and N.
        descriptor: Descriptor of the instruction.
        scales: Block scales of the operands in tensor memory.
        num_ctas: 1 or 2.
        accumulate: 0 overwrites the accumulator. None adds to it.
        more_than: The instruction does nothing unless the first number is larger. It is a
            predicate, because branches around single instructions cost more, and CuTe DSL 4.8 fails
            to compile some.
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
    scale_operands = "[$4], [$5], " if scales else ""
    asm_volatile(
        f"{{ .reg .pred p, q; {set_up} "
        f"{guard}tcgen05.mma.cta_group::{num_ctas}.kind::{kind.tcgen05.qualifiers} "
        f"[$0], $1, $2, $3, {scale_operands}p; }}",
        values,
    )
