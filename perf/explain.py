"""``perf explain``: what a layer of experts costs in each recipe, predicted, and what bounds it.

The layer is the MLP of a rank's experts, SwiGLU included. The router, the permutation of tokens and
the exchange between ranks are not in it. Times are of a CUDA graph, by ``perf.planner.model``.
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
    """Milliseconds, and between what they are expected."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_digits(self.value)} ({_digits(self.low)}-{_digits(self.high)})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is predicted of a recipe.

    Attributes:
        times: of ``serving``, a forward pass in ``eval()``; of training ``forward``,
            ``backward``, both as ``step``, and ``weight kept``: a step that does not
            quantize the weights.
        bounds: share of a step's time by what bounds its kernels, largest first.
        kernels: of a step: name, milliseconds, what bounds it.
        memory: bytes, see ``planner.layer``.
        basis: ``"fitted"`` if all of its kernels were measured on this GPU, or
            ``"prediction"``.
        missing: why the package does not run it there yet; empty if it does.
    """

    times: Mapping[str, Time]
    bounds: Mapping[str, float]
    kernels: Sequence[tuple[str, float, str]]
    memory: Mapping[str, int]
    basis: str
    missing: str


def refusal(layer: Layer, recipe: Recipe) -> str:
    multiple = math.lcm(recipe.multiple, N_ALIGN)
    for name in ("hidden", "intermediate"):
        if getattr(layer, name) % multiple:
            return f"{name} must be a multiple of {multiple}, got {getattr(layer, name)}"
    return ""


def plan(layer: Layer, recipe: Recipe, gpu: Gpu, model: Model, counts: Counts) -> Plan:
    def time(kernels: Sequence[Kernel]) -> Time:
        found = [(model.time(k, gpu)[0], *model.range(k, gpu)) for k in kernels]
        return Time(*(sum(column) * 1e-3 for column in zip(*found, strict=True)))

    found = passes(layer, recipe, gpu, counts)
    step = step_of(found)
    times = {
        "serving": time(found["serving"]),
        "forward": time([*found["weights"], *found["forward"]]),
        "backward": time(found["backward"]),
        "step": time(step),
        "weight kept": time(step_of(found, kept=True)),
    }
    parts = []
    bounds: dict[str, float] = {}
    for kernel in step:
        microseconds, by = model.time(kernel, gpu)
        bound = max(by, key=lambda name: by[name])
        parts.append((kernel.name, microseconds * 1e-3, bound))
        share = microseconds * 1e-3 / times["step"].value
        bounds[bound] = bounds.get(bound, 0.0) + share
    is_fitted = gpu.name == FITTED and all(map(model.is_known, step))
    return Plan(
        times,
        dict(sorted(bounds.items(), key=lambda entry: -entry[1])),
        parts,
        memory(layer, recipe),
        "fitted" if is_fitted else "prediction",
        missing_kernels(recipe, gpu),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hidden", type=int, required=True, help="features of a token")
    add("--intermediate", type=int, required=True, help="features inside an expert")
    add("--experts", type=int, required=True, help="of the layer, on all ranks")
    add("--top-k", type=int, required=True, help="experts of a token")
    add("--tokens", type=int, required=True, help="of each rank")
    add("--ep", type=int, default=1, help="ranks that share the experts (default: 1)")
    add("--routing", default="balanced", choices=ROUTINGS, help="rows of the experts of a rank")
    add("--gpu", default=FITTED, help=f"one of {', '.join(GPUS)} (default: {FITTED})")
    add("--recipe", default="all", help="names with commas between them, or all")
    add("--records", type=Path, default=RESULTS, help="what the model is fitted to")


def _layer(arguments: argparse.Namespace) -> Layer:
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


def _chosen(text: str) -> dict[str, Recipe]:
    every = recipes()
    names = list(every) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in every:
            raise ValueError(f"recipe must be all, or some of {', '.join(every)}, got {name!r}")
    return {name: every[name] for name in names}


def main(arguments: argparse.Namespace) -> int:
    """Explain; 1 if no recipe takes these sizes."""
    layer, gpu, chosen = _layer(arguments), gpu_of(arguments.gpu), _chosen(arguments.recipe)
    records = load(arguments.records)
    model, counts = fitted(records), Counts(records, gpu.arch)
    refused = {n: reason for n, recipe in chosen.items() if (reason := refusal(layer, recipe))}
    plans = {
        name: plan(layer, recipe, gpu, model, counts)
        for name, recipe in chosen.items()
        if name not in refused
    }
    fastest = min(plans, key=lambda name: plans[name].times["step"].value, default=None)
    total, least, most = sum(layer.sizes), min(layer.sizes), max(layer.sizes)
    print(
        f"{len(layer.sizes)} experts of {layer.hidden} x {layer.intermediate} with SwiGLU on one "
        f"{gpu.name} of {arguments.ep}: {total} rows, {least} to {most} an expert.\n"
        "Without the router, the permutation of tokens and the exchange between ranks.\n"
    )
    if fastest is not None:
        print("\n".join((*_times(plans), "", *_memory(plans, gpu), "", *_verdict(fastest, plans))))
    for name, reason in refused.items():
        print(f"{name} does not take these sizes: {reason}.")
    for name, each in plans.items():
        if each.missing:
            print(f"* {name}: {each.missing}.")
    print(
        f"Model: {model.count} times of ours on an {FITTED}; of those held out half are predicted "
        f"within {model.error:.1%}, nine in ten within {model.spread:.0%}. Rates: {gpu.source}."
    )
    return int(fastest is None)


def _digits(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    first, *rest = aligned([heads, *rows])
    for cells in (first, ["-" * len(head) for head in first], *rest):
        yield "  ".join(cells).rstrip()


def _times(plans: Mapping[str, Plan]) -> Iterator[str]:
    rows = []
    for name, each in plans.items():
        bounds = ", ".join(f"{what} {share:.0%}" for what, share in list(each.bounds.items())[:2])
        times = (str(t) if key == "step" else _digits(t.value) for key, t in each.times.items())
        rows.append([name + "*" * bool(each.missing), *times, bounds, each.basis])
    return _table(
        ["milliseconds", *next(iter(plans.values())).times, "a step is bounded by", "basis"], rows
    )


def _memory(plans: Mapping[str, Plan], gpu: Gpu) -> Iterator[str]:
    rows = []
    for name, each in plans.items():
        fits = each.memory["total"] <= gpu.memory * 1e9
        much = "" if fits else f"more than {gpu.memory:.0f} GB"
        rows.append([name, *(f"{n / _GIB:.2f}" for n in each.memory.values()), much])
    return _table(["GiB", *next(iter(plans.values())).memory, ""], rows)


def _verdict(fastest: str, plans: Mapping[str, Plan]) -> Iterator[str]:
    best = plans[fastest]
    step, bound = best.times["step"], next(iter(best.bounds))
    close = [n for n, p in plans.items() if n != fastest and p.times["step"].low < step.high]
    met = f" Their ranges meet it: {', '.join(close)}." if close else ""
    yield f"Fastest step: {fastest}, {step} ms, bounded by {bound}.{met}"
    runs = {name: each.times["step"] for name, each in plans.items() if not each.missing}
    now = min(runs, key=lambda name: runs[name].value, default=fastest)
    if now != fastest:
        yield f"Of those that have kernels: {now}, {runs[now]} ms."
    yield ""
    rows = [[n, _digits(t), f"{t / step.value:.0%}", bound] for n, t, bound in best.kernels]
    yield from _table([f"a step in {fastest}", "ms", "share", "bounded by"], rows)
    yield ""
