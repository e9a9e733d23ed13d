"""Time the sm_90a grouped GEMMs and torch's on an H200, the results checked first.

    python -m perf.gemm_h200 --case dsv3-up --tokens 16 512 [--product wgrad] [--json FILE]
    python -m perf.gemm_h200 --tokens 16 128 512 --kind nvfp4 bf16 fp8 --routing zipf half empty

A time is the median of seven replays of a CUDA graph of many calls, 40 ms or more, by turns with
what it is compared with: the sustained rate of a power-limited GPU. "mhz" and "watts" are means
over the replays. "op" is the whole op: the GEMM, and the pass that expands or rearranges the tokens
before it. Weights are larger than the L2 cache in all of these cases. The environment variable
COMMIT names the code where git cannot.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import cute_kernels
from cute_kernels.gemm.choice import choose_config
from cute_kernels.gemm.sm90.config import SM90_TILES, Sm90GemmConfig
from cute_kernels.gemm.sm90.fp4.config import ExpandConfig
from cute_kernels.layout.shapes import PIECE_K, ceil_div
from cute_kernels.runtime.backend import active_backend
from cute_kernels.runtime.launch import launcher
from perf.gemm_cases import A_FORMAT, B_FORMAT, CASES, PRODUCTS, Case
from perf.measure import machine_facts, relative_error, sustained
from perf.routing import ROUTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from cute_kernels.gemm.problem import TileShape

#: Bytes of one element of the weights, block scales included.
_ELEMENT_BYTES = {"nvfp4": 0.5625, "w4a16": 0.5625, "fused": 0.5625, "bf16": 2.0, "fp8": 1.0}


class Contender(NamedTuple):
    """Something to time.

    Attributes:
        what: its name; the first word is the kind.
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

    def run(self, case: Case, kinds: list[str]) -> None:
        """Time all kinds of one case together."""
        contenders = [contender for kind in kinds for contender in getattr(self, kind)(case)]
        results = sustained([contender.run for contender in contenders])
        for contender, (us, power) in zip(contenders, results, strict=True):
            self.report(case, contender.what, us, **power, **contender.more)

    def report(self, case: Case, what: str, us: float, **more: Any) -> None:
        """Print a result and keep it."""
        # Weights of experts without rows are not read.
        groups = sum(map(bool, case.splits))
        weight_bytes = groups * case.n * case.k * _ELEMENT_BYTES[what.split()[0]]
        result = {
            "case": case.name,
            "product": case.product,
            "tokens": case.tokens,
            "routing": case.routing,
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

    def configs(self, case: Case, operand: str) -> list[Sm90GemmConfig]:
        """The chosen configuration, then those with the tiles that were asked for."""
        problem = case.problem(operand)
        base = Sm90GemmConfig(
            operand,
            problem.grouping,
            tile=Sm90GemmConfig.any_tile(problem.grouping),
            row_scaled=operand == "nvfp4" and not case.is_wgrad,
            transpose_b=operand != "nvfp4" and case.product == "dgrad",
        )
        best = choose_config(base, problem, self.launch.num_sms)
        tiles = [
            tile
            for tile in SM90_TILES
            if base.takes(tile) and tile != best.tile and tile_name(tile) in self.tiles
        ]
        return [best, *(dataclasses.replace(base, tile=tile) for tile in tiles)]

    def nvfp4(self, case: Case) -> list[Contender]:
        """The op, also with prepacked weights; the GEMM with each tile; the expand pass."""
        out = torch.zeros(case.out_shape, dtype=torch.bfloat16, device=self.device)
        a, b = case.nvfp4()
        op, args = case.call(a, b)
        op(*args, out=out)
        errors = [relative_error(out[at], want) for at, want in case.expected_nvfp4(a, b)]
        assert max(errors) < 4e-3, f"{case}: relative errors {errors}"
        got = torch.zeros_like(out)
        contenders = [Contender("nvfp4 op", lambda: op(*args, out=got), {"error": max(errors)})]
        if not case.is_wgrad:
            packed_weights = (cute_kernels.prepack(b[0]), *b[1:])
            _, packed_args = case.call(a, packed_weights, prepacked=True)
            op(*packed_args, out=got)
            assert torch.equal(got, out), "prepacked weights give other bits"

            def run_packed() -> None:
                op(*packed_args, out=got)

            contenders.append(Contender("nvfp4 prepacked op", run_packed, {}))
        expand = self.launch.kernel(ExpandConfig(is_ragged=not case.is_wgrad))
        packed, offs = (b, None) if case.is_wgrad else (a, case.offs)
        depth = ceil_div(packed[0].shape[1] * 2, PIECE_K) * PIECE_K
        values = torch.empty(len(packed[0]), depth, dtype=torch.float16, device=self.device)
        sms = self.launch.num_sms

        def run_expand() -> None:
            expand(*packed[:2], offs, values, sms)

        run_expand()
        contenders.append(Contender("nvfp4 expand", run_expand, {}))
        operands = (*a, values, None, b[2]) if case.is_wgrad else (values, None, a[2], *b)
        for config in self.configs(case, "nvfp4"):
            kernel = self.launch.kernel(config)

            def run_gemm(kernel: Any = kernel) -> None:
                kernel(*operands, case.offs, None, None, got, sms)

            got.zero_()
            run_gemm()
            assert torch.equal(got, out), f"{config.tile} gives other bits"
            contenders.append(Contender("nvfp4 gemm", run_gemm, {"tile": tile_name(config.tile)}))
        return contenders

    def w4a16(self, case: Case) -> list[Contender]:
        """The op beside bf16 activations."""
        if case.is_wgrad:
            return []
        _, b = case.nvfp4()
        options: dict[str, Any] = {"device": "cuda", "generator": case.generator}
        x = torch.randn(case.rows, case.depth, **options).bfloat16()
        out = torch.zeros(case.out_shape, dtype=torch.bfloat16, device=self.device)
        op, args = case.call(x, b)
        op(*args, out=out)
        errors = [relative_error(out[at], want) for at, want in case.expected_w4a16(x, b)]
        assert max(errors) < 4e-3, f"{case}: relative errors {errors}"
        facts = {"error": max(errors)}
        return [Contender("w4a16 op", lambda: op(*args, out=out), facts)]

    def fused(self, case: Case) -> list[Contender]:
        """Quantizing bf16 activations row by row and multiplying: in one op, and in two."""
        if case.is_wgrad:
            return []
        _, b = case.nvfp4()
        options: dict[str, Any] = {"device": "cuda", "generator": case.generator}
        x = torch.randn(case.rows, case.depth, **options).bfloat16()
        both, out = (
            torch.zeros(case.out_shape, dtype=torch.bfloat16, device=self.device) for _ in range(2)
        )
        ops: Any = torch.ops.cute_kernels
        quantized = (x, A_FORMAT.text, case.offs)
        parts = ops.grouped_quantize(*quantized)
        multiply, args = case.call(parts, b)
        texts = (A_FORMAT.text, B_FORMAT.text)
        fused = (x, b[0], case.offs, list(b[1:]), *texts, None, None, case.is_dgrad)

        def run_steps() -> None:
            ops.grouped_quantize_out(*quantized, out=parts)
            multiply(*args, out=both)

        def run_fused() -> None:
            ops.m_grouped_quantize_gemm_out(*fused, out=out)

        run_steps()
        run_fused()
        assert torch.equal(both, out), "one op gives other bits than two"
        return [
            Contender("fused quantize, then multiply", run_steps, {}),
            Contender("fused quantize and multiply", run_fused, {}),
        ]

    def bf16(self, case: Case) -> list[Contender]:
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
        return contenders

    def fp8(self, case: Case) -> list[Contender]:
        """torch._scaled_grouped_mm with a scale a row; of the m_grouped products alone."""
        if case.is_wgrad:
            return []
        run, expected = case.fp8()
        group = case.splits.index(max(case.splits))
        part = slice(case.ends[group] - case.splits[group], case.ends[group])
        error = relative_error(run()[part], expected(part, group))
        assert error < 1e-2, f"{case}: relative error {error}"
        return [Contender("fp8 torch._scaled_grouped_mm", run, {"error": error})]


def tile_name(tile: TileShape) -> str:
    """A tile in short: M and N of a CTA, CTAs of a cluster if there are two, f if it is fitted."""
    ctas = f"x{tile.num_ctas}" if tile.num_ctas > 1 else ""
    return f"{tile.m}x{tile.n}{ctas}{'f' * getattr(tile, 'fitted', False)}"


def main() -> None:
    """Time what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", default=["dsv3-up"], choices=CASES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128, 512])
    parser.add_argument("--kind", nargs="+", default=["nvfp4", "bf16"], choices=_ELEMENT_BYTES)
    parser.add_argument("--routing", nargs="+", default=["uniform"], choices=ROUTINGS)
    parser.add_argument("--product", nargs="+", default=["fprop"], choices=PRODUCTS)
    parser.add_argument("--tiles", nargs="+", default=[], help="more tiles to time: 128x256x2")
    parser.add_argument("--json", help="append results to this file")
    options = parser.parse_args()
    bench = Bench(options.tiles, options.json)
    choices = (options.case, options.tokens, options.product, options.routing)
    for choice in itertools.product(*choices):
        bench.run(Case(*choice), options.kind)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
