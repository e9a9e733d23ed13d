import dataclasses

import pytest
import torch
from torch import nn

import cute_kernels
import grouped
from grouped.nn import GroupedLinear, GroupedMLP
from tests.helpers import BF16, assert_all_same, each, raises, sample, step, whole_graph

from .cases import FP8_RECIPES, QUANTIZED, RECIPES, WEIGHT_FORMAT

K, N, ENDS = 64, 96, [13, 13, 35]
ROWS = torch.arange(40)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
FIRST, LAST = ROWS < 13, (ROWS >= 13) & (ROWS < 35)
NOBODY = torch.zeros(40, dtype=torch.bool)
PROPAGATING = QUANTIZED | FP8_RECIPES
#: With the option off.
SILENT = {
    name: dataclasses.replace(recipe, propagate_nonfinite=False)
    for name, recipe in PROPAGATING.items()
}
#: What holds a NaN: rows of y, rows of dx and groups of dw that are NaN.
REACHED = {
    None: (NOBODY, NOBODY, [0, 0, 0]),
    "x": (FIRST, NOBODY, [1, 0, 0]),
    "weight": (LAST, LAST, [0, 0, 0]),
    "dy": (NOBODY, FIRST, [1, 0, 0]),
}


def run(recipe, place, value=torch.nan, single=True, compiled=False):
    """y, dx and dw with ``value`` in one place, NaN in the tail, and two biases."""
    torch.manual_seed(3)
    layer = GroupedLinear(3, K, N, recipe=recipe, dtype=BF16, single_parameter=single)
    x, dy = sample(40, K), sample(40, N)
    x[35:], dy[35:] = torch.nan, torch.nan
    if place is not None:
        weight = layer.weight if single else layer.weight2
        target = {"x": x[3], "dy": dy[3], "weight": weight[2, 3] if single else weight[3]}[place]
        with torch.no_grad():
            target[5] = value
    function = whole_graph(layer) if compiled else None
    y, dx, *gradients = step(layer, x, dy, torch.tensor(ENDS), function=function)
    return y, dx, torch.stack(gradients[: 1 if single else 3]).view(3, N, K)


def assert_all_or_none(values, wanted, found=torch.isnan):
    flat = values.flatten(1)
    assert found(flat).all(1).tolist() == list(map(bool, wanted))
    assert flat.isfinite().all(1).tolist() == [not w for w in wanted]


def assert_reached(got, place, row_scaled, found=torch.isnan):
    y, dx, dw = REACHED[place]
    if place == "x" and row_scaled:
        y = ROWS == 3
    for values, wanted in zip(got, (y, dx, dw), strict=True):
        assert_all_or_none(values, wanted, found)


@each("single", [True, False])
@each("place", [*REACHED])
@each("name", [*QUANTIZED])
def test_a_nan_reaches_what_it_was_quantized_with(name, place, single):
    got = run(PROPAGATING[name], place, single=single)
    assert_reached(got, place, name == "row-scaled")


@each(("name", "backend"), [("row-scaled", "emulated:sm_90a"), ("nvfp4", "emulated:sm_100a")])
def test_on_kernels(name, backend):
    with cute_kernels.backend(backend):
        for place in ("x", "weight", "dy"):
            assert_reached(run(PROPAGATING[name], place), place, name == "row-scaled")


@each("place", ["x", "weight"])
def test_compiled(place):
    got = run(PROPAGATING["row-scaled"], place, compiled=True)
    assert_reached(got, place, row_scaled=True)


@each("name", [*QUANTIZED])
def test_where_an_operand_is_quantized_on_the_way(name):
    """Without gradients of the weight no product reads a columnwise copy."""
    layer = GroupedLinear(3, K, N, recipe=PROPAGATING[name]).requires_grad_(False)
    x, dy = with_nan(K), with_nan(N)
    with torch.no_grad():
        y = layer(x, ENDS)
    assert_all_or_none(y, ROWS == 3 if name == "row-scaled" else FIRST)
    leaf = sample(40, K).requires_grad_()
    layer(leaf, ENDS).backward(dy)
    assert_all_or_none(leaf.grad, FIRST)


@each("name", [*PROPAGATING])
def test_numbers_keep_their_bits(name):
    assert_all_same(run(PROPAGATING[name], None), run(SILENT[name], None))


#: Where y, dx and dw are NaN for one element of an operand.
EVERYTHING = slice(None)
FP8_REACHED = {
    "x": ((3, EVERYTHING), None, (0, EVERYTHING, 5)),
    "dy": (None, (3, EVERYTHING), (0, 5)),
    "weight": ((slice(13, 35), 3), (slice(13, 35), 5), None),
}


def assert_fp8_reached(got, where, spread=lambda want: want):
    want = torch.zeros(got.shape, dtype=torch.bool)
    if where is not None:
        want[where] = True
    assert (got.isnan() & want == want).all()
    assert (
        torch.equal(got.isnan() & ~spread(want), torch.zeros_like(want)) and not got.isinf().any()
    )


@each("place", [*FP8_REACHED])
@each("name", [*FP8_RECIPES])
def test_fp8_codes_keep_a_nan_in_its_row_or_column(name, place):
    for recipe in (PROPAGATING, SILENT):
        for got, where in zip(run(recipe[name], place), FP8_REACHED[place], strict=True):
            assert_fp8_reached(got, where)


def rows_of_its_group(want):
    """Of y or dx, the rows of each group that has some; of dw whole groups."""
    if want.dim() == 3:
        return want.flatten(1).any(1)[:, None, None].expand_as(want)
    groups = torch.zeros_like(want)
    for rows in (FIRST, LAST):
        groups[rows] = want[rows].any()
    return groups


@each("value", [torch.inf, -torch.inf])
@each("place", [*FP8_REACHED])
@each("name", [*FP8_RECIPES])
def test_an_infinity_reaches_what_shares_its_scale(name, place, value):
    is_local = name in (
        "mxfp8",
        *(() if place == "weight" else ("mxfp8-hybrid", "fp8-block", "fp8-block-fp32")),
    )
    for got, where in zip(run(PROPAGATING[name], place, value), FP8_REACHED[place], strict=True):
        assert_fp8_reached(got, where, *(() if is_local else (rows_of_its_group,)))
    for got in run(SILENT[name], place, value):
        # The largest number of MXFP8 is beyond bf16 when it is multiplied.
        assert not got.isnan().any() if name.startswith("mxfp8") else got.isfinite().all()


@each("place", ["x", "weight", "dy"])
@each("name", [*QUANTIZED])
def test_without_the_option_a_nan_disappears_as_documented(name, place):
    assert all(t.isfinite().all() for t in run(SILENT[name], place))


@each("place", ["x", "weight", "dy"])
@each("value", [torch.inf, -torch.inf])
@each("name", [*QUANTIZED])
def test_infinities_need_no_option(name, value, place):
    assert_reached(
        run(SILENT[name], place, value), place, name == "row-scaled", lambda flat: ~flat.isfinite()
    )


def test_kept_weights_have_the_option_too():
    layer = GroupedLinear(3, K, N, recipe=PROPAGATING["nvfp4"])
    with torch.no_grad():
        layer.weight[2, 3, 4] = torch.nan
    for first in (True, False):
        assert_all_or_none(layer(sample(40, K), ENDS, is_first_microbatch=first).detach(), LAST)


# Grouped.debug


def mlp_of(recipe):
    return GroupedMLP(3, K, 32, recipe=recipe, dtype=BF16)


def train(model, offs=ENDS, x=None, dy=None, function=None):
    x = sample(40, K) if x is None else x
    x[35:] = torch.nan
    y = (model if function is None else function)(x.requires_grad_(), torch.tensor(offs))
    dy = torch.ones_like(y) if dy is None else dy
    dy[35:] = torch.nan
    y.backward(dy)


def with_nan(cols):
    x = sample(40, cols)
    x[3, 3] = torch.nan
    return x


def broken_weight(mlp):
    with torch.no_grad():
        mlp.down.weight[2, 3, 4] = torch.nan


FOUND = {
    ("bf16", "none"): {},
    ("bf16", "x"): {"gate_up": ("input", "output", "grad_output"), "down": ("input", "output")},
    ("bf16", "weight"): {"gate_up": ("grad_output",), "down": ("weight", "output")},
    ("bf16", "dy"): {"gate_up": ("grad_output",), "down": ("grad_output",)},
    ("row-scaled", "none"): {},
    ("row-scaled", "x"): {"gate_up": ("input",)},
    ("row-scaled", "weight"): {"down": ("weight",)},
    ("row-scaled", "dy"): {"down": ("grad_output",)},
}


@each(
    ("name", "place", "compiled"),
    [(*case, False) for case in FOUND] + [("row-scaled", "x", True), ("bf16", "dy", True)],
)
def test_where_it_is_found(name, place, compiled):
    """It stays found when good batches follow; the tails hold NaN and are passed over."""
    mlp = mlp_of(dataclasses.replace(RECIPES[name], propagate_nonfinite=False))
    function = whole_graph(mlp) if compiled else mlp
    with grouped.inspect.detect_nonfinite(mlp) as found:
        if place == "weight":
            broken_weight(mlp)
        x = with_nan(K) if place == "x" else None
        train(mlp, x=x, dy=with_nan(K) if place == "dy" else None, function=function)
        if place != "weight":
            train(mlp, function=function)
    assert found.report() == FOUND[name, place]


def test_a_block_ends():
    mlp = mlp_of(RECIPES["bf16"])
    with grouped.inspect.detect_nonfinite(mlp) as found:
        train(mlp)
    broken_weight(mlp)
    train(mlp)
    assert found.report() == {}
    with grouped.inspect.detect_nonfinite(mlp) as found:
        train(mlp)
    assert "down" in found.report()


def test_all_layers_without_a_model():
    layers = [GroupedLinear(3, K, K, recipe=SILENT["nvfp4"]) for _ in range(3)]
    model = nn.ModuleList(layers)
    with grouped.inspect.detect_nonfinite() as found:
        for layer, x in zip(reversed(layers), (sample(40, K), with_nan(K), None), strict=True):
            if x is not None:
                train(layer, x=x)
        with raises(RuntimeError, "active already"), grouped.inspect.detect_nonfinite():
            pass
    (name, roles), *others = found.report().items()
    assert not others and roles == ("input",)
    assert name.startswith("GroupedLinear 1 (num_groups=3, in_features=64")
    assert all(layer._nonfinite is None for layer in model)


def test_only_the_layers_of_the_model():
    mlp, other = mlp_of(SILENT["nvfp4"]), mlp_of(SILENT["nvfp4"])
    with grouped.inspect.detect_nonfinite(mlp.down) as found:
        train(other, x=with_nan(K))
        train(mlp, x=with_nan(K))
    assert found.report() == {}
    with grouped.inspect.detect_nonfinite(mlp.gate_up) as found:
        train(mlp, x=with_nan(K))
    assert found.report() == {"GroupedLinear": ("input",)}


def test_a_compiled_layer_needs_the_model():
    layer = GroupedLinear(3, K, N, recipe=RECIPES["nvfp4"])
    function = torch.compile(layer, fullgraph=True, backend="eager")
    with (
        grouped.inspect.detect_nonfinite(),
        raises(Exception, "needs the model to watch a compiled layer"),
    ):
        train(layer, function=function)


@each("single", [True, False])
def test_no_gradients_and_quantized_weights(single):
    layer = GroupedLinear(3, K, N, recipe=RECIPES["nvfp4"], single_parameter=single).eval()
    weight = sample(3, N, K)
    weight[2, 3, 4] = torch.inf
    if single:
        layer.weight = nn.Parameter(grouped.quantize(weight, WEIGHT_FORMAT))
    else:
        layer.weight2 = nn.Parameter(weight[2].float())
    with torch.no_grad(), grouped.inspect.detect_nonfinite(layer) as found:
        for _ in range(2):
            layer(sample(0, K), [0, 0, 0])
            layer(sample(4, 10, K), ENDS)
    assert found.report() == {"GroupedLinear": ("weight", "output")}
