"""Check group boundaries on a GPU, without a synchronization until the result is read."""

import sys
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

import cute_kernels
from cute_kernels.ops.checks import EndRowChecks

#: Broken rules, by their numbers in a code.
_RULES = (
    "an end row is negative",
    "the end rows decrease",
    "the last end row is past the {rows} rows of the tensor",
)
_NONE = torch.iinfo(torch.int64).max
#: Folders of this package, of cute_kernels and of PyTorch: the user's code is elsewhere.
_INTERNAL = (
    str(Path(__file__).parents[1]),
    *(module.__path__[0] for module in (cute_kernels, torch)),
)


class check_offsets:
    """Check ``offs`` on a GPU in all calls inside the block, without a synchronization.

    CPU tensors and host lists are checked in every call. Values on a GPU are never read: kernels
    clamp them, and wrong ones give wrong or zero rows. Inside this block each call with ``offs``
    launches a few small kernels that record the first broken rule on the device. The end of the
    block reads the record and raises, and so does ``check()``.

        with grouped.inspect.check_offsets():
          y = layer(x, offs)

    The rules are those of ``grouped.quantize``: end rows are not negative, do not decrease, and the
    last one is within the rows of the tensor. If the last one is smaller, the rows after it are the
    tail of a capacity buffer.

    Inside a CUDA graph each replay is checked, if the block was entered before the capture on the
    same device. Compiled code is checked when it runs. Calls of all threads count. Each call takes
    about 0.2 ms of the host (H100, 2026-11-27) and adds a record of one line to its memory.

    Raises:
        ValueError: At the end of the block or in ``check()``, if a call broke a rule. The message
            names the first such call.
        RuntimeError: Another block is active, or a graph is captured on a device that had no call
            before the capture.
    """

    def __init__(self) -> None:
        #: () int64 for each device: the smallest code of a broken rule. A code is the number of the
        #: call times the number of rules, plus the rule.
        self._codes: dict[torch.device, Tensor] = {}
        #: Location and rows of each call.
        self._calls: list[tuple[str, int, int]] = []

    def __enter__(self) -> "check_offsets":
        if EndRowChecks.recorder is not None:
            raise RuntimeError("grouped.inspect.check_offsets is active already")
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._device_code(torch.device("cuda", torch.cuda.current_device()))
        EndRowChecks.recorder = self._record
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        EndRowChecks.recorder = None
        if kind is None:
            self.check()

    def check(self) -> None:
        """Wait for the device, and raise ValueError if a call broke a rule.

        A second call reports only later calls with ``offs``.
        """
        code = min(map(int, self._codes.values()), default=_NONE)
        for device_code in self._codes.values():
            device_code.fill_(_NONE)
        if code == _NONE:
            return
        number, rule = divmod(code, len(_RULES))
        location, groups, rows = self._calls[number]
        raise ValueError(
            f"offs of {groups} groups broke a rule: {_RULES[rule].format(rows=rows)}; first in "
            f"call {number} since the block began, at {location}. offs are end rows: of counts "
            "grouped.compute_offsets makes them"
        )

    def _device_code(self, device: torch.device) -> Tensor:
        """Return the smallest code of a device, which the first call makes."""
        code = self._codes.get(device)
        if code is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "enter grouped.inspect.check_offsets before the capture of a graph, with "
                    f"{device} as current"
                )
            # A tensor made in inference mode cannot be written outside of it.
            with torch.inference_mode(False):
                code = torch.full((), _NONE, dtype=torch.int64, device=device)
            self._codes[device] = code
        return code

    def _record(self, offs: Tensor, rows: int) -> None:
        """Record on the device which rule the call broke, if any. The first of all calls stays."""
        with torch.no_grad():
            code, number = self._device_code(offs.device), len(self._calls)
            self._calls.append((_location(), offs.shape[0], rows))
            broken = torch.stack([(offs < 0).any(), (offs[1:] < offs[:-1]).any(), offs[-1] > rows])
            codes = torch.arange(len(_RULES), device=offs.device) + number * len(_RULES)
            torch.minimum(code, codes.masked_fill(~broken, _NONE).min(), out=code)


def _location() -> str:
    """Return file and line of the innermost frame outside of these packages and of PyTorch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
