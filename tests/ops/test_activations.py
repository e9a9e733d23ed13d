"""Activations in front of quantization and dbias: the codes of what an activation makes."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
from torch.library import opcheck

import cute_kernels
from cute_kernels import support
from cute_kernels.activations import ACTIVATIONS, Activation
from cute_kernels.capability import ARCHITECTURES
from cute_kernels.formats import FP8, MXFP8, NVFP4, FP8Block
from cute_kernels.layout.buffers import buffers
from cute_kernels.reference.activations import activate, activate_gradient
from tests.helpers import (
	DTYPES,
	SPLITS,
	assert_all_same,
	assert_same_bytes,
	each,
	end_rows,
	many_groups,
	offsets,
	ops,
	poisoned,
	sample,
)
from tests.reference import activation_oracle as oracle

_RECORDS = (
	*(NVFP4(), NVFP4(row_scaled=True), NVFP4(block=(16, 16)), NVFP4(four_over_six=True)),
	*(FP8(), FP8(torch.float8_e5m2), MXFP8(), MXFP8(block=(32, 32))),
	*(FP8Block(), FP8Block(block=(128, 128), pow2_scales=False)),
)
FORMATS = [fmt for fmt in _RECORDS if support("grouped_quantize", fmt, "reference")]
EVERY = [*map(Activation, ACTIVATIONS), Activation("clamped_swiglu", alpha=1.0, limit=0.5)]
#: One of each shape, for what does not depend on the arithmetic.
SOME = [Activation("gelu"), Activation("swiglu"), Activation("clamped_swiglu", limit=0.5)]
BF16 = torch.bfloat16
K = 64


def texts(records):
	return {"argvalues": records, "ids": [r.text for r in records]}


each_format = pytest.mark.parametrize("fmt", **texts(FORMATS))
each_way = each("backward", [False, True], ids=["forward", "backward"])


def case(act, rows, dtype, backward, cols=K):
	if backward:
		return sample(*rows, cols, dtype=dtype), sample(*rows, act.width(cols), dtype=dtype)
	return sample(*rows, cols * 2 if act.is_gated else cols, dtype=dtype), None


def made(act, x, grad):
	"""The fp32 elements, all at once."""
	if grad is None:
		return activate(x.float(), act)
	return activate_gradient(x.float(), grad.float(), act)


def stored(fmt, elements, dtype):
	"""The elements as a tensor of its own, which quantizes to the same codes."""
	return elements.to(dtype) if fmt.truncates else elements


def names(fmt, x, num_groups, directions):
	rowwise, columnwise = directions
	return list(buffers(fmt, x.shape, num_groups, rowwise=rowwise, columnwise=columnwise))


def check(fmt, act, x, grad, offs, directions=(True, True), amax=None):
	"""That an activation and codes at once are those one after the other."""
	got = ops.grouped_quantize(x, fmt.text, offs, amax, *directions, activation=act.text, grad=grad)
	# NaN in what no group has must not matter: the tail of the elements is left as it comes.
	elements = made(act, x, grad)
	want = ops.grouped_quantize(stored(fmt, elements, x.dtype), fmt.text, offs, amax, *directions)
	for name, a, b in zip(names(fmt, x, 1, directions), got, want, strict=True):
		assert_same_bytes(a, b, f"{fmt.text} {act.text} {name}")
	return got


@each_way
@pytest.mark.parametrize("act", **texts(EVERY))
@each_format
def test_codes_of_every_activation(fmt, act, backward):
	x, grad = case(act, (150,), BF16, backward)
	x[-3:] = torch.nan
	check(fmt, act, x, grad, offsets((131, 0, 16)))


@each(
	("dtype", "directions"),
	[
		*(("bfloat16", (True, False)), ("bfloat16", (False, True))),
		*(("float16", (True, True)), ("float32", (True, True))),
	],
	ids=str,
)
@each_format
def test_directions_dtypes_and_groups(fmt, directions, dtype):
	dtype = DTYPES[dtype]
	for act, backward in itertools.product(SOME, (False, True)):
		for splits in ("one row", "tile edges", "empty first", "all empty"):
			x, grad = case(act, (sum(SPLITS[splits]) + 2,), dtype, backward)
			check(fmt, act, x, grad, offsets(SPLITS[splits]), directions)
		for uniform in ((3, 21), (2, 0)):
			check(fmt, act, *case(act, uniform, dtype, backward), None, directions)


def test_truncation_makes_a_difference():
	"""Codes of what is not rounded where it should be, and the other way round, are others."""
	x, offs = torch.randn(128, 256).to(BF16), offsets((128,))
	exact = made(SOME[0], x, None)
	for fmt in FORMATS:
		got = check(fmt, SOME[0], x, None, offs, (True, False))
		other = exact if fmt.truncates else exact.to(BF16)
		differs = ops.grouped_quantize(other, fmt.text, offs)
		assert not got[0].view(torch.uint8).equal(differs[0].view(torch.uint8))


@each_format
def test_many_groups_and_strided_inputs(fmt):
	act, offs = SOME[1], many_groups()
	check(fmt, act, *case(act, (int(offs[-1]) + 5,), BF16, backward=True), offs)
	x, grad = case(act, (2 * 45,), BF16, backward=True)
	x, grad = x[::2], grad.mT.contiguous().mT[::2]
	assert not x.is_contiguous() and not grad.is_contiguous()
	check(fmt, act, x, grad, offsets((30, 15)))


@pytest.mark.parametrize("fmt", **texts([f for f in FORMATS if f.level(columnwise=True)]))
def test_given_amax(fmt):
	x, grad = case(SOME[1], (40,), BF16, backward=True)
	amax = torch.tensor([3.0, -5.0])
	check(fmt, SOME[1], x, grad, offsets((10, 30)), (True, True), amax)


@pytest.mark.parametrize("act", **texts(SOME))
def test_transformed_and_stochastic_codes(act):
	"""Both copies are of the rounded elements; draws count elements, not columns of the input."""
	fmt, seed = NVFP4(hadamard=True, stochastic_rounding=True), torch.tensor([5, 7])
	arguments = (fmt.text, offsets((131, 0, 9)), None, True, True, None, seed)
	for backward in (False, True):
		x, grad = case(act, (143,), BF16, backward)
		elements = stored(fmt, made(act, x, grad), BF16)
		got = ops.grouped_quantize(x, *arguments, activation=act.text, grad=grad)
		assert_all_same(got, ops.grouped_quantize(elements, *arguments))


def test_given_scale():
	"""Delayed FP8: the scale is given, the amax is that of elements that are not rounded."""
	x, grad = case(SOME[1], (40,), BF16, backward=True)
	elements, offs, scale = made(SOME[1], x, grad), offsets((10, 30)), torch.tensor([2.0, 0.125])
	arguments = ("fp8:scaling=delayed", offs, None, True, True, scale)
	got = ops.grouped_quantize(x, *arguments, activation="swiglu", grad=grad)
	want = ops.grouped_quantize(elements, *arguments)
	assert_all_same(got, want)
	amax = names(FP8(), x, 2, (True, True)).index("amax")
	assert_same_bytes(got[amax], ops.grouped_amax(elements, offs))


def split(flat, shapes):
	parts = flat[: sum(m * n for m, n in shapes)].split([m * n for m, n in shapes])
	return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@each_format
def test_groups_that_have_shapes_of_their_own(fmt):
	shapes = [(5, 128), (0, 64), (130, 192)]  # of x
	count = sum(m * n for m, n in shapes)
	for act, backward in itertools.product(SOME, (False, True)):
		x = torch.cat([sample(count), torch.full((7,), torch.nan).to(BF16)])
		of_grad = [(m, act.width(n)) for m, n in shapes]
		grad = sample(sum(m * n for m, n in of_grad)) if backward else None
		grads = split(grad, of_grad) if backward else [None] * len(shapes)
		members = [made(act, *both) for both in zip(split(x, shapes), grads, strict=True)]
		elements = stored(fmt, torch.cat([t.flatten() for t in members]), BF16)
		arguments = (fmt.text, None, None, True, True)
		options = {"shapes": [*itertools.chain(*(shapes if backward else of_grad))]}
		got = ops.grouped_quantize(x, *arguments, activation=act.text, grad=grad, **options)
		assert_all_same(got, ops.grouped_quantize(elements, *arguments, **options))


# dbias


def tree_sum(tile):
	while len(tile) > 1:
		half = len(tile) // 2
		tile = tile[:half] + tile[half:]
	return tile[0]


@each_way
@pytest.mark.parametrize("act", **texts(EVERY))
def test_dbias_sums_exact_elements_in_order(act, backward):
	splits = (131, 0, 1, 300)
	x, grad = case(act, (sum(splits) + 3,), BF16, backward, cols=14)
	x[sum(splits) :] = torch.nan
	as_fp32 = (None if t is None else t.float().numpy() for t in (x, grad))
	elements = oracle.elements(act, *as_fp32)
	want, start = np.zeros((len(splits), elements.shape[1]), np.float32), 0
	for g, end in enumerate(end_rows(splits)):
		for first in range(start, end, 128):
			tile = np.zeros((128, elements.shape[1]), np.float32)
			tile[: min(128, end - first)] = elements[first : min(end, first + 128)]
			want[g] = want[g] + tree_sum(tile)
		start = end
	got = ops.grouped_dbias(x, offsets(splits), act.text, grad)
	assert_same_bytes(got, torch.from_numpy(want))
	assert not got[1].any()


@each("act", [None, *SOME], ids=lambda a: a and a.text)
def test_dbias_of_uniform_groups(act):
	for rows in (0, 1, 130):
		x = sample(3, rows, 32)
		text = None if act is None else act.text
		got = ops.grouped_dbias(x, None, text)
		want = ops.grouped_dbias(x.flatten(0, 1), offsets((rows,) * 3), text)
		assert_same_bytes(got, want)


# What is refused


X, OFFS = sample(8, K), offsets((3, 5))
SILU, GATED = {"activation": "silu"}, {"activation": "swiglu"}
SHAPED = GATED | {"x": X.flatten(), "offs": None, "shapes": [4, 32, 4, 32]}
#: What is changed in a call, by the message.
REFUSED = {
	"grad needs an activation": {"grad": X},
	"activation must be one of gelu": {"activation": "swish"},
	"K must be a positive multiple of 16 (nvfp4, x is (..., 2K)), got 24": {"x": sample(8, 48), "activation": "reglu"},
	"grad must have size 32 in dimension 1, got shape (8, 64)": GATED | {"grad": X},
	"grad must have size 8 in dimension 0, got shape (7, 64)": SILU | {"grad": sample(7, K)},
	"grad must be bfloat16, got float32": SILU | {"grad": X.float()},
	"shapes[1], (4, 48), must end within the 256 elements of the tensor, but ends at 320": (
		SHAPED | {"shapes": [4, 32, 4, 48]}
	),
	"grad must hold the 256 elements of the activation's result, got 255": (
		SHAPED | {"shapes": [4, 64, 4, 64], "grad": sample(255)}
	),
	"shapes[1] (m, 2n) of swiglu, which is gated, must have an even number of columns, got (4, 63)": SHAPED
	| {"shapes": [4, 64, 4, 63], "grad": sample(255)},
	"grad with shapes must have 1 dimensions, got shape (8, 32)": (SHAPED | {"grad": sample(8, 32)}),
}


@each("message", [*REFUSED])
def test_refused(message):
	arguments = {"x": X, "format": "nvfp4", "offs": OFFS} | REFUSED[message]
	error = TypeError if "bfloat16" in message else ValueError
	for call in (ops.grouped_quantize, cute_kernels.ops.grouped_quantize):
		order = [f.name for f in dataclasses.fields(cute_kernels.ops.quantize.GroupedQuantize)]
		given = dict.fromkeys(order) | {"rowwise": True, "columnwise": False} | arguments
		with pytest.raises(error, match=re.escape(message)):
			call(*(given[name] for name in order))


@each(
	("arguments", "error", "message"),
	[
		((X, OFFS, None, X), ValueError, "grad needs an activation"),
		((X, OFFS, "swiglu", X), ValueError, "grad must have size 32 in dimension 1"),
	],
)
def test_dbias_refuses(arguments, error, message):
	with pytest.raises(error, match=re.escape(message)):
		ops.grouped_dbias(*arguments)


def test_ops_that_take_none_say_so():
	for op in ("grouped_amax", "grouped_dequantize"):
		fmt = None if op == "grouped_amax" else NVFP4()
		reason = support(op, fmt, "reference", activation=True).reason
		assert reason == f"{op} takes no activation"
	for op, fmt in (("grouped_quantize", FP8()), ("grouped_dbias", None)):
		assert all(support(op, fmt, arch, activation=True) for arch in ARCHITECTURES)
	assert support("grouped_gemm", NVFP4(), "sm_90a", activation=True)
	assert support("grouped_gemm", NVFP4(), "sm_100a", activation=True)


# The dispatcher


RAGGED = (sample(13, 96), "nvfp4:block=16x16", offsets((5, 8)), None, True, True)
OPCHECKS = {
	"forward": (RAGGED, {"activation": "swiglu"}),
	"backward": (RAGGED, {"activation": "swiglu", "grad": sample(13, 48)}),
	"uniform": ((sample(2, 5, 64), "nvfp4"), {"activation": "gelu"}),
	"shapes": (
		(sample(500), "nvfp4", None, None, True, True),
		{"activation": "swiglu", "grad": sample(250), "shapes": [5, 64, 2, 32]},
	),
}


@each(("arguments", "options"), OPCHECKS)
def test_opcheck(arguments, options):
	opcheck(ops.grouped_quantize.default, arguments, options)
	out = [poisoned(t) for t in ops.grouped_quantize(*arguments, **options)]
	opcheck(ops.grouped_quantize_out.default, arguments, options | {"out": out})
	if "shapes" in options:
		return
	dbias = (arguments[0], offsets((5, 8)) if arguments is RAGGED else None)
	opcheck(ops.grouped_dbias.default, dbias, options)
	out = poisoned(ops.grouped_dbias(*dbias, **options))
	opcheck(ops.grouped_dbias_out.default, dbias, options | {"dbias": out})
