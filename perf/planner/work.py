"""Work of kernels: bytes, products, instructions, tiles. No times.

Tiles are those of ``gpus.Tiles``, not the ones that the kernels choose: kernels choose by the mean
rows of the groups alone.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from cute_kernels.arch import get_arch
from cute_kernels.formats import Format, parse
from cute_kernels.layout.shapes import ceil_div, round_up
from cute_kernels.layout.slots import TILE_ROWS, num_slot_tiles

from ..records import Record
from ..suites.base import element_bytes
from ..suites.quantize import Quantization
from .gpus import Gpu

_BF16 = 2.0
#: Tiles per SM from which waves even out.
_FEW_WAVES = 4.0
#: Rows of a tile from which its products hide half of the decoding.
_WIDE = 128
#: Bytes per element and launches of SwiGLU: two inputs and a result, for the gradient two more.
_GATE = {"forward": (4 + 2, 1), "backward": (4 + 2 + 4, 1)}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Work of a kernel, or of a few kernels that one call launches.

    Attributes:
        name: Name for people.
        kind: Kind of kernel. Kernels of a kind share coefficients: ``"product"``, ``"wgrad"``,
            ``"quantize"``, ``"expand"`` or ``"elementwise"``.
        bytes: Bytes read and written. Each byte counts once.
        useful: Useful operations, without padding.
        flops: Operations for which tensor cores are busy. Padding and waiting SMs are included.
        mma_type: Data type of the operands of tensor cores. A key of ``Gpu.dense``.
        multiply: Name of the coefficient of ``flops``.
        instructions: Thread instructions, or decoded elements if ``decode`` is a cost per element.
        decode: Name of the coefficient of ``instructions``.
        waves: Tiles that one SM computes one after the other.
        launches: Number of launches.
    """

    name: str
    kind: str
    bytes: float
    useful: float = 0.0
    flops: float = 0.0
    mma_type: str = ""
    multiply: str = ""
    instructions: float = 0.0
    decode: str = ""
    waves: float = 0.0
    launches: int = 1


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of a layer whose weights are (groups, n, k).

    Attributes:
        product: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        sizes: Rows of each group.
        n: N of the weights.
        k: K of the weights.
        a: Format of operand A. None means bf16.
        b: Format of operand B. None means bf16.
        prepacked: True if B is prepacked.
        a_is_decoded: True if a quantizer already gives the values of A that tensor cores multiply.
    """

    product: str
    sizes: Sequence[int]
    n: int
    k: int
    a: Format | None
    b: Format | None
    prepacked: bool = False
    a_is_decoded: bool = False


def stream(
    name: str, kind: str, moved: float, instructions: float = 0.0, launches: int = 1
) -> Kernel:
    """Return a kernel that reads, computes and writes element by element."""
    decode = "instruction" if instructions else ""
    return Kernel(name, kind, moved, instructions=instructions, decode=decode, launches=launches)


def product(work: Product, gpu: Gpu, name: str = "") -> list[Kernel]:
    """Return the kernels of a product.

    On sm_90a another kernel comes before it, which expands operand A, if operands are decoded.
    """
    fmt, name = work.b or work.a, name or work.product
    mma_type, is_decoded = gpu.mma_operand(fmt)
    if is_decoded and work.a is None:
        mma_type = "bfloat16"
    is_wgrad = work.product == "wgrad"
    tiled = _wgrad_work if is_wgrad else _m_grouped_work
    moved, useful, padded, decoded, tiles, width = tiled(work, gpu, is_decoded)
    waves = tiles / gpu.sms
    # With few tiles some SMs wait for the others.
    full_waves = math.ceil(waves) if waves <= _FEW_WAVES else waves
    idle = full_waves / waves if waves else 1.0
    multiply, decode = f"multiply {mma_type}", ""
    if fmt is not None and mma_type.startswith("fp"):
        multiply += f", {fmt.name}"
    if get_arch(gpu.arch).tuned_by != "time":
        # The share of a dense product's rate that these kernels reach was not measured.
        multiply += f", {gpu.arch}"
    kernels = []
    if is_decoded and fmt is not None:
        target = f" to {mma_type}" if work.a is None else ""
        prepacked = ", prepacked" if work.prepacked else ""
        wide = ", wide" if width >= _WIDE else ""
        decode = f"decode {fmt.name}{target}{prepacked}{wide}"
        if not work.a_is_decoded:
            # Operand A is expanded; for wgrad in all slots that the buffer may have.
            rows = sum(work.sizes)
            if is_wgrad:
                rows = num_slot_tiles(rows, len(work.sizes)) * TILE_ROWS
            elements = rows * (work.n if work.product == "dgrad" else work.k)
            expanded = elements * (element_bytes(work.a) + _BF16)
            kernels.append(stream(f"{name}, expand", "expand", expanded))
    kernels.append(
        Kernel(
            name=name,
            kind="wgrad" if is_wgrad else "product",
            bytes=moved,
            useful=useful,
            flops=padded * idle,
            mma_type=mma_type,
            multiply=multiply,
            instructions=decoded * idle * is_decoded,
            decode=decode,
            waves=full_waves,
        )
    )
    return kernels


def _m_grouped_work(work: Product, gpu: Gpu, is_decoded: bool) -> tuple[float, ...]:
    """Return the work of fprop or dgrad.

    Returns:
        Bytes, useful and padded operations, decoded elements, tiles, width of an instruction.
    """
    n, k = (work.k, work.n) if work.product == "dgrad" else (work.n, work.k)
    total, filled = sum(work.sizes), [size for size in work.sizes if size]
    mean = total / min(len(work.sizes), total)
    min_rows, max_rows = gpu.tiles.rows
    rows = min(max_rows, max(min_rows, 1 << math.ceil(math.log2(mean))))
    row_tiles = sum(ceil_div(size, rows) for size in filled)
    padded = sum(round_up(size, gpu.tiles.step or rows) for size in filled)
    token_bytes = _BF16 if is_decoded else element_bytes(work.a)
    weight_bytes = len(filled) * n * k * element_bytes(work.b)
    moved = weight_bytes + total * (k * token_bytes + n * _BF16)
    tiles = row_tiles * ceil_div(n, gpu.tiles.cols)
    return moved, 2.0 * total * n * k, 2.0 * padded * n * k, row_tiles * n * k, tiles, rows


def _wgrad_work(work: Product, gpu: Gpu, is_decoded: bool) -> tuple[float, ...]:
    """Return the same numbers for a gradient of weights, which is written in bf16."""
    groups, total, weights = len(work.sizes), sum(work.sizes), work.n * work.k
    depth = sum(round_up(size, gpu.tiles.depth) for size in work.sizes)
    b_bytes = _BF16 if is_decoded else element_bytes(work.b)
    moved = total * (work.n * element_bytes(work.a) + work.k * b_bytes) + groups * weights * _BF16
    col_tiles = ceil_div(work.k, gpu.tiles.cols)
    tiles = groups * ceil_div(work.n, gpu.tiles.wgrad_rows) * col_tiles
    decoded = depth * work.n * col_tiles
    return moved, 2.0 * total * weights, 2.0 * depth * weights, decoded, tiles, gpu.tiles.cols


class Counts:
    """Instructions per element of an architecture's quantizers, from records of the emulator."""

    def __init__(self, records: Iterable[Record], arch: str) -> None:
        counts: dict[tuple[str, ...], tuple[float, float]] = {}
        for r in records:
            is_ours = r.is_count and r.contender == "ours" and r.gpu.startswith(arch)
            if is_ours and r.quantity == "thread instructions" and "op" in r.case:
                elements = float(r.case["rows"] * r.case["cols"])
                names = (str(r.case.get(name, "")) for name in ("op", "directions", "amax"))
                key = (r.format, *names)
                # Prefer large inputs, where the fixed cost of a CTA counts for less.
                count = (elements, r.value / elements)
                counts[key] = max(counts.get(key, (0.0, 0.0)), count)
        self._per_element = {key: instructions for key, (_, instructions) in counts.items()}

    def per_element(
        self, fmt: Format | None, op: str, directions: str = "", amax: str = ""
    ) -> float | None:
        """Return the instructions per element of an op, None if no record has them.

        A format without counts is taken for one whose codes have as many bits.
        """
        names = ["bfloat16"]
        if fmt is not None:
            texts = {text for text, *_ in self._per_element if text != "bfloat16"}
            names = [
                fmt.text,
                *sorted(t for t in texts if parse(t).element.bits == fmt.element.bits),
            ]
        keys = ((name, op, directions, amax) for name in names)
        return next((self._per_element[key] for key in keys if key in self._per_element), None)


def quantization(
    name: str,
    elements: float,
    fmt: Format,
    counts: Counts,
    directions: str,
    *,
    gives_amax: bool = False,
    to_values: bool = False,
) -> Kernel:
    """Return the kernels that quantize bf16.

    Args:
        name: Name for people.
        elements: Number of elements.
        fmt: Format of the copies.
        counts: Instructions per element.
        directions: Copies, a key of ``suites.quantize.DIRECTIONS``.
        gives_amax: True if the amaxes are given.
        to_values: True if the quantizer gives fp16 values, as a product would expand them from
            codes.
    """
    request = Quantization(directions, gives_amax)
    reads_twice = request.has_group_scale(fmt) and not gives_amax and not fmt.has_given_scale
    two_phases = counts.per_element(fmt, "quantize", directions, "computed")
    one_phase = counts.per_element(fmt, "quantize", directions, "given")
    if reads_twice and two_phases is None and one_phase is not None:
        two_phases = one_phase + (counts.per_element(None, "amax") or 0.0)
    candidates = (two_phases, one_phase) if reads_twice else (one_phase, two_phases)
    instructions = next((count for count in candidates if count is not None), 0.0)
    written = _BF16 if to_values else len(request.copies) * element_bytes(fmt)
    moved = elements * (_BF16 * (1 + reads_twice) + written)
    return stream(name, "quantize", moved, elements * instructions, 1 + reads_twice)


def gate(name: str, elements: float, direction: str) -> Kernel:
    """Return SwiGLU of ``GroupedMLP`` to ``elements``, ``"forward"`` or ``"backward"``."""
    moved, launches = _GATE[direction]
    return stream(name, "elementwise", elements * moved, launches=launches)
