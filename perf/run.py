"""``perf run``: check contenders, measure the correct ones, and keep records."""

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
from ptx_emulator.host.suggestions import did_you_mean

from .contender import Contender, Task
from .measure import Meter
from .measure.emulator import EmulatorMeter, bind_compiler
from .measure.gpu import PROTOCOLS
from .peers import all_peers
from .records import FAILURE, Record, append, covers_all_work, merge_fields
from .roofs import why_impossible
from .suites import SUITES, suite
from .suites.base import Options

_LOG_SECONDS = 30.0


@dataclass(frozen=True)
class Selection:
    """Regular expressions that select tasks and contenders.

    Attributes:
        case: Must match in the text of a task, ``suite name=value ...``.
        contender: Must match in the name of a contender.
        format: Must match in the format of a contender.
    """

    case: str = ""
    contender: str = ""
    format: str = ""

    def accepts(self, contender: Contender) -> bool:
        """Return True if the name and the format of a contender match."""
        pairs = ((self.contender, contender.name), (self.format, contender.format))
        return all(re.search(pattern, text) for pattern, text in pairs)


@dataclass
class Report:
    """Outcome of a run other than records, as lines for people.

    Attributes:
        wrong: Contenders with a wrong result.
        impossible: Contenders that were faster than the GPU can be.
        failed: Contenders that raised.
        unsupported: Contenders that do not run here.
        excluded: Contenders that were not measured, and the reasons.
        is_bad: True if a contender of this package was excluded.
        tasks: Number of tasks that ran.
        accepted: Number of contenders that the selection accepted, over all tasks.
        rejected: Names and formats of the contenders that it did not accept.
    """

    wrong: list[str] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    excluded: list[tuple[Contender, str]] = field(default_factory=list)
    is_bad: bool = False
    tasks: int = 0
    accepted: int = 0
    rejected: set[str] = field(default_factory=set)

    def add_exception(self, task: Task, contender: Contender, reason: Exception) -> None:
        """Exclude a contender that raised."""
        text = str(reason).strip().partition("\n")[0]
        self.exclude(self.failed, task, contender, f"{type(reason).__name__}: {text}")

    def exclude(self, lines: list[str], task: Task, contender: Contender, reason: str) -> None:
        """Add a line about a contender to one of the lists of this report."""
        lines.append(f"{task}: {contender}: {reason}")
        self.excluded.append((contender, reason))
        self.is_bad |= contender.is_ours


@dataclass
class _Checked:
    """A contender whose result is correct.

    Attributes:
        contender: The contender.
        run: Its prepared call. None if it was dropped because memory is limited.
        error: Relative error of its result.
        memory: Bytes that it takes.
    """

    contender: Contender
    run: Callable[[], Any] | None
    error: float
    memory: float


def measure_task(
    task: Task, meter: Meter, run_fields: dict[str, Any], selection: Selection, report: Report
) -> list[Record]:
    """Check and measure the contenders of one task.

    Args:
        task: The task.
        meter: Measures the contenders.
        run_fields: Fields of ``Record`` that all records of the run share.
        selection: Contenders to measure.
        report: Gets a line for each contender that is wrong or raises.

    Returns:
        The records. A contender that was excluded has one of the quantity ``FAILURE``, except on
        the emulator.
    """
    checked, num_excluded = [], len(report.excluded)
    for contender in task.contenders(0):
        if not selection.accepts(contender):
            report.rejected |= {contender.name, contender.format}
            continue
        report.accepted += 1
        correct = _check(task, contender, meter, report)
        if correct is not None:
            if math.isfinite(meter.free_memory()):
                correct.run = None
            checked.append(correct)
    records: list[Record] = []
    for batch in _batches(checked, meter.free_memory()):
        records += _measure_or_split(task, batch, meter, run_fields, report)
    # The comparison with the committed counts shows missing ones anyway.
    failures = report.excluded[num_excluded:] if meter.kind != "emulator" else []
    for contender, reason in failures:
        records.append(
            Record(
                suite=task.suite,
                case=task.case,
                contender=contender.name,
                quantity=FAILURE,
                value=1.0,
                unit="1",
                format=contender.format,
                note=reason,
                **run_fields,
            )
        )
    return records


def _measure_or_split(
    task: Task,
    batch: Sequence[_Checked],
    meter: Meter,
    run_fields: dict[str, Any],
    report: Report,
) -> list[Record]:
    """Measure contenders that fit into memory together. If one raises, measure each alone."""
    try:
        return _measure_batch(task, batch, meter, run_fields, report)
    except Exception as reason:  # a call that works may still fail under graph capture
        if len(batch) == 1:
            report.add_exception(task, batch[0].contender, reason)
            return []
    records: list[Record] = []
    for checked in batch:
        records += _measure_or_split(task, [checked], meter, run_fields, report)
    return records


def _batches(checked: Sequence[_Checked], free_memory: float) -> Iterator[list[_Checked]]:
    """Split contenders into batches that fit into memory; one contender always fits."""
    batch: list[_Checked] = []
    for item in checked:
        if batch and sum(member.memory for member in batch) + item.memory > free_memory:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _measure_batch(
    task: Task,
    batch: Sequence[_Checked],
    meter: Meter,
    run_fields: dict[str, Any],
    report: Report,
) -> list[Record]:
    """Measure contenders together, each on as many sets of operands as a cache must not hold."""
    contenders = [checked.contender for checked in batch]
    smallest = min((c.bytes for c in contenders if c.bytes), default=0.0)
    runs = [[checked.run or checked.contender.prepare()] for checked in batch]
    for copy in range(1, meter.copies(smallest) if smallest else 1):
        copies = {c.key: c for c in task.contenders(copy)}
        for calls, contender in zip(runs, contenders, strict=True):
            calls.append(copies[contender.key].prepare())
    records: list[Record] = []
    for checked, measurements in zip(batch, meter.measure(contenders, runs), strict=True):
        measured = [_record(task, checked, asdict(m), run_fields) for m in measurements]
        reason = next(filter(None, map(why_impossible, measured)), "")
        if reason:
            report.exclude(report.impossible, task, checked.contender, reason)
        else:
            records += measured
    return records


def _record(
    task: Task, checked: _Checked, measurement: dict[str, Any], run_fields: dict[str, Any]
) -> Record:
    """Return a record of the fields of a measurement, of its contender and of the run."""
    contender, fields = checked.contender, merge_fields(run_fields, measurement)
    quantity, unit = measurement["quantity"], measurement["unit"]
    has_work = quantity == contender.quantity or covers_all_work(quantity, unit)
    if contender.versions:
        fields["versions"] = {**run_fields.get("versions", {}), **contender.versions}
    return Record(
        suite=task.suite,
        case=task.case,
        contender=contender.name,
        format=contender.format,
        error=float(f"{checked.error:.3g}"),
        bytes=contender.bytes if has_work else None,
        flops=contender.flops if has_work else None,
        note=contender.note,
        **fields,
    )


def _check(task: Task, contender: Contender, meter: Meter, report: Report) -> _Checked | None:
    """Call a contender once and check its result. Return None if it is not to be measured."""
    try:
        with meter.peak_memory() as memory:
            run = contender.prepare()
            result = meter.call(run)
        error = contender.error(result)
    except UnsupportedError as reason:
        report.unsupported.append(f"{contender}: {str(reason).rpartition(': ')[2]}")
        return None
    except Exception as reason:  # a library may raise anything
        report.add_exception(task, contender, reason)
        return None
    if not error <= contender.bound:  # NaN is wrong, too
        text = f"relative error {error:.3g}, at most {contender.bound:.3g} is right"
        report.exclude(report.wrong, task, contender, text)
        return None
    return _Checked(contender, run, error, sum(memory))


def measure_suite(
    name: str, options: Options, selection: Selection, collect: Callable[[list[Record]], object]
) -> Report:
    """Run the tasks of a suite.

    Args:
        name: Name of the suite.
        options: Options of the run.
        selection: Tasks and contenders to measure.
        collect: Called with the records of each task.
    """
    report = Report()
    chosen = suite(name)
    for meter in chosen.meters(options):
        tasks = [task for task in chosen.tasks(meter, options) if task.matches(selection.case)]
        if not tasks:
            continue
        report.tasks += len(tasks)
        if options.paths and isinstance(meter, EmulatorMeter):
            bind_compiler(meter.arch)
        run_fields = {
            "seed": options.seed,
            "ceilings": meter.ceilings(),
            "kind": meter.kind,
            **meter.environment(),
        }
        for task in _with_progress(tasks, f"{name} {meter.backend}"):
            collect(measure_task(task, meter, run_fields, selection, report))
            gc.collect()
            if meter.kind == "gpu":
                torch.cuda.empty_cache()
        for peer in options.peers if chosen.has_peers else ():
            reason = peer.missing(meter)
            if reason and meter.kind in peer.kinds:
                report.unsupported.append(f"{peer.name}: {reason}")
    return report


def _with_progress(tasks: Sequence[Task], title: str) -> Iterator[Task]:
    """Yield tasks, and show the progress on standard error."""
    try:
        from tqdm import tqdm
    except ImportError:
        for number, task in enumerate(tasks, 1):
            print(f"{title} {number}/{len(tasks)} {task}", file=sys.stderr, flush=True)
            yield task
        return
    # A log gets a line every 30 s, a terminal a bar that moves.
    interval = 0.1 if sys.stderr.isatty() else _LOG_SECONDS
    with tqdm(tasks, desc=title, unit="task", dynamic_ncols=True, mininterval=interval) as bar:
        for task in bar:
            bar.set_postfix_str(str(task), refresh=sys.stderr.isatty())
            yield task


def _shares(record: Record) -> str:
    """Return the shares of the ceilings that a time reaches, in parentheses."""
    if record.unit != "us":
        return ""
    shares = ((name, record.share(name)) for name in record.ceilings)
    texts = [f"{share:.0%} of {name}" for name, share in shares if share is not None]
    return f" ({', '.join(texts)})" if texts else ""


def _print(records: Iterable[Record]) -> None:
    """Print records, one line per contender."""
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
    """Add the arguments of ``perf run``."""
    add = parser.add_argument
    add("suites", nargs="+", choices=SUITES, metavar="SUITE", help=", ".join(SUITES))
    add("--backend", default="", help="cuda, reference, emulated:sm_90a, emulated:sm_100a")
    add("--filter", default="", metavar="REGEX", help="only cases whose text matches")
    add("--contender", default="", metavar="REGEX", help="only contenders whose name matches")
    add("--format", default="", metavar="REGEX", help="only formats and recipes that match")
    add("--protocol", choices=PROTOCOLS, default="sustained", help="clock of a GPU")
    add("--quick", action="store_true", help="small shapes, few repeats: does everything run?")
    add("--full", action="store_true", help="all models and routings")
    add("--seed", type=int, default=0)
    add("--no-peers", action="store_true", help="measure this package alone")
    add("--path", action="append", default=[], metavar="PEER=FOLDER", help="sources of a peer")
    add("--num-sms", type=int, help="number of SMs of the emulated GPU")
    add("--out", type=Path, help="append records to this file")
    add("--list", action="store_true", help="print the tasks, run nothing")
    add("--renew", action="store_true", help="counts: replace the committed record")
    add("--check", action="store_true", help="counts: compare with the committed record")


def parse_options(arguments: argparse.Namespace) -> Options:
    """Return the options of suites from the command line.

    Raises:
        ValueError: A path is not PEER=FOLDER.
    """
    paths = {}
    for item in arguments.path:
        name, separator, folder = item.partition("=")
        if not separator:
            raise ValueError(f"--path must be PEER=FOLDER, got {item!r}")
        paths[name] = Path(folder)
    return Options(
        backend=arguments.backend,
        protocol=arguments.protocol,
        quick=arguments.quick,
        full=arguments.full,
        seed=arguments.seed,
        peers=() if arguments.no_peers else all_peers(paths),
        paths=paths,
        emulation={"num_sms": arguments.num_sms} if arguments.num_sms else {},
    )


def _list_tasks(suites: Iterable[str], options: Options, selection: Selection) -> None:
    for name in suites:
        for meter in suite(name).meters(options):
            for task in suite(name).tasks(meter, options):
                if task.matches(selection.case):
                    print(task)


def main(arguments: argparse.Namespace) -> int:
    """Run suites and return 1 if a contender of this package was wrong or failed."""
    options = parse_options(arguments)
    selection = Selection(arguments.filter, arguments.contender, arguments.format)
    if arguments.list:
        _list_tasks(arguments.suites, options, selection)
        return 0
    if arguments.renew or arguments.check:
        from perf import committed

        return committed.main(arguments, options, selection)

    def collect(records: list[Record]) -> None:
        _print(records)
        append(arguments.out, records)

    status, reports = 0, []
    for name in arguments.suites:
        reports.append(measure_suite(name, options, selection, collect))
        status = max(status, print_report(reports[-1]))
    require_match(selection, reports)
    return status


def require_match(selection: Selection, reports: Sequence[Report]) -> None:
    """Raise ``ValueError`` if a selection matched no case or no contender of any report."""
    if not any(report.tasks for report in reports):
        raise ValueError(
            f"no case here matches --filter {selection.case!r}: --list prints the cases; --full "
            "or another --backend has more"
        )
    rejected = {text for report in reports for text in report.rejected}
    if rejected and not any(report.accepted for report in reports):
        raise ValueError(_nothing_accepted(selection, rejected))


def _nothing_accepted(selection: Selection, rejected: Iterable[str]) -> str:
    """Return a message for patterns that accept none of the contenders."""
    patterns = {"--contender": selection.contender, "--format": selection.format}
    patterns_set = {option: pattern for option, pattern in patterns.items() if pattern}
    texts = " and ".join(f"{option} {pattern!r}" for option, pattern in patterns_set.items())
    hints = (did_you_mean(pattern, sorted(rejected)) for pattern in patterns_set.values())
    hint = next(filter(None, hints), f": they are {', '.join(sorted(rejected))}")
    return f"no contender here matches {texts}{hint}"


def print_report(report: Report) -> int:
    """Print a report to standard error and return 1 if it is bad."""
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
