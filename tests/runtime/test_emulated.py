"""Kernels on the emulator: compiled here, loaded from the disk, and beside kernels for a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels.runtime import aot, architecture, compile_kernel
from cute_kernels.runtime.emulated import EmulatedKernel
from tests.runtime.toy_kernels import Scale

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")
emulator = pytest.importorskip("cute_kernels.emulator")

EMULATED = [architecture("emulated:sm_90a"), architecture("emulated:sm_100a")]
SPECS = [Scale(2.0), Scale(3.0)]


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


def test_one_process_has_kernels_for_both_devices():
    before = emulator.installed()
    emulated = compile_kernel(Scale(2.0), EMULATED[0])
    real = compile_kernel(Scale(2.0), architecture("sm_90a"))
    assert emulator.installed() == before
    x, y = torch.ones(64), torch.zeros(64)
    with pytest.raises(ValueError, match="device_type=cuda"):
        real(x, y)
    emulated(x, y)
    assert y.eq(2).all()
    emulator.install("sm_100a")
    try:
        late = compile_kernel(Scale(3.0), architecture("sm_90a"))
        assert emulator.installed() == "sm_100a"
    finally:
        emulator.uninstall()
    assert isinstance(emulated, EmulatedKernel)
    assert not isinstance(late, EmulatedKernel)
