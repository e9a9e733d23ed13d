"""Each owner of a parameter is recognized, and nothing else is."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import parametrize

import grouped
from grouped import ownership
from grouped.nn import GroupedLinear, GroupedMLP
from grouped.ownership import RULES, Ownership, refill, retire
from tests.helpers import BF16, contains_all, run_python


@pytest.fixture
def mesh():
    """A mesh of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    _ALIVE.clear()
    dist.destroy_process_group()


#: Models whose state is that of a part.
_ALIVE = []


def model_of():
    return nn.Sequential(GroupedMLP(2, 32, 32, dtype=BF16), nn.Linear(32, 32, dtype=BF16))


def gate_up_of(model):
    return model[0].gate_up


def fsdp(model, mesh):
    fully_shard(model, mesh=mesh)
    return model, gate_up_of(model)


def fsdp_unsharded(model, mesh):
    """After a call the root keeps its plain parameters: nothing about them says that FSDP2 has
    them.
    """
    fully_shard(model, mesh=mesh)
    model.unshard()
    assert type(gate_up_of(model).weight) is nn.Parameter
    return model, gate_up_of(model)


def fsdp_outside_of_the_root(model, mesh):
    """Shard a model with FSDP2, and return one of its modules as the root."""
    fully_shard(model, mesh=mesh)
    model.unshard()
    _ALIVE.append(model)
    return gate_up_of(model), gate_up_of(model)


def fsdp1(model, mesh):
    return FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu")
    ), gate_up_of(model)


def dtensor(model, mesh):
    layer = gate_up_of(model)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    return model, layer


def ddp(model, mesh):
    return nn.parallel.DistributedDataParallel(model), gate_up_of(model)


def replicated(model, mesh):
    layer = replicate(gate_up_of(model))
    layer(torch.zeros(2, 32, dtype=BF16), [1, 2])
    return layer, layer


def parametrized(model, mesh):
    parametrize.register_parametrization(gate_up_of(model), "weight", nn.Identity())
    return model, gate_up_of(model)


def computed(model, mesh):
    """Replace a parameter by a plain tensor attribute."""
    layer = gate_up_of(model)
    weight = layer.weight.detach()
    del layer.weight
    layer.weight = weight
    return model, layer


def meta(model, mesh):
    return model.to("meta"), gate_up_of(model)


def tied(model, mesh):
    model[0].down.other = gate_up_of(model).weight
    return model, gate_up_of(model)


def subclass(model, mesh):
    class Theirs(nn.Parameter):
        pass

    gate_up_of(model).weight = Theirs(gate_up_of(model).weight.detach())
    return model, gate_up_of(model)


def bitsandbytes(model, mesh):
    """By the name of the class, or of one that it is made from: the library is not imported."""
    theirs = type("Mine", (type("Params4bit", (nn.Parameter,), {}),), {})
    gate_up_of(model).weight = theirs(gate_up_of(model).weight.detach())
    return model, gate_up_of(model)


def deepspeed(model, mesh):
    gate_up_of(model).weight.ds_id = 1
    return model, gate_up_of(model)


def hooked(model, mesh):
    gate_up_of(model).weight.register_post_accumulate_grad_hook(lambda p: None)
    return model, gate_up_of(model)


def accelerate(model, mesh):
    pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))
    return model, gate_up_of(model)


def adapted(model, mesh):
    """Add LoRA adapters to an expert parameter of a model."""
    peft = pytest.importorskip("peft")
    model.config = {}
    config = peft.LoraConfig(target_modules=["1"], target_parameters=["0.gate_up.weight"], r=2)
    return peft.get_peft_model(model, config), gate_up_of(model).get_base_layer()


def saved_by_peft(model, mesh):
    """Wrap a module in PEFT's ``modules_to_save``."""
    peft = pytest.importorskip("peft")
    model.config = {}
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["1"], modules_to_save=["gate_up"], r=2)
    )
    return wrapped, gate_up_of(model).modules_to_save["default"]


OWNED = {
    "fsdp": ("fsdp", fsdp),
    "fsdp, gathered": ("fsdp", fsdp_unsharded),
    "fsdp, of a parent": ("fsdp", fsdp_outside_of_the_root),
    "fsdp1": ("fsdp1", fsdp1),
    "dtensor": ("dtensor", dtensor),
    "ddp": ("ddp", ddp),
    "replicate": ("ddp", replicated),
    "parametrize": ("parametrize", parametrized),
    "computed": ("computed", computed),
    "meta": ("meta", meta),
    "tied": ("tied", tied),
    "subclass": ("subclass", subclass),
    "bitsandbytes": ("bitsandbytes", bitsandbytes),
    "deepspeed": ("deepspeed", deepspeed),
    "hooked": ("hooked", hooked),
    "accelerate": ("accelerate", accelerate),
    "peft": ("peft", adapted),
    "modules_to_save": ("peft", saved_by_peft),
}


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "wrap"), OWNED.values(), ids=OWNED)
def test_owners(kind, wrap, mesh):
    """Check the owner of each kind of weight, and the error that names it."""
    root, layer = wrap(model_of(), mesh)
    ownership = Ownership(root)
    owner = ownership.owner(layer, "weight")
    assert (
        owner is not None and owner.kind == kind and (owner.manager is not None) == (kind == "fsdp")
    )
    with pytest.raises(
        ValueError, match=contains_all("load() cannot replace", "weight: ", *RULES[kind])
    ):
        ownership.check_replaceable([(layer, "weight")], "load()")
    ownership.check_replaceable([(layer, "weight")], "load()", allow=[kind])


def test_every_kind_has_a_case():
    assert {kind for kind, _ in OWNED.values()} == RULES.keys()


def test_what_a_module_owns_itself():
    """Check that a module owns its plain and quantized parameters."""
    model = model_of()
    quantized = grouped.quantize(model[0].down.weight.detach(), grouped.NVFP4())
    model[0].down.weight = nn.Parameter(quantized, requires_grad=False)
    for root in (model, torch.compile(model), nn.Sequential(model, model), gate_up_of(model)):
        for layer in (gate_up_of(model), model[0].down):
            assert Ownership(root).owner(layer, "weight") is None


def test_tied_parameters_pass_together():
    model = model_of()
    model[0].down.other = gate_up_of(model).weight
    Ownership(model).check_replaceable(
        [(gate_up_of(model), "weight"), (model[0].down, "other")], "prepare()"
    )


def test_the_message_names_the_parameter():
    model = model_of().to("meta")
    with pytest.raises(
        ValueError,
        match=r"^prepare\(\) cannot replace 0\.gate_up\.weight: it is on the meta device",
    ):
        Ownership(model).check_replaceable([(gate_up_of(model), "weight")], "prepare()")


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, grouped.optim.AdamW])
def test_an_optimizer_of_replaced_parameters_raises_at_its_next_step(make):
    """Check that an optimizer of replaced parameters raises, and that others do not."""
    model = model_of()
    old, other_optimizer = make(model.parameters(), lr=0.1), make(model[1].parameters(), lr=0.1)
    parameter = gate_up_of(model).weight
    gate_up_of(model).weight = nn.Parameter(parameter.detach() * 2)
    retire([parameter], "prepare()")
    message = r"parameter 0 of param_groups\[0\] of shape \(2, 64, 32\) that prepare\(\) replaced"
    with pytest.raises(RuntimeError, match=f"holds {message}"):
        old.step()
    other_optimizer.step()
    make(model.parameters(), lr=0.1).step()


class PlainSGD(torch.optim.Optimizer):
    """Optimizer whose step is a single graph; those of torch break their graphs themselves."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.compile
@pytest.mark.parametrize(
    ("make", "fullgraph"), [(PlainSGD, True), (PlainSGD, False), (torch.optim.AdamW, False)]
)
def test_steps_compile_after_parameters_were_replaced(make, fullgraph):
    """The check of steps is part of their graph, and a compiled step raises like others."""
    retire([torch.ones(2)], "prepare()")
    layer = nn.Linear(4, 4)
    optimizer = make(layer.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        before = layer.weight.detach().clone()
        layer(torch.ones(2, 4)).sum().backward()
        step()
        assert not layer.weight.equal(before)
    retire([layer.bias], "prepare()")
    with pytest.raises(
        RuntimeError, match="" if fullgraph else r"\(4,\) that prepare\(\) replaced"
    ):
        step()


@pytest.mark.compile
def test_compiled_steps_continue_after_parameters_were_written():
    """The check of masters is done once, outside the graph."""
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for is_written in (False, True, False):
        layer(torch.ones(2, 4)).sum().backward()
        before = layer.weight.detach().clone()
        if is_written:
            refill([layer.weight], "checkpoint.load")
        step()
        assert not layer.weight.equal(before)
        assert not hasattr(layer.weight, ownership._WRITTEN_BY)


@pytest.mark.distributed
@pytest.mark.parametrize("called", [False, True])
def test_what_is_assigned_to_a_sharded_layer(called, mesh):
    """FSDP2 would go on with its own tensor, without a word."""
    layer, x = GroupedLinear(2, 32, 32, dtype=BF16), torch.randn(9, 32).bfloat16()
    fully_shard(layer, mesh=mesh)
    want = layer(x, [4, 9]) if called else None
    layer.reshard()
    quantized = grouped.quantize(layer.weight.full_tensor().detach(), grouped.NVFP4())
    for value in (
        nn.Parameter(quantized, requires_grad=False),
        nn.Parameter(torch.zeros(2, 32, 32, dtype=BF16)),
    ):
        for unsharded in (False, True):
            layer.unshard() if unsharded else layer.reshard()
            with pytest.raises(
                ValueError,
                match=contains_all(
                    "GroupedLinear.weight cannot be assigned", "FSDP2", "before fully_shard"
                ),
            ):
                layer.weight = value
    layer.reshard()
    assert want is None or torch.equal(layer(x, [4, 9]), want)
    state = {
        name: distribute_tensor(t.full_tensor() * 2, mesh, [Shard(0)])
        for name, t in layer.state_dict().items()
    }
    layer.load_state_dict(state, assign=True)
    assert torch.equal(layer(x, [4, 9]), want * 2) if called else layer(x, [4, 9]).any()
    layer.reshard()
    layer.weight = nn.Parameter(
        distribute_tensor(torch.zeros(2, 32, 32, dtype=BF16), mesh, [Shard(0)])
    )
    with pytest.raises(
        RuntimeError, match=contains_all("GroupedLinear.weight was replaced", "copy_")
    ):
        layer(x, [4, 9])


def test_asking_imports_nothing():
    program = (
        "import sys, torch, grouped; from grouped.ownership import Ownership; before = set(sys.modules);"  # noqa: E501
        "layer = grouped.nn.GroupedLinear(2, 32, 32); assert Ownership(layer).owner(layer, 'weight') is None;"  # noqa: E501
        "assert not {'peft', 'accelerate', 'transformers', 'torch.distributed.fsdp', 'torch.distributed.tensor'} & ("  # noqa: E501
        "set(sys.modules) - before), set(sys.modules) - before"
    )
    run_python(program)
