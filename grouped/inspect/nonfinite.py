"""Finds where numbers stop being finite in a model of grouped layers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..tensor.grouped_tensor import GroupedTensor

if TYPE_CHECKING:
    from .statistics import Probe

#: What is looked at in each layer, in the order of ``detect_nonfinite.report``.
ROLES = ("input", "weight", "output", "grad_output")

_active: "detect_nonfinite | None" = None


class Watched(nn.Module):
    """Base of the layers that ``detect_nonfinite`` watches and ``inspect`` looks into."""

    #: The flags that the one set up, one for each of ``ROLES``.
    _nonfinite: Tensor | None = None
    #: What gives what the other looks at a call with, if it does.
    _lens: "Callable[[], Probe | None] | None" = None


def named_layers(model: nn.Module) -> dict[str, Watched]:
    """The layers of ``model`` by name; there must be one."""
    found = {
        name or type(layer).__name__: layer
        for name, layer in model.named_modules()
        if isinstance(layer, Watched)
    }
    if not found:
        raise ValueError("model holds no grouped layers")
    return found


class detect_nonfinite:
    """Watch the grouped layers that run inside for NaN and infinities.

    A recipe lets what is not finite through to outputs and gradients
    (``Recipe.propagate_nonfinite``), but does not say where it arose. This looks at what enters and
    leaves each layer. Rows of the tail are passed over. Of a weight that is quantized already it
    sees the second-level scales.

    A flag for each layer and role is set on the layer's device, and no kernel waits for the host
    until ``report`` reads them. One more read of every operand: for looking, not for training.

      with grouped.debug.detect_nonfinite(model) as found:
        model(x, offs).sum().backward()
      found.report()  # {"experts.down": ("input", "output")}

    Args:
        model: what holds the layers to watch, and names them; all layers that run inside if
            None. Compiled calls need it, and are compiled anew inside.

    Raises:
        ValueError: ``model`` holds no grouped layers.
        RuntimeError: on entry, inside another one; on a call of a compiled layer without
            ``model``.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._layers: list[tuple[str, Watched]] = (
            [] if model is None else list(named_layers(model).items())
        )
        self._flags: list[tuple[str, Tensor]] = []
        self._takes_all = model is None

    def __enter__(self) -> "detect_nonfinite":
        global _active
        if _active is not None:
            raise RuntimeError("detect_nonfinite is active already")
        for name, layer in self._layers:
            self._watch(name, layer, next(layer.parameters()).device)
        _active = self
        return self

    def __exit__(self, *exception: object) -> None:
        global _active
        _active = None
        for _, layer in self._layers:
            layer._nonfinite = None

    def report(self) -> dict[str, tuple[str, ...]]:
        """The layers where something was not finite, by name, and what it was (``ROLES``).

        In the order in which the model lists its layers, or in which they first ran. Reads the
        flags on the host, and so waits for the device. Calls inside and after the block add up.
        """
        found = ((name, flags.tolist()) for name, flags in self._flags)
        return {
            name: tuple(role for role, is_set in zip(ROLES, sets, strict=True) if is_set)
            for name, sets in found
            if any(sets)
        }

    def _watch(self, name: str, layer: Watched, device: torch.device) -> None:
        layer._nonfinite = torch.zeros(len(ROLES), dtype=torch.bool, device=device)
        self._flags.append((name, layer._nonfinite))

    def _meet(self, layer: Watched, device: torch.device) -> None:
        """Watch a layer that runs, if all are watched."""
        if not self._takes_all:
            return
        if torch.compiler.is_compiling():
            raise RuntimeError("detect_nonfinite needs the model to watch a compiled layer")
        name = f"{type(layer).__name__} {len(self._layers)} ({layer.extra_repr()})"
        self._layers.append((name, layer))
        self._watch(name, layer, device)


def flags_of(layer: Watched, device: torch.device) -> Tensor | None:
    """The flags to set for this call of ``layer``; None if nobody watches."""
    if _active is not None and layer._nonfinite is None:
        _active._meet(layer, device)
    return layer._nonfinite


def watch(flags: Tensor, x: Tensor, weights: Sequence[Tensor], y: Tensor, offs: Tensor) -> Tensor:
    """Set the flags of one call, and those of its backward pass when that runs.

    Returns:
        ``y``.
    """
    note(flags, x, weights, y, offs)
    return _WatchGradient.apply(y, flags, offs)


@torch.no_grad()
def note(flags: Tensor, x: Tensor, weights: Sequence[Tensor], y: Tensor, offs: Tensor) -> None:
    """Set the flags of one forward pass; arguments as of ``watch``."""
    live = _live(x, offs)
    bad_weight = torch.stack([_holds_nonfinite(w) for w in weights]).any()
    _set(flags, "input", _rows_hold_nonfinite(x, live))
    _set(flags, "weight", bad_weight)
    _set(flags, "output", _rows_hold_nonfinite(y, live))


@torch.no_grad()
def note_gradient(flags: Tensor, dy: Tensor, offs: Tensor) -> None:
    """Set the flag of the gradient of the output."""
    _set(flags, "grad_output", _rows_hold_nonfinite(dy, _live(dy, offs)))


def _live(x: Tensor, offs: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) < offs[-1]


def _set(flags: Tensor, role: str, bad: Tensor) -> None:
    flags[ROLES.index(role)].logical_or_(bad)


def _rows_hold_nonfinite(x: Tensor, live: Tensor) -> Tensor:
    return (~x.isfinite().all(dim=-1) & live).any()


def _holds_nonfinite(weight: Tensor) -> Tensor:
    if isinstance(weight, GroupedTensor):
        copy = weight.rowwise or weight.columnwise
        # What decodes a quantized weight last is not finite if anything of it was not.
        weight = weight if copy is None else copy.operand[1][-1]
    return ~weight.isfinite().all()


class _WatchGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, flags: Tensor, offs: Tensor) -> Tensor:
        # Not saved for backward: other calls set flags in between.
        ctx.flags = flags
        ctx.save_for_backward(offs)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        note_gradient(ctx.flags, dy, *ctx.saved_tensors)
        return dy, None, None
