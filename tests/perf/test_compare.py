import dataclasses

from perf import committed, compare
from perf.__main__ import main
from perf.records import pooled, write
from tests.helpers import each

from .test_records import BASE

TIME = dataclasses.replace(BASE, spread=1.0)
_COUNTED = {"suite": "counts", "kind": "emulator", "unit": "1", "spread": 0.0, "repeats": 1}
COUNT = dataclasses.replace(TIME, what="warp instructions", value=100_000, **_COUNTED)


def verdict(old, new, **options):
	changes = compare.compare([old], [dataclasses.replace(old, **new)], **options)
	assert len(changes) == 1
	return changes[0].verdict


@each(
	("value", "wanted"), [(100_000, "same"), (102_000, "same"), (102_001, "worse"), (97_999, "better"), (0, "better")]
)
def test_counts_have_no_noise(value, wanted):
	assert verdict(COUNT, {"value": value}) == wanted


def test_from_nothing_to_something_is_worse():
	assert [verdict(dataclasses.replace(COUNT, value=0), {"value": n}) for n in (0, 1)] == ["same", "worse"]


def test_times_within_their_noise_are_the_same():
	# Runs differ by 1 % (sigma), so three sigma of a difference of two are 4.2 %.
	assert verdict(TIME, {"value": 104.0}) == "same"
	assert verdict(TIME, {"value": 106.0}) == "worse"
	assert verdict(TIME, {"value": 94.0}) == "better"
	# A range of 30 % of seven repeats: sigma is 30 / 2.70, that of the median 0.47 of it.
	wide = dataclasses.replace(TIME, spread=30.0)
	assert verdict(wide, {"value": 120.0}) == "same"
	assert verdict(wide, {"value": 130.0}) == "worse"


def test_runs_that_differ_widen_the_noise():
	wild = [dataclasses.replace(TIME, value=v) for v in (80.0, 100.0, 120.0)]
	assert compare.compare(wild, [dataclasses.replace(TIME, value=115.0)])[0].verdict == "same"
	calm = [dataclasses.replace(TIME, value=v) for v in (99.9, 100.0, 100.1)]
	assert compare.compare(calm, [dataclasses.replace(TIME, value=115.0)])[0].verdict == "worse"


def test_gone_and_new():
	other = dataclasses.replace(TIME, contender="torch")
	found = compare.compare([TIME, other], [TIME, dataclasses.replace(TIME, format="fp8")])
	assert [c.verdict for c in found] == ["same", "gone", "new"]
	# Another GPU, another protocol: never compared.
	for change in ({"gpu": "NVIDIA H100"}, {"protocol": "burst"}, {"case": {"rows": 1}}):
		found = compare.compare([TIME], [dataclasses.replace(TIME, **change)])
		assert [c.verdict for c in found] == ["gone", "new"]


def test_three_runs_say_themselves_how_much_they_differ():
	"""Wide repeats, such as of a GPU at its power limit, whose medians agree."""
	wide = dataclasses.replace(TIME, spread=30.0, repeats=7)
	runs = [dataclasses.replace(wide, value=v, commit="a") for v in (99.0, 100.0, 101.0)]
	worse = [dataclasses.replace(r, value=1.05 * r.value, commit="b", time="9") for r in runs]
	assert [c.verdict for c in compare.compare(runs[:1], worse[:1])] == ["same"]
	assert [c.verdict for c in compare.compare(runs, worse)] == ["worse"]
	assert (pooled(runs).value, pooled(runs).spread, pooled(runs).repeats) == (100.0, 2.0, 3)
	assert pooled(runs[:2]) == runs[1] and pooled([*runs, worse[0]]) == worse[0]


def test_exit_status(tmp_path, capsys):
	paths = [tmp_path / name for name in ("old.jsonl", "same.jsonl", "worse.jsonl", "other.jsonl")]
	same, worse = (dataclasses.replace(TIME, value=value) for value in (101.0, 150.0))
	for path, record in zip(paths, (TIME, same, worse, COUNT), strict=True):
		write(path, [record])
	old, *others = map(str, paths)
	statuses = [main(["compare", old, new]) for new in (*others, str(tmp_path / "none"))]
	assert statuses == [0, 1, 2, 2]
	assert "100 -> 150 us (+50.0%" in capsys.readouterr().out
	assert main(["compare", old, others[1], "--least", "0.6"]) == 0


def test_the_check_of_ci(tmp_path, capsys):
	path = tmp_path / "counts-ci.jsonl"
	other = dataclasses.replace(COUNT, what="bytes read")
	write(path, [COUNT, other])
	assert committed.check([COUNT, other], path, partial=False) == 0
	worse = dataclasses.replace(COUNT, value=103_000)
	assert committed.check([worse, other], path, partial=False) == 1
	assert committed.RENEW in capsys.readouterr().out
	assert committed.check([COUNT], path, partial=False) == 1
	assert committed.check([COUNT], path, partial=True) == 0
	better = dataclasses.replace(COUNT, value=1)
	assert committed.check([better, other], path, partial=False) == 0


def test_renewing_keeps_the_history_of_what_changed():
	was, same, gone = (dataclasses.replace(COUNT, what=what) for what in ("a", "b", "c"))
	peer = dataclasses.replace(gone, contender="torch")
	now = [dataclasses.replace(r, commit="d", time="9") for r in (was, same)]
	now[0] = dataclasses.replace(now[0], value=1)
	found = committed.renewed([was, same, gone, peer], now)
	assert found == [was, same, peer, now[0]]
	assert committed.renewed(found, now) == found
	# Back to where it was: that is a change, too.
	back = dataclasses.replace(was, commit="e", time="99")
	assert committed.renewed(found, [back, same])[-1] is back


def test_renewing_is_of_the_whole_record():
	for more in (["--format", "fp8"], ["--backend", "emulated:sm_90a"], ["--full", "--no-peers"]):
		assert main(["run", "counts", "--renew", *more]) == 2
	assert main(["run", "gemm", "--check"]) == 2


def test_more_of_a_rate_or_of_a_signal_is_better():
	for unit in ("TB/s", "TFLOP/s", "dB"):
		old = dataclasses.replace(TIME, unit=unit)
		assert verdict(old, {"value": 120.0}) == "better"
		assert verdict(old, {"value": 80.0}) == "worse"
