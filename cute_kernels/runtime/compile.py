"""Compilation of kernels: from spec and architecture to a callable.

A kernel is looked up in memory, then on disk, then compiled. In both of the last cases the exported
object is loaded and runs. So both run the same code, and a call enters it directly, without the
DSL's Python wrapper.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ptx_emulator.host.locks import ForkSafeLock
from ptx_emulator.host.settings import warn_once

from .arch import Architecture
from .cache import CacheKey, DiskCache, cache_key, default_cache
from .dsl import require_dsl
from .emulated import load_emulated, real_device
from .spec import KernelSpec, resolve, short_name

_kernels: dict[tuple[KernelSpec, Architecture], Callable[..., object]] = {}
# cute.compile may not run in two threads at once.
_compile_lock = ForkSafeLock()


def compile_kernel(spec: KernelSpec, arch: Architecture) -> Callable[..., object]:
    """Return the compiled kernel of a spec, compiled at most once per process and per cache folder.

    Returns:
        A function that takes torch tensors and Python numbers by position. It checks them against
        the extents, strides, dtypes and alignments that the spec declares (ValueError or
        TypeError), and launches on the current stream of the tensors' device. For an emulated
        architecture it takes CPU tensors, has finished when it returns, and raises the
        emulator's errors.

    Raises:
        UnsupportedError: The CuTe DSL is missing or has an unsupported version.
    """
    kernel = _kernels.get((spec, arch))
    if kernel is None:
        with _compile_lock:
            kernel = _kernels.get((spec, arch))
            if kernel is None:
                require_dsl()
                with real_device():
                    kernel = _kernels[spec, arch] = _load_or_compile(spec, arch)
    return kernel


def is_on_disk(spec: KernelSpec, arch: Architecture) -> bool:
    """Return True if the disk cache has the kernel, complete and up to date."""
    cache, key = default_cache(), cache_key(spec, arch)
    return cache is not None and key is not None and cache.load(key) is not None


def compile_to_disk(spec: KernelSpec, arch: Architecture) -> bool | None:
    """Ensure that the disk cache has a kernel, without loading it into this process.

    Returns:
        True if it was compiled, False if it was cached, None if it cannot be cached.
    """
    require_dsl()
    cache, key = default_cache(), cache_key(spec, arch)
    if cache is None or key is None:
        return None
    if cache.load(key):
        return False
    with _compile_lock, cache.lock(key), real_device():
        if cache.load(key):
            return False
        files = _export(_compile(spec, arch), spec, arch)
        return True if files and cache.store(key, files) else None


def forget_kernels() -> None:
    """Drop all compiled kernels from memory. The disk cache does not change."""
    _kernels.clear()


def _load_or_compile(spec: KernelSpec, arch: Architecture) -> Callable[..., object]:
    """Load a kernel from the disk cache, or compile it."""
    cache, key = default_cache(), cache_key(spec, arch)
    if cache is None or key is None:
        return _compile_and_load(spec, arch, lambda files: None)
    if kernel := _load_entry(cache, key, spec, arch):
        return kernel
    with cache.lock(key):
        # Another process may have compiled it while this one waited.
        if kernel := _load_entry(cache, key, spec, arch):
            return kernel
        return _compile_and_load(spec, arch, lambda files: cache.store(key, files))


def _recompile(cache: DiskCache, key: CacheKey, spec: KernelSpec, arch: Architecture) -> Any:
    """Replace an entry that turned out to be damaged after its kernel was returned."""
    with _compile_lock, cache.lock(key), real_device():
        return _compile_and_load(spec, arch, lambda files: cache.store(key, files))


def _compile_and_load(
    spec: KernelSpec, arch: Architecture, keep: Callable[[dict[str, bytes]], object]
) -> Callable[..., object]:
    """Compile a kernel, pass its files to ``keep``, and load them."""
    compiled = _compile(spec, arch)
    files = _export(compiled, spec, arch)
    if files is None:
        return compiled
    keep(files)
    return _load(files, spec, arch)


def _compile(spec: KernelSpec, arch: Architecture) -> Any:
    """Compile a kernel with the DSL."""
    from cutlass import cute

    kernel = resolve(spec.kernel)
    arguments = kernel.fake_args(spec)
    options: tuple[Any, ...] = (cute.GPUArch(arch.target), cute.EnableTVMFFI(True))
    with tempfile.TemporaryDirectory(prefix="cute_kernels-") as folder:
        if arch.emulated:
            from cutlass.base_dsl.compiler import DumpDir

            # The DSL passes code through files, which two processes must not share.
            options = (*options, cute.KeepPTX(True), cute.KeepCUBIN(True), DumpDir(folder))
        with _kernels_named(f"{short_name(spec)}_{arch.target}", kernel):
            return cute.compile[options](kernel(spec), *arguments)


@contextlib.contextmanager
def _kernels_named(prefix: str, owner: type) -> Iterator[None]:
    """Give the kernels among the methods of ``owner`` names that identify the variant.

    The DSL names a kernel after its function and arguments. All variants of a class would share one
    name, and profiles and error messages could not tell them apart.
    """
    candidates = [value for cls in owner.__mro__ for value in vars(cls).values()]
    setters = [c.set_name_prefix for c in candidates if hasattr(c, "set_name_prefix")]
    for set_name_prefix in setters:
        set_name_prefix(prefix)
    try:
        yield
    finally:
        for set_name_prefix in setters:
            set_name_prefix("")


def _export(compiled: Any, spec: KernelSpec, arch: Architecture) -> dict[str, bytes] | None:
    """Return the files of a cache entry, or None with a warning if the DSL cannot export."""
    with tempfile.TemporaryDirectory(prefix="cute_kernels-") as folder:
        path = Path(folder) / "kernel.o"
        try:
            compiled.export_to_c(str(path), function_name=_symbol(spec))
            files = {"o": path.read_bytes()}
        except Exception as error:  # the DSL raises whatever its layers raise
            if arch.emulated:  # there, host code runs from an object file only
                raise
            warn_once(f"compiled kernels are not kept on disk: export failed with {error!r}")
            return None
    if arch.emulated:
        files |= {"ptx": compiled.artifacts.PTX.encode(), "cubin": compiled.artifacts.CUBIN}
    return files


def _load_entry(
    cache: DiskCache, key: CacheKey, spec: KernelSpec, arch: Architecture
) -> Callable[..., object] | None:
    """Load an entry of the disk cache; an entry that does not load is a miss, and is replaced."""
    files = cache.load(key)
    if files is None:
        return None
    try:
        return _load(files, spec, arch, lambda: _recompile(cache, key, spec, arch))
    except Exception as error:  # the DSL's loader raises whatever its layers raise
        warn_once(f"a cached kernel is compiled again, it does not load: {error!r}")
        return None


def _load(
    files: Mapping[str, bytes],
    spec: KernelSpec,
    arch: Architecture,
    renew: Callable[[], Any] | None = None,
) -> Callable[..., object]:
    """Link the object file of a cache entry into this process.

    ``renew`` compiles the kernel again if a file that is read later turns out to be damaged, or
    None for files that were just compiled.
    """
    if arch.emulated:
        return load_emulated(files, _symbol(spec), renew)
    from cutlass import cute

    # The loader takes a path. Only this process can write there.
    with tempfile.TemporaryDirectory(prefix="cute_kernels-") as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(files["o"])
        module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    return module[_symbol(spec)]


def _symbol(spec: KernelSpec) -> str:
    """Return the name of the exported function."""
    return f"cute_kernels_{short_name(spec)}"
