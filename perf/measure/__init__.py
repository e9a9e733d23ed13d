"""Meters: how a contender is measured on a GPU, on a CPU, and on the emulator."""

from collections.abc import Mapping
from typing import Any

import torch

from .base import Meter

__all__ = ["Meter", "meter_of"]


def meter_of(backend: str, protocol: str, quick: bool, options: Mapping[str, Any]) -> Meter:
    """Return the meter of a backend.

    Args:
        backend: Name of the backend; ``""`` is the GPU, or the reference on a machine without one.
        protocol: One of ``measure.gpu.PROTOCOLS``.
        quick: True to measure few repeats.
        options: Options of the emulator.

    Raises:
        ValueError: The backend needs a GPU, and there is none.
    """
    if not backend:
        backend = "cuda" if torch.cuda.is_available() else "reference"
    if backend.startswith("emulated:"):
        from .emulator import EmulatorMeter

        return EmulatorMeter(backend, **options)
    if backend.startswith("reference"):
        from .cpu import CpuMeter

        return CpuMeter(backend, quick)
    if not torch.cuda.is_available():
        raise ValueError(f"backend {backend} needs a GPU, and torch sees none")
    from .gpu import GpuMeter

    return GpuMeter(protocol, quick)
