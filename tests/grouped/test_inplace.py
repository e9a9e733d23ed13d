"""In-place ops, optimizers and initializers of quantized weights, against decode, op, quantize."""

import warnings

import pytest
import torch
from torch import nn

import grouped
from grouped import GroupedTensor
from grouped.tensor import lost_updates as updates
from tests.helpers import BF16, U8, assert_same_buffers, assert_same_bytes, sample

from .cases import EVERY_FORMAT, FORMATS, WEIGHT_FORMAT, bytes_of, parameter, pointers, weight

every_format = pytest.mark.parametrize("fmt", EVERY_FORMAT.values(), ids=EVERY_FORMAT)


def assert_holds(p, dense):
    """Check that p has the bytes of ``dense``, quantized."""
    rowwise, columnwise = p.rowwise is not None, p.columnwise is not None
    want = grouped.quantize(
        dense.to(p.dtype),
        p.format,
        offs=p.offs,
        shapes=p.member_shapes,
        rowwise=rowwise,
        columnwise=columnwise,
    )
    got = bytes_of(p)
    assert_same_buffers(got, bytes_of(want))


IN_PLACE = {
    "add_": lambda t, other: t.add_(other),
    "add_ scalar": lambda t, _: t.add_(1),
    "mul_": lambda t, _: t.mul_(3),
    "copy_": lambda t, other: t.copy_(other),
    "copy_ broadcast": lambda t, other: t.copy_(other[..., :1]),
    "foreach": lambda t, other: torch._foreach_add_([t], [other])[0],
    "zero_": lambda t, _: t.zero_(),
    "clamp_": lambda t, _: t.clamp_(-0.5, 0.5),
    "lerp_": lambda t, other: t.lerp_(other, 0.25),
    "uniform_": lambda t, _: t.uniform_(-1, 1),
    "normal_": lambda t, _: t.normal_(),
}


in_groups = pytest.mark.parametrize(
    "groups",
    [
        pytest.param({"offs": [13, 40]}, id="ragged"),
        pytest.param({"shapes": [(5, 64), (0, 32), (13, 64)]}, id="shapes"),
    ],
)


def shape_of(groups):
    return (40, 32) if "offs" in groups else (1280,)


@pytest.mark.parametrize("op", IN_PLACE.values(), ids=IN_PLACE)
@in_groups
@every_format
def test_in_place_ops(fmt, groups, op):
    """Compare in-place ops with the same ops on the decoded tensor."""
    shape = shape_of(groups)
    x = grouped.quantize(sample(*shape), fmt, columnwise=True, **groups)
    operand, dense, before = sample(*shape), x.dequantize(), pointers(x)
    view = x.detach()
    torch.manual_seed(1)
    assert op(x, operand) is x
    torch.manual_seed(1)
    dense = op(dense, operand)
    assert_holds(x, dense)
    assert pointers(x) == before
    assert_same_buffers(bytes_of(view), bytes_of(x))


@in_groups
@every_format
def test_chained_in_place_ops_quantize_at_each_op(fmt, groups):
    """Check that each of several chained in-place ops quantizes its result."""
    x = grouped.quantize(sample(*shape_of(groups)), fmt, columnwise=True, **groups)
    operand, before = sample(*shape_of(groups)), pointers(x)
    view = x.detach()
    assert x.zero_().add_(operand).mul_(2) is x
    assert_holds(x, grouped.quantize(operand, fmt, **groups).dequantize() * 2)
    assert pointers(x) == before
    assert_same_buffers(bytes_of(view), bytes_of(x))


def test_in_place_ops_match_keywords_by_name():
    p, operand = parameter(requires_grad=False), weight()
    dense = p.dequantize()
    for call in (
        lambda t: t.addcmul_(value=0.5, tensor2=operand, tensor1=t),
        lambda t: t.add_(alpha=2, other=t),
        lambda t: t.clamp_(max=0.5, min=-0.25),
        lambda t: t.normal_(std=0.5, mean=3.0),
        lambda t: t.lerp_(weight=0.25, end=operand),
        lambda t: t.masked_fill_(value=1.0, mask=operand > 0),
        lambda t: t.add_(t.detach()),  # two views
    ):
        torch.manual_seed(1)
        assert call(p) is p
        torch.manual_seed(1)
        dense = call(dense)
        assert_holds(p, dense)
        dense = p.dequantize()


@every_format
def test_in_place_ops_of_a_parameter_need_no_grad(fmt):
    """Check that in-place ops on a parameter that requires gradients need ``no_grad``."""
    p = parameter(fmt=fmt)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        p.mul_(2)
    with torch.no_grad():
        assert p.mul_(2) is p
    assert p.requires_grad and p.is_leaf and isinstance(p, nn.Parameter)


@every_format
def test_copying_an_equal_format_copies_the_bytes(fmt):
    """Decoding and quantizing would not always restore a row-scaled tensor of fp32."""
    source = grouped.quantize(sample(40, 32), fmt, offs=[13, 40], columnwise=True)
    target = grouped.quantize(sample(40, 32), fmt, offs=[20, 30], columnwise=True)
    assert target.copy_(source) is target
    assert_same_buffers(bytes_of(target), bytes_of(source))


@every_format
def test_copying_a_different_format_requantizes(fmt):
    """Check that copying from another format quantizes again in place."""
    source = grouped.quantize(weight(), FORMATS["row-scaled"])
    target = parameter(False, fmt)
    before = pointers(target)
    target.copy_(source)
    assert_holds(target, source.dequantize())
    assert pointers(target) == before


@every_format
def test_copying_between_one_direction_and_two(fmt):
    """Check copies between a tensor with one direction and a tensor with two."""
    two_directions = parameter(False, fmt)
    rowwise = grouped.quantize(weight(), fmt)
    rowwise.copy_(two_directions)
    assert_same_bytes(rowwise.dequantize(), two_directions.dequantize())
    two_directions.copy_(rowwise)
    assert_holds(two_directions, rowwise.dequantize())


@pytest.mark.parametrize("groups", [2, 4])
def test_copying_a_different_shape_is_refused(groups):
    with pytest.raises(RuntimeError, match="expand"):
        parameter(requires_grad=False).copy_(weight(groups))


INITIALIZERS = {
    "uniform_": {},
    "normal_": {"std": 0.02},
    "constant_": {"val": 0.5},
    "zeros_": {},
    "kaiming_uniform_": {"a": 5**0.5},
}


@pytest.mark.parametrize(("name", "options"), INITIALIZERS.items(), ids=INITIALIZERS)
def test_initializers_return_self(name, options):
    """Check that initializers of ``torch.nn.init`` return the quantized parameter."""
    p, dense = parameter(), torch.empty(3, 48, 64, dtype=BF16)
    init = getattr(nn.init, name)
    torch.manual_seed(2)
    assert init(p, **options) is p
    torch.manual_seed(2)
    init(dense, **options)
    assert_holds(p, dense)
    assert p.requires_grad and isinstance(p, nn.Parameter)


def test_trunc_normal_stays_within_its_bounds():
    """It rejects samples after they are quantized, so its random numbers are not torch's."""
    p = parameter()
    torch.manual_seed(2)
    assert nn.init.trunc_normal_(p, std=0.5, a=-0.5, b=0.5) is p
    assert p.dequantize().abs().max() <= 0.5
    assert p.requires_grad and isinstance(p, nn.Parameter)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum decay": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1}),
}


@pytest.mark.parametrize("loop", ["foreach", "for loop"])
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_step_as_on_a_decoded_parameter(optimizer, options, loop):
    """Compare two optimizer steps with those of a decoded parameter."""
    p = parameter()
    dense = nn.Parameter(p.dequantize().detach().clone())
    states = [optimizer([t], foreach=loop == "foreach", **options) for t in (p, dense)]
    before = pointers(p)
    for _ in range(2):
        grad = weight()
        for t, state in zip((p, dense), states, strict=True):
            t.grad = grad.clone()
            state.step()
        assert_holds(p, dense)
        with torch.no_grad():
            dense.copy_(p.dequantize())
    assert pointers(p) == before
    assert isinstance(p, nn.Parameter) and type(p.data) is GroupedTensor
    state_tensors = [v for v in states[0].state[p].values() if isinstance(v, torch.Tensor)]
    assert all(type(v) is torch.Tensor for v in state_tensors)
    states[0].load_state_dict(states[0].state_dict())


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        *((o, {"fused": True}) for o in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)),
        (torch.optim.Adam, {"foreach": False}),
    ],
)
@every_format
def test_optimizers_step_every_format(fmt, optimizer, options):
    """Check that optimizers step parameters of every format."""
    p = parameter(fmt=fmt)
    dense = nn.Parameter(p.dequantize().detach().clone())
    grad, before = weight(), dense.detach().clone()
    for t in (p, dense):
        t.grad = grad.clone()
        optimizer([t], lr=0.1, **options).step()
    assert_holds(p, dense)
    assert not torch.equal(dense, before)


def test_weight_decay_of_adamw_shrinks_then_updates():
    """Check that weight decay applies before the update."""
    p = parameter()
    dense = p.dequantize().detach()
    p.grad = torch.zeros(p.shape, dtype=p.dtype)
    torch.optim.AdamW([p], lr=0.5, weight_decay=0.5, foreach=False).step()
    assert_holds(p, dense * 0.75)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping(foreach):
    """Check gradient clipping by norm and by value."""
    p, plain = parameter(), nn.Parameter(torch.randn(4))
    p.grad, plain.grad = weight(), torch.randn(4)
    norm = nn.utils.clip_grad_norm_([p, plain], 0.5, foreach=foreach)
    gradients = torch.cat([p.grad.float().flatten(), plain.grad])
    assert norm > 1
    torch.testing.assert_close(gradients.norm(), torch.tensor(0.5), rtol=1e-2, atol=0)
    nn.utils.clip_grad_value_([p], 1e-3)
    assert p.grad.abs().max() <= 1e-3


@every_format
def test_averaged_model(fmt):
    """Check ``AveragedModel`` with a quantized parameter."""
    module = nn.Module()
    module.w = parameter(fmt=fmt)
    average = torch.optim.swa_utils.AveragedModel(
        module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    average.update_parameters(module)
    start = average.module.w.dequantize()
    with torch.no_grad():
        module.w.mul_(2)
    average.update_parameters(module)
    assert_holds(average.module.w, start.lerp(module.w.dequantize(), 0.5))


@every_format
def test_only_the_live_rows_of_a_ragged_tensor_are_rewritten(fmt):
    """Check that an in-place op leaves the codes of the tail unchanged."""
    x = grouped.quantize(sample(40, 32), fmt, offs=[13, 30])
    codes = x.rowwise.codes.view(U8)
    codes[30:] = 0xA5
    x.add_(1)
    assert (codes[30:] == 0xA5).all()
    assert not x.dequantize()[30:].any()


def test_in_place_ops_in_inference_mode():
    with torch.inference_mode():
        p = grouped.quantize(weight(), WEIGHT_FORMAT)
        dense = p.dequantize()
        assert p.mul_(3) is p
        assert_holds(p, dense * 3)
        assert torch.add(p, 1).sub_(p).dtype == p.dtype


TINY = {
    "AdamW foreach": lambda p: torch.optim.AdamW([p], lr=1e-4, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW([p], lr=1e-4, fused=True),
    "SGD": lambda p: torch.optim.SGD([p], lr=1e-6, foreach=False),
}


@pytest.fixture
def large():
    """A weight whose values are so large that updates of 1e-4 round away."""
    return nn.Parameter(grouped.quantize(weight() + 8, WEIGHT_FORMAT, columnwise=True))


@every_format
def test_an_update_that_changes_nothing_warns_in_any_format(fmt):
    w = grouped.quantize(weight() + 8, fmt, columnwise=True)
    with pytest.warns(UserWarning, match="add_ changed nothing"):
        w.add_(1e-5)


@pytest.mark.parametrize("optimizer", TINY.values(), ids=TINY)
def test_an_optimizer_that_changes_nothing_warns(large, optimizer):
    """Check that an optimizer step too small to change the codes warns."""
    before = bytes_of(large)
    large.grad = torch.ones_like(large)
    with pytest.warns(UserWarning, match=r"changed nothing in GroupedTensor.*quantize\(master"):
        optimizer(large).step()
    assert_same_buffers(bytes_of(large), before)


def test_an_average_that_does_not_move_warns(large):
    with pytest.warns(UserWarning, match="lerp_ changed nothing"):
        large.detach().lerp_(large.dequantize().detach() + 1, 1e-5)


SILENT = {
    "a step that changes something": lambda p: p.add_(torch.ones_like(p), alpha=2),
    "no gradient": lambda p: p.add_(torch.zeros_like(p), alpha=-0.1),
    "a learning rate of zero": lambda p: p.addcdiv_(p.dequantize(), p.dequantize(), value=0.0),
    "foreach, no factor": lambda p: torch._foreach_addcdiv_(
        [p], [torch.ones_like(p)], [torch.ones_like(p)], [0.0]
    ),
    "weight decay": lambda p: p.mul_(1 - 1e-6),
    "an average that arrived": lambda p: p.lerp_(p.dequantize(), 0.5),
    "copies": lambda p: p.copy_(p.dequantize()),
}


@pytest.mark.parametrize("op", SILENT.values(), ids=SILENT)
def test_updates_that_do_not_warn(large, op):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        op(large)


def test_devices_that_are_not_watched_warn_once(large):
    """Meta tensors stand for a GPU's: their bytes are not compared either."""
    updates._warn_unwatched.cache_clear()
    on_device = large.detach().to("meta")
    with pytest.warns(UserWarning, match="not on a GPU or in compiled code"):
        on_device.add_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_device.add_(1)
