"""Find where numbers stop being finite in a model of grouped layers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..functional.nonfinite_flags import ROLES
from .statistics import Probe

_active: "detect_nonfinite | None" = None


class InspectableLayer(nn.Module):
    """Base class of the layers that ``detect_nonfinite`` and ``inspect_quantization`` look into."""

    #: Flags that ``detect_nonfinite`` gave the layer, one for each of ``ROLES``.
    _nonfinite: Tensor | None = None
    #: Returns the probe of a call, if ``inspect_quantization`` looks into the layer.
    _inspector: Callable[[], Probe | None] | None = None


def named_layers(model: nn.Module) -> dict[str, InspectableLayer]:
    """Return the grouped layers of ``model`` by name. Raise ValueError if there are none."""
    layers = {
        name or type(layer).__name__: layer
        for name, layer in model.named_modules()
        if isinstance(layer, InspectableLayer)
    }
    if not layers:
        raise ValueError("model holds no grouped layers")
    return layers


class detect_nonfinite:
    """Watch the grouped layers that run inside for NaN and infinities.

    A recipe lets non-finite numbers through to outputs and gradients
    (``Recipe.propagate_nonfinite``), but does not say where they arose. This block looks at the
    operands and results of each layer. Rows of the tail are ignored. For a weight that is quantized
    already it looks at the global scales.

    A flag for each layer and role is set on the layer's device, and no kernel waits for the host
    until ``report`` reads the flags. Every operand is read once more: use it to search, not to
    train.

        with grouped.inspect.detect_nonfinite(model) as detector:
          model(x, offs).sum().backward()
        detector.report()  # {"experts.down": ("input", "output")}

    Args:
        model: Module that holds the layers to watch, and names them. None watches all layers that
            run inside. Compiled calls need ``model``, and are compiled again inside.

    Raises:
        ValueError: ``model`` holds no grouped layers.
        RuntimeError: On entry, if another block is active. On a call of a compiled layer without
            ``model``.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._layers: list[tuple[str, InspectableLayer]] = (
            [] if model is None else list(named_layers(model).items())
        )
        self._flags: list[tuple[str, Tensor]] = []
        self._watches_all = model is None

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
        """Return the names of layers with non-finite numbers, and their roles (``ROLES``).

        Layers come in the order in which the model lists them, or in which they first ran. This
        reads the flags on the host, and so waits for the device. Calls inside and after the block
        add up.
        """
        flags = ((name, layer_flags.tolist()) for name, layer_flags in self._flags)
        return {
            name: tuple(role for role, is_set in zip(ROLES, layer_flags, strict=True) if is_set)
            for name, layer_flags in flags
            if any(layer_flags)
        }

    def _watch(self, name: str, layer: InspectableLayer, device: torch.device) -> None:
        layer._nonfinite = torch.zeros(len(ROLES), dtype=torch.bool, device=device)
        self._flags.append((name, layer._nonfinite))

    def _watch_running(self, layer: InspectableLayer, device: torch.device) -> None:
        """Watch a layer that runs, if all layers are watched."""
        if not self._watches_all:
            return
        if torch.compiler.is_compiling():
            raise RuntimeError("detect_nonfinite needs the model to watch a compiled layer")
        name = f"{type(layer).__name__} {len(self._layers)} ({layer.extra_repr()})"
        self._layers.append((name, layer))
        self._watch(name, layer, device)


def flags_of(layer: InspectableLayer, device: torch.device) -> Tensor | None:
    """Return the flags to set for this call of ``layer``, or None if no block is active."""
    if _active is not None and layer._nonfinite is None:
        _active._watch_running(layer, device)
    return layer._nonfinite
