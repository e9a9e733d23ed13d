"""DistributedDataParallel and FSDP2, alone and around expert parallelism."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import clip_grad_norm_ as torch_clip

import grouped
from grouped import recipes
from grouped.nn import GroupedLinear
from grouped.parallel import clip_grad_norm_
from grouped.parallel.expert_parallel import ExpertParallel
from tests.grouped.cases import assert_same_tensor
from tests.helpers import BF16, F32, assert_all_same, assert_same_bytes

from .models import (
    GROUPS,
    OFFS,
    SQUARE_FP8,
    TOKENS,
    H,
    K,
    N,
    assert_same_step,
    full,
    gradients,
    layer_input,
    linear_layer,
    local_rows,
    mixture,
    plain_weight,
    quantize_experts,
    quantized,
    tokens,
)
from .runner import check, world


@check
def data_parallel():
    """DDP broadcasts the bytes of rank 0, and sums gradients."""
    for make, train in ((quantized, False), (quantized, True), (plain_weight, True)):
        module = linear_layer(grouped.NVFP4(), recipes.NVFP4(), train)
        module.weight = nn.Parameter(make(shift=world.rank), requires_grad=train)
        # The gain lies in the bucket of the codes.
        module.gain = nn.Parameter(torch.full((3,), float(world.rank)), False)
        parallel = nn.parallel.DistributedDataParallel(module)
        single = linear_layer(None, recipes.NVFP4(), train)
        single.weight = nn.Parameter(make(), train)
        if make is quantized:
            assert_same_tensor(module.weight.data, quantized())
        assert not module.gain.any()
        x, y = layer_input(), layer_input()
        parallel(x, OFFS).sum().backward()
        single(y, OFFS).sum().backward()
        assert_all_same([x.grad, *gradients(module)], [y.grad, *gradients(single)])


@check
def fully_sharded():
    """FSDP2 gathers quantized weights as bytes and trains them in place, with equal bits."""
    for fmt, recipe, train, reshard in (
        (None, recipes.BF16(), False, True),
        (None, recipes.NVFP4(), True, True),
        (None, recipes.NVFP4(), True, False),
        (grouped.FP8(), recipes.FP8Current(), True, True),
        (SQUARE_FP8, recipes.FP8Block(), True, True),
    ):
        single = linear_layer(fmt, recipe, train)
        module = fully_shard(copy.deepcopy(single), mesh=world.mesh, reshard_after_forward=reshard)
        assert module.weight.to_local().num_groups == GROUPS // 2
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, single)]
        for _ in range(2):
            inputs = layer_input(), layer_input()
            outputs = [m(x, OFFS) for m, x in zip((module, single), inputs, strict=True)]
            assert_same_bytes(*(y.detach() for y in outputs))
            for y in outputs:
                y.sum().backward()
            assert_same_bytes(inputs[0].grad, inputs[1].grad)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert_same_tensor(module.weight.full_tensor(), single.weight.data)


@check
def fully_sharded_under_a_mixed_precision_policy():
    """Gradients of one FSDP unit have one dtype, the fp32 of the parameters."""
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    module = linear_layer(None, recipes.NVFP4(), True).float()
    fully_shard(module, mesh=world.mesh, mp_policy=policy)
    module(layer_input(), OFFS).sum().backward()
    assert module.weight.grad.dtype == module.bias.grad.dtype == F32


@check
def fully_sharded_groups_must_divide():
    """FSDP2 shards whole groups, so the ranks must divide their number."""
    module = GroupedLinear(3, K, N, bias=False)
    module.weight = nn.Parameter(quantized(groups=3), False)
    fully_shard(module, mesh=world.mesh)
    with pytest.raises(ValueError, match="their number, 3, must be a multiple of its 2 ranks"):
        module(layer_input(), [3, 7, 10])


@check
def fully_sharded_payload_is_codes_and_scales():
    weight = grouped.quantize(torch.randn(2, 128, 256), grouped.NVFP4())
    payload, _ = weight.fsdp_pre_all_gather(world.mesh, weight.shape, None, None, None)
    assert sum(t.nbytes for t in payload) == 2 * (128 * 256 * (1 / 2 + 1 / 16) + 4)


@check
def fully_sharded_mixtures():
    """Experts form a unit of their own, in which p stays fp32; a unit per layer is refused."""
    policy, dy = MixedPrecisionPolicy(param_dtype=BF16), torch.randn(sum(TOKENS), H).bfloat16()
    for recipe, train in (
        (recipes.BF16(), None),
        (recipes.BF16(), False),
        (recipes.NVFP4RowScaled(), True),
    ):
        single = quantize_experts(mixture(recipe), train)
        sharded = copy.deepcopy(single)
        for module in (sharded.experts, sharded):
            fully_shard(module, mesh=world.mesh, mp_policy=policy)
        assert type(sharded.experts.down.weight.to_local()) is type(single.experts.down.weight.data)
        x = assert_same_step(single, sharded, slice(None), dy)
        if train is not False:
            assert_same_bytes(*(full(m.experts.down.weight.grad) for m in (sharded, single)))
    fully_shard(single.experts.down, mesh=world.mesh)
    with pytest.raises(RuntimeError, match="not called: shard, or hook into, the experts"):
        single(x)


@check
def fully_sharded_expert_parallel():
    """Expert parallelism spans one dimension of a mesh and FSDP2 the other; gradients are means.

    The mean is over all ranks.
    """
    dy = torch.randn(sum(TOKENS), H).bfloat16()
    for sizes in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep"))
        for train in (None, False, True):
            single = quantize_experts(mixture(recipes.BF16()), train)
            moe = parallelize_module(copy.deepcopy(single), mesh["ep"], ExpertParallel())
            fully_shard(moe.experts, mesh=mesh["dp"]).set_gradient_divide_factor(2)
            assert_same_step(single, moe, local_rows(), dy)
            if train is not False:
                got, want = (full(m.experts.down.weight.grad).float() for m in (moe, single))
                assert (2 * got - want).norm() <= 0.01 * want.norm()


class Block(nn.Module):
    """A dense layer and a mixture, as a transformer's block."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(H, H, dtype=BF16)
        self.moe = mixture(recipes.BF16())

    def forward(self, x):
        return x + self.moe(x + self.dense(x))


def blocks():
    """Return a model of two blocks and a dense layer, equal on both ranks."""
    torch.manual_seed(8)
    return nn.Sequential(Block(), Block(), nn.Linear(H, 16, dtype=BF16))


def mean_loss(model, x):
    """Return the loss of ``x`` over the number of all ranks' tokens."""
    return model(x).float().square().sum() / sum(TOKENS)


def assert_gradients_of_one_process(model, factor=1):
    """Compare all gradients of a step, and their norm, with one process that has all tokens.

    Args:
        model: The distributed ``blocks``.
        factor: Factor of the loss of each rank.
    """
    single = blocks()
    mean_loss(single, tokens().detach()).backward()
    (factor * mean_loss(model, tokens().detach()[local_rows()])).backward()
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        got, want = full(p.grad).float(), q.grad.float()
        assert (got - want).norm() <= 0.01 * want.norm(), name
    norms = (f(m.parameters(), 1.0) for f, m in ((clip_grad_norm_, model), (torch_clip, single)))
    torch.testing.assert_close(*(norm.float() for norm in norms), rtol=0.01, atol=0.0)


def sum_gradients(*modules):
    """Make FSDP units sum gradients instead of averaging them."""
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


@check
def models_with_expert_parallel_mixtures():
    """Gradients of a loss over the number of all tokens are those of one process, everywhere."""
    model = blocks()
    for block in model[:2]:
        parallelize_module(block.moe, world.mesh, ExpertParallel())
    ignored = {p for block in model[:2] for p in block.moe.parameters()}
    for unit in (*model[:2], model):
        fully_shard(unit, mesh=world.mesh, ignored_params=ignored)
        sum_gradients(unit)
    assert_gradients_of_one_process(model)


@check
def models_with_expert_parallel_and_sharded_mixtures():
    """The same, if FSDP2 also shards the experts along the other dimension of the mesh.

    FSDP2 sums gradients, or averages them over all ranks.
    """
    for sizes, averages in (((1, 2), False), ((2, 1), False), ((1, 2), True), ((2, 1), True)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep"))
        model = blocks()
        for block in model[:2]:
            parallelize_module(block.moe, mesh["ep"], ExpertParallel(replicate=False))
            fully_shard(block.moe.experts, mesh=mesh["dp"]).set_gradient_divide_factor(2.0)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if not averages:
            sum_gradients(*(block.moe.experts for block in model[:2]), *model[:2], model)
        assert_gradients_of_one_process(model, factor=2 if averages else 1)


@check
def models_with_expert_parallel_mixtures_under_data_parallelism():
    """DDP averages, so hooks divide the sums of the mixtures, and the loss counts twice."""
    model = blocks()
    for block in model[:2]:
        parallelize_module(block.moe, world.mesh, ExpertParallel())
        for p in block.moe.parameters():
            p.register_hook(lambda gradient: gradient / 2)
        block.dense = nn.parallel.DistributedDataParallel(block.dense)
    model[2] = nn.parallel.DistributedDataParallel(model[2])
    assert_gradients_of_one_process(model, factor=2)
