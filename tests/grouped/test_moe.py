import contextlib
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
    Graphs,
    assert_all_same,
    assert_same_bytes,
    each,
    needs_compiler,
    ops,
    refusals,
    seeded,
)
from tests.reference.test_activations import in_fp64

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
every_recipe = each("recipe", ALL_RECIPES | DELAYED)
#: Those in which a token shares no scale with others.
BY_TOKEN = {name: ALL_RECIPES[name] for name in ("bf16", "row-scaled", "mxfp8", "fp8-block")}


def moe_of(recipe=None, dtype=BF16, seed=3, **options):
    torch.manual_seed(seed)
    moe = MoE(H, WIDTH, E, K, recipe=recipe, dtype=dtype, **options)
    if moe.router.selection_bias is not None:
        moe.router.selection_bias.uniform_(-0.2, 0.2)
    return moe


def tokens(count=T, seed=1, dtype=BF16):
    return torch.randn(count, H, generator=seeded(seed)).to(dtype)


def gradient_like(y):
    return torch.randn(y.shape, generator=seeded(9)).to(y.dtype)


def step(moe, x, **options):
    return helpers.step(moe, x, gradient_like(x), **options)


# Numbers


def expert_of(mlp, e, x):
    def linear(layer, x):
        y = layer.weight[e].double() @ x
        return y if layer.bias is None else y + layer.bias[e].double()

    z = linear(mlp.gate_up, x)
    z = torch.cat([z[::2], z[1::2]]) if mlp.interleaved else z
    return linear(mlp.down, in_fp64(mlp.activation, z))


def mixture(moe, x, name):
    """What the models' papers say, token by token in fp64."""
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
        y = sum(w * expert_of(moe.experts, e, token) for w, e in zip(p, chosen, strict=True))
        out.append(y if moe.shared is None else y + expert_of(moe.shared, 0, token))
    return torch.stack(out)


@each("name", list(MODELS))
def test_models(name):
    """Parameters and tokens are bf16 numbers in fp32: of the experts' results alone some round."""
    moe = moe_of(dtype=F32, **MODELS[name])
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(p.bfloat16())
        if name == "gpt-oss":  # So that some of them are clamped.
            moe.experts.gate_up.weight.mul_(16)
    x = tokens(dtype=BF16).float().requires_grad_()
    want, y = mixture(moe, x, name), moe(x)
    leaves, dy = [x, *moe.parameters()], torch.randn(T, H).bfloat16()
    close(y, want)
    wanted = torch.autograd.grad(want, leaves, dy.double())
    for got, exact in zip(torch.autograd.grad(y, leaves, dy.float()), wanted, strict=True):
        close(got, exact)
    assert y.dtype == F32 and moe(x.view(3, 7, H)).equal(y.view(3, 7, H))


@every_recipe
def test_it_is_a_router_experts_and_a_sum(recipe):
    """To the bit, trained or not; gradients are those of the composition, but for rounding."""
    moe = moe_of(recipe, bias=True, router_bias=True)
    x = tokens()
    choice = moe.router(x)
    r = grouped.compute_routing(choice.expert_ids, E)
    leaf = x.clone().requires_grad_()
    h = moe.experts(ops.moe_gather(leaf, r.token, r.row), r.offs)
    want = ops.moe_combine(h, r.row, choice.weights.detach().requires_grad_())
    got = step(moe, x)
    assert_same_bytes(got[0], want.detach())
    with torch.no_grad():
        assert_same_bytes(moe(x), want.detach())
    if recipe.takes_scales:
        return  # A step changes the scales.
    moe.zero_grad()
    want.backward(gradient_like(want))
    lost = {F32: 0.2, None: 2e-2}[None if recipe.weight is None else F32]
    for p, gradient in zip(moe.parameters(), got[2:], strict=True):
        if p.grad is not None:
            assert (p.grad - gradient).float().norm() <= lost * p.grad.float().norm()


@each("many", [2, 2048])
def test_router_gradients_of_every_kind_of_input(many, monkeypatch):
    """Also of dtypes that are split into parts, and of halves of the tokens; logits have the
    precision of fp32.
    """
    monkeypatch.setattr("grouped.nn.router._MANY_TOKENS", many)
    half, single = BF16, F32
    for dtype, of_weight in ((half, half), (half, single), (single, single), (F16, F16)):
        x, weight = (
            tokens(dtype=dtype).requires_grad_(),
            (torch.randn(E, H) / 8).to(of_weight).requires_grad_(),
        )
        logits = torch.ops.grouped.router_logits(x, weight)
        want = x.double() @ weight.double().T
        torch.testing.assert_close(logits.double(), want, rtol=1e-6, atol=2e-6)
        dy = torch.randn(T, E)
        exact = torch.autograd.grad(want, (x, weight), dy.double())
        for got, wanted in zip(torch.autograd.grad(logits, (x, weight), dy), exact, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)


def test_halves_of_many_tokens(monkeypatch):
    """The router's weight alone sees that its gradient is two sums."""
    found = []
    for many in (T + 1, T):
        monkeypatch.setattr("grouped.nn.router._MANY_TOKENS", many)
        torch.manual_seed(3)
        found.append(step(MoE(H, WIDTH, 8, K, dtype=BF16), tokens()))
    weights = [made.pop(2) for made in found]
    assert_all_same(*found)
    torch.testing.assert_close(*weights, rtol=1e-2, atol=1e-3)


# The contract


@each("name", ["mixtral", "deepseek-v3", "gpt-oss"])
@each("recipe", BY_TOKEN)
def test_a_token_is_on_its_own(recipe, name):
    """Its bits depend on no other token, on no order, on no capacity."""
    moe, x = moe_of(recipe, **MODELS[name]), tokens(40)
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


@each("recipe", {name: ALL_RECIPES[name] for name in ("nvfp4", "row-scaled")})
def test_serving_has_the_bits_of_training(recipe):
    """Eval, kept weights, weights that were quantized before, prepacked or not, microbatches."""
    moe, x = moe_of(recipe), tokens()
    y = step(moe, x)[0]
    for first in (True, False):
        assert_same_bytes(moe(x, is_first_microbatch=first).detach(), y)
    for prepacked in (False, True):
        served = copy.deepcopy(moe).eval()
        with torch.no_grad():
            assert_same_bytes(served(x), y)
            for layer in (served.experts.gate_up, served.experts.down):
                weight = grouped.quantize(layer.weight, WEIGHT_FORMAT)
                layer.weight = nn.Parameter(weight.prepack() if prepacked else weight)
            for _ in range(2):
                assert_same_bytes(served(x), y)


@every_recipe
def test_steps_repeat_and_recompute(recipe):
    runs = [step(moe_of(recipe, bias=True, recompute=r), tokens()) for r in (False, False, True)]
    assert_all_same(*runs[:2])
    assert_all_same(*runs[::2])


@each("recipe", {name: ALL_RECIPES[name] for name in ("mxfp8", "fp8-block")} | DELAYED)
def test_gradients_are_quantized_by_what_makes_them(recipe, monkeypatch):
    """With the bits of quantizing them after, and its amaxes in some steps, unless something else
    reads them.
    """

    def steps(moe):
        moe = copy.deepcopy(moe)
        return [t for seed in range(3) for t in step(moe, tokens(seed=seed))] + [
            t.clone() for t in moe.buffers()
        ]

    calls, make = [], experts.ops.moe_quantize_gradient
    monkeypatch.setattr(
        experts.ops, "moe_quantize_gradient", lambda *given: calls.append(1) or make(*given)
    )
    for options, by_one in (
        ({}, 1),
        ({"activation": "srelu", "recompute": True}, 1),
        ({"bias": True}, 0),
    ):
        moe = moe_of(recipe, **options)
        got = steps(moe)
        with monkeypatch.context() as patch:
            patch.setattr(experts, "_quantizes_gradients", lambda *_: False)
            assert_all_same(steps(moe), got)
        with grouped.inspect.inspect_quantization(moe):
            assert_all_same(step(moe, tokens(seed=0)), got[: 2 + len([*moe.parameters()])])
        # Under delayed scaling not in the first step, whose scales follow from what is made.
        assert len(calls) == (3 - recipe.takes_scales) * by_one
        calls.clear()


@each("name", ["mixtral", "gpt-oss", "squared relu"])
@every_recipe
def test_activations_in_epilogues(recipe, name, monkeypatch):
    """The bits of products whose results are activated by what reads them."""
    runs = []
    for fused in (True, False):
        moe = moe_of(recipe, **MODELS[name])
        if not fused:
            monkeypatch.setattr(experts, "activates", lambda *_: False)
        with monkeypatch.context() as patch, torch.no_grad():
            apart = ["moe_activate", "moe_gather"][: 1 + (recipe.input is None)]
            for op in (
                apart if fused else ["m_grouped_gemm_activate", "m_grouped_quantize_gemm_activate"]
            ):
                patch.delattr(cute_kernels.ops, op)
            y = moe(tokens())
        runs.append([y, *step(moe, tokens())])
    assert_all_same(*runs)


def test_recompute_of_weights_that_were_kept():
    for recipe in (recipes.NVFP4RowScaled(), recipes.BF16()):
        runs = []
        for recompute in (False, True):
            moe = moe_of(recipe, recompute=recompute)
            step(moe, tokens(), is_first_microbatch=True)
            runs.append(step(moe, tokens(), is_first_microbatch=False))
            for layer in (moe.experts.gate_up, moe.experts.down):
                layer.weight = nn.Parameter(
                    grouped.quantize(layer.weight, WEIGHT_FORMAT, columnwise=True),
                    requires_grad=False,
                )
            y, dx, drouter = step(moe, tokens())[:3]
            runs[-1] += [y, dx, drouter]
        assert_all_same(*runs)
    with pytest.raises(ValueError, match="recompute would not make again"):
        stochastic = grouped.NVFP4(stochastic_rounding=True)
        moe_of(recipes.Recipe(stochastic, WEIGHT_FORMAT, stochastic), recompute=True)


# Memory


@every_recipe
@each("recompute", [False, True])
@each("parts", [2, 4])
def test_saved(recipe, recompute, parts):
    """The input, z, the routing and the router's few numbers; and quantized weights.

    No more bytes of rows with twice the experts, of half the width, twice as many for each token.
    """
    width, experts = 128 // parts, 4 * parts
    moe = MoE(H, width, experts, parts, recipe=recipe, dtype=BF16, recompute=recompute)
    with saved_by(moe) as saved:
        moe(tokens(60).requires_grad_())
    rows = [t.shape for t in saved if t.shape[:1] == (60 * parts,)]
    assert sorted(rows) == sorted([(60 * parts,)] * 2 + [(60 * parts, 2 * width)] * (not recompute))
    assert sum(t.shape == (60, H) for t in saved) == 1
    assert {t.shape[1] for t in saved if t.shape[:1] == (60,)} <= {H, experts, parts, 1}
    assert sum(t.nbytes for t in saved if t.dtype == BF16) == 60 * (H + 256 * (not recompute)) * 2


# What goes with grouped layers


@each("options", [(True, False), (False, True), (True, True)])
@each("single", [True, False])
@each("recipe", {name: ALL_RECIPES[name] for name in ("bf16", "row-scaled")})
def test_gradients_that_go_another_way(recipe, single, options):
    plain = moe_of(recipe, single_parameter=single, shared_intermediate_size=32)
    fused, delayed = options
    options = {"fuse_wgrad_accumulation": fused, "delay_wgrad": delayed}
    other = moe_of(recipe, single_parameter=single, shared_intermediate_size=32, **options)
    named = dict(other.named_parameters())
    for name, p in named.items():
        if "weight" in name and "router" not in name:
            p.main_grad = torch.full_like(
                p, torch.nan, dtype=F32
            )  # Which a first microbatch drops.
    want = step(plain, tokens())
    leaf = tokens().requires_grad_()
    y = other(leaf, is_first_microbatch=True)
    y.backward(gradient_like(y))
    if delayed:
        assert all(p.grad is None for name, p in named.items() if "router" not in name)
        other.backward_dw()
    assert_all_same([y.detach(), leaf.grad], want[:2])
    for (name, p), grad in zip(named.items(), want[2:], strict=True):
        got = p.main_grad.bfloat16() if fused and hasattr(p, "main_grad") else p.grad
        assert_same_bytes(got, grad, name)


@each("recipe", {"bf16": recipes.BF16(), "fp8-block": recipes.FP8Block()})
def test_gradients_of_some(recipe):
    """They are the same where other parameters are frozen, the input among them."""
    moe = moe_of(recipe, bias=True, shared_intermediate_size=32)
    gradients = step(moe, tokens())[2:]
    for part in ("router", "gate_up", "down", "bias"):
        for name, p in moe.named_parameters():
            p.requires_grad_(part in name)
        moe.zero_grad()
        y = moe(tokens())
        y.backward(gradient_like(y))
        for (name, p), gradient in zip(moe.named_parameters(), gradients, strict=True):
            if part in name:
                assert_same_bytes(p.grad, gradient, name)
            assert p.requires_grad or p.grad is None


def test_nan_is_found_and_numbers_are_inspected():
    moe = moe_of(recipes.NVFP4RowScaled())
    want = step(moe, tokens())
    lens = grouped.inspect.inspect_quantization(moe)
    with lens:
        assert_all_same(step(moe, tokens()), want)
    seen = {(e["layer"], e["role"], e["direction"]) for e in lens.summary()}
    for layer in ("experts.gate_up", "experts.down"):
        for role in ("input", "weight", "grad_output"):
            assert {(layer, role, d) for d in ("rowwise", "columnwise")} <= seen
    with grouped.inspect.detect_nonfinite(moe) as found:
        assert_all_same(step(moe, tokens()), want)
    assert found.report() == {}
    with torch.no_grad():
        moe.experts.down.weight[1, 2, 3] = torch.nan
    with grouped.inspect.detect_nonfinite(moe) as found:
        step(moe, tokens())
    assert "weight" in found.report()["experts.down"]


@needs_compiler
@each("recipe", {"bf16": recipes.BF16(), "row-scaled": ALL_RECIPES["row-scaled"]} | DELAYED)
def test_compiled_once_for_all_numbers_of_tokens(recipe, fresh_dynamo):
    torch._dynamo.utils.counters.clear()
    eager, moe = (moe_of(recipe, **MODELS["deepseek-v3"]) for _ in range(2))
    compiled = torch.compile(
        moe, fullgraph=True, backend=Graphs() if recipe.is_quantized else "inductor"
    )

    def run(moe, x):
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


# Options and errors


def test_losses():
    for score, of in {"sigmoid": torch.sigmoid, "softmax": torch.exp}.items():
        moe, x = moe_of(dtype=F32, score=score), tokens(dtype=F32)
        y, losses = moe(x, losses=True)
        counts = torch.bincount(moe.router(x).expert_ids.flatten(), minlength=E)
        assert torch.equal(losses.tokens_per_expert, counts.int())
        logits = x.double() @ moe.router.weight.double().T
        scores = of(logits) / of(logits).sum(-1, keepdim=True)
        exact = (
            E * (counts / counts.sum() * scores.mean(0)).sum(),
            logits.logsumexp(-1).pow(2).mean(),
        )
        for loss, wanted in zip((*losses[:2], sum(losses[:2])), (*exact, sum(exact)), strict=True):
            torch.testing.assert_close(loss, wanted.float())
            both = (
                torch.autograd.grad(t, moe.router.weight, retain_graph=True)[0]
                for t in (loss, wanted)
            )
            torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)
    buffer = torch.cat([x, torch.full((4, H), torch.nan)]).requires_grad_()
    z, in_buffer = moe(buffer, losses=True, num_tokens=torch.tensor([T], dtype=I32))
    for a, b in zip(in_buffer, losses, strict=True):
        torch.testing.assert_close(a, b)
    (z.sum() + in_buffer.balance + in_buffer.z).backward()
    assert not buffer.grad[T:].any() and buffer.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in moe.parameters())
    # Nor do gradients of the tail count, of which the loss may have made anything.
    biased, dy = moe_of(bias=True), torch.full((T + 4, H), torch.nan, dtype=BF16)
    dy[:T] = 1
    biased(buffer.detach().bfloat16(), num_tokens=torch.tensor(T)).backward(dy)
    assert all(p.grad.isfinite().all() for p in biased.parameters())
    # One of a token's is for its experts alone.
    dy[1, 3] = torch.nan
    biased.experts.down.bias.grad = None
    biased(buffer.detach().bfloat16(), num_tokens=torch.tensor(T)).backward(dy)
    lost = torch.zeros_like(biased.experts.down.bias, dtype=torch.bool)
    lost[biased.router(buffer[:T].detach().bfloat16()).expert_ids[1].long(), 3] = True
    assert biased.experts.down.bias.grad.isnan().equal(lost)
    none = moe(torch.zeros(0, H), losses=True)
    assert none[0].shape == (0, H) and not any(t.any() for t in none[1])


def test_a_pair_without_a_row_takes_nothing_of_a_bias():
    moe, p = moe_of(bias=True), torch.ones(2, K, requires_grad=True)
    with torch.no_grad():
        moe.experts.down.bias[1, 3] = torch.nan
    r = grouped.compute_routing(torch.tensor([[2, -1], [1, E]]), E)
    moe.experts.run(tokens(2), p, r, None, moe._style(BF16)).sum().backward()
    assert p.grad.isnan().tolist() == [[False, False], [True, False]] and not p.grad[:, 1].any()


def test_selection_bias_moves_towards_balance():
    moe = moe_of(selection_bias=True, score="sigmoid")
    before = moe.router.selection_bias.clone()
    counts = torch.tensor([9, 1, 5, 5, 5, 5])
    moe.router.update_selection_bias(counts, rate=0.5)
    assert (moe.router.selection_bias - before).tolist() == pytest.approx([-0.5, 0.5, 0, 0, 0, 0])
    assert moe.half().router.selection_bias.dtype == F32
    assert "router.selection_bias" in moe.state_dict()
    with pytest.raises(RuntimeError, match="has no selection_bias"):
        moe_of().router.update_selection_bias(counts)
    with pytest.raises(ValueError, match="tokens_per_expert must have size 6"):
        moe.router.update_selection_bias(counts[:1])


def test_selection_bias_is_moved_by_the_mean_count():
    """Not the median, 3: three experts have fewer tokens than the mean, 4, and one has as many."""
    moe = moe_of(selection_bias=True)
    moe.router.selection_bias.zero_()
    moe.router.update_selection_bias(torch.tensor([1, 2, 2, 4, 5, 10], dtype=I32), rate=1.0)
    assert moe.router.selection_bias.tolist() == [1, 1, 1, 0, -1, -1]


@each("recipe", {name: ALL_RECIPES[name] for name in ("bf16", "fp8-block", "row-scaled")})
def test_only_the_router_takes_gradients(recipe):
    """Nor do tokens: the gradients are those of a step in which all take some, also from a kept
    weight.
    """
    both = moe_of(recipe, bias=True), moe_of(recipe, bias=True)
    both[1].experts.requires_grad_(False)
    for first in (None, True, False):
        for moe in both:
            moe.zero_grad()
        y, _ = step(both[0], tokens().requires_grad_(), is_first_microbatch=first)[:2]
        got = both[1](tokens(), is_first_microbatch=first)
        got.backward(gradient_like(got))
        assert_same_bytes(got.detach(), y.detach())
        assert both[1].router.weight.grad.any()
        assert_same_bytes(both[1].router.weight.grad, both[0].router.weight.grad)


def test_a_kept_weight_without_the_copy_that_gradients_of_the_router_read():
    """The gradient of routing weights reads the columnwise copy of the second weight alone, here."""
    for trains, needs_copy in ((True, True), (False, False)):
        moe = moe_of(ALL_RECIPES["fp8-block"])
        moe.experts.requires_grad_(False)
        moe.router.requires_grad_(trains)
        with torch.no_grad():
            moe(tokens(), is_first_microbatch=True)
        error = (
            pytest.raises(RuntimeError, match="needs the columnwise weight")
            if needs_copy
            else contextlib.nullcontext()
        )
        with error:
            moe(tokens(), is_first_microbatch=False)


@each("name", ["gelu", "relu", "silu"])
def test_experts_without_a_gate_are_asked_for(name):
    gated = {"gelu": "geglu", "relu": "reglu", "silu": "swiglu"}[name]
    with pytest.warns(
        UserWarning, match=rf"without a gate.*pass '{gated}'.*grouped.Activation\('{name}'\)"
    ):
        moe = moe_of(activation=name)
    assert moe.experts.gate_up.out_features == WIDTH
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for activation in (gated, grouped.Activation(name), "srelu"):
            moe_of(activation=activation)


def test_the_first_of_equal_scores_wins():
    moe = moe_of(selection_bias=True)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.selection_bias.zero_()
        assert moe.router(tokens()).expert_ids.tolist() == [[0, 1]] * T


def test_autocast():
    moe, x = moe_of(dtype=F32), tokens(dtype=F32)
    with torch.autocast("cpu", BF16):
        y = moe(x)
    choice = moe.router(x)
    r = grouped.compute_routing(choice.expert_ids, E)
    h = moe.experts(x.bfloat16()[r.token.long()], r.offs)
    assert_same_bytes(y, ops.moe_combine(h, r.row, choice.weights, F32))


@each("way", ["eager", "inside", "compiled"])
@each("dtype", [BF16, F16])
def test_autocast_leaves_router_and_biases_alone(dtype, way):
    """Products of fp32 stay so: the router's, forward and backward, and those of the second bias."""

    def gradients(way):
        moe, x = moe_of(dtype=F32, bias=True, router_bias=True), tokens(dtype=F32).requires_grad_()
        run = torch.compile(moe, backend="aot_eager", fullgraph=True) if way == "compiled" else moe
        with torch.autocast("cpu", dtype):
            y = run(x)
            if way == "inside":
                y.backward(tokens(seed=2, dtype=F32))
        if way != "inside":
            y.backward(tokens(seed=2, dtype=F32))
        return [x.grad, *(p.grad for p in moe.parameters())]

    router, x = moe_of(dtype=F32).router, tokens(dtype=F32)
    want = router(x).logits
    with torch.autocast("cpu", dtype):
        assert_same_bytes(router(x).logits, want)
    for got, gradient in zip(gradients(way), gradients("eager"), strict=True):
        torch.testing.assert_close(
            got, gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max())
        )


SIZES = {"hidden_size": H, "intermediate_size": WIDTH, "num_experts": E, "top_k": K}
test_what_cannot_be_made = refusals(
    lambda change: MoE(**SIZES | change),
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


def test_what_cannot_be_called():
    moe = moe_of()
    with pytest.raises(ValueError, match="x must have shape"):
        moe(torch.zeros(3, 8))
    with pytest.raises(ValueError, match="num_tokens must be a tensor of one element"):
        moe(tokens(), num_tokens=3)
    with pytest.raises(TypeError, match="num_tokens must be int32 or int64, got bool"):
        moe(tokens(), num_tokens=torch.tensor(True))
    for count in (-1, 1 << 40):
        with pytest.raises(
            ValueError, match=f"num_tokens must be in .*, the tokens of x, got {count}"
        ):
            moe(tokens(), num_tokens=torch.tensor(count))
    for name in ("is_first_microbatch", "losses"):
        with pytest.raises(TypeError, match=f"{name} must be a bool, got 'no'"):
            moe(tokens(), **{name: "no"})
    for options in ({}, {"losses": True}):
        with pytest.raises(TypeError, match="x must be a tensor, got list"):
            moe([1.0], **options)
        with pytest.raises(ValueError, match="x must be on the device of the router's weight"):
            moe(tokens().to("meta"), **options)
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.grad(lambda x: moe(x).sum().float())(tokens())
    x = tokens().requires_grad_()
    (dx,) = torch.autograd.grad(moe(x).float().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()
