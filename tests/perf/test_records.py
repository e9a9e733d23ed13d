"""Records of measurements: validity, files, and the latest record of a case."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf import records
from perf.records import RESULTS, Record, append, latest, load, read, write

BASE = Record(
    suite="gemm",
    case={"model": "DeepSeek-V3", "rows": 512},
    contender="ours",
    quantity="time",
    value=100.0,
    unit="us",
    kind="gpu",
    format="nvfp4",
    protocol="sustained, L2-cold",
    spread=2.0,
    repeats=7,
    bytes=4e8,
    flops=6e10,
    ceilings={"copy": 4.0, "bfloat16": 700.0},
    gpu="NVIDIA H200",
    clocks={"sm": 1500.0, "sm max": 1980.0},
    commit="abc",
    time="2026-11-20T10:00:00+00:00",
)
_TEXT = st.sampled_from(["a", "b", "ours", "nvfp4 x nvfp4"])
_CASES = st.dictionaries(
    st.sampled_from(["rows", "routing", "k"]), st.integers(0, 3) | _TEXT, max_size=3
)
_NUMBERS = st.dictionaries(st.sampled_from(["sm", "draw"]), st.sampled_from([1.0, 2.5]))
_RECORDS = st.builds(
    Record,
    suite=_TEXT,
    case=_CASES,
    contender=_TEXT,
    quantity=_TEXT,
    value=st.floats(allow_nan=False, allow_infinity=False),
    unit=_TEXT,
    kind=st.sampled_from(records.KINDS),
    format=st.sampled_from(["", "fp8"]),
    spread=st.none() | st.floats(0, 10),
    clocks=_NUMBERS,
    versions=st.dictionaries(_TEXT, _TEXT, max_size=2),
    commit=st.sampled_from(["", "abc", "def"]),
    note=st.sampled_from(["", "x"]),
    time=st.sampled_from(["", "2026-11-20", "2026-11-21"]),
)


def sorted_texts(records):
    return sorted(json.dumps(asdict(record), sort_keys=True) for record in records)


@settings(max_examples=60)
@given(st.lists(_RECORDS, max_size=8), st.lists(st.lists(_RECORDS, max_size=5), max_size=4))
def test_a_file_holds_what_was_written_and_appended(tmp_path_factory, many, batches):
    """Check that a file has the records that were written and appended."""
    path = tmp_path_factory.mktemp("records") / "r.jsonl"
    write(path, many)
    assert sorted_texts(read(path)) == sorted_texts(many)
    for batch in batches:
        append(path, batch)
    assert sorted_texts(read(path)) == sorted_texts(sum(batches, many))


def test_a_file_has_one_record_per_line_without_default_values(tmp_path):
    """Check that a file has one record per line, without default values."""
    path = tmp_path / "r.jsonl"
    write(path, [BASE, replace(BASE, value=1.5)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["value"] for line in lines] == [100.0, 1.5]
    assert not {"error", "driver", "note", "origin"} & lines[0].keys()


def test_blank_lines_between_records_are_skipped(tmp_path):
    """Check that blank lines between records are skipped."""
    path = tmp_path / "r.jsonl"
    write(path, [BASE])
    path.write_text(f"{path.read_text()}\n{path.read_text()}")
    assert read(path) == [BASE, BASE]


def test_old_names_of_contenders_are_read(tmp_path):
    """Records of an older commit belong to the same thing as those of a newer one."""
    path = tmp_path / "r.jsonl"
    new = replace(BASE, contender="ours, cached weight")
    write(path, [replace(new, contender="ours, weight kept"), new])
    assert read(path) == [new, new]
    path.write_text("{}")
    with pytest.raises(ValueError, match="line 1: 'contender'"):
        read(path)


def test_files_of_schema_2_call_the_quantity_what(tmp_path):
    """Check that files of schema 2 are read, which have ``what`` for ``quantity``."""
    path = tmp_path / "r.jsonl"
    write(path, [BASE])
    row = json.loads(path.read_text())
    row["what"], row["schema"] = row.pop("quantity"), 2
    path.write_text(json.dumps(row))
    assert read(path) == [BASE]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "tpu"}, "kind must be one of gpu, cpu, emulator"),
        ({"origin": "guess"}, "origin must be"),
        ({"schema": 1}, "schema must be"),
        ({"schema": 2}, "schema must be"),
        ({"value": float("nan")}, "finite"),
        ({"value": True}, "finite"),
        ({"unit": ""}, "unit is empty"),
        ({"case": {"rows": [1]}}, "case"),
    ],
)
def test_what_is_no_record_is_refused(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        replace(BASE, **change)


def test_a_wrong_line_is_named(tmp_path):
    """Check that the error for an invalid line names the line."""
    path = tmp_path / "r.jsonl"
    write(path, [BASE])
    path.write_text(path.read_text() + '{"value": "fast"}\n')
    with pytest.raises(ValueError, match="line 2"):
        read(path)
    path.write_text(path.read_text().splitlines()[0][:-9])
    with pytest.raises(ValueError, match="line 1"):
        read(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")


def test_rates_and_shares_are_of_the_least_work():
    """Check rates and shares, which count the least bytes and operations."""
    assert [BASE.tbs, BASE.tflops] == pytest.approx([4.0, 600.0])
    assert [BASE.share("copy"), BASE.share("bfloat16")] == pytest.approx([1, 600 / 700])
    assert BASE.share("fp8") is None
    in_ms = replace(BASE, value=0.1, unit="ms")
    assert in_ms.microseconds == pytest.approx(100) and in_ms.tbs == pytest.approx(BASE.tbs)
    with pytest.raises(ValueError, match="no time"):
        _ = replace(BASE, unit="GB").microseconds


def test_the_latest_of_one_thing():
    """Check that ``latest`` returns the newest record of each measurement."""
    older = replace(BASE, time="2026-11-19", value=1.0)
    changed = replace(BASE, case={"rows": 3}, time="2026-11-01")
    assert latest([BASE, older, changed]) == [BASE, changed]
    assert latest([older, BASE]) == [BASE]


def test_committed_records_are_records():
    loaded = load(RESULTS)
    assert {r.suite for r in loaded} >= {"quantize", "gemm", "layer", "host", "counts", "memory"}
    for record in loaded:
        assert record.time >= "2026-11-20" and (record.commit or record.note), record
        assert record.gpu or record.machine, record
        assert record.origin != "noted" or record.note, record
