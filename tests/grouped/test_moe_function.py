"""``grouped.moe`` against loops over pairs in fp64, and against ``MoE``, bit by bit."""

import pytest
import torch
from torch import nn

import cute_kernels
import grouped
from cute_kernels.runtime.plan_cache import clear_plan_cache
from cute_kernels.runtime.replay import Recording
from grouped import recipes
from grouped.functional.moe import ExpertIdChecks
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

from .cases import ALL_RECIPES, WEIGHT_FORMAT, close
from .moe_support import MODELS, E, H, K, T, make_moe, tokens

WIDTH = 96
#: Experts that three ranks have, by global id.
RANKS = [[0, 4], [1, 2, 5], [3]]
#: Recipes in which the output of a token depends on no other token.
PER_TOKEN_RECIPES = {
    name: ALL_RECIPES[name] for name in ("bf16", "row-scaled", "mxfp8", "fp8-block")
}
CLAMPED = grouped.Activation("clamped_swiglu", alpha=1.5, limit=5.0)
each_recipe = pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES)
per_token = pytest.mark.parametrize("recipe", PER_TOKEN_RECIPES.values(), ids=PER_TOKEN_RECIPES)


def draw(*shape, seed=0, dtype=BF16, scale=1.0):
    return (torch.randn(shape, generator=seeded_generator(seed)) * scale).to(dtype)


def random_choice(count=T, top_k=K, experts=E, seed=0):
    """Return ids with -1 among them and routing weights."""
    rng = seeded_generator(seed)
    ids = torch.rand(count, experts, generator=rng).argsort(1)[:, :top_k]
    ids[torch.rand(ids.shape, generator=rng) < 0.2] = -1
    return ids, torch.rand(ids.shape, generator=rng)


def make_experts(experts=E, activation="swiglu", bias=True, dtype=BF16, seed=5):
    """Return w1, w2, b1 and b2."""
    act = grouped.Activation(activation) if isinstance(activation, str) else activation
    rows = WIDTH * (1 + act.is_gated)
    parameters = [
        draw(experts, rows, H, seed=seed, scale=0.3),
        draw(experts, H, WIDTH, seed=seed + 1, scale=0.3),
        draw(experts, rows, seed=seed + 2) if bias else None,
        draw(experts, H, seed=seed + 3) if bias else None,
    ]
    return [p if p is None else p.to(dtype) for p in parameters]


def loop(
    x, ids, weights, w1, w2, b1=None, b2=None, *, activation="swiglu", interleaved=False, on_input
):
    """Return the output in fp64: one expert of one token at a time."""
    act = grouped.Activation(activation) if isinstance(activation, str) else activation
    outputs = []
    for t, token in enumerate(x.double()):
        y = torch.zeros(w2.shape[1], dtype=torch.float64)
        for k, e in enumerate(ids[t].tolist()):
            if not 0 <= e < len(w1):
                continue
            p = 1.0 if weights is None else weights[t, k].double()
            z = w1[e].double() @ (p * token if on_input else token)
            z = z if b1 is None else z + b1[e].double()
            z = torch.cat([z[::2], z[1::2]]) if interleaved else z
            h = w2[e].double() @ compute_fp64(act, z)
            h = h if b2 is None else h + b2[e].double()
            y = y + (h if on_input else p * h)
        outputs.append(y)
    return torch.stack(outputs)


def run(x, ids, weights, parameters, **options):
    w1, w2, b1, b2 = parameters
    return grouped.moe(x, ids, weights, w1, w2, b1=b1, b2=b2, **options)


def quantize(weight, *, prepacked=False, columnwise=False):
    quantized = grouped.quantize(weight.detach(), WEIGHT_FORMAT, columnwise=columnwise)
    return quantized.prepack() if prepacked else quantized


# ---- values


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize(
    ("activation", "interleaved", "bias"),
    [("swiglu", False, False), (CLAMPED, True, True), ("srelu", False, True)],
)
def test_values_and_gradients_are_near_loops_in_fp64(
    activation, interleaved, bias, top_k, on_input
):
    """Operands are bf16 numbers in fp32, so only results between products are rounded."""
    ids, p = random_choice(top_k=top_k)
    parameters = make_experts(activation=activation, bias=bias, dtype=F32)
    leaves = [tokens(dtype=BF16).float(), p.bfloat16().float(), *parameters]
    leaves = [t if t is None else t.requires_grad_() for t in leaves]
    x, p, *parameters = leaves
    options = {"activation": activation, "interleaved": interleaved}
    want = loop(x, ids, p, *parameters, **options, on_input=on_input)
    y = run(x, ids, p, parameters, **options, apply_router_weight_on_input=on_input)
    close(y, want)
    assert y.dtype == F32
    wanted, dy = [t for t in leaves if t is not None], draw(T, H, seed=8)
    for got, exact in zip(
        torch.autograd.grad(y, wanted, dy.float()),
        torch.autograd.grad(want, wanted, dy.double()),
        strict=True,
    ):
        close(got, exact)


@each_recipe
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "squared relu"])
def test_bits_are_those_of_the_module(recipe, name):
    """Output and all gradients, for the choice of the module's own router."""
    module, x = make_moe(recipe, **MODELS[name]), tokens().requires_grad_()
    mlp, router = module.experts, module.router
    parameters = mlp.gate_up.weight, mlp.down.weight, mlp.gate_up.bias, mlp.down.bias
    leaves = [x, *(p for p in parameters if p is not None), *router.parameters()]
    options = {"activation": mlp.activation, "interleaved": mlp.interleaved, "recipe": recipe}

    def step(y):
        """Return the result of a call, and its gradients."""
        return [y.detach(), *torch.autograd.grad(y, leaves, draw(T, H, seed=9))]

    want = step(module(x))
    choice = router(x)
    assert_all_same(step(run(x, choice.expert_ids, choice.weights, parameters, **options)), want)
    with torch.no_grad():
        for _ in range(3):
            y = run(x, choice.expert_ids, choice.weights, parameters, **options)
            assert_same_bytes(y, want[0])
        out = torch.full_like(y, torch.nan)
        assert run(x, choice.expert_ids, choice.weights, parameters, **options, out=out) is out
        assert_same_bytes(out, want[0])


def composed(x, ids, p, parameters, recipe):
    """Return the output of gather, two layers with an activation between, and combine."""
    w1, w2, b1, b2 = parameters
    r = grouped.compute_routing(ids, len(w1))
    z = grouped.linear(ops.moe_gather(x, r.token, r.row), w1, b1, r.offs, recipe)
    h = grouped.linear(ops.moe_activate(z, "swiglu", r.offs), w2, b2, r.offs, recipe)
    return ops.moe_combine(h, r.row, p)


@pytest.mark.parametrize("recipe", [None, recipes.NVFP4RowScaled()], ids=["w4a16", "w4a4"])
def test_quantized_weights_are_used_as_they_are(recipe):
    """Prepared or not: BF16 multiplies bf16 tokens by the decoded weights."""
    (w1, w2, b1, b2), (ids, p) = make_experts(), random_choice()
    x, v1, v2 = tokens(), quantize(w1), quantize(w2)
    with torch.no_grad():
        want = run(x, ids, p, (v1, v2, b1, b2), recipe=recipe)
        assert_same_bytes(want, composed(x, ids, p, (v1, v2, b1, b2), recipe or recipes.BF16()))
        if recipe is not None:
            assert_same_bytes(want, run(x, ids, p, (w1, w2, b1, b2), recipe=recipe))
            packed = [quantize(w, prepacked=True) for w in (w1, w2)]
            assert_same_bytes(run(x, ids, p, (*packed, b1, b2), recipe=recipe), want)
        for weights in ((nn.Parameter(v1, False), nn.Parameter(v2, False)), (v1, v2)):
            assert_same_bytes(run(x, ids, p, (*weights, b1, b2), recipe=recipe), want)


def test_gradients_through_quantized_weights():
    """Their gradients are those of the decoded values."""
    (w1, w2, b1, b2), (ids, p) = make_experts(), random_choice()
    quantized = [nn.Parameter(quantize(w, columnwise=True)) for w in (w1, w2)]
    decoded = [q.detach().dequantize().requires_grad_() for q in quantized]
    results = []
    for weights in (quantized, decoded):
        x, scales = tokens().requires_grad_(), p.clone().requires_grad_()
        y = run(x, ids, scales, (*weights, b1, b2))
        leaves = [x, scales, *weights]
        results.append([y.detach(), *torch.autograd.grad(y, leaves, draw(T, H, seed=3))])
    for got, want in zip(*results, strict=True):
        close(got, want)


def test_weights_may_be_stored_transposed():
    """Check that strides of weights do not change the result."""
    (w1, w2, b1, b2), (ids, p) = make_experts(), random_choice()
    want = run(tokens(), ids, p, (w1, w2, b1, b2))
    stored = [w.mT.contiguous().mT for w in (w1, w2)]
    assert_same_bytes(run(tokens(), ids, p, (*stored, b1, b2)), want)


@pytest.mark.parametrize("on_input", [False, True])
def test_dtypes_of_weights_and_ids(on_input):
    """The routing weights are converted to fp32, which is exact."""
    (ids, p), parameters, x = random_choice(), make_experts(), tokens()
    p = p.bfloat16()
    options = {"apply_router_weight_on_input": on_input}
    want = run(x, ids, p.float(), parameters, **options)
    assert_same_bytes(run(x, ids.int(), p, parameters, **options), want)
    assert_same_bytes(run(x, ids, p.mT.contiguous().mT, parameters, **options), want)
    strided = torch.stack([ids, ids + 1], 2)[..., 0]
    assert_same_bytes(run(x, strided, p.float(), parameters, **options), want)


def test_missing_weights_are_ones():
    """Check that ``weights=None`` has the bits of ones, with gradients and without."""
    (ids, _), parameters, x = random_choice(), make_experts(), tokens().requires_grad_()
    runs = []
    for weights in (None, torch.ones(T, K)):
        y = run(x, ids, weights, parameters)
        runs.append([y.detach(), *torch.autograd.grad(y.sum(), x)])
        with torch.no_grad():
            assert_same_bytes(run(x, ids, weights, parameters), y.detach())
    assert_all_same(*runs)


def test_weights_on_the_input_are_rounded_once():
    """For one expert per token this is the call with weighted tokens."""
    ids, p = random_choice(top_k=1)
    x, parameters = tokens(), make_experts()
    weighted = (x.float() * p).bfloat16()
    want = run(weighted, ids, None, parameters)
    assert_same_bytes(run(x, ids, p, parameters, apply_router_weight_on_input=True), want)
    ids, p = random_choice(top_k=3)
    pairs = (x.float().unsqueeze(1) * p.unsqueeze(2)).bfloat16()
    rows = run(pairs.view(-1, H), ids.reshape(-1, 1), None, parameters).view(T, 3, H).float()
    want = (rows[:, 0] + rows[:, 1] + rows[:, 2]).bfloat16()
    with torch.no_grad():
        y = run(x, ids, p, parameters, apply_router_weight_on_input=True)
    assert_same_bytes(y, want)
    out = torch.empty_like(y)
    run(x, ids, p, parameters, apply_router_weight_on_input=True, out=out)
    assert_same_bytes(out, want)


# ---- ids


@pytest.mark.parametrize("kind", [torch.int64, I32])
@pytest.mark.parametrize("on_input", [False, True])
def test_ranks_add_up_to_one_process(kind, on_input):
    """Each rank has some experts, and a map: the parts' rows are those of all experts."""
    (ids, p), parameters, x = random_choice(), make_experts(), tokens().float()
    ids = ids.to(kind)
    parameters = [t.float() for t in parameters]
    options = {"apply_router_weight_on_input": on_input}
    want = loop(x, ids, p, *parameters, on_input=on_input)
    total = torch.zeros(T, H, dtype=torch.float64)
    for experts in RANKS:
        expert_map = torch.full((E,), -1, dtype=I32)
        expert_map[experts] = torch.arange(len(experts), dtype=I32)
        local = [t[experts] for t in parameters]
        y = run(x, ids, p, local, expert_map=expert_map, **options)
        mapped = torch.where(ids >= 0, expert_map.to(kind)[ids.clamp_min(0)], -1)
        assert_same_bytes(run(x, mapped, p, local, num_experts=E, **options), y)
        assert_same_bytes(run(x, ids, p, local, expert_map=expert_map, num_experts=E, **options), y)
        none = (mapped < 0).all(1)
        assert none.any() and not y[none].any()
        total += y.double()
    close(total, want)


def test_pairs_of_other_ranks_are_never_read():
    """NaN in their tokens, weights and gradients stays where it is."""
    (ids, p), parameters = random_choice(), make_experts()
    local = [t[:3].requires_grad_() for t in parameters]
    is_local = (ids >= 0) & (ids < 3)
    dead = ~is_local.any(1)
    assert dead.any() and not is_local[~dead].all()
    for on_input in (False, True):
        options = {"num_experts": E, "apply_router_weight_on_input": on_input}
        results = []
        for number in (0, torch.nan):
            x = tokens().masked_fill(dead.unsqueeze(1), number).requires_grad_()
            weights = p.masked_fill(~is_local, number).requires_grad_()
            y = run(x, ids, weights, local, **options)
            dy = draw(T, H).masked_fill(dead.unsqueeze(1), number)
            results.append([y.detach(), *torch.autograd.grad(y, [x, weights, *local], dy)])
            with torch.no_grad():
                assert_same_bytes(run(x, ids, weights, local, **options), y.detach())
        assert_all_same(*results)
        y, dx, dp = results[0][:3]
        assert not (y[dead].any() or dx[dead].any() or dp[~is_local].any())


@pytest.mark.parametrize("ids", [-1, E, E + 511, -(2**31), 2**31 - 1, 2**62, -(2**63)])
def test_ids_that_are_no_experts(ids):
    """All tokens have outputs and gradients of zero."""
    ids = torch.full((T, K), ids)
    parameters = [t.requires_grad_() for t in make_experts()]
    x, p = tokens().requires_grad_(), torch.rand(T, K, requires_grad=True)
    expert_map = torch.arange(E, dtype=I32)
    for options in ({}, {"expert_map": expert_map}, {"apply_router_weight_on_input": True}):
        y = run(x, ids, p, parameters, **options)
        gradients = torch.autograd.grad(y.sum(), [x, p, *parameters])
        assert y.shape == (T, H) and not any(t.any() for t in (y, *gradients))


def test_a_token_may_have_an_expert_twice():
    """Check that both rows of an expert count."""
    ids, p = torch.tensor([[1, 1, 0], [2, 2, 2]]), torch.rand(2, 3)
    parameters = [t.float().requires_grad_() for t in make_experts()]
    x, p = tokens(2).float().requires_grad_(), p.requires_grad_()
    want, y = loop(x, ids, p, *parameters, on_input=False), run(x, ids, p, parameters)
    close(y, want)
    leaves = [x, p, *parameters]
    for got, exact in zip(
        torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
    ):
        close(got, exact)


@pytest.mark.parametrize(("count", "top_k"), [(0, 2), (1, 1), (1, 2), (5, 0), (0, 0)])
@pytest.mark.parametrize("recipe", [None, recipes.NVFP4RowScaled()])
def test_few_tokens(count, top_k, recipe):
    """Also no token, and no expert."""
    ids, p = random_choice(count, top_k)
    parameters = [t.requires_grad_() for t in make_experts()]
    for on_input in (False, True):
        x, weights = tokens(count).requires_grad_(), p.clone().requires_grad_()
        options = {"recipe": recipe, "apply_router_weight_on_input": on_input}
        y = run(x, ids, weights, parameters, **options)
        y.sum().backward()
        assert y.shape == x.grad.shape == (count, H) and weights.grad.shape == p.shape
        if not (ids >= 0).any():
            assert not y.any()
        elif recipe is None:
            close(y.detach(), loop(x, ids, weights, *parameters, on_input=on_input).detach())
        elif not on_input:
            assert_same_bytes(y.detach(), composed(x, ids, weights, parameters, recipe).detach())
        out = torch.full((count, H), torch.nan, dtype=BF16)
        with torch.no_grad():
            assert_same_bytes(run(x, ids, weights, parameters, **options, out=out), y.detach())


def test_more_than_1024_experts():
    """Check that there is no largest number of experts."""
    w1, w2, _, _ = make_experts(1300, bias=False, dtype=F32)
    ids, p = random_choice(9, 3, 1300)
    expert_map = torch.arange(1299, -1, -1, dtype=I32)
    want = loop(tokens(9), ids, p, w1, w2, on_input=False)
    close(grouped.moe(tokens(9), ids, p, w1, w2), want)
    flipped = [w.flip(0) for w in (w1, w2)]
    close(grouped.moe(tokens(9), ids, p, *flipped, expert_map=expert_map), want)


# ---- what the bits depend on


@per_token
@pytest.mark.parametrize("weights", ["plain", "quantized"])
@pytest.mark.parametrize("on_input", [False, True])
def test_a_token_does_not_depend_on_other_tokens(recipe, weights, on_input):
    """Batch invariance: the same bits in any batch, at any place, on any number of ranks."""
    (w1, w2, b1, b2), (ids, p), x = make_experts(), random_choice(40), tokens(40)
    if weights == "quantized":
        fmt = recipe.weight or WEIGHT_FORMAT
        w1, w2 = (grouped.quantize(w, fmt) for w in (w1, w2))
    parameters = w1, w2, b1, b2
    options = {"recipe": recipe, "apply_router_weight_on_input": on_input}
    y = run(x, ids, p, parameters, **options)
    order = torch.randperm(40)
    assert_same_bytes(run(x[order], ids[order], p[order], parameters, **options), y[order])
    for rows in (slice(0, 1), slice(3, 20), slice(7, 40, 5)):
        assert_same_bytes(run(x[rows], ids[rows], p[rows], parameters, **options), y[rows])
    large = torch.cat([tokens(9, 5) * 50, x])
    more_ids, more_p = random_choice(9, seed=4)
    got = run(large, torch.cat([more_ids, ids]), torch.cat([more_p, p]), parameters, **options)
    assert_same_bytes(got[9:], y)


@each_recipe
def test_calls_repeat(recipe):
    """Check that two steps have the same outputs and gradients."""
    (ids, p), x = random_choice(), tokens().requires_grad_()
    parameters = [t.requires_grad_() for t in make_experts()]

    def step():
        """Return the result of a call, and its gradients."""
        y = run(x, ids, p, parameters, recipe=recipe)
        return [y.detach(), *torch.autograd.grad(y, [x, *parameters], draw(T, H))]

    assert_all_same(step(), step())


# ---- out


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_out_has_any_dtype(dtype):
    """The sums of fp32 are cast once, to the dtype of out."""
    (ids, p), parameters = random_choice(), make_experts()
    out = torch.full((T, H), torch.nan, dtype=dtype)
    exact = torch.full((T, H), torch.nan)
    assert run(tokens(), ids, p, parameters, out=exact) is exact
    version = out._version
    assert run(tokens(), ids, p, parameters, out=out) is out
    assert_same_bytes(out, exact.to(dtype))
    assert out._version > version


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("on_input", [False, True])
def test_out_may_be_the_tokens(top_k, on_input):
    """Check that the result may replace the tokens."""
    (ids, p), parameters, x = random_choice(top_k=top_k), make_experts(), tokens()
    options = {"apply_router_weight_on_input": on_input}
    want = run(x, ids, p, parameters, **options)
    assert run(x, ids, p, parameters, out=x, **options) is x
    assert_same_bytes(x, want)


def test_out_has_no_gradients():
    (ids, p), parameters, out = random_choice(), make_experts(), torch.empty(T, H, dtype=BF16)
    with pytest.raises(RuntimeError, match=r"grouped.moe\(out=\).*x requires.*leave out= away"):
        run(tokens().requires_grad_(), ids, p, parameters, out=out)
    with pytest.raises(RuntimeError, match="out requires"):
        run(tokens(), ids, p, parameters, out=out.requires_grad_())


# ---- compilers and modes


@pytest.mark.compile
@needs_compiler
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("recipe", [None, recipes.NVFP4RowScaled()])
def test_compiled_once_for_all_numbers_of_tokens(recipe, on_input, fresh_dynamo):
    """One graph serves all numbers of tokens, with a map and gradients."""
    parameters = [t.requires_grad_() for t in make_experts(3)]
    expert_map = torch.tensor([2, -1, 0, -1, 1, -1], dtype=I32)

    def call(x, ids, p):
        return run(
            x,
            ids,
            p,
            parameters,
            activation=CLAMPED,
            interleaved=True,
            expert_map=expert_map,
            recipe=recipe,
            apply_router_weight_on_input=on_input,
        )

    graphs = GraphRecorder()
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for count in (21, 40, 5):
        ids, p = random_choice(count)
        results = []
        for function in (compiled, call):
            x, weights = tokens(count).requires_grad_(), p.clone().requires_grad_()
            for t in (x, ids, weights):
                torch._dynamo.mark_dynamic(t, 0)
            y = function(x, ids, weights)
            leaves = [x, weights, *parameters]
            results.append([y.detach(), *torch.autograd.grad(y, leaves, draw(count, H))])
        assert_all_same(*results)
    assert len(graphs) == 1


@pytest.mark.compile
@needs_compiler
@pytest.mark.parametrize("weights", ["plain", "quantized"])
def test_compiled_for_serving(weights, fresh_dynamo):
    """Under no_grad, with and without out, with and without routing weights."""
    w1, w2, b1, b2 = make_experts()
    if weights == "quantized":
        w1, w2 = quantize(w1), quantize(w2)

    def call(x, ids, p, out):
        y = run(x, ids, p, (w1, w2, b1, b2))
        return y, run(x, ids, None, (w1, w2, b1, b2), out=out)

    compiled = torch.compile(call, fullgraph=True)
    with torch.no_grad():
        for count in (21, 40):
            (ids, p), x, outs = random_choice(count), tokens(count), []
            for function in (compiled, call):
                out = torch.empty(count, H)
                y, result = function(x, ids, p, out)
                assert_same_bytes(result, out)
                outs.append([y, out])
            assert_all_same(*outs)


def test_autocast():
    """Experts compute in the dtype of autocast, and results have the dtype of the tokens."""
    (ids, p), parameters = random_choice(), make_experts(dtype=F32)
    x = tokens(dtype=F32)
    with torch.autocast("cpu", dtype=BF16):
        y = run(x, ids, p, parameters)
    out = torch.empty(T, H)
    assert_same_bytes(y, run(x.bfloat16(), ids, p, parameters, out=out))


def test_meta_tensors():
    """Check the shape of a call without data."""
    (ids, p), parameters = random_choice(), make_experts()
    arguments = [t.to("meta") for t in (tokens(), ids, p)]
    y = run(*arguments, [t.to("meta") for t in parameters])
    assert y.is_meta and y.shape == (T, H) and y.dtype == BF16


def test_transforms_and_second_derivatives_raise():
    """Check that derivatives that do not exist raise."""
    (ids, p), parameters = random_choice(), make_experts()
    with pytest.raises(RuntimeError, match="grouped.moe has no torch.func transforms"):
        torch.func.grad(lambda x: run(x, ids, p, parameters).sum())(tokens())
    x = tokens().requires_grad_()
    (dx,) = torch.autograd.grad(run(x, ids, p, parameters).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        dx.sum().backward()
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="grouped.moe has no forward-mode derivative"),
    ):
        dual = torch.autograd.forward_ad.make_dual(tokens(), tokens())
        run(dual, ids, p, parameters)


# ---- checks of ids


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (-2, {}, "an id is less than -1"),
        (E, {}, f"an id is not less than num_experts = {E}"),
        (E + 2, {"num_experts": E + 2}, f"num_experts = {E + 2}"),
        (
            0,
            {"expert_map": torch.tensor([0, E], dtype=I32)},
            rf"expert_map has an entry outside of \[-1, {E}\)",
        ),
        (2, {"expert_map": torch.tensor([0, -1], dtype=I32)}, "num_experts = 2"),
    ],
)
def test_ids_are_checked_when_asked(ids, options, message):
    """With and without gradients and ``out``; the message has the line of the first call."""
    bad, parameters, p = torch.full((T, K), ids), make_experts(), torch.rand(T, K)
    good = torch.full((T, K), -1), {"num_experts": E}
    with grouped.inspect.check_expert_ids() as checks:
        for chosen, more in (good, (bad, options)):
            for enabled in (False, True):
                with torch.set_grad_enabled(enabled):
                    run(tokens(), chosen, p, parameters, **more)
                    run(tokens(), chosen, p, parameters, **more, out=tokens())
                    if chosen is bad:
                        with pytest.raises(ValueError, match=rf"{message}.*{__file__}:\d+"):
                            checks.check()
                    checks.check()
    with pytest.raises(ValueError, match=message), grouped.inspect.check_expert_ids():
        run(tokens(), bad, p, parameters, **options)
    run(tokens(), bad, p, parameters, **options)


def test_one_check_of_ids_at_a_time():
    """Check the ends of blocks: nested, in inference mode, and after another error."""
    check = grouped.inspect.check_expert_ids
    with check(), pytest.raises(RuntimeError, match="active already"), check():
        pass
    with check(), torch.inference_mode():
        _call()
    with check(), pytest.raises(ValueError, match="must share H"):
        _call(x=tokens()[:, :32])
    assert ExpertIdChecks.recorder is None


# ---- errors


def _call(**changes):
    """Call ``moe`` with valid arguments, some of them replaced."""
    w1, w2, b1, b2 = make_experts()
    ids, p = random_choice()
    arguments = {"x": tokens(), "expert_ids": ids, "weights": p, "w1": w1, "w2": w2}
    return grouped.moe(**{**arguments, "b1": b1, "b2": b2, **changes})


W1, W2, B1, B2 = make_experts()
IDS, P = random_choice()
TYPE_ERRORS = {
    "x": ({"x": [1.0]}, "x must be a tensor, got list"),
    "quantized x": ({"x": W1[0].new_zeros(T, H).int()}, "x must be bfloat16"),
    "ids": ({"expert_ids": IDS.float()}, "expert_ids must be int32 or int64, got float32"),
    "weights": ({"weights": IDS}, "weights must be bfloat16 .* got int64"),
    "missing": ({"w1": None}, "w1 must be a tensor, got NoneType"),
    "map": ({"expert_map": torch.arange(E)}, "expert_map must be int32, got int64"),
    "recipe": ({"recipe": recipes.BF16}, r"recipe must be a .* BF16\(\), not BF16"),
    "activation": ({"activation": 3}, "activation must be a name such as 'swiglu'"),
    "interleaved": ({"interleaved": 1}, "interleaved must be"),
    "on input": ({"apply_router_weight_on_input": 1}, "apply_router_weight_on_input must be"),
    "count": ({"num_experts": 6.0}, "num_experts must be"),
    "out": ({"out": torch.empty(T, H, dtype=torch.float64)}, "out must be bfloat16"),
}
VALUE_ERRORS = {
    "width": ({"x": tokens()[:, :32]}, r"x \(T, H\) and w1 \(E, N, H\) must share H.*w1.mT"),
    "dimensions": ({"x": tokens()[0]}, "x must have 2 dimensions"),
    "ids": ({"expert_ids": IDS[:3]}, "expert_ids must have size 21 in dimension 0"),
    "flat ids": ({"expert_ids": IDS[:, 0]}, "expert_ids must have 2 dimensions"),
    "weights": ({"weights": P[:, :1]}, "weights must have size 2 in dimension 1"),
    "gate": ({"activation": "silu"}, r"w1 \(E, I, H\) and w2 \(E, H, I\) must share I"),
    "no gate": ({"w2": W2[:, :, :16]}, r"w1 \(E, 2 I, H\) and w2 \(E, H, I\) must share I"),
    "experts": ({"w2": W2[:4]}, "w2 must have size 6 in dimension 0"),
    "no experts": ({"w1": W1[:0], "w2": W2[:0]}, "w1 must have at least one expert"),
    "b1": ({"b1": B2}, "b1 must have size"),
    "b2": ({"b2": B2[:3]}, "b2 must have size 6"),
    "activation": ({"activation": "swiglo"}, "swiglu"),
    "interleaved": (
        {"activation": "silu", "interleaved": True, "w1": W1[:, :32], "b1": None},
        "interleaved=True needs a gated activation; silu has no gate",
    ),
    "count": ({"num_experts": 5}, "num_experts must be at least 6, the experts of w1, got 5"),
    "map": (
        {"num_experts": 7, "expert_map": torch.arange(6, dtype=I32)},
        "expert_map must have size 7 in dimension 0",
    ),
    "delayed": ({"recipe": recipes.FP8Delayed()}, "use FP8Current, or grouped.nn.MoE"),
    "out": ({"out": torch.empty(T, 32)}, "out must have size 64 in dimension 1"),
    "strides": ({"out": torch.empty(H, T).mT}, "out must be row-major"),
    "device": ({"w2": W2.to("meta"), "b2": None}, "w2 must be on the device of x"),
}


@pytest.mark.parametrize(("changes", "message"), TYPE_ERRORS.values(), ids=TYPE_ERRORS)
def test_type_errors(changes, message):
    with torch.no_grad(), pytest.raises(TypeError, match=message):
        _call(**changes)


@pytest.mark.parametrize(("changes", "message"), VALUE_ERRORS.values(), ids=VALUE_ERRORS)
def test_value_errors(changes, message):
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        _call(**changes)
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_quantized_tokens_raise():
    x = grouped.quantize(tokens(), grouped.NVFP4(row_scaled=True), offs=[T])
    with pytest.raises(TypeError, match="x must be a plain tensor"):
        _call(x=x)


def test_missing_copies_raise():
    """A gradient of x reads the columnwise copies of quantized weights."""
    with pytest.raises(RuntimeError, match="no columnwise copy"):
        _call(x=tokens().requires_grad_(), w1=quantize(W1), w2=quantize(W2))


# ---- kernels

#: Recipe, architecture, and mode of the emulator.
EMULATED = [
    ("bf16", "emulated:sm_90a", {}),
    ("row-scaled", "emulated:sm_90a", {}),
    ("fp8-block", "emulated:sm_90a", {"mode": "chaos", "seed": 1}),
    ("mxfp8", "emulated:sm_100a", {}),
    ("row-scaled", "emulated:sm_100a", {"mode": "chaos", "seed": 1}),
    ("fp8-block", "emulated:sm_100a", {}),
]


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize(("name", "backend", "mode"), EMULATED)
def test_kernels_have_the_bits_of_the_reference(name, backend, mode, on_input):
    """With and without gradients, replayed or not, with a map, into out."""
    recipe, (ids, p) = ALL_RECIPES[name], random_choice()
    parameters = [t.requires_grad_() for t in make_experts(3)]
    expert_map = torch.tensor([2, -1, 0, -1, 1, -1], dtype=I32)
    options = {
        "recipe": recipe,
        "expert_map": expert_map,
        "apply_router_weight_on_input": on_input,
    }

    def step():
        """Return the result of a call, and its gradients."""
        x, weights = tokens().requires_grad_(), p.clone().requires_grad_()
        y = run(x, ids, weights, parameters, **options)
        leaves = [x, weights, *parameters]
        return [y.detach(), *torch.autograd.grad(y, leaves, draw(T, H, seed=4))]

    with cute_kernels.backend(backend.replace("emulated", "reference")):
        want = step()
    with cute_kernels.backend(backend, **mode):
        assert_all_same(step(), want)
        with torch.no_grad():
            for _ in range(3):
                out = torch.full((T, H), torch.nan, dtype=BF16)
                assert_same_bytes(run(tokens(), ids, p, parameters, **options), want[0])
                assert_same_bytes(run(tokens(), ids, p, parameters, **options, out=out), want[0])


@pytest.mark.emulated
@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_replay_writes_out_and_counts_its_version(monkeypatch, is_in_place):
    """The third call with ``out`` repeats launches only."""
    parameters, repeated, repeat = make_experts(), [], Recording.repeat
    monkeypatch.setattr(
        Recording, "repeat", lambda *given: (repeated.append(given[0]), repeat(*given))[1]
    )
    clear_plan_cache()
    for seed in range(4):
        choice, x = random_choice(seed=seed), tokens(seed=seed)
        want = run(x, *choice, parameters)
        out = x if is_in_place else torch.full((T, H), torch.nan, dtype=BF16)
        with cute_kernels.backend("emulated:sm_90a"), torch.no_grad():
            before, version = len(repeated), out._version
            run(x, *choice, parameters, out=out)
        assert len(repeated) == before + (seed > 1) and out._version > version
        close(out, want)
    clear_plan_cache()


@pytest.mark.parametrize("backend", ["emulated:sm_90a", "emulated:sm_100a"])
def test_kernels_have_no_races(backend):
    """Check a small call with the race detector."""
    (w1, w2, _, _), (ids, p) = make_experts(3), random_choice(6)
    weights = quantize(w1), quantize(w2)
    options = {"num_experts": E, "recipe": recipes.NVFP4RowScaled()}
    with torch.no_grad():
        with cute_kernels.backend(backend.replace("emulated", "reference")):
            want = grouped.moe(tokens(6), ids, p, *weights, **options)
        with cute_kernels.backend(backend, races=True):
            assert_same_bytes(grouped.moe(tokens(6), ids, p, *weights, **options), want)


@pytest.mark.parametrize("backend", ["emulated:sm_90a", "emulated:sm_100a"])
def test_replays_see_other_values_and_other_options(backend):
    """A recorded call is repeated for equal options only, with the values of the new call."""
    (w1, w2, b1, b2), x = make_experts(3), tokens()
    weights = quantize(w1), quantize(w2)
    calls = [
        (seed, options)
        for seed in range(3)
        for options in (
            {},
            {"interleaved": True},
            {"activation": CLAMPED},
            {"apply_router_weight_on_input": True},
            {"expert_map": torch.tensor([2, -1, 0, -1, 1, -1], dtype=I32)},
        )
    ]
    results = []
    for name in (backend.replace("emulated", "reference"), backend):
        with cute_kernels.backend(name), torch.no_grad():
            results.append(
                [run(x, *random_choice(seed=s), (*weights, b1, b2), **o) for s, o in calls]
            )
    assert_all_same(*results)
