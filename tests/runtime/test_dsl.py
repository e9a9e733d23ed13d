"""Accepted versions of the CuTe DSL, and the error without one."""

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from cute_kernels.capability import UnsupportedError
from cute_kernels.runtime import dsl
from tests.helpers import contains_all

ROOT = Path(__file__).parents[2]


@pytest.fixture
def versions(monkeypatch):
    """Pretend that supported packages are installed; yield their versions for changes."""
    installed = {"nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15.post2", "filelock": "4.0"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    dsl.dsl_unavailable.cache_clear()
    yield installed
    dsl.dsl_unavailable.cache_clear()


@pytest.mark.parametrize("version", ["4.8", "4.8.0", "4.8.0.dev1", "4.8.1", "4.8.99.post1"])
def test_supported_versions(versions, version):
    versions["nvidia-cutlass-dsl"] = version
    assert dsl.dsl_unavailable() is None
    dsl.require_dsl()


@pytest.mark.parametrize("version", ["4.7.1", "4.9", "4.9.0.dev0", "4.10.0", "5.0", "unknown"])
def test_an_unsupported_version_raises_with_its_name(versions, version):
    versions["nvidia-cutlass-dsl"] = version
    words = [
        f"nvidia-cutlass-dsl>=4.8,<4.9 ({version} is installed)",
        "pip install 'grouped-kernels[cutedsl]'",
    ]
    with pytest.raises(UnsupportedError, match=contains_all(*words)):
        dsl.require_dsl()


def test_the_error_names_all_missing_packages(versions):
    del versions["nvidia-cutlass-dsl"], versions["apache-tvm-ffi"]
    with pytest.raises(UnsupportedError, match=r"cutlass-dsl.*\(not installed\) and apache-tvm"):
        dsl.require_dsl()


def test_the_extra_cutedsl_lists_the_requirements():
    extra = re.search(r"\ncutedsl = \[([^]]*)\]", (ROOT / "pyproject.toml").read_text())
    assert sorted(re.findall(r'"(.*?)"', extra.group(1))) == sorted(map(str, dsl.REQUIREMENTS))


def test_installed_versions_include_the_libraries_of_the_dsl(monkeypatch, tmp_path):
    """Check that installed versions include the libraries of the DSL."""
    for name in ("nvidia_cutlass_dsl-4.8.1", "nvidia_cutlass_dsl_libs_cu13-4.8.1", "torch-2.13.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "missing")])
    dsl.installed_versions.cache_clear()
    try:
        assert dsl.installed_versions() == (
            "nvidia_cutlass_dsl-4.8.1",
            "nvidia_cutlass_dsl_libs_cu13-4.8.1",
        )
    finally:
        dsl.installed_versions.cache_clear()
