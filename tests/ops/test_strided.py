import pytest
import torch

import cute_kernels
from cute_kernels.formats import parse
from cute_kernels.layout.buffers import buffers
from tests.helpers import BF16, F32, assert_all_same, dequantize_arguments, each, ends

pytest.importorskip("cutlass")


def shifted(*shape, dtype):
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
		out = shifted(100, 16, dtype=BF16)
		flat.grouped_dequantize_out(*dequantize_arguments(copy, text, 100, out.dtype, offs), out=out)
		yield out
	out = shifted(100, 32, dtype=F32)
	flat.m_grouped_gemm_out(x, w, offs, out_dtype=out.dtype, out=out, accumulate=True)
	assert (out[90:] == 0x25).all()
	yield out


@each("arch", ["sm_90a", "sm_100a"])
def test_outputs_that_kernels_cannot_write_keep_the_rest(arch):
	with cute_kernels.backend(f"reference:{arch}"):
		want = list(written())
	with cute_kernels.backend(f"emulated:{arch}"):
		got = list(written())
	assert_all_same(got, want)
