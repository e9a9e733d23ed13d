"""Records as observations of the planner: the kernels that took a measured time."""

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
#: Contenders of a suite that are the current kernels, not designs that were tried.
_CURRENT = {
    "gemm": ("ours", "ours, prepacked", "ours, tokens quantized too"),
    "quantize": ("ours",),
    "layer": ("ours", "ours, cached weight"),
}
#: Quantities, and the kernels of a call that they cover.
_COVERED_KERNELS = {
    "time": slice(None),
    "time of GEMM": slice(-1, None),
    "time of expand pass": slice(1),
}


def _format(text: str) -> Format | None:
    return None if text == "bfloat16" else parse(text)


def _sizes(record: Record) -> tuple[int, ...]:
    case = record.case
    return tuple(split_rows(case["routing"], case["experts"], case["rows"], record.seed or 0))


def _gemm(record: Record, gpu: Gpu, counts: Counts) -> list[Kernel]:
    """Return the kernels of a product, and of the quantizer if tokens are quantized too."""
    case, texts = record.case, record.format.split(" x ")
    a, b = _format(texts[0]), _format(texts[-1])
    a_is_decoded = record.contender == "ours, tokens quantized too" and gpu.mma_operand(a)[1]
    prepacked = record.contender == "ours, prepacked"
    kernels = product(
        Product(
            case["product"], _sizes(record), case["n"], case["k"], a, b, prepacked, a_is_decoded
        ),
        gpu,
    )
    if a_is_decoded and a is not None:
        elements = case["rows"] * case["k"]
        kernels[:0] = [quantization("quantize", elements, a, counts, "row", to_values=True)]
    return kernels


def _quantize(record: Record, gpu: Gpu, counts: Counts) -> list[Kernel]:
    """Return the kernels of a quantizer, of decoding or of a reduction."""
    case, fmt = record.case, _format(record.format)
    op, elements, directions = case["op"], case["rows"] * case["cols"], case.get("directions", "")
    if op == "quantize" and fmt is not None:
        has_amax = case["amax"] == "given"
        return [quantization(op, elements, fmt, counts, directions, gives_amax=has_amax)]
    if op not in ("dequantize", "amax", "dbias"):
        return []
    moved = element_bytes(None) + (element_bytes(fmt) if op == "dequantize" else 0.0)
    instructions = counts.per_element(fmt, op, directions) or 0.0
    return [stream(op, "quantize", elements * moved, elements * instructions)]


def _layer(record: Record, gpu: Gpu, counts: Counts) -> list[Kernel]:
    """Return the kernels of a pass of a layer; none for an unknown recipe."""
    case, recipe = record.case, recipes().get(record.format)
    if recipe is None:
        return []
    layer = Layer(_sizes(record), case["hidden"], case["intermediate"], case["layer"] == "mlp")
    kernels = passes(layer, recipe, gpu, counts)
    is_cached = record.contender == "ours, cached weight"
    if case["pass"] == "forward":
        return kernels["serving"] if is_cached else [*kernels["weights"], *kernels["forward"]]
    return step_of(kernels, is_cached)


def kernels_of(record: Record, counts: Counts) -> list[Kernel]:
    """Return the kernels of a record's time; none if they are not known."""
    kernels = {"gemm": _gemm, "quantize": _quantize, "layer": _layer}.get(record.suite)
    if record.kind != "gpu" or record.quantity not in _COVERED_KERNELS or kernels is None:
        return []
    return kernels(record, gpu_of(record.gpu), counts)[_COVERED_KERNELS[record.quantity]]


def _observation(record: Record, counts: Counts) -> Observation:
    return Observation(
        kernels_of(record, counts), record.microseconds, gpu_of(record.gpu), record.suite
    )


def ours(records: Sequence[Record], gpu: str = FITTED) -> list[Observation]:
    """Return the newest record of each case of this package on a GPU.

    Records without a commit are left out: they come from other sessions, whose layers had other
    parts.
    """
    counts = Counts(records, gpu_of(gpu).arch)
    mine = [
        record
        for record in records
        if gpu in record.gpu and record.commit and record.quantity in _COVERED_KERNELS
        if record.contender in _CURRENT.get(record.suite, ())
    ]
    observations = (_observation(record, counts) for record in latest(mine))
    return [observation for observation in observations if observation.kernels]


def published(records: Sequence[Record], gpu: str) -> list[Observation]:
    """Return the published times of a GPU whose kernels are known."""
    newest = latest(records)
    counts = Counts(newest, gpu_of(gpu).arch)
    published_records = (r for r in newest if gpu in r.gpu and r.protocol == "published")
    return [_observation(r, counts) for r in published_records if kernels_of(r, counts)]


def fitted(records: Sequence[Record]) -> Model:
    """Return the model of the records.

    Raises:
        ValueError: There are fewer than two times of this package.
    """
    mine = ours(records)
    if len(mine) < 2:
        raise ValueError(f"records must have times of ours on an {FITTED}, got {len(mine)}")
    return fit(mine)
