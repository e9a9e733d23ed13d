"""GEMMs of the reference on quantized operands, against sums in the documented order."""

import itertools
import math

import pytest
import torch

from cute_kernels.formats import parse
from tests.helpers import (
    BF16,
    DTYPES,
    F16,
    F32,
    assert_same_bytes,
    k_grouped_arguments,
    m_grouped_arguments,
    offs_from_splits,
    offs_of_many_groups,
    ops,
    poisoned,
    quantize_operand,
    row_ranges,
    sample,
)
from tests.reference import fp8_oracle

from .test_gemm import check_empty_wgrad

#: Formats of A and B of m_grouped GEMMs, by the case that they cover.
FP8_PAIRS = {
    "fp8": ("fp8", "fp8"),
    "fp8 e4m3 x e5m2": ("fp8", "fp8:dtype=e5m2"),
    "fp8 e5m2": ("fp8:dtype=e5m2", "fp8:dtype=e5m2"),
    "fp8_block 1D x 2D": ("fp8_block", "fp8_block:block=128x128"),
    "fp8_block 1D x 1D": ("fp8_block:dtype=e5m2", "fp8_block"),
    "fp32 scales, 1D x 2D": (
        "fp8_block:pow2_scales=false",
        "fp8_block:block=128x128,pow2_scales=false",
    ),
    "fp32 scales, 2D x 1D": (
        "fp8_block:block=128x128,pow2_scales=false",
        "fp8_block:dtype=e5m2,pow2_scales=false",
    ),
    "fp32 scales, 1D x 1D": ("fp8_block:pow2_scales=false", "fp8_block:pow2_scales=false"),
    "fp32 and pow2 scales": ("fp8_block:pow2_scales=false", "fp8_block:block=128x128"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp8 e5m2 x 2D": ("mxfp8:dtype=e5m2", "mxfp8:block=32x32"),
}
FP8_KINDS = {
    name: FP8_PAIRS[name]
    for name in ("fp8", "fp32 scales, 1D x 2D", "fp8_block 1D x 1D", "mxfp8 e5m2 x 2D")
}
NVFP4_PAIRS = {
    "nvfp4": ("nvfp4", "nvfp4"),
    "nvfp4 by row x 2D": ("nvfp4:row_scaled", "nvfp4:block=16x16"),
}
PAIRS = FP8_PAIRS | NVFP4_PAIRS
#: One pair per kind of operand.
KINDS = FP8_KINDS | NVFP4_PAIRS
#: Pairs of formats whose K need not fill the last block.
RAGGED_K = {name: pair for name, pair in PAIRS.items() if parse(pair[0]).k_multiple == 16}

each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
each_kind = pytest.mark.parametrize("pair", KINDS.values(), ids=KINDS)
each_fp8 = pytest.mark.parametrize("pair", FP8_KINDS.values(), ids=FP8_KINDS)
each_direction = pytest.mark.parametrize("transpose_b", [False, True], ids=["fprop", "dgrad"])


def texts(pair):
    return {"a_format": pair[0], "b_format": pair[1]}


def run_wgrad(pair, copies, offs):
    return ops.k_grouped_gemm(*k_grouped_arguments(*copies, offs, None, F32, **texts(pair)))


def columnwise(pair, tensors, offs):
    return [
        quantize_operand(x, f, offs, columnwise=True) for x, f in zip(tensors, pair, strict=True)
    ]


def columnwise_members(pair, copies, group, start, end):
    return [
        fp8_oracle.member(text, copy, group, end - start, start, True)
        for text, copy in zip(pair, copies, strict=True)
    ]


class Product:
    """An m_grouped product: random operands, their quantized copies, and the op's arguments."""

    def __init__(self, pair, splits, cols=32, depth=160, *, transpose_b=False, tail=3):
        self.pair, self.splits, self.transpose_b = pair, splits, transpose_b
        self.offs, self.depth, self.cols = offs_from_splits(splits), depth, cols
        self.x = sample(sum(splits) + tail, depth)
        self.w = sample(len(splits), *((depth, cols) if transpose_b else (cols, depth)))
        self.a = quantize_operand(self.x, pair[0], self.offs)
        self.b = quantize_operand(self.w, pair[1], columnwise=transpose_b)

    def arguments(self, *options):
        bias, alpha, dtype = options or (None, None, F32)
        return m_grouped_arguments(
            self.a, self.b, self.offs, bias, alpha, self.transpose_b, dtype, **texts(self.pair)
        )

    def run(self, *options):
        return ops.m_grouped_gemm(*self.arguments(*options))

    def run_out(self, out, bias=None, alpha=None, accumulate=False):
        ops.m_grouped_gemm_out(
            *self.arguments(bias, alpha, out.dtype), out=out, accumulate=accumulate
        )
        return out

    def members(self):
        for g, (start, end) in enumerate(row_ranges(self.splits)):
            if start < end:
                a = fp8_oracle.member(self.pair[0], self.a, g, end - start, start)
                rows = self.w.shape[1]
                b = fp8_oracle.member(self.pair[1], self.b, g, rows, None, self.transpose_b)
                yield g, slice(start, end), a, b


class Wgrad:
    """A k_grouped product of two columnwise copies."""

    def __init__(self, pair, splits, n=32, k=64):
        self.pair, self.splits, self.offs = pair, splits, offs_from_splits(splits)
        self.tensors = [sample(sum(splits) + 2, cols) / 8 for cols in (n, k)]
        self.copies = columnwise(pair, self.tensors, self.offs)

    def arguments(self, alpha=None, dtype=F32):
        return k_grouped_arguments(*self.copies, self.offs, alpha, dtype, **texts(self.pair))

    def run(self, alpha=None, dtype=F32):
        return ops.k_grouped_gemm(*self.arguments(alpha, dtype))

    def members(self):
        for g, (start, end) in enumerate(row_ranges(self.splits)):
            if start < end:
                yield g, *columnwise_members(self.pair, self.copies, g, start, end)


def accumulator_and_factor(a, b):
    """Return the oracle's accumulator and the factor that the epilogue multiplies it by."""
    dot = fp8_oracle.dot_sixteen if a.bound else fp8_oracle.dot_fp64
    if a.vec == b.vec == 128 and a.scales is not None:
        dot = fp8_oracle.dot_blocks
    factors = [torch.tensor(x.factor) for x in (a, b) if x.level is not None]
    return torch.from_numpy(dot(a, b)), math.prod(factors) if factors else None


def scaled(acc, factor, alpha=None):
    if alpha is not None:
        factor = alpha if factor is None else factor * alpha
    return acc if factor is None else acc * factor


@each_direction
@each_pair
def test_m_grouped_products_have_the_documented_bits(pair, transpose_b):
    """Sums in the stated order, then global scales, alpha, bias and output, each rounded once."""
    case = Product(pair, (3, 0, 4), 32, 160, transpose_b=transpose_b)
    bias, alpha = torch.randn(3, 32), torch.tensor([1.7, 2.0, -0.3])
    initial = torch.randn(len(case.x), 32).bfloat16()
    plain, total = torch.zeros(len(case.x), 32), initial.float()
    for g, rows, a, b in case.members():
        acc, factor = accumulator_and_factor(a, b)
        plain[rows] = scaled(acc, factor)
        total[rows] = scaled(acc, factor, alpha[g]) + bias[g] + initial[rows].float()
    for dtype in DTYPES.values():
        assert_same_bytes(case.run(None, None, dtype), plain.to(dtype))
    out = case.run_out(initial.clone(), bias, alpha, accumulate=True)
    assert_same_bytes(out, total.bfloat16())


@each_pair
def test_wgrads_have_the_documented_bits(pair):
    """Compare wgrad with the documented bits."""
    case = Wgrad(pair, (7, 0, 131), 32, 32)
    alpha, initial = torch.tensor([0.9, 5.0, 1.1]), torch.randn(3, 32, 32)
    plain, total = torch.zeros(3, 32, 32), initial.clone()
    for g, a, b in case.members():
        acc, factor = accumulator_and_factor(a, b)
        plain[g] = scaled(acc, factor)
        total[g] = scaled(acc, factor, alpha[g]) + initial[g]
    for dtype in DTYPES.values():
        assert_same_bytes(case.run(None, dtype), plain.to(dtype))
    out = initial.clone()
    ops.k_grouped_gemm_out(*case.arguments(alpha), out=out, accumulate=True)
    assert_same_bytes(out, total)


@each_direction
@pytest.mark.parametrize("pair", RAGGED_K.values(), ids=RAGGED_K)
@pytest.mark.parametrize("depth", [16, 48, 112, 144, 272])
def test_k_may_end_inside_a_block(pair, transpose_b, depth):
    """Check products whose K ends inside a block."""
    case = Product(pair, (2, 1), 16, depth, transpose_b=transpose_b)
    want = torch.zeros(len(case.x), 16)
    for _, rows, a, b in case.members():
        want[rows] = scaled(*accumulator_and_factor(a, b))
    assert_same_bytes(case.run(), want)


@each_kind
def test_1500_groups(pair):
    """Check products of 1500 groups."""
    offs = offs_of_many_groups()
    rows = int(offs[-1])
    x, w = sample(rows, 32), sample(len(offs), 16, 32)
    a, b = quantize_operand(x, pair[0], offs), quantize_operand(w, pair[1])
    got = ops.m_grouped_gemm(*m_grouped_arguments(a, b, offs, out_dtype=F32, **texts(pair)))
    copies = columnwise(pair, (x, x), offs)
    wgrad = run_wgrad(pair, copies, offs)
    start = 0
    for g, end in enumerate(offs.tolist()):
        if g % 97 == 0 or end - start > 2:
            pairs = [fp8_oracle.member(pair[0], a, g, end - start, start)]
            pairs.append(fp8_oracle.member(pair[1], b, g, 16))
            if start < end:
                assert_same_bytes(
                    got[start:end], scaled(*accumulator_and_factor(*pairs)), f"group {g}"
                )
                want = scaled(
                    *accumulator_and_factor(*columnwise_members(pair, copies, g, start, end))
                )
                assert_same_bytes(wgrad[g], want, f"wgrad of group {g}")
            else:
                assert not wgrad[g].any()
        start = end


@each_kind
@pytest.mark.parametrize("accumulate", [False, True])
def test_out_forms_leave_tail_and_empty_groups_unchanged(pair, accumulate):
    """Check that out forms leave the tail and empty groups unchanged."""
    case = Product(pair, (20, 0, 12), tail=9)
    functional = case.run()
    out = poisoned(functional)
    if accumulate:
        out[:32] = 0.0
    untouched = out.clone()
    case.run_out(out, accumulate=accumulate)
    assert_same_bytes(out, torch.cat([functional[:32], untouched[32:]]))
    check_empty_wgrad(*Wgrad(pair, (20, 0, 12)).arguments())


@each_fp8
def test_nan_stays_in_its_row_and_group(pair):
    """Check that NaN affects only its row and its group."""
    case = Product(pair, (3, 4), tail=0)
    x = case.x.clone()
    x[1, 5] = torch.nan
    case.a = quantize_operand(x, pair[0], case.offs)
    rows = case.run().isnan()
    assert rows[1].all() and not rows[0].any() and not rows[2:].any()
    copy = quantize_operand(x, pair[0], case.offs, columnwise=True)
    got = run_wgrad([pair[0]] * 2, [copy, copy], case.offs)
    assert got[0, 5].isnan().all() and got[0, :, 5].isnan().all()
    assert got.isnan().sum() == 2 * case.depth - 1


@each_direction
@each_fp8
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_plain_activations_times_quantized_weights(pair, transpose_b, dtype):
    """Compare plain activations times quantized weights with rounded fp64 products."""
    case = Product(pair, (20, 0, 12), transpose_b=transpose_b)
    bias, alpha = torch.randn(3, 32), torch.tensor([1.7, 2.0, -0.3])
    x = case.x.to(dtype)
    got = ops.m_grouped_gemm(
        *m_grouped_arguments(x, case.b, case.offs, bias, alpha, transpose_b, F32, b_format=pair[1])
    )
    for g, rows, _, b in case.members():
        acc = (x[rows].double() @ torch.from_numpy(b.values()).T).float()
        global_scale = None if b.level is None else torch.tensor(b.level)
        assert_same_bytes(got[rows], scaled(acc, global_scale, alpha[g]) + bias[g])
    assert not got[32:].any()


@each_direction
@each_pair
def test_quantizing_on_the_fly_gives_the_bits_of_two_ops(pair, transpose_b):
    case = Product(pair, (20, 0, 12), transpose_b=transpose_b)
    bias, alpha = torch.randn(3, 32), torch.rand(3)
    for x, dtype in itertools.product((case.x, case.x.float()), (F32, BF16)):
        got = ops.m_grouped_quantize_gemm(
            *(x, case.b[0], case.offs, case.b[1:], *pair, bias, alpha, transpose_b, dtype)
        )
        assert_same_bytes(got, case.run(bias, alpha, dtype))


def test_delayed_scaling_times_current_scaling():
    """Check a product of delayed-scaling and current-scaling codes."""
    case = Product(KINDS["fp8"], (20, 0, 12))
    scale = torch.tensor([3.0, 1.0, 0.25])
    codes, scale_inv, *_ = ops.grouped_quantize(
        case.x, "fp8:scaling=delayed", case.offs, scale=scale
    )
    case.a, case.pair = [codes, scale_inv], ("fp8:scaling=delayed", "fp8")
    got = case.run()
    for g, rows, a, b in case.members():
        assert a.level == 1 / scale[g].numpy()
        assert_same_bytes(got[rows], scaled(*accumulator_and_factor(a, b)))
