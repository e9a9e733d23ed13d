"""Checks of values on a GPU, recorded there and read at the end of a block."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

import cute_kernels

C = TypeVar("C", bound="DeviceChecks")

_NONE = torch.iinfo(torch.int64).max
#: Folders of this package, of cute_kernels and of PyTorch: the user's code is elsewhere.
_INTERNAL = (
    str(Path(__file__).parents[1]),
    *(module.__path__[0] for module in (cute_kernels, torch)),
)


class DeviceChecks:
    """Block that records on the device which call first broke a rule, without a synchronization.

    A subclass sets a recorder in ``_start``, removes it in ``_stop``, and calls ``_note`` from it.
    """

    def __init__(self) -> None:
        #: () int64 for each device: the smallest code of a broken rule. A code is the number of the
        #: call times the number of rules, plus the rule.
        self._codes: dict[torch.device, Tensor] = {}
        #: Location of each call, and what ``_describe`` needs.
        self._calls: list[tuple[str, tuple[Any, ...]]] = []

    def _start(self) -> None:
        """Have calls recorded, or raise RuntimeError if another block is active."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Have calls recorded no longer."""
        raise NotImplementedError

    def _rules(self) -> tuple[str, ...]:
        """Return the rules as they are broken."""
        raise NotImplementedError

    def _describe(self, rule: str, call: str, info: tuple[Any, ...]) -> str:
        """Return the message for a broken rule.

        Args:
            rule: One of ``_rules``.
            call: Number and location of the call.
            info: As given to ``_note``.
        """
        raise NotImplementedError

    def __enter__(self: C) -> C:
        self._start()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._device_code(torch.device("cuda", torch.cuda.current_device()))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._stop()
        if kind is None:
            self.check()

    def check(self) -> None:
        """Wait for the device, and raise ValueError if a call broke a rule.

        A second call reports only later calls.
        """
        code = min(map(int, self._codes.values()), default=_NONE)
        for device_code in self._codes.values():
            device_code.fill_(_NONE)
        if code == _NONE:
            return
        number, rule = divmod(code, len(self._rules()))
        location, info = self._calls[number]
        call = f"call {number} since the block began, at {location}"
        raise ValueError(self._describe(self._rules()[rule], call, info))

    def _note(self, broken: Tensor, *info: Any) -> None:
        """Record on the device which rule the call broke, if any. The first of all calls stays.

        Args:
            broken: (rules,) bool.
            info: Facts about the call for its message.
        """
        with torch.no_grad():
            code, number = self._device_code(broken.device), len(self._calls)
            self._calls.append((_location(), info))
            codes = torch.arange(len(broken), device=broken.device) + number * len(broken)
            torch.minimum(code, codes.masked_fill(~broken, _NONE).min(), out=code)

    def _device_code(self, device: torch.device) -> Tensor:
        """Return the smallest code of a device, which the first call makes."""
        code = self._codes.get(device)
        if code is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"enter grouped.inspect.{type(self).__name__} before the capture of a graph, "
                    f"with {device} as current"
                )
            # A tensor made in inference mode cannot be written outside of it.
            with torch.inference_mode(False):
                code = torch.full((), _NONE, dtype=torch.int64, device=device)
            self._codes[device] = code
        return code


def _location() -> str:
    """Return file and line of the innermost frame outside of these packages and of PyTorch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
