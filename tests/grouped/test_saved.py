"""The tensors that a call saves for its backward pass, and no others."""

import gc

import pytest
import torch
from torch._subclasses import FakeTensorMode

import grouped
from cute_kernels.layout.buffers import buffers
from cute_kernels.testing.memory import SavedTensor, fake_peak_bytes, record_saved_tensors
from grouped import recipes
from grouped.functional.linear_call import LinearCall
from grouped.nn import GroupedLinear, GroupedMLP, MoE
from tests.helpers import BF16, E4M3, F32, I32, offs_tensor, sample

from .cases import ALL_RECIPES, QUANTIZED, WEIGHT_FORMAT

ROWS, GROUPS, HIDDEN, WIDTH = 40, 3, 64, 32
OFFS = offs_tensor(13, 13, 35)
_OFFS = SavedTensor((GROUPS,), I32, 4 * GROUPS)


def plain(*shape, dtype=BF16):
    return SavedTensor(shape, dtype, torch.Size(shape).numel() * dtype.itemsize)


def copy_of(fmt, shape, groups=GROUPS):
    specs = buffers(fmt, shape, groups if len(shape) == 2 else None, columnwise=True)
    return [
        plain(*specs[name].shape, dtype=specs[name].dtype)
        for name in fmt.operand_names(columnwise=True)
    ]


def sort(saved):
    return sorted(saved, key=str)


def expected_of_linear(recipe, rows, n, k, x=True, weight=True):
    """Return the tensors that a linear layer saves."""
    if not recipe.is_quantized:
        return [plain(rows, k)] if x else []
    saved_tensors = copy_of(recipe.input, (rows, k)) if x else []
    if recipe.takes_scales:  # The gradient's, and the amaxes of x and of the weight.
        saved_tensors += [plain(GROUPS, dtype=F32)] * 3
    return saved_tensors + (copy_of(recipe.weight, (GROUPS, n, k)) if weight else [])


RECIPES_AND_DELAYED = ALL_RECIPES | {"fp8-delayed": recipes.FP8Delayed()}


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("parameters", [BF16, F32])
@pytest.mark.parametrize(
    "recipe",
    RECIPES_AND_DELAYED.values(),
    ids=RECIPES_AND_DELAYED,
)
def test_mlp(recipe, parameters, single):
    """Check the tensors that ``GroupedMLP`` saves for backward."""
    mlp = GroupedMLP(
        *(GROUPS, HIDDEN, WIDTH), recipe=recipe, dtype=parameters, single_parameter=single
    )
    x = sample(ROWS, HIDDEN).requires_grad_()
    with record_saved_tensors(mlp) as saved:
        mlp(x, OFFS)
    gate_up = expected_of_linear(recipe, ROWS, 2 * WIDTH, HIDDEN)
    down = expected_of_linear(recipe, ROWS, HIDDEN, WIDTH)
    assert sort(saved) == sort([_OFFS, *gate_up, plain(ROWS, 2 * WIDTH), *down])


@pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES)
@pytest.mark.parametrize("frozen", ["x", "weight", "weight bias", "x weight", "x weight bias"])
def test_frozen_operands_keep_nothing(frozen, recipe):
    """Check that frozen operands save nothing for backward."""
    layer = GroupedLinear(GROUPS, HIDDEN, WIDTH, recipe=recipe, dtype=BF16)
    layer.weight.requires_grad_("weight" not in frozen)
    layer.bias.requires_grad_("bias" not in frozen)
    x = sample(ROWS, HIDDEN).requires_grad_("x" not in frozen)
    with record_saved_tensors(layer) as saved:
        y = layer(x, OFFS)
    want = expected_of_linear(
        *(recipe, ROWS, WIDTH, HIDDEN), x="weight" not in frozen, weight="x" not in frozen
    )
    assert sort(saved) == sort([_OFFS, *want] if y.requires_grad else [])


@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
def test_microbatches_keep_their_rows(recipe, is_quantized, delay):
    """And the weight once; one that is quantized already as it is."""
    layer = GroupedLinear(GROUPS, HIDDEN, WIDTH, recipe=recipe, dtype=BF16, delay_wgrad=delay)
    if is_quantized:
        layer.weight = torch.nn.Parameter(
            grouped.quantize(layer.weight, WEIGHT_FORMAT, columnwise=True)
        )
    x = sample(ROWS, HIDDEN).requires_grad_()
    with record_saved_tensors(layer) as saved:
        for is_first in (True, False, False):
            layer(x, OFFS, is_first_microbatch=is_first)
    rows = expected_of_linear(recipe, ROWS, WIDTH, HIDDEN, weight=False)
    assert sort(saved) == sort(
        [_OFFS, *(3 * rows), *expected_of_linear(recipe, ROWS, WIDTH, HIDDEN, x=False)]
    )


@pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES)
def test_peak(recipe):
    """With the gradients live only the output and the operands of wgrad, but no quantized weight."""  # noqa: E501
    groups, width, rows, weight = 8, 128, 8 * 64, 8 * 256 * 128
    with FakeTensorMode():
        mlp = GroupedMLP(groups, 256, width, recipe=recipe, dtype=BF16)
        offs = torch.full((groups,), 64).cumsum(0).to(I32)
        x, dy = (torch.randn(rows, 256, dtype=BF16) for _ in range(2))
        x.requires_grad_()
        existing = [*mlp.parameters(), x, dy, offs]
        peak = fake_peak_bytes(lambda: mlp(x, offs).backward(dy), existing)
    gradients = 2 * (3 * weight + rows * 256)
    wgrad = 2 * rows * 2 * 128
    if recipe.is_quantized:
        for fmt in (recipe.input, recipe.grad_output):
            wgrad += sum(t.nbytes for t in copy_of(fmt, (rows, 256), groups=8))
    assert peak <= gradients + 2 * rows * 256 + wgrad + 4096


@pytest.mark.parametrize("is_moe", [False, True])
def test_quantized_weights_are_released_before_wgrad(monkeypatch, is_moe):
    """A layer's copy is released before its own weight gradient is computed."""
    options = {"recipe": recipes.FP8Block(), "dtype": BF16}
    layer = (
        MoE(HIDDEN, WIDTH, GROUPS, 2, **options)
        if is_moe
        else GroupedMLP(GROUPS, HIDDEN, WIDTH, **options)
    )
    alive, make = [], LinearCall.weight_gradient

    def live():
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dim() == 3]
        return sum(t.dtype == E4M3 for t in tensors)

    def count(*arguments, **given):
        alive.append(live() - before)
        return make(*arguments, **given)

    before = live()
    monkeypatch.setattr(LinearCall, "weight_gradient", count)
    x = sample(ROWS, HIDDEN).requires_grad_()
    (layer(x) if is_moe else layer(x, OFFS)).sum().backward()
    assert alive == [1, 0]
