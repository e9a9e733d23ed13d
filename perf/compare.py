"""``perf compare``: find what got slower from one set of records to another.

docs/develop/measuring.md states the rule.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .records import ENOUGH_RUNS, Record, group_by_key, load

#: A difference of fewer standard errors than this may be noise.
SIGMAS = 3.0
#: Relative standard deviation of a median from one run to the next, by kind: GPUs run the same
#: kernel 1 % apart, CPUs are shared.
BETWEEN_RUNS = {"gpu": 0.01, "cpu": 0.05}
#: Relative differences below this are ignored.
LEAST = 0.02
#: Tolerance for rounding of a difference: 102 is not more than 2 % above 100.
_ROUNDING = 1e-9
#: Mean range of n normal numbers over their standard deviation (Tippett 1925).
_RANGES = (1.128, 1.693, 2.059, 2.326, 2.534, 2.704, 2.847, 2.970, 3.078)
#: Standard error of a median over that of a mean, of normal numbers.
_MEDIAN = math.sqrt(math.pi / 2)
#: Units of which more is better.
_RATES = frozenset({"TB/s", "TFLOP/s", "dB"})


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that is in both sets, or in one.

    Attributes:
        record: The newer record, or the older one if there is no newer.
        old: Value in the old set, or None.
        new: Value in the new set, or None.
        threshold: Relative difference from which a change counts.
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
        device = f"{r.gpu or r.machine}, " if r.gpu or r.machine else ""
        name = f"{r.title} {r.quantity} ({device}{r.protocol})"
        unit = "" if r.unit == "1" else f" {r.unit}"
        if self.old is None or self.new is None:
            value = self.new if self.old is None else self.old
            return f"{self.verdict}: {name}: {value:g}{unit}"
        change = f"{self.worse_by:+.1%}, threshold {self.threshold:.1%}"
        return f"{self.verdict}: {name}: {self.old:g} -> {self.new:g}{unit} ({change})"


@dataclasses.dataclass(frozen=True)
class _Estimate:
    """Median of a thing in one set, and the relative variance of that median."""

    record: Record
    value: float
    variance: float


def _repeat_error(record: Record) -> float:
    """Return the relative standard error of a record's median, from the range of its repeats."""
    if not record.spread or not record.repeats or record.repeats < 2 or not record.value:
        return 0.0
    expected = _RANGES[min(record.repeats, len(_RANGES) + 1) - 2]
    return _MEDIAN * record.spread / expected / math.sqrt(record.repeats) / abs(record.value)


def _estimates(records: Iterable[Record]) -> dict[tuple[Any, ...], _Estimate]:
    """Return an estimate per key of a set, from the runs of the newest commit."""
    estimates = {}
    for key, history in group_by_key(records).items():
        newest = max(history, key=lambda record: record.time)
        runs = [record for record in history if record.commit == newest.commit]
        value = statistics.median(record.value for record in runs)
        variance = 0.0
        if not newest.is_count and value:
            between = BETWEEN_RUNS[newest.kind]
            repeats = statistics.fmean(_repeat_error(record) ** 2 for record in runs)
            if len(runs) >= ENOUGH_RUNS:
                # The error of the repeats is part of the difference between runs.
                spread = statistics.stdev(record.value for record in runs)
                between, repeats = max(between, spread / abs(value)), 0.0
            variance = (between**2 + repeats) / len(runs)
        estimates[key] = _Estimate(newest, value, variance)
    return estimates


def compare(old: Iterable[Record], new: Iterable[Record], least: float = LEAST) -> list[Change]:
    """Compare two sets of records.

    Args:
        old: Records of the old set.
        new: Records of the new set.
        least: Smallest relative difference that counts.

    Returns:
        A change per thing: first those of the old set in its order, then the new ones.
    """
    before, after = _estimates(old), _estimates(new)
    changes = []
    for key, earlier in before.items():
        later = after.get(key)
        if later is None:
            changes.append(Change(earlier.record, earlier.value, None))
            continue
        noise = SIGMAS * math.sqrt(earlier.variance + later.variance)
        changes.append(Change(later.record, earlier.value, later.value, max(least, noise)))
    changes += [Change(e.record, None, e.value) for key, e in after.items() if key not in before]
    return changes


#: Verdicts in the order in which they are printed.
VERDICTS = ("worse", "better", "gone", "new", "same")


def print_changes(changes: Sequence[Change], shown: Sequence[str]) -> None:
    """Print the changes with the verdicts ``shown``, the largest first, and the number of all."""
    groups: dict[str, list[Change]] = {verdict: [] for verdict in VERDICTS}
    for change in changes:
        groups[change.verdict].append(change)
    for verdict in shown:
        for change in sorted(groups[verdict], key=lambda c: -abs(c.worse_by)):
            print(change)
    print(", ".join(f"{len(group)} {verdict}" for verdict, group in groups.items()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``perf compare``."""
    parser.add_argument("old", type=Path, help="a file or folder of records")
    parser.add_argument("new", type=Path, help="another file or folder of records")
    parser.add_argument("--least", type=float, default=LEAST, help="smallest relative change")
    parser.add_argument("--all", action="store_true", help="also print same, gone and new things")


def main(arguments: argparse.Namespace) -> int:
    """Compare and return 1 if something is worse, 2 if the sets have nothing in common."""
    changes = compare(load(arguments.old), load(arguments.new), arguments.least)
    print_changes(changes, VERDICTS if arguments.all else VERDICTS[:2])
    if all(change.verdict in ("gone", "new") for change in changes):
        print("nothing is in both sets")
        return 2
    return int(any(change.verdict == "worse" for change in changes))
