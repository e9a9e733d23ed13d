"""``GroupedLinear`` against one linear layer per expert on decoded operands, in fp64."""

import pytest
import torch
from torch import nn

import grouped
from grouped.nn import GroupedLinear, GroupedMLP
from grouped.recipes import Recipe
from tests.helpers import (
    BF16,
    F16,
    F32,
    SPLITS,
    assert_all_same,
    assert_same_bytes,
    end_rows,
    forward_backward,
    sample,
)

from .cases import ALL_RECIPES, FP8_RECIPES, RECIPES, WEIGHT_FORMAT, OpCounter, close

K, N, ENDS = 96, 160, [13, 13, 35]
OFFS = torch.tensor(ENDS)
EVERY_RECIPE = RECIPES | FP8_RECIPES
QUANTIZED = {name: recipe for name, recipe in EVERY_RECIPE.items() if recipe.is_quantized}
MULTIPLY = "m_grouped_quantize_gemm"


def make_layer(recipe, groups=3, **options):
    options.setdefault("dtype", F32)
    return GroupedLinear(groups, K, N, recipe=recipe, **options)


def spans(ends):
    return list(zip([0, *ends[:-1]], ends, strict=True))


def decoded(x, fmt, offs):
    """Return the values of the rowwise and of the columnwise copy, in fp64."""
    if fmt is None:
        return [x.bfloat16().double()] * 2
    q = grouped.quantize(x, fmt, offs=offs, columnwise=True)
    return [q.dequantize(F32, direction).double() for direction in ("rowwise", "columnwise")]


def expected(layer, x, ends, dy):
    """Return output and gradients of a linear layer per group, on the decoded operands, in fp64."""
    recipe = layer.recipe
    live = ends[-1]
    w = layer._stacked("weight").detach()
    bias = layer._stacked("bias").detach() if layer.has_bias else None
    fprop_x, wgrad_x = decoded(x, recipe.input, ends)
    dgrad_dy, wgrad_dy = decoded(dy, recipe.grad_output, ends)
    fprop_w, dgrad_w = decoded(w, recipe.weight, None)
    cols, depth = w.shape[1:]
    y, dx = torch.zeros(len(x), cols).double(), torch.zeros(len(x), depth).double()
    dw, db = torch.zeros(w.shape).double(), torch.zeros(len(w), cols).double()
    for g, (start, end) in enumerate(spans(ends)):
        rows = slice(start, end)
        y[rows] = fprop_x[rows] @ fprop_w[g].T + (0 if bias is None else bias[g].double())
        dx[rows] = dgrad_dy[rows] @ dgrad_w[g]
        dw[g] = wgrad_dy[rows].T @ wgrad_x[rows]
        db[g] = dy[rows].double().sum(0)
    assert not y[live:].any()
    return y, dx, dw, db


@pytest.mark.parametrize("recipe", EVERY_RECIPE.values(), ids=EVERY_RECIPE)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_against_one_linear_per_expert(splits, recipe):
    """Inputs are fp32, so only the accumulation differs; the tails of x and dy are NaN."""
    ends = end_rows(splits)
    layer = make_layer(
        recipe, len(splits), single_parameter=len(splits) % 3 == 1, bias=len(splits) != 4
    )
    x, dy = (sample(ends[-1] + 6, width, dtype=F32) for width in (K, N))
    want = expected(layer, x, ends, dy)
    x[ends[-1] :] = torch.nan
    dy[ends[-1] :] = torch.nan
    y, dx, *gradients = forward_backward(layer, x, dy, torch.tensor(ends))
    if not layer.single_parameter:
        gradients = [
            torch.stack(gradients[i : i + len(splits)])
            for i in range(0, len(gradients), len(splits))
        ]
    assert {t.dtype for t in (y, dx, *gradients)} == {F32}
    for a, b in zip((y, dx, *gradients), want, strict=layer.has_bias):
        close(a, b, 1e-5)
    assert not y[ends[-1] :].any() and not dx[ends[-1] :].any()
    for g, rows in enumerate(splits):
        if not rows:
            assert not any(t[g].any() for t in gradients)


MORE_RECIPES = {
    "row-scaled gradients": Recipe(grouped.NVFP4(), WEIGHT_FORMAT, grouped.NVFP4(row_scaled=True))
}


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("parameters", [BF16, F32])
@pytest.mark.parametrize(
    "recipe", (EVERY_RECIPE | MORE_RECIPES).values(), ids=EVERY_RECIPE | MORE_RECIPES
)
def test_dtypes(recipe, dtype, parameters):
    compare_dtypes(recipe, dtype, parameters)


def test_dtypes_of_the_hadamard_transform():
    """Only bf16 is transformed."""
    compare_dtypes(ALL_RECIPES["hadamard"], BF16, BF16)


def compare_dtypes(recipe, dtype, parameters):
    """Compare a step with ``expected``, within the precision of the dtypes."""
    ends = [9, 20, 31]
    layer = make_layer(recipe, dtype=parameters)
    x, dy = torch.randn(31, K, dtype=dtype), torch.randn(31, N, dtype=dtype)
    tolerance = {BF16: 1e-2, F16: 2e-3, F32: 1e-5}
    got, dtypes = forward_backward(layer, x, dy, ends), [dtype, dtype, parameters, parameters]
    assert [t.dtype for t in got] == dtypes
    if recipe.is_quantized or dtype != F16:
        for t, want, output_dtype in zip(got, expected(layer, x, ends, dy), dtypes, strict=True):
            close(t, want, tolerance[output_dtype])


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_names_and_initialization_are_those_of_linear(bias, single):
    """Check that names and initial values match those of ``nn.Linear`` per expert."""
    layer = make_layer(RECIPES["bf16"], single_parameter=single, bias=bias)
    names = ["weight"] + ["bias"] * bias
    wanted = names if single else [f"{name}{g}" for name in names for g in range(3)]
    assert [name for name, _ in layer.named_parameters()] == wanted
    torch.manual_seed(0)
    for g in range(3):
        expert = nn.Linear(K, N, bias)
        for name in names:
            assert_same_bytes(layer._stacked(name)[g].detach(), getattr(expert, name).detach())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_two_backward_passes_and_accumulation(recipe):
    """Check that two backward passes accumulate, and that a third raises."""
    layer = make_layer(recipe)
    x = sample(40, K).requires_grad_()
    y = layer(x, ENDS)
    dy = torch.randn_like(y)
    y.backward(dy, retain_graph=True)
    gradients = [t.grad.clone() for t in (x, *layer.parameters())]
    y.backward(dy)
    for t, gradient in zip((x, *layer.parameters()), gradients, strict=True):
        assert_same_bytes(t.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_autocast(recipe):
    """Check dtypes and bits under autocast."""
    layer = make_layer(recipe)
    x = torch.randn(40, K, requires_grad=True)
    with torch.autocast("cpu", BF16):
        y = layer(x, ENDS)
    assert y.dtype == BF16
    assert_same_bytes(y.detach(), layer(x.bfloat16(), ENDS).detach())
    y.sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == F32


def directions(counter):
    """Return (is the weight, rowwise, columnwise) of each quantization, also inside of a GEMM."""
    return [
        (False, True, False) if name == MULTIPLY else (a[2] is None, a[4], a[5])
        for name, a in counter.calls
        if name in ("grouped_quantize", MULTIPLY)
    ]


@pytest.mark.parametrize("is_first", [None, True])
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_quantizes_rowwise_only(grad_mode, is_first):
    """Check that a call without gradients makes rowwise copies only."""
    layer = make_layer(RECIPES["row-scaled"])
    with grad_mode(), OpCounter() as counter:
        y = layer(sample(40, K).requires_grad_(), OFFS, is_first_microbatch=is_first)
    assert sorted(directions(counter)) == [(False, True, False), (True, True, False)]
    assert not y.requires_grad


def directions_of_a_step(layer, x):
    with OpCounter() as counter:
        layer(x, OFFS).sum().backward()
    return directions(counter)


def test_all_gradients_quantize_every_operand_in_both_directions():
    layer = make_layer(RECIPES["row-scaled"])
    got = directions_of_a_step(layer, sample(40, K).requires_grad_())
    assert sorted(got) == [(False, True, True)] * 2 + [(True, True, True)]


def test_without_a_gradient_of_x_no_weight_is_quantized_columnwise():
    """Nor is dy quantized rowwise."""
    got = directions_of_a_step(make_layer(RECIPES["row-scaled"]), sample(40, K))
    assert got == [(True, True, False), (False, True, True), (False, False, True)]


def test_a_frozen_weight_needs_no_columnwise_x_or_dy():
    """Check that x and dy need no columnwise copies if the weight is frozen."""
    layer = make_layer(RECIPES["row-scaled"])
    layer.weight.requires_grad_(False)
    got = directions_of_a_step(layer, sample(40, K).requires_grad_())
    assert got == [(True, True, True), (False, True, False), (False, True, False)]
    assert layer.weight.grad is None and layer.bias.grad is not None


def test_a_gradient_of_the_bias_alone_quantizes_rowwise_only():
    """Check that a gradient of the bias alone needs rowwise copies only."""
    layer = make_layer(RECIPES["row-scaled"])
    layer.weight.requires_grad_(False)
    got = directions_of_a_step(layer, sample(40, K))
    assert got == [(True, True, False), (False, True, False)]


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
def test_microbatches_share_one_quantized_weight(recipe, single):
    """Check that microbatches quantize the weight once and have the same gradients."""
    layer = make_layer(recipe, single_parameter=single)
    batches = [sample(40, K) for _ in range(3)]

    def run(flags):
        """Return all gradients and the number of quantizations of the weight."""
        layer.zero_grad()
        inputs = [batch.clone().requires_grad_() for batch in batches]
        with OpCounter() as counter:
            for leaf, flag in zip(inputs, flags, strict=True):
                layer(leaf, OFFS, is_first_microbatch=flag).sum().backward()
        grads = [leaf.grad for leaf in inputs] + [p.grad.clone() for p in layer.parameters()]
        return grads, sum(weight for weight, _, _ in directions(counter))

    plain, plain_count = run([None] * 3)
    cached, cached_count = run([True, False, False])
    assert (plain_count, cached_count) == (3, 1)
    assert_all_same(plain, cached)


def test_a_later_microbatch_needs_a_cached_weight():
    """Check that a later microbatch raises without a suitable cached weight."""
    layer = make_layer(RECIPES["row-scaled"])
    x = sample(40, K)
    with pytest.raises(RuntimeError, match="a call with True cached; there is none"):
        layer(x, ENDS, is_first_microbatch=False)
    with torch.no_grad():
        layer(x, ENDS, is_first_microbatch=True)
    layer(x, ENDS, is_first_microbatch=False)
    with pytest.raises(RuntimeError, match="columnwise weight.*under no_grad"):
        layer(x.requires_grad_(), ENDS, is_first_microbatch=False)


def quantized_layer(recipe, requires_grad=True, **options):
    """Return a layer whose weight is quantized with ``options``."""
    layer = make_layer(recipe, dtype=BF16)
    options.setdefault("columnwise", True)
    layer.weight = nn.Parameter(
        grouped.quantize(layer.weight, WEIGHT_FORMAT, **options), requires_grad
    )
    return layer


def test_a_frozen_quantized_weight():
    """Check that a frozen quantized weight is used as it is."""
    layer = quantized_layer(RECIPES["row-scaled"], requires_grad=False, columnwise=False)
    x = sample(40, K)
    with OpCounter() as counter:
        layer(x, OFFS)
    assert directions(counter) == [(False, True, False)]
    with pytest.raises(RuntimeError, match="weight has no columnwise copy"):
        layer(x.requires_grad_(), ENDS)
    with torch.no_grad():
        layer(x, ENDS)


def ragged_weight():
    return grouped.quantize(sample(3 * N, K), WEIGHT_FORMAT, offs=[N, 2 * N, 3 * N])


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: grouped.quantize(sample(3, N, K), grouped.NVFP4(row_scaled=True)),
            ValueError,
            "row_",
        ),
        (lambda: grouped.quantize(sample(2, N, K), WEIGHT_FORMAT), ValueError, "uniform of shape"),
        (lambda: grouped.quantize(sample(3, K, K), WEIGHT_FORMAT), ValueError, "uniform of shape"),
        (ragged_weight, ValueError, "uniform of shape"),
        (
            lambda: grouped.quantize(
                sample(3, N, K), WEIGHT_FORMAT, rowwise=False, columnwise=True
            ),
            RuntimeError,
            "no rowwise copy",
        ),
    ],
)
def test_unsuitable_quantized_weights_are_refused(make, error, match):
    """Check that quantized weights of a wrong format or shape are refused."""
    mlp = GroupedMLP(3, K, N // 2, recipe=RECIPES["row-scaled"], dtype=BF16)
    alone = make_layer(mlp.gate_up.recipe)
    alone.weight = mlp.gate_up.weight = nn.Parameter(make())
    for module in (alone, mlp):
        with pytest.raises(error, match=match):
            module(sample(40, K), ENDS)


def test_bf16_activations_with_a_quantized_weight():
    """Compare a layer with bf16 activations and a quantized weight to ``grouped_gemm``."""
    layer = quantized_layer(RECIPES["bf16"])
    x, dy = sample(40, K), sample(40, N)
    y, dx, dw, _ = forward_backward(layer, x, dy, ENDS)
    got, vjp = torch.func.vjp(lambda x: layer(x, ENDS), x)
    assert_all_same((got, *vjp(dy)), (y, dx))
    options = {"offs": ENDS, "out_dtype": BF16}
    weight, bias = layer.weight.detach(), layer.bias.detach()
    assert_same_bytes(y, grouped.grouped_gemm(x, weight, bias=bias, **options))
    assert_same_bytes(dx, grouped.grouped_gemm(dy, weight, transpose_b=True, **options))
    assert_same_bytes(dw, grouped.grouped_gemm(dy, x, **options))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, K, N), "num_groups"), ((3, 0, N), "in_features"), ((3, K, -1), "out_features")],
)
def test_sizes_must_be_positive(arguments, name):
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        GroupedLinear(*arguments)
