import re

import pytest
import torch

import grouped
from grouped import recipes
from tests.helpers import each

OFFS = torch.tensor([4, 4, 9], dtype=torch.int32)
X = torch.zeros(9, 64, dtype=torch.bfloat16)
W = torch.zeros(3, 32, 64, dtype=torch.bfloat16)
DELAYED = grouped.FP8(scaling="delayed")


def quantize(x=X, fmt=None, **options):
	return grouped.quantize(x, fmt or grouped.NVFP4(), offs=OFFS, **options)


@each(
	("call", "message"),
	[
		(lambda: quantize(x=[[1.0]]), "x must be a tensor, got list"),
		(lambda: quantize(amax=1.0), "amax must be a tensor, got float"),
		(lambda: quantize(fmt=DELAYED, scale=[1.0] * 3), "scale must be a tensor, got list"),
		(lambda: quantize(activation="silu", grad=1.0), "grad must be a tensor, got float"),
		(lambda: grouped.quantize(X, DELAYED, offs=9), "offs must hold the end row of each group"),
		(lambda: grouped.grouped_gemm([1.0], W, offs=OFFS), "a must be a tensor, got list"),
		(lambda: grouped.grouped_gemm(X, 2.0, offs=OFFS), "b must be a tensor, got float"),
		(lambda: grouped.grouped_gemm(X, W, offs=OFFS, out=2.0), "out must be a tensor, got float"),
		(lambda: grouped.grouped_gemm(X, W, offs=OFFS, alpha=2.0), "alpha must be a tensor"),
		(lambda: grouped.grouped_gemm(X, W, offs=OFFS, bias=2.0), "bias must be a tensor"),
		(lambda: grouped.linear(X, W, 2.0, OFFS, recipes.BF16()), "bias must be a tensor"),
		(lambda: grouped.linear(X.double(), W, None, OFFS, recipes.BF16()), "x must be bfloat16 or float16 or float32"),
		(lambda: grouped.linear(X, None, None, OFFS, recipes.BF16()), "weight must be a tensor"),
		(lambda: quantize().dequantize("rowwise"), "dtype must be a torch.dtype, got 'rowwise'"),
	],
)
def test_what_is_no_tensor_is_named(call, message):
	with pytest.raises(TypeError, match=re.escape(message)):
		call()


@each(
	("recipe", "message"),
	[
		(recipes.MXFP8, r"MXFP8\(\), not MXFP8"),
		(grouped.MXFP8(), r"a format, which a recipe has for each role"),
		("mxfp8", r"got 'mxfp8'$"),
	],
)
def test_what_is_no_recipe_is_named(recipe, message):
	with pytest.raises(TypeError, match=rf"recipe must be a grouped.recipes.Recipe.*{message}"):
		grouped.nn.GroupedLinear(3, 64, 32, recipe=recipe)
	with pytest.raises(TypeError, match=rf"recipe must be a grouped.recipes.Recipe.*{message}"):
		grouped.linear(X, W, None, OFFS, recipe)


def test_a_recipe_is_no_format():
	with pytest.raises(TypeError, match="fmt must be a format record.*: a recipe, which has one"):
		quantize(fmt=recipes.MXFP8())


def test_a_scale_that_the_format_computes():
	with pytest.raises(ValueError, match=r"leave it away, or take FP8\(scaling='delayed'\)"):
		quantize(fmt=grouped.FP8(), scale=torch.ones(3))
