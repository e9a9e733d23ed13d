"""The compiled engine: programs, launches, options, watched memory, counts."""

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
from .parser import Module
from .program import Kernel

unsupported: dict[str, set[str]] = {}
"""Opcodes that are not modelled, by kernel. They are errors only where a warp reaches them."""

_MODES = {"eager": 0, "chaos": 1}


class _Config(ctypes.Structure):
    """``Config`` of ``src/machine.h``."""

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


#: Where no option says otherwise.
_defaults = _Config(4, 1, 0, 0, 4_000_000_000, 50_000_000, 1, 0)
_capability = [10, 0]
_modules: list[Module] = []  # the engine holds addresses of their variables
_kernels: dict[str, Kernel] = {}


class _Options(threading.local):
    """What ``options`` changes in one thread, by field of ``_Config``."""

    def __init__(self) -> None:
        self.changed: dict[str, int] = {}


_options = _Options()


def _recover_after_fork() -> None:
    """Forget, in a forked child, what another thread of its parent was running."""
    if library.cache_info().currsize:
        library().emu_forget_launch()


# The engine is one machine with one set of programs, whatever thread drives it.
_lock = ForkSafeLock(on_orphaned=_recover_after_fork)


@functools.cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build()))
    for name in ("emu_opcodes", "emu_types", "emu_statistics", "emu_last_error", "emu_cubin_hash"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.emu_tensor_map_encode.restype = ctypes.c_char_p
    return lib


@contextlib.contextmanager
def exclusive() -> Iterator[ctypes.CDLL]:
    """Keep other threads from the engine inside the block; it has this thread's options there."""
    with _lock:
        lib = library()
        config = _config()
        lib.emu_configure(ctypes.byref(config))
        lib.emu_set_device(int(config.num_sms), *_capability)
        yield lib


def _config() -> _Config:
    config = _Config.from_buffer_copy(_defaults)
    for name, value in _options.changed.items():
        setattr(config, name, value)
    return config


def set_device(arch: str, num_sms: int) -> None:
    """Make the device one of this architecture (``"sm_90a"``) with this many multiprocessors."""
    m = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
    if not m:
        raise ValueError(f"arch must be like 'sm_90a' or 'sm_100a', got {arch!r}")
    if num_sms < 1:
        raise ValueError(f"num_sms must be positive, got {num_sms}")
    with exclusive():
        _capability[:] = int(m.group(1)), int(m.group(2))
        _defaults.num_sms = num_sms


def device_attribute(attribute: int) -> int:
    value = ctypes.c_int()
    with exclusive() as lib:
        lib._cudaDeviceGetAttribute(ctypes.byref(value), int(attribute), 0)
    return value.value


def device_sms() -> int:
    """Multiprocessors of the emulated device where no option says otherwise."""
    return int(_defaults.num_sms)


def num_sms() -> int:
    return int(_config().num_sms)


def resident_ctas() -> int:
    config = _config()
    return int(config.num_sms * config.ctas_per_sm)


def clear_error() -> None:
    library().emu_set_error(b"")


def last_error() -> str:
    message: bytes = library().emu_last_error()
    return message.decode(errors="replace")


def load_ptx(text: str, cubin: bytes | None = None) -> list[str]:
    """Hand PTX to the engine.

    Args:
        text: A PTX module.
        cubin: What the host code will load for it. Kernels of different modules may have the
            same name; the cubin tells them apart. Without it the kernels are known by name
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
        kernel: Its name.
        grid: CTAs in x, y, z; missing ones are 1.
        block: Threads in x, y, z; missing ones are 1.
        args: One for each parameter: an int or float, a NumPy array or CPU tensor (its
            address), or the parameter's bytes (a tensor map).
        cluster: CTAs of a cluster in x, y, z; no cluster launch where None.
        dynamic_smem: Bytes of dynamic shared memory.

    Raises:
        EmulatorError: The kernel failed.
        KeyError: No such kernel was loaded.
        ValueError: The arguments do not fit the parameters.
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


#: The hardware's codes.
_TYPES = {
    "uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5,
    "float16": 6, "float32": 7, "float64": 9, "bfloat16": 10,
}  # fmt: skip
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def tensor_map(array: Any, box: Sequence[int], *, swizzle: int = 0) -> bytes:
    """A tensor map over a NumPy array or CPU tensor, for a 128-byte parameter of ``launch``.

    Args:
        array: Of 1 to 5 dimensions, contiguous in the last.
        box: Elements of the box in each dimension, in the array's order.
        swizzle: 0, 32, 64 or 128 bytes.

    Raises:
        ValueError: The hardware takes no such tensor map.
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
    """Change how this thread's kernels run inside the block; None leaves an option as it is.

    Args:
        mode: ``"eager"`` (warps in order, asynchronous work at once) or ``"chaos"`` (warps in
            random order and for random spans, asynchronous work late and out of order).
        seed: Of chaos mode.
        num_sms: Multiprocessors of the device.
        ctas_per_sm: CTAs of a multiprocessor that run at the same time.
        max_insns: Warp instructions after which a launch is an error.
        max_idle_insns: Warp instructions after which a launch is an error if they changed
            nothing but registers: warps poll for what does not come.
        check_fences: Whether to look for missing ``fence.proxy.async``.
        races: Whether to look for data races on shared and tensor memory (about 2x slower).
    """
    if mode is not None and mode not in _MODES:
        raise ValueError(f"mode must be one of {sorted(_MODES)}, got {mode!r}")
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
    """Let kernels touch only the memory of the watched tensors (or NumPy arrays) from now on.

    Global memory that nobody watches is out of bounds, except for kernels' own parameters and
    constants. Where nothing is watched, all memory may be touched. A tensor is watched with the
    whole of its storage; keep it alive until ``unwatch``. This holds for kernels of all threads.
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
    """Forget every watched tensor: all memory may be touched again."""
    with exclusive() as lib:
        lib.emu_clear_ranges()


def stats() -> dict[str, int]:
    """Counts of all launches that succeeded, in any thread, since ``reset_stats``.

    Returns:
        ``warp_insns`` and ``thread_insns``; ``op.<OPCODE>`` warp instructions of each class
        that ran; ``ld_global_bytes`` and ``st_global_bytes``, the same in 32-byte ``_sectors``;
        ``tma_load_bytes`` and ``tma_store_bytes`` (bulk copies included); ``smem_accesses`` and
        the ``smem_wavefronts`` they take (the difference is bank conflicts); ``mma_flops``,
        ``mma_insns``, ``ctas`` and ``atomics``.
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
    """Start counting afresh."""
    with exclusive() as lib:
        lib.emu_reset_stats()
