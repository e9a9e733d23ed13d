"""The ceilings of rooflines: measured where a run measured them, published elsewhere."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.records import Record

__all__ = ["PUBLISHED", "Roof", "roofs_of"]

#: Rates of data sheets, dense: memory in TB/s, products in TFLOP/s. A name is looked for in that of
#: the GPU, the longest first.
PUBLISHED = {
    "H100": {"copy": 3.35, "bfloat16": 989.0, "fp8": 1979.0},
    "H200": {"copy": 4.8, "bfloat16": 989.0, "fp8": 1979.0},
    "B200": {"copy": 8.0, "bfloat16": 2250.0, "fp8": 4500.0, "fp4": 9000.0},
    "GB200": {"copy": 8.0, "bfloat16": 2500.0, "fp8": 5000.0, "fp4": 10000.0},
    "B300": {"copy": 8.0, "bfloat16": 2250.0, "fp8": 4500.0, "fp4": 14000.0},
}
_NAMES = {"copy": "memory", "bfloat16": "bf16", "fp8": "FP8", "fp4": "FP4"}


@dataclasses.dataclass(frozen=True)
class Roof:
    """A rate that nothing exceeds.

    Attributes:
        kind: ``"copy"`` of memory, else a precision.
        name: for people.
        rate: TB/s of memory, TFLOP/s of products.
        measured: whether a run measured it; else it is published.
    """

    kind: str
    name: str
    rate: float
    measured: bool


def roofs_of(gpu: str, records: Sequence[Record]) -> list[Roof]:
    """The roofs of a GPU, memory first; the highest of those that were measured."""
    published: dict[str, float] = {}
    for name in sorted(PUBLISHED, key=len):
        if name in gpu:
            published = PUBLISHED[name]
    measured: dict[str, float] = {}
    for record in records:
        if record.gpu == gpu and record.kind == "gpu":
            for kind, rate in record.ceilings.items():
                measured[kind] = max(rate, measured.get(kind, 0.0))
    return [
        Roof(kind, name, measured.get(kind) or published[kind], kind in measured)
        for kind, name in _NAMES.items()
        if kind in measured or kind in published
    ]
