"""Delayed scaling whose amaxes are reduced over a group of one; over two: ``two_ranks``."""

import pytest
import torch
import torch.distributed as dist

import grouped
from grouped import recipes
from grouped.nn import GroupedLinear
from tests.helpers import assert_same_buffers, assert_same_bytes, sample

NAN = torch.nan
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def one_process():
	dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
	yield dist.group.WORLD
	dist.destroy_process_group()


def test_a_group_of_one_is_no_group(one_process):
	torch._dynamo.reset()
	recipe = recipes.FP8Delayed(history_length=3, amax_group=one_process)
	assert recipe.amax_group == one_process.group_name
	torch.manual_seed(0)
	layers = [
		GroupedLinear(2, 32, 16, recipe=r, dtype=torch.bfloat16)
		for r in (recipe, recipes.FP8Delayed(history_length=3), recipe)
	]
	for other in layers[1:]:
		other.load_state_dict(layers[0].state_dict())
	functions = [*layers[:2], torch.compile(layers[2], fullgraph=True, backend="aot_eager")]
	for _ in range(3):
		x, dy = sample(20, 32), sample(20, 16)
		leaves = [x.clone().requires_grad_() for _ in functions]
		for function, leaf in zip(functions, leaves, strict=True):
			function(leaf, [8, 20]).backward(dy)
		for leaf, layer in zip(leaves[1:], layers[1:], strict=True):
			assert_same_bytes(leaf.grad, leaves[0].grad)
			assert_same_buffers(layer.state_dict(), layers[0].state_dict())
	torch._dynamo.reset()


def test_errors_come_before_anything_is_written(one_process):
	history, scale = torch.tensor([[NAN, 1.0], [2.0, 3.0]]), torch.ones(2)
	before = history.clone()
	with pytest.raises(ValueError, match="algorithm must be"):
		grouped.delayed_scaling_update(history, scale, E4M3, algorithm="mean", group=one_process)
	with pytest.raises(ValueError, match="scale must have size 2"):
		grouped.delayed_scaling_update(history, torch.ones(3), E4M3, group=one_process)
	assert_same_bytes(history, before)
