"""Replayed calls of several ops: the bits of calls that are not replayed, whatever changed."""

import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import grouped
from cute_kernels import backend
from cute_kernels.runtime import replay
from cute_kernels.runtime.plan_cache import clear_plan_cache
from tests.helpers import BF16, F32, assert_all_same, ops, seeded_generator

EMULATED = "emulated:sm_90a"


@pytest.fixture
def recordings(monkeypatch):
    """Return the list of calls that were replayed."""
    calls, repeat = [], replay.Recording.repeat
    monkeypatch.setattr(
        replay.Recording, "repeat", lambda *args: (calls.append(args[0]), repeat(*args))[1]
    )
    clear_plan_cache()
    yield calls
    clear_plan_cache()


def make_moe(recipe=None, **options):
    torch.manual_seed(3)
    return grouped.nn.MoE(64, 32, 8, 2, recipe=recipe, dtype=BF16, **options)


def tokens(seed, count=9):
    return torch.randn(count, 64, generator=seeded_generator(seed)).bfloat16()


def check(function):
    """Check that kernels and the tensor-core reference give the same bits."""
    results = []
    for name in ("reference:sm_90a", EMULATED):
        with backend(name):
            results.append([t.detach() for t in function()])
    assert_all_same(*results)


def step(moe, x, dy=lambda y: y.detach() * 0.5):
    """Return the output and all gradients of one training step."""
    x = x.clone().requires_grad_()
    for p in moe.parameters():
        p.main_grad = torch.zeros(p.shape)
    y, leaves = moe(x), [x, *(p for p in moe.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad(y, leaves, dy(y))]


every_recipe = pytest.mark.parametrize(
    "recipe", [grouped.recipes.BF16(), grouped.recipes.FP8Block()], ids=["bf16", "fp8-block"]
)


def serve(moe, x):
    with torch.no_grad():
        return [moe(x)]


def count_replays(recordings, function):
    """Check the function's bits, and return the number of calls that were replayed."""
    before = len(recordings)
    check(function)
    return len(recordings) - before


@pytest.fixture
def served(recordings, recipe):
    """Return a layer in inference whose calls are replayed, and a function that counts replays."""
    moe = make_moe(recipe, bias=True).eval()

    def count(seed, rows=9):
        return count_replays(recordings, lambda: serve(moe, tokens(seed, rows)))

    assert [count(seed) for seed in range(4)] == [0, 0, 1, 1]
    return moe, count


@pytest.mark.emulated
@every_recipe
def test_inference_reads_changed_weights(served):
    """Check that replayed calls read changed weights."""
    moe, count = served
    with torch.no_grad():
        moe.experts.gate_up.weight.mul_(1.5)
        moe.router.weight.copy_(moe.router.weight.flip(0))
    assert count(5) == 1
    moe.experts.down.weight.data = moe.experts.down.weight.data.neg()
    assert count(6) == 1


@pytest.mark.emulated
@every_recipe
def test_other_options_and_sizes_are_not_replayed(served):
    """Check that other options and sizes are not replayed."""
    moe, count = served
    moe.router.renormalize = False
    assert count(7) == 0
    assert count(8, rows=5) == 0
    check(lambda: serve(moe, tokens(1, 18)[::2]))


@pytest.mark.emulated
@every_recipe
def test_a_hook_of_the_router_is_called(served):
    """Check that a hook of the router is called, and that its parts are replayed separately."""
    moe, count = served
    calls = []
    hook = moe.router.register_forward_hook(lambda *args: calls.append(args))
    # The hook splits the layer: experts, routing and router are replayed separately.
    assert [count(seed) for seed in range(3)] == [0, 3, 3]
    hook.remove()
    assert len(calls) == 6


@pytest.mark.emulated
@every_recipe
def test_observed_calls_are_not_replayed(served, recordings):
    """Check that calls under a profiler or a dispatch mode are not replayed."""
    moe, _ = served
    before = len(recordings)
    with backend(EMULATED):
        with FlopCounterMode(display=False) as flops:
            serve(moe, tokens(1))
        with torch.profiler.profile() as profile:
            serve(moe, tokens(1))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert serve(moe, mode.from_tensor(tokens(1)))[0].fake_mode is mode
    assert flops.get_total_flops() > 0
    assert "cute_kernels::moe_combine" in {e.name for e in profile.events()}
    assert len(recordings) == before


#: Options of the layer, and the passes of a step that are replayed.
LAYERS = {
    "plain": ({}, 5),
    "recompute": ({"recompute": True, "bias": True}, 5),
    "fused": ({"fuse_wgrad_accumulation": True}, 4),
    "separate parameters": ({"single_parameter": False}, 4),
}


def train(recordings, moe, seed, **options):
    """Run a training step, change a weight, and return the number of replayed passes."""
    replays = count_replays(
        recordings,
        lambda: step(moe, tokens(seed), **options) + [p.main_grad for p in moe.parameters()],
    )
    with torch.no_grad():
        next(moe.experts.down.parameters()).add_(0.1)
    return replays


@pytest.mark.emulated
@every_recipe
@pytest.mark.parametrize(("options", "passes"), LAYERS.values(), ids=LAYERS)
def test_training_steps_are_replayed(recordings, recipe, options, passes):
    """Passes of the experts that write gradients elsewhere, or separate ones, are not replayed."""
    moe = make_moe(recipe, **options)
    assert [train(recordings, moe, seed) for seed in range(4)] == [0, 0, passes, passes]


@pytest.mark.emulated
@every_recipe
def test_other_steps_are_replayed_separately(recordings, recipe):
    """Strided gradients, a frozen router, and a backward hook change the passes of a step."""
    moe = make_moe(recipe)
    assert [train(recordings, moe, seed) for seed in range(3)] == [0, 0, 5]
    strided = {"dy": lambda y: y.T.contiguous().T}
    assert [train(recordings, moe, seed, **strided) for seed in range(3)] == [4, 4, 5]
    moe.router.requires_grad_(False)
    assert [train(recordings, moe, seed) for seed in range(3)] == [4, 4, 5]
    moe.router.requires_grad_(True)
    calls = []
    hook = moe.experts.register_full_backward_hook(lambda *args: calls.append(args))
    assert train(recordings, moe, 5) == 5 and len(calls) == 2
    hook.remove()


@pytest.mark.emulated
@every_recipe
def test_a_second_derivative_raises(recordings, recipe):
    moe = make_moe(recipe)
    with backend(EMULATED):
        for seed in range(3):
            step(moe, tokens(seed))
        assert recordings
        x = tokens(0).requires_grad_()
        (dx,) = torch.autograd.grad(moe(x).float().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated twice"):
            dx.sum().backward()


@pytest.mark.emulated
def test_two_threads_replay_steps(recordings):
    """Check that two threads replay training steps with correct results."""
    moe, results = make_moe(), {}

    def run(seed):
        results[seed] = [step(moe, tokens(seed)) for _ in range(3)]

    with backend(EMULATED):
        expected = {seed: step(moe, tokens(seed)) for seed in range(2)}
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert recordings
    for seed, steps in results.items():
        for tensors in steps:
            assert_all_same(tensors, expected[seed])


def route_and_combine(ids, rows):
    """Return tensors that ops compute, and a value that is not a tensor."""
    offs, token, _, row = ops.compute_routing(ids, 3)
    gathered = ops.moe_gather(rows, token) + 1
    return [ops.moe_combine(gathered, row, None, F32), offs], "more"


def values(width=16):
    return torch.tensor([[0, 1], [2, 0], [1, 2]]), torch.randn(3, width).bfloat16()


@pytest.mark.emulated
@pytest.mark.parametrize("cause", ["reads", "foreign", "same", "aligned"])
def test_calls_that_cannot_be_replayed(recordings, cause):
    """Check that calls with unsuitable tensors are not replayed."""
    foreign = torch.ones(())

    def function(ids, rows):
        """Return the results, changed in the way that prevents a replay."""
        results, more = route_and_combine(ids, rows)
        if cause == "reads" and results[1][0].item() < 0:
            return [results[0]], more
        if cause == "foreign":
            results[0] = results[0] * foreign
        return results, more

    with backend(EMULATED):
        for i in range(4):
            ids, rows = values()
            tensors = [ids, rows, rows] if cause == "same" else [ids, rows]
            if cause == "aligned" and i == 3:
                tensors[1] = rows = torch.empty(49, dtype=rows.dtype)[1:].view(3, 16).copy_(rows)
            got, more = replay.replayed(
                cause, tensors, lambda _, ids=ids, rows=rows: function(ids, rows)
            )
            assert more == "more"
            assert_all_same(got, route_and_combine(ids, rows)[0])
    assert len(recordings) == (cause == "aligned")


@pytest.mark.emulated
def test_calls_with_the_same_key_keep_their_guards(recordings, monkeypatch):
    """Guards are made once, though calls alternate between widths, which the key omits."""
    guarded, guard = [], replay.Recording.guard
    monkeypatch.setattr(
        replay.Recording, "guard", lambda *args: (guarded.append(args[0]), guard(*args))[1]
    )
    with backend(EMULATED):
        for _ in range(6):
            for width in (16, 32):
                ids, rows = values(width)
                got, _ = replay.replayed(
                    "alike", [ids, rows], lambda arguments: route_and_combine(*arguments)
                )
                assert_all_same(got, route_and_combine(ids, rows)[0])
    assert len(guarded) == 2 and len(recordings) == 8


@pytest.mark.emulated
def test_temporary_tensors_are_freed_once_read(recordings):
    """A replayed call frees each temporary tensor after its last use."""
    with backend(EMULATED):
        for _ in range(3):
            ids, rows = values()
            replay.replayed("memory", [ids, rows], lambda arguments: route_and_combine(*arguments))
    (recording,) = recordings
    created = [step[2] for step in recording.steps if step[2]]
    freed = [i for step in recording.steps for i in step[3]]
    # Two arguments are freed as well, and two results are not.
    assert len(set(freed)) == len(freed) == len(created)
