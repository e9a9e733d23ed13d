"""The badge of the README: how much faster than PyTorch, in one line of an SVG."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perf.records import Record

__all__ = ["badge", "speedups"]

_SIDES = (("ours", "nvfp4:row_scaled x nvfp4"), ("torch", "bfloat16"))
_LABEL = "NVFP4 grouped GEMM"
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img">
<title>{label}: {message}</title>
<rect width="{width}" height="20" rx="3" fill="#1d4ed8"/>
<path d="M3 0h{left}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#3f3f46"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="6" y="14" textLength="{label_length}">{label}</text>
<text x="{message_x}" y="14" textLength="{message_length}">{message}</text>
</g>
</svg>
"""


def speedups(records: Iterable[Record]) -> tuple[str, list[float]]:
    """The GPU of the newest product, and how many times faster than torch's in bf16 each case is.

    Cases of the suite gemm where both were measured on one commit, each on the last such: times of
    one day are not compared with those of another.
    """
    both: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in sorted(records, key=lambda record: record.time):
        is_product = (record.suite, record.kind, record.what) == ("gemm", "gpu", "time")
        if is_product and record.commit and (record.contender, record.format) in _SIDES:
            case = tuple(sorted((name, str(value)) for name, value in record.case.items()))
            where = (record.gpu, record.protocol, case, record.commit)
            both.setdefault(where, {})[record.contender] = record
    pairs = [sides for sides in both.values() if len(sides) == len(_SIDES)]
    pairs.sort(key=lambda sides: sides["ours"].time)
    gpu = pairs[-1]["ours"].gpu if pairs else ""
    newest: dict[tuple[Any, ...], float] = {}
    for sides in pairs:
        if sides["ours"].gpu == gpu:
            newest[sides["ours"].key] = sides["torch"].microseconds / sides["ours"].microseconds
    return gpu, sorted(newest.values())


def badge(records: Iterable[Record]) -> str:
    """An SVG that shows the median and the range over all cases, slow ones included."""
    gpu, found = speedups(records)
    message = "not measured yet"
    if found:
        middle = f"{statistics.median(found):.2f}x torch bf16 on {gpu.removeprefix('NVIDIA ')}"
        message = f"{middle} ({found[0]:.2f}x to {found[-1]:.2f}x, {len(found)} cases)"
    # Letters of 11 px Verdana are 6.6 px wide, on the average of such texts.
    label_length, message_length = (round(6.6 * len(text)) for text in (_LABEL, message))
    return _SVG.format(
        label=_LABEL,
        message=escape(message),
        width=label_length + message_length + 24,
        left=label_length + 9,
        message_x=label_length + 18,
        label_length=label_length,
        message_length=message_length,
    )
