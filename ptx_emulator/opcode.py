"""An opcode, split into mnemonic and modifiers, with the modifiers common to all instructions."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from .isa import MODIFIER_FLAGS, ROUNDINGS, SPACES, Flag
from .program import KernelBuilder, Operand

Lowering = Callable[["Opcode", list[str]], None]


class NotModelledError(Exception):
    """A form of an instruction that the engine does not model."""


class Opcode:
    """``mnemonic.modifier.modifier...`` of one instruction.

    Attributes:
        name: Mnemonic.
        modifiers: All modifiers in order.
        types: Modifiers that are types, in order.
        flags: Flags of the modifiers that any instruction may have.
    """

    def __init__(self, builder: KernelBuilder, text: str) -> None:
        self.builder = builder
        self.name, *self.modifiers = text.split(".")
        self.types = [m for m in self.modifiers if m in builder.types]
        self.flags = Flag(0)
        for m in self.modifiers:
            self.flags |= MODIFIER_FLAGS.get(m, Flag(0))

    def has(self, *modifiers: str) -> bool:
        """Return True if the instruction has one of ``modifiers``."""
        return any(m in self.modifiers for m in modifiers)

    def flag(self, modifier: str, flag: Flag) -> Flag:
        """Return ``flag`` if the instruction has ``modifier``, else no flag."""
        return flag if modifier in self.modifiers else Flag(0)

    def choose(self, names: list[str]) -> int:
        """Return the position in ``names`` of the first modifier that is one of them."""
        return names.index(next(m for m in self.modifiers if m in names))

    def refuse(self, *modifiers: str) -> None:
        """Raise ``NotModelledError`` if the instruction has one of ``modifiers``."""
        for m in modifiers:
            if m in self.modifiers:
                raise NotModelledError(f"{self.name}.{m}")

    @property
    def vector_width(self) -> int:
        """Number of elements: 2, 4 or 8 with ``.v2``, ``.v4`` or ``.v8``, else 1."""
        return next((int(m[1:]) for m in self.modifiers if re.fullmatch(r"v[248]", m)), 1)

    @property
    def space(self) -> int:
        """State space; generic if no modifier names one."""
        for m in self.modifiers:
            base = m.split("::")[0]
            if base in SPACES:
                return SPACES[base]
        return SPACES["generic"]

    @property
    def rounding(self) -> int:
        """Position of the rounding mode in ``ROUNDINGS``; by default round to nearest."""
        return next((ROUNDINGS.index(m) for m in self.modifiers if m in ROUNDINGS), 0)

    def type_id(self, index: int) -> int:
        """Return the engine's number of the type at this position, or 0 if there is none."""
        return self.builder.types[self.types[index]] if len(self.types) > index else 0

    def emit(self, op: str, operands: Iterable[Operand | str] = (), **fields: Any) -> None:
        """Append an engine instruction.

        Args:
            op: Name of the opcode.
            operands: Operands, or their PTX texts.
            **fields: Fields of the instruction. Others follow from the modifiers.
        """
        read = [
            value
            for operand in operands
            for value in (self.builder.read(operand) if isinstance(operand, str) else [operand])
        ]
        common: dict[str, Any] = {
            "type": self.type_id(0),
            "type2": self.type_id(1),
            "flags": self.flags,
            "rounding": self.rounding,
            "space": self.space,
        }
        self.builder.emit(op, read, **(common | fields))
