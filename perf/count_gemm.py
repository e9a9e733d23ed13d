"""Count what the sm_100a NVFP4 grouped GEMM executes and moves, on the emulator.

    python -m perf.count_gemm [--cases balanced ragged] [--tiles 256x256t 128x32s]
        [--sizes 432,80,160] [--n 2048] [--k 2048] [--example CUTLASS]

``work`` is MMA work over useful work: rows of tiles that no group has count as waste. ``load`` and
``store`` are megabytes by TMA, ``direct`` megabytes by ordinary stores. ``warp`` is thousands of
warp instructions, of PTX; a wait counts once, however long it lasts. ``waves`` is thousands of
shared-memory wavefronts of ordinary accesses. Registers are of the machine code. The tile that the
ops choose for these sizes is marked with a star; they know the rows of all groups together only.
Each product is first compared, on a sample, with what a tensor core gives.

Rows named "example" are NVIDIA's CuTe DSL example of a scaled grouped GEMM for MoE on the same
emulator: run where ``--example`` gives a checkout of CUTLASS, otherwise as ``perf.moe_example``
recorded it. Its work is that of rows rounded up to 16, over that of the rows that were asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from cute_kernels import emulator
from cute_kernels.gemm.choice import choose_config
from cute_kernels.gemm.problem import GemmArguments, GemmProblem
from cute_kernels.gemm.sm100.config import SM100_TILES, Sm100GemmConfig, Sm100Tile
from perf import moe_example
from perf.gemm_counts import ARCH, CASES, NUM_SMS, Counts, Operands


def tile_name(tile: Sm100Tile) -> str:
    """Size of a tile; an s if its operands are swapped, a t if only those of partial ones."""
    return f"{tile.m}x{tile.n}{'s' * tile.swap_ab}{'t' * tile.swap_partial}"


def run(operands: Operands, config: Sm100GemmConfig) -> torch.Tensor:
    """The (T, N) bf16 output of one launch."""
    from perf.compiled import compile_for_emulator

    rows, groups = len(operands.a), len(operands.b)
    ones = torch.full((max(rows, groups),), 2688.0)
    out = torch.empty(rows, operands.b.shape[1], dtype=torch.bfloat16)
    compile_for_emulator(config, ARCH).run(
        *GemmArguments(
            a=operands.a,
            a_scales=operands.a_scales,
            a_amax=ones[:rows],
            b=operands.b,
            b_scales=operands.b_scales,
            b_amax=ones[:groups],
            offs=operands.offs,
            bias=None,
            alpha=None,
            out=out,
            num_sms=NUM_SMS,
        )
    )
    return out


def report(tile: Sm100Tile, operands: Operands, is_chosen: bool) -> None:
    """Print one line of the table."""
    from perf.compiled import compile_for_emulator
    from perf.cubin import read_resources

    config = Sm100GemmConfig("nvfp4", row_scaled=True, tile=tile)
    emulator.reset_stats()
    out = run(operands, config)
    counts = Counts.of(emulator.stats(), operands)
    operands.check(out)
    resources = read_resources(compile_for_emulator(config, ARCH).cubin).values()
    registers = max(r.registers for r in resources)
    print(f"{tile_name(tile) + ' *' * is_chosen:18}{counts.cells()}{registers:8d}", flush=True)


def report_example(case: str, sizes: list[int], n: int, k: int, cutlass: Path | None) -> None:
    """Print what the example takes for rows that are rounded up to what it accepts."""
    if cutlass is None:
        found = moe_example.recorded(case, n, k)
    else:
        operands = Operands.random(moe_example.padded(sizes), n, k)
        found = {tile: moe_example.count(cutlass, operands, tile) for tile in moe_example.TILES}
    # Of the rows that were asked for, not of those that the example was given.
    surplus = sum(moe_example.padded(sizes)) / sum(sizes)
    for tile, counts in found.items():
        counts.work *= surplus
        print(f"{'example ' + tile:18}{counts.cells()}")


def report_case(
    case: str, sizes: list[int], n: int, k: int, tiles: list[str], cutlass: Path | None
) -> None:
    """Print the table of one list of group sizes."""
    print(f"{case}: rows {' '.join(map(str, sizes))}, N {n}, K {k}, {NUM_SMS} SMs")
    heads = ("work", "load", "store", "direct", "warp", "waves", "regs")
    print(f"{'tile':18}" + "".join(f"{head:>8}" for head in heads))
    report_example(case, sizes, n, k, cutlass)
    operands = Operands.random(sizes, n, k)
    problem = GemmProblem("nvfp4", "m_grouped", "bfloat16", len(sizes), sum(sizes), n, k=k)
    chosen = choose_config(Sm100GemmConfig("nvfp4", row_scaled=True), problem, NUM_SMS).tile
    for tile in SM100_TILES:
        if tile_name(tile) in tiles:
            report(tile, operands, tile == chosen)
    print()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["balanced", "ragged"])
    parser.add_argument("--sizes", help="rows of each group, instead of --cases")
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument("--k", type=int, default=2048)
    names = [tile_name(tile) for tile in SM100_TILES]
    parser.add_argument("--tiles", nargs="+", choices=names, default=names)
    parser.add_argument("--example", type=Path, help="a checkout of CUTLASS, to run its example")
    options = parser.parse_args()
    emulator.install(arch=ARCH, num_sms=NUM_SMS)
    cases = {case: CASES[case] for case in options.cases}
    if options.sizes:
        cases = {"given": [int(size) for size in options.sizes.split(",")]}
    for case, sizes in cases.items():
        report_case(case, sizes, options.n, options.k, options.tiles, options.example)


if __name__ == "__main__":
    main()
