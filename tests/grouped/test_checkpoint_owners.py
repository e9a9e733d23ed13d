"""Checkpoints loaded into modules whose parameters optimizers, accelerate, PEFT or FSDP own."""

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

from .damaged_checkpoints import assert_refused

HIDDEN, INNER, EXPERTS = 64, 64, 2


def make_moe(seed=0):
    torch.manual_seed(seed)
    return MoE(HIDDEN, INNER, EXPERTS, 1, dtype=BF16)


@pytest.fixture
def quantized_folder(tmp_path):
    """A folder with quantized experts."""
    checkpoint.save(make_moe(), tmp_path / "quantized", "modelopt")
    return tmp_path / "quantized"


@pytest.fixture
def plain_folder(tmp_path):
    """A folder with plain experts."""
    model, path = make_moe(), tmp_path / "plain"
    path.mkdir()
    tensors = {
        "router.weight": model.router.weight,
        "experts.gate_up_proj": model.experts.gate_up.weight,
    }
    tensors["experts.down_proj"] = model.experts.down.weight
    save_file({name: t.detach() for name, t in tensors.items()}, path / "model.safetensors")
    return path


def test_an_optimizer_of_replaced_parameters_raises(quantized_folder, plain_folder):
    """Check that an optimizer raises if loading replaced its parameters."""
    model = make_moe(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.load(model, plain_folder)
    model(torch.randn(4, HIDDEN, dtype=BF16)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.experts.down.weight, make_moe().experts.down.weight)
    checkpoint.load(model, quantized_folder)
    with pytest.raises(
        RuntimeError, match="checkpoint.load replaced.*Make the optimizer after checkpoint.load"
    ):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def train_step(model, optimizer):
    model(torch.randn(4, HIDDEN, dtype=BF16)).sum().backward()
    optimizer.step()


def adamw(parameters):
    return grouped.optim.AdamW(parameters, lr=0.1, master_weights=True)


def test_masters_of_old_values_raise(plain_folder):
    """Check that fp32 masters raise if loading wrote their parameters."""
    model = make_moe(1)
    optimizer = adamw(model.parameters())
    train_step(model, optimizer)
    checkpoint.load(model, plain_folder)
    message = "a master of parameter .* checkpoint.load wrote.*Make the optimizer after"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            train_step(model, optimizer)
    assert_same_bytes(model.experts.down.weight.detach(), make_moe().experts.down.weight.detach())


@pytest.mark.parametrize("name", ["router", "experts"])
def test_masters_of_some_old_values_raise(name, plain_folder):
    """Check that masters of some of the written parameters raise, too."""
    model = make_moe(1)
    optimizer = adamw(getattr(model, name).parameters())
    train_step(model, optimizer)
    checkpoint.load(model, plain_folder)
    with pytest.raises(RuntimeError, match="a master of parameter"):
        train_step(model, optimizer)


def test_masters_that_belong_to_a_loaded_state_are_used(plain_folder):
    """A resumed training loads the values that belong to the masters."""
    model = make_moe(1)
    optimizer = adamw(model.parameters())
    train_step(model, optimizer)
    train_step(model, optimizer)
    trained = {name: t.detach().clone() for name, t in model.state_dict().items()}
    checkpoint.load(model, plain_folder)
    model.load_state_dict(trained)
    train_step(model, optimizer)


def test_parametrized_parameters(quantized_folder, plain_folder):
    model = make_moe(1)
    parametrize.register_parametrization(model.experts.down, "weight", nn.Identity())
    for path in (quantized_folder, plain_folder):
        assert_refused(
            model,
            path,
            ValueError,
            "cannot fill experts.down.weight: torch.nn.utils.parametrize computes it",
        )


def test_wrappers_of_experts_are_not_experts():
    """PEFT's wrappers pass attributes on to the experts, and hold no parameters of their own."""

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


def test_parameters_of_bitsandbytes(quantized_folder, plain_folder):
    """Check that parameters of bitsandbytes are refused."""
    model = make_moe(1)
    theirs = type("Params4bit", (nn.Parameter,), {})
    model.experts.down.weight = theirs(model.experts.down.weight.detach())
    for path in (quantized_folder, plain_folder):
        assert_refused(
            model, path, ValueError, "cannot fill experts.down.weight: bitsandbytes holds it"
        )


def test_offloaded_parameters(quantized_folder, plain_folder):
    """Check that parameters that accelerate offloads are refused and unchanged."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(make_moe(1))
    before = [(p, p.device) for p in model.parameters()]
    for path in (quantized_folder, plain_folder):
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
        checkpoint.load(model, quantized_folder)


@pytest.fixture
def make_qwen3():
    """A function that returns a small model of transformers with grouped experts."""
    pytest.importorskip("transformers")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from grouped.integrations.transformers import register

    register()
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        intermediate_size=32,
        num_experts=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=64,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    )
    config._experts_implementation = "grouped_bf16"
    return lambda: Qwen3MoeForCausalLM(config).bfloat16().eval()


def test_prepared_experts_of_transformers_are_loaded_over(make_qwen3, tmp_path):
    """Check that a checkpoint loads into experts that ``prepare`` has quantized."""
    from grouped.integrations.transformers import prepare

    source, want, prepared = make_qwen3(), make_qwen3(), make_qwen3()
    checkpoint.save(source, tmp_path, "modelopt")
    prepare(prepared, grouped.NVFP4())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        for model in (want, prepared):
            assert len(checkpoint.load(model, tmp_path).layouts) == 2
        assert_same_bytes(prepared(ids).logits, want(ids).logits)


def test_experts_with_a_peft_adapter_keep_their_weight(make_qwen3, tmp_path):
    """Check that experts with a PEFT adapter are refused and keep their weight."""
    peft = pytest.importorskip("peft")
    checkpoint.save(make_qwen3(), tmp_path, "modelopt")
    targets = peft.LoraConfig(
        target_modules=[], target_parameters=["mlp.experts.gate_up_proj"], r=4
    )
    adapted = peft.get_peft_model(make_qwen3(), targets)
    rename = {r"base_model\.model\.": "", r"\.base_layer": ""}
    assert_refused(
        adapted,
        tmp_path,
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
def test_loaded_modules_can_be_converted(mesh, plain_folder):
    """``Module.to`` swaps DTensors and GroupedTensors, which weak references would prevent."""
    quantized, sharded = make_moe(1), make_moe(1)
    grouped.prepare(quantized, grouped.NVFP4())
    fully_shard(sharded, mesh=mesh)
    for model in (quantized, sharded):
        checkpoint.load(model, plain_folder)
        assert model.to(torch.float16).experts.down.weight.dtype == torch.float16


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:When using")
def test_fully_shard_in_one_process(mesh, quantized_folder, plain_folder):
    """FSDP2 replaces the parameters of its modules."""
    for path in (plain_folder, quantized_folder):
        want = make_moe(1)
        checkpoint.load(want, path)
        for is_called in (False, True):
            model = make_moe(2)
            fully_shard(model.experts, mesh=mesh)
            fully_shard(model, mesh=mesh)
            x = torch.randn(4, HIDDEN, dtype=BF16)
            with torch.no_grad():
                if is_called:
                    model(x)
                checkpoint.load(model, path)
                assert_same_bytes(model(x), want(x))


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:When using")
def test_fsdp1_is_refused(mesh, quantized_folder):
    model = FullyShardedDataParallel(
        make_moe(1), use_orig_params=True, device_id=torch.device("cpu")
    )
    message = "FullyShardedDataParallel keeps it in a flat parameter"
    with pytest.raises(ValueError, match=message):
        checkpoint.load(model, quantized_folder, rename={r"_fsdp_wrapped_module\.": ""})


@pytest.mark.distributed
def test_shared_dtensors_are_not_replaced(mesh, quantized_folder):
    """Check that DTensors that modules share are refused and unchanged."""
    model = nn.ModuleDict(dict(make_moe(1).named_children()))
    experts = model.experts
    for layer in (experts.gate_up, experts.down):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    model.other = nn.Module()
    model.other.weight = experts.down.weight
    before = list(model.parameters())
    message = "cannot replace experts.down.weight: other modules share it"
    with pytest.raises(ValueError, match=message):
        checkpoint.load(model, quantized_folder)
    del model.other
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    checkpoint.load(model, quantized_folder)
    assert isinstance(model.experts.down.weight.to_local(), grouped.GroupedTensor)


def transposed_experts():
    """Return a module whose experts store (E, K, N), as transformers does for gpt-oss."""
    module = nn.Module()
    module.has_gate = module.is_transposed = True
    module.gate_up_proj, module.down_proj = (nn.Parameter(torch.ones(2, 64, n)) for n in (128, 64))
    return nn.ModuleDict({"x": module})


@pytest.mark.distributed
def test_transposed_experts_of_fsdp_are_not_replaced(mesh, tmp_path):
    """Their quantized parameters would have another shape."""
    checkpoint.save(transposed_experts(), tmp_path, "modelopt", stacked=True)
    sharded = transposed_experts()
    fully_shard(sharded.x, mesh=mesh)
    message = (
        r"x.gate_up_proj has the shape \(2, 64, 128\) under fully_shard, "
        r"but \(2, 128, 64\) when quantized"
    )
    with pytest.raises(ValueError, match=message):
        checkpoint.load(sharded, tmp_path)
    assert sharded.x.is_transposed and (sharded.x.down_proj.to_local() == 1).all()


@pytest.fixture
def two_by_two():
    """A mesh of two dimensions, on rank 3 of a fake group of four."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("placements", "rows"),
    [
        ([Shard(0), Replicate()], range(4, 8)),
        ([Replicate(), Shard(0)], range(4, 8)),
        ([Shard(0), Shard(0)], range(6, 8)),
        ([Shard(1), Replicate()], None),
    ],
)
def test_local_rows_of_a_mesh(placements, rows, two_by_two):
    """Check which rows of a DTensor ``local_rows`` finds on a two-dimensional mesh."""
    weight = torch.arange(8.0)[:, None, None].expand(8, 2, 2).contiguous()
    p = distribute_tensor(weight, two_by_two, placements, src_data_rank=None)
    assert local_rows(p) == rows
    if rows is not None:
        assert p.to_local().flatten()[::4].tolist() == list(rows)


@pytest.mark.distributed
def test_local_rows_of_fsdp_around_expert_parallelism(two_by_two):
    """The dimensions of the mesh cut the groups in the order of the parallel styles."""
    experts = GroupedMLP(8, HIDDEN, INNER, dtype=BF16)
    for layer in (experts.gate_up, experts.down):
        weight = distribute_tensor(
            layer.weight.detach(), two_by_two["ep"], [Shard(0)], src_data_rank=None
        )
        layer.weight = nn.Parameter(weight)
    fully_shard(experts, mesh=two_by_two["dp"])
    assert local_rows(experts.down.weight) == range(6, 8)


@pytest.mark.distributed
def test_local_rows_of_an_uneven_shard(two_by_two):
    p = distribute_tensor(torch.ones(5, 2, 2), two_by_two["ep"], [Shard(0)], src_data_rank=None)
    assert local_rows(p) == range(3, 5)


def test_trained_quantized_weights_are_not_replaced(quantized_folder, plain_folder):
    """Check that quantized weights that require gradients are not replaced."""
    model = make_moe(1)
    grouped.prepare(model, grouped.NVFP4(), trainable=True)
    before = {name: (p, p._version) for name, p in model.named_parameters()}
    with pytest.raises(
        ValueError, match="gate_up.weight is quantized and requires gradients.*requires_grad_"
    ):
        checkpoint.load(model, quantized_folder)
    assert all(
        p is before[name][0] and p._version == before[name][1]
        for name, p in model.named_parameters()
    )
    checkpoint.load(model, plain_folder)
    assert model.experts.down.weight.requires_grad
    for p in model.experts.parameters():
        p.requires_grad_(False)
    checkpoint.load(model, quantized_folder)
