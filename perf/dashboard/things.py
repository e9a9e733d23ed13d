"""The records as the page reads them: each thing measured, its newest record, its history."""

import dataclasses
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..compare import compare
from ..records import Record, by_key, pooled
from ..roofs import published

_ROOFS = {"copy": "memory", "bfloat16": "bf16", "fp8": "FP8", "fp4": "FP4"}
_TIMES = ("us", "ms", "s")
#: Fields of a record that the page shows as they are.
_SHOWN = (
    "suite contender format quantity unit protocol kind value spread repeats error bytes flops time"
)


def roofs_of(gpu: str, records: Iterable[Record]) -> list[tuple[str, str, float, bool]]:
    """The roofs of a GPU, memory first: kind, name, rate, and whether a run measured it.

    Of those that were measured the highest; the others are of its data sheet.
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
    """Name of the kernel of ours that a record measures; none of peers, of layers and of calls."""
    case, parts = record.case, []
    if record.contender.startswith("ours") and record.suite in ("counts", "quantize", "gemm"):
        if "op" in case:
            amax = f"amax {case['amax']}" if "amax" in case else ""
            parts = [f"{case['op']} {record.format}".strip(), case.get("directions"), amax]
        elif "product" in case:
            prepacked = "prepacked" * ("prepacked" in record.contender.split(", "))
            parts = [f"gemm {record.format}", case["product"], prepacked]
    return ", ".join(filter(None, parts))


def commit_name(commit: str) -> str:
    """A commit as the page shows it; records have longer and shorter names of one."""
    stem, dirty, _ = commit.partition("-dirty")
    return stem[:7] + dirty if commit else "unknown"


def commits_of(records: Iterable[Record]) -> dict[str, str]:
    """The commits by name, in the order of their first measurement, with its time."""
    first: dict[str, str] = {}
    for record in records:
        name = commit_name(record.commit)
        first[name] = min(record.time, first.get(name, record.time))
    return dict(sorted(first.items(), key=lambda item: (item[1], item[0])))


def history_of(records: Iterable[Record], commits: Mapping[str, str]) -> list[dict[str, Any]]:
    """What became of the one thing of these records, by ``perf compare``, over named commits.

    Returns:
        Of each commit that has it: its name and time, the median of its runs, the verdict, the
        relative difference (positive if worse), the noise, and the spread of its newest run.
    """
    by_commit: dict[str, list[Record]] = {}
    for record in records:
        name = commit_name(record.commit)
        by_commit.setdefault(name, []).append(dataclasses.replace(record, commit=name))
    steps: list[dict[str, Any]] = []
    before: list[Record] = []
    for name, time in commits.items():
        if name in by_commit:
            # Compared with itself, the first commit gives its median.
            (change,) = compare(before or by_commit[name], by_commit[name])
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
            before = by_commit[name]
    return steps


def _case_id(case: Mapping[str, Any]) -> str:
    """Its name in addresses, which new records do not change."""
    return f"{zlib.crc32(json.dumps(dict(case), sort_keys=True).encode()):08x}"


def _made_with(record: Record) -> str:
    parts = [f"{name} {version}" for name, version in record.versions.items()]
    parts += [f"driver {record.driver}"] * bool(record.driver)
    parts += [f"{record.clocks[n]:.0f} MHz {n}" for n in ("sm", "sm max") if n in record.clocks]
    parts += [f"{record.power[n]:.0f} W {n}" for n in ("draw", "limit") if n in record.power]
    parts += [f"seed {record.seed}"] * (record.seed is not None)
    parts += [record.machine] * bool(record.gpu and record.machine)
    parts += [record.origin] * (record.origin != "run")
    parts += [record.note] * bool(record.note)
    return ", ".join(parts)


def _thing(record: Record, history: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(record, name) for name in _SHOWN.split()}
    found |= {
        "ceilings": dict(record.ceilings),
        "place": record.gpu or record.machine,
        "case": dict(record.case),
        "kernel": kernel_of(record),
        "caseId": _case_id(record.case),
        "commit": commit_name(record.commit),
        "with": _made_with(record),
        # Ours with a setting that the op would choose itself, such as a tile.
        "variant": bool(re.match(r"ours,.*\d", record.contender)),
    }
    if record.unit in _TIMES:
        found |= {"us": record.microseconds, "tbs": record.tbs, "tflops": record.tflops}
    if len(history) > 1:
        found["history"] = history
    return found


def _order(record: Record) -> tuple[Any, ...]:
    case = [(n, 0 if isinstance(v, str) else v, str(v)) for n, v in sorted(record.case.items())]
    return (record.kind, record.suite, case, record.key[:8], record.time, repr(record))


def payload(records: Sequence[Record], numerics: Sequence[Any] = ()) -> dict[str, Any]:
    """What the page needs, as JSON can say it.

    Raises:
        ValueError: there are none.
    """
    if not records:
        raise ValueError("there are no records to show")
    ordered = sorted(records, key=_order)
    commits = commits_of(ordered)
    things = [_thing(pooled(runs), history_of(runs, commits)) for runs in by_key(ordered).values()]
    gpus = sorted({record.gpu for record in ordered if record.kind == "gpu"})
    roofs = {gpu: roofs_of(gpu, ordered) for gpu in gpus}
    return {"things": things, "roofs": roofs, "numerics": list(numerics)}
