"""Measure what quantization loses in a model, by layer, role, direction and expert."""

import dataclasses
import fnmatch
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ptx_emulator.host.suggestions import did_you_mean

from ..tensor.validation import check_size
from .nonfinite import InspectableLayer, named_layers
from .statistics import MAXIMA, SUMS, OperandStatistics, Probe, Step

EAGER_ONLY = (
    "grouped.inspect.inspect_quantization looks at the operands of eager calls: a layer that is "
    "traced or transformed hides them"
)
#: Operands of each layer that are inspected.
_ROLES = ("input", "weight", "grad_output")
#: Version of the file format.
_SCHEMA = 2
_SHARES = ("saturated", "underflow")
_DIGITS = 6


def check_eager() -> None:
    """Raise RuntimeError if the call is traced or transformed."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
        raise RuntimeError(EAGER_ONLY)


def inspect_quantization(
    model: nn.Module,
    *,
    every: int = 1,
    layers: Sequence[str] | None = None,
    roles: Sequence[str] = _ROLES,
) -> "QuantizationInspector":
    """Return a ``QuantizationInspector`` of the grouped layers of a model.

    Args:
        model: Module that holds the layers, and names them.
        every: Inspect one of so many steps, the first of them.
        layers: Names of layers, or shell patterns such as ``"*.down"``. None for all.
        roles: Operands to inspect, of ``input``, ``weight`` and ``grad_output``.
    """
    return QuantizationInspector(model, every=every, layers=layers, roles=roles)


class QuantizationInspector:
    """Records the quantization loss of the operands of a model's grouped layers.

        inspector = grouped.inspect.inspect_quantization(model, every=10)
        with inspector:
          for batch in batches:
            loss(model(batch)).backward()
            optimizer.step()
            inspector.step()
        print(inspector.table())
        inspector.save("numerics.jsonl", run="NVFP4")

    It inspects the copies that the products multiply, with the recipe, the scales and the random
    bits of the call. Each copy is decoded and compared with the values that it was made from.
    Results, gradients and random numbers keep their bits.

    **Counting.** Calls inside the block count, with or without gradients, and their backward passes
    whenever these run. Over the calls of a step counts add up, and the largest amax counts. For the
    weight only the first call of each step counts. Activation checkpointing does not count twice.
    Rows of the tail are ignored. Layers are inspected (``GroupedLinear``, also in a
    ``GroupedMLP``), but not ``grouped.linear``.

    **Compiled code.** Only eager calls are inspected: ``torch.compile`` breaks its graph at the
    layers, which then run eagerly inside the block. ``fullgraph=True``, ``torch.export``,
    ``torch.func`` and the capture of a CUDA graph raise.

    **Cost.** In a step that is inspected each operand is decoded twice in each direction and read
    about ten times. One fp32 copy of an operand exists at a time. If no gradient of the weight is
    needed, a product is not fused with the quantization before it. The demo's step takes 1.8 to 2.5
    times as long on a CPU (Xeon, one thread); a step that is not inspected takes no longer. Nothing
    waits for the device: 72 bytes per expert, direction, role and layer stay there for each step
    until ``clear``; ``rows``, ``records``, ``table`` and ``save`` read them.

    Args:
        model: Module that holds the layers, and names them.
        every: Inspect one of so many steps, the first of them.
        layers: Names of layers, or shell patterns such as ``"*.down"``. None for all.
        roles: Operands to inspect, of ``input``, ``weight`` and ``grad_output``.

    Raises:
        TypeError: ``every`` is not an integer, or names are one string.
        ValueError: There is no such layer or role, or ``every`` is not positive.
        RuntimeError: On entry, if another inspector looks at a layer.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        layers: Sequence[str] | None = None,
        roles: Sequence[str] = _ROLES,
    ) -> None:
        check_size("every", every)
        for argument, names in (("layers", layers), ("roles", roles)):
            if isinstance(names, str):
                raise TypeError(f"{argument} must be a sequence of names, got the string {names!r}")
        for role in roles:
            if role not in _ROLES:
                raise ValueError(
                    f"roles must be of {', '.join(_ROLES)}, got {role!r}"
                    + did_you_mean(role, _ROLES)
                )
        self._layers = _matching_layers(model, layers)
        self._every, self._roles = every, tuple(roles)
        self._number = 0
        self._steps: list[Step] = []

    def __enter__(self) -> "QuantizationInspector":
        for name, layer in self._layers.items():
            if layer._inspector is not None:
                raise RuntimeError(f"{name} is inspected already: leave that block first")
        for name, layer in self._layers.items():
            layer._inspector = functools.partial(self._probe, name)
        return self

    def __exit__(self, *exception: object) -> None:
        for layer in self._layers.values():
            layer._inspector = None

    def step(self) -> None:
        """End a step, usually after the optimizer's; inside the block or outside of it."""
        self._number += 1

    def clear(self) -> None:
        """Forget the statistics of all steps; steps go on being counted."""
        self._steps = []

    def _probe(self, layer: str) -> Probe | None:
        """Return the probe of a call of a layer, or None in a step that is not inspected."""
        if self._number % self._every:
            return None
        if not self._steps or self._steps[-1].number != self._number:
            self._steps.append(Step(self._number))
        return Probe(layer, self._roles, self._steps[-1])

    def records(self) -> list[dict[str, Any]]:
        """Return all statistics, one record for each step, layer, role, direction and format.

        Each record is a dict that JSON can store. It has lists with one entry per expert, and these
        entries:

            step: Number of the step, from 0.
            layer: Name of the layer in the model.
            role: ``"input"``, ``"weight"`` or ``"grad_output"``.
            direction: ``"rowwise"`` or ``"columnwise"``. Fprop reads rowwise copies of input and
                weight, and dgrad of the gradient. Wgrad reads columnwise copies of input and
                gradient, and dgrad of the weight.
            format: Text of the format. A plain copy has ``"bfloat16"`` or ``"float16"``.
            columns: Elements of a row.

        The lists:

            rows: Number of the expert's tokens, its load. A weight has N.
            snr_db: ``10 log10(signal / noise)``. None if nothing is lost, or there are no rows.
            signal: Sum of x^2. Here x are the values that were quantized.
            noise: Sum of (x - copy)^2.
            saturated: Share of the elements that exceed the largest number of their scales by more
                than half a step, so that they lose more than by rounding. In a plain copy it is the
                share of elements that became infinite.
            underflow: Share of the elements that are not zero and became zero.
            amax: Largest magnitude of x. A weight that is quantized already has the amax of its
                copy.
            global_scale: Global scale, the factor of codes times block scales. A row-scaled copy
                has the largest of the expert's rows.
            nonfinite: Number of elements of x that are NaN or infinite. The statistics above
                ignore them.
            nonfinite_copy: Number of such elements of the copy. ``snr_db``, ``signal`` and
                ``noise`` ignore them.

        An entry is None if it has no meaning. An expert without rows has no shares. A weight that
        is quantized already has no losses, since its original is gone. Some formats have no
        ``global_scale``. The codes of a transformed columnwise copy (``NVFP4(hadamard=True)``)
        belong to no element, so it has neither ``saturated`` nor ``underflow``.
        """
        return [
            {
                "step": step.number,
                **key._asdict(),
                "columns": statistics.columns,
                **_lists(statistics),
            }
            for step in self._steps
            for key, statistics in step.statistics.items()
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return ``records`` with one row per expert: numbers instead of lists, and ``expert``."""
        return [
            {"expert": expert}
            | {name: v[expert] if isinstance(v, list) else v for name, v in record.items()}
            for record in self.records()
            for expert in range(len(record["rows"]))
        ]

    def summary(self, step: int | None = None) -> list[dict[str, Any]]:
        """Summarize one step over the experts of each layer.

        Args:
            step: Number of the step. None for the last one that was inspected.

        Returns:
            Dicts as in ``records``, with numbers instead of lists. ``snr_db`` is the ratio of all
            signal to all noise. They also have ``worst_snr_db`` and ``worst_expert``, those of the
            expert with the lowest ratio. ``load`` is the number of rows of the busiest expert over
            the mean, ``idle`` the number of experts without rows.
        """
        steps = self._steps[-1:] if step is None else [s for s in self._steps if s.number == step]
        if not steps:
            missing = "no step was" if step is None else f"step {step} was not"
            raise ValueError(f"{missing} looked at")
        return [
            {
                "step": s.number,
                **key._asdict(),
                "columns": statistics.columns,
                **_summarize(statistics),
            }
            for s in steps
            for key, statistics in s.statistics.items()
        ]

    def table(self, step: int | None = None) -> str:
        """Return ``summary`` as text, one line for each layer, role and direction.

        Args:
            step: Number of the step. None for the last one that was inspected.
        """
        head = ["layer", "role", "direction", "format", "snr dB", "worst", "saturated %"]
        head += ["underflow %", "amax", "nonfinite", "load", "idle"]
        lines = aligned([head, *map(_line, self.summary(step))], head.index("snr dB"))
        return "\n".join("  ".join(line).rstrip() for line in lines)

    def save(self, path: str | Path, *, run: str = "", append: bool = False) -> None:
        """Write ``records`` as JSON lines.

        Each line is a record with ``"numerics": 2``, the version of the file format, and ``run``,
        so that files may be joined. Floats have six digits. ``python -m perf dashboard`` draws
        them.

        Args:
            path: The file.
            run: Name that distinguishes these steps from those of other runs, such as the recipe's
                name.
            append: Add to the file, instead of writing a new one.
        """
        records = json.loads(json.dumps(self.records(), allow_nan=False), parse_float=_short)
        lines = [json.dumps({"numerics": _SCHEMA, "run": run} | record) for record in records]
        with Path(path).open("a" if append else "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)


def aligned(rows: Sequence[Sequence[str]], texts: int = 1) -> list[list[str]]:
    """Pad cells to the width of their columns: the first ``texts`` are text, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust] * texts + [str.rjust] * (len(widths) - texts)
    return [
        [side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)]
        for row in rows
    ]


def _matching_layers(
    model: nn.Module, patterns: Sequence[str] | None
) -> dict[str, InspectableLayer]:
    """Return the layers whose names match a pattern. Raise for a pattern without a match."""
    layers = named_layers(model)
    for pattern in patterns or ():
        if not fnmatch.filter(layers, pattern):
            raise ValueError(
                f"layers: {pattern!r} is none of {', '.join(layers)}"
                + did_you_mean(pattern, layers)
            )
    if patterns is None:
        return layers
    return {n: x for n, x in layers.items() if any(fnmatch.fnmatchcase(n, p) for p in patterns)}


def _lists(statistics: OperandStatistics) -> dict[str, list[Any]]:
    """Return the statistics of an operand as lists with one entry per expert."""
    values_by_name = torch.cat([statistics.sums, statistics.maxima], dim=1).T.tolist()
    columns = dict(zip((*SUMS, *MAXIMA), values_by_name, strict=True))
    lists: dict[str, list[Any]] = {}
    for name, values in columns.items():
        if name not in statistics.known:
            lists[name] = [None] * len(values)
        elif name in _SHARES:
            elements = (rows * statistics.columns for rows in columns["rows"])
            lists[name] = [v / n if n else None for v, n in zip(values, elements, strict=True)]
        elif name in ("rows", "nonfinite", "nonfinite_copy"):
            lists[name] = [int(v) for v in values]
        else:
            lists[name] = [v if math.isfinite(v) else None for v in values]
    pairs = zip(lists["signal"], lists["noise"], strict=True)
    return {"rows": lists.pop("rows"), "snr_db": [_decibels(*pair) for pair in pairs], **lists}


def _decibels(signal: float | None, noise: float | None) -> float | None:
    return 10 * math.log10(signal / noise) if signal and noise else None


def _summarize(statistics: OperandStatistics) -> dict[str, Any]:
    """Return the statistics of all experts of a layer together, and those of the worst one."""
    lists = _lists(statistics)
    total = dataclasses.replace(
        statistics,
        sums=statistics.sums.sum(0, keepdim=True),
        maxima=statistics.maxima.amax(0, keepdim=True),
    )
    totals = {name: value for name, (value,) in _lists(total).items()}
    rows = lists["rows"]
    known = [(v, expert) for expert, v in enumerate(lists["snr_db"]) if v is not None]
    worst, expert = min(known, default=(None, None))
    return totals | {
        "worst_snr_db": worst,
        "worst_expert": expert,
        "load": max(rows) * len(rows) / totals["rows"] if totals["rows"] else None,
        "idle": rows.count(0),
    }


def _line(entry: dict[str, Any]) -> list[str]:
    """Return the cells of one line of the table."""

    def number(name: str, form: str, factor: float = 1) -> str:
        value = entry[name]
        return "-" if value is None else format(value * factor, form)

    worst = number("worst_snr_db", ".1f")
    if entry["worst_expert"] is not None:
        worst += f" (expert {entry['worst_expert']})"
    return [
        *(entry[name] for name in ("layer", "role", "direction", "format")),
        number("snr_db", ".1f"),
        worst,
        *(number(name, ".3g", 100) for name in _SHARES),
        number("amax", ".3g"),
        number("nonfinite", ".0f"),
        number("load", ".2f"),
        str(entry["idle"]),
    ]


def _short(number: str) -> float:
    return float(f"{float(number):.{_DIGITS}g}")
