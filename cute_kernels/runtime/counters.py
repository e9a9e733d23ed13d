"""Counters in a GPU's memory that every launch finds at zero, and leaves there.

A kernel that comes to no end takes the process's context along, so none is left half-way.
"""

import contextlib
import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from ptx_emulator.host.locks import ForkSafeLock

#: Counters of a device: of its streams, and of launches in graphs.
_COUNT = 1 << 16
_lock = ForkSafeLock()
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)


class Counters:
    """Those of one device, (1,) int32. No two launches that may overlap have the same one.

    Launches on a stream follow each other. A graph may be replayed beside others, so a launch that
    is captured has one of its own for good.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_stream: dict[int, Tensor] = {}
        self._all: Tensor | None = None
        self._numbers = itertools.count()

    def current(self) -> Tensor:
        stream = _stream_id(self._device)
        # CUDA captures nothing on the default stream: there is no need to ask.
        if stream and _is_capturing(self._device):
            return self._new()
        if stream and stream % 2 == 0:
            # Not one of PyTorch's, which last: another may get its name before its work is done.
            return self._cleared()
        counter = self._of_stream.get(stream)
        if counter is None:
            with _lock:
                if self._all is None:
                    self._all = torch.zeros(_COUNT, dtype=torch.int32, device=self._device)
                    _wait(self._device)
                counter = self._of_stream.setdefault(stream, self._new())
        return counter

    def _new(self) -> Tensor:
        number = next(self._numbers)
        # Made while a graph is captured, all would be cleared in each replay.
        return (
            self._cleared()
            if self._all is None or number >= _COUNT
            else self._all[number : number + 1]
        )

    def _cleared(self) -> Tensor:
        """One that is cleared before each launch: 2 us."""
        return torch.zeros(1, dtype=torch.int32, device=self._device)


@functools.cache
def counters(device: torch.device) -> Counters:
    """Those of a device, which stay: graphs have their addresses."""
    return Counters(device)


def _is_capturing(device: torch.device) -> bool:
    is_here = torch.cuda.current_device() == device.index
    with contextlib.nullcontext() if is_here else torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _stream_id(device: torch.device) -> int:
    return int(_current_stream(device.index)[0])


def _wait(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()
