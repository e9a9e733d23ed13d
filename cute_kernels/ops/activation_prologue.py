"""Activation that an op applies to its input first: checks, widths and elements."""

from collections.abc import Sequence

from torch import Tensor

from cute_kernels import reference

from ..formats.activations import curve_of, is_gated, parse_activation
from .checks import check_tensor, same_device


def result_columns(columns: int, activation: str | None) -> int:
    """Return the number of columns of an activation's result."""
    return columns // 2 if _halves(activation) else columns


def input_columns(columns: int, activation: str | None) -> int:
    """Return the number of columns of an activation's input."""
    return 2 * columns if _halves(activation) else columns


def result_shape(shape: Sequence[int], activation: str | None) -> tuple[int, ...]:
    """Return the shape of an activation's result for an input of ``shape``."""
    return (*shape[:-1], result_columns(shape[-1], activation)) if shape else ()


def _halves(activation: str | None) -> bool:
    """Return True if the activation halves the number of columns."""
    return activation is not None and is_gated(activation)


def check_prologue(
    name: str, x: Tensor, activation: str | None, grad: Tensor | None = None
) -> None:
    """Check the activation of ``x``, and ``grad``, the gradient of its result.

    Args:
        name: Name of the argument ``x``.
        x: (T, W) or (G, N, W), or flat, of groups with shapes of their own.
        activation: Text of the activation, or None.
        grad: Gradient of the shape of the result, or None.

    Raises:
        ValueError: ``activation`` is not the text of an activation; or a shape, width or device is
            invalid.
        TypeError: ``grad`` has another dtype than ``x``.
        UnsupportedError: Nothing computes the activation's curve.
    """
    if activation is None:
        return
    act = parse_activation(activation)
    curve_of(act)  # Raises if nothing computes it.
    if act.is_gated and x.dim() > 1 and x.shape[-1] % 2:
        raise ValueError(
            f"{name} (..., 2N) of {activation}, which is gated, must have an even number of "
            f"columns, got {x.shape[-1]}"
        )
    if grad is not None:
        check_tensor("grad", grad, dtypes=(x.dtype,), shape=result_shape(x.shape, activation))
        same_device(name, x.device, grad=grad)


def elements_of(
    x: Tensor, activation: str | None, *, rounds_activation: bool = False
) -> reference.Elements:
    """Return the elements that the reference backend quantizes.

    Args:
        x: (T, W) or (G, N, W).
        activation: Text of the activation, or None.
        rounds_activation: Round the result of the activation to the dtype of ``x``.
    """
    return reference.Elements(
        x,
        None if activation is None else parse_activation(activation),
        rounds_activation=rounds_activation,
    )
