"""Count what the kernels of quantization execute and move, per element, on the emulator.

    python -m perf.count_quantize [--rows 1024] [--cols 4096] [--groups 4] [--dtype bfloat16]
                                  [--arch sm_100a]

The emulator interprets PTX, so instructions are PTX instructions: a division or a reciprocal counts
as one and is about ten in machine code, moves that pack registers count and are mostly free there.
``issued`` is 32 x warp instructions, lanes that sit out included. ``sectors`` is bytes stored over
bytes of the 32-byte sectors that each store instruction touches; ``conflicts`` is shared-memory
wavefronts beyond one a request. Registers and stack are of the machine code.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

from cute_kernels import emulator
from cute_kernels.layout.shapes import ceil_div, code_pitch, num_slot_tiles, scale_tiles
from cute_kernels.quantize import (
    AmaxConfig,
    DbiasConfig,
    DequantizeConfig,
    QuantizeProblem,
    RowScaledConfig,
    TileConfig,
)

NUM_SMS = 4


@dataclasses.dataclass
class Counts:
    """Counts of one launch per element of the rows that exist."""

    instructions: float
    issued: float
    bytes_read: float
    bytes_written: float
    store_sectors: float
    conflicts: float


def buffers(rows: int, cols: int, groups: int) -> dict[str, torch.Tensor]:
    """Output buffers of the layout contract."""
    tiles = num_slot_tiles(rows, groups)
    return {
        "codes": torch.empty(rows, code_pitch(cols // 2), dtype=torch.uint8)[:, : cols // 2],
        "scales": torch.empty(tiles, scale_tiles(cols, 16), 512, dtype=torch.uint8),
        "codes_t": torch.empty(cols, 64 * tiles, dtype=torch.uint8),
        "scales_t": torch.empty(ceil_div(cols, 128), 2 * tiles, 512, dtype=torch.uint8),
    }


def arguments(config: Any, x: torch.Tensor, offs: torch.Tensor) -> tuple[Any, ...]:
    """What the compiled function of ``config`` takes."""
    out = buffers(x.shape[0], x.shape[1], len(offs))
    row_amax, group_amax = x.float().abs().amax(1), torch.full((len(offs),), float(x.abs().max()))
    if isinstance(config, RowScaledConfig):
        row_amax = group_amax if config.group_amax else row_amax
        return x, offs, row_amax, out["codes"], out["scales"], NUM_SMS
    if isinstance(config, AmaxConfig):
        amaxes = (row_amax if config.per_row else None, group_amax if config.per_group else None)
        return x, offs, *amaxes, NUM_SMS
    if isinstance(config, DbiasConfig):
        return x, offs, torch.empty(len(offs), x.shape[1]), NUM_SMS
    if isinstance(config, DequantizeConfig):
        names = ("codes_t", "scales_t") if config.columnwise else ("codes", "scales")
        amax = row_amax if config.row_scaled else group_amax
        return *(out[name] for name in names), amax, offs, torch.empty_like(x), 0, NUM_SMS
    rowwise = (out["codes"], out["scales"]) if config.rowwise else (None, None)
    columnwise = (out["codes_t"], out["scales_t"]) if config.columnwise else (None, None)
    amaxes = (
        row_amax if config.row_scaled else None,
        group_amax if config.uses_group_amax else None,
    )
    return x, offs, *amaxes, *rowwise, *columnwise, NUM_SMS


def count(config: Any, arch: str, x: torch.Tensor, offs: torch.Tensor) -> Counts:
    """Run ``config`` once on the emulator and count."""
    from perf.compiled import compile_for_emulator

    kernel = compile_for_emulator(config, arch)
    emulator.reset_stats()
    kernel.run(*arguments(config, x, offs))
    stats = emulator.stats()
    elements = int(offs[-1]) * x.shape[1]
    stored = stats["st_global_bytes"]
    return Counts(
        stats["thread_insns"] / elements,
        32 * stats["warp_insns"] / elements,
        (stats["ld_global_bytes"] + stats["tma_load_bytes"]) / elements,
        (stored + stats["tma_store_bytes"]) / elements,
        stored / max(1, 32 * stats["st_global_sectors"]),
        max(0.0, stats["smem_wavefronts"] / max(1, stats["smem_accesses"]) - 1),
    )


def variants(dtype: str, cols: int, arch: Any = "sm_100a") -> dict[str, Any]:
    """The measured kernels by name."""
    rows = RowScaledConfig.choose(QuantizeProblem(dtype, cols), arch)
    kernels: dict[str, Any] = {
        "amax, per group": AmaxConfig(dtype),
        "rowwise, amax given": TileConfig(dtype),
        "rowwise, two phases": TileConfig(dtype, compute_amax=True),
        "row-scaled, one read": rows,
        "rowwise by rows, amax given": dataclasses.replace(rows, group_amax=True),
        "columnwise, amax given": TileConfig(dtype, rowwise=False, columnwise=True),
        "row + column, amax given": TileConfig(dtype, columnwise=True),
        "row-scaled + column, two phases": TileConfig(
            dtype, columnwise=True, row_scaled=True, compute_amax=True
        ),
        "16x16 row + column, amax given": TileConfig(dtype, columnwise=True, square_blocks=True),
        "dequantize, rowwise": DequantizeConfig(dtype),
        "dequantize, row-scaled": DequantizeConfig(dtype, row_scaled=True),
        "dequantize, columnwise": DequantizeConfig(dtype, columnwise=True),
        "dbias": DbiasConfig(dtype),
    }
    # Those without the field have one code for all architectures.
    return {
        name: dataclasses.replace(config, arch=arch) if hasattr(config, "arch") else config
        for name, config in kernels.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--groups", type=int, default=4, help="of equal size")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--arch", default="sm_100a", choices=("sm_90a", "sm_100a"))
    options = parser.parse_args()
    emulator.install(arch=options.arch)
    from perf.compiled import compile_for_emulator
    from perf.cubin import read_resources

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.rows, options.cols, generator=generator)
    x = x.to(getattr(torch, options.dtype))
    ends = torch.arange(1, options.groups + 1) * options.rows // options.groups
    what = f"{options.rows} x {options.cols} {options.dtype}, {options.groups} groups"
    print(f"{what}, {options.arch}; per element")
    heads = ("instr", "issued", "read B", "written B", "sectors", "conflicts", "registers", "stack")
    print(f"{'kernel':34}" + "".join(f"{head:>11}" for head in heads))
    for name, config in variants(options.dtype, options.cols, options.arch).items():
        counts = count(config, options.arch, x, ends.int())
        resources = read_resources(compile_for_emulator(config, options.arch).cubin).values()
        cells = [f"{value:11.2f}" for value in dataclasses.astuple(counts)]
        cells.append(f"{max(r.registers for r in resources):11d}")
        cells.append(f"{max(r.stack_bytes for r in resources):11d}")
        print(f"{name:34}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
