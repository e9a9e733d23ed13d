"""The chart of the README: tokens per second of whole layers beside other libraries, as SVG.

matplotlib draws it, and its bytes depend on matplotlib's version. So the numbers are kept in the
file's metadata, and ``stale`` compares these with the records.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .docs import newest
from .records import Record
from .tables import TABLES, Table

CHART = Path(__file__).parent.parent / "docs" / "images" / "layers.svg"
_DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
#: Columns of the tables that the chart shows, their labels and colors.
_BARS = {
    "torch, bf16": ("torch._grouped_mm, bf16", "#b8bec7"),
    "transformers, bf16": ("transformers, bf16", "#8f98a3"),
    "quack, bf16": ("quack, bf16", "#5f6b78"),
    "BF16": ("this package, bf16", "#8fb4f5"),
    "FP8Block, cached weights": ("this package, FP8", "#3f7de0"),
    "NVFP4RowScaled, cached weights": ("this package, NVFP4", "#173f94"),
}


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot of the chart: rows of a measured table.

    Attributes:
        title: Title of the plot.
        table: Name of the table in ``TABLES``.
        rows: Titles of the rows, as (model, tokens) of the table.
    """

    title: str
    table: str
    rows: tuple[tuple[str, int], ...]


PANELS = (
    Panel(
        "Serving: forward, 64 tokens",
        "moe-h200",
        (("Qwen3-30B-A3B", 64), ("DeepSeek-V3", 64), ("gpt-oss-120b", 64), ("Mixtral-8x7B", 64)),
    ),
    Panel(
        "Training: forward and backward, 4096 tokens",
        "moe-step-h200",
        (("Qwen3-30B-A3B", 4096), ("gpt-oss-120b", 4096), ("Mixtral-8x7B", 4096)),
    ),
)


def _rates(table: Table, model: str, tokens: int, records: Sequence[Record]) -> list[int | None]:
    """Return the tokens per second of each bar; None where nothing was measured."""
    (row,) = (row for row in table.rows if row.titles == (model, str(tokens)))
    cells = {column.title: column.cell.conditions for column in table.columns}
    newest_records = [
        newest(records, {**table.conditions, **row.conditions, **cells[title]}) for title in _BARS
    ]
    return [
        None if record is None else round(tokens / record.microseconds * 1e6)
        for record in newest_records
    ]


def numbers(records: Sequence[Record]) -> str:
    """Return the numbers of the chart as JSON: tokens per second by panel, model and bar."""
    labels = [label for label, _ in _BARS.values()]
    data = {
        panel.title: {
            model: dict(
                zip(labels, _rates(TABLES[panel.table], model, tokens, records), strict=True)
            )
            for model, tokens in panel.rows
        }
        for panel in PANELS
    }
    return json.dumps(data)


def stale(records: Sequence[Record]) -> bool:
    """Return True if the committed chart does not show the records."""
    element = next(ElementTree.parse(CHART).iter(_DESCRIPTION), None)
    return element is None or element.text != numbers(records)


def draw(records: Sequence[Record]) -> None:
    """Draw the chart into ``CHART``."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "perf docs --write needs matplotlib: pip install 'grouped-kernels[demo]'"
        ) from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    text = numbers(records)
    colors = dict(_BARS.values())
    settings: dict[Any, Any] = {
        "svg.hashsalt": "grouped-kernels",
        "svg.fonttype": "none",
        "font.size": 9,
    }
    with pyplot.rc_context(settings):
        widths = [len(panel.rows) for panel in PANELS]
        figure, axes = pyplot.subplots(
            1, len(PANELS), figsize=(10, 3.6), layout="constrained", width_ratios=widths
        )
        for axis, (title, models) in zip(axes, json.loads(text).items(), strict=True):
            width = 0.8 / len(colors)
            for i, (label, color) in enumerate(colors.items()):
                heights = [(rates[label] or 0) / 1e6 for rates in models.values()]
                positions = [m + (i - (len(colors) - 1) / 2) * width for m in range(len(models))]
                axis.bar(positions, heights, width, color=color, label=label)
            for m, rates in enumerate(models.values()):
                heights = [rate or 0 for rate in rates.values()]
                best = max(heights)
                x = m + (heights.index(best) - (len(colors) - 1) / 2) * width
                if heights[0]:
                    label = f"{best / heights[0]:.1f}x torch"
                    axis.annotate(
                        label, (x, best / 1e6), (0, 2), textcoords="offset points", ha="center"
                    )
            axis.set_title(title, fontsize=10, pad=10)
            axis.set_xticks(range(len(models)), models)
            axis.set_ylabel("million tokens per second")
            axis.spines[["top", "right"]].set_visible(False)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        CHART.parent.mkdir(exist_ok=True)
        figure.savefig(CHART, metadata={"Date": None, "Description": text})
    pyplot.close(figure)
