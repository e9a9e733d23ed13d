"""Collectives of PyTorch on a ``GroupedTensor``: they move the bytes of its plain tensors.

Collectives that only move data run once for each plain tensor; those that reduce raise, like any
op without a handler. ``GroupedTensor.fsdp_pre_all_gather`` has what FSDP2 gathers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .dispatch import handler
from .gather import gather_inputs, wrap_gathered
from .grouped_tensor import GroupedTensor

aten = torch.ops.aten


def _bytes(t: Tensor) -> Tensor:
    """Return the memory of ``t``, with the padding of its rows, as a contiguous view of bytes."""
    span = (
        1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    )
    return torch.as_strided(t, (span,), (1,)).view(torch.uint8)


def _plain_bytes(i: int, x: GroupedTensor) -> Tensor:
    return _bytes(list(x._inner().values())[i])


def _count_plain_tensors(func: Any, arguments: Any) -> int:
    """Return the number of plain tensors of each GroupedTensor among ``arguments``.

    Raises:
        TypeError: A tensor is plain, or the tensors have different formats, directions or dtypes.
    """
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    kinds = [
        (x.__tensor_flatten__()[1], *x._inner()) for x in tensors if isinstance(x, GroupedTensor)
    ]
    if len(kinds) < len(tensors) or len(set(kinds)) != 1:
        raise TypeError(
            f"{func} needs GroupedTensors of one format, direction and dtype on both sides, "
            f"got {tensors!r}"
        )
    return len(kinds[0]) - 1


def _move(func: Any, *arguments: Any, **options: Any) -> Any:
    """Run a collective that moves data in place, once for each plain tensor."""
    result: Any = None
    for i in range(_count_plain_tensors(func, arguments)):
        if result is not None:
            # Each may run on its own thread, and the caller waits for the last one only.
            _work(result).wait()
        result = func(
            *tree_map_only(GroupedTensor, functools.partial(_plain_bytes, i), arguments), **options
        )
    return (arguments[0], result[1]) if isinstance(result, tuple) else result


def _work(result: Any) -> Any:
    return result[1] if isinstance(result, tuple) else result


class Flat(Tensor):
    """Tensors side by side as one flat tensor, into which DDP and FSDP flatten parameters.

    DDP broadcasts a bucket of flattened parameters and copies the tensors back.
    """

    tensors: list[Tensor]

    @staticmethod
    def __new__(cls, tensors: Sequence[Tensor]) -> "Flat":
        """Wrap tensors of one dtype and device, which stay as they are."""
        numel = sum(t.numel() for t in tensors)
        self: Flat = torch.Tensor._make_wrapper_subclass(
            cls, (numel,), dtype=tensors[0].dtype, device=tensors[0].device
        )
        self.tensors = list(tensors)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Flat({self.tensors!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        flat_handler = _FLAT.get(func)
        if flat_handler is None:
            raise TypeError(
                f"{func} does not work on a GroupedTensor that was flattened; decode it first with "
                ".dequantize()"
            )
        return flat_handler(func, *args, **(kwargs or {}))


def _flat_cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Flat:
    return Flat([t for x in tensors for t in (x.tensors if isinstance(x, Flat) else [x])])


def _flat_slice(func: Any, x: Flat, dim: int, start: int, end: int) -> Flat:
    """Return the tensors in elements [start, end), which must not cut a tensor."""
    inside, position = [], 0
    for t in x.tensors:
        if start <= position and position + t.numel() <= end:
            inside.append(t)
        position += t.numel()
    flat = Flat(inside) if inside else None
    if flat is None or flat.shape[0] != end - start:
        raise TypeError("flattened GroupedTensors can only be cut between them")
    return flat


def _flat_view(func: Any, x: Flat, size: Sequence[int]) -> Tensor:
    """Return the only tensor in its own shape, or the same flat tensor."""
    if len(x.tensors) == 1 and not isinstance(x.tensors[0], GroupedTensor):
        return x.tensors[0].view(size)
    if len(size) == 1:
        return Flat(x.tensors)
    (tensor,) = x.tensors
    return tensor


def _flat_broadcast(func: Any, tensors: Sequence[Flat], *arguments: Any, **options: Any) -> Any:
    """Broadcast the tensors one after the other."""
    work: Any = None
    for t in tensors[0].tensors:
        if work is not None:
            work.wait()
        _, work = func([t], *arguments, **options)
    return tensors, work


_FLAT: dict[Any, Callable[..., Any]] = {
    aten.cat.default: _flat_cat,
    aten.slice.Tensor: _flat_slice,
    aten.view.default: _flat_view,
    aten.detach.default: lambda func, x: Flat(x.tensors),
}


if torch.distributed.is_available():
    c10d, functional = torch.ops.c10d, torch.ops._c10d_functional
    handler(
        c10d.broadcast_.default,
        c10d.allgather_.default,
        c10d.scatter_.default,
        c10d.gather_.default,
        c10d.send.default,
        c10d.recv_.default,
        c10d.recv_any_source_.default,
        c10d.alltoall_.default,
    )(_move)
    _FLAT[c10d.broadcast_.default] = _flat_broadcast

    @handler(functional.all_gather_into_tensor.default, functional.broadcast.default)
    def _functional(func: Any, x: GroupedTensor, *options: Any) -> GroupedTensor:
        inputs = gather_inputs(x, 1, len(x))
        outputs = [func(t.view(torch.uint8), *options).view(t.dtype) for t in inputs]
        return wrap_gathered(x, outputs)

    # The second op would wrap it in an AsyncCollectiveTensor, which hides its class.
    @handler(functional.wait_tensor.default, "_c10d_functional::_wrap_tensor_autograd")
    def _wait(func: Any, x: GroupedTensor) -> GroupedTensor:
        for t in x._inner().values():
            functional.wait_tensor(t)
        return x._apply_inner(lambda t: t)
