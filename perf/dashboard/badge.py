"""The badge of the README: how much faster than PyTorch, in one line of an SVG."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.records import Record

__all__ = ["badge", "speedups"]

_SIDES = (("ours", "nvfp4:row_scaled x nvfp4"), ("torch", "bfloat16"))
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
    if not pairs:
        return "", []
    gpu = max((sides["ours"] for sides in pairs), key=lambda record: record.time).gpu
    newest: dict[tuple[Any, ...], float] = {}
    for sides in sorted(pairs, key=lambda sides: sides["ours"].time):
        ours, torch = sides["ours"], sides["torch"]
        if ours.gpu == gpu:
            newest[ours.key] = torch.microseconds / ours.microseconds
    return gpu, sorted(newest.values())


def badge(records: Sequence[Record]) -> str:
    """An SVG that shows the median and the range over all cases, slow ones included."""
    gpu, found = speedups(records)
    message = "not measured yet"
    if found:
        middle = statistics.median(found)
        message = (
            f"{middle:.2f}x torch bf16 on {gpu.removeprefix('NVIDIA ')}"
            f" ({found[0]:.2f}x to {found[-1]:.2f}x, {len(found)} cases)"
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
