import itertools

import pytest
import torch

import cute_kernels
import grouped
from tests.helpers import assert_same_bytes, each, offsets, sample

pytest.importorskip("cutlass")
#: Formats of activations and gradients, and of weights.
FORMATS = {
	"block": (grouped.FP8Block(), grouped.FP8Block(block=(128, 128))),
	"block, not pow2": (grouped.FP8Block(pow2_scales=False), grouped.FP8Block(block=(128, 128), pow2_scales=False)),
	"group": (grouped.FP8(), grouped.FP8()),
	"mxfp8": (grouped.MXFP8(), grouped.MXFP8(block=(32, 32))),
}


PAIRS = itertools.product(FORMATS, ("sm_90a", "sm_100a"))


@each(("name", "arch"), [(n, a) for n, a in PAIRS if cute_kernels.support("grouped_gemm", FORMATS[n][0], a)])
def test_quantizing_and_multiplying_in_one_op(name, arch):
	fmt, weight = FORMATS[name]
	torch.manual_seed(0)
	x, offs = sample(150, 160), offsets((20, 0, 130))
	recipe = grouped.recipes.Recipe(input=fmt, weight=weight, grad_output=fmt)
	with cute_kernels.backend("reference"):
		w = grouped.quantize(sample(3, 48, 160), weight)
	found = []
	for backend in (f"reference:{arch}", f"emulated:{arch}"):
		with cute_kernels.backend(backend):
			found.append(grouped.linear(x, w, None, offs, recipe))
			apart = grouped.grouped_gemm(grouped.quantize(x, fmt, offs=offs), w)
		assert_same_bytes(found[-1], apart)
	assert_same_bytes(*found)
