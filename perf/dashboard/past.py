"""Records that the repository had and has no more: counts are replaced when they are renewed."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from perf.records import Record, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["past"]


def _git(folder: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True)
    if done.returncode:
        raise ValueError(f"git {arguments[0]} in {folder}: {done.stderr.decode().strip()}")
    return done.stdout


def _identity(record: Record) -> tuple[object, ...]:
    """What tells two measurements apart."""
    return (*record.key, record.commit, record.time, record.value)


def past(paths: Iterable[Path], present: Sequence[Record]) -> list[Record]:
    """The records of all older versions of files, oldest first, less those that are present.

    Versions that this package cannot read, being of another schema, are passed over and counted.

    Args:
        paths: files or folders in a git repository.
        present: what is not wanted.

    Raises:
        ValueError: git cannot say.
    """
    known = {_identity(record): record for record in present}
    unread = 0
    for path in paths:
        folder = path if path.is_dir() else path.parent
        pattern = "*.jsonl*" if path.is_dir() else path.name
        # Of a file that a commit removes there is no version.
        log = ["log", "--reverse", "--diff-filter=d", "--format=>%H", "--name-only", "--", pattern]
        commit = ""
        for line in _git(folder, *log).decode().split():
            if line.startswith(">"):
                commit = line[1:]
                continue
            with tempfile.TemporaryDirectory() as scratch:
                copy = Path(scratch, Path(line).name)
                copy.write_bytes(_git(folder, "show", f"{commit}:{line}"))
                try:
                    for record in read(copy):
                        known.setdefault(_identity(record), record)
                except ValueError:
                    unread += 1
    if unread:
        print(f"passed over {unread} versions of files that are no records of this schema")
    return list(known.values())[len({_identity(record) for record in present}) :]
