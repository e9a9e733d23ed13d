"""Layers under the recipes of FP8 codes: numbers, kept and quantized weights, infinities, NaN."""

import dataclasses

import pytest
import torch

from grouped import recipes
from grouped.nn import GroupedLinear
from tests.grouped.cases import ALL_RECIPES, FP8_RECIPES
from tests.helpers import assert_all_same, assert_same_bytes, each, sample

K, N, ENDS = 96, 160, [13, 13, 35]
every_recipe = each("recipe", FP8_RECIPES)


def layer_of(recipe, groups=3, **options):
    torch.manual_seed(3)
    return GroupedLinear(groups, K, N, recipe=recipe, **options)


def step(layer, x, dy, **options):
    """y and all gradients."""
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(leaf, ENDS, **options)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())]


def test_stochastic_gradients():
    """Random bits decide the gradients alone, and a seed decides the bits."""
    layer = layer_of(recipes.NVFP4(hadamard=True, stochastic_rounding=True), dtype=torch.bfloat16)
    x, dy = sample(40, K), sample(40, N)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(step(layer, x, dy))
    assert_all_same(*runs[:2])
    same = [torch.equal(a, b) for a, b in zip(*runs[1:], strict=True)]
    assert same == [True, False, False, True]  # y, dx, dw, db
    nearest = layer_of(recipes.NVFP4(hadamard=True), dtype=torch.bfloat16)
    plain = layer_of(recipes.NVFP4(), dtype=torch.bfloat16)
    assert_same_bytes(step(nearest, x, dy)[0], runs[0][0])
    assert not torch.equal(step(plain, x, dy)[2], step(nearest, x, dy)[2])


def test_fp32_inputs_are_not_transformed():
    layer = layer_of(recipes.NVFP4(hadamard=True))
    with pytest.raises(TypeError, match="x must be bfloat16"):
        layer(torch.randn(40, K), ENDS)
    with torch.no_grad():  # Nothing reads a transformed copy.
        layer(torch.randn(40, K), ENDS)


# Not finite


@each("value", [torch.nan, torch.inf, -torch.inf])
@each("place", ["x", "weight", "dy"])
@every_recipe
def test_what_is_not_finite_reaches_the_results(recipe, place, value):
    """A NaN always, an infinity if the recipe says so: as NaN, in its row or its column."""
    results = []
    for propagate in (False, True):
        layer = layer_of(dataclasses.replace(recipe, propagate_nonfinite=propagate))
        x, dy = sample(40, K), sample(40, N)
        with torch.no_grad():
            {"x": x, "dy": dy, "weight": layer.weight[2]}[place][20, 5] = value
        results.append(step(layer, x, dy)[:3])
    for (y, dx, dw), is_certain in zip(results, (value != value, True), strict=True):
        if not is_certain:
            continue
        nan_y, nan_dx, nan_dw = (t.isnan() for t in (y, dx, dw))
        if place == "x":
            assert nan_y.nonzero()[:, 0].unique().tolist() == [20] and nan_y[20].all()
            assert nan_dw.any(1)[2].nonzero().flatten().tolist() == [5] and nan_dw[2, :, 5].all()
            assert not nan_dx.any() and not nan_dw[:2].any()
        elif place == "dy":
            assert nan_dx.nonzero()[:, 0].unique().tolist() == [20] and nan_dx[20].all()
            assert nan_dw[2, 5].all() and not nan_dw[:2].any() and not nan_y.any()
        else:
            assert nan_y[13:35, 20].all() and not nan_y[:13].any()
            assert nan_dx[13:35, 5].all() and not nan_dx[:13].any() and not nan_dw.any()


@every_recipe
def test_finite_numbers_keep_their_bits(recipe):
    x, dy = sample(40, K), sample(40, N)
    propagating = dataclasses.replace(recipe, propagate_nonfinite=True)
    pairs = zip(step(layer_of(recipe), x, dy), step(layer_of(propagating), x, dy), strict=True)
    for a, b in pairs:
        assert_same_bytes(a, b)


@each("recipe", ALL_RECIPES)
def test_sizes_that_the_blocks_do_not_divide(recipe):
    multiple = recipe.multiple
    assert multiple == {"mxfp8": 32, None: 1}.get(recipe.weight and recipe.weight.name, 16)
    GroupedLinear(2, multiple, 3 * multiple, recipe=recipe)
    if multiple > 1:
        for sizes in ((multiple // 2, multiple), (multiple, multiple + multiple // 2)):
            with pytest.raises(ValueError, match=f"must be a multiple of {multiple}"):
                GroupedLinear(2, *sizes, recipe=recipe)
