"""What kernels have to do: bytes, products, instructions, tiles. No times.

Tiles are as ``gpus.Tiles`` says, not as the kernels choose: they see the mean of the groups alone.
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
#: Tiles an SM from which waves even out.
_FEW_WAVES = 4.0
#: Rows of a tile from which its products hide half of what is decoded beside them.
_WIDE = 128
#: Bytes an element and launches of SwiGLU: two inputs and a result; and with its gradient two more.
_GATE = {"forward": (4 + 2, 1), "backward": (4 + 2 + 4, 1)}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The work of a kernel, or of a few that one call launches.

    Attributes:
        kind: kernels that share coefficients: ``"product"``, ``"wgrad"``, ``"quantize"``,
            ``"expand"`` or ``"elementwise"``.
        bytes: read and written, each once.
        useful: operations that were asked for.
        flops: operations that tensor cores are busy for: with padding, and SMs that wait.
        multiplied: what they multiply, a key of ``Gpu.dense``.
        multiply: name of the coefficient of that.
        instructions: of threads; elements that are decoded, where ``decode`` is one's price.
        decode: name of the coefficient of those.
        waves: tiles one after the other on an SM.
    """

    name: str
    kind: str
    bytes: float
    useful: float = 0.0
    flops: float = 0.0
    multiplied: str = ""
    multiply: str = ""
    instructions: float = 0.0
    decode: str = ""
    waves: float = 0.0
    launches: int = 1


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of a layer whose weights are (groups, n, k).

    Attributes:
        sizes: rows of each group.
        a, b: formats of the operands, None for bf16.
        prepacked: B has the order of bits of ``prepack``.
        ready: A comes as what is multiplied, from a quantizer that makes it.
    """

    product: str
    sizes: Sequence[int]
    n: int
    k: int
    a: Format | None
    b: Format | None
    prepacked: bool = False
    ready: bool = False


def stream(
    name: str, kind: str, moved: float, instructions: float = 0.0, launches: int = 1
) -> Kernel:
    """Kernels that read and write, and compute an element at a time."""
    decode = "instruction" if instructions else ""
    return Kernel(name, kind, moved, instructions=instructions, decode=decode, launches=launches)


def product(work: Product, gpu: Gpu, name: str = "") -> list[Kernel]:
    """The kernels of a product: on sm_90a one before it, where operands are decoded."""
    fmt, name = work.b or work.a, name or work.product
    multiplied, is_decoded = gpu.multiplied(fmt)
    if is_decoded and work.a is None:
        multiplied = "bfloat16"
    is_wgrad = work.product == "wgrad"
    cut = _wgrad if is_wgrad else _m_grouped
    moved, useful, padded, decoded, tiles, width = cut(work, gpu, is_decoded)
    waves = tiles / gpu.sms
    # While there are few tiles some SMs wait for the others.
    whole = math.ceil(waves) if waves <= _FEW_WAVES else waves
    idle = whole / waves if waves else 1.0
    multiply, decode = f"multiply {multiplied}", ""
    if fmt is not None and multiplied.startswith("fp"):
        multiply += f", {fmt.name}"
    if get_arch(gpu.arch).tuned_by != "time":
        # What share of a dense product's rate kernels have there was not measured.
        multiply += f", {gpu.arch}"
    kernels = []
    if is_decoded and fmt is not None:
        to = f" to {multiplied}" * (work.a is None)
        decode = (
            f"decode {fmt.name}{to}{', prepacked' * work.prepacked}{', wide' * (width >= _WIDE)}"
        )
        if not work.ready:
            # Operand N becomes what is multiplied; of a wgrad in all slots that there may be.
            rows = sum(work.sizes)
            if is_wgrad:
                rows = num_slot_tiles(rows, len(work.sizes)) * TILE_ROWS
            elements = rows * (work.n if work.product == "dgrad" else work.k)
            before = elements * (element_bytes(work.a) + _BF16)
            kernels.append(stream(f"{name}, expand", "expand", before))
    kernel = Kernel(
        *(name, "wgrad" if is_wgrad else "product", moved, useful, padded * idle),
        *(multiplied, multiply, decoded * idle * is_decoded, decode, whole),
    )
    return [*kernels, kernel]


def _m_grouped(work: Product, gpu: Gpu, is_decoded: bool) -> tuple[float, ...]:
    """Bytes, useful and padded operations, decoded elements, tiles, width of an instruction."""
    n, k = (work.k, work.n) if work.product == "dgrad" else (work.n, work.k)
    total, live = sum(work.sizes), [size for size in work.sizes if size]
    mean = total / min(len(work.sizes), total)
    least, most = gpu.tiles.rows
    rows = min(most, max(least, 1 << math.ceil(math.log2(mean))))
    row_tiles = sum(ceil_div(size, rows) for size in live)
    padded = sum(round_up(size, gpu.tiles.step or rows) for size in live)
    tokens = _BF16 if is_decoded else element_bytes(work.a)
    moved = len(live) * n * k * element_bytes(work.b) + total * (k * tokens + n * _BF16)
    tiles = row_tiles * ceil_div(n, gpu.tiles.cols)
    return moved, 2.0 * total * n * k, 2.0 * padded * n * k, row_tiles * n * k, tiles, rows


def _wgrad(work: Product, gpu: Gpu, is_decoded: bool) -> tuple[float, ...]:
    """The same, of a gradient of weights, which is written in bf16."""
    groups, total, weights = len(work.sizes), sum(work.sizes), work.n * work.k
    depth = sum(round_up(size, gpu.tiles.depth) for size in work.sizes)
    other = _BF16 if is_decoded else element_bytes(work.b)
    moved = total * (work.n * element_bytes(work.a) + work.k * other) + groups * weights * _BF16
    across = ceil_div(work.k, gpu.tiles.cols)
    tiles = groups * ceil_div(work.n, gpu.tiles.wgrad_rows) * across
    decoded = depth * work.n * across
    return moved, 2.0 * total * weights, 2.0 * depth * weights, decoded, tiles, gpu.tiles.cols


class Counts:
    """Instructions an element of an architecture's quantizers, from records of the emulator."""

    def __init__(self, records: Iterable[Record], arch: str) -> None:
        found: dict[tuple[str, ...], tuple[float, float]] = {}
        for r in records:
            is_ours = r.is_count and r.contender == "ours" and r.gpu.startswith(arch)
            if is_ours and r.quantity == "thread instructions" and "op" in r.case:
                elements = float(r.case["rows"] * r.case["cols"])
                names = (str(r.case.get(name, "")) for name in ("op", "directions", "amax"))
                key = (r.format, *names)
                # Of large inputs, where what a CTA does once counts for less.
                counted = (elements, r.value / elements)
                found[key] = max(found.get(key, (0.0, 0.0)), counted)
        self._found = {key: each for key, (_, each) in found.items()}

    def of(self, fmt: Format | None, op: str, directions: str = "", amax: str = "") -> float | None:
        """Of one; a format without counts is taken for one that has codes of as many bits."""
        names = ["bfloat16"]
        if fmt is not None:
            texts = {text for text, *_ in self._found if text != "bfloat16"}
            names = [
                fmt.text,
                *sorted(t for t in texts if parse(t).element.bits == fmt.element.bits),
            ]
        keys = ((name, op, directions, amax) for name in names)
        return next((self._found[key] for key in keys if key in self._found), None)


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
    """The kernels that quantize bf16; ``to_values`` to fp16, where a product would expand codes."""
    asked = Quantization(directions, gives_amax)
    reads_twice = asked.has_group_level(fmt) and not gives_amax and not fmt.has_given_scale
    computed = counts.of(fmt, "quantize", directions, "computed")
    given = counts.of(fmt, "quantize", directions, "given")
    if reads_twice and computed is None and given is not None:
        computed = given + (counts.of(None, "amax") or 0.0)
    first, second = (computed, given) if reads_twice else (given, computed)
    each = next((count for count in (first, second) if count is not None), 0.0)
    written = _BF16 if to_values else len(asked.ways) * element_bytes(fmt)
    moved = elements * (_BF16 * (1 + reads_twice) + written)
    return stream(name, "quantize", moved, elements * each, 1 + reads_twice)


def gate(name: str, elements: float, which: str) -> Kernel:
    """SwiGLU of ``GroupedMLP`` to ``elements``, ``which`` is ``"forward"`` or ``"backward"``."""
    moved, launches = _GATE[which]
    return stream(name, "elementwise", elements * moved, launches=launches)
