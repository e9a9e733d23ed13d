"""Compiles the engine on first use and keeps the library in a cache.

The library is named after a hash of its sources and of what the compiler says about itself and this
machine's processor, so another source version, compiler or processor never meets it. It is moved
into place when it is complete: processes that build at the same time cannot see half of one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from cute_kernels.emulator.errors import BuildError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_SOURCES = Path(__file__).resolve().parent / "src"
_FLAGS = ["-std=c++17", "-O2", "-march=native", "-fPIC", "-fno-math-errno", "-w"]
_INSTALL = (
    "The emulator compiles its engine on first use and needs g++ 12 or later (C++17 and _Float16): "
    "install it (Debian or Ubuntu: apt-get install g++), or name another compiler in CXX."
)


def compiler() -> str:
    """Path of the C++ compiler: ``CXX``, or g++.

    Raises:
        BuildError: There is none.
    """
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"no C++ compiler {name!r} was found. {_INSTALL}")
    return path


def cache_directory() -> Path:
    """Where libraries are kept.

    ``CUTE_KERNELS_CACHE_DIR``, else ``XDG_CACHE_HOME/cute_kernels``, else
    ``~/.cache/cute_kernels``; a directory of this user's under the system's temporary directory
    where that is not writable.
    """
    chosen = os.environ.get("CUTE_KERNELS_CACHE_DIR")
    root = Path(chosen or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    directory = root / "emulator" if chosen else root / "cute_kernels" / "emulator"
    if _make_writable(directory):
        return directory
    private = Path(tempfile.gettempdir()) / f"cute_kernels-{os.getuid()}"
    with contextlib.suppress(OSError):
        private.mkdir(mode=0o700, exist_ok=True)
        status = private.lstat()
        # A library is code: take none from a directory that others can write to.
        if status.st_uid == os.getuid() and not private.is_symlink() and not status.st_mode & 0o022:
            directory = private / "emulator"
            if _make_writable(directory):
                return directory
    return Path(tempfile.mkdtemp(prefix="cute_kernels-"))


def _make_writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _digest(cxx: str) -> str:
    h = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        h.update(path.name.encode() + b"\0" + path.read_bytes())
    # The predefined macros name the compiler's version and the processor's features.
    macros = subprocess.run(
        [cxx, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, check=False
    )
    if macros.returncode:
        raise BuildError(f"{cxx} failed: {macros.stderr.decode()}\n{_INSTALL}")
    h.update(macros.stdout)
    return h.hexdigest()[:16]


def _lock(path: Path) -> AbstractContextManager[object]:
    """Keeps a second process from doing the same work; without filelock both do it."""
    try:
        from filelock import FileLock
    except ImportError:
        return contextlib.nullcontext()
    return FileLock(path)


def _run(command: list[str], directory: Path) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, check=False)
    if done.returncode:
        raise BuildError(
            f"the emulator's engine did not compile.\n{' '.join(command)}\n"
            f"{done.stderr.decode()[-4000:]}\n{_INSTALL}"
        )


def _compile(cxx: str, work: Path) -> Path:
    """Build in ``work``; returns the library's path there."""
    flags = [*_FLAGS, "-I", str(_SOURCES)]
    # Most of the time would go into the standard headers, once for every source.
    (work / "prefix.h").write_text('#include "machine.h"\n#include <algorithm>\n#include <cmath>\n')
    _run([cxx, *flags, "-x", "c++-header", "prefix.h", "-o", "prefix.h.gch"], work)
    sources = sorted(_SOURCES.glob("*.cpp"))

    def compile_one(source: Path) -> str:
        target = f"{source.stem}.o"
        _run([cxx, *flags, "-include", "prefix.h", "-c", str(source), "-o", target], work)
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    # Its own symbols come first: another library of the process may have the same ones.
    _run([cxx, "-shared", "-Wl,-Bsymbolic", *objects, "-o", "engine.so"], work)
    return work / "engine.so"


@functools.cache
def build() -> Path:
    """Path of the compiled engine, which is built if the cache has none.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    cxx = compiler()
    cache = cache_directory()
    library = cache / f"libcute_kernels_emulator-{_digest(cxx)}.so"
    if library.exists():
        return library
    with _lock(library.with_suffix(".lock")):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as work:
                _compile(cxx, Path(work)).replace(library)
    return library
