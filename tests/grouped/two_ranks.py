"""Checks of two processes, which ``test_distributed`` starts:

``python -m tests.grouped.two_ranks RANK FOLDER``
"""

import contextlib
import copy
import datetime
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    PrepareModuleInputOutput,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import grouped
from cute_kernels import backend
from grouped import recipes
from grouped.functional.experts import compute_routing, experts
from grouped.nn import GroupedLinear, MoE
from grouped.parallel.expert_parallel import Exchange, ExpertParallel, ExpertTensorParallel
from tests.grouped.cases import EVERY_FORMAT
from tests.grouped.cases import assert_same_tensor as assert_same
from tests.helpers import (
    BF16,
    E4M3,
    F32,
    assert_all_same,
    assert_same_buffers,
    assert_same_bytes,
    raises,
    seeded,
    whole_graph,
)

GROUPS, N, K = 4, 32, 48
ENDS = [3, 3, 7, 10]
SQUARE = grouped.FP8Block(block=(128, 128))
CHECKS, RESULTS = {}, {}
RANK = 0
FOLDER = Path()
MESH = None


def check(function):
    CHECKS[function.__name__] = function
    return function


def plain_weight(shift=0.0, groups=GROUPS):
    return torch.randn(groups, N, K, generator=seeded(7)).bfloat16() + shift


def quantized(fmt=None, shift=0.0, groups=GROUPS):
    """The same on both ranks; rows of its NVFP4 codes are padded."""
    return grouped.quantize(plain_weight(shift, groups), fmt or grouped.NVFP4(), columnwise=True)


def rows():
    return torch.randn(10, K, generator=seeded(9)).bfloat16().requires_grad_()


def layer(fmt, recipe, train):
    torch.manual_seed(3)
    module = GroupedLinear(GROUPS, K, N, recipe=recipe, dtype=BF16)
    module.weight = nn.Parameter(quantized(fmt), requires_grad=train)
    return module


def gradients(module):
    return [p.grad for p in module.parameters() if p.requires_grad]


@check
def data_parallel():
    """DDP broadcasts the bytes of the first rank, and sums gradients."""
    for make, train in ((quantized, False), (quantized, True), (plain_weight, True)):
        module = layer(grouped.NVFP4(), recipes.NVFP4(), train)
        module.weight = nn.Parameter(make(shift=RANK), requires_grad=train)
        module.gain = nn.Parameter(
            torch.full((3,), float(RANK)), False
        )  # In the bucket of the codes.
        parallel = nn.parallel.DistributedDataParallel(module)
        alone = layer(None, recipes.NVFP4(), train)
        alone.weight = nn.Parameter(make(), train)
        if make is quantized:
            assert_same(module.weight.data, quantized())
        assert not module.gain.any()
        x, y = rows(), rows()
        parallel(x, ENDS).sum().backward()
        alone(y, ENDS).sum().backward()
        assert_all_same([x.grad, *gradients(module)], [y.grad, *gradients(alone)])


@check
def moved_by_collectives():
    mine, second = quantized(shift=RANK), quantized(shift=1)
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert_same(both[0], quantized())
    assert_same(both[1], second)
    dist.broadcast(mine, 1)
    assert_same(mine, second)
    if RANK:
        dist.send(mine, 0)
    else:
        dist.recv(both[0], 1)
        assert_same(both[0], second)
    for reduce in (dist.all_reduce, lambda x: dist.reduce(x, 0)):
        with raises(TypeError, "does not work on a GroupedTensor; decode it first"):
            reduce(mine)
    with raises(TypeError, "needs GroupedTensors of one format"):
        dist.all_gather([plain_weight(), plain_weight()], mine)


@check
def dtensors():
    for fmt in EVERY_FORMAT.values():
        if fmt.second_level is not None and fmt.second_level.per == "row":
            continue
        cols = 64 if fmt.k_multiple > 16 else K
        whole = grouped.quantize(torch.randn(3, N, cols, generator=seeded(1)), fmt, columnwise=True)
        for groups in (2, 3):
            part = whole[:groups]
            sharded = distribute_tensor(nn.Parameter(part, False), MESH, [Shard(0)])
            assert isinstance(sharded, DTensor)
            first = RANK * ((groups + 1) // 2)
            assert_same(
                sharded.to_local(), whole[first : min(groups, first + (groups + 1) // 2)].clone()
            )
            assert_same(sharded.full_tensor(), part.clone())
        one = distribute_tensor(nn.Parameter(whole[:1], False), MESH, [Shard(0)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one.mul_(0.5)  # The second rank has no groups.
        assert len(one.to_local().dequantize()) == 1 - RANK
        replica = distribute_tensor(whole, MESH, [Replicate()])
        assert_same(replica.to_local(), whole)
        assert_same(replica.redistribute(MESH, [Shard(0)]).full_tensor(), whole)


@check
def layers_of_dtensors():
    """A layer whose parameters are DTensors multiplies this rank's groups, and keeps their copies."""
    want = layer(None, recipes.NVFP4(), False)
    for is_quantized in (False, True):
        module, alone = layer(None, recipes.NVFP4(), False), want
        if not is_quantized:
            alone = GroupedLinear(GROUPS, K, N, recipe=recipes.NVFP4(), dtype=BF16)
            module = copy.deepcopy(alone)
        y = alone(x := rows(), ENDS)
        dy = torch.ones_like(y)
        y.backward(dy)
        for name, p in list(module.named_parameters()):
            setattr(
                module,
                name,
                nn.Parameter(distribute_tensor(p.detach(), MESH, [Shard(0)]), p.requires_grad),
            )
        part, ends = (slice(3, 10), [4, 7]) if RANK else (slice(0, 3), [3, 3])
        mine = rows().detach()[part].requires_grad_()
        for first in (True, False):
            mine.grad = None
            got = module(mine, ends, is_first_microbatch=first)
            got.backward(dy[part])
            assert_same_bytes(got.detach(), y.detach()[part])
            assert_same_bytes(mine.grad, x.grad[part], name)
        if not is_quantized:
            assert module.weight.grad.placements == (Shard(0),)
            assert_same_bytes(module.weight.grad.full_tensor(), 2 * alone.weight.grad)


@check
def products_of_dtensors():
    """The placements of the table in ``grouped.functional.dtensor_ops``; of whole groups the bits of one process."""
    R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
    x, dense = torch.randn(10, 64).bfloat16(), torch.randn(GROUPS, N, 64).bfloat16()
    bias, dy, fmt = (
        torch.randn(GROUPS, N).bfloat16(),
        torch.randn(10, N).bfloat16(),
        grouped.NVFP4(),
    )
    ends, low = torch.tensor(ENDS), grouped.quantize(dense, fmt, columnwise=True)

    def compare(run, tensors, placements, want, exact=True):
        found = []
        for place in (
            lambda t, _: t.detach().clone(),
            lambda t, p: distribute_tensor(t.detach(), MESH, [p]),
        ):
            made = [place(t, p) for t, p in zip(tensors, placements, strict=True)]
            leaves = [
                m.requires_grad_()
                for t, m in zip(tensors, made, strict=True)
                if type(t) is torch.Tensor
            ]
            y = run(*made)
            y.backward(place(dy, R))
            found.append([y, *(t.grad for t in leaves)])
        assert found[1][0].placements == (want,)
        for a, b in zip(*found, strict=True):
            b = b.full_tensor()
            assert torch.equal(a, b) if exact else (a - b).norm() < 0.02 * a.norm()

    def linear(x, w, b=None):
        return grouped.linear(x.view(2, 5, -1), w, b, ENDS, recipe).view(10, -1)

    def dgrad(x, w):
        return grouped.grouped_gemm(x, w, offs=ends, transpose_b=True)

    for recipe, weight in (
        (recipes.NVFP4(), dense),
        (recipes.NVFP4(), low),
        (recipes.BF16(), dense),
    ):  # noqa: B007 - linear reads it.
        compare(linear, [x, weight, bias], [R, S0, S0], Partial())
        compare(linear, [x, weight, bias], [S0, R, S0], R)
    compare(linear, [x, dense], [R, S1], S1, False)
    compare(linear, [x, dense], [S1, S2], Partial(), False)
    compare(lambda x, w: grouped.grouped_gemm(x, w, offs=[3, 7, 10]), [x, dense[:3]], [S1, S0], R)
    for of_x, of_w, want in ((R, S0, Partial()), (S1, S1, Partial()), (R, S2, S1)):
        compare(dgrad, [x, dense.mT.contiguous()], [of_x, of_w], want, of_w == S0)
    X, W = distribute_tensor(x, MESH, [S1]), distribute_tensor(dense, MESH, [S0])
    made, rows = (
        grouped.quantize(W, fmt, columnwise=True),
        grouped.quantize(X, fmt, offs=distribute_tensor(ends, MESH, [R])),
    )
    assert made.placements == (S0,)
    assert_same(made.full_tensor(), low)
    assert_same_bytes(
        grouped.grouped_gemm(rows, made).to_local(), grouped.grouped_gemm(rows.to_local(), low)
    )
    assert_same_bytes(
        grouped.grouped_gemm(X, X, offs=ends).to_local(), grouped.grouped_gemm(x, x, offs=ends)
    )
    random = recipes.NVFP4(stochastic_rounding=True)
    for error, message, make in (
        (
            TypeError,
            "must all be DTensors",
            lambda: grouped.linear(X, dense, None, ends, recipes.BF16()),
        ),
        (ValueError, "rounds stochastically", lambda: grouped.linear(X, W, None, ends, random)),
        (ValueError, "out does not go with", lambda: grouped.grouped_gemm(X, W, offs=ends, out=dy)),
        (ValueError, "goes with offs", lambda: grouped.quantize(W, fmt, out=made)),
    ):
        with raises(error, message):
            make()


@check
def fully_sharded():
    """FSDP2: the bits of one process, quantized weights gathered as bytes, trained in place."""
    for fmt, recipe, train, reshard in (
        (None, recipes.BF16(), False, True),
        (None, recipes.NVFP4(), True, True),
        (None, recipes.NVFP4(), True, False),
        (grouped.FP8(), recipes.FP8Current(), True, True),
        (SQUARE, recipes.FP8Block(), True, True),
    ):
        alone = layer(fmt, recipe, train)
        module = fully_shard(copy.deepcopy(alone), mesh=MESH, reshard_after_forward=reshard)
        assert module.weight.to_local().num_groups == GROUPS // 2
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, alone)]
        for _ in range(2):
            inputs = rows(), rows()
            outputs = [m(x, ENDS) for m, x in zip((module, alone), inputs, strict=True)]
            assert_same_bytes(*(y.detach() for y in outputs))
            for y in outputs:
                y.sum().backward()
            assert_same_bytes(inputs[0].grad, inputs[1].grad)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert_same(module.weight.full_tensor(), alone.weight.data)
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    module = fully_shard(layer(None, recipes.NVFP4(), True).float(), mesh=MESH, mp_policy=policy)
    module(
        rows(), ENDS
    ).sum().backward()  # Gradients of one unit have one dtype, that of the policy.
    assert module.weight.grad.dtype == module.bias.grad.dtype == F32
    module = GroupedLinear(3, K, N, bias=False)
    module.weight = nn.Parameter(quantized(groups=3), False)
    fully_shard(module, mesh=MESH)
    with raises(ValueError, "their number, 3, must be a multiple of its 2 ranks"):
        module(rows(), [3, 7, 10])
    # What is gathered.
    whole = grouped.quantize(torch.randn(2, 128, 256), grouped.NVFP4())
    payload, _ = whole.fsdp_pre_all_gather(MESH, whole.shape, None, None, None)
    assert sum(t.nbytes for t in payload) == 2 * (128 * 256 * (1 / 2 + 1 / 16) + 4)


@check
def mixtures_fully_sharded():
    """The experts in a unit of their own, in which p stays fp32; each layer in one is refused."""
    policy, dy = MixedPrecisionPolicy(param_dtype=BF16), torch.randn(sum(TOKENS), H).bfloat16()
    for recipe, train in (
        (recipes.BF16(), None),
        (recipes.BF16(), False),
        (recipes.NVFP4RowScaled(), True),
    ):
        alone = with_low_experts(mixture(recipe), train)
        sharded = copy.deepcopy(alone)
        for module in (sharded.experts, sharded):
            fully_shard(module, mesh=MESH, mp_policy=policy)
        assert type(sharded.experts.down.weight.to_local()) is type(alone.experts.down.weight.data)
        x = step_of_both(alone, sharded, slice(None), dy)
        if train is not False:
            assert_same_bytes(*(full(m.experts.down.weight.grad) for m in (sharded, alone)))
    fully_shard(alone.experts.down, mesh=MESH)
    with raises(RuntimeError, "not called: shard, or hook into, the experts"):
        alone(x)


@check
def spread_experts_fully_sharded():
    """Expert parallelism along one dimension of a mesh, FSDP2 along the other; gradients are means
    over all ranks.
    """
    dy = torch.randn(sum(TOKENS), H).bfloat16()
    for sizes in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep"))
        for train in (None, False, True):
            alone = with_low_experts(mixture(recipes.BF16()), train)
            moe = parallelize_module(copy.deepcopy(alone), mesh["ep"], ExpertParallel())
            fully_shard(moe.experts, mesh=mesh["dp"]).set_gradient_divide_factor(2)
            step_of_both(alone, moe, of_rank(), dy)
            if train is not False:
                both = [full(m.experts.down.weight.grad).float() for m in (moe, alone)]
                assert (2 * both[0] - both[1]).norm() <= 0.01 * both[1].norm()


@check
def sequence_parallel():
    """PyTorch's styles around a mixture, which takes all tokens for tensor parallelism, else those
    of a rank.
    """
    dy = torch.randn(2, 8, H).bfloat16()
    for style, layout in ((ExpertTensorParallel(), Replicate()), (ExpertParallel(), Shard(1))):
        alone = nn.Sequential(nn.RMSNorm(H, dtype=BF16), mixture(recipes.BF16()))
        block = parallelize_module(
            copy.deepcopy(alone), MESH, {"0": SequenceParallel(), "1": style}
        )
        x = tokens().detach().view(2, 8, H).requires_grad_()
        mine = distribute_tensor(x.detach(), MESH, [Shard(1)]).requires_grad_()
        with raises(TypeError, "x is a DTensor.*PrepareModuleInputOutput"):
            block(mine)
        around = PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(layout,),
            use_local_input=True,
            output_layouts=(layout,),
            desired_output_layouts=(Shard(1),),
            use_local_output=False,
        )
        parallelize_module(block, MESH, {"1": around})
        y, got = alone(x), block(mine)
        y.backward(dy)
        got.backward(distribute_tensor(dy, MESH, [Shard(1)]))
        assert got.placements == (Shard(1),)
        for a, b in ((got, y), (mine.grad, x.grad), (block[0].weight.grad, alone[0].weight.grad)):
            assert (full(a) - b).norm() < 0.01 * b.norm()


@check
def pipelined():
    """Stages of modules, and of plain weights those that PyTorch cuts from a traced model."""
    dy = torch.randn(16, H).bfloat16()
    for train in (None, False, True):
        alone = nn.Sequential(
            *(with_low_experts(mixture(recipes.FP8Block()), train) for _ in range(2))
        )
        stages = [PipelineStage(copy.deepcopy(alone)[RANK], RANK, 2, torch.device("cpu"))]
        if train is None:
            cut = pipeline(
                copy.deepcopy(alone), (tokens()[:8],), split_spec={"1": SplitPoint.BEGINNING}
            )
            stages.append(cut.build_stage(RANK, torch.device("cpu")))
        for x, dx in zip(tokens().chunk(2), dy.chunk(2), strict=True):
            alone(x).backward(dx)
        for stage in stages:
            schedule = ScheduleGPipe(
                stage, 2, loss_fn=lambda y, t: (y * t).float().sum(), scale_grads=False
            )
            schedule.step(*(() if RANK else (tokens(),)), target=dy if RANK else None)
            assert_all_same(gradients(stage.submod), gradients(alone[RANK]))


@check
def optimizers():
    """An fp32 master beside it, and a warning where a step is lost."""
    master = nn.Parameter(distribute_tensor(plain_weight().float(), MESH, [Shard(0)]))
    weight = nn.Parameter(distribute_tensor(quantized(), MESH, [Shard(0)]), False)
    optimizer = torch.optim.SGD([master], lr=1e-3)
    for _ in range(3):
        master.grad = torch.ones_like(master)
        optimizer.step()
        weight.copy_(master)
    want = plain_weight().float()
    for _ in range(3):
        want -= 1e-3
    assert_same(
        weight.full_tensor(), grouped.quantize(want.bfloat16(), grouped.NVFP4(), columnwise=True)
    )
    p = nn.Parameter(distribute_tensor(quantized(shift=8.0), MESH, [Shard(0)]))
    p.grad = torch.ones_like(master).bfloat16()
    with pytest.warns(UserWarning, match="changed nothing"):
        torch.optim.SGD([p], lr=1e-6).step()


@check
def checkpoints():
    """DCP of shards; ``test_distributed`` loads them as one."""
    module = fully_shard(layer(None, recipes.NVFP4(), False), mesh=MESH)
    three = quantized(groups=3)
    state = {
        "layer": module.state_dict(),
        "odd": distribute_tensor(three.clone(), MESH, [Shard(0)]),
    }
    dcp.async_save(state, checkpoint_id=FOLDER / "saved").result()
    for tensor in (state["layer"]["weight"], state["odd"]):
        tensor.to_local().zero_()
    whole = {"odd": torch.zeros_like(three)}
    dcp.load(state, checkpoint_id=FOLDER / "saved")
    assert_same(state["layer"]["weight"].full_tensor(), quantized())
    assert_same(state["odd"].full_tensor(), three)
    dcp.load(whole, checkpoint_id=FOLDER / "saved")
    assert_same_bytes(whole["odd"], three.dequantize())
    dist.barrier()


@check
def optimizer_states():
    """Masters and moments are DTensors: checkpoints have all shards, also for another number of
    processes.
    """

    def trained(mesh):
        module = layer(None, recipes.NVFP4(), True)
        if mesh is not None:
            fully_shard(module, mesh=mesh)
        masters = {module.weight: plain_weight()}
        return module, grouped.optim.AdamW(
            module.parameters(), lr=0.1, masters=masters, master_weights=True
        )

    def steps(module, optimizer, count):
        for _ in range(count):
            module(rows(), ENDS).square().sum().backward()
            with backend("emulated:sm_90a"):
                optimizer.step()
            optimizer.zero_grad()
        return [full(t.detach()) for t in (module.weight, module.bias)]

    first, *others = trained(MESH), trained(MESH), trained(None)
    steps(*first, 2)
    dcp.save(dict(zip("mo", get_state_dict(*first), strict=True)), checkpoint_id=FOLDER / "trained")
    want = steps(*first, 1)
    for other, alone in zip(others, (False, True), strict=True):
        state = dict(zip("mo", get_state_dict(*other), strict=True))
        dcp.load(state, checkpoint_id=FOLDER / "trained", no_dist=alone)
        set_state_dict(*other, model_state_dict=state["m"], optim_state_dict=state["o"])
        weight, bias = steps(*other, 1)
        assert_same(weight, want[0])
        assert_same_bytes(bias, want[1])
    dist.barrier()


H, I, TOKENS = 128, 128, (9, 7)  # noqa: E741
SPREAD = {
    "bf16": (recipes.BF16(), {}),
    "capacity": (recipes.BF16(), {"capacity": 18}),
    "row-scaled": (recipes.NVFP4RowScaled(), {"capacity": (18, 9)}),
    "fp8-block": (recipes.FP8Block(), {}),
    "wire": (recipes.FP8Block(), {"wire": grouped.FP8Block(), "gradient_wire": grouped.FP8Block()}),
    "nvfp4 wire": (recipes.BF16(), {"wire": grouped.NVFP4(row_scaled=True), "capacity": 18}),
}


def mixture(recipe, **options):
    torch.manual_seed(4)
    # Gradients share a scale in NVFP4RowScaled, in a shared expert those of a rank's tokens alone.
    shared = 0 if isinstance(recipe, recipes.NVFP4RowScaled) else I
    return MoE(H, I, 4, 2, recipe=recipe, dtype=BF16, shared_intermediate_size=shared, **options)


def with_low_experts(moe, train=False):
    """``moe`` with experts that are quantized; as it is if ``train`` is None."""
    for layer in (moe.experts.gate_up, moe.experts.down) if train is not None else ():
        layer.weight = nn.Parameter(
            grouped.quantize(layer.weight, grouped.NVFP4(), columnwise=True), train
        )
    return moe


def of_rank():
    """Where the tokens of this rank are."""
    return slice(TOKENS[0], None) if RANK else slice(0, TOKENS[0])


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def tokens():
    x = torch.randn(sum(TOKENS), H, generator=seeded(11)).bfloat16()
    return x.requires_grad_()


def step(moe, x, dy):
    y = moe(x)
    y.backward(dy)
    return y.detach()


def step_of_both(alone, moe, part, dy):
    """One step of one process, and of this rank's ``part`` of the tokens: the same bits.

    All tokens.
    """
    x, mine = tokens(), tokens().detach()[part].requires_grad_()
    y, got = step(alone, x, dy), step(moe, mine, dy[part])
    assert_same_bytes(got, y[part])
    assert_same_bytes(mine.grad, x.grad[part])
    return x


def rounded(x, fmt):
    return x.clone() if fmt is None else grouped.quantize(x, fmt, offs=[len(x)]).dequantize()


class Wire(torch.autograd.Function):
    """What arrives of tokens and of gradients."""

    forward = staticmethod(lambda ctx, x, fmt, back: setattr(ctx, "back", back) or rounded(x, fmt))
    backward = staticmethod(lambda ctx, dx: (rounded(dx, ctx.back), None, None))


def spread(name, part):
    recipe, options = SPREAD[name]
    wire, gradient_wire = options.get("wire"), options.get("gradient_wire")
    alone, moe = (
        mixture(recipe),
        parallelize_module(mixture(recipe), MESH, ExpertParallel(**options)),
    )
    if wire is not None:
        alone.experts.exchange = lambda x, *rest: Wire.apply(
            experts(Wire.apply(x, wire, None), *rest[:5]), None, gradient_wire
        )
    step_of_both(alone, moe, part, torch.randn(sum(TOKENS), H).bfloat16())
    for layer in ("gate_up", "down"):
        weight = getattr(moe.experts, layer).weight
        assert weight.placements == (Shard(0),) and weight.to_local().shape[0] == 2
        assert_same_bytes(
            weight.grad.full_tensor(), getattr(alone.experts, layer).weight.grad, layer
        )
    assert_close_gradients(moe, alone)
    return moe


@check
def experts_are_spread():
    for name in SPREAD:
        moe = spread(name, of_rank())
        sent, options = moe.exchange.sent, SPREAD[name][1]
        assert sent["combine"] == sent["dispatch_gradient"] and sent["combine"] % (2 * H) == 0
        rows = sent["combine"] // (2 * H)
        assert rows == 18 if "capacity" in options else 0 < rows <= 18
        if "wire" not in options:
            assert sent["dispatch"] == sent["combine_gradient"]
        if "capacity" in options:
            width = 2 * H if name != "nvfp4 wire" else -(-(H // 2 + H // 16 + 4) // 16) * 16
            assert (
                sent["dispatch"] == width * (9 if name == "row-scaled" else 18)
                and moe.exchange.dropped == 0
            )


@check
def other_experts_are_spread():
    """A ``GroupedMLP``, whose rows lie by expert on each rank; and weights that are quantized."""
    sizes, part = torch.tensor([[3, 0, 4, 2], [2, 2, 0, 3]]), of_rank()
    x, dy = torch.randn(16, H).bfloat16(), torch.randn(16, H).bfloat16()
    # Where the rows of both are where one process has them all.
    order = torch.repeat_interleave(torch.arange(4).repeat(2), sizes.flatten()).argsort(stable=True)
    mlp, all_ends = mixture(recipes.FP8Block()).experts, sizes.sum(0).cumsum(0)
    a = x[order].requires_grad_()
    mlp(a, all_ends).backward(dy[order])
    wants = [
        torch.empty_like(t).index_copy_(0, order, t) for t in (mlp(a, all_ends).detach(), a.grad)
    ]
    for style, which, ends in (
        (
            ExpertParallel(wire=grouped.FP8Block(), capacity=16),
            torch.arange(16)[part],
            sizes[RANK].cumsum(0),
        ),
        (ExpertTensorParallel(), order, all_ends),
    ):
        b = x[which].requires_grad_()
        got = parallelize_module(copy.deepcopy(mlp), MESH, style)(b, ends)
        got.backward(dy[which])
        for want, t in zip(wants, (got, b.grad), strict=True):
            assert (want[which] - t).norm() <= (0 if which is not order else 0.02) * want.norm()
    for recipe in (recipes.BF16(), recipes.NVFP4RowScaled()):
        alone = with_low_experts(mixture(recipe).requires_grad_(False))
        moe = parallelize_module(copy.deepcopy(alone), MESH, ExpertParallel())
        assert moe.experts.down.weight.to_local().nbytes * 2 == alone.experts.down.weight.nbytes
        step_of_both(alone, moe, part, torch.ones(16, H).bfloat16())


@check
def spread_experts_in_odd_cases():
    """A rank without tokens, all tokens to one rank, pairs beyond the capacity."""
    dy = torch.randn(sum(TOKENS), H).bfloat16()
    for capacity in (None, 2 * sum(TOKENS)):
        for chosen in ((1, 2), (2, 3)):
            alone = mixture(recipes.BF16(), selection_bias=True)
            alone.router.selection_bias[list(chosen)] = 100.0
            moe = parallelize_module(copy.deepcopy(alone), MESH, ExpertParallel(capacity=capacity))
            step_of_both(alone, moe, slice(0) if RANK else slice(None), dy)
            assert_same_bytes(
                moe.experts.down.weight.grad.full_tensor(), alone.experts.down.weight.grad
            )
    for capacity in (1, (99, 1)):
        moe = parallelize_module(
            mixture(recipes.BF16(), selection_bias=True), MESH, ExpertParallel(capacity=capacity)
        )
        moe.router.selection_bias[:2] = 100.0
        step(moe, mine := tokens(), dy)
        kept = 1 if capacity == 1 else 2
        assert moe.exchange.dropped == 2 * sum(TOKENS) - kept and mine.grad.isfinite().all()


def assert_close_gradients(moe, alone):
    """Those of router and shared expert, which nobody has to sum; they are those of all tokens on
    each rank.
    """
    for (name, p), q in zip(moe.named_parameters(), alone.parameters(), strict=True):
        if not name.startswith("experts."):
            assert p.placements == p.grad.placements == (Replicate(),), name
            torch.testing.assert_close(p.grad.to_local(), q.grad, rtol=0.02, atol=0.02)


def norm_of(model):
    """In fp64, of the whole gradients."""
    return torch.stack([full(p.grad).double().norm() for p in model.parameters()]).norm()


@check
def gradients_are_clipped_and_optimizers_step_over_all_parameters():
    """PyTorch's calls take router, shared and spread experts together."""
    dy = torch.randn(sum(TOKENS), H).bfloat16()
    adamw = torch.optim.AdamW
    for style, options, make in (
        (
            ExpertParallel(),
            {"selection_bias": True},
            lambda m: adamw(m.parameters(), lr=0.01, foreach=True),
        ),
        (
            ExpertParallel(capacity=18),
            {"bias": True, "router_bias": True},
            lambda m: adamw(m.parameters(), fused=True),
        ),
        (ExpertTensorParallel(), {}, lambda m: adamw(m.parameters(), lr=0.01, foreach=True)),
        (ExpertParallel(), {}, lambda m: grouped.optim.AdamW(m.parameters(), lr=0.01)),
    ):
        alone = mixture(recipes.BF16(), **options)
        moe = parallelize_module(copy.deepcopy(alone), MESH, style)
        part = of_rank() if type(style) is ExpertParallel else slice(None)
        step(alone, tokens(), dy)
        step(moe, tokens().detach()[part].requires_grad_(), dy[part])
        want = norm_of(alone)
        for norm in (
            torch.nn.utils.clip_grad_norm_(moe.parameters(), 1e9).full_tensor(),
            grouped.distributed.clip_grad_norm_(moe.parameters(), want.item() / 2),
        ):
            assert (norm - want).abs() < 0.01 * want
        assert (norm_of(moe) - want / 2).abs() < 0.01 * want
        before = [full(p.detach()).clone() for p in moe.parameters()]
        make(moe).step()
        for old, p in zip(before, moe.parameters(), strict=True):
            new = full(p.detach())
            assert not torch.equal(old, new)
            both = [torch.empty_like(new) for _ in range(2)]
            dist.all_gather(both, new.contiguous())
            assert_same_bytes(*both)


@check
def clipping_takes_plain_parameters_and_those_of_several_meshes():
    """As torchtitan spreads a model: experts along one mesh, all others sharded along another; or
    not at all.
    """
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    for others in ("plain", "sharded"):
        alone = nn.Sequential(nn.Linear(H, H, dtype=BF16), mixture(recipes.BF16()))
        model = copy.deepcopy(alone)
        parallelize_module(model[1], whole["ep"], ExpertParallel(replicate=others == "plain"))
        assert isinstance(model[1].router.weight, DTensor) == (others == "plain")
        if others == "sharded":
            fully_shard(model[1].experts, mesh=whole["dp"])
            fully_shard(model, mesh=whole["dp", "ep"]._flatten("all"))
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            q.grad = torch.randn(q.shape, generator=seeded(q.numel())).bfloat16()
            p.grad = q.grad.clone()
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements, src_data_rank=None)
        with raises(RuntimeError, "mesh|mixed"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        want = norm_of(alone)
        for order in (2.0, torch.inf):
            norm = grouped.distributed.clip_grad_norm_(model.parameters(), 1e9, order)
            largest = max(p.grad.abs().max() for p in alone.parameters())
            wanted = want if order == 2.0 else largest
            assert type(norm) is torch.Tensor and (norm - wanted).abs() < 0.01 * wanted
        grouped.distributed.clip_grad_norm_(model.parameters(), 1.0)
        assert (norm_of(model) - 1).abs() < 0.01
        model[1].router.weight.grad *= torch.inf
        with raises(RuntimeError, "cannot be clipped"):
            grouped.distributed.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@check
def biases_of_the_ranks_stay_alike():
    """Counts are summed over the ranks; also where each process has a plain router, given its
    group.
    """
    for spread_over in (True, False):
        alone = mixture(recipes.BF16(), selection_bias=True, score="sigmoid")
        moe = copy.deepcopy(alone)
        group = None if spread_over else dist.group.WORLD
        if spread_over:
            parallelize_module(moe, MESH, ExpertParallel())
        for _ in range(3):
            for module, x, given in ((alone, tokens(), None), (moe, tokens()[of_rank()], group)):
                _, losses = module(x.detach(), losses=True)
                module.router.update_selection_bias(losses.tokens_per_expert, 0.1, group=given)
        assert alone.router.selection_bias.any()
        assert_same_bytes(moe.router.selection_bias, alone.router.selection_bias)


@check
def drops_add_up_over_calls():
    moe = parallelize_module(
        mixture(recipes.BF16(), selection_bias=True), MESH, ExpertParallel(capacity=1)
    )
    moe.router.selection_bias[:2] = 100.0
    for calls in (1, 2, 3):
        with torch.no_grad():
            moe(tokens())
        assert moe.exchange.dropped == calls * (2 * sum(TOKENS) - 1)


@check
def the_shared_expert_overlaps():
    """It computes while results travel, with the same bits; with a capacity nothing is read on the
    host.
    """
    for capacity, exchanges in ((None, 2), (18, 1)):
        found = []
        for overlap in (True, False):
            moe = parallelize_module(
                mixture(recipes.BF16()), MESH, ExpertParallel(capacity=capacity, overlap=overlap)
            )
            log = []
            for module, name in (
                (moe.exchange, "_start"),
                (moe.exchange, "_finish"),
                (moe.shared, "forward"),
            ):
                setattr(module, name, logged(log, getattr(module, name)))
            x = tokens().detach()[: TOKENS[RANK]].requires_grad_()
            with NothingRead() if capacity else contextlib.nullcontext():
                found.append(
                    (step(moe, x, torch.ones_like(x)), x.grad, full(moe.shared.down.weight.grad))
                )
            until = log[: log.index("forward")]
            assert (
                until[-1] == "_finish"
                if not overlap
                else until == [*["_start", "_finish"] * exchanges, "_start"]
            ), log
        assert_all_same(*found)


def logged(log, function):
    return lambda *args, **options: log.append(function.__name__) or function(*args, **options)


class NothingRead(TorchDispatchMode):
    """Values are not read on the host, nor shapes made of them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")
        assert func.overloadpacket.__name__ not in read
        return func(*args, **(kwargs or {}))


@check
def spread_experts_compile():
    part = of_rank()
    dy = torch.randn(sum(TOKENS), H).bfloat16()[part]
    found = []
    for compiled in (False, True):
        moe = mixture(recipes.BF16())
        moe.shared = None
        parallelize_module(moe, MESH, ExpertParallel(capacity=18, wire=grouped.FP8Block()))
        mine = tokens().detach()[part].requires_grad_()
        run = torch.compile(moe, fullgraph=True, backend="eager") if compiled else moe
        found.append((step(run, mine, dy), mine.grad, moe.experts.gate_up.weight.grad.to_local()))
    assert_all_same(*found)


@check
def tensor_parallel():
    for recipe, options in (
        (recipes.BF16(), {}),
        (recipes.BF16(), {"interleaved": True}),
        (recipes.FP8Block(), {"activation": "gelu"}),
    ):
        alone, moe = mixture(recipe, **options), mixture(recipe, **options)
        moe = parallelize_module(moe, MESH, ExpertTensorParallel())
        x, mine, dy = tokens(), tokens(), torch.randn(sum(TOKENS), H).bfloat16()
        y, got = step(alone, x, dy), step(moe, mine, dy)
        both = [torch.empty_like(got) for _ in range(2)]
        dist.all_gather(both, got)
        assert_same_bytes(*both)
        for a, b in (
            (got, y),
            (mine.grad, x.grad),
            (full(moe.router.weight.grad), alone.router.weight.grad),
        ):
            assert (a - b).float().norm() < 0.02 * b.float().norm()
        for layer in ("gate_up", "down"):
            a, b = (getattr(m.experts, layer).weight for m in (moe, alone))
            if type(a.placements[0]) is not Shard and torch.__version__ < "2.13":
                continue  # No full_tensor() there.
            assert_same_bytes(a.full_tensor().detach(), b.detach())
            assert (a.grad.full_tensor() - b.grad).float().norm() < 0.02 * b.grad.float().norm()


@check
def what_cannot_be_spread():
    plain, nvfp4, delayed = recipes.BF16(), grouped.NVFP4(), recipes.FP8Delayed()
    for message, make in (
        (
            r"wire must quantize each row by itself.*use NVFP4\(row_scaled=True\)",
            lambda: ExpertParallel(wire=nvfp4),
        ),
        (
            r"gradient_wire must .*use FP8Block\(\) instead",
            lambda: ExpertParallel(gradient_wire=SQUARE),
        ),
        ("wire must .*FP8Block.*MXFP8.*do$", lambda: ExpertParallel(wire=grouped.FP8())),
        ("capacity must be one positive number or two.*got 0", lambda: ExpertParallel(capacity=0)),
        ("mesh is missing", lambda: ExpertParallel()(mixture(plain))),
        ("must be a multiple of the mesh's 2", lambda: ExpertParallel(MESH)(MoE(H, I, 3, 2))),
        (
            "spread over processes already",
            lambda: ExpertParallel(MESH)(ExpertParallel(MESH)(mixture(plain))),
        ),
        (
            "single_parameter=True",
            lambda: ExpertParallel(MESH)(MoE(H, I, 4, 2, single_parameter=False)),
        ),
        ("keeps scales of all experts", lambda: ExpertParallel(MESH)(mixture(delayed))),
        (
            "biases have no tensor parallelism",
            lambda: ExpertTensorParallel(MESH)(MoE(H, I, 4, 2, bias=True)),
        ),
        (
            "cut between groups",
            lambda: ExpertTensorParallel(MESH)(with_low_experts(mixture(plain))),
        ),
        (
            "must be a multiple of 16 on each",
            lambda: ExpertTensorParallel(MESH)(MoE(H, 48, 4, 2, recipe=recipes.NVFP4())),
        ),
    ):
        with raises(ValueError, message):
            make()
    for capacity in ((3, 4, 5), (3,), (3, -1), [2, 0]):
        with raises(ValueError, "capacity must be one positive number or two"):
            ExpertParallel(capacity=capacity)
    for capacity in (True, (3, True), 2.0, (3, 4.0), "34", torch.tensor([3, 4])):
        with raises(TypeError, "capacity must be an int or a tuple"):
            ExpertParallel(capacity=capacity)
    with raises(TypeError, "experts of torchtitan"):
        ExpertParallel(MESH)(nn.Linear(2, 2))


NAN, INF = torch.nan, torch.inf
#: Amaxes of six slots on each rank, and the largest of both by the rule.
AMAXES = [[1.0, 0.0, NAN, NAN, INF, 7.0], [4.0, 0.0, 3.0, NAN, 2.0, 0.0]]
LARGEST = [4.0, 0.0, 3.0, 0.0, INF, 7.0]


def updated(row, **options):
    history, scale = torch.zeros(3, 6), torch.ones(6)
    history[0] = torch.tensor(row)
    grouped.delayed_scaling_update(history, scale, E4M3, **options)
    return history, scale


@check
def delayed_scaling():
    """Both take the largest amaxes; where the second was given 0, its row 0 counts, which is 9."""
    given = [max(a, 9.0) if b == 0 else c for a, b, c in zip(*AMAXES, LARGEST, strict=True)]
    mine = AMAXES[RANK]
    assert_all_same(updated(mine, group=dist.group.WORLD), updated(LARGEST))
    row = [9.0] * 6 if RANK else mine
    assert_all_same(updated(row, amax=torch.tensor(mine), group=dist.group.WORLD), updated(given))
    recipe = recipes.FP8Delayed(history_length=3, amax_group=dist.group.WORLD)
    module = GroupedLinear(2, 32, 16, recipe=recipe, dtype=BF16)
    again = copy.deepcopy(module)
    for i in range(3):
        x = (torch.randn(20, 32) * 4.0 ** (i - RANK)).bfloat16()
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for leaf, run in zip(leaves, (module, whole_graph(again)), strict=True):
            y = run(leaf, [20, 20] if RANK else [8, 20])
            y.backward(torch.full_like(y, 2.0 ** (i + RANK)))
        assert_same_bytes(leaves[0].grad, leaves[1].grad)
        assert_same_buffers(again.state_dict(), module.state_dict())
    with raises(ValueError, "scale must have size 6"):
        grouped.delayed_scaling_update(
            torch.ones(3, 6), torch.ones(3), E4M3, group=dist.group.WORLD
        )
    for name, value in module.state_dict().items():
        if "scaling" in name:
            held = (
                value[1:] if "history" in name else value
            )  # Those of the last step are each rank's own.
            both = [torch.empty_like(held) for _ in range(2)]
            dist.all_gather(both, held)
            assert_same_bytes(*both, name)
            assert held.any()
            # The second group has rows in the first process alone.
            assert (
                name.split(".")[1] not in ("input_scale", "grad_output_scale") or held.ne(1).all()
            )


@check
def a_rank_that_does_not_come_or_dies():
    """An error that says so, no later than the group's timeout.

    The last check: one rank is gone then.
    """
    late = dist.new_group(timeout=datetime.timedelta(seconds=1))
    for group in (late, MESH.get_group()):
        dist.barrier()
        if RANK:
            if group is not late:
                leave()
            dist.barrier()
            continue
        exchange = Exchange(group, 4)
        start = time.perf_counter()
        routing = compute_routing(torch.tensor([[0, 2]]), 4)
        with raises(RuntimeError, "one of them is gone, or did not come before"):
            exchange.places(routing, torch.ones(1, 2))
        assert time.perf_counter() - start < 20
        if group is late:
            dist.barrier()


def leave():
    write(dict.fromkeys(CHECKS, "") | RESULTS)
    os._exit(0)


def write(results):
    (FOLDER / f"{RANK}.json").write_text(json.dumps(results))


def launch(module, folder):
    """Run the checks of ``module`` in two processes; their results are in ``folder``."""
    root = Path(__file__).parents[2]
    options = {
        "cwd": root,
        "env": os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        "text": True,
    }
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, "-m", module]
    processes = [
        subprocess.Popen([*command, str(rank), str(folder)], **options) for rank in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    return folder


def main():
    global RANK, FOLDER, MESH
    RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(str(FOLDER / "store"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=RANK, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    MESH = init_device_mesh("cpu", (2,))
    for name in sys.argv[3:] or CHECKS:
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            CHECKS[name]()
            RESULTS[name] = ""
        except Exception:
            RESULTS[name] = traceback.format_exc()
        print(RANK, name, f"{time.perf_counter() - start:.2f} s", RESULTS[name], flush=True)
        write(RESULTS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
