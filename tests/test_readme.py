"""The README's support table, test command and list of folders."""

import re
import subprocess
from pathlib import Path

import pytest

from cute_kernels import capability

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_support_table_is_the_capability_table():
    start = README.index("markdown_table() -->\n") + len("markdown_table() -->\n")
    end = README.index("\n<!-- end of support table -->")
    assert README[start:end] == capability.markdown_table()


def test_ci_runs_the_second_command():
    """Check that CI runs the second command of the README."""
    commands = re.findall(r"```bash\n(.*?)\n```", README, flags=re.DOTALL)
    assert len(commands) == 2
    pattern = re.search(r"grep -m1 '(.*?)' README.md", (ROOT / ".ci" / "run").read_text()).group(1)
    line = subprocess.run(
        ["grep", "-m1", pattern, "README.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert line.stdout.strip() == commands[1]


@pytest.mark.parametrize("folder", ["cute_kernels", "grouped", "tests", "perf"])
def test_folders_are_named(folder):
    assert f"| `{folder}/` |" in README
