"""torchtitan's experts converted to grouped ones, against torchtitan's own."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from grouped import recipes
from tests.helpers import BF16, assert_same_bytes

moe = pytest.importorskip("torchtitan.models.common.moe", exc_type=ImportError)
from torchtitan.components.quantization.utils import has_quantization  # noqa: E402
from torchtitan.config import Configurable  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher  # noqa: E402
from torchtitan.tools.logging import logger  # noqa: E402

import grouped.integrations.torchtitan as torchtitan_integration  # noqa: E402
from grouped.integrations.torchtitan import GroupedExpertsConverter  # noqa: E402

CONFIG = moe.GroupedExperts.Config(dim=64, hidden_dim=32, num_experts=4)


def converted(recipe, config=CONFIG, **options):
    return GroupedExpertsConverter.Config(recipe=recipe, **options).build().convert(config)


@pytest.mark.parametrize("recipe", ["BF16", "FP8Block", recipes.NVFP4()])
def test_converted_experts(recipe):
    """Compare converted experts with those of torchtitan."""
    theirs, ours = CONFIG.build(), converted(recipe).build()
    assert type(ours).__name__ == "CuteGroupedExperts"
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.1)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(40, 64, dtype=BF16, requires_grad=True)
    counts = torch.tensor([13, 0, 7, 20])  # no padding
    results = []
    for experts in (theirs, ours):
        y = experts(x, counts)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *experts.parameters()))))
    for got, want in zip(*results, strict=True):
        assert (got - want).float().norm() / want.float().norm() < (
            0.02 if recipe == "BF16" else 0.5
        )


def on_two_ranks(rank, folder):
    """DTensor weights, Shard(0), behind torchtitan's exchange of tokens: the bits of one process."""  # noqa: E501
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    set_spmd_backend("partial_dtensor")
    for recipe in ("BF16", "FP8Block"):
        dispatcher = AllToAllTokenDispatcher.Config(num_experts=4, top_k=2)
        torch.manual_seed(0)
        config = moe.RoutedExperts.Config(inner_experts=CONFIG, token_dispatcher=dispatcher)
        alone, spread = (converted(recipe, config).build() for _ in range(2))
        for name, p in list(alone.inner_experts.named_parameters()):
            nn.init.normal_(p, std=0.1)
            shard = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(spread.inner_experts, name, nn.Parameter(shard))
        spread.token_dispatcher.wire_meshes(ep_mesh=mesh)
        x, dy = torch.randn(2, 2, 20, 64, dtype=BF16)
        # No token of rank 1 goes to the last expert.
        ids = torch.stack([torch.rand(20, experts).topk(2).indices for experts in (4, 3)])
        scores, results = torch.rand(2, 20, 2), []
        for experts, mine in ((alone, slice(None)), (spread, slice(rank, rank + 1))):
            leaf = x[mine].clone().requires_grad_()
            y = experts(
                leaf, scores[mine], ids[mine], torch.bincount(ids[mine].flatten(), minlength=4)
            )
            y.backward(dy[mine])
            results.append((y.detach(), leaf.grad, [p.grad for p in experts.parameters()]))
        (y, dx, dw), (mine, dmine, dparts) = results
        assert_same_bytes(mine[0], y[rank])
        assert_same_bytes(dmine[0], dx[rank])
        for shard, whole in zip(dparts, dw, strict=True):
            assert_same_bytes(shard.full_tensor(), whole)
    dist.destroy_process_group()


@pytest.mark.distributed
def test_experts_spread_by_torchtitan(tmp_path):
    torch.multiprocessing.spawn(on_two_ranks, (str(tmp_path),), 2)


def test_layers_that_stay():
    """Check nested configs, and options that leave no experts to convert."""
    nested = moe.RoutedExperts.Config(inner_experts=CONFIG, token_dispatcher=None)
    converted("MXFP8", nested)
    assert isinstance(nested.inner_experts.recipe, recipes.MXFP8)
    for skip in ({"skip": ("inner",)}, {"skip_first": 1}, {"skip_last": 1}):
        with pytest.raises(ValueError, match=f"no experts to convert: .*{next(iter(skip))}"):
            converted("MXFP8", nested, **skip)


def test_first_and_last_layers_stay():
    """Check that ``skip``, ``skip_first`` and ``skip_last`` leave layers unconverted."""

    @dataclasses.dataclass
    class Config(Configurable.Config):
        layers: list

    config = Config(layers=[dataclasses.replace(CONFIG) for _ in range(5)])
    converted("MXFP8", config, skip_first=1, skip_last=2, skip=("layers.2",))
    assert [hasattr(layer, "recipe") for layer in config.layers] == [
        False,
        True,
        False,
        False,
        False,
    ]


def test_what_is_refused():
    with pytest.raises(ValueError, match="recipe must be one of"):
        converted("FP4")
    with pytest.raises(ValueError, match="keeps scales"):
        converted("FP8Delayed")
    with pytest.raises(ValueError, match="skip_last must not be negative"):
        converted("BF16", skip_last=-1)


@dataclasses.dataclass
class Tree(Configurable.Config):
    """Stands for the configuration of a model."""

    layers: list = dataclasses.field(default_factory=list)


@pytest.fixture
def logged(caplog, monkeypatch):
    """Lines that torchtitan's logger is given."""
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(
        torchtitan_integration,
        "_warn_of_overrides",
        torchtitan_integration._warn_of_overrides.__wrapped__,
    )
    with caplog.at_level("INFO", logger=logger.name):
        yield lambda: [record.getMessage() for record in caplog.records]


def tree_of(count):
    return Tree(layers=[dataclasses.replace(CONFIG) for _ in range(count)])


def test_torchtitan_sees_that_experts_are_quantized(logged):
    """So that it reports no MFU by the peak of BF16; under the recipe BF16 that is the right one."""  # noqa: E501
    for recipe, is_quantized in (("FP8Block", True), (recipes.NVFP4(), True), ("BF16", False)):
        tree = converted(recipe, tree_of(2))
        assert has_quantization(tree) == is_quantized
        assert not has_quantization(tree_of(2))
    converted_twice = converted("MXFP8", converted("BF16", tree_of(1)))
    assert has_quantization(converted_twice) and not has_quantization(
        converted("BF16", converted_twice)
    )
    assert type(converted_twice.layers[0])._owner.__mro__[1] is moe.GroupedExperts


def test_what_was_converted_is_logged(logged):
    converted("FP8Block", tree_of(6), skip_first=1)
    (line,) = (line for line in logged() if line.startswith("Converted experts to FP8Block"))
    assert "5 (layers.1, layers.2, layers.3, ...); others: 1 (layers.0)" in line


def test_overrides_of_experts(logged):
    """Check that torchtitan's override skips converted experts with a message, unless ``after``."""
    fused = "torchtitan.overrides.fused_swiglu.fused_grouped_experts"
    converted("FP8Block", converted("FP8Block", tree_of(1))).layers[0].build()
    tree = converted("FP8Block", tree_of(1))
    apply_overrides(OverrideConfig(imports=[fused]), tree)
    assert type(tree.layers[0].build()).__name__ == "CuteGroupedExperts"
    assert any(
        fused in line and "no effect on experts" in line and "grouped_experts" in line
        for line in logged()
    )
    tree, ours = tree_of(2), "grouped.integrations.torchtitan.grouped_experts"
    apply_overrides(OverrideConfig(imports=[(ours, {"recipe": "FP8Block", "after": fused})]), tree)
    experts = tree.layers[1].build()
    assert type(experts).__name__ == "CuteFusedGroupedExperts" and experts.w13.shape == (
        4,
        32,
        2,
        64,
    )
    assert experts.recipe == recipes.FP8Block() and has_quantization(tree)
    plain = tree_of(1)
    apply_overrides(OverrideConfig(imports=[(ours, {"recipe": "FP8Block"})]), plain)
    x = torch.randn(40, 64, dtype=BF16)
    for p in (theirs := converted("FP8Block").build()).parameters():
        nn.init.normal_(p, std=0.1)
    (mine := plain.layers[0].build()).load_state_dict(theirs.state_dict())
    counts = torch.tensor([13, 0, 7, 20])
    assert_same_bytes(mine(x, counts).detach(), theirs(x, counts).detach())
    for options, message in (
        ({"recipe": "FP4"}, "recipe must be one of"),
        (
            {"after": "torchtitan.overrides.fused_swiglu.fused"},
            "after must name an override.*'fused' is none",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            apply_overrides(OverrideConfig(imports=[(ours, options)]), tree_of(1))
    with pytest.raises(ValueError, match="does not apply to CuteGroupedExperts.*left it unchanged"):
        apply_overrides(
            OverrideConfig(imports=[(ours, {"after": fused})]), converted("FP8Block", tree_of(1))
        )
    with pytest.raises(ValueError, match="both claim node"):
        apply_overrides(OverrideConfig(imports=[fused, ours]), tree_of(1))
