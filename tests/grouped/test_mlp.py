"""``GroupedMLP`` against one expert at a time, and against its two layers, bit by bit."""

import functools

import pytest
import torch
from torch.nn import functional as F

from cute_kernels.formats.activations import ACTIVATIONS
from grouped import Activation, recipes
from grouped.nn import GroupedLinear, GroupedMLP, MoE
from tests.helpers import BF16, assert_all_same, assert_same_bytes, sample
from tests.reference.test_activations import compute_fp64

from .cases import ALL_RECIPES, RECIPES, close

HIDDEN, WIDTH, ENDS = 64, 32, [13, 13, 35]


def mlp_of(recipe, **options):
    return GroupedMLP(3, HIDDEN, WIDTH, recipe=recipe, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bf16_against_one_expert_at_a_time(name, bias):
    """Parameters and inputs are bf16 numbers in fp32; only the two activations are rounded."""
    interleaved = bias and Activation(name).is_gated
    mlp = mlp_of(RECIPES["bf16"], bias=bias, activation=name, interleaved=interleaved)
    with torch.no_grad():
        for p in mlp.parameters():
            p.copy_(p.bfloat16())
    x = torch.randn(40, HIDDEN).bfloat16().float().requires_grad_()
    y = mlp(x, ENDS)
    dy = torch.randn_like(y).bfloat16().float()
    leaves = [x, *mlp.parameters()]
    got = torch.autograd.grad(y, leaves, dy)
    outputs = []
    for g, (start, end) in enumerate(((0, 13), (13, 13), (13, 35))):
        up_bias = mlp.gate_up.bias[g] if bias else None
        z = F.linear(x[start:end], mlp.gate_up.weight[g], up_bias)
        hidden = compute_fp64(
            mlp.activation, z.unflatten(1, (-1, 2)).mT.flatten(1) if interleaved else z
        )
        down_bias = mlp.down.bias[g] if bias else None
        outputs.append(F.linear(hidden, mlp.down.weight[g], down_bias))
    want = torch.cat(outputs)
    close(y[:35], want)
    assert not y[35:].any()
    for a, b in zip(got, torch.autograd.grad(want, leaves, dy[:35]), strict=True):
        close(a, b)


@pytest.mark.parametrize(
    "activation, interleaved, bias",
    [("swiglu", False, True), ("swiglu", True, False), ("srelu", False, False)],
)
@pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES)
def test_one_function_has_the_bits_of_two_layers(recipe, activation, interleaved, bias):
    """Compare ``GroupedMLP`` with its two layers called one after the other."""
    mlp = mlp_of(recipe, bias=bias, activation=activation, interleaved=interleaved, dtype=BF16)
    x, dy, calls = sample(40, HIDDEN).requires_grad_(), sample(40, HIDDEN), []

    def step(is_first):
        """Return the output, the gradients and the state after a step."""
        torch.manual_seed(1)
        if mlp.down.scaling is not None:
            for layer in (mlp.gate_up, mlp.down):
                layer.scaling.reset()
        y = mlp(x, ENDS, is_first_microbatch=is_first)
        grads = torch.autograd.grad(y, [x, *mlp.parameters()], dy)
        state = [t for layer in (mlp.gate_up, mlp.down) for t in layer.state_dict().values()]
        return [t.clone() for t in (y.detach(), *grads, *state)]

    for is_first in (None, True):
        fused = step(is_first)
        mlp.gate_up.register_forward_hook(lambda *_: calls.append(1))
        assert_all_same(fused, step(is_first))
        mlp.gate_up._forward_hooks.clear()
    assert len(calls) == 2


def test_no_tokens():
    """Check that a call without tokens gives empty results and zero gradients."""
    mlp = mlp_of(RECIPES["row-scaled"])
    x = torch.zeros(0, HIDDEN, requires_grad=True)
    mlp(x, [0, 0, 0]).sum().backward()
    assert x.grad.shape == (0, HIDDEN) and not mlp.down.weight.grad.any()


def test_errors_come_from_the_layers():
    with pytest.raises(ValueError, match="x must have shape"):
        mlp_of(RECIPES["bf16"])(sample(40, 32), ENDS)


def test_recipe_of_both_layers_can_be_set():
    """A recipe that is set later gives the bits of one that the constructor gets."""
    x, mlp, want = sample(40, HIDDEN), mlp_of(recipes.FP8Block()), mlp_of(recipes.NVFP4())
    want.load_state_dict(mlp.state_dict())
    mlp.recipe = recipes.NVFP4()
    assert mlp.recipe == mlp.down.recipe == recipes.NVFP4()
    assert_same_bytes(mlp(x, ENDS), want(x, ENDS))
    mlp.down.recipe = recipes.BF16()
    with pytest.raises(
        ValueError, match=r"no single value: gate_up.recipe is NVFP4\(\), down.recipe is BF16"
    ):
        print(mlp.recipe)
    with pytest.raises(TypeError, match="recipe must be a grouped.recipes.Recipe, got 'BF16'"):
        mlp.recipe = "BF16"
    with pytest.raises(ValueError, match=r"cannot become FP8Delayed\(\).*create the layer"):
        mlp.recipe = recipes.FP8Delayed()
    narrow = GroupedMLP(2, 24, 32)
    with pytest.raises(ValueError, match="in_features must be a multiple of 16"):
        narrow.recipe = recipes.NVFP4()
    assert narrow.recipe == narrow.gate_up.recipe == narrow.down.recipe == recipes.BF16()


@pytest.mark.parametrize(
    ("make", "name", "suggestion"),
    [
        (functools.partial(MoE, 64, 32, 4), "topk", "top_k"),
        (functools.partial(GroupedMLP, 4, 64, 32), "activaton", "activation"),
        (functools.partial(GroupedLinear, 4, 64, 32), "recip", "recipe"),
    ],
)
def test_unknown_arguments_suggest_the_name_that_was_meant(make, name, suggestion):
    with pytest.raises(TypeError, match=f"argument '{name}'.*did you mean '{suggestion}'"):
        make(**{name: None})
