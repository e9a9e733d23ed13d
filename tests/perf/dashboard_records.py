"""Records and numerics of examples that the tests of the dashboard draw."""

import functools
from dataclasses import replace

import torch

import grouped
from perf.records import RESULTS, Record, load

OLD, NEW = ("aaaaaaa", "2026-11-01T00:00:00+00:00"), ("bbbbbbb", "2026-11-02T00:00:00+00:00")
TOKENS = (1, 16, 128)
NVFP4 = "nvfp4:row_scaled x nvfp4"
_CASE = {"model": "M", "layer": "up", "experts": 4, "n": 512, "k": 256, "routing": "balanced"}
_GPU = {"gpu": "NVIDIA H200", "protocol": "sustained, L2-cold", "repeats": 7}
#: Microseconds with one token an expert, then how they grew from the old commit.
_SPEEDS = {
    ("ours", NVFP4): (20.0, 1.0),
    ("ours, prepacked", NVFP4): (10.0, 1.5),
    ("ours, tile 128x16", NVFP4): (30.0, 1.0),
    ("torch", "bfloat16"): (40.0, 0.5),
}
COUNTS = {"warp instructions": 1000, "bytes read by TMA": 65536, "MMA operations": 0}


def _all_records():
    """Yield the records of all suites."""
    for (contender, fmt), (base, growth) in _SPEEDS.items():
        for tokens in TOKENS:
            case = {**_CASE, "product": "fprop", "rows": 4 * tokens}
            product = Record("gemm", case, contender, "time", base, "us", "gpu", fmt, **_GPU)
            work = {"bytes": 500_000 + tokens, "flops": 2 * 4 * tokens * 512 * 256}
            product = replace(product, ceilings={"copy": 4.0, "bfloat16": 700.0}, **work)
            now = base * (1 + tokens / 8)
            for value, (commit, time) in ((now / growth, OLD), (now, NEW)):
                yield replace(product, value=value, spread=value / 100, commit=commit, time=time)
    case = {"op": "quantize", "rows": 256, "cols": 512, "groups": 2, "directions": "row"}
    run = {"commit": NEW[0], "time": NEW[1]}
    quantize = Record("quantize", case, "ours", "time", 5.0, "us", "gpu", "nvfp4", bytes=3e6, **run)
    yield replace(quantize, spread=0.5, ceilings={"copy": 4.0}, **_GPU)
    yield replace(quantize, kind="cpu", machine="A machine", value=9000.0)
    for arch, factor in (("sm_90a", 1), ("sm_100a", 2)):
        for quantity, count in COUNTS.items():
            counts = {"suite": "counts", "kind": "emulator", "gpu": f"{arch}, 8 SMs", "unit": "1"}
            yield replace(quantize, quantity=quantity, value=count * factor, **counts)


RECORDS = list(_all_records())
CURRENT = [record for record in RECORDS if record.commit == NEW[0]]


def save_numerics(path):
    """Save the inspector's records of two steps of a layer with two experts."""
    torch.manual_seed(0)
    options = {"bias": False, "recipe": grouped.recipes.MXFP8(), "dtype": torch.bfloat16}
    model = torch.nn.ModuleDict({"up": grouped.nn.GroupedLinear(2, 64, 32, **options)})
    with grouped.inspect.inspect_quantization(model) as lens:
        for _ in range(2):
            model["up"](torch.randn(9, 64).bfloat16(), torch.tensor([3, 9], dtype=torch.int32))
            lens.step()
    lens.save(path, run="a run")


@functools.cache
def all_committed():
    return load(RESULTS)
