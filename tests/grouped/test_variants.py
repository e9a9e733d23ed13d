"""Variants of NVFP4: seeds of stochastic rounding, the Hadamard transform, four over six."""

import dataclasses

import pytest
import torch

import cute_kernels
import grouped
from grouped import NVFP4
from grouped.nn import GroupedLinear
from grouped.recipes import Recipe
from grouped.tensor.validation import saved_format
from tests.helpers import F16, F32, compile_full_graph, forward_backward, offs_from_splits, sample

from .cases import bytes_of

STOCHASTIC = NVFP4(stochastic_rounding=True)
SQUARES = NVFP4(block=(16, 16), stochastic_rounding=True)
HADAMARD = NVFP4(hadamard=True)
ROLES = Recipe(HADAMARD, NVFP4(block=(16, 16)), NVFP4(hadamard=True, stochastic_rounding=True))


def same(a, b):
    return all(map(torch.equal, bytes_of(a).values(), bytes_of(b).values()))


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
def test_an_int_is_itself_and_zero(seed):
    x = sample(40, 32)
    q = grouped.quantize(x, STOCHASTIC, offs=[13, 40], columnwise=True, seed=seed)
    assert same(
        q,
        grouped.quantize(
            x, STOCHASTIC, offs=[13, 40], columnwise=True, seed=torch.tensor([seed, 0])
        ),
    )


@pytest.mark.parametrize("seed", [3, torch.tensor([3, 4])])
def test_a_seed_of_a_format_that_takes_none(seed):
    with pytest.raises(ValueError, match="seed is for stochastic rounding, which nvfp4 does not"):
        grouped.quantize(sample(40, 32), NVFP4(), offs=[40], seed=seed)
    out = grouped.quantize(sample(40, 32), NVFP4(), offs=[40])
    with pytest.raises(ValueError, match="seed is for stochastic rounding"):
        grouped.quantize(sample(40, 32), NVFP4(), offs=[40], seed=seed, out=out)


def test_manual_seed_governs_what_is_not_given():
    """Check that ``torch.manual_seed`` determines seeds that are not given."""
    x, results = sample(40, 32), []
    for state in (1, 1, 2):
        torch.manual_seed(state)
        results += [grouped.quantize(x, STOCHASTIC, offs=[13, 40], columnwise=True) for _ in "ab"]
    a, b, again, c = results[0], results[1], results[2], results[4]
    assert same(a, again) and same(b, results[3])
    assert not same(a, b) and not same(a, c)


def test_nothing_is_drawn_for_other_formats():
    x, state = sample(40, 32), torch.get_rng_state()
    grouped.quantize(x, HADAMARD, offs=[40], columnwise=True)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("fmt", [STOCHASTIC, SQUARES, NVFP4(four_over_six=True), HADAMARD], ids=str)
def test_into_a_tensor_and_in_place(fmt):
    """Check quantization into ``out`` and by ``copy_`` for each variant of NVFP4."""
    x, y = sample(40, 32), sample(40, 32)
    seed = 9 if fmt.is_stochastic else None
    out = grouped.quantize(x, fmt, offs=[13, 40], columnwise=True)
    grouped.quantize(y, fmt, offs=[20, 40], columnwise=True, seed=seed, out=out)
    assert same(out, grouped.quantize(y, fmt, offs=[20, 40], columnwise=True, seed=seed))
    torch.manual_seed(3)
    out.copy_(x)
    torch.manual_seed(3)
    assert same(out, grouped.quantize(x, fmt, offs=[20, 40], columnwise=True))
    decoded = out.dequantize()
    torch.manual_seed(4)
    out.mul_(3.0)
    torch.manual_seed(4)
    assert same(out, grouped.quantize(decoded * 3.0, fmt, offs=[20, 40], columnwise=True))


def test_records_of_old_files():
    """Written before the bound and the error of four over six were fields."""
    fields = {
        "row_scaled": False,
        "block": (1, 16),
        "hadamard": True,
        "stochastic_rounding": False,
        "four_over_six": False,
    }
    assert saved_format("nvfp4", fields, "0.1.0") == HADAMARD
    assert saved_format("nvfp4", fields | {"hadamard": False}, "0.1.0") == NVFP4()


def gradients(layer, x, dy, offs, state=0, function=None):
    torch.manual_seed(state)
    return forward_backward(layer, x, dy, offs, function=function)[:3]


def test_gradients_follow_the_generator():
    """Check that stochastic gradients depend on the generator alone."""
    layer, x, dy = GroupedLinear(2, 64, 48, recipe=ROLES), sample(40, 64), sample(40, 48)
    a, again, c = (gradients(layer, x, dy, offs_from_splits((13, 27)), s) for s in (1, 1, 2))
    assert all(map(torch.equal, a, again))
    assert torch.equal(a[0], c[0])
    assert not torch.equal(a[1], c[1]) and not torch.equal(a[2], c[2])


@pytest.mark.compile
def test_a_compiled_layer_draws_anew():
    layer = GroupedLinear(2, 64, 48, recipe=ROLES)
    compiled = compile_full_graph(layer, dynamic=True)
    for rows in (40, 56):
        arguments = sample(rows, 64), sample(rows, 48), offs_from_splits((13, rows - 13))
        a, again, c = (gradients(layer, *arguments, state, compiled)[1:] for state in (1, 1, 2))
        assert all(map(torch.equal, a, again))
        assert not any(map(torch.equal, a, c))


@pytest.mark.parametrize("dtype", [F32, F16])
def test_only_bf16_is_transformed(dtype):
    """Check that transformed formats refuse dtypes other than bf16."""
    layer = GroupedLinear(2, 64, 48, recipe=ROLES)
    with torch.no_grad():
        layer(sample(40, 64, dtype=dtype), offs_from_splits((13, 27)))
    with pytest.raises(TypeError, match="nvfp4:hadamard transforms .*: cast it, as x.bfloat16"):
        layer(sample(40, 64, dtype=dtype), offs_from_splits((13, 27)))
    status = cute_kernels.support(
        "grouped_quantize", HADAMARD, "reference", dtype=dtype, columnwise=True
    )
    assert not status and "bfloat16 only" in status.reason


@pytest.mark.parametrize("propagate", [False, True])
def test_infinities_that_meet_in_a_transform(propagate):
    """Four in a chunk of 16 may leave no infinity; the flag then says that the group is lost."""
    recipe = dataclasses.replace(ROLES, propagate_nonfinite=propagate)
    layer, x = GroupedLinear(2, 64, 48, recipe=recipe), sample(40, 64)
    for i, row in enumerate((0, 1, 2, 3)):
        x[row, 5] = torch.inf * (1 if i % 2 else -1)
    y, _, dweight = gradients(layer, x, sample(40, 48), offs_from_splits((20, 20)))
    assert not y[:4].isfinite().any() and dweight[1].isfinite().all()
    if propagate:
        assert not dweight[0].isfinite().any()
