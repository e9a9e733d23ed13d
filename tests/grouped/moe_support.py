"""Mixtures and inputs that the tests of ``MoE`` share."""

import pytest
import torch

from grouped import recipes
from grouped.nn import MoE
from tests import helpers
from tests.grouped.cases import ALL_RECIPES
from tests.helpers import (
    BF16,
    seeded_generator,
)

H, WIDTH, E, K, T = 64, 32, 6, 2, 21
#: Options of MoE for the mixtures of published models.
MODELS = {
    "mixtral": {},
    "qwen3": {"renormalize": False},
    "deepseek-v3": {
        "score": "sigmoid",
        "selection_bias": True,
        "expert_groups": 3,
        "top_groups": 2,
        "routed_scaling_factor": 2.5,
        "shared_intermediate_size": 64,
    },
    "gpt-oss": {
        "activation": "clamped_swiglu",
        "bias": True,
        "interleaved": True,
        "router_bias": True,
    },
    "squared relu": {"activation": "srelu", "bias": True},
}


DELAYED = {"fp8-delayed": recipes.FP8Delayed(history_length=4)}
RECIPES_AND_DELAYED = ALL_RECIPES | DELAYED
every_recipe = pytest.mark.parametrize(
    "recipe", RECIPES_AND_DELAYED.values(), ids=RECIPES_AND_DELAYED
)


def make_moe(recipe=None, dtype=BF16, seed=3, **options):
    """Return a mixture of E experts with the same parameters at each call."""
    torch.manual_seed(seed)
    moe = MoE(H, WIDTH, E, K, recipe=recipe, dtype=dtype, **options)
    if moe.router.selection_bias is not None:
        moe.router.selection_bias.uniform_(-0.2, 0.2)
    return moe


def tokens(count=T, seed=1, dtype=BF16):
    return torch.randn(count, H, generator=seeded_generator(seed)).to(dtype)


def gradient_like(y):
    return torch.randn(y.shape, generator=seeded_generator(9)).to(y.dtype)


def step(moe, x, **options):
    return helpers.forward_backward(moe, x, gradient_like(x), **options)
