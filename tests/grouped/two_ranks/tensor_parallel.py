"""Tensor, sequence and pipeline parallelism against one process."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    PrepareModuleInputOutput,
    SequenceParallel,
    parallelize_module,
)

import grouped
from grouped import recipes
from grouped.nn import MoE
from grouped.parallel.expert_parallel import ExpertParallel, ExpertTensorParallel
from tests.helpers import BF16, assert_all_same, assert_same_bytes

from .models import (
    TOKENS,
    H,
    I,
    full,
    gather,
    gradients,
    local_rows,
    mixture,
    quantize_experts,
    step,
    tokens,
)
from .runner import check, world


@check
def tensor_parallel():
    """Both ranks have equal outputs, close to those of one process; weights have its bits."""
    for recipe, options in (
        (recipes.BF16(), {}),
        (recipes.BF16(), {"interleaved": True}),
        (recipes.FP8Block(), {"activation": "gelu"}),
    ):
        single, moe = mixture(recipe, **options), mixture(recipe, **options)
        moe = parallelize_module(moe, world.mesh, ExpertTensorParallel())
        x, local, dy = tokens(), tokens(), torch.randn(sum(TOKENS), H).bfloat16()
        y, got = step(single, x, dy), step(moe, local, dy)
        assert_same_bytes(*gather(got))
        for a, b in (
            (got, y),
            (local.grad, x.grad),
            (full(moe.router.weight.grad), single.router.weight.grad),
        ):
            assert (a - b).float().norm() < 0.02 * b.float().norm()
        for layer in ("gate_up", "down"):
            a, b = (getattr(m.experts, layer).weight for m in (moe, single))
            if type(a.placements[0]) is not Shard and torch.__version__ < "2.13":
                continue  # full_tensor() fails there.
            assert_same_bytes(a.full_tensor().detach(), b.detach())
            assert (a.grad.full_tensor() - b.grad).float().norm() < 0.02 * b.grad.float().norm()


@check
def parallel_mlp():
    """A ``GroupedMLP``, whose rows lie by expert on each rank, under both styles."""
    sizes, rows = torch.tensor([[3, 0, 4, 2], [2, 2, 0, 3]]), local_rows()
    x, dy = torch.randn(16, H).bfloat16(), torch.randn(16, H).bfloat16()
    # The order of both ranks' rows in one process: by expert.
    order = torch.repeat_interleave(torch.arange(4).repeat(2), sizes.flatten()).argsort(stable=True)
    mlp, all_offs = mixture(recipes.FP8Block()).experts, sizes.sum(0).cumsum(0)
    sorted_x = x[order].requires_grad_()
    mlp(sorted_x, all_offs).backward(dy[order])
    expected = [
        torch.empty_like(t).index_copy_(0, order, t)
        for t in (mlp(sorted_x, all_offs).detach(), sorted_x.grad)
    ]
    for style, index, offs, tolerance in (
        (
            ExpertParallel(wire=grouped.FP8Block(), capacity=16),
            torch.arange(16)[rows],
            sizes[world.rank].cumsum(0),
            0,
        ),
        (ExpertTensorParallel(), order, all_offs, 0.02),
    ):
        local = x[index].requires_grad_()
        got = parallelize_module(copy.deepcopy(mlp), world.mesh, style)(local, offs)
        got.backward(dy[index])
        for want, t in zip(expected, (got, local.grad), strict=True):
            assert (want[index] - t).norm() <= tolerance * want.norm()


@check
def sequence_parallel():
    """PyTorch's styles around a mixture.

    For tensor parallelism the mixture takes all tokens, for expert parallelism those of its rank.
    """
    dy = torch.randn(2, 8, H).bfloat16()
    for style, layout in ((ExpertTensorParallel(), Replicate()), (ExpertParallel(), Shard(1))):
        single = nn.Sequential(nn.RMSNorm(H, dtype=BF16), mixture(recipes.BF16()))
        block = parallelize_module(
            copy.deepcopy(single), world.mesh, {"0": SequenceParallel(), "1": style}
        )
        x = tokens().detach().view(2, 8, H).requires_grad_()
        sharded = distribute_tensor(x.detach(), world.mesh, [Shard(1)]).requires_grad_()
        with pytest.raises(TypeError, match="x is a DTensor.*PrepareModuleInputOutput"):
            block(sharded)
        conversion = PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(layout,),
            use_local_input=True,
            output_layouts=(layout,),
            desired_output_layouts=(Shard(1),),
            use_local_output=False,
        )
        parallelize_module(block, world.mesh, {"1": conversion})
        y, got = single(x), block(sharded)
        y.backward(dy)
        got.backward(distribute_tensor(dy, world.mesh, [Shard(1)]))
        assert got.placements == (Shard(1),)
        for a, b in (
            (got, y),
            (sharded.grad, x.grad),
            (block[0].weight.grad, single[0].weight.grad),
        ):
            assert (full(a) - b).norm() < 0.01 * b.norm()


@check
def pipeline_parallel():
    """Stages of modules; for plain weights also stages that PyTorch cuts from a traced model."""
    dy = torch.randn(16, H).bfloat16()
    for train in (None, False, True):
        single = nn.Sequential(
            *(quantize_experts(mixture(recipes.FP8Block()), train) for _ in range(2))
        )
        module = copy.deepcopy(single)[world.rank]
        stages = [PipelineStage(module, world.rank, 2, torch.device("cpu"))]
        if train is None:
            traced = pipeline(
                copy.deepcopy(single), (tokens()[:8],), split_spec={"1": SplitPoint.BEGINNING}
            )
            stages.append(traced.build_stage(world.rank, torch.device("cpu")))
        for x, dx in zip(tokens().chunk(2), dy.chunk(2), strict=True):
            single(x).backward(dx)
        for stage in stages:
            schedule = ScheduleGPipe(
                stage, 2, loss_fn=lambda y, t: (y * t).float().sum(), scale_grads=False
            )
            inputs = () if world.rank else (tokens(),)
            schedule.step(*inputs, target=dy if world.rank else None)
            assert_all_same(gradients(stage.submod), gradients(single[world.rank]))


@check
def unsupported_tensor_parallel_modules():
    """Biases, quantized weights and odd sizes raise errors that say why."""
    parallel = ExpertTensorParallel(world.mesh)
    with pytest.raises(ValueError, match="biases have no tensor parallelism"):
        parallel(MoE(H, I, 4, 2, bias=True))
    with pytest.raises(ValueError, match="between groups"):
        parallel(quantize_experts(mixture(recipes.BF16())))
    with pytest.raises(ValueError, match="must be a multiple of 16 on each"):
        parallel(MoE(H, 48, 4, 2, recipe=recipes.NVFP4()))
