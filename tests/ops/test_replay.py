"""Calls of several ops that are repeated: the bits of calls that are not, whatever changed in
between.
"""

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
    """Calls that were repeated."""
    found, repeat = [], replay.Recording.repeat
    monkeypatch.setattr(
        replay.Recording, "repeat", lambda *args: (found.append(args[0]), repeat(*args))[1]
    )
    clear_plan_cache()
    yield found
    clear_plan_cache()


def moe_of(recipe=None, **options):
    torch.manual_seed(3)
    return grouped.nn.MoE(64, 32, 8, 2, recipe=recipe, dtype=BF16, **options)


def tokens(seed, count=9):
    return torch.randn(count, 64, generator=seeded_generator(seed)).bfloat16()


def check(function):
    """Kernels and the reference that adds like them give the same."""
    found = []
    for name in ("reference:sm_90a", EMULATED):
        with backend(name):
            found.append([t.detach() for t in function()])
    assert_all_same(*found)


def step(moe, x, dy=lambda y: y.detach() * 0.5):
    x = x.clone().requires_grad_()
    for p in moe.parameters():
        p.main_grad = torch.zeros(p.shape)
    y, leaves = moe(x), [x, *(p for p in moe.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad(y, leaves, dy(y))]


every_recipe = pytest.mark.parametrize(
    "recipe", [grouped.recipes.BF16(), grouped.recipes.FP8Block()], ids=["bf16", "fp8-block"]
)


@pytest.mark.emulated
@every_recipe
def test_a_layer_that_serves(recordings, recipe):
    moe = moe_of(recipe, bias=True).eval()

    @torch.no_grad()
    def serve(x):
        return [moe(x)]

    def serves(seed, count=9):
        before = len(recordings)
        check(lambda: serve(tokens(seed, count)))
        return len(recordings) - before

    assert [serves(seed) for seed in range(4)] == [0, 0, 1, 1]
    with torch.no_grad():
        moe.experts.gate_up.weight.mul_(1.5)
        moe.router.weight.copy_(moe.router.weight.flip(0))
    assert serves(5) == 1
    moe.experts.down.weight.data = moe.experts.down.weight.data.neg()
    assert serves(6) == 1
    moe.router.renormalize = False
    assert serves(7) == 0
    assert serves(8, count=5) == 0
    moe.router.renormalize = True
    seen = []
    hook = moe.router.register_forward_hook(lambda *args: seen.append(args))
    assert [serves(seed) for seed in range(3)] == [2, 3, 3]  # experts, routing and then the router
    hook.remove()
    assert len(seen) == 6
    check(lambda: serve(tokens(1, 18)[::2]))
    before = len(recordings)
    with backend(EMULATED):
        with FlopCounterMode(display=False) as flops:
            serve(tokens(1))
        with torch.profiler.profile() as profile:
            serve(tokens(1))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert serve(mode.from_tensor(tokens(1)))[0].fake_mode is mode
    assert flops.get_total_flops() > 0
    assert "cute_kernels::moe_combine" in {e.name for e in profile.events()}
    assert len(recordings) == before


WAYS = {
    "plain": {},
    "recompute": {"recompute": True, "bias": True},
    "fused": {"fuse_wgrad_accumulation": True},
    "apart": {"single_parameter": False},
}


@pytest.mark.emulated
@every_recipe
@pytest.mark.parametrize("way", list(WAYS))
def test_steps(recordings, recipe, way):
    """Forward and backward of router and experts; those of experts not where they are written, or
    cut, elsewhere.
    """
    moe, passes = moe_of(recipe, **WAYS[way]), 5 if way in ("plain", "recompute") else 4

    def steps(seed, **options):
        before = len(recordings)
        check(lambda: step(moe, tokens(seed), **options) + [p.main_grad for p in moe.parameters()])
        with torch.no_grad():
            next(moe.experts.down.parameters()).add_(0.1)
        return len(recordings) - before

    assert [steps(seed) for seed in range(4)] == [0, 0, passes, passes]
    if way != "plain":
        return
    # Gradients that lie otherwise in memory, and of frozen parameters.
    assert [steps(seed, dy=lambda y: y.T.contiguous().T) for seed in range(3)] == [4, 4, 5]
    moe.router.requires_grad_(False)
    assert [steps(seed) for seed in range(3)] == [4, 4, 5]
    moe.router.requires_grad_(True)
    seen = []
    hook = moe.experts.register_full_backward_hook(lambda *args: seen.append(args))
    assert steps(5) == passes and len(seen) == 2
    hook.remove()
    with backend(EMULATED):
        x = tokens(0).requires_grad_()
        (dx,) = torch.autograd.grad(moe(x).float().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated twice"):
            dx.sum().backward()


@pytest.mark.emulated
def test_steps_of_two_threads(recordings):
    moe, found = moe_of(), {}

    def run(seed):
        found[seed] = [step(moe, tokens(seed)) for _ in range(3)]

    with backend(EMULATED):
        expected = {seed: step(moe, tokens(seed)) for seed in range(2)}
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert recordings
    for seed, made in found.items():
        for one in made:
            assert_all_same(one, expected[seed])


def count(ids, rows):
    offs, token, _, row = ops.compute_routing(ids, 3)
    made = ops.moe_gather(rows, token) + 1
    return [ops.moe_combine(made, row, None, F32), offs], "more"


def values(width=16):
    return torch.tensor([[0, 1], [2, 0], [1, 2]]), torch.randn(3, width).bfloat16()


@pytest.mark.emulated
@pytest.mark.parametrize("what", ["reads", "foreign", "same", "aligned"])
def test_what_is_not_repeated(recordings, what):
    foreign = torch.ones(())

    def function(ids, rows):
        found, more = count(ids, rows)
        if what == "reads" and found[1][0].item() < 0:
            return [found[0]], more
        if what == "foreign":
            found[0] = found[0] * foreign
        return found, more

    with backend(EMULATED):
        for i in range(4):
            ids, rows = values()
            tensors = [ids, rows, rows] if what == "same" else [ids, rows]
            if what == "aligned" and i == 3:
                tensors[1] = rows = torch.empty(49, dtype=rows.dtype)[1:].view(3, 16).copy_(rows)
            got, more = replay.replayed(
                what, tensors, lambda _, ids=ids, rows=rows: function(ids, rows)
            )
            assert more == "more"
            assert_all_same(got, count(ids, rows)[0])
    assert len(recordings) == (what == "aligned")


@pytest.mark.emulated
def test_guards_of_calls_alike(recordings, monkeypatch):
    """They are made once, though calls differ by turns in what their key leaves out."""
    made, guard = [], replay.Recording.guard
    monkeypatch.setattr(
        replay.Recording, "guard", lambda *args: (made.append(args[0]), guard(*args))[1]
    )
    with backend(EMULATED):
        for _ in range(6):
            for width in (16, 32):
                ids, rows = values(width)
                got, _ = replay.replayed("alike", [ids, rows], lambda given: count(*given))
                assert_all_same(got, count(ids, rows)[0])
    assert len(made) == 2 and len(recordings) == 8


@pytest.mark.emulated
def test_memory_ends_where_it_did(recordings):
    """Temporary tensors of a repeated call are let go as they are read."""
    with backend(EMULATED):
        for _ in range(3):
            ids, rows = values()
            replay.replayed("memory", [ids, rows], lambda given: count(*given))
    (recording,) = recordings
    made = [step[2] for step in recording.steps if step[2]]
    ended = [i for step in recording.steps for i in step[3]]
    assert (
        len(set(ended)) == len(ended) == len(made)
    )  # With two that were given, without two that are returned.
