"""What one kernel of quantization executes and moves, per element, on the emulator."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from cute_kernels.formats import NVFP4
from cute_kernels.layout.buffers import buffers
from cute_kernels.quantize import AmaxConfig, RowsConfig
from perf.compiled import compile_for_emulator
from perf.measure import emulator

NUM_SMS = 4


@dataclasses.dataclass
class Counts:
    """Counts of one launch per element of the rows that exist.

    Attributes:
        instructions: of threads, of PTX.
        bytes_read: from global memory.
        store_sectors: bytes stored over bytes of the 32-byte sectors that stores touch.
        conflicts: shared-memory wavefronts beyond one a request.
    """

    instructions: float
    bytes_read: float
    store_sectors: float
    conflicts: float


def arguments(config: Any, x: torch.Tensor, offs: torch.Tensor) -> tuple[Any, ...]:
    """What the compiled function of ``config`` takes."""
    specs = buffers(NVFP4(), x.shape, len(offs), columnwise=True)
    out = {name: spec.allocate(x.device, zeroed=False) for name, spec in specs.items()}
    row_amax, group_amax = x.float().abs().amax(1), torch.full((len(offs),), float(x.abs().max()))
    if isinstance(config, RowsConfig):
        amax = row_amax if config.computes_amax else group_amax
        return x, None, offs, amax, out["codes"], out["scales"], None, None, NUM_SMS
    if isinstance(config, AmaxConfig):
        amaxes = (row_amax if config.per_row else None, group_amax if config.per_group else None)
        return x, None, offs, *amaxes, NUM_SMS
    rowwise = (out["codes"], out["scales"]) if config.rowwise else (None, None)
    columnwise = (out["codes_t"], out["scales_t"]) if config.columnwise else (None, None)
    amaxes = (
        row_amax if config.uses_row_amax else None,
        group_amax if config.uses_group_amax else None,
    )
    return x, None, offs, *amaxes, *rowwise, *columnwise, *[None] * 5, NUM_SMS


def count(config: Any, arch: str, x: torch.Tensor, offs: torch.Tensor) -> Counts:
    """Run the kernel of ``config`` once and count."""
    kernel, given = compile_for_emulator(config, arch), arguments(config, x, offs)
    counts = emulator.count(lambda: kernel.run(*given))
    elements = int(offs[-1]) * x.shape[1]
    return Counts(
        counts["thread instructions"] / elements,
        (counts["bytes read"] + counts["bytes read by TMA"]) / elements,
        counts["bytes written"] / max(1, 32 * counts["sectors written"]),
        max(0.0, counts["shared wavefronts"] / max(1, counts["shared accesses"]) - 1),
    )
