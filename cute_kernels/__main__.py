"""``python -m cute_kernels``: versions, devices, backends and caches, for bug reports."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator

import cute_kernels
from ptx_emulator.host.settings import cache_root, kernel_cache_is_on

_PACKAGES = ("torch", "numpy", "nvidia-cutlass-dsl", "apache-tvm-ffi", "filelock", "transformers")


def report() -> Iterator[tuple[str, str]]:
    """Yield versions, devices, backends and caches as pairs of a name and a value."""
    yield "grouped-kernels", f"{cute_kernels.__version__} from {next(iter(cute_kernels.__path__))}"
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield from ((package, _version(package)) for package in _PACKAGES)
    yield "C++ compiler (emulator)", shutil.which(os.environ.get("CXX", "g++")) or "not found"
    if importlib.util.find_spec("torch") is not None:
        yield from _devices()
    yield "kernel cache", str(cache_root()) if kernel_cache_is_on() else "off"
    for name, value in sorted(os.environ.items()):
        if name.startswith("CUTE_"):
            yield name, value


def _version(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    """Yield the GPUs, and the backends of CPU and CUDA tensors."""
    import torch

    from .runtime.arch import device_architecture
    from .runtime.backend import active_backend
    from .runtime.dsl import dsl_unavailable

    yield "CUDA of torch", torch.version.cuda or "none: a CPU build"
    yield "CuTe DSL kernels", dsl_unavailable() or "can be compiled"
    for index in range(torch.cuda.device_count()):
        try:
            runs = f"runs the kernels of {device_architecture(index)}"
        except cute_kernels.UnsupportedError as error:
            runs = f"no kernels: {error}"
        yield f"GPU {index}", f"{torch.cuda.get_device_name(index)}: {runs}"
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        try:
            backend = active_backend(torch.device(kind)).name
        except (cute_kernels.UnsupportedError, ValueError) as error:
            backend = f"none: {error}"
        yield f"backend of {kind} tensors", backend


def main() -> None:
    """Print the report, aligned."""
    pairs = list(report())
    width = max(len(name) for name, _ in pairs)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in pairs))


if __name__ == "__main__":
    main()
