"""The page of the dashboard: its data, links and text."""

import base64
import gzip
import json
import random
import re
import sys
from dataclasses import replace

import pytest

from perf.__main__ import main
from perf.compare import compare
from perf.dashboard.badge import badge, speedups
from perf.dashboard.entries import commits_of, history_of, payload, roofs_of
from perf.dashboard.numerics import read_numerics
from perf.dashboard.page import _plotly, page
from perf.records import latest, read, write

from .dashboard_records import CURRENT, OLD, RECORDS, all_committed, save_numerics


def test_the_page_is_whole_and_depends_on_the_records_alone():
    """Check that the page needs no other files, and depends on its records alone."""
    mixed = RECORDS.copy()
    random.Random(0).shuffle(mixed)
    text = page(mixed)
    assert text == page(RECORDS)
    assert "@@" not in text and "records.jsonl" not in text
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?:https?:)?//|url\(|@import""", text)
    assert page(RECORDS, "records.jsonl").count('href="records.jsonl"') == 1
    packed = re.search(r'id="records">(.*?)</script>', text)[1]
    assert json.loads(gzip.decompress(base64.b64decode(packed))) == json.loads(
        json.dumps(payload(RECORDS))
    )


def test_without_plotly_the_extra_is_named(monkeypatch, tmp_path, capsys):
    """Check that an error without plotly names the extra to install."""
    _plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    write(tmp_path / "records.jsonl", RECORDS)
    assert main(["dashboard", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert "needs plotly: pip install 'grouped-kernels[perf]'" in capsys.readouterr().err


def test_all_newest_numbers_are_in_the_page():
    """Check that the page has the latest value of every record."""
    fields = ["suite", "quantity", "unit", "protocol", "kind", "contender", "format"]
    fields += ["value", "spread", "error", "bytes", "flops"]
    rows = [[getattr(r, n) for n in fields] + [r.case, r.gpu or r.machine] for r in latest(RECORDS)]
    entries = payload(RECORDS)["entries"]
    matches = [[t[n] for n in (*fields, "case", "device")] for t in entries]
    assert sorted(map(repr, matches)) == sorted(map(repr, rows))
    entries = payload(all_committed())["entries"]
    assert len(entries) == len({record.key for record in all_committed()})


def test_history_says_what_compare_says():
    """Check that the history on the page agrees with ``compare``."""
    data = payload(RECORDS)
    changes = compare([r for r in RECORDS if r.commit == OLD[0]], CURRENT)
    changed = [(c.record, c) for c in changes if c.old is not None]
    wanted = {(r.contender, r.case["rows"]): (c.old, c.new, c.verdict) for r, c in changed}
    matches = {}
    for entry in data["entries"]:
        if "history" in entry:
            old, new = entry["history"]
            assert (old["commit"], new["commit"]) == (OLD[0], "bbbbbbb")
            matches[entry["contender"], entry["case"]["rows"]] = (
                old["value"],
                new["value"],
                new["verdict"],
            )
            assert new["verdict"] == {"ours, prepacked": "worse", "torch": "better"}.get(
                entry["contender"], "same"
            )
    assert matches == wanted


def test_runs_of_one_commit_are_one_step():
    """Check that several runs of one commit are one step of the history."""
    runs = [(100, "a" * 12), (102, "a" * 7), (101, "b" * 12 + "-dirty"), (120, "")]
    files = [
        replace(RECORDS[0], value=v, spread=0.0, commit=c, time=str(i))
        for i, (v, c) in enumerate(runs)
    ]
    commits = commits_of(files)
    assert list(commits.items()) == [("aaaaaaa", "0"), ("bbbbbbb-dirty", "2"), ("unknown", "3")]
    steps = history_of(files, commits)
    matches = [(step["commit"], step["value"], step["verdict"]) for step in steps]
    assert matches == [
        (name, *other_lines)
        for name, other_lines in zip(
            commits, [(101, "same"), (101, "same"), (120, "worse")], strict=True
        )
    ]
    assert steps[2]["worse_by"] == pytest.approx(120 / 101 - 1, abs=1e-4)


def test_kernels_and_variants():
    """Check the kernels and variants on the page."""
    entries = payload(RECORDS)["entries"]
    gemm = "gemm nvfp4:row_scaled x nvfp4, fprop"
    assert {t["kernel"] for t in entries if t["kernel"]} == {
        "quantize nvfp4, row",
        gemm,
        f"{gemm}, prepacked",
    }
    assert {t["contender"] for t in entries if t["variant"]} == {"ours, tile 128x16"}


def test_roofs_are_measured_or_said_to_be_published():
    """Check that each roof is marked as measured or as published."""
    roofs = {kind: other_lines for kind, _, *other_lines in roofs_of("NVIDIA H200", RECORDS)}
    assert roofs == {"copy": [4.0, True], "bfloat16": [700.0, True], "fp8": [1979.0, False]}
    assert [roof[2] for roof in roofs_of("NVIDIA GB200", [])] == [8.0, 2500.0, 5000.0, 10000.0]
    assert roofs_of("another", RECORDS) == []


def test_the_badge_says_what_the_records_say():
    """Check that the badge shows the speedups of the records."""
    assert speedups(RECORDS) == ("NVIDIA H200", pytest.approx([2.0, 2.0, 2.0]))
    assert "2.00x torch bf16 on NVIDIA H200 (2.00x to 2.00x, 3 cases)" in badge(RECORDS)
    assert "not measured yet" in badge([r for r in RECORDS if r.kind != "gpu"])


def test_the_badge_compares_what_was_measured_on_one_commit():
    """Check that the badge compares only records of one commit."""
    ours = [r for r in RECORDS if (r.suite, r.contender) == ("gemm", "ours")]
    torch = [r for r in RECORDS if r.contender == "torch"]
    assert speedups([*ours, *(r for r in torch if r.commit == OLD[0])])[1] == [4.0] * 3
    for commit in ("ccccccc", ""):
        assert speedups([*ours, *(replace(r, commit=commit) for r in torch)])[1] == []


def test_publish(tmp_path, capsys):
    """Check the files that ``--publish`` writes."""
    source, site, row = tmp_path / "r.jsonl", tmp_path / "site", tmp_path / "one.html"
    write(source, RECORDS)
    matches = read(source)
    assert main(["dashboard", str(source), "--publish", str(site), "--out", str(row)]) == 0
    assert capsys.readouterr().out.count(" KB\n") == 4
    assert (site / "index.html").read_text() == page(matches, "records.jsonl")
    assert (site / "badge.svg").read_text() == badge(RECORDS)
    assert row.read_text() == page(matches)
    assert {repr(r) for r in read(site / "records.jsonl")} == {repr(r) for r in matches}
    assert main(["dashboard"]) == 2
    assert "--out FILE" in capsys.readouterr().err
    source.write_text("")
    assert main(["dashboard", str(source), "--out", str(row)]) == 2
    assert "no records" in capsys.readouterr().err


def test_numerics_are_read_once_and_only_in_their_form(tmp_path):
    """Check that numerics files are read once, and that other files are refused."""
    file = tmp_path / "n.jsonl"
    save_numerics(file)
    matches = read_numerics([file, file])
    assert [(r["step"], r["role"]) for r in matches if r["direction"] == "rowwise"] == [
        (step, role) for step in (0, 1) for role in ("weight", "input")
    ]
    assert {r["run"] for r in matches} == {"a run"} and all(len(r["amax"]) == 2 for r in matches)
    current = file.read_text()
    old = current.replace('"numerics": 2', '"numerics": 1').replace("global_scale", "second_level")
    assert old != current
    file.write_text(old)
    assert read_numerics([file]) == matches
    for text in ('{"numerics": 3}', '{"numerics": 2}', '{"numerics": 1}', "[]", "no JSON"):
        file.write_text(text)
        with pytest.raises(ValueError, match="line 1, is not a record of numerics"):
            read_numerics([file])
