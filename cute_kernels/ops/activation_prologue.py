"""The activation that an op applies to its input first: checks, widths and elements."""

from collections.abc import Sequence

from torch import Tensor

from cute_kernels import reference

from ..formats.activations import curve_of, is_gated, parse_activation
from .checks import check_tensor, same_device


def result_columns(columns: int, activation: str | None) -> int:
    """Columns of the elements that an input of ``columns`` ones becomes."""
    return columns // 2 if _halves(activation) else columns


def input_columns(columns: int, activation: str | None) -> int:
    """Columns of the input that elements of ``columns`` ones are made of."""
    return 2 * columns if _halves(activation) else columns


def result_shape(shape: Sequence[int], activation: str | None) -> tuple[int, ...]:
    """Shape of the elements that an input of ``shape`` becomes."""
    return (*shape[:-1], result_columns(shape[-1], activation)) if shape else ()


def _halves(activation: str | None) -> bool:
    return activation is not None and is_gated(activation)


def check_prologue(
    name: str, x: Tensor, activation: str | None, grad: Tensor | None = None
) -> None:
    """Check the activation of ``x``, and ``grad``, the gradient of its result.

    Args:
        name: the argument that is ``x``.
        x: (T, W) or (G, N, W), or flat, of groups with shapes.
        activation: its text, or None.
        grad: of the shape of the result; or None.

    Raises:
        ValueError: ``activation`` is no text of one, or a shape, width or device that does not
            fit.
        TypeError: ``grad`` has another dtype than ``x``.
        UnsupportedError: nothing computes the activation's curve.
    """
    if activation is None:
        return
    act = parse_activation(activation)
    curve_of(act)  # Raises if nothing computes it.
    if act.is_gated and x.dim() > 1 and x.shape[-1] % 2:
        raise ValueError(
            f"{name} (..., 2N) of {activation}, which is gated, must have an even number of columns, got {x.shape[-1]}"
        )
    if grad is not None:
        check_tensor("grad", grad, dtypes=(x.dtype,), shape=result_shape(x.shape, activation))
        same_device(name, x.device, grad=grad)


def elements_of(
    x: Tensor, activation: str | None, *, rounds_activation: bool = False
) -> reference.Elements:
    """The elements that the reference backend quantizes.

    Args:
        x: (T, W) or (G, N, W).
        activation: its text, or None.
        rounds_activation: what the activation makes is rounded to the dtype of ``x``.
    """
    return reference.Elements(
        x,
        None if activation is None else parse_activation(activation),
        rounds_activation=rounds_activation,
    )
