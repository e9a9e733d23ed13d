"""Roofs of rates, from data sheets, and the refusal of records above them.

Records are checked when they are measured and when they are loaded. Two rates are impossible:

**Memory.** The least bytes that the memory must move, at more than its rate plus 5 %. Protocols
that are ``L2-cold`` go through more operands than L2 holds, so inputs and results of any size come
from memory. Tensors that the call itself writes and reads again may stay in L2: only their bytes
beyond the size of L2 count. With other protocols L2 may hold operands, too. Its size is then
subtracted.

**Tensor cores.** The useful operations, at more than their rate plus 10 %, since clocks reach 1980
MHz where the data sheet assumes 1830. The rate is that of the narrowest type of the GPU that is at
least as wide as the widest operand.

GPUs without a data sheet here are not checked.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .traffic import work_of

if TYPE_CHECKING:
    from .records import Record

#: Dense rates of data sheets: memory in TB/s, products in TFLOP/s; and megabytes of L2. The longest
#: name that is part of the GPU's name counts.
PUBLISHED = {
    "H100": {"copy": 3.35, "bfloat16": 989.0, "fp8": 1979.0, "l2": 50.0},
    "H100 NVL": {"copy": 3.9, "bfloat16": 835.0, "fp8": 1671.0, "l2": 50.0},
    "H100 PCIe": {"copy": 2.0, "bfloat16": 756.0, "fp8": 1513.0, "l2": 50.0},
    "H200": {"copy": 4.8, "bfloat16": 989.0, "fp8": 1979.0, "l2": 50.0},
    "GH200": {"copy": 4.9, "bfloat16": 989.0, "fp8": 1979.0, "l2": 50.0},
    "B200": {"copy": 8.0, "bfloat16": 2250.0, "fp8": 4500.0, "fp4": 9000.0, "l2": 126.0},
    "GB200": {"copy": 8.0, "bfloat16": 2500.0, "fp8": 5000.0, "fp4": 10000.0, "l2": 126.0},
    "B300": {"copy": 8.0, "bfloat16": 2250.0, "fp8": 4500.0, "fp4": 14000.0, "l2": 126.0},
}
#: Bits of the operands of tensor cores.
_BITS = {"fp4": 4, "fp8": 8, "bfloat16": 16}
_TIMES = ("us", "ms", "s")
_MEMORY_MARGIN, _PRODUCT_MARGIN = 1.05, 1.1


def published(gpu: str) -> dict[str, float]:
    """Return the rates of a GPU's data sheet, without L2; empty for an unknown GPU."""
    return {kind: rate for kind, rate in _sheet(gpu).items() if kind != "l2"}


def _sheet(gpu: str) -> dict[str, float]:
    names = sorted((name for name in PUBLISHED if name in gpu), key=len)
    return PUBLISHED[names[-1]] if names else {}


def _products_roof(sheet: dict[str, float], text: str) -> float:
    """Return the TFLOP/s of products of operands in the formats ``text``, as in ``Record``."""
    matches = [re.search(r"fp([48])", operand.lower()) for operand in text.split(" x ")]
    widest = max(16 if match is None else int(match[1]) for match in matches)
    return max(rate for kind, rate in sheet.items() if _BITS.get(kind, 0) >= widest)


def _least_from_memory(record: "Record", l2: float) -> float:
    """Return the bytes of a record that the memory must move."""
    if record.bytes is None:
        return 0.0
    work = work_of(vars(record))
    cached = 2 * sum(min(size, l2) for size in work.reused) if work is not None else 0.0
    if "L2-cold" not in record.protocol or "quick" in record.protocol:
        cached += l2
    return max(0.0, record.bytes - cached)


def _rates(record: "Record", sheet: dict[str, float]) -> Iterator[tuple[str, float, float, str]]:
    """Yield the name of each rate of a record, the rate, its roof, and the unit of both."""
    for kind, rate in record.ceilings.items():
        # A kernel that only reads is bounded by the same memory.
        roof = sheet.get("copy" if kind == "read" else kind)
        if roof is not None:
            is_memory = kind in ("copy", "read")
            margin, unit = (_MEMORY_MARGIN, "TB/s") if is_memory else (_PRODUCT_MARGIN, "TFLOP/s")
            yield f"the ceiling {kind}", rate, margin * roof, unit
    if record.unit not in _TIMES or not record.value:
        return
    moved = _least_from_memory(record, sheet["l2"] * 1e6)
    yield "its bytes", moved / record.microseconds * 1e-6, _MEMORY_MARGIN * sheet["copy"], "TB/s"
    if record.tflops is not None:
        yield (
            "its operations",
            record.tflops,
            _PRODUCT_MARGIN * _products_roof(sheet, record.format),
            "TFLOP/s",
        )


def why_impossible(record: "Record") -> str:
    """Return why the GPU of a record cannot be as fast as the record says.

    Returns: The reason. Empty if the rates are possible or the GPU is unknown.
    """
    sheet = _sheet(record.gpu)
    if record.kind != "gpu" or not sheet:
        return ""
    for name, rate, roof, unit in _rates(record, sheet):
        if rate > roof:
            return (
                f"{name} take {rate:.4g} {unit}, {record.gpu} has at most {roof:.4g}: "
                "work or time are wrong"
            )
    return ""
