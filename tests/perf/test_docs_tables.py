"""The tables of docs/performance.md against the committed records."""

from dataclasses import replace

import pytest

from perf import chart, docs
from perf.__main__ import main
from perf.records import FAILURE, RESULTS, load
from perf.tables import Cell, Column, Row, Table

from .test_records import BASE

_RUN = {"commit": "cd73e60abcdef", "protocol": "sustained", "value": 141.4, "spread": 3.0}
RECORD = replace(BASE, case={"rows": 32, "routing": "balanced"}, **_RUN)
TABLE = Table(
    "t",
    ("tokens",),
    (Row(("1",), {"rows": 32}), Row(("2",), {"rows": 64})),
    (
        Column("us", Cell({"quantity": "time", "contender": "ours"})),
        Column("torch", Cell({"quantity": "time", "contender": "torch"}, digits=1, unit=" us")),
        Column("share", Cell({"quantity": "time", "contender": "ours"}, show="copy")),
    ),
    {"suite": "gemm", "kind": "gpu"},
)


def changed(**fields):
    return replace(RECORD, **fields)


def test_page_and_chart_are_up_to_date():
    assert main(["docs", "--check"]) == 0


def test_a_changed_number_is_found(tmp_path, monkeypatch, capsys):
    """Check that a changed number in the page is found and rewritten."""
    text = docs.PAGE.read_text()
    wrong = tmp_path / "performance.md"
    got = next(f for f in docs._BLOCK.finditer(text) if f["name"] == "gemm-h200")
    row = next(line for line in got["body"].splitlines() if line.startswith("| 16 |"))
    wrong.write_text(text.replace(row, row.replace("1", "7")))
    monkeypatch.setattr(docs, "PAGE", wrong)
    assert main(["docs", "--check"]) == 1
    assert "gemm-h200" in capsys.readouterr().out
    assert main(["docs", "--write"]) == 0
    assert wrong.read_text() == text


def test_a_chart_of_other_numbers_is_found(tmp_path, monkeypatch):
    """Check that a chart is stale if a record changes, and drawn anew."""
    pytest.importorskip("matplotlib")
    records = load(RESULTS)
    assert not chart.stale(records)
    slower = [
        replace(r, value=2 * r.value) if r.suite == "moe" and r.contender == "quack" else r
        for r in records
    ]
    assert chart.stale(slower)
    monkeypatch.setattr(chart, "CHART", tmp_path / "images" / "chart.svg")
    chart.draw(slower)
    assert not chart.stale(slower) and chart.stale(records)


def test_a_table_without_markers_is_refused():
    with pytest.raises(ValueError, match="gemm-h200"):
        docs.replace_tables("no tables", [])


def test_cells_show_median_spread_and_share():
    """Check that cells show the median, the spread and the share."""
    text = docs.render(TABLE, [RECORD, changed(contender="torch", value=616.04, spread=0.1)])
    assert "| 1 | 141 ± 2 | 616.0 ± 0.05 us | 71 % |" in text
    assert "| 2 |" not in text
    assert "NVIDIA H200; sustained; medians of 7." in text
    assert "at most 1.1 %" in text and "spread" not in text.splitlines()[-1]
    assert "Measured 2026-11-20 (commit cd73e60)." in text


def test_the_newest_record_counts_and_other_runs_are_marked():
    """Check that the latest record is shown, and that records of other runs are marked."""
    newer = changed(commit="fffffff", time="2026-11-21", value=100.0, spread=None, origin="noted")
    other_rows = [changed(case={"rows": 64}), changed(case={"rows": 64}, contender="torch")]
    text = docs.render(TABLE, [newer, RECORD, *other_rows])
    assert "| 1 | 100¹ |  | 100 %¹ |" in text
    assert "The spread of some records is unknown." in text
    assert "Measured 2026-11-20 (commit cd73e60); ¹2026-11-21 (commit fffffff, from notes)." in text


def test_kinds_never_mix():
    any_kind = replace(TABLE, conditions={"suite": "gemm"})
    with pytest.raises(ValueError, match="mixes cpu and gpu"):
        docs.render(any_kind, [RECORD, changed(kind="cpu", contender="torch")])


def test_what_is_not_there_is_said():
    """A table without records, a column without numbers, and a contender that failed since its last
    number.
    """
    assert docs.render(TABLE, [changed(kind="cpu")]) == "Not measured yet.\n"
    assert "torch" not in docs.render(TABLE, [RECORD])
    lost = changed(contender="torch", quantity=FAILURE, value=1.0, unit="1")
    for other_row in ([], [changed(contender="torch", time="2026-11-01")]):
        assert "| 1 | 141 ± 2 | failed | 71 % |" in docs.render(TABLE, [RECORD, lost, *other_row])
    assert "failed" not in docs.render(TABLE, [RECORD, lost, changed(contender="torch")])
