"""Check group boundaries on a GPU, without a synchronization until the result is read."""

from typing import Any

import torch
from torch import Tensor

from cute_kernels.ops.checks import EndRowChecks

from .device_checks import DeviceChecks


class check_offsets(DeviceChecks):
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

    def _start(self) -> None:
        """Set the recorder of end rows."""
        if EndRowChecks.recorder is not None:
            raise RuntimeError("grouped.inspect.check_offsets is active already")
        EndRowChecks.recorder = self._record

    def _stop(self) -> None:
        """Remove the recorder of end rows."""
        EndRowChecks.recorder = None

    def _rules(self) -> tuple[str, ...]:
        """Return the rules of ``grouped.quantize``, as they are broken."""
        return (
            "an end row is negative",
            "the end rows decrease",
            "the last end row is past the {rows} rows of the tensor",
        )

    def _describe(self, rule: str, call: str, info: tuple[Any, ...]) -> str:
        """Return the message for a broken rule."""
        groups, rows = info
        return (
            f"offs of {groups} groups broke a rule: {rule.format(rows=rows)}; first in {call}. "
            "offs are end rows: of counts grouped.compute_offsets makes them"
        )

    def _record(self, offs: Tensor, rows: int) -> None:
        with torch.no_grad():
            broken = torch.stack([(offs < 0).any(), (offs[1:] < offs[:-1]).any(), offs[-1] > rows])
        self._note(broken, offs.shape[0], rows)
