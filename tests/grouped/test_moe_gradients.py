"""Gradients of ``MoE``: router, recomputation, fused quantization, and frozen parameters."""

import copy

import pytest
import torch
from torch import nn

import cute_kernels
import grouped
from grouped import recipes
from grouped.functional import experts_backward
from grouped.nn import MoE
from tests.grouped.cases import ALL_RECIPES, WEIGHT_FORMAT
from tests.helpers import (
    BF16,
    F16,
    F32,
    assert_all_same,
    assert_same_bytes,
)

from .moe_support import DELAYED, WIDTH, E, H, K, T, gradient_like, make_moe, step, tokens

FUSED_GRADIENT_RECIPES = {name: ALL_RECIPES[name] for name in ("mxfp8", "fp8-block")} | DELAYED


@pytest.mark.parametrize("many", [2, 2048])
def test_router_gradients_of_every_dtype(many, monkeypatch):
    """Logits have the precision of fp32.

    Some dtypes are split into parts; with more than ``many`` tokens, halves are summed.
    """
    monkeypatch.setattr("grouped.nn.router._MANY_TOKENS", many)
    for dtype, weight_dtype in ((BF16, BF16), (BF16, F32), (F32, F32), (F16, F16)):
        x = tokens(dtype=dtype).requires_grad_()
        weight = (torch.randn(E, H) / 8).to(weight_dtype).requires_grad_()
        logits = torch.ops.grouped.router_logits(x, weight)
        want = x.double() @ weight.double().T
        torch.testing.assert_close(logits.double(), want, rtol=1e-6, atol=2e-6)
        dy = torch.randn(T, E)
        exact = torch.autograd.grad(want, (x, weight), dy.double())
        for got, wanted in zip(torch.autograd.grad(logits, (x, weight), dy), exact, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)


def test_router_gradients_of_many_tokens_are_two_sums(monkeypatch):
    """Only the gradient of the router's weight may round differently."""
    results = []
    for many in (T + 1, T):
        monkeypatch.setattr("grouped.nn.router._MANY_TOKENS", many)
        torch.manual_seed(3)
        results.append(step(MoE(H, WIDTH, 8, K, dtype=BF16), tokens()))
    weights = [result.pop(2) for result in results]
    assert_all_same(*results)
    torch.testing.assert_close(*weights, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "recipe",
    FUSED_GRADIENT_RECIPES.values(),
    ids=FUSED_GRADIENT_RECIPES,
)
def test_gradients_are_quantized_by_the_op_that_computes_them(recipe, monkeypatch):
    """Bits and amaxes are those of a separate quantization.

    A bias needs the plain gradient, and prevents the fusion.
    """

    def steps(moe):
        moe = copy.deepcopy(moe)
        results = [t for seed in range(3) for t in step(moe, tokens(seed=seed))]
        return results + [t.clone() for t in moe.buffers()]

    calls, quantize_gradient = [], cute_kernels.ops.moe_quantize_gradient

    def count(*arguments, **options):
        calls.append(1)
        return quantize_gradient(*arguments, **options)

    monkeypatch.setattr(cute_kernels.ops, "moe_quantize_gradient", count)
    for options, is_fused in (
        ({}, True),
        ({"activation": "srelu", "recompute": True}, True),
        ({"bias": True}, False),
    ):
        moe = make_moe(recipe, **options)
        got = steps(moe)
        with monkeypatch.context() as patch:
            patch.setattr(experts_backward, "_supports_quantized_gradient", lambda *_: False)
            assert_all_same(steps(moe), got)
        with grouped.inspect.inspect_quantization(moe):
            assert_all_same(step(moe, tokens(seed=0)), got[: 2 + len([*moe.parameters()])])
        # Under delayed scaling the first step's scales come from the plain gradient.
        assert len(calls) == (3 - recipe.takes_scales) * is_fused
        calls.clear()


@pytest.mark.parametrize("recipe", [recipes.NVFP4RowScaled(), recipes.BF16()], ids=str)
def test_recomputation_with_cached_weights(recipe):
    runs = []
    for recompute in (False, True):
        moe = make_moe(recipe, recompute=recompute)
        step(moe, tokens(), is_first_microbatch=True)
        runs.append(step(moe, tokens(), is_first_microbatch=False))
    assert_all_same(*runs)


@pytest.mark.parametrize("recipe", [recipes.NVFP4RowScaled(), recipes.BF16()], ids=str)
def test_recomputation_with_frozen_quantized_weights(recipe):
    runs = []
    for recompute in (False, True):
        moe = make_moe(recipe, recompute=recompute)
        for layer in (moe.experts.gate_up, moe.experts.down):
            layer.weight = nn.Parameter(
                grouped.quantize(layer.weight, WEIGHT_FORMAT, columnwise=True),
                requires_grad=False,
            )
        runs.append(step(moe, tokens())[:3])
    assert_all_same(*runs)


def test_recomputation_refuses_stochastic_rounding():
    with pytest.raises(ValueError, match="recompute=True cannot reproduce"):
        stochastic = grouped.NVFP4(stochastic_rounding=True)
        make_moe(recipes.Recipe(stochastic, WEIGHT_FORMAT, stochastic), recompute=True)


@pytest.mark.parametrize("options", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    "recipe", [pytest.param(ALL_RECIPES[name], id=name) for name in ("bf16", "row-scaled")]
)
def test_fused_and_delayed_weight_gradients(recipe, single, options):
    """Compare fused and delayed weight gradients with plain ones."""
    plain = make_moe(recipe, single_parameter=single, shared_intermediate_size=32)
    fused, delayed = options
    options = {"fuse_wgrad_accumulation": fused, "delay_wgrad": delayed}
    moe = make_moe(recipe, single_parameter=single, shared_intermediate_size=32, **options)
    named = dict(moe.named_parameters())
    for name, p in named.items():
        if "weight" in name and "router" not in name:
            # A first microbatch overwrites the NaN.
            p.main_grad = torch.full_like(p, torch.nan, dtype=F32)
    want = step(plain, tokens())
    leaf = tokens().requires_grad_()
    y = moe(leaf, is_first_microbatch=True)
    y.backward(gradient_like(y))
    if delayed:
        assert all(p.grad is None for name, p in named.items() if "router" not in name)
        moe.backward_dw()
    assert_all_same([y.detach(), leaf.grad], want[:2])
    for (name, p), grad in zip(named.items(), want[2:], strict=True):
        got = p.main_grad.bfloat16() if fused and hasattr(p, "main_grad") else p.grad
        assert_same_bytes(got, grad, name)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipes.BF16(), id="bf16"),
        pytest.param(recipes.FP8Block(), id="fp8-block"),
    ],
)
def test_gradients_with_frozen_parameters(recipe):
    """Gradients have the same bits if other parameters and the input are frozen."""
    moe = make_moe(recipe, bias=True, shared_intermediate_size=32)
    gradients = step(moe, tokens())[2:]
    for trained in ("router", "gate_up", "down", "bias"):
        for name, p in moe.named_parameters():
            p.requires_grad_(trained in name)
        moe.zero_grad()
        y = moe(tokens())
        y.backward(gradient_like(y))
        for (name, p), gradient in zip(moe.named_parameters(), gradients, strict=True):
            if trained in name:
                assert_same_bytes(p.grad, gradient, name)
            assert p.requires_grad or p.grad is None


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(ALL_RECIPES[name], id=name) for name in ("bf16", "fp8-block", "row-scaled")],
)
def test_gradients_of_the_router_alone(recipe):
    """They have the bits of a step with all gradients, also with a cached weight."""
    trained, frozen = make_moe(recipe, bias=True), make_moe(recipe, bias=True)
    frozen.experts.requires_grad_(False)
    for is_first in (None, True, False):
        for moe in (trained, frozen):
            moe.zero_grad()
        y = step(trained, tokens().requires_grad_(), is_first_microbatch=is_first)[0]
        got = frozen(tokens(), is_first_microbatch=is_first)
        got.backward(gradient_like(got))
        assert_same_bytes(got.detach(), y.detach())
        assert frozen.router.weight.grad.any()
        assert_same_bytes(frozen.router.weight.grad, trained.router.weight.grad)


def moe_with_rowwise_weights(trains_router):
    """Return a mixture that has cached its weights without the columnwise copy."""
    moe = make_moe(ALL_RECIPES["fp8-block"])
    moe.experts.requires_grad_(False)
    moe.router.requires_grad_(trains_router)
    with torch.no_grad():
        moe(tokens(), is_first_microbatch=True)
    return moe


def test_gradients_of_the_router_need_the_columnwise_weight():
    """The gradient of routing weights reads the columnwise copy of the second weight."""
    moe = moe_with_rowwise_weights(trains_router=True)
    with pytest.raises(RuntimeError, match="needs the columnwise weight"):
        moe(tokens(), is_first_microbatch=False)


def test_a_frozen_mixture_needs_no_columnwise_weight():
    moe_with_rowwise_weights(trains_router=False)(tokens(), is_first_microbatch=False)
