"""The kernel of docs/internals/smallest_kernel.md: it is right, and its broken form is reported."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import has_compiler

pytest.importorskip("cutlass")

ROOT = Path(__file__).parents[1]
KERNEL = ROOT / "docs" / "internals" / "smallest_kernel.py"


def run(*arguments):
    """Run the script in a process of its own, since it installs the emulator."""
    program = f"import runpy, sys; sys.argv = ['kernel', *{arguments!r}]; "
    program += f"runpy.run_path({str(KERNEL)!r}, run_name='__main__')"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.emulated
@pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler")
def test_it_equals_torch_without_a_race():
    process = run()
    assert process.returncode == 0, process.stderr
    assert "equal to torch, 280 instructions" in process.stdout


@pytest.mark.emulated
@pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler")
def test_a_missing_barrier_is_reported():
    process = run("--broken")
    assert process.returncode != 0
    assert "data race on shared offset" in process.stderr
