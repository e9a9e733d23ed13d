import numpy as np
import torch

import grouped
from tests.helpers import I32, assert_same_buffers, assert_same_bytes, each, ends, raises, refusals, sample

from .cases import FORMATS, bytes_of

ROWS = 40
FORMS = {
	"list": [7, 7, 33],
	"tuple": (7, 7, 33),
	"numpy int64": np.array([7, 7, 33]),
	"numpy uint8": np.array([7, 7, 33], dtype=np.uint8),
	"list of numpy": list(np.array([7, 7, 33])),
	"int64": torch.tensor([7, 7, 33]),
	"strided": ends(7, 0, 7, 0, 33, 0)[::2],
}


@each("offs", FORMS)
def test_every_form_of_offs_means_the_same(offs):
	x = sample(ROWS, 32)
	want = grouped.quantize(x, FORMATS["1x16"], offs=ends(7, 7, 33), columnwise=True)
	got = grouped.quantize(x, FORMATS["1x16"], offs=offs, columnwise=True)
	assert got.offs.dtype == I32
	assert_same_buffers(bytes_of(got), bytes_of(want))


test_offs_that_cannot_be_are_refused = refusals(
	lambda offs: grouped.quantize(sample(ROWS, 32), FORMATS["1x16"], offs=offs),
	[
		([7, 6, 40], ValueError, "must not decrease or be negative, got 6 at 1"),
		([-1, 6, 40], ValueError, "must not decrease or be negative, got -1 at 0"),
		([7, 41], ValueError, "within the 40 rows of x, got 41"),
		([], ValueError, "G >= 1"),
		([7.0, 40.0], TypeError, "integers, got 7.0 at 0"),
		([True, 40], TypeError, "integers, got True at 0"),
		(np.array([False, True]), TypeError, "integers"),
		([[7, 40]], TypeError, "integers"),
		(torch.tensor([7.0, 40.0]), TypeError, "int32 or int64, got torch.float32"),
		(torch.tensor(40), ValueError, r"shape \(G,\)"),
		(torch.tensor([[7, 40]]), ValueError, r"shape \(G,\).*\(1, 2\)"),
		(torch.tensor([], dtype=I32), ValueError, "G >= 1"),
		(torch.zeros(2, dtype=I32, device="meta"), ValueError, "device of x"),
	],
)


@each(
	("wild", "tame"),
	[
		([-5, 20, 10, 99], [0, 20, 20, 40]),
		*(
			case
			for n in (1 << 31, (1 << 32) + 5, (1 << 62) + 1)
			for case in (([7, n, n], [7, 40, 40]), ([-n, 7, 40], [0, 7, 40]))
		),
	],
)
def test_tensors_of_offs_are_clamped_not_read(wild, tame):
	"""They cannot raise without a sync; what int32 cannot hold, cut to 32 bits, would be a row of the tensor."""
	x = sample(ROWS, 32)
	got, want = (grouped.quantize(x, FORMATS["1x16"], offs=offs) for offs in (torch.tensor(wild), tame))
	assert_same_bytes(got.dequantize(), want.dequantize())


@each("multiplier", [1.5, 2.0, "2", None])
def test_a_multiplier_that_is_no_integer_is_refused(multiplier):
	grouped.compute_offsets(torch.tensor([1, 2]), multiplier=2)  # 2.0 finds its plan
	with raises(TypeError, "multiplier must be an integer, got"):
		grouped.compute_offsets(torch.tensor([1, 2]), multiplier=multiplier)


def test_operands_of_wgrad_are_cut_alike():
	def tensor(offs):
		return grouped.quantize(sample(ROWS, 32), FORMATS["1x16"], offs=offs, columnwise=True)

	x = tensor([7, 7, 33])
	with raises(ValueError, r"cut at the same rows.*\[7, 8, 33\].*\[7, 7, 33\]"):
		grouped.grouped_gemm(tensor([7, 8, 33]), x)
	out = torch.zeros(3, 32, 32)
	with raises(ValueError, "cut at the same rows"):
		grouped.grouped_gemm(tensor([7, 8, 33]), x, out=out, accumulate=True)
	assert not out.any()
	grouped.grouped_gemm(tensor([7, 7, 33]), x, out=out)
	assert out.any()


def test_a_quantized_tensor_owns_its_boundaries():
	"""Neither side sees the other write: callers reuse offs buffers, ``out=`` rewrites offs."""
	offs = ends(7, 7, 33)
	x = sample(ROWS, 32)
	xq = grouped.quantize(x, FORMATS["1x16"], offs=offs)
	before = xq.dequantize()
	offs.fill_(3)
	assert_same_bytes(xq.dequantize(), before)
	second = ends(1, 2, 3)
	grouped.quantize(x, FORMATS["1x16"], offs=second, out=xq)
	xq.offs.zero_()
	assert offs.tolist() == [3, 3, 3] and second.tolist() == [1, 2, 3]
