"""Progress, the table and the files of the demo."""

import csv
import dataclasses
import importlib.util
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grouped.inspect.inspector import aligned

from .train import ROLES, Run

#: Command that installs the progress bar and the plot.
INSTALL = "pip install 'grouped-kernels[demo]'"
_BASELINE = "BF16"
_ABSENT = "n/a"
_SMOOTHING = 0.9


def _gap(run: Run, runs: Sequence[Run]) -> float | None:
    baseline = next((r.end_loss for r in runs if r.recipe == _BASELINE), None)
    return None if run.end_loss is None or baseline is None else 100 * (run.end_loss / baseline - 1)


def _cell(value: float | None, spec: str) -> str:
    return _ABSENT if value is None else format(value, spec)


def _row(run: Run, runs: Sequence[Run]) -> list[str]:
    busiest, idle = (run.load.max_over_mean, run.load.idle) if run.load else (None, None)
    return [
        run.recipe + (f" (stopped at step {len(run.losses)})" if run.interrupted else ""),
        _cell(run.start_loss, ".3f"),
        _cell(run.end_loss, ".3f"),
        _cell(_gap(run, runs), "+.2f"),
        *(_cell(run.snr_db.get(role), ".1f") for role in ROLES),
        _cell(busiest, ".2f"),
        _cell(idle, "d"),
        _cell(run.milliseconds_per_step, ".0f"),
    ]


#: Column titles, grouped under a title that spans them.
_COLUMNS = (
    ("", ("recipe",)),
    ("held-out loss", ("start", "end", "vs BF16, %")),
    ("SNR in the experts, dB", ROLES),
    ("experts", ("max/mean", "idle")),
    ("time", ("ms/step",)),
)


def table(runs: Sequence[Run]) -> str:
    """Return a plain text table with one line per recipe."""
    rows = [[name for _, names in _COLUMNS for name in names], *(_row(run, runs) for run in runs)]
    lines = []
    # A bar separates the groups of columns.
    for row in aligned(rows):
        columns = iter(row)
        lines.append(["  ".join(itertools.islice(columns, len(names))) for _, names in _COLUMNS])
    spans = [title.center(len(cell)) for (title, _), cell in zip(_COLUMNS, lines[0], strict=True)]
    rule = ["-" * len(cell) for cell in lines[0]]
    text = [" | ".join(cells).rstrip() for cells in (spans, lines[0])]
    return "\n".join([*text, "-+-".join(rule), *(" | ".join(cells) for cells in lines[1:])])


def write_results(out: Path, runs: Sequence[Run], metadata: dict[str, Any]) -> list[Path]:
    """Write ``results.json`` (everything) and ``loss.csv`` (training loss by step and recipe).

    Returns:
        The files.
    """
    described = [
        dataclasses.asdict(run)
        | {
            "gap_to_bf16_percent": _gap(run, runs),
            "milliseconds_per_step": run.milliseconds_per_step,
        }
        for run in runs
    ]
    results, losses = out / "results.json", out / "loss.csv"
    results.write_text(json.dumps(metadata | {"runs": described}, indent=2) + "\n")
    with losses.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(run.recipe for run in runs)])
        rows = itertools.zip_longest(*(run.losses for run in runs), fillvalue="")
        writer.writerows([step, *row] for step, row in enumerate(rows, start=1))
    return [results, losses]


def can_plot() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average without a bias toward the first value."""
    smooth, total, weight = [], 0.0, 0.0
    for value in values:
        total = _SMOOTHING * total + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        smooth.append(total / weight)
    return smooth


def write_plot(out: Path, runs: Sequence[Run], entropy: float) -> Path:
    """Plot the losses, and below them their distance to the loss of BF16, to ``loss.png``.

    Needs matplotlib.

    Returns:
        The file.
    """
    from matplotlib.figure import Figure  # No pyplot: nothing global, and no display is needed.

    figure = Figure(figsize=(8, 7), layout="constrained")
    losses, gaps = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    baseline = next((run.losses for run in runs if run.recipe == _BASELINE), [])
    for run in runs:
        (line,) = losses.plot(range(1, len(run.losses) + 1), run.losses, label=run.recipe)
        # The batches of a step are the same in every recipe.
        gap = [100 * (a / b - 1) for a, b in zip(run.losses, baseline, strict=False)]
        gaps.plot(range(1, len(gap) + 1), _smooth(gap), color=line.get_color())
        gaps.plot(range(1, len(gap) + 1), gap, color=line.get_color(), alpha=0.2)
    losses.axhline(entropy, color="gray", linestyle=":", label="unigram entropy")
    losses.set(ylabel="training loss, nats per byte")
    losses.legend()
    gaps.set(xlabel="step", ylabel=f"against {_BASELINE}, %")
    path = out / "loss.png"
    figure.savefig(path, dpi=150)
    return path
