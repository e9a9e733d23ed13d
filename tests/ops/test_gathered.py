"""GEMMs of rows selected by an index, against GEMMs of rows gathered first."""

import functools

import pytest
import torch

from cute_kernels import UnsupportedError, backend
from cute_kernels.kernels.gemm.sm90.config import Sm90Tile
from cute_kernels.kernels.gemm.sm100.config import Sm100Tile
from cute_kernels.ops.gemm import gathered
from cute_kernels.ops.gemm.launcher import force_tile
from cute_kernels.ops.gemm.op import MGroupedGemm
from cute_kernels.runtime.plan_cache import clear_plan_cache
from tests.helpers import (
    BF16,
    F16,
    F32,
    assert_same_bytes,
    offs_from_splits,
    ops,
    quantize_operand,
    sample,
    seeded_generator,
)

TOKENS = 50


def random_index(rows, tokens=TOKENS, seed=0):
    """Return row indices, some of them outside of the tokens."""
    rng = seeded_generator(seed)
    index = torch.randint(0, max(1, tokens), (rows,), generator=rng)
    pick = torch.randint(0, 14, (rows,), generator=rng)
    return torch.where(
        pick < 4, torch.tensor([-1, tokens, 2**31 - 1, -(2**31)])[pick.clamp(max=3)], index
    ).int()


def fprop(
    sizes,
    n=264,
    k=288,
    *,
    tail=11,
    tokens=TOKENS,
    dtype=BF16,
    bias=False,
    transpose_b=False,
    seed=0,
):
    """Return arguments of m_grouped_gemm on ``tokens`` rows, and the index of rows."""
    groups = len(sizes)
    x, w = (
        sample(tokens, k).to(dtype),
        sample(groups, *((k, n) if transpose_b else (n, k))).to(dtype),
    )
    arguments = (
        x,
        w,
        offs_from_splits(sizes),
        sample(groups, n) if bias else None,
        torch.rand(groups) if bias else None,
    )
    return (*arguments, transpose_b, F32), random_index(sum(sizes) + tail, tokens, seed)


def wgrad(sizes, m=136, n=264, *, tail=11, tokens=TOKENS, dtype=BF16):
    """Return arguments of k_grouped_gemm, whose B has ``tokens`` rows, and the index of rows."""
    rows = sum(sizes) + tail
    a, b = sample(rows, m).to(dtype), sample(tokens, n).to(dtype)
    a[sum(sizes) :] = torch.nan
    return (a, b, offs_from_splits(sizes), None, F32), random_index(rows, tokens)


def check(op, arguments, rows, arch="sm_90a", **mode):
    """Compare with gathering first, on the reference and on the backend that ``mode`` names."""
    side = "mk".index(op[0])
    gathered_arguments = list(arguments)
    gathered_arguments[side] = ops.moe_gather(gathered_arguments[side], rows)
    product = getattr(ops, f"{op}_grouped_gemm")
    with backend(f"reference:{arch}"):
        want = product(*gathered_arguments)
        assert_same_bytes(product(*arguments, rows=rows), want)
    if mode:
        with backend(**mode):
            assert_same_bytes(product(*arguments, rows=rows), want)


NARROW, WIDE = (
    Sm90Tile(256, 16, swap_ab=True, consumers=4),
    Sm90Tile(256, 160, swap_ab=True, row_fitted=True),
)
SWAPPED, SQUARE, TALL = Sm90Tile(128, 128, swap_ab=True), Sm90Tile(128, 128), Sm90Tile(256, 128)


@pytest.mark.parametrize(
    "text", ["nvfp4:row_scaled", "mxfp8", "fp8_block", "fp8_block:pow2_scales=false"]
)
def test_quantized_rows(text):
    """Compare products of gathered codes with products of copied rows."""
    x, w, rows = sample(TOKENS, 384), sample(2, 24, 384), random_index(150)
    weights = (
        text.replace("row_scaled", "")
        if "nvfp4" in text
        else text.replace("fp8_block", "fp8_block:block=128x128")
    )
    weights = weights.removesuffix(":").replace("128:", "128,")
    codes, *scales = quantize_operand(w, weights)
    options = {"b_scales": scales, "a_format": text, "b_format": weights}
    a, *a_scales = quantize_operand(x, text, offs_from_splits((TOKENS,)))
    for offs in (offs_from_splits((130, 9)), offs_from_splits((0, 150))):
        gathered_codes, *gathered_scales = quantize_operand(ops.moe_gather(x, rows), text, offs)
        want = ops.m_grouped_gemm(gathered_codes, codes, offs, a_scales=gathered_scales, **options)
        assert_same_bytes(
            ops.m_grouped_gemm(a, codes, offs, a_scales=a_scales, rows=rows, **options), want
        )


CASES = {
    "narrow": ("m", NARROW, fprop((100, 0, 5, 17), 72)),
    "one row, one token": ("m", NARROW, fprop((1,), 8, 8, tail=0, tokens=1)),
    "no token": ("m", NARROW, fprop((3, 0), 8, 8, tokens=0)),
    "all empty": ("m", NARROW, fprop((0, 0, 0), tail=3)),
    "many groups": ("m", NARROW, fprop((0, 1, 0, 2) * 260, 8, 16)),
    "swapped, bias": ("m", SWAPPED, fprop((0, 130, 3, 0), 136, 144, dtype=F16, bias=True)),
    "wide": ("m", WIDE, fprop((60, 0, 330, 5), k=144)),
    "wide, long K": ("m", WIDE, fprop((1, 140), 8, 720)),
    "dgrad": ("m", SWAPPED, fprop((100, 0, 5, 130), k=72, transpose_b=True)),
    "wgrad": ("k", TALL, wgrad((100, 0, 5, 64, 300))),
    "wgrad, one row": ("k", TALL, wgrad((1,), 8, 8, tail=0, tokens=1)),
    "wgrad, empty": ("k", TALL, wgrad((0, 0), tokens=0)),
    "wgrad, fp16": ("k", SQUARE, wgrad((0, 130, 0), 136, 72, dtype=F16)),
}


#: Modes of the emulator in which some cases run as well.
MODES = {
    "narrow": [{"races": True}, {"mode": "chaos", "seed": 1}],
    "wide": [{"races": True}],
    "wide, long K": [{"mode": "chaos", "seed": seed} for seed in range(2)],
    "wgrad": [{"races": True}, *({"mode": "chaos", "seed": seed} for seed in range(2))],
}


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "mode"),
    [(case, mode) for case in CASES for mode in ({}, *MODES.get(case, ()))],
    ids=str,
)
def test_kernels_of_sm_90a(case, mode, monkeypatch):
    monkeypatch.setattr(gathered, "_MANY_ROWS", 0)
    op, tile, (arguments, rows) = CASES[case]
    with force_tile(tile):
        check(op, arguments, rows, name="emulated:sm_90a", **mode)


SM100_CASES = {
    "pair, partial": (
        "m",
        Sm100Tile(256, 256, 2, swap_partial=True),
        fprop((60, 0, 257, 5), k=144, bias=True),
    ),
    "swapped": ("m", Sm100Tile(128, 32, swap_ab=True), fprop((100, 0, 5, 17), 72, dtype=F16)),
    "many groups": (
        "m",
        Sm100Tile(128, 32, swap_ab=True),
        fprop((0, 1, 0, 2) * 260, 8, 16, dtype=F16, tokens=1),
    ),
    "wgrad": ("k", Sm100Tile(256, 128, 2), wgrad((100, 0, 5, 64, 300))),
    "wgrad, one row": ("k", Sm100Tile(256, 128, 2), wgrad((1,), 8, 8, tail=0, tokens=1)),
    "wgrad, empty": ("k", Sm100Tile(128, 128), wgrad((0, 130, 0), tokens=0)),
}
SM100_MODES = ({}, {"races": True}, *({"mode": "chaos", "seed": seed} for seed in range(3)))


@pytest.mark.emulated
@pytest.mark.parametrize("case", SM100_CASES.values(), ids=SM100_CASES)
def test_kernels_of_sm_100a(case):
    op, tile, (arguments, rows) = case
    for mode in SM100_MODES if len(arguments[2]) > 3 else SM100_MODES[:1]:
        with force_tile(tile):
            check(op, arguments, rows, "sm_100a", name="emulated:sm_100a", **mode)


@pytest.mark.emulated
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_both_architectures(arch, monkeypatch):
    """Chosen tiles, strided operands, and rows that are gathered first."""
    (x, w, *more), rows = fprop((9, 0, 5), 24, 64, tail=2)
    check(
        "m",
        (sample(TOKENS, 131)[:, 3:67], w, *more),
        torch.stack([rows, rows], 1)[:, 0],
        name=f"emulated:{arch}",
    )
    (a, b, *more), rows = wgrad((9, 0, 5), 24, 64)
    check("k", (a, sample(TOKENS, 67)[:, 3:], *more), rows, name=f"emulated:{arch}")
    codes, *scales = quantize_operand(w, "nvfp4")
    options = {"b_scales": scales, "b_format": "nvfp4", "bias": None}
    arguments, rows = (x, codes, offs_from_splits((9, 0, 5))), random_index(16)
    with backend(f"emulated:{arch}"):
        want = ops.m_grouped_gemm(ops.moe_gather(x, rows), *arguments[1:], **options)
        assert_same_bytes(ops.m_grouped_gemm(*arguments, **options, rows=rows), want)
    monkeypatch.setattr(gathered, "_MOST_BYTES", 100)
    clear_plan_cache()
    check("m", *fprop((9, 0, 5), 24, 64, tail=2), name=f"emulated:{arch}")
    clear_plan_cache()


W4A16_CASES = {
    "uneven": ((9, 0, 130, 5, 0), 40, 208, TOKENS),
    "one row, one token": ((1,), 16, 16, 1),
    "no token": ((3, 0), 16, 16, 0),
    "all empty": ((0, 0, 0), 16, 48, TOKENS),
    "many groups": ((0, 1, 0, 2) * 260, 16, 16, TOKENS),
}


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, BF16) for case in W4A16_CASES), ("uneven", F16)]
)
def test_w4a16_gathers_while_it_rearranges(case, dtype):
    """No gathered copy is stored, which the launches show."""
    sizes, n, k, tokens = W4A16_CASES[case]
    x, rows = sample(tokens, k).to(dtype), random_index(sum(sizes) + 7, tokens)
    codes, *scales = quantize_operand(sample(len(sizes), n, k), "nvfp4")
    options = {"b_scales": scales, "b_format": "nvfp4", "bias": None}
    want = ops.m_grouped_gemm(ops.moe_gather(x, rows), codes, offs_from_splits(sizes), **options)
    orders = [{"races": True}, *({"mode": "chaos", "seed": seed} for seed in range(3))]
    for mode in [{}, *(orders if case == "uneven" and dtype == BF16 else ())]:
        with backend("emulated:sm_90a", **mode):
            got = ops.m_grouped_gemm(x, codes, offs_from_splits(sizes), **options, rows=rows)
            assert_same_bytes(
                got,
                ops.m_grouped_gemm(
                    ops.moe_gather(x, rows), codes, offs_from_splits(sizes), **options
                ),
            )
    torch.testing.assert_close(got, want, atol=1e-2, rtol=2e-2)
    op = MGroupedGemm(
        x,
        codes,
        offs_from_splits(sizes),
        None,
        None,
        False,
        None,
        None,
        scales,
        None,
        "nvfp4",
        rows=rows,
    )
    assert not gathered.gathers_first(op, "a", "sm_90a")


def test_gathering_codes_on_sm_100a_raises():
    """Check that sm_100a refuses products of gathered codes."""
    pytest.importorskip("cutlass")
    x = quantize_operand(sample(TOKENS, 128), "fp8_block", offs_from_splits((TOKENS,)))
    w = quantize_operand(sample(1, 16, 128), "fp8_block:block=128x128")
    formats = {"a_format": "fp8_block", "b_format": "fp8_block:block=128x128"}
    options = {"a_scales": x[1:], "b_scales": w[1:], "rows": random_index(9), **formats}
    with backend("emulated:sm_100a"), pytest.raises(UnsupportedError, match="codes by an index"):
        ops.m_grouped_gemm(x[0], w[0], offs_from_splits((9,)), **options)


def product_and_gradients(product, arguments, side, index):
    """Return results and gradients with torch's indexing, and with ``rows``."""
    results = []
    for uses_torch in (True, False):
        operands = [
            t.clone().requires_grad_() if t is not None and t.is_floating_point() else t
            for t in arguments
        ]
        leaves = [t for t in operands if t is not None and t.requires_grad]
        if uses_torch:
            is_token = (index >= 0) & (index < TOKENS)
            operands[side] = (
                operands[side][torch.where(is_token, index, 0).long()] * is_token[:, None]
            )
        y = product(*operands, rows=None if uses_torch else index)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    return results


@pytest.mark.parametrize("transpose_b", [False, True])
def test_gradients_equal_those_of_indexing(transpose_b):
    """Compare gradients of gathered products with those of indexing."""
    (x, w, offs, bias, *_), rows = fprop(
        (9, 0, 5), 24, 16, dtype=F32, bias=True, transpose_b=transpose_b
    )
    product = functools.partial(ops.m_grouped_gemm, transpose_b=transpose_b)
    results = [product_and_gradients(product, (x, w, offs, bias.float()), 0, rows)]
    (a, b, offs, *_), rows = wgrad((9, 0, 5), 24, 16, tail=0, dtype=F32)
    results.append(product_and_gradients(ops.k_grouped_gemm, (a, b, offs), 1, rows))
    for want, got in results:
        for actual, expected in zip(got, want, strict=True):
            torch.testing.assert_close(actual, expected)
