"""Ops on no rows, no columns, no depth and empty groups."""

import pytest
import torch

from tests.helpers import (
    F32,
    dequantize_arguments,
    k_grouped_arguments,
    m_grouped_arguments,
    offs_tensor,
    ops,
)

from .test_quantize import every_format

NO_ROWS = offs_tensor(0, 0, 0)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
@every_format
def test_dequantizing_no_rows(text, columnwise, uniform):
    """Check that tensors without rows can be decoded."""
    x = torch.ones(*((3, 0) if uniform else (0,)), 64)
    offs = None if uniform else NO_ROWS
    copy = ops.grouped_quantize(x, text, offs, rowwise=not columnwise, columnwise=columnwise)
    out = ops.grouped_dequantize(*dequantize_arguments(copy, text, 0, F32, offs, columnwise))
    assert out.shape == x.shape


@pytest.mark.parametrize("shape", [(0, 16), (5, 0), (2, 5, 0), (2, 0, 16)])
def test_amax_without_elements_is_zero(shape):
    offs = None if len(shape) == 3 else offs_tensor(0, 0)
    assert ops.grouped_amax(torch.ones(shape), offs).tolist() == [0.0, 0.0]


def test_dbias_without_elements_is_zero():
    assert ops.grouped_dbias(torch.ones(0, 5), NO_ROWS).equal(torch.zeros(3, 5))
    assert ops.grouped_dbias(torch.ones(7, 5), NO_ROWS).equal(torch.zeros(3, 5))
    assert ops.grouped_dbias(torch.ones(7, 0), NO_ROWS).shape == (3, 0)


def test_gemm_without_columns():
    """Check products whose output has no columns."""
    offs = offs_tensor(3, 5)
    assert ops.m_grouped_gemm(torch.ones(5, 16), torch.ones(2, 0, 16), offs).shape == (5, 0)
    assert ops.k_grouped_gemm(torch.ones(5, 0), torch.ones(5, 4), offs).shape == (2, 0, 4)
    a = ops.grouped_quantize(torch.ones(5, 32), "nvfp4", offs, columnwise=True)
    b = ops.grouped_quantize(torch.ones(2, 0, 32), "nvfp4")
    assert ops.m_grouped_gemm(*m_grouped_arguments(a[:3], b, offs)).shape == (5, 0)
    none = (a[3][:0], a[4][:0], a[5])
    assert ops.k_grouped_gemm(*k_grouped_arguments(none, a[3:], offs)).shape == (2, 0, 32)


def test_gemm_without_depth_gives_the_bias():
    bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    out = ops.m_grouped_gemm(torch.ones(5, 0), torch.ones(2, 2, 0), offs_tensor(3, 5), bias)
    assert out.equal(bias[[0, 0, 0, 1, 1]])


def test_gemm_without_live_rows():
    """Check products of groups without rows."""
    a, b = torch.full((5, 16), torch.nan), torch.ones(3, 4, 16)
    assert ops.m_grouped_gemm(a, b, NO_ROWS).equal(torch.zeros(5, 4))
    assert ops.k_grouped_gemm(a, a, NO_ROWS).equal(torch.zeros(3, 16, 16))
    x = ops.grouped_quantize(a, "nvfp4", NO_ROWS, columnwise=True)
    w = ops.grouped_quantize(b, "nvfp4")
    assert not ops.m_grouped_gemm(*m_grouped_arguments(x[:3], w, NO_ROWS)).any()
    assert not ops.k_grouped_gemm(*k_grouped_arguments(x[3:], x[3:], NO_ROWS)).any()
