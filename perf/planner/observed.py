"""Records as observations: which kernels took the time that was measured."""

from collections.abc import Sequence

from cute_kernels.formats import Format, parse

from ..cases import split_rows
from ..records import Record, latest
from ..suites.base import element_bytes
from ..suites.layer import recipes
from .gpus import Gpu, gpu_of
from .layer import Layer, passes, step_of
from .model import Model, Observation, fit
from .work import Counts, Kernel, Product, product, quantization, stream

#: The GPU whose records the model is fitted to.
FITTED = "H200"
#: Contenders of a suite that are what the package does now, not a design that was tried.
_OURS = {
    "gemm": ("ours", "ours, prepacked", "ours, tokens quantized too"),
    "quantize": ("ours",),
    "layer": ("ours", "ours, weight kept"),
}
#: Times, and which of the kernels they are of.
_PARTS = {"time": slice(None), "time of GEMM": slice(-1, None), "time of expand pass": slice(1)}


def _format(text: str) -> Format | None:
    return None if text == "bfloat16" else parse(text)


def _sizes(record: Record) -> tuple[int, ...]:
    case = record.case
    return tuple(split_rows(case["routing"], case["experts"], case["rows"], record.seed or 0))


def _gemm(record: Record, gpu: Gpu, counts: Counts) -> list[Kernel]:
    case, texts = record.case, record.format.split(" x ")
    a, b = _format(texts[0]), _format(texts[-1])
    ready = record.contender == "ours, tokens quantized too" and gpu.multiplied(a)[1]
    prepacked = record.contender == "ours, prepacked"
    kernels = product(
        Product(case["product"], _sizes(record), case["n"], case["k"], a, b, prepacked, ready), gpu
    )
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
    return [
        stream(op, "quantize", elements * moved, elements * (counts.of(fmt, op, directions) or 0.0))
    ]


def _layer(record: Record, gpu: Gpu, counts: Counts) -> list[Kernel]:
    case, recipe = record.case, recipes().get(record.format)
    if recipe is None:
        return []
    sizes = (_sizes(record), case["hidden"], case["intermediate"], case["layer"] == "mlp")
    found = passes(Layer(*sizes), recipe, gpu, counts)
    kept = record.contender == "ours, weight kept"
    if case["pass"] == "forward":
        return found["serving"] if kept else [*found["weights"], *found["forward"]]
    return step_of(found, kept)


def kernels_of(record: Record, counts: Counts) -> list[Kernel]:
    """The kernels that a record's time is of; none if it is not known of what it is."""
    read = {"gemm": _gemm, "quantize": _quantize, "layer": _layer}.get(record.suite)
    if record.kind != "gpu" or record.quantity not in _PARTS or read is None:
        return []
    return read(record, gpu_of(record.gpu), counts)[_PARTS[record.quantity]]


def _seen(record: Record, counts: Counts) -> Observation:
    return Observation(
        kernels_of(record, counts), record.microseconds, gpu_of(record.gpu), record.suite
    )


def ours(records: Sequence[Record], gpu: str = FITTED) -> list[Observation]:
    """The newest record of each case of ours on a GPU.

    Those without a commit are of other sessions, in which other things were part of a layer.
    """
    counts = Counts(records, gpu_of(gpu).arch)
    mine = [
        record
        for record in records
        if gpu in record.gpu and record.commit and record.quantity in _PARTS
        if record.contender in _OURS.get(record.suite, ())
    ]
    return [each for each in (_seen(record, counts) for record in latest(mine)) if each.kernels]


def published(records: Sequence[Record], gpu: str) -> list[Observation]:
    every = latest(records)
    counts = Counts(every, gpu_of(gpu).arch)
    found = (r for r in every if gpu in r.gpu and r.protocol == "published")
    return [_seen(r, counts) for r in found if kernels_of(r, counts)]


def fitted(records: Sequence[Record]) -> Model:
    """The model of all records.

    Raises:
        ValueError: there are too few of ours.
    """
    mine = ours(records)
    if len(mine) < 2:
        raise ValueError(f"records must have times of ours on an {FITTED}, got {len(mine)}")
    return fit(mine)
