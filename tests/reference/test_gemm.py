"""Grouped GEMMs: exact order, epilogue, groups, tails; and fp64 bounds."""

import math

import numpy as np
import pytest
import torch

from tests.helpers import (
    SPLITS,
    assert_same_bytes,
    dtype_ulp,
    end_rows,
    offsets,
    ops,
    poisoned,
    sample,
)
from tests.reference import oracle

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPLITS_OF_GEMM = {**SPLITS, "tile edges": (127, 129, 1)}


class Fprop:
    """Quantized operands of a product of ragged rows and (G, N, K) matrices."""

    def __init__(self, splits, cols, depth, *, row_scaled=False, tail=0, transpose_b=False):
        self.x = sample(sum(splits) + tail, depth)
        shape = (depth, cols) if transpose_b else (cols, depth)
        self.w = sample(len(splits), *shape)
        self.offs, self.splits = offsets(splits), splits
        self.row_scaled = row_scaled
        self.a = ops.grouped_quantize_nvfp4(self.x, self.offs, row_scaled=row_scaled)[:3]
        w = ops.grouped_quantize_nvfp4(self.w, columnwise=True, block_2d=transpose_b)
        self.b = w[3:] if transpose_b else w[:3]
        self.w_values = ops.grouped_dequantize_nvfp4(
            *self.b, None, shape[0], torch.float32, columnwise=transpose_b
        )
        self.x_values = ops.grouped_dequantize_nvfp4(
            *self.a, self.offs, len(self.x), torch.float32, row_scaled=row_scaled
        )
        if transpose_b:
            self.w_values = self.w_values.mT

    def run(self, bias=None, alpha=None, dtype=torch.float32):
        return ops.m_grouped_gemm_nvfp4(
            *self.a, *self.b, self.offs, bias, alpha, self.row_scaled, dtype
        )

    def run_out(self, out, bias=None, alpha=None, accumulate=False):
        operands = (*self.a, *self.b, self.offs, bias, alpha, self.row_scaled, out.dtype)
        ops.m_grouped_gemm_nvfp4_out(*operands, out=out, accumulate=accumulate)
        return out

    def exact(self):
        """fp64 product of the dequantized operands, and |a||b| for the bound."""
        out = torch.zeros(len(self.x), self.w_values.shape[1], dtype=torch.float64)
        size, start = out.clone(), 0
        for g, rows in enumerate(self.splits):
            a, b = self.x_values[start : start + rows].double(), self.w_values[g].double()
            out[start : start + rows] = a @ b.T
            size[start : start + rows] = a.abs() @ b.abs().T
            start += rows
        return out, size


def assert_within_bound(got, want, size, depth):
    """4 * 2^-24 * sqrt(K) * |a||b| for the accumulation, and one ulp of the output."""
    allowed = 4 * 2.0**-24 * math.sqrt(depth) * size + dtype_ulp(want, got.dtype)
    assert ((got.double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row_scaled", [False, True])
@pytest.mark.parametrize("splits", SPLITS_OF_GEMM.values(), ids=SPLITS_OF_GEMM)
def test_nvfp4_fprop_against_fp64(splits, row_scaled, dtype):
    case = Fprop(splits, 40, 112, row_scaled=row_scaled, tail=3)
    want, size = case.exact()
    got = case.run(dtype=dtype)
    assert got.dtype == dtype
    fits = want.abs() < torch.finfo(dtype).max
    assert_within_bound(got[fits], want[fits], size[fits], 112)
    assert got[~fits].isinf().all()
    assert not got[sum(splits) :].any()  # the tail


@pytest.mark.parametrize("depth", [16, 48, 128, 272])
def test_nvfp4_dgrad_reads_the_columnwise_copy(depth):
    case = Fprop((20, 0, 33), 32, depth, transpose_b=True)
    want, size = case.exact()
    assert_within_bound(case.run(), want, size, depth)


@pytest.mark.parametrize("splits", SPLITS_OF_GEMM.values(), ids=SPLITS_OF_GEMM)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4_wgrad_against_fp64(splits, dtype):
    offs, rows = offsets(splits), sum(splits)
    copies, values = [], []
    for cols in (32, 48):
        x = sample(rows + 2, cols) / 8
        q = ops.grouped_quantize_nvfp4(x, offs, rowwise=False, columnwise=True)[3:]
        copies += q
        values.append(
            ops.grouped_dequantize_nvfp4(*q, offs, rows + 2, torch.float32, columnwise=True)
        )
    got = ops.k_grouped_gemm_nvfp4(*copies, offs, None, dtype)
    start = 0
    for g, end in enumerate(end_rows(splits)):
        a, b = (v[start:end].double() for v in values)
        want, size = a.T @ b, a.abs().T @ b.abs()
        fits = want.abs() < torch.finfo(dtype).max
        assert_within_bound(got[g][fits], want[fits], size[fits], max(1, end - start))
        if start == end:
            assert_same_bytes(got[g], torch.zeros_like(got[g]))
        start = end


@pytest.mark.parametrize("row_scaled", [False, True])
def test_nvfp4_fprop_adds_blocks_in_order_and_scales_in_order(row_scaled):
    """Byte for byte: blocks ascending in fp32, then factor, alpha, bias, output, one cast each."""
    splits, cols, depth = (3, 0, 5), 6, 272
    case = Fprop(splits, cols, depth, row_scaled=row_scaled)
    groups, tiles = oracle.ragged_groups(end_rows(splits), 8)
    q = oracle.quantize(case.x.float().numpy(), groups, tiles, row_scaled=row_scaled)
    a = oracle.row_values(q, groups, depth)
    members, all_tiles = oracle.uniform_groups(3, cols)
    p = oracle.quantize(case.w.float().flatten(0, 1).numpy(), members, all_tiles, uniform=True)
    b = oracle.row_values(p, members, depth).reshape(3, cols, depth)
    bias, alpha = torch.randn(3, cols), torch.tensor([1.7, 2.0, -0.3])
    start_value = torch.randn(8, cols).bfloat16()
    plain, with_all = np.zeros((8, cols), np.float32), np.zeros((8, cols), np.float32)
    for g, group in enumerate(groups):
        for r in range(group.start, group.end):
            amax = q.amax[r] if row_scaled else q.amax[g]
            factor = oracle.nvfp4_factor(amax, p.amax[g])
            for n in range(cols):
                acc = oracle.dot_blocks(a[r], b[g, n])
                plain[r, n] = acc * factor
                scaled = acc * (factor * np.float32(alpha[g]))
                biased = scaled + np.float32(bias[g, n])
                with_all[r, n] = biased + np.float32(start_value[r, n].item())
    assert_same_bytes(case.run(), torch.from_numpy(plain))
    for dtype in DTYPES:
        assert_same_bytes(case.run(dtype=dtype), torch.from_numpy(plain).to(dtype))
    out = case.run_out(start_value.clone(), bias, alpha, accumulate=True)
    assert_same_bytes(out, torch.from_numpy(with_all).bfloat16())


def test_nvfp4_wgrad_adds_blocks_of_each_group_in_order():
    splits = (70, 0, 35)
    offs = offsets(splits)
    x, dy = sample(105, 16), sample(105, 32)
    groups, tiles = oracle.ragged_groups(end_rows(splits), 105)
    q, p = (oracle.quantize(t.float().numpy(), groups, tiles) for t in (dy, x))
    a, b = oracle.column_values(q, groups, 32), oracle.column_values(p, groups, 16)
    alpha, start_value = torch.tensor([0.9, 5.0, 1.1]), torch.randn(3, 32, 16)
    plain, total = np.zeros((3, 32, 16), np.float32), start_value.numpy().copy()
    for g, group in enumerate(groups):
        if group.start == group.end:
            continue
        factor = oracle.nvfp4_factor(q.amax_t[g], p.amax_t[g])
        rows = slice(group.start, group.end)
        for n in range(32):
            for k in range(16):
                acc = oracle.dot_blocks(a[rows, n], b[rows, k])
                plain[g, n, k] = acc * factor
                total[g, n, k] = acc * (factor * np.float32(alpha[g])) + total[g, n, k]
    copies = [t for y in (dy, x) for t in ops.grouped_quantize_nvfp4(y, offs, columnwise=True)[3:]]
    assert_same_bytes(
        ops.k_grouped_gemm_nvfp4(*copies, offs, None, torch.float32), torch.from_numpy(plain)
    )
    out = start_value.clone()
    ops.k_grouped_gemm_nvfp4_out(*copies, offs, alpha, torch.float32, out=out, accumulate=True)
    assert_same_bytes(out, torch.from_numpy(total))


@pytest.mark.parametrize("row_scaled", [False, True])
def test_nvfp4_groups_equal_calls_of_their_own(row_scaled):
    splits = (130, 0, 7, 64)
    case = Fprop(splits, 40, 80, row_scaled=row_scaled)
    bias, alpha = torch.randn(4, 40), torch.rand(4)
    got = case.run(bias, alpha)
    start = 0
    for g, rows in enumerate(splits):
        whole = torch.tensor([rows], dtype=torch.int32)
        part = case.x[start : start + rows]
        a = ops.grouped_quantize_nvfp4(part, whole, row_scaled=row_scaled)[:3]
        b = [t[g : g + 1] for t in case.b]
        want = ops.m_grouped_gemm_nvfp4(
            *a, *b, whole, bias[g : g + 1], alpha[g : g + 1], row_scaled, torch.float32
        )
        assert_same_bytes(got[start : start + rows], want)
        start += rows


def test_nvfp4_wgrad_groups_equal_calls_of_their_own():
    splits = (130, 0, 7, 64)
    offs, x = offsets(splits), sample(201, 48)
    q = ops.grouped_quantize_nvfp4(x, offs, columnwise=True)[3:]
    got = ops.k_grouped_gemm_nvfp4(*q, *q, offs, None, torch.float32)
    for g, part in enumerate(x.split(splits)):
        whole = torch.tensor([len(part)], dtype=torch.int32)
        p = ops.grouped_quantize_nvfp4(part, whole, columnwise=True)[3:]
        want = ops.k_grouped_gemm_nvfp4(*p, *p, whole, None, torch.float32)
        assert_same_bytes(got[g : g + 1], want)


@pytest.mark.parametrize("accumulate", [False, True])
def test_out_form_leaves_tail_and_empty_groups_alone(accumulate):
    splits = (20, 0, 12)
    case = Fprop(splits, 24, 32, tail=9)
    functional = case.run()
    out = poisoned(functional)
    if accumulate:
        out[:32] = 0.0
    untouched = out.clone()
    case.run_out(out, accumulate=accumulate)
    assert_same_bytes(out, torch.cat([functional[:32], untouched[32:]]))
    plain = ops.m_grouped_gemm(case.x, case.w, case.offs, out_dtype=torch.float32)
    out = untouched.clone()
    ops.m_grouped_gemm_out(
        case.x, case.w, case.offs, out_dtype=torch.float32, out=out, accumulate=accumulate
    )
    assert_same_bytes(out, torch.cat([plain[:32], untouched[32:]]))


@pytest.mark.parametrize("quantized", [False, True])
def test_wgrad_of_an_empty_group_is_zero_or_unchanged(quantized):
    offs, x = offsets((20, 0, 12)), sample(32, 16)
    q = ops.grouped_quantize_nvfp4(x, offs, columnwise=True)[3:]
    operands = (*q, *q, offs, None, torch.float32) if quantized else (x, x, offs, None, x.dtype)
    name = "k_grouped_gemm_nvfp4" if quantized else "k_grouped_gemm"
    functional = getattr(ops, name)(*operands)
    assert not functional[1].any()
    written = poisoned(functional)
    getattr(ops, f"{name}_out")(*operands, out=written)
    assert_same_bytes(written, functional)
    kept = poisoned(functional)
    getattr(ops, f"{name}_out")(*operands, out=kept, accumulate=True)
    assert_same_bytes(kept[1], poisoned(functional)[1])


def test_tail_of_the_operands_is_not_read():
    splits = (20, 0, 12)
    case = Fprop(splits, 24, 32, tail=200)
    want = case.run()
    codes, scales, amax = (t.clone() for t in case.a)
    codes[32:] = 0xFF
    live = torch.tensor([0, 2])  # the tiles of groups 0 and 2
    used = scales[live].clone()
    scales.fill_(0x7F)  # NaN
    scales[live] = used
    case.a = (codes, scales, amax)
    assert_same_bytes(case.run(), want)
    x = case.x.clone()
    x[32:] = torch.nan
    assert_same_bytes(
        ops.m_grouped_gemm(x, case.w, case.offs), ops.m_grouped_gemm(case.x, case.w, case.offs)
    )
    assert_same_bytes(
        ops.k_grouped_gemm(x, x, case.offs), ops.k_grouped_gemm(case.x, case.x, case.offs)
    )


GARBAGE = [[-5, 30], [30, 10], [10, 999], [2**31 - 1, -(2**31)], [-1, -1]]


@pytest.mark.parametrize("ends", GARBAGE, ids=str)
def test_garbage_offsets_act_as_their_clamped_values(ends):
    x, w = sample(40, 32), sample(2, 24, 32)
    given = torch.tensor(ends, dtype=torch.int32)
    legal = given.clamp(0, 40).cummax(0).values.int()
    a, b = (ops.grouped_quantize_nvfp4(x, offs, columnwise=True) for offs in (given, legal))
    v = ops.grouped_quantize_nvfp4(w)[:3]
    for i in range(6):
        assert_same_bytes(a[i], b[i])
    pairs = [
        [ops.m_grouped_gemm_nvfp4(*a[:3], *v, offs) for offs in (given, legal)],
        [ops.k_grouped_gemm_nvfp4(*a[3:], *a[3:], offs) for offs in (given, legal)],
        [ops.m_grouped_gemm(x, w, offs) for offs in (given, legal)],
        [ops.k_grouped_gemm(x, x, offs) for offs in (given, legal)],
        [ops.grouped_dbias(x, offs) for offs in (given, legal)],
        [ops.grouped_amax(x, offs) for offs in (given, legal)],
        [ops.grouped_dequantize_nvfp4(*a[:3], o, 40, torch.bfloat16) for o in (given, legal)],
        [
            ops.grouped_dequantize_nvfp4(*a[3:], o, 40, torch.bfloat16, columnwise=True)
            for o in (given, legal)
        ],
    ]
    for got, want in pairs:
        assert_same_bytes(got, want)
    out = torch.full((50, 24), 7.0)  # the operand ends at row 40 of a larger buffer
    ops.m_grouped_gemm_out(x, w, given, out_dtype=torch.float32, out=out[:40])
    assert (out[40:] == 7.0).all() and (out[int(legal[-1]) : 40] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transpose_b", [False, True])
def test_plain_fprop_is_the_fp64_product_rounded(dtype, out_dtype, transpose_b):
    splits = (20, 0, 33, 1)
    x, offs = torch.randn(58).repeat(70, 1).T.to(dtype), offsets(splits)
    x = x * torch.randn(58, 70).to(dtype)
    w = torch.randn(4, 24, 70).to(dtype)
    b = w.mT if transpose_b else w
    bias, alpha = torch.randn(4, 24), torch.tensor([1.5, 2.0, -0.7, 0.1])
    got = ops.m_grouped_gemm(x, b, offs, bias, alpha, transpose_b, out_dtype)
    want = torch.zeros(58, 24)
    start = 0
    for g, end in enumerate(end_rows(splits)):
        acc = (x[start:end].double() @ w[g].double().T).float()
        want[start:end] = acc * alpha[g] + bias[g]
        start = end
    assert_same_bytes(got, want.to(out_dtype))
    total = torch.full((58, 24), 3.0, dtype=out_dtype)
    operands = (x, b, offs, bias, alpha, transpose_b, out_dtype)
    ops.m_grouped_gemm_out(*operands, out=total, accumulate=True)
    assert_same_bytes(total[:54], (want[:54] + 3.0).to(out_dtype))
    assert (total[54:] == 3.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_plain_wgrad_is_the_fp64_product_rounded(dtype, out_dtype):
    splits = (20, 0, 33)
    a, b = torch.randn(55, 8).to(dtype), torch.randn(55, 12).to(dtype)
    alpha = torch.tensor([1.5, 2.0, -0.7])
    got = ops.k_grouped_gemm(a, b, offsets(splits), alpha, out_dtype)
    start = 0
    for g, end in enumerate(end_rows(splits)):
        want = (a[start:end].double().T @ b[start:end].double()).float() * alpha[g]
        assert_same_bytes(got[g], want.to(out_dtype))
        start = end


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_plain_groups_equal_calls_of_their_own(splits):
    x, dy, w = sample(sum(splits), 48), sample(sum(splits), 16), sample(len(splits), 16, 48)
    fprop = ops.m_grouped_gemm(x, w, offsets(splits))
    wgrad = ops.k_grouped_gemm(dy, x, offsets(splits))
    start = 0
    for g, rows in enumerate(splits):
        whole, part = torch.tensor([rows], dtype=torch.int32), slice(start, start + rows)
        assert_same_bytes(fprop[part], ops.m_grouped_gemm(x[part], w[g : g + 1], whole))
        assert_same_bytes(wgrad[g : g + 1], ops.k_grouped_gemm(dy[part], x[part], whole))
        start += rows


def test_nan_and_inf_of_plain_operands_stay_in_their_group():
    x = torch.ones(6, 4)
    x[1, 2], x[4, 0] = torch.nan, torch.inf
    out = ops.m_grouped_gemm(x, torch.ones(2, 3, 4), offsets((2, 4)))
    assert out[:, 0].isnan().tolist() == [False, True, False, False, False, False]
    assert out[:, 0].isinf().tolist() == [False, False, False, False, True, False]
