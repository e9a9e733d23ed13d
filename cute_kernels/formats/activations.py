"""Activations that a tensor goes through on its way to codes: one record each, no arithmetic.

``cute_kernels.reference.activations`` states them to the bit. Sources: GELU arXiv 1606.08415 (its
tanh form), SiLU arXiv 1702.03118, gated units arXiv 2002.05202, squared ReLU arXiv 2109.08668.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

from ..records import Record, UnsupportedError, check_choice, check_kind, read

_hex = float.fromhex


class Numbers:
    """The fp32 numbers of the formulas that ``cute_kernels.reference.activations`` states."""

    #: The largest of fp32.
    FMAX = _hex("0x1.fffffep+127")
    #: Beyond it, derivatives are at their limits, and its cube is finite.
    FAR = 2.0**32
    #: Added, it rounds to integers, which are then the low bits.
    MAGIC = 1.5 * 2.0**23
    LOG2E = _hex("0x1.715476p+0")
    LN2 = _hex("0x1.62e4p-1"), _hex("0x1.7f7d1cp-20")
    #: (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, from the constant term up.
    EXP = tuple(
        map(_hex, ("0x1p-1", "0x1.5554b2p-3", "0x1.5554c8p-5", "0x1.12266ap-7", "0x1.6d721ap-10"))
    )
    #: (tanh(r) / r - 1) / r^2 for 0 <= r <= ln(2) / 2 in powers of r^2.
    TANH = tuple(map(_hex, ("-0x1.55554ep-2", "0x1.110c54p-3", "-0x1.b83438p-5", "0x1.3f46fp-6")))
    #: 1.702; 0.79788456, 0.03567741 and 0.1070322243.
    QUICK = _hex("0x1.b3b646p+0")
    GELU = _hex("0x1.988454p-1"), _hex("0x1.2444f4p-5"), _hex("0x1.b6676cp-4")


class Curve(NamedTuple):
    """A function of one variable, as the reference and the kernels compute it.

    Attributes:
        family: ``"rectified"`` is max(x, 0); ``"tanh"`` is GELU's; ``"sigmoid"`` is x times the
            sigmoid of ``alpha`` x.
        alpha: The factor of the sigmoid's argument; None where the activation has it as a
            parameter.
        is_squared: The result is squared.
        is_clamped: The argument is clamped at the activation's ``limit``.
    """

    family: Literal["rectified", "tanh", "sigmoid"]
    alpha: float | None = 1.0
    is_squared: bool = False
    is_clamped: bool = False


#: The curves by name; nothing computes one that is not here.
CURVES: dict[str, Curve] = {
    "gelu": Curve("tanh"),
    "silu": Curve("sigmoid"),
    "qgelu": Curve("sigmoid", Numbers.QUICK),
    "clamped_silu": Curve("sigmoid", None, is_clamped=True),
    "relu": Curve("rectified"),
    "srelu": Curve("rectified", is_squared=True),
}
#: The curve of each activation, and whether a second half of its input multiplies it.
_FACTS: dict[str, tuple[str, bool]] = {
    "gelu": ("gelu", False),
    "silu": ("silu", False),
    "relu": ("relu", False),
    "qgelu": ("qgelu", False),
    "srelu": ("srelu", False),
    "geglu": ("gelu", True),
    "swiglu": ("silu", True),
    "reglu": ("relu", True),
    "qgeglu": ("qgelu", True),
    "sreglu": ("srelu", True),
    "clamped_swiglu": ("clamped_silu", True),
}
#: The names of all activations.
ACTIVATIONS = tuple(_FACTS)
#: Parameters beyond this, or below its inverse, leave the range in which fp32 carries formulas.
_LARGEST = 2.0**64


@dataclasses.dataclass(frozen=True)
class Activation(Record):
    """What is done to a plain tensor before it is quantized.

    Without a gate it is ``act(x)``. A gated one takes ``x = [A | B]``, halves of equal width along
    the last dimension, and gives ``act(A) * B``; a clamped one ``act(A) * (clamp(B) + 1)``.

    Args:
        name: One of ``ACTIVATIONS``.
        alpha: What ``clamped_swiglu`` multiplies the argument of its sigmoid by.
        limit: Where ``clamped_swiglu`` clamps: A from above, B from both sides.

    Raises:
        ValueError: A name that is none, a parameter out of [2^-64, 2^64], or one of an
            activation that has no parameters.
    """

    name: str  # type: ignore[misc]
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        check_choice("activation", self.name, ACTIVATIONS)
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            check_kind(float, **{field.name: value})
            if not 1 / _LARGEST <= value <= _LARGEST:
                raise ValueError(f"{field.name} must be in [2^-64, 2^64], got {value}")
            if value != field.default and not self.is_clamped:
                raise ValueError(f"{field.name} is of clamped_swiglu; {self.name} has none")
            object.__setattr__(self, field.name, float(value))
        super().__post_init__()

    @property
    def curve(self) -> str:
        """The name of the function of one variable, one of ``CURVES``."""
        return _FACTS[self.name][0]

    @property
    def is_gated(self) -> bool:
        """Whether the input has a second half that multiplies the activated first one."""
        return _FACTS[self.name][1]

    @property
    def is_clamped(self) -> bool:
        """Whether it clamps its input at ``limit``."""
        curve = CURVES.get(self.curve)
        return curve is not None and curve.is_clamped

    def width(self, columns: int) -> int:
        """Columns of the result for an input of ``columns`` ones."""
        return columns // 2 if self.is_gated else columns


F = TypeVar("F")


def curve_of(act: Activation) -> Curve:
    """The curve of an activation.

    Raises:
        UnsupportedError: ``CURVES`` has none of its name.
    """
    if act.curve not in CURVES:
        raise UnsupportedError(
            f"activation {act.name} has the curve {act.curve!r}, which is none of {', '.join(CURVES)}"
        )
    return CURVES[act.curve]


def formula_of(act: Activation, formulas: Mapping[str, F]) -> F:
    """Return the one of ``formulas``, which are by family, that computes the curve of an
    activation.

    Raises:
        UnsupportedError: There is none.
    """
    family = curve_of(act).family
    if family not in formulas:
        raise UnsupportedError(
            f"no formula of the curve {act.curve!r}, which is of the family {family!r}"
        )
    return formulas[family]


def alpha_of(act: Activation) -> float:
    """The factor of the argument of an activation's sigmoid; 1 without a sigmoid."""
    alpha = curve_of(act).alpha
    return act.alpha if alpha is None else alpha


def is_gated(text: str) -> bool:
    """``Activation.is_gated`` of the record that a text stands for; False if it is no text of one.

    A compiler traces this where shapes are worked out; ``parse_activation`` is for ops.
    """
    name = text.partition(":")[0]
    return name in _FACTS and _FACTS[name][1]


@functools.lru_cache(maxsize=256)
def parse_activation(text: str) -> Activation:
    """The record that ``Activation.text`` stands for, such as ``"clamped_swiglu:limit=5.0"``.

    Raises:
        ValueError: There is no such activation, it has no such parameter or value, or its
            record has another text: parameters at their defaults are left out.
    """
    return read("activation", dict.fromkeys(ACTIVATIONS, Activation), text)
