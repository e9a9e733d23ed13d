"""How each thing changed from commit to commit, by the noise model of ``perf compare``."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from perf.compare import compare

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perf.records import Record

__all__ = ["Step", "commit_name", "commits_of", "steps_of"]

_SHORT = 7


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing at one commit.

    Attributes:
        commit: its name.
        value: median of the runs of that commit.
        spread: of the newest of them, None if it was not kept.
        verdict: what ``perf compare`` says of it and the commit before; ``"same"`` of the first.
        worse_by: relative difference, positive if it got worse.
        threshold: relative difference from which it counts.
    """

    commit: str
    value: float
    spread: float | None
    verdict: str = "same"
    worse_by: float = 0.0
    threshold: float = 0.0


def commit_name(commit: str) -> str:
    """A commit as pages show it; records have longer and shorter names of one."""
    dirty = "-dirty"
    stem = commit.removesuffix(dirty)
    return stem[:_SHORT] + dirty * commit.endswith(dirty) if commit else "unknown"


def commits_of(records: Iterable[Record]) -> dict[str, str]:
    """The commits by name, in the order of their first measurement, with its time."""
    first: dict[str, str] = {}
    for record in records:
        name = commit_name(record.commit)
        first[name] = min(record.time, first.get(name, record.time))
    return dict(sorted(first.items(), key=lambda item: (item[1], item[0])))


def steps_of(records: Sequence[Record], order: Sequence[str]) -> list[Step]:
    """The history of one thing.

    Args:
        records: all of it.
        order: names of the commits, the oldest first.
    """
    by_commit: dict[str, list[Record]] = {}
    for record in records:
        name = commit_name(record.commit)
        by_commit.setdefault(name, []).append(dataclasses.replace(record, commit=name))
    steps: list[Step] = []
    before: list[Record] = []
    for name in order:
        runs = by_commit.get(name)
        if not runs:
            continue
        # Compared with itself, the first commit gives its median.
        (change,) = compare(before or runs, runs)
        assert change.new is not None
        worse_by = change.worse_by if math.isfinite(change.worse_by) else 1e9
        facts: dict[str, Any] = {"verdict": change.verdict, "worse_by": worse_by}
        facts["threshold"] = change.threshold
        steps.append(Step(name, change.new, change.record.spread, **facts))
        before = runs
    return steps
