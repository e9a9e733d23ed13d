import pytest
import torch

import cute_kernels
from cute_kernels.ops.reductions.op import GroupedAmax
from cute_kernels.runtime.plan_cache import PLANS, PlanCache, plan_key
from tests.helpers import F16, m_grouped_arguments, offs_tensor


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.setattr(PLANS, "_plans", {})
    return PLANS


@pytest.fixture
def checks(monkeypatch):
    calls = []
    check = GroupedAmax.check
    monkeypatch.setattr(GroupedAmax, "check", lambda op: (calls.append(op), check(op)))
    return calls


def test_a_hit_runs_no_check_again(plans, checks):
    offs = offs_tensor(2, 3)
    first = GroupedAmax.fast_call(torch.ones(3, 8), offs)
    again = GroupedAmax.fast_call(torch.full((3, 8), 2.0), offs - 1)
    assert len(checks) == len(plans) == 1
    assert first.tolist() == [1.0, 1.0]
    assert again.tolist() == [2.0, 2.0]


def test_backends_and_flags_have_plans_of_their_own(plans):
    x, offs = torch.ones(3, 16), offs_tensor(2, 3)
    quantize = cute_kernels.ops.grouped_quantize
    quantize(x, "nvfp4", offs)
    quantize(x, "nvfp4:row_scaled", offs)
    quantize(x, "nvfp4", offs, None, True, True)
    with cute_kernels.backend("reference:sm_100a"):
        quantize(x, "nvfp4", offs)
    assert len(plans) == 4


def key_of(*arguments):
    return plan_key(GroupedAmax, None, arguments)


X = torch.zeros(3, 8)
PAIR = [X, torch.zeros(3)]


@pytest.mark.parametrize(
    ("given", "other"),
    [
        *((X, other) for other in (X[:2], torch.zeros(8, 3).t(), X.to(F16), X.to("meta"), None)),
        *((PAIR, other) for other in ([X[:2], PAIR[1]], PAIR[::-1], [X, torch.zeros(6)[::2]], [X])),
        *((PAIR, other) for other in ([*PAIR, PAIR[1]], [], None)),
    ],
)
def test_what_a_plan_may_depend_on_is_in_the_key(given, other):
    assert key_of(other, True) != key_of(given, True)
    hash(key_of(other, True))


def test_values_of_tensors_are_not_in_the_key():
    assert key_of(X + 1, True) == key_of(X, True)
    assert key_of([part + 1 for part in PAIR], True) == key_of(tuple(PAIR), True)


def test_lists_are_told_from_their_tensors():
    a, b = PAIR
    keys = [key_of(*call) for call in ((a, b), ([a], b), (a, [b]), ([a, b],), ([a], [b]), ([], a))]
    assert len(set(keys)) == len(keys)


def test_scales_have_a_part_in_the_plan(plans):
    x, offs = torch.randn(40, 32), offs_tensor(10, 40)
    a = cute_kernels.ops.grouped_quantize(x, "nvfp4", offs)
    b = cute_kernels.ops.grouped_quantize(torch.randn(2, 16, 32), "nvfp4")
    apart = a[1].repeat_interleave(2, dim=0)[::2]
    assert apart.equal(a[1]) and apart.stride() != a[1].stride()
    plans.clear()
    multiply = cute_kernels.ops.m_grouped_gemm
    first = multiply(*m_grouped_arguments(a, b, offs))
    again = multiply(*m_grouped_arguments([t.clone() for t in a], b, offs))
    assert len(plans) == 1
    other = multiply(*m_grouped_arguments([a[0], apart, a[2]], b, offs))
    assert len(plans) == 2
    assert first.equal(again) and first.equal(other)


def test_a_failed_check_is_not_remembered(plans, checks):
    for _ in range(2):
        with pytest.raises(ValueError, match="offs"):
            GroupedAmax.fast_call(torch.ones(3, 8), torch.zeros(0, dtype=torch.int32))
    assert len(checks) == 2
    assert len(plans) == 0


def test_past_its_capacity_the_oldest_plan_goes():
    plans = PlanCache(capacity=2)
    for key in "abc":
        plans.add(key, key.upper())
    assert len(plans) == 2
    assert plans.get("a") is None
    assert plans.get("c") == "C"
