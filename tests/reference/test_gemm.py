"""Grouped GEMMs: exact order, epilogue, groups, tails; and fp64 bounds."""

import math

import numpy as np
import pytest
import torch

from tests.helpers import (
    DTYPES,
    SPLITS,
    assert_same_bytes,
    dequantize_arguments,
    dtype_ulp,
    end_rows,
    ends,
    k_grouped_arguments,
    m_grouped_arguments,
    offsets,
    ops,
    poisoned,
    sample,
)
from tests.reference import oracle

SPLITS_OF_GEMM = {**SPLITS, "tile edges": (127, 129, 1)}


class Fprop:
    """Quantized operands of a product of ragged rows and (G, N, K) matrices."""

    def __init__(self, splits, cols, depth, *, row_scaled=False, tail=0, transpose_b=False):
        self.x = sample(sum(splits) + tail, depth)
        shape = (depth, cols) if transpose_b else (cols, depth)
        self.w = sample(len(splits), *shape)
        self.offs, self.splits = offsets(splits), splits
        self.transpose_b = transpose_b
        self.a_format = "nvfp4:row_scaled" if row_scaled else "nvfp4"
        self.b_format = "nvfp4:block=16x16" if transpose_b else "nvfp4"
        self.a = ops.grouped_quantize(self.x, self.a_format, self.offs)
        w = ops.grouped_quantize(self.w, self.b_format, columnwise=True)
        self.b = w[3:] if transpose_b else w[:3]
        fp32 = torch.float32
        self.w_values = ops.grouped_dequantize(
            *dequantize_arguments(self.b, self.b_format, shape[0], fp32, None, transpose_b)
        )
        self.x_values = ops.grouped_dequantize(
            *dequantize_arguments(self.a, self.a_format, len(self.x), fp32, self.offs)
        )
        if transpose_b:
            self.w_values = self.w_values.mT

    def arguments(self, bias, alpha, dtype):
        options = (bias, alpha, self.transpose_b, dtype)
        formats = {"a_format": self.a_format, "b_format": self.b_format}
        return m_grouped_arguments(self.a, self.b, self.offs, *options, **formats)

    def run(self, bias=None, alpha=None, dtype=torch.float32):
        return ops.m_grouped_gemm(*self.arguments(bias, alpha, dtype))

    def run_out(self, out, bias=None, alpha=None, accumulate=False):
        arguments = self.arguments(bias, alpha, out.dtype)
        ops.m_grouped_gemm_out(*arguments, out=out, accumulate=accumulate)
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


def columnwise_copy(x, offs):
    return ops.grouped_quantize(x, "nvfp4", offs, rowwise=False, columnwise=True)


def assert_within_bound(got, want, size, depth):
    """4 * 2^-24 * sqrt(K) * |a||b| for the accumulation, and one ulp of the output."""
    allowed = 4 * 2.0**-24 * math.sqrt(depth) * size + dtype_ulp(want, got.dtype)
    assert ((got.double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
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
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_nvfp4_wgrad_against_fp64(splits, dtype):
    offs, rows = offsets(splits), sum(splits)
    copies, values = [], []
    for cols in (32, 48):
        x = sample(rows + 2, cols) / 8
        q = columnwise_copy(x, offs)
        copies.append(q)
        arguments = dequantize_arguments(q, "nvfp4", rows + 2, torch.float32, offs, True)
        values.append(ops.grouped_dequantize(*arguments))
    got = ops.k_grouped_gemm(*k_grouped_arguments(*copies, offs, None, dtype))
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
    for dtype in DTYPES.values():
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
    copies = [columnwise_copy(y, offs) for y in (dy, x)]
    product = ops.k_grouped_gemm(*k_grouped_arguments(*copies, offs, None, torch.float32))
    assert_same_bytes(product, torch.from_numpy(plain))
    out = start_value.clone()
    arguments = k_grouped_arguments(*copies, offs, alpha, torch.float32)
    ops.k_grouped_gemm_out(*arguments, out=out, accumulate=True)
    assert_same_bytes(out, torch.from_numpy(total))


@pytest.mark.parametrize("row_scaled", [False, True])
def test_nvfp4_groups_equal_calls_of_their_own(row_scaled):
    splits = (130, 0, 7, 64)
    case = Fprop(splits, 40, 80, row_scaled=row_scaled)
    bias, alpha = torch.randn(4, 40), torch.rand(4)
    got = case.run(bias, alpha)
    start = 0
    for g, rows in enumerate(splits):
        whole, one = ends(rows), slice(g, g + 1)
        a = ops.grouped_quantize(case.x[start : start + rows], case.a_format, whole)
        b = [t[one] for t in case.b]
        options = (bias[one], alpha[one], False, torch.float32)
        arguments = m_grouped_arguments(a, b, whole, *options, a_format=case.a_format)
        want = ops.m_grouped_gemm(*arguments)
        assert_same_bytes(got[start : start + rows], want)
        start += rows


def test_nvfp4_wgrad_groups_equal_calls_of_their_own():
    splits = (130, 0, 7, 64)
    offs, x = offsets(splits), sample(201, 48)
    q = columnwise_copy(x, offs)
    got = ops.k_grouped_gemm(*k_grouped_arguments(q, q, offs, None, torch.float32))
    for g, part in enumerate(x.split(splits)):
        whole = ends(len(part))
        p = columnwise_copy(part, whole)
        want = ops.k_grouped_gemm(*k_grouped_arguments(p, p, whole, None, torch.float32))
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
    operand = columnwise_copy(x, offs) if quantized else x
    dtype = torch.float32 if quantized else x.dtype
    arguments = k_grouped_arguments(operand, operand, offs, None, dtype)
    functional = ops.k_grouped_gemm(*arguments)
    assert not functional[1].any()
    written = poisoned(functional)
    ops.k_grouped_gemm_out(*arguments, out=written)
    assert_same_bytes(written, functional)
    kept = poisoned(functional)
    ops.k_grouped_gemm_out(*arguments, out=kept, accumulate=True)
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


@pytest.mark.parametrize("rows", GARBAGE, ids=str)
def test_garbage_offsets_act_as_their_clamped_values(rows):
    x, w = sample(40, 32), sample(2, 24, 32)
    given = ends(*rows)
    legal = given.clamp(0, 40).cummax(0).values.int()
    a, b = (ops.grouped_quantize(x, "nvfp4", offs, columnwise=True) for offs in (given, legal))
    v = ops.grouped_quantize(w, "nvfp4")
    for i in range(6):
        assert_same_bytes(a[i], b[i])
    pairs = [
        [ops.m_grouped_gemm(*m_grouped_arguments(a[:3], v, offs)) for offs in (given, legal)],
        [ops.k_grouped_gemm(*k_grouped_arguments(a[3:], a[3:], offs)) for offs in (given, legal)],
        [ops.m_grouped_gemm(x, w, offs) for offs in (given, legal)],
        [ops.k_grouped_gemm(x, x, offs) for offs in (given, legal)],
        [ops.grouped_dbias(x, offs) for offs in (given, legal)],
        [ops.grouped_amax(x, offs) for offs in (given, legal)],
        *[
            [
                ops.grouped_dequantize(
                    *dequantize_arguments(copy, "nvfp4", 40, torch.bfloat16, offs, columnwise)
                )
                for offs in (given, legal)
            ]
            for copy, columnwise in ((a[:3], False), (a[3:], True))
        ],
    ]
    for got, want in pairs:
        assert_same_bytes(got, want)
    out = torch.full((50, 24), 7.0)  # the operand ends at row 40 of a larger buffer
    ops.m_grouped_gemm_out(x, w, given, out_dtype=torch.float32, out=out[:40])
    assert (out[40:] == 7.0).all() and (out[int(legal[-1]) : 40] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES.values(), ids=DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES.values(), ids=DTYPES)
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
        whole, part = ends(rows), slice(start, start + rows)
        assert_same_bytes(fprop[part], ops.m_grouped_gemm(x[part], w[g : g + 1], whole))
        assert_same_bytes(wgrad[g : g + 1], ops.k_grouped_gemm(dy[part], x[part], whole))
        start += rows


def test_nan_and_inf_of_plain_operands_stay_in_their_group():
    x = torch.ones(6, 4)
    x[1, 2], x[4, 0] = torch.nan, torch.inf
    out = ops.m_grouped_gemm(x, torch.ones(2, 3, 4), offsets((2, 4)))
    assert out[:, 0].isnan().tolist() == [False, True, False, False, False, False]
    assert out[:, 0].isinf().tolist() == [False, False, False, False, True, False]
