"""Backends: implementations of ops, chosen by the tensor's device or by the user.

- ``reference``: exact PyTorch, on any device; the default for CPU tensors.
- ``reference:sm_90a``, ``reference:sm_100a``: the reference with the accumulation of that tensor
core
  in GEMMs, exact to the bit.
- ``cuda``: CuTe DSL kernels for the tensor's GPU; the default for CUDA tensors.
- ``emulated:sm_90a``, ``emulated:sm_100a``: the same kernels, interpreted on the CPU.

``CUTE_KERNELS_BACKEND`` or ``with backend(...)`` choose another backend. The variable takes
options: ``emulated:sm_100a,mode=chaos,seed=3``. There is no silent fallback: unsupported calls
raise ``UnsupportedError`` with the reason.
"""

import contextlib
import contextvars
import dataclasses
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from ptx_emulator.host.settings import boolean
from ptx_emulator.host.suggestions import did_you_mean

from ..capability import ARCHITECTURES
from ..records import UnsupportedError
from .arch import device_architecture

_REFERENCE = "reference:"
_EMULATED = "emulated:"
BACKENDS = (
    "reference",
    *(_REFERENCE + arch for arch in ARCHITECTURES[1:]),
    "cuda",
    *(_EMULATED + arch for arch in ARCHITECTURES[1:]),
)
_ENVIRONMENT = "CUTE_KERNELS_BACKEND"
_environment: Any = getattr(os.environ, "_data", os.environ)
_KEY: Any = os.environ.encodekey(_ENVIRONMENT) if hasattr(os.environ, "_data") else _ENVIRONMENT


#: Options that ``backend`` passes to the emulator.
EMULATOR_OPTIONS = ("mode", "seed", "num_sms", "races")


@dataclasses.dataclass(frozen=True)
class Backend:
    """A choice of implementation.

    Attributes:
        name: One of ``BACKENDS``.
        arch: Architecture whose kernels it runs, as in ``capability.ARCHITECTURES``.
        tensor_core: Architecture whose accumulation the GEMMs of a reference backend emulate. None
            for the order of ``cute_kernels.reference.gemm``.
        emulation: Options of the emulator, by name.
    """

    name: str
    arch: str
    tensor_core: str | None = None
    emulation: tuple[tuple[str, Any], ...] = ()

    @property
    def listed(self) -> str:
        """Name for ``capability.support``, which tells reference backends apart by tensor core."""
        return self.arch if self.tensor_core is None else _REFERENCE + self.tensor_core

    @property
    def is_emulated(self) -> bool:
        """True for kernels on the emulator."""
        return self.name.startswith(_EMULATED)


#: Choice of a backend: its name and options, the text of the environment, or None.
Choice: TypeAlias = "_Block | str | None"

#: Name and options of a block's backend.
_Block: TypeAlias = "tuple[str, tuple[tuple[str, Any], ...]]"
#: Blocks that the main thread has entered, for threads without a block of their own.
_main_blocks: list[_Block] = []
#: Number of blocks of all threads. If it is 0, the other variables are not read.
_entered = 0
_entered_lock = threading.Lock()
#: Blocks of this thread. This is a context variable, because PyTorch passes the context of the
#: thread that calls ``backward()`` to autograd's threads, which run the backward pass of GPU ops.
_blocks: contextvars.ContextVar[tuple[_Block, ...]] = contextvars.ContextVar(
    "cute_kernels.backend", default=()
)
_CALLER = "context"


def _check_name(name: str, source: str) -> str:
    """Return ``name``, or raise ValueError if it is not a backend."""
    if name not in BACKENDS:
        raise ValueError(
            f"{source} must be one of {', '.join(BACKENDS)}, got {name!r}"
            + did_you_mean(name, BACKENDS)
        )
    return name


def _caller_blocks() -> tuple[_Block, ...]:
    """Return the blocks of the thread whose backward pass this thread runs."""
    context = torch._C._get_obj_in_tls(_CALLER) if torch._C._is_key_in_tls(_CALLER) else None
    return () if context is None else context.get(_blocks, ())


def _enter(block: _Block) -> None:
    """Enter a block in this thread."""
    global _entered
    with _entered_lock:
        _entered += 1
        if threading.current_thread() is threading.main_thread():
            _main_blocks.append(block)
    _blocks.set((*_blocks.get(), block))


def _leave(block: _Block) -> None:
    """Leave a block of this thread."""
    global _entered
    # Generators may leave their blocks in another order, so this may not be the last block.
    _blocks.set(tuple(entered for entered in _blocks.get() if entered is not block))
    with _entered_lock:
        _main_blocks[:] = [entered for entered in _main_blocks if entered is not block]
        _entered -= 1


@contextlib.contextmanager
def backend(name: str, **options: Any) -> Iterator[None]:
    """Run ops on the backend ``name`` in a ``with`` block.

    The block applies to the thread that enters it, and to the backward passes that this thread
    runs. A thread without a block of its own uses the block of the main thread, or else the
    environment's choice. So do GPU backward passes of other threads in PyTorch 2.11, which does not
    pass the context of a thread to autograd's threads; 2.13 does.

    Ops choose their backend when they run, also in a compiled function: enter the block around the
    call of the function, whatever backend was active at compilation. A block inside the function is
    not part of the graph: ``fullgraph=True`` and ``torch.export`` reject it; without them the
    function runs eagerly.

    Args:
        name: One of ``BACKENDS``.
        **options: Options of an emulated backend: ``mode`` ("eager" or "chaos"), ``seed``,
            ``num_sms`` and ``races``, as for ``cute_kernels.emulator.options``.

    Raises:
        ValueError: ``name`` is not one of ``BACKENDS``.
        TypeError: The backend does not take an option.
        RuntimeError: The block is entered while a function is traced.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a compiled graph cannot choose a backend: enter cute_kernels.backend(...) around the "
            "call of the compiled function"
        )
    _check_name(name, "backend")
    block = (name, _check_options(name, options))
    _enter(block)
    try:
        yield
    finally:
        _leave(block)


def chosen_backend() -> Choice:
    """Return the current choice, which with the device determines ``active_backend``.

    It is a key for cached decisions. The main thread may change it at any time: read it once, and
    pass it on.
    """
    if _entered:
        blocks = _blocks.get() or _caller_blocks() or tuple(_main_blocks)
        if blocks:
            return blocks[-1]
    # ``os.environ`` encodes and decodes, which takes a microsecond per call.
    text = _environment.get(_KEY)
    return text.decode() if isinstance(text, bytes) else text


def active_backend(device: torch.device) -> Backend:
    """Return the backend for tensors on ``device``.

    Args:
        device: Device of the tensors, such as ``torch.device("cpu")``.

    Raises:
        ValueError: ``CUTE_KERNELS_BACKEND`` is not one of ``BACKENDS``.
        UnsupportedError: No backend supports this device.
    """
    return resolve_backend(chosen_backend(), device)


def resolve_backend(choice: Choice, device: torch.device) -> Backend:
    """Return the backend of a ``choice`` of ``chosen_backend`` for tensors on ``device``."""
    if not choice:
        return _resolve("cuda" if device.type == "cuda" else "reference", (), device)
    name, options = _parse(choice) if isinstance(choice, str) else choice
    return _resolve(name, options, device)


@functools.cache
def _parse(text: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Parse the environment's choice: ``name,option=value,...``."""
    name, *items = text.split(",")
    _check_name(name, _ENVIRONMENT)
    options: dict[str, Any] = {}
    for item in items:
        option, separator, value = item.partition("=")
        if not separator:
            raise ValueError(f"{_ENVIRONMENT}: options are written option=value, got {item!r}")
        if option in ("seed", "num_sms"):
            if not value.isdecimal():
                raise ValueError(f"{_ENVIRONMENT}: {option} must be a number, got {value!r}")
            options[option] = int(value)
        elif option == "races":
            options[option] = boolean(f"{_ENVIRONMENT}: races", value)
        else:
            options[option] = value
    return name, _check_options(name, options)


def _check_options(name: str, options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Check the options of a backend, and return them sorted by name."""
    known = EMULATOR_OPTIONS if name.startswith(_EMULATED) else ()
    for option in options:
        if option not in known:
            raise TypeError(
                f"backend {name} takes {', '.join(known) or 'no options'}; got {option}"
                + did_you_mean(option, known)
            )
    if "seed" in options and options.get("mode") != "chaos":
        raise ValueError(f"seed needs mode='chaos', got {options}")
    return tuple(sorted(options.items()))


@functools.lru_cache(maxsize=256)
def _resolve(name: str, options: tuple[tuple[str, Any], ...], device: torch.device) -> Backend:
    """Return the backend with this name and options."""
    if name == "cuda":
        return Backend(name, device_architecture(device).name)
    if name.startswith(_EMULATED):
        if device.type != "cpu":
            raise UnsupportedError(f"backend {name} runs CPU tensors, got a tensor on {device}")
        return Backend(name, name.removeprefix(_EMULATED), emulation=options)
    tensor_core = name.removeprefix(_REFERENCE) if name.startswith(_REFERENCE) else None
    return Backend(name, "reference", tensor_core)
