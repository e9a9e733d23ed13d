"""FP8 with a scale per group: the quantizers and the dequantizer on the emulator, byte for byte.

The oracle is written out here: torch's conversions, with what they leave to the format's rule.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from cute_kernels import emulator
from cute_kernels.formats import FP8
from cute_kernels.quantize import DequantizeConfig, QuantizeProblem, RowsConfig, TileConfig
from perf.compiled import compile_for_emulator
from perf.cubin import read_resources
from tests.helpers import DTYPES, assert_same_bytes, ends, many_groups, poisoned, sample
from tests.kernels.op_support import ARCHITECTURES, MODE_IDS, MODES
from tests.kernels.quantize_support import NUM_SMS, Problem, special_input

FORMATS = {"e4m3": FP8(), "e5m2": FP8(torch.float8_e5m2)}
#: (rows of the buffer, K, end rows).
RAGGED = {
    "one row": (1, 16, ends(1)),
    "odd rows, odd strips": (300, 272, ends(7, 136, 137, 300)),
    "empty first, middle, last": (200, 48, ends(0, 0, 65, 65, 190, 190)),
    "all empty": (64, 32, ends(0, 0)),
    "tail": (260, 144, ends(3, 131, 219)),
}


def scales_of(amax: Tensor, fmt: FP8) -> tuple[Tensor, Tensor]:
    """scale and scale_inv of each group."""
    scale = (torch.tensor(fmt.element.max) / amax).clamp(max=torch.finfo(torch.float32).max)
    scale[(amax == 0) | ~amax.isfinite()] = 1.0
    return scale, 1.0 / scale


def codes_of(x: Tensor, scale: Tensor, fmt: FP8) -> Tensor:
    """Codes of rows under a scale a row; NaN is 0x7F."""
    y = (x.float() * scale[:, None]).clamp(-fmt.element.max, fmt.element.max)
    codes = y.to(fmt.dtype)
    return torch.where(y.isnan(), 0x7F, codes.view(torch.uint8)).view(fmt.dtype)


def amaxes(problem: Problem) -> Tensor:
    """Largest magnitude of each group but NaN."""
    out = torch.zeros(len(problem.groups))
    group = problem.groups.group_of_row()
    rows = problem.matrix.float().abs().nan_to_num(0.0, torch.inf).amax(1)
    for g in range(len(out)):
        if (group == g).any():
            out[g] = rows[group == g].amax()
    return out


def expected(problem: Problem, fmt: FP8, columnwise: bool) -> dict[str, Tensor]:
    """What a quantizer writes over poison; all of the buffers, the tail included."""
    out = poisoned_buffers(problem, fmt, columnwise)
    out["amax"] = amaxes(problem)
    out["scale"], out["scale_inv"] = scales_of(out["amax"], fmt)
    if columnwise:
        return out | {"codes_t": transposed(problem, fmt, out["codes_t"], out["scale"])}
    group = problem.groups.group_of_row()
    live = group < len(out["amax"])
    codes = out["codes"].flatten(0, -2)
    codes[live] = codes_of(problem.matrix[live], out["scale"][group[live]], fmt)
    return out


def transposed(problem: Problem, fmt: FP8, codes_t: Tensor, scale: Tensor) -> Tensor:
    """The transposed copy in slot columns, with zeros up to the last tile of each group."""
    group = problem.groups.group_of_row()
    for g in range(len(scale)):
        rows = (group == g).nonzero().flatten()
        if len(rows):
            first = 0 if problem.offs is None else (int(rows[0]) // 128 + g) * 128
            matrix = codes_t[g] if problem.offs is None else codes_t
            columns = matrix.view(torch.uint8)[:, first : first + (len(rows) + 127) // 128 * 128]
            columns.zero_()
            codes = codes_of(problem.matrix[rows], scale[g].expand(len(rows)), fmt)
            columns[:, : len(rows)] = codes.view(torch.uint8).T
    return codes_t


def poisoned_buffers(problem: Problem, fmt: FP8, columnwise: bool) -> dict[str, Tensor]:
    specs = problem.buffers(fmt, not columnwise, columnwise)
    return {name: poisoned(value) for name, value in specs.items() if value is not None}


def quantize(
    config: RowsConfig | TileConfig, problem: Problem, fmt: FP8, columnwise: bool = False
) -> dict[str, Tensor]:
    """Outputs of a quantizer, the amaxes of groups given."""
    out = poisoned_buffers(problem, fmt, columnwise)
    out["amax"] = amaxes(problem)
    results = (out["scale_inv"], out["scale"])
    kernel = compile_for_emulator(config, config.arch).run
    if isinstance(config, RowsConfig):
        copy = (out["amax"], out["codes"], None)
    elif columnwise:
        copy = (None, out["amax"], None, None, out["codes_t"], None)
    else:
        copy = (None, out["amax"], out["codes"], None, None, None)
    if isinstance(config, TileConfig):
        results = (*results, None)
    kernel(*problem.inputs, *copy, *results, NUM_SMS)
    return out


def check(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_same_bytes(got[name], value, name)


def ragged(case: str, dtype: str = "bfloat16") -> Problem:
    rows, cols, offs = RAGGED[case]
    x = sample(rows, cols, dtype=DTYPES[dtype])
    x[int(offs[-1]) :] = float("nan")
    return Problem(x, offs)


@pytest.mark.parametrize("element", FORMATS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows(arch: str, element: str) -> None:
    fmt = FORMATS[element]
    for case in RAGGED:
        problem = ragged(case)
        config = RowsConfig.choose(fmt, QuantizeProblem("bfloat16", problem.x.shape[1]), arch)
        check(quantize(config, problem, fmt), expected(problem, fmt, False))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_of_other_dtypes(dtype: str) -> None:
    for warps, rows in ((1, 2), (2, 1)):
        config = RowsConfig("fp8", dtype, warps_per_row=warps, rows_per_warp=rows)
        problem = ragged("odd rows, odd strips", dtype)
        check(quantize(config, problem, FP8()), expected(problem, FP8(), False))


def test_rows_of_uniform_groups() -> None:
    problem = Problem(sample(3, 140, 80), None)
    config = RowsConfig("fp8", "bfloat16", "uniform", 1)
    check(quantize(config, problem, FP8()), expected(problem, FP8(), False))


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiles(arch: str, columnwise: bool) -> None:
    """Rows of any length; and the transposed copy."""
    for dtype in ("bfloat16", "float32"):
        config = TileConfig("fp8", dtype, rowwise=not columnwise, columnwise=columnwise, arch=arch)
        for case in ("odd rows, odd strips", "empty first, middle, last", "tail"):
            problem = ragged(case, dtype)
            got = quantize(config, problem, FP8(), columnwise)
            check(got, expected(problem, FP8(), columnwise))


@pytest.mark.parametrize("element", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: str, element: str) -> None:
    """NaN, infinities, denormals; amaxes of zero, infinity and less than FP8_MAX / FMAX."""
    x = special_input(150, 128, DTYPES[dtype])
    tiny = torch.full((20, 128), torch.finfo(DTYPES[dtype]).tiny * 0.25, dtype=DTYPES[dtype])
    tiny[:, ::3] *= -0.5
    finite = sample(30, 128, dtype=DTYPES[dtype])
    problem = Problem(torch.cat([x, tiny, finite]), ends(1, 2, 3, 40, 60, 150, 170, 200))
    fmt = FORMATS[element]
    for arch in ARCHITECTURES:
        config = RowsConfig.choose(fmt, QuantizeProblem(dtype, 128), arch)
        check(quantize(config, problem, fmt), expected(problem, fmt, False))


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("warps", [1, 4])
def test_any_order(warps: int, mode: dict) -> None:
    problem = Problem(sample(300, 496), ends(0, 130, 131, 290))
    config = RowsConfig("fp8", "bfloat16", warps_per_row=warps)
    with emulator.options(**mode):
        check(quantize(config, problem, FP8()), expected(problem, FP8(), False))


def test_many_groups() -> None:
    offs = many_groups()
    problem = Problem(sample(int(offs[-1]) + 5, 16), offs)
    config = RowsConfig.choose(FP8(), QuantizeProblem("bfloat16", 16))
    check(quantize(config, problem, FP8()), expected(problem, FP8(), False))


@pytest.mark.parametrize("element", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantized_rows(dtype: str, element: str) -> None:
    """Every code, under scales of all sizes."""
    fmt, offs = FORMATS[element], ends(7, 136, 136, 290)
    codes = torch.arange(256, dtype=torch.uint8).repeat(300, 2)[:, :272].contiguous()
    scale_inv = torch.tensor([1.7, 3e-39, 1.0, 2.0**-7])
    group = torch.bucketize(torch.arange(290), offs, right=True)
    numbers = codes.view(fmt.dtype)[:290].float() * scale_inv[group][:, None]
    config = DequantizeConfig(fmt.text, dtype)
    out = poisoned(torch.empty(300, 272, dtype=DTYPES[dtype]))
    want = out.clone()
    want[:290] = numbers.to(DTYPES[dtype])
    for arch in ARCHITECTURES:
        got = out.clone()
        run = compile_for_emulator(config, arch).run
        run(codes.view(fmt.dtype), None, scale_inv, offs, got, 0, NUM_SMS)
        assert_same_bytes(got, want, any_nan=True)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_dequantized_columns(arch: str) -> None:
    problem = ragged("odd rows, odd strips")
    parts = expected(problem, FP8(), True)
    config = DequantizeConfig("fp8", "float32", columnwise=True)
    got = torch.full(problem.x.shape, -7.0)
    run = compile_for_emulator(config, arch).run
    run(parts["codes_t"], None, parts["scale_inv"], problem.offs, got, 0, NUM_SMS)
    group = problem.groups.group_of_row()
    rowwise = expected(problem, FP8(), False)["codes"].float()
    assert_same_bytes(got, rowwise * parts["scale_inv"][group][:, None], any_nan=True)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_code(arch: str) -> None:
    """Exact arithmetic, the hardware's conversions, no spills."""
    problem = QuantizeProblem("bfloat16", 4096)
    for fmt in FORMATS.values():
        kernel = compile_for_emulator(RowsConfig.choose(fmt, problem, arch), arch)
        assert not re.findall(r"\.ftz|\.approx|\bfma\.", kernel.ptx)
        assert f"cvt.rn.satfinite.{fmt.element.name}x2.f32" in kernel.ptx
        assert all(r.stack_bytes == 0 for r in read_resources(kernel.cubin).values())
