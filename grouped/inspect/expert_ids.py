"""Check the ids of experts on a GPU, without a synchronization until the result is read."""

from typing import Any

import torch
from torch import Tensor

from ..functional.moe import ExpertIdChecks
from .device_checks import DeviceChecks


class check_expert_ids(DeviceChecks):
    """Check the ids and maps of ``grouped.moe`` in all eager calls inside the block.

    An id that is no expert gets no row, so a wrong one goes unnoticed: its expert is missing in the
    output. Inside this block each call launches a few small kernels that record the first broken
    rule on the device, without a synchronization. The end of the block reads the record and raises,
    and so does ``check()``.

        with grouped.inspect.check_expert_ids():
          y = grouped.moe(x, expert_ids, weights, w1, w2)

    The rules: ids are in [-1, num_experts), and entries of ``expert_map`` in [-1, E) for the E
    experts of ``w1``. Inside a CUDA graph each replay is checked, if the block was entered before
    the capture on the same device. Compiled code is not checked. Experts of transformers are.

    Raises:
        ValueError: At the end of the block or in ``check()``, if a call broke a rule. The message
            names the first such call.
        RuntimeError: Another block is active, or a graph is captured on a device that had no call
            before the capture.
    """

    def _start(self) -> None:
        """Set the recorder of ids."""
        if ExpertIdChecks.recorder is not None:
            raise RuntimeError("grouped.inspect.check_expert_ids is active already")
        ExpertIdChecks.recorder = self._record

    def _stop(self) -> None:
        """Remove the recorder of ids."""
        ExpertIdChecks.recorder = None

    def _rules(self) -> tuple[str, ...]:
        """Return the rules of ``grouped.moe``, as they are broken."""
        return (
            "an id is less than -1",
            "an id is not less than num_experts = {num_experts}",
            "expert_map has an entry outside of [-1, {experts}), the experts of w1",
        )

    def _describe(self, rule: str, call: str, info: tuple[Any, ...]) -> str:
        """Return the message for a broken rule."""
        shape, num_experts, experts = info
        broken = rule.format(num_experts=num_experts, experts=experts)
        return f"expert_ids {shape} broke a rule: {broken}; first in {call}"

    def _record(
        self, ids: Tensor, expert_map: Tensor | None, num_experts: int, experts: int
    ) -> None:
        with torch.no_grad():
            positions = ids.new_zeros(1) if expert_map is None else expert_map
            broken = torch.stack(
                [
                    (ids < -1).any(),
                    (ids >= num_experts).any(),
                    ((positions < -1) | (positions >= experts)).any(),
                ]
            )
        self._note(broken, tuple(ids.shape), num_experts, experts)
