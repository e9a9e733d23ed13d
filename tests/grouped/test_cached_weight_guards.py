"""Cached weights, main_grads and delayed gradients while user code views or replaces tensors."""

import copy
import dataclasses
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from cute_kernels.formats import MXFP8, NVFP4, FP8Block
from grouped import optim, quantize, recipes
from grouped.nn import GroupedLinear
from grouped.nn.delayed_scaling import DelayedScaling
from grouped.parallel.wire_format import check_wire
from tests.helpers import BF16, sample

GROUPS, K, N, ENDS = 3, 64, 96, [13, 13, 35]


def make_layer(recipe=None, **options):
    torch.manual_seed(3)
    return GroupedLinear(
        GROUPS, K, N, bias=False, recipe=recipe or recipes.FP8Block(), dtype=BF16, **options
    )


def with_cached_weight(layer):
    """Return the layer after a call that caches its weight."""
    layer(sample(40, K), ENDS, is_first_microbatch=True)
    return layer


def test_data_at_another_view_of_the_storage_drops_the_cache():
    """Check that assigning other data of the same storage invalidates the cached weight."""
    layer = make_layer()
    storage = torch.randn(GROUPS + 1, N, K).to(BF16)
    layer.weight.data = storage[:GROUPS]
    with_cached_weight(layer)
    layer.weight.data = storage[1:]
    with pytest.raises(RuntimeError, match=r"its data is another tensor \(\.data"):
        layer(sample(40, K), ENDS, is_first_microbatch=False)


def test_propagate_nonfinite_is_part_of_a_cached_weight():
    layer = with_cached_weight(make_layer())
    layer.recipe = dataclasses.replace(
        layer.recipe, propagate_nonfinite=not layer.recipe.propagate_nonfinite
    )
    with pytest.raises(RuntimeError, match="the recipe is"):
        layer(sample(40, K), ENDS, is_first_microbatch=False)


def test_a_cached_copy_holds_no_weight_and_dies_with_its_layer():
    """Check that a cached copy does not keep its weight alive, nor outlive its layer."""
    layer = with_cached_weight(make_layer())
    old = weakref.ref(layer.weight)
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
    gc.collect()
    assert old() is None
    with_cached_weight(layer)
    cached = weakref.ref(layer._cached_weight)
    del layer
    gc.collect()
    assert cached() is None


def test_a_fused_step_leaves_frozen_weights_cached():
    """Check that a fused optimizer step keeps the cached weight of a frozen layer."""
    layer, trained = with_cached_weight(make_layer()), nn.Parameter(torch.ones(4))
    layer.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([layer.weight, trained], fused=True)
    with_cached_weight(layer)
    trained.grad = torch.ones(4)
    optimizer.step()
    layer(sample(40, K), ENDS, is_first_microbatch=False)


def parameters_of(layer):
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


def backward(layer, **options):
    torch.manual_seed(5)
    layer(sample(40, K), ENDS, **options).backward(sample(40, N))


def test_versions_of_main_grads_count_writes():
    """A backward pass that saved a main_grad then raises."""
    for single in (True, False):
        layer = make_layer(fuse_wgrad_accumulation=True, single_parameter=single)
        flat = torch.zeros(GROUPS, N, K)
        for p, view in zip(parameters_of(layer), [flat] if single else flat.unbind(), strict=True):
            p.main_grad = view.data  # ``.data`` has a version counter of its own.
        versions = [p.main_grad._version for p in parameters_of(layer)]
        backward(layer)
        assert all(
            p.main_grad._version > v for p, v in zip(parameters_of(layer), versions, strict=True)
        )


@pytest.mark.parametrize("layout", ["reversed", "several buffers", "two dtypes", "one overwritten"])
def test_main_grads_in_any_place_have_the_same_sums(layout):
    """They may lie in one buffer in another order, in several buffers, or have two dtypes."""
    layers = [
        make_layer(recipes.BF16(), fuse_wgrad_accumulation=True, single_parameter=False)
        for _ in range(2)
    ]
    want, got = map(parameters_of, layers)
    for p in want:
        p.main_grad = torch.ones(N, K)
    flat = torch.ones(GROUPS, N, K)
    views = list(flat.unbind())
    if layout == "reversed":
        views.reverse()
    elif layout == "several buffers":
        views = [torch.ones(GROUPS, N, K)[g] for g in range(GROUPS)]
    elif layout == "two dtypes":
        views[1] = torch.ones(GROUPS, N, K, dtype=BF16)[1]
    elif layout == "one overwritten":
        want[1].overwrite_main_grad = got[1].overwrite_main_grad = True
    for p, view in zip(got, views, strict=True):
        p.main_grad = view
    for layer in layers:
        backward(layer)
    for p, q in zip(want, got, strict=True):
        assert torch.equal(p.main_grad.to(q.main_grad.dtype), q.main_grad)
    assert not torch.equal(want[0].main_grad, want[2].main_grad)


def test_a_copied_layer_has_no_hooks_of_the_original():
    """Check that a deep copy of a layer does not call the hooks of the original."""
    calls = []
    layer = make_layer(delay_wgrad=True)
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    copied = copy.deepcopy(layer)
    backward(copied)
    copied.backward_dw()
    assert not calls and copied.weight.grad is not None


def test_scales_move_with_a_layer_whose_dtype_changes():
    scaling = DelayedScaling(recipes.FP8Delayed(), GROUPS).to("meta", BF16)
    assert {(b.device.type, b.dtype) for b in scaling.buffers()} == {("meta", torch.float32)}


def test_foreach_warns_for_the_tensor_that_does_not_change():
    """A foreach op writes several tensors; each one that should change and does not warns."""
    w = torch.full((2, 32, 32), 4.0, dtype=BF16)
    a, b = (nn.Parameter(quantize(w, NVFP4()), False) for _ in range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch._foreach_add_([a, b], [torch.full_like(w, 1e-4), torch.zeros_like(w)])
        assert len(caught) == 1
        torch._foreach_add_([a, b], [torch.zeros_like(w), torch.full_like(w, 1e-4)])
        assert len(caught) == 2


@pytest.mark.parametrize("fmt", [FP8Block(block=(128, 128)), MXFP8(block=(32, 32))], ids=str)
def test_a_wire_format_needs_scales_per_row(fmt):
    with pytest.raises(ValueError, match="wire must quantize each row by itself"):
        check_wire("wire", fmt)


def test_a_closure_computes_gradients():
    """Check that ``step`` enables gradients for its closure."""
    p = nn.Parameter(torch.ones(4))
    ours = optim.AdamW([p], lr=0.1)

    def closure():
        """Compute the loss and its gradients."""
        ours.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert ours.step(closure) == 4 and p.grad is not None and not torch.equal(p, torch.ones(4))


def test_masters_name_parameters_of_the_optimizer():
    p, unknown = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4).to(BF16))
    with pytest.raises(TypeError, match="masters names a tensor that is not a parameter"):
        optim.AdamW([p], masters={unknown: torch.ones(4)}, master_weights=True)
