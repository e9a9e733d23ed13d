import pytest
import torch

import cute_kernels
from cute_kernels.ops import registry
from tests.helpers import each, needs_compiler, offsets, ops, sample

from .test_schemas import CASES, IDS, detached, outputs_like, tensors

OFFS = offsets((5, 0, 8))
BACKENDS = ["reference", "reference:sm_90a"]


def write(name, arguments, outputs):
	getattr(ops, f"{name}_out")(*arguments, **outputs)


@each(("name", "make"), [(name, make) for name, _, make in CASES], ids=IDS)
def test_every_out_form_bumps_what_it_writes_and_nothing_else(monkeypatch, name, make):
	"""Whatever computes: PyTorch counts writes of the reference by itself, not those of kernels."""
	arguments = detached(make())
	outputs = outputs_like(name, getattr(ops, name)(*arguments))
	monkeypatch.setattr(registry._Plan, "compute_into", lambda *args, **options: None)
	given = tensors(outputs)
	before = [t._version for t in given]
	read = [t._version for t in tensors(arguments)]
	write(name, arguments, outputs)
	assert all(t._version > v for t, v in zip(given, before, strict=True))
	assert [t._version for t in tensors(arguments)] == read


@each("backend", [*BACKENDS, pytest.param("emulated:sm_100a", marks=needs_compiler)])
def test_a_buffer_saved_for_backward_and_then_overwritten_raises(backend):
	if backend.startswith("emulated"):
		pytest.importorskip("cutlass")
	x = sample(15, 32)
	amax = torch.ones(3)
	factor = torch.rand(3, requires_grad=True)
	y = (factor * amax).sum()
	with cute_kernels.backend(backend):
		ops.grouped_amax_out(x, OFFS, amax=amax)
	with pytest.raises(RuntimeError, match="modified by an inplace operation"):
		y.backward()


def test_inference_tensors_have_no_version():
	x = sample(15, 32)
	with torch.inference_mode():
		amax = torch.ones(3)
		ops.grouped_amax_out(x, OFFS, amax=amax)
	assert torch.equal(amax, ops.grouped_amax(x, OFFS))
