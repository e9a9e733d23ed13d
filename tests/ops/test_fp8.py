"""FP8 with a scale a group, from ``grouped`` down to the kernels: the bytes of the reference."""

import pytest
import torch

import cute_kernels
import grouped
from tests.helpers import assert_same_bytes, each, offsets, sample, weird_values

pytest.importorskip("cutlass")

FORMATS = {fmt.text: fmt for fmt in (grouped.FP8(), grouped.FP8(torch.float8_e5m2))}
DIRECTIONS = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}


def parts(q):
	"""Everything that the contract says is written, and what it decodes to."""
	for g, member in enumerate(q.unbind()):
		for name, tensor in vars(member).items():
			if tensor is not None:
				yield f"{name} of group {g}", tensor
	for direction in ("rowwise", "columnwise"):
		if getattr(q, direction) is not None:
			yield f"{direction} values", q.dequantize(direction=direction)


@each("backend", ["emulated:sm_90a", "emulated:sm_100a"])
@each("directions", DIRECTIONS)
@each("fmt", FORMATS)
def test_kernels_give_the_bytes_of_the_reference(fmt, directions, backend):
	offs = offsets((5, 0, 28, 130))
	options = dict(zip(("rowwise", "columnwise"), directions, strict=True))
	for x, ends in ((weird_values(166, 144, torch.bfloat16), offs), (sample(3, 40, 48), None)):
		found = []
		for name in ("reference", backend):
			with cute_kernels.backend(name):
				found.append(list(parts(grouped.quantize(x, fmt, offs=ends, **options))))
		for (what, want), (_, got) in zip(*found, strict=True):
			assert_same_bytes(got, want, what, any_nan=want.dtype == x.dtype)


def test_given_amaxes_and_groups_without_rows():
	fmt = grouped.FP8()
	q = grouped.quantize(torch.ones(4, 32), fmt, offs=[4, 4], amax=torch.tensor([-2.0, 7.0]))
	assert q.amax.tolist() == [2.0, 7.0]
	assert q.rowwise.scale.tolist() == [224.0, 64.0]
	assert q.rowwise.scale_inv.equal(q.rowwise.scale.reciprocal())
	assert q.member(0).codes.float().eq(224.0).all()
	for backend in ("reference", "emulated:sm_100a"):
		with cute_kernels.backend(backend):
			empty = grouped.quantize(torch.ones(0, 32), fmt, offs=[0, 0])
		assert empty.amax.tolist() == [0.0, 0.0] and empty.rowwise.scale.tolist() == [1.0, 1.0]


def test_both_directions_share_one_scale():
	small, large = (
		grouped.quantize(w, grouped.FP8(), columnwise=True) for w in (sample(3, 48, 64), 1000 * sample(3, 48, 64))
	)
	with pytest.raises(ValueError, match="share scale_inv"):
		grouped.GroupedTensor(small.shape, small.dtype, small.format, None, small.rowwise, large.columnwise)
	with pytest.raises(ValueError, match="share scale_inv"):
		grouped.GroupedTensor(
			*(small.shape, small.dtype, small.format, None, small.rowwise),
			small.columnwise._replace(scale_inv=large.rowwise.scale_inv),
		)
