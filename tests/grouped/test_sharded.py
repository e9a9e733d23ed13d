"""Layers under FSDP2: initialization, training and cached weights, against plain layers."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from grouped.nn import GroupedLinear, GroupedMLP
from tests.helpers import assert_same_bytes, sample

from .cases import RECIPES, OpCounter, weights_quantized

GROUPS, K, N, ENDS = 3, 64, 32, [13, 13, 35]

pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators")


@pytest.fixture(params=[1, 2])
def mesh(request):
    """One rank of a gloo group, or the first of two whose collectives do nothing."""
    if request.param == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (request.param,))
    dist.destroy_process_group()


#: Runs with a mesh of one rank only.
alone = pytest.mark.parametrize("mesh", [1], indirect=True)


def assert_initialized(parameter, fan_in):
    """Check that a local shard has values of the uniform initialization."""
    values = parameter.to_local().detach()
    bound = 1 / math.sqrt(fan_in)
    assert values.numel() and values.abs().max() <= bound * (1 + 1e-6)
    assert values.abs().max() > 0.8 * bound and values.unique().numel() > 0.9 * values.numel()


@pytest.mark.distributed
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("make", [GroupedLinear, GroupedMLP])
def test_initialization_after_to_empty(mesh, make, single):
    """Check that ``reset_parameters`` initializes a sharded module after ``to_empty``."""
    recipe = RECIPES["nvfp4"]
    with torch.device("meta"):
        module = make(GROUPS, K, N, bias=True, recipe=recipe, single_parameter=single)
    fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.to_local().fill_(torch.nan)
    module.reset_parameters()
    for name, parameter in module.named_parameters():
        if mesh.size() > 1 and not parameter.to_local().numel():
            continue
        assert_initialized(parameter, N if name.startswith("down") else K)


@pytest.mark.distributed
@alone
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_training_gives_the_bits_of_one_process(mesh, reshard, single):
    """Compare training with FSDP2 to training in one process."""
    options = {"recipe": RECIPES["row-scaled"], "single_parameter": single}
    torch.manual_seed(1)
    plain = GroupedMLP(GROUPS, K, N, **options)
    torch.manual_seed(1)
    sharded = GroupedMLP(GROUPS, K, N, **options)
    for layer in (sharded.gate_up, sharded.down, sharded):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # FSDP warns of an output that is a view.
        for module in (plain, sharded):
            torch.manual_seed(2)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
            for _ in range(2):
                for is_first in (True, False):
                    y = module(sample(40, K), ENDS, is_first_microbatch=is_first)
                    y.float().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert_same_bytes(a.full_tensor().detach(), b.detach())


@pytest.mark.distributed
@alone
@pytest.mark.parametrize("reshard", [True, False])
def test_a_kept_weight_is_not_used_after_a_step(mesh, reshard):
    """FSDP gathers into the same tensor each time and counts no version of it."""
    layer = GroupedLinear(GROUPS, K, N, recipe=RECIPES["nvfp4"]).eval()
    fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    x, offs = sample(40, K), torch.tensor(ENDS)
    outputs = [torch.zeros(40, N)]
    for _ in range(3):
        with torch.no_grad(), OpCounter() as counter:
            outputs.append(layer(x, offs))
            assert_same_bytes(layer(x, offs), outputs[-1])
        assert weights_quantized(counter) == 1
        assert not torch.equal(*outputs[-2:])
        layer(x, offs).sum().backward()
        optimizer.step()
    layer(x, offs, is_first_microbatch=True).sum().backward()
    layer(x, offs, is_first_microbatch=False).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="the weight changed since: it was written in place"):
        layer(x, offs, is_first_microbatch=False)


@pytest.mark.distributed
@alone
@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad"])
def test_gradients_of_sharded_parameters_go_no_other_way(mesh, option):
    layer = GroupedLinear(GROUPS, K, N, **{option: True})
    fully_shard(layer, mesh=mesh)
    with pytest.raises(RuntimeError, match="not for sharded parameters"):
        layer(sample(40, K), ENDS)
