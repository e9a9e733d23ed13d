"""Compilation of kernels: memory and disk caches, threads, processes and ``precompile``."""

import contextlib
import importlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import cute_kernels
from cute_kernels.capability import UnsupportedError
from cute_kernels.runtime import aot, architecture, cache, compile_kernel, forget_kernels
from cute_kernels.runtime import compile as compile_module
from cute_kernels.runtime.compile import compile_to_disk, is_on_disk
from cute_kernels.runtime.spec import short_name
from cute_kernels.runtime.worker import Worker
from tests.helpers import run_python
from tests.runtime import toy_kernels

from .toy_kernels import Scale

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

SM90, SM100, SM103 = map(architecture, ("sm_90a", "sm_100a", "sm_103a"))
SPEC = Scale(2.0)


@pytest.fixture
def traced(monkeypatch):
    """Return a function that counts the kernels traced since its last call."""
    monkeypatch.setattr(Scale, "traced", 0)

    def count():
        new, Scale.traced = Scale.traced, 0
        return new

    return count


@pytest.fixture
def on_disk(traced):
    """Leave the kernel on disk only and return the counter of traced kernels."""
    compile_kernel(SPEC, SM90)
    forget_kernels()
    traced()
    return traced


def object_path():
    return cache.default_cache().root / f"{cache.cache_key(SPEC, SM90).name}.o"


def test_memory_then_disk_then_compiler(traced):
    """Check that kernels are looked up in memory and on disk before they are compiled."""
    kernel = compile_kernel(SPEC, SM90)
    assert traced() == 1
    assert compile_kernel(Scale(2.0), SM90) is kernel
    forget_kernels()
    assert callable(compile_kernel(SPEC, SM90))
    assert traced() == 0


def test_a_process_that_waited_for_another_does_not_compile(on_disk, monkeypatch):
    """Check that a process that waited for another loads its kernel."""
    marker = object_path().with_suffix(".json")
    hidden_marker = marker.rename(marker.with_suffix(".hidden"))

    @contextlib.contextmanager
    def lock_after_another(self, key):
        hidden_marker.rename(marker)
        yield

    monkeypatch.setattr(cache.DiskCache, "lock", lock_after_another)
    compile_kernel(SPEC, SM90)
    assert on_disk() == 0


def test_an_entry_that_does_not_load_is_compiled_again(on_disk):
    """Check that an entry that does not load is compiled again."""
    disk, key = cache.default_cache(), cache.cache_key(SPEC, SM90)
    disk.store(key, {"o": b"complete, but not an object file"})
    with pytest.warns(RuntimeWarning, match="compiled again"):
        compile_kernel(SPEC, SM90)
    assert on_disk() == 1
    forget_kernels()
    compile_kernel(SPEC, SM90)
    assert on_disk() == 0


def test_the_hashed_bytes_are_loaded_not_the_file(on_disk, monkeypatch):
    """Check that the bytes that were hashed are loaded, even if the file changes."""
    load = cache.DiskCache.load

    def load_and_exchange(self, key):
        files = load(self, key)
        object_path().write_bytes(b"other code")
        return files

    monkeypatch.setattr(cache.DiskCache, "load", load_and_exchange)
    assert callable(compile_kernel(SPEC, SM90))
    assert on_disk() == 0


def test_the_disk_cache_can_be_turned_off(traced, monkeypatch, tmp_path):
    """Check that the disk cache can be turned off."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    assert compile_kernel(SPEC, SM90) is compile_kernel(SPEC, SM90)
    assert compile_to_disk(SPEC, SM90) is None
    assert traced() == 1
    assert not (tmp_path / "kernels").exists()


def assert_two_kernels_warn_once(message):
    with pytest.warns(RuntimeWarning, match=message) as caught:
        assert callable(compile_kernel(SPEC, SM90))
        assert callable(compile_kernel(SPEC, SM100))
    assert len(caught) == 1


def test_kernels_run_without_a_writable_folder(traced, monkeypatch, tmp_path):
    """Check that kernels run without a writable folder, with one warning."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    assert_two_kernels_warn_once("not kept on disk")
    assert traced() == 2


def test_a_kernel_that_cannot_be_exported_still_runs(monkeypatch):
    """Check that a kernel that cannot be exported still runs."""
    from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunctionBase

    def fail(self, path, function_name=None):
        raise RuntimeError("no exporter")

    monkeypatch.setattr(TVMFFIJitCompiledFunctionBase, "export_to_c", fail)
    assert_two_kernels_warn_once("export failed.*no exporter")
    assert not is_on_disk(SPEC, SM90)


def run_together(functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(function) for function in functions]]


def test_threads_compile_a_kernel_once(traced):
    """Check that concurrent threads compile a kernel once."""
    start = threading.Barrier(4)

    def compile_after_start():
        start.wait()
        return compile_kernel(SPEC, SM90)

    assert len(set(run_together([compile_after_start] * 4))) == 1
    assert traced() == 1


FORK = """
import os, signal, threading
from cute_kernels.runtime import architecture, compile_kernel
from tests.runtime.toy_kernels import Scale

compiling, go_on = threading.Event(), threading.Event()

class Slow(Scale):
    @property
    def kernel(self):
        compiling.set()
        go_on.wait(100)
        return Scale.kernel

arch = architecture("sm_90a")
thread = threading.Thread(target=compile_kernel, args=(Slow(2.0), arch))
thread.start()
assert compiling.wait(100)
child = os.fork()
if not child:
    signal.alarm(100)  # ends a child that hangs
    os._exit(0 if callable(compile_kernel(Scale(3.0), arch)) else 1)
status = os.waitpid(child, 0)[1]
go_on.set()
thread.join()
print(status)
"""


def test_a_child_forked_while_a_thread_compiles_can_compile():
    assert run_python(FORK).splitlines()[-1:] == ["0"]


def test_arguments_are_checked_by_the_compiled_function():
    """Check that compiled functions check their arguments."""
    import torch

    kernel = compile_kernel(SPEC, SM90)
    with pytest.raises(ValueError, match="device_type=cuda"):
        kernel(torch.zeros(4), torch.zeros(4))
    with pytest.raises(TypeError):
        kernel(torch.zeros(4))


def test_compiling_without_the_dsl_raises_the_reason(monkeypatch):
    def refuse():
        raise UnsupportedError("nvidia-cutlass-dsl>=4.8,<4.9 (not installed)")

    monkeypatch.setattr(compile_module, "require_dsl", refuse)
    for call in (compile_kernel, compile_to_disk):
        with pytest.raises(UnsupportedError, match="not installed"):
            call(SPEC, SM90)


def test_concurrent_processes_compile_a_kernel_once(traced):
    with Worker() as worker, Worker() as second_worker:
        assert sorted(
            run_together([lambda w=w: w.compile(SPEC, SM90) for w in (worker, second_worker)])
        ) == [False, True]
        assert is_on_disk(SPEC, SM90)
        assert traced() == 0
        assert "no attribute 'Nonsense'" in worker.compile(Scale(2.0, "Nonsense"), SM90)
        assert worker.compile(SPEC, SM100) is True


def test_a_compiler_process_that_dies_costs_one_kernel(monkeypatch):
    """Check that a compiler process that dies fails one kernel only."""
    programs = [
        "import os; os.kill(os.getpid(), 9)",
        "import pickle, sys\npickle.load(sys.stdin.buffer)\n"
        "pickle.dump(True, sys.stdout.buffer); sys.stdout.flush()",
    ]

    def start():
        command = [sys.executable, "-S", "-c", programs.pop(0)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(Worker, "_start", staticmethod(start))
    with Worker() as worker:
        assert worker.compile(SPEC, SM90) == "the compiler process died with status -9"
        assert worker.compile(SPEC, SM90) is True


def test_precompile_in_processes(traced, capsys):
    """Check that ``precompile`` compiles in processes and skips cached kernels."""
    specs = [Scale(float(factor)) for factor in range(3)]
    result = cute_kernels.precompile(specs + specs, arch="sm_100a", jobs=2, load=False)
    assert (result.compiled, result.cached) == (3, 0)
    assert "3/3" in capsys.readouterr().err
    result = cute_kernels.precompile(specs, arch=SM100)
    assert (result.compiled, result.cached) == (0, 3)
    for spec in specs:
        compile_kernel(spec, SM100)
    assert traced() == 0


def test_precompile_reports_every_failure(traced, capsys):
    """Check that ``precompile`` reports every failure."""
    specs = [Scale(1.0, "Bad"), Scale(2.0), Scale(3.0, "Worse")]
    with pytest.raises(aot.PrecompileError, match=r"(?s)'Bad'.*'Worse'") as error:
        cute_kernels.precompile(specs, arch="sm_90a", jobs=1, progress=False)
    assert "dtype='Float32'" not in str(error.value)
    assert is_on_disk(Scale(2.0), SM90)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("options", [[], ["--list"]])
@pytest.mark.parametrize(
    ("pattern", "message"),
    [("NvFp5", "'NvFp5' matches no kernel of sm_90a"), ("(", "must be a regular expression")],
)
def test_a_pattern_without_kernels_is_an_error(pattern, message, options, capsys):
    assert aot.main(["--arch", "sm_90a", "--match", pattern, *options]) == 1
    assert message in capsys.readouterr().err


def test_precompile_needs_a_device_or_an_architecture(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="name an arch"):
        cute_kernels.precompile([SPEC])


@pytest.fixture
def family(monkeypatch):
    monkeypatch.setattr(aot, "FAMILIES", ("tests.runtime.toy_kernels",))
    specs = {"sm_100a": [Scale(1.0), Scale(2.0, "Float16")], "sm_90a": [Scale(3.0)]}
    monkeypatch.setattr(toy_kernels, "kernel_specs", specs.get, raising=False)


def test_the_command_lists_and_compiles_matching_kernels(family, capsys):
    """Check that the command lists and compiles matching kernels."""
    assert aot.main(["--arch", "sm_103a", "--arch", "sm_90a", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[2] for line in lines] == [
        f"tests.runtime.toy_kernels.Scale(factor={factor}, dtype='{dtype}')"
        for factor, dtype in ((1.0, "Float32"), (2.0, "Float16"), (3.0, "Float32"))
    ]
    name = lines[1].partition(" ")[0]
    assert name == short_name(Scale(2.0, "Float16"))
    assert aot.main(["--arch", "sm_103a", "--list", "--match", name.partition("_")[2]]) == 0
    assert capsys.readouterr().out.splitlines() == [lines[1]]
    arguments = ["--arch", "sm_103a", "--match", "factor=.*Float16", "--jobs", "1"]
    for expected in ("1 compiled, 0 cached", "0 compiled, 1 cached"):
        assert aot.main(arguments) == 0
        assert f"sm_103a: {expected}" in capsys.readouterr().out
    assert is_on_disk(Scale(2.0, "Float16"), SM103)
    assert not is_on_disk(Scale(1.0), SM103)


def test_the_command_cannot_be_imported():
    """Check that the command's module cannot be imported, and that it runs with ``-m``."""
    with pytest.raises(ImportError, match=r"call cute_kernels.precompile\(\)"):
        importlib.import_module("cute_kernels.precompile")
    assert callable(cute_kernels.precompile)
    command = [sys.executable, "-m", "cute_kernels.precompile", "--list", "--arch", "sm_90a"]
    process = subprocess.run([*command, "--match", "Offsets"], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.splitlines()) == 4
