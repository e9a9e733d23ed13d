"""The choice of a lowering by mnemonic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_kernels.emulator.lower_alu import ALU
from cute_kernels.emulator.lower_memory import MEMORY
from cute_kernels.emulator.lower_sync import SYNC
from cute_kernels.emulator.lower_tensor import TENSOR
from cute_kernels.emulator.opcode import Opcode

if TYPE_CHECKING:
  from cute_kernels.emulator.program import KernelBuilder

_LOWERINGS = ALU | MEMORY | SYNC | TENSOR


def lower(builder: KernelBuilder, opcode: str, operands: list[str]) -> None:
  """Append the engine's instructions for one PTX instruction.

  Raises:
    NotModelledError: This form of the instruction is not modelled.
    KeyError, ValueError, IndexError, StopIteration: The opcode or its operands are not known.
  """
  op = Opcode(builder, opcode)
  op.refuse("f64", "b128")
  _LOWERINGS[op.name](op, operands)
