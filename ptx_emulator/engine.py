"""Python interface of the compiled engine: programs, launches, options, watched memory, counts."""

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from .compilation import build
from .errors import EmulatorError
from .host.locks import ForkSafeLock
from .host.suggestions import did_you_mean
from .parser import Module
from .program import Kernel

unsupported: dict[str, set[str]] = {}
"""Opcodes that are not modelled, by kernel. They raise an error only when a warp reaches them."""

_MODES = {"eager": 0, "chaos": 1}


class _Config(ctypes.Structure):
    """Mirror of the struct ``Config`` in ``src/machine.h``."""

    _fields_ = [
        ("num_sms", ctypes.c_uint32),
        ("ctas_per_sm", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("mode", ctypes.c_uint32),
        ("max_insns", ctypes.c_uint64),
        ("max_idle_insns", ctypes.c_uint64),
        ("check_fences", ctypes.c_uint32),
        ("check_races", ctypes.c_uint32),
    ]


#: Values of options that are not set.
_defaults = _Config(4, 1, 0, 0, 4_000_000_000, 50_000_000, 1, 0)
_capability = [10, 0]
_modules: list[Module] = []  # the engine holds addresses of their variables
_kernels: dict[str, Kernel] = {}


class _Options(threading.local):
    """Options of one thread that differ from the defaults, by field of ``_Config``."""

    def __init__(self) -> None:
        self.changed: dict[str, int] = {}


_options = _Options()


def _recover_after_fork() -> None:
    """Forget, in a forked child, the launch that another thread of the parent was running."""
    if library.cache_info().currsize:
        library().emu_forget_launch()


# The engine is one machine with one set of programs for all threads.
_lock = ForkSafeLock(on_orphaned=_recover_after_fork)


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded engine, compiled if needed."""
    lib = ctypes.CDLL(str(build()))
    for name in ("emu_opcodes", "emu_types", "emu_statistics", "emu_last_error", "emu_cubin_hash"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.emu_tensor_map_encode.restype = ctypes.c_char_p
    return lib


@contextlib.contextmanager
def exclusive() -> Iterator[ctypes.CDLL]:
    """Give this thread exclusive use of the engine in the block, with this thread's options."""
    with _lock:
        lib = library()
        config = _config()
        lib.emu_configure(ctypes.byref(config))
        lib.emu_set_device(int(config.num_sms), *_capability)
        yield lib


def _config() -> _Config:
    """Return the configuration of this thread."""
    config = _Config.from_buffer_copy(_defaults)
    for name, value in _options.changed.items():
        setattr(config, name, value)
    return config


def set_device(arch: str, num_sms: int) -> None:
    """Set the architecture and the number of multiprocessors of the emulated device.

    Args:
        arch: Architecture, such as ``"sm_90a"``.
        num_sms: Number of multiprocessors.

    Raises:
        ValueError: ``arch`` or ``num_sms`` is invalid.
    """
    m = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
    if not m:
        raise ValueError(f"arch must be like 'sm_90a' or 'sm_100a', got {arch!r}")
    if num_sms < 1:
        raise ValueError(f"num_sms must be positive, got {num_sms}")
    with exclusive():
        _capability[:] = int(m.group(1)), int(m.group(2))
        _defaults.num_sms = num_sms


def device_attribute(attribute: int) -> int:
    """Return an attribute of the emulated device by its CUDA number."""
    value = ctypes.c_int()
    with exclusive() as lib:
        lib._cudaDeviceGetAttribute(ctypes.byref(value), int(attribute), 0)
    return value.value


def device_sms() -> int:
    """Return the number of multiprocessors of the emulated device, unless an option changes it."""
    return int(_defaults.num_sms)


def num_sms() -> int:
    """Return the number of multiprocessors that kernels of this thread use."""
    return int(_config().num_sms)


def resident_ctas() -> int:
    """Return the number of CTAs that run at the same time."""
    config = _config()
    return int(config.num_sms * config.ctas_per_sm)


def clear_error() -> None:
    """Clear the message of the last error."""
    library().emu_set_error(b"")


def last_error() -> str:
    """Return the message of the last error, or an empty string."""
    message: bytes = library().emu_last_error()
    return message.decode(errors="replace")


def load_ptx(text: str, cubin: bytes | None = None) -> list[str]:
    """Load a PTX module into the engine.

    Args:
        text: PTX module.
        cubin: Machine code that the host code will load for this module. It distinguishes kernels
            of the same name in different modules. Without it, kernels are known by name
            alone, for ``launch``.

    Returns:
        The names of the kernels.
    """
    with exclusive() as lib:
        module = Module(text, lib.emu_opcodes().decode().split(), lib.emu_types().decode().split())
        _modules.append(module)
        for address, size in module.memory:
            lib.emu_add_module_range(ctypes.c_uint64(address), ctypes.c_uint64(size))
        prefix = f"{lib.emu_cubin_hash(cubin).decode()}:" if cubin is not None else ""
        for kernel in module.kernels:
            _add_program(lib, prefix + kernel.name, kernel)
    return [kernel.name for kernel in module.kernels]


def _add_program(lib: ctypes.CDLL, key: str, k: Kernel) -> None:
    """Register a kernel with the engine under ``key``."""
    count = len(k.param_offset)
    array = ctypes.c_uint32 * max(1, count)
    lib.emu_add_program(
        key.encode(),
        k.name.encode(),
        k.instructions.ctypes.data_as(ctypes.c_void_p),
        len(k.instructions),
        k.operands.ctypes.data_as(ctypes.c_void_p),
        len(k.operands),
        "\n".join(k.text).encode(),
        array(*k.param_offset),
        array(*k.param_size),
        count,
        k.param_bytes,
        k.num_regs,
        k.static_smem,
        k.local_bytes,
    )
    _kernels[key] = k
    unsupported.pop(k.name, None)
    if k.unsupported:
        unsupported[k.name] = k.unsupported


def _argument(value: Any, size: int) -> bytes:
    """Return the bytes of one kernel parameter of ``size`` bytes."""
    if isinstance(value, bytes):
        raw = value
    elif hasattr(value, "data_ptr"):  # a torch tensor
        raw = int(value.data_ptr()).to_bytes(8, "little")
    elif hasattr(value, "ctypes"):  # a NumPy array
        raw = int(value.ctypes.data).to_bytes(8, "little")
    elif isinstance(value, float):
        raw = bytes((ctypes.c_float if size == 4 else ctypes.c_double)(value))
    else:
        raw = (int(value) % (1 << 8 * size)).to_bytes(size, "little")
    if len(raw) != size:
        raise ValueError(f"a parameter of {size} bytes got {len(raw)}")
    return raw


def launch(
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any] = (),
    *,
    cluster: Sequence[int] | None = None,
    dynamic_smem: int = 0,
) -> None:
    """Run a kernel that was loaded by ``load_ptx`` without a cubin.

    Args:
        kernel: Name of the kernel.
        grid: Number of CTAs in x, y, z. Missing dimensions are 1.
        block: Number of threads in x, y, z. Missing dimensions are 1.
        args: One value per parameter: an int or float, a NumPy array or CPU tensor (passed by
            address), or the bytes of the parameter (for example a tensor map).
        cluster: Number of CTAs of a cluster in x, y, z. None launches without clusters.
        dynamic_smem: Bytes of dynamic shared memory.

    Raises:
        EmulatorError: The kernel failed.
        KeyError: No such kernel was loaded.
        ValueError: The arguments do not match the parameters.
    """
    sizes = _kernels[kernel].param_size
    if len(args) != len(sizes):
        raise ValueError(f"{kernel} has {len(sizes)} parameters, got {len(args)} arguments")
    buffers = [
        ctypes.create_string_buffer(_argument(v, n), n) for v, n in zip(args, sizes, strict=True)
    ]
    pointers = (ctypes.c_void_p * max(1, len(buffers)))(*map(ctypes.addressof, buffers))

    def dim3(sizes: Sequence[int] | None) -> Any:
        x, y, z, *_ = (*(sizes or ()), 1, 1, 1)
        return (ctypes.c_uint32 * 3)(x, y, z)

    with exclusive() as lib:
        failed = lib.emu_launch(
            kernel.encode(),
            dim3(grid),
            dim3(block),
            dim3(cluster),
            int(cluster is not None),
            dynamic_smem,
            pointers,
        )
        if failed:
            message = last_error()
            clear_error()
            raise EmulatorError(message)


#: Codes of the hardware.
_TYPES = {
    "uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5,
    "float16": 6, "float32": 7, "float64": 9, "bfloat16": 10,
}  # fmt: skip
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def tensor_map(array: Any, box: Sequence[int], *, swizzle: int = 0) -> bytes:
    """Return a tensor map over a NumPy array or CPU tensor, for a 128-byte parameter of ``launch``.

    Args:
        array: Array of 1 to 5 dimensions, contiguous in the last.
        box: Number of elements of the box in each dimension, in the array's order.
        swizzle: Swizzle in bytes: 0, 32, 64 or 128.

    Raises:
        ValueError: The hardware does not support such a tensor map.
    """
    rank = len(box)
    type_name = str(array.dtype).removeprefix("torch.")
    is_tensor = hasattr(array, "data_ptr")
    address = array.data_ptr() if is_tensor else array.ctypes.data
    strides = (
        [s * array.element_size() for s in array.stride()] if is_tensor else list(array.strides)
    )
    raw = ctypes.create_string_buffer(128 + 64)
    aligned = ctypes.addressof(raw) + 63 & ~63
    error: bytes | None = library().emu_tensor_map_encode(
        ctypes.c_void_p(aligned),
        _TYPES[type_name],
        rank,
        ctypes.c_uint64(address),
        (ctypes.c_uint64 * rank)(*reversed(array.shape)),
        (ctypes.c_uint64 * rank)(*reversed(strides[:-1])),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        _SWIZZLES[swizzle],
    )
    if error is not None:
        raise ValueError(f"no such tensor map: {error.decode()}")
    return ctypes.string_at(aligned, 128)


@contextlib.contextmanager
def options(
    *,
    mode: str | None = None,
    seed: int | None = None,
    num_sms: int | None = None,
    ctas_per_sm: int | None = None,
    max_insns: int | None = None,
    max_idle_insns: int | None = None,
    check_fences: bool | None = None,
    races: bool | None = None,
) -> Iterator[None]:
    """Change how this thread's kernels run in the block. None leaves an option unchanged.

    Args:
        mode: ``"eager"`` runs warps in order and asynchronous work at once. ``"chaos"`` runs warps
            in random order and for random spans, and asynchronous work late and out of order.
        seed: Seed of chaos mode.
        num_sms: Number of multiprocessors of the device.
        ctas_per_sm: Number of CTAs of a multiprocessor that run at the same time.
        max_insns: Number of warp instructions after which a launch fails.
        max_idle_insns: Number of warp instructions after which a launch fails if they changed
            only registers. It detects warps that poll for an event that never happens.
        check_fences: Check for missing ``fence.proxy.async``.
        races: Check for data races on shared and tensor memory. Kernels run about 2x slower.
    """
    if mode is not None and mode not in _MODES:
        raise ValueError(
            f"mode must be one of {sorted(_MODES)}, got {mode!r}" + did_you_mean(mode, _MODES)
        )
    for name, flag in (("races", races), ("check_fences", check_fences)):
        if not (flag is None or isinstance(flag, bool)):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    new = {
        "mode": None if mode is None else _MODES[mode],
        "seed": seed,
        "num_sms": num_sms,
        "ctas_per_sm": ctas_per_sm,
        "max_insns": max_insns,
        "max_idle_insns": max_idle_insns,
        "check_fences": check_fences,
        "check_races": races,
    }
    for name in ("num_sms", "ctas_per_sm", "max_insns", "max_idle_insns"):
        value = new[name]
        if value is not None and value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    before = _options.changed
    _options.changed = before | {name: value for name, value in new.items() if value is not None}
    try:
        yield
    finally:
        _options.changed = before


def watch(*tensors: Any) -> None:
    """Let kernels access only the memory of the watched tensors or NumPy arrays from now on.

    Other global memory is then out of bounds, except for kernels' own parameters and constants. If
    nothing is watched, kernels may access all memory. Watching a tensor watches its whole storage;
    keep the tensor alive until ``unwatch``. This applies to kernels of all threads.

    Args:
        tensors: CPU tensors or NumPy arrays.
    """
    with exclusive() as lib:
        for t in tensors:
            if hasattr(t, "untyped_storage"):
                storage = t.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
            else:
                address, size = t.ctypes.data, t.nbytes
            if size:
                lib.emu_add_range(ctypes.c_uint64(address), ctypes.c_uint64(size))


def unwatch() -> None:
    """Forget all watched tensors, so that kernels may access all memory again."""
    with exclusive() as lib:
        lib.emu_clear_ranges()


def stats() -> dict[str, int]:
    """Return the counts of all successful launches, in any thread, since ``reset_stats``.

    Returns:
        A dictionary with these counts: ``warp_insns`` and ``thread_insns``; ``op.<OPCODE>``, the
        executed warp instructions by class; ``ld_global_bytes`` and ``st_global_bytes``, and
        the same in 32-byte ``_sectors``. ``tma_load_bytes`` and ``tma_store_bytes`` include
        bulk copies. ``smem_accesses`` and ``smem_wavefronts`` differ by the bank
        conflicts. The rest are ``mma_flops``, ``mma_insns``, ``ctas`` and ``atomics``.
    """
    with exclusive() as lib:
        counts = (ctypes.c_uint64 * lib.emu_num_stats())()
        lib.emu_stats(counts)
    opcodes = lib.emu_opcodes().decode().split()
    out = {"warp_insns": counts[0], "thread_insns": counts[1]}
    out |= {f"op.{name}": counts[2 + i] for i, name in enumerate(opcodes) if counts[2 + i]}
    out |= zip(lib.emu_statistics().decode().split(), counts[2 + len(opcodes) :], strict=True)
    return out


def reset_stats() -> None:
    """Set all counts to zero."""
    with exclusive() as lib:
        lib.emu_reset_stats()
