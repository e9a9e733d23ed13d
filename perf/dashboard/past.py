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


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise ValueError(f"git {arguments[0]} in {folder}: {done.stderr.strip()}")
    return done.stdout


def _identity(record: Record) -> tuple[object, ...]:
    """What tells two measurements apart."""
    return (*record.key, record.commit, record.time, record.value)


def past(paths: Iterable[Path], present: Sequence[Record]) -> list[Record]:
    """The records of all older versions of files, oldest first, less those that are present.

    A version that this package cannot read, being of another schema, is passed over and said.

    Args:
        paths: files or folders in a git repository.
        present: what is not wanted.

    Raises:
        ValueError: git cannot say.
    """
    known = {_identity(record) for record in present}
    found: list[Record] = []
    for path in paths:
        folder = path if path.is_dir() else path.parent
        pattern = "*.jsonl" if path.is_dir() else path.name
        log = _git(folder, "log", "--reverse", "--format=>%H", "--name-only", "--", pattern)
        commit = ""
        for line in filter(None, log.splitlines()):
            if line.startswith(">"):
                commit = line[1:]
                continue
            for record in _version(folder, commit, line):
                if _identity(record) not in known:
                    known.add(_identity(record))
                    found.append(record)
    return found


def _version(folder: Path, commit: str, name: str) -> list[Record]:
    """The records of a file in a commit; none if it was removed there."""
    if not _git(folder, "ls-tree", "--full-tree", commit, name):
        return []
    text = _git(folder, "show", f"{commit}:{name}")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, Path(name).name)
        copy.write_text(text, encoding="utf-8")
        try:
            return read(copy)
        except ValueError as error:
            print(f"passed over {name} of {commit[:12]}: {error}")
            return []
