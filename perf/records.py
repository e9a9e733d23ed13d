"""Records of measurements, in memory and on disk.

A ``Record`` is one number with everything that it depends on. A file holds JSON lines, one record
per line, in the order of the fields of ``Record`` and without the fields that have their default
value. ``cat`` joins files, and ``git diff`` shows which records changed.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .roofs import impossible
from .traffic import work_of

#: Version of the file format that is written. Older versions are read, too: version 2 calls the
#: field ``quantity`` ``what``; version 1 does as well, and its work of a layer's pass was that of
#: the case instead of the contender, so it is derived again. Any other version is refused.
SCHEMA = 3
_OLD_SCHEMAS = (1, 2)
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


@dataclasses.dataclass(frozen=True)
class Record:
    """One measured number.

    Attributes:
        suite: which suite measured it.
        case: what was done: shapes, routing, pass. Contenders with equal cases compete.
        contender: who did it: ``"ours"``, ``"torch"``, or a variant: ``"ours, tile 256x64"``.
        format: the text of a format, both operands as ``"nvfp4:row_scaled x nvfp4"``, the name
            of a recipe, or ``"bfloat16"``.
        quantity: ``"time"``, ``"warp instructions"``, ``"rate"``.
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
    quantity: str
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
            raise ValueError(
                f"value must be a finite number, got {self.value!r} for {self.quantity}"
            )
        for name in ("suite", "contender", "quantity", "unit"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty")
        for name, entry in self.case.items():
            if not isinstance(entry, (str, int, float, bool)):
                raise TypeError(f"case[{name!r}] must be text or a number, got {entry!r}")

    @property
    def key(self) -> tuple[Any, ...]:
        """What two measurements of one thing have in common, on whatever commit and day."""
        case = tuple(sorted((name, str(value)) for name, value in self.case.items()))
        names = (self.suite, self.contender, self.format, self.quantity, self.unit)
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
            raise ValueError(f"{self.quantity} in {self.unit} is no time")
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


def _line(record: Record) -> str:
    return json.dumps(_plain(record), ensure_ascii=False) + "\n"


def write(path: Path, records: Iterable[Record]) -> None:
    """Write a file of records, one record per line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(map(_line, records))


def _upgraded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record of any readable version in the form of ``SCHEMA``."""
    version = row.get("schema")
    if version not in _OLD_SCHEMAS:
        return dict(row)
    fields = {("quantity" if name == "what" else name): value for name, value in row.items()}
    fields["schema"] = SCHEMA
    if version == 1 and is_whole(fields["quantity"], fields["unit"]):
        work = work_of(fields)
        if work is not None:
            fields |= {"bytes": work.bytes, "flops": work.flops}
    return fields


def is_whole(quantity: str, unit: str) -> bool:
    """Tell whether a quantity is of all the work of a contender: a time or a count, and no part of
    the time.
    """
    return quantity in _WHOLE_TIMES or (unit == "1" and quantity != FAILURE)


def read(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        ValueError: a line is no record; it says which.
    """
    records: list[Record] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    records.append(Record(**_upgraded(json.loads(line))))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return records


def load(*paths: Path) -> list[Record]:
    """The records of files, and of the ``*.jsonl`` files in folders.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: a record is faster than its GPU can be, see ``perf.roofs``; it says which.
    """
    records = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there are no records at {path}")
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            for record in read(file):
                if reason := impossible(record):
                    raise ValueError(
                        f"{file}: {record.title} {record.quantity} {record.value:g} {record.unit}: {reason}"
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
            file.writelines(map(_line, records))
