"""The dashboard's bytes and what is in them; ``test_dashboard_browser.py`` looks at it."""

import dataclasses
import hashlib
import json
import random
import re
import statistics
import subprocess

import pytest

from perf.__main__ import main
from perf.compare import compare
from perf.dashboard.badge import badge, speedups
from perf.dashboard.history import commit_name, commits_of, steps_of
from perf.dashboard.kernels import is_variant, kernel_of
from perf.dashboard.page import VENDORED, page
from perf.dashboard.past import past
from perf.dashboard.payload import payload
from perf.dashboard.roofs import roofs_of
from perf.records import RESULTS, read, write
from tests.perf.dashboard_records import NEW, OLD, RECORDS, all_committed, current

BADGE = RESULTS.parent.parent / "docs" / "badge.svg"


def test_the_plotting_library_is_what_its_package_has():
    origin = json.loads((VENDORED / "origin.json").read_text())
    found = {path.name for path in VENDORED.iterdir()} - {"origin.json"}
    assert found == set(origin["files"])
    for name, facts in origin["files"].items():
        assert hashlib.sha256((VENDORED / name).read_bytes()).hexdigest() == facts["sha256"], name
    assert f"(v{origin['version']})" in (VENDORED / "uPlot.iife.min.js").read_text()[:80]


def test_same_records_give_the_same_bytes_in_any_order():
    mixed = RECORDS.copy()
    random.Random(0).shuffle(mixed)
    assert page(mixed) == page(RECORDS)


def test_the_page_is_whole():
    text = page(RECORDS)
    assert "@@" not in text
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?:https?:)?//""", text)
    assert "url(" not in text and "@import" not in text
    assert (VENDORED / "LICENSE").read_text().strip() in text
    assert page(RECORDS, "records.jsonl").count('href="records.jsonl"') == 1
    assert "records.jsonl" not in text


def test_no_record_can_end_the_element_that_it_is_in():
    evil = "</script><script>alert(1)</script><!-- @@script@@"
    text = page([dataclasses.replace(RECORDS[0], note=evil, contender=evil)])
    assert text.count("<script") == page(RECORDS[:1]).count("<script")
    found = re.search(
        r'<script type="application/json" id="records">(.*?)</script>', text, re.DOTALL
    )
    assert evil in json.loads(found[1])["texts"]


def unpacked(data):
    """What ``assets/data.js`` makes of the things."""
    for row in data["things"]:
        row = row + [None] * (15 - len(row))
        suite, what, unit, protocol, kind, place = data["measures"][row[0]]
        work = [None, None] if row[11] is None else data["works"][row[11]]
        names = (suite, what, unit, protocol, kind, place)
        numbers = (*row[7:11], *work, {} if row[12] is None else data["ceilings"][row[12]])
        texts = (data["texts"][row[1]], data["texts"][row[2]])
        case = json.dumps(data["cases"][row[3]], sort_keys=True)
        yield (
            *names,
            *texts,
            case,
            data["runs"][row[6]]["commit"],
            *numbers[:-1],
            str(numbers[-1]),
        )


@pytest.mark.parametrize("records", [RECORDS, all_committed()], ids=["made", "committed"])
def test_all_newest_numbers_are_in_the_page(records):
    wanted, found = {}, list(unpacked(payload(records)))
    for r in sorted(records, key=lambda record: record.time):
        names = (r.suite, r.what, r.unit, r.protocol, r.kind, r.gpu or r.machine)
        case = json.dumps(dict(r.case), sort_keys=True)
        numbers = (r.value, r.spread, r.repeats, r.error, r.bytes, r.flops, str(dict(r.ceilings)))
        wanted.setdefault((*names, r.contender, r.format, case), {}).setdefault(r.time, []).append(
            (commit_name(r.commit), *numbers)
        )
    assert len(found) == len(wanted)
    for row in found:
        of_thing = wanted[row[:9]]
        assert row[9:] in of_thing[max(of_thing)]


def test_history_says_what_compare_says():
    data = payload(RECORDS)
    assert [name for name, _ in data["commits"]] == [OLD[0], NEW[0]]
    changes = compare([r for r in RECORDS if r.commit == OLD[0]], current())
    verdicts = [c.verdict for c in changes if c.old is not None and c.new is not None]
    signs = [rows[1][2] for _, rows in data["history"]]
    assert sorted(signs) == sorted({"worse": 1, "better": -1, "same": 0}[v] for v in verdicts)
    assert {1, -1, 0} == set(signs)
    contenders = {1: "ours, prepacked", -1: "torch"}
    for thing, rows in data["history"]:
        wanted = contenders.get(rows[1][2])
        assert wanted in (None, data["texts"][data["things"][thing][1]])


def test_steps_of_a_thing():
    times = [
        (100, "a" * 12, "1"),
        (102, "a" * 7, "2"),
        (101, "b" * 12 + "-dirty", "3"),
        (120, "", "4"),
    ]
    made = [
        dataclasses.replace(RECORDS[0], value=value, spread=0.0, commit=commit, time=time)
        for value, commit, time in times
    ]
    order = commits_of(made)
    assert list(order.items()) == [("aaaaaaa", "1"), ("bbbbbbb-dirty", "3"), ("unknown", "4")]
    steps = steps_of(made, list(order))
    assert [(s.value, s.verdict) for s in steps] == [(101, "same"), (101, "same"), (120, "worse")]
    assert steps[2].worse_by == pytest.approx(120 / 101 - 1)


def test_kernels():
    kernels = {kernel.slug: kernel for r in RECORDS if (kernel := kernel_of(r))}
    assert {k.title for k in kernels.values()} == {
        "quantize nvfp4, row",
        "gemm nvfp4:row_scaled x nvfp4, fprop",
        "gemm nvfp4:row_scaled x nvfp4, fprop, prepacked",
    }
    committed = {kernel_of(record) for record in all_committed()} - {None}
    assert len({kernel.slug for kernel in committed}) == len(committed)
    assert all(re.fullmatch(r"[a-z0-9-]+", kernel.slug) for kernel in committed)


@pytest.mark.parametrize(
    ("contender", "wanted"),
    [("ours", False), ("ours, prepacked", False), ("ours, tile 256x8", True), ("torch", False)],
)
def test_variants(contender, wanted):
    assert is_variant(contender) is wanted


def test_roofs_are_measured_or_said_to_be_published():
    roofs = {roof.kind: (roof.rate, roof.measured) for roof in roofs_of("NVIDIA H200", RECORDS)}
    assert roofs == {"copy": (4.0, True), "bfloat16": (700.0, True), "fp8": (1979.0, False)}
    assert [r.rate for r in roofs_of("NVIDIA GB200", [])] == [8.0, 2500.0, 5000.0, 10000.0]
    assert roofs_of("another", RECORDS) == []


def test_the_badge_says_what_the_records_say():
    gpu, found = speedups(RECORDS)
    assert (gpu, found) == ("NVIDIA H200", pytest.approx([2.0, 2.0, 2.0]))
    assert "NVFP4 grouped GEMM: 2.00x torch bf16 on H200 (2.00x to 2.00x, 3 cases)" in badge(
        RECORDS
    )
    assert "not measured yet" in badge([r for r in RECORDS if r.kind != "gpu"])
    rates = speedups(all_committed())[1]
    assert f"{statistics.median(rates):.2f}x torch bf16" in badge(all_committed())


def test_the_badge_compares_what_was_measured_together():
    """On one commit, the newest that has both."""
    ours = [r for r in RECORDS if (r.suite, r.contender) == ("gemm", "ours")]
    torch = [r for r in RECORDS if r.contender == "torch"]
    old, new = ([r for r in torch if r.commit == commit] for commit, _ in (OLD, NEW))
    assert speedups([*ours, *new])[1] == pytest.approx([2.0] * 3)
    assert speedups([*ours, *old])[1] == pytest.approx([4.0] * 3)
    assert speedups([*ours, *(dataclasses.replace(r, commit="ccccccc") for r in new)])[1] == []
    nameless = [dataclasses.replace(r, commit="") for r in (*ours, *torch)]
    assert speedups(nameless)[1] == []


def test_the_badge_of_the_readme_is_of_the_committed_records():
    told = "python -m perf dashboard --badge docs/badge.svg"
    assert BADGE.read_text() == badge(all_committed()), f"renew it: {told}"


def test_publish(tmp_path, capsys):
    source, site = tmp_path / "records.jsonl", tmp_path / "site"
    write(source, RECORDS)
    assert main(["dashboard", str(source), "--publish", str(site)]) == 0
    assert (site / "index.html").read_text() == page(RECORDS, "records.jsonl")
    by_text = {json.dumps(dataclasses.asdict(r), sort_keys=True) for r in RECORDS}
    published = read(site / "records.jsonl")
    assert {json.dumps(dataclasses.asdict(r), sort_keys=True) for r in published} == by_text
    assert (site / "badge.svg").read_text() == badge(RECORDS)
    assert capsys.readouterr().out.count(" KB\n") == 3
    assert main(["dashboard", str(source), "--out", str(tmp_path / "one.html")]) == 0
    assert (tmp_path / "one.html").read_text() == page(RECORDS)


def test_what_makes_no_page(tmp_path, capsys):
    assert main(["dashboard"]) == 2
    assert "--out FILE" in capsys.readouterr().err
    empty = tmp_path / "none.jsonl"
    empty.write_text("")
    assert main(["dashboard", str(empty), "--out", str(tmp_path / "x.html")]) == 2
    assert "no records" in capsys.readouterr().err


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


def test_history_brings_back_what_was_replaced(tmp_path, capsys):
    old = [r for r in RECORDS if r.commit == OLD[0]]
    git(tmp_path, "init", "-q")
    folder = tmp_path / "results"
    folder.mkdir()
    file = folder / "a.jsonl"
    for text in (None, '{"schema": 0}\n', ""):
        write(file, old) if text is None else file.write_text(text)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-qm", "x")
    write(file, current())
    assert {r.key for r in past([folder], current())} == {r.key for r in old}
    assert "passed over 1 versions" in capsys.readouterr().out
    assert past([file], [*old, *current()]) == []
    with pytest.raises(ValueError, match="git log"):
        past([tmp_path.parent], [])
    out = tmp_path / "x.html"
    assert main(["dashboard", str(folder), "--history", "--out", str(out)]) == 0
    assert out.read_text() == page(RECORDS)
