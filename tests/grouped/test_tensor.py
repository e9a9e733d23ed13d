"""``GroupedTensor`` as a tensor: views, copies, data, files, arithmetic, and refused ops."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import grouped
from grouped import GroupedTensor
from tests.helpers import (
    BF16,
    F16,
    F32,
    I32,
    assert_same_buffers,
    assert_same_bytes,
    sample,
    save_and_load,
)

from .cases import (
    EVERY_FORMAT,
    FORMATS,
    OpCounter,
    assert_same_tensor,
    bytes_of,
    parameter,
    pointers,
    ragged,
    shaped,
    uniform,
)

DIRECTIONS = {
    "rowwise": {},
    "columnwise": {"rowwise": False, "columnwise": True},
    "both": {"columnwise": True},
}
every_format = pytest.mark.parametrize("fmt", EVERY_FORMAT.values(), ids=EVERY_FORMAT)


MAKES = {"ragged": ragged, "uniform": uniform, "shapes": shaped}


def test_metadata():
    """Check shapes, dtypes and groups of ragged and uniform tensors."""
    x, w = ragged(), uniform()
    assert isinstance(x, torch.Tensor)
    assert x.shape == (36, 64) and x.dtype == BF16 and x.num_groups == 3
    assert w.shape == (3, 48, 64) and w.offs is None and w.num_groups == 3
    assert x.offs.tolist() == [7, 7, 33] and x.format == FORMATS["row-scaled"]
    assert x.amax.shape == (36,) and w.amax.shape == (3,)
    assert x.stride() == (64, 1) and x.is_contiguous() and len(w) == 3
    for copies in (x.rowwise, x.columnwise, w.rowwise, w.columnwise):
        assert copies._fields == ("codes", "scales", "amax")
    with pytest.raises(ValueError, match="both None"):
        GroupedTensor((1, 16), BF16, FORMATS["1x16"], None, None, None)


@pytest.mark.parametrize("options", DIRECTIONS.values(), ids=DIRECTIONS)
@every_format
def test_flatten_and_unflatten(fmt, options):
    for make in MAKES.values():
        x = make(fmt, **options)
        assert is_traceable_wrapper_subclass(x)
        names, context = x.__tensor_flatten__()
        inner = {name: getattr(x, name) for name in names}
        assert all(type(t) is torch.Tensor for t in inner.values())
        back = GroupedTensor.__tensor_unflatten__(inner, context, x.shape, x.stride())
        assert_same_tensor(back, x)
        assert pointers(back) == pointers(x)
        assert x.nbytes == sum(t.nbytes for t in inner.values())
        assert hash(back.__tensor_flatten__()[1]) == hash(context)


@pytest.mark.parametrize("x", [ragged(), uniform(), parameter()], ids=("x", "w", "parameter"))
def test_repr_reads_no_values(x):
    """Check that ``repr`` runs no op."""
    with OpCounter() as counter:
        text = repr(x)
    assert not counter.calls
    kind = "ragged" if x.offs is not None else "uniform"
    for text_part in (
        "GroupedTensor",
        str(tuple(x.shape)),
        kind,
        x.format.text,
        "rowwise + columnwise",
    ):
        assert text_part in text
    assert str(x) == f"{x}"
    repr(x.to("meta"))


SAME_SHAPE = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": torch.ops.aten.alias,
    "view": lambda x: x.view(x.shape),
    "view -1": lambda x: x.view(-1, *x.shape[1:]),
    "reshape": lambda x: x.reshape(x.shape),
    "expand": lambda x: x.expand(x.shape),
    "expand -1": lambda x: x.expand([-1] * x.dim()),
    "contiguous": lambda x: x.contiguous(),
    "to the same": lambda x: x.to(x.device, x.dtype),
}


@pytest.mark.parametrize("view", SAME_SHAPE.values(), ids=SAME_SHAPE)
@pytest.mark.parametrize("make_one", MAKES.values(), ids=MAKES)
@every_format
def test_views_of_the_same_shape_share_the_storage(fmt, make_one, view):
    """Check that views of the same shape share the storage."""
    x = make_one(fmt)
    got = view(x)
    assert_same_tensor(got, x)
    assert pointers(got) == pointers(x)
    got.mul_(2)
    assert_same_tensor(got, x)


@pytest.mark.parametrize(
    "make_other",
    [
        lambda p: parameter(False),
        lambda p: p.data.prepack(),
        lambda p: p.data.to(F16),
        lambda p: uniform(columnwise=False),
        lambda p: grouped.quantize(sample(3, 48, 64), FORMATS["1x16"]),
        lambda p: uniform(EVERY_FORMAT["128x128"]),
        lambda p: uniform(EVERY_FORMAT["mxfp8"]),
        lambda p: uniform(EVERY_FORMAT["fp8"]),
    ],
    ids=["same kind", "prepacked", "dtype", "one direction", "format", "128x128", "mxfp8", "fp8"],
)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_assigning_data(make_other, requires_grad):
    """Check that ``data`` of a parameter can be replaced."""
    p = parameter(requires_grad)
    detached, old, new = p.detach(), p.data.clone(), make_other(p).detach()
    p.data = new
    assert isinstance(p, nn.Parameter) and p.requires_grad is requires_grad and p.is_leaf
    assert_same_tensor(p.data, new)
    assert pointers(p) == pointers(new)
    assert_same_tensor(detached, old)
    p.dequantize().sum()


def test_assigning_data_that_cannot_be_held():
    """Check that assigning unsuitable ``data`` raises and changes nothing."""
    p = parameter()
    before = bytes_of(p)
    with pytest.raises(TypeError, match=r"GroupedTensor, got Tensor; copy_\(\)"):
        p.data = torch.zeros(p.shape)
    with pytest.raises(ValueError, match=r"shape \(3, 48, 64\), got \(2, 48, 64\)"):
        p.data = grouped.quantize(sample(2, 48, 64), FORMATS["16x16"])
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        p.data = p.data.to("meta")
    assert_same_buffers(bytes_of(p), before)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_views_of_parameters(requires_grad):
    """Check class and ``requires_grad`` of views of parameters."""
    p = parameter(requires_grad)
    assert isinstance(p, nn.Parameter) and isinstance(p, GroupedTensor)
    assert p.requires_grad is requires_grad and p.is_leaf
    assert not p.detach().requires_grad and not p.data.requires_grad
    assert p.view(p.shape).requires_grad is requires_grad
    assert p.clone().requires_grad is requires_grad
    assert p.requires_grad_(not requires_grad) is p and p.requires_grad is not requires_grad


@pytest.mark.parametrize("options", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("copied", [torch.clone, copy.deepcopy], ids=["clone", "deepcopy"])
@every_format
def test_copies_have_their_own_storage(fmt, copied, options):
    for make in MAKES.values():
        x = make(fmt, **options)
        got = copied(x)
        assert_same_tensor(got, x)
        assert not set(pointers(got)) & set(pointers(x))


@every_format
def test_deepcopy_of_a_parameter(fmt):
    """Check that a deep copy of a parameter copies its bytes and its gradient."""
    p = parameter(fmt=fmt)
    p.grad = torch.ones(p.shape, dtype=p.dtype)
    got = copy.deepcopy(p)
    assert isinstance(got, nn.Parameter) and got.requires_grad
    assert_same_tensor(got.data, p.data)
    assert torch.equal(got.grad, p.grad) and got.grad.data_ptr() != p.grad.data_ptr()
    frozen = copy.deepcopy(parameter(False, fmt))
    assert isinstance(frozen, nn.Parameter) and not frozen.requires_grad


@pytest.mark.parametrize("dtype", [F16, F32])
@every_format
def test_to_another_dtype_keeps_the_bytes(fmt, dtype):
    for make in MAKES.values():
        x = make(fmt)
        got = x.to(dtype)
        assert got.dtype == dtype and got.dequantize().dtype == dtype
        assert_same_buffers(bytes_of(got), bytes_of(x))
    for refused in (torch.float64, I32):
        with pytest.raises(TypeError, match="dtype must be bfloat16 or float16 or float32"):
            x.to(refused)


NEW = {
    "zeros_like": (torch.zeros_like, (3, 48, 64)),
    "full_like": (lambda x: torch.full_like(x, 3), (3, 48, 64)),
    "randn_like": (torch.randn_like, (3, 48, 64)),
    "new_empty": (lambda x: x.new_empty(5, 2), (5, 2)),
    "new_zeros": (lambda x: x.new_zeros(5, 2), (5, 2)),
    "new_full": (lambda x: x.new_full((5, 2), 7), (5, 2)),
    "new_tensor": (lambda x: x.new_tensor([1.0, 2.0]), (2,)),
}


@pytest.mark.parametrize(("create", "shape"), NEW.values(), ids=NEW)
def test_tensors_made_like_one_are_plain(create, shape):
    got = create(parameter())
    assert type(got) is torch.Tensor and got.shape == shape and got.dtype == BF16


def test_buffers_for_copies_are_grouped():
    """Check that ``empty_like`` and ``new_zeros`` return GroupedTensors."""
    p = parameter()
    for make, groups in ((torch.empty_like(p), 3), (p.new_zeros(5, 48, 64), 5)):
        assert (
            type(make) is grouped.GroupedTensor
            and make.format == p.format
            and make.num_groups == groups
        )
    assert not p.new_zeros(2, 48, 64).dequantize().any()
    assert type(torch.empty_like(p, dtype=F32)) is torch.Tensor


VARIANTS = {
    "hadamard": grouped.NVFP4(hadamard=True),
    "stochastic": grouped.NVFP4(block=(16, 16), stochastic_rounding=True),
    "448": grouped.NVFP4(four_over_six=True, e4m3_max=448, four_over_six_error="mse"),
}


FORMATS_AND_VARIANTS = EVERY_FORMAT | VARIANTS


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("options", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("fmt", FORMATS_AND_VARIANTS.values(), ids=FORMATS_AND_VARIANTS)
def test_save_and_load(fmt, options, weights_only):
    for make in MAKES.values():
        x = make(fmt, **options)
        got = save_and_load({"x": x}, weights_only)["x"]
        assert_same_tensor(got, x)
        assert not got.requires_grad
        assert_same_bytes(got.dequantize(), x.dequantize())
    for p in (parameter(requires_grad, fmt) for requires_grad in (True, False)):
        got = save_and_load(p, weights_only)
        assert isinstance(got, nn.Parameter) and got.requires_grad is p.requires_grad
        assert_same_tensor(got.data, p.data)


@every_format
def test_a_file_keeps_aliases(fmt):
    x = ragged(fmt)
    a, b = save_and_load([x, x.detach()], weights_only=True)
    assert pointers(a) == pointers(b)


@every_format
def test_shared_memory(fmt):
    """Check that ``share_memory_`` shares all buffers."""
    p = parameter(False, fmt)
    before = p.dequantize()
    assert not p.is_shared()
    assert p.share_memory_() is p and p.is_shared()
    assert all(t.is_shared() for t in (*p.rowwise, *p.columnwise))
    assert_same_bytes(p.dequantize(), before)


@every_format
def test_arithmetic_that_optimizers_use_gives_plain_tensors(fmt):
    """Check that arithmetic on a quantized tensor gives plain tensors."""
    p = parameter(False, fmt)
    dense = p.dequantize()
    for function in (
        lambda t: t + 1,
        lambda t: 1 - t,
        lambda t: t * t,
        lambda t: t / 2,
        lambda t: -t,
        lambda t: t**2,
        lambda t: t < 0,
        lambda t: t.abs(),
        lambda t: t.isfinite(),
        lambda t: torch.lerp(t, dense + 1, 0.25),
        lambda t: torch.where(dense > 0, t, dense),
        lambda t: torch.linalg.vector_norm(t),
        lambda t: torch._foreach_norm([t])[0],
        lambda t: torch._foreach_add([dense], [t], alpha=0.5)[0],
        lambda t: torch._foreach_mul([t], 3)[0],
        lambda t: dense.clone().add_(t),
        lambda t: dense.new_empty(dense.shape).copy_(t),
    ):
        got = function(p)
        assert type(got) is torch.Tensor
        assert torch.equal(got, function(dense))
    assert torch.equal(p, p) and torch.equal(p, dense)


def test_gradients_pass_through_decoded_values():
    """Check that gradients pass through decoded values."""
    p = parameter()
    assert p.dequantize().requires_grad
    factor = torch.randn(p.shape, dtype=p.dtype)
    (p.dequantize() * factor).sum().backward()
    assert type(p.grad) is torch.Tensor
    assert torch.equal(p.grad, factor)
    p.grad = None
    (p * factor).sum().backward()
    assert torch.equal(p.grad, factor)
    p.grad = None
    (p.dequantize(F32) * factor).sum().backward()
    assert p.grad.dtype == BF16
    with torch.no_grad():
        assert not p.dequantize().requires_grad


REFUSED = {
    "reshape": lambda w: w.reshape(3, -1),
    "view": lambda w: w.view(-1, 64),
    "unflatten": lambda w: w.unflatten(0, (3, 1)),
    "view dtype": lambda w: w.view(torch.int16),
    "transpose": lambda w: w.transpose(0, 1),
    "mT": lambda w: w.mT,
    "select": lambda w: w[0],
    "slice": lambda w: w[:, :2],
    "index": lambda w: w[torch.tensor([0])],
    "set item": lambda w: w.__setitem__(0, 0.0),
    "expand": lambda w: w.expand(2, 3, 48, 64),
    "cat": lambda w: torch.cat([w, w], 1),
    "split": lambda w: w.split(1, 1),
    "torch.unbind": lambda w: torch.unbind(w),
    "matmul": lambda w: torch.matmul(torch.ones(36, 64, dtype=w.dtype), w),
    "linear": lambda w: nn.functional.linear(torch.ones(2, 64), w),
    "sum": lambda w: w.sum(),
    "resize_": lambda w: w.resize_(3),
    "as_strided_": lambda w: w.as_strided_((3,), (1,)),
    "set_": lambda w: w.set_(),
    "out=": lambda w: torch.add(torch.ones(3, 48, 64), 1, out=w),
}


#: Refusals that say what to call instead.
ALTERNATIVES = {
    **dict.fromkeys(
        ("select", "slice", "index", "split", "torch.unbind"),
        r"member\(g\) and unbind\(\).*dequantize",
    ),
    **dict.fromkeys(("matmul", "linear", "mT"), r"grouped\.grouped_gemm"),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [*REFUSED])
def test_ops_that_would_decode_are_refused(name, inference):
    """Check that ops that would decode implicitly are refused."""
    w = uniform()
    before = bytes_of(w)
    with (
        torch.inference_mode(inference),
        pytest.raises(TypeError, match=r"GroupedTensor.*\.dequantize\(\)") as caught,
    ):
        REFUSED[name](w)
    assert re.search(ALTERNATIVES.get(name, ""), str(caught.value))
    assert w.shape == (3, 48, 64)
    assert_same_buffers(bytes_of(w), before)


@pytest.mark.parametrize("read", [lambda w: w.numpy(), lambda w: w.tolist(), lambda w: w.item()])
def test_host_reads_are_refused(read):
    with pytest.raises(RuntimeError):
        read(uniform())
