"""The committed counts: renewing them on purpose, and comparing with them in CI."""

import argparse
from pathlib import Path

from perf import compare

from .records import RESULTS, Record, append, latest, read, write
from .run import Choice, measure_suite, print_report
from .suites.base import Options

#: How to accept other counts.
RENEW = "python -m perf run counts --renew"


def _measured(options: Options, choice: Choice, out: Path | None) -> tuple[list[Record], int]:
    records: list[Record] = []

    def keep(found: list[Record]) -> None:
        records.extend(found)
        append(out, found)

    return records, print_report(measure_suite("counts", options, choice, keep))


def check(records: list[Record], path: Path, partial: bool) -> int:
    """1 if counts are worse than a committed file's, or gone unless the run is ``partial``."""
    changes = compare.compare(read(path), records)
    if partial:
        changes = [change for change in changes if change.verdict != "gone"]
    compare.print_changes(changes, ("worse", "better", "gone"))
    bad = [change for change in changes if change.verdict in ("worse", "gone")]
    if bad:
        print(f"{len(bad)} counts are worse than, or missing from, {path.name}.")
        print(f"If that is meant, renew the record and say why in the commit: {RENEW}")
    return int(bool(bad))


def renewed(old: list[Record], new: list[Record]) -> list[Record]:
    """What a file has after a run: counts that changed beside the older ones, for the history.

    What this package no longer counts is gone; peers may not be here, so theirs stay.
    """
    counted = {record.key for record in new}
    known = {(record.key, record.value, record.bytes, record.flops) for record in latest(old)}
    kept = [r for r in old if r.key in counted or not r.contender.startswith("ours")]
    return kept + [r for r in new if (r.key, r.value, r.bytes, r.flops) not in known]


def main(arguments: argparse.Namespace, options: Options, choice: Choice) -> int:
    """``perf run counts`` with ``--renew`` or ``--check``.

    Raises:
        ValueError: another suite, or a renewal of a part.
    """
    if arguments.suites != ["counts"]:
        raise ValueError("--renew and --check are for the suite counts")
    path = RESULTS / f"counts-{'readme' if options.full else 'ci'}.jsonl"
    partial = bool(options.backend or choice.case or choice.contender or choice.format)
    if arguments.renew and partial:
        raise ValueError("--renew replaces the whole record: leave filters away")
    if arguments.renew and options.full and not options.peers:
        raise ValueError("--renew --full keeps peers that run from --path: do not leave them away")
    records, status = _measured(options, choice, arguments.out)
    if status:
        return status
    if arguments.check:
        return check(records, path, partial)
    write(path, renewed(read(path) if path.exists() else [], records))
    print(f"{path}: {len(records)} records")
    return 0
