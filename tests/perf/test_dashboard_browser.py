"""Every view is drawn without an error; ``test_dashboard.py`` checks the data of the views."""

import re
import shutil
import subprocess

import pytest

from perf.dashboard.entries import payload
from perf.dashboard.numerics import read_numerics
from perf.dashboard.page import page

from .dashboard_records import CURRENT, RECORDS, all_committed, save_numerics

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
    " --disable-background-networking --enable-logging=stderr --virtual-time-budget=5000 --dump-dom"
)
KERNEL = "kernel=gemm+nvfp4:row_scaled+x+nvfp4,+fprop"
CASE = "view=case&case=" + next(t["caseId"] for t in payload(RECORDS)["entries"] if "history" in t)
PLOTS = [f"view={name}" for name in ("tokens", "rooflines", "history", "numerics")]
MADE = ("", *PLOTS, CASE, KERNEL, "suite=gemm&contender=torch")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is on the PATH"),
    # One worker has the browser.
    pytest.mark.xdist_group("chromium"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write dashboard pages, and return their folder."""
    folder = tmp_path_factory.mktemp("pages")
    save_numerics(folder / "numerics.jsonl")
    numerics = read_numerics([folder / "numerics.jsonl"])
    (folder / "made.html").write_text(page(RECORDS, numerics=numerics), encoding="utf-8")
    (folder / "committed.html").write_text(page(all_committed()), encoding="utf-8")
    return folder


def shown(folder, file_name, view):
    """Titles, text and elements of a view; what it writes to its console fails."""
    url = f"{(folder / f'{file_name}.html').as_uri()}#{view}"
    command = [CHROMIUM, *OPTIONS.split(), f"--user-data-dir={folder / 'profile'}", url]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in process.stderr, process.stderr
    main = re.search(r"(?s)<main.*</main>", process.stdout)[0]
    return re.findall(r"<h1[^>]*>(.*?)</h1>", main), re.sub("<[^>]*>", " ", main), main


@pytest.mark.parametrize(
    ("file_name", "view"),
    [*(("made", v) for v in MADE), *(("committed", v) for v in ("", *PLOTS[:2]))],
)
def test_views_are_drawn(folder, file_name, view):
    """Open each view in a browser, and check its plots and tables."""
    titles, text, main = shown(folder, file_name, view)
    assert len(titles) == 1 and "<td" in main
    assert not re.search(
        "No records|no points|undefined"
        if "numerics" in view
        else "No records|no points|NaN|undefined",
        text,
    )
    # Plotly draws each point of the tables below its plots.
    tables = re.findall(r"(?s)<details.*?</details>", main)
    points = sum(table.count("<tr>") - 1 for table in tables)
    assert main.count('class="point ') == points and bool(points) == view.startswith("view=")
    if view == "view=history":
        assert (text.count("▲ worse"), text.count("▼ better")) == (3, 3)
    if file_name == "made" and view in ("", KERNEL):
        names = (
            {"ours", "torch"} if view else {r.contender for r in CURRENT} - {"ours, tile 128x16"}
        )
        for record in CURRENT:
            if record.suite == "gemm" and record.contender in names:
                assert f'title="{record.value:g} us, {record.commit}"' in main


@pytest.mark.parametrize(
    ("view", "title"), [("view=numerics", "page"), ("view=case&case=none", "case")]
)
def test_there_is_no_such_view(folder, view, title):
    assert shown(folder, "committed", view)[0] == [f"No such {title}"]
