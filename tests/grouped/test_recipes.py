"""Recipes: what they refuse, and that what they do not refuse is honoured."""

import dataclasses
import pickle
import re

import pytest
import torch

import cute_kernels
import grouped
from cute_kernels.capability import support
from grouped import recipes
from grouped.nn import GroupedLinear
from grouped.recipes import Recipe
from tests.helpers import sample

NVFP4 = grouped.NVFP4
FORMATS = [
    NVFP4(),
    NVFP4(row_scaled=True),
    NVFP4(block=(16, 16)),
    NVFP4(hadamard=True),
    NVFP4(stochastic_rounding=True),
    NVFP4(four_over_six=True),
    grouped.MXFP8(),
    grouped.MXFP8(torch.float8_e5m2, (32, 32)),
    grouped.FP8Block(),
    grouped.FP8Block((128, 128), torch.float8_e5m2, pow2_scales=False, amax_epsilon=1e-7),
    grouped.FP8(),
    grouped.FP8(scaling="delayed"),
]


def output(fmt, role):
    """Of a layer, forward and backward, with one role in ``fmt``."""
    torch.manual_seed(1)
    plain = recipes.NVFP4()
    if fmt.is_transformed and role != "weight":
        # Both operands of wgrad have the transform, or none.
        plain = dataclasses.replace(plain, input=fmt, grad_output=fmt)
    layer = GroupedLinear(2, 64, 48, recipe=dataclasses.replace(plain, **{role: fmt}))
    x = sample(40, 64).requires_grad_()
    y = layer(x, [13, 35])
    y.backward(sample(40, 48))
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("role", recipes.ROLES)
@pytest.mark.parametrize("flag", ["hadamard", "stochastic_rounding", "four_over_six", "row_scaled"])
def test_a_flag_is_refused_or_honoured(flag, role):
    """It is never dropped: a recipe with the flag does not give the bits of one without."""
    fmt = NVFP4(**{flag: True})
    status = support("grouped_quantize", fmt, "reference")
    if not status:
        with pytest.raises(cute_kernels.UnsupportedError, match=rf"{role} cannot be.*{flag}"):
            output(fmt, role)
        assert status.reason
        return
    if role == "weight" and flag == "row_scaled":
        with pytest.raises(ValueError, match="one second-level scale a group"):
            output(fmt, role)
        return
    if role == "weight" and flag == "hadamard":
        with pytest.raises(ValueError, match="weight cannot have hadamard"):
            output(fmt, role)
        return
    pairs = zip(output(fmt, role), output(NVFP4(), role), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("fmt", FORMATS[6:], ids=lambda fmt: fmt.text)
def test_a_format_is_refused_or_runs(fmt):
    ops = ("grouped_quantize", "grouped_gemm")
    reasons = [r for op in ops if (r := support(op, fmt, "reference").reason)]
    if reasons:
        with pytest.raises(cute_kernels.UnsupportedError, match=re.escape(reasons[0])):
            Recipe(fmt, fmt, fmt)
        return
    if fmt.takes_scale:
        with pytest.raises(ValueError, match="use FP8Delayed"):
            Recipe(fmt, fmt, fmt)
        return
    layer = GroupedLinear(2, 128, 128, recipe=Recipe(fmt, fmt, fmt))
    layer(sample(40, 128).requires_grad_(), [13, 35]).sum().backward()


@pytest.mark.parametrize("fmt", [grouped.NVFP4, grouped.MXFP8, grouped.FP8Block, grouped.FP8])
def test_a_class_is_no_record(fmt):
    name = fmt.__name__
    with pytest.raises(TypeError, match=rf"weight must be a format record: {name}\(\), not {name}"):
        Recipe(NVFP4(), fmt, NVFP4())
    with pytest.raises(TypeError, match=rf"fmt must be a format record: {name}\(\), not {name}"):
        grouped.quantize(sample(2, 48, 64), fmt)


@pytest.mark.parametrize("fmt", ["nvfp4", 4, torch.float8_e4m3fn, recipes.NVFP4()])
def test_what_is_no_format_is_refused(fmt):
    with pytest.raises(TypeError, match="input must be a format record such as"):
        Recipe(fmt, NVFP4(), NVFP4())
    with pytest.raises(TypeError, match="fmt must be a format record such as"):
        grouped.quantize(sample(2, 48, 64), fmt)


def test_no_format_is_refused():
    with pytest.raises(TypeError, match="fmt must be a format record such as"):
        grouped.quantize(sample(2, 48, 64), None)


def test_operands_of_wgrad_are_transformed_alike():
    transformed = NVFP4(hadamard=True)
    for roles in ((transformed, NVFP4(), NVFP4()), (NVFP4(), NVFP4(), transformed)):
        with pytest.raises(ValueError, match="input and grad_output must both have hadamard"):
            Recipe(*roles)


def test_other_errors():
    with pytest.raises(ValueError, match=r"all roles or none; no format for \['weight'\]"):
        Recipe(NVFP4(), None, NVFP4())
    with pytest.raises(TypeError, match="propagate_nonfinite must be a bool, got 1"):
        recipes.NVFP4(propagate_nonfinite=1)


@pytest.mark.parametrize("recipe", [recipes.BF16(), recipes.NVFP4RowScaled()])
def test_recipes_are_values(recipe):
    same = pickle.loads(pickle.dumps(recipe))
    assert same == recipe and hash(same) == hash(recipe) and same.texts == recipe.texts
    other = dataclasses.replace(recipe, propagate_nonfinite=True)
    assert other != recipe and other.texts == recipe.texts
