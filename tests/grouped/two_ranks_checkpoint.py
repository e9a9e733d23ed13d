"""Checks of checkpoints in two processes, which ``test_checkpoint_sharded`` starts."""

import copy
import importlib

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import grouped
from grouped import checkpoint, recipes
from grouped.checkpoint import files as ckpt_files
from grouped.nn import GroupedMLP, MoE
from grouped.parallel.expert_parallel import ExpertParallel, ExpertTensorParallel
from tests.grouped import two_ranks as ranks
from tests.grouped.cases import assert_same_tensor
from tests.helpers import BF16, assert_same_bytes, raises, seeded

load_module = importlib.import_module("grouped.checkpoint.load")
H, I, EXPERTS = 128, 128, 4  # noqa: E741
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def mixture(seed, dtype=BF16):
    torch.manual_seed(seed)
    return MoE(H, I, EXPERTS, 2, recipe=recipes.BF16(), dtype=dtype)


def plain_files(moe, stacked):
    """Tensors of a bf16 checkpoint."""
    gate_up, down = moe.experts.gate_up.weight.detach(), moe.experts.down.weight.detach()
    tensors = {"router.weight": moe.router.weight.detach()}
    if stacked:
        return tensors | {"experts.gate_up_proj": gate_up, "experts.down_proj": down}
    for g in range(EXPERTS):
        gate, up = gate_up[g].chunk(2)
        named = {"gate_proj": gate, "up_proj": up, "down_proj": down[g]}
        tensors |= {f"experts.{g}.{name}.weight": t.clone() for name, t in named.items()}
    return tensors


def folder(name):
    """Written by the first rank: a layout, or plain; of one tensor an expert, or stacked."""
    path = ranks.FOLDER / name
    layout, stacked = name.split("/")[0], name.endswith("stacked")
    if not ranks.RANK and not path.exists():
        path.mkdir(parents=True)
        if layout == "plain":
            save_file(plain_files(mixture(0), stacked), path / "model.safetensors")
        else:
            checkpoint.save(mixture(0), path, layout, stacked=stacked)
    dist.barrier()
    return path


FOLDERS = ("plain/apart", "plain/stacked", "modelopt/apart", "modelopt/stacked", "deepseek/apart")


def in_groups(moe):
    for module in (moe.experts.gate_up, moe.experts.down):
        for name, p in list(module.named_parameters()):
            setattr(
                module,
                name,
                nn.Parameter(
                    distribute_tensor(p.detach(), ranks.MESH, [Shard(0)]), p.requires_grad
                ),
            )
    return moe


def fully(moe):
    fully_shard(moe.experts, mesh=ranks.MESH)
    return fully_shard(moe, mesh=ranks.MESH)


def alone(moe):
    fully_shard(moe.experts, mesh=ranks.MESH)
    return moe


def both(sizes):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep"))

    def spread(moe):
        parallelize_module(moe, mesh["ep"], ExpertParallel())
        fully_shard(moe.experts, mesh=mesh["dp"])
        return moe

    return spread


def expert_parallel(moe):
    return parallelize_module(moe, ranks.MESH, ExpertParallel())


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def tokens(seed=11):
    return torch.randn(12, H, generator=seeded(seed)).bfloat16().requires_grad_()


def step(moe):
    x = tokens()
    y = moe(x)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad


def compare(name, wrap, is_called):
    path = folder(name)
    want, moe = mixture(1), wrap(mixture(2))
    alike = checkpoint.load(want, path)
    if is_called:
        step(moe)
        moe.zero_grad()
    report = checkpoint.load(moe, path)
    assert report.layouts == alike.layouts
    if not report.layouts:  # Weights that are loaded quantized have no copy for gradients.
        for got, y in zip(step(moe), step(want), strict=True):
            assert_same_bytes(got, y)
    for layer in ("gate_up", "down"):
        got, weight = (full(getattr(m.experts, layer).weight.detach()) for m in (moe, want))
        if report.layouts:
            assert_same_tensor(got, weight)
        else:
            assert_same_bytes(got, weight)
    assert_same_bytes(full(moe.router.weight.detach()), want.router.weight.detach())
    with torch.no_grad():
        assert_same_bytes(moe(tokens()), want(tokens()))


@check
def expert_parallelism():
    for name in FOLDERS:
        for is_called in (False, True):
            compare(name, expert_parallel, is_called)


@check
def the_experts_fully_sharded():
    for name in FOLDERS:
        for is_called in (False, True):
            compare(name, alone, is_called)


@check
def all_fully_sharded():
    for name in FOLDERS:
        for is_called in (False, True):
            compare(name, fully, is_called)


@check
def expert_parallelism_and_fully_sharded():
    for sizes in ((1, 2), (2, 1)):
        for name in FOLDERS[:4:2]:
            for is_called in (False, True):
                compare(name, both(sizes), is_called)


class CountingReader(ckpt_files.Reader):
    """Records what is read."""

    readers = []

    def __init__(self, folder):
        super().__init__(folder)
        self.names = set()
        self.readers.append(self)

    def _read(self, name, read):
        self.names.add(name)
        return super()._read(name, read)


@check
def only_the_experts_of_a_rank_are_read():
    for name in FOLDERS:
        path = folder(name)
        CountingReader.readers.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load_module, "Reader", CountingReader)
            for wrap in (lambda moe: moe, expert_parallel, fully, in_groups):
                checkpoint.load(wrap(mixture(2)), path)
        whole, *parts = CountingReader.readers
        first = 2 * ranks.RANK
        for part in parts:
            assert part.bytes_read <= 0.51 * whole.bytes_read + EXPERTS * H * 2, name
            read = {
                n.split(".")[1]
                for n in part.names
                if n.startswith("experts.") and n.split(".")[1].isdigit()
            }
            assert read == ({str(first), str(first + 1)} if name.endswith("apart") else set())


@check
def weights_that_are_sharded_otherwise():
    """Parts of the inner dimension of all experts: plain weights are loaded, quantized ones
    refused.
    """
    for name in FOLDERS:
        path = folder(name)
        if name.startswith("plain"):
            continue
        moe = parallelize_module(mixture(2), ranks.MESH, ExpertTensorParallel())
        refused(moe, path, "cut between groups only")
    for name in ("plain/apart", "plain/stacked"):
        path, want = folder(name), mixture(1)
        checkpoint.load(want, path)
        moe = parallelize_module(mixture(2), ranks.MESH, ExpertTensorParallel())
        twin = parallelize_module(copy.deepcopy(want), ranks.MESH, ExpertTensorParallel())
        checkpoint.load(moe, path)
        for a, b in zip(moe.parameters(), twin.parameters(), strict=True):
            assert_same_bytes(ranks_part(a), ranks_part(b))
        for got, y in zip(step(moe), step(twin), strict=True):
            assert_same_bytes(got, y)


def ranks_part(p):
    return p.detach().to_local() if isinstance(p, DTensor) else p.detach()


def refused(moe, path, message):
    before = [ranks_part(p).clone() for p in moe.parameters()]
    held = list(moe.parameters())
    with raises(ValueError, message):
        checkpoint.load(moe, path)
    for p, old, values in zip(moe.parameters(), held, before, strict=True):
        assert p is old
        if isinstance(values, grouped.GroupedTensor):
            assert_same_tensor(ranks_part(p), values)
        else:
            assert_same_bytes(ranks_part(p), values)


@check
def groups_that_the_ranks_do_not_divide():
    torch.manual_seed(0)
    source, path = GroupedMLP(3, H, I, dtype=BF16), ranks.FOLDER / "uneven"
    if not ranks.RANK:
        checkpoint.save(source, path / "low", "modelopt")
        path.joinpath("plain").mkdir()
        tensors = {
            "experts.gate_up_proj": source.gate_up.weight.detach(),
            "experts.down_proj": source.down.weight.detach(),
        }
        save_file(tensors, path / "plain/model.safetensors")
    dist.barrier()
    for is_called in (False, True):
        mlp = fully_shard(GroupedMLP(3, H, I, dtype=BF16), mesh=ranks.MESH)
        if is_called:
            mlp(tokens(), [4, 8, 12]).sum().backward()
        refused(mlp, path / "low", "a multiple of the ranks")
        checkpoint.load(mlp, path / "plain", rename={"^$": "experts"})
        for a, b in zip(mlp.parameters(), source.parameters(), strict=True):
            assert_same_bytes(a.full_tensor().detach(), b.detach())
    # Without FSDP, ranks may have other numbers of groups, or none.
    for groups in (3, 1):
        low, whole = path / f"low-{groups}", GroupedMLP(groups, H, I, dtype=BF16)
        if not ranks.RANK:
            checkpoint.save(whole, low, "modelopt")
        dist.barrier()
        checkpoint.load(whole, low)
        mlp = GroupedMLP(groups, H, I, dtype=BF16)
        for module in (mlp.gate_up, mlp.down):
            module.weight = nn.Parameter(
                distribute_tensor(module.weight.detach(), ranks.MESH, [Shard(0)])
            )
        checkpoint.load(mlp, low)
        for a, b in zip(mlp.parameters(), whole.parameters(), strict=True):
            assert a.to_local().num_groups == (2 - ranks.RANK if groups == 3 else 1 - ranks.RANK)
            assert_same_tensor(a.full_tensor(), b.data)


@check
def a_fault_that_one_rank_sees():
    """All raise, and nothing is changed."""
    path = ranks.FOLDER / "damaged"
    if not ranks.RANK:
        checkpoint.save(mixture(0), path, "modelopt")
        tensors = load_file(path / "model.safetensors")
        tensors["experts.3.down_proj.weight_scale"].view(torch.uint8)[3, 2] = 0x7F
        save_file(tensors, path / "model.safetensors")
    dist.barrier()
    for wrap in (expert_parallel, fully, in_groups):
        message = (
            r"3.down_proj.weight_scale in .* has nan"
            if ranks.RANK
            else "another rank cannot load its part"
        )
        refused(wrap(mixture(2)), path, message)


@check
def weights_that_are_quantized_and_sharded_already():
    low = folder("modelopt/apart")
    for wrap in (expert_parallel, alone, fully):
        for name in FOLDERS:
            for is_called in (False, True):
                moe, want = mixture(2), mixture(1)
                for m in (moe, want):
                    checkpoint.load(m, low)
                moe = wrap(moe)
                with torch.no_grad():
                    if is_called:
                        moe(tokens())
                    for m in (moe, want):
                        checkpoint.load(m, folder(name))
                    assert_same_bytes(moe(tokens()), want(tokens()))


@check
def policies_and_states_of_fully_shard():
    """fp32 parameters and a policy; parameters that are gathered when load is called; experts
    alone.
    """
    for name in FOLDERS[1:4]:
        path, want = folder(name), mixture(1, torch.float32)
        checkpoint.load(want, path)
        moe = mixture(2, torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=BF16)
        fully_shard(moe.experts, mesh=ranks.MESH, mp_policy=policy, reshard_after_forward=False)
        fully_shard(moe, mesh=ranks.MESH, mp_policy=policy, reshard_after_forward=False)
        with torch.no_grad():
            y = moe(tokens().detach())
            assert not isinstance(moe.router.weight, DTensor)
            checkpoint.load(moe, path)
            got = moe(tokens().detach())
        assert not torch.equal(got, y)
        for layer in ("gate_up", "down"):
            a, b = (getattr(m.experts, layer).weight for m in (moe, want))
            if isinstance(b.data, grouped.GroupedTensor):
                assert_same_tensor(a.data._apply_inner(lambda t: t, torch.float32), b.data)
        moe = fully(mixture(2))
        step(moe)
        report = checkpoint.load(moe.experts, path, rename={"^": "experts"}, strict=False)
        assert report.unexpected == ["router.weight"]


@check
def other_parameters_that_are_sharded():
    torch.manual_seed(0)
    source, path = (
        nn.Sequential(mixture(0), nn.Linear(H, 64), nn.Linear(64, H)),
        ranks.FOLDER / "dense",
    )
    if not ranks.RANK:
        checkpoint.save(source, path, "modelopt")
    dist.barrier()
    model = nn.Sequential(mixture(1), nn.Linear(H, 64), nn.Linear(64, H))
    parallelize_module(
        model, ranks.MESH, {"0": ExpertParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
    )
    checkpoint.load(model, path)
    for a, b in zip(model[1:].parameters(), source[1:].parameters(), strict=True):
        assert isinstance(a, DTensor)
        assert_same_bytes(a.full_tensor().detach(), b.detach())


if __name__ == "__main__":
    ranks.CHECKS.clear()
    ranks.CHECKS.update(CHECKS)
    ranks.main()
