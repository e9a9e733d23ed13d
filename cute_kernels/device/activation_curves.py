"""Activations and their gradients in PTX, bit-equal to ``cute_kernels.reference.activations``.

The formulas follow the steps of the reference in the same order, with these changes. They do not
change a bit of the result. sm_100a computes two numbers per instruction.

- A product that is exact, or a sum of two doubled summands, is contracted: a * b + c is then
  rounded once either way. n times the first part of ln 2 is exact, and so is p * 2^n.
- A sigmoid needs no e^x below 2^-25, because 1 + e^x does not show it. So e^x takes no second step
  to subnormal numbers: 2^n is 2 * 2^(n - 1), whose bits are those of z alone.
- Clamps of the argument replace those of its factor. If they differ, the other factor is 0.
- r is kept as -r, so that no argument is negated.
- For sums below 2^126, one Newton step turns an approximate reciprocal into the rounded one.
  ``rcp.rn`` does the same after a branch. Branches prevent the GPU from working on several numbers
  side by side.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.formats.activations import Activation, Numbers, alpha_of, curve_of, formula_of

from ..arch import get_arch
from .convert import pack_words, unpack_words
from .memory import load_shared, store_shared
from .ptx import add_rn, asm, bits_as_f32, f32_as_bits, mul_rn
from .ptx_builder import PtxBuilder, PtxNumber, apply_formula

#: Rounds to integers when added: the low bits are then the integer plus the bias of the exponent,
#: minus one for a factor of 2 elsewhere.
_ROUNDS = Numbers.MAGIC + 126
#: Below ``_STEEP`` 1 + e^-x is infinite; above ``_FLAT`` it is 1.
_STEEP, _FLAT = -89.0, 80.0


class _CurveValue(NamedTuple):
    """A curve f at x.

    Attributes:
        value: f(x).
        slope: A function that emits the instructions of f'(x); only gradients call it.
        factor: The number that x, or min(x, limit), is multiplied with to give f(x). None for
            curves without such a factor.
    """

    value: PtxNumber
    slope: Callable[[], PtxNumber]
    factor: PtxNumber | None = None


def _sigmoid(t: PtxBuilder, c: PtxNumber, quick: bool) -> PtxNumber:
    """Return the sigmoid of numbers between ``_STEEP`` and ``_FLAT``."""
    z = t.add(t.mul(c, -Numbers.LOG2E), _ROUNDS)
    n = t.sub(z, _ROUNDS)
    r = t.add(t.fma(n, Numbers.LN2[0], c), t.mul(n, Numbers.LN2[1]))
    q = t.mul(r, Numbers.EXP[-1])
    for factor in Numbers.EXP[-2:0:-1]:
        q = t.mul(t.sub(factor, q), r)
    p = t.sub(t.mul(t.sub(Numbers.EXP[0], q), t.mul(r, r)), r)
    sum_ = t.fma(t.fma(p, 2.0, 2.0), t.power_of_two(z), 1.0)
    if not quick:
        return t.scalar("rcp.rn.f32 {0}, {1}", sum_)
    r = t.scalar("rcp.approx.ftz.f32 {0}, {1}", sum_)
    return t.fma(t.scalar("neg.f32 {0}, {1}", t.fma(sum_, r, -1.0)), r, r)


def _tanh(t: PtxBuilder, x: PtxNumber) -> PtxNumber:
    """Return tanh(x)."""
    a = t.scalar("abs.f32 {0}, {1}; min.NaN.f32 {0}, {0}, {2}", x, 10.0)
    z = t.vector("add.rm", t.mul(a, 2 * Numbers.LOG2E), _ROUNDS)
    n = t.sub(z, _ROUNDS)
    r = t.sub(t.fma(n, -Numbers.LN2[0] / 2, a), t.mul(n, Numbers.LN2[1] / 2))
    w = t.mul(r, r)
    q = t.mul(w, Numbers.TANH[-1])
    for factor in Numbers.TANH[-2:0:-1]:
        q = t.mul(t.add(q, factor), w)
    p = t.add(t.mul(t.add(q, Numbers.TANH[0]), t.mul(w, r)), r)
    s = t.power_of_two(z)
    u = t.add(t.mul(p, t.add(s, 0.5)), t.sub(s, 0.5))
    # 0xD8 selects bits: of the second operand where the third is set, else of the first.
    text = "div.rn.f32 {0}, {1}, {2}; lop3.b32 {0}, {0}, {3}, 0x80000000, 0xD8"
    return t.scalar(text, u, t.add(u, t.sub(1.0, p)), x)


def _sigmoid_curve(
    t: PtxBuilder, act: Activation, x: PtxNumber, quick: bool, s: PtxNumber | None
) -> _CurveValue:
    """Return x times the sigmoid of alpha * x; ``s`` is that sigmoid if the caller has it."""
    alpha, limit = alpha_of(act), act.limit if act.is_clamped else None
    y = x if limit is None else t.minimum(x, limit)
    steep = y if alpha == 1.0 else t.mul(y, alpha)
    factor = y
    if not quick:
        steep = t.maximum(steep, _STEEP)
        factor = steep if alpha == 1.0 else t.maximum(y, -Numbers.FMAX)
    c = steep if quick else t.minimum(steep, _FLAT)
    s = s or _sigmoid(t, c, quick)
    value = t.mul(factor, s)

    def slope() -> PtxNumber:
        """Emit f'(x)."""
        out = t.add(t.mul(value if c is factor else t.mul(c, s), t.sub(1.0, s)), s)
        return out if limit is None else t.select_above(x, limit, 0.0, out)

    return _CurveValue(value, slope, s)


def _tanh_curve(
    t: PtxBuilder, act: Activation, x: PtxNumber, quick: bool, s: PtxNumber | None
) -> _CurveValue:
    """Return GELU in its tanh form; there is no quick variant."""
    core = _tanh(t, t.mul(x, t.add(t.mul(t.mul(x, x), Numbers.GELU[1]), Numbers.GELU[0])))

    def slope() -> PtxNumber:
        """Emit f'(x)."""
        w = t.minimum(t.maximum(x, -Numbers.FAR), Numbers.FAR)
        rise = t.add(t.mul(t.mul(w, w), Numbers.GELU[2]), Numbers.GELU[0])
        steep = t.mul(t.mul(w, 0.5), t.mul(rise, t.sub(1.0, t.mul(core, core))))
        return t.fma(t.add(core, 1.0), 0.5, steep)

    factor = t.fma(core, 0.5, 0.5)
    return _CurveValue(t.mul(t.maximum(x, -Numbers.FMAX), factor), slope, factor)


def _rectified_curve(
    t: PtxBuilder, act: Activation, x: PtxNumber, quick: bool, s: PtxNumber | None
) -> _CurveValue:
    """Return max(x, 0), squared if the curve says so."""
    core = t.maximum(x, 0.0)
    if curve_of(act).is_squared:
        return _CurveValue(t.mul(core, core), lambda: t.add(core, core))
    return _CurveValue(core, lambda: t.select_above(x, 0.0, 1.0, core))


class _CurveFamily(NamedTuple):
    """The PTX of a family of curves, see ``cute_kernels.formats.activations.Curve``.

    Attributes:
        formula: Emits a curve: (builder, activation, x, quick, sigmoid or None) -> _CurveValue.
        has_sigmoid: True if there is a faster formula for moderate arguments. Callers may pass the
            sigmoid.
        has_factor: True if f(x) is a multiple of x, so bf16 inputs can look the factor up in a
            table.
    """

    formula: Callable[..., _CurveValue]
    has_sigmoid: bool
    has_factor: bool


#: The families that kernels compute. A curve of any other family raises UnsupportedError.
CURVE_FAMILIES: dict[str, _CurveFamily] = {
    "tanh": _CurveFamily(_tanh_curve, has_sigmoid=False, has_factor=True),
    "rectified": _CurveFamily(_rectified_curve, has_sigmoid=False, has_factor=False),
    "sigmoid": _CurveFamily(_sigmoid_curve, has_sigmoid=True, has_factor=True),
}


def _curve(
    t: PtxBuilder, act: Activation, x: PtxNumber, quick: bool, s: PtxNumber | None = None
) -> _CurveValue:
    """Emit the curve of an activation.

    Raises:
        UnsupportedError: Kernels have no formula for the curve of ``act``.
    """
    return formula_of(act, CURVE_FAMILIES).formula(t, act, x, quick, s)


def quick_bound(act: Activation) -> float | None:
    """Return the magnitude of x up to which ``activated`` may be ``quick``.

    Returns:
        None for curves without a sigmoid.

    Raises:
        UnsupportedError: Kernels have no formula for the curve of ``act``.
    """
    if not formula_of(act, CURVE_FAMILIES).has_sigmoid:
        return None
    return (_FLAT - 1) / alpha_of(act)


def _gate(t: PtxBuilder, act: Activation, b: PtxNumber) -> PtxNumber:
    """Return the factor that the second half of a gated activation's input contributes."""
    if not act.is_clamped:
        return b
    return t.add(t.minimum(t.maximum(b, -act.limit), act.limit), 1.0)


def _activated_numbers(
    t: PtxBuilder,
    act: Activation,
    is_gradient: bool,
    inputs: list[PtxNumber],
    quick: bool,
    with_value: bool,
    has_sigmoid: bool,
) -> list[PtxNumber]:
    """Return the results of ``activated`` for one number, or one pair, of each input.

    ``inputs`` are x or A, then B, then the gradient of the result, then the sigmoid, as far as the
    activation and the arguments ask for them.
    """
    x, *more = inputs
    curve = _curve(t, act, x, quick, more.pop() if has_sigmoid else None)
    if not act.is_gated:
        return [
            *([t.mul(curve.slope(), more[0])] if is_gradient else []),
            *[curve.value] * with_value,
        ]
    b, gate = more[0], _gate(t, act, more[0])
    value = [t.mul(curve.value, gate)] if with_value else []
    if not is_gradient:
        return value
    g = more[1]
    grad_b = t.mul(curve.value, g)
    if act.is_clamped:
        size = t.scalar("abs.f32 {0}, {1}", b)
        grad_b = t.select_above(size, act.limit, 0.0, grad_b)
    return [t.mul(t.mul(curve.slope(), gate), g), grad_b, *value]


def activated(
    act: Activation,
    is_gradient: bool,
    arch: str,
    inputs: Sequence[Sequence[Float32]],
    quick: bool = False,
    with_value: bool = False,
    has_sigmoid: bool = False,
) -> list[list[Float32]]:
    """Compute an activation, or its gradient, in fp32.

    Args:
        act: The activation.
        is_gradient: Compute the gradient of the input instead of the activation.
        arch: ``"sm_90a"`` or ``"sm_100a"``.
        inputs: Lists of equal length: x, or A and B of a gated activation. Then, for gradients, the
            gradient of the result. Then, with ``has_sigmoid``, the sigmoids.
        quick: True if no x or A exceeds ``quick_bound`` in magnitude, except NaN.
        with_value: For gradients, also compute the activation.
        has_sigmoid: True if the caller passes the sigmoids as the last input.

    Returns:
        Lists as long as the inputs: the gradients (of A, then of B, if gated), then the values.
    """
    width = 2 if get_arch(arch).has_f32x2 else 1
    with_value = with_value or not is_gradient
    num_results = is_gradient * (1 + act.is_gated) + with_value
    out: list[list[Float32]] = [[] for _ in range(num_results)]
    for i in range(0, len(inputs[0]), width):
        # If the count is odd, the last number is paired with itself.
        operands = [
            numbers[min(i + j, len(numbers) - 1)] for numbers in inputs for j in range(width)
        ]
        builder = PtxBuilder(width, len(operands), num_results * width)
        names = [f"${num_results * width + j}" for j in range(len(operands))]
        pairs = [names[j : j + width] for j in range(0, len(names), width)]
        numbers = [PtxNumber(p[0] if width == 1 else None, p) for p in pairs]
        for j, number in enumerate(
            _activated_numbers(builder, act, is_gradient, numbers, quick, with_value, has_sigmoid)
        ):
            builder.result(number, [f"${j * width + k}" for k in range(width)])
        body = "\n".join(builder.lines)
        operands += [Int64(_signed(bits)) for bits in builder.constants]
        results = asm(f"{{\n{body}\n}}", [Float32] * (num_results * width), operands)
        results = results if num_results * width > 1 else (results,)
        for j, number in enumerate(results):
            out[j // width].append(number)
    return [numbers[: len(inputs[0])] for numbers in out]


@cute.jit
def activated_by_magnitude(
    act: Activation,
    is_gradient: bool,
    arch: str,
    inputs: list[list[Float32]],
    with_value: bool = False,
) -> list[list[Float32]]:
    """Compute ``activated``, by the quick formula if all numbers of x or A allow it."""
    bound, high, count = quick_bound(act), inputs[0][0], len(inputs[0])
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


def _store(results: list[list[Float32]], out: cute.Tensor) -> None:
    """Store lists of numbers one after another in a register tensor."""
    for i, number in enumerate(number for numbers in results for number in numbers):
        out[i] = number


#: Exponents that a table covers and mantissas of a bf16.
_EXPONENTS, _MANTISSAS = 32, 128
#: Bytes of a table: an fp32 factor for each number and for its negative.
TABLE_BYTES = 2 * _EXPONENTS * _MANTISSAS * 4
#: The named barrier of the threads that write a table. Teams use the lower ids.
_TABLE_BARRIER = 15


class FactorTable:
    """A table in shared memory of f(x) / x for bf16 numbers x.

    Smaller magnitudes than the table covers use the factor of the smallest entry of their sign,
    which is 0.5. Larger magnitudes use the factor of the largest entry, which is 0 or 1.

    Attributes:
        act: The activation.
        alpha: The factor of the sigmoid's argument.
        lowest_exponent: The lowest exponent in the table. If a number has a smaller exponent, alpha
            times the number is at most 2^-25.
        begin: Bits of the first bf16 number in the table.
        end: Bits of the first bf16 number after the table.
    """

    def __init__(self, act: Activation):
        self.act = act
        self.alpha = alpha_of(act)
        self.lowest_exponent = math.floor(-25 - math.log2(self.alpha))
        self.begin = (self.lowest_exponent + 127) * _MANTISSAS
        self.end = self.begin + _EXPONENTS * _MANTISSAS

    @classmethod
    def create(cls, act: Activation, dtype: str) -> "FactorTable | None":
        """Return the table of an activation, or None if inputs of ``dtype`` have none.

        Raises:
            UnsupportedError: Kernels have no formula for the curve of ``act``.
        """
        if not formula_of(act, CURVE_FAMILIES).has_factor or dtype != "bfloat16":
            return None
        table = cls(act)
        # The largest number is a 256th below that power of two.
        is_steep = table.alpha * 2.0 ** (table.lowest_exponent + _EXPONENTS) > 1 - _STEEP
        return table if is_steep and 0 < table.begin and table.end <= 255 * _MANTISSAS else None

    @cute.jit
    def fill(self, address: Int32, thread: Int32, num_threads: int) -> None:
        """Write the table to shared memory and synchronize the threads that write it.

        Args:
            address: Shared-memory address of the table, ``TABLE_BYTES`` bytes.
            thread: Index of the calling thread among ``num_threads``.
            num_threads: Threads that call this function.
        """
        size = TABLE_BYTES // 8
        for i in cutlass.range(thread, 2 * size, num_threads, unroll=1):
            x = bits_as_f32(Uint32((i % size + self.begin) << 16 | i // size << 31))
            factor = apply_formula(lambda t, x: _curve(t, self.act, x, False).factor, x)
            store_shared(address + i * 4, [f32_as_bits(factor)])
        cute.arch.barrier(barrier_id=_TABLE_BARRIER, number_of_threads=num_threads)

    def _product(self, t: PtxBuilder, x: PtxNumber, factor: PtxNumber, *b: PtxNumber) -> PtxNumber:
        """Return x, clamped if the activation clamps it, times ``factor``, times the gate of B."""
        value = t.mul(t.minimum(x, self.act.limit) if self.act.is_clamped else x, factor)
        return t.mul(value, _gate(t, self.act, *b)) if b else value

    def activated(self, inputs: Sequence[Sequence[Uint32]], address: Int32) -> list[Float32]:
        """Compute ``activated`` by table lookup.

        Args:
            inputs: Words of two bf16 each: of x, or of A and of B.
            address: Shared-memory address of the table, below 2^15.

        Returns:
            fp32 numbers, two per word of x or A.
        """
        # Infinity times a factor of 0 would be NaN.
        x = [
            asm("max.NaN.bf16x2 $0, $1, $2;", [Uint32], [word, Uint32(0xFF7FFF7F)])
            for word in inputs[0]
        ]
        factors = self.factors(x, address)
        x, *b = (unpack_words(words, "bfloat16") for words in (x, *inputs[1:]))
        return [
            apply_formula(self._product, *numbers) for numbers in zip(x, factors, *b, strict=True)
        ]

    def factors(self, x: Sequence[Uint32], address: Int32) -> list[Float32]:
        """Load the factors of the bf16 numbers in the words ``x``, two per word, as fp32."""
        return [
            bits_as_f32(load_shared(entry, 1)[0])
            for word in x
            for entry in self._entry_addresses(word, address)
        ]

    def _entry_addresses(self, word: Uint32, address: Int32) -> Sequence[Int32]:
        """Return the addresses of the factors of the two bf16 in ``word``.

        Each address is computed in half a word.
        """
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
        ones = 1 << 16 | 1
        start = Uint32(address) * Uint32(ones) - Uint32(4 * self.begin * ones & 0xFFFFFFFF)
        limits = Uint32(self.begin * ones), Uint32((self.end - 1) * ones)
        return asm(text, [Int32, Int32], [word, *limits, start])  # type: ignore[no-any-return]


def weighted_gradient(
    act: Activation,
    config: Any,
    inputs: Sequence[Sequence[Float32]],
    grad: Sequence[Float32],
    p: Float32,
    factors: list[Float32] | None = None,
) -> tuple[list[list[Float32]], list[Float32], Float32]:
    """Compute ``moe_activate_gradient`` for neighbouring elements of one row.

    Args:
        act: The activation.
        config: The kernel's configuration; ``arch`` and ``dtype`` are used.
        inputs: x, or A and B of a gated activation, as fp32.
        grad: The gradient of the weighted result, as many fp32 numbers.
        p: The routing weight of the row.
        factors: Factors of x or A from a ``FactorTable``, or None to compute them.

    Returns:
        The gradients of the inputs; p times the values, which are rounded to ``config.dtype``
        first; and the sum of grad times value over 16 lanes.
    """
    inputs = [*inputs, [mul_rn(p, number) for number in grad]]
    if factors is None:
        results = activated_by_magnitude(act, True, config.arch, inputs, True)
    else:
        results = activated(
            act, True, config.arch, [*inputs, factors], with_value=True, has_sigmoid=True
        )
    values = unpack_words(pack_words(results.pop(), config.dtype), config.dtype)
    total = Float32(0.0)
    for g, a in zip(grad, values, strict=True):
        total = add_rn(total, mul_rn(g, a))
    for lanes in (8, 4, 2, 1):
        total = add_rn(total, cute.arch.shuffle_sync_bfly(total, lanes))
    return results, [mul_rn(p, number) for number in values], total


def exponential(x: Float32, sigmoid: bool = False) -> Float32:
    """Return exp(x), or with ``sigmoid`` the sigmoid of x, as ``reference.activations`` does."""
    return apply_formula(lambda t, number: _exponential(t, number, sigmoid), x)


def _exponential(t: PtxBuilder, x: PtxNumber, sigmoid: bool) -> PtxNumber:
    """Emit exp(x), or with ``sigmoid`` 1 / (1 + exp(-x))."""
    c = t.minimum(t.maximum(t.scalar("neg.f32 {0}, {1}", x) if sigmoid else x, -104.0), 89.0)
    z = t.add(t.mul(c, Numbers.LOG2E), Numbers.MAGIC + 254)
    n = t.sub(z, Numbers.MAGIC + 254)
    r = t.sub(t.sub(c, t.mul(n, Numbers.LN2[0])), t.mul(n, Numbers.LN2[1]))
    q = t.mul(r, Numbers.EXP[-1])
    for factor in Numbers.EXP[-2:0:-1]:
        q = t.mul(t.add(q, factor), r)
    p = t.add(t.add(t.mul(t.add(q, Numbers.EXP[0]), t.mul(r, r)), r), 1.0)
    half = t.scalar("shr.s32 {0}, {1}, 1", z)
    remainder = t.scalar("sub.s32 {0}, {1}, {2}", z, half)
    out = t.mul(t.mul(p, t.power_of_two(half)), t.power_of_two(remainder))
    if sigmoid:
        out = t.scalar("rcp.rn.f32 {0}, {1}", t.add(out, 1.0))
    return out


def _signed(bits: int) -> int:
    """Return 64 unsigned bits as a signed integer."""
    return bits - (1 << 64) if bits >> 63 else bits
