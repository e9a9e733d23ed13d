import pytest
import torch

import cute_kernels
from cute_kernels.ops import registry
from cute_kernels.ops.quantize import GroupedAmax
from cute_kernels.runtime.plan import PlanCache, plan_key


@pytest.fixture
def plans(monkeypatch):
    cache = PlanCache()
    monkeypatch.setattr(registry, "_plans", cache)
    return cache


@pytest.fixture
def checks(monkeypatch):
    """Calls of the op's check."""
    calls = []
    check = GroupedAmax.check
    monkeypatch.setattr(GroupedAmax, "check", lambda op: (calls.append(op), check(op)))
    return calls


def test_a_hit_runs_no_check_again(plans, checks):
    offs = torch.tensor([2, 3], dtype=torch.int32)
    first = GroupedAmax.invoke(torch.ones(3, 8), offs)
    again = GroupedAmax.invoke(torch.full((3, 8), 2.0), offs - 1)
    assert len(checks) == len(plans) == 1
    assert first.tolist() == [1.0, 1.0]
    assert again.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 8),
        torch.zeros(8, 3).t(),
        torch.zeros(3, 8, dtype=torch.float16),
        torch.zeros(3, 8, device="meta"),
        None,
    ],
)
def test_what_a_plan_may_depend_on_is_in_the_key(other):
    def key(x):
        return plan_key(GroupedAmax, None, (x, True))

    assert key(other) != key(torch.zeros(3, 8))
    assert key(torch.ones(3, 8)) == key(torch.zeros(3, 8))


def test_backends_and_flags_have_plans_of_their_own(plans):
    x, offs = torch.ones(3, 16), torch.tensor([2, 3], dtype=torch.int32)
    quantize = cute_kernels.ops.grouped_quantize_nvfp4
    quantize(x, offs)
    quantize(x, offs, None, True)
    with cute_kernels.backend("reference:sm_100a"):
        quantize(x, offs)
    assert len(plans) == 3


def test_a_failed_check_is_not_remembered(plans, checks):
    for _ in range(2):
        with pytest.raises(ValueError, match="offs"):
            GroupedAmax.invoke(torch.ones(3, 8), torch.zeros(0, dtype=torch.int32))
    assert len(checks) == 2
    assert len(plans) == 0


def test_past_its_capacity_the_oldest_plan_goes():
    plans = PlanCache(capacity=2)
    for key in "abc":
        plans.add(key, key.upper())
    assert len(plans) == 2
    assert plans.get("a") is None
    assert plans.get("c") == "C"
