"""Optimizers, gradient clipping, distributed checkpoints, and scales that ranks agree on."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import grouped
from cute_kernels import backend
from grouped import recipes
from grouped.parallel.expert_parallel import ExpertParallel, ExpertTensorParallel
from tests.grouped.cases import assert_same_tensor
from tests.helpers import BF16, assert_same_bytes, seeded_generator

from .models import (
    OFFS,
    TOKENS,
    H,
    full,
    gather,
    gradient_norm,
    layer_input,
    linear_layer,
    local_rows,
    mixture,
    plain_weight,
    quantized,
    step,
    tokens,
)
from .runner import check, world


@check
def fp32_masters():
    """A quantized DTensor follows an fp32 master by ``copy_``."""
    master = nn.Parameter(distribute_tensor(plain_weight().float(), world.mesh, [Shard(0)]))
    weight = nn.Parameter(distribute_tensor(quantized(), world.mesh, [Shard(0)]), False)
    optimizer = torch.optim.SGD([master], lr=1e-3)
    for _ in range(3):
        master.grad = torch.ones_like(master)
        optimizer.step()
        weight.copy_(master)
    want = plain_weight().float()
    for _ in range(3):
        want -= 1e-3
    assert_same_tensor(
        weight.full_tensor(), grouped.quantize(want.bfloat16(), grouped.NVFP4(), columnwise=True)
    )


@check
def lost_steps_warn():
    p = nn.Parameter(distribute_tensor(quantized(shift=8.0), world.mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(p.shape, dtype=BF16), world.mesh, [Shard(0)])
    with pytest.warns(UserWarning, match="changed nothing"):
        torch.optim.SGD([p], lr=1e-6).step()


@check
def distributed_checkpoints():
    """DCP saves and loads shards; ``test_distributed`` loads them in one process."""
    module = fully_shard(linear_layer(None, recipes.NVFP4(), False), mesh=world.mesh)
    odd = quantized(groups=3)
    state = {
        "layer": module.state_dict(),
        "odd": distribute_tensor(odd.clone(), world.mesh, [Shard(0)]),
    }
    dcp.async_save(state, checkpoint_id=world.folder / "saved").result()
    for tensor in (state["layer"]["weight"], state["odd"]):
        tensor.to_local().zero_()
    plain = {"odd": torch.zeros_like(odd)}
    dcp.load(state, checkpoint_id=world.folder / "saved")
    assert_same_tensor(state["layer"]["weight"].full_tensor(), quantized())
    assert_same_tensor(state["odd"].full_tensor(), odd)
    dcp.load(plain, checkpoint_id=world.folder / "saved")
    assert_same_bytes(plain["odd"], odd.dequantize())
    dist.barrier()


@check
def optimizer_states():
    """Masters and moments are DTensors, so another number of processes can load all shards."""

    def layer_and_optimizer(mesh):
        """Return a layer, sharded along ``mesh`` if there is one, and its optimizer."""
        module = linear_layer(None, recipes.NVFP4(), True)
        if mesh is not None:
            fully_shard(module, mesh=mesh)
        masters = {module.weight: plain_weight()}
        return module, grouped.optim.AdamW(
            module.parameters(), lr=0.1, masters=masters, master_weights=True
        )

    def train(module, optimizer, steps):
        for _ in range(steps):
            module(layer_input(), OFFS).square().sum().backward()
            with backend("emulated:sm_90a"):
                optimizer.step()
            optimizer.zero_grad()
        return [full(t.detach()) for t in (module.weight, module.bias)]

    def state_of(module, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))

    saved = layer_and_optimizer(world.mesh)
    train(*saved, steps=2)
    dcp.save(state_of(*saved), checkpoint_id=world.folder / "trained")
    expected_weight, expected_bias = train(*saved, steps=1)
    for mesh, no_dist in ((world.mesh, False), (None, True)):
        loaded = layer_and_optimizer(mesh)
        state = state_of(*loaded)
        dcp.load(state, checkpoint_id=world.folder / "trained", no_dist=no_dist)
        set_state_dict(
            *loaded, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        weight, bias = train(*loaded, steps=1)
        assert_same_tensor(weight, expected_weight)
        assert_same_bytes(bias, expected_bias)
    dist.barrier()


@check
def clipping_and_steps_of_all_parameters():
    """PyTorch's calls take the parameters of router, shared and distributed experts together."""
    dy = torch.randn(sum(TOKENS), H).bfloat16()

    def adamw(**options):
        return lambda moe: torch.optim.AdamW(moe.parameters(), **options)

    for style, options, make_optimizer in (
        (ExpertParallel(), {"selection_bias": True}, adamw(lr=0.01, foreach=True)),
        (ExpertParallel(capacity=18), {"bias": True, "router_bias": True}, adamw(fused=True)),
        (ExpertTensorParallel(), {}, adamw(lr=0.01, foreach=True)),
        (ExpertParallel(), {}, lambda moe: grouped.optim.AdamW(moe.parameters(), lr=0.01)),
    ):
        single = mixture(recipes.BF16(), **options)
        moe = parallelize_module(copy.deepcopy(single), world.mesh, style)
        rows = local_rows() if type(style) is ExpertParallel else slice(None)
        step(single, tokens(), dy)
        step(moe, tokens().detach()[rows].requires_grad_(), dy[rows])
        want = gradient_norm(single)
        for norm in (
            torch.nn.utils.clip_grad_norm_(moe.parameters(), 1e9).full_tensor(),
            grouped.parallel.clip_grad_norm_(moe.parameters(), want.item() / 2),
        ):
            assert (norm - want).abs() < 0.01 * want
        assert (gradient_norm(moe) - want / 2).abs() < 0.01 * want
        before = [full(p.detach()).clone() for p in moe.parameters()]
        make_optimizer(moe).step()
        for old, p in zip(before, moe.parameters(), strict=True):
            new = full(p.detach())
            assert not torch.equal(old, new)
            assert_same_bytes(*gather(new))


@check
def clipping_over_several_meshes():
    """A model as torchtitan parallelizes it: experts along one mesh, the others along another.

    The other parameters may also be plain.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    for is_sharded in (False, True):
        single = nn.Sequential(nn.Linear(H, H, dtype=BF16), mixture(recipes.BF16()))
        model = copy.deepcopy(single)
        parallelize_module(model[1], mesh["ep"], ExpertParallel(replicate=not is_sharded))
        assert isinstance(model[1].router.weight, DTensor) != is_sharded
        if is_sharded:
            fully_shard(model[1].experts, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp", "ep"]._flatten("all"))
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            q.grad = torch.randn(q.shape, generator=seeded_generator(q.numel())).bfloat16()
            p.grad = q.grad.clone()
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements, src_data_rank=None)
        with pytest.raises(RuntimeError, match="mesh|mixed"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms = {
            2.0: gradient_norm(single),
            torch.inf: max(p.grad.abs().max() for p in single.parameters()),
        }
        for order, want in norms.items():
            norm = grouped.parallel.clip_grad_norm_(model.parameters(), 1e9, order)
            assert type(norm) is torch.Tensor and (norm - want).abs() < 0.01 * want
        grouped.parallel.clip_grad_norm_(model.parameters(), 1.0)
        assert (gradient_norm(model) - 1).abs() < 0.01
        model[1].router.weight.grad *= torch.inf
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            grouped.parallel.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
