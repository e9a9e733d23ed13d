"""Counters in a GPU's memory that are zero before and after every launch.

A kernel that does not finish destroys the process's context, so no counter stays half-way.
"""

import contextlib
import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from ptx_emulator.host.locks import ForkSafeLock

#: Number of counters of a device, for its streams and for launches in graphs.
_COUNT = 1 << 16
_lock = ForkSafeLock()
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)


class Counters:
    """Counters of one device, (1,) int32. No two launches that may overlap have the same counter.

    Launches on a stream follow each other. A graph may be replayed next to others, so a captured
    launch has a counter of its own forever.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream_counters: dict[int, Tensor] = {}
        self._all: Tensor | None = None
        self._numbers = itertools.count()

    def current(self) -> Tensor:
        """Return the counter of a launch on the current stream."""
        stream = _stream_id(self._device)
        # CUDA captures nothing on the default stream, so no check is needed.
        if stream and _is_capturing(self._device):
            return self._new()
        if stream and stream % 2 == 0:
            # This stream is not PyTorch's, whose streams live forever: another stream may get its
            # id before its work is done.
            return self._cleared()
        counter = self._stream_counters.get(stream)
        if counter is None:
            with _lock:
                if self._all is None:
                    self._all = torch.zeros(_COUNT, dtype=torch.int32, device=self._device)
                    _wait(self._device)
                counter = self._stream_counters.setdefault(stream, self._new())
        return counter

    def _new(self) -> Tensor:
        """Return a counter that no other launch uses."""
        number = next(self._numbers)
        # If all counters were created while a graph is captured, each replay would clear them.
        return (
            self._cleared()
            if self._all is None or number >= _COUNT
            else self._all[number : number + 1]
        )

    def _cleared(self) -> Tensor:
        """Return a counter that is cleared before each launch, which takes 2 us."""
        return torch.zeros(1, dtype=torch.int32, device=self._device)


@functools.cache
def counters(device: torch.device) -> Counters:
    """Return the counters of a device, which are never freed: graphs have their addresses."""
    return Counters(device)


def _is_capturing(device: torch.device) -> bool:
    """Return True if the current stream of the device is capturing a graph."""
    is_here = torch.cuda.current_device() == device.index
    with contextlib.nullcontext() if is_here else torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _stream_id(device: torch.device) -> int:
    """Return the id of the current stream."""
    return int(_current_stream(device.index)[0])


def _wait(device: torch.device) -> None:
    """Wait for the current stream."""
    torch.cuda.current_stream(device).synchronize()
