"""``perf compare`` and the check of counts in CI, on records written here."""

from dataclasses import replace

import pytest

from perf import committed, compare
from perf.__main__ import main
from perf.records import pool_runs, write

from .test_records import BASE

TIME = replace(BASE, spread=1.0)
_COUNTED = {"suite": "counts", "kind": "emulator", "unit": "1", "spread": 0.0, "repeats": 1}
COUNT = replace(TIME, quantity="warp instructions", value=100_000, **_COUNTED)


def verdicts(old, new):
    return [change.verdict for change in compare.compare(old, new)]


def verdict(old, value):
    (got,) = verdicts([old], [replace(old, value=value)])
    return got


def runs(*values, record=TIME, **fields):
    return [replace(record, value=value, **fields) for value in values]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(100_000, "same"), (102_000, "same"), (102_001, "worse"), (97_999, "better"), (0, "better")],
)
def test_counts_have_no_noise(value, wanted):
    assert verdict(COUNT, value) == wanted


def test_from_nothing_to_something_is_worse():
    assert [verdict(replace(COUNT, value=0), n) for n in (0, 1)] == ["same", "worse"]


def test_times_within_their_noise_are_the_same():
    # Runs differ by 1 % (sigma), so three sigma of a difference of two are 4.2 %.
    assert [verdict(TIME, value) for value in (104.0, 106.0, 94.0)] == ["same", "worse", "better"]
    # A range of 30 % of seven repeats: sigma is 30 / 2.70, that of the median 0.47 of it.
    wide = replace(TIME, spread=30.0)
    assert [verdict(wide, value) for value in (120.0, 130.0)] == ["same", "worse"]


def test_runs_that_differ_widen_the_noise():
    assert verdicts(runs(80.0, 100.0, 120.0), runs(115.0)) == ["same"]
    assert verdicts(runs(99.9, 100.0, 100.1), runs(115.0)) == ["worse"]


def test_gone_and_new():
    record_pair = [TIME, replace(TIME, contender="torch")]
    assert verdicts(record_pair, [TIME, replace(TIME, format="fp8")]) == ["same", "gone", "new"]
    # Another GPU, another protocol: never compared.
    for change in ({"gpu": "NVIDIA H100"}, {"protocol": "burst"}, {"case": {"rows": 1}}):
        assert verdicts([TIME], [replace(TIME, **change)]) == ["gone", "new"]


def test_three_runs_say_themselves_how_much_they_differ():
    """Wide repeats, such as of a GPU at its power limit, whose medians agree."""
    wide = runs(99.0, 100.0, 101.0, spread=30.0, repeats=7, commit="a")
    worse = [replace(r, value=1.05 * r.value, commit="b", time="9") for r in wide]
    assert verdicts(wide[:1], worse[:1]) == ["same"]
    assert verdicts(wide, worse) == ["worse"]
    assert (pool_runs(wide).value, pool_runs(wide).spread, pool_runs(wide).repeats) == (
        100.0,
        2.0,
        3,
    )
    assert pool_runs(wide[:2]) == wide[1] and pool_runs([*wide, worse[0]]) == worse[0]


def test_exit_status(tmp_path, capsys):
    """Check the exit status of ``compare``."""
    paths = [tmp_path / name for name in ("old.jsonl", "same.jsonl", "worse.jsonl", "other.jsonl")]
    for path, record in zip(paths, (TIME, *runs(101.0, 150.0), COUNT), strict=True):
        write(path, [record])
    old, *other_records = map(str, paths)
    assert [main(["compare", old, new]) for new in (*other_records, str(tmp_path / "none"))] == [
        0,
        1,
        2,
        2,
    ]
    assert "100 -> 150 us (+50.0%" in capsys.readouterr().out
    assert main(["compare", old, other_records[1], "--least", "0.6"]) == 0


def test_the_check_of_ci(tmp_path, capsys):
    """Check the exit status of the comparison in CI."""
    path, changed_record = tmp_path / "counts-ci.jsonl", replace(COUNT, quantity="bytes read")
    write(path, [COUNT, changed_record])

    def check(*found, partial=False):
        return committed.check(list(found), path, partial=partial)

    same, worse, better = runs(100_000, 103_000, 1, record=COUNT)
    assert check(worse, changed_record) == 1
    assert committed.RENEW in capsys.readouterr().out
    assert [
        check(same, changed_record),
        check(better, changed_record),
        check(COUNT),
        check(COUNT, partial=True),
    ] == [
        0,
        0,
        1,
        0,
    ]


def test_renewing_keeps_the_history_of_what_changed():
    """Check that renewing records keeps the history of changed values."""
    was, same, removed = (replace(COUNT, quantity=quantity) for quantity in ("a", "b", "c"))
    peer = replace(removed, contender="torch")
    now = [replace(r, commit="d", time="9") for r in (was, same)]
    now[0] = replace(now[0], value=1)
    got = committed.renew([was, same, removed, peer], now)
    assert got == [was, same, peer, now[0]]
    assert committed.renew(got, now) == got
    # Back to where it was: that is a change, too.
    back = replace(was, commit="e", time="99")
    assert committed.renew(got, [back, same])[-1] is back


def test_renewing_is_of_the_whole_record():
    for more in (["--format", "fp8"], ["--backend", "emulated:sm_90a"], ["--full", "--no-peers"]):
        assert main(["run", "counts", "--renew", *more]) == 2
    assert main(["run", "gemm", "--check"]) == 2


def test_more_of_a_rate_or_of_a_signal_is_better():
    for unit in ("TB/s", "TFLOP/s", "dB"):
        assert [verdict(replace(TIME, unit=unit), value) for value in (120.0, 80.0)] == [
            "better",
            "worse",
        ]
