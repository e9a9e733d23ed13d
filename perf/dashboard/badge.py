"""The badge of the README: how much faster than PyTorch, in one line of an SVG."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from perf.records import Record, latest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["badge", "speedups"]

_FORMAT = "nvfp4:row_scaled x nvfp4"
_LABEL = "NVFP4 grouped GEMM"
#: Width of a letter of 11 px Verdana, on the average of such texts.
_LETTER = 6.6
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{all}">
<title>{all}</title>
<rect width="{width}" height="20" rx="3" fill="#1d4ed8"/>
<path d="M3 0h{left}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#3f3f46"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{label_x}" y="14" textLength="{label_length}">{label}</text>
<text x="{message_x}" y="14" textLength="{message_length}">{message}</text>
</g>
</svg>
"""


def speedups(records: Sequence[Record]) -> tuple[str, list[float]]:
    """The GPU of the newest product, and how many times faster than torch's in bf16 each case is.

    Cases of the suite gemm that both have, each by its last time.
    """
    products = [
        record
        for record in latest(records)
        if (record.suite, record.kind, record.what) == ("gemm", "gpu", "time")
    ]
    ours = [r for r in products if (r.contender, r.format) == ("ours", _FORMAT)]
    if not ours:
        return "", []
    gpu = max(ours, key=lambda record: record.time).gpu
    theirs = {
        (_case(r), r.protocol): r.microseconds
        for r in products
        if (r.contender, r.format, r.gpu) == ("torch", "bfloat16", gpu)
    }
    pairs = [(theirs.get((_case(r), r.protocol)), r.microseconds) for r in ours if r.gpu == gpu]
    return gpu, sorted(torch / time for torch, time in pairs if torch)


def _case(record: Record) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, str(value)) for name, value in record.case.items()))


def badge(records: Sequence[Record]) -> str:
    """An SVG that shows the median and the range over all cases, slow ones included."""
    gpu, found = speedups(records)
    message = "not measured yet"
    if found:
        middle = statistics.median(found)
        message = (
            f"{middle:.1f}x torch bf16 on {gpu.removeprefix('NVIDIA ')}"
            f" ({found[0]:.1f}x to {found[-1]:.1f}x, {len(found)} cases)"
        )
    label_length, message_length = (round(_LETTER * len(t)) for t in (_LABEL, message))
    left, right = label_length + 12, message_length + 12
    return _SVG.format(
        all=escape(f"{_LABEL}: {message}"),
        label=escape(_LABEL),
        message=escape(message),
        width=left + right,
        left=left - 3,
        label_x=left / 2,
        message_x=left + right / 2,
        label_length=label_length,
        message_length=message_length,
    )
