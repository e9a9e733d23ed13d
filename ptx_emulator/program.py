"""Builds one kernel: registers, scopes, labels, operands, instructions."""

import re
from dataclasses import dataclass, field

import numpy as np

from .isa import INSTRUCTION, OPERAND, SPECIAL_IDS, Kind
from .lexer import PtxError, literal, split_operands

_REGISTER_RANGE = re.compile(r"([\w%$]+)<(\d+)>")
_NUMBERED = re.compile(r"(.*?)(\d+)")
_ADDRESS = re.compile(r"([\w%$.]+)\s*(?:\+\s*(-?\w+))?")
_SYMBOL_PLUS = re.compile(r"([\w$.]+)\s*\+\s*(-?\d+)")

_FIELDS = INSTRUCTION.names or ()
# (kind, negated, count, register, immediate)
Operand = tuple[int, int, int, int, int]
NO_OPERAND: Operand = (Kind.NONE, 0, 0, 0, 0)


def align(n: int, to: int) -> int:
    """Return ``n`` rounded up to a multiple of ``to``."""
    return (n + to - 1) // to * to


def immediate(value: int) -> Operand:
    """Return an immediate operand."""
    return (Kind.IMM, 0, 0, 0, value)


@dataclass
class Kernel:
    """One ``.entry`` in the engine's form.

    Attributes:
        instructions: Array of ``isa.INSTRUCTION``.
        operands: Array of ``isa.OPERAND``.
        text: PTX of each instruction, for reports.
        num_regs: Number of 64-bit registers per lane.
        static_smem: Bytes of shared memory before the dynamic part.
        local_bytes: Bytes of local memory per lane.
        unsupported: Opcodes of the kernel that are not modelled.
    """

    name: str
    instructions: np.ndarray
    operands: np.ndarray
    text: list[str]
    param_offset: list[int]
    param_size: list[int]
    param_bytes: int
    num_regs: int
    static_smem: int
    local_bytes: int
    unsupported: set[str]


@dataclass(frozen=True)
class Register:
    """A register or a range of numbered ones."""

    base: int
    count: int
    type: str


@dataclass
class Symbols:
    """The variables that a kernel can name, by state space; offsets in bytes, or addresses."""

    shared: dict[str, int] = field(default_factory=dict)
    dynamic_shared: dict[str, int] = field(default_factory=dict)  # name -> alignment
    params: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    globals: dict[str, int] = field(default_factory=dict)
    shared_end: int = 0
    local_end: int = 0

    def add_shared(self, name: str, size: int, alignment: int) -> None:
        """Place a variable; one without a size is the dynamic part, which follows the others."""
        if size == 0:
            self.dynamic_shared[name] = alignment
            return
        self.shared[name] = align(self.shared_end, alignment)
        self.shared_end = self.shared[name] + size

    def add_local(self, name: str, size: int, alignment: int) -> None:
        """Reserve local memory for a variable."""
        self.local[name] = align(self.local_end, alignment)
        self.local_end = self.local[name] + size


class KernelBuilder:
    """Collects the instructions of one kernel and resolves what they name."""

    def __init__(self, opcodes: dict[str, int], types: dict[str, int], symbols: Symbols) -> None:
        self.opcodes = opcodes
        self.types = types
        self.symbols = symbols
        self.num_regs = 0
        self.rows: list[dict[str, int]] = []
        self.operands: list[Operand] = []
        self.text: list[str] = []
        self.unsupported: set[str] = set()
        self.call_params: set[str] = set()
        self.branch_tables: dict[str, list[str]] = {}
        self.line = 0
        self.statement = ""
        self._scopes: list[dict[str, Register]] = [{}]
        self._scope_path: tuple[int, ...] = ()
        self._scopes_made = 0
        self._labels: dict[tuple[tuple[int, ...], str], int] = {}
        self._branches: list[tuple[int, str, tuple[int, ...]]] = []
        self._table_entries: list[tuple[int, str, tuple[int, ...]]] = []
        self._last_label = ""

    # ---- scopes, registers, labels
    def open_scope(self) -> None:
        """Open a scope of registers and labels."""
        self._scopes_made += 1
        self._scope_path += (self._scopes_made,)
        self._scopes.append({})

    def close_scope(self) -> None:
        """Close the innermost scope."""
        self._scope_path = self._scope_path[:-1]
        self._scopes.pop()

    def declare_registers(self, type_name: str, names: str) -> None:
        """Declare the registers of ``.reg .type a, b<n>``."""
        for name in (n.strip() for n in names.split(",")):
            m = _REGISTER_RANGE.fullmatch(name)
            count = int(m.group(2)) if m else 1
            key = f"{m.group(1)}<>" if m else name
            self._scopes[-1][key] = Register(self.num_regs, count, type_name)
            self.num_regs += count

    def _find_register(self, name: str) -> tuple[int, Register] | None:
        m = _NUMBERED.fullmatch(name)
        for scope in reversed(self._scopes):
            if register := scope.get(name):
                return register.base, register
            if m and (numbered := scope.get(f"{m.group(1)}<>")):
                index = int(m.group(2))
                if index < numbered.count:
                    return numbered.base + index, numbered
        return None

    def register(self, name: str) -> int | None:
        """Return the engine's number of a register, or None if ``name`` is not a register."""
        match = self._find_register(name)
        return match[0] if match else None

    def register_type(self, name: str) -> str:
        """Return the type of a register, negated or not, or '' if ``name`` is not a register."""
        match = self._find_register(name.lstrip("! "))
        return match[1].type if match else ""

    def label(self, name: str) -> None:
        """Define a label at the next instruction."""
        self._labels[(self._scope_path, name)] = len(self.rows)
        self._last_label = name

    def branch_targets(self, names: list[str]) -> None:
        """Define the branch table of the last label."""
        self.branch_tables[self._last_label] = names

    def branch_to(self, name: str) -> None:
        """Make the next instruction's ``aux`` the position of a label."""
        self._branches.append((len(self.rows), name, self._scope_path))

    def _position(self, name: str, scope: tuple[int, ...]) -> int:
        """Return the position of a label that is visible in a scope."""
        for depth in range(len(scope), -1, -1):
            if (scope[:depth], name) in self._labels:
                return self._labels[(scope[:depth], name)]
        raise PtxError(f"label {name} is not defined")

    # ---- operands
    def value(self, text: str) -> Operand:
        """Return the operand of a register, literal, symbol or ``{vector}``; ``_`` is none."""
        text = text.strip()
        negated = 0
        if text.startswith("!"):
            negated, text = 1, text[1:].strip()
        if text in ("_", ""):
            return NO_OPERAND
        if text.startswith("{"):
            return self.vector(text)
        if text in SPECIAL_IDS:
            return (Kind.SPECIAL, negated, 0, SPECIAL_IDS[text], 0)
        register = self.register(text)
        if register is not None:
            return (Kind.REG, negated, 0, register, 0)
        number = literal(text)
        return immediate(number) if number is not None else self._symbol(text)

    def vector(self, text: str) -> Operand:
        """Return the operand of ``{a, b, ...}``."""
        items = [self.value(item) for item in split_operands(text.strip()[1:-1])]
        self.operands.extend(items)
        return (Kind.VEC, 0, len(items), len(self.operands) - len(items), 0)

    def table(self, labels: list[str]) -> Operand:
        """Return the operand of a branch table."""
        base = len(self.operands)
        for i, name in enumerate(labels):
            self.operands.append(immediate(0))
            self._table_entries.append((base + i, name, self._scope_path))
        return (Kind.VEC, 0, len(labels), base, 0)

    def address(self, text: str) -> Operand:
        """Return the operand of ``register + offset`` or ``symbol + offset``."""
        m = _ADDRESS.fullmatch(text)
        if not m:
            raise PtxError(f"address {text}")
        base, offset = m.group(1), int(m.group(2), 0) if m.group(2) else 0
        register = self.register(base)
        if register is not None:
            return (Kind.ADDR_REG, 0, 0, register, offset)
        number = literal(base)
        if number is not None:
            return (Kind.ADDR_ABS, 0, 0, 0, number + offset)
        return self._symbol(base, offset)

    def read(self, text: str) -> list[Operand]:
        """Return the operands of ``[address]``, ``[map, {c0, c1}]`` or a value.

        A tensor map gives its address and the coordinates.
        """
        if not text.startswith("["):
            return [self.value(text)]
        address, *coordinates = split_operands(text[1:-1])
        return [self.address(address), *map(self.vector, coordinates)]

    def pair(self, text: str) -> tuple[Operand, Operand]:
        """Return both destinations of ``d|p``."""
        before, _, after = text.partition("|")
        return self.value(before), self.value(after)

    def _symbol(self, text: str, offset: int = 0) -> Operand:
        """Return the operand of the address of a variable."""
        if m := _SYMBOL_PLUS.fullmatch(text):
            return self._symbol(m.group(1), offset + int(m.group(2)))
        s = self.symbols
        if text in s.dynamic_shared:
            return (Kind.SHARED_SYM, 0, 0, -1 - list(s.dynamic_shared).index(text), offset)
        for kind, table in (
            (Kind.SHARED_SYM, s.shared),
            (Kind.PARAM_SYM, s.params),
            (Kind.LOCAL_SYM, s.local),
            (Kind.GLOBAL_SYM, s.globals),
        ):
            if text in table:
                return (kind, 0, 0, 0, table[text] + offset)
        raise PtxError(f"unknown name {text}")

    # ---- instructions
    def emit(
        self, op: str, operands: tuple[Operand, ...] | list[Operand] = (), **fields: int
    ) -> None:
        """Append an instruction.

        Args:
            op: Name of the opcode.
            operands: Operands.
            **fields: Fields of ``isa.INSTRUCTION``. Missing fields are 0, and the guard is empty.
        """
        values = {
            "op": self.opcodes[op],
            "guard": -1,
            "num_operands": len(operands),
            "operands": len(self.operands),
        }
        row = dict.fromkeys(_FIELDS, 0) | values | {"line": self.line} | fields
        assert len(row) == len(_FIELDS), f"no field of an instruction: {row.keys() - set(_FIELDS)}"
        self.rows.append(row)
        self.operands.extend(operands)
        self.text.append(" ".join(self.statement.split()))

    def finish(self, name: str, param_offset: list[int], param_size: list[int]) -> Kernel:
        """Resolve labels and the dynamic shared memory, and return the kernel."""
        self.statement = "ret"
        self.emit("EXIT")
        for index, label, scope in self._branches:
            self.rows[index]["aux"] = self._position(label, scope)
        for index, label, scope in self._table_entries:
            self.operands[index] = immediate(self._position(label, scope))
        static_smem = self._place_dynamic_shared()
        operands = np.array(
            [(*o[:4], (o[4] + (1 << 63)) % (1 << 64) - (1 << 63)) for o in self.operands]
            or [NO_OPERAND],
            dtype=OPERAND,
        )
        return Kernel(
            name=name,
            instructions=np.array(
                [tuple(row[f] for f in _FIELDS) for row in self.rows], dtype=INSTRUCTION
            ),
            operands=operands,
            text=self.text,
            param_offset=param_offset,
            param_size=param_size,
            param_bytes=param_offset[-1] + param_size[-1] if param_offset else 0,
            num_regs=self.num_regs + 2,
            static_smem=static_smem,
            local_bytes=align(self.symbols.local_end, 16),
            unsupported=self.unsupported,
        )

    def _place_dynamic_shared(self) -> int:
        """Place dynamic shared memory after the static variables and return its start."""
        start = align(self.symbols.shared_end, max(self.symbols.dynamic_shared.values(), default=1))
        self.operands = [
            (o[0], o[1], o[2], 0, start + o[4]) if o[0] == Kind.SHARED_SYM and o[3] < 0 else o
            for o in self.operands
        ]
        return start
