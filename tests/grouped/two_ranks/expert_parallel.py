"""Expert parallelism against one process that has all experts and all tokens."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import grouped
from grouped import recipes
from grouped.functional.experts import experts
from grouped.nn import MoE
from grouped.parallel.expert_parallel import ExpertParallel
from tests.helpers import assert_all_same, assert_same_bytes

from .models import (
    SQUARE_FP8,
    TOKENS,
    H,
    I,
    assert_close_gradients,
    assert_same_step,
    full,
    local_rows,
    mixture,
    quantize_experts,
    step,
    tokens,
)
from .runner import check, world

#: Recipes and options of ``ExpertParallel``.
CASES = {
    "bf16": (recipes.BF16(), {}),
    "capacity": (recipes.BF16(), {"capacity": 18}),
    "row-scaled": (recipes.NVFP4RowScaled(), {"capacity": (18, 9)}),
    "fp8-block": (recipes.FP8Block(), {}),
    "wire": (recipes.FP8Block(), {"wire": grouped.FP8Block(), "gradient_wire": grouped.FP8Block()}),
    "nvfp4 wire": (recipes.BF16(), {"wire": grouped.NVFP4(row_scaled=True), "capacity": 18}),
}


def distributed_mixture(recipe=None, *, options=None, **moe_options):
    """Return a mixture under ``ExpertParallel(**options)``."""
    moe = mixture(recipe or recipes.BF16(), **moe_options)
    return parallelize_module(moe, world.mesh, ExpertParallel(**(options or {})))


def round_trip(x, fmt):
    """Return x as it arrives in the format of the wire."""
    return x.clone() if fmt is None else grouped.quantize(x, fmt, offs=[len(x)]).dequantize()


class Wire(torch.autograd.Function):
    """Rounds tokens and their gradients as the formats of the wire do."""

    @staticmethod
    def forward(ctx, x, fmt, gradient_fmt):
        ctx.gradient_fmt = gradient_fmt
        return round_trip(x, fmt)

    @staticmethod
    def backward(ctx, dx):
        return round_trip(dx, ctx.gradient_fmt), None, None


def compare_with_one_process(name):
    """Run a step of the case ``name`` and return the distributed mixture."""
    recipe, options = CASES[name]
    wire, gradient_wire = options.get("wire"), options.get("gradient_wire")
    single, moe = mixture(recipe), distributed_mixture(recipe, options=options)
    if wire is not None:
        single.experts.exchange = lambda x, *arguments: Wire.apply(
            experts(Wire.apply(x, wire, None), *arguments[:5]), None, gradient_wire
        )
    assert_same_step(single, moe, local_rows(), torch.randn(sum(TOKENS), H).bfloat16())
    for layer in ("gate_up", "down"):
        weight = getattr(moe.experts, layer).weight
        assert weight.placements == (Shard(0),) and weight.to_local().shape[0] == 2
        want = getattr(single.experts, layer).weight.grad
        assert_same_bytes(weight.grad.full_tensor(), want, layer)
    assert_close_gradients(moe, single)
    return moe


@check
def expert_parallel():
    """Outputs, gradients and the bytes that were sent, for every recipe, capacity and wire."""
    for name, (_, options) in CASES.items():
        moe = compare_with_one_process(name)
        sent = moe.exchange.sent
        assert sent["combine"] == sent["dispatch_gradient"] and sent["combine"] % (2 * H) == 0
        rows = sent["combine"] // (2 * H)
        assert rows == 18 if "capacity" in options else 0 < rows <= 18
        if "wire" not in options:
            assert sent["dispatch"] == sent["combine_gradient"]
        if "capacity" in options:
            width = 2 * H if name != "nvfp4 wire" else -(-(H // 2 + H // 16 + 4) // 16) * 16
            assert sent["dispatch"] == width * (9 if name == "row-scaled" else 18)
            assert moe.exchange.dropped == 0


@check
def expert_parallel_of_quantized_weights():
    for recipe in (recipes.BF16(), recipes.NVFP4RowScaled()):
        single = quantize_experts(mixture(recipe).requires_grad_(False))
        moe = parallelize_module(copy.deepcopy(single), world.mesh, ExpertParallel())
        assert moe.experts.down.weight.to_local().nbytes * 2 == single.experts.down.weight.nbytes
        assert_same_step(single, moe, local_rows(), torch.ones(16, H).bfloat16())


@check
def a_rank_without_tokens():
    """All tokens are on rank 0; experts of both ranks, or of rank 1 alone, receive them."""
    dy = torch.randn(sum(TOKENS), H).bfloat16()
    for capacity in (None, 2 * sum(TOKENS)):
        for chosen in ((1, 2), (2, 3)):
            single = mixture(recipes.BF16(), selection_bias=True)
            single.router.selection_bias[list(chosen)] = 100.0
            moe = copy.deepcopy(single)
            parallelize_module(moe, world.mesh, ExpertParallel(capacity=capacity))
            assert_same_step(single, moe, slice(0) if world.rank else slice(None), dy)
            assert_same_bytes(
                moe.experts.down.weight.grad.full_tensor(), single.experts.down.weight.grad
            )


@check
def pairs_beyond_the_capacity_are_dropped():
    dy = torch.randn(sum(TOKENS), H).bfloat16()
    for capacity, sent in ((1, 1), ((99, 1), 2)):
        moe = distributed_mixture(options={"capacity": capacity}, selection_bias=True)
        moe.router.selection_bias[:2] = 100.0
        step(moe, x := tokens(), dy)
        assert moe.exchange.dropped == 2 * sum(TOKENS) - sent and x.grad.isfinite().all()


@check
def drops_add_up_over_calls():
    moe = distributed_mixture(options={"capacity": 1}, selection_bias=True)
    moe.router.selection_bias[:2] = 100.0
    for calls in (1, 2, 3):
        with torch.no_grad():
            moe(tokens())
        assert moe.exchange.dropped == calls * (2 * sum(TOKENS) - 1)


@check
def selection_biases_agree():
    """Counts are summed over the ranks, also for plain routers that are given the group."""
    for is_parallel in (True, False):
        single = mixture(recipes.BF16(), selection_bias=True, score="sigmoid")
        moe = copy.deepcopy(single)
        group = None if is_parallel else dist.group.WORLD
        if is_parallel:
            parallelize_module(moe, world.mesh, ExpertParallel())
        for _ in range(3):
            for module, x, over in ((single, tokens(), None), (moe, tokens()[local_rows()], group)):
                _, losses = module(x.detach(), losses=True)
                module.router.update_selection_bias(losses.tokens_per_expert, 0.1, group=over)
        assert single.router.selection_bias.any()
        assert_same_bytes(moe.router.selection_bias, single.router.selection_bias)


class NoHostReads(TorchDispatchMode):
    """Fails if the host reads a value of a tensor, or makes a shape of one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")
        assert func.overloadpacket.__name__ not in read
        return func(*args, **(kwargs or {}))


def logged(log, function):
    """Return ``function``, which then appends its name to ``log`` at each call."""

    def run(*args, **options):
        log.append(function.__name__)
        return function(*args, **options)

    return run


@check
def the_shared_expert_overlaps():
    """It computes while results travel, with equal bits; with a capacity the host reads nothing."""
    for capacity, exchanges in ((None, 2), (18, 1)):
        results = []
        for overlap in (True, False):
            moe = distributed_mixture(options={"capacity": capacity, "overlap": overlap})
            log = []
            for module, name in (
                (moe.exchange, "_start"),
                (moe.exchange, "_finish"),
                (moe.shared, "forward"),
            ):
                setattr(module, name, logged(log, getattr(module, name)))
            x = tokens().detach()[: TOKENS[world.rank]].requires_grad_()
            with NoHostReads() if capacity else contextlib.nullcontext():
                y = step(moe, x, torch.ones_like(x))
                results.append((y, x.grad, full(moe.shared.down.weight.grad)))
            calls = log[: log.index("forward")]
            if overlap:
                assert calls == [*["_start", "_finish"] * exchanges, "_start"], log
            else:
                assert calls[-1] == "_finish", log
        assert_all_same(*results)


@check
def expert_parallel_compiles():
    """One graph gives the bits of eager mode."""
    rows = local_rows()
    dy = torch.randn(sum(TOKENS), H).bfloat16()[rows]
    results = []
    for is_compiled in (False, True):
        moe = mixture(recipes.BF16())
        moe.shared = None
        style = ExpertParallel(capacity=18, wire=grouped.FP8Block())
        parallelize_module(moe, world.mesh, style)
        x = tokens().detach()[rows].requires_grad_()
        run = torch.compile(moe, fullgraph=True, backend="eager") if is_compiled else moe
        y = step(run, x, dy)
        results.append((y, x.grad, moe.experts.gate_up.weight.grad.to_local()))
    assert_all_same(*results)


@check
def unsupported_wires():
    with pytest.raises(
        ValueError,
        match=r"wire must quantize each row by itself.*use NVFP4\(row_scaled=True\)",
    ):
        ExpertParallel(wire=grouped.NVFP4())
    with pytest.raises(ValueError, match=r"gradient_wire must .*use FP8Block\(\) instead"):
        ExpertParallel(gradient_wire=SQUARE_FP8)
    with pytest.raises(ValueError, match="wire must .*FP8Block.*MXFP8.*do$"):
        ExpertParallel(wire=grouped.FP8())


@check
def invalid_capacities():
    with pytest.raises(ValueError, match="capacity must be one positive number or two.*got 0"):
        ExpertParallel(capacity=0)
    for capacity in ((3, 4, 5), (3,), (3, -1), [2, 0]):
        with pytest.raises(ValueError, match="capacity must be one positive number or two"):
            ExpertParallel(capacity=capacity)
    for capacity in (True, (3, True), 2.0, (3, 4.0), "34", torch.tensor([3, 4])):
        with pytest.raises(TypeError, match="capacity must be an int or a tuple"):
            ExpertParallel(capacity=capacity)


@check
def unsupported_expert_parallel_modules():
    """Modules that cannot be distributed raise errors that say why."""
    parallel = ExpertParallel(world.mesh)
    with pytest.raises(ValueError, match="mesh is missing"):
        ExpertParallel()(mixture(recipes.BF16()))
    with pytest.raises(ValueError, match="must be a multiple of the mesh's 2"):
        parallel(MoE(H, I, 3, 2))
    with pytest.raises(ValueError, match="already distributed"):
        parallel(parallel(mixture(recipes.BF16())))
    with pytest.raises(ValueError, match="single_parameter=True"):
        parallel(MoE(H, I, 4, 2, single_parameter=False))
    with pytest.raises(ValueError, match="has the scales of all experts"):
        parallel(mixture(recipes.FP8Delayed()))
    with pytest.raises(TypeError, match="torchtitan and transformers distribute their own experts"):
        parallel(nn.Linear(2, 2))
