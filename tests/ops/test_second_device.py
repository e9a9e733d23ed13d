"""Tensors on a GPU that is not the current one.

CPU tensors pretend to be there, and kernels record their arguments instead of running.
"""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import cute_kernels
from cute_kernels.layout.buffers import BufferSpec
from cute_kernels.ops.op import Op
from cute_kernels.runtime import allocator, backend, launch
from cute_kernels.runtime.allocator import Allocator
from cute_kernels.runtime.arch import _index_architecture
from tests.helpers import BF16, F32, I32, ops

from .test_layouts import CALLS

#: PyTorch checks that a second GPU exists if there is a first one.
needs_no_gpu = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="there is a GPU, and no second one"
)
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
#: Compute capability of the second GPU; the first one has the other.
CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
NUM_SMS = {FIRST: 132, SECOND: 148}


class OnSecond(torch.Tensor):
    """A CPU tensor that claims to be on the second GPU."""

    device = SECOND
    is_cuda = True


def on_second(value):
    return value.as_subclass(OnSecond) if isinstance(value, torch.Tensor) else value


class Kernels:
    """Compiler whose kernels record their arguments and do nothing."""

    def __init__(self, arch):
        self.arch = arch
        self.architectures, self.calls = set(), []

    def compile(self, spec, arch):
        self.architectures.add(arch.name)
        return lambda *arguments: self.calls.append(arguments)


@pytest.fixture(params=CAPABILITIES)
def kernels(monkeypatch, request):
    """Pretend to have two GPUs, of which the first is current, and kernels that do nothing."""
    (first_arch,) = CAPABILITIES.keys() - {request.param}
    capabilities = [CAPABILITIES[first_arch], CAPABILITIES[request.param]]
    caches = (_index_architecture, backend._resolve, launch.launcher)
    kernels, empty_strided = Kernels(request.param), torch.empty_strided

    def allocate(*args, device, **kwargs):
        real = empty_strided(*args, **kwargs, device="cpu" if device == SECOND else device)
        return on_second(real) if device == SECOND else real

    def allocate_on_current(*args):
        raise AssertionError("an allocation on the current device")

    def counters(device):
        return SimpleNamespace(
            current=lambda: on_second(torch.zeros(1)) if device == SECOND else torch.zeros(1)
        )

    def properties(device):
        return SimpleNamespace(
            multi_processor_count=NUM_SMS[torch.device(device)],
            memory_clock_rate=3201000,
            memory_bus_width=6144,
        )

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        allocator, "get_current_device", torch.cuda.current_device
    )  # CUDA builds use this function
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch, "empty_strided", allocate)
    monkeypatch.setattr(allocator, "empty_strided_cuda", allocate_on_current)
    monkeypatch.setattr(launch, "compile_kernel", kernels.compile)
    monkeypatch.setattr(launch, "counters", counters)
    for cache in caches:
        cache.cache_clear()
    yield kernels
    for cache in caches:
        cache.cache_clear()


def all_subclasses(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from all_subclasses(sub)


OPS = {cls.name: cls for cls in all_subclasses(Op) if hasattr(cls, "name")}


def is_only_on_sm90(op):
    """Return True if the op has no kernel of its own on sm_100a."""
    return (
        "activate" in op.name
        or op.name == "m_grouped_quantize_gemm"
        or op.capability()[0] == "grouped_gemm_w4a16"
    )


@pytest.mark.parametrize(("name", "make"), CALLS.values(), ids=CALLS)
def test_plans_and_launches_use_the_second_gpu(kernels, name, make):
    """Check that plans and launches use the second GPU."""
    op = OPS[name](*tree_map(on_second, make()))
    if kernels.arch == "sm_100a" and is_only_on_sm90(op):
        pytest.skip("no kernel of its own")
    assert op.device == SECOND
    chosen = backend.active_backend(op.device)
    assert (chosen.name, chosen.arch) == ("cuda", kernels.arch)
    outputs = op.plan(chosen).compute(op)
    assert kernels.architectures == {kernels.arch} and kernels.calls
    kernel_tensors = [a for call in kernels.calls for a in call if isinstance(a, torch.Tensor)]
    assert kernel_tensors and {t.device for t in (*outputs, *kernel_tensors) if t is not None} == {
        SECOND
    }
    counts = [
        {a for a in call if type(a) is int}
        for call in kernels.calls
        if not name.startswith("compute_")
    ]
    assert all(148 in count for count in counts)


def test_new_tensors_are_on_the_right_device(kernels, monkeypatch):
    """Inductor's allocator uses the current device, so it serves that device only."""
    spec = BufferSpec((2, 3), F32)
    (out,) = Allocator([spec], SECOND).make()
    assert out.device == SECOND and out.shape == (2, 3)
    allocations = []
    monkeypatch.setattr(allocator, "empty_strided_cuda", lambda *args: allocations.append(args))
    Allocator([spec], FIRST).make()
    assert allocations == [((2, 3), (3, 1), F32)]


@needs_no_gpu
@pytest.mark.parametrize(("name", "make"), CALLS.values(), ids=CALLS)
def test_fakes_are_on_the_device_of_the_operands(name, make):
    with cute_kernels.backend("reference"):
        arguments = make()
    with FakeTensorMode():
        fakes = tree_map(
            lambda a: (
                torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=SECOND)
                if isinstance(a, torch.Tensor)
                else a
            ),
            arguments,
        )
        results = getattr(ops, name)(*fakes)
    assert {t.device for t in tree_leaves(results)} == {SECOND}


@needs_no_gpu
def test_operands_on_two_devices_are_refused():
    with FakeTensorMode():
        x = torch.empty(8, 64, dtype=BF16, device=SECOND)
        offs = torch.empty(2, dtype=I32, device=FIRST)
        with pytest.raises(ValueError, match="cuda:0"):
            ops.grouped_amax(x, offs)
