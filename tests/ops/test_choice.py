"""The backend of a call: plans belong to it, in threads, compiled code and exported modules."""

import contextlib
import threading

import pytest
import torch

import cute_kernels
import grouped
from cute_kernels import backend
from cute_kernels.ops import registration
from cute_kernels.ops.op import Op
from cute_kernels.ops.plan import CallPlan
from cute_kernels.runtime.plan_cache import PLANS, clear_plan_cache
from tests.helpers import (
    BF16,
    F32,
    assert_same_bytes,
    compile_full_graph,
    m_grouped_arguments,
    offs_from_splits,
    ops,
    sample,
)

OFFS = offs_from_splits((3, 5))
K, N = 512, 16


@pytest.fixture(autouse=True)
def fresh_plans_and_dynamo(monkeypatch, fresh_dynamo):
    monkeypatch.setattr(PLANS, "_plans", {})


@pytest.fixture
def planned_backends(monkeypatch):
    """Return the list of backends for which plans are made."""
    names, plan = [], Op.plan

    def record_plan(op, backend):
        names.append(backend.name)
        return plan(op, backend)

    monkeypatch.setattr(Op, "plan", record_plan)
    return names


def operands():
    return sample(8, K), sample(2, N, K)


def enter_in_another_thread(stack, name):
    thread = threading.Thread(target=lambda: stack.enter_context(backend(name)))
    thread.start()
    thread.join()


@pytest.mark.parametrize("direct", [True, False])
def test_a_plan_is_cached_under_its_backend(monkeypatch, planned_backends, direct):
    """Another thread switches between the key of a call and its plan."""
    a, b = operands()
    call = direct_gemm if direct else ops.m_grouped_gemm
    key = registration.plan_key
    with contextlib.ExitStack() as stack_of_thread:

        def switch_after_key(*args):
            plan_key = key(*args)
            enter_in_another_thread(stack_of_thread, "reference:sm_90a")
            return plan_key

        with backend("reference"):
            monkeypatch.setattr(registration, "plan_key", switch_after_key)
            product = call(a, b, OFFS)
            monkeypatch.setattr(registration, "plan_key", key)
    assert planned_backends == ["reference"]
    with backend("reference"):
        assert_same_bytes(call(a, b, OFFS), product)
    with backend("reference:sm_90a"):
        call(a, b, OFFS)
    assert planned_backends == ["reference", "reference:sm_90a"]


def direct_gemm(a, b, offs):
    return cute_kernels.ops.m_grouped_gemm(a, b, offs, None, None, False, None)


def gemms():
    """Yield GEMM ops and arguments: plain, quantized, mixed, and quantizing on the fly."""
    a, b = operands()
    w = ops.grouped_quantize(b, "nvfp4")
    x = ops.grouped_quantize(a, "nvfp4", OFFS)
    options = (None, None, False, F32)
    for pair in ((a, b), (x, w), (a, w)):
        yield ops.m_grouped_gemm, m_grouped_arguments(*pair, OFFS, *options)
    yield ops.m_grouped_quantize_gemm, (a, w[0], OFFS, w[1:], "nvfp4", "nvfp4", *options)


def test_a_call_sums_like_the_backend_of_its_plan(monkeypatch):
    """Another thread switches between the plan of a call and its run."""
    compute = CallPlan.compute
    for call, arguments in gemms():
        with backend("reference:sm_90a"):
            want = call(*arguments)
        with backend("reference"):
            assert not call(*arguments).equal(want), "the sums do not differ"
        with contextlib.ExitStack() as stack_of_thread:

            def switch_before_run(plan, op, stack_of_thread=stack_of_thread):
                enter_in_another_thread(stack_of_thread, "reference")
                return compute(plan, op)

            with backend("reference:sm_90a"):
                monkeypatch.setattr(CallPlan, "compute", switch_before_run)
                got = call(*arguments)
                monkeypatch.setattr(CallPlan, "compute", compute)
        assert_same_bytes(got, want)


def inside(x, w, offs):
    with backend("reference:sm_90a"):
        return ops.m_grouped_gemm(x * 2, w, offs) + 1


@pytest.mark.compile
def test_a_block_inside_a_full_graph_is_refused():
    function = torch.compile(inside, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot choose a backend: enter"):
        function(*operands(), OFFS)
    with backend("reference"):
        ops.m_grouped_gemm(*operands(), OFFS)  # the block has no effect


def test_a_block_inside_an_exported_module_is_refused():
    class Module(torch.nn.Module):
        def forward(self, x, w, offs):
            return inside(x, w, offs)

    with pytest.raises(Exception, match="cannot choose a backend: enter"):
        torch.export.export(Module(), (*operands(), OFFS))


@pytest.mark.compile
def test_a_block_inside_a_function_with_graph_breaks_holds(planned_backends):
    """Check that a backend block holds in a compiled function with graph breaks."""
    a, b = operands()
    want = inside(a, b, OFFS)
    planned_backends.clear()
    clear_plan_cache()
    assert_same_bytes(torch.compile(inside, backend="eager")(a, b, OFFS), want)
    assert planned_backends == ["reference:sm_90a"]


@pytest.mark.compile
@pytest.mark.emulated
def test_a_block_of_kernels_inside_a_function_with_graph_breaks(planned_backends):
    """Check that kernels run in a block of a compiled function with graph breaks."""

    def product(x, w, offs):
        with backend("emulated:sm_90a"):
            wq = grouped.quantize(w, grouped.NVFP4(block=(16, 16)))
            xq = grouped.quantize(x, grouped.NVFP4(row_scaled=True), offs=offs)
            out = torch.zeros(8, N, dtype=BF16)
            ops.m_grouped_gemm_out(x, w, offs, out=out)
            return grouped.grouped_gemm(xq, wq) + out

    a, b = operands()
    want = product(a, b, OFFS)
    clear_plan_cache()
    planned_backends.clear()
    assert_same_bytes(torch.compile(product, backend="eager")(a, b, OFFS), want)
    assert set(planned_backends) == {"emulated:sm_90a"}


@pytest.mark.compile
def test_a_compiled_function_runs_on_the_backend_of_its_call(planned_backends):
    """Check that a compiled function runs on the backend of each call."""

    def product(x, w, offs):
        return ops.m_grouped_gemm(x * 2, w, offs, None, None, False, F32)

    a, b = operands()
    function = compile_full_graph(product)
    names = ("reference:sm_90a", "reference", "reference:sm_100a", "reference:sm_90a")
    results = []
    for i, name in enumerate(names):
        with backend(name), torch._dynamo.config.patch(error_on_recompile=i > 0):
            results.append(function(a, b, OFFS))
            assert_same_bytes(results[-1], product(a, b, OFFS))
    assert planned_backends == list(names[:3])
    assert_same_bytes(results[3], results[0])
    assert not results[0].equal(results[1])
