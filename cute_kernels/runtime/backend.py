"""Which implementation runs an op: chosen by the tensor's device, or by the user.

Backends are ``reference`` (exact PyTorch, any device), ``reference:sm_90a`` / ``reference:sm_100a``
(the same, but its GEMMs add as that tensor core does, to the bit), ``cuda`` (CuTe DSL kernels for
the tensor's GPU) and ``emulated:sm_90a`` / ``emulated:sm_100a`` (those kernels, interpreted on the
CPU).
CPU tensors default to ``reference`` and CUDA tensors to ``cuda``. ``CUTE_KERNELS_BACKEND`` or
``with backend(...)`` choose another. There is no fallback: what a backend cannot do raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING

import torch

from cute_kernels.capability import ARCHITECTURES, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BACKENDS", "Backend", "active_backend", "backend"]

_REFERENCE = "reference:"
_EMULATED = "emulated:"
BACKENDS = (
    "reference",
    *(_REFERENCE + arch for arch in ARCHITECTURES[1:]),
    "cuda",
    *(_EMULATED + arch for arch in ARCHITECTURES[1:]),
)
_ENVIRONMENT = "CUTE_KERNELS_BACKEND"


@dataclasses.dataclass(frozen=True)
class Backend:
    """A choice of implementation.

    Attributes:
        name: one of ``BACKENDS``.
        arch: the architecture whose kernels it runs, as in ``capability.ARCHITECTURES``.
        tensor_core: the architecture whose tensor core the GEMMs of a reference backend add like;
            None for the order of ``cute_kernels.reference.gemm``.
    """

    name: str
    arch: str
    tensor_core: str | None = None


# Process-wide rather than thread-local: autograd runs the backward pass of GPU ops in its own
# threads, which must see the choice too.
_chosen: list[str] = []


def _check_name(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Run ops on the backend ``name`` inside a ``with`` block, in all threads.

    Raises:
        ValueError: ``name`` is not one of ``BACKENDS``.
    """
    _chosen.append(_check_name(name, "backend"))
    try:
        yield
    finally:
        _chosen.pop()


def active_backend(device: torch.device) -> Backend:
    """Return the backend for tensors on ``device``.

    Raises:
        ValueError: ``CUTE_KERNELS_BACKEND`` is not one of ``BACKENDS``.
        UnsupportedError: no backend serves this device.
    """
    if _chosen:
        name = _chosen[-1]
    elif os.environ.get(_ENVIRONMENT):
        name = _check_name(os.environ[_ENVIRONMENT], _ENVIRONMENT)
    else:
        name = "cuda" if device.type == "cuda" else "reference"
    if name == "cuda":
        return Backend(name, _cuda_arch(device))
    if name.startswith(_EMULATED):
        if device.type != "cpu":
            raise UnsupportedError(f"backend {name} runs CPU tensors, got a tensor on {device}")
        return Backend(name, name.removeprefix(_EMULATED))
    core = name.removeprefix(_REFERENCE) if name.startswith(_REFERENCE) else None
    return Backend(name, "reference", core)


def _cuda_arch(device: torch.device) -> str:
    if device.type != "cuda":
        raise UnsupportedError(f"backend cuda runs CUDA tensors, got a tensor on {device}")
    capability = torch.cuda.get_device_capability(device)
    # sm_103a is Blackwell Ultra: a superset of what the sm_100a kernels use.
    arch = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_100a"}.get(capability)
    if arch is None:
        raise UnsupportedError(
            f"backend cuda has kernels for Hopper (9.0) and Blackwell (10.0, 10.3); {device} has "
            f"compute capability {capability[0]}.{capability[1]}"
        )
    return arch
