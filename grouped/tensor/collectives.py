"""How PyTorch's distributed machinery moves a ``GroupedTensor``: as the bytes of its plain tensors.

Collectives that only move data run once for each of them; those that reduce are refused, as any
op without a handler. What FSDP2 gathers is in ``GroupedTensor.fsdp_pre_all_gather``.
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
    """What ``t`` spans, with the padding of its rows, as a contiguous view of bytes."""
    span = (
        1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    )
    return torch.as_strided(t, (span,), (1,)).view(torch.uint8)


def _part(i: int, x: GroupedTensor) -> Tensor:
    return _bytes(list(x._inner().values())[i])


def _same_parts(func: Any, arguments: Any) -> int:
    """How many plain tensors each GroupedTensor among ``arguments`` has."""
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    kinds = [
        (x.__tensor_flatten__()[1], *x._inner()) for x in tensors if isinstance(x, GroupedTensor)
    ]
    if len(kinds) < len(tensors) or len(set(kinds)) != 1:
        raise TypeError(
            f"{func} needs GroupedTensors of one format, direction and dtype on both sides, got {tensors!r}"
        )
    return len(kinds[0]) - 1


def _move(func: Any, *arguments: Any, **options: Any) -> Any:
    """Run a collective that moves data in place, once for each plain tensor."""
    result: Any = None
    for i in range(_same_parts(func, arguments)):
        if result is not None:
            # Each may run on a thread of its own, and the caller waits for the last one only.
            _work(result).wait()
        result = func(
            *tree_map_only(GroupedTensor, functools.partial(_part, i), arguments), **options
        )
    return (arguments[0], result[1]) if isinstance(result, tuple) else result


def _work(result: Any) -> Any:
    return result[1] if isinstance(result, tuple) else result


class Flat(Tensor):
    """Tensors side by side as one flat tensor: what DDP and FSDP make of parameters in between.

    DDP broadcasts a bucket of flattened parameters and copies its parts back.
    """

    parts: list[Tensor]

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor]) -> "Flat":
        """Of tensors of one dtype and device, each of which stays whole."""
        numel, first = sum(t.numel() for t in parts), parts[0]
        self: Flat = torch.Tensor._make_wrapper_subclass(
            cls, (numel,), dtype=first.dtype, device=first.device
        )
        self.parts = list(parts)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Flat({self.parts!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = _FLAT.get(func)
        if known is None:
            raise TypeError(
                f"{func} does not work on a GroupedTensor that was flattened; decode it first with .dequantize()"
            )
        return known(func, *args, **(kwargs or {}))


def _flat_cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Flat:
    return Flat([part for x in tensors for part in (x.parts if isinstance(x, Flat) else [x])])


def _flat_slice(func: Any, x: Flat, dim: int, start: int, end: int) -> Flat:
    """The parts in elements [start, end), which must be whole ones."""
    chosen, position = [], 0
    for part in x.parts:
        if start <= position and position + part.numel() <= end:
            chosen.append(part)
        position += part.numel()
    found = Flat(chosen) if chosen else None
    if found is None or found.shape[0] != end - start:
        raise TypeError("what GroupedTensors were flattened to can only be cut between them")
    return found


def _flat_view(func: Any, x: Flat, size: Sequence[int]) -> Tensor:
    if len(x.parts) == 1 and not isinstance(x.parts[0], GroupedTensor):
        return x.parts[0].view(size)
    if len(size) == 1:
        return Flat(x.parts)
    (part,) = x.parts
    return part


def _flat_broadcast(func: Any, tensors: Sequence[Flat], *rest: Any, **options: Any) -> Any:
    work: Any = None
    for part in tensors[0].parts:
        if work is not None:
            work.wait()
        _, work = func([part], *rest, **options)
    return tensors, work


_FLAT: dict[Any, Callable[..., Any]] = {
    aten.cat.default: _flat_cat,
    aten.slice.Tensor: _flat_slice,
    aten.view.default: _flat_view,
    aten.detach.default: lambda func, x: Flat(x.parts),
}


if torch.distributed.is_available():
    c10d, functional = torch.ops.c10d, torch.ops._c10d_functional
    handler(
        *(
            c10d.broadcast_.default,
            c10d.allgather_.default,
            c10d.scatter_.default,
            c10d.gather_.default,
        ),
        *(
            c10d.send.default,
            c10d.recv_.default,
            c10d.recv_any_source_.default,
            c10d.alltoall_.default,
        ),
    )(_move)
    _FLAT[c10d.broadcast_.default] = _flat_broadcast

    @handler(functional.all_gather_into_tensor.default, functional.broadcast.default)
    def _functional(func: Any, x: GroupedTensor, *where: Any) -> GroupedTensor:
        return wrap_gathered(
            x,
            [func(t.view(torch.uint8), *where).view(t.dtype) for t in gather_inputs(x, 1, len(x))],
        )

    # The second one would make it an AsyncCollectiveTensor, which hides what it is.
    @handler(functional.wait_tensor.default, "_c10d_functional::_wrap_tensor_autograd")
    def _wait(func: Any, x: GroupedTensor) -> GroupedTensor:
        for t in x._inner().values():
            functional.wait_tensor(t)
        return x._apply_inner(lambda t: t)
