"""Badge: the speedup over PyTorch, as one line of SVG."""

import statistics
from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape

from ..records import Record

_SIDES = (("ours", "nvfp4:row_scaled x nvfp4"), ("torch", "bfloat16"))
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img">
<title>{text}</title>
<rect width="{width}" height="20" rx="3" fill="#1d4ed8"/>
<text x="6" y="14" fill="#fff" style="font: 11px Verdana" textLength="{length}">{text}</text>
</svg>
"""


def speedups(records: Iterable[Record]) -> tuple[str, list[float]]:
    """Return the GPU of the newest product, and the speedups over torch's bf16 product on it.

    A case of the suite gemm counts if both were measured on one commit; the newest such commit
    gives the speedup. Times of different days are not compared.

    Returns:
        Name of the GPU, and the sorted speedups of all cases.
    """
    sides_of: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in sorted(records, key=lambda record: record.time):
        is_product = (record.suite, record.kind, record.quantity) == ("gemm", "gpu", "time")
        if is_product and record.commit and (record.contender, record.format) in _SIDES:
            case = tuple(sorted((name, str(value)) for name, value in record.case.items()))
            sides_of.setdefault((record.gpu, record.protocol, case, record.commit), {})[
                record.contender
            ] = record
    pairs = [sides for sides in sides_of.values() if len(sides) == len(_SIDES)]
    pairs.sort(key=lambda sides: sides["ours"].time)
    gpu = pairs[-1]["ours"].gpu if pairs else ""
    newest: dict[tuple[Any, ...], float] = {}
    for sides in pairs:
        if sides["ours"].gpu == gpu:
            newest[sides["ours"].key] = sides["torch"].microseconds / sides["ours"].microseconds
    return gpu, sorted(newest.values())


def badge(records: Iterable[Record]) -> str:
    """Return an SVG with the median and the range of the speedups of all cases."""
    gpu, ratios = speedups(records)
    text = "NVFP4 grouped GEMM: not measured yet"
    if ratios:
        text = f"NVFP4 grouped GEMM: {statistics.median(ratios):.2f}x torch bf16 on {gpu}"
        text += f" ({ratios[0]:.2f}x to {ratios[-1]:.2f}x, {len(ratios)} cases)"
    # Letters of 11 px Verdana are 6.6 px wide on average in such texts.
    length = round(6.6 * len(text))
    return _SVG.format(text=escape(text), length=length, width=length + 12)
