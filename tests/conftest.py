"""Seeds every test, on one thread; hypothesis draws the same examples on every run."""

import hypothesis
import pytest
import torch

from cute_kernels.emulator import BuildError
from tests.helpers import has_compiler

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")

# The tensors of tests are small: more threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip what needs the emulator where there is no compiler to build it."""
    try:
        return (yield)
    except BuildError as error:
        if has_compiler():
            raise
        pytest.skip(str(error))
