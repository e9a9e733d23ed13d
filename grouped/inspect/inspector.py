"""What quantization does to the numbers of a model, by layer, role, direction and expert."""

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

from ..tensor.validation import check_size
from .nonfinite import Watched, named_layers
from .statistics import MAXIMA, SUMS, Found, Probe, Step

EAGER_ONLY = "grouped.debug.inspect looks at the operands of eager calls: what traces or transforms a layer would not see it look"
#: What is looked at in each layer.
_ROLES = ("input", "weight", "grad_output")
#: Version of the form of files.
_SCHEMA = 1
_SHARES = ("saturated", "underflow")
_DIGITS = 6


def check_eager() -> None:
    """Raise RuntimeError where something traces or transforms a call."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
        raise RuntimeError(EAGER_ONLY)


class inspect:
    """Look at what quantization does to the operands of the grouped layers of a model.

      lens = grouped.debug.inspect(model, every=10)
      with lens:
        for batch in batches:
          loss(model(batch)).backward()
          optimizer.step()
          lens.step()
      print(lens.table())
      lens.save("numerics.jsonl", run="NVFP4")

    The copies that it looks at are those that the products multiply, by the recipe, the scales and
    the random bits of the call; each is decoded and compared with what it was made from. Results,
    gradients and random numbers keep their bits.

    **What counts.** Calls inside the block, of training or without gradients, and their backward
    passes whenever these run. Over the calls of a step counts add up and the largest amax counts;
    of the weight the first call of each step does. What activation checkpointing computes again
    counts once. Rows of the tail are passed over. Only layers (``GroupedLinear``, also those of a
    ``GroupedMLP``) are looked at, not ``grouped.linear``.

    **Compiled code.** The look is at eager calls: ``torch.compile`` breaks its graph at the layers,
    which then run eagerly inside the block, and ``fullgraph=True``, ``torch.export``,
    ``torch.func`` and the capture of a CUDA graph raise.

    **Cost.** In a step that is looked at each operand is decoded twice in each direction and read
    about ten times, an fp32 copy of it is held at a time, and where no gradient of the weight is
    wanted a product is not fused with the quantization before it. The demo's step takes 1.8 to 2.5
    times as long on a CPU (Xeon, one thread); a step that is passed over takes no longer. Nothing
    waits for the device: 72 bytes an expert, direction, role and layer stay there for each step
    until ``clear``; ``rows``, ``records``, ``table`` and ``save`` read them.

    Args:
        model: what holds the layers, and names them.
        every: of so many steps one is looked at, the first of them.
        layers: names of layers or shell patterns such as ``"*.down"``; None for all.
        roles: those of ``input``, ``weight`` and ``grad_output`` to look at.

    Raises:
        TypeError: ``every`` is no integer, or names are one string.
        ValueError: there is no such layer or role, or ``every`` is not positive.
        RuntimeError: on entry, where another one looks at a layer.
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
        for name, given in (("layers", layers), ("roles", roles)):
            if isinstance(given, str):
                raise TypeError(f"{name} must be a sequence of names, got the string {given!r}")
        for role in roles:
            if role not in _ROLES:
                raise ValueError(f"roles must be of {', '.join(_ROLES)}, got {role!r}")
        self._layers = _named_layers(model, layers)
        self._every, self._roles = every, tuple(roles)
        self._number = 0
        self._steps: list[Step] = []

    def __enter__(self) -> "inspect":
        for name, layer in self._layers.items():
            if layer._lens is not None:
                raise RuntimeError(f"{name} is inspected already: leave that block first")
        for name, layer in self._layers.items():
            layer._lens = functools.partial(self._probe, name)
        return self

    def __exit__(self, *exception: object) -> None:
        for layer in self._layers.values():
            layer._lens = None

    def step(self) -> None:
        """End a step, usually after the optimizer's; inside the block or outside of it."""
        self._number += 1

    def clear(self) -> None:
        """Forget all steps but how many there were."""
        self._steps = []

    def _probe(self, layer: str) -> Probe | None:
        """What looks at the operands of a call of a layer; None in a step that is passed over."""
        if self._number % self._every:
            return None
        if not self._steps or self._steps[-1].number != self._number:
            self._steps.append(Step(self._number))
        return Probe(layer, self._roles, self._steps[-1])

    def records(self) -> list[dict[str, Any]]:
        """All statistics, one record for each step, layer, role, direction and format.

        Each is a dict that JSON can hold, of lists with one entry an expert, beside:

          step: its number, from 0.
          layer: name of the layer in the model.
          role: ``"input"``, ``"weight"`` or ``"grad_output"``.
          direction: ``"rowwise"``, which fprop reads of input and weight and dgrad of the
            gradient, or ``"columnwise"``: wgrad reads those of input and gradient, dgrad that
            of the weight.
          format: the text of the format; ``"bfloat16"`` or ``"float16"`` of a plain copy.
          columns: elements of a row.

        The lists:

                rows: of input and gradient, the expert's tokens: its load; N of a weight. snr_db:
                ``10 log10(signal / noise)``; None where nothing is lost, or nothing is there.
                signal: sum of x^2, x being what was quantized. noise: sum of (x
                - copy)^2. saturated: share of the elements that exceed the largest number of their
                        scales by more than half a step, so that they lose more than by rounding; of
                        a plain copy, that became infinite.
                underflow: share of the elements that are not zero and became zero.
                amax: largest magnitude of x; of a weight that is quantized already, of its copy.
                second_level: what codes times block scales are multiplied by; the largest of the
                        expert's rows of a row-scaled copy.
                nonfinite: how many elements of x are NaN or infinite. Other numbers leave these
                    out.
                nonfinite_copy: how many of the copy are. ``snr_db``, ``signal`` and ``noise`` leave
                        these out.

        An entry is None where it means nothing: shares of an expert without rows, the losses of a
        weight that is quantized already, whose original is gone, ``second_level`` of a format that
        has none, and ``saturated`` and ``underflow`` of a columnwise copy that is transformed
        (``NVFP4(hadamard=True)``), whose codes belong to no element.
        """
        return [
            {"step": step.number, **key._asdict(), "columns": found.columns, **_lists(found)}
            for step in self._steps
            for key, found in step.found.items()
        ]

    def rows(self) -> list[dict[str, Any]]:
        """``records``, one row an expert: numbers in place of lists, and ``expert``."""
        return [
            {"expert": expert}
            | {name: v[expert] if isinstance(v, list) else v for name, v in record.items()}
            for record in self.records()
            for expert in range(len(record["rows"]))
        ]

    def summary(self, step: int | None = None) -> list[dict[str, Any]]:
        """One step with the experts of each layer together.

        Args:
            step: its number; None for the last that was looked at.

        Returns:
            Dicts as in ``records``, with numbers in place of lists, the ratio of all signal to
            all noise, ``worst_snr_db`` and ``worst_expert`` of the expert with the least,
            ``load``: rows of the busiest expert over the mean, and ``idle``: experts without
            any.
        """
        chosen = self._steps[-1:] if step is None else [s for s in self._steps if s.number == step]
        if not chosen:
            missing = "no step was" if step is None else f"step {step} was not"
            raise ValueError(f"{missing} looked at")
        return [
            {"step": s.number, **key._asdict(), "columns": found.columns, **_together(found)}
            for s in chosen
            for key, found in s.found.items()
        ]

    def table(self, step: int | None = None) -> str:
        """``summary`` as text, one line for each layer, role and direction."""
        head = ["layer", "role", "direction", "format", "snr dB", "worst", "saturated %"]
        head += ["underflow %", "amax", "nonfinite", "load", "idle"]
        lines = aligned([head, *map(_line, self.summary(step))], head.index("snr dB"))
        return "\n".join("  ".join(line).rstrip() for line in lines)

    def save(self, path: str | Path, *, run: str = "", append: bool = False) -> None:
        """Write ``records`` as JSON lines.

        Each line is a record with ``"numerics": 1``, the version of this form, and ``run``, so that
        files may be joined. Floats have six digits. ``python -m perf dashboard`` draws them.

        Args:
            path: the file.
            run: what tells these steps from those of other runs, such as a recipe's name.
            append: add to the file, instead of writing a new one.
        """
        records = json.loads(json.dumps(self.records(), allow_nan=False), parse_float=_short)
        lines = [json.dumps({"numerics": _SCHEMA, "run": run} | record) for record in records]
        with Path(path).open("a" if append else "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)


def aligned(rows: Sequence[Sequence[str]], texts: int = 1) -> list[list[str]]:
    """Cells as wide as their columns, the first ``texts`` of which are text and the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust] * texts + [str.rjust] * (len(widths) - texts)
    return [
        [side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)]
        for row in rows
    ]


def _named_layers(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, Watched]:
    found = named_layers(model)
    for pattern in patterns or ():
        if not fnmatch.filter(found, pattern):
            raise ValueError(f"layers: {pattern!r} is none of {', '.join(found)}")
    if patterns is None:
        return found
    return {n: x for n, x in found.items() if any(fnmatch.fnmatchcase(n, p) for p in patterns)}


def _lists(found: Found) -> dict[str, list[Any]]:
    statistics = torch.cat([found.sums, found.maxima], dim=1).T.tolist()
    columns = dict(zip((*SUMS, *MAXIMA), statistics, strict=True))
    lists: dict[str, list[Any]] = {}
    for name, values in columns.items():
        if name not in found.known:
            lists[name] = [None] * len(values)
        elif name in _SHARES:
            elements = (rows * found.columns for rows in columns["rows"])
            lists[name] = [v / n if n else None for v, n in zip(values, elements, strict=True)]
        elif name in ("rows", "nonfinite", "nonfinite_copy"):
            lists[name] = [int(v) for v in values]
        else:
            lists[name] = [v if math.isfinite(v) else None for v in values]
    pairs = zip(lists["signal"], lists["noise"], strict=True)
    return {"rows": lists.pop("rows"), "snr_db": [_decibels(*pair) for pair in pairs], **lists}


def _decibels(signal: float | None, noise: float | None) -> float | None:
    return 10 * math.log10(signal / noise) if signal and noise else None


def _together(found: Found) -> dict[str, Any]:
    """All experts of a layer as one, and the one that fares worst."""
    lists, sums, maxima = (
        _lists(found),
        found.sums.sum(0, keepdim=True),
        found.maxima.amax(0, keepdim=True),
    )
    total = {
        name: one
        for name, (one,) in _lists(dataclasses.replace(found, sums=sums, maxima=maxima)).items()
    }
    rows = lists["rows"]
    known = [(v, expert) for expert, v in enumerate(lists["snr_db"]) if v is not None]
    worst, expert = min(known, default=(None, None))
    return total | {
        "worst_snr_db": worst,
        "worst_expert": expert,
        "load": max(rows) * len(rows) / total["rows"] if total["rows"] else None,
        "idle": rows.count(0),
    }


def _line(entry: dict[str, Any]) -> list[str]:
    def number(name: str, form: str, factor: float = 1) -> str:
        value = entry[name]
        return "-" if value is None else format(value * factor, form)

    worst = number("worst_snr_db", ".1f")
    if entry["worst_expert"] is not None:
        worst += f" (expert {entry['worst_expert']})"
    return [
        *(entry[name] for name in ("layer", "role", "direction", "format")),
        *(number("snr_db", ".1f"), worst),
        *(number(name, ".3g", 100) for name in _SHARES),
        *(number("amax", ".3g"), number("nonfinite", ".0f"), number("load", ".2f")),
        str(entry["idle"]),
    ]


def _short(number: str) -> float:
    return float(f"{float(number):.{_DIGITS}g}")
