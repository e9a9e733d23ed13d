"""Elements that an activation computes from the input, where a kernel needs them.

A unit is the elements of 16 bytes of input. The halves of a row are multiples of 16 bytes, so a
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
    """Computation of elements of ``dtype`` as a prologue describes.

    Attributes:
        unit: Elements of a unit.
        words: 32-bit words of a unit's elements.
        loads: 16-byte loads of a unit.
        table: Table of activation factors for kernels that have room for it, or None.
    """

    def __init__(self, prologue: Prologue, dtype: str, arch: str):
        self.prologue = prologue
        self.dtype = dtype
        self.arch = arch
        self.size = DTYPE_BYTES[prologue.dtype]
        self.unit, self.loads = prologue.unit, prologue.num_inputs
        self.words = self.unit * DTYPE_BYTES[dtype] // 4
        self.table = (
            FactorTable.create(prologue.record, prologue.dtype)
            if get_arch(arch).tuned_by == "time"
            else None
        )

    def cols(self, x: cute.Tensor) -> Int32:
        """Return the columns of the elements."""
        width = x.shape[len(x.shape) - 1]
        return width // 2 if self.prologue.is_gated else width

    def row_bytes(self, cols: Any) -> Any:
        """Return the bytes of an input row with ``cols`` columns of elements."""
        return cols * (self.size * self.prologue.num_inputs)

    def addresses(self, row_address: Any, col: Int32, cols: Int32) -> list[Any]:
        """Return the address of the 16 bytes of each half, for the unit at column ``col``."""
        return [row_address + (col + i * cols) * self.size for i in range(self.prologue.num_inputs)]

    def sources(
        self, x: cute.Tensor, row: Int32, col: Int32, cols: Int32
    ) -> list[tuple[Int64, Int64]]:
        """Return the global ``addresses`` of a unit, each with the bytes to the next row."""
        pitch = Int64(self.row_bytes(cols))
        return [
            (address, pitch)
            for address in self.addresses(x.iterator.toint() + row * pitch, col, cols)
        ]

    def make(
        self,
        inputs: Sequence[Sequence[Uint32]],
        by_magnitude: bool = False,
        table_address: Int32 | None = None,
    ) -> list[Uint32]:
        """Compute a unit's elements.

        Args:
            inputs: Words of the unit in each half of the input.
            by_magnitude: Use the quick formula if the numbers allow it, see
                ``activated_by_magnitude``. On an H200 quantizing tiles takes 89 us instead of 106;
                sm_100a executes more instructions.
            table_address: Shared-memory address of ``table``, or None to compute without a table.

        Returns:
            Words of the elements.
        """
        if table_address is not None:
            return pack_words(self.table.activated(inputs, table_address), self.dtype)
        numbers = [unpack_words(words, self.prologue.dtype) for words in inputs]
        make: Any = (
            activated_by_magnitude
            if by_magnitude and get_arch(self.arch).tuned_by == "time"
            else activated
        )
        return pack_words(make(self.prologue.record, False, self.arch, numbers)[0], self.dtype)


def element_maker(config: Any) -> ElementMaker | None:
    """Return the maker of a configuration's elements, or None if they are the input itself."""
    if config.prologue is None or config.prologue.activation is None:
        return None
    return ElementMaker(config.prologue, config.dtype, config.arch)
