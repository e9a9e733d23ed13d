"""The one form of a measurement, in memory and on disk.

A ``Record`` is one number with everything that it depends on. A file holds JSON lines: records
without the fields that have their default, as a run appends them, and tables of many records,
``{"columns": {"suite": [...], "case.rows": [...]}}``, with null where a record has no such field,
which are smaller. ``cat`` joins files. A file whose name ends in ``.xz`` is compressed.
"""

import dataclasses
import json
import lzma
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from .roofs import impossible
from .traffic import work_of

#: Version of the form. Records of version 1 are read as well: there the work of a layer's pass was
#: that of its case. It is derived anew for the contender. A reader refuses any other version.
SCHEMA = 2
_OLD_SCHEMA = 1
#: What ran: a GPU, the reference backend on a CPU, or the emulator. They never share a table.
KINDS = ("gpu", "cpu", "emulator")
#: Where a number is from: ``perf run``; a record of the scripts before it; a text whose raw record
#: is gone.
ORIGINS = ("run", "converted", "noted")
#: What a record counts that says in its note why there is no number.
FAILURE = "failure"
#: Times of all the work of a call; a part of it has another name.
_WHOLE_TIMES = ("time", "eager time")
#: From as many runs of a commit on, they themselves say how much runs differ.
ENOUGH_RUNS = 3
#: The records of this repository.
RESULTS = Path(__file__).parent / "results"

_COLUMNS = "columns"


@dataclasses.dataclass(frozen=True)
class Record:
    """One measured number.

    Attributes:
        suite: which suite measured it.
        case: what was done: shapes, routing, pass. Contenders with equal cases compete.
        contender: who did it: ``"ours"``, ``"torch"``, or a variant: ``"ours, tile 256x64"``.
        format: the text of a format, both operands as ``"nvfp4:row_scaled x nvfp4"``, the name
            of a recipe, or ``"bfloat16"``.
        what: ``"time"``, ``"warp instructions"``, ``"rate"``.
        value: the number; of repeated measurements their median.
        unit: of value and spread; ``"1"`` for a count or a ratio.
        protocol: how it was measured, such as ``"sustained, L2-cold"``.
        spread: largest minus smallest of the ``repeats``; None if it was not kept.
        error: relative error that the check before the measurement found; 0 if the bits are
            equal, None if only a wrong result would have been noticed.
        bytes: least bytes that this contender moves: each input read once, in the form that the
            contender has it in, each output written once. What a pass of a layer makes for
            itself ``perf.traffic`` says.
        flops: useful operations; padding is none.
        ceilings: rates of the same run that nothing exceeds: ``"copy"`` and ``"read"`` in TB/s,
            ``"bfloat16"`` and ``"fp8"`` (dense products) in TFLOP/s.
        gpu: its name, or what is emulated.
        machine: the host's processor.
        clocks: MHz: ``"sm"`` and ``"memory"`` while it was measured, ``"sm max"``.
        power: watts: ``"draw"`` while it was measured, ``"limit"``.
        versions: of packages: torch, cuda, the CuTe DSL, and the contender's own.
        time: when, UTC, ISO 8601; a date alone where no more is known.
    """

    suite: str
    case: Mapping[str, Any]
    contender: str
    what: str
    value: float
    unit: str
    kind: str
    format: str = ""
    protocol: str = ""
    spread: float | None = None
    repeats: int | None = None
    error: float | None = None
    bytes: float | None = None
    flops: float | None = None
    ceilings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gpu: str = ""
    machine: str = ""
    clocks: Mapping[str, float] = dataclasses.field(default_factory=dict)
    power: Mapping[str, float] = dataclasses.field(default_factory=dict)
    driver: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    commit: str = ""
    seed: int | None = None
    time: str = ""
    origin: str = "run"
    note: str = ""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for name, allowed in (("kind", KINDS), ("origin", ORIGINS), ("schema", (SCHEMA,))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, allowed))}, got {getattr(self, name)!r}"
                )
        if isinstance(self.value, bool) or not math.isfinite(self.value):
            raise ValueError(f"value must be a finite number, got {self.value!r} for {self.what}")
        for name in ("suite", "contender", "what", "unit"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty")
        for name, entry in self.case.items():
            if not isinstance(entry, (str, int, float, bool)):
                raise TypeError(f"case[{name!r}] must be text or a number, got {entry!r}")

    @property
    def key(self) -> tuple[Any, ...]:
        """What two measurements of one thing have in common, on whatever commit and day."""
        case = tuple(sorted((name, str(value)) for name, value in self.case.items()))
        names = (self.suite, self.contender, self.format, self.what, self.unit)
        return (*names, self.kind, self.gpu or self.machine, self.protocol, case)

    @property
    def title(self) -> str:
        case = " ".join(f"{name}={value}" for name, value in self.case.items())
        return f"{self.suite} {case}: {self.contender} [{self.format}]"

    @property
    def is_count(self) -> bool:
        return self.kind == "emulator"

    @property
    def microseconds(self) -> float:
        """The value as time.

        Raises:
            ValueError: it is no time.
        """
        factors = {"us": 1.0, "ms": 1e3, "s": 1e6}
        if self.unit not in factors:
            raise ValueError(f"{self.what} in {self.unit} is no time")
        return self.value * factors[self.unit]

    @property
    def tbs(self) -> float | None:
        return self._rate(self.bytes)

    @property
    def tflops(self) -> float | None:
        return self._rate(self.flops)

    def _rate(self, work: float | None) -> float | None:
        time = self.microseconds
        return work / time * 1e-6 if work is not None and time else None

    def share(self, ceiling: str) -> float | None:
        """Fraction of a ceiling of the same run; None if it was not measured."""
        rate = self.tbs if ceiling in ("copy", "read") else self.tflops
        most = self.ceilings.get(ceiling)
        return None if rate is None or not most else rate / most


def _plain(record: Record) -> dict[str, Any]:
    """The fields that differ from their defaults, the case and the schema."""
    values = ((f, getattr(record, f.name)) for f in dataclasses.fields(Record))
    return {
        f.name: dict(value) if isinstance(value, Mapping) else value
        for f, value in values
        if f.name in ("case", "schema") or value not in (f.default, {})
    }


def merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields ``own`` over ``shared``; those that are objects are merged."""
    found = dict(shared)
    for name, value in own.items():
        found[name] = {**found.get(name, {}), **value} if isinstance(value, dict) else value
    return found


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n"


def _open(path: Path, mode: str) -> IO[str]:
    if path.suffix != ".xz":
        return path.open(mode, encoding="utf-8")
    opener: Any = lzma.open
    filters = (
        [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]
        if "w" in mode
        else None
    )
    return opener(path, mode, filters=filters, encoding="utf-8")


def _cells(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by name; of those that are objects each entry by itself."""
    return {
        f"{name}.{entry}" if entry else name: cell
        for name, value in plain.items()
        for entry, cell in (value.items() if isinstance(value, dict) else [("", value)])
    }


def _rows(columns: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for cells in zip(*columns.values(), strict=True):
        row: dict[str, Any] = {"case": {}}
        for name, cell in zip(columns, cells, strict=True):
            field, dot, entry = name.partition(".")
            if cell is not None:
                row = merged(row, {field: {entry: cell} if dot else cell})
        yield row


def write(path: Path, records: Iterable[Record]) -> None:
    """Write a file of records, one table of all."""
    rows = [_cells(_plain(record)) for record in records]
    names = dict.fromkeys(name for row in rows for name in row)
    with _open(path, "wt") as file:
        file.write(_text({_COLUMNS: {name: [row.get(name) for row in rows] for name in names}}))


def _upgraded(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record in the form of ``SCHEMA``."""
    if row.get("schema") != _OLD_SCHEMA:
        return row
    work = work_of(row) if is_whole(row["what"], row["unit"]) else None
    return {**row, "schema": SCHEMA} | (
        {} if work is None else {"bytes": work.bytes, "flops": work.flops}
    )


def is_whole(what: str, unit: str) -> bool:
    """Tell whether a quantity is of all the work of a contender: a time or a count, and no part of
    the time.
    """
    return what in _WHOLE_TIMES or (unit == "1" and what != FAILURE)


def read(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        ValueError: a line is no record; it says which.
    """
    records: list[Record] = []
    number = 0
    with _open(path, "rt") as file:
        try:
            for number, line in enumerate(file, 1):  # noqa: B007, it is in the message
                if line.strip():
                    value = json.loads(line)
                    rows = _rows(value[_COLUMNS]) if _COLUMNS in value else [value]
                    records += [Record(**_upgraded(row)) for row in rows]
        except (AttributeError, EOFError, KeyError, TypeError, ValueError, lzma.LZMAError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return records


def load(*paths: Path) -> list[Record]:
    """The records of files, and of the ``*.jsonl`` and ``*.jsonl.xz`` files in folders.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: a record is faster than its GPU can be, see ``perf.roofs``; it says which.
    """
    records = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there are no records at {path}")
        for file in sorted(path.rglob("*.jsonl*")) if path.is_dir() else [path]:
            for record in read(file):
                if reason := impossible(record):
                    raise ValueError(
                        f"{file}: {record.title} {record.what} {record.value:g} {record.unit}: {reason}"
                    )
                records.append(record)
    return records


def pooled(runs: Sequence[Record]) -> Record:
    """The last run of one thing; of three or more on its commit their median and their range."""
    newest = max(reversed(runs), key=lambda record: record.time)
    values = [record.value for record in runs if record.commit == newest.commit]
    if newest.is_count or not newest.commit or len(values) < ENOUGH_RUNS:
        return newest
    spread = round(max(values) - min(values), 6)
    return dataclasses.replace(
        newest, value=statistics.median(values), spread=spread, repeats=len(values)
    )


def by_key(records: Iterable[Record]) -> dict[tuple[Any, ...], list[Record]]:
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record)
    return found


def latest(records: Iterable[Record]) -> list[Record]:
    """Of each thing that was measured the last runs, ``pooled``, in the order of their first."""
    return list(map(pooled, by_key(records).values()))


def append(path: Path | None, records: Sequence[Record]) -> None:
    """Add records to a file, if there is to be one, as they come: a run that is cut short leaves
    what it has.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(_text(_plain(record)) for record in records)
