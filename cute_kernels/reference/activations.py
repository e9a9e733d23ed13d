"""Activations and their gradients, exact to the bit.

Every step is one IEEE fp32 operation, rounded to nearest even, with subnormals and without fma: a
kernel writes ``mul.rn``, ``add.rn``, ``sub.rn``, ``rcp.rn`` and ``div.rn`` (no ``.ftz``, no
``.approx``), which a compiler does not contract. ``min`` and ``max`` keep NaN (``min.NaN.f32``).
``bits()`` and ``float()`` reinterpret; ``<<``, ``>>`` and ``-`` on bits wrap at 32 bits.

**exp(x)**, within 1.02 ulp of e^x, 27 instructions: x = n ln 2 + r, a polynomial of e^r, and a
product with 2^n in two steps, so that subnormal results are rounded once more and not flushed.

  x = min(max(x, -104), 89)                                   beyond: 0 and Inf
  z = x * 0x1.715476p+0 + 12583166                            1.5 * 2^23 + 254 rounds to integers
  n = z - 12583166
  r = (x - n * 0x1.62e4p-1) - n * 0x1.7f7d1cp-20              ln 2 in two parts
  q = (((0x1.6d721ap-10 * r + 0x1.12266ap-7) * r + 0x1.5554c8p-5) * r + 0x1.5554b2p-3) * r + 0.5
  p = (q * (r * r) + r) + 1
  a = bits(z) >> 1,  b = bits(z) - a                          n + 254 in two halves
  exp = (p * float(a << 23)) * float(b << 23)

**tanh(x)**, within 1.66 ulp, 28 instructions: |x| = n ln 2 / 2 + r with r >= 0, an odd polynomial
t of tanh(r), and the addition theorem with tanh(n ln 2 / 2) = (2^n - 1) / (2^n + 1); halved. All
summands are positive, and the numerator's error is in the denominator, too. (``add.rm`` gives z of
the product at once.)

  a = min(|x|, 10)                                            beyond: 1
  n = floor(a * 0x1.715476p+1)
  z = n + 12583038                                            1.5 * 2^23 + 126
  r = (a - n * 0x1.62e4p-2) - n * 0x1.7f7d1cp-21
  w = r * r
  q = ((0x1.3f46fp-6 * w + -0x1.b83438p-5) * w + 0x1.110c54p-3) * w + -0x1.55554ep-2
  t = q * (w * r) + r
  s = float(bits(z) << 23)                                    2^(n - 1)
  u = t * (s + 0.5) + (s - 0.5)
  tanh = copysign(u / (u + (1 - t)), x)

**sigmoid**: s(v) = rcp(1 + exp(-v)), with the correctly rounded reciprocal (``rcp.rn``): within 2.4
ulp for v > -87, subnormal or 0 below, 30 instructions.

**Curves** f and their derivatives f', in this order of operations; c0 = 0.79788456, c1 =
0.03567741, c2 = 0.1070322243 and 1.702 are rounded to fp32, H = 2^32:

  relu     f = 0 if x <= 0, else x                            f' = 1 if x > 0, else f
  srelu    f = m * m of m = relu(x)                           f' = m + m
  silu     f = max(x, -FMAX) * s(x)                           f' = (w * s) * (1 - s) + s
                 of w = min(max(x, -H), H), s = s(x)
  qgelu    f = max(x, -FMAX) * s(1.702 * x)                   f' the same of 1.702 * x as x
  gelu     t = tanh(x * (c0 + c1 * (x * x)))
             f = max(x, -FMAX) * (0.5 + 0.5 * t)
             f' = (0.5 * w) * ((1 - t * t) * (c0 + c2 * (w * w))) + 0.5 * (1 + t)
  clamped  f = that of y = min(x, limit): max(y, -FMAX) * s(alpha * y)
             f' = 0 if x > limit, else that of alpha * y as silu's x

The clamps at FMAX and H change no finite result; they make the formulas meet their limits, so that
f(-Inf) = -0 and f(Inf) = Inf for all but relu (+0 and Inf), srelu (+0 and Inf) and the
clamped one (-0 and f(limit)), and f' is the derivative's limit (0 or 1; Inf of srelu). NaN gives
NaN. A derivative's tanh and sigmoid are those of the value, so a kernel evaluates them once.

**Elements** of x, or of halves x = [A | B], with the gradient g of the result:

  plain     f(x)                          gradient  g * f'(x)
  gated     f(A) * B                      gradient  [ (f'(A) * B) * g | f(A) * g ]
  clamped   f(A) * (clamp(B) + 1)         gradient  [ (f'(A) * (clamp(B) + 1)) * g | f(A) * g ]
              clamp(B) = min(max(B, -limit), limit); its gradient is +0 where |B| > limit

At A = limit and |B| = limit the gradient passes, as ``torch.clamp``'s does.
"""

import abc
from collections.abc import Callable

import torch
from torch import Tensor

from ..formats.activations import Activation, Numbers, alpha_of, curve_of, formula_of
from .conversions import f32


def _polynomial(r: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Evaluate a polynomial by Horner's rule, from the highest power down."""
    *lower, highest = coefficients
    value = r * highest
    for c in reversed(lower[1:]):
        value.add_(c).mul_(r)
    return value.add_(lower[0])


def _power_of_two(bits: Tensor) -> Tensor:
    """Return 2^(e - 127) for integers whose low bits are e."""
    return (bits << 23).view(torch.float32)


def exp(x: Tensor) -> Tensor:
    """Return e^x by the formula of the module."""
    x = x.clamp(-104.0, 89.0)
    z = (x * Numbers.LOG2E).add_(Numbers.MAGIC + 254)
    n = z - (Numbers.MAGIC + 254)
    r = x.sub_(n * Numbers.LN2[0]).sub_(n * Numbers.LN2[1])
    p = _polynomial(r, Numbers.EXP).mul_(r * r).add_(r).add_(1.0)
    m = z.view(torch.int32)
    a = m >> 1
    return p.mul_(_power_of_two(a)).mul_(_power_of_two(m - a))


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent of ``x`` by the formula of the module."""
    a = x.abs().clamp_max_(10.0)
    n = (a * (2 * Numbers.LOG2E)).floor_()
    z = n + (Numbers.MAGIC + 126)
    r = a.sub_(n * (Numbers.LN2[0] / 2)).sub_(n * (Numbers.LN2[1] / 2))
    w = r * r
    t = _polynomial(w, Numbers.TANH).mul_(w * r).add_(r)
    s = _power_of_two(z.view(torch.int32))
    u = (t * (s + 0.5)).add_(s - 0.5)
    return u.div_(u + t.neg_().add_(1.0)).copysign_(x)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x) by the formula of the module."""
    return exp(-x).add_(1.0).reciprocal_()


class _Curve(abc.ABC):
    """Function of one variable and its derivative."""

    @abc.abstractmethod
    def core(self, x: Tensor) -> Tensor:
        """Return the intermediate result that value and slope share; neither changes it."""

    @abc.abstractmethod
    def value(self, x: Tensor, core: Tensor) -> Tensor:
        """Return f(x), given ``core(x)``."""

    @abc.abstractmethod
    def slope(self, x: Tensor, core: Tensor) -> Tensor:
        """Return f'(x), given ``core(x)``."""


class _Relu(_Curve):
    def core(self, x: Tensor) -> Tensor:
        return x.masked_fill(x <= 0.0, 0.0)

    def value(self, x: Tensor, core: Tensor) -> Tensor:
        return core

    def slope(self, x: Tensor, core: Tensor) -> Tensor:
        return core.masked_fill(x > 0.0, 1.0)


class _SquaredRelu(_Relu):
    def value(self, x: Tensor, core: Tensor) -> Tensor:
        return core * core

    def slope(self, x: Tensor, core: Tensor) -> Tensor:
        return core + core


class _Gelu(_Curve):
    def core(self, x: Tensor) -> Tensor:
        return tanh((x * x).mul_(Numbers.GELU[1]).add_(Numbers.GELU[0]).mul_(x))

    def value(self, x: Tensor, core: Tensor) -> Tensor:
        return (core * 0.5).add_(0.5).mul_(x.clamp_min(-Numbers.FMAX))

    def slope(self, x: Tensor, core: Tensor) -> Tensor:
        w = x.clamp(-Numbers.FAR, Numbers.FAR)
        steep = (
            (w * w).mul_(Numbers.GELU[2]).add_(Numbers.GELU[0]).mul_((core * core).neg_().add_(1.0))
        )
        return w.mul_(0.5).mul_(steep).add_((core + 1.0).mul_(0.5))


class _Silu(_Curve):
    """The argument times the sigmoid of ``alpha`` times the argument."""

    def __init__(self, alpha: float = 1.0) -> None:
        self._alpha = f32(alpha)

    def _argument(self, x: Tensor) -> Tensor:
        return x * self._alpha

    def core(self, x: Tensor) -> Tensor:
        return sigmoid(self._argument(x))

    def value(self, x: Tensor, core: Tensor) -> Tensor:
        return x.clamp_min(-Numbers.FMAX).mul_(core)

    def slope(self, x: Tensor, core: Tensor) -> Tensor:
        w = self._argument(x).clamp_(-Numbers.FAR, Numbers.FAR)
        return w.mul_(core).mul_(1.0 - core).add_(core)


class _ClampedSilu(_Silu):
    """``_Silu`` with its argument clamped from above at ``limit``."""

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__(alpha)
        self._limit = f32(limit)

    def _argument(self, x: Tensor) -> Tensor:
        return super()._argument(x.clamp_max(self._limit))

    def value(self, x: Tensor, core: Tensor) -> Tensor:
        return x.clamp(-Numbers.FMAX, self._limit).mul_(core)

    def slope(self, x: Tensor, core: Tensor) -> Tensor:
        return super().slope(x, core).masked_fill_(x > self._limit, 0.0)


def _rectified(act: Activation) -> _Curve:
    return _SquaredRelu() if curve_of(act).is_squared else _Relu()


def _sigmoid_curve(act: Activation) -> _Curve:
    return _ClampedSilu(alpha_of(act), act.limit) if act.is_clamped else _Silu(alpha_of(act))


_FORMULAS: dict[str, Callable[[Activation], _Curve]] = {
    "rectified": _rectified,
    "tanh": lambda act: _Gelu(),
    "sigmoid": _sigmoid_curve,
}


def _curve(act: Activation) -> _Curve:
    """Return the curve of an activation."""
    return formula_of(act, _FORMULAS)(act)


def _gate(b: Tensor, act: Activation) -> Tensor:
    """Return the factor that the second half B contributes."""
    if not act.is_clamped:
        return b
    limit = f32(act.limit)
    return b.clamp(-limit, limit).add_(1.0)


def activate(x: Tensor, act: Activation) -> Tensor:
    """Apply an activation to ``x``, (..., W) fp32; the result is (..., W / 2) if it is gated."""
    curve = _curve(act)
    if not act.is_gated:
        return curve.value(x, curve.core(x))
    a, b = x.chunk(2, dim=-1)
    return curve.value(a, curve.core(a)).mul_(_gate(b, act))


def activate_gradient(x: Tensor, grad: Tensor, act: Activation) -> Tensor:
    """Return the fp32 gradient of ``activate(x, act)`` with respect to ``x``, given ``grad``."""
    curve = _curve(act)
    if not act.is_gated:
        return curve.slope(x, curve.core(x)).mul_(grad)
    a, b = x.chunk(2, dim=-1)
    core = curve.core(a)
    a_gradient = curve.slope(a, core).mul_(_gate(b, act)).mul_(grad)
    b_gradient = curve.value(a, core).mul_(grad)
    if act.is_clamped:
        b_gradient.masked_fill_(b.abs() > f32(act.limit), 0.0)
    return torch.cat([a_gradient, b_gradient], dim=-1)
