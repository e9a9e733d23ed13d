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

from .roofs import why_impossible
from .traffic import work_of

#: Version of the file format that is written. Older versions are read, too: version 2 calls the
#: field ``quantity`` ``what``; version 1 does as well, and its work of a layer's pass was that of
#: the case instead of the contender, so it is derived again. Any other version is refused.
SCHEMA = 3
_OLD_SCHEMAS = (1, 2)
#: Old names of contenders in records of all versions, and their new names.
_RENAMED_CONTENDERS = {"ours, weight kept": "ours, cached weight"}
#: Kinds of backends: a GPU, the reference backend on a CPU, the emulator. They never share a table.
KINDS = ("gpu", "cpu", "emulator")
#: Origins of a number: ``perf run``; a record converted from the scripts before it; a text whose
#: raw record is lost.
ORIGINS = ("run", "converted", "noted")
#: Quantity of a record that has no number; its note says why.
FAILURE = "failure"
#: Times that cover all the work of a call. A time of a part of the call has another name.
_TOTAL_TIMES = ("time", "eager time")
#: From this many runs of a commit on, the runs themselves show how much runs differ.
ENOUGH_RUNS = 3
#: The records of this repository.
RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Record:
    """One measured number.

    Attributes:
        suite: Name of the suite that measured it.
        case: Shapes, routing and pass. Contenders with equal cases compete.
        contender: ``"ours"``, ``"torch"``, or a variant such as ``"ours, tile 256x64"``.
        quantity: The measured quantity, such as ``"time"``, ``"warp instructions"`` or ``"rate"``.
        value: The number. It is the median of repeated measurements.
        unit: Unit of value and spread. Counts and ratios have ``"1"``.
        kind: One of ``KINDS``.
        format: Text of a format, both operands as ``"nvfp4:row_scaled x nvfp4"``, the name of a
            recipe, or ``"bfloat16"``.
        protocol: How it was measured, such as ``"sustained, L2-cold"``.
        spread: Largest minus smallest of the ``repeats``. None if that is unknown.
        repeats: Number of measurements.
        error: Relative error found by the check before the measurement. It is 0 if the bits are
            equal, and None if only a wrong result would have been noticed.
        bytes: Least bytes that this contender moves. Each input is read once, in the form that the
            contender gets, and each output is written once. ``perf.traffic`` defines the bytes of a
            layer's pass.
        flops: Useful operations, without padding.
        ceilings: Rates of the same run that nothing exceeds: ``"copy"`` and ``"read"`` in TB/s,
            ``"bfloat16"`` and ``"fp8"`` (dense products) in TFLOP/s.
        gpu: Name of the GPU, or of the emulated one.
        machine: Processor of the host.
        clocks: Clock rates in MHz: ``"sm max"``, and ``"sm"`` and ``"memory"`` during the
            measurement.
        power: Power in watts: ``"draw"`` during the measurement, and ``"limit"``.
        driver: Version of the GPU driver.
        versions: Versions of torch, cuda, the CuTe DSL, and the contender's packages.
        commit: Commit of this package. It ends in ``-dirty`` if the checkout had changes.
        seed: Seed of the random numbers.
        time: Start of the run in UTC, as ISO 8601. A date alone means that no more is known.
        origin: One of ``ORIGINS``.
        note: Remark of the contender, or source of the number.
        schema: Version of the file format.
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
            value = getattr(self, name)
            if value not in allowed:
                choices = ", ".join(map(str, allowed))
                raise ValueError(f"{name} must be one of {choices}, got {value!r}")
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
        """Identity of the measured thing: equal for its measurements on all commits and days."""
        case = tuple(sorted((name, str(value)) for name, value in self.case.items()))
        names = (self.suite, self.contender, self.format, self.quantity, self.unit)
        return (*names, self.kind, self.gpu or self.machine, self.protocol, case)

    @property
    def title(self) -> str:
        """Suite, case, contender and format in one line."""
        case = " ".join(f"{name}={value}" for name, value in self.case.items())
        return f"{self.suite} {case}: {self.contender} [{self.format}]"

    @property
    def is_count(self) -> bool:
        """True for a count of the emulator, which does not vary."""
        return self.kind == "emulator"

    @property
    def microseconds(self) -> float:
        """The value as time.

        Raises:
            ValueError: The unit is not a time.
        """
        factors = {"us": 1.0, "ms": 1e3, "s": 1e6}
        if self.unit not in factors:
            raise ValueError(f"{self.quantity} in {self.unit} is no time")
        return self.value * factors[self.unit]

    @property
    def tbs(self) -> float | None:
        """Rate of the least bytes in TB/s, or None if the bytes are unknown."""
        return self._rate(self.bytes)

    @property
    def tflops(self) -> float | None:
        """Rate of the useful operations in TFLOP/s, or None if they are unknown."""
        return self._rate(self.flops)

    def _rate(self, work: float | None) -> float | None:
        time = self.microseconds
        return work / time * 1e-6 if work is not None and time else None

    def share(self, ceiling: str) -> float | None:
        """Return the fraction of a ceiling of the same run, or None if it was not measured."""
        rate = self.tbs if ceiling in ("copy", "read") else self.tflops
        limit = self.ceilings.get(ceiling)
        return None if rate is None or not limit else rate / limit


def _changed_fields(record: Record) -> dict[str, Any]:
    """Return the fields that differ from their defaults, and always the case and the schema."""
    values = ((f, getattr(record, f.name)) for f in dataclasses.fields(Record))
    return {
        f.name: dict(value) if isinstance(value, Mapping) else value
        for f, value in values
        if f.name in ("case", "schema") or value not in (f.default, {})
    }


def merge_fields(shared: Mapping[str, Any], specific: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``shared`` updated with ``specific``; fields that are dicts are merged."""
    fields = dict(shared)
    for name, value in specific.items():
        fields[name] = {**fields.get(name, {}), **value} if isinstance(value, dict) else value
    return fields


def _line(record: Record) -> str:
    return json.dumps(_changed_fields(record), ensure_ascii=False) + "\n"


def write(path: Path, records: Iterable[Record]) -> None:
    """Write a file of records, one record per line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(map(_line, records))


def _upgrade(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record of any readable version in the form of ``SCHEMA``."""
    version, contender = row.get("schema"), row["contender"]
    row = {**row, "contender": _RENAMED_CONTENDERS.get(contender, contender)}
    if version not in _OLD_SCHEMAS:
        return row
    fields = {("quantity" if name == "what" else name): value for name, value in row.items()}
    fields["schema"] = SCHEMA
    if version == 1 and covers_all_work(fields["quantity"], fields["unit"]):
        work = work_of(fields)
        if work is not None:
            fields |= {"bytes": work.bytes, "flops": work.flops}
    return fields


def covers_all_work(quantity: str, unit: str) -> bool:
    """Return True for a time or count of all the work of a contender, not of a part of it."""
    return quantity in _TOTAL_TIMES or (unit == "1" and quantity != FAILURE)


def _parse_line(line: str, location: str) -> Record:
    try:
        return Record(**_upgrade(json.loads(line)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{location}: {error}") from error


def read(path: Path) -> list[Record]:
    """Return the records of a file.

    Raises:
        ValueError: A line is not a record. The message has the number of the line.
    """
    with path.open(encoding="utf-8") as file:
        return [
            _parse_line(line, f"{path}, line {number}")
            for number, line in enumerate(file, 1)
            if line.strip()
        ]


def load(*paths: Path) -> list[Record]:
    """Return the records of files, and of the ``*.jsonl`` files in folders.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: A record is faster than its GPU can be, see ``perf.roofs``. The message names
            the record.
    """
    records = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there are no records at {path}")
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            for record in read(file):
                if reason := why_impossible(record):
                    measured = f"{record.quantity} {record.value:g} {record.unit}"
                    raise ValueError(f"{file}: {record.title} {measured}: {reason}")
                records.append(record)
    return records


def pool_runs(runs: Sequence[Record]) -> Record:
    """Return the newest of several runs of one thing.

    If its commit has three or more runs, return their median and their range instead.
    """
    newest = max(reversed(runs), key=lambda record: record.time)
    values = [record.value for record in runs if record.commit == newest.commit]
    if newest.is_count or not newest.commit or len(values) < ENOUGH_RUNS:
        return newest
    spread = round(max(values) - min(values), 6)
    return dataclasses.replace(
        newest, value=statistics.median(values), spread=spread, repeats=len(values)
    )


def group_by_key(records: Iterable[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """Return lists of the records with equal ``key``, in the order of their first record."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(record.key, []).append(record)
    return groups


def latest(records: Iterable[Record]) -> list[Record]:
    """Return one record per ``key``: the newest runs, as ``pool_runs`` combines them."""
    return list(map(pool_runs, group_by_key(records).values()))


def append(path: Path | None, records: Sequence[Record]) -> None:
    """Append records to a file, if ``path`` is given.

    It is called after each task, so that a run that is cut short keeps its records.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(map(_line, records))
