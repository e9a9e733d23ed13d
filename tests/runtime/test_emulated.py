"""Kernels on the emulator: compiled here, loaded from the disk, and beside kernels for a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels.runtime import aot, architecture, compile_kernel
from cute_kernels.runtime.emulated import EmulatedKernel, _DeviceView
from tests.runtime.toy_kernels import Scale

pytest.importorskip("cutlass")
tvm_ffi = pytest.importorskip("tvm_ffi")
emulator = pytest.importorskip("cute_kernels.emulator")

ENGINE = emulator.build()
EMULATED = [architecture("emulated:sm_90a"), architecture("emulated:sm_100a")]
SPECS = [Scale(2.0), Scale(3.0)]


@pytest.fixture(autouse=True)
def built_engine(fresh_runtime, tmp_path):
    """The emulator keeps its engine in the same cache folder, and need not build it anew."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "emulator").symlink_to(ENGINE.parent)


def results():
    """Whether each kernel computes what it should; all have the same name in the DSL."""
    x, y = torch.arange(1000.0, requires_grad=True), torch.zeros(1000)
    kernels = {(s.factor, str(a)): compile_kernel(s, a) for s in SPECS for a in EMULATED}
    outcome = {}
    for _ in range(2):
        for (factor, arch), kernel in kernels.items():
            y.zero_()
            kernel(x, y)
            outcome[f"{arch} {factor}"] = torch.equal(y, factor * x)
    return outcome


def test_kernels_run_when_compiled_and_when_loaded_by_another_process():
    for arch in EMULATED:
        aot.precompile(SPECS, arch=arch, jobs=1, load=False, progress=False)
    program = (
        "import json; from tests.runtime import test_emulated, toy_kernels\n"
        "print(json.dumps([test_emulated.results(), toy_kernels.entries_traced]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    loaded, traced = json.loads(process.stdout.splitlines()[-1])
    assert traced == 0
    compiled = results()
    assert loaded == compiled
    assert len(compiled) == 4 and all(compiled.values()), compiled


def test_faults_and_wrong_arguments_raise():
    kernel = compile_kernel(Scale(2.0), EMULATED[1])
    x, y = torch.zeros(64), torch.zeros(64)
    with pytest.raises(ValueError, match=r"to match x\.shape"):
        kernel(x, y[:-1])
    emulator.watch(x)
    try:
        with pytest.raises(emulator.EmulatorError):
            kernel(x, y)
    finally:
        emulator.unwatch()
    kernel(x, y)


@pytest.mark.skipif(torch.cuda.is_available(), reason="gives host memory to a kernel for a GPU")
@pytest.mark.parametrize("real_first", [True, False])
def test_one_process_has_kernels_for_both_devices(real_first):
    real_arch, emulated_arch = architecture("sm_90a"), EMULATED[0]
    x, y = torch.ones(64), torch.zeros(64)
    order = [real_arch, emulated_arch] if real_first else [emulated_arch, real_arch]
    kernels = {arch: compile_kernel(Scale(2.0), arch) for arch in order}
    with pytest.raises(ValueError, match="device_type=cuda"):
        kernels[real_arch](x, y)
    with pytest.raises(RuntimeError, match="[Cc]uda.*[Dd]river"):
        kernels[real_arch](*(tvm_ffi.from_dlpack(_DeviceView(t)) for t in (x, y)))
    kernels[emulated_arch](x, y)
    assert y.eq(2).all()


def test_an_installed_emulator_does_not_catch_kernels_for_a_gpu():
    emulator.install("sm_100a", num_sms=3)
    try:
        kernel = compile_kernel(Scale(2.0), architecture("sm_90a"))
        assert not isinstance(kernel, EmulatedKernel)
        assert (emulator.installed(), emulator.engine.num_sms()) == ("sm_100a", 3)
    finally:
        emulator.uninstall()


def test_tensors_of_another_device_are_refused():
    kernel = compile_kernel(Scale(2.0), EMULATED[0])
    with pytest.raises(ValueError, match="got one on meta"):
        kernel(torch.ones(4, device="meta"), torch.ones(4))
