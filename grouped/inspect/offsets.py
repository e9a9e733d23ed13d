"""Checks of group boundaries on a GPU, without a synchronization until they are read."""

import sys
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

import cute_kernels
from cute_kernels.ops.checks import EndRowChecks

#: Rules by their numbers in a code: what ``offs`` broke.
_RULES = (
    "an end row is negative",
    "the end rows decrease",
    "the last end row is past the {rows} rows of the tensor",
)
_NONE = torch.iinfo(torch.int64).max
#: Folders of code that is not the user's.
_INTERNAL = (
    str(Path(__file__).parents[1]),
    *(module.__path__[0] for module in (cute_kernels, torch)),
)


class check_offsets:
    """Check ``offs`` on a GPU in all calls inside the block, without a synchronization.

    CPU tensors and host lists are checked in every call. Values on a GPU are never read: kernels
    clamp them, and wrong ones give wrong or zero rows. Inside this block each call with ``offs``
    launches a few small kernels that record the first broken rule on the device. The end of the
    block reads it and raises, and so does ``check()``.

      with grouped.inspect.check_offsets():
        y = layer(x, offs)

    The rules are those of ``grouped.quantize``: end rows are not negative, do not decrease, and the
    last one is within the rows of the tensor. If the last one is smaller, the rows behind it are
    the tail of a capacity buffer.

    Inside a CUDA graph each replay is checked, if the block was entered before the capture on the
    same device. Compiled code is checked when it runs. Calls of all threads count. Each call takes
    about 0.2 ms of the host (H100, 2026-11-27) and adds a record of one line to its memory.

    Raises:
        ValueError: at the end of the block or in ``check()``, a call broke a rule. The message
            names the first such call.
        RuntimeError: another block is active, or a graph is captured on a device that the block
            did not know.
    """

    def __init__(self) -> None:
        #: () int64 of each device, the smallest code of a broken rule: the call's number times the
        #: rules, plus the rule.
        self._first: dict[torch.device, Tensor] = {}
        #: Location and rows of each call.
        self._calls: list[tuple[str, int, int]] = []

    def __enter__(self) -> "check_offsets":
        if EndRowChecks.recorder is not None:
            raise RuntimeError("grouped.inspect.check_offsets is active already")
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._state(torch.device("cuda", torch.cuda.current_device()))
        EndRowChecks.recorder = self._record
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        EndRowChecks.recorder = None
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise ValueError if a call broke a rule; waits for the device.

        A second call starts anew.
        """
        codes = {device: int(first) for device, first in self._first.items()}
        for first in self._first.values():
            first.fill_(_NONE)
        code = min(codes.values(), default=_NONE)
        if code == _NONE:
            return
        number, rule = divmod(code, len(_RULES))
        location, groups, rows = self._calls[number]
        raise ValueError(
            f"offs of {groups} groups broke a rule: {_RULES[rule].format(rows=rows)}; first in call {number} since the block "
            f"began, at {location}. offs are end rows: of counts grouped.compute_offsets makes them"
        )

    def _state(self, device: torch.device) -> Tensor:
        first = self._first.get(device)
        if first is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"enter grouped.inspect.check_offsets before the capture of a graph, with {device} as current"
                )
            # A tensor that is made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                first = self._first[device] = torch.full(
                    (), _NONE, dtype=torch.int64, device=device
                )
        return first

    def _record(self, offs: Tensor, rows: int) -> None:
        """Note on the device which rule the call broke, if any: the first one of all calls stays."""
        with torch.no_grad():
            first, number = self._state(offs.device), len(self._calls)
            self._calls.append((_location(), offs.shape[0], rows))
            broken = torch.stack([(offs < 0).any(), (offs[1:] < offs[:-1]).any(), offs[-1] > rows])
            codes = torch.arange(len(_RULES), device=offs.device) + number * len(_RULES)
            torch.minimum(first, codes.masked_fill(~broken, _NONE).min(), out=first)


def _location() -> str:
    """File and line of the innermost frame that is not of these packages or of PyTorch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
