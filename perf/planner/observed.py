"""Records as observations: which kernels took the time that was measured."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from cute_kernels.formats import Format, parse
from perf.cases import split_rows
from perf.planner.gpus import Gpu, gpu_of
from perf.planner.layer import Layer, passes, step_of
from perf.planner.model import Model, Observation, fit
from perf.planner.work import Counts, Product, product, quantization, stream
from perf.records import latest
from perf.suites.base import element_bytes
from perf.suites.layer import recipes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.planner.work import Kernel
    from perf.records import Record

__all__ = ["FITTED", "fitted", "kernels_of", "ours", "published", "stand_ins"]

#: The GPU whose records the model is fitted to.
FITTED = "H200"
#: Peers that do what ours do not yet, by contender and format: the formats that they stand for.
_STAND_INS = {
    ("torch", "fp8 rowwise"): "fp8 x fp8",
    ("DeepGEMM", "fp8 1x128 x 128x128"): "fp8_block x fp8_block:block=128x128",
}
#: Rows an expert from which a product says what multiplying costs.
_MANY = 128
#: A time that was measured again and differs by more is of kernels that have changed since; so are
#: those of the like that are not newer. Their weight.
_CHANGED, _OLD = 0.1, 0.05
#: Contenders of a suite that are what the package does now, not a design that was tried.
_OURS = {
    "gemm": ("ours", "ours, prepacked", "ours, tokens quantized too"),
    "quantize": ("ours",),
    "layer": ("ours", "ours, weight kept"),
}
#: Times, and which of the kernels they are of.
_PARTS = {
    "time": slice(None),
    "time of GEMM": slice(-1, None),
    "time of expand pass": slice(1),
}


def _format(text: str) -> Format | None:
    return None if text == "bfloat16" else parse(text)


def _sizes(record: Record) -> tuple[int, ...]:
    case = record.case
    rows = split_rows(case["routing"], case["experts"], case["rows"], record.seed or 0)
    return tuple(rows)


def _gemm(record: Record, gpu: Gpu, counts: Counts) -> list[Kernel]:
    case, texts = record.case, record.format.split(" x ")
    a, b = _format(texts[0]), _format(texts[-1])
    ready = record.contender == "ours, tokens quantized too" and gpu.multiplied(a)[1]
    prepacked = record.contender == "ours, prepacked"
    work = Product(case["product"], _sizes(record), case["n"], case["k"], a, b, prepacked, ready)
    kernels = product(work, gpu)
    if ready and a is not None:
        elements = case["rows"] * case["k"]
        kernels[:0] = [quantization("quantize", elements, a, counts, "row", to_values=True)]
    return kernels


def _quantize(record: Record, gpu: Gpu, counts: Counts) -> list[Kernel]:
    case, fmt = record.case, _format(record.format)
    op, elements, directions = case["op"], case["rows"] * case["cols"], case.get("directions", "")
    if op == "quantize" and fmt is not None:
        given = case["amax"] == "given"
        return [quantization(op, elements, fmt, counts, directions, gives_amax=given)]
    if op not in ("dequantize", "amax", "dbias"):
        return []
    moved = element_bytes(None) + (element_bytes(fmt) if op == "dequantize" else 0.0)
    each = counts.of(fmt, op, directions) or 0.0
    return [stream(op, "quantize", elements * moved, elements * each)]


def _layer(record: Record, gpu: Gpu, counts: Counts) -> list[Kernel]:
    case, recipe = record.case, recipes().get(record.format)
    if recipe is None:
        return []
    sizes = (_sizes(record), case["hidden"], case["intermediate"], case["layer"] == "mlp")
    found = passes(Layer(*sizes), recipe, gpu, counts)
    if case["pass"] == "forward":
        return found["serving"]
    return step_of(found, kept=record.contender == "ours, weight kept")


_READERS = {"gemm": _gemm, "quantize": _quantize, "layer": _layer}


def kernels_of(record: Record, counts: Counts) -> list[Kernel]:
    """The kernels that a record's time is of; none if it is not known of what it is."""
    read = _READERS.get(record.suite)
    if record.kind != "gpu" or record.what not in _PARTS or read is None:
        return []
    return read(record, gpu_of(record.gpu), counts)[_PARTS[record.what]]


def _seen(record: Record, counts: Counts, suite: str, weight: float = 1.0) -> Observation:
    kernels = kernels_of(record, counts)
    return Observation(kernels, record.microseconds, gpu_of(record.gpu), suite, weight)


def _family(record: Record) -> tuple[str, ...]:
    """What a change of kernels would change at once."""
    names = (str(record.case.get(name, "")) for name in ("product", "op", "pass"))
    text = "" if record.suite == "layer" else record.format
    return (record.suite, record.contender, text, *names)


def ours(records: Sequence[Record], gpu: str = FITTED) -> list[Observation]:
    """The newest record of each case of ours on a GPU.

    Those without a commit are of other sessions, in which other things were part of a layer.
    """
    counts = Counts(records, gpu_of(gpu).arch)
    mine = [
        record
        for record in records
        if gpu in record.gpu and record.commit and record.what in _PARTS
        if record.contender in _OURS.get(record.suite, ())
    ]
    newest = {record.key: record for record in latest(mine)}
    changed: dict[tuple[str, ...], str] = {}
    for record in mine:
        if abs(math.log(newest[record.key].value / record.value)) > _CHANGED:
            changed[_family(record)] = max(changed.get(_family(record), ""), record.time)
    found = []
    for record in newest.values():
        is_old = record.time <= changed.get(_family(record), "")
        found.append(_seen(record, counts, record.suite, _OLD if is_old else 1.0))
    return [each for each in found if each.kernels]


def stand_ins(records: Sequence[Record]) -> list[Observation]:
    """Products of peers in formats of which ours may have no records."""
    every = latest(records)
    counts = Counts(every, gpu_of(FITTED).arch)
    found = []
    for record in every:
        text = _STAND_INS.get((record.contender, record.format))
        if record.suite != "gemm" or FITTED not in record.gpu or text is None:
            continue
        if record.case["rows"] >= _MANY * record.case["experts"]:
            found.append(_seen(dataclasses.replace(record, format=text), counts, "peers"))
    return found


def published(records: Sequence[Record], gpu: str) -> list[Observation]:
    """Times of others on a GPU that was not measured here."""
    every = latest(records)
    counts = Counts(every, gpu_of(gpu).arch)
    found = (r for r in every if gpu in r.gpu and r.protocol == "published")
    return [_seen(r, counts, r.suite) for r in found if kernels_of(r, counts)]


def fitted(records: Sequence[Record]) -> Model:
    """The model of all records.

    Raises:
        ValueError: there are too few of ours.
    """
    mine = ours(records)
    if len(mine) < 2:
        raise ValueError(f"records must have times of ours on an {FITTED}, got {len(mine)}")
    return fit(mine, stand_ins(records))
