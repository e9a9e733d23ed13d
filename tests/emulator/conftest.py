from __future__ import annotations

import os
import shutil

import pytest

if shutil.which(os.environ.get("CXX") or "g++") is None:
    pytest.skip("the emulator needs g++", allow_module_level=True)

from cute_kernels import emulator


@pytest.fixture(autouse=True)
def clean_emulator():
    """Every test starts with no watched memory and counts of zero."""
    emulator.unwatch()
    emulator.reset_stats()
    yield
    emulator.unwatch()
