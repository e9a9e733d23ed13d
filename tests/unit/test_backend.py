"""Choice of the backend: device, environment variable, ``with backend(...)`` blocks and threads."""

import asyncio
import contextlib
import contextvars
import threading
from concurrent import futures

import pytest
import torch

import cute_kernels
from cute_kernels import UnsupportedError, active_backend, backend, capability
from cute_kernels.runtime import architecture
from cute_kernels.runtime import backend as backend_module
from cute_kernels.runtime.backend import BACKENDS, Backend
from cute_kernels.runtime.plan_cache import PLANS
from tests.helpers import contains_all, offs_tensor, ops

CPU, CUDA, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))
REFERENCE = Backend("reference", "reference")
VARIABLE = "CUTE_KERNELS_BACKEND"


@pytest.fixture(autouse=True)
def unset_environment(monkeypatch):
    """Unset the environment variable and forget backends that it chose."""
    monkeypatch.delenv(VARIABLE, raising=False)
    backend_module._resolve.cache_clear()
    yield
    backend_module._resolve.cache_clear()


def some_call():
    return ops.compute_offsets(torch.tensor([1, 2, 3]))


def test_default_follows_the_device(monkeypatch):
    assert active_backend(CPU) == REFERENCE
    monkeypatch.setattr(
        backend_module, "device_architecture", lambda device: architecture("sm_103a")
    )
    assert active_backend(CUDA) == Backend("cuda", "sm_100a")


def test_reference_backends_name_a_tensor_core():
    with backend("reference:sm_90a"):
        assert active_backend(CPU) == Backend("reference:sm_90a", "reference", "sm_90a")


def test_options_of_the_emulator_hold_for_one_block():
    with backend("emulated:sm_100a", seed=3, mode="chaos"):
        assert active_backend(CPU).emulation == (("mode", "chaos"), ("seed", 3))
        with backend("emulated:sm_100a"):
            assert active_backend(CPU).emulation == ()


def test_unknown_options_raise():
    for name, option in (("reference", "seed"), ("cuda", "mode"), ("emulated:sm_90a", "speed")):
        with pytest.raises(TypeError, match=rf"{name}.*{option}"), backend(name, **{option: 1}):
            pytest.fail("entered the block")
    assert active_backend(CPU).name == "reference"


def test_the_environment_chooses_the_backend(monkeypatch):
    options = (("mode", "chaos"), ("num_sms", 2), ("races", True), ("seed", 3))
    for text, device, wanted in (
        ("emulated:sm_90a", CPU, Backend("emulated:sm_90a", "sm_90a")),
        ("reference", CUDA, REFERENCE),
        ("", CPU, REFERENCE),
        (
            "emulated:sm_90a,mode=chaos,seed=3,num_sms=2,races=1",
            CPU,
            Backend("emulated:sm_90a", "sm_90a", None, options),
        ),
    ):
        monkeypatch.setenv(VARIABLE, text)
        assert active_backend(device) == wanted


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("emulated:sm_100a,seed=x", ValueError, "seed must be a number, got 'x'"),
        ("emulated:sm_100a,races=maybe", ValueError, "races must be one of .*, got 'maybe'"),
        ("emulated:sm_100a,races=", ValueError, "races must be one of .*, got ''"),
        ("emulated:sm_100a,chaos", ValueError, "option=value, got 'chaos'"),
        ("emulated:sm_100a,speed=1", TypeError, "got speed"),
        ("emulated:sm_100a,seed=1", ValueError, "seed needs mode='chaos'"),
        ("reference,seed=1", TypeError, "reference takes no options"),
    ],
)
def test_options_in_the_environment_are_checked(monkeypatch, text, error, message):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(error, match=message):
        active_backend(CPU)


def test_the_backend_in_the_environment_is_checked(monkeypatch):
    monkeypatch.setenv(VARIABLE, "emulated:sm_80")
    with pytest.raises(ValueError, match=contains_all(VARIABLE, "'emulated:sm_80'", *BACKENDS)):
        some_call()


def test_blocks_override_the_environment_and_nest(monkeypatch):
    monkeypatch.setenv(VARIABLE, "emulated:sm_90a")
    with backend("emulated:sm_100a"):
        assert active_backend(CPU).arch == "sm_100a"
        with backend("reference"):
            assert active_backend(CPU).arch == "reference"
        assert active_backend(CPU).arch == "sm_100a"
    assert active_backend(CPU).arch == "sm_90a"


def test_an_exception_ends_a_block():
    with pytest.raises(KeyError), backend("emulated:sm_90a"), backend("emulated:sm_100a"):
        raise KeyError
    assert active_backend(CPU).name == "reference"


@pytest.mark.parametrize("name", ["", "gpu", "emulated", "emulated:reference", "Reference", None])
def test_unknown_names_raise_and_change_nothing(name):
    with (
        pytest.raises(ValueError, match=contains_all("backend", repr(name), *BACKENDS)),
        backend(name),
    ):
        pytest.fail("entered the block")
    assert active_backend(CPU).name == "reference"


def in_thread(function):
    """Return the function's result in another thread."""
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


def active():
    return active_backend(CPU).name


def test_threads_without_a_block_use_the_block_of_the_main_thread():
    with backend("emulated:sm_100a"):
        assert in_thread(active) == "emulated:sm_100a"
    assert in_thread(active) == "reference"


def test_a_block_holds_in_its_thread_only(monkeypatch):
    """A thread's block overrides that of the main thread, and other threads do not see it."""

    def job():
        before = active()
        with backend("emulated:sm_90a"):
            entered.wait()
            checked.wait()
            with backend("reference"):
                inner = active()
            return before, active(), inner

    for name in (None, "emulated:sm_100a"):
        entered, checked = threading.Barrier(2), threading.Barrier(2)
        outer = name or "reference"
        with (
            backend(name) if name else contextlib.nullcontext(),
            futures.ThreadPoolExecutor(1) as pool,
        ):
            result = pool.submit(job)
            entered.wait()
            assert active() == in_thread(active) == outer
            checked.wait()
            assert result.result() == (outer, "emulated:sm_90a", "reference")
            assert pool.submit(active).result() == outer
    assert active() == "reference"


def test_backward_uses_the_block_of_the_thread_that_runs_it():
    """Check that backward uses the backend of the thread that runs it."""
    names = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            names.append(active())
            return dy

    def job():
        y = Note.apply(torch.ones(2, requires_grad=True)).sum()
        with backend("reference:sm_90a"):
            y.backward()

    with backend("emulated:sm_100a"):
        in_thread(job)
        Note.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert names == ["reference:sm_90a", "emulated:sm_100a"]


def test_autograd_threads_use_the_context_of_their_caller():
    """PyTorch stores the context of the caller for the threads that run backward."""

    def caller():
        with backend("reference:sm_90a"):
            return contextvars.copy_context()

    # Older versions leave a None there.
    remove = getattr(
        torch._C, "_remove_obj_from_tls", lambda key: torch._C._stash_obj_in_tls(key, None)
    )

    def device_thread(context):
        """Return the active backend with the caller's context, and without it."""
        torch._C._stash_obj_in_tls("context", context)
        name = active()
        remove("context")
        return name, active()

    with backend("emulated:sm_100a"):
        assert in_thread(lambda: device_thread(in_thread(caller))) == (
            "reference:sm_90a",
            "emulated:sm_100a",
        )
        assert in_thread(lambda: device_thread(contextvars.Context())) == ("emulated:sm_100a",) * 2


def test_asyncio_tasks_have_separate_blocks():
    """Check that asyncio tasks have separate backends."""

    async def job(name):
        with backend(name):
            await asyncio.sleep(0)
            return active()

    async def run_jobs():
        return await asyncio.gather(job("reference:sm_90a"), job("reference:sm_100a"))

    assert asyncio.run(run_jobs()) == ["reference:sm_90a", "reference:sm_100a"]
    assert active() == "reference"


def test_an_outer_block_may_end_first():
    """Blocks inside generators end in any order."""
    with contextlib.ExitStack() as stack:
        with backend("emulated:sm_100a"):
            stack.enter_context(backend("emulated:sm_90a"))
        assert active() == "emulated:sm_90a"
    assert active() == "reference"


def test_the_backend_must_run_on_the_device():
    with backend("cuda"), pytest.raises(UnsupportedError, match=r"CUDA tensors.*cpu"):
        some_call()
    with backend("emulated:sm_90a"), pytest.raises(UnsupportedError, match=r"emulated.*cuda"):
        active_backend(CUDA)


def test_a_backend_without_a_kernel_is_an_error(monkeypatch):
    monkeypatch.setattr(
        capability, "_RUNS", capability._RUNS | {("grouped_dbias", None): ("reference", "sm_90a")}
    )
    monkeypatch.setattr(PLANS, "_plans", {})
    with (
        backend("emulated:sm_100a"),
        pytest.raises(UnsupportedError, match="no sm_100a kernel of grouped_dbias"),
    ):
        cute_kernels.ops.grouped_dbias(torch.ones(4, 32), offs_tensor(4))


def test_reference_serves_any_device():
    with backend("reference"):
        assert active_backend(META) == REFERENCE
