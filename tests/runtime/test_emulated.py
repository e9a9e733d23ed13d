"""Kernels on the emulator, compiled and from the disk; each run is a process of its own, as the
emulator has to be there before the CuTe DSL is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")
pytest.importorskip("cute_kernels.emulator")

PROGRAM = """
import json
import torch
from tests.runtime import toy_kernels
from cute_kernels import emulator
from cute_kernels.runtime import architecture, compile_kernel

results = {}
x, y = torch.arange(1000.0, requires_grad=True), torch.zeros(1000)
for arch in ("emulated:sm_90a", "emulated:sm_100a"):
    kernels = {f: compile_kernel(toy_kernels.Scale(f), architecture(arch)) for f in (2.0, 3.0)}
    for _ in range(2):
        for factor, kernel in kernels.items():
            y.zero_()
            kernel(x, y)
            results[f"{arch} {factor}"] = torch.equal(y, factor * x)
try:
    kernel(x, y[:-1])
except ValueError as error:
    results["shape"] = str(error)
emulator.watch(x)
try:
    kernel(x, y)
except emulator.EmulatorError as error:
    results["fault"] = str(error)
print(json.dumps({"traced": toy_kernels.entries_traced, **results}))
"""


def run():
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_compiled_and_loaded_kernels_run_on_the_emulator():
    cold, warm = run(), run()
    assert (cold.pop("traced"), warm.pop("traced")) == (4, 0)
    assert warm.keys() == cold.keys()
    for results in (cold, warm):
        assert "to match x.shape[0]" in results.pop("shape")
        assert results.pop("fault")
        assert len(results) == 4
        assert all(results.values()), results
