import pytest

from cute_kernels.runtime import cache, forget_kernels
from ptx_emulator.host import settings


@pytest.fixture(autouse=True)
def fresh_runtime(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("CUTE_KERNELS_CACHE", raising=False)
    monkeypatch.setattr(settings, "_warned", set())
    # A checkout may be newer than this process; the rule about that has a test of its own.
    monkeypatch.setattr(cache, "_STARTED", float("inf"))
    source_digest = cache._source_digest
    source_digest.cache_clear()
    forget_kernels()
    yield
    source_digest.cache_clear()
    forget_kernels()
