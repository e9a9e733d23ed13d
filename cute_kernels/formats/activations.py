"""Activations that ops apply before quantization: one record each, without arithmetic.

``cute_kernels.reference.activations`` states their bits. Sources: GELU arXiv 1606.08415 (its tanh
form), SiLU arXiv 1702.03118, gated units arXiv 2002.05202, squared ReLU arXiv 2109.08668.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

from ..records import Record, UnsupportedError, check_choice, check_kind, read, suggest_arguments

__all__ = ["ACTIVATIONS", "CURVES", "Activation", "Curve", "parse_activation"]


def __dir__() -> list[str]:
    return sorted(__all__)


_hex = float.fromhex


class Numbers:
    """Fp32 numbers of the formulas in ``cute_kernels.reference.activations``."""

    #: Largest fp32 number.
    FMAX = _hex("0x1.fffffep+127")
    #: Derivatives of larger arguments are at their limits; its cube is finite.
    FAR = 2.0**32
    #: Adding it rounds to an integer, which is then in the low bits.
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
        family: ``"rectified"`` is max(x, 0). ``"tanh"`` is GELU. ``"sigmoid"`` is x times the
            sigmoid of ``alpha`` x.
        alpha: Factor of the sigmoid's argument. None if it is a parameter of the activation.
        is_squared: True if the result is squared.
        is_clamped: True if the argument is clamped at the activation's ``limit``.
    """

    family: Literal["rectified", "tanh", "sigmoid"]
    alpha: float | None = 1.0
    is_squared: bool = False
    is_clamped: bool = False


#: Curves by name; nothing computes other curves.
CURVES: dict[str, Curve] = {
    "gelu": Curve("tanh"),
    "silu": Curve("sigmoid"),
    "qgelu": Curve("sigmoid", Numbers.QUICK),
    "clamped_silu": Curve("sigmoid", None, is_clamped=True),
    "relu": Curve("rectified"),
    "srelu": Curve("rectified", is_squared=True),
}
#: Curve of each activation, and True if a second half of its input multiplies it.
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
#: Bound of parameters and of their inverses, in which fp32 can represent the formulas.
_LARGEST = 2.0**64


@suggest_arguments
@dataclasses.dataclass(frozen=True)
class Activation(Record):
    """An activation of a plain tensor.

    Without a gate it computes ``act(x)``. A gated activation takes ``x = [A | B]``, halves of equal
    width along the last dimension, and computes ``act(A) * B``; a clamped one ``act(A) * (clamp(B)
    + 1)``.

    Args:
        name: One of ``ACTIVATIONS``.
        alpha: Factor of the sigmoid's argument in ``clamped_swiglu``.
        limit: Limit of ``clamped_swiglu``, which clamps A from above and B from both sides.

    Raises:
        ValueError: ``name`` is unknown; or a parameter is outside [2^-64, 2^64], or given to an
            activation without parameters.
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
        """Name of the function of one variable, one of ``CURVES``."""
        return _FACTS[self.name][0]

    @property
    def is_gated(self) -> bool:
        """True if a second half of the input multiplies the activated first half."""
        return _FACTS[self.name][1]

    @property
    def is_clamped(self) -> bool:
        """True if the input is clamped at ``limit``."""
        curve = CURVES.get(self.curve)
        return curve is not None and curve.is_clamped

    def width(self, columns: int) -> int:
        """Return the number of columns of the result.

        Args:
            columns: Number of columns of the input, with both halves of a gated activation.
        """
        return columns // 2 if self.is_gated else columns


F = TypeVar("F")


def curve_of(act: Activation) -> Curve:
    """Return the curve of an activation.

    Raises:
        UnsupportedError: ``CURVES`` has no curve of its name.
    """
    if act.curve not in CURVES:
        raise UnsupportedError(
            f"activation {act.name} has the curve {act.curve!r}, which is none of "
            f"{', '.join(CURVES)}"
        )
    return CURVES[act.curve]


def formula_of(act: Activation, formulas: Mapping[str, F]) -> F:
    """Return the formula of an activation's curve from ``formulas`` by family.

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
    """Return the factor of the argument of an activation's sigmoid; 1 without a sigmoid."""
    alpha = curve_of(act).alpha
    return act.alpha if alpha is None else alpha


def is_gated(text: str) -> bool:
    """Return ``Activation.is_gated`` of the record with a text; False if there is none.

    Compilers trace this function to compute shapes; ``parse_activation`` is for ops.
    """
    name = text.partition(":")[0]
    return name in _FACTS and _FACTS[name][1]


@functools.lru_cache(maxsize=256)
def parse_activation(text: str) -> Activation:
    """Return the record with a text, such as ``"clamped_swiglu:limit=5.0"``.

    Args:
        text: Name of the activation, and the parameters that differ from their defaults.

    Raises:
        ValueError: There is no such activation, parameter or value; or the record has another text,
            which leaves out parameters at their defaults.
    """
    return read("activation", dict.fromkeys(ACTIVATIONS, Activation), text)
