"""``perf explain``: predict time and memory of a layer of experts in each recipe.

The layer is the MLP of a rank's experts, SwiGLU included. The router, the permutation of tokens and
the exchange between ranks are left out. Times are those of a CUDA graph, by ``perf.planner.model``.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cute_kernels.kernels.gemm.common.problem import N_ALIGN
from grouped.inspect.inspector import aligned
from grouped.recipes import Recipe

from .cases import ROUTINGS, split_rows
from .planner.gpus import GPUS, Gpu, gpu_of
from .planner.layer import Layer, memory, missing_kernels, passes, step_of
from .planner.model import Model
from .planner.observed import FITTED, fitted
from .planner.work import Counts, Kernel
from .records import RESULTS, load
from .suites.layer import recipes

_GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Time:
    """A predicted time in milliseconds, and the bounds of its expected range."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_digits(self.value)} ({_digits(self.low)}-{_digits(self.high)})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Prediction for a recipe.

    Attributes:
        times: ``"serving"`` is a forward pass in ``eval()``. ``"forward"``, ``"backward"`` and
            ``"step"`` are those of training. ``"cached weight"`` is a step that does not quantize
            the weights.
        bounds: Share of a step's time by the resource that bounds its kernels, largest first.
        kernels: Kernels of a step, as (name, milliseconds, bound).
        memory: Bytes, see ``planner.layer.memory``.
        basis: ``"fitted"`` if all kernels of a step were measured on this GPU, else
            ``"prediction"``.
        missing: Reason why the package does not run the recipe on the GPU. Empty if it does.
    """

    times: Mapping[str, Time]
    bounds: Mapping[str, float]
    kernels: Sequence[tuple[str, float, str]]
    memory: Mapping[str, int]
    basis: str
    missing: str


def why_unsupported(layer: Layer, recipe: Recipe) -> str:
    """Return why a recipe does not accept the sizes of a layer, or '' if it does."""
    multiple = math.lcm(recipe.multiple, N_ALIGN)
    for name in ("hidden", "intermediate"):
        if getattr(layer, name) % multiple:
            return f"{name} must be a multiple of {multiple}, got {getattr(layer, name)}"
    return ""


def plan(layer: Layer, recipe: Recipe, gpu: Gpu, model: Model, counts: Counts) -> Plan:
    """Predict the cost of ``layer`` in ``recipe`` on ``gpu``."""

    def total(kernels: Sequence[Kernel]) -> Time:
        times = [(model.time(k, gpu)[0], *model.range(k, gpu)) for k in kernels]
        return Time(*(sum(column) * 1e-3 for column in zip(*times, strict=True)))

    kernels = passes(layer, recipe, gpu, counts)
    step = step_of(kernels)
    times = {
        "serving": total(kernels["serving"]),
        "forward": total([*kernels["weights"], *kernels["forward"]]),
        "backward": total(kernels["backward"]),
        "step": total(step),
        "cached weight": total(step_of(kernels, weights_cached=True)),
    }
    step_kernels = []
    bounds: dict[str, float] = {}
    for kernel in step:
        microseconds, terms = model.time(kernel, gpu)
        bound = max(terms, key=lambda name: terms[name])
        step_kernels.append((kernel.name, microseconds * 1e-3, bound))
        share = microseconds * 1e-3 / times["step"].value
        bounds[bound] = bounds.get(bound, 0.0) + share
    is_fitted = gpu.name == FITTED and all(map(model.is_known, step))
    return Plan(
        times=times,
        bounds=dict(sorted(bounds.items(), key=lambda entry: -entry[1])),
        kernels=step_kernels,
        memory=memory(layer, recipe),
        basis="fitted" if is_fitted else "prediction",
        missing=missing_kernels(recipe, gpu),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``perf explain``."""
    add = parser.add_argument
    add("--hidden", type=int, required=True, help="features of a token")
    add("--intermediate", type=int, required=True, help="features inside an expert")
    add("--experts", type=int, required=True, help="experts of the layer, on all ranks")
    add("--top-k", type=int, required=True, help="experts per token")
    add("--tokens", type=int, required=True, help="tokens per rank")
    add("--ep", type=int, default=1, help="ranks that share the experts (default: 1)")
    add("--routing", default="balanced", choices=ROUTINGS, help="rows of the experts of a rank")
    add("--gpu", default=FITTED, help=f"one of {', '.join(GPUS)} (default: {FITTED})")
    add("--recipe", default="all", help="names with commas between them, or all")
    add("--records", type=Path, default=RESULTS, help="records to which the model is fitted")


def _layer(arguments: argparse.Namespace) -> Layer:
    """Return the layer of the command line.

    Raises:
        ValueError: A size is not positive, or sizes do not fit together.
    """
    for name in ("hidden", "intermediate", "experts", "top_k", "tokens", "ep"):
        value = getattr(arguments, name)
        if value < 1:
            raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {value}")
    experts, ranks, top_k = arguments.experts, arguments.ep, arguments.top_k
    if experts % ranks:
        raise ValueError(f"ep must divide the {experts} experts, got {ranks}")
    if top_k > experts:
        raise ValueError(f"top-k must be at most the {experts} experts, got {top_k}")
    sizes = split_rows(arguments.routing, experts // ranks, arguments.tokens * top_k)
    return Layer(tuple(sizes), arguments.hidden, arguments.intermediate)


def _selected_recipes(text: str) -> dict[str, Recipe]:
    """Return the recipes named in ``--recipe``."""
    available = recipes()
    names = list(available) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in available:
            raise ValueError(f"recipe must be all, or some of {', '.join(available)}, got {name!r}")
    return {name: available[name] for name in names}


def main(arguments: argparse.Namespace) -> int:
    """Print the prediction and return 1 if no recipe accepts these sizes."""
    layer, gpu = _layer(arguments), gpu_of(arguments.gpu)
    selected = _selected_recipes(arguments.recipe)
    records = load(arguments.records)
    model, counts = fitted(records), Counts(records, gpu.arch)
    unsupported = {
        name: reason
        for name, recipe in selected.items()
        if (reason := why_unsupported(layer, recipe))
    }
    plans = {
        name: plan(layer, recipe, gpu, model, counts)
        for name, recipe in selected.items()
        if name not in unsupported
    }
    fastest = min(plans, key=lambda name: plans[name].times["step"].value, default=None)
    print(
        f"{len(layer.sizes)} experts of {layer.hidden} x {layer.intermediate} with SwiGLU on one "
        f"{gpu.name} of {arguments.ep}: {sum(layer.sizes)} rows, {min(layer.sizes)} to "
        f"{max(layer.sizes)} per expert.\n"
        "Without the router, the permutation of tokens and the exchange between ranks.\n"
    )
    if fastest is not None:
        print("\n".join((*_times(plans), "", *_memory(plans, gpu), "", *_verdict(fastest, plans))))
    for name, reason in unsupported.items():
        print(f"{name} does not accept these sizes: {reason}.")
    for name, prediction in plans.items():
        if prediction.missing:
            print(f"* {name}: {prediction.missing}.")
    print(
        f"Model: {model.count} times of this package on an {FITTED}; of held-out times half are "
        f"predicted within {model.error:.1%}, nine in ten within {model.spread:.0%}. Rates: "
        f"{gpu.source}."
    )
    return int(fastest is None)


def _digits(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    head, *body = aligned([heads, *rows])
    for cells in (head, ["-" * len(text) for text in head], *body):
        yield "  ".join(cells).rstrip()


def _times(plans: Mapping[str, Plan]) -> Iterator[str]:
    """Yield the lines of the table of times."""
    rows = []
    for name, prediction in plans.items():
        largest = list(prediction.bounds.items())[:2]
        bounds = ", ".join(f"{bound} {share:.0%}" for bound, share in largest)
        times = (
            str(time) if key == "step" else _digits(time.value)
            for key, time in prediction.times.items()
        )
        rows.append([name + "*" * bool(prediction.missing), *times, bounds, prediction.basis])
    return _table(
        ["milliseconds", *next(iter(plans.values())).times, "a step is bounded by", "basis"], rows
    )


def _memory(plans: Mapping[str, Plan], gpu: Gpu) -> Iterator[str]:
    """Yield the lines of the table of memory."""
    rows = []
    for name, prediction in plans.items():
        fits = prediction.memory["total"] <= gpu.memory * 1e9
        remark = "" if fits else f"more than {gpu.memory:.0f} GB"
        rows.append([name, *(f"{n / _GIB:.2f}" for n in prediction.memory.values()), remark])
    return _table(["GiB", *next(iter(plans.values())).memory, ""], rows)


def _verdict(fastest: str, plans: Mapping[str, Plan]) -> Iterator[str]:
    """Yield lines about the fastest recipe, and the kernels of its step."""
    best = plans[fastest]
    step, bound = best.times["step"], next(iter(best.bounds))
    close = [n for n, p in plans.items() if n != fastest and p.times["step"].low < step.high]
    overlap = f" Its range overlaps with: {', '.join(close)}." if close else ""
    yield f"Fastest step: {fastest}, {step} ms, bounded by {bound}.{overlap}"
    runnable = {name: p.times["step"] for name, p in plans.items() if not p.missing}
    best_runnable = min(runnable, key=lambda name: runnable[name].value, default=fastest)
    if best_runnable != fastest:
        yield f"Fastest recipe that has kernels: {best_runnable}, {runnable[best_runnable]} ms."
    yield ""
    rows = [[n, _digits(t), f"{t / step.value:.0%}", bound] for n, t, bound in best.kernels]
    yield from _table([f"a step in {fastest}", "ms", "share", "bounded by"], rows)
    yield ""
