"""Shapes of groups that vary in the last dimension or in both, on the host and on a device."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cute_kernels.ops.checks import check_tensor
from cute_kernels.ops.member_shapes import element_offsets

from .offsets import host_integers

#: (m, n) of each member: a host list, or an integer tensor (G, 2) on the CPU.
Shapes: TypeAlias = Sequence[Sequence[int]] | Tensor | np.ndarray[Any, np.dtype[np.int64]]
#: (m, n) of each member, as a GroupedTensor stores it.
MemberShapes: TypeAlias = tuple[tuple[int, int], ...]


def parse_shapes(shapes: Shapes) -> MemberShapes:
    """Return ``shapes`` as host integers; ops check their values.

    Raises:
        TypeError: The values are not integers.
        ValueError: There is not one pair per member, or the values are on a device.
    """
    if isinstance(shapes, Tensor):
        check_tensor("shapes", shapes, dtypes=(torch.int32, torch.int64), shape=(None, 2))
        why = "their values decide how large the buffers are, which only the host can allocate"
        if shapes.device.type != "cpu":
            raise ValueError(
                "shapes must be a host list or a tensor on the CPU, got one on "
                f"{shapes.device}: {why}"
            )
        if torch.compiler.is_compiling():
            raise ValueError(f"shapes must be a host list in compiled code, not a tensor: {why}")
        return tuple((m, n) for m, n in shapes.tolist())
    if not hasattr(shapes, "__len__"):
        raise TypeError(f"shapes must hold (m, n) for each member, got {shapes!r}")
    members = []
    for i, shape in enumerate(shapes):
        if not hasattr(shape, "__len__") or len(shape) != 2:
            raise ValueError(f"shapes must hold (m, n) for each member, got {shape!r} at {i}")
        for size in shape:
            if isinstance(size, (bool, np.bool_)) or not isinstance(size, (int, np.integer)):
                raise TypeError(f"shapes must hold integers, got {size!r} at {i}")
        members.append((int(shape[0]), int(shape[1])))
    return tuple(members)


def flat_shapes(shapes: MemberShapes | None) -> list[int] | None:
    """Return ``shapes`` as ops take them: [m0, n0, m1, n1, ...]."""
    return None if shapes is None else list(itertools.chain.from_iterable(shapes))


def shape_tensors(shapes: MemberShapes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``shapes`` (G, 2) and the element offsets (G + 1,) on a device, int64.

    The offsets are the first element of each member, and the end of the last. There is no
    synchronization.
    """
    sizes = list(itertools.chain.from_iterable(shapes))
    integers = host_integers(sizes + element_offsets(shapes), torch.int64, device)
    return integers[: len(sizes)].view(-1, 2), integers[len(sizes) :]
