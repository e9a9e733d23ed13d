"""Vectors that are not contiguous: every other entry of a longer one."""

import pytest
import torch

import cute_kernels
from cute_kernels import ops

pytest.importorskip("cutlass")


def results():
    torch.manual_seed(0)
    x, w = torch.randn(100, 32).bfloat16(), torch.randn(3, 16, 32).bfloat16()
    offs = torch.tensor([10, 0, 40, 0, 90, 0], dtype=torch.int32)[::2]
    alpha = torch.rand(6)[::2]
    assert not (offs.is_contiguous() or alpha.is_contiguous())
    yield ops.compute_offsets(torch.tensor([1, 0, 2, 0])[::2], 1, torch.int32)
    yield ops.grouped_amax(x, offs)
    yield ops.grouped_dbias(x, offs)
    yield ops.m_grouped_gemm(x, w, offs, None, alpha)
    yield ops.k_grouped_gemm(x, x, offs, alpha)
    for row_scaled, columnwise in ((True, False), (False, False), (True, True)):
        q = ops.grouped_quantize_nvfp4(x, offs, None, row_scaled, False, True, columnwise)
        yield ops.grouped_dequantize_nvfp4(*q[:3], offs, 100, torch.float32, row_scaled)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_take_strided_vectors(arch):
    with cute_kernels.backend(f"reference:{arch}"):
        want = list(results())
    with cute_kernels.backend(f"emulated:{arch}"):
        got = list(results())
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
