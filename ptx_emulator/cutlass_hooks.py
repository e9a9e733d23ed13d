"""Makes the CuTe DSL compile for, and run on, the emulated device.

``cute.compile`` needs no GPU. Its host code calls some CUDA runtime functions from a library that
the DSL takes from ``CUTE_DSL_LIBS``; the engine exports the same functions. A function that is
compiled while the emulator is installed is bound to the emulator forever. The classes of the DSL
are patched once; the patches do not affect functions that were compiled without the emulator.

The DSL's loader looks up CUDA's functions by name in the whole process, and the library that was
loaded first wins. A process that has compiled for the real device therefore cannot compile for the
emulator here (an error), and once it has compiled for the emulator, TVM-FFI functions for the real
device fail. Host code that is linked into a library of its own (``RTLD_DEEPBIND``) has no such
limit: ``cute_kernels.runtime`` loads emulated kernels in that way.
"""

import contextlib
import ctypes
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptx_emulator import engine

from .compilation import build
from .errors import EmulatorError

_DL_CPU, _DL_CUDA = 1, 2  # DLDeviceType
_L2_BYTES = 126 << 20
_REAL_RUNTIME = "libcute_dsl_runtime"


class _State:
    """The installed architecture, and the DSL's settings from before the installation."""

    arch: str | None = None
    is_first_runtime = False
    environment: dict[str, str | None] = {}
    settings: list[tuple[Any, dict[str, Any]]] = []


def installed() -> str | None:
    """Return the architecture that new kernels are emulated for, or None if the emulator is off."""
    return _State.arch


def install(arch: str = "sm_100a", num_sms: int = 4) -> None:
    """Compile for ``arch`` from now on, and run the compiled kernels on the emulator.

    It may be called again to change the architecture or the number of multiprocessors, and after
    ``import cutlass``. Functions that were emulated for another architecture still work. Values
    that user code has computed from the architecture at import time do not change. CPU tensors
    stand for device memory. If the process has compiled for the real device, compiling raises
    ``EmulatorError``. A process that never calls this function is not affected.

    Args:
        arch: ``"sm_90a"``, ``"sm_100a"`` or ``"sm_103a"``.
        num_sms: Number of multiprocessors of the emulated device.

    Raises:
        BuildError: The engine could not be compiled.
        ImportError: The CuTe DSL is not installed.
        ValueError: There is no such architecture.
    """
    engine.set_device(arch, num_sms)
    _restore_settings()
    # Before the environment changes: the DSL's objects must keep the real settings for later.
    import cutlass  # noqa: F401

    _change_environment(
        CUTE_DSL_ARCH=arch, CUTE_DSL_LIBS=str(build()), CUTE_DSL_KEEP="ptx,cubin",
        CUTE_DSL_DUMP_DIR=_dump_directory().name,
    )  # fmt: skip
    try:
        _patch_dsl()
        _change_settings(arch)
    except BaseException:
        _restore_settings()
        raise
    _State.arch = arch


def uninstall() -> None:
    """Compile for the real device again. Kernels that are emulated already stay emulated."""
    _restore_settings()
    _State.arch = None


@functools.cache
def _dump_directory() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of the DSL's PTX and cubin files, which is removed with the process."""
    return tempfile.TemporaryDirectory(prefix="cute_kernels-ptx-")


def _change_environment(**values: str) -> None:
    """Set environment variables and remember their old values."""
    for name, value in values.items():
        _State.environment.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def _dsl_instances() -> list[Any]:
    """Return the DSL objects of this process."""
    from cutlass.base_dsl.dsl import DSLSingletonMeta

    return list(DSLSingletonMeta._instances.values())


def _forget_read_environment() -> None:
    """Clear the DSL's cache of environment variables."""
    from cutlass.base_dsl import env_manager

    env_manager.get_str_env_var.cache_clear()


def _change_settings(arch: str) -> None:
    """Change the settings of existing DSL objects, which have read the environment already."""
    _forget_read_environment()
    for dsl in _dsl_instances():
        settings = dsl.envar
        new = {
            "_arch": arch,
            "shared_libs": os.environ["CUTE_DSL_LIBS"],
            "keep_ptx": True,
            "keep_cubin": True,
            "dump_dir": os.environ["CUTE_DSL_DUMP_DIR"],
        }
        _State.settings.append((settings, {name: getattr(settings, name) for name in new}))
        for name, value in new.items():
            setattr(settings, name, value)


def _restore_settings() -> None:
    """Restore the environment and the DSL's settings from before ``install``."""
    for name, value in _State.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for settings, old in _State.settings:
        for name, value in old.items():
            setattr(settings, name, value)
    if _State.settings:
        _forget_read_environment()
    _State.environment.clear()
    _State.settings.clear()


def _wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace ``owner.name`` by ``f(original, *args)``."""

    def replace(f: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return f(original, *args, **kwargs)

        setattr(owner, name, wrapper)

    return replace


def real_runtime_is_loaded() -> bool:
    """Return True if the DSL has bound functions of this process to the real CUDA runtime."""
    return _REAL_RUNTIME in Path("/proc/self/maps").read_text()


def _need_first_runtime() -> None:
    """Raise ``EmulatorError`` if the real CUDA runtime was loaded before the emulator."""
    if not _State.is_first_runtime and real_runtime_is_loaded():
        raise EmulatorError(
            "functions for the real device were compiled in this process before any emulated one; "
            "CuTe DSL would bind emulated functions to the real CUDA runtime. Use another process"
        )
    _State.is_first_runtime = True


def _is_emulated(compiled: Any) -> bool:
    return bool(getattr(compiled, "_cute_kernels_emulated", False))


def _run(call: Callable[[], Any]) -> Any:
    """Call into emulated host code. A failure of the emulator becomes an ``EmulatorError``."""
    with engine.exclusive():
        engine.clear_error()
        try:
            result = call()
        except Exception as e:
            if message := engine.last_error():
                raise EmulatorError(message) from None
            raise e
        if message := engine.last_error():
            raise EmulatorError(message)
        return result


@functools.cache
def _patch_dsl() -> None:
    """Patch the DSL's classes once."""
    _patch_compiled_functions()
    _patch_executor()
    _patch_device_queries()
    _patch_tensors()
    _patch_tvm_ffi()


def _patch_compiled_functions() -> None:
    """Mark compiled functions that are emulated, and load their PTX."""
    import cutlass.cutlass_dsl.cuda_jit_executor as executor

    function: Any = executor.CudaDialectJitCompiledFunction
    real_num_devices = function.num_devices

    @_wrap(function, "__init__")
    def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        """Load the PTX of an emulated function."""
        self._cute_kernels_emulated = _State.arch is not None
        if self._cute_kernels_emulated:
            _need_first_runtime()
        original(self, *args, **kwargs)
        if self._cute_kernels_emulated and self.has_gpu_module and self.engine is not None:
            artifacts = self.artifacts
            if artifacts is None or not artifacts.PTX or not artifacts.CUBIN:
                raise EmulatorError(f"the DSL kept no PTX and cubin of {self.function_name}")
            engine.load_ptx(artifacts.PTX, artifacts.CUBIN)

    @_wrap(function, "to")
    def _to(original: Any, self: Any, device: Any = None) -> Any:
        # Loads the cubin; another thread may be running a kernel.
        with engine.exclusive() if _is_emulated(self) else contextlib.nullcontext():
            module = original(self, device)
        if _is_emulated(self) and isinstance(self.jit_module, executor.CudaDialectJitModule):
            vars(self.jit_module)["_cute_kernels_emulated"] = True
        return module

    def num_devices(self: Any) -> int:
        return 1 if _is_emulated(self) else real_num_devices.__get__(self, type(self))

    function.num_devices = property(num_devices)

    @_wrap(executor.CudaDialectJitModule, "unload")
    def _unload(original: Any, self: Any) -> None:
        if _is_emulated(self):  # the real runtime does not know its libraries
            self._unloaded = True
        else:
            original(self)


def _patch_executor() -> None:
    """Run emulated programs with the engine."""
    from cutlass.base_dsl.jit_executor import JitExecutor

    @_wrap(JitExecutor, "run_compiled_program")
    def _run_compiled_program(original: Any, self: Any, exe_args: list[Any]) -> Any:
        return (
            original(self, exe_args)
            if not _is_emulated(self.jit_module)
            else _run(lambda: original(self, exe_args))
        )


def _patch_device_queries() -> None:
    """Answer queries about the device from the engine while the emulator is installed."""
    import cutlass.base_dsl.runtime.cuda as runtime_cuda
    from cutlass.utils.hardware_info import HardwareInfo

    @_wrap(runtime_cuda, "get_device_attribute")
    def _attribute(original: Any, attribute: Any, device_id: int = 0) -> Any:
        return (
            original(attribute, device_id)
            if _State.arch is None
            else engine.device_attribute(int(attribute))
        )

    def answer(name: str, emulated: Callable[..., Any]) -> None:
        @_wrap(HardwareInfo, name)
        def _method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            return (
                original(self, *args, **kwargs)
                if _State.arch is None
                else emulated(*args, **kwargs)
            )

    answer("__init__", lambda device_id=0: None)
    answer(
        "get_max_active_clusters",
        lambda cluster_size, stream=None: max(1, engine.resident_ctas() // cluster_size),
    )
    answer("get_device_multiprocessor_count", engine.num_sms)
    answer("get_l2_cache_size_in_bytes", lambda: _L2_BYTES)


def _relabel_as_cuda(capsule: Any) -> Any:
    """Make a DLPack capsule of host memory claim CUDA memory, in place."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = api.PyCapsule_GetName(capsule)
    # DLManagedTensorVersioned has a version, two pointers and flags in front.
    tensor = api.PyCapsule_GetPointer(capsule, name) + (32 if name == b"dltensor_versioned" else 0)
    device_type = ctypes.c_int32.from_address(tensor + 8)
    if device_type.value != _DL_CPU:
        raise EmulatorError(
            "only CPU tensors can be given to an emulated kernel "
            f"(DLPack device type {device_type.value})"
        )
    device_type.value = _DL_CUDA
    return capsule


def _patch_tensors() -> None:
    """Make the DSL accept host tensors as global memory."""
    from cutlass.cute import runtime

    @_wrap(runtime._Tensor, "__init__")
    def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _State.arch is not None and type(self._dlpack_data).__name__ == "PyCapsule":
            _relabel_as_cuda(self._dlpack_data)


class _CudaView:
    """Host tensor that tells DLPack consumers that it lives on a GPU."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return _relabel_as_cuda(self._tensor.detach().__dlpack__())

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_DL_CUDA, 0)


def _device_view(value: Any) -> Any:
    """Return a CPU tensor as CUDA memory for TVM-FFI; return other values unchanged."""
    if not hasattr(value, "untyped_storage"):
        return value
    if value.device.type != "cpu":
        raise EmulatorError(
            f"only CPU tensors can be given to an emulated kernel, got one on {value.device}"
        )
    import tvm_ffi

    return tvm_ffi.from_dlpack(_CudaView(value))


def call(function: Any, *args: Any) -> Any:
    """Call an emulated TVM-FFI function that did not come from ``cute.compile``.

    Functions of ``cute.runtime.load_module`` do not know the emulator. This function presents CPU
    tensors as CUDA tensors and turns failures into ``EmulatorError``. The module must be bound to
    the emulator, by ``install`` or by its linker, and ``load_ptx`` must have loaded its PTX and
    cubin.

    Args:
        function: Function of the module.
        args: Arguments of the function. Tensors are on the CPU.

    Raises:
        EmulatorError: The kernel failed, or a tensor is not on the CPU.
    """
    return _run(lambda: function(*map(_device_view, args)))


def _patch_tvm_ffi() -> None:
    """Let functions that were compiled with --enable-tvm-ffi accept host tensors."""
    try:
        from cutlass.cutlass_dsl import tvm_ffi_provider as provider
    except ImportError:
        return

    for function in (
        provider.TVMFFIJitCompiledFunction,
        provider.TVMFFIJitCompiledFunctionWithKwargs,
    ):

        @_wrap(function, "__call__")
        def _call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_emulated(self):
                return original(self, *args, **kwargs)
            named = {name: _device_view(value) for name, value in kwargs.items()}
            return _run(lambda: original(self, *map(_device_view, args), **named))
