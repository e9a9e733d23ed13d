"""Files at the top of the repository and in ``.github``: they parse, and name what exists."""

import os
import re
from pathlib import Path

import pytest

import cute_kernels

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
#: Documents for contributors. tests/test_docs.py checks the pages of the site.
DOCUMENTS = ("CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY", "tests/README")
#: A path of a file in inline code or in a command, such as ``tests/unit/test_host.py``.
PATH = re.compile(r"(?<![\w./~-])(?:\.ci|cute_kernels|grouped|perf|tests|docs)/[\w/.]*\w")


def parse(path):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def commands(workflow):
    """Return the commands of all steps of a workflow."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


def test_there_are_workflows_and_forms():
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "wheels"]
    assert [path.stem for path in FORMS] == ["bug_report", "config", "feature_request"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_scripts_of_workflows_exist_and_are_executable(path):
    """Check the scripts of .ci that workflows run."""
    workflow = parse(path)
    scripts = re.findall(r"\.ci/\w+", "\n".join(commands(workflow)))
    assert scripts
    assert not [name for name in scripts if not os.access(ROOT / name, os.X_OK)]
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_workflows_cover_the_versions_of_python():
    """Compare the versions of Python in workflows with those of pyproject.toml."""
    versions = re.findall(
        r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    jobs = parse(ROOT / ".github" / "workflows" / "ci.yml")["jobs"].values()
    tested = {version for job in jobs for version in re.findall(r"'(3\.\d+)'", str(job))}
    assert sorted(tested) == sorted(versions)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_have_unique_fields(path):
    """Check that no issue form has two fields of one name."""
    form = parse(path)
    if path.stem == "config":
        assert all(link.keys() == {"name", "url", "about"} for link in form["contact_links"])
        return
    assert form.keys() >= {"name", "description", "body"}
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 2


def test_citation_has_the_version_of_the_package():
    """Compare the version of CITATION.cff and of the changelog with that of the package."""
    citation = parse(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert str(citation["version"]) == cute_kernels.__version__
    assert f"## {cute_kernels.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_of_documents_exist(name):
    """Check links and paths of the documents at the top of the repository."""
    path = ROOT / f"{name}.md"
    text = path.read_text(encoding="utf-8")
    links = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]
    missing = [target for target in links if not (path.parent / target).exists()]
    missing += [target for target in PATH.findall(text) if not (ROOT / target).exists()]
    assert not missing


def test_documents_name_the_markers_that_exist():
    """Compare the markers of documents with those of pyproject.toml."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lines = settings.partition("\nmarkers = [")[2].partition("\n]")[0]
    markers = set(re.findall(r'^ *"(\w+):', lines, re.MULTILINE))
    readme = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    table = readme.partition("\n## Markers")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == markers
    testing = (ROOT / "docs" / "develop" / "testing.md").read_text(encoding="utf-8")
    for text in (readme, testing, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        expressions = re.findall(r'pytest -m ("[^"]+"|\w+)', text)
        assert expressions
        names = set(re.findall(r"\w+", " ".join(expressions))) - {"and", "or", "not"}
        assert names <= markers
