"""A builder of PTX text for fp32 formulas, for one number or for two numbers at once.

sm_100a has instructions that take two fp32 numbers in a 64-bit register (``.f32x2``). A formula is
written once, as calls of ``PtxBuilder``; the builder emits the instructions of one number or of a
pair.
"""

import struct
from collections.abc import Callable, Sequence

from cutlass import Float32

from .ptx import asm


def float_bits(value: float) -> int:
    """Return the bits of ``value`` as fp32."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


class PtxNumber:
    """One number or a pair of numbers in registers.

    Attributes:
        packed: The register that holds the number or the pair, or None if there is none yet.
        scalars: One register per number, or None if there are none yet.
    """

    def __init__(self, packed: str | None = None, scalars: Sequence[str] | None = None):
        self.packed = packed
        self.scalars = scalars


PtxOperand = PtxNumber | float


class PtxBuilder:
    """PTX text under construction.

    The operands of the inline assembly are numbered: first the results, then the inputs, then the
    constants that the builder collects.

    Args:
        width: Numbers per instruction, 1 or 2.
        num_operands: Inputs of the inline assembly.
        num_results: Results of the inline assembly.
    """

    def __init__(self, width: int, num_operands: int, num_results: int):
        self.width = width
        self.lines: list[str] = []
        self.constants: dict[int, str] = {}
        self._next_operand = num_operands + num_results
        self._count = 0

    def register(self, kind: str) -> str:
        """Declare a register of the PTX type ``kind`` and return its name."""
        self._count += 1
        self.lines.append(f".reg .{kind} r{self._count};")
        return f"r{self._count}"

    def result(self, value: PtxNumber, names: Sequence[str]) -> None:
        """Move ``value`` to the result operands ``names``, one per number."""
        if value.packed is not None and self.width > 1:
            self.lines.append(f"mov.b64 {{{', '.join(names)}}}, {value.packed};")
        else:
            pairs = zip(names, self._scalars(value), strict=True)
            self.lines += [f"mov.b32 {name}, {scalar};" for name, scalar in pairs]

    def _packed(self, value: PtxOperand) -> str:
        """Return the register or constant that holds all numbers of ``value``."""
        if isinstance(value, PtxNumber):
            if value.packed is None:
                value.packed = self.register("b64")
                self.lines.append(f"mov.b64 {value.packed}, {{{', '.join(value.scalars or ())}}};")
            return value.packed
        if self.width == 1:
            return f"0f{float_bits(value):08X}"
        pair = float_bits(value) << 32 | float_bits(value)
        if pair not in self.constants:
            self.constants[pair] = f"${self._next_operand + len(self.constants)}"
        return self.constants[pair]

    def _scalars(self, value: PtxOperand) -> Sequence[str]:
        """Return one register or literal per number of ``value``."""
        if not isinstance(value, PtxNumber):
            return [f"0f{float_bits(value):08X}"] * self.width
        if value.scalars is None:
            value.scalars = [self.register("b32") for _ in range(self.width)]
            self.lines.append(f"mov.b64 {{{', '.join(value.scalars)}}}, {value.packed};")
        return value.scalars

    def vector(self, name: str, *operands: PtxOperand) -> PtxNumber:
        """Apply the instruction ``name`` to all numbers at once."""
        if self.width == 1:
            text = f"{name}.f32 {{0}}, " + ", ".join(f"{{{i + 1}}}" for i in range(len(operands)))
            return self.scalar(text, *operands)
        inputs = ", ".join(map(self._packed, operands))
        out = self.register("b64")
        self.lines.append(f"{name}.f32x2 {out}, {inputs};")
        return PtxNumber(out)

    def scalar(self, text: str, *operands: PtxOperand) -> PtxNumber:
        """Apply instructions to each number on its own.

        In ``text``, ``{0}`` is the result, ``{1}`` and so on are the operands, and ``{p}`` is a
        free predicate register.
        """
        operands_per_number = list(zip(*map(self._scalars, operands), strict=True))
        out = [self.register("b32") for _ in operands_per_number]
        for result, inputs in zip(out, operands_per_number, strict=True):
            predicate = self.register("pred") if "{p}" in text else ""
            self.lines.append(text.format(result, *inputs, p=predicate) + ";")
        return PtxNumber(out[0] if self.width == 1 else None, out)

    # ---- arithmetic

    def mul(self, a: PtxOperand, b: PtxOperand) -> PtxNumber:
        """Return a * b, rounded to nearest even."""
        return self.vector("mul.rn", a, b)

    def add(self, a: PtxOperand, b: PtxOperand) -> PtxNumber:
        """Return a + b, rounded to nearest even."""
        return self.vector("add.rn", a, b)

    def sub(self, a: PtxOperand, b: PtxOperand) -> PtxNumber:
        """Return a - b, rounded to nearest even."""
        return self.vector("sub.rn", a, b)

    def fma(self, a: PtxOperand, b: PtxOperand, c: PtxOperand) -> PtxNumber:
        """Return a * b + c, rounded once.

        Use it only if a separate product and sum give the same bits.
        """
        return self.vector("fma.rn", a, b, c)

    def minimum(self, a: PtxOperand, b: float) -> PtxNumber:
        """Return the smaller of a and b, or NaN if a is NaN."""
        return self.scalar("min.NaN.f32 {0}, {1}, {2}", a, b)

    def maximum(self, a: PtxOperand, b: float) -> PtxNumber:
        """Return the larger of a and b, or NaN if a is NaN."""
        return self.scalar("max.NaN.f32 {0}, {1}, {2}", a, b)

    def power_of_two(self, z: PtxNumber) -> PtxNumber:
        """Return 2^(n - 127) for numbers whose low bits are n."""
        return self.scalar("shl.b32 {0}, {1}, 23", z)

    def select_above(
        self, a: PtxOperand, limit: float, above: float, otherwise: PtxOperand
    ) -> PtxNumber:
        """Return ``above`` if a > limit, else ``otherwise``."""
        text = "setp.gt.f32 {p}, {1}, {2}; selp.f32 {0}, {3}, {4}, {p}"
        return self.scalar(text, a, limit, above, otherwise)


def apply_formula(formula: Callable[..., PtxNumber], *numbers: Float32) -> Float32:
    """Evaluate ``formula(builder, *numbers)`` for single fp32 numbers.

    Args:
        formula: A function of a ``PtxBuilder`` and as many ``PtxNumber`` as there are numbers.
        numbers: Fp32 scalars.

    Returns:
        The fp32 scalar that the formula computes.
    """
    builder = PtxBuilder(1, len(numbers), 1)
    names = [f"${i + 1}" for i in range(len(numbers))]
    inputs = (PtxNumber(name, [name]) for name in names)
    builder.result(formula(builder, *inputs), ["$0"])
    body = "\n".join(builder.lines)
    return asm(f"{{\n{body}\n}}", [Float32], numbers)  # type: ignore[no-any-return]
