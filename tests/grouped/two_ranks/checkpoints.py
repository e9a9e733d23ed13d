"""``grouped.checkpoint.load`` into sharded modules, against a load in one process."""

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
from tests.grouped.cases import assert_same_tensor
from tests.helpers import BF16, assert_same_bytes, seeded_generator

from .models import full, sharded_copy
from .runner import check, world

load_module = importlib.import_module("grouped.checkpoint.load")
H, I, EXPERTS = 128, 128, 4  # noqa: E741
#: Names of folders: the layout, or plain; and one tensor per expert, or stacked.
FOLDERS = ("plain/apart", "plain/stacked", "modelopt/apart", "modelopt/stacked", "deepseek/apart")


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
    """Return the folder of that name; rank 0 writes it first."""
    path = world.folder / name
    layout, stacked = name.split("/")[0], name.endswith("stacked")
    if not world.rank and not path.exists():
        path.mkdir(parents=True)
        if layout == "plain":
            save_file(plain_files(mixture(0), stacked), path / "model.safetensors")
        else:
            checkpoint.save(mixture(0), path, layout, stacked=stacked)
    dist.barrier()
    return path


def shard_groups(moe):
    """Shard the experts' parameters between groups, as plain DTensors."""
    for name in ("gate_up", "down"):
        layer = sharded_copy(
            getattr(moe.experts, name),
            lambda p: distribute_tensor(p, world.mesh, [Shard(0)]),
        )
        setattr(moe.experts, name, layer)
    return moe


def shard_fully(moe):
    fully_shard(moe.experts, mesh=world.mesh)
    return fully_shard(moe, mesh=world.mesh)


def shard_experts_fully(moe):
    fully_shard(moe.experts, mesh=world.mesh)
    return moe


def shard_in_both_ways(sizes):
    """Return a function that applies expert parallelism and FSDP2 along a mesh of ``sizes``."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep"))

    def shard(moe):
        parallelize_module(moe, mesh["ep"], ExpertParallel())
        fully_shard(moe.experts, mesh=mesh["dp"])
        return moe

    return shard


def shard_experts(moe):
    return parallelize_module(moe, world.mesh, ExpertParallel())


def tokens(seed=11):
    return torch.randn(12, H, generator=seeded_generator(seed)).bfloat16().requires_grad_()


def step(moe):
    """Return the output and the gradient of the tokens."""
    x = tokens()
    y = moe(x)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad


def compare(name, shard, is_called):
    """Load the folder ``name`` into a plain mixture and into one under ``shard``.

    If ``is_called``, the sharded mixture has run a step before.
    """
    path = folder(name)
    want, moe = mixture(1), shard(mixture(2))
    expected_report = checkpoint.load(want, path)
    if is_called:
        step(moe)
        moe.zero_grad()
    report = checkpoint.load(moe, path)
    assert report.layouts == expected_report.layouts
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


def compare_all(shard, names=FOLDERS):
    for name in names:
        for is_called in (False, True):
            compare(name, shard, is_called)


@check
def load_into_expert_parallelism():
    compare_all(shard_experts)


@check
def load_into_fully_sharded_experts():
    compare_all(shard_experts_fully)


@check
def load_into_fully_sharded_mixtures():
    compare_all(shard_fully)


@check
def load_into_expert_parallelism_and_full_sharding():
    for sizes in ((1, 2), (2, 1)):
        compare_all(shard_in_both_ways(sizes), FOLDERS[:4:2])


class CountingReader(ckpt_files.Reader):
    """Reader that records the names of the tensors that are read."""

    readers = []

    def __init__(self, folder):
        super().__init__(folder)
        self.names = set()
        self.readers.append(self)

    def _read(self, name, read):
        self.names.add(name)
        return super()._read(name, read)


@check
def a_rank_reads_only_its_experts():
    for name in FOLDERS:
        path = folder(name)
        CountingReader.readers.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load_module, "Reader", CountingReader)
            for shard in (lambda moe: moe, shard_experts, shard_fully, shard_groups):
                checkpoint.load(shard(mixture(2)), path)
        plain_reader, *sharded_readers = CountingReader.readers
        experts = {str(2 * world.rank), str(2 * world.rank + 1)}
        for reader in sharded_readers:
            assert reader.bytes_read <= 0.51 * plain_reader.bytes_read + EXPERTS * H * 2, name
            read = {
                n.split(".")[1]
                for n in reader.names
                if n.startswith("experts.") and n.split(".")[1].isdigit()
            }
            assert read == (experts if name.endswith("apart") else set())


@check
def tensor_parallelism_refuses_quantized_weights():
    for name in FOLDERS:
        path = folder(name)
        if not name.startswith("plain"):
            moe = parallelize_module(mixture(2), world.mesh, ExpertTensorParallel())
            assert_refused(moe, path, "between groups only")


@check
def load_into_tensor_parallelism():
    """Parts of the inner dimension of all experts are loaded from plain weights."""
    for name in ("plain/apart", "plain/stacked"):
        path, want = folder(name), mixture(1)
        checkpoint.load(want, path)
        moe = parallelize_module(mixture(2), world.mesh, ExpertTensorParallel())
        twin = parallelize_module(copy.deepcopy(want), world.mesh, ExpertTensorParallel())
        checkpoint.load(moe, path)
        for a, b in zip(moe.parameters(), twin.parameters(), strict=True):
            assert_same_bytes(local(a), local(b))
        for got, y in zip(step(moe), step(twin), strict=True):
            assert_same_bytes(got, y)


def local(p):
    return p.detach().to_local() if isinstance(p, DTensor) else p.detach()


def assert_refused(moe, path, message):
    """Check that ``load`` raises ValueError and leaves every parameter as it was."""
    parameters = list(moe.parameters())
    before = [local(p).clone() for p in parameters]
    with pytest.raises(ValueError, match=message):
        checkpoint.load(moe, path)
    for p, old, values in zip(moe.parameters(), parameters, before, strict=True):
        assert p is old
        if isinstance(values, grouped.GroupedTensor):
            assert_same_tensor(local(p), values)
        else:
            assert_same_bytes(local(p), values)


@check
def full_sharding_of_three_groups():
    """Two ranks do not divide three groups: plain weights load, quantized weights are refused."""
    torch.manual_seed(0)
    source, path = GroupedMLP(3, H, I, dtype=BF16), world.folder / "uneven"
    if not world.rank:
        checkpoint.save(source, path / "quantized", "modelopt")
        path.joinpath("plain").mkdir()
        tensors = {
            "experts.gate_up_proj": source.gate_up.weight.detach(),
            "experts.down_proj": source.down.weight.detach(),
        }
        save_file(tensors, path / "plain/model.safetensors")
    dist.barrier()
    for is_called in (False, True):
        mlp = fully_shard(GroupedMLP(3, H, I, dtype=BF16), mesh=world.mesh)
        if is_called:
            mlp(tokens(), [4, 8, 12]).sum().backward()
        assert_refused(mlp, path / "quantized", "a multiple of the ranks")
        checkpoint.load(mlp, path / "plain", rename={"^$": "experts"})
        for a, b in zip(mlp.parameters(), source.parameters(), strict=True):
            assert_same_bytes(a.full_tensor().detach(), b.detach())


@check
def ranks_with_different_numbers_of_groups():
    """Without FSDP, ranks may have different numbers of groups, or none."""
    torch.manual_seed(0)
    for groups in (3, 1):
        path = world.folder / f"groups-{groups}"
        want = GroupedMLP(groups, H, I, dtype=BF16)
        if not world.rank:
            checkpoint.save(want, path, "modelopt")
        dist.barrier()
        checkpoint.load(want, path)
        mlp = GroupedMLP(groups, H, I, dtype=BF16)
        for module in (mlp.gate_up, mlp.down):
            module.weight = nn.Parameter(
                distribute_tensor(module.weight.detach(), world.mesh, [Shard(0)])
            )
        checkpoint.load(mlp, path)
        for a, b in zip(mlp.parameters(), want.parameters(), strict=True):
            assert a.to_local().num_groups == (2 - world.rank if groups == 3 else 1 - world.rank)
            assert_same_tensor(a.full_tensor(), b.data)


@check
def a_fault_on_one_rank_raises_on_all():
    """A NaN scale of rank 1's expert raises on rank 0 too, and changes nothing."""
    path = world.folder / "damaged"
    if not world.rank:
        checkpoint.save(mixture(0), path, "modelopt")
        tensors = load_file(path / "model.safetensors")
        tensors["experts.3.down_proj.weight_scale"].view(torch.uint8)[3, 2] = 0x7F
        save_file(tensors, path / "model.safetensors")
    dist.barrier()
    message = "another rank cannot load its part"
    if world.rank:
        message = r"3.down_proj.weight_scale in .* has nan"
    for shard in (shard_experts, shard_fully, shard_groups):
        assert_refused(shard(mixture(2)), path, message)


@check
def load_over_weights_that_are_quantized_and_sharded():
    quantized = folder("modelopt/apart")
    for shard in (shard_experts, shard_experts_fully, shard_fully):
        for name in FOLDERS:
            for is_called in (False, True):
                moe, want = mixture(2), mixture(1)
                for m in (moe, want):
                    checkpoint.load(m, quantized)
                moe = shard(moe)
                with torch.no_grad():
                    if is_called:
                        moe(tokens())
                    for m in (moe, want):
                        checkpoint.load(m, folder(name))
                    assert_same_bytes(moe(tokens()), want(tokens()))


@check
def load_under_a_mixed_precision_policy():
    """Parameters are fp32 and gathered when ``load`` is called."""
    for name in FOLDERS[1:4]:
        path, want = folder(name), mixture(1, torch.float32)
        checkpoint.load(want, path)
        moe = mixture(2, torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=BF16)
        fully_shard(moe.experts, mesh=world.mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(moe, mesh=world.mesh, mp_policy=policy, reshard_after_forward=False)
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


@check
def load_into_the_experts_of_a_sharded_mixture():
    for name in FOLDERS[1:4]:
        moe = shard_fully(mixture(2))
        step(moe)
        report = checkpoint.load(moe.experts, folder(name), rename={"^": "experts"}, strict=False)
        assert report.unexpected == ["router.weight"]


@check
def load_into_sharded_dense_layers():
    """Linear layers under PyTorch's column and row styles load their parts."""
    torch.manual_seed(0)
    path = world.folder / "dense"
    source = nn.Sequential(mixture(0), nn.Linear(H, 64), nn.Linear(64, H))
    if not world.rank:
        checkpoint.save(source, path, "modelopt")
    dist.barrier()
    model = nn.Sequential(mixture(1), nn.Linear(H, 64), nn.Linear(64, H))
    parallelize_module(
        model, world.mesh, {"0": ExpertParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
    )
    checkpoint.load(model, path)
    for a, b in zip(model[1:].parameters(), source[1:].parameters(), strict=True):
        assert isinstance(a, DTensor)
        assert_same_bytes(a.full_tensor().detach(), b.detach())
