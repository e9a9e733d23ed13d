"""Quantizers of FP8 formats, by tiles and by rows, against the reference byte by byte."""

import itertools

import pytest
import torch

from cute_kernels.formats import FP8, MXFP8, FP8Block, parse
from cute_kernels.kernels.quantize.choose import choose_row_config
from cute_kernels.kernels.quantize.config import QuantizeProblem, RowsConfig, TileConfig
from tests.helpers import (
    BF16,
    DIRECTIONS,
    DTYPES,
    E5M2,
    F32,
    assert_same_buffers,
    each_arch,
    offs_of_many_groups,
    offs_tensor,
)

from .op_support import ARCHITECTURES, check_code, each_mode
from .quantize_support import (
    Problem,
    check,
    directions_of,
    expected,
    quantize,
    ragged,
    ragged_cases,
    random_input,
    special_input,
)

ANY_SCALE = "fp8_block:pow2_scales=false,amax_epsilon=0.001"
DELAYED = "fp8:dtype=e5m2,scaling=delayed"
#: Formats that mark blocks with non-finite values by a NaN scale.
NAN_SCALES = (
    "fp8_block:nan_scales",
    "fp8_block:block=128x128,nan_scales",
    "fp8_block:pow2_scales=false,nan_scales",
    "mxfp8:nan_scales",
    "mxfp8:block=32x32,nan_scales",
    "fp8:nan_scales",
    "fp8:scaling=delayed,nan_scales",
)
FORMATS = {
    fmt.text: fmt
    for fmt in (
        FP8Block(),
        FP8Block(dtype=E5M2),
        FP8Block(pow2_scales=False, amax_epsilon=1e-3),
        FP8Block(block=(128, 128)),
        FP8Block((128, 128), E5M2, False),
        MXFP8(),
        MXFP8(E5M2),
        MXFP8(block=(32, 32)),
        FP8(),
        FP8(E5M2, "delayed"),
    )
}
#: One format per layout of scales.
ONE_PER_LAYOUT = ("fp8_block", "fp8_block:block=128x128", "mxfp8", "mxfp8:block=32x32")
RAGGED = ragged_cases("odd rows, odd K", 128, 32, 288, 96, 32, 160, 64)


def cases_of(text):
    """Return the ragged cases; every other K is 16 less if the format allows it."""
    less = 32 - parse(text).k_multiple
    return [(rows, k - i % 2 * less, offs) for i, (rows, k, offs) in enumerate(RAGGED.values())]


def special(dtype, cols):
    """Return NaN, infinities, denormals, and blocks with extreme amaxes."""
    x = special_input(150, cols, DTYPES[dtype])
    x[8::7, 48:64] = -torch.nan
    tiny = torch.full((140, cols), torch.finfo(DTYPES[dtype]).tiny * 0.25, dtype=DTYPES[dtype])
    tiny[:, ::3] *= -0.5
    # Magnitudes on both sides of the ones where a power-of-two scale changes.
    edges = torch.tensor([1.0, 1.75, 448.0, 57344.0])[:, None] * (1 + torch.arange(-2, 3) * 2**-23)
    finite = torch.zeros(40, cols)
    finite[:, ::32] = (
        edges.flatten().repeat(2)[:, None] * torch.logspace(-8, 7, 8, 2.0)[: cols // 32]
    )
    finite = finite.clamp(max=torch.finfo(DTYPES[dtype]).max).to(DTYPES[dtype])
    return Problem(torch.cat([x, tiny, finite]), offs_tensor(1, 2, 3, 40, 60, 150, 290, 330))


def kernel_cases():
    for i, text in enumerate(FORMATS):
        yield "sm_90a", text, "both"
        yield "sm_100a", text, list(DIRECTIONS)[i % 3]
    for text, directions in itertools.product(ONE_PER_LAYOUT, ("rowwise", "columnwise")):
        yield "sm_90a", text, directions


@pytest.mark.parametrize(("arch", "text", "directions"), list(kernel_cases()))
def test_tiles_of_ragged_groups(arch, text, directions):
    config = TileConfig(text, "bfloat16", "ragged", *DIRECTIONS[directions], arch=arch)
    for case in cases_of(text):
        check(config, ragged(*case))


@pytest.mark.parametrize("text", [*ONE_PER_LAYOUT, DELAYED])
def test_tiles_of_uniform_groups(text):
    config = TileConfig(text, "bfloat16", "uniform", True, True, arch="sm_90a")
    for shape in ((2, 100, 96), (1, 256, 64), (3, 129, 32)):
        check(config, Problem(random_input(shape, BF16), None))


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *((text, "bfloat16") for text in FORMATS),
        *itertools.product((*ONE_PER_LAYOUT, ANY_SCALE), ("float16", "float32")),
    ],
)
def test_tiles_of_special_values(text, dtype):
    check(TileConfig(text, dtype, "ragged", True, True, arch="sm_90a"), special(dtype, 256))


@each_arch
@pytest.mark.parametrize("text", NAN_SCALES)
def test_tiles_with_nan_scales(arch, text):
    """Only non-finite values mark a block; finite ones have the bytes of the unmarked format."""
    for directions in ((True, False), (False, True), (True, True)):
        check(
            TileConfig(text, "float16", "ragged", *directions, arch=arch), special("float16", 256)
        )
    plain = text.replace(",nan_scales", "").replace(":nan_scales", "")
    for case in cases_of(text)[:3]:
        finite = ragged(*case)
        assert_same_buffers(*(expected(finite, parse(name), True, True) for name in (text, plain)))


@pytest.mark.parametrize("text", ["fp8_block:nan_scales", "mxfp8:nan_scales", "fp8:nan_scales"])
@each_arch
def test_rows_with_nan_scales(arch, text):
    config = RowsConfig(text, "bfloat16", arch=arch)
    if config.can_implement(QuantizeProblem("bfloat16", 256)):
        check(config, special("bfloat16", 256))


def test_amaxes_next_to_changes_of_the_scale():
    """Blocks whose amaxes have every fp32 exponent, with mantissas near 1, 1.75 and 2."""
    mantissas = torch.tensor([0, 1, 2, 0x5FFFFF, 0x600000, 0x600001, 0x600002, 0x7FFFFF])
    bits = (torch.arange(255)[:, None] << 23 | mantissas).flatten().int()
    amaxes = torch.cat([bits, torch.arange(0x3FFFF8, 0x400008).int()]).view(F32)
    for text, block in (("fp8_block", 128), ("fp8_block:dtype=e5m2", 128), ("mxfp8", 32)):
        x = torch.zeros(1 << 8, -(-len(amaxes) // 256) * block)
        x[:, 1::block] = torch.nn.functional.pad(amaxes, (0, -len(amaxes) % 256)).view(256, -1)
        check(TileConfig(text, "float32", arch="sm_90a"), Problem(x, offs_tensor(256)))


@pytest.mark.parametrize("text", ONE_PER_LAYOUT)
def test_tiles_of_many_groups(text):
    offs = offs_of_many_groups()
    problem = Problem(random_input((int(offs[-1]) + 5, 32), BF16), offs)
    check(TileConfig(text, "bfloat16", "ragged", True, True, arch="sm_90a"), problem)


@pytest.mark.parametrize("text", ["fp8", *ONE_PER_LAYOUT, DELAYED])
def test_invalid_end_rows(text):
    """End rows are clamped to the buffer; falling ones only have to stay inside it."""
    x, fmt = random_input((140, 96), BF16), parse(text)
    rows = RowsConfig(text, "bfloat16", arch="sm_90a")
    for config in (TileConfig(text, "bfloat16", columnwise=True, arch="sm_90a"), rows):
        if config is rows and not rows.can_implement(QuantizeProblem("bfloat16", 96)):
            continue
        got = quantize(config, Problem(x, offs_tensor(-5, 20, 1000, 2**31 - 1)))
        assert_same_buffers(
            got, expected(Problem(x, offs_tensor(0, 20, 140, 140)), fmt, *directions_of(config))
        )
        for offs in (offs_tensor(100, 20, -7, 130), offs_tensor(2**31 - 1, -(2**31), 2**31 - 1, 0)):
            quantize(config, Problem(x, offs))


@each_mode
@pytest.mark.parametrize("text", [*ONE_PER_LAYOUT, DELAYED])
def test_tiles_in_any_order(text, mode):
    """Check that tiles give the same bytes in any order of events."""
    arch = ARCHITECTURES[mode.get("seed", 0) % 2]
    problem = Problem(random_input((300, 544), BF16), offs_tensor(0, 130, 131, 290))
    check(TileConfig(text, "bfloat16", "ragged", True, True, arch=arch), problem, **mode)
    check(TileConfig(text, "bfloat16", arch=arch), problem, num_sms=1, **mode)


@pytest.mark.parametrize("directions", ["rowwise", "both"])
@pytest.mark.parametrize("text", ONE_PER_LAYOUT)
@each_arch
def test_code_of_tiles(arch, text, directions):
    config = TileConfig(text, "bfloat16", "ragged", *DIRECTIONS[directions], arch=arch)
    assert f"cvt.rn.satfinite.{FORMATS[text].element.name}x2.f32" in check_code(config, arch)


@pytest.mark.parametrize("text", ["fp8", "fp8:dtype=e5m2", "fp8_block", "mxfp8"])
@each_arch
def test_code_of_rows(arch, text):
    fmt = parse(text)
    config = choose_row_config(fmt, QuantizeProblem("bfloat16", 4096), arch)
    assert f"cvt.rn.satfinite.{fmt.element.name}x2.f32" in check_code(config, arch)


#: Format, dtype, warps per row and rows per warp; blocks span two or eight lanes.
ROWS = [
    ("fp8_block", "bfloat16", 1, 4),
    ("fp8_block", "bfloat16", 2, 1),
    (ANY_SCALE, "float32", 1, 2),
    ("mxfp8", "bfloat16", 1, 8),
    ("mxfp8:dtype=e5m2", "float16", 1, 1),
    ("fp8", "bfloat16", 1, 4),
    ("fp8", "float32", 2, 1),
    ("fp8:dtype=e5m2", "bfloat16", 1, 1),
    ("fp8:dtype=e5m2", "float16", 1, 2),
]


@pytest.mark.parametrize(("text", "dtype", "warps", "rows"), ROWS)
def test_rows_of_all_formats(text, dtype, warps, rows):
    """Compare the row quantizer with the reference for all formats with 8-bit codes."""
    for i, case in enumerate(cases_of(text)):
        problem = ragged(*case, dtype)
        config = RowsConfig(
            text, dtype, warps_per_row=warps, rows_per_warp=rows, arch=ARCHITECTURES[i % 3 == 2]
        )
        if config.can_implement(QuantizeProblem(dtype, problem.x.shape[1])):
            check(config, problem)
        else:
            assert rows > 1 and problem.x.shape[1] > 128
    check(config, special(dtype, 128))
    uniform = Problem(random_input((3, 140, 128), DTYPES[dtype]), None)
    check(RowsConfig(text, dtype, "uniform", warps, rows_per_warp=rows), uniform)


@each_mode
def test_rows_in_any_order(mode):
    problem = Problem(random_input((300, 544), BF16), offs_tensor(0, 130, 131, 290))
    for text, arch in (
        ("fp8_block", "sm_90a"),
        ("mxfp8", "sm_90a"),
        ("fp8", "sm_90a"),
        ("fp8", "sm_100a"),
    ):
        check(RowsConfig(text, "bfloat16", warps_per_row=2, arch=arch), problem, **mode)
