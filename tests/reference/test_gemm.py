"""GEMMs of the reference on plain operands, against fp64 products; invalid end rows."""

import pytest
import torch

from cute_kernels.ops.checks import unchecked_end_rows
from tests.helpers import (
    BF16,
    DTYPES,
    F32,
    assert_all_same,
    assert_same_bytes,
    dequantize_arguments,
    offs_from_splits,
    offs_tensor,
    ops,
    poisoned,
    row_ranges,
    sample,
)


def check_empty_wgrad(*arguments):
    """Check the second, empty group: zeros, or unchanged if the op accumulates."""
    functional = ops.k_grouped_gemm(*arguments)
    assert not functional[1].any()
    written, accumulated = poisoned(functional), poisoned(functional)
    ops.k_grouped_gemm_out(*arguments, out=written)
    assert_same_bytes(written, functional)
    ops.k_grouped_gemm_out(*arguments, out=accumulated, accumulate=True)
    assert_same_bytes(accumulated[1], poisoned(functional)[1])


def test_wgrad_of_an_empty_group_is_zero_or_unchanged():
    x = sample(32, 16)
    check_empty_wgrad(x, x, offs_from_splits((20, 0, 12)))


INVALID_END_ROWS = [[-5, 30], [30, 10], [10, 999], [2**31 - 1, -(2**31)], [-1, -1], [0, 0]]


@pytest.mark.parametrize("rows", INVALID_END_ROWS, ids=str)
@unchecked_end_rows()
def test_invalid_end_rows_act_as_their_clamped_values(rows):
    """Check that invalid end rows give the results of clamped ones."""
    x, w = sample(40, 32), sample(2, 24, 32)
    offs = offs_tensor(*rows)
    clamped = offs.clamp(0, 40).cummax(0).values.int()
    a = ops.grouped_quantize(x, "nvfp4", clamped, columnwise=True)

    def results(offs):
        yield from (ops.m_grouped_gemm(x, w, offs), ops.k_grouped_gemm(x, x, offs))
        yield from (ops.grouped_dbias(x, offs), ops.grouped_amax(x, offs))
        for copy, columnwise in ((a[:3], False), (a[3:], True)):
            yield ops.grouped_dequantize(
                *dequantize_arguments(copy, "nvfp4", 40, BF16, offs, columnwise)
            )

    assert_all_same(results(offs), results(clamped))
    out = torch.full((50, 24), 7.0)  # the operand ends at row 40 of a larger buffer
    ops.m_grouped_gemm_out(x, w, offs, out_dtype=F32, out=out[:40])
    assert (out[40:] == 7.0).all() and (out[int(clamped[-1]) : 40] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("transpose_b", [False, True])
def test_plain_fprop_is_the_fp64_product_rounded(dtype, out_dtype, transpose_b):
    """Compare plain fprop with the rounded fp64 product."""
    splits = (20, 0, 33, 1)
    x, offs = torch.randn(58).repeat(70, 1).T.to(dtype), offs_from_splits(splits)
    x = x * torch.randn(58, 70).to(dtype)
    w = torch.randn(4, 24, 70).to(dtype)
    b = w.mT if transpose_b else w
    bias, alpha = torch.randn(4, 24), torch.tensor([1.5, 2.0, -0.7, 0.1])
    got = ops.m_grouped_gemm(x, b, offs, bias, alpha, transpose_b, out_dtype)
    want = torch.zeros(58, 24)
    for g, (start, end) in enumerate(row_ranges(splits)):
        acc = (x[start:end].double() @ w[g].double().T).float()
        want[start:end] = acc * alpha[g] + bias[g]
    assert_same_bytes(got, want.to(out_dtype))
    total = torch.full((58, 24), 3.0, dtype=out_dtype)
    ops.m_grouped_gemm_out(
        x, b, offs, bias, alpha, transpose_b, out_dtype, out=total, accumulate=True
    )
    assert_same_bytes(total[:54], (want[:54] + 3.0).to(out_dtype))
    assert (total[54:] == 3.0).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES.values(), ids=DTYPES)
def test_plain_wgrad_is_the_fp64_product_rounded(dtype, out_dtype):
    """Compare plain wgrad with the rounded fp64 product."""
    splits = (20, 0, 33)
    a, b = torch.randn(55, 8).to(dtype), torch.randn(55, 12).to(dtype)
    alpha = torch.tensor([1.5, 2.0, -0.7])
    got = ops.k_grouped_gemm(a, b, offs_from_splits(splits), alpha, out_dtype)
    for g, (start, end) in enumerate(row_ranges(splits)):
        want = (a[start:end].double().T @ b[start:end].double()).float() * alpha[g]
        assert_same_bytes(got[g], want.to(out_dtype))


def test_nan_and_inf_of_plain_operands_stay_in_their_group():
    """Check that NaN and infinity of plain operands affect only their rows."""
    x = torch.ones(6, 4)
    x[1, 2], x[4, 0] = torch.nan, torch.inf
    out = ops.m_grouped_gemm(x, torch.ones(2, 3, 4), offs_from_splits((2, 4)))
    assert out[:, 0].isnan().tolist() == [False, True, False, False, False, False]
    assert out[:, 0].isinf().tolist() == [False, False, False, False, True, False]
