"""Ops of mixtures of experts: routing, router, gather, combine, activations, quantization."""

import pytest
import torch

import grouped
from cute_kernels import backend
from cute_kernels.kernels.moe.config import RoutingConfig
from cute_kernels.ops import gather_rows as rows
from cute_kernels.ops.moe import launcher as moe_launcher
from cute_kernels.runtime.plan_cache import clear_plan_cache
from ptx_emulator import reset_stats, stats
from tests.helpers import (
    BF16,
    DTYPES,
    F16,
    F32,
    I32,
    assert_all_same,
    assert_same_bytes,
    each_arch,
    offs_of_many_groups,
    ops,
    poisoned,
    sample,
    seeded_generator,
    special_values,
)
from tests.reference.test_activations import compute_fp64

ARCHITECTURES = ("sm_90a", "sm_100a")
MODES = [{}, {"mode": "chaos", "seed": 1}, {"mode": "chaos", "seed": 2}, {"races": True}]


def random_expert_ids(tokens, top_k, experts, *, seed=0, dtype=torch.int64):
    """Return experts of each token, distinct if there are enough; some are not experts."""
    rng = seeded_generator(seed)
    ids = torch.rand(tokens, max(experts, top_k), generator=rng).argsort(1)[:, :top_k] % experts
    invalid = torch.tensor([-1, experts, -(2**31), 2**31 - 1, experts + 511])
    choice = torch.randint(0, 12, ids.shape, generator=rng)
    return torch.where(choice < len(invalid), invalid[choice.clamp(max=4)], ids).to(dtype)


def route_in_python(ids, experts, expert_map=None):
    """Return offs, token, pair and row of ``compute_routing`` by loops."""
    top_k, numbers = ids.shape[1], ids.flatten().tolist()
    if expert_map is not None:
        targets = dict(enumerate(expert_map.tolist()))
        numbers = [targets.get(i, -1) for i in numbers]
    pairs = [(e, i) for i, e in enumerate(numbers) if 0 <= e < experts]
    offs = [sum(e <= g for e, _ in pairs) for g in range(experts)]
    order = [i for _, i in sorted(pairs)]
    tail = [-1] * (ids.numel() - len(order))
    row = [-1] * ids.numel()
    for r, i in enumerate(order):
        row[i] = r
    results = (offs, [i // top_k for i in order] + tail, order + tail)
    return [torch.tensor(v, dtype=I32) for v in results] + [
        torch.tensor(row, dtype=I32).view(ids.shape)
    ]


SHAPES = [(1, 1, 1), (7, 2, 5), (33, 8, 20), (5, 3, 600), (0, 2, 3), (40, 1, 4), (3, 0, 2)]


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
@pytest.mark.parametrize("dtype", [I32, torch.int64])
def test_routing_equals_loops(tokens, top_k, experts, dtype):
    ids = random_expert_ids(tokens, top_k, experts, dtype=dtype)
    assert_all_same(ops.compute_routing(ids, experts), route_in_python(ids, experts))


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [I32, torch.int64])
@each_arch
def test_routing_kernels_have_the_bits_of_the_reference(arch, dtype, monkeypatch):
    """One CTA and a cluster, one and several windows of experts, full and partial warp rounds."""
    clear_plan_cache()
    # The race detector follows this many warps.
    if dtype == torch.int64:
        monkeypatch.setattr(
            moe_launcher,
            "choose_routing_config",
            lambda ids, pairs, mapped: RoutingConfig(ids, 4 if pairs > 100 else 1, 4, mapped),
        )
    shapes = [*SHAPES[:5], (1100, 2, 40), (1100, 8, 13), (700, 8, 1500), (600, 7, 3)]
    for i, (tokens, top_k, experts) in enumerate(shapes):
        ids = random_expert_ids(tokens, top_k, experts, seed=i, dtype=dtype)
        want = ops.compute_routing(ids, experts)
        with backend(f"emulated:{arch}", **MODES[i % (4 if dtype == torch.int64 else 3)]):
            assert_all_same(ops.compute_routing(ids, experts), want)
    clear_plan_cache()


def random_expert_map(ids, experts, *, seed=0):
    """Return experts of ids: each expert of this rank has one id, and others are elsewhere."""
    expert_map = torch.cat([torch.arange(experts), torch.full((ids - experts,), -1)])
    expert_map = expert_map[torch.randperm(ids, generator=seeded_generator(seed))].to(I32)
    if ids > experts:
        invalid = torch.tensor([experts, -(2**31), 2**31 - 1], dtype=I32)
        elsewhere = (expert_map == -1).nonzero().flatten()[:3]
        expert_map[elsewhere] = invalid[: len(elsewhere)]
    return expert_map


#: (tokens, top k, ids, experts) of calls with a map.
MAPPED = [
    (7, 2, 5, 5),
    (33, 8, 40, 9),
    (5, 3, 1300, 600),
    (0, 2, 3, 1),
    (40, 1, 4, 1),
    (3, 0, 2, 2),
]


@pytest.mark.parametrize(("tokens", "top_k", "num_ids", "experts"), MAPPED)
@pytest.mark.parametrize("dtype", [I32, torch.int64])
def test_mapped_routing_equals_loops(tokens, top_k, num_ids, experts, dtype):
    """Compare compute_routing with an expert map with loops in Python."""
    ids = random_expert_ids(tokens, top_k, num_ids, dtype=dtype)
    expert_map = random_expert_map(num_ids, experts)
    want = route_in_python(ids, experts, expert_map)
    assert_all_same(ops.compute_routing(ids, experts, expert_map), want)
    identity = torch.arange(num_ids, dtype=I32)
    assert_all_same(ops.compute_routing(ids, num_ids, identity), ops.compute_routing(ids, num_ids))


def test_an_empty_map_routes_nothing():
    ids = torch.tensor([[0, -1]])
    want = route_in_python(ids, 3, torch.empty(0))
    assert_all_same(ops.compute_routing(ids, 3, torch.empty(0, dtype=I32)), want)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [I32, torch.int64])
@each_arch
def test_mapped_routing_kernels_have_the_bits_of_the_reference(arch, dtype, monkeypatch):
    """Compare kernels with an expert map with the reference."""
    clear_plan_cache()
    if dtype == torch.int64:
        monkeypatch.setattr(
            moe_launcher,
            "choose_routing_config",
            lambda ids, pairs, mapped: RoutingConfig(ids, 4 if pairs > 100 else 1, 4, mapped),
        )
    shapes = [*MAPPED[:4], (1100, 2, 80, 40), (700, 8, 2000, 1500)]
    for i, (tokens, top_k, num_ids, experts) in enumerate(shapes):
        ids = random_expert_ids(tokens, top_k, num_ids, seed=i, dtype=dtype)
        expert_map = random_expert_map(num_ids, experts, seed=i)
        want = ops.compute_routing(ids, experts, expert_map)
        with backend(f"emulated:{arch}", **MODES[i % (4 if dtype == torch.int64 else 3)]):
            assert_all_same(ops.compute_routing(ids, experts, expert_map), want)
    clear_plan_cache()


@pytest.mark.emulated
@pytest.mark.parametrize("expert_map", [None, [1, 0]])
def test_extreme_int64_ids_are_not_experts(expert_map):
    """Check that ids beyond the int32 range are not taken for experts."""
    info = torch.iinfo(torch.int64)
    ids = torch.tensor([[info.min, info.max], [2**32, 1], [-(2**32), 0]])
    expert_map = expert_map and torch.tensor(expert_map, dtype=I32)
    want = route_in_python(ids, 2, expert_map)
    assert_all_same(ops.compute_routing(ids, 2, expert_map), want)
    with backend("emulated:sm_90a"):
        assert_all_same(ops.compute_routing(ids, 2, expert_map), want)


#: (experts, top k, score, renormalize, groups, top groups, factor).
ROUTERS = [
    (128, 8, "softmax", True, 1, 1, 1.0),
    (256, 8, "sigmoid", True, 8, 4, 2.5),
    (20, 3, "softmax", False, 1, 1, 1.0),
    (60, 5, "sigmoid", False, 10, 3, 1.5),
    (40, 40, "softmax", True, 1, 1, 1.0),
]


def route_with_special_values(case, tokens=7):
    """Return results and gradients of all kinds of numbers, with or without bias and end row."""
    experts, k, *options = case
    logits = torch.randn(tokens, experts, generator=seeded_generator(experts)) * 4
    logits[0], logits[1, 3], logits[2, 5], logits[3, :4], logits[4, 0] = (
        0,
        torch.nan,
        torch.inf,
        -torch.inf,
        torch.nan,
    )
    logits[5] = -100  # sigmoid scores of 0, which are divided by their sum
    bias = end = dscores = None
    if not (experts == 128 or k == 40):
        bias, end = torch.arange(experts) % 5 * 0.1, torch.tensor([6], dtype=I32)
        bias[2], bias[7], dscores = -torch.inf, torch.nan, logits.nan_to_num(0, 1, 1)
    out = ops.moe_route(logits, bias, end, k, *options)
    out[1][4, 0] = -1  # no expert: the NaN of expert 0 must not count
    dweights = torch.arange(tokens * k).view(tokens, k) % 7 - 2.5
    gradient_arguments = (dweights, dscores, out[1], out[2], *options[:2], options[-1])
    return [
        *out,
        ops.moe_route_gradient(*gradient_arguments),
        ops.moe_route_gradient(*gradient_arguments, True),
    ]


@pytest.mark.emulated
@pytest.mark.parametrize("case", ROUTERS)
def test_router_kernels_have_the_bits_of_the_reference(case):
    want, index = route_with_special_values(case), ROUTERS.index(case)
    for arch in ARCHITECTURES[: 1 if index > 2 else 2]:
        for mode in MODES[index % 2 :: 2]:
            with backend(f"emulated:{arch}", **mode):
                assert_all_same(route_with_special_values(case), want, any_nan=True)


def operands(tokens=9, cols=24, top_k=3, experts=4, dtype=F32, seed=0):
    """Return tokens (tokens, cols), rows (pairs, cols), weights, token and row."""
    ids = random_expert_ids(tokens, top_k, experts, seed=seed)
    _, token, _, row = ops.compute_routing(ids, experts)
    rng = seeded_generator(seed)
    weight = torch.randn(tokens, top_k, generator=rng)
    return (
        sample(tokens, cols, dtype=dtype),
        sample(tokens * top_k, cols, dtype=dtype),
        weight,
        token,
        row,
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_gather_selects_tokens(dtype):
    x, _, _, token, _ = operands(dtype=dtype)
    rows = torch.stack([x[t] if t >= 0 else torch.zeros_like(x[0]) for t in token.tolist()])
    assert_same_bytes(ops.moe_gather(x, token), rows)


@pytest.mark.parametrize("has_weights", [True, False], ids=["weighted", "sum"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_combine_sums_in_fp32(dtype, has_weights):
    """Check that ``moe_combine`` sums in fp32 and rounds once."""
    x, h, weight, _, row = operands(dtype=dtype)
    weight = weight if has_weights else None
    y = torch.zeros(x.shape)
    for t, k in torch.cartesian_prod(torch.arange(9), torch.arange(3)).tolist():
        if row[t, k] >= 0:
            y[t] += h[row[t, k]].float() * (1 if weight is None else weight[t, k])
    for out in DTYPES.values():
        assert_same_bytes(ops.moe_combine(h, row, weight, out), y.to(out))
    assert ops.moe_combine(h, row, weight).dtype == dtype


def test_invalid_rows_are_ignored():
    """Whatever their weights are, NaN included."""
    h, nan = torch.ones(2, 8), torch.nan
    row = torch.tensor([[0, 2, -1], [2**31 - 1, -(2**31), 5]], dtype=I32)
    weight = torch.tensor([[2.0, nan, nan], [nan, nan, nan]])
    assert ops.moe_combine(h, row, weight).tolist() == [[2.0] * 8, [0.0] * 8]
    assert ops.moe_gather(h, torch.tensor([1, 2, -1], dtype=I32)).sum(1).tolist() == [8, 0, 0]
    ops.moe_combine(h, row, weight.requires_grad_()).backward(h.log() / 0)
    assert weight.grad.isnan().tolist() == [[True, False, False], [False] * 3]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_gradients_of_combine_with_missing_pairs(value):
    """Missing pairs have zero gradients, and no row gets the gradient of another token."""
    row = torch.tensor([[0, -1, 2], [-1, 9, 2**31 - 1], [4, 1, -(2**31)]], dtype=I32)
    is_row = (row >= 0) & (row < 6)
    for weights in (None, torch.tensor([[0.5, 2.0, 3.0]] * 3)):
        for token in range(3):
            h, dy = sample(6, 8).requires_grad_(), torch.ones(3, 8)
            dy[token, 5] = value
            weight = None if weights is None else weights.clone().requires_grad_()
            ops.moe_combine(h, row, weight).backward(dy.to(h.dtype))
            want = torch.zeros(6, 8)
            for t, k in is_row.nonzero().tolist():
                want[row[t, k]] = dy[t] * (1.0 if weight is None else weight[t, k].detach())
            assert_same_bytes(h.grad, want.to(h.dtype), any_nan=True)
            assert h.grad[[3, 5]].eq(0).all()
            if weight is not None:
                assert weight.grad[~is_row].eq(0).all()
                assert weight.grad[is_row].isfinite().tolist() == [
                    t != token for t, _ in is_row.nonzero().tolist()
                ]


@pytest.mark.emulated
@each_arch
def test_gather_and_combine_kernels_have_the_bits_of_the_reference(arch, monkeypatch):
    """Loads of all widths, more experts per token than loads in flight, full and partial strips."""
    monkeypatch.setattr(rows, "_MANY_BYTES", 0)
    clear_plan_cache()
    for i, (dtype, cols) in enumerate([(BF16, 8), (BF16, 1096), (BF16, 9), (F32, 12)]):
        x, h, weight, token, row = operands(11, cols, 6, 9, dtype, i)
        x[3], h[5], weight[2, 1] = torch.nan, torch.inf, -0.0
        invalid_token = token.clone()
        invalid_token[:3] = torch.tensor([2**31 - 1, -(2**31), 11])
        out = F32 if i % 2 else dtype
        calls = (
            lambda a=(x, invalid_token): ops.moe_gather(*a),
            lambda a=(x, token, row): ops.moe_gather(*a),
            lambda a=(h[:50], row, weight, out): ops.moe_combine(*a),
            lambda a=(h, row, None): ops.moe_combine(*a),
            # Misaligned, and not dense.
            lambda a=(h[1:, 1:], row[1:, ::2], weight[1:, ::2]): ops.moe_combine(*a),
        )
        for call in calls[: 5 if arch == "sm_90a" else 3]:
            want = call()
            with backend(f"emulated:{arch}", **MODES[i]):
                assert_same_bytes(call(), want, any_nan=True)
        with backend(f"emulated:{arch}"):  # invalid rows are ignored
            ops.moe_gather(x, token, torch.where(row % 4 == 0, 2**31 - 1, row - 1))
    no_rows = torch.zeros(0, 8), torch.zeros(3, 2, dtype=I32)
    with backend(f"emulated:{arch}"):
        assert not ops.moe_combine(*no_rows).any()
        assert not ops.moe_gather(no_rows[0], no_rows[1].flatten()).any()
        assert ops.moe_gather(no_rows[0], no_rows[1][:0].flatten()).shape == (0, 8)
        # One row is contiguous with any stride.
        row = torch.ones(1, 11, dtype=BF16)[:, :8]
        assert ops.moe_gather(row, no_rows[1].flatten()).sum() == 48
        assert not ops.moe_combine(torch.ones(3, 8), no_rows[1][:, :0]).any()


each_activation = pytest.mark.parametrize(
    ("name", "dtype", "cols", "interleaved"),
    [
        ("swiglu", BF16, 264, False),
        ("clamped_swiglu:limit=2.0", F32, 24, True),
        ("silu", F16, 13, False),
        ("geglu", BF16, 9, True),
    ],
)


def activation_calls(name, dtype, cols, interleaved, ragged=True):
    """Return the end row and calls of the op, its gradient, and the gradient with weights."""
    gated = "glu" in name
    x, _, weight, _, row = operands(20, cols * (1 + gated), 2, 4, dtype, cols)
    x, grad = torch.cat([x, -x]), sample(40, cols, dtype=dtype)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-30, 100.0, -100.0])
    x[1, :8], grad[2, :8] = special.to(dtype), special.to(dtype)
    ids = random_expert_ids(20, 2, 4, seed=cols)
    offs, _, pair, _ = ops.compute_routing(ids, 4)
    options = (offs if ragged else None, interleaved)
    x[int(offs[-1]) :] = torch.nan
    return int(offs[-1]) if ragged else None, [
        lambda: [ops.moe_activate(x, name, *options)],
        lambda: ops.moe_activate_gradient(x, grad, name, *options),
        lambda: ops.moe_activate_gradient(x, grad, name, *options, weight, pair),
    ]


@each_activation
def test_activations_and_gradients_are_near_fp64(name, dtype, cols, interleaved):
    """The expected values come from autograd in fp64 of what a layer computes."""
    act = grouped.Activation(name.partition(":")[0])
    if "limit" in name:
        act = grouped.Activation("clamped_swiglu", limit=2.0)
    gated, rows = act.is_gated, 12
    x, grad = (torch.randn(rows, cols * n).to(dtype) for n in (1 + gated, 1))
    weight = torch.rand(rows, 1)
    pair = torch.randperm(rows).int()
    exact = x.double().requires_grad_()
    p = weight.double().requires_grad_()
    y = compute_fp64(act, exact.unflatten(1, (-1, 2)).mT.flatten(1) if interleaved else exact)
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 2e-6}
    got = ops.moe_activate(x, act.text, None, interleaved)
    torch.testing.assert_close(got.double(), y, **tolerance)
    (y * p[pair.long()] * grad.double()).sum().backward()
    dx, scaled, dp = ops.moe_activate_gradient(x, grad, act.text, None, interleaved, weight, pair)
    torch.testing.assert_close(dx.double(), exact.grad, **tolerance)
    torch.testing.assert_close(scaled.double(), (y * p[pair.long()]).detach(), **tolerance)
    torch.testing.assert_close(dp.double(), p.grad, rtol=2e-2, atol=2e-2)
    (plain,) = ops.moe_activate_gradient(x, grad, act.text, None, interleaved)
    leaf = x.clone().requires_grad_()
    ops.moe_activate(leaf, act.text, None, interleaved).backward(grad)
    assert_same_bytes(leaf.grad, plain)


@pytest.mark.emulated
@each_activation
@each_arch
def test_activation_kernels_have_the_bits_of_the_reference(arch, name, dtype, cols, interleaved):
    live, calls = activation_calls(name, dtype, cols, interleaved, ragged=cols != 24)
    for i, call in enumerate(calls if cols in (264, 13) else calls[-1:]):
        want = call()
        with backend(f"emulated:{arch}", **MODES[i + 1]):
            for got, expected_tensor in zip(call(), want, strict=True):
                # The tail is undefined.
                rows = live if len(got) == 40 else None
                assert_same_bytes(got[:rows], expected_tensor[:rows], any_nan=True)


#: (columns, activation, interleaved, formats, dtype, end rows); some have no kernel.
QUANTIZED = [
    (256, "swiglu", False, ("fp8_block", "fp8_block"), "bfloat16", (0, 1, 1, 130, 147)),
    (
        128,
        "clamped_swiglu:limit=2.0",
        False,
        ("fp8_block:pow2_scales=false", "mxfp8"),
        "bfloat16",
        (149, 150, 150),
    ),
    (32, "srelu", False, ("mxfp8", "fp8_block:dtype=e5m2"), "float16", ()),
    (96, "swiglu", True, ("fp8_block", "mxfp8:block=32x32"), "bfloat16", (150,)),
    (144, "silu", False, ("fp8_block", "fp8_block"), "bfloat16", (0, 0, 129)),
    (128, "swiglu", False, ("fp8_block", "fp8_block"), "bfloat16", (0, 0)),
    (
        256,
        "swiglu",
        False,
        ("fp8:dtype=e5m2,scaling=delayed", "fp8:scaling=delayed"),
        "bfloat16",
        (0, 1, 1, 130, 147),
    ),
    (32, "silu", False, ("mxfp8", "fp8:scaling=delayed"), "float16", ()),
    (128, "geglu", False, ("fp8:scaling=delayed", "fp8_block"), "bfloat16", (149, 150, 150)),
    (48, "swiglu", True, ("fp8:scaling=delayed",) * 2, "float32", (150,)),
    (
        128,
        "swiglu",
        False,
        ("fp8_block:nan_scales", "mxfp8:nan_scales"),
        "float16",
        (0, 1, 1, 130, 147),
    ),
    (
        256,
        "swiglu",
        False,
        ("fp8:scaling=delayed,nan_scales",) * 2,
        "bfloat16",
        (0, 1, 1, 130, 147),
    ),
    (32, "silu", False, ("fp8:scaling=delayed,nan_scales", "fp8:scaling=delayed"), "float16", ()),
]


@pytest.mark.emulated
@pytest.mark.parametrize("case", QUANTIZED)
@each_arch
def test_gradients_are_quantized_on_the_fly(arch, case, monkeypatch):
    """The bits equal those of separate ops, over poison, and counters end at zero."""
    cols, act, interleaved, formats, dtype, end_rows = case
    rows = 150 if end_rows else 1300
    x, grad = (special_values(rows, n, DTYPES[dtype]) for n in (cols * (1 + ("glu" in act)), cols))
    pair, weight = torch.randperm(rows).int(), torch.rand(rows // 2, 2)
    pair[:3] = torch.tensor([-1, rows, 2**31 - 1])
    offs = torch.tensor(end_rows, dtype=I32) if end_rows else offs_of_many_groups()
    x[int(offs[-1]) :] = torch.nan
    weight[5] = torch.tensor([torch.inf, torch.nan])
    scales = [
        torch.exp2(torch.arange(len(offs)).clamp(0, 90) - i) if "delayed" in formats[i] else None
        for i in (0, 1)
    ]
    op_arguments, first_count = (
        (x, grad, *formats, act, offs, interleaved, weight, pair, *scales),
        4 + ("delayed" in formats[0]),
    )

    def run():
        out = [poisoned(t) for t in reference_outputs[:-1]] + [reference_outputs[-1].clone()]
        ops.moe_quantize_gradient_out(*op_arguments, out=out)
        return out

    reference_outputs = ops.moe_quantize_gradient(*op_arguments)
    want = run()
    dz, scaled, dp = ops.moe_activate_gradient(x, grad, act, offs, interleaved, weight, pair)
    reference_outputs = [*(poisoned(t) for t in reference_outputs[:-1]), dp]
    ops.grouped_quantize_out(
        dz, formats[0], offs, None, True, True, scales[0], out=reference_outputs[:first_count]
    )
    ops.grouped_quantize_out(
        scaled,
        formats[1],
        offs,
        None,
        False,
        True,
        scales[1],
        out=reference_outputs[first_count:-1],
    )
    runs, index = [want], QUANTIZED.index(case)
    zeros, allocated = torch.zeros, []
    monkeypatch.setattr(
        torch,
        "zeros",
        lambda *size, **options: allocated.append(zeros(*size, **options)) or allocated[-1],
    )
    for mode in MODES[index % 4 :] if arch == "sm_90a" else [MODES[index % 4]]:
        with backend(f"emulated:{arch}", **mode):
            runs.append(run())
    for outputs in runs:
        assert_all_same(outputs, reference_outputs, any_nan=True)
    assert [t.item() for t in allocated if t.dtype == I32 and t.shape == (1,)] == [0] * (
        0 if interleaved else len(runs) - 1
    )


#: (format, directions, activation).
GATHERED = [
    ("fp8_block", "both", None),
    ("nvfp4:row_scaled", "rowwise", None),
    ("mxfp8", "columnwise", None),
    ("fp8_block", "rowwise", "swiglu"),
    ("fp8:scaling=delayed", "both", None),
    ("nvfp4", "both", None),
]


@pytest.mark.parametrize(("text", "direction", "act"), GATHERED)
@pytest.mark.parametrize(
    "arch",
    ("reference", *(pytest.param(a, marks=pytest.mark.emulated) for a in ARCHITECTURES)),
)
def test_the_quantizer_gathers_rows(arch, text, direction, act):
    """The bits equal those of gathering first, over poison; a GEMM that quantizes does the same."""
    x, _, _, _, _ = operands(50, 320 if act else 160, dtype=BF16)
    offs, token, _, _ = ops.compute_routing(random_expert_ids(50, 3, 5), 5)
    scale = torch.exp2(torch.arange(5.0)) if "delayed" in text else None
    options = (None, direction != "columnwise", direction != "rowwise", scale, None, act, None)
    arguments = [(ops.moe_gather(x, token), text, offs, *options), (x, text, offs, *options, token)]
    reference_outputs = ops.grouped_quantize(*arguments[0])
    if arch == "reference":
        assert_all_same(ops.grouped_quantize(*arguments[1]), reference_outputs)
    if (
        arch == "reference"
        or arch == "sm_100a"
        and text in ("mxfp8", "fp8:scaling=delayed", "nvfp4")
    ):
        return
    want, got = ([poisoned(t) for t in reference_outputs] for _ in arguments)
    ops.grouped_quantize_out(*arguments[0], out=want)
    with backend(f"emulated:{arch}", **MODES[GATHERED.index((text, direction, act)) % 4]):
        ops.grouped_quantize_out(*arguments[1], out=got)
        assert_all_same(got, want)
        if direction == "rowwise" and (act or arch == "sm_90a"):
            weight_format = "fp8_block:block=128x128" if act else "nvfp4"
            codes, *scales = ops.grouped_quantize(torch.randn(5, 32, 160).bfloat16(), weight_format)
            product = (
                codes,
                offs,
                scales,
                text,
                weight_format,
                None,
                None,
                False,
                None,
                False,
                None,
                None,
                act,
            )
            want = ops.m_grouped_quantize_gemm(arguments[0][0], *product)
            assert_same_bytes(ops.m_grouped_quantize_gemm(x, *product, token), want)


#: (format, directions, dtype, tokens, columns, end rows).
TILES_OF_ROWS = [
    ("fp8_block", "both", BF16, 90, 1040, (0, 130, 130, 400, 657)),
    ("mxfp8", "columnwise", F32, 70, 416, (1, 1, 1, 300, 700)),
    ("nvfp4", "both", F16, 1, 272, (0, 0, 257, 258, 640)),
    ("mxfp8:block=32x32", "both", BF16, 30, 96, ()),
    ("nvfp4:hadamard", "columnwise", BF16, 40, 144, (129,)),
    ("fp8_block", "columnwise", BF16, 5, 48, (0, 0)),
]


@pytest.mark.emulated
@pytest.mark.parametrize("case", TILES_OF_ROWS)
@each_arch
def test_the_tile_quantizer_gathers_rows(arch, case):
    """Over poison, with invalid indices in the tail, and more tiles than an SM has stages."""
    text, direction, dtype, tokens, cols, end_rows = case
    offs = torch.tensor(end_rows, dtype=I32) if end_rows else offs_of_many_groups()
    x, index = (
        special_values(tokens, cols, dtype),
        torch.randint(0, tokens, (700 if end_rows else 1300,)).int(),
    )
    index[int(offs[-1]) :] = torch.tensor([-1, 2**31 - 1, -(2**31)]).repeat(500)[
        : len(index) - int(offs[-1])
    ]
    amax = torch.rand(len(offs)) if "nvfp4" in text else None
    options = (text, offs, amax, direction == "both", True, None, None, None, None)
    gathered = x[index.clamp(0, tokens - 1).long()]
    want = [poisoned(t) for t in ops.grouped_quantize(gathered, *options)]
    ops.grouped_quantize_out(gathered, *options, out=want)
    case_index = TILES_OF_ROWS.index(case)
    for i, mode in enumerate(MODES if arch == "sm_90a" else MODES[case_index % 4 :][:1]):
        got = [poisoned(t) for t in want]
        with backend(f"emulated:{arch}", num_sms=1 + i % 2, **mode):
            ops.grouped_quantize_out(x, *options, index, out=got)
        assert_all_same(got, want, any_nan=True)


#: (format, dtype, activation, (tokens, columns, top k, experts)).
BY_TOKEN = [
    ("fp8_block", BF16, None, (50, 160, 3, 5)),
    ("fp8_block", F32, None, (1, 16, 2, 3)),
    ("fp8_block:pow2_scales=false", F16, None, (3, 2064, 40, 900)),
    ("mxfp8", BF16, None, (40, 4128, 2, 3)),
    ("mxfp8", F32, "swiglu", (5, 96, 3, 1)),
    ("nvfp4:row_scaled", BF16, None, (140, 272, 2, 2)),
    ("nvfp4:row_scaled", BF16, "silu", (1, 7168, 8, 300)),
    ("nvfp4:row_scaled", F32, None, (9, 2064, 3, 4)),
]


@pytest.mark.emulated
@pytest.mark.parametrize("case", BY_TOKEN)
@each_arch
def test_tokens_are_read_once(arch, case):
    """The bits equal those of one read per row, unwritten poison included; a GEMM does the same."""
    pytest.importorskip("cutlass")
    text, dtype, act, (tokens, cols, top_k, experts) = case
    index = BY_TOKEN.index(case)
    x = sample(tokens, cols * (1 + (act == "swiglu")), dtype=dtype)
    x[-1, :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-30, 3e38, -1e-39]).to(
        dtype
    )
    for ids in (
        random_expert_ids(tokens, top_k, experts, seed=index),
        torch.full((tokens, top_k), -1),
    ):
        offs, token, _, row = ops.compute_routing(ids, experts)
        options = (x, text, offs, None, True, False, None, None, act, None, token)
        got, want = ([poisoned(t) for t in ops.grouped_quantize(*options)] for _ in range(2))
        with backend(f"emulated:{arch}", **MODES[index % 4]):
            ops.grouped_quantize_out(*options, out=want)
            reset_stats()
            ops.grouped_quantize_out(*options, row, out=got)
            assert stats()["tma_load_bytes"] == x.nbytes
            assert_all_same(got, want)
            if text == "nvfp4:row_scaled" and arch == "sm_90a":
                codes, *scales = ops.grouped_quantize(
                    sample(experts, 16, cols, dtype=BF16), "nvfp4"
                )
                product = (
                    codes,
                    offs,
                    scales,
                    text,
                    "nvfp4",
                    None,
                    None,
                    False,
                    None,
                    False,
                    None,
                    None,
                    act,
                    token,
                )
                assert_same_bytes(
                    ops.m_grouped_quantize_gemm(x, *product, row),
                    ops.m_grouped_quantize_gemm(x, *product),
                )
            # Invalid rows are ignored, and rows of the tail are unchanged.
            invalid = torch.tensor([2**31 - 1, -(2**31), row.numel()], dtype=I32)[: row.numel()]
            row.view(-1)[: len(invalid)] = invalid
            ops.grouped_quantize_out(*options, row, out=got)


def test_gradients_of_gather_and_combine():
    """They equal those of the same in plain torch, also for rows without a token."""
    x, h, weight, token, row = operands()
    is_row = (row >= 0).double()
    row_index = row.clamp_min(0).long()

    def in_torch(x, h, weight):
        rows = x[token.clamp_min(0).long()] * (token >= 0).double()[:, None]
        return ((rows + h)[row_index] * (weight * is_row).unsqueeze(-1)).sum(1)

    def with_ops(x, h, weight):
        rows = ops.moe_gather(x, token, row) + h
        return ops.moe_combine(rows, row, weight) + 0 * ops.moe_combine(rows, row)

    leaves = [t.requires_grad_() for t in (x, h, weight)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    dy = torch.randn(9, 24)
    got = torch.autograd.grad(with_ops(*leaves), leaves, dy)
    for a, b in zip(got, torch.autograd.grad(in_torch(*exact), exact, dy.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="needs row, the inverse of index"):
        ops.moe_gather(x, token)
