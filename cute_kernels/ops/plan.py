"""Plans: everything about an op call that follows from the metadata of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..layout.buffers import BufferSpec
from ..layout.shapes import PITCH_ALIGNMENT
from ..runtime.allocator import Allocator

#: Computes an op into its outputs: ``(op, outputs, **options)``. A runner holds no tensors.
Runner: TypeAlias = "Callable[..., None]"


class CallPlan:
    """The outputs of an op call and the function that computes them.

    Args:
        device: Device on which fresh outputs are allocated.
        alignment: Bytes to which kernels expect outputs to be aligned.
        outputs: Specs of the outputs.
        run: Computes the op into its outputs.
        zeroed: True zeroes all fresh outputs before ``run``, whatever their specs say.
        fills_fresh: True if ``run`` accepts ``fresh=True`` and then writes the zeros that the
            specs ask for.
    """

    def __init__(
        self,
        device: torch.device,
        alignment: int,
        outputs: Iterable[BufferSpec],
        run: Runner,
        *,
        zeroed: bool = False,
        fills_fresh: bool = False,
    ) -> None:
        self.outputs = tuple(outputs)
        self.run = run
        self.options = {"fresh": True} if fills_fresh else {}
        self._alignment = alignment
        self._allocator = Allocator(self.outputs, device)
        self._zeroed = [
            i for i, spec in enumerate(self.outputs) if zeroed or (spec.zeroed and not fills_fresh)
        ]

    def compute(self, op: object) -> list[Tensor]:
        """Allocate the outputs, compute the op into them and return them."""
        outputs = self._allocator.make()
        for i in self._zeroed:
            outputs[i].zero_()
        self.run(op, outputs, **self.options)
        return outputs

    def compute_into(self, op: object, targets: Sequence[Tensor], **options: bool) -> None:
        """Compute the op into the caller's tensors.

        A target that kernels cannot address is computed in a copy, then copied back.

        Args:
            op: The call.
            targets: Tensors of the shapes and dtypes of ``outputs``.
            **options: Options of the ``_out`` form, such as ``accumulate``.
        """
        buffers = [
            t if _is_writable(t, spec, self._alignment) else _copy(t, spec)
            for t, spec in zip(targets, self.outputs, strict=True)
        ]
        self.run(op, buffers, **options)
        for target, buffer in zip(targets, buffers, strict=True):
            if target is not buffer:
                target.copy_(buffer)


def _is_writable(target: Tensor, spec: BufferSpec, alignment: int) -> bool:
    """Return True if kernels can write a target in place.

    A dense copy of an output with padded rows may have a pitch that kernels cannot address.
    """
    has_pitch = spec.pitch is None or target.stride(-2) * target.itemsize % PITCH_ALIGNMENT == 0
    return has_pitch and target.data_ptr() % alignment == 0


def _copy(target: Tensor, spec: BufferSpec) -> Tensor:
    """Return a copy that kernels can write, including the elements that they leave alone."""
    return spec.allocate(target.device, False).copy_(target)
