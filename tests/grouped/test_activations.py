"""``grouped.quantize(activation=...)`` against quantizing the reference's activations."""

import pytest
import torch

import grouped
from cute_kernels.formats.activations import Activation
from cute_kernels.reference.activations import activate, activate_gradient
from tests.helpers import BF16, assert_all_same, assert_same_bytes, offs_tensor, ops, sample

OFFS = [10, 10, 37]
FORMATS = {f.name: f for f in (grouped.NVFP4(), grouped.FP8(), grouped.MXFP8(), grouped.FP8Block())}
SWIGLU = Activation("swiglu")


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def fmt(request):
    return request.param


def stored(fmt, elements):
    """Return the elements in the dtype that quantizes to the same codes without an activation."""
    return elements.to(BF16) if fmt.rounds_activation else elements


@pytest.mark.parametrize("rows", [(40,), (3, 20)], ids=["ragged", "uniform"])
@pytest.mark.parametrize("backward", [False, True])
def test_codes_and_dbias(fmt, backward, rows):
    """Compare fused activations, their gradient and dbias with separate steps."""
    x, grad = sample(*rows, 128), sample(*rows, 64) if backward else None
    offs = offs_tensor(*OFFS) if len(rows) == 1 else None
    got, dbias = grouped.quantize(
        x, fmt, offs=offs, activation="swiglu", grad=grad, columnwise=True, dbias=True
    )
    elements = (
        activate_gradient(x.float(), grad.float(), SWIGLU)
        if backward
        else activate(x.float(), SWIGLU)
    )
    want = grouped.quantize(stored(fmt, elements), fmt, offs=offs, columnwise=True)
    assert got.shape == elements.shape and got.dtype == BF16
    assert_all_same((*got.rowwise, *got.columnwise), (*want.rowwise, *want.columnwise))
    # dbias sums the elements in fp32 before they are rounded, and is rounded once.
    assert_same_bytes(dbias, ops.grouped_dbias(elements, offs).to(BF16))
    assert dbias[1].any() == (offs is None)


def test_out_is_overwritten(fmt):
    x, grad = sample(40, 128), sample(40, 64)
    for options in ({"activation": "swiglu"}, {"activation": "swiglu", "grad": grad}):
        want = grouped.quantize(x, fmt, offs=OFFS, columnwise=True, **options)
        out = grouped.quantize(torch.zeros_like(want), fmt, offs=[1, 2, 40], columnwise=True)
        assert grouped.quantize(x, fmt, offs=OFFS, columnwise=True, out=out, **options) is out
        for direction in ("rowwise", "columnwise"):
            got, exact = (t.dequantize(direction=direction)[:37] for t in (out, want))
            assert_same_bytes(got, exact)


def test_results_require_no_gradient():
    x, grad = sample(40, 128).requires_grad_(), sample(40, 64).requires_grad_()
    q, dbias = grouped.quantize(
        x, grouped.FP8(), offs=OFFS, activation="swiglu", grad=grad, dbias=True
    )
    assert not q.requires_grad and not dbias.requires_grad
