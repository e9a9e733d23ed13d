import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from grouped import recipes
from tests.helpers import BF16, assert_same_bytes, raises

moe = pytest.importorskip("torchtitan.models.common.moe", exc_type=ImportError)
from torchtitan.config import Configurable  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher  # noqa: E402

from grouped.integrations.torchtitan import GroupedExpertsConverter  # noqa: E402

CONFIG = moe.GroupedExperts.Config(dim=64, hidden_dim=32, num_experts=4)


def converted(recipe, config=CONFIG, **options):
	return GroupedExpertsConverter.Config(recipe=recipe, **options).build().convert(config)


@pytest.mark.parametrize("recipe", ["BF16", "FP8Block", recipes.NVFP4()])
def test_converted_experts(recipe):
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
		assert (got - want).float().norm() / want.float().norm() < (0.02 if recipe == "BF16" else 0.5)


def on_two_ranks(rank, folder):
	"""DTensor weights, Shard(0), behind torchtitan's exchange of tokens: the bits of one process."""
	dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
	mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
	set_spmd_backend("partial_dtensor")
	for recipe in ("BF16", "FP8Block"):
		dispatcher = AllToAllTokenDispatcher.Config(num_experts=4, top_k=2)
		torch.manual_seed(0)
		config = moe.RoutedExperts.Config(inner_experts=CONFIG, token_dispatcher=dispatcher)
		alone, spread = (converted(recipe, config).build() for _ in range(2))
		for name, p in list(alone.inner_experts.named_parameters()):
			nn.init.normal_(p, std=0.1)
			part = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
			setattr(spread.inner_experts, name, nn.Parameter(part))
		spread.token_dispatcher.wire_meshes(ep_mesh=mesh)
		x, dy = torch.randn(2, 2, 20, 64, dtype=BF16)
		# Of the second rank none goes to the last expert.
		ids = torch.stack([torch.rand(20, experts).topk(2).indices for experts in (4, 3)])
		scores, found = torch.rand(2, 20, 2), []
		for experts, mine in ((alone, slice(None)), (spread, slice(rank, rank + 1))):
			leaf = x[mine].clone().requires_grad_()
			y = experts(leaf, scores[mine], ids[mine], torch.bincount(ids[mine].flatten(), minlength=4))
			y.backward(dy[mine])
			found.append((y.detach(), leaf.grad, [p.grad for p in experts.parameters()]))
		(y, dx, dw), (mine, dmine, dparts) = found
		assert_same_bytes(mine[0], y[rank])
		assert_same_bytes(dmine[0], dx[rank])
		for part, whole in zip(dparts, dw, strict=True):
			assert_same_bytes(part.full_tensor(), whole)
	dist.destroy_process_group()


def test_experts_spread_by_torchtitan(tmp_path):
	torch.multiprocessing.spawn(on_two_ranks, (str(tmp_path),), 2)


def test_layers_that_stay():
	nested = moe.RoutedExperts.Config(inner_experts=CONFIG, token_dispatcher=None)
	converted("MXFP8", nested)
	assert isinstance(nested.inner_experts.recipe, recipes.MXFP8)
	for skip in ({"skip": ("inner",)}, {"skip_first": 1}, {"skip_last": 1}):
		with raises(ValueError, f"no experts to convert: .*{next(iter(skip))}"):
			converted("MXFP8", nested, **skip)


def test_first_and_last_layers_stay():
	@dataclasses.dataclass
	class Config(Configurable.Config):
		layers: list

	config = Config(layers=[dataclasses.replace(CONFIG) for _ in range(5)])
	converted("MXFP8", config, skip_first=1, skip_last=2, skip=("layers.2",))
	assert [hasattr(layer, "recipe") for layer in config.layers] == [False, True, False, False, False]


def test_what_is_refused():
	with raises(ValueError, "recipe must be one of"):
		converted("FP4")
	with raises(ValueError, "keeps scales"):
		converted("FP8Delayed")
	with raises(ValueError, "skip_last must not be negative"):
		converted("BF16", skip_last=-1)
