"""``linear``, ``grouped_gemm`` and ``quantize`` of DTensors: each rank computes its part.

| weight (G, N, K) | x (T, K) | y (T, N) | gradient of x |
|---|---|---|---|
| ``Replicate()`` | ``Replicate()`` | ``Replicate()`` | ``Replicate()`` |
| ``Shard(0)``, groups | ``Replicate()`` | ``Partial()``: zeros in rows of other ranks' groups | ``Partial()`` |
| ``Shard(1)``, columns of y | ``Replicate()`` | ``Shard(1)`` | ``Partial()`` |
| ``Shard(2)``, columns of x | ``Shard(1)``, and no bias | ``Partial()`` | ``Shard(1)`` |

Along each dimension of the mesh; with ``transpose_b`` N and K change places. Operands of other
placements are redistributed: weights whose groups the ranks do not divide, and those beside
quantized x, are gathered. ``offs`` are those of all rows, the same on each rank. The rules of
products of two ragged operands are in ``_ragged``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .offsets import Offsets, as_offs
from .shards import local_part
from .tensor import GroupedTensor

if TYPE_CHECKING:
	from torch.distributed.device_mesh import DeviceMesh
	from torch.distributed.tensor.placement_types import Placement

	from cute_kernels.formats import Format

_ALL, _SUM = Replicate(), Partial()


class _Rule(NamedTuple):
	"""Placements of operands, result and gradients along one dimension of a mesh."""

	x: Placement = _ALL
	weight: Placement = _ALL
	bias: Placement = _ALL
	alpha: Placement = _ALL
	y: Placement = _ALL
	dx: Placement = _ALL
	dweight: Placement = _ALL


def _uniform(x: DTensor, weight: DTensor, has_bias: bool, transposed: bool) -> list[_Rule]:
	columns, depth = (2, 1) if transposed else (1, 2)
	whole = weight.shape[0] % weight.device_mesh.size() or isinstance(local_part(x), GroupedTensor)
	rules = []
	for of_x, of_weight in zip(x.placements, weight.placements, strict=True):
		dim = of_weight.dim if type(of_weight) is Shard else None
		if dim == 0 and not whole:
			rules.append(_Rule(_ALL, of_weight, of_weight, of_weight, _SUM, _SUM, of_weight))
		elif dim == columns:
			rules.append(_Rule(_ALL, of_weight, Shard(1), _ALL, Shard(1), _SUM, of_weight))
		elif dim == depth and of_x == Shard(1) and not has_bias:
			rules.append(_Rule(of_x, of_weight, y=_SUM, dx=of_x, dweight=of_weight))
		else:
			rules.append(_Rule())
	return rules


def _ragged(a: DTensor, b: DTensor) -> list[_Rule]:
	"""Columns of one operand are rows or columns of the result (G, N, K); rows are never cut."""
	rules = []
	for of_a, of_b in zip(a.placements, b.placements, strict=True):
		if of_a == Shard(1):
			rules.append(_Rule(of_a, y=of_a, dx=of_a, dweight=_SUM))
		elif of_b == Shard(1):
			rules.append(_Rule(weight=of_b, y=Shard(2), dx=_SUM, dweight=of_b))
		else:
			rules.append(_Rule())
	return rules


def product(
	call: Callable[..., Tensor],
	x: Any,
	weight: Any,
	offs: Offsets | None,
	bias: Tensor | None = None,
	alpha: Tensor | None = None,
	*,
	transposed: bool = False,
) -> DTensor:
	"""``call(x, weight, offs, bias, alpha)`` of each rank's part; differentiable.

	Raises:
	  TypeError: operands that are DTensors and others that are not, or of several meshes.
	"""
	mesh = _mesh_of({"x": x, "weight": weight, "bias": bias, "alpha": alpha})
	is_ragged = weight.dim() == 2  # noqa: PLR2004
	rules = _ragged(x, weight) if is_ragged else _uniform(x, weight, bias is not None, transposed)
	of: Any = _Rule(*([rule[i] for rule in rules] for i in range(len(_Rule._fields))))  # type: ignore[arg-type]
	rows, part = _part(x, of.x, of.dx), _part(weight, of.weight, of.dweight)
	vectors = [None if t is None else _part(t, p, p) for t, p in ((bias, of.bias), (alpha, of.alpha))]
	ends = _ends(offs, x)
	if len(part) < len(weight) and not is_ragged and ends is not None:
		_, (first, *_) = compute_local_shape_and_global_offset(weight.shape, mesh, of.weight)
		y = _of_some_groups(call, rows, part, ends, first, vectors)
	else:
		y = call(rows, part, ends, *vectors)
	columns = weight.shape[2 if transposed else 1]
	return _whole(y, mesh, of.y, (y.shape[0], x.shape[1], columns) if is_ragged else (len(x), columns))


def _of_some_groups(call: Any, x: Tensor, weight: Tensor, ends: Tensor, first: int, vectors: Sequence[Any]) -> Tensor:
	"""The product of the groups from ``first`` on; zeros in the rows of others."""
	start = ends[first - 1] if first else ends.new_zeros(())
	row, count = torch.arange(len(x), device=x.device), max(1, len(x))
	# Turned, so that theirs are the first rows and the others a tail that is not read.
	x, ends = x.index_select(0, (row + start) % count), ends[first : first + len(weight)] - start
	y: Tensor = call(x, weight, ends, *vectors)
	return y.index_select(0, (row - start) % count)


def quantize(x: Any, fmt: Format, offs: Offsets | None, vectors: dict[str, Any], options: dict[str, Any]) -> Any:
	"""``grouped.quantize``: of whole groups ``Shard(0)``, if x has them so; else ``Replicate()``.

	Raises:
	  ValueError: a stochastic format, whose draws would differ between ranks; ``shapes`` or ``out``.
	  TypeError: as of ``product``.
	"""
	import grouped

	refuse_random(fmt)
	refused = [name for name in ("shapes", "out") if options.pop(name) is not None]
	if refused:
		raise ValueError(f"{refused[0]} does not go with x that is a DTensor")
	mesh, groups = _mesh_of({"x": x, **vectors}), len(x)
	is_uniform = x.dim() == 3  # noqa: PLR2004
	placements = [p if is_uniform and p == Shard(0) else _ALL for p in x.placements]
	x, *rest = (t if t is None else _part(t, placements, placements).detach() for t in (x, *vectors.values()))
	options |= zip(vectors, rest, strict=True)
	made: Any = grouped.quantize(x, fmt, offs=_ends(offs, x), **options)

	def spread(t: Tensor) -> DTensor:
		return _whole(t, mesh, placements, (groups if is_uniform else len(t), *t.shape[1:]))

	return tuple(map(spread, made)) if isinstance(made, tuple) else spread(made)


def refuse_random(*formats: Format | None) -> None:
	"""Raise for formats that draw numbers: ranks would draw each their own for the same values."""
	for fmt in formats:
		if fmt is not None and fmt.is_stochastic:
			raise ValueError(f"{fmt} rounds stochastically, each rank differently: pass x.to_local() instead of a DTensor")


def _mesh_of(operands: dict[str, Tensor | None]) -> DeviceMesh:
	meshes = {name: getattr(t, "device_mesh", None) for name, t in operands.items() if t is not None}
	first = next(iter(meshes.values()))
	if any(mesh is None or mesh != first for mesh in meshes.values()):
		plain = ", ".join(name for name, mesh in meshes.items() if mesh is None) or "another mesh"
		raise TypeError(
			f"{' and '.join(meshes)} must all be DTensors of one mesh, or none: {plain} is not. For rows of this rank's "
			"groups pass to_local() of the others"
		)
	return first  # type: ignore[return-value]


def _whole(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]) -> DTensor:
	strides = torch.empty(shape, device="meta").stride()
	return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def _part(t: Any, placements: Any, gradient: Any) -> Tensor:
	part: Tensor = t.redistribute(t.device_mesh, placements).to_local(grad_placements=gradient)
	return part


def _ends(offs: Any, x: Tensor) -> Tensor | None:
	if offs is None:
		return None
	return as_offs(offs.full_tensor() if isinstance(offs, DTensor) else offs, len(x), x.device)
