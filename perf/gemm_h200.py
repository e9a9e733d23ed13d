"""Time the sm_90a grouped GEMMs and torch's on an H200, the results checked first.

    python -m perf.gemm_h200 --case dsv3-up --tokens 16 512 [--product wgrad] [--json FILE]

A time is the median of seven replays of a CUDA graph of many calls, 40 ms or more, by turns with
what it is compared with: the sustained rate of a power-limited GPU. "mhz" and "watts" are means
over the replays. "op" is the whole op: the expand pass and the GEMM. Weights are larger than the L2
cache in all of these cases. The environment variable COMMIT names the code where git cannot.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import statistics
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import cute_kernels  # noqa: F401  (registers the ops)
from cute_kernels.gemm.heuristics import choose_config
from cute_kernels.gemm.hopper.config import HOPPER_TILE_SHAPES, ExpandConfig, HopperGemmConfig
from cute_kernels.gemm.hopper.heuristics import estimated_hopper_cycles
from cute_kernels.runtime.backend import active_backend
from cute_kernels.runtime.launch import launcher
from perf.gemm_cases import CASES, PRODUCTS, Case
from perf.power import PowerMeter

if TYPE_CHECKING:
    from collections.abc import Callable

    from cute_kernels.gemm.config import TileShape

_REPLAYS = 7
_REPLAY_SECONDS = 0.04
#: Of replays before those that count: until clocks have settled.
_WARM_UP_SECONDS = 0.4


def graph_of(run: Callable[[], object], seconds: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of many calls, and how many."""
    run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def capture(calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                run()
        return graph

    probe = capture(3)
    probe.replay()
    calls = max(3, int(seconds * 1e6 / (replay_us(probe) / 3)) + 1)
    return capture(calls), calls


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def sustained(runs: list[Callable[[], object]]) -> list[tuple[float, dict[str, int]]]:
    """Median microseconds of one call of each, and clock and power.

    Graphs are replayed by turns in changing order: what ran before leaves more or less power.
    """
    graphs = [graph_of(run, _REPLAY_SECONDS) for run in runs]
    order = list(range(len(runs)))
    shuffle = random.Random(0).shuffle
    for index in order * math.ceil(_WARM_UP_SECONDS / _REPLAY_SECONDS / len(runs)):
        replay_us(graphs[index][0])
    times: list[list[float]] = [[] for _ in runs]
    meters = [PowerMeter() for _ in runs]
    for _ in range(_REPLAYS):
        shuffle(order)
        for index in order:
            graph, calls = graphs[index]
            with meters[index]:
                times[index].append(replay_us(graph) / calls)
    return [
        (statistics.median(mine), meter.result()) for mine, meter in zip(times, meters, strict=True)
    ]


class Contender(NamedTuple):
    """Something to time.

    Attributes:
        what: its name.
        run: one call.
        more: facts to report with the result.
    """

    what: str
    run: Callable[[], object]
    more: dict[str, Any]


class Bench:
    """Runs cases and collects results.

    Args:
        tiles: names of tiles to time beside the one that is chosen.
        path: file that results are appended to as JSON lines, or None.
    """

    def __init__(self, tiles: list[str], path: str | None):
        self.tiles = tiles
        self.path = path
        self.device = torch.device("cuda", 0)
        self.launch = launcher(active_backend(self.device), self.device)
        self.facts = machine_facts()

    def time(self, case: Case, contenders: list[Contender]) -> None:
        """Time all of them together."""
        results = sustained([contender.run for contender in contenders])
        for contender, (us, power) in zip(contenders, results, strict=True):
            self.report(case, contender.what, us, **power, **contender.more)

    def report(self, case: Case, what: str, us: float, **more: Any) -> None:
        """Print a result and keep it."""
        weight_bytes = case.groups * case.n * case.k * (0.5625 if "nvfp4" in what else 2)
        result = {
            "case": case.name,
            "product": case.product,
            "tokens": case.tokens,
            "skewed": case.skewed,
            "what": what,
            "us": round(us, 1),
            "tflops": round(case.flops / us * 1e-6, 1),
            "weight_tbs": round(weight_bytes / us * 1e-6, 2),
            **more,
        }
        print(json.dumps(result), flush=True)
        if self.path is not None:
            with Path(self.path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(result | self.facts) + "\n")

    def configs(self, case: Case, operand: str) -> list[HopperGemmConfig]:
        """The chosen configuration, then those with the tiles that were asked for."""
        problem = case.problem(operand)
        base = HopperGemmConfig(
            operand,
            problem.grouping,
            tile=HopperGemmConfig.any_tile(problem.grouping),
            row_scaled=operand == "nvfp4" and not case.is_wgrad,
            transpose_b=operand != "nvfp4" and case.product == "dgrad",
        )
        best = choose_config(base, problem, self.launch.num_sms, cost=estimated_hopper_cycles)
        tiles = [
            tile
            for tile in HOPPER_TILE_SHAPES
            if base.takes(tile) and tile != best.tile and tile_name(tile) in self.tiles
        ]
        return [best, *(dataclasses.replace(base, tile=tile) for tile in tiles)]

    def nvfp4(self, case: Case) -> None:
        """The op, the GEMM with each tile, and the expand pass."""
        out = torch.zeros(case.out_shape, dtype=torch.bfloat16, device=self.device)
        a, b = case.nvfp4()
        op = torch.ops.cute_kernels.m_grouped_gemm_nvfp4_out
        args: tuple[Any, ...] = (*a, *b, case.offs, None, None, True, torch.bfloat16)
        if case.is_wgrad:
            op = torch.ops.cute_kernels.k_grouped_gemm_nvfp4_out
            args = (*a, *b, case.offs, None, torch.bfloat16)
        op(*args, out=out)
        errors = [relative_error(out[at], want) for at, want in case.expected_nvfp4(a, b)]
        assert max(errors) < 4e-3, f"{case}: relative errors {errors}"
        contenders = [Contender("nvfp4 op", lambda: op(*args, out=out), {"error": max(errors)})]
        expand = self.launch.kernel(ExpandConfig(is_ragged=not case.is_wgrad))
        packed, offs = (b, None) if case.is_wgrad else (a, case.offs)
        shape = (packed[0].shape[0], packed[0].shape[1] * 2)
        values = torch.empty(shape, dtype=torch.float16, device=self.device)
        sms = self.launch.num_sms

        def run_expand() -> None:
            expand(*packed[:2], offs, values, sms)

        # It bounds memory and leaves power to others: alone.
        self.time(case, [Contender("nvfp4 expand", run_expand, {})])
        operands = (*a, values, None, b[2]) if case.is_wgrad else (values, None, a[2], *b)
        got = torch.zeros_like(out)
        for config in self.configs(case, "nvfp4"):
            kernel = self.launch.kernel(config)

            def run_gemm(kernel: Any = kernel) -> None:
                kernel(*operands, case.offs, None, None, got, sms)

            got.zero_()
            run_gemm()
            assert torch.equal(got, out), f"{config.tile} gives other bits"
            contenders.append(Contender("nvfp4 gemm", run_gemm, {"tile": tile_name(config.tile)}))
        self.time(case, contenders)

    def bf16(self, case: Case) -> None:
        """Ours with each tile, and torch._grouped_mm."""
        a, b, run_torch = case.plain()
        sms = self.launch.num_sms
        want = run_torch()
        out = torch.empty_like(want)
        contenders = [Contender("bf16 torch._grouped_mm", run_torch, {})]
        for config in self.configs(case, "bfloat16"):
            kernel = self.launch.kernel(config)

            def run(kernel: Any = kernel) -> None:
                kernel(a, None, None, b, None, None, case.offs, None, None, out, sms)

            out.zero_()
            run()
            error = relative_error(out, want.float())
            assert error < 4e-3, f"{config}: relative error {error}"
            facts = {"tile": tile_name(config.tile), "error": error}
            contenders.append(Contender("bf16 gemm", run, facts))
        self.time(case, contenders)


def tile_name(tile: TileShape) -> str:
    """A tile in short: M and N of a CTA, and CTAs of a cluster if there is more than one."""
    return f"{tile.m}x{tile.n}" + (f"x{tile.num_ctas}" if tile.num_ctas > 1 else "")


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``; NaN fails every comparison."""
    return float((got.float() - want).norm() / want.norm())


def machine_facts() -> dict[str, Any]:
    """What a result depends on beside the code."""
    query = "clocks.sm,clocks.mem,clocks.max.sm,power.limit,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    clocks = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    commit = (
        os.environ.get("COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        query: clocks.splitlines()[0],
        "torch": torch.__version__,
        "commit": commit.strip(),
    }


def main() -> None:
    """Time what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", default=["dsv3-up"], choices=CASES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128, 512])
    parser.add_argument("--kind", nargs="+", default=["nvfp4", "bf16"], choices=["nvfp4", "bf16"])
    parser.add_argument("--product", nargs="+", default=["fprop"], choices=PRODUCTS)
    parser.add_argument("--skewed", action="store_true", help="groups of very different sizes")
    parser.add_argument("--tiles", nargs="+", default=[], help="more tiles to time: 128x256x2")
    parser.add_argument("--json", help="append results to this file")
    options = parser.parse_args()
    bench = Bench(options.tiles, options.json)
    for choice in itertools.product(options.case, options.tokens, options.product):
        for kind in options.kind:
            getattr(bench, kind)(Case(*choice, options.skewed))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
