"""An opcode taken apart: mnemonic, modifiers, and what they mean to every instruction."""

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

    Of the modifiers ``types`` are types, in order, and ``flags`` flags of any instruction.
    """

    def __init__(self, builder: KernelBuilder, text: str) -> None:
        self.builder = builder
        self.name, *self.modifiers = text.split(".")
        self.types = [m for m in self.modifiers if m in builder.types]
        self.flags = Flag(0)
        for m in self.modifiers:
            self.flags |= MODIFIER_FLAGS.get(m, Flag(0))

    def has(self, *modifiers: str) -> bool:
        return any(m in self.modifiers for m in modifiers)

    def flag(self, modifier: str, flag: Flag) -> Flag:
        return flag if modifier in self.modifiers else Flag(0)

    def choose(self, names: list[str]) -> int:
        """Position in ``names`` of the first modifier that is one of them."""
        return names.index(next(m for m in self.modifiers if m in names))

    def refuse(self, *modifiers: str) -> None:
        for m in modifiers:
            if m in self.modifiers:
                raise NotModelledError(f"{self.name}.{m}")

    @property
    def vector_width(self) -> int:
        """2, 4 or 8 with ``.v2`` and so on, else 1."""
        return next((int(m[1:]) for m in self.modifiers if re.fullmatch(r"v[248]", m)), 1)

    @property
    def space(self) -> int:
        """The state space; generic where none is named."""
        for m in self.modifiers:
            base = m.split("::")[0]
            if base in SPACES:
                return SPACES[base]
        return SPACES["generic"]

    @property
    def rounding(self) -> int:
        """Position in ``ROUNDINGS``; to nearest where none is named."""
        return next((ROUNDINGS.index(m) for m in self.modifiers if m in ROUNDINGS), 0)

    def type_id(self, index: int) -> int:
        """The engine's number of the type at this position, 0 where there is none."""
        return self.builder.types[self.types[index]] if len(self.types) > index else 0

    def emit(self, op: str, operands: Iterable[Operand | str] = (), **fields: Any) -> None:
        """Append an instruction with the meaning of the modifiers, or what ``fields`` says; texts
        are read.
        """
        read = [
            o
            for given in operands
            for o in (self.builder.read(given) if isinstance(given, str) else [given])
        ]
        common: dict[str, Any] = {
            "type": self.type_id(0),
            "type2": self.type_id(1),
            "flags": self.flags,
            "rounding": self.rounding,
            "space": self.space,
        }
        self.builder.emit(op, read, **(common | fields))
