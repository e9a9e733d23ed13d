"""NaN and infinities in operands: where they reach, and ``grouped.inspect.detect_nonfinite``."""

import dataclasses

import pytest
import torch
from torch import nn

import cute_kernels
import grouped
from grouped.nn import GroupedLinear, GroupedMLP
from tests.helpers import BF16, assert_all_same, compile_full_graph, forward_backward, sample

from .cases import FP8_RECIPES, QUANTIZED, RECIPES, WEIGHT_FORMAT

K, N, ENDS = 64, 96, [13, 13, 35]
ROWS = torch.arange(40)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
GROUP_0, GROUP_2 = ROWS < 13, (ROWS >= 13) & (ROWS < 35)
NO_ROW = torch.zeros(40, dtype=torch.bool)
PROPAGATING = QUANTIZED | FP8_RECIPES
#: The same recipes with propagate_nonfinite=False.
NOT_PROPAGATING = {
    name: dataclasses.replace(recipe, propagate_nonfinite=False)
    for name, recipe in PROPAGATING.items()
}
#: The operand with a NaN: rows of y, rows of dx and groups of dw that become NaN.
NAN_REACHES = {
    None: (NO_ROW, NO_ROW, [0, 0, 0]),
    "x": (GROUP_0, NO_ROW, [1, 0, 0]),
    "weight": (GROUP_2, GROUP_2, [0, 0, 0]),
    "dy": (NO_ROW, GROUP_0, [1, 0, 0]),
}


def run(recipe, operand, value=torch.nan, single=True, compiled=False):
    """Return y, dx and dw of a step with ``value`` in one operand and NaN in the tail."""
    torch.manual_seed(3)
    layer = GroupedLinear(3, K, N, recipe=recipe, dtype=BF16, single_parameter=single)
    x, dy = sample(40, K), sample(40, N)
    x[35:], dy[35:] = torch.nan, torch.nan
    if operand is not None:
        weight = layer.weight if single else layer.weight2
        target = {"x": x[3], "dy": dy[3], "weight": weight[2, 3] if single else weight[3]}[operand]
        with torch.no_grad():
            target[5] = value
    function = compile_full_graph(layer) if compiled else None
    y, dx, *gradients = forward_backward(layer, x, dy, torch.tensor(ENDS), function=function)
    return y, dx, torch.stack(gradients[: 1 if single else 3]).view(3, N, K)


def assert_all_or_none(values, wanted, is_bad=torch.isnan):
    """Check that the rows or groups in ``wanted`` are all bad, and all others finite."""
    flat = values.flatten(1)
    assert is_bad(flat).all(1).tolist() == list(map(bool, wanted))
    assert flat.isfinite().all(1).tolist() == [not w for w in wanted]


def assert_reached(got, operand, row_scaled, is_bad=torch.isnan):
    """Check y, dx and dw for a bad element of ``operand``."""
    y, dx, dw = NAN_REACHES[operand]
    if operand == "x" and row_scaled:
        y = ROWS == 3
    for values, wanted in zip(got, (y, dx, dw), strict=True):
        assert_all_or_none(values, wanted, is_bad)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("operand", [*NAN_REACHES])
@pytest.mark.parametrize("name", [*QUANTIZED])
def test_a_nan_reaches_its_scale_group(name, operand, single):
    got = run(PROPAGATING[name], operand, single=single)
    assert_reached(got, operand, name == "row-scaled")


@pytest.mark.parametrize(
    ("name", "backend"), [("row-scaled", "emulated:sm_90a"), ("nvfp4", "emulated:sm_100a")]
)
def test_a_nan_on_kernels(name, backend):
    with cute_kernels.backend(backend):
        for operand in ("x", "weight", "dy"):
            assert_reached(run(PROPAGATING[name], operand), operand, name == "row-scaled")


@pytest.mark.parametrize("operand", ["x", "weight"])
def test_a_nan_in_a_compiled_layer(operand):
    got = run(PROPAGATING["row-scaled"], operand, compiled=True)
    assert_reached(got, operand, row_scaled=True)


@pytest.mark.parametrize("name", [*QUANTIZED])
def test_a_nan_in_operands_quantized_inside_the_gemm(name):
    """Without gradients of the weight no GEMM reads a columnwise copy."""
    layer = GroupedLinear(3, K, N, recipe=PROPAGATING[name]).requires_grad_(False)
    x, dy = with_nan(K), with_nan(N)
    with torch.no_grad():
        y = layer(x, ENDS)
    assert_all_or_none(y, ROWS == 3 if name == "row-scaled" else GROUP_0)
    leaf = sample(40, K).requires_grad_()
    layer(leaf, ENDS).backward(dy)
    assert_all_or_none(leaf.grad, GROUP_0)


@pytest.mark.parametrize("name", [*PROPAGATING])
def test_finite_operands_keep_their_bits(name):
    assert_all_same(run(PROPAGATING[name], None), run(NOT_PROPAGATING[name], None))


#: The elements of y, dx and dw that a NaN in one element of an operand reaches.
EVERYTHING = slice(None)
FP8_NAN_REACHES = {
    "x": ((3, EVERYTHING), None, (0, EVERYTHING, 5)),
    "dy": (None, (3, EVERYTHING), (0, 5)),
    "weight": ((slice(13, 35), 3), (slice(13, 35), 5), None),
}


def assert_fp8_reached(got, index, widen=lambda want: want):
    """Check that the elements at ``index`` are NaN, and none beyond ``widen`` of them."""
    want = torch.zeros(got.shape, dtype=torch.bool)
    if index is not None:
        want[index] = True
    assert (got.isnan() & want == want).all()
    assert torch.equal(got.isnan() & ~widen(want), torch.zeros_like(want))
    assert not got.isinf().any()


@pytest.mark.parametrize("operand", [*FP8_NAN_REACHES])
@pytest.mark.parametrize("name", [*FP8_RECIPES])
def test_fp8_codes_keep_a_nan_in_its_row_or_column(name, operand):
    for recipe in (PROPAGATING, NOT_PROPAGATING):
        for got, index in zip(run(recipe[name], operand), FP8_NAN_REACHES[operand], strict=True):
            assert_fp8_reached(got, index)


def widen_to_groups(want):
    """Return the rows of every group with a wanted row, or for dw the wanted groups."""
    if want.dim() == 3:
        return want.flatten(1).any(1)[:, None, None].expand_as(want)
    groups = torch.zeros_like(want)
    for rows in (GROUP_0, GROUP_2):
        groups[rows] = want[rows].any()
    return groups


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("operand", [*FP8_NAN_REACHES])
@pytest.mark.parametrize("name", [*FP8_RECIPES])
def test_an_fp8_infinity_reaches_its_scale_group(name, operand, value):
    is_local = name in (
        "mxfp8",
        *(() if operand == "weight" else ("mxfp8-hybrid", "fp8-block", "fp8-block-fp32")),
    )
    for got, index in zip(
        run(PROPAGATING[name], operand, value), FP8_NAN_REACHES[operand], strict=True
    ):
        assert_fp8_reached(got, index, *(() if is_local else (widen_to_groups,)))
    for got in run(NOT_PROPAGATING[name], operand, value):
        # Products with the largest MXFP8 number may exceed bf16.
        assert not got.isnan().any() if name.startswith("mxfp8") else got.isfinite().all()


@pytest.mark.parametrize("operand", ["x", "weight", "dy"])
@pytest.mark.parametrize("name", [*QUANTIZED])
def test_a_nan_disappears_without_the_option(name, operand):
    assert all(t.isfinite().all() for t in run(NOT_PROPAGATING[name], operand))


@pytest.mark.parametrize("operand", ["x", "weight", "dy"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [*QUANTIZED])
def test_infinities_propagate_without_the_option(name, value, operand):
    assert_reached(
        run(NOT_PROPAGATING[name], operand, value),
        operand,
        name == "row-scaled",
        lambda flat: ~flat.isfinite(),
    )


def test_a_nan_in_a_cached_weight():
    layer = GroupedLinear(3, K, N, recipe=PROPAGATING["nvfp4"])
    with torch.no_grad():
        layer.weight[2, 3, 4] = torch.nan
    for is_first in (True, False):
        y = layer(sample(40, K), ENDS, is_first_microbatch=is_first)
        assert_all_or_none(y.detach(), GROUP_2)


def make_mlp(recipe):
    return GroupedMLP(3, K, 32, recipe=recipe, dtype=BF16)


def train(model, offs=ENDS, x=None, dy=None, function=None):
    """Take a step with NaN in the tail of x and dy."""
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


def break_weight(mlp):
    with torch.no_grad():
        mlp.down.weight[2, 3, 4] = torch.nan


REPORTS = {
    ("bf16", "none"): {},
    ("bf16", "x"): {"gate_up": ("input", "output", "grad_output"), "down": ("input", "output")},
    ("bf16", "weight"): {"gate_up": ("grad_output",), "down": ("weight", "output")},
    ("bf16", "dy"): {"gate_up": ("grad_output",), "down": ("grad_output",)},
    ("row-scaled", "none"): {},
    ("row-scaled", "x"): {"gate_up": ("input",)},
    ("row-scaled", "weight"): {"down": ("weight",)},
    ("row-scaled", "dy"): {"down": ("grad_output",)},
}


@pytest.mark.parametrize(
    ("name", "operand", "compiled"),
    [(*case, False) for case in REPORTS] + [("row-scaled", "x", True), ("bf16", "dy", True)],
)
def test_reports_name_layer_and_operand(name, operand, compiled):
    """A report stays when good batches follow; NaN in the tails is ignored."""
    mlp = make_mlp(dataclasses.replace(RECIPES[name], propagate_nonfinite=False))
    function = compile_full_graph(mlp) if compiled else mlp
    with grouped.inspect.detect_nonfinite(mlp) as detector:
        if operand == "weight":
            break_weight(mlp)
        x = with_nan(K) if operand == "x" else None
        train(mlp, x=x, dy=with_nan(K) if operand == "dy" else None, function=function)
        if operand != "weight":
            train(mlp, function=function)
    assert detector.report() == REPORTS[name, operand]


def test_detection_ends_with_its_block():
    """Check that detection covers its ``with`` block only."""
    mlp = make_mlp(RECIPES["bf16"])
    with grouped.inspect.detect_nonfinite(mlp) as detector:
        train(mlp)
    break_weight(mlp)
    train(mlp)
    assert detector.report() == {}
    with grouped.inspect.detect_nonfinite(mlp) as detector:
        train(mlp)
    assert "down" in detector.report()


def test_detection_of_all_layers():
    """Check that detection without a model covers all layers, one block at a time."""
    layers = [GroupedLinear(3, K, K, recipe=NOT_PROPAGATING["nvfp4"]) for _ in range(3)]
    model = nn.ModuleList(layers)
    with grouped.inspect.detect_nonfinite() as detector:
        for layer, x in zip(reversed(layers), (sample(40, K), with_nan(K), None), strict=True):
            if x is not None:
                train(layer, x=x)
        with (
            pytest.raises(RuntimeError, match="active already"),
            grouped.inspect.detect_nonfinite(),
        ):
            pass
    ((name, roles),) = detector.report().items()
    assert roles == ("input",)
    assert name.startswith("GroupedLinear 1 (num_groups=3, in_features=64")
    assert all(layer._nonfinite is None for layer in model)


def test_detection_of_the_layers_of_a_model():
    """Check that detection covers only the layers of the given model."""
    mlp, unwatched = make_mlp(NOT_PROPAGATING["nvfp4"]), make_mlp(NOT_PROPAGATING["nvfp4"])
    with grouped.inspect.detect_nonfinite(mlp.down) as detector:
        train(unwatched, x=with_nan(K))
        train(mlp, x=with_nan(K))
    assert detector.report() == {}
    with grouped.inspect.detect_nonfinite(mlp.gate_up) as detector:
        train(mlp, x=with_nan(K))
    assert detector.report() == {"GroupedLinear": ("input",)}


@pytest.mark.compile
def test_a_compiled_layer_needs_the_model():
    layer = GroupedLinear(3, K, N, recipe=RECIPES["nvfp4"])
    function = torch.compile(layer, fullgraph=True, backend="eager")
    with (
        grouped.inspect.detect_nonfinite(),
        pytest.raises(Exception, match="needs the model to watch a compiled layer"),
    ):
        train(layer, function=function)


@pytest.mark.parametrize("single", [True, False])
def test_detection_without_gradients(single):
    """Check that detection works without gradients."""
    layer = GroupedLinear(3, K, N, recipe=RECIPES["nvfp4"], single_parameter=single).eval()
    weight = sample(3, N, K)
    weight[2, 3, 4] = torch.inf
    if single:
        layer.weight = nn.Parameter(grouped.quantize(weight, WEIGHT_FORMAT))
    else:
        layer.weight2 = nn.Parameter(weight[2].float())
    with torch.no_grad(), grouped.inspect.detect_nonfinite(layer) as detector:
        for _ in range(2):
            layer(sample(0, K), [0, 0, 0])
            layer(sample(4, 10, K), ENDS)
    assert detector.report() == {"GroupedLinear": ("weight", "output")}
