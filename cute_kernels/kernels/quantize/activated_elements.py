"""Elements of a tensor that goes through an activation first, made where a kernel needs them.

A unit is what 16 bytes of the input make. Halves of a row are a multiple of 16 bytes, so that a
unit lies in one of them.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Int32, Int64, Uint32, cute

from cute_kernels.arch import get_arch
from cute_kernels.device.activation_curves import FactorTable, activated, activated_by_magnitude
from cute_kernels.device.convert import pack_words, unpack_words

from .prologue import DTYPE_BYTES, Prologue


class ElementMaker:
    """Makes elements of ``dtype`` as ``prologue`` says.

    Attributes:
        unit: elements of a unit.
        words: words of a unit's elements.
        loads: 16-byte loads of a unit.
    """

    def __init__(self, prologue: Prologue, dtype: str, arch: str):
        self.prologue = prologue
        self.dtype = dtype
        self.arch = arch
        self.size = DTYPE_BYTES[prologue.dtype]
        self.unit, self.loads = prologue.unit, prologue.num_inputs
        self.words = self.unit * DTYPE_BYTES[dtype] // 4
        #: What kernels that have the room make elements by.
        self.table = (
            FactorTable.create(prologue.record, prologue.dtype)
            if get_arch(arch).tuned_by == "time"
            else None
        )

    def cols(self, x: cute.Tensor) -> Int32:
        width = x.shape[len(x.shape) - 1]
        return width // 2 if self.prologue.is_gated else width

    def row_bytes(self, cols: Any) -> Any:
        return cols * (self.size * self.prologue.num_inputs)

    def places(self, x_at: Any, col: Int32, cols: Int32) -> list[Any]:
        """Where the 16 bytes of each half are, of the row at ``x_at`` and the unit from ``col`` on."""
        return [x_at + (col + i * cols) * self.size for i in range(self.prologue.num_inputs)]

    def sources(
        self, x: cute.Tensor, row: Int32, col: Int32, cols: Int32
    ) -> list[tuple[Int64, Int64]]:
        """``places`` of a row in global memory, each with the bytes from there to the next row."""
        pitch = Int64(self.row_bytes(cols))
        return [(at, pitch) for at in self.places(x.iterator.toint() + row * pitch, col, cols)]

    def make(
        self,
        inputs: Sequence[Sequence[Uint32]],
        by_size: bool = False,
        table_at: Int32 | None = None,
    ) -> list[Uint32]:
        """Words of a unit's elements, of those of each half; by ``table`` if that is somewhere.

        ``by_size`` avoids branches where numbers allow it: tiles on an H200 took 89 us instead of
        106. sm_100a counts more.
        """
        if table_at is not None:
            return pack_words(self.table.activated(inputs, table_at), self.dtype)
        numbers = [unpack_words(words, self.prologue.dtype) for words in inputs]
        make: Any = (
            activated_by_magnitude
            if by_size and get_arch(self.arch).tuned_by == "time"
            else activated
        )
        return pack_words(make(self.prologue.record, False, self.arch, numbers)[0], self.dtype)


def maker_of(config: Any) -> ElementMaker | None:
    """What makes the elements of a configuration; None where they are the input's."""
    if config.prologue is None or config.prologue.activation is None:
        return None
    return ElementMaker(config.prologue, config.dtype, config.arch)
