"""``state_dict``, copies and moves of grouped layers with plain and quantized weights."""

import pytest
import torch
from torch import nn

import grouped
from grouped.nn import GroupedLinear, GroupedMLP
from tests.helpers import (
    BF16,
    F16,
    I32,
    assert_same_buffers,
    assert_same_bytes,
    each_copy,
    sample,
    save_and_load,
)

from .cases import RECIPES, WEIGHT_FORMAT, bytes_of

K, N, G = 64, 48, 3
OFFS = [13, 13, 35]


def make_layer(single=True, bias=True, **options):
    options.setdefault("dtype", BF16)
    options.setdefault("recipe", RECIPES["row-scaled"])
    return GroupedLinear(G, K, N, bias, single_parameter=single, **options)


def quantized_layer(fmt=WEIGHT_FORMAT, requires_grad=True):
    layer = make_layer()
    layer.weight = nn.Parameter(grouped.quantize(layer.weight, fmt, columnwise=True), requires_grad)
    return layer


def same_output(a, b):
    x = sample(40, K)
    assert_same_bytes(a(x, OFFS).detach(), b(x, OFFS).detach())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("target", [True, False])
@pytest.mark.parametrize("source", [True, False])
def test_either_form_loads_into_either(source, target, bias):
    """Check that stacked and separate parameters load from each other."""
    a, b = make_layer(source, bias), make_layer(target, bias)
    state = a.state_dict()
    keys = set(state)
    result = b.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert set(state) == keys, "the caller's dict is left alone"
    same_output(a, b)


@pytest.mark.parametrize("single", [True, False])
def test_a_redundant_form_is_dropped(single):
    layer, same, target = make_layer(single), make_layer(single), make_layer(not single)
    layer.load_state_dict(target.state_dict() | same.state_dict())
    same_output(layer, same)


@pytest.mark.parametrize("strict", [True, False])
def test_a_partial_set_is_missing_keys(strict):
    """Check that an incomplete set of separate weights counts as missing."""
    layer, state = make_layer(), make_layer(single=False).state_dict()
    del state["weight1"]
    before = layer.weight.detach().clone()
    if strict:
        with pytest.raises(RuntimeError, match=r"Missing key.*\"weight\""):
            layer.load_state_dict(state)
    else:
        result = layer.load_state_dict(state, strict=False)
        assert result.missing_keys == ["weight"]
        assert set(result.unexpected_keys) == {"weight0", "weight2"}
    assert_same_bytes(layer.weight.detach(), before)


def test_stacks_of_other_sizes_are_refused():
    state = GroupedLinear(G + 1, K, N, dtype=BF16).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        make_layer().load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        make_layer(single=False).load_state_dict(state)


@pytest.mark.parametrize("single", [True, False])
def test_a_bias_with_a_unit_dimension(single):
    """Check that a bias with an extra dimension of size 1 loads."""
    source = make_layer()
    state = source.state_dict()
    state["bias"] = state["bias"].unsqueeze(1)
    layer = make_layer(single)
    layer.load_state_dict(state)
    same_output(layer, source)


def test_keys_carry_the_prefix_of_a_parent():
    """Check that conversion respects the key prefix of a parent module."""
    a = GroupedMLP(G, K, 32, bias=True, dtype=BF16)
    b = GroupedMLP(G, K, 32, bias=True, dtype=BF16, single_parameter=False)
    b.load_state_dict(a.state_dict())
    same_output(a, b)
    a.load_state_dict(b.state_dict())


def test_equal_formats_keep_their_bytes():
    """Check that loading the same format copies bytes in place."""
    a, b = quantized_layer(), quantized_layer()
    pointer = b.weight.rowwise.codes.data_ptr()
    b.load_state_dict(save_and_load(a.state_dict()))
    assert_same_buffers(bytes_of(b.weight), bytes_of(a.weight))
    assert b.weight.rowwise.codes.data_ptr() == pointer


@pytest.mark.parametrize("assign", [True, False])
def test_assigning_keeps_requires_grad(assign):
    """Check that loading keeps ``requires_grad``."""
    a, b = quantized_layer(), quantized_layer(requires_grad=False)
    b.load_state_dict(a.state_dict(), assign=assign)
    assert isinstance(b.weight, nn.Parameter) and not b.weight.requires_grad
    same_output(a, b)


def test_dense_and_quantized_weights_convert():
    """Check that plain and quantized weights load from each other."""
    dense, quantized = make_layer(), quantized_layer()
    quantized.load_state_dict(dense.state_dict())
    want = grouped.quantize(dense.weight, WEIGHT_FORMAT, columnwise=True)
    assert_same_buffers(bytes_of(quantized.weight), bytes_of(want))
    dense.load_state_dict(quantized.state_dict())
    assert type(dense.weight) is nn.Parameter
    assert_same_bytes(dense.weight.detach(), want.dequantize())
    target = quantized_layer(grouped.NVFP4())
    target.load_state_dict(quantized.state_dict())
    want = grouped.quantize(want.dequantize(), grouped.NVFP4())
    assert_same_bytes(target.weight.dequantize().detach(), want.dequantize())
    discrete = make_layer(single=False)
    discrete.load_state_dict(quantized.state_dict())
    same_output(dense, discrete)


def test_loading_and_moving_drop_the_cached_weight():
    x = sample(40, K)
    for change in (
        lambda layer: layer.load_state_dict(make_layer().state_dict()),
        lambda layer: layer.to(F16),
    ):
        layer = make_layer()
        layer(x, OFFS, is_first_microbatch=True)
        change(layer)
        with pytest.raises(RuntimeError, match="there is none"):
            layer(x, OFFS, is_first_microbatch=False)


@pytest.mark.parametrize("make", [make_layer, quantized_layer])
@each_copy
def test_copies_of_modules(copied, make):
    """Check that copies of modules are independent."""
    a = make()
    b = copied(a)
    same_output(a, b)
    with torch.no_grad():
        b.weight.mul_(2)
    x = sample(40, K)
    assert not torch.equal(a(x, OFFS), b(x, OFFS))


@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_moving_a_quantized_weight(requires_grad, swap):
    """Check that a cast changes the dtype of a quantized weight and keeps its bytes."""
    layer = quantized_layer(requires_grad=requires_grad)
    before = bytes_of(layer.weight)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        layer.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    weight = layer.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, grouped.GroupedTensor)
    assert weight.dtype == F16 and weight.requires_grad is requires_grad
    assert_same_buffers(bytes_of(weight), before)
    assert layer.to("meta").weight.is_meta
    restored = layer.to_empty(device="cpu")
    restored.load_state_dict(quantized_layer().state_dict())
    restored(sample(40, K), OFFS)


@pytest.mark.parametrize("single", [True, False])
def test_construction_on_meta(single):
    """Check that layers on the meta device run and can be initialized later."""
    torch.manual_seed(3)
    eager = make_layer(single)
    layer = make_layer(single, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    x = torch.empty(40, K, dtype=BF16, device="meta", requires_grad=True)
    y = layer(x, torch.empty(G, dtype=I32, device="meta"))
    y.sum().backward()
    assert y.is_meta and y.shape == (40, N) and x.grad.shape == (40, K)
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    same_output(layer, eager)


def test_repr():
    assert "in_features=64, out_features=48" in repr(
        make_layer()
    ) and "recipe=NVFP4RowScaled" in repr(make_layer())
