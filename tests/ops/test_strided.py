"""Buffers that kernels cannot take as they are: strided vectors, dense codes, odd addresses."""

import pytest
import torch

import cute_kernels
from cute_kernels import ops
from tests.helpers import assert_same_bytes

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


def shifted(*shape, dtype):
    """A dense tensor of a pattern, one element off an aligned address."""
    out = torch.full((torch.Size(shape).numel() + 1,), 0x25).to(dtype)[1:].view(shape)
    assert out.data_ptr() % 16
    return out


def written():
    """Outputs over a pattern: of 8 bytes a row where kernels need 16, or with odd addresses."""
    torch.manual_seed(0)
    flat, u8 = torch.ops.cute_kernels, torch.uint8
    x, w = torch.randn(100, 16).bfloat16(), torch.randn(3, 32, 16).bfloat16()
    offs = torch.tensor([10, 40, 90], dtype=torch.int32)
    for row_scaled in (True, False):
        codes, scales = torch.full((100, 8), 0xA5, dtype=u8), shifted(3, 1, 512, dtype=u8)
        amax = shifted(100 if row_scaled else 3, dtype=torch.float32)
        flat.grouped_quantize_nvfp4_out(
            *(x, offs, None, row_scaled), out_codes=codes, out_scales=scales, out_amax=amax
        )
        assert (codes[90:] == 0xA5).all()
        yield from (codes, scales, amax)
        out = shifted(100, 16, dtype=torch.bfloat16)
        flat.grouped_dequantize_nvfp4_out(
            *(codes, scales, amax, offs, 100, out.dtype, row_scaled), out=out
        )
        yield out
    out = shifted(100, 32, dtype=torch.float32)
    flat.m_grouped_gemm_out(x, w, offs, out_dtype=out.dtype, out=out, accumulate=True)
    assert (out[90:] == 0x25).all()
    yield out


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_outputs_that_kernels_cannot_write_keep_the_rest(arch):
    with cute_kernels.backend(f"reference:{arch}"):
        want = list(written())
    with cute_kernels.backend(f"emulated:{arch}"):
        got = list(written())
    for a, b in zip(got, want, strict=True):
        assert_same_bytes(a, b)


def misaligned(x):
    """``x`` one element into a buffer, as a view of a flat parameter is."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert flat.data_ptr() % 16
    return flat


def products(place, bias_dtype):
    """Every GEMM with its vectors where ``place`` puts them."""
    torch.manual_seed(0)
    x, w, dy = (torch.randn(*shape).bfloat16() for shape in ((9, 32), (3, 16, 32), (9, 16)))
    bias, alpha = torch.randn(3, 16).to(bias_dtype), torch.rand(3) + 0.5
    offs = place(torch.tensor([4, 4, 8], dtype=torch.int32))
    amax = place(torch.tensor([3.0, 4.0, 5.0]))
    vectors = (offs, place(bias), place(alpha))
    q = ops.grouped_quantize_nvfp4(x, offs, amax, False, False, True, True)
    row_scaled = ops.grouped_quantize_nvfp4(x, offs, None, True, False, True, False)
    grad = ops.grouped_quantize_nvfp4(dy, offs, None, False, False, False, True)
    weight = ops.grouped_quantize_nvfp4(w, None, None, False, False, True, False)
    held = (*weight[:2], place(weight[2]))
    yield from q[:3]
    yield ops.m_grouped_gemm(x, w, *vectors)
    yield ops.k_grouped_gemm(dy, x, offs, vectors[2])
    yield ops.m_grouped_gemm_nvfp4(*q[:2], place(q[2]), *held, *vectors)
    options = (True, torch.float16)
    yield ops.m_grouped_gemm_nvfp4(*row_scaled[:2], place(row_scaled[2]), *held, *vectors, *options)
    yield ops.m_grouped_quantize_gemm_nvfp4(x, *held, *vectors, True)
    if cute_kernels.active_backend(x.device).name.endswith("sm_90a"):
        yield ops.m_grouped_gemm_w4a16(x, *held, *vectors)
    left, right = (*grad[3:5], place(grad[5])), (*q[3:5], place(q[5]))
    yield ops.k_grouped_gemm_nvfp4(*left, *right, offs, vectors[2])


BIAS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("bias_dtype", BIAS_DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_vectors_may_have_any_address(arch, bias_dtype):
    with cute_kernels.backend(f"reference:{arch}"):
        want = list(products(torch.clone, bias_dtype))
    with cute_kernels.backend(f"emulated:{arch}"):
        got = list(products(misaligned, bias_dtype))
    for a, b in zip(got, want, strict=True):
        assert_same_bytes(a, b)


def small_vectors(place):
    x, offs = torch.randn(9, 32).bfloat16(), place(torch.tensor([4, 4, 8], dtype=torch.int32))
    q = ops.grouped_quantize_nvfp4(x, offs, None, True, False, True, False)
    yield ops.grouped_amax(x, offs)
    yield ops.grouped_dbias(x, offs)
    yield ops.compute_offsets(place(torch.tensor([4, 0, 4], dtype=torch.int32)), 3, torch.int64)
    yield ops.compute_offsets(place(torch.tensor([4, 0, 4])), 3, torch.int32)
    operands = (*q[:2], place(q[2]), offs, 9, torch.float32, True, False)
    yield ops.grouped_dequantize_nvfp4(*operands)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_vectors_of_the_other_ops_may_have_any_address(arch):
    torch.manual_seed(0)
    want = list(small_vectors(torch.clone))
    torch.manual_seed(0)
    with cute_kernels.backend(f"emulated:{arch}"):
        got = list(small_vectors(misaligned))
    for a, b in zip(got, want, strict=True):
        assert_same_bytes(a, b)
