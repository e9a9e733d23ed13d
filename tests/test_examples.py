"""Every example runs in a process of its own, checks itself, and has less than 100 lines."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import has_compiler

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
#: The start of the last line that each example prints, and the marks of its test.
EXAMPLES = {
    "adapters": ("distance of the merged weights", []),
    "add_a_format": ("sm_100a: the kernel writes and decodes", [pytest.mark.emulated]),
    "expert_parallel": ("outputs and gradients have the bits", [pytest.mark.distributed]),
    "quickstart": ("the compiled layer has the bits", [pytest.mark.compile]),
    "serve_transformers": ("tokens: [1, 2, 3, 4, ", []),
    "train_moe": ("step  60  loss 0.0", []),
}
MODULES = {"add_a_format": "cutlass", "serve_transformers": "transformers"}
NEEDS_COMPILER = ("add_a_format", "quickstart")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, (_, marks) in EXAMPLES.items()]
)
def test_example_runs(name, tmp_path):
    """Run an example, which raises if something that it shows is not true."""
    if name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
        pytest.skip(f"{MODULES[name]} is not installed")
    if name in NEEDS_COMPILER and not has_compiler():
        pytest.skip("Inductor and the emulator need a C++ compiler")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # No GPU, so that results do not depend on the machine.
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1].startswith(EXAMPLES[name][0])
    assert not list(tmp_path.iterdir()), "an example leaves files behind"


def test_every_example_is_tested_listed_and_short():
    """Check that tests and README name each example, and that it has less than 100 lines."""
    readme = (FOLDER / "README.md").read_text()
    files = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    assert files.keys() == EXAMPLES.keys()
    for name, text in files.items():
        assert f"[{name}.py]({name}.py)" in readme
        assert len(text.splitlines()) < 100, name
        assert f"python examples/{name}.py" in text, "the docstring says how to run it"
