"""NVIDIA's CuTe DSL example of a scaled grouped GEMM for MoE, counted as our kernels are.

    python -m perf.moe_example CUTLASS [--cases balanced ragged]

runs it from a checkout of CUTLASS on the emulator, compares its output, and writes the counts with
where they are from to ``perf/results/moe_example.json``, which ``count_gemm`` reads. The example
has no factor per row, and takes groups of whole 16 rows.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels import emulator
from cute_kernels.layout.shapes import ceil_div
from cute_kernels.layout.slots import slot_tile
from perf.gemm_counts import ARCH, CASES, NUM_SMS, Counts, Operands

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ROW_MULTIPLE", "count", "recorded"]

#: Rows of a group that the example takes are whole multiples of this.
ROW_MULTIPLE = 16
RECORD = Path(__file__).parent / "results" / "moe_example.json"
_SOURCES = "examples/python/CuTeDSL/cute"
_MODULE = "blackwell.kernel.moe.torch_scaled_grouped_mm"
#: Tiles of the example by name: M and N, and CTAs.
TILES = {"256x256": (256, 256, 2), "256x128": (256, 128, 2), "128x128": (128, 128, 1)}
_N = _K = 2048


def padded(sizes: Sequence[int]) -> list[int]:
    """Rows of groups that the example takes for ``sizes``."""
    return [ceil_div(rows, ROW_MULTIPLE) * ROW_MULTIPLE for rows in sizes]


def count(cutlass: Path, operands: Operands, tile: str) -> Counts:
    """Run the example on ``operands`` on the emulator, and compare its output.

    Args:
        cutlass: a checkout of CUTLASS.
        operands: of groups of whole 16 rows.
        tile: one of ``TILES``.
    """
    folder = cutlass / _SOURCES
    if not (folder / (_MODULE.replace(".", "/") + ".py")).is_file():
        raise FileNotFoundError(f"{cutlass} is no checkout of CUTLASS: it has no {_SOURCES}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    from cutlass import Float32, cute

    m, n, ctas = TILES[tile]
    kernel = importlib.import_module(_MODULE).ScaledGroupedGemmKernel(
        scenario="2Dx3D",
        sf_vec_size=16,
        accumulate_on_output=False,
        separate_tensormap_init=True,
        consistent_token_padding=False,
        acc_dtype=Float32,
        mma_tiler_mnk=(m, n, 256),
        cluster_shape_mnk=(ctas, 1, 1),
        use_2cta_instrs=ctas == 2,
        fixed_expert_cnt=None,
    )
    groups = len(operands.b)
    ones = torch.ones(groups)
    out = torch.empty(len(operands.a), operands.b.shape[1], dtype=torch.bfloat16)
    workspace = torch.full((kernel.get_workspace_size(groups),), 255, dtype=torch.uint8)
    k = operands.a.shape[1] * 2
    # The scales of each group's rows in whole tiles of 128, one group after the other.
    starts = [0, *operands.offs.tolist()]
    tiles = [
        operands.a_scales[slot_tile(start, g) :][: ceil_div(end - start, 128)]
        for g, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True))
    ]
    a_scales = torch.cat(tiles).view(-1, k // 16)
    b_scales = operands.b_scales.view(groups, -1)
    a, b = (x.view(torch.float4_e2m1fn_x2) for x in (operands.a, operands.b))
    arguments = (
        *(a, b.transpose(1, 2), *(x.view(torch.float8_e4m3fn) for x in (a_scales, b_scales))),
        *(out, operands.offs, workspace),
    )
    tensors = [_cute_tensor(x) for x in arguments]
    scales = (_cute_tensor(ones), _cute_tensor(ones))
    stream = importlib.import_module("cuda.bindings.driver").CUstream(0)
    clusters = NUM_SMS // ctas
    compiled = cute.compile(kernel, *tensors, clusters, stream, *scales)
    emulator.reset_stats()
    compiled(*tensors, stream, *scales)
    counts = Counts.of(emulator.stats(), operands)
    operands.check(out)
    return counts


def _cute_tensor(x: torch.Tensor) -> Any:
    """A tensor of dynamic layout."""
    from cutlass.cute.runtime import from_dlpack

    return from_dlpack(x).mark_layout_dynamic(leading_dim=x.stride().index(1))


def recorded(case: str, n: int, k: int) -> dict[str, Counts]:
    """The recorded counts of a case by tile; empty if there are none."""
    record = json.loads(RECORD.read_text())
    if [n, k] != record["shape_nk"]:
        return {}
    return {tile: Counts(**counts) for tile, counts in record["counts"].get(case, {}).items()}


def _commit(folder: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Run the example and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cutlass", type=Path, help="a checkout of CUTLASS")
    parser.add_argument("--commit", help="its commit, if the folder is no repository")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    emulator.install(arch=ARCH, num_sms=NUM_SMS)
    counts: dict[str, Any] = {}
    for case in options.cases:
        operands = Operands.random(padded(CASES[case]), _N, _K)
        for tile in TILES:
            found = count(options.cutlass, operands, tile)
            counts.setdefault(case, {})[tile] = vars(found)
            print(case, tile, found, flush=True)
    record = {
        "what": f"{_SOURCES}/{_MODULE.replace('.', '/')}.py of CUTLASS, on cute_kernels.emulator",
        "command": "python -m perf.moe_example " + " ".join(sys.argv[1:]),
        "cutlass": options.commit or _commit(options.cutlass),
        "nvidia-cutlass-dsl": metadata.version("nvidia-cutlass-dsl"),
        "cute_kernels": _commit(Path(__file__).parent),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "num_sms": NUM_SMS,
        "shape_nk": [_N, _K],
        "rows": {case: padded(CASES[case]) for case in options.cases},
        "counts": counts,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
