"""Which kernel a record is of, and which contenders are only variants of another."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perf.records import Record

__all__ = ["Kernel", "is_variant", "kernel_of"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What has a page of its own: an op of this package in a format.

    Attributes:
        op: ``"quantize"``, ``"gemm"``, ...
        format: as in records.
        parts: what else tells it from others: ``("row", "amax given")``.
    """

    op: str
    format: str
    parts: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Its name for people."""
        return ", ".join(filter(None, (f"{self.op} {self.format}".strip(), *self.parts)))

    @property
    def slug(self) -> str:
        """Its name in addresses."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def kernel_of(record: Record) -> Kernel | None:
    """The kernel of ours that a record measures; None of peers, of layers and of calls."""
    case = record.case
    if not record.contender.startswith("ours") or record.suite not in (
        "counts",
        "quantize",
        "gemm",
    ):
        return None
    if "op" in case:
        amax = f"amax {case['amax']}" if "amax" in case else ""
        parts = tuple(filter(None, (str(case.get("directions", "")), amax)))
        return Kernel(str(case["op"]), record.format, parts)
    if "product" in case:
        prepacked = ("prepacked",) * ("prepacked" in record.contender.split(", "))
        return Kernel("gemm", record.format, (str(case["product"]), *prepacked))
    return None


def is_variant(contender: str) -> bool:
    """Whether it is ours with a setting that the op would choose itself, such as a tile."""
    return contender.startswith("ours,") and any(letter.isdigit() for letter in contender)
