"""``perf docs``: write the measured tables and the chart from the committed records.

Each table of docs/performance.md lies between ``<!-- perf table: NAME -->`` and
``<!-- end of perf table -->``. A cell shows the newest record that matches, or the median of three
or more runs of one commit, with half of the spread. A line below the table names the runs.
``--check`` fails if the page or the chart differs.
"""

import argparse
import collections
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from .records import FAILURE, RESULTS, Record, load, pool_runs
from .tables import TABLES, Cell, Column, Row, Table, matches

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
_BLOCK = re.compile(
    r"(?P<start><!-- perf table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)"
    r"(?P<end><!-- end of perf table -->)",
    re.DOTALL,
)


def newest(records: Sequence[Record], conditions: dict[str, object]) -> Record | None:
    """Return the newest record that matches, None if there is none.

    Several runs of one commit are combined by ``pool_runs``.
    """
    matching = [record for record in records if matches(record, conditions)]
    record = max(matching, key=lambda record: record.time, default=None)
    return record and pool_runs([run for run in matching if run.key == record.key])


#: Marks of cells whose records come from other runs than most cells of the table.
_MARKS = ("", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹")


def _run_of(record: Record) -> tuple[str, str]:
    """Return commit and day of a record's run."""
    commit = record.commit.removesuffix("-dirty")[:7]
    text = f"commit {commit}" if commit else "unknown commit"
    return text + ", from notes" * (record.origin == "noted"), record.time[:10]


class _Renderer:
    """Renders the rows of one table, and collects the records that it uses."""

    def __init__(self, table: Table, records: Sequence[Record]) -> None:
        self._table = table
        self._records = [r for r in records if matches(r, table.conditions)]
        self.used: list[Record] = []

    def _number(self, row: Row, cell: Cell) -> tuple[float, float | None] | None:
        """Return the number of a cell and half of its spread; None if there is no record."""
        record = newest(self._records, {**row.conditions, **cell.conditions})
        if record is None:
            return None
        self.used.append(record)
        if cell.show == "value":
            half = None if record.spread is None else record.spread / 2 * cell.scale
            return record.value * cell.scale, half
        shown = record.flops if cell.show == "flops" else record.share(cell.show)
        return None if shown is None else (shown * cell.scale, None)

    def _cell(self, row: Row, column: Column) -> tuple[str, Record | None]:
        """Return the text of a cell and its record; empty and None if there is no record."""
        conditions = {**row.conditions, **column.cell.conditions}
        failure = newest(self._records, {**conditions, "quantity": FAILURE})
        success = newest(self._records, conditions)
        if failure is not None and (success is None or success.time < failure.time):
            return "failed", failure
        number = self._number(row, column.cell)
        if number is None:
            return "", None
        record, (value, half) = self.used[-1], number
        for cell, is_sum in ((column.plus, True), (column.over, False)):
            operand = None if cell is None else self._number(row, cell)
            if operand is not None:
                value = value + operand[0] if is_sum else value / operand[0]
        if column.cell.show == "copy":
            return f"{100 * value:.0f} %", record
        digits = column.cell.digits
        text = f"{value:.{digits}f}"
        if half:
            text += f" ± {half:.{digits}f}" if half >= 10**-digits else f" ± {half:.1g}"
        return text + column.cell.unit, record

    def lines(self) -> tuple[list[str], str]:
        """Return the lines of the table, without empty rows and columns, and a legend of its runs.

        Both are empty if the table has no number.
        """
        table = [[self._cell(row, c) for c in self._table.columns] for row in self._table.rows]
        runs = collections.Counter(_run_of(r) for cells in table for _, r in cells if r is not None)
        if not runs:
            return [], ""
        is_filled = [any(text for text, _ in cells) for cells in zip(*table, strict=True)]
        heads = [
            *self._table.heads,
            *(c.title for c, filled in zip(self._table.columns, is_filled, strict=True) if filled),
        ]
        marks = {run: mark for (run, _), mark in zip(runs.most_common(), _MARKS, strict=False)}
        lines = [
            f"| {' | '.join(heads)} |",
            f"|{'---|' * len(self._table.heads)}{'---:|' * sum(is_filled)}",
        ]
        for row, cells in zip(self._table.rows, table, strict=True):
            texts = [
                text + ("" if r is None else marks[_run_of(r)])
                for text, r in itertools.compress(cells, is_filled)
            ]
            if any(texts):
                lines.append(f"| {' | '.join((*row.titles, *texts))} |")
        legend = (f"{mark}{day} ({commit})" for (commit, day), mark in marks.items())
        return lines, f"Measured {'; '.join(legend)}."


def _origin(used: Sequence[Record]) -> list[str]:
    """Return sentences about the origin of the records of a table."""
    kinds = {record.kind for record in used}
    if len(kinds) > 1:
        raise ValueError(f"a table mixes {' and '.join(sorted(kinds))}")
    return ["Counts do not vary."] if kinds == {"emulator"} else _statistics(used)


def _statistics(used: Sequence[Record]) -> list[str]:
    """Return sentences about machine, protocol, repeats and spread of times."""
    devices = sorted({record.gpu or record.machine for record in used} - {""})
    protocols = sorted({record.protocol for record in used} - {""})
    repeats = sorted({record.repeats for record in used if record.repeats})
    text = f"{', '.join(devices)}; {'; '.join(protocols)}"
    if repeats and repeats != [1]:
        count = str(repeats[0]) if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
        text += f"; medians of {count}"
    sentences = [f"{text}."]
    with_spread = [record for record in used if record.spread is not None]
    relative = [50 * r.spread / abs(r.value) for r in with_spread if r.spread and r.value]
    if relative:
        sentences.append(f"± is half of the range of the repeats, at most {max(relative):.1f} %.")
    if len(with_spread) < len(used):
        sentences.append(f"The spread of {'some' if with_spread else 'these'} records is unknown.")
    return sentences


def render(table: Table, records: Sequence[Record]) -> str:
    """Return a table and the sentences below it, as Markdown."""
    renderer = _Renderer(table, records)
    lines, runs = renderer.lines()
    if not lines:
        return "Not measured yet.\n"
    below = " ".join(filter(None, (table.summary, *_origin(renderer.used), runs)))
    return "\n".join([*lines, "", below, ""])


def replace_tables(text: str, records: Sequence[Record]) -> str:
    """Return the page with its tables written anew.

    Raises:
        ValueError: Its tables are not those of ``TABLES``.
    """
    names = [block["name"] for block in _BLOCK.finditer(text)]
    if sorted(names) != sorted(TABLES):
        lacking = sorted(TABLES.keys() - set(names)) or "none"
        raise ValueError(f"the page has the tables {names}; it lacks {lacking}")

    def rewritten(block: re.Match[str]) -> str:
        return block["start"] + render(TABLES[block["name"]], records) + block["end"]

    return _BLOCK.sub(rewritten, text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``perf docs``."""
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="1 if the page differs")
    action.add_argument("--write", action="store_true", help="write the tables")


def main(arguments: argparse.Namespace) -> int:
    """Write or check the tables, and return 1 if ``--check`` finds a difference."""
    from . import chart  # It imports this module.

    text, records = PAGE.read_text(encoding="utf-8"), load(RESULTS)
    wanted = replace_tables(text, records)
    if arguments.write:
        PAGE.write_text(wanted, encoding="utf-8")
        if not chart.CHART.exists() or chart.stale(records):
            chart.draw(records)
        return 0
    has_stale_chart = chart.stale(records)
    if text == wanted and not has_stale_chart:
        return 0
    changed = [
        old["name"]
        for old, new in zip(_BLOCK.finditer(text), _BLOCK.finditer(wanted), strict=True)
        if old["body"] != new["body"]
    ]
    if has_stale_chart:
        changed.append(chart.CHART.name)
    print(f"{', '.join(changed)}: not the records of perf/results")
    print("python -m perf docs --write")
    return 1
