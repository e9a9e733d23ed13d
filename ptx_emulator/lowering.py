"""The choice of a lowering by mnemonic."""

from .lower_alu import ALU
from .lower_memory import MEMORY
from .lower_sync import SYNC
from .lower_tensor import TENSOR
from .opcode import Opcode
from .program import KernelBuilder

_LOWERINGS = ALU | MEMORY | SYNC | TENSOR


def lower(builder: KernelBuilder, opcode: str, operands: list[str]) -> None:
    """Append the engine's instructions for one PTX instruction.

    Raises:
        NotModelledError: This form of the instruction is not modelled. KeyError, ValueError,
        IndexError, StopIteration: The opcode or its operands are not known.
    """
    op = Opcode(builder, opcode)
    op.refuse("f64", "b128")
    _LOWERINGS[op.name](op, operands)
