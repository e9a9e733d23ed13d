"""Seeds every test, on one thread; hypothesis draws the same examples on every run."""

import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

from cute_kernels.capability import UnsupportedError
from ptx_emulator import BuildError
from tests.helpers import has_compiler

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


def inductor_cache():
    """Compiled graphs for these sources: its keys do not see what ops do inside."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for package in ("cute_kernels", "grouped"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return str(Path(tempfile.gettempdir()) / f"inductor-{os.getuid()}-{digest.hexdigest()[:16]}")


os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", inductor_cache())

# The tensors of tests are small: more threads would only wait for each other.
torch.set_num_threads(1)


def _required_markers(item):
    """Yield the markers that a test's folder, fixtures and parameters imply."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    names_emulator = any(
        isinstance(value, str) and value.startswith("emulated:") for value in parameters.values()
    )
    runs_on_gpu = parameters.get("device") == "cuda"
    is_kernel_test = Path(__file__).with_name("kernels") in item.path.parents
    if names_emulator or "engine" in item.fixturenames or (is_kernel_test and not runs_on_gpu):
        yield "emulated"
    if "fresh_dynamo" in item.fixturenames:
        yield "compile"
    if runs_on_gpu:
        yield "gpu"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests whose folder, fixtures or parameters tell what they need."""
    for item in items:
        for name in _required_markers(item):
            item.add_marker(name)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def garbage():
    """Fresh memory holds NaN."""
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
    """Skip what needs the emulator where there is no compiler to build it, or the CuTe DSL where
    there is none.
    """
    try:
        return (yield)
    except BuildError as error:
        if has_compiler():
            raise
        pytest.skip(str(error))
    except (UnsupportedError, ModuleNotFoundError) as error:
        if "cutlass" not in str(error) or importlib.util.find_spec("cutlass"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def comparable(monkeypatch):
    """opcheck compares what an op must not change; PyTorch cannot compare numbers of FP8."""
    allclose = torch.allclose

    def compare(a, b, *args, **options):
        if a.dtype.is_floating_point and a.itemsize == 1:
            return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return allclose(a, b, *args, **options)

    monkeypatch.setattr(torch, "allclose", compare)
