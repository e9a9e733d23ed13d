"""Kept weights and gradients beside tensors that somebody else owns, views, replaces or shares."""

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


def layer_of(recipe=None, **options):
    torch.manual_seed(3)
    return GroupedLinear(
        GROUPS, K, N, bias=False, recipe=recipe or recipes.FP8Block(), dtype=BF16, **options
    )


def kept(layer):
    """The layer after a call that keeps its weight."""
    layer(sample(40, K), ENDS, is_first_microbatch=True)
    return layer


def test_a_weight_that_is_another_view_of_its_storage_is_not_used():
    layer = layer_of()
    whole = torch.randn(GROUPS + 1, N, K).to(BF16)
    layer.weight.data = whole[:GROUPS]
    kept(layer)
    layer.weight.data = whole[1:]
    with pytest.raises(RuntimeError, match=r"its data is another tensor \(\.data"):
        layer(sample(40, K), ENDS, is_first_microbatch=False)


def test_the_option_for_nonfinite_numbers_belongs_to_a_kept_weight():
    layer = kept(layer_of())
    layer.recipe = dataclasses.replace(
        layer.recipe, propagate_nonfinite=not layer.recipe.propagate_nonfinite
    )
    with pytest.raises(RuntimeError, match="the recipe is"):
        layer(sample(40, K), ENDS, is_first_microbatch=False)


def test_what_is_kept_holds_no_weight_and_dies_with_its_layer():
    layer = kept(layer_of())
    old = weakref.ref(layer.weight)
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
    gc.collect()
    assert old() is None
    kept(layer)
    held = weakref.ref(layer._kept)
    del layer
    gc.collect()
    assert held() is None


def test_a_fused_step_leaves_frozen_weights_kept():
    layer, other = kept(layer_of()), nn.Parameter(torch.ones(4))
    layer.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([layer.weight, other], fused=True)
    kept(layer)
    other.grad = torch.ones(4)
    optimizer.step()
    layer(sample(40, K), ENDS, is_first_microbatch=False)


def parameters_of(layer):
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


def backward(layer, **options):
    torch.manual_seed(5)
    layer(sample(40, K), ENDS, **options).backward(sample(40, N))


def test_versions_of_main_grads_count_writes():
    """Whoever saved one for a backward pass is told that it changed."""
    for single in (True, False):
        layer = layer_of(fuse_wgrad_accumulation=True, single_parameter=single)
        flat = torch.zeros(GROUPS, N, K)
        for p, view in zip(parameters_of(layer), [flat] if single else flat.unbind(), strict=True):
            p.main_grad = view.data  # A version of its own.
        versions = [p.main_grad._version for p in parameters_of(layer)]
        backward(layer)
        assert all(
            p.main_grad._version > v for p, v in zip(parameters_of(layer), versions, strict=True)
        )


@pytest.mark.parametrize("place", ["reversed", "apart", "mixed dtypes", "one fresh"])
def test_main_grads_that_lie_otherwise_have_the_same_sums(place):
    """In one buffer in another order, at like offsets of several, of two dtypes, or one that is
    overwritten.
    """
    layers = [
        layer_of(recipes.BF16(), fuse_wgrad_accumulation=True, single_parameter=False)
        for _ in range(2)
    ]
    want, got = map(parameters_of, layers)
    for p in want:
        p.main_grad = torch.ones(N, K)
    flat = torch.ones(GROUPS, N, K)
    views = list(flat.unbind())
    if place == "reversed":
        views.reverse()
    elif place == "apart":
        views = [torch.ones(GROUPS, N, K)[g] for g in range(GROUPS)]
    elif place == "mixed dtypes":
        views[1] = torch.ones(GROUPS, N, K, dtype=BF16)[1]
    elif place == "one fresh":
        want[1].overwrite_main_grad = got[1].overwrite_main_grad = True
    for p, view in zip(got, views, strict=True):
        p.main_grad = view
    for layer in layers:
        backward(layer)
    for p, q in zip(want, got, strict=True):
        assert torch.equal(p.main_grad.to(q.main_grad.dtype), q.main_grad)
    assert not torch.equal(want[0].main_grad, want[2].main_grad)


def test_a_copy_of_a_layer_has_no_hooks_of_the_original():
    calls = []
    layer = layer_of(delay_wgrad=True)
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    copied = copy.deepcopy(layer)
    backward(copied)
    copied.backward_dw()
    assert not calls and copied.weight.grad is not None


def test_scales_move_with_a_layer_whose_dtype_changes():
    scaling = DelayedScaling(recipes.FP8Delayed(), GROUPS).to("meta", BF16)
    assert {(b.device.type, b.dtype) for b in scaling.buffers()} == {("meta", torch.float32)}


def test_a_lost_update_among_others_is_the_one_that_is_named():
    """Foreach ops write several tensors: that of the tensor that did not change decides."""
    w = torch.full((2, 32, 32), 4.0, dtype=BF16)
    first, second = (nn.Parameter(quantize(w, NVFP4()), False) for _ in range(2))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch._foreach_add_([first, second], [torch.full_like(w, 1e-4), torch.zeros_like(w)])
        assert len(seen) == 1
        torch._foreach_add_([first, second], [torch.zeros_like(w), torch.full_like(w, 1e-4)])
        assert len(seen) == 2


@pytest.mark.parametrize("fmt", [FP8Block(block=(128, 128)), MXFP8(block=(32, 32))], ids=str)
def test_formats_whose_rows_share_scales_do_not_travel(fmt):
    with pytest.raises(ValueError, match="wire must quantize each row by itself"):
        check_wire("wire", fmt)


def test_closures_make_gradients_and_masters_need_a_parameter():
    p, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4).to(BF16))
    ours = optim.AdamW([p], lr=0.1)

    def closure():
        ours.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert ours.step(closure) == 4 and p.grad is not None and not torch.equal(p, torch.ones(4))
    with pytest.raises(TypeError, match="masters names a tensor that is no parameter"):
        optim.AdamW([p], masters={other: torch.ones(4)}, master_weights=True)
