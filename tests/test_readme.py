"""The test command of the README, and the table of docs/support.md."""

import re
import subprocess
from pathlib import Path

from cute_kernels import capability

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SUPPORT = (ROOT / "docs" / "support.md").read_text()


def test_support_table_is_the_capability_table():
    start = SUPPORT.index("markdown_table() -->\n") + len("markdown_table() -->\n")
    end = SUPPORT.index("\n<!-- end of support table -->")
    assert SUPPORT[start:end] == capability.markdown_table()


def test_ci_runs_the_second_command():
    """Check that CI runs the second command of the README."""
    commands = re.findall(r"```bash\n(.*?)\n```", README, flags=re.DOTALL)
    assert len(commands) == 2
    pattern = re.search(r"grep -m1 '(.*?)' README.md", (ROOT / ".ci" / "run").read_text()).group(1)
    line = subprocess.run(
        ["grep", "-m1", pattern, "README.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert line.stdout.strip() == commands[1]


def test_the_first_page_is_short():
    assert len(README.splitlines()) <= 130
