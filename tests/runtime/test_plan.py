import pytest
import torch

from cute_kernels.runtime import LaunchPlan, PlanCache


class Builder:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return ("plan", self.calls)


def test_a_hit_runs_no_check_again():
    plans, build = PlanCache(), Builder()
    offs = torch.zeros(4, dtype=torch.int32)
    first = plans.get((torch.zeros(3, 8), offs, None), "facts", build)
    again = plans.get((torch.ones(3, 8), offs + 1, None), "facts", build)
    assert first is again
    assert build.calls == 1


@pytest.mark.parametrize(
    ("tensor", "facts"),
    [
        (torch.zeros(4, 8), "facts"),
        (torch.zeros(8, 3).t(), "facts"),
        (torch.zeros(3, 8, dtype=torch.float16), "facts"),
        (torch.zeros(3, 8, device="meta"), "facts"),
        (None, "facts"),
        (torch.zeros(3, 8), "other facts"),
    ],
)
def test_what_a_plan_may_depend_on_is_in_the_key(tensor, facts):
    plans, build = PlanCache(), Builder()
    plans.get((torch.zeros(3, 8),), "facts", build)
    plans.get((tensor,), facts, build)
    assert build.calls == 2


def test_a_failed_build_is_not_remembered():
    plans = PlanCache()

    def refuse():
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            plans.get((torch.zeros(1),), None, refuse)
    assert len(plans) == 0


def test_past_its_capacity_the_oldest_plan_goes():
    plans, build = PlanCache(capacity=2), Builder()
    for rows in (1, 2, 3):
        plans.get((torch.zeros(rows),), None, build)
    assert len(plans) == 2
    plans.get((torch.zeros(3),), None, build)
    assert build.calls == 3
    plans.get((torch.zeros(1),), None, build)
    assert build.calls == 4


def test_a_plan_passes_tensors_then_scalars():
    calls = []
    plan = LaunchPlan(lambda *args: calls.append(args), (7, 0.5))
    tensor = torch.zeros(1)
    plan(tensor, None)
    assert calls == [(tensor, None, 7, 0.5)]
