"""``perf compare``: what got slower from one set of records to another; docs/perf.md says how."""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .records import ENOUGH_RUNS, Record, by_key, load

#: A difference of fewer standard errors than this may be noise.
SIGMAS = 3.0
#: Standard deviation of a median from one run to the next, relative to it, by kind: GPUs run the
#: same kernel 1 % apart, CPUs are shared.
BETWEEN = {"gpu": 0.01, "cpu": 0.05}
#: Differences that nobody cares about, relative.
LEAST = 0.02
#: Of the differences themselves: 102 is not more than 2 % above 100.
_ROUNDING = 1e-9
#: Mean range of n normal numbers over their standard deviation (Tippett 1925).
_RANGES = (1.128, 1.693, 2.059, 2.326, 2.534, 2.704, 2.847, 2.970, 3.078)
#: Standard error of a median over that of a mean, of normal numbers.
_MEDIAN = math.sqrt(math.pi / 2)
#: Units of which more is better.
_RATES = frozenset({"TB/s", "TFLOP/s", "dB"})


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing in both sets, or in one.

    ``record`` is the newer one, or the older if there is none; ``old`` and ``new`` are the values,
    ``threshold`` the relative difference from which it counts.
    """

    record: Record
    old: float | None
    new: float | None
    threshold: float = 0.0

    @property
    def worse_by(self) -> float:
        """Relative difference, positive if it got worse; infinite from nothing to something."""
        if self.old is None or self.new is None or self.old == self.new:
            return 0.0
        if self.old == 0:
            return math.inf
        difference = self.new / self.old - 1
        return -difference if self.record.unit in _RATES else difference

    @property
    def verdict(self) -> str:
        """``"worse"``, ``"better"``, ``"same"``, ``"gone"`` or ``"new"``."""
        if self.new is None:
            return "gone"
        if self.old is None:
            return "new"
        if abs(self.worse_by) <= self.threshold + _ROUNDING:
            return "same"
        return "worse" if self.worse_by > 0 else "better"

    def __str__(self) -> str:
        r = self.record
        where = f"{r.gpu or r.machine}, " if r.gpu or r.machine else ""
        what = f"{r.title} {r.quantity} ({where}{r.protocol})"
        unit = "" if r.unit == "1" else f" {r.unit}"
        if self.old is None or self.new is None:
            value = self.new if self.old is None else self.old
            return f"{self.verdict}: {what}: {value:g}{unit}"
        change = f"{self.worse_by:+.1%}, threshold {self.threshold:.1%}"
        return f"{self.verdict}: {what}: {self.old:g} -> {self.new:g}{unit} ({change})"


@dataclasses.dataclass(frozen=True)
class _Side:
    """What one set knows of a thing: its median, and the relative variance of that."""

    record: Record
    value: float
    variance: float


def _repeat_error(record: Record) -> float:
    """Relative standard error of a record's median, from the range of its repeats."""
    if not record.spread or not record.repeats or record.repeats < 2 or not record.value:
        return 0.0
    expected = _RANGES[min(record.repeats, len(_RANGES) + 1) - 2]
    return _MEDIAN * record.spread / expected / math.sqrt(record.repeats) / abs(record.value)


def _sides(records: Iterable[Record]) -> dict[tuple[Any, ...], _Side]:
    sides = {}
    for key, found in by_key(records).items():
        newest = max(found, key=lambda record: record.time)
        runs = [record for record in found if record.commit == newest.commit]
        value = statistics.median(record.value for record in runs)
        variance = 0.0
        if not newest.is_count and value:
            between = BETWEEN[newest.kind]
            repeats = statistics.fmean(_repeat_error(record) ** 2 for record in runs)
            if len(runs) >= ENOUGH_RUNS:
                # Runs differ by the error of their repeats, too.
                spread = statistics.stdev(record.value for record in runs)
                between, repeats = max(between, spread / abs(value)), 0.0
            variance = (between**2 + repeats) / len(runs)
        sides[key] = _Side(newest, value, variance)
    return sides


def compare(old: Iterable[Record], new: Iterable[Record], least: float = LEAST) -> list[Change]:
    """What changed by more than ``least``, in the order of the old records, then what is new."""
    before, after = _sides(old), _sides(new)
    changes = []
    for key, side in before.items():
        other = after.get(key)
        if other is None:
            changes.append(Change(side.record, side.value, None))
            continue
        noise = SIGMAS * math.sqrt(side.variance + other.variance)
        changes.append(Change(other.record, side.value, other.value, max(least, noise)))
    changes += [Change(s.record, None, s.value) for key, s in after.items() if key not in before]
    return changes


#: What a change can be, in the order in which they are printed.
VERDICTS = ("worse", "better", "gone", "new", "same")


def print_changes(changes: Sequence[Change], shown: Sequence[str]) -> None:
    by_verdict: dict[str, list[Change]] = {verdict: [] for verdict in VERDICTS}
    for change in changes:
        by_verdict[change.verdict].append(change)
    for verdict in shown:
        for change in sorted(by_verdict[verdict], key=lambda c: -abs(c.worse_by)):
            print(change)
    print(", ".join(f"{len(found)} {verdict}" for verdict, found in by_verdict.items()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, help="a file or folder of records")
    parser.add_argument("new", type=Path, help="another")
    parser.add_argument("--least", type=float, default=LEAST, help="smallest relative change")
    parser.add_argument("--all", action="store_true", help="print what is the same, gone or new")


def main(arguments: argparse.Namespace) -> int:
    """Compare; 1 if something is worse, 2 if the sets have nothing in common."""
    changes = compare(load(arguments.old), load(arguments.new), arguments.least)
    print_changes(changes, VERDICTS if arguments.all else VERDICTS[:2])
    if all(change.verdict in ("gone", "new") for change in changes):
        print("nothing is in both sets")
        return 2
    return int(any(change.verdict == "worse" for change in changes))
