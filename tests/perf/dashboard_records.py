"""Made-up records for the tests of the dashboard: one of each kind, with known regressions."""

import dataclasses
import functools

from perf.records import RESULTS, Record, load

OLD, NEW = ("aaaaaaa", "2026-11-01T00:00:00+00:00"), ("bbbbbbb", "2026-11-02T00:00:00+00:00")
TOKENS = (1, 16, 128)
_BASE = {"model": "M", "layer": "up", "experts": 4, "n": 512, "k": 256, "routing": "balanced"}
_GPU = {"kind": "gpu", "gpu": "NVIDIA H200", "protocol": "sustained, L2-cold", "repeats": 7}
NVFP4 = "nvfp4:row_scaled x nvfp4"
#: Microseconds with one token an expert, then how they grew from the old commit.
_SPEEDS = {
    ("ours", NVFP4): (20.0, 1.0),
    ("ours, prepacked", NVFP4): (10.0, 1.5),
    ("ours, tile 128x16", NVFP4): (30.0, 1.0),
    ("torch", "bfloat16"): (40.0, 0.5),
}
COUNTS = {"warp instructions": 1000, "bytes read by TMA": 65536, "MMA operations": 0}


def _product(contender, fmt, tokens, value, commit, time):
    return Record(
        suite="gemm",
        case={**_BASE, "product": "fprop", "rows": 4 * tokens},
        contender=contender,
        format=fmt,
        what="time",
        value=value,
        unit="us",
        spread=value / 100,
        bytes=500_000 + tokens,
        flops=2 * 4 * tokens * 512 * 256,
        ceilings={"copy": 4.0, "bfloat16": 700.0},
        commit=commit,
        time=time,
        **_GPU,
    )


def _products():
    for (contender, fmt), (first, growth) in _SPEEDS.items():
        for tokens in TOKENS:
            now = first * (1 + tokens / 8)
            yield _product(contender, fmt, tokens, now / growth, *OLD)
            yield _product(contender, fmt, tokens, now, *NEW)


def _others():
    case = {"op": "quantize", "rows": 256, "cols": 512, "groups": 2, "directions": "row"}
    quantize = Record("quantize", case, "ours", "time", 5.0, "us", "gpu", "nvfp4", bytes=3e6)
    now = {"commit": NEW[0], "time": NEW[1]}
    gpu = {name: value for name, value in _GPU.items() if name != "kind"}
    ceilings = {"copy": 4.0}
    yield dataclasses.replace(quantize, **now, **gpu, spread=0.5, ceilings=ceilings)
    yield dataclasses.replace(quantize, **now, kind="cpu", machine="A machine", value=9000.0)
    for arch, factor in (("sm_90a", 1), ("sm_100a", 2)):
        for what, count in COUNTS.items():
            facts = {"what": what, "value": count * factor, "unit": "1", "gpu": f"{arch}, 8 SMs"}
            facts |= {"suite": "counts", "kind": "emulator", "protocol": "counted", **now}
            yield dataclasses.replace(quantize, **facts)


RECORDS = [*_products(), *_others()]


def current():
    """The records of the new commit."""
    return [record for record in RECORDS if record.commit == NEW[0]]


@functools.cache
def all_committed():
    """Those of the repository, read once."""
    return load(RESULTS)
