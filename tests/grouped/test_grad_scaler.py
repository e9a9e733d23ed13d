"""Overflows of fp16 training:

``torch.amp.GradScaler`` sees each under every recipe, and skips the step.
"""

import dataclasses

import pytest
import torch

import cute_kernels
from cute_kernels.formats import MXFP8, NVFP4, FP8Block
from grouped import recipes
from grouped.nn import GroupedLinear, GroupedMLP, MoE
from grouped.parallel import wire_format as wire
from tests.helpers import assert_all_same, compile_full_graph

from .cases import FP8_RECIPES, RECIPES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ALL = RECIPES | FP8_RECIPES | {"delayed": recipes.FP8Delayed(history_length=4)}
VALUES = (torch.inf, -torch.inf, torch.nan)
ROWS, K, N, GROUPS = 40, 64, 64, 3
OFFS = torch.tensor([13, 13, 35])
#: Rows of the first group, which hold what is not finite.
ROW = 3


def linear(recipe, **options):
    return GroupedLinear(GROUPS, K, N, recipe=recipe, **options)


def mlp(recipe, **options):
    return GroupedMLP(GROUPS, K, 32, recipe=recipe, **options)


def moe(recipe, **options):
    return MoE(K, 32, 4, 2, recipe=recipe, **options)


def tensors(value=None, operand=None):
    """x and dy, fp16, with ``value`` in one of them; what is behind the last group is NaN."""
    torch.manual_seed(0)
    x, dy = torch.randn(ROWS, K).half(), torch.randn(ROWS, N).half()
    if operand is not None:
        {"x": x, "dy": dy}[operand][ROW, 5] = value
    return x, dy


def scaled_step(module, x, dy, function=None):
    """Return True if the step was taken, and the gradients after it."""
    is_moe = isinstance(module, MoE)
    if not is_moe:
        x, dy = x.clone(), dy.clone()
        x[int(OFFS[-1]) :], dy[int(OFFS[-1]) :] = torch.nan, torch.nan
    function = module if function is None else function
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in module.parameters()]
    y = function(x) if is_moe else function(x, OFFS)
    scaler.scale((y.float() * dy.float()).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    gradients = [p.grad for p in module.parameters()]
    changed = [not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
    assert any(changed) == (scaler.get_scale() == 4.0)
    return any(changed), gradients


def module_of(kind, recipe, **options):
    torch.manual_seed(1)
    return kind(recipe, **options)


@pytest.mark.parametrize("kind", [linear, mlp, moe], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [*ALL])
def test_a_step_with_an_overflow_is_skipped(name, kind):
    for operand in ("x", "dy"):
        for value in VALUES:
            module = module_of(kind, ALL[name])
            assert scaled_step(module, *tensors())[0]  # The calls that follow are replayed.
            assert not scaled_step(module, *tensors(value, operand))[0], (operand, value)
            assert scaled_step(module, *tensors())[0]


@pytest.mark.parametrize("kind", [mlp, moe], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [*ALL])
def test_an_overflow_between_the_layers_is_seen(name, kind):
    """Check that ``GradScaler`` skips a step with an overflow between the layers."""
    module = module_of(kind, ALL[name])
    experts = module.experts if kind is moe else module
    with torch.no_grad():
        experts.gate_up.weight.fill_(100.0)
    x, dy = tensors()
    assert not scaled_step(module, x.abs() * 0 + 200, dy)[0]


@pytest.mark.parametrize("name", [*ALL])
def test_only_the_expert_whose_rows_hold_it(name):
    for operand in ("x", "dy"):
        _, (dw, *_) = scaled_step(module_of(linear, ALL[name]), *tensors(torch.inf, operand))
        assert not dw[0].isfinite().all() and dw[1:].isfinite().all()


@pytest.mark.parametrize("name", [*ALL])
def test_biases_recomputed_layers_and_separate_parameters(name):
    for make, options in (
        (linear, {"single_parameter": False}),
        (moe, {"bias": True}),
        (moe, {"recompute": True}),
    ):
        for operand in ("x", "dy"):
            assert not scaled_step(
                module_of(make, ALL[name], **options), *tensors(torch.inf, operand)
            )[0]


@pytest.mark.parametrize("name", [*ALL])
def test_a_gradient_that_is_added_to_is_not_finite(name):
    """Check that a nonfinite gradient reaches ``main_grad`` of its group only."""
    layer = module_of(linear, ALL[name], fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    x, dy = tensors(torch.inf, "dy")
    layer(x, OFFS).backward(dy)
    assert (
        not layer.weight.main_grad[0].isfinite().all()
        and layer.weight.main_grad[1:].isfinite().all()
    )


@pytest.mark.compile
@pytest.mark.parametrize("name", ["nvfp4", "fp8-block", "fp8", "delayed"])
def test_compiled(name):
    for kind in (linear, mlp):
        module = module_of(kind, ALL[name])
        function = compile_full_graph(module)
        assert scaled_step(module, *tensors(), function)[0]
        for operand, value in (("x", torch.inf), ("dy", torch.nan), ("dy", -torch.inf)):
            assert not scaled_step(module, *tensors(value, operand), function)[0]


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "emulated:sm_90a") for name in ("fp8-block", "row-scaled", "delayed")),
        *((name, "emulated:sm_100a") for name in ("mxfp8", "nvfp4")),
    ],
)
def test_on_kernels(name, backend):
    with cute_kernels.backend(backend):
        module = module_of(linear, ALL[name])
        for operand, value in (("x", torch.inf), ("dy", -torch.inf), ("dy", torch.nan)):
            assert not scaled_step(module, *tensors(value, operand))[0]


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("name", "backend"), [("fp8-block", "emulated:sm_90a"), ("delayed", "emulated:sm_100a")]
)
def test_experts_on_kernels(name, backend):
    with cute_kernels.backend(backend):
        assert not scaled_step(module_of(moe, ALL[name]), *tensors(torch.inf, "dy"))[0]


@pytest.mark.parametrize("kind", [linear, mlp, moe], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [*ALL])
def test_finite_gradients_have_the_bits_that_they_have_without(name, kind):
    silent = dataclasses.replace(ALL[name], propagate_nonfinite=False)
    got, want = (
        scaled_step(module_of(kind, recipe), *tensors())[1] for recipe in (ALL[name], silent)
    )
    assert_all_same(got, want)


@pytest.mark.parametrize("name", [name for name in FP8_RECIPES if not name.startswith("mxfp8")])
def test_an_infinity_saturates_without_the_option(name):
    module = module_of(linear, dataclasses.replace(ALL[name], propagate_nonfinite=False))
    assert scaled_step(module, *tensors(torch.inf, "x"))[0]


@pytest.mark.parametrize(
    "fmt", [FP8Block(), FP8Block(pow2_scales=False), MXFP8(), NVFP4(row_scaled=True)], ids=str
)
@pytest.mark.parametrize("value", VALUES)
def test_rows_that_travel_between_processes_keep_it(fmt, value):
    """Check that nonfinite rows stay nonfinite when they are sent between processes."""
    x, _ = tensors(value, "x")
    y = wire.unpack(wire.pack(x, fmt), K, fmt, torch.float16)
    assert not y[ROW].isfinite().all()
    other_rows = torch.arange(ROWS) != ROW
    assert_all_same(
        [y[other_rows]],
        [wire.unpack(wire.pack(tensors()[0], fmt), K, fmt, torch.float16)[other_rows]],
    )
