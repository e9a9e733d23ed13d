"""Losses, selection biases, autocast and errors of ``MoE``."""

import warnings

import pytest
import torch

import grouped
from grouped import recipes
from grouped.nn import GroupedMLP, MoE
from tests.helpers import (
    BF16,
    F16,
    F32,
    I32,
    assert_same_bytes,
    ops,
)

from .cases import WEIGHT_FORMAT
from .moe_support import WIDTH, E, H, K, T, make_moe, tokens


@pytest.mark.parametrize(
    ("score", "function"), [("sigmoid", torch.sigmoid), ("softmax", torch.exp)]
)
def test_losses_and_their_gradients(score, function):
    """Compare the losses and their gradients with float64 formulas."""
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
    """Check that the tail of a token buffer does not affect the losses."""
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
    """Check that NaN gradients of tail rows do not reach parameters."""
    moe, dy = make_moe(bias=True), torch.full((T + 4, H), torch.nan, dtype=BF16)
    dy[:T] = 1
    moe(with_nan_tail(tokens()), num_tokens=torch.tensor(T)).backward(dy)
    assert all(p.grad.isfinite().all() for p in moe.parameters())


def test_a_nan_gradient_of_a_token_reaches_only_the_biases_of_its_experts():
    """Check that a NaN gradient of a token reaches the biases of its experts only."""
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
    """Check that a dropped token-expert pair adds no bias."""
    moe, p = make_moe(bias=True), torch.ones(2, K, requires_grad=True)
    with torch.no_grad():
        moe.experts.down.bias[1, 3] = torch.nan
    r = grouped.compute_routing(torch.tensor([[2, -1], [1, E]]), E)
    moe.experts.run(tokens(2), p, r, None, moe._experts_options(BF16)).sum().backward()
    assert p.grad.isnan().tolist() == [[False, False], [True, False]] and not p.grad[:, 1].any()


COUNTS = torch.tensor([9, 1, 5, 5, 5, 5])


def test_selection_bias_moves_towards_balance():
    """Check that the selection bias moves against the load."""
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


@pytest.mark.parametrize("name", ["gelu", "relu", "silu"])
def test_experts_without_a_gate_warn_unless_explicit(name):
    """Check that an activation without a gate warns unless it is given explicitly."""
    gated = {"gelu": "geglu", "relu": "reglu", "silu": "swiglu"}[name]
    with pytest.warns(
        UserWarning, match=rf"without a gate.*pass '{gated}'.*grouped.Activation\('{name}'\)"
    ):
        moe = make_moe(activation=name, shared_intermediate_size=WIDTH)
    assert moe.experts.gate_up.out_features == WIDTH
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for activation in (gated, grouped.Activation(name), "srelu"):
            make_moe(activation=activation)
            GroupedMLP(2, H, WIDTH, activation=activation)
    with pytest.warns(UserWarning, match=r"GroupedMLP\(activation=.*without a gate") as caught:
        GroupedMLP(2, H, WIDTH, activation=name)
    assert caught[0].filename == __file__


def test_recipe_of_all_experts_can_be_set():
    """Setting the recipe of a mixture sets that of all its experts."""
    moe = make_moe(shared_intermediate_size=WIDTH, recompute=True)
    moe.recipe = recipes.NVFP4()
    layers = [layer for mlp in (moe.experts, moe.shared) for layer in (mlp.gate_up, mlp.down)]
    assert [layer.recipe for layer in layers] == [moe.recipe] * 4 == [recipes.NVFP4()] * 4
    with pytest.raises(ValueError, match="recompute=True cannot reproduce"):
        moe.recipe = recipes.Recipe(
            grouped.NVFP4(stochastic_rounding=True), WEIGHT_FORMAT, grouped.NVFP4()
        )
    moe.shared.recipe = recipes.BF16()
    with pytest.raises(ValueError, match=r"experts.recipe is NVFP4\(\), shared.recipe is BF16\(\)"):
        print(moe.recipe)


def test_equal_scores_select_the_lowest_experts():
    moe = make_moe(selection_bias=True)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.selection_bias.zero_()
        assert moe.router(tokens()).expert_ids.tolist() == [[0, 1]] * T


def test_autocast():
    """Check the dtypes of router, experts and sum under autocast."""
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
        ({"activation": "silu", "interleaved": True}, ValueError, "interleaved=True needs a gated"),
    ],
)
def test_construction_refuses(change, error, message):
    with pytest.raises(error, match=message):
        MoE(**SIZES | change)


def test_calls_check_num_tokens():
    """Check that calls refuse an invalid ``num_tokens``."""
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
    """Check that calls refuse an x with a wrong shape, type or device."""
    moe = make_moe()
    with pytest.raises(ValueError, match="x must have shape"):
        moe(torch.zeros(3, 8), losses=losses)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        moe([1.0], losses=losses)
    with pytest.raises(ValueError, match="x must be on the device of the router's weight"):
        moe(tokens().to("meta"), losses=losses)


def test_a_mixture_refuses_torch_func_and_second_derivatives():
    """Check that ``torch.func`` and second derivatives raise."""
    moe, x = make_moe(), tokens().requires_grad_()
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.grad(lambda x: moe(x).sum().float())(tokens())
    (dx,) = torch.autograd.grad(moe(x).float().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()
