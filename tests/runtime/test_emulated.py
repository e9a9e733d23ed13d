"""Compiled kernels on the emulator: loading from disk, damaged entries, threads, two devices."""

import contextlib
import json

import pytest
import torch

import ptx_emulator as emulator
from cute_kernels.runtime import aot, architecture, cache, compile_kernel, forget_kernels
from cute_kernels.runtime.emulated import EmulatedKernel
from tests.helpers import run_python

from .toy_kernels import Scale

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

ENGINE = emulator.build()
EMULATED = [architecture("emulated:sm_90a"), architecture("emulated:sm_100a")]
SPECS = [Scale(2.0), Scale(3.0)]


@pytest.fixture(autouse=True)
def built_engine(fresh_runtime, tmp_path):
    """Link the built engine into the test's cache folder, so that it is not built again."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "emulator").symlink_to(ENGINE.parent)


def results():
    """Run two kernels on both architectures twice and return whether each result is right."""
    x, y = torch.arange(1000.0, requires_grad=True), torch.zeros(1000)
    kernels = {(s.factor, str(a)): compile_kernel(s, a) for s in SPECS for a in EMULATED}
    outcome = {}
    for _ in range(2):
        for (factor, arch), kernel in kernels.items():
            y.zero_()
            kernel(x, y)
            outcome[f"{arch} {factor}"] = torch.equal(y, factor * x)
    return outcome


@pytest.mark.emulated
def test_compiled_and_loaded_kernels_give_the_same_results():
    """Compare results of compiled kernels with those of loaded kernels."""
    for arch in EMULATED:
        aot.precompile(SPECS, arch=arch, jobs=1, load=False, progress=False)
    program = (
        "import json; from tests.runtime import test_emulated\n"
        "print(json.dumps([test_emulated.results(), test_emulated.Scale.traced]))"
    )
    loaded, traced = json.loads(run_python(program).splitlines()[-1])
    assert traced == 0
    compiled = results()
    assert loaded == compiled
    assert len(compiled) == 4 and all(compiled.values()), compiled


@pytest.mark.emulated
def test_wrong_arguments_raise():
    kernel = compile_kernel(Scale(2.0), EMULATED[1])
    x, y = torch.zeros(64), torch.zeros(64)
    with pytest.raises(ValueError, match=r"to match x\.shape"):
        kernel(x, y[:-1])


@pytest.mark.emulated
def test_a_kernel_runs_again_after_a_fault():
    """Check that a kernel runs again after a fault."""
    kernel = compile_kernel(Scale(2.0), EMULATED[1])
    x, y = torch.zeros(64), torch.zeros(64)
    emulator.watch(x)
    try:
        with pytest.raises(emulator.EmulatorError):
            kernel(x, y)
    finally:
        emulator.unwatch()
    kernel(x, y)


def other_ptx():
    return compile_kernel(Scale(3.0), EMULATED[1]).ptx.encode()


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("ptx", b"invalid"),
        ("ptx", b""),
        ("ptx", b".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k("),
        ("ptx", b"\xff\xfe not even text"),
        ("ptx", other_ptx),
        ("cubin", b"invalid"),
        ("o", b"invalid"),
        ("o", b"\x7fELF\x02\x01\x01" + bytes(57)),
    ],
    ids=["text", "empty", "cut off", "binary", "other kernel", "cubin", "object", "ELF header"],
)
def test_an_entry_with_invalid_code_is_compiled_again(suffix, content, monkeypatch):
    """Check that an entry with invalid code is compiled again."""
    spec, arch = Scale(2.0), EMULATED[1]
    compile_kernel(spec, arch)
    disk, key = cache.default_cache(), cache.cache_key(spec, arch)
    content = content() if callable(content) else content
    assert disk.store(key, disk.load(key) | {suffix: content})
    monkeypatch.setattr(Scale, "traced", 0)
    x, y = torch.arange(64.0), torch.zeros(64)
    for expected in (
        pytest.warns(RuntimeWarning, match="a cached kernel is compiled again"),
        contextlib.nullcontext(),
    ):
        forget_kernels()
        with expected:
            compile_kernel(spec, arch)(x, y.zero_())
        assert torch.equal(y, 2 * x)
        assert Scale.traced == 1


@pytest.mark.emulated
def test_invalid_ptx_in_memory_raises(monkeypatch):
    kernel = compile_kernel(Scale(2.0), EMULATED[1])
    monkeypatch.setattr(kernel, "ptx", "invalid")
    with pytest.raises((emulator.PtxError, ValueError)):
        kernel(torch.ones(64), torch.zeros(64))


THREADS = """
import torch
from concurrent.futures import ThreadPoolExecutor
from cute_kernels.runtime import architecture, launcher
from cute_kernels.runtime.backend import Backend
from tests.runtime.toy_kernels import Scale

wrong = []
def work(number):
    name = ("emulated:sm_90a", "emulated:sm_100a")[number % 2]
    options = (("mode", "chaos"), ("num_sms", 1 + number), ("seed", number))
    launch = launcher(Backend(name, name[9:], emulation=options), torch.device("cpu"))
    x, y = torch.arange(1000.0), torch.zeros(1000)
    for i in range(20):
        factor = float(2 + i % 2)
        launch.kernel(Scale(factor))(x, y.zero_())
        if not torch.equal(y, factor * x):
            wrong.append(number)
list(ThreadPoolExecutor(4).map(work, range(4)))
print(wrong)
"""


@pytest.mark.emulated
def test_threads_share_an_emulated_backend():
    assert run_python(THREADS).splitlines()[-1] == "[]"


BOTH_DEVICES = """
import sys, torch
from ptx_emulator.cutlass_hooks import _device_view
from cute_kernels.runtime import architecture, compile_kernel
from tests.runtime.toy_kernels import Scale

x, y = torch.ones(64), torch.zeros(64)
kernels = {arch: compile_kernel(Scale(2.0), architecture(arch)) for arch in sys.argv[1:]}
kernels["emulated:sm_90a"](x, y)
assert y.eq(2).all()
try:
    kernels["sm_90a"](*map(_device_view, (x, y)))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.emulated
@pytest.mark.skipif(torch.cuda.is_available(), reason="gives host memory to a kernel for a GPU")
@pytest.mark.parametrize("order", [["sm_90a", "emulated:sm_90a"], ["emulated:sm_90a", "sm_90a"]])
def test_one_process_runs_kernels_for_both_devices(order):
    process = run_python(BOTH_DEVICES, *order)
    assert "CUDA driver version is insufficient" in process, process


@pytest.mark.emulated
def test_an_installed_emulator_does_not_catch_kernels_for_a_gpu():
    before = emulator.installed()
    emulator.install("sm_100a", num_sms=3)
    try:
        assert not isinstance(compile_kernel(Scale(2.0), architecture("sm_90a")), EmulatedKernel)
        assert (emulator.installed(), emulator.engine.num_sms()) == ("sm_100a", 3)
    finally:
        emulator.uninstall()
        if before is not None:
            emulator.install(before)


@pytest.mark.emulated
def test_tensors_of_another_device_are_refused():
    kernel = compile_kernel(Scale(2.0), EMULATED[0])
    with pytest.raises(ValueError, match="got one on meta"):
        kernel(torch.ones(4, device="meta"), torch.ones(4))
