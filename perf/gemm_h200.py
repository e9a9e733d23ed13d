"""Time the sm_90a grouped GEMMs and torch's on an H200, the results checked first.

    python -m perf.gemm_h200 --case dsv3-up --tokens 1 16 128 512 [--tiles] [--json results.jsonl]

A time is the median of seven replays of a CUDA graph of many calls, 40 ms or more: the sustained
rate of a power-limited GPU. "op" is the whole op: the expand pass and the GEMM. NVFP4 operands are
random codes and block scales. Weights are larger than the L2 cache in all of these cases. The
environment variable COMMIT names the code where git cannot.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import cute_kernels  # noqa: F401  (registers the ops)
from cute_kernels.gemm.config import GemmProblem
from cute_kernels.gemm.heuristics import choose_config
from cute_kernels.gemm.hopper.config import HOPPER_TILE_SHAPES, ExpandConfig, HopperGemmConfig
from cute_kernels.gemm.hopper.heuristics import estimated_hopper_cycles
from cute_kernels.runtime.backend import active_backend
from cute_kernels.runtime.launch import launcher
from cute_kernels.shapes import ceil_div, num_slot_tiles, scale_tiles

if TYPE_CHECKING:
    from collections.abc import Callable

#: (experts, N, K).
CASES = {
    "dsv3-up": (32, 4096, 7168),
    "dsv3-down": (32, 7168, 2048),
    "mixtral-up": (8, 28672, 4096),
    "qwen3-up": (128, 1536, 2048),
}
_REPLAYS = 7
_REPLAY_SECONDS = 0.04


def median_us(run: Callable[[], object]) -> float:
    """Sustained microseconds of one call."""
    run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def graph_of(calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                run()
        return graph

    def time_of(graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    probe = graph_of(3)
    probe.replay()
    calls = max(3, int(_REPLAY_SECONDS * 1e6 / (time_of(probe) / 3)) + 1)
    graph = graph_of(calls)
    graph.replay()
    return statistics.median(time_of(graph) for _ in range(_REPLAYS)) / calls


@dataclasses.dataclass
class Case:
    """Operands of one m_grouped product with ``tokens`` rows in every group."""

    name: str
    tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        self.groups, self.n, self.k = CASES[self.name]
        self.rows = self.groups * self.tokens
        generator = torch.Generator("cuda").manual_seed(self.seed)
        device: dict[str, Any] = {"device": "cuda", "generator": generator}

        def tiles(*shape: int) -> Tensor:
            # E4M3 between 2^-2 and 2^6.
            out: Tensor = torch.randint(0x28, 0x68, shape, dtype=torch.uint8, **device)
            return out

        def codes(*shape: int) -> Tensor:
            out: Tensor = torch.randint(0, 256, shape, dtype=torch.uint8, **device)
            return out

        self.offs = torch.arange(1, self.groups + 1, device="cuda").int() * self.tokens
        k_tiles = scale_tiles(self.k, 16)
        self.a = (
            codes(self.rows, self.k // 2),
            tiles(num_slot_tiles(self.rows, self.groups), k_tiles, 512),
            torch.rand(self.rows, **device) + 0.5,
        )
        self.b = (
            codes(self.groups, self.n, self.k // 2),
            tiles(self.groups, ceil_div(self.n, 128), k_tiles, 512),
            torch.rand(self.groups, **device) + 0.5,
        )

    @property
    def flops(self) -> float:
        """Useful operations."""
        return 2.0 * self.rows * self.n * self.k

    def plain(self) -> tuple[Tensor, Tensor]:
        """bf16 operands of the same shape."""
        generator = torch.Generator("cuda").manual_seed(self.seed)
        options: dict[str, Any] = {
            "device": "cuda",
            "dtype": torch.bfloat16,
            "generator": generator,
        }
        a = torch.randn(self.rows, self.k, **options)
        return a, torch.randn(self.groups, self.n, self.k, **options)

    def problem(self, operand: str) -> GemmProblem:
        """The sizes as kernels see them."""
        return GemmProblem(
            operand, "m_grouped", "bfloat16", self.groups, self.rows, self.n, k=self.k
        )


class Bench:
    """Runs cases and collects results.

    Args:
        sweep: time every tile and not only the one that is chosen.
        path: file that results are appended to as JSON lines, or None.
    """

    def __init__(self, sweep: bool, path: str | None):
        self.sweep = sweep
        self.path = path
        self.device = torch.device("cuda", 0)
        self.launch = launcher(active_backend(self.device), self.device)
        self.facts = machine_facts()

    def report(self, case: Case, what: str, us: float, **more: Any) -> None:
        """Print one result and keep it."""
        weight_bytes = case.groups * case.n * case.k * (0.5625 if "nvfp4" in what else 2)
        result = {
            "case": case.name,
            "tokens": case.tokens,
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

    def configs(self, case: Case, operand: str, **fields: Any) -> list[HopperGemmConfig]:
        """The chosen configuration, then the others if all are to be timed."""
        tile = HopperGemmConfig.any_tile("m_grouped")
        base = HopperGemmConfig(operand, tile=tile, **fields)
        sms = self.launch.num_sms
        best = choose_config(base, case.problem(operand), sms, cost=estimated_hopper_cycles)
        if not self.sweep:
            return [best]
        tiles = [
            tile
            for tile in HOPPER_TILE_SHAPES
            if base.takes(tile)
            and tile != best.tile
            and case.tokens / 2 <= tile.n <= 4 * max(case.tokens, 8)
        ]
        return [best, *(dataclasses.replace(base, tile=tile) for tile in tiles)]

    def nvfp4(self, case: Case) -> None:
        """The op, the GEMM with each tile, and the expand pass."""
        out = torch.empty(case.rows, case.n, dtype=torch.bfloat16, device=self.device)
        op = torch.ops.cute_kernels.m_grouped_gemm_nvfp4_out
        args = (*case.a, *case.b, case.offs, None, None, True, torch.bfloat16)
        op(*args, out=out)
        want = expected_rows(case)
        error = relative_error(out, want)
        assert error < 4e-3, f"{case}: relative error {error}"
        self.report(case, "nvfp4 op", median_us(lambda: op(*args, out=out)), error=error)
        expand = self.launch.kernel(ExpandConfig(is_ragged=True))
        values = torch.empty(case.rows, case.k, dtype=torch.float16, device=self.device)
        sms = self.launch.num_sms

        def run_expand() -> None:
            expand(*case.a[:2], case.offs, values, sms)

        self.report(case, "nvfp4 expand", median_us(run_expand))
        for config in self.configs(case, "nvfp4", row_scaled=True):
            kernel = self.launch.kernel(config)
            got = torch.zeros_like(out)

            def run_gemm(kernel: Any = kernel, got: Tensor = got) -> None:
                kernel(values, None, case.a[2], *case.b, case.offs, None, None, got, sms)

            run_gemm()
            assert torch.equal(got, out), f"{config.tile} gives other bits"
            self.report(case, "nvfp4 gemm", median_us(run_gemm), tile=tile_name(config))

    def bf16(self, case: Case) -> None:
        """Ours with each tile, and torch._grouped_mm."""
        a, b = case.plain()
        sms = self.launch.num_sms
        want = torch._grouped_mm(a, b.transpose(1, 2), offs=case.offs)
        out = torch.empty_like(want)
        self.report(
            case,
            "bf16 torch._grouped_mm",
            median_us(lambda: torch._grouped_mm(a, b.transpose(1, 2), offs=case.offs)),
        )
        for config in self.configs(case, "bfloat16"):
            kernel = self.launch.kernel(config)

            def run(kernel: Any = kernel) -> None:
                kernel(a, None, None, b, None, None, case.offs, None, None, out, sms)

            out.zero_()
            run()
            error = relative_error(out, want.float())
            assert error < 4e-3, f"{config}: relative error {error}"
            self.report(case, "bf16 gemm", median_us(run), tile=tile_name(config), error=error)


def tile_name(config: HopperGemmConfig) -> str:
    """A tile in short."""
    return f"{config.tile.m}x{config.tile.n} c{config.consumers}"


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``; NaN fails every comparison."""
    return float((got.float() - want).norm() / want.norm())


def expected_rows(case: Case) -> Tensor:
    """The product in fp32 by way of dequantized operands and torch."""
    from cute_kernels.reference.groups import Groups
    from cute_kernels.reference.nvfp4 import block_values, linear_row_scales

    groups = Groups.ragged(case.offs.cpu(), case.rows)
    row, slot = (t.cuda() for t in groups.slot_of_row())
    slots = torch.zeros(case.rows, dtype=torch.int64, device="cuda")
    slots[row] = slot
    a = block_values(case.a[0], linear_row_scales(case.a[1], slots, case.k))
    out = torch.empty(case.rows, case.n, device="cuda")
    rows = torch.arange(case.n, device="cuda")
    for group in range(case.groups):
        part = slice(group * case.tokens, (group + 1) * case.tokens)
        b = block_values(case.b[0][group], linear_row_scales(case.b[1][group], rows, case.k))
        # Both are exact in fp16; the products are added in fp32.
        product = torch.mm(a[part].half(), b.half().T, out_dtype=torch.float32)
        out[part] = product * (case.a[2][part, None] / 2688) * (case.b[2][group] / 2688)
    return out


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
    parser.add_argument("--tiles", action="store_true", help="time every tile that makes sense")
    parser.add_argument("--json", help="append results to this file")
    options = parser.parse_args()
    bench = Bench(options.tiles, options.json)
    for name in options.case:
        for tokens in options.tokens:
            for kind in options.kind:
                getattr(bench, kind)(Case(name, tokens))
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
