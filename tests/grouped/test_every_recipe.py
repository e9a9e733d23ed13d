"""Layers under the recipes of FP8 codes: numbers, kept and quantized weights, infinities, NaN."""

import dataclasses

import pytest
import torch
from torch import nn

import grouped
from grouped import recipes
from grouped.nn import GroupedLinear
from tests.grouped.cases import ALL_RECIPES, FP8_RECIPES, OpCounter, weights_quantized
from tests.grouped.test_linear import close, expected
from tests.helpers import assert_same_bytes, end_rows, sample

K, N, ENDS = 96, 160, [13, 13, 35]
#: An empty group first, in the middle and last; more rows than a block has; nothing at all.
SPLITS = [(0, 130, 0, 7), (37,), (1, 0, 1), (0, 0)]

each = pytest.mark.parametrize("recipe", FP8_RECIPES.values(), ids=FP8_RECIPES)


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


@each
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_against_one_linear_per_expert(splits, recipe):
    """Of the decoded operands in fp64; NaN in the tails of x and dy."""
    ends = end_rows(splits)
    layer = layer_of(recipe, len(splits))
    x, dy = (sample(ends[-1] + 6, width, dtype=torch.float32) for width in (K, N))
    want = expected(layer, x, ends, dy)
    x[ends[-1] :], dy[ends[-1] :] = torch.nan, torch.nan
    x.requires_grad_()
    y = layer(x, torch.tensor(ends))
    y.backward(dy)
    for a, b in zip((y.detach(), x.grad, layer.weight.grad, layer.bias.grad), want, strict=True):
        close(a, b, 1e-5)
    assert not y[ends[-1] :].any() and not x.grad[ends[-1] :].any()


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype, recipe):
    layer = layer_of(recipe, dtype=dtype)
    x, dy = torch.randn(40, K, dtype=dtype), torch.randn(40, N, dtype=dtype)
    want = expected(layer, x, ENDS, dy)
    for a, b in zip(step(layer, x, dy), want, strict=True):
        assert a.dtype == dtype
        close(a, b, 1e-2 if dtype == torch.bfloat16 else 2e-3)


@each
def test_both_parameter_forms_and_quantized_weights_agree(recipe):
    x, dy = sample(40, K), sample(40, N)
    single = layer_of(recipe, dtype=torch.bfloat16)
    want = step(single, x, dy)
    discrete = layer_of(recipe, dtype=torch.bfloat16, single_parameter=False)
    y, dx, *grads = step(discrete, x, dy)
    got = [y, dx, torch.stack(grads[:3]), torch.stack(grads[3:])]
    single.weight = nn.Parameter(grouped.quantize(single.weight, recipe.weight, columnwise=True))
    for other in (got, step(single, x, dy)):
        for a, b in zip(other, want, strict=True):
            assert_same_bytes(a, b)


@each
def test_kept_weights(recipe):
    layer = layer_of(recipe, dtype=torch.bfloat16)
    x, dy = sample(40, K), sample(40, N)
    want = step(layer, x, dy)
    with OpCounter() as counter:
        for first in (True, False):
            for a, b in zip(step(layer, x, dy, is_first_microbatch=first), want, strict=True):
                assert_same_bytes(a, b)
    assert weights_quantized(counter) == 1
    layer.eval()
    with torch.no_grad(), OpCounter() as counter:
        for _ in range(2):
            assert_same_bytes(layer(x, ENDS), want[0])
    assert weights_quantized(counter) == 1


@each
def test_under_torch_func(recipe):
    layer = layer_of(recipe, dtype=torch.bfloat16)
    x, dy = sample(40, K), sample(40, N)
    _, dx, dw, _ = step(layer, x, dy)
    offs = torch.tensor(ENDS, dtype=torch.int32)

    def loss(weight, x):
        y = grouped.linear(x, weight, layer.bias.detach(), offs, recipe)
        return (y.float() * dy.float()).sum()

    got = torch.func.grad(loss, argnums=(0, 1))(layer.weight.detach(), x)
    assert_same_bytes(got[0], dw)
    assert_same_bytes(got[1], dx)


def test_stochastic_gradients():
    """Random bits decide the gradients alone, and a seed decides the bits."""
    layer = layer_of(recipes.NVFP4(hadamard=True, stochastic_rounding=True), dtype=torch.bfloat16)
    x, dy = sample(40, K), sample(40, N)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(step(layer, x, dy))
    for a, b in zip(*runs[:2], strict=True):
        assert_same_bytes(a, b)
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


# ------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["x", "weight", "dy"])
@each
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


@each
def test_finite_numbers_keep_their_bits(recipe):
    x, dy = sample(40, K), sample(40, N)
    propagating = dataclasses.replace(recipe, propagate_nonfinite=True)
    pairs = zip(step(layer_of(recipe), x, dy), step(layer_of(propagating), x, dy), strict=True)
    for a, b in pairs:
        assert_same_bytes(a, b)


@pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES)
def test_sizes_that_the_blocks_do_not_divide(recipe):
    multiple = recipe.multiple
    assert multiple == {"mxfp8": 32, None: 1}.get(recipe.weight and recipe.weight.name, 16)
    GroupedLinear(2, multiple, 3 * multiple, recipe=recipe)
    if multiple > 1:
        for sizes in ((multiple // 2, multiple), (multiple, multiple + multiple // 2)):
            with pytest.raises(ValueError, match=f"must be a multiple of {multiple}"):
                GroupedLinear(2, *sizes, recipe=recipe)
