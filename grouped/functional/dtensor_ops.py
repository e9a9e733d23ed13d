"""``linear``, ``grouped_gemm`` and ``quantize`` of DTensors: each rank computes its part.

| weight (G, N, K) | x (T, K) | y (T, N) | gradient of x | |---|---|---|---| | ``Replicate()`` |
``Replicate()`` | ``Replicate()`` | ``Replicate()`` | | ``Shard(0)``, groups | ``Replicate()`` |
``Partial()``: zeros in rows of other ranks' groups | ``Partial()`` | | ``Shard(1)``, columns of y |
``Replicate()`` | ``Shard(1)`` | ``Partial()`` | | ``Shard(2)``, columns of x | ``Shard(1)``, and no
bias | ``Partial()`` | ``Shard(1)`` |

Along each dimension of the mesh; with ``transpose_b`` N and K change places. Operands of other
placements are
redistributed: weights whose groups the ranks do not divide and those beside quantized x are
gathered, as are both operands of ragged products. ``offs`` are those of all rows, the same on each
rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import grouped
from cute_kernels.formats import Format

from ..tensor.dtensor_parts import local_part
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.offsets import as_offs

_ALL, _SUM = Replicate(), Partial()


def _rule(x: Any, weight: Any, groups: bool, columns: int, has_bias: bool) -> tuple[Any, ...]:
    """Placements along one dimension of the mesh of x, weight, bias, alpha, y and the gradient of
    x.
    """
    dim = weight.dim if type(weight) is Shard else None
    if dim == 0 and groups:
        return _ALL, weight, weight, weight, _SUM, _SUM
    if dim == columns:
        return _ALL, weight, Shard(1), _ALL, Shard(1), _SUM
    if dim == 3 - columns and x == Shard(1) and not has_bias:
        return x, weight, _ALL, _ALL, _SUM, x
    return (_ALL,) * 6


def product(
    call: Callable[..., Tensor],
    x: Any,
    weight: Any,
    offs: Any,
    bias: Any = None,
    alpha: Any = None,
    columns: int = 1,
) -> DTensor:
    """``call(x, weight, offs, bias, alpha)`` of each rank's part;

    ``columns`` of the weight are those of y.
    """
    mesh = _mesh_of(x, weight, *(t for t in (bias, alpha) if t is not None))
    uniform = weight.dim() == 3
    groups = uniform and not (len(weight) % mesh.size() or isinstance(local_part(x), GroupedTensor))
    pairs = zip(x.placements, weight.placements, strict=True)
    rules = [
        _rule(*pair, groups, columns, bias is not None) if uniform else (_ALL,) * 6
        for pair in pairs
    ]
    of_x, of_weight, of_bias, of_alpha, of_y, of_dx = (list(of) for of in zip(*rules, strict=True))
    rows, part = _part(x, of_x, of_dx), _part(weight, of_weight)
    vectors = [
        None if t is None else _part(t, of) for t, of in ((bias, of_bias), (alpha, of_alpha))
    ]
    ends = _ends(offs, x)
    if ends is not None and len(part) < len(weight):
        _, (first, *_) = compute_local_shape_and_global_offset(weight.shape, mesh, of_weight)
        start = ends[first - 1] if first else 0
        row, count = torch.arange(len(x), device=x.device), max(1, len(x))
        # Turned, so that theirs are the first rows and the others a tail that is not read.
        rows, ends = (
            rows.index_select(0, (row + start) % count),
            ends[first : first + len(part)] - start,
        )
        y = call(rows, part, ends, *vectors).index_select(0, (row - start) % count)
    else:
        y = call(rows, part, ends, *vectors)
    return whole(y, mesh, of_y, (len(x), weight.shape[columns]) if uniform else tuple(y.shape))


def quantize(x: Any, fmt: Format, offs: Any, **options: Any) -> DTensor:
    """``grouped.quantize``: of whole groups ``Shard(0)``, if x has them so; else ``Replicate()``."""
    refuse_random(fmt)
    uniform = x.dim() == 3
    placements = [p if uniform and p == Shard(0) else _ALL for p in x.placements]
    made = grouped.quantize(_part(x, placements).detach(), fmt, offs=_ends(offs, x), **options)
    return whole(made, x.device_mesh, placements, tuple(x.shape))


def refuse_random(*formats: Format | None) -> None:
    """Raise for formats that draw numbers: ranks would draw each their own for the same values."""
    for fmt in formats:
        if fmt is not None and fmt.is_stochastic:
            raise ValueError(
                f"{fmt} rounds stochastically, on each rank differently: pass to_local() of DTensors"
            )


def _mesh_of(*operands: Any) -> DeviceMesh:
    mesh: DeviceMesh = getattr(operands[0], "device_mesh", None) or operands[1].device_mesh
    if any(getattr(t, "device_mesh", None) != mesh for t in operands):
        raise TypeError(
            "operands must all be DTensors of one mesh; for rows of this rank's groups pass to_local() of them"
        )
    return mesh


def _part(t: Any, placements: Any, gradient: Any = None) -> Tensor:
    return t.redistribute(t.device_mesh, placements).to_local(grad_placements=gradient)


def whole(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: tuple[int, ...]
) -> DTensor:
    """The tensor of which ``part`` is this rank's."""
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def _ends(offs: Any, x: Tensor) -> Tensor | None:
    offs = offs.full_tensor() if isinstance(offs, DTensor) else offs
    return None if offs is None else as_offs(offs, len(x), x.device)
