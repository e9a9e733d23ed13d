"""How much of a signal survives quantization, in decibels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import cute_kernels
import grouped
from grouped import recipes

if TYPE_CHECKING:
    from cute_kernels.formats import Format

__all__ = ["ROLES", "NoiseProbe", "snr_db"]

#: What enters the products of a grouped linear layer, forward and backward.
ROLES = ("weights", "activations", "gradients")


def snr_db(
    x: Tensor, fmt: Format | None, offs: Tensor | None = None, scale: Tensor | None = None
) -> float | None:
    """Signal-to-quantization-noise ratio ``10 log10(sum x^2 / sum (x - decode(encode(x)))^2)``.

    Args:
        x: (T, K) with ``offs``, or (G, N, K) without.
        fmt: the format; None for rounding to bf16.
        offs: (G,) end row of each group.
        scale: (G,) scales, of a format that takes them.

    Returns:
        Decibels, or None where there is no ratio: ``x`` is zero or loses nothing.
    """
    if fmt is None:
        decoded = x.bfloat16().float()
    else:
        # A property of the format, not of a kernel: the backends agree to the bit, and the
        # reference one is the fastest on a CPU.
        with cute_kernels.backend("reference"):
            decoded = grouped.quantize(x, fmt, offs=offs, scale=scale).dequantize(torch.float32)
    signal = x.double().square().sum().item()
    noise = (x.double() - decoded.double()).square().sum().item()
    return 10 * math.log10(signal / noise) if signal and noise else None


class NoiseProbe:
    """Records what enters the grouped linear layers of ``model`` inside a ``with`` block."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, grouped.nn.GroupedLinear)]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        #: Role, and what ``snr_db`` takes.
        self._seen: list[
            tuple[str, tuple[Tensor, Format | None, Tensor | None, Tensor | None]]
        ] = []

    def __enter__(self) -> NoiseProbe:
        self._handles = [layer.register_forward_hook(self._record) for layer in self._layers]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(layer, grouped.nn.GroupedLinear)
        assert isinstance(layer.weight, Tensor)
        recipe, (x, offs) = layer.recipe, args
        # A copy: the optimizer changes weights in place before ``mean_db`` looks at them.
        scales: list[Tensor | None] = [None] * 3
        if layer.scaling is not None:
            # Those of this call: the next step's has others.
            scales = [layer.scaling.scale(role).clone() for role in recipes.ROLES]
        weight = layer.weight.detach().clone()
        self._seen.append(("weights", (weight, recipe.weight, None, scales[1])))
        self._seen.append(("activations", (x.detach(), recipe.input, offs, scales[0])))

        def record_gradient(grad: Tensor) -> None:
            self._seen.append(("gradients", (grad.detach(), recipe.grad_output, offs, scales[2])))

        output.register_hook(record_gradient)

    def mean_db(self) -> dict[str, float | None]:
        """Mean ratio over the layers, by role; None for a role without one."""
        means: dict[str, float | None] = {}
        for role in ROLES:
            ratios = [snr_db(*seen) for name, seen in self._seen if name == role]
            known = [ratio for ratio in ratios if ratio is not None]
            means[role] = sum(known) / len(known) if known else None
        return means
