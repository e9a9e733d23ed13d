"""Buffers that kernels cannot take as they are: strided vectors, dense codes, odd addresses."""

import pytest
import torch

import cute_kernels
from cute_kernels import ops
from cute_kernels.formats import parse
from cute_kernels.layout.buffers import buffers
from tests.helpers import assert_same_bytes, dequantize_arguments, ends

pytest.importorskip("cutlass")


def results():
    torch.manual_seed(0)
    x, w = torch.randn(100, 32).bfloat16(), torch.randn(3, 16, 32).bfloat16()
    offs = ends(10, 0, 40, 0, 90, 0)[::2]
    alpha = torch.rand(6)[::2]
    assert not (offs.is_contiguous() or alpha.is_contiguous())
    yield ops.compute_offsets(torch.tensor([1, 0, 2, 0])[::2], 1, torch.int32)
    yield ops.grouped_amax(x, offs)
    yield ops.grouped_dbias(x, offs)
    yield ops.m_grouped_gemm(x, w, offs, None, alpha)
    yield ops.k_grouped_gemm(x, x, offs, alpha)
    by_row = "nvfp4:row_scaled"
    for text, columnwise in ((by_row, False), ("nvfp4", False), (by_row, True)):
        q = ops.grouped_quantize(x, text, offs, None, True, columnwise)
        arguments = dequantize_arguments(q[:3], text, 100, torch.float32, offs)
        yield ops.grouped_dequantize(*arguments)


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
    flat = torch.ops.cute_kernels
    x, w = torch.randn(100, 16).bfloat16(), torch.randn(3, 32, 16).bfloat16()
    offs = ends(10, 40, 90)
    for text in ("nvfp4:row_scaled", "nvfp4"):
        codes, *rest = buffers(parse(text), x.shape, 3).values()
        copy = [torch.full(codes.shape, 0xA5, dtype=codes.dtype)]
        copy += [shifted(*spec.shape, dtype=spec.dtype) for spec in rest]
        flat.grouped_quantize_out(x, text, offs, out=copy)
        assert (copy[0][90:] == 0xA5).all()
        yield from copy
        out = shifted(100, 16, dtype=torch.bfloat16)
        flat.grouped_dequantize_out(
            *dequantize_arguments(copy, text, 100, out.dtype, offs), out=out
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
