"""Activations and their gradients in PTX, to the bit of ``cute_kernels.reference.activations``.

Its steps and their order, and these changes, none of which changes a bit. sm_100a takes two numbers
an instruction.

- A product that is exact, or a sum of which both summands are doubled, is contracted: a * b + c is
  then rounded once either way. n times the first part of ln 2 is exact, and so is p * 2^n.
- A sigmoid needs no e^x below 2^-25, which 1 + e^x does not show, so e^x takes no second step to
  subnormal numbers: 2^n is 2 * 2^(n - 1), whose bits are those of z alone.
- Clamps of the argument stand for those of its factor: where they differ the other factor is 0.
- r is kept as -r, so that no argument is negated.
- Of sums below 2^126 a step of Newton's makes an approximate reciprocal the rounded one, which is
  what ``rcp.rn`` does behind a branch. Branches keep numbers from being worked on side by side.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.formats.activations import Activation, Numbers, alpha_of, curve_of, formula_of

from .convert import pack_words, unpack_words
from .memory import load_shared, store_shared
from .ptx import add_rn, asm, bits_as_f32, f32_as_bits, mul_rn

#: The exponent's bias and one less for a 2 elsewhere, in the low bits of a number that rounds.
_ROUNDS = Numbers.MAGIC + 126
#: Beyond them 1 + e^-x is infinite, or 1.
_STEEP, _FLAT = -89.0, 80.0


def _bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


class _Number:
    """One number, or a pair: as a register, as those of its parts, or both."""

    def __init__(self, packed: str | None = None, parts: Sequence[str] | None = None):
        self.packed = packed
        self.parts = parts


_Operand = _Number | float


class _Text:
    """PTX under construction, of one number or of two at once:

    ``width``. Operands come in before the constants.
    """

    def __init__(self, width: int, num_operands: int, num_results: int):
        self.width = width
        self.lines: list[str] = []
        self.constants: dict[int, str] = {}
        self._next_operand = num_operands + num_results
        self._count = 0

    def register(self, kind: str) -> str:
        self._count += 1
        self.lines.append(f".reg .{kind} r{self._count};")
        return f"r{self._count}"

    def result(self, value: _Number, names: Sequence[str]) -> None:
        if value.packed is not None and self.width > 1:
            self.lines.append(f"mov.b64 {{{', '.join(names)}}}, {value.packed};")
        else:
            pairs = zip(names, self._parts(value), strict=True)
            self.lines += [f"mov.b32 {name}, {part};" for name, part in pairs]

    def _packed(self, value: _Operand) -> str:
        if isinstance(value, _Number):
            if value.packed is None:
                value.packed = self.register("b64")
                self.lines.append(f"mov.b64 {value.packed}, {{{', '.join(value.parts or ())}}};")
            return value.packed
        if self.width == 1:
            return f"0f{_bits(value):08X}"
        pair = _bits(value) << 32 | _bits(value)
        if pair not in self.constants:
            self.constants[pair] = f"${self._next_operand + len(self.constants)}"
        return self.constants[pair]

    def _parts(self, value: _Operand) -> Sequence[str]:
        if not isinstance(value, _Number):
            return [f"0f{_bits(value):08X}"] * self.width
        if value.parts is None:
            value.parts = [self.register("b32") for _ in range(self.width)]
            self.lines.append(f"mov.b64 {{{', '.join(value.parts)}}}, {value.packed};")
        return value.parts

    def all(self, name: str, *operands: _Operand) -> _Number:
        if self.width == 1:
            return self.each(f"{name}.f32 {{0}}, " + _listed(len(operands)), *operands)
        given = ", ".join(map(self._packed, operands))
        out = self.register("b64")
        self.lines.append(f"{name}.f32x2 {out}, {given};")
        return _Number(out)

    def each(self, text: str, *operands: _Operand) -> _Number:
        """Instructions for one number: ``{0}`` is the result, operands follow, ``{p}`` is free."""
        of_each = list(zip(*map(self._parts, operands), strict=True))
        out = [self.register("b32") for _ in of_each]
        for result, given in zip(out, of_each, strict=True):
            test = self.register("pred") if "{p}" in text else ""
            self.lines.append(text.format(result, *given, p=test) + ";")
        return _Number(out[0] if self.width == 1 else None, out)

    # ---- arithmetic

    def mul(self, a: _Operand, b: _Operand) -> _Number:
        return self.all("mul.rn", a, b)

    def add(self, a: _Operand, b: _Operand) -> _Number:
        return self.all("add.rn", a, b)

    def sub(self, a: _Operand, b: _Operand) -> _Number:
        return self.all("sub.rn", a, b)

    def fma(self, a: _Operand, b: _Operand, c: _Operand) -> _Number:
        """Of a * b + c, where that is what a product and a sum give."""
        return self.all("fma.rn", a, b, c)

    def low(self, a: _Operand, b: float) -> _Number:
        return self.each("min.NaN.f32 {0}, {1}, {2}", a, b)

    def high(self, a: _Operand, b: float) -> _Number:
        return self.each("max.NaN.f32 {0}, {1}, {2}", a, b)

    def power(self, z: _Number) -> _Number:
        """2^(n - 127) of numbers whose low bits are n."""
        return self.each("shl.b32 {0}, {1}, 23", z)

    def where_above(self, a: _Operand, limit: float, then: float, b: _Operand) -> _Number:
        """``then`` where a > limit, else b."""
        text = "setp.gt.f32 {p}, {1}, {2}; selp.f32 {0}, {3}, {4}, {p}"
        return self.each(text, a, limit, then, b)


def _listed(count: int) -> str:
    return ", ".join(f"{{{i + 1}}}" for i in range(count))


class _Curve(NamedTuple):
    """f(x) and f'(x); f' as what makes it, since only gradients need it.

    ``factor`` is what f(x) is a multiple of x by, or of min(x, limit); None of curves that have no
    use for it.
    """

    value: _Number
    slope: Any
    factor: _Number | None = None


def _sigmoid(t: _Text, c: _Number, quick: bool) -> _Number:
    """Of numbers from ``_STEEP`` to ``_FLAT``."""
    z = t.add(t.mul(c, -Numbers.LOG2E), _ROUNDS)
    n = t.sub(z, _ROUNDS)
    r = t.add(t.fma(n, Numbers.LN2[0], c), t.mul(n, Numbers.LN2[1]))
    q = t.mul(r, Numbers.EXP[-1])
    for factor in Numbers.EXP[-2:0:-1]:
        q = t.mul(t.sub(factor, q), r)
    p = t.sub(t.mul(t.sub(Numbers.EXP[0], q), t.mul(r, r)), r)
    sum_ = t.fma(t.fma(p, 2.0, 2.0), t.power(z), 1.0)
    if not quick:
        return t.each("rcp.rn.f32 {0}, {1}", sum_)
    r = t.each("rcp.approx.ftz.f32 {0}, {1}", sum_)
    return t.fma(t.each("neg.f32 {0}, {1}", t.fma(sum_, r, -1.0)), r, r)


def _tanh(t: _Text, x: _Number) -> _Number:
    a = t.each("abs.f32 {0}, {1}; min.NaN.f32 {0}, {0}, {2}", x, 10.0)
    z = t.all("add.rm", t.mul(a, 2 * Numbers.LOG2E), _ROUNDS)
    n = t.sub(z, _ROUNDS)
    r = t.sub(t.fma(n, -Numbers.LN2[0] / 2, a), t.mul(n, Numbers.LN2[1] / 2))
    w = t.mul(r, r)
    q = t.mul(w, Numbers.TANH[-1])
    for factor in Numbers.TANH[-2:0:-1]:
        q = t.mul(t.add(q, factor), w)
    p = t.add(t.mul(t.add(q, Numbers.TANH[0]), t.mul(w, r)), r)
    s = t.power(z)
    u = t.add(t.mul(p, t.add(s, 0.5)), t.sub(s, 0.5))
    # 0xD8 selects: the second where the third is set, else the first.
    text = "div.rn.f32 {0}, {1}, {2}; lop3.b32 {0}, {0}, {3}, 0x80000000, 0xD8"
    return t.each(text, u, t.add(u, t.sub(1.0, p)), x)


def _silu(
    t: _Text, x: _Number, alpha: float, limit: float | None, quick: bool, s: _Number | None = None
) -> _Curve:
    y = x if limit is None else t.low(x, limit)
    steep = y if alpha == 1.0 else t.mul(y, alpha)
    factor = y
    if not quick:
        steep = t.high(steep, _STEEP)
        factor = steep if alpha == 1.0 else t.high(y, -Numbers.FMAX)
    c = steep if quick else t.low(steep, _FLAT)
    s = s or _sigmoid(t, c, quick)
    value = t.mul(factor, s)

    def slope() -> _Number:
        out = t.add(t.mul(value if c is factor else t.mul(c, s), t.sub(1.0, s)), s)
        return out if limit is None else t.where_above(x, limit, 0.0, out)

    return _Curve(value, slope, s)


def _gelu(t: _Text, x: _Number) -> _Curve:
    core = _tanh(t, t.mul(x, t.add(t.mul(t.mul(x, x), Numbers.GELU[1]), Numbers.GELU[0])))

    def slope() -> _Number:
        w = t.low(t.high(x, -Numbers.FAR), Numbers.FAR)
        rise = t.add(t.mul(t.mul(w, w), Numbers.GELU[2]), Numbers.GELU[0])
        steep = t.mul(t.mul(w, 0.5), t.mul(rise, t.sub(1.0, t.mul(core, core))))
        return t.fma(t.add(core, 1.0), 0.5, steep)

    factor = t.fma(core, 0.5, 0.5)
    return _Curve(t.mul(t.high(x, -Numbers.FMAX), factor), slope, factor)


def _relu(t: _Text, x: _Number, is_squared: bool) -> _Curve:
    core = t.high(x, 0.0)
    if is_squared:
        return _Curve(t.mul(core, core), lambda: t.add(core, core))
    return _Curve(core, lambda: t.where_above(x, 0.0, 1.0, core))


#: By the family of a curve, of the arguments of ``_curve``.
_FORMULAS: dict[str, Callable[..., _Curve]] = {
    "tanh": lambda t, act, x, quick, s: _gelu(t, x),
    "rectified": lambda t, act, x, quick, s: _relu(t, x, curve_of(act).is_squared),
    "sigmoid": lambda t, act, x, quick, s: _silu(
        t, x, alpha_of(act), act.limit if act.is_clamped else None, quick, s
    ),
}


def _curve(t: _Text, act: Activation, x: _Number, quick: bool, s: _Number | None = None) -> _Curve:
    return formula_of(act, _FORMULAS)(t, act, x, quick, s)


def quick_to(act: Activation) -> float | None:
    """Up to which magnitude ``activated`` may be ``quick``; None of curves without a sigmoid."""
    return (_FLAT - 1) / alpha_of(act) if curve_of(act).family == "sigmoid" else None


def _gate(t: _Text, act: Activation, b: _Number) -> _Number:
    """What the second half of a gated activation's input multiplies by."""
    return t.add(t.low(t.high(b, -act.limit), act.limit), 1.0) if act.is_clamped else b


def _made(
    t: _Text,
    act: Activation,
    is_gradient: bool,
    inputs: list[_Number],
    quick: bool,
    with_value: bool,
    by_factor: bool,
) -> list[_Number]:
    """The elements of x or A, then B and then the gradient, where there are those."""
    x, *others = inputs
    curve = _curve(t, act, x, quick, others.pop() if by_factor else None)
    if not act.is_gated:
        return [
            *([t.mul(curve.slope(), others[0])] if is_gradient else []),
            *[curve.value] * with_value,
        ]
    b, gate = others[0], _gate(t, act, others[0])
    value = [t.mul(curve.value, gate)] if with_value else []
    if not is_gradient:
        return value
    g = others[1]
    of_b = t.mul(curve.value, g)
    if act.is_clamped:
        size = t.each("abs.f32 {0}, {1}", b)
        of_b = t.where_above(size, act.limit, 0.0, of_b)
    return [t.mul(t.mul(curve.slope(), gate), g), of_b, *value]


def activated(
    act: Activation,
    is_gradient: bool,
    arch: str,
    inputs: Sequence[Sequence[Float32]],
    quick: bool = False,
    with_value: bool = False,
    by_factor: bool = False,
) -> list[list[Float32]]:
    """Elements that an activation makes, in fp32.

    ``inputs`` are as many numbers each: x, or A and B of a gated one; then the gradient of the
    result, if ``is_gradient`` asks for that of the input. If ``quick`` no x or A is beyond
    ``quick_to``; NaN may be there. With ``with_value`` what is differentiated is made, too.
    ``by_factor`` the sigmoids are given last.

    Returns:
        As many elements; of the gradient of a gated activation those of A, and those of B.
        Values last.
    """
    width = 2 if arch == "sm_100a" else 1
    with_value = with_value or not is_gradient
    num_results = is_gradient * (1 + act.is_gated) + with_value
    out: list[list[Float32]] = [[] for _ in range(num_results)]
    for i in range(0, len(inputs[0]), width):
        # An odd number is beside itself.
        given = [numbers[min(i + j, len(numbers) - 1)] for numbers in inputs for j in range(width)]
        text = _Text(width, len(given), num_results * width)
        names = [f"${num_results * width + j}" for j in range(len(given))]
        parts = [names[j : j + width] for j in range(0, len(names), width)]
        numbers = [_Number(p[0] if width == 1 else None, p) for p in parts]
        for j, number in enumerate(
            _made(text, act, is_gradient, numbers, quick, with_value, by_factor)
        ):
            text.result(number, [f"${j * width + k}" for k in range(width)])
        body = "\n".join(text.lines)
        given += [Int64(_signed(bits)) for bits in text.constants]
        made = asm(f"{{\n{body}\n}}", [Float32] * (num_results * width), given)
        made = made if num_results * width > 1 else (made,)
        for j, number in enumerate(made):
            out[j // width].append(number)
    return [half[: len(inputs[0])] for half in out]


@cute.jit
def activated_by_size(
    act: Activation,
    is_gradient: bool,
    arch: str,
    inputs: list[list[Float32]],
    with_value: bool = False,
) -> list[list[Float32]]:
    """``activated``, quick where numbers allow it."""
    bound, high, count = quick_to(act), inputs[0][0], len(inputs[0])
    if cutlass.const_expr(bound is None):
        return activated(act, is_gradient, arch, inputs, False, with_value)
    for x in inputs[0][min(1, count - 1) :]:
        high = asm(
            "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; max.f32 $0, a, b; }",
            [Float32],
            [high, x],
        )
    out = cute.make_rmem_tensor(
        (is_gradient * (1 + act.is_gated) + (with_value or not is_gradient)) * count, Float32
    )
    if high > bound:
        _store(activated(act, is_gradient, arch, inputs, False, with_value), out)
    else:
        _store(activated(act, is_gradient, arch, inputs, True, with_value), out)
    return [[out[i + j] for j in range(count)] for i in range(0, cute.size(out), count)]


def _store(made: list[list[Float32]], out: cute.Tensor) -> None:
    for i, number in enumerate(number for numbers in made for number in numbers):
        out[i] = number


#: Exponents of a table, mantissas of a bf16, and bytes: an fp32 factor of each number and its
#: negative.
_EXPONENTS, _MANTISSAS = 32, 128
TABLE_BYTES = 2 * _EXPONENTS * _MANTISSAS * 4
#: Of the threads that write a table; behind those of teams.
_TABLE_BARRIER = 15


class FactorTable:
    """What f(x) is a multiple of x by, of bf16 numbers, in shared memory.

    Numbers below have the factor of the smallest of their sign, 0.5, those above that of the
    largest, 0 or 1.
    """

    def __init__(self, act: Activation):
        self.act = act
        self.alpha = alpha_of(act)
        #: The lowest exponent, up to which alpha takes numbers to 2^-25 at most, and the bits where
        #: numbers begin and end.
        self.lowest = math.floor(-25 - math.log2(self.alpha))
        self.first = (self.lowest + 127) * _MANTISSAS
        self.end = self.first + _EXPONENTS * _MANTISSAS

    @classmethod
    def of(cls, act: Activation, dtype: str) -> "FactorTable | None":
        """That of an input's ``dtype``; None if there is none."""
        if dtype != "bfloat16" or curve_of(act).family == "rectified":
            return None
        table = cls(act)
        # The largest number is a 256th below that power of two.
        is_steep = table.alpha * 2.0 ** (table.lowest + _EXPONENTS) > 1 - _STEEP
        return table if is_steep and 0 < table.first and table.end <= 255 * _MANTISSAS else None

    @cute.jit
    def fill(self, at: Int32, thread: Int32, num_threads: int) -> None:
        """Write the table, by so many threads; all of them have it then."""
        size = TABLE_BYTES // 8
        for i in cutlass.range(thread, 2 * size, num_threads, unroll=1):
            x = bits_as_f32(Uint32((i % size + self.first) << 16 | i // size << 31))
            factor = _apply(lambda t, x: _curve(t, self.act, x, False).factor, x)
            store_shared(at + i * 4, [f32_as_bits(factor)])
        cute.arch.barrier(barrier_id=_TABLE_BARRIER, number_of_threads=num_threads)

    def _product(self, t: _Text, x: _Number, factor: _Number, *b: _Number) -> _Number:
        value = t.mul(t.low(x, self.act.limit) if self.act.is_clamped else x, factor)
        return t.mul(value, _gate(t, self.act, *b)) if b else value

    def activated(self, inputs: Sequence[Sequence[Uint32]], at: Int32) -> list[Float32]:
        """``activated`` of words of x, or of A and B; the table is ``at`` an address below 2^15."""
        # Infinity times a factor of 0 would be NaN.
        x = [
            asm("max.NaN.bf16x2 $0, $1, $2;", [Uint32], [word, Uint32(0xFF7FFF7F)])
            for word in inputs[0]
        ]
        factors = self.factors(x, at)
        x, *b = (unpack_words(words, "bfloat16") for words in (x, *inputs[1:]))
        return [_apply(self._product, *of_each) for of_each in zip(x, factors, *b, strict=True)]

    def factors(self, x: Sequence[Uint32], at: Int32) -> list[Float32]:
        """Of words of x."""
        return [
            bits_as_f32(load_shared(place, 1)[0]) for word in x for place in self._places(word, at)
        ]

    def _places(self, word: Uint32, at: Int32) -> Sequence[Int32]:
        """Where the factors of a pair are, each worked out in half a word."""
        text = """{
			.reg .b32 m, s;
			abs.bf16x2 m, $2;
			max.bf16x2 m, m, $3;
			min.bf16x2 m, m, $4;
			shr.u32 s, $2, 1;
			and.b32 s, s, 0x40004000;
			mad.lo.u32 m, m, 4, $5;
			add.u32 m, m, s;
			and.b32 $0, m, 0xFFFF;
			shr.u32 $1, m, 16;
		}"""
        both = 1 << 16 | 1
        start = Uint32(at) * Uint32(both) - Uint32(4 * self.first * both & 0xFFFFFFFF)
        limits = Uint32(self.first * both), Uint32((self.end - 1) * both)
        return asm(text, [Int32, Int32], [word, *limits, start])  # type: ignore[no-any-return]


def _apply(formula: Any, *numbers: Float32) -> Float32:
    """What ``formula`` writes of a text and so many numbers."""
    t = _Text(1, len(numbers), 1)
    names = [f"${i + 1}" for i in range(len(numbers))]
    t.result(formula(t, *(_Number(name, [name]) for name in names)), ["$0"])
    body = "\n".join(t.lines)
    return asm(f"{{\n{body}\n}}", [Float32], numbers)  # type: ignore[no-any-return]


def weighted_gradient(
    act: Activation,
    config: Any,
    inputs: Sequence[Sequence[Float32]],
    grad: Sequence[Float32],
    p: Float32,
    factors: list[Float32] | None = None,
) -> tuple[list[list[Float32]], list[Float32], Float32]:
    """What ``moe_activate_gradient`` makes of neighbours in a row of weight ``p``.

    Of x, or A and B, and the gradient of the result: the gradients of the inputs, p times the
    values, which are rounded to ``config.dtype`` first, and the sum of <grad, values> of 16 lanes.
    By ``factors`` of a table of x or A if there are some.
    """
    inputs = [*inputs, [mul_rn(p, number) for number in grad]]
    if factors is None:
        made = activated_by_size(act, True, config.arch, inputs, True)
    else:
        made = activated(
            act, True, config.arch, [*inputs, factors], with_value=True, by_factor=True
        )
    values = unpack_words(pack_words(made.pop(), config.dtype), config.dtype)
    total = Float32(0.0)
    for g, a in zip(grad, values, strict=True):
        total = add_rn(total, mul_rn(g, a))
    for lanes in (8, 4, 2, 1):
        total = add_rn(total, cute.arch.shuffle_sync_bfly(total, lanes))
    return made, [mul_rn(p, number) for number in values], total


def exponential(x: Float32, sigmoid: bool = False) -> Float32:
    """``exp`` of ``reference.activations``, or its ``sigmoid``."""
    return _apply(lambda t, number: _exponential(t, number, sigmoid), x)


def _exponential(t: _Text, given: _Number, sigmoid: bool) -> _Number:
    c = t.low(t.high(t.each("neg.f32 {0}, {1}", given) if sigmoid else given, -104.0), 89.0)
    z = t.add(t.mul(c, Numbers.LOG2E), Numbers.MAGIC + 254)
    n = t.sub(z, Numbers.MAGIC + 254)
    r = t.sub(t.sub(c, t.mul(n, Numbers.LN2[0])), t.mul(n, Numbers.LN2[1]))
    q = t.mul(r, Numbers.EXP[-1])
    for factor in Numbers.EXP[-2:0:-1]:
        q = t.mul(t.add(q, factor), r)
    p = t.add(t.add(t.mul(t.add(q, Numbers.EXP[0]), t.mul(r, r)), r), 1.0)
    half = t.each("shr.s32 {0}, {1}, 1", z)
    rest = t.each("sub.s32 {0}, {1}, {2}", z, half)
    out = t.mul(t.mul(p, t.power(half)), t.power(rest))
    if sigmoid:
        out = t.each("rcp.rn.f32 {0}, {1}", t.add(out, 1.0))
    return out


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
