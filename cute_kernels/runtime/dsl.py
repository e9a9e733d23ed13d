"""Whether the CuTe DSL is installed, in a version that the kernels are written for.

``import cute_kernels`` and the reference backend never need the DSL. Everything that does calls
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
        """What is needed and what is there instead, or None if the requirement is met."""
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


#: What the ``cutedsl`` extra installs; pyproject.toml has the same bounds.
REQUIREMENTS = (
    Requirement("nvidia-cutlass-dsl", (4, 8), (4, 9)),
    Requirement("apache-tvm-ffi", (0, 1, 11), (0, 2)),
    Requirement("filelock", (3, 16)),
)


@functools.cache
def dsl_unavailable() -> str | None:
    """Say why kernels cannot be compiled or run in this process; imports nothing.

    Returns:
        None if the CuTe DSL and its companions are installed in supported versions, otherwise
        the reason with the pip command that helps. The answer is kept for the process.
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
    """Names with versions of every installed package whose code ends up in a compiled kernel.

    The CuTe DSL is split over several distributions (front end, core, one library package per CUDA
    major version), and any of them can change alone. They are found by their metadata folders, as
    asking ``importlib.metadata`` for all distributions would parse every package installed.
    """
    patterns = ("nvidia_cutlass_dsl*.*-info", "apache_tvm_ffi*.*-info")
    folders = (Path(entry or ".") for entry in sys.path)
    return tuple(
        sorted({p.stem for f in folders if f.is_dir() for pat in patterns for p in f.glob(pat)})
    )
