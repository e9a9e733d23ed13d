"""The activation that an op applies to its input first: checks, widths and elements."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.activations import Activation, is_gated, parse_activation

from .checks import check_tensor, same_device
from .members import element_offsets, pairs


def result_columns(columns: int, activation: str | None, grad: Tensor | None) -> int:
	"""Columns of the elements that an input of ``columns`` ones becomes."""
	return columns // 2 if _halves(activation, grad) else columns


def input_columns(columns: int, activation: str | None, grad: Tensor | None) -> int:
	"""Columns of the input that elements of ``columns`` ones are made of."""
	return 2 * columns if _halves(activation, grad) else columns


def grad_columns(columns: int, activation: str | None) -> int:
	"""Columns of the gradient of the result, where the gradient of the input has ``columns``."""
	return result_columns(columns, activation, None)


def result_shape(shape: Sequence[int], activation: str | None, grad: Tensor | None) -> tuple[int, ...]:
	"""Shape of the elements that an input of ``shape`` becomes."""
	if not shape or not _halves(activation, grad):
		return tuple(shape)
	return (*shape[:-1], shape[-1] // 2)


def _halves(activation: str | None, grad: Tensor | None) -> bool:
	return activation is not None and grad is None and is_gated(activation)


def check_prologue(
	name: str, x: Tensor, activation: str | None, grad: Tensor | None, shapes: Sequence[int] | None = None
) -> None:
	"""Check the activation of ``x``, and ``grad``, the gradient of its result.

	Args:
	  name: the argument that is ``x``.
	  x: (T, W) or (G, N, W), or (capacity,) with ``shapes``.
	  activation: its text, or None.
	  grad: of the shape of the result, or (capacity,) of it with ``shapes``; or None.
	  shapes: rows and columns of each member of the elements.

	Raises:
	  ValueError: ``activation`` is no text of one, ``grad`` has none, or a shape, width or device
	    that does not fit.
	  TypeError: ``grad`` has another dtype than ``x``.
	"""
	if activation is None:
		if grad is not None:
			raise ValueError("grad needs an activation: it is the gradient of the activation's result")
		return
	act = parse_activation(activation)
	if shapes is not None:
		_check_members(grad, act, pairs(shapes), x.dtype)
	elif act.is_gated and x.shape[-1] % 2:
		raise ValueError(
			f"{name} (..., 2N) of {activation}, which is gated, must have an even number of columns, got {x.shape[-1]}"
		)
	elif grad is not None:
		check_tensor("grad", grad, dtypes=(x.dtype,), shape=result_shape(x.shape, activation, None))
	same_device(name, x.device, grad=grad)


def _check_members(grad: Tensor | None, act: Activation, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
	"""``grad`` must hold that of each member, and a gated one's members must have two halves."""
	if grad is None:
		return
	for i, (m, n) in enumerate(shapes):
		if act.is_gated and n % 2:
			raise ValueError(
				f"shapes[{i}] (m, 2n) of {act.text}, which is gated, must have an even number of columns, got ({m}, {n})"
			)
	check_tensor("grad with shapes", grad, dtypes=(dtype,), ndim=(1,))
	needed = element_offsets([(m, act.width(n)) for m, n in shapes])[-1]
	if grad.shape[0] < needed:
		raise ValueError(f"grad must hold the {needed} elements of the activation's result, got {grad.shape[0]}")


def elements_of(
	x: Tensor, activation: str | None, grad: Tensor | None, *, truncates: bool = False
) -> reference.Elements:
	"""The elements that the reference backend reduces or quantizes.

	Args:
	  x: (T, W) or (G, N, W).
	  activation: its text, or None.
	  grad: the gradient of its result, or None.
	  truncates: what the activation makes is rounded to the dtype of ``x``.
	"""
	act = None if activation is None else parse_activation(activation)
	return reference.Elements(x, act, grad, truncates=truncates)
