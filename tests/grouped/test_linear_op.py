"""``grouped.linear`` and torch.func, torch.export, checkpointing and autocast around it."""

import functools
import io

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import grouped
from grouped import recipes
from grouped.nn import GroupedLinear, GroupedMLP
from tests.helpers import (
    BF16,
    assert_all_same,
    assert_same_bytes,
    forward_backward,
    offs_tensor,
    sample,
)

from .cases import ALL_RECIPES, QUANTIZED, RECIPES, WEIGHT_FORMAT, OpCounter, weights_quantized

K, N = 64, 96
OFFS = offs_tensor(13, 13, 35)


def make_layer(recipe, **options):
    return GroupedLinear(3, K, N, recipe=recipe, dtype=BF16, **options)


def gradients(module, x, dy, function=None):
    return forward_backward(module, x, dy, OFFS, function=function)


def saved_and_loaded(program):
    """Return the module of an exported program that was saved and loaded."""
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    return torch.export.load(saved).module()


@pytest.fixture
def data():
    return sample(40, K), sample(40, N)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_linear_has_the_bits_of_the_module(recipe, data):
    """Compare ``grouped.linear`` with the module, also for higher-rank and strided x."""
    layer = make_layer(recipe)
    x, dy = data
    want = gradients(layer, x, dy)

    def linear(x, _):
        return grouped.linear(x, layer.weight, layer.bias, [13, 13, 35], recipe)

    assert_all_same(gradients(layer, x, dy, linear), want)
    # Leading dimensions are flattened, and rows need not be dense.
    deep = gradients(layer, x.T.contiguous().T.view(2, 2, 10, K), dy.view(2, 2, 10, N), linear)
    assert_all_same((deep[0].view(40, N), deep[1].reshape(40, K), *deep[2:]), want)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_autocast_casts_x(recipe, data):
    """Check that autocast casts x for ``grouped.linear``."""
    layer, x = make_layer(recipe), data[0]
    want = layer(x, OFFS).detach()
    with torch.no_grad(), torch.autocast("cpu", BF16):
        got = grouped.linear(x.float(), layer.weight, layer.bias, OFFS, recipe)
    assert_same_bytes(got, want)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_no_bias_has_the_bits_of_a_bias_of_zeros(recipe, data):
    layer, x = make_layer(recipe), data[0]
    assert_same_bytes(
        grouped.linear(x, layer.weight, None, OFFS, recipe).detach(),
        grouped.linear(x, layer.weight, torch.zeros(3, N), OFFS, recipe).detach(),
    )


@pytest.fixture(params=[False, True], ids=["plain order", "prepacked"])
def is_prepacked(request):
    return request.param


@pytest.fixture(params=QUANTIZED.values(), ids=QUANTIZED)
def quantized_layer(request, is_prepacked, data):
    """A layer with a quantized weight, and the results of a step before it was quantized."""
    layer = make_layer(request.param)
    want = gradients(layer, *data)
    q = grouped.quantize(layer.weight, WEIGHT_FORMAT, columnwise=True)
    layer.weight = nn.Parameter(q.prepack() if is_prepacked else q)
    return layer, want


def test_linear_of_a_quantized_weight(quantized_layer, data):
    layer, want = quantized_layer

    def linear(x, offs):
        return grouped.linear(x, layer.weight, layer.bias, offs, layer.recipe)

    assert_all_same(gradients(layer, *data, linear), want)


def test_an_exported_quantized_weight(quantized_layer, data):
    layer, want = quantized_layer
    exported = saved_and_loaded(torch.export.export(layer, (data[0], OFFS)))
    assert_all_same(gradients(exported, *data), want)


def test_checkpointing_of_a_quantized_weight(quantized_layer, data):
    layer, want = quantized_layer
    function = functools.partial(checkpoint, layer, use_reentrant=False)
    assert_all_same(gradients(layer, *data, function), want)


def test_autocast_with_a_quantized_weight(quantized_layer, data):
    layer, want = quantized_layer
    with torch.no_grad(), torch.autocast("cpu", BF16):
        assert_same_bytes(layer(data[0].float(), OFFS), want[0])


def test_functional_gradients_of_a_quantized_weight(quantized_layer, data):
    """Compare ``torch.func`` gradients of a quantized weight with autograd."""
    layer, want = quantized_layer
    x, dy = data

    def loss(parameters, x):
        return (torch.func.functional_call(layer, parameters, (x, OFFS)).float() * dy.float()).sum()

    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    grads, dx = torch.func.grad(loss, argnums=(0, 1))(parameters, x)
    assert_all_same((dx, grads["weight"], grads["bias"]), want[1:])


ARGUMENTS = {"x": torch.zeros(40, K), "weight": torch.zeros(3, N, K), "bias": None, "offs": OFFS}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.zeros(N, K)}, ValueError, "weight must have 3 dimensions"),
        ({"weight": torch.zeros(3, N, 32)}, ValueError, "must share K"),
        ({"x": torch.zeros(K)}, ValueError, "at least 2 dimensions"),
        ({"offs": [13, 13, 41]}, ValueError, "within the 40 rows"),
        (
            {"weight": grouped.quantize(torch.ones(3, N, K), grouped.NVFP4(row_scaled=True))},
            ValueError,
            "one global scale per group",
        ),
    ],
)
def test_linear_checks_its_arguments(change, error, message):
    with pytest.raises(error, match=message):
        grouped.linear(**ARGUMENTS | {"recipe": RECIPES["nvfp4"]} | change)


@pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES)
def test_functional_gradients(recipe, data):
    """Compare ``torch.func`` gradients of layers and exported layers with autograd."""
    layer = make_layer(recipe)
    x, dy = data
    want = gradients(layer, x, dy)
    for module in (layer, torch.export.export(layer, (x, OFFS)).module()):
        parameters = {k: p.detach() for k, p in module.named_parameters()}

        def call(parameters, x, module=module):
            return torch.func.functional_call(module, parameters, (x, OFFS))

        y, vjp = torch.func.vjp(call, parameters, x)
        grads, dx = vjp(dy)
        assert_all_same((y, dx, grads["weight"], grads["bias"]), want)

        def loss(parameters, x, call=call):
            return (call(parameters, x).float() * dy.float()).sum()

        grads, dx = torch.func.grad(loss, argnums=(0, 1))(parameters, x)
        assert_all_same((dx, grads["weight"]), want[1:3])
        with OpCounter() as counter:
            dx = torch.func.grad(lambda x, loss=loss, p=parameters: loss(p, x))(x)
        assert_same_bytes(dx, want[1])
        assert weights_quantized(counter) == recipe.is_quantized


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_forward_mode_and_vmap_raise(recipe, data):
    """Check that forward-mode derivatives and ``vmap`` raise."""
    layer = make_layer(recipe)
    x = data[0]
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: layer(x, OFFS), (x,), (x,))
    for grad_mode in (torch.enable_grad, torch.no_grad):
        with forward_ad.dual_level(), grad_mode():
            for requires_grad in (True, False):
                layer.requires_grad_(requires_grad)
                with pytest.raises(RuntimeError, match="no forward-mode derivative"):
                    layer(forward_ad.make_dual(x, x), OFFS)
            layer(x, OFFS)
    with pytest.raises(RuntimeError, match="grouped.linear has no vmap"):
        torch.vmap(lambda x: layer(x, OFFS))(x.expand(2, 40, K))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_no_second_derivative(recipe, data):
    """Neither dx can be differentiated by dy, nor dw by x with a constant dy."""
    layer = make_layer(recipe, bias=False)
    x, dy = data
    leaf = x.clone().requires_grad_()
    (dw,) = torch.autograd.grad(layer(leaf, OFFS), layer.weight, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        (dw.sum() + leaf.sum()).backward()
    weight = layer.weight.detach()

    def y(x, weight):
        return grouped.linear(x, weight, None, OFFS, recipe)

    def dx_by_dy(dy):
        return torch.func.vjp(y, x, weight)[1](dy)[0].float().sum()

    def dw_by_x(x):
        return torch.func.grad(lambda w: y(x, w).float().sum())(weight).sum()

    for function, argument in ((dx_by_dy, dy), (dw_by_x, x)):
        function(argument)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.func.grad(function)(argument)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_backward_through_an_exported_module(recipe, single, strict):
    """The module is traced without gradients of x, saved and loaded; parameters may be frozen."""
    mlp = GroupedMLP(3, K, 32, bias=True, recipe=recipe, single_parameter=single)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(
        mlp, (sample(40, K), OFFS), dynamic_shapes=({0: tokens}, None), strict=strict
    )
    exported = saved_and_loaded(program)
    assert [str(node.target) for node in program.graph.nodes].count("grouped.experts.default") == 1
    x, dy = sample(77, K), sample(77, K)
    offs = offs_tensor(30, 30, 70)
    for is_trained in (True, False):
        results = []
        for module in (mlp, exported):
            module.requires_grad_(is_trained)
            results.append(forward_backward(module, x, dy, offs))
        assert_all_same(*results)


def test_a_custom_recipe_is_exported():
    """Check that a layer with a custom recipe can be exported."""
    layer = make_layer(recipes.Recipe(*[grouped.NVFP4()] * 3, propagate_nonfinite=True))
    x = sample(40, K)
    x[3, 3] = torch.nan
    y = torch.export.export(layer, (x, OFFS)).module()(x, OFFS).detach()
    assert y.isnan().all(1).tolist() == [i < 13 for i in range(40)]
    assert_same_bytes(y[13:], layer(x, OFFS).detach()[13:])
