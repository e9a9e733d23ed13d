"""``MoE`` against the models' papers in fp64, and against its parts, bit by bit."""

import copy

import pytest
import torch
from torch import nn

import cute_kernels
import grouped
from cute_kernels.testing.memory import record_saved_tensors
from grouped import recipes
from grouped.functional import expert_layer
from grouped.nn import MoE
from tests.grouped.cases import ALL_RECIPES, WEIGHT_FORMAT, close
from tests.helpers import (
    BF16,
    F32,
    GraphRecorder,
    assert_all_same,
    assert_same_bytes,
    needs_compiler,
    ops,
)
from tests.reference.test_activations import compute_fp64

from .moe_support import (
    DELAYED,
    MODELS,
    E,
    H,
    K,
    T,
    every_recipe,
    gradient_like,
    make_moe,
    step,
    tokens,
)

#: Recipes in which a token shares no scale with other tokens.
PER_TOKEN_RECIPES = {
    name: ALL_RECIPES[name] for name in ("bf16", "row-scaled", "mxfp8", "fp8-block")
}


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
    """Parameters and tokens are bf16 numbers in fp32, so only the experts' results are rounded."""
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
    """Compare ``MoE`` with a router, experts and a weighted sum."""
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


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "squared relu"])
@every_recipe
def test_activations_in_epilogues(recipe, name, monkeypatch):
    """A GEMM that applies the activation has the bits of a GEMM and a separate activation."""
    runs = []
    for fused in (True, False):
        moe = make_moe(recipe, **MODELS[name])
        if not fused:
            monkeypatch.setattr(expert_layer, "activates", lambda *_: False)
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


@every_recipe
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("top_k", [2, 4])
def test_tensors_saved_for_the_backward_pass(recipe, recompute, top_k):
    """A mixture saves its input, the pre-activation, the routing, and quantized weights.

    Twice the experts of half the width, twice as many per token, save no more bytes of rows.
    """
    width, num_experts = 128 // top_k, 4 * top_k
    moe = MoE(H, width, num_experts, top_k, recipe=recipe, dtype=BF16, recompute=recompute)
    with record_saved_tensors(moe) as saved:
        moe(tokens(60).requires_grad_())
    pairs = 60 * top_k
    rows = [t.shape for t in saved if t.shape[:1] == (pairs,)]
    assert sorted(rows) == sorted([(pairs,)] * 2 + [(pairs, 2 * width)] * (not recompute))
    assert sum(t.shape == (60, H) for t in saved) == 1
    assert {t.shape[1] for t in saved if t.shape[:1] == (60,)} <= {H, num_experts, top_k, 1}
    assert sum(t.nbytes for t in saved if t.dtype == BF16) == 60 * (H + 256 * (not recompute)) * 2


def test_an_inspector_records_every_operand_of_the_experts():
    """Check that the inspector records every operand of both expert layers."""
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
    """Check that ``detect_nonfinite`` names the layer and operand with a NaN."""
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
    """Check that ``MoE`` compiles once for all numbers of tokens."""
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
