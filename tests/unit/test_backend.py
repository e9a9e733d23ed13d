"""Which backend serves a call: device, environment, context manager."""

import threading

import pytest
import torch

import cute_kernels
from cute_kernels import UnsupportedError, active_backend, backend
from cute_kernels.runtime.backend import BACKENDS, Backend

CPU, CUDA, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))
VARIABLE = "CUTE_KERNELS_BACKEND"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def offsets():
    return torch.ops.cute_kernels.compute_offsets(torch.tensor([1, 2, 3]))


def test_names():
    names = ["reference", "reference:sm_90a", "reference:sm_100a"]
    names += ["cuda", "emulated:sm_90a", "emulated:sm_100a"]
    assert list(BACKENDS) == names
    assert cute_kernels.backend is backend


def test_default_follows_the_device(monkeypatch):
    assert active_backend(CPU) == Backend("reference", "reference")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert active_backend(CUDA) == Backend("cuda", "sm_90a")


@pytest.mark.parametrize(
    ("compute", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_100a")]
)
def test_cuda_architecture_comes_from_the_gpu(monkeypatch, compute, arch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: compute)
    assert active_backend(CUDA).arch == arch


@pytest.mark.parametrize("compute", [(8, 0), (8, 9), (11, 0), (12, 0)])
def test_other_gpus_are_refused_by_number(monkeypatch, compute):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: compute)
    with pytest.raises(UnsupportedError, match=f"{compute[0]}.{compute[1]}"):
        active_backend(CUDA)


def test_environment_chooses(monkeypatch):
    monkeypatch.setenv(VARIABLE, "emulated:sm_90a")
    assert active_backend(CPU) == Backend("emulated:sm_90a", "sm_90a")
    monkeypatch.setenv(VARIABLE, "reference")
    assert active_backend(CUDA) == Backend("reference", "reference")
    monkeypatch.setenv(VARIABLE, "")
    assert active_backend(CPU) == Backend("reference", "reference")


def test_environment_is_checked(monkeypatch):
    monkeypatch.setenv(VARIABLE, "emulated:sm_80")
    with pytest.raises(ValueError) as caught:
        offsets()
    for word in (VARIABLE, "'emulated:sm_80'", *BACKENDS):
        assert word in str(caught.value)


def test_context_beats_environment_and_nests(monkeypatch):
    monkeypatch.setenv(VARIABLE, "emulated:sm_90a")
    with backend("emulated:sm_100a"):
        assert active_backend(CPU).arch == "sm_100a"
        with backend("reference"):
            assert active_backend(CPU).arch == "reference"
            with backend("emulated:sm_90a"):
                assert active_backend(CPU).arch == "sm_90a"
            assert active_backend(CPU).arch == "reference"
        assert active_backend(CPU).arch == "sm_100a"
    assert active_backend(CPU).arch == "sm_90a"


def test_context_ends_with_an_exception():
    with pytest.raises(KeyError), backend("emulated:sm_90a"), backend("emulated:sm_100a"):
        raise KeyError
    assert active_backend(CPU).name == "reference"


@pytest.mark.parametrize("name", ["", "gpu", "emulated", "emulated:reference", "Reference", None])
def test_unknown_names_raise_and_change_nothing(name):
    with pytest.raises(ValueError) as caught, backend(name):
        pytest.fail("entered the block")
    for word in ("backend", repr(name), *BACKENDS):
        assert word in str(caught.value)
    assert active_backend(CPU).name == "reference"


def test_all_threads_see_the_choice():
    seen = []
    with backend("emulated:sm_100a"):
        thread = threading.Thread(target=lambda: seen.append(active_backend(CPU).name))
        thread.start()
        thread.join()
    assert seen == ["emulated:sm_100a"]


def test_backend_and_device_must_fit():
    with backend("cuda"), pytest.raises(UnsupportedError, match=r"cuda.*cpu"):
        offsets()
    with backend("emulated:sm_90a"), pytest.raises(UnsupportedError, match=r"emulated.*cuda"):
        active_backend(CUDA)


def test_there_is_no_fallback_to_the_reference():
    x, offs = torch.ones(4, 32), torch.tensor([4], dtype=torch.int32)
    for arch in ("sm_90a", "sm_100a"):
        status = cute_kernels.support("compute_offsets", None, arch)
        if not status:
            with backend(f"emulated:{arch}"), pytest.raises(UnsupportedError) as caught:
                offsets()
            assert status.reason in str(caught.value) and arch in str(caught.value)
    with backend("reference"):
        torch.ops.cute_kernels.grouped_quantize_nvfp4(x, offs)


def test_reference_serves_any_device():
    with backend("reference"):
        assert active_backend(META) == Backend("reference", "reference")
