"""Delayed scaling whose amaxes are reduced over processes: two of them, on gloo."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import grouped
from grouped import recipes
from grouped.nn import GroupedLinear
from tests.helpers import assert_all_same, assert_same_buffers, assert_same_bytes, sample

INF, NAN = float("inf"), float("nan")
E4M3 = torch.float8_e4m3fn
ROOT = Path(__file__).parents[2]
#: Amaxes of six slots on each of two processes, and the largest of both by the rule.
FIRST = [1.0, 0.0, NAN, NAN, INF, 7.0]
SECOND = [4.0, 0.0, 3.0, NAN, 2.0, 0.0]
LARGEST = [4.0, 0.0, 3.0, 0.0, INF, 7.0]

PROGRAM = """
    import sys, torch, torch.distributed as dist
    import grouped
    from grouped import recipes
    from grouped.nn import GroupedLinear

    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    store = dist.FileStore(folder + "/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    amaxes = torch.tensor(eval(sys.argv[3], {"inf": float("inf"), "nan": float("nan")}))

    found = {}
    for given in (False, True):
        history, scale = torch.zeros(3, 6), torch.ones(6)
        history[0] = torch.full((6,), 9.0) if given and rank else amaxes
        amax = amaxes if given else None
        grouped.delayed_scaling_update(
            history, scale, torch.float8_e4m3fn, amax=amax, group=dist.group.WORLD
        )
        found[given] = (history, scale)

    recipe = recipes.FP8Delayed(history_length=3, amax_group=dist.group.WORLD)
    torch.manual_seed(0)
    layer = GroupedLinear(2, 32, 16, recipe=recipe, dtype=torch.bfloat16)
    torch.manual_seed(1 + rank)
    outputs = []
    for step in range(3):
        x = (torch.randn(20, 32) * 4.0 ** (step - rank)).bfloat16().requires_grad_()
        y = layer(x, [20, 20] if rank else [8, 20])
        y.backward(torch.full_like(y, 2.0 ** (step + rank)))
        outputs.append(y.detach())
    found["layer"] = {k: v for k, v in layer.state_dict().items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
	"""What each of two processes found."""
	folder = tmp_path_factory.mktemp("processes")
	program = folder / "program.py"
	program.write_text(textwrap.dedent(PROGRAM))
	environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
	processes = [
		subprocess.Popen(
			[sys.executable, str(program), str(rank), str(folder), str(amaxes)],
			env=environment,
			stderr=subprocess.PIPE,
			text=True,
		)
		for rank, amaxes in enumerate((FIRST, SECOND))
	]
	for process in processes:
		_, errors = process.communicate(timeout=120)
		assert process.returncode == 0, errors
	return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def alone(amaxes):
	history, scale = torch.zeros(3, 6), torch.ones(6)
	history[0] = torch.tensor(amaxes)
	grouped.delayed_scaling_update(history, scale, E4M3)
	return history, scale


def test_both_processes_take_the_largest_and_stay_in_step(results):
	want = alone(LARGEST)
	for found in results:
		assert_all_same(found[False], want)


def test_amaxes_that_are_given_are_reduced_where_they_are_not_zero(results):
	"""Where the second process was given 0, its row 0 counts, which is 9."""
	given = [max(a, 9.0) if b == 0 else c for a, b, c in zip(FIRST, SECOND, LARGEST, strict=True)]
	want = alone(given)
	for found in results:
		assert_all_same(found[True], want)


def test_layers_share_their_scales(results):
	first, second = (found["layer"] for found in results)
	for name, value in first.items():
		if name.endswith("_scale"):
			assert_same_bytes(value, second[name], name)
		if name.endswith("_amax_history"):
			# Those of the last step are each process's own.
			assert_same_bytes(value[1:], second[name][1:], name)
			assert value[1:].any()
	# The second group has rows in the first process alone.
	assert first["scaling.input_scale"].ne(1).all()
	assert first["scaling.grad_output_scale"].ne(1).all()


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
