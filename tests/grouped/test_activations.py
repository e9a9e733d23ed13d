"""``grouped.quantize(activation=...)``: shapes, gradients, reuse of tensors, dbias, errors."""

import pytest
import torch
import torch.nn.functional as F

import grouped
from cute_kernels.activations import Activation
from cute_kernels.reference.activations import activate, activate_gradient
from tests.grouped.cases import bytes_of
from tests.helpers import assert_all_same, assert_same_buffers, assert_same_bytes, each, ops, sample

OFFS = [10, 10, 37]
FORMATS = {f.name: f for f in (grouped.NVFP4(), grouped.FP8(), grouped.MXFP8(), grouped.FP8Block())}
SWIGLU = Activation("swiglu")
BF16 = torch.bfloat16


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def fmt(request):
    return request.param


def assert_same(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype and got.format == want.format
    assert_same_buffers(bytes_of(got), bytes_of(want))


def stored(fmt, elements):
    """What quantizes to the same codes without an activation."""
    return elements.to(BF16) if fmt.truncates else elements


@each("activation", ["swiglu", SWIGLU], ids=["name", "record"])
def test_forward(fmt, activation):
    x = sample(40, 128)
    got = grouped.quantize(x, fmt, offs=OFFS, activation=activation, columnwise=True)
    assert got.shape == (40, 64) and got.dtype == BF16
    elements = activate(x.float(), SWIGLU)
    want = grouped.quantize(stored(fmt, elements), fmt, offs=OFFS, columnwise=True)
    for name in ("rowwise", "columnwise"):
        assert_all_same(getattr(got, name), getattr(want, name))
    a, b = x[:37].double().chunk(2, -1)
    exact = F.silu(a) * b
    assert (got.dequantize()[:37] - exact).norm() <= 0.2 * exact.norm()


def test_backward_and_dbias(fmt):
    x, grad = sample(40, 128), sample(40, 64)
    got, dbias = grouped.quantize(
        x, fmt, offs=OFFS, activation=SWIGLU, grad=grad, columnwise=True, dbias=True
    )
    elements = activate_gradient(x.float(), grad.float(), SWIGLU)
    assert got.shape == x.shape
    want = grouped.quantize(stored(fmt, elements), fmt, offs=OFFS, columnwise=True)
    assert_same_bytes(got.rowwise.codes, want.rowwise.codes)
    assert_same_bytes(got.columnwise.codes, want.columnwise.codes)
    # Summed in fp32 from what is not rounded, and rounded once.
    assert dbias.dtype == BF16 and dbias.shape == (3, 128)
    offs = torch.tensor(OFFS, dtype=torch.int32)
    assert_same_bytes(dbias, ops.grouped_dbias(elements, offs).to(BF16))
    assert not dbias[1].any()


def test_uniform_groups(fmt):
    x = sample(3, 20, 128)
    got, dbias = grouped.quantize(x, fmt, activation="swiglu", columnwise=True, dbias=True)
    assert got.shape == (3, 20, 64) and dbias.shape == (3, 64)
    elements = activate(x.float(), SWIGLU)
    want = grouped.quantize(stored(fmt, elements), fmt, columnwise=True)
    assert_same_bytes(got.rowwise.codes, want.rowwise.codes)
    torch.testing.assert_close(dbias, elements.sum(1).to(BF16), rtol=2e-2, atol=1e-2)


def test_into_a_tensor_that_there_is(fmt):
    x, grad = sample(40, 128), sample(40, 64)
    for options in ({"activation": "swiglu"}, {"activation": "swiglu", "grad": grad}):
        want = grouped.quantize(x, fmt, offs=OFFS, columnwise=True, **options)
        out = grouped.quantize(
            torch.zeros(want.shape, dtype=BF16), fmt, offs=[1, 2, 40], columnwise=True
        )
        got = grouped.quantize(x, fmt, offs=OFFS, columnwise=True, out=out, **options)
        assert got is out
        assert_same_bytes(got.dequantize()[:37], want.dequantize()[:37])
        assert_same_bytes(got.columnwise.codes[:0], want.columnwise.codes[:0])
        columns = (t.dequantize(direction="columnwise")[:37] for t in (got, want))
        assert_same_bytes(*columns)


def test_groups_that_have_shapes_of_their_own(fmt):
    shapes = [(5, 64), (0, 32), (9, 128)]
    elements = sum(m * n for m, n in shapes)
    x, grad = sample(1, 2 * elements + 3).flatten(), sample(1, elements // 2).flatten()
    got = grouped.quantize(x, fmt, shapes=shapes, activation="swiglu")
    parts = x[: 2 * elements].split([2 * m * n for m, n in shapes])
    halves = [p.view(m, 2 * n) for p, (m, n) in zip(parts, shapes, strict=True)]
    made = [activate(part.float(), SWIGLU) for part in halves]
    want = grouped.quantize(stored(fmt, torch.cat([t.flatten() for t in made])), fmt, shapes=shapes)
    assert got.member_shapes == want.member_shapes
    assert_all_same(got.rowwise, want.rowwise)
    # Backward: the gradient of the second half of such an x, into the tensor that there is.
    y = x[:elements]
    got = grouped.quantize(y, fmt, shapes=shapes, activation="swiglu", grad=grad)
    out = grouped.quantize(torch.zeros_like(y), fmt, shapes=shapes)
    grouped.quantize(y, fmt, shapes=shapes, activation="swiglu", grad=grad, out=out)
    assert_all_same(got.rowwise, out.rowwise)
    with pytest.raises(ValueError, match="dbias has no meaning with shapes"):
        grouped.quantize(x, fmt, shapes=shapes, activation="swiglu", dbias=True)


def test_parameters_of_the_clamped_one(fmt):
    x = sample(40, 128)
    act = Activation("clamped_swiglu", limit=0.5)
    got = grouped.quantize(x, fmt, offs=OFFS, activation="clamped_swiglu:limit=0.5")
    assert_same(got, grouped.quantize(x, fmt, offs=OFFS, activation=act))
    other = grouped.quantize(x, fmt, offs=OFFS, activation="clamped_swiglu")
    assert not got.dequantize()[:37].equal(other.dequantize()[:37])


def test_compiled_once_for_all_token_counts():
    torch._dynamo.reset()

    def function(x, grad, offs):
        q = grouped.quantize(x, grouped.NVFP4(), offs=offs, activation="swiglu", columnwise=True)
        d, dbias = grouped.quantize(
            x, grouped.FP8(), offs=offs, activation="swiglu", grad=grad, dbias=True
        )
        return q.dequantize(), q.dequantize(direction="columnwise"), d.dequantize(), dbias

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (40, 41, 130, 7):
            x, grad = sample(tokens, 96), sample(tokens, 48)
            offs = torch.tensor([tokens // 3, tokens // 3, tokens], dtype=torch.int32)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(grad, 0)
            assert_all_same(compiled(x, grad, offs), function(x, grad, offs))
    torch._dynamo.reset()


@each(
    ("options", "error", "match"),
    [
        ({"activation": 3}, TypeError, "activation must be a name such as 'swiglu' or a grouped"),
        ({"activation": "swish"}, ValueError, "activation must be one of gelu, silu"),
    ],
)
def test_refused(options, error, match):
    with pytest.raises(error, match=match):
        grouped.quantize(sample(40, 128), grouped.NVFP4(), offs=OFFS, **options)


def test_out_has_the_shape_of_the_result():
    x = sample(40, 128)
    out = grouped.quantize(x, grouped.NVFP4(), offs=OFFS)
    with pytest.raises(ValueError, match="out was made with another shape"):
        grouped.quantize(x, grouped.NVFP4(), offs=OFFS, activation="swiglu", out=out)


def test_gradients_do_not_pass():
    x, grad = sample(40, 128).requires_grad_(), sample(40, 64).requires_grad_()
    q, dbias = grouped.quantize(
        x, grouped.FP8(), offs=OFFS, activation="swiglu", grad=grad, dbias=True
    )
    assert not q.requires_grad and not dbias.requires_grad
