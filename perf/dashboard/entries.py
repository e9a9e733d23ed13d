"""Records as the page reads them: an entry per ``Record.key``, with its history."""

import dataclasses
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..compare import compare
from ..records import Record, group_by_key, pool_runs
from ..roofs import published

_ROOFS = {"copy": "memory", "bfloat16": "bf16", "fp8": "FP8", "fp4": "FP4"}
_TIMES = ("us", "ms", "s")
#: Fields of a record that the page shows as they are.
_SHOWN = (
    "suite contender format quantity unit protocol kind value spread repeats error bytes flops time"
)


def roofs_of(gpu: str, records: Iterable[Record]) -> list[tuple[str, str, float, bool]]:
    """Return the roofs of a GPU, memory first.

    Returns:
        Kind, name and rate of each roof, and True if a run measured it. A measured rate is the
        highest one; other rates come from the data sheet.
    """
    measured: dict[str, float] = {}
    for record in records:
        if record.gpu == gpu and record.kind == "gpu":
            for kind, rate in record.ceilings.items():
                measured[kind] = max(rate, measured.get(kind, 0.0))
    roofs = published(gpu) | measured
    known = {kind: name for kind, name in _ROOFS.items() if kind in roofs}
    return [(kind, name, roofs[kind], kind in measured) for kind, name in known.items()]


def kernel_of(record: Record) -> str:
    """Return the name of this package's kernel that a record measures.

    It is empty for peers, layers and host times.
    """
    case = record.case
    words: list[Any] = []
    if record.contender.startswith("ours") and record.suite in ("counts", "quantize", "gemm"):
        if "op" in case:
            amax = f"amax {case['amax']}" if "amax" in case else ""
            words = [f"{case['op']} {record.format}".strip(), case.get("directions"), amax]
        elif "product" in case:
            prepacked = "prepacked" * ("prepacked" in record.contender.split(", "))
            words = [f"gemm {record.format}", case["product"], prepacked]
    return ", ".join(filter(None, words))


def commit_name(commit: str) -> str:
    """Return a commit as the page shows it: records have longer and shorter ids of one commit."""
    stem, dirty, _ = commit.partition("-dirty")
    return stem[:7] + dirty if commit else "unknown"


def commits_of(records: Iterable[Record]) -> dict[str, str]:
    """Return the time of the first measurement by commit, in the order of these times."""
    start: dict[str, str] = {}
    for record in records:
        name = commit_name(record.commit)
        start[name] = min(record.time, start.get(name, record.time))
    return dict(sorted(start.items(), key=lambda item: (item[1], item[0])))


def history_of(records: Iterable[Record], commits: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the history of records with one key, with the verdicts of ``perf compare``.

    Args:
        records: Records with equal keys.
        commits: Times by commit, in order.

    Returns:
        A step per commit: its name and time, the median of its runs, the verdict, the relative
        difference (positive if worse), the noise, and the spread of its newest run.
    """
    runs_of: dict[str, list[Record]] = {}
    for record in records:
        name = commit_name(record.commit)
        runs_of.setdefault(name, []).append(dataclasses.replace(record, commit=name))
    steps: list[dict[str, Any]] = []
    before: list[Record] = []
    for name, time in commits.items():
        if name in runs_of:
            # Comparing the first commit with itself gives its median.
            (change,) = compare(before or runs_of[name], runs_of[name])
            worse_by = round(change.worse_by, 5) if math.isfinite(change.worse_by) else 1e9
            step = {
                "commit": name,
                "time": time,
                "value": change.new,
                "verdict": change.verdict,
                "worse_by": worse_by,
            }
            steps.append(
                step | {"noise": round(change.threshold, 5), "spread": change.record.spread}
            )
            before = runs_of[name]
    return steps


def _case_id(case: Mapping[str, Any]) -> str:
    """Return the name of a case in URLs. New records do not change it."""
    return f"{zlib.crc32(json.dumps(dict(case), sort_keys=True).encode()):08x}"


def _environment(record: Record) -> str:
    """Return versions, clocks, power and origin of a record in one line."""
    words = [f"{name} {version}" for name, version in record.versions.items()]
    words += [f"driver {record.driver}"] * bool(record.driver)
    words += [f"{record.clocks[n]:.0f} MHz {n}" for n in ("sm", "sm max") if n in record.clocks]
    words += [f"{record.power[n]:.0f} W {n}" for n in ("draw", "limit") if n in record.power]
    words += [f"seed {record.seed}"] * (record.seed is not None)
    words += [record.machine] * bool(record.gpu and record.machine)
    words += [record.origin] * (record.origin != "run")
    words += [record.note] * bool(record.note)
    return ", ".join(words)


def _entry(record: Record, history: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the newest record of a key and its history, as the page reads them."""
    entry: dict[str, Any] = {name: getattr(record, name) for name in _SHOWN.split()}
    entry |= {
        "ceilings": dict(record.ceilings),
        "device": record.gpu or record.machine,
        "case": dict(record.case),
        "kernel": kernel_of(record),
        "caseId": _case_id(record.case),
        "commit": commit_name(record.commit),
        "environment": _environment(record),
        # True for a setting that the op would choose itself, such as a tile.
        "variant": bool(re.match(r"ours,.*\d", record.contender)),
    }
    if record.unit in _TIMES:
        entry |= {"us": record.microseconds, "tbs": record.tbs, "tflops": record.tflops}
    if len(history) > 1:
        entry["history"] = history
    return entry


def _order(record: Record) -> tuple[Any, ...]:
    case = [(n, 0 if isinstance(v, str) else v, str(v)) for n, v in sorted(record.case.items())]
    return (record.kind, record.suite, case, record.key[:8], record.time, repr(record))


def payload(records: Sequence[Record], numerics: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the data of the page, as plain dicts and lists.

    Raises:
        ValueError: There are no records.
    """
    if not records:
        raise ValueError("there are no records to show")
    ordered = sorted(records, key=_order)
    commits = commits_of(ordered)
    entries = [
        _entry(pool_runs(runs), history_of(runs, commits))
        for runs in group_by_key(ordered).values()
    ]
    gpus = sorted({record.gpu for record in ordered if record.kind == "gpu"})
    roofs = {gpu: roofs_of(gpu, ordered) for gpu in gpus}
    return {"entries": entries, "roofs": roofs, "numerics": list(numerics)}
