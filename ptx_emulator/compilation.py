"""Compiles the engine on first use and keeps the library in a cache.

The library is named after a hash of its sources and of what the compiler says about itself and this
machine's processor, so another source version, compiler or processor never meets it. It is moved
into place when it is complete: processes that build at the same time cannot see half of one. Beside
it is its SHA-256, without which, or with another, it is built anew. A library is code: it is taken
only from a folder and a file that nobody else may write (``host.trust``).
"""

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from .errors import BuildError
from .host.settings import cache_root, warn_once
from .host.trust import FILE_MODE, distrust, make_folder, open_folder, read_file, write_file

_SOURCES = Path(__file__).resolve().parent / "src"
_FLAGS = ["-std=c++17", "-O2", "-march=native", "-fPIC", "-fno-math-errno", "-w"]
_HINT = (
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
        raise BuildError(f"no C++ compiler {name!r} was found. {_HINT}")
    return path


def cache_directory() -> Path:
    """Where libraries are kept.

    ``emulator`` in the cache folder (``host.settings.cache_root``); where this user cannot write
    that, or others can, a directory of this user's under the system's temporary directory.
    """
    root = cache_root()
    if root is not None and _is_usable(root / "emulator"):
        return root / "emulator"
    private = Path(tempfile.gettempdir()) / f"cute_kernels-{os.getuid()}"
    # Anybody can put a symbolic link there, to another of this user's folders.
    if _is_usable(private) and not private.is_symlink() and _is_usable(private / "emulator"):
        return private / "emulator"
    return Path(tempfile.mkdtemp(prefix="cute_kernels-"))


def _is_usable(directory: Path) -> bool:
    """Whether code may be kept in the directory, which is made if it is missing."""
    try:
        make_folder(directory)
        if reason := distrust(directory.stat()):
            warn_once(f"the emulator's library is not kept in {directory}: {reason}")
            return False
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
        raise BuildError(f"{cxx} failed: {macros.stderr.decode()}\n{_HINT}")
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
            f"the emulator's engine did not compile.\n{' '.join(command)}\n{done.stderr.decode()[-4000:]}\n{_HINT}"
        )


def _compile(cxx: str, work: Path) -> Path:
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


def _is_intact(library: Path) -> bool:
    """Whether the library is there, is this user's own or root's, and has its hash beside it."""
    try:
        folder = open_folder(library.parent)
        try:
            found = hashlib.sha256(read_file(folder, library.name)).hexdigest()
            return found.encode() == read_file(folder, _hash_file(library).name)
        finally:
            os.close(folder)
    except OSError:
        return False


def _hash_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _install(built: Path, library: Path) -> None:
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    built.chmod(FILE_MODE)
    if library.is_dir():
        shutil.rmtree(library)  # A file cannot take its place.
    built.replace(library)
    # Last, so that a process that dies in between leaves a library that is not taken.
    write_file(_hash_file(library), digest.encode())


@functools.cache
def build() -> Path:
    """Path of the compiled engine, which is built if the cache has none.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    cxx = compiler()
    cache = cache_directory()
    library = cache / f"libcute_kernels_emulator-{_digest(cxx)}.so"
    if _is_intact(library):
        return library
    with _lock(library.with_suffix(".lock")):
        if not _is_intact(library):
            with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as work:
                _install(_compile(cxx, Path(work)), library)
    return library
