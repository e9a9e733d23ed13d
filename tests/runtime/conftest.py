"""A fresh cache folder and empty caches in memory for every test of this folder."""

import pytest

from cute_kernels.runtime import cache, forget_kernels
from ptx_emulator.host import settings


@pytest.fixture(autouse=True)
def fresh_runtime(monkeypatch, tmp_path):
    """Give the test an empty cache folder, and forget kernels, digests and warnings."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("CUTE_KERNELS_CACHE", raising=False)
    monkeypatch.setattr(settings, "_warned", set())
    # A checkout may be newer than this process; another test covers that rule.
    monkeypatch.setattr(cache, "_STARTED", float("inf"))
    source_digest = cache._source_digest
    source_digest.cache_clear()
    forget_kernels()
    yield
    source_digest.cache_clear()
    forget_kernels()
