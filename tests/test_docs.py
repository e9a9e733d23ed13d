"""Every block of Python in the README and in docs/ runs, pasted in order, and says what is true."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from tests.helpers import has_compiler

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Blocks of Python. One after the comment is shown, but does not run; the comment gives the reason.
BLOCK = re.compile(r"(<!-- not run: .+? -->\n)?```python\n(.*?)```", re.DOTALL)
PAGES = {
    str(path.relative_to(ROOT)): [
        code for shown, code in BLOCK.findall(path.read_text()) if not shown
    ]
    for path in FILES
}
PAGES = {page: blocks for page, blocks in PAGES.items() if blocks}
#: Libraries that a page needs.
LIBRARIES = {
    "transformers": "transformers",
    "torchtitan": "torchtitan.models.common.moe",
    "checkpoints": "safetensors",
    "save_and_serve": "safetensors",
}


def run_page(page, folder, monkeypatch):
    """Run the blocks of a page in order in one namespace; return the namespace and the output."""
    monkeypatch.chdir(folder)
    torch._dynamo.reset()
    names, output = {}, io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            for code in PAGES[page]:
                exec(compile(code, page, "exec"), names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return names, output.getvalue()


def needs(page):
    """Return the marks of a page: what its code needs."""
    code = "".join(PAGES[page])
    marks = []
    if "emulated:" in code:
        marks.append(pytest.mark.emulated)
    if "torch.compile" in code:
        marks.append(pytest.mark.compile)
    if "torch.distributed" in code:
        marks.append(pytest.mark.distributed)
    return marks


@pytest.mark.parametrize("page", [pytest.param(page, marks=needs(page)) for page in PAGES])
def test_blocks_run(page, tmp_path, monkeypatch):
    """Run the Python blocks of a page in order, in one namespace."""
    if Path(page).stem in LIBRARIES:
        pytest.importorskip(LIBRARIES[Path(page).stem], exc_type=ImportError)
    code = "".join(PAGES[page])
    if ("torch.compile" in code or "emulated:" in code) and not has_compiler():
        pytest.skip("Inductor and the emulator need a C++ compiler")
    run_page(page, tmp_path, monkeypatch)


def test_extras_that_are_named_exist():
    """Compare the extras that documents install with those of pyproject.toml."""
    folders = [
        path
        for top in ("cute_kernels", "grouped", "docs")
        for path in (ROOT / top).rglob("*.[pm][yd]")
    ]
    text = "".join(path.read_text() for path in (ROOT / "README.md", *folders))
    named = set(re.findall(r"(?:grouped-kernels|\.)\[(\w+)\]'", text))
    assert named >= {"cutedsl"}
    toml = pytest.importorskip("tomllib")
    project = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert named <= project["optional-dependencies"].keys()


def test_tests_that_are_named_exist():
    """Check that test files and tests that documents name exist."""
    text = (ROOT / "docs" / "guide" / "pytorch.md").read_text()
    files, checks = (
        re.findall(r"`(?:tests/(integration)/)?(test_\w+)`", text),
        re.findall(r" \*(\w+)\*", text),
    )
    assert len(files) > 15
    assert all(
        (ROOT / "tests" / (folder or "grouped") / f"{name}.py").exists() for folder, name in files
    )
    modules = (ROOT / "tests" / "grouped" / "two_ranks").glob("*.py")
    two_ranks = "".join(path.read_text() for path in modules)
    assert len(checks) > 15
    assert not [name for name in checks if f"@check\ndef {name}(" not in two_ranks]


def test_links_lead_somewhere():
    """Relative links of the README and of all pages name files that exist."""
    missing = []
    for path in FILES:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        missing += [
            f"{path.relative_to(ROOT)}: {target}"
            for target in re.findall(r"\]\(([^)#\s]+)", text)
            if "://" not in target and not (path.parent / target).exists()
        ]
    assert not missing


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in FILES[1:]]
    assert not [page for page in pages if page not in navigation]
