"""``perf readme``: the measured tables of the README, written from the committed records.

Each lies between ``<!-- perf table: NAME -->`` and ``<!-- end of perf table -->``. A cell shows the
newest record of what it asks for, or the median of three or more runs of one commit, with half of
the spread; below a table stands where its records are from. ``--check`` fails if the README says
anything else.
"""

import argparse
import collections
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from .records import FAILURE, RESULTS, Record, load, pooled
from .tables import TABLES, Cell, Column, Row, Table, matches

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(
    r"(?P<start><!-- perf table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)"
    r"(?P<end><!-- end of perf table -->)",
    re.DOTALL,
)


def newest(records: Sequence[Record], where: dict[str, object]) -> Record | None:
    """The newest record that has these fields and entries of its case; None if there is none.

    If it is of several runs of a commit, they are ``pooled``.
    """
    found = [record for record in records if matches(record, where)]
    last = max(found, key=lambda record: record.time, default=None)
    return last and pooled([record for record in found if record.key == last.key])


#: Marks of cells whose records are not of the run that most cells of a table are of.
_MARKS = ("", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹")


def _run_of(record: Record) -> tuple[str, str]:
    commit = record.commit.removesuffix("-dirty")[:7] or "an unknown commit"
    return commit + ", noted" * (record.origin == "noted"), record.time[:10]


class _Renderer:
    def __init__(self, table: Table, records: Sequence[Record]) -> None:
        self._table = table
        self._records = [r for r in records if matches(r, table.where)]
        self.used: list[Record] = []

    def _number(self, row: Row, cell: Cell) -> tuple[float, float | None] | None:
        record = newest(self._records, {**row.where, **cell.where})
        if record is None:
            return None
        self.used.append(record)
        if cell.show == "value":
            half = None if record.spread is None else record.spread / 2 * cell.scale
            return record.value * cell.scale, half
        shown = record.flops if cell.show == "flops" else record.share(cell.show)
        return None if shown is None else (shown * cell.scale, None)

    def _cell(self, row: Row, column: Column) -> tuple[str, Record | None]:
        """The text of a cell, and the record that it is of; empty where there is none."""
        wanted = {**row.where, **column.cell.where}
        lost, last = (
            newest(self._records, {**wanted, **more}) for more in ({"quantity": FAILURE}, {})
        )
        if lost is not None and (last is None or last.time < lost.time):
            return "failed", lost
        found = self._number(row, column.cell)
        if found is None:
            return "", None
        record, (value, half) = self.used[-1], found
        for other, is_sum in ((column.plus, True), (column.over, False)):
            second = None if other is None else self._number(row, other)
            if second is not None:
                value = value + second[0] if is_sum else value / second[0]
        if column.cell.show == "copy":
            return f"{100 * value:.0f} %", record
        digits = column.cell.digits
        text = f"{value:.{digits}f}"
        if half:
            text += f" ± {half:.{digits}f}" if half >= 10**-digits else f" ± {half:.1g}"
        return text + column.cell.unit, record

    def lines(self) -> tuple[list[str], str]:
        """Head, rows and columns that have a number, if there are some, and which runs their marks
        mean.
        """
        table = [[self._cell(row, c) for c in self._table.columns] for row in self._table.rows]
        runs = collections.Counter(_run_of(r) for cells in table for _, r in cells if r is not None)
        if not runs:
            return [], ""
        is_there = [any(text for text, _ in cells) for cells in zip(*table, strict=True)]
        heads = [
            *self._table.heads,
            *(c.title for c, there in zip(self._table.columns, is_there, strict=True) if there),
        ]
        marks = {run: mark for (run, _), mark in zip(runs.most_common(), _MARKS, strict=False)}
        lines = [
            f"| {' | '.join(heads)} |",
            f"|{'---|' * len(self._table.heads)}{'---:|' * sum(is_there)}",
        ]
        for row, cells in zip(self._table.rows, table, strict=True):
            texts = [
                text + ("" if r is None else marks[_run_of(r)])
                for text, r in itertools.compress(cells, is_there)
            ]
            if any(texts):
                lines.append(f"| {' | '.join((*row.titles, *texts))} |")
        named = (f"{mark}{commit} ({day})" for (commit, day), mark in marks.items())
        return lines, f"Records of {'; '.join(named)}."


def _origin(used: Sequence[Record]) -> list[str]:
    kinds = {record.kind for record in used}
    if len(kinds) > 1:
        raise ValueError(f"a table mixes {' and '.join(sorted(kinds))}")
    return ["Counts do not vary."] if kinds == {"emulator"} else _statistics(used)


def _statistics(used: Sequence[Record]) -> list[str]:
    where = sorted({record.gpu or record.machine for record in used} - {""})
    protocols = sorted({record.protocol for record in used} - {""})
    repeats = sorted({record.repeats for record in used if record.repeats})
    text = f"{', '.join(where)}; {'; '.join(protocols)}"
    if repeats and repeats != [1]:
        few = str(repeats[0]) if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
        text += f"; medians of {few}"
    sentences = [f"{text}."]
    kept = [record for record in used if record.spread is not None]
    relative = [50 * r.spread / abs(r.value) for r in kept if r.spread and r.value]
    if relative:
        sentences.append(f"± is half of largest minus smallest, at most {max(relative):.1f} %.")
    if len(kept) < len(used):
        sentences.append(f"Of {'some' if kept else 'these'} records the spread was not kept.")
    return sentences


def render(table: Table, records: Sequence[Record]) -> str:
    renderer = _Renderer(table, records)
    lines, runs = renderer.lines()
    if not lines:
        return "Not measured yet.\n"
    below = " ".join(filter(None, (table.summary, *_origin(renderer.used), runs)))
    return "\n".join([*lines, "", below, ""])


def replace_tables(text: str, records: Sequence[Record]) -> str:
    """The README with its tables written anew.

    Raises:
        ValueError: it has a table that ``TABLES`` does not, or lacks one.
    """
    names = [found["name"] for found in _BLOCK.finditer(text)]
    if sorted(names) != sorted(TABLES):
        raise ValueError(
            f"the README has the tables {names}; it lacks {sorted(TABLES.keys() - set(names)) or 'none'}"
        )

    def body(found: re.Match[str]) -> str:
        return found["start"] + render(TABLES[found["name"]], records) + found["end"]

    return _BLOCK.sub(body, text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--check", action="store_true", help="1 if the README says anything else")
    which.add_argument("--write", action="store_true", help="write the tables")


def main(arguments: argparse.Namespace) -> int:
    text = README.read_text(encoding="utf-8")
    wanted = replace_tables(text, load(RESULTS))
    if arguments.write:
        README.write_text(wanted, encoding="utf-8")
        return 0
    if text == wanted:
        return 0
    changed = [
        old["name"]
        for old, new in zip(_BLOCK.finditer(text), _BLOCK.finditer(wanted), strict=True)
        if old["body"] != new["body"]
    ]
    print(f"the README's tables {', '.join(changed)} are not those of perf/results")
    print("python -m perf readme --write")
    return 1
