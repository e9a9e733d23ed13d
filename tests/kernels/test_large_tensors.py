"""Tensors with more than 2^31 elements.

They are mapped but untouched memory, and edited PTX makes a few CTAs work at the end of the grid.
"""

import contextlib
import mmap
import re

import pytest
import torch

import ptx_emulator as emulator
from cute_kernels import backend
from cute_kernels.formats import NVFP4, parse
from cute_kernels.kernels.quantize.choose import choose_dequantize_config
from cute_kernels.kernels.quantize.config import DequantizeConfig, RowsConfig, TileConfig
from cute_kernels.kernels.quantize.pass_config import AmaxConfig, DbiasConfig
from cute_kernels.layout.buffers import buffers, code_pitch
from cute_kernels.layout.shapes import ceil_div, scale_tiles
from cute_kernels.testing.compiled import compile_for_emulator
from tests.helpers import (
    BF16,
    F32,
    I32,
    U8,
    assert_same_bytes,
    dequantize_arguments,
    each_arch,
    offs_tensor,
    ops,
)

from .op_support import watching
from .quantize_support import (
    ARCH,
    NO_RESULTS,
    NO_TILE_RESULTS,
    SEED,
    Problem,
    expected,
    random_input,
)

#: Flag of Linux's mmap, which Python has from 3.13 on.
MAP_NORESERVE = 0x4000
ROWS = 40
#: (rows before the last ``ROWS``, K): long rows or many rows, past 2^31 elements per operand.
SHAPES = {"long rows": (2**23, 8192), "many rows": (2**29, 64)}
each_shape = pytest.mark.parametrize("name", [*SHAPES])


def sparse(*shape, dtype=BF16):
    """Return a zero tensor whose pages use memory only once they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(
        mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags), dtype=dtype
    ).view(shape)


def run_ctas(config, first_cta, grid, *arguments, arch=ARCH):
    """Run CTAs from ``first_cta`` on, of a ``grid``.

    The SM count at the end of ``arguments`` sets how many CTAs really run.
    """
    kernel = compile_for_emulator(config, arch)
    register = r"mov\.u32\s+(%r\d+), %{};"
    patched, count = re.subn(
        register.format(r"ctaid\.x"),
        rf"mov.u32 \1, %ctaid.x; add.s32 \1, \1, {first_cta};",
        kernel.ptx,
    )
    patched, sizes = re.subn(register.format(r"nctaid\.x"), rf"mov.u32 \1, {grid};", patched)
    assert count and sizes and "%nctaid" not in patched
    with loaded(kernel, patched), watching(*arguments):
        kernel(*arguments)


@contextlib.contextmanager
def loaded(kernel, ptx):
    """Replace the PTX of a kernel inside the block."""
    kernel._is_loaded = True
    emulator.load_ptx(ptx, kernel.cubin)
    try:
        yield
    finally:
        emulator.load_ptx(kernel.ptx, kernel.cubin)


def append_to_zeros(x, before):
    out = sparse(before + len(x), *x.shape[1:], dtype=x.dtype)
    out[before:] = x
    return out


def last_tile(before):
    return before // 128


@each_shape
def test_amax_of_rows_and_groups(name):
    """Check amaxes at addresses beyond 2^31 elements."""
    before, cols = SHAPES[name]
    x = random_input((ROWS, cols), BF16)
    big = append_to_zeros(x, before)
    rows, groups = sparse(len(big), dtype=F32), torch.zeros(1)
    # The kernel takes rows from the last to the first.
    run_ctas(
        AmaxConfig("bfloat16", per_row=True), 0, 2**20, big, offs_tensor(len(big)), rows, groups, 2
    )
    assert rows[before:].equal(x.float().abs().amax(1))
    assert groups.equal(x.float().abs().amax().view(1))


@each_arch
@each_shape
def test_row_quantizer(name, arch):
    """Check the row quantizer at addresses beyond 2^31 elements."""
    before, cols = SHAPES[name]
    x = random_input((ROWS, cols), BF16)
    big, tile = append_to_zeros(x, before), last_tile(before)
    want = expected(Problem(x, offs_tensor(ROWS)), NVFP4(row_scaled=True), True, False)
    config = RowsConfig(
        NVFP4(row_scaled=True).text, "bfloat16", warps_per_row=cols // 2048 or 1, arch=arch
    )
    amax = sparse(len(big), dtype=F32)
    codes = sparse(len(big), code_pitch(cols // 2), dtype=U8)
    scales = sparse(tile + 1, scale_tiles(cols, 16), 512, dtype=U8)
    first_cta, ctas = tile * 16, 18
    arguments = (
        big,
        None,
        offs_tensor(len(big)),
        amax,
        codes[:, : cols // 2],
        scales,
        *NO_RESULTS,
        ctas,
    )
    run_ctas(config, first_cta, first_cta + ctas, *arguments, arch=arch)
    assert amax[before:].equal(want["amax"])
    assert codes[before:, : cols // 2].equal(want["codes"])
    assert scales[tile].equal(want["scales"][0])


TILES = {
    "ragged": ("nvfp4", False),
    "uniform": ("nvfp4", True),
    "stochastic": ("nvfp4:stochastic_rounding", False),
    "rows of bytes": ("fp8_block", False),
    "uniform bytes": ("mxfp8", True),
}


@each_arch
@pytest.mark.parametrize(("text", "uniform"), TILES.values(), ids=TILES)
@each_shape
def test_tile_quantizer(name, text, uniform, arch):
    """Stochastic formats use block numbers past 2^32 or 2^31."""
    before, cols = SHAPES[name]
    fmt, blocks_before = parse(text), (before * cols // 16, before // 16 * cols)
    x = random_input((1, 128, cols) if uniform else (ROWS, cols), BF16)
    big, offs = (
        append_to_zeros(x.flatten(0, -2), before),
        None if uniform else offs_tensor(before + ROWS),
    )
    big = big.view(-1, 128, cols) if uniform else big
    want = expected(
        Problem(x, None if uniform else offs_tensor(ROWS)),
        fmt,
        True,
        True,
        blocks_before=blocks_before,
    )
    config = TileConfig(
        text, "bfloat16", "uniform" if uniform else "ragged", columnwise=True, arch=arch
    )
    out = {}
    for key, spec in buffers(fmt, big.shape, None if uniform else 1, columnwise=True).items():
        out[key] = sparse(*spec.shape[:-1], spec.pitch or spec.shape[-1], dtype=spec.dtype)[
            ..., : spec.shape[-1]
        ]
    amax = out.get("amax")
    if amax is not None:
        amax[-1] = want["amax"][-1]
    col_tiles = ceil_div(cols, 128)
    items = (last_tile(before) + 1) * col_tiles
    # One tile, the last in both directions.
    last_arguments = (*NO_TILE_RESULTS[:4], SEED if fmt.is_stochastic else None, None, None, 1)
    copies = [out[key] for key in ("codes", "scales", "codes_t", "scales_t")]
    run_ctas(
        config, items - 1, items, big, None, offs, None, amax, *copies, *last_arguments, arch=arch
    )
    for key in ("codes", "scales", "codes_t", "scales_t"):
        # Compare the last tile. Dimensions of equal size cover all columns and are cut to one tile,
        # except the 512 bytes of a scale tile.
        got, expected_tile = (t[key][-1] if uniform else t[key] for t in (out, want))
        for i, count in enumerate(expected_tile.shape):
            size = count // col_tiles if count == got.shape[i] and count != 512 else count
            got, expected_tile = (
                t.narrow(i, t.shape[i] - size, size) for t in (got, expected_tile)
            )
        assert_same_bytes(got, expected_tile, key)


@pytest.mark.parametrize("vectorized", [True, False])
def test_dbias_of_far_rows(vectorized):
    """Check dbias at addresses beyond 2^31 elements."""
    before, cols = SHAPES["long rows"]
    x = random_input((ROWS, cols), BF16)
    big, offs = append_to_zeros(x, before), offs_tensor(before, before + ROWS)
    want = ops.grouped_dbias(x, offs_tensor(ROWS))
    config, out = DbiasConfig("bfloat16", vectorized), torch.zeros(2, cols)
    items = 2 * cols // (64 if vectorized else 32)
    run_ctas(config, items - 4, items, big, offs, out, 1)
    assert_same_bytes(out[1, -64:], want[0, -64:], any_nan=True)
    # Sums of many groups, of which the last has all rows.
    offs = torch.zeros(2**19 + 1, dtype=I32)
    offs[-1] = ROWS
    sums = sparse(len(offs), cols, dtype=F32)
    items = len(offs) * cols // (64 if vectorized else 32)
    run_ctas(config, items - 4, items, x, offs, sums, 1)
    assert_same_bytes(sums[-1, -64:], want[0, -64:], any_nan=True)


DIRECTIONS = {"rowwise": (False, False), "row-scaled": (True, False), "columnwise": (False, True)}


@pytest.mark.parametrize("uniform", [False, True], ids=["ragged", "uniform"])
@pytest.mark.parametrize("direction", [*DIRECTIONS])
@each_shape
def test_dequantize_far_rows(name, direction, uniform):
    """Check the dequantizer at addresses beyond 2^31 elements."""
    row_scaled, columnwise = DIRECTIONS[direction]
    before, cols = SHAPES[name]
    tile = last_tile(before)
    fmt, rows = NVFP4(row_scaled=row_scaled), offs_tensor(ROWS)
    copy = ops.grouped_quantize(
        random_input((ROWS, cols), BF16), fmt.text, rows, None, not columnwise, columnwise
    )
    want = ops.grouped_dequantize(
        *dequantize_arguments(copy, fmt.text, ROWS, BF16, rows, columnwise)
    )
    codes, scales, amax = copy
    total, groups, lead, tiles = before + ROWS, 1, (), tile + 1
    if uniform:
        total, groups, lead, tiles = before + 128, tile + 1, (tile + 1,), 1
    if columnwise:
        big_codes = sparse(*lead, cols, 64 * tiles, dtype=U8)
        big_codes[..., -64:][-1 if uniform else slice(None)] = codes[:, :64]
        big_scales = sparse(*lead, ceil_div(cols, 128), 2 * tiles, 512, dtype=U8)
        big_scales[..., -2:, :][-1 if uniform else slice(None)] = scales[:, :2]
    else:
        big_codes = sparse(total, code_pitch(cols // 2), dtype=U8)[:, : cols // 2]
        big_codes[before : before + ROWS] = codes
        big_scales = sparse(*lead, tiles, scale_tiles(cols, 16), 512, dtype=U8)
        big_scales.flatten(0, -3)[-1] = scales[0]
    big_amax = sparse(total if row_scaled else groups, dtype=F32)
    big_amax[before : before + ROWS] = amax
    if not row_scaled:
        big_amax[-1] = amax[0]
    out, offs = sparse(total, cols), offs_tensor(total)
    if uniform:
        out, offs = out.view(groups, 128, cols), None
        big_codes = big_codes if columnwise else big_codes.unflatten(0, (groups, 128))
    config = choose_dequantize_config(
        fmt, "bfloat16", "uniform" if uniform else "ragged", columnwise
    )
    items_per_tile = ceil_div(cols, 64) if columnwise else 4 * ceil_div(cols, 256)
    first_cta, ctas = tile * items_per_tile // 8, items_per_tile // 8 // 2 * 2 + 2
    run_ctas(
        config,
        first_cta,
        first_cta + ctas,
        big_codes,
        big_scales,
        big_amax,
        offs,
        out,
        0,
        ctas // 2,
    )
    assert_same_bytes(out.flatten(0, -2)[before : before + ROWS], want, any_nan=True)


@each_arch
def test_gather_and_combine_far_rows(arch):
    """Check gather and combine at addresses beyond 2^31 elements."""
    last_rows, before, index = random_input((ROWS, 512), BF16), 2**23, torch.randperm(ROWS).int()
    row, weight, h = index.view(-1, 4), torch.rand(ROWS // 4, 4), append_to_zeros(last_rows, before)
    want = ops.moe_gather(last_rows, index), ops.moe_combine(last_rows, row, weight)
    with backend(f"emulated:{arch}"):
        assert_same_bytes(ops.moe_gather(h, index + before), want[0])
        assert_same_bytes(ops.moe_combine(h, row + before, weight), want[1])


def test_dequantize_zeroes_a_long_tail():
    """Check that the dequantizer writes zeros to a tail beyond 2^31 elements."""
    before, cols = SHAPES["long rows"]
    before -= 128
    codes = sparse(before + 2, cols // 2, dtype=U8)
    scales = sparse(before // 128 + 1, scale_tiles(cols, 16), 512, dtype=U8)
    out = sparse(before + 2, cols)
    out[before - 1 :] = 3.0
    run_ctas(
        DequantizeConfig("nvfp4", "bfloat16"),
        0,
        2**18,
        codes,
        scales,
        torch.ones(1),
        offs_tensor(before),
        out,
        1,
        8,
    )
    assert (out[before - 1] == 3).all() and not out[before:].any()
