"""Modules on the meta device: check that a checkpoint sets all their tensors, and allocate them."""

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..ownership import retire
from ..tensor.dtensor_parts import is_distributed


class Allocator:
    """Allocation of the tensors of a module that are on the meta device.

    Args:
        module: The module.
        loaded: Ids of the tensors that the checkpoint sets.
        device: Device for them, or None if the module must not have any.

    Raises:
        TypeError: ``device`` is not a device.
        ValueError: A tensor is on the meta device, and ``device`` is None, or the checkpoint does
            not set it, or it is sharded. Or a tensor is on another device than ``device``.
    """

    def __init__(
        self,
        module: nn.Module,
        loaded: Container[int],
        device: torch.device | str | int | None,
    ) -> None:
        self._holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for m in module.modules():
            stores: tuple[dict[str, Any], ...] = (m._parameters, m._buffers)
            for tensors in stores:
                for name, t in tensors.items():
                    if t is not None:
                        self._holders.setdefault(id(t), []).append((tensors, name))
        self.device: torch.device | None = None
        if device is not None:
            self.device = _indexed(device)
            self._check_device(module)
        for name, t in _meta_tensors(module):
            self._check_meta(name, t, id(t) in loaded)

    def _check_device(self, module: nn.Module) -> None:
        """Raise ValueError if a tensor with values is on another device."""
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if not t.is_meta and t.device != self.device:
                raise ValueError(
                    f"{name} is on {t.device}, but device is {self.device}, which is for tensors "
                    "on the meta device: move the others there first"
                )

    def _check_meta(self, name: str, t: Tensor, is_loaded: bool) -> None:
        """Raise ValueError unless the tensor can be allocated and set."""
        if self.device is None:
            raise ValueError(
                f"{name} is on the meta device: pass device=..., on which load allocates what the "
                "checkpoint sets, or build the model on its device"
            )
        if not is_loaded:
            raise ValueError(
                f"{name} is on the meta device, but no checkpoint has it (it is not in the state "
                f"dict): build the module that has it again on {self.device}, or build the model "
                "with its parameters alone on the meta device, as by accelerate.init_empty_weights"
            )
        if is_distributed(t):
            raise ValueError(
                f"{name} is on the meta device and sharded: call load before it is sharded, or "
                "allocate it first"
            )

    def allocate(self, t: Tensor) -> Tensor:
        """Return a tensor for the values of ``t``: ``t``, or one in its place in all modules."""
        if not t.is_meta:
            return t
        new = torch.empty_like(t, device=self.device)
        if isinstance(t, nn.Parameter):
            new = nn.Parameter(new, requires_grad=t.requires_grad)
        retire([t], "checkpoint.load")
        for tensors, name in self._holders[id(t)]:
            tensors[name] = new
        return new

    def device_of(self, t: Tensor) -> torch.device:
        """Return the device of the values of ``t``."""
        if not t.is_meta:
            return t.device
        assert self.device is not None
        return self.device


def _indexed(device: torch.device | str | int) -> torch.device:
    """Return a device with its index.

    Raises:
        TypeError: It is not a device.
        ValueError: It is the meta device, or its text is invalid.
    """
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"device must be a torch.device, a str or an int, got {device!r}")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a device, got {device!r}: {error}") from None
    if target.type == "meta":
        raise ValueError("device must be a device with memory, got 'meta'")
    return torch.empty(0, device=target).device


def _meta_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors on the meta device: parameters, buffers, and attributes."""
    for path, m in module.named_modules():
        for name, t in (*m._parameters.items(), *m._buffers.items(), *vars(m).items()):
            if isinstance(t, Tensor) and t.is_meta:
                yield ".".join(filter(None, (path, name))), t
