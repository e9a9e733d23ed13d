"""Buffers that kernels cannot take as they are: strided vectors, dense codes, odd addresses."""

import pytest
import torch

import cute_kernels
from cute_kernels import ops
from cute_kernels.formats import parse
from cute_kernels.layout.buffers import buffers
from tests.helpers import (
    DTYPES,
    assert_same_bytes,
    dequantize_arguments,
    ends,
    k_grouped_arguments,
    m_grouped_arguments,
)

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
    offs = place(ends(4, 4, 8))
    amax = place(torch.tensor([3.0, 4.0, 5.0]))
    vectors = (offs, place(bias), place(alpha))
    by_row = "nvfp4:row_scaled"
    q = ops.grouped_quantize(x, "nvfp4", offs, amax, True, True)
    row_scaled = ops.grouped_quantize(x, by_row, offs)
    grad = ops.grouped_quantize(dy, "nvfp4", offs, None, False, True)
    weight = ops.grouped_quantize(w, "nvfp4")

    def placed(copy):
        return [*copy[:2], place(copy[2])]

    held = placed(weight)
    # What no group has is unspecified: the tail, and the tile of the empty group.
    yield from (q[0][:8], q[1][::2], q[2])
    yield ops.m_grouped_gemm(x, w, *vectors)
    yield ops.k_grouped_gemm(dy, x, offs, vectors[2])
    yield ops.m_grouped_gemm(*m_grouped_arguments(placed(q[:3]), held, *vectors))
    options = (False, torch.float16)
    yield ops.m_grouped_gemm(
        *m_grouped_arguments(placed(row_scaled), held, *vectors, *options, a_format=by_row)
    )
    texts = (by_row, "nvfp4")
    yield ops.m_grouped_quantize_gemm(x, held[0], offs, held[1:], *texts, *vectors[1:])
    if cute_kernels.active_backend(x.device).name.endswith("sm_90a"):
        yield ops.m_grouped_gemm(*m_grouped_arguments(x, held, *vectors))
    yield ops.k_grouped_gemm(*k_grouped_arguments(placed(grad), placed(q[3:]), offs, vectors[2]))


@pytest.mark.parametrize("bias_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_vectors_may_have_any_address(arch, bias_dtype):
    with cute_kernels.backend(f"reference:{arch}"):
        want = list(products(torch.clone, bias_dtype))
    with cute_kernels.backend(f"emulated:{arch}"):
        got = list(products(misaligned, bias_dtype))
    for a, b in zip(got, want, strict=True):
        assert_same_bytes(a, b)


def small_vectors(place):
    x, offs = torch.randn(9, 32).bfloat16(), place(ends(4, 4, 8))
    q = ops.grouped_quantize(x, "nvfp4:row_scaled", offs)
    yield ops.grouped_amax(x, offs)
    yield ops.grouped_dbias(x, offs)
    yield ops.compute_offsets(place(torch.tensor([4, 0, 4], dtype=torch.int32)), 3, torch.int64)
    yield ops.compute_offsets(place(torch.tensor([4, 0, 4])), 3, torch.int32)
    copy = (*q[:2], place(q[2]))
    yield ops.grouped_dequantize(
        *dequantize_arguments(copy, "nvfp4:row_scaled", 9, torch.float32, offs)
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_vectors_of_the_other_ops_may_have_any_address(arch):
    torch.manual_seed(0)
    want = list(small_vectors(torch.clone))
    torch.manual_seed(0)
    with cute_kernels.backend(f"emulated:{arch}"):
        got = list(small_vectors(misaligned))
    for a, b in zip(got, want, strict=True):
        assert_same_bytes(a, b)
