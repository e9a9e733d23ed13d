"""Generated code: exact arithmetic, no spills, and what configurations allow."""

import dataclasses
import re

import pytest

from cute_kernels.formats import MXFP8, NVFP4
from cute_kernels.kernels.gemm.variants import kernel_specs
from cute_kernels.kernels.quantize.choose import choose_row_config
from cute_kernels.kernels.quantize.config import Prologue, QuantizeProblem, RowsConfig, TileConfig
from cute_kernels.kernels.quantize.pass_config import AmaxConfig
from cute_kernels.testing.compiled import compile_for_emulator
from tests.helpers import DTYPES

from .op_support import ARCHITECTURES, check_code
from .quantize_support import ARCH

BY_ROW = NVFP4(row_scaled=True)
ROW_SCALED, SQUARE = BY_ROW.text, NVFP4(block=(16, 16)).text
CONFIGS = [
    RowsConfig(ROW_SCALED, "bfloat16", warps_per_row=1),
    RowsConfig(ROW_SCALED, "bfloat16", warps_per_row=4),
    RowsConfig(ROW_SCALED, "bfloat16", warps_per_row=1, rows_per_warp=4),
    RowsConfig(ROW_SCALED, "float32", warps_per_row=16),
    TileConfig("nvfp4", "bfloat16"),
    TileConfig("nvfp4", "bfloat16", columnwise=True, compute_amax=True),
    TileConfig(ROW_SCALED, "bfloat16", columnwise=True, compute_amax=True),
    TileConfig(SQUARE, "bfloat16", columnwise=True),
    TileConfig("nvfp4", "float32", columnwise=True),
    AmaxConfig("bfloat16", per_row=True),
    *(
        RowsConfig(text, "bfloat16", warps_per_row=2, arch="sm_90a")
        for text in ("nvfp4", ROW_SCALED)
    ),
    TileConfig("nvfp4", "bfloat16", columnwise=True, arch="sm_90a"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_arithmetic_of_quantizers_is_exact(config):
    """No spills, flushed denormals, approximations or fused multiply-adds; hardware conversions."""
    ptx = check_code(config, config.arch)
    if not isinstance(config, AmaxConfig):
        for instruction in ("div.rn.f32", "rcp.rn.f32", "cvt.rn.satfinite.e4m3x2.f32"):
            assert instruction in ptx
        # sm_90a has no such conversion: fp16 instructions round its codes.
        assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx) == (config.arch == ARCH)


@pytest.mark.parametrize("dtype", [*DTYPES])
def test_tiles_in_flight_have_enough_barriers(dtype):
    """A team has two arrival barriers, so no more tiles than that may be in flight."""
    config = TileConfig("nvfp4", dtype)
    assert config.num_teams <= config.num_stages <= 2 * config.num_teams


def test_configurations_give_reasons():
    """Check that configurations give a reason for each problem that they cannot compute."""
    problem = QuantizeProblem("bfloat16", 4096)
    rows = choose_row_config(BY_ROW, problem)
    assert rows.can_implement(problem) and rows.warps_per_row == 2
    too_long = QuantizeProblem("bfloat16", 32784)
    refused = choose_row_config(BY_ROW, too_long).can_implement(too_long)
    assert not refused and "32784" in refused.reason
    assert "16" in RowsConfig(SQUARE, "bfloat16").can_implement(problem).reason
    odd = QuantizeProblem("bfloat16", 48)
    assert "32" in RowsConfig("mxfp8", "bfloat16").can_implement(odd).reason
    # Scales of a row are whole words.
    short = QuantizeProblem("float32", 64, prologue=Prologue("float32", "swiglu"))
    assert choose_row_config(MXFP8(), short, "sm_90a").rows_per_warp == 4


def properties(spec):
    """Return the class of a variant with each of its fields and values."""
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    return {(type(spec), *field) for field in fields.items()}


def cover_properties(specs):
    """Return few variants that together have every value of every field."""
    remaining, chosen = list(specs), []
    missing = set().union(*map(properties, remaining))
    while missing:
        best = max(remaining, key=lambda spec: len(properties(spec) & missing))
        chosen.append(best)
        missing -= properties(best)
    return chosen


GEMMS = [(arch, spec) for arch in ARCHITECTURES for spec in cover_properties(kernel_specs(arch))]


@pytest.mark.parametrize(("arch", "spec"), GEMMS, ids=str)
def test_arithmetic_of_gemms_is_exact(arch, spec):
    """Only reciprocals may be approximate or flush denormals; they are rounded afterwards."""
    ptx = compile_for_emulator(spec, arch).ptx
    assert ".entry" in ptx
    assert not re.findall(
        r"^.*(?:\.ftz|\.approx).*$", ptx.replace("rcp.approx.ftz", ""), re.MULTILINE
    )
