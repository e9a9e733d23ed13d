"""``perf run``: check contenders, measure those that are right, and keep records."""

import argparse
import collections
import contextlib
import gc
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from cute_kernels.records import UnsupportedError

from .contender import Contender, Task
from .measure import Meter
from .measure.emulator import EmulatorMeter, claim
from .measure.gpu import PROTOCOLS
from .peers import all_peers
from .records import FAILURE, Record, append, is_whole, merged
from .roofs import impossible
from .suites import SUITES, suite
from .suites.base import Options

_LOG_SECONDS = 30.0


@dataclass(frozen=True)
class Choice:
    """Regular expressions that must be found in a task, ``suite name=value ...``, a contender and
    its format.
    """

    case: str = ""
    contender: str = ""
    format: str = ""

    def takes(self, contender: Contender) -> bool:
        pairs = ((self.contender, contender.name), (self.format, contender.format))
        return all(re.search(pattern, text) for pattern, text in pairs)


@dataclass
class Report:
    """What came of a run beside records, in lines for people; bad if one of this package's own was
    wrong or raised.
    """

    wrong: list[str] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    lost: list[tuple[Contender, str]] = field(default_factory=list)
    is_bad: bool = False
    tasks: int = 0

    def raised(self, task: Task, contender: Contender, reason: Exception) -> None:
        text = str(reason).strip().partition("\n")[0]
        self.lose(self.failed, task, contender, f"{type(reason).__name__}: {text}")

    def lose(self, lines: list[str], task: Task, contender: Contender, why: str) -> None:
        lines.append(f"{task}: {contender}: {why}")
        self.lost.append((contender, why))
        self.is_bad |= contender.is_ours


def measure_task(
    task: Task, meter: Meter, facts: dict[str, Any], choice: Choice, report: Report
) -> list[Record]:
    """The records of one task; contenders that are wrong or fail are in ``report``, and have a
    record that says so.
    """
    checked, before = [], len(report.lost)
    for contender in filter(choice.takes, task.contenders(0)):
        right = _checked(task, contender, meter, report)
        if right is not None:
            if math.isfinite(meter.room()):
                right.run = None
            checked.append(right)
    records: list[Record] = []
    for batch in _batches(checked, meter.room()):
        records += _measured(task, batch, meter, facts, report)
    # Committed counts are compared: there it is seen what is gone.
    for contender, why in report.lost[before:] if meter.kind != "emulator" else ():
        named = (task.suite, task.case, contender.name, FAILURE, 1.0, "1")
        records.append(Record(*named, format=contender.format, note=why, **facts))
    return records


def _measured(
    task: Task, batch: "Sequence[_Checked]", meter: Meter, facts: dict[str, Any], report: Report
) -> list[Record]:
    """The records of contenders that have room together; who raises does not disturb the others."""
    try:
        return _measure_batch(task, batch, meter, facts, report)
    except Exception as reason:  # what can be called may still not be captured
        if len(batch) == 1:
            report.raised(task, batch[0].contender, reason)
            return []
    return [record for one in batch for record in _measured(task, [one], meter, facts, report)]


@dataclass
class _Checked:
    """A contender whose result is right; its call is dropped where memory is short."""

    contender: Contender
    run: Callable[[], Any] | None
    error: float
    weight: float  # Bytes that it takes.


def _batches(checked: Sequence[_Checked], room: float) -> Iterator[list[_Checked]]:
    batch: list[_Checked] = []
    for one in checked:
        if batch and sum(other.weight for other in batch) + one.weight > room:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def _measure_batch(
    task: Task, batch: Sequence[_Checked], meter: Meter, facts: dict[str, Any], report: Report
) -> list[Record]:
    contenders = [one.contender for one in batch]
    least = min((c.bytes for c in contenders if c.bytes), default=0.0)
    runs = [[one.run or one.contender.prepare()] for one in batch]
    for copy in range(1, meter.copies(least) if least else 1):
        others = {c.key: c for c in task.contenders(copy)}
        for mine, contender in zip(runs, contenders, strict=True):
            mine.append(others[contender.key].prepare())
    records: list[Record] = []
    for one, found in zip(batch, meter.measure(contenders, runs), strict=True):
        measured = [_record(task, one, asdict(measurement), facts) for measurement in found]
        reason = next(filter(None, map(impossible, measured)), "")
        if reason:
            report.lose(report.impossible, task, one.contender, reason)
        else:
            records += measured
    return records


def _record(task: Task, one: _Checked, own: dict[str, Any], facts: dict[str, Any]) -> Record:
    contender, fields = one.contender, merged(facts, own)
    is_all = own["quantity"] == contender.quantity or is_whole(own["quantity"], own["unit"])
    if contender.versions:
        fields["versions"] = {**facts.get("versions", {}), **contender.versions}
    return Record(
        suite=task.suite,
        case=task.case,
        contender=contender.name,
        format=contender.format,
        error=float(f"{one.error:.3g}"),
        bytes=contender.bytes if is_all else None,
        flops=contender.flops if is_all else None,
        note=contender.note,
        **fields,
    )


def _checked(task: Task, contender: Contender, meter: Meter, report: Report) -> _Checked | None:
    try:
        with meter.weighing() as weight:
            run = contender.prepare()
            got = meter.call(run)
        error = contender.error(got)
    except UnsupportedError as reason:
        report.unsupported.append(f"{contender}: {str(reason).rpartition(': ')[2]}")
        return None
    except Exception as reason:  # a library may raise whatever it likes
        report.raised(task, contender, reason)
        return None
    if not error <= contender.bound:
        why = f"relative error {error:.3g}, at most {contender.bound:.3g} is right"
        report.lose(report.wrong, task, contender, why)
        return None
    return _Checked(contender, run, error, sum(weight))


def measure_suite(
    name: str, options: Options, choice: Choice, keep: Callable[[list[Record]], object]
) -> Report:
    report = Report()
    found = suite(name)
    for meter in found.meters(options):
        tasks = [task for task in found.tasks(meter, options) if task.matches(choice.case)]
        if not tasks:
            continue
        report.tasks += len(tasks)
        if options.paths and isinstance(meter, EmulatorMeter):
            claim(meter.arch)
        facts = {
            "seed": options.seed,
            "ceilings": meter.ceilings(),
            "kind": meter.kind,
            **meter.environment(),
        }
        for task in _shown(tasks, f"{name} {meter.backend}"):
            keep(measure_task(task, meter, facts, choice, report))
            gc.collect()
            if meter.kind == "gpu":
                torch.cuda.empty_cache()
        for peer in options.peers if found.has_peers else ():
            reason = peer.missing(meter)
            if reason and meter.kind in peer.kinds:
                report.unsupported.append(f"{peer.name}: {reason}")
    return report


def _shown(tasks: Sequence[Task], title: str) -> Iterator[Task]:
    try:
        from tqdm import tqdm
    except ImportError:
        for number, task in enumerate(tasks, 1):
            print(f"{title} {number}/{len(tasks)} {task}", file=sys.stderr, flush=True)
            yield task
        return
    # A log gets a line now and then, a terminal a bar that moves.
    interval = 0.1 if sys.stderr.isatty() else _LOG_SECONDS
    with tqdm(tasks, desc=title, unit="task", dynamic_ncols=True, mininterval=interval) as bar:
        for task in bar:
            bar.set_postfix_str(str(task), refresh=sys.stderr.isatty())
            yield task


def _shares(record: Record) -> str:
    if record.unit != "us":
        return ""
    shares = ((name, record.share(name)) for name in record.ceilings)
    texts = [f"{share:.0%} of {name}" for name, share in shares if share is not None]
    return f" ({', '.join(texts)})" if texts else ""


def _print(records: Iterable[Record]) -> None:
    lines: dict[str, list[str]] = {}
    for record in records:
        spread = "" if not record.spread else f" +- {record.spread / 2:.2g}"
        unit = "" if record.unit == "1" else f" {record.unit}"
        lines.setdefault(record.title, []).append(
            f"{record.quantity} {record.value:.6g}{spread}{unit}{_shares(record)}"
        )
    for title, texts in lines.items():
        print(f"{title} {', '.join(texts)}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("suites", nargs="+", choices=SUITES, metavar="SUITE", help=", ".join(SUITES))
    add("--backend", default="", help="cuda, reference, emulated:sm_90a, emulated:sm_100a")
    add("--filter", default="", metavar="REGEX", help="only cases whose text has a match")
    add("--contender", default="", metavar="REGEX", help="only contenders whose name has one")
    add("--format", default="", metavar="REGEX", help="only formats and recipes that have one")
    add("--protocol", choices=PROTOCOLS, default="sustained", help="of a GPU's clock")
    add("--quick", action="store_true", help="small shapes, few repeats: does everything run?")
    add("--full", action="store_true", help="all models and routings")
    add("--seed", type=int, default=0)
    add("--no-peers", action="store_true", help="this package alone")
    add("--path", action="append", default=[], metavar="PEER=FOLDER", help="sources of a peer")
    add("--num-sms", type=int, help="of the emulated GPU")
    add("--out", type=Path, help="append records to this file")
    add("--list", action="store_true", help="print the tasks, run nothing")
    add("--renew", action="store_true", help="counts: replace the committed record")
    add("--check", action="store_true", help="counts: compare with the committed record")


def options_of(arguments: argparse.Namespace) -> Options:
    """What the command line asks of suites.

    Raises:
        ValueError: a path that is not PEER=FOLDER.
    """
    paths = {}
    for item in arguments.path:
        name, separator, folder = item.partition("=")
        if not separator:
            raise ValueError(f"--path must be PEER=FOLDER, got {item!r}")
        paths[name] = Path(folder)
    emulation = {"num_sms": arguments.num_sms} if arguments.num_sms else {}
    same = {
        name: getattr(arguments, name) for name in ("backend", "protocol", "quick", "full", "seed")
    }
    return Options(
        **same,
        peers=() if arguments.no_peers else all_peers(paths),
        paths=paths,
        emulation=emulation,
    )


def main(arguments: argparse.Namespace) -> int:
    """Run what was asked for; 1 if a contender of this package was wrong or failed."""
    options = options_of(arguments)
    choice = Choice(arguments.filter, arguments.contender, arguments.format)
    if arguments.list:
        for name in arguments.suites:
            for meter in suite(name).meters(options):
                print(
                    *(t for t in suite(name).tasks(meter, options) if t.matches(choice.case)),
                    sep="\n",
                )
        return 0
    if arguments.renew or arguments.check:
        from perf import committed

        return committed.main(arguments, options, choice)

    def keep(records: list[Record]) -> None:
        _print(records)
        append(arguments.out, records)

    status = tasks = 0
    for name in arguments.suites:
        report = measure_suite(name, options, choice, keep)
        status, tasks = max(status, print_report(report)), tasks + report.tasks
    if not tasks:
        raise ValueError(
            f"no case here matches --filter {choice.case!r}: --list has them, with --full or another --backend more"
        )
    return status


def print_report(report: Report) -> int:
    with contextlib.suppress(BrokenPipeError):
        for title, lines in (
            ("not here", report.unsupported),
            ("FAILED", report.failed),
            ("WRONG, so not measured", report.wrong),
            ("IMPOSSIBLE, so not kept", report.impossible),
        ):
            for line, times in collections.Counter(lines).items():
                print(f"{title}: {line}" + f" ({times} times)" * (times > 1), file=sys.stderr)
    return int(report.is_bad)
