"""The hooks in the CuTe DSL: kernels compiled by ``cute.compile`` run on the emulator."""

import os

import pytest

torch = pytest.importorskip("torch")
cutlass = pytest.importorskip("cutlass")

from cuda.bindings.driver import CUstream  # noqa: E402, TC002

import cutlass.cute as cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

import ptx_emulator as emulator  # noqa: E402
from ptx_emulator import cutlass_hooks as hooks  # noqa: E402

from .ptx import fails  # noqa: E402


@pytest.fixture(autouse=True)
def uninstalled():
    if not hooks._State.is_first_runtime and hooks.real_runtime_is_loaded():
        pytest.skip("CuTe DSL has compiled for the real device in this process")
    yield
    emulator.uninstall()


class AddConstant:
    """Add a constant; kernels of all instances have the same name."""

    def __init__(self, constant):
        self.constant = constant

    @cute.jit
    def __call__(self, x: cute.Tensor):
        self.kernel(x).launch(grid=[1, 1, 1], block=[32, 1, 1])

    @cute.kernel
    def kernel(self, x: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        x[thread] = x[thread] + cutlass.Float32(self.constant)


def adder(view, constant=1.0, options=""):
    return cute.compile(AddConstant(constant), view, options=options)


@pytest.fixture
def x():
    return torch.zeros(32)


@pytest.fixture
def view(x):
    """Return x as a DSL tensor, with the emulator of sm_100a installed."""
    emulator.install("sm_100a")
    return from_dlpack(x)


def test_each_compiled_function_runs_its_own_kernel(x, view):
    add_one, add_two = adder(view, 1.0), adder(view, 2.0)
    for function, want in ((add_one, 1), (add_two, 3), (add_one, 4)):
        function(view)
        assert (x == want).all()


def test_kernels_of_two_architectures_run_side_by_side(x):
    """Check that kernels compiled for sm_90a and for sm_100a run in one process."""
    emulator.install("sm_90a", num_sms=3)
    assert emulator.installed() == "sm_90a"
    view = from_dlpack(x)
    hopper = adder(view)
    assert ".target sm_90a" in hopper.__ptx__
    emulator.install("sm_100a", num_sms=5)
    blackwell = adder(view, 10.0)
    assert ".target sm_100a" in blackwell.__ptx__
    assert cutlass.utils.HardwareInfo().get_max_active_clusters(2) == 2
    assert cutlass.utils.HardwareInfo().get_device_multiprocessor_count() == 5
    hopper(view)
    blackwell(view)
    assert (x == 11).all()


def test_uninstall_restores_the_dsl(x):
    """Check that uninstalling restores the environment and the settings of the DSL."""
    from cutlass.base_dsl.dsl import DSLSingletonMeta

    names = ("CUTE_DSL_ARCH", "CUTE_DSL_LIBS", "CUTE_DSL_KEEP", "CUTE_DSL_DUMP_DIR")
    fields = ("_arch", "shared_libs", "keep_ptx", "keep_cubin", "dump_dir")

    def state():
        settings = [dsl.envar for dsl in DSLSingletonMeta._instances.values()]
        return (
            [os.environ.get(name) for name in names],
            [[getattr(s, field) for field in fields] for s in settings],
        )

    before = state()
    emulator.install("sm_90a")
    view = from_dlpack(x)
    compiled = adder(view)
    emulator.install("sm_100a")
    assert state() != before
    emulator.uninstall()
    assert state() == before
    assert emulator.installed() is None
    compiled(view)  # stays emulated
    assert (x == 1).all()


def test_tensors_are_in_global_memory_only_while_installed(x, view):
    assert view.memspace == cute.AddressSpace.gmem
    emulator.uninstall()
    assert from_dlpack(x).memspace != cute.AddressSpace.gmem


def test_errors_of_kernels_reach_the_caller(x, view):
    """Check that a fault in a kernel raises in the caller, with and without TVM FFI."""
    pytest.importorskip("tvm_ffi")
    plain, ffi = adder(view), adder(view, options="--enable-tvm-ffi")
    plain(view)
    ffi(x)
    assert (x == 2).all()
    emulator.watch(torch.zeros(4))
    for call, argument in ((plain, view), (ffi, x)):
        with fails("global load out of bounds"):
            call(argument)
    emulator.unwatch()
    plain(view)
    ffi(x)
    assert (x == 4).all()


def test_object_files_run_by_call(tmp_path, x, view):
    """Check that a kernel exported to an object file runs and reports its faults."""
    pytest.importorskip("tvm_ffi")
    adder(view, options="--enable-tvm-ffi").export_to_c(
        str(tmp_path / "add.o"), function_name="add"
    )
    module = cute.runtime.load_module(str(tmp_path / "add.o"), enable_tvm_ffi=True)
    emulator.call(module.add, x)
    assert (x == 1).all()
    emulator.watch(torch.zeros(4))
    with fails("global load out of bounds"):
        emulator.call(module.add, x)


def test_dynamic_sizes_and_the_environment_stream():
    """Check that kernels take dynamic sizes and the stream of the environment."""
    pytest.importorskip("tvm_ffi")

    @cute.kernel
    def kernel(x: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        x[block * 32 + thread] = cutlass.Float32(3)

    @cute.jit
    def fill(x: cute.Tensor, stream: CUstream):
        kernel(x).launch(grid=[cute.size(x) // 32, 1, 1], block=[32, 1, 1], stream=stream)

    emulator.install("sm_90a")
    fake = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = cute.compile(fill, fake, stream, options="--enable-tvm-ffi")
    for size in (32, 96):
        x = torch.zeros(size)
        compiled(x)
        assert (x == 3).all()


def test_compiling_after_the_real_runtime_was_loaded_fails(monkeypatch, x):
    """The C library stands in for the real CUDA runtime."""
    monkeypatch.setattr(hooks, "_REAL_RUNTIME", "libc.so")
    monkeypatch.setattr(hooks._State, "is_first_runtime", False)
    emulator.install("sm_100a")
    with fails("Use another process"):
        adder(from_dlpack(x))


def test_an_invalid_architecture_is_refused():
    with pytest.raises(ValueError, match="arch must be like"):
        emulator.install("hopper")
    assert emulator.installed() is None
