"""``perf readme``: the measured tables of the README, written from the committed records.

Each lies between ``<!-- perf table: NAME -->`` and ``<!-- end of perf table -->``. A cell shows the
newest record of what it asks for, with half of its spread; below a table stands where its records
are from. ``--check`` fails if the README says anything else.
"""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import TYPE_CHECKING

from perf.records import RESULTS, Record, load
from perf.tables import TABLES, Cell, Column, Row, Table, matches

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["README", "add_arguments", "main", "render", "replace_tables"]

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(
    r"(?P<start><!-- perf table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)"
    r"(?P<end><!-- end of perf table -->)",
    re.DOTALL,
)


def newest(records: Sequence[Record], where: dict[str, object]) -> Record | None:
    """The newest record that has these fields and entries of its case; None if there is none."""
    found = [record for record in records if matches(record, where)]
    return max(found, key=lambda record: record.time, default=None)


class _Renderer:
    """Renders one table, and notes the records that it shows."""

    def __init__(self, table: Table, records: Sequence[Record]) -> None:
        self._table = table
        self._records = [r for r in records if matches(r, table.where)]
        self.used: list[Record] = []

    def _find(self, row: Row, cell: Cell) -> Record | None:
        found = newest(self._records, {**row.where, **cell.where})
        if found is not None:
            self.used.append(found)
        return found

    def _number(self, row: Row, cell: Cell) -> tuple[float, float | None] | None:
        """Value and half of its spread, as the cell shows them."""
        record = self._find(row, cell)
        if record is None:
            return None
        if cell.show == "value":
            half = None if record.spread is None else record.spread / 2 * cell.scale
            return record.value * cell.scale, half
        shown = record.flops if cell.show == "flops" else record.share(cell.show)
        return None if shown is None else (shown * cell.scale, None)

    def cell(self, row: Row, column: Column) -> str:
        """The text of a cell; empty where there is no record."""
        found = self._number(row, column.cell)
        if found is None:
            return ""
        value, half = found
        for other, is_sum in ((column.plus, True), (column.over, False)):
            second = None if other is None else self._number(row, other)
            if second is not None:
                value = value + second[0] if is_sum else value / second[0]
        if column.cell.show == "copy":
            return f"{100 * value:.0f} %"
        text = f"{value:.{column.cell.digits}f}"
        if half:
            digits = (
                column.cell.digits if half >= 10**-column.cell.digits else column.cell.digits + 1
            )
            text += f" ± {half:.{digits}f}"
        return text + column.cell.unit

    def rows(self) -> list[str]:
        """The rows of the table that have a number.

        Raises:
            ValueError: none has.
        """
        lines = []
        for row in self._table.rows:
            cells = [self.cell(row, column) for column in self._table.columns]
            if any(cells):
                lines.append(f"| {' | '.join((*row.titles, *cells))} |")
        if not lines:
            raise ValueError(f"table {self._table.name}: there is no record of any of its cells")
        return lines


def _origin(used: Sequence[Record]) -> str:
    """What the records of a table say of themselves, in sentences."""
    kinds = {record.kind for record in used}
    if len(kinds) > 1:
        raise ValueError(f"a table mixes {' and '.join(sorted(kinds))}")
    sentences = []
    if kinds == {"emulator"}:
        sentences.append("Counts do not vary.")
    else:
        sentences += _statistics(used)
    runs: dict[str, set[str]] = collections.defaultdict(set)
    for record in used:
        noted = ", noted" if record.origin == "noted" else ""
        runs[record.commit.removesuffix("-dirty")[:7] + noted].add(record.time[:10])
    commits = (f"{commit} ({', '.join(sorted(days))})" for commit, days in sorted(runs.items()))
    sentences.append(f"Records of {'; '.join(commits)}.")
    return " ".join(sentences)


def _statistics(used: Sequence[Record]) -> list[str]:
    where = sorted({record.gpu or record.machine for record in used} - {""})
    protocols = sorted({record.protocol for record in used} - {""})
    repeats = sorted({record.repeats for record in used if record.repeats})
    text = f"{', '.join(where)}; {'; '.join(protocols)}"
    if repeats:
        few = str(repeats[0]) if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
        text += f"; medians of {few}"
    sentences = [f"{text}."]
    spreads = [100 * r.spread / 2 / abs(r.value) for r in used if r.spread is not None and r.value]
    if spreads:
        sentences.append(f"± is half of largest minus smallest, at most {max(spreads):.1f} %.")
    if len(spreads) < len(used):
        some = "some" if spreads else "these"
        sentences.append(f"Of {some} records the spread was not kept.")
    return sentences


def render(table: Table, records: Sequence[Record]) -> str:
    """A table in Markdown, with where its numbers are from."""
    renderer = _Renderer(table, records)
    rows = renderer.rows()
    heads = (*table.heads, *(column.title for column in table.columns))
    rule = "---|" * len(table.heads) + "---:|" * len(table.columns)
    origin = _origin(renderer.used)
    summary = f"{table.summary} {origin}" if table.summary else origin
    return "\n".join([f"| {' | '.join(heads)} |", f"|{rule}", *rows, "", summary, ""])


def replace_tables(text: str, records: Sequence[Record]) -> str:
    """The README with its tables written anew.

    Raises:
        ValueError: it has a table that ``TABLES`` does not, or lacks one.
    """
    names = [found["name"] for found in _BLOCK.finditer(text)]
    if sorted(names) != sorted(TABLES):
        missing = sorted(TABLES.keys() - set(names)) or "none"
        raise ValueError(f"the README has the tables {names}; it lacks {missing}")

    def body(found: re.Match[str]) -> str:
        return found["start"] + render(TABLES[found["name"]], records) + found["end"]

    return _BLOCK.sub(body, text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``perf readme``."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--check", action="store_true", help="1 if the README says anything else")
    which.add_argument("--write", action="store_true", help="write the tables")


def main(arguments: argparse.Namespace) -> int:
    """Check or write the tables."""
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
