"""Settings of all tests: seed, one thread, repeatable Hypothesis examples, markers and skips."""

import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

import ptx_emulator
from cute_kernels.capability import UnsupportedError
from tests.helpers import has_compiler

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


def inductor_cache():
    """Return a cache folder for graphs of these sources.

    Inductor's own keys do not depend on the implementation of our ops.
    """
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for package in ("cute_kernels", "grouped"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return str(Path(tempfile.gettempdir()) / f"inductor-{os.getuid()}-{digest.hexdigest()[:16]}")


os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", inductor_cache())

# The tensors of tests are small, so more threads would only wait for each other.
torch.set_num_threads(1)


def _implied_markers(item):
    """Yield the markers that a test's folder, fixtures and parameters imply."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    names_emulator = any(
        isinstance(value, str) and value.startswith("emulated:") for value in parameters.values()
    )
    runs_on_gpu = parameters.get("device") == "cuda"
    is_kernel_test = Path(__file__).with_name("kernels") in item.path.parents
    if names_emulator or "engine" in item.fixturenames or (is_kernel_test and not runs_on_gpu):
        yield "emulated"
    if parameters.get("compiled") in (True, "inside", "outside"):
        yield "compile"
    if parameters.get("mode") == "compiled":
        yield "compile"
    if runs_on_gpu:
        yield "gpu"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests whose folder, fixtures or parameters tell what they need."""
    for item in items:
        for name in _implied_markers(item):
            item.add_marker(name)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def _emulated_instructions():
    """Return the number of instructions that the emulator has run since ``reset_stats``."""
    is_loaded = ptx_emulator.engine.library.cache_info().currsize > 0
    return ptx_emulator.stats()["warp_insns"] if is_loaded else 0


@pytest.fixture(autouse=True)
def check_emulated_marker(request):
    """Fail a test that launches kernels on the emulator without the marker ``emulated``."""
    if request.node.get_closest_marker("emulated") is not None:
        yield
        return
    if _emulated_instructions():
        ptx_emulator.reset_stats()
    yield
    assert not _emulated_instructions(), "runs on the emulator: needs pytest.mark.emulated"


@pytest.fixture
def garbage():
    """Fill fresh memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip tests that need the emulator without a compiler, or the CuTe DSL without it."""
    try:
        return (yield)
    except ptx_emulator.BuildError as error:
        if has_compiler():
            raise
        pytest.skip(str(error))
    except (UnsupportedError, ModuleNotFoundError) as error:
        if "cutlass" not in str(error) or importlib.util.find_spec("cutlass"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def comparable(monkeypatch):
    """Let opcheck compare FP8 tensors, which ``torch.allclose`` cannot."""
    allclose = torch.allclose

    def compare(a, b, *args, **options):
        if a.dtype.is_floating_point and a.itemsize == 1:
            return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return allclose(a, b, *args, **options)

    monkeypatch.setattr(torch, "allclose", compare)
