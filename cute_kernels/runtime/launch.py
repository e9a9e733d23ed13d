"""Launching kernels on a GPU or on the emulator."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .arch import Architecture, architecture, device_architecture
from .backend import Backend
from .compile import compile_kernel
from .counters import counters
from .spec import KernelSpec

#: SMs of the emulated GPU unless the user says otherwise: enough for persistent CTAs to share work.
EMULATED_SMS = 4


class Launcher:
    """Launcher of the kernels of one architecture on one device.

    Attributes:
        num_sms: Number of SMs of the device, the size of a persistent grid.
        bandwidth: Peak bytes per second of the device's memory. None for an emulated device.
        arch: Architecture whose kernels it runs, as in ``capability.ARCHITECTURES``.
        target: Target of the compilation.
    """

    def __init__(
        self,
        arch: Architecture,
        num_sms: int,
        emulation: dict[str, Any],
        device: torch.device | None = None,
        bandwidth: float | None = None,
    ) -> None:
        self._counters = None if device is None else counters(device)
        self.num_sms = num_sms
        self.bandwidth = bandwidth
        self.arch = arch.name
        self.target = arch
        self._emulation = emulation

    def kernel(self, spec: KernelSpec) -> Callable[..., object]:
        """Return the kernel of ``spec``, compiled if needed. It launches on the current stream."""
        kernel = compile_kernel(spec, self.target)
        # A kernel with dynamic scheduling takes a counter as its last argument.
        has_counter = getattr(spec, "uses_dynamic_scheduling", False)
        if not self.target.emulated:
            if not has_counter or self._counters is None:
                return kernel
            # Look the counter up per launch: a replayed call may run on another stream.
            current = self._counters.current
            return lambda *arguments: kernel(*arguments[:-1], current())
        import ptx_emulator as emulator

        def run(*arguments: Any) -> object:
            if has_counter:
                arguments = *arguments[:-1], torch.zeros(1, dtype=torch.int32, device="cpu")
            with emulator.options(**self._emulation):
                return kernel(*arguments)

        return run


@functools.lru_cache(maxsize=256)
def launcher(backend: Backend, device: torch.device) -> Launcher:
    """Return the launcher of a backend on a device."""
    if backend.is_emulated:
        options = {"num_sms": EMULATED_SMS, **dict(backend.emulation)}
        return Launcher(architecture(backend.name), options["num_sms"], options)
    properties = torch.cuda.get_device_properties(device)
    # Two transfers per memory clock, which is in kHz.
    bandwidth = 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8
    return Launcher(
        device_architecture(device), properties.multi_processor_count, {}, device, bandwidth
    )
