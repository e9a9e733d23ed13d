"""The records as the page reads them: the newest of each thing, and how each came to be.

What many have in common stands once, and they name its place.
``assets/data.js`` undoes this; the two agree on the order of the fields below.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from perf.dashboard.history import commit_name, commits_of, steps_of
from perf.dashboard.kernels import is_variant, kernel_of
from perf.dashboard.roofs import roofs_of
from perf.records import Record, latest

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["payload"]

#: What is measured, and how.
_MEASURE = ("suite", "what", "unit", "protocol", "kind")
#: Where, when and with what.
_RUN = ("machine", "gpu", "driver", "versions", "commit", "time", "origin", "note", "seed")


class _Table:
    """Values, each once, and the place of each."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[Hashable, int] = {}

    def place(self, value: Any) -> int:
        """Where a value is; it is added if it is new."""
        key = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value)
        return self._places[key]


def _plain(value: float | None) -> float | int | None:
    """A number in as few letters as say it exactly."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _trimmed(row: list[Any]) -> list[Any]:
    """Without the nulls at its end."""
    while row and row[-1] is None:
        row.pop()
    return row


class _Builder:
    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.texts, self.cases, self.runs, self.measures = _Table(), _Table(), _Table(), _Table()
        self.works, self.ceilings, self.kernels = _Table(), _Table(), _Table()

    def _run(self, record: Record) -> int:
        run = {name: getattr(record, name) for name in _RUN}
        run["clocks"] = {k: _plain(v) for k, v in record.clocks.items() if k != "sm"}
        run["power"] = {k: _plain(v) for k, v in record.power.items() if k != "draw"}
        run = {name: value for name, value in run.items() if value not in ("", None, {})}
        run["commit"] = commit_name(record.commit)
        return self.runs.place(run)

    def thing(self, record: Record) -> list[Any]:
        """A thing that was measured, and its newest record."""
        kernel = kernel_of(record)
        page = None
        if kernel is not None:
            page = self.kernels.place([kernel.slug, kernel.title, kernel.op])
        measure = [getattr(record, name) for name in _MEASURE]
        row: list[Any] = [self.measures.place([*measure, record.gpu or record.machine])]
        row += [self.texts.place(record.contender), self.texts.place(record.format)]
        row += [self.cases.place(dict(record.case)), int(is_variant(record.contender)), page]
        row += [self._run(record), record.value, record.spread, record.repeats, record.error]
        work = [_plain(record.bytes), _plain(record.flops)]
        row.append(None if work == [None, None] else self.works.place(work))
        row.append(self.ceilings.place(dict(record.ceilings)) if record.ceilings else None)
        row += [record.clocks.get("sm"), record.power.get("draw")]
        return _trimmed([_plain(number) for number in row])

    def history(self, things: Sequence[Record], commits: list[str]) -> list[Any]:
        """Of each thing that several commits have: commits, values and verdicts."""
        signs = {"worse": 1, "better": -1}
        by_key: dict[Hashable, list[Record]] = {}
        for record in self.records:
            by_key.setdefault(record.key, []).append(record)
        found = []
        for thing, newest in enumerate(things):
            steps = steps_of(by_key[newest.key], commits)
            if len(steps) > 1:
                rows = [
                    _trimmed(
                        [
                            commits.index(step.commit),
                            _plain(step.value),
                            signs.get(step.verdict, 0),
                            round(step.worse_by, 5),
                            round(step.threshold, 5),
                            _plain(step.spread),
                        ]
                    )
                    for step in steps
                ]
                found.append([thing, rows])
        return found


def payload(records: Sequence[Record]) -> dict[str, Any]:
    """What the page needs, as JSON can say it.

    Args:
        records: in any order; what is shown does not depend on it.

    Raises:
        ValueError: there are none.
    """
    if not records:
        raise ValueError("there are no records to show")
    ordered = sorted(records, key=_order)
    builder = _Builder(ordered)
    newest = latest(ordered)
    things = [builder.thing(record) for record in newest]
    commits = commits_of(ordered)
    gpus = sorted({record.gpu for record in ordered if record.kind == "gpu"})
    return {
        "count": len(ordered),
        "texts": builder.texts.values,
        "cases": builder.cases.values,
        "runs": builder.runs.values,
        "measures": builder.measures.values,
        "works": builder.works.values,
        "ceilings": builder.ceilings.values,
        "commits": list(commits.items()),
        "kernels": builder.kernels.values,
        "things": things,
        "history": builder.history(newest, list(commits)),
        "roofs": {gpu: list(map(dataclasses.astuple, roofs_of(gpu, ordered))) for gpu in gpus},
    }


def _order(record: Record) -> tuple[Any, ...]:
    """By suite and case, numbers as numbers, then by time."""
    case = [
        (name, isinstance(value, str), 0 if isinstance(value, str) else value, str(value))
        for name, value in record.case.items()
    ]
    last = (record.value, record.commit, json.dumps(dataclasses.asdict(record), sort_keys=True))
    return (record.kind, record.suite, sorted(case), record.key[:8], record.time, *last)
