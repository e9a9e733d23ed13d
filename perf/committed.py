"""Committed counts: compare with them in CI, and renew them on purpose."""

import argparse
from pathlib import Path

from perf import compare

from .records import RESULTS, Record, append, latest, read, write
from .run import Selection, measure_suite, print_report, require_match
from .suites.base import Options

#: Command that accepts changed counts.
RENEW = "python -m perf run counts --renew"


def _measure(options: Options, selection: Selection, out: Path | None) -> tuple[list[Record], int]:
    """Run the suite ``counts`` and return its records and the exit status of the report.

    Raises:
        ValueError: The selection matches no case or no contender.
    """
    records: list[Record] = []

    def collect(measured: list[Record]) -> None:
        records.extend(measured)
        append(out, measured)

    report = measure_suite("counts", options, selection, collect)
    status = print_report(report)
    require_match(selection, [report])
    return records, status


def check(records: list[Record], path: Path, partial: bool) -> int:
    """Compare counts with a committed file.

    Returns:
        1 if a count got worse. Missing counts also give 1, unless the run is ``partial``.
    """
    changes = compare.compare(read(path), records)
    if partial:
        changes = [change for change in changes if change.verdict != "gone"]
    compare.print_changes(changes, ("worse", "better", "gone"))
    bad = [change for change in changes if change.verdict in ("worse", "gone")]
    if bad:
        print(f"{len(bad)} counts are worse than, or missing from, {path.name}.")
        print(f"If that is intended, renew the record and give the reason in the commit: {RENEW}")
    return int(bool(bad))


def renew(old: list[Record], new: list[Record]) -> list[Record]:
    """Return the records of a renewed file: changed counts are added to the older ones.

    Counts that this package no longer makes are removed. Counts of peers stay, since peers may not
    be installed here.
    """
    counted = {record.key for record in new}
    known = {(record.key, record.value, record.bytes, record.flops) for record in latest(old)}
    retained = [r for r in old if r.key in counted or not r.contender.startswith("ours")]
    return retained + [r for r in new if (r.key, r.value, r.bytes, r.flops) not in known]


def main(arguments: argparse.Namespace, options: Options, selection: Selection) -> int:
    """Run ``perf run counts`` with ``--renew`` or ``--check``.

    Raises:
        ValueError: Another suite is named, only a part would be renewed, or filters match nothing.
    """
    if arguments.suites != ["counts"]:
        raise ValueError("--renew and --check are for the suite counts")
    path = RESULTS / f"counts-{'readme' if options.full else 'ci'}.jsonl"
    partial = bool(options.backend or selection.case or selection.contender or selection.format)
    if arguments.renew and partial:
        raise ValueError("--renew replaces the whole record: leave out filters and --backend")
    if arguments.renew and options.full and not options.peers:
        raise ValueError("--renew --full also counts peers that run from --path: omit --no-peers")
    records, status = _measure(options, selection, arguments.out)
    if status:
        return status
    if arguments.check:
        return check(records, path, partial)
    write(path, renew(read(path) if path.exists() else [], records))
    print(f"{path}: {len(records)} records")
    return 0
