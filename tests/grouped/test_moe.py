import copy
import warnings

import pytest
import torch
from torch import nn

import cute_kernels
import grouped
from grouped import recipes
from grouped.functional import experts
from grouped.nn import MoE
from perf.measure.memory import saved_by
from tests import helpers
from tests.grouped.cases import ALL_RECIPES, WEIGHT_FORMAT, close
from tests.helpers import (
    BF16,
    F16,
    F32,
    I32,
    GraphRecorder,
    assert_all_same,
    assert_same_bytes,
    needs_compiler,
    ops,
    seeded_generator,
)
from tests.reference.test_activations import compute_fp64

H, WIDTH, E, K, T = 64, 32, 6, 2, 21
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
#: Recipes in which a token shares no scale with other tokens.
PER_TOKEN_RECIPES = {
    name: ALL_RECIPES[name] for name in ("bf16", "row-scaled", "mxfp8", "fp8-block")
}


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
    return helpers.step(moe, x, gradient_like(x), **options)


def exact_expert(mlp, e, x):
    """Return the output of expert e for one token, in fp64."""

    def linear(layer, x):
        y = layer.weight[e].double() @ x
        return y if layer.bias is None else y + layer.bias[e].double()

    z = linear(mlp.gate_up, x)
    z = torch.cat([z[::2], z[1::2]]) if mlp.interleaved else z
    return linear(mlp.down, compute_fp64(mlp.activation, z))


def exact_mixture(moe, x, name):
    """Return the output that the models' papers define, token by token in fp64."""
    router, out = moe.router, []
    for token in x.double():
        logits = router.weight.double() @ token
        if name == "gpt-oss":
            best = (logits + router.bias.double()).topk(K)
            chosen, p = best.indices.tolist(), best.values.softmax(0)
        elif name == "deepseek-v3":
            scores = logits.sigmoid()
            biased = scores + router.selection_bias.double()
            groups = biased.view(3, -1).topk(2).values.sum(1).topk(2).indices
            allowed = [e for e in range(E) if e // 2 in groups.tolist()]
            chosen = sorted(allowed, key=lambda e: -float(biased[e].detach()))[:K]
            p = scores[chosen] / scores[chosen].sum() * 2.5
        else:
            p, chosen = logits.softmax(0).topk(K)
            p = p if name == "qwen3" else p / p.sum()
            chosen = chosen.tolist()
        y = sum(w * exact_expert(moe.experts, e, token) for w, e in zip(p, chosen, strict=True))
        out.append(y if moe.shared is None else y + exact_expert(moe.shared, 0, token))
    return torch.stack(out)


@pytest.mark.parametrize("name", list(MODELS))
def test_models(name):
    """Parameters and tokens are bf16 numbers in fp32, so only results of the experts are rounded."""
    moe = make_moe(dtype=F32, **MODELS[name])
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(p.bfloat16())
        if name == "gpt-oss":  # Large enough for the activation to clamp some.
            moe.experts.gate_up.weight.mul_(16)
    x = tokens(dtype=BF16).float().requires_grad_()
    want, y = exact_mixture(moe, x, name), moe(x)
    leaves, dy = [x, *moe.parameters()], torch.randn(T, H).bfloat16()
    close(y, want)
    wanted = torch.autograd.grad(want, leaves, dy.double())
    for got, exact in zip(torch.autograd.grad(y, leaves, dy.float()), wanted, strict=True):
        close(got, exact)
    assert y.dtype == F32 and moe(x.view(3, 7, H)).equal(y.view(3, 7, H))


def composed(moe, x):
    """Return the output of router, experts and combine, each called by itself."""
    choice = moe.router(x)
    r = grouped.compute_routing(choice.expert_ids, E)
    leaf = x.clone().requires_grad_()
    h = moe.experts(ops.moe_gather(leaf, r.token, r.row), r.offs)
    return ops.moe_combine(h, r.row, choice.weights.detach().requires_grad_())


@every_recipe
def test_a_mixture_is_a_router_experts_and_a_sum(recipe):
    moe, x = make_moe(recipe, bias=True, router_bias=True), tokens()
    want = composed(moe, x).detach()
    assert_same_bytes(step(moe, x)[0], want)
    with torch.no_grad():
        assert_same_bytes(moe(x), want)


@pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES)
def test_gradients_are_those_of_the_composition(recipe):
    """Only the rounding differs. With delayed scaling the scales would differ too."""
    moe, x = make_moe(recipe, bias=True, router_bias=True), tokens()
    want = composed(moe, x)
    gradients = step(moe, x)[2:]
    moe.zero_grad()
    want.backward(gradient_like(want))
    tolerance = 2e-2 if recipe.weight is None else 0.2
    for p, gradient in zip(moe.parameters(), gradients, strict=True):
        if p.grad is not None:
            assert (p.grad - gradient).float().norm() <= tolerance * p.grad.float().norm()


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


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "gpt-oss"])
@pytest.mark.parametrize("recipe", PER_TOKEN_RECIPES.values(), ids=PER_TOKEN_RECIPES)
def test_a_token_does_not_depend_on_other_tokens(recipe, name):
    """Its bits do not depend on other tokens, on the order, or on the capacity of the buffer."""
    moe, x = make_moe(recipe, **MODELS[name]), tokens(40)
    y = moe(x).detach()
    order = torch.randperm(40)
    assert_same_bytes(moe(x[order]).detach(), y[order])
    for rows in (slice(0, 1), slice(3, 20), slice(7, 40, 5)):
        assert_same_bytes(moe(x[rows]).detach(), y[rows])
    assert_same_bytes(moe(torch.cat([tokens(9, 5) * 50, x[:8]])).detach()[9:], y[:8])
    got = moe(
        torch.cat([x[:11], torch.full((6, H), torch.nan, dtype=x.dtype)]),
        num_tokens=torch.tensor(11),
    ).detach()
    assert_same_bytes(got[:11], y[:11])
    assert not got[11:].any()


@pytest.mark.parametrize(
    "recipe", [pytest.param(ALL_RECIPES[name], id=name) for name in ("nvfp4", "row-scaled")]
)
def test_serving_has_the_bits_of_training(recipe):
    """In eval mode, and with weights that are quantized beforehand, prepacked or not."""
    moe, x = make_moe(recipe), tokens()
    y = step(moe, x)[0]
    for prepacked in (False, True):
        served = copy.deepcopy(moe).eval()
        with torch.no_grad():
            assert_same_bytes(served(x), y)
            for layer in (served.experts.gate_up, served.experts.down):
                weight = grouped.quantize(layer.weight, WEIGHT_FORMAT)
                layer.weight = nn.Parameter(weight.prepack() if prepacked else weight)
            for _ in range(2):
                assert_same_bytes(served(x), y)


@pytest.mark.parametrize(
    "recipe", [pytest.param(ALL_RECIPES[name], id=name) for name in ("nvfp4", "row-scaled")]
)
def test_microbatches_with_a_cached_weight_have_the_same_bits(recipe):
    moe, x = make_moe(recipe), tokens()
    y = step(moe, x)[0]
    for is_first in (True, False):
        assert_same_bytes(moe(x, is_first_microbatch=is_first).detach(), y)


@every_recipe
def test_steps_repeat_with_and_without_recomputation(recipe):
    runs = [step(make_moe(recipe, bias=True, recompute=r), tokens()) for r in (False, False, True)]
    assert_all_same(*runs[:2])
    assert_all_same(*runs[::2])


FUSED_GRADIENT_RECIPES = {name: ALL_RECIPES[name] for name in ("mxfp8", "fp8-block")} | DELAYED


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

    calls, quantize_gradient = [], experts.ops.moe_quantize_gradient

    def count(*arguments, **options):
        calls.append(1)
        return quantize_gradient(*arguments, **options)

    monkeypatch.setattr(experts.ops, "moe_quantize_gradient", count)
    for options, is_fused in (
        ({}, True),
        ({"activation": "srelu", "recompute": True}, True),
        ({"bias": True}, False),
    ):
        moe = make_moe(recipe, **options)
        got = steps(moe)
        with monkeypatch.context() as patch:
            patch.setattr(experts, "_quantizes_gradients", lambda *_: False)
            assert_all_same(steps(moe), got)
        with grouped.inspect.inspect_quantization(moe):
            assert_all_same(step(moe, tokens(seed=0)), got[: 2 + len([*moe.parameters()])])
        # Under delayed scaling the first step's scales come from the plain gradient.
        assert len(calls) == (3 - recipe.takes_scales) * is_fused
        calls.clear()


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "squared relu"])
@every_recipe
def test_activations_in_epilogues(recipe, name, monkeypatch):
    """A GEMM that applies the activation has the bits of a GEMM and a separate activation."""
    runs = []
    for fused in (True, False):
        moe = make_moe(recipe, **MODELS[name])
        if not fused:
            monkeypatch.setattr(experts, "activates", lambda *_: False)
        with monkeypatch.context() as patch, torch.no_grad():
            if fused:
                unused = ["moe_activate", "moe_gather"][: 1 + (recipe.input is None)]
            else:
                unused = ["m_grouped_gemm_activate", "m_grouped_quantize_gemm_activate"]
            for op in unused:
                patch.delattr(cute_kernels.ops, op)
            y = moe(tokens())
        runs.append([y, *step(moe, tokens())])
    assert_all_same(*runs)


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
    with pytest.raises(ValueError, match="recompute would not make again"):
        stochastic = grouped.NVFP4(stochastic_rounding=True)
        make_moe(recipes.Recipe(stochastic, WEIGHT_FORMAT, stochastic), recompute=True)


@every_recipe
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("top_k", [2, 4])
def test_tensors_saved_for_the_backward_pass(recipe, recompute, top_k):
    """A mixture saves its input, the pre-activation, the routing, and quantized weights.

    Twice the experts of half the width, twice as many per token, save no more bytes of rows.
    """
    width, num_experts = 128 // top_k, 4 * top_k
    moe = MoE(H, width, num_experts, top_k, recipe=recipe, dtype=BF16, recompute=recompute)
    with saved_by(moe) as saved:
        moe(tokens(60).requires_grad_())
    pairs = 60 * top_k
    rows = [t.shape for t in saved if t.shape[:1] == (pairs,)]
    assert sorted(rows) == sorted([(pairs,)] * 2 + [(pairs, 2 * width)] * (not recompute))
    assert sum(t.shape == (60, H) for t in saved) == 1
    assert {t.shape[1] for t in saved if t.shape[:1] == (60,)} <= {H, num_experts, top_k, 1}
    assert sum(t.nbytes for t in saved if t.dtype == BF16) == 60 * (H + 256 * (not recompute)) * 2


@pytest.mark.parametrize("options", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    "recipe", [pytest.param(ALL_RECIPES[name], id=name) for name in ("bf16", "row-scaled")]
)
def test_fused_and_delayed_weight_gradients(recipe, single, options):
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


def test_an_inspector_records_every_operand_of_the_experts():
    moe = make_moe(recipes.NVFP4RowScaled())
    want = step(moe, tokens())
    inspector = grouped.inspect.inspect_quantization(moe)
    with inspector:
        assert_all_same(step(moe, tokens()), want)
    recorded = {(e["layer"], e["role"], e["direction"]) for e in inspector.summary()}
    for layer in ("experts.gate_up", "experts.down"):
        for role in ("input", "weight", "grad_output"):
            assert {(layer, role, d) for d in ("rowwise", "columnwise")} <= recorded


def test_detect_nonfinite_names_the_layer_of_a_mixture():
    moe = make_moe(recipes.NVFP4RowScaled())
    want = step(moe, tokens())
    with grouped.inspect.detect_nonfinite(moe) as detector:
        assert_all_same(step(moe, tokens()), want)
    assert detector.report() == {}
    with torch.no_grad():
        moe.experts.down.weight[1, 2, 3] = torch.nan
    with grouped.inspect.detect_nonfinite(moe) as detector:
        step(moe, tokens())
    assert "weight" in detector.report()["experts.down"]


COMPILED_RECIPES = {"bf16": recipes.BF16(), "row-scaled": ALL_RECIPES["row-scaled"]} | DELAYED


@pytest.mark.compile
@needs_compiler
@pytest.mark.parametrize(
    "recipe",
    COMPILED_RECIPES.values(),
    ids=COMPILED_RECIPES,
)
def test_compiled_once_for_all_numbers_of_tokens(recipe, fresh_dynamo):
    torch._dynamo.utils.counters.clear()
    eager, moe = (make_moe(recipe, **MODELS["deepseek-v3"]) for _ in range(2))
    compiled = torch.compile(
        moe, fullgraph=True, backend=GraphRecorder() if recipe.is_quantized else "inductor"
    )

    def run(moe, x):
        """Return output, gradient of x, and token counts of a step with all losses."""
        leaf = x.clone().requires_grad_()
        torch._dynamo.mark_dynamic(leaf, 0)
        y, losses = moe(leaf, losses=True)
        (y.float().square().sum() + losses.balance + losses.z).backward()
        return [y.detach(), leaf.grad, losses.tokens_per_expert]

    for count in (21, 40, 5):
        y, dx, counts = run(compiled, tokens(count))
        want = run(eager, tokens(count))
        assert_all_same([y, counts], want[::2])
        # Inductor adds the gradients of experts and router without rounding them first.
        torch.testing.assert_close(dx, want[1], rtol=0.05, atol=2e-3)
    assert_all_same(*([p.grad for p in m.experts.parameters()] for m in (moe, eager)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("score", "function"), [("sigmoid", torch.sigmoid), ("softmax", torch.exp)]
)
def test_losses_and_their_gradients(score, function):
    moe, x = make_moe(dtype=F32, score=score), tokens(dtype=F32)
    _, losses = moe(x, losses=True)
    counts = torch.bincount(moe.router(x).expert_ids.flatten(), minlength=E)
    assert torch.equal(losses.tokens_per_expert, counts.int())
    logits = x.double() @ moe.router.weight.double().T
    scores = function(logits) / function(logits).sum(-1, keepdim=True)
    balance = E * (counts / counts.sum() * scores.mean(0)).sum()
    z = logits.logsumexp(-1).pow(2).mean()
    for loss, want in (
        (losses.balance, balance),
        (losses.z, z),
        (losses.balance + losses.z, balance + z),
    ):
        torch.testing.assert_close(loss, want.float())
        gradients = (
            torch.autograd.grad(t, moe.router.weight, retain_graph=True)[0] for t in (loss, want)
        )
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def with_nan_tail(x):
    """Return a buffer of T tokens and 4 rows of NaN behind them."""
    return torch.cat([x, torch.full((4, H), torch.nan, dtype=x.dtype)])


def test_losses_ignore_the_tail_of_a_buffer():
    moe, x = make_moe(dtype=F32), tokens(dtype=F32)
    _, losses = moe(x, losses=True)
    buffer = with_nan_tail(x).requires_grad_()
    y, losses_of_buffer = moe(buffer, losses=True, num_tokens=torch.tensor([T], dtype=I32))
    for a, b in zip(losses_of_buffer, losses, strict=True):
        torch.testing.assert_close(a, b)
    (y.sum() + losses_of_buffer.balance + losses_of_buffer.z).backward()
    assert not buffer.grad[T:].any() and buffer.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in moe.parameters())


def test_gradients_of_the_tail_are_ignored():
    moe, dy = make_moe(bias=True), torch.full((T + 4, H), torch.nan, dtype=BF16)
    dy[:T] = 1
    moe(with_nan_tail(tokens()), num_tokens=torch.tensor(T)).backward(dy)
    assert all(p.grad.isfinite().all() for p in moe.parameters())


def test_a_nan_gradient_of_a_token_reaches_only_the_biases_of_its_experts():
    moe, dy = make_moe(bias=True), torch.full((T + 4, H), torch.nan, dtype=BF16)
    dy[:T] = 1
    dy[1, 3] = torch.nan
    moe(with_nan_tail(tokens()), num_tokens=torch.tensor(T)).backward(dy)
    want = torch.zeros_like(moe.experts.down.bias, dtype=torch.bool)
    want[moe.router(tokens()).expert_ids[1].long(), 3] = True
    assert moe.experts.down.bias.grad.isnan().equal(want)


def test_losses_without_tokens_are_zero():
    moe = make_moe(dtype=F32)
    y, losses = moe(torch.zeros(0, H), losses=True)
    assert y.shape == (0, H) and not any(t.any() for t in losses)


def test_a_dropped_pair_adds_no_bias():
    moe, p = make_moe(bias=True), torch.ones(2, K, requires_grad=True)
    with torch.no_grad():
        moe.experts.down.bias[1, 3] = torch.nan
    r = grouped.compute_routing(torch.tensor([[2, -1], [1, E]]), E)
    moe.experts.run(tokens(2), p, r, None, moe._style(BF16)).sum().backward()
    assert p.grad.isnan().tolist() == [[False, False], [True, False]] and not p.grad[:, 1].any()


COUNTS = torch.tensor([9, 1, 5, 5, 5, 5])


def test_selection_bias_moves_towards_balance():
    moe = make_moe(selection_bias=True, score="sigmoid")
    before = moe.router.selection_bias.clone()
    moe.router.update_selection_bias(COUNTS, rate=0.5)
    assert (moe.router.selection_bias - before).tolist() == pytest.approx([-0.5, 0.5, 0, 0, 0, 0])


def test_selection_bias_is_saved_and_stays_in_fp32():
    moe = make_moe(selection_bias=True, score="sigmoid")
    assert moe.half().router.selection_bias.dtype == F32
    assert "router.selection_bias" in moe.state_dict()


def test_update_selection_bias_checks_its_arguments():
    with pytest.raises(RuntimeError, match="has no selection_bias"):
        make_moe().router.update_selection_bias(COUNTS)
    moe = make_moe(selection_bias=True, score="sigmoid")
    with pytest.raises(ValueError, match="tokens_per_expert must have size 6"):
        moe.router.update_selection_bias(COUNTS[:1])


def test_selection_bias_compares_counts_with_their_mean():
    """The mean is 4 and the median 3: three experts have fewer than 4 tokens, and one has 4."""
    moe = make_moe(selection_bias=True)
    moe.router.selection_bias.zero_()
    moe.router.update_selection_bias(torch.tensor([1, 2, 2, 4, 5, 10], dtype=I32), rate=1.0)
    assert moe.router.selection_bias.tolist() == [1, 1, 1, 0, -1, -1]


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


@pytest.mark.parametrize("name", ["gelu", "relu", "silu"])
def test_experts_without_a_gate_warn_unless_explicit(name):
    gated = {"gelu": "geglu", "relu": "reglu", "silu": "swiglu"}[name]
    with pytest.warns(
        UserWarning, match=rf"without a gate.*pass '{gated}'.*grouped.Activation\('{name}'\)"
    ):
        moe = make_moe(activation=name)
    assert moe.experts.gate_up.out_features == WIDTH
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for activation in (gated, grouped.Activation(name), "srelu"):
            make_moe(activation=activation)


def test_equal_scores_select_the_lowest_experts():
    moe = make_moe(selection_bias=True)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.selection_bias.zero_()
        assert moe.router(tokens()).expert_ids.tolist() == [[0, 1]] * T


def test_autocast():
    moe, x = make_moe(dtype=F32), tokens(dtype=F32)
    with torch.autocast("cpu", BF16):
        y = moe(x)
    choice = moe.router(x)
    r = grouped.compute_routing(choice.expert_ids, E)
    h = moe.experts(x.bfloat16()[r.token.long()], r.offs)
    assert_same_bytes(y, ops.moe_combine(h, r.row, choice.weights, F32))


@pytest.mark.parametrize("mode", ["eager", "inside", "compiled"])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast_keeps_the_router_and_biases_in_fp32(dtype, mode):
    """The router's GEMMs, forward and backward, and those of the second bias stay in fp32."""

    def gradients(mode):
        """Return gradients of x and parameters; "inside" calls backward under autocast."""
        moe, x = (
            make_moe(dtype=F32, bias=True, router_bias=True),
            tokens(dtype=F32).requires_grad_(),
        )
        run = torch.compile(moe, backend="aot_eager", fullgraph=True) if mode == "compiled" else moe
        with torch.autocast("cpu", dtype):
            y = run(x)
            if mode == "inside":
                y.backward(tokens(seed=2, dtype=F32))
        if mode != "inside":
            y.backward(tokens(seed=2, dtype=F32))
        return [x.grad, *(p.grad for p in moe.parameters())]

    router, x = make_moe(dtype=F32).router, tokens(dtype=F32)
    want = router(x).logits
    with torch.autocast("cpu", dtype):
        assert_same_bytes(router(x).logits, want)
    for got, gradient in zip(gradients(mode), gradients("eager"), strict=True):
        torch.testing.assert_close(
            got, gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max())
        )


SIZES = {"hidden_size": H, "intermediate_size": WIDTH, "num_experts": E, "top_k": K}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"top_k": 7}, ValueError, "top_k must be in .* got 7"),
        ({"top_k": 2.0}, TypeError, "top_k must be an integer, got 2.0"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be positive, got 0"),
        (
            {"intermediate_size": 24, "recipe": recipes.NVFP4()},
            ValueError,
            "^intermediate_size must be a multiple of 16",
        ),
        (
            {"shared_intermediate_size": 24, "recipe": recipes.NVFP4()},
            ValueError,
            "^shared_intermediate_size must be a mul",
        ),
        ({"score": "tanh"}, ValueError, "score must be softmax or sigmoid"),
        ({"expert_groups": 4}, ValueError, "expert_groups must divide num_experts = 6, got 4"),
        ({"expert_groups": 6, "top_groups": 6}, ValueError, "must have two or more"),
        ({"routed_scaling_factor": 0.0}, ValueError, "routed_scaling_factor must be positive"),
        (
            {"routed_scaling_factor": "2"},
            TypeError,
            "routed_scaling_factor must be a number, got '2'",
        ),
        ({"renormalize": "no"}, TypeError, "renormalize must be a bool, got 'no'"),
        ({"activation": 3}, TypeError, "activation must be a name such as 'swiglu'"),
        ({"activation": "silu", "interleaved": True}, ValueError, "interleaved is of gated"),
    ],
)
def test_construction_refuses(change, error, message):
    with pytest.raises(error, match=message):
        MoE(**SIZES | change)


def test_calls_check_num_tokens():
    moe = make_moe()
    with pytest.raises(ValueError, match="num_tokens must be a tensor of one element"):
        moe(tokens(), num_tokens=3)
    with pytest.raises(TypeError, match="num_tokens must be int32 or int64, got bool"):
        moe(tokens(), num_tokens=torch.tensor(True))
    for count in (-1, 1 << 40):
        with pytest.raises(
            ValueError, match=f"num_tokens must be in .*, the tokens of x, got {count}"
        ):
            moe(tokens(), num_tokens=torch.tensor(count))


@pytest.mark.parametrize("name", ["is_first_microbatch", "losses"])
def test_calls_check_flags(name):
    with pytest.raises(TypeError, match=f"{name} must be a bool, got 'no'"):
        make_moe()(tokens(), **{name: "no"})


@pytest.mark.parametrize("losses", [False, True])
def test_calls_check_x(losses):
    moe = make_moe()
    with pytest.raises(ValueError, match="x must have shape"):
        moe(torch.zeros(3, 8), losses=losses)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        moe([1.0], losses=losses)
    with pytest.raises(ValueError, match="x must be on the device of the router's weight"):
        moe(tokens().to("meta"), losses=losses)


def test_a_mixture_refuses_torch_func_and_second_derivatives():
    moe, x = make_moe(), tokens().requires_grad_()
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.grad(lambda x: moe(x).sum().float())(tokens())
    (dx,) = torch.autograd.grad(moe(x).float().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()
