"""Conversion of group boundaries from every form that users have, without a synchronization."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cute_kernels.ops.checks import EndRowChecks, check_end_rows, check_end_rows_of

_INT32 = torch.iinfo(torch.int32)
#: End row of each group: an integer tensor, or a host list.
Offsets: TypeAlias = Tensor | Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]


def parse_offs(offs: Offsets, rows: int, device: torch.device) -> Tensor:
    """Return end rows as an int32 tensor (G,) on the device.

    Values of host lists and of CPU tensors are checked here. Values on a GPU are never read, and
    the kernels clamp them. ``grouped.inspect.check_offsets`` checks them without a synchronization.
    The last end may be below ``rows``: the rows after it are a tail. int64 values beyond int32
    saturate.

    Args:
        offs: End row of each group.
        rows: Number of rows of the tensor.
        device: Device of the tensor.

    Raises:
        TypeError: The values are not integers.
        ValueError: ``offs`` is not one-dimensional, empty or on another device, or values on the
            host or a CPU decrease or exceed ``rows``.
    """
    if isinstance(offs, Tensor):
        if offs.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"offs must be int32 or int64, got {offs.dtype}")
        if offs.dim() != 1 or offs.shape[0] < 1:
            raise ValueError(f"offs must have shape (G,) with G >= 1, got {tuple(offs.shape)}")
        if offs.device != device:
            raise ValueError(f"offs must be on the device of x ({device}), got {offs.device}")
        if offs.is_cpu or EndRowChecks.recorder is not None:
            check_end_rows_of(offs, rows)
        # Values beyond int32 must not wrap around: they are past the rows of any tensor.
        return offs if offs.dtype == torch.int32 else offs.clamp(_INT32.min, _INT32.max).int()
    if not hasattr(offs, "__len__"):
        raise TypeError(f"offs must hold the end row of each group, got {offs!r}")
    values: list[int | np.integer[Any]] = list(offs)
    if len(values) < 1:
        raise ValueError("offs must have shape (G,) with G >= 1, got (0,)")
    for group, end in enumerate(values):
        if isinstance(end, (bool, np.bool_)) or not isinstance(end, (int, np.integer)):
            raise TypeError(f"offs must hold integers, got {end!r} at {group}")
    check_end_rows(values, rows)
    return host_integers(values, torch.int32, device)


def host_integers(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return integers of the host as a tensor on ``device``, without a synchronization."""
    # The default device may be a GPU, whose memory cannot be pinned.
    on_host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)
