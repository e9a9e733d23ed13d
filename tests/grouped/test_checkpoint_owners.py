"""Checkpoints loaded into modules whose parameters somebody else has: an optimizer, accelerate,
PEFT and others.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore

pytest.importorskip("safetensors")

from safetensors.torch import save_file

import grouped
from grouped import checkpoint
from grouped.checkpoint.shards import local_rows
from grouped.checkpoint.weights import expert_weights
from grouped.nn import GroupedMLP, MoE
from tests.helpers import BF16, assert_same_bytes

from .test_checkpoint_damage import refused

HIDDEN, INNER, EXPERTS = 64, 64, 2


def moe(seed=0):
    torch.manual_seed(seed)
    return MoE(HIDDEN, INNER, EXPERTS, 1, dtype=BF16)


@pytest.fixture
def low(tmp_path):
    """A folder of quantized experts."""
    checkpoint.save(moe(), tmp_path / "low", "modelopt")
    return tmp_path / "low"


@pytest.fixture
def plain(tmp_path):
    """A folder of plain ones."""
    model, path = moe(), tmp_path / "plain"
    path.mkdir()
    tensors = {
        "router.weight": model.router.weight,
        "experts.gate_up_proj": model.experts.gate_up.weight,
    }
    tensors["experts.down_proj"] = model.experts.down.weight
    save_file({name: t.detach() for name, t in tensors.items()}, path / "model.safetensors")
    return path


def test_an_optimizer_that_has_the_old_parameters_says_so(low, plain):
    model = moe(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.load(model, plain)
    model(torch.randn(4, HIDDEN, dtype=BF16)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.experts.down.weight, moe().experts.down.weight)
    checkpoint.load(model, low)
    with pytest.raises(
        RuntimeError, match="checkpoint.load replaced.*Make the optimizer after checkpoint.load"
    ):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_masters_of_old_values_do_not_come_back(low, plain):
    model = moe(1)

    def step(optimizer):
        model(torch.randn(4, HIDDEN, dtype=BF16)).sum().backward()
        optimizer.step()

    optimizer = grouped.optim.AdamW(model.parameters(), lr=0.1, master_weights=True)
    step(optimizer)
    checkpoint.load(model, plain)
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match="a master of a parameter .* checkpoint.load wrote.*Make the optimizer after",
        ):
            step(optimizer)
    assert_same_bytes(model.experts.down.weight.detach(), moe().experts.down.weight.detach())
    for parameters in (model.router.parameters(), model.experts.parameters()):
        optimizer = grouped.optim.AdamW(parameters, lr=0.1, master_weights=True)
        step(optimizer)
        checkpoint.load(model, plain)
        with pytest.raises(RuntimeError, match="a master of a parameter"):
            step(optimizer)
    again = grouped.optim.AdamW(model.parameters(), lr=0.1, master_weights=True)
    step(again)
    step(again)
    # A state that belongs to the values: a resumed training.
    trained = {name: t.detach().clone() for name, t in model.state_dict().items()}
    checkpoint.load(model, plain)
    model.load_state_dict(trained)
    step(again)


def test_parameters_that_are_computed(low, plain):
    model = moe(1)
    parametrize.register_parametrization(model.experts.down, "weight", nn.Identity())
    for path in (low, plain):
        refused(
            model,
            path,
            ValueError,
            "cannot fill experts.down.weight: torch.nn.utils.parametrize computes it",
        )


def test_wrappers_of_experts_are_not_experts():
    """PEFT's pass the attributes of experts on, and hold no parameter of theirs."""

    class Experts(nn.Module):
        has_gate, is_transposed = True, False

        def __init__(self):
            super().__init__()
            self.gate_up_proj, self.down_proj = (
                nn.Parameter(torch.zeros(2, n, 32)) for n in (64, 32)
            )

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            inner = super().__getattr__("inner")
            return inner if name == "inner" else getattr(inner, name)

    weights = expert_weights(nn.ModuleDict({"experts": Wrapper(Experts())}))
    assert [weight.key for weight in weights] == [
        "experts.inner.gate_up_proj",
        "experts.inner.down_proj",
    ]


def test_parameters_of_bitsandbytes(low, plain):
    model = moe(1)
    theirs = type("Params4bit", (nn.Parameter,), {})
    model.experts.down.weight = theirs(model.experts.down.weight.detach())
    for path in (low, plain):
        refused(model, path, ValueError, "cannot fill experts.down.weight: bitsandbytes holds it")


def test_offloaded_parameters(low, plain):
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(moe(1))
    before = [(p, p.device) for p in model.parameters()]
    for path in (low, plain):
        with pytest.raises(ValueError, match="cannot fill .*: a hook of accelerate offloads it"):
            checkpoint.load(model, path)
    assert all(
        a is p and a.device == device
        for a, (p, device) in zip(model.parameters(), before, strict=True)
    )
    model = accelerate.cpu_offload(nn.ModuleDict({"router": nn.Linear(HIDDEN, EXPERTS)}))
    with pytest.raises(
        ValueError, match="cannot fill router.weight: a hook of accelerate offloads it"
    ):
        checkpoint.load(model, low)


def test_experts_of_transformers(tmp_path):
    """Prepared ones are loaded over, as plain ones; those that PEFT adds to keep the weight that it
    knows.
    """
    pytest.importorskip("transformers")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from grouped.integrations.transformers import prepare, register

    register()
    sizes = {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "intermediate_size": 32,
        "num_experts": 4,
    }
    few = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 64,
    }
    config = Qwen3MoeConfig(**sizes, **few, num_experts_per_tok=2, tie_word_embeddings=True)
    config._experts_implementation = "grouped_bf16"

    def model():
        return Qwen3MoeForCausalLM(config).bfloat16().eval()

    source, want, prepared = model(), model(), model()
    checkpoint.save(source, tmp_path / "low", "modelopt")
    prepare(prepared, grouped.NVFP4())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        for other in (want, prepared):
            assert len(checkpoint.load(other, tmp_path / "low").layouts) == 2
        assert_same_bytes(prepared(ids).logits, want(ids).logits)
    peft = pytest.importorskip("peft")
    targets = peft.LoraConfig(
        target_modules=[], target_parameters=["mlp.experts.gate_up_proj"], r=4
    )
    adapted = peft.get_peft_model(model(), targets)
    rename = {r"base_model\.model\.": "", r"\.base_layer": ""}
    refused(
        adapted,
        tmp_path / "low",
        KeyError,
        "load the checkpoint before get_peft_model",
        rename=rename,
        strict=False,
    )


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.distributed
def test_loaded_modules_are_converted_afterwards(mesh, plain):
    """``Module.to`` swaps DTensors and GroupedTensors, which PyTorch refuses if somebody has a weak
    reference to one.
    """
    quantized, sharded = moe(1), moe(1)
    grouped.prepare(quantized, grouped.NVFP4())
    fully_shard(sharded, mesh=mesh)
    for model in (quantized, sharded):
        checkpoint.load(model, plain)
        assert model.to(torch.float16).experts.down.weight.dtype == torch.float16


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:When using")
def test_one_process_of_fully_shard(mesh, low, plain):
    """FSDP2 replaces the parameters of its modules, the guard of FullyShardedDataParallel refuses."""
    for path in (plain, low):
        want = moe(1)
        checkpoint.load(want, path)
        for is_called in (False, True):
            model = moe(2)
            fully_shard(model.experts, mesh=mesh)
            fully_shard(model, mesh=mesh)
            x = torch.randn(4, HIDDEN, dtype=BF16)
            with torch.no_grad():
                if is_called:
                    model(x)
                checkpoint.load(model, path)
                assert_same_bytes(model(x), want(x))
    model = FullyShardedDataParallel(moe(1), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="FullyShardedDataParallel keeps it in a flat parameter"):
        checkpoint.load(model, low, rename={r"_fsdp_wrapped_module\.": ""})


@pytest.mark.distributed
def test_parameters_that_cannot_be_replaced(mesh, low, tmp_path):
    """DTensors that another module shares, and transposed experts of FSDP2, whose parameters would
    change their shape.
    """
    model = nn.ModuleDict(dict(moe(1).named_children()))
    experts = model.experts
    for layer in (experts.gate_up, experts.down):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    model.other = nn.Module()
    model.other.weight = experts.down.weight
    before = list(model.parameters())
    with pytest.raises(
        ValueError, match="cannot replace experts.down.weight: other modules share it"
    ):
        checkpoint.load(model, low)
    del model.other
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    checkpoint.load(model, low)
    assert isinstance(model.experts.down.weight.to_local(), grouped.GroupedTensor)

    def transposed():
        module = nn.Module()
        module.has_gate = module.is_transposed = True
        module.gate_up_proj, module.down_proj = (
            nn.Parameter(torch.ones(2, 64, n)) for n in (128, 64)
        )
        return nn.ModuleDict({"x": module})

    checkpoint.save(transposed(), tmp_path / "stacked", "modelopt", stacked=True)
    sharded = transposed()
    fully_shard(sharded.x, mesh=mesh)
    with pytest.raises(
        ValueError,
        match=r"x.gate_up_proj has the shape \(2, 64, 128\) under fully_shard, but \(2, 128, 64\) when quantized",
    ):
        checkpoint.load(sharded, tmp_path / "stacked")
    assert sharded.x.is_transposed and (sharded.x.down_proj.to_local() == 1).all()


@pytest.mark.distributed
def test_rows_of_a_rank(rank=3):
    """Groups that a mesh of two dimensions cuts in both orders, as parallel styles do, and
    unevenly.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        dp, ep = divmod(rank, 2)
        whole = torch.arange(8.0)[:, None, None].expand(8, 2, 2).contiguous()
        for placements, start, count in (
            ([Shard(0), Replicate()], 4 * dp, 4),
            ([Replicate(), Shard(0)], 4 * ep, 4),
            ([Shard(0), Shard(0)], 4 * dp + 2 * ep, 2),
        ):
            p = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert local_rows(p) == range(start, start + count)
            assert p.to_local().flatten()[::4].tolist() == list(range(start, start + count))
        assert (
            local_rows(distribute_tensor(whole, mesh, [Shard(1), Replicate()], src_data_rank=None))
            is None
        )
        experts = GroupedMLP(8, HIDDEN, INNER, dtype=BF16)
        for layer in (experts.gate_up, experts.down):
            part = distribute_tensor(
                layer.weight.detach(), mesh["ep"], [Shard(0)], src_data_rank=None
            )
            layer.weight = nn.Parameter(part)
        fully_shard(experts, mesh=mesh["dp"])
        assert local_rows(experts.down.weight) == range(4 * ep + 2 * dp, 4 * ep + 2 * dp + 2)
        odd = distribute_tensor(whole[:5], mesh["ep"], [Shard(0)], src_data_rank=None)
        assert local_rows(odd) == (range(3, 5) if ep else range(3))
    finally:
        dist.destroy_process_group()


def test_quantized_weights_that_are_trained_are_not_replaced_by_frozen_ones(low, plain):
    model = moe(1)
    grouped.prepare(model, grouped.NVFP4(), trainable=True)
    before = {name: (p, p._version) for name, p in model.named_parameters()}
    with pytest.raises(
        ValueError, match="gate_up.weight is quantized and requires gradients.*requires_grad_"
    ):
        checkpoint.load(model, low)
    assert all(
        p is before[name][0] and p._version == before[name][1]
        for name, p in model.named_parameters()
    )
    checkpoint.load(model, plain)
    assert model.experts.down.weight.requires_grad
    for p in model.experts.parameters():
        p.requires_grad_(False)
    checkpoint.load(model, low)
