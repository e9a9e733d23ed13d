"""Compiles the engine on first use and caches the library.

The file name contains a hash of the sources, of the compiler's version and of this machine's
processor, so another source version, compiler or processor never loads it. The library is moved
into place when it is complete: a process never sees half of a library that another process builds.
A file next to the library holds its SHA-256; if that is missing or differs, the library is rebuilt.
A library is code, so it is loaded only from a folder and a file that no other user may write
(``host.trust``).
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
    """Return the path of the C++ compiler: ``CXX``, or g++.

    Raises:
        BuildError: There is no compiler.
    """
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"no C++ compiler {name!r} was found. {_HINT}")
    return path


def cache_directory() -> Path:
    """Return the folder of compiled libraries.

    It is ``emulator`` in the cache folder (``host.settings.cache_root``). If this user cannot write
    there, or other users can, it is a folder of this user in the system's temporary directory.
    """
    root = cache_root()
    if root is not None and _is_usable(root / "emulator"):
        return root / "emulator"
    private = Path(tempfile.gettempdir()) / f"cute_kernels-{os.getuid()}"
    # Any user could place a symbolic link there that points to another folder of this user.
    if _is_usable(private) and not private.is_symlink() and _is_usable(private / "emulator"):
        return private / "emulator"
    return Path(tempfile.mkdtemp(prefix="cute_kernels-"))


def _is_usable(directory: Path) -> bool:
    """Return True if code may be stored in the directory, which is created if it is missing."""
    try:
        make_folder(directory)
        if reason := distrust(directory.stat()):
            warn_once(f"the emulator's library is not stored in {directory}: {reason}")
            return False
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _digest(cxx: str) -> str:
    """Return a hash of the sources, the flags, and the compiler's and the processor's features."""
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
    """Return a lock that keeps other processes from the same work; without filelock, no lock."""
    try:
        from filelock import FileLock
    except ImportError:
        return contextlib.nullcontext()
    return FileLock(path)


def _run(command: list[str], directory: Path) -> None:
    """Run a compiler command and raise ``BuildError`` if it fails."""
    result = subprocess.run(command, cwd=directory, capture_output=True, check=False)
    if result.returncode:
        raise BuildError(
            f"the emulator's engine did not compile.\n{' '.join(command)}\n"
            f"{result.stderr.decode()[-4000:]}\n{_HINT}"
        )


def _compile(cxx: str, work: Path) -> Path:
    """Compile all sources in parallel in ``work`` and return the path of the library."""
    flags = [*_FLAGS, "-I", str(_SOURCES)]
    # Precompile the standard headers, which would otherwise dominate the time of each source.
    (work / "prefix.h").write_text('#include "machine.h"\n#include <algorithm>\n#include <cmath>\n')
    _run([cxx, *flags, "-x", "c++-header", "prefix.h", "-o", "prefix.h.gch"], work)
    sources = sorted(_SOURCES.glob("*.cpp"))

    def compile_one(source: Path) -> str:
        target = f"{source.stem}.o"
        _run([cxx, *flags, "-include", "prefix.h", "-c", str(source), "-o", target], work)
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    # Prefer the library's own symbols: another library in the process may define the same names.
    _run([cxx, "-shared", "-Wl,-Bsymbolic", *objects, "-o", "engine.so"], work)
    return work / "engine.so"


def _is_intact(library: Path) -> bool:
    """Return True if the library exists, may be trusted, and matches the hash next to it."""
    try:
        folder = open_folder(library.parent)
        try:
            digest = hashlib.sha256(read_file(folder, library.name)).hexdigest()
            return digest.encode() == read_file(folder, _hash_file(library).name)
        finally:
            os.close(folder)
    except OSError:
        return False


def _hash_file(library: Path) -> Path:
    """Return the path of the file with a library's hash."""
    return library.with_suffix(".sha256")


def _install(built: Path, library: Path) -> None:
    """Move a compiled library to its place, then write its hash."""
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    built.chmod(FILE_MODE)
    if library.is_dir():
        shutil.rmtree(library)  # a file cannot replace a folder
    built.replace(library)
    # The hash comes last: if the process dies before, the library is not used.
    write_file(_hash_file(library), digest.encode())


@functools.cache
def build() -> Path:
    """Return the path of the compiled engine, and compile it if the cache has none.

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
