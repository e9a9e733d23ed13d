"""Choice of a lowering by mnemonic."""

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
        NotModelledError: The engine does not model this form of the instruction.
        KeyError: The opcode is unknown; for unknown operands also ValueError, IndexError or
            StopIteration.
    """
    op = Opcode(builder, opcode)
    op.refuse("f64", "b128")
    _LOWERINGS[op.name](op, operands)
