"""``linear``, ``grouped_gemm`` and ``quantize`` of DTensors: each rank computes its part.

The placements along each dimension of the mesh decide:

| weight (G, N, K) | x (T, K) | y (T, N) | gradient of x |
|---|---|---|---|
| ``Replicate()`` | ``Replicate()`` | ``Replicate()`` | ``Replicate()`` |
| ``Shard(0)``, groups | ``Replicate()`` | ``Partial()`` | ``Partial()`` |
| ``Shard(1)``, columns of y | ``Replicate()`` | ``Shard(1)`` | ``Partial()`` |
| ``Shard(2)``, columns of x | ``Shard(1)``, and no bias | ``Partial()`` | ``Shard(1)`` |

Under ``Shard(0)`` y has zeros in rows of other ranks' groups.

With ``transpose_b`` N and K change places. Operands of other placements are redistributed. Weights
are gathered if the ranks do not divide their groups, or if x is quantized. Both operands of ragged
products are gathered. ``offs`` are the end rows of all rows, the same on each rank.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from cute_kernels.formats import Format

from ..tensor.dtensor_parts import from_local_part, local_part
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.offsets import parse_offs

_REPLICATE, _PARTIAL = Replicate(), Partial()


class _Placements(NamedTuple):
    """Placements of the tensors of a product along one dimension of the mesh."""

    x: Any = _REPLICATE
    weight: Any = _REPLICATE
    bias: Any = _REPLICATE
    alpha: Any = _REPLICATE
    y: Any = _REPLICATE
    dx: Any = _REPLICATE


def _choose_placements(
    x: Any, weight: Any, shards_groups: bool, columns: int, has_bias: bool
) -> _Placements:
    """Return the placements of a product from those of x and of the weight."""
    dim = weight.dim if type(weight) is Shard else None
    if dim == 0 and shards_groups:
        return _Placements(weight=weight, bias=weight, alpha=weight, y=_PARTIAL, dx=_PARTIAL)
    if dim == columns:
        return _Placements(weight=weight, bias=Shard(1), y=Shard(1), dx=_PARTIAL)
    if dim == 3 - columns and x == Shard(1) and not has_bias:
        return _Placements(x=x, weight=weight, y=_PARTIAL, dx=x)
    return _Placements()


def product(
    call: Callable[..., Tensor],
    x: Any,
    weight: Any,
    offs: Any,
    bias: Any = None,
    alpha: Any = None,
    columns: int = 1,
) -> Tensor:
    """Compute a product of DTensors.

    Args:
        call: Computes the product of a rank's parts: ``call(x, weight, offs, bias, alpha)``.
        x: (T, K).
        weight: (G, N, K), or ragged (T, N).
        offs: (G,). End rows. Optional.
        bias: (G, N). Optional.
        alpha: (G,) fp32. Factors. Optional.
        columns: Dimension of the weight that is the columns of y.
    """
    mesh = _common_mesh(x, weight, *(t for t in (bias, alpha) if t is not None))
    is_uniform = weight.dim() == 3
    shards_groups = is_uniform and not (
        len(weight) % mesh.size() or isinstance(local_part(x), GroupedTensor)
    )
    pairs = zip(x.placements, weight.placements, strict=True)
    mesh_dim_placements = [
        _choose_placements(*pair, shards_groups, columns, bias is not None)
        if is_uniform
        else _Placements()
        for pair in pairs
    ]
    placements = _Placements(*(list(column) for column in zip(*mesh_dim_placements, strict=True)))
    rows = _redistribute(x, placements.x, placements.dx)
    local_weight = _redistribute(weight, placements.weight)
    local_bias = None if bias is None else _redistribute(bias, placements.bias)
    local_alpha = None if alpha is None else _redistribute(alpha, placements.alpha)
    end_rows = _end_rows(offs, x)
    if end_rows is not None and len(local_weight) < len(weight):
        _, (first_group, *_) = compute_local_shape_and_global_offset(
            weight.shape, mesh, placements.weight
        )
        start = end_rows[first_group - 1] if first_group else 0
        row, count = torch.arange(len(x), device=x.device), max(1, len(x))
        # Rotate the rows: this rank's rows come first, the others are a tail that is not read.
        rows = rows.index_select(0, (row + start) % count)
        end_rows = end_rows[first_group : first_group + len(local_weight)] - start
        y = call(rows, local_weight, end_rows, local_bias, local_alpha)
        y = y.index_select(0, (row - start) % count)
    else:
        y = call(rows, local_weight, end_rows, local_bias, local_alpha)
    shape = (len(x), weight.shape[columns]) if is_uniform else tuple(y.shape)
    return from_local_part(y, mesh, placements.y, shape)


def quantize(call: Callable[..., Tensor], x: Any, fmt: Format, offs: Any, **options: Any) -> Tensor:
    """Quantize a DTensor: sharded along whole groups if ``x`` is, else replicated.

    Args:
        call: ``grouped.quantize``, for a rank's part.
        x: (T, K), or (G, N, K).
        fmt: The format.
        offs: (G,) end rows, or None.
        **options: Other arguments of ``call``.
    """
    refuse_stochastic(fmt)
    is_uniform = x.dim() == 3
    placements = [p if is_uniform and p == Shard(0) else _REPLICATE for p in x.placements]
    rows = _redistribute(x, placements).detach()
    quantized = call(rows, fmt, offs=_end_rows(offs, x), **options)
    return from_local_part(quantized, x.device_mesh, placements, tuple(x.shape))


def refuse_stochastic(*formats: Format | None) -> None:
    """Raise for stochastic formats: each rank would draw other numbers for the same values."""
    for fmt in formats:
        if fmt is not None and fmt.is_stochastic:
            raise ValueError(
                f"{fmt} rounds stochastically, on each rank differently: pass to_local() of "
                "DTensors"
            )


def _common_mesh(*operands: Any) -> DeviceMesh:
    mesh: DeviceMesh = getattr(operands[0], "device_mesh", None) or operands[1].device_mesh
    if any(getattr(t, "device_mesh", None) != mesh for t in operands):
        raise TypeError(
            "operands must all be DTensors of one mesh; for rows of this rank's groups pass "
            "to_local() of them"
        )
    return mesh


def _redistribute(t: Any, placements: Any, gradient_placements: Any = None) -> Tensor:
    """Return this rank's part of ``t`` under other placements."""
    redistributed = t.redistribute(t.device_mesh, placements)
    return redistributed.to_local(grad_placements=gradient_placements)


def _end_rows(offs: Any, x: Tensor) -> Tensor | None:
    offs = offs.full_tensor() if isinstance(offs, DTensor) else offs
    return None if offs is None else parse_offs(offs, len(x), x.device)
