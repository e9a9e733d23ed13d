"""The example of ``ptx_emulator/README.md`` runs, and the package stands alone."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ptx_emulator"


def test_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert int(capsys.readouterr().out) > 0


def test_package_imports_nothing_of_cute_kernels():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            assert not any(m.split(".")[0] in ("cute_kernels", "grouped") for m in modules), path
