"""The cache of launch plans: what its keys contain, and when checks run again."""

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
    """Return the list of ops whose arguments have been checked."""
    calls = []
    check = GroupedAmax.check
    monkeypatch.setattr(GroupedAmax, "check", lambda op: (calls.append(op), check(op)))
    return calls


def test_a_hit_skips_the_checks(plans, checks):
    """Check that a cached plan skips the checks."""
    offs = offs_tensor(2, 3)
    amaxes = GroupedAmax.fast_call(torch.ones(3, 8), offs)
    amaxes_of_hit = GroupedAmax.fast_call(torch.full((3, 8), 2.0), offs - 1)
    assert len(checks) == len(plans) == 1
    assert amaxes.tolist() == [1.0, 1.0]
    assert amaxes_of_hit.tolist() == [2.0, 2.0]


def test_backends_formats_and_directions_have_separate_plans(plans):
    """Check that backends, formats and directions have separate plans."""
    x, offs = torch.ones(3, 16), offs_tensor(2, 3)
    quantize = cute_kernels.ops.grouped_quantize
    quantize(x, "nvfp4", offs)
    quantize(x, "nvfp4:row_scaled", offs)
    quantize(x, "nvfp4", offs, None, True, True)
    with cute_kernels.backend("reference:sm_100a"):
        quantize(x, "nvfp4", offs)
    assert len(plans) == 4


def make_key(*arguments):
    return plan_key(GroupedAmax, None, arguments)


X = torch.zeros(3, 8)
PAIR = [X, torch.zeros(3)]


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        *(
            (X, changed)
            for changed in (X[:2], torch.zeros(8, 3).t(), X.to(F16), X.to("meta"), None)
        ),
        *(
            (PAIR, changed)
            for changed in ([X[:2], PAIR[1]], PAIR[::-1], [X, torch.zeros(6)[::2]], [X])
        ),
        *((PAIR, changed) for changed in ([*PAIR, PAIR[1]], [], None)),
    ],
)
def test_shape_layout_dtype_and_device_are_in_the_key(arguments, changed):
    assert make_key(changed, True) != make_key(arguments, True)
    hash(make_key(changed, True))


def test_values_of_tensors_are_not_in_the_key():
    assert make_key(X + 1, True) == make_key(X, True)
    assert make_key([tensor + 1 for tensor in PAIR], True) == make_key(tuple(PAIR), True)


def test_lists_differ_from_their_tensors():
    a, b = PAIR
    keys = [
        make_key(*call) for call in ((a, b), ([a], b), (a, [b]), ([a, b],), ([a], [b]), ([], a))
    ]
    assert len(set(keys)) == len(keys)


def test_layouts_of_scales_are_in_the_key(plans):
    """Check that the key of a plan has the strides of scales."""
    x, offs = torch.randn(40, 32), offs_tensor(10, 40)
    a = cute_kernels.ops.grouped_quantize(x, "nvfp4", offs)
    b = cute_kernels.ops.grouped_quantize(torch.randn(2, 16, 32), "nvfp4")
    strided = a[1].repeat_interleave(2, dim=0)[::2]
    assert strided.equal(a[1]) and strided.stride() != a[1].stride()
    plans.clear()
    multiply = cute_kernels.ops.m_grouped_gemm
    product = multiply(*m_grouped_arguments(a, b, offs))
    product_of_clones = multiply(*m_grouped_arguments([t.clone() for t in a], b, offs))
    assert len(plans) == 1
    product_of_strided = multiply(*m_grouped_arguments([a[0], strided, a[2]], b, offs))
    assert len(plans) == 2
    assert product.equal(product_of_clones) and product.equal(product_of_strided)


def test_a_failed_check_is_not_remembered(plans, checks):
    for _ in range(2):
        with pytest.raises(ValueError, match="offs"):
            GroupedAmax.fast_call(torch.ones(3, 8), torch.zeros(0, dtype=torch.int32))
    assert len(checks) == 2
    assert len(plans) == 0


def test_a_full_cache_drops_the_oldest_plan():
    """Check that a full cache drops the oldest plan."""
    plans = PlanCache(capacity=2)
    for key in "abc":
        plans.add(key, key.upper())
    assert len(plans) == 2
    assert plans.get("a") is None
    assert plans.get("c") == "C"
