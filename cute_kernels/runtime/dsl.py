"""Availability of the CuTe DSL, in a version that the kernels are written for.

``import cute_kernels`` and the reference backend never need the DSL. All code that does calls
``require_dsl`` first, so a missing or wrong package is reported by its pip name.
"""

import dataclasses
import functools
import importlib.metadata
import re
import sys
from pathlib import Path

from ..records import UnsupportedError

_INSTALL_HINT = "pip install 'grouped-kernels[cutedsl]'"


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A package by its pip name, with ``at_least <= version < below``."""

    pip_name: str
    at_least: tuple[int, ...]
    below: tuple[int, ...] | None = None

    def __str__(self) -> str:
        text = f"{self.pip_name}>={'.'.join(map(str, self.at_least))}"
        return text if self.below is None else f"{text},<{'.'.join(map(str, self.below))}"

    def problem(self) -> str | None:
        """Return the requirement and the installed version, or None if the requirement is met."""
        try:
            version = importlib.metadata.version(self.pip_name)
        except importlib.metadata.PackageNotFoundError:
            return f"{self} (not installed)"
        # Only the leading release numbers count: 4.9.0.dev0 is already outside <4.9.
        match = re.match(r"\d+(?:\.\d+)*", version)
        release = tuple(map(int, match.group().split("."))) if match else ()
        if release < self.at_least or (self.below is not None and release >= self.below):
            return f"{self} ({version} is installed)"
        return None


#: Packages of the ``cutedsl`` extra; pyproject.toml has the same bounds.
REQUIREMENTS = (
    Requirement("nvidia-cutlass-dsl", (4, 8), (4, 9)),
    Requirement("apache-tvm-ffi", (0, 1, 11), (0, 2)),
    Requirement("filelock", (3, 16)),
)


@functools.cache
def dsl_unavailable() -> str | None:
    """Return why kernels cannot be compiled or run in this process; nothing is imported.

    Returns:
        None if the CuTe DSL and its companions are installed in supported versions. Otherwise the
        reason, with a pip command. The answer is cached for the process.
    """
    problems = [problem for req in REQUIREMENTS if (problem := req.problem())]
    if not problems:
        return None
    return f"the CuTe DSL kernels need {' and '.join(problems)}: {_INSTALL_HINT}"


def require_dsl() -> None:
    """Raise ``UnsupportedError`` with the reason unless the CuTe DSL can be used."""
    if reason := dsl_unavailable():
        raise UnsupportedError(reason)


@functools.cache
def installed_versions() -> tuple[str, ...]:
    """Return names and versions of all installed packages whose code enters compiled kernels.

    The CuTe DSL consists of several distributions (front end, core, one library package per CUDA
    major version), and each can change on its own. They are found by their metadata folders:
    asking ``importlib.metadata`` for all distributions would parse every installed package.
    """
    patterns = ("nvidia_cutlass_dsl*.*-info", "apache_tvm_ffi*.*-info")
    folders = (Path(entry or ".") for entry in sys.path)
    return tuple(
        sorted({p.stem for f in folders if f.is_dir() for pat in patterns for p in f.glob(pat)})
    )
