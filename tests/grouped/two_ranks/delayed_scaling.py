"""Delayed scaling with amaxes that are reduced over both ranks."""

import copy

import pytest
import torch
import torch.distributed as dist

import grouped
from grouped import recipes
from grouped.nn import GroupedLinear
from tests.helpers import (
    BF16,
    E4M3,
    assert_all_same,
    assert_same_buffers,
    assert_same_bytes,
    compile_full_graph,
)

from .models import gather
from .runner import check, world

NAN, INF = torch.nan, torch.inf
#: Amaxes of six slots on each rank, and the largest of both by the rule.
AMAXES = [[1.0, 0.0, NAN, NAN, INF, 7.0], [4.0, 0.0, 3.0, NAN, 2.0, 0.0]]
LARGEST = [4.0, 0.0, 3.0, 0.0, INF, 7.0]


def updated(row, **options):
    """Return history and scale after an update of a history whose row 0 is ``row``."""
    history, scale = torch.zeros(3, 6), torch.ones(6)
    history[0] = torch.tensor(row)
    grouped.delayed_scaling_update(history, scale, E4M3, **options)
    return history, scale


@check
def delayed_scaling_reduces_amaxes():
    local = AMAXES[world.rank]
    assert_all_same(updated(local, group=dist.group.WORLD), updated(LARGEST))


@check
def delayed_scaling_reduces_given_amaxes():
    """An amax of 0 gives way to row 0 of the history, which is 9 on rank 1."""
    want = [
        max(a, 9.0) if b == 0 else largest for a, b, largest in zip(*AMAXES, LARGEST, strict=True)
    ]
    local = AMAXES[world.rank]
    row = [9.0] * 6 if world.rank else local
    assert_all_same(updated(row, amax=torch.tensor(local), group=dist.group.WORLD), updated(want))


@check
def delayed_scaling_layers():
    """Layers of both ranks have equal scales, eager and compiled."""
    recipe = recipes.FP8Delayed(history_length=3, amax_group=dist.group.WORLD)
    module = GroupedLinear(2, 32, 16, recipe=recipe, dtype=BF16)
    compiled = copy.deepcopy(module)
    for i in range(3):
        x = (torch.randn(20, 32) * 4.0 ** (i - world.rank)).bfloat16()
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for leaf, run in zip(leaves, (module, compile_full_graph(compiled)), strict=True):
            y = run(leaf, [20, 20] if world.rank else [8, 20])
            y.backward(torch.full_like(y, 2.0 ** (i + world.rank)))
        assert_same_bytes(leaves[0].grad, leaves[1].grad)
        assert_same_buffers(compiled.state_dict(), module.state_dict())
    for name, value in module.state_dict().items():
        if "scaling" in name:
            # Row 0 of a history holds the amaxes of the current step, which are each rank's own.
            shared = value[1:] if "history" in name else value
            assert_same_bytes(*gather(shared), name)
            assert shared.any()
            # Only rank 0 has rows of the second group.
            if name.split(".")[1] in ("input_scale", "grad_output_scale"):
                assert shared.ne(1).all()


@check
def delayed_scaling_checks_sizes():
    with pytest.raises(ValueError, match="scale must have size 6"):
        grouped.delayed_scaling_update(
            torch.ones(3, 6), torch.ones(3), E4M3, group=dist.group.WORLD
        )
