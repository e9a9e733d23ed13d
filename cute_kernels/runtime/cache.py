"""On-disk cache of compiled kernels.

An entry is a few files next to each other: ``<name>.o``, for emulated architectures ``<name>.ptx``,
and last ``<name>.json``, which holds the whole key and a SHA-256 of each file. There is no entry
without a readable JSON file with the requested key and matching hashes. Files that are missing,
truncated, altered, or left by a writer that died are a miss, never an error. Files appear by atomic
replacement. Readers take no lock. A process that compiles holds a file lock for the entry, so that
several processes that need the same kernel compile it once.

An entry is code. It is loaded only from a folder and from files that belong to this user or to root
and that no other user may write (``host.trust``). A file is read once, so the hashed bytes are the
loaded bytes. A folder that other users own or may write gives one warning, and is neither read nor
written.

Everything in the folder may be deleted at any time.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ptx_emulator.host.settings import cache_root, kernel_cache_is_on, warn_once
from ptx_emulator.host.trust import distrust, make_folder, open_folder, read_file, write_file

from .arch import Architecture
from .dsl import installed_versions
from .sources import digest_of, module_file
from .spec import KernelSpec, canonical_text, short_name

#: Bump when the meaning of an entry's files changes.
_LAYOUT = 1
#: A compilation takes seconds; a lock held for longer than this belongs to a stuck process.
_LOCK_TIMEOUT_S = 300.0
_STARTED = time.time()
#: Files of this package that compile kernels. Their own imports do not change the code.
_COMPILER_SOURCE = tuple(
    Path(__file__).with_name(f"{name}.py") for name in ("arch", "compile", "dsl", "spec")
)
#: CUTE_DSL_* variables that do not change the generated code. Every version of the DSL adds
#: variables, so all others are part of the key.
_HARMLESS_DSL_VARIABLES = frozenset(
    f"CUTE_DSL_{name}"
    for name in (
        "ARCH",  # the target is passed to each compilation
        "CACHE_DIR",
        "DISABLE_FILE_CACHING",
        "DUMP_DIR",
        "FILTER_STACKTRACE",
        "JIT_CACHE_MAX_ELEMS",
        "JIT_TIME_PROFILING",
        "KEEP",
        "LIBS",
        "LOG_LEVEL",
        "LOG_TO_CONSOLE",
        "LOG_TO_FILE",
        "NO_CACHE",
        "PRINT_AFTER_PREPROCESSOR",
        "PRINT_IR",
        "SHOW_STACKTRACE",
    )
)


class CacheKey:
    """Name of an entry, and every fact that its compiled code depends on.

    Args:
        name: Start of the name.
        facts: Facts by name.
    """

    def __init__(self, name: str, facts: dict[str, str]) -> None:
        self.facts = facts
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.name = f"{name}-{digest[:32]}"


class DiskCache:
    """Entries of compiled code in one folder. See the module's docstring for the format.

    Args:
        root: Folder. It is created when the first entry is written; it may be read-only or missing.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, key: CacheKey) -> dict[str, bytes] | None:
        """Return the files of an entry by suffix (``"o"``, ``"ptx"``), or None on a miss.

        A folder or a file that another user owns or may write is a miss, with a warning.
        """
        try:
            folder = open_folder(self.root)
        except PermissionError as error:
            warn_once(f"cached kernels are not used: {error}")
            return None
        except OSError:
            return None
        try:
            return self._read(folder, key)
        except PermissionError as error:
            warn_once(f"a cached kernel in {self.root} is compiled again: {error}")
            return None
        # A malformed file raises any of these; endless nesting raises a RecursionError.
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        finally:
            os.close(folder)

    @staticmethod
    def _read(folder: int, key: CacheKey) -> dict[str, bytes] | None:
        """Read and verify the files of an entry, or None if there is no valid entry."""
        meta = json.loads(read_file(folder, f"{key.name}.json"))
        if meta["key"] != key.facts:
            return None
        files = {}
        for suffix, digest in meta["files"].items():
            if not suffix.isalnum():
                return None
            files[suffix] = read_file(folder, f"{key.name}.{suffix}")
            if hashlib.sha256(files[suffix]).hexdigest() != digest:
                return None
        return files

    def store(self, key: CacheKey, files: Mapping[str, bytes]) -> bool:
        """Write an entry of files by suffix. Its JSON file comes last and makes it valid.

        Returns:
            True if the entry was written. A folder that cannot be written gives one warning, not an
            error: the kernel still runs.
        """
        hashes = {suffix: hashlib.sha256(data).hexdigest() for suffix, data in files.items()}
        meta = json.dumps({"key": key.facts, "files": hashes}, indent=1, sort_keys=True)
        try:
            self._make_root()
            for suffix, data in {**files, "json": meta.encode()}.items():
                write_file(self.root / f"{key.name}.{suffix}", data)
        except OSError as error:
            warn_once(f"compiled kernels are not kept on disk: {error}")
            return False
        return True

    @contextlib.contextmanager
    def lock(self, key: CacheKey) -> Iterator[None]:
        """Hold the entry's lock, so that others wait instead of compiling the same kernel.

        The operating system drops the lock of a process that dies. If no lock is available (a
        read-only folder, a file system without locks, a stuck holder), the block runs without one.
        In the worst case a kernel is compiled twice.
        """
        import filelock

        path = self.root / f"{key.name}.lock"
        file_lock = filelock.FileLock(path, timeout=_LOCK_TIMEOUT_S)
        is_locked = False
        try:
            self._make_root()
            file_lock.acquire()
            is_locked = True
        except filelock.Timeout:
            warn_once(f"{path} was held for {_LOCK_TIMEOUT_S:.0f} s; compiling without it")
        except (OSError, NotImplementedError):
            pass  # store() reports a folder that cannot be written
        try:
            yield
        finally:
            if is_locked:
                file_lock.release()

    def _make_root(self) -> None:
        """Create the folder, or check that it may hold code.

        Raises:
            OSError: It cannot be created, or other users own or may write it.
        """
        make_folder(self.root)
        if reason := distrust(self.root.stat()):
            raise PermissionError(f"{self.root} is not used: {reason}")


def default_cache() -> DiskCache | None:
    """Return the cache that the environment asks for, or None if it is off.

    ``CUTE_KERNELS_CACHE=0`` turns it off; ``host.settings.cache_root`` is its folder.

    Raises:
        ValueError: ``CUTE_KERNELS_CACHE`` is not a boolean.
    """
    root = cache_root() if kernel_cache_is_on() else None
    return None if root is None else DiskCache(root)


def cache_key(spec: KernelSpec, arch: Architecture) -> CacheKey | None:
    """Return the key of a kernel's entry.

    Returns:
        The key, or None if the kernel's sources are not certain (unreadable, or edited since this
        process started). The disk is then not used, rather than used with a weaker key.
    """
    sources = _source_digest(type(spec).__module__, spec.kernel.partition(":")[0])
    if sources is None:
        return None
    facts = {
        "layout": str(_LAYOUT),
        "spec": canonical_text(spec),
        "arch": str(arch),
        "sources": sources,
        "python": f"{sys.implementation.name} {platform.python_version()}",
        "packages": " ".join(installed_versions()),
        "options": " ".join(
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if name.startswith("CUTE_DSL_") and name not in _HARMLESS_DSL_VARIABLES
        ),
        # The host half of a kernel is compiled for this CPU: it may have AVX instructions.
        "host": _host(),
    }
    return CacheKey(short_name(spec), facts)


@functools.cache
def _source_digest(*modules: str) -> str | None:
    """Return a digest of the sources of ``modules``, their imports, and the compiler's sources.

    Imports count if they belong to this package. For a module of another package, all sources of
    that package count.
    """
    digests: list[str | None] = [_compiler_digest()]
    for module in modules:
        file = module_file(module)
        if file is not None:
            digests.append(digest_of([file], _STARTED))
            continue
        top = module.partition(".")[0]
        source = getattr(sys.modules.get(top), "__file__", None)
        if source is None or top == __name__.partition(".")[0]:
            return None
        path = Path(source).resolve()
        files = list(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
        # Without a file the module comes from an archive.
        digests.append(digest_of(files, _STARTED, path.parent) if path in files else None)
    return (
        None
        if None in digests
        else hashlib.sha256(" ".join(filter(None, digests)).encode()).hexdigest()
    )


def _compiler_digest() -> str | None:
    """Return a digest of the sources that compile kernels, or None if they changed."""
    try:
        if any(path.stat().st_mtime > _STARTED for path in _COMPILER_SOURCE):
            return None
        return hashlib.sha256(
            b"".join(hashlib.sha256(path.read_bytes()).digest() for path in _COMPILER_SOURCE)
        ).hexdigest()
    except OSError:
        return None


@functools.cache
def _host() -> str:
    """Return the operating system, the machine and a digest of the CPU's features."""
    features = ""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        named = (line for line in lines if line.startswith(("flags", "Features")))
        features = hashlib.sha256(next(named, "").encode()).hexdigest()[:16]
    return f"{platform.system()} {platform.machine()} {features}"
