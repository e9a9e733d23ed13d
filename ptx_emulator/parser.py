"""Parses PTX modules into kernels in the engine's form.

The accepted language is the output of the CuTe DSL with inline assembly: ``.entry`` functions,
scoped registers and labels, shared, local, global and constant variables. An opcode that the engine
does not model becomes an ``UNSUPPORTED`` instruction, which raises an error if a warp reaches it.
"""

import re

import numpy as np

from .isa import TYPE_BYTES
from .lexer import PtxError, literals, matching_brace, split_operands, statements, strip_comments
from .lowering import lower
from .opcode import NotModelledError
from .program import Kernel, KernelBuilder, Symbols, align

_ENTRY_OR_VARIABLE = re.compile(
    r"(?P<entry>(?:\.visible\s+|\.weak\s+)?\.entry\s+(?P<name>[\w$.]+)\s*\()"
    r"|(?P<variable>(?:\.visible\s+|\.extern\s+|\.weak\s+|\.common\s+)*"
    r"\.(?P<space>shared|global|const)\s+(?P<declaration>[^;]*);)"
)
_ALIGNMENT = re.compile(r"\.align\s+(\d+)")
_DECLARED_TYPE = re.compile(r"\.([bsuf]\d+|pred)\b")
_DECLARED_NAME = re.compile(r"([\w$%]+)\s*(?:\[(\d*)\])?\s*$")
_CALL_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.\w+\s+([\w$]+)")
_GUARD = re.compile(r"@(!?)([\w%$]+)\s+(.*)", re.DOTALL)
_OPCODE = re.compile(r"([\w.:]+)\s*(.*)", re.DOTALL)
_GLOBAL_ALIGNMENT = 256
# Exceptions of a lowering for an unknown opcode or operand.
_UNKNOWN = (KeyError, ValueError, IndexError, StopIteration, NotModelledError)


class Declaration:
    """A declaration such as ``.align 16 .b8 name[4] = {...}``."""

    def __init__(self, text: str) -> None:
        body, _, self.initialiser = text.partition("=")
        alignment = _ALIGNMENT.search(body)
        body = _ALIGNMENT.sub("", body)
        type_name = _DECLARED_TYPE.search(body)
        name = _DECLARED_NAME.search(body)
        if not type_name or not name:
            raise PtxError(f"declaration {text}")
        self.element_bytes = TYPE_BYTES[type_name.group(1)]
        self.name, dimension = name.group(1), name.group(2)
        count = 1 if dimension is None else int(dimension or 0)
        self.size = self.element_bytes * count
        self.alignment = max(int(alignment.group(1)) if alignment else 0, self.element_bytes)

    def initial_bytes(self) -> bytes:
        """Return the bytes of the initialiser."""
        mask = (1 << 8 * self.element_bytes) - 1
        return b"".join(
            (v & mask).to_bytes(self.element_bytes, "little") for v in literals(self.initialiser)
        )


class Module:
    """A parsed PTX module.

    Attributes:
        kernels: One per ``.entry``.
        memory: (address, bytes) of the ``.global`` and ``.const`` variables, which the module owns.
    """

    def __init__(self, text: str, opcodes: list[str], types: list[str]) -> None:
        self.kernels: list[Kernel] = []
        self.memory: list[tuple[int, int]] = []
        self._buffers: list[np.ndarray] = []
        self._opcodes = {name: i for i, name in enumerate(opcodes)}
        self._types = {name.lower(): i for i, name in enumerate(types)}
        self._symbols = Symbols()
        text = strip_comments(text)
        pos = 0
        while m := _ENTRY_OR_VARIABLE.search(text, pos):
            pos = m.end()
            if m.group("variable"):
                self._declare(m.group("space"), m.group("declaration"), self._symbols)
                continue
            params_end = text.index(")", pos)
            brace = text.index("{", params_end)
            end = matching_brace(text, brace)
            line = text.count("\n", 0, brace) + 1
            self._add_kernel(m.group("name"), text[pos:params_end], text[brace + 1 : end], line)
            pos = end + 1

    def _declare(self, space: str, text: str, symbols: Symbols) -> None:
        """Add a variable to ``symbols``."""
        d = Declaration(text)
        if space == "shared":
            symbols.add_shared(d.name, d.size, d.alignment)
        elif space == "local":
            symbols.add_local(d.name, d.size, d.alignment)
        else:
            symbols.globals[d.name] = self._allocate(d)

    def _allocate(self, d: Declaration) -> int:
        """Allocate and initialise a global or constant variable and return its address."""
        buffer = np.zeros(max(d.size, 16) + _GLOBAL_ALIGNMENT, dtype=np.uint8)
        address = align(buffer.ctypes.data, _GLOBAL_ALIGNMENT)
        start = address - buffer.ctypes.data
        initial = np.frombuffer(d.initial_bytes(), dtype=np.uint8)
        buffer[start : start + initial.size] = initial
        self._buffers.append(buffer)
        self.memory.append((address, max(d.size, 16)))
        return address

    def _add_kernel(self, name: str, params: str, body: str, line: int) -> None:
        """Parse an ``.entry`` and add it to the kernels."""
        s = self._symbols
        symbols = Symbols(
            shared=dict(s.shared),
            dynamic_shared=dict(s.dynamic_shared),
            globals=s.globals,
            shared_end=s.shared_end,
        )
        offsets: list[int] = []
        sizes: list[int] = []
        end = 0
        for text in split_operands(params):
            d = Declaration(text.replace(".param", "").replace(".ptr", ""))
            end = align(end, d.alignment)
            symbols.params[d.name] = end
            offsets.append(end)
            sizes.append(d.size)
            end += d.size
        builder = KernelBuilder(self._opcodes, self._types, symbols)
        for statement in statements(body, line):
            if statement.kind == "open":
                builder.open_scope()
            elif statement.kind == "close":
                builder.close_scope()
            elif statement.kind == "label":
                builder.label(statement.text)
            else:
                builder.line = statement.line
                self._statement(builder, statement.text)
        self.kernels.append(builder.finish(name, offsets, sizes))

    def _statement(self, builder: KernelBuilder, text: str) -> None:
        """Parse one statement of a kernel."""
        if not text.startswith("."):
            if text:
                self._instruction(builder, text)
            return
        directive, arguments = (*text[1:].split(None, 1), "")[:2]
        if directive == "reg":
            builder.declare_registers(*arguments.lstrip(".").split(None, 1))
        elif directive in ("shared", "local", "global", "const"):
            self._declare(directive, arguments, builder.symbols)
        elif directive == "branchtargets":
            builder.branch_targets([name.strip() for name in arguments.split(",")])
        elif m := _CALL_PARAM.match(text):  # an argument or result of a call
            builder.call_params.add(m.group(1))

    def _instruction(self, builder: KernelBuilder, text: str) -> None:
        """Parse one instruction with its guard."""
        builder.statement = text
        guard = (-1, False)
        if m := _GUARD.match(text):
            register = builder.register(m.group(2))
            if register is None:
                raise PtxError(f"line {builder.line}: unknown predicate {m.group(2)}")
            guard = (register, bool(m.group(1)))
            text = m.group(3)
        m = _OPCODE.match(text)
        if not m:
            raise PtxError(f"line {builder.line}: {text}")
        first_row = len(builder.rows)
        try:
            lower(builder, m.group(1), split_operands(m.group(2)))
        except _UNKNOWN as e:
            del builder.rows[first_row:], builder.text[first_row:]
            why = f" ({e})" if isinstance(e, NotModelledError) else ""
            builder.unsupported.add(m.group(1) + why)
            builder.emit("UNSUPPORTED")
        for row in builder.rows[first_row:]:
            row["guard"], row["guard_negated"] = guard[0], int(guard[1])
