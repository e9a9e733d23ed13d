"""Layers whose parameters are slices of one flat buffer, as trainers that shard them keep them."""

import pytest
import torch
from torch import nn

import cute_kernels
from grouped.nn import GroupedMLP
from tests.grouped.cases import RECIPES
from tests.helpers import assert_same_bytes, offsets, sample

pytest.importorskip("cutlass")

K, HIDDEN, GROUPS = 64, 32, 3
OFFS = offsets((9, 0, 24))


def flatten(module):
    """Move all parameters, and their gradients, into two buffers; each begins at an odd element."""
    parameters = list(module.parameters())
    size = 1 + sum(p.numel() + 2 for p in parameters)
    data, grads, at = torch.zeros(size).bfloat16(), torch.zeros(size).bfloat16(), 1
    for p in parameters:
        place = slice(at, at + p.numel())
        p.data = data[place].view(p.shape).copy_(p.data)
        p.grad = grads[place].view(p.shape)
        at += p.numel() + 2
    return data


def step(module, x):
    leaf = x.clone().requires_grad_()
    y = module(leaf, OFFS)
    y.float().square().sum().backward()
    return y.detach(), leaf.grad, *(p.grad for p in module.parameters())


@pytest.mark.parametrize("backend", ["reference", "emulated:sm_90a", "emulated:sm_100a"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_training_steps_have_the_same_bits(recipe, backend):
    torch.manual_seed(0)
    module = GroupedMLP(GROUPS, K, HIDDEN, bias=True, dtype=torch.bfloat16, recipe=recipe)
    for p in module.parameters():
        nn.init.normal_(p)
    x = sample(35, K)
    with cute_kernels.backend(backend):
        want = [t.clone() for t in step(module, x)]
        before = flatten(module).clone()
        assert all(p.data_ptr() % 16 for p in module.parameters())
        for got, wanted in zip(step(module, x), want, strict=True):
            assert_same_bytes(got, wanted)
    data = next(module.parameters()).data
    assert torch.equal(torch.empty(0).bfloat16().set_(data.untyped_storage()), before)
