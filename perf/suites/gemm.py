"""Grouped products of one layer's shapes: each format of ours, and peers."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import grouped
from cute_kernels.capability import require
from cute_kernels.formats import Format, parse

from ..cases import DECODE_TOKENS, HEADLINE, MODELS, TRAINING_ROWS, GroupedShape
from ..contender import Contender, Task
from ..measure import Meter
from ..operands import Operands
from .base import Options, Suite, default_meters, element_bytes

#: Rounding to bf16 is 1.7e-3; the sums are of exact products in fp32.
_BOUND = 4e-3


@dataclasses.dataclass(frozen=True)
class Pair:
    """Formats of the two operands of a product.

    Attributes:
        a, b: texts of the formats, None for bf16.
        prepacked: B has the order of bits of ``prepack``.
        quantizes: A is quantized by the same call.
        accumulates: the product is added to fp32, as gradients of weights are.
    """

    a: str | None
    b: str | None
    prepacked: bool = False
    quantizes: bool = False
    accumulates: bool = False

    def text(self, product: str) -> str:
        """As ``Record.format``, in one of ``cases.PRODUCTS``."""
        if self.a == self.b is None:
            return "bfloat16"
        return f"{self.a or 'bfloat16'} x {self.a if product == 'wgrad' else self.b}"

    @property
    def variant(self) -> str:
        said = {"prepacked": self.prepacked, "tokens quantized too": self.quantizes}
        said["accumulating"] = self.accumulates
        return "".join(f", {text}" for text, is_so in said.items() if is_so)

    def fits(self, product: str) -> bool:
        """Whether it makes sense for one of ``cases.PRODUCTS``.

        A wgrad has no weights, and no operand with a level of each row.
        """
        if product != "wgrad":
            return not self.accumulates and (product == "fprop" or not self.quantizes)
        a, b = self.formats
        level = None if a is None else a.global_scale
        by_row = level is not None and level.per == "row"
        return not (by_row or self.prepacked or self.quantizes or (a is None and b is not None))

    @property
    def formats(self) -> tuple[Format | None, Format | None]:
        return (self.a and parse(self.a)) or None, (self.b and parse(self.b)) or None


#: What is multiplied; of wgrad both operands have the first format.
PAIRS = (
    Pair("nvfp4:row_scaled", "nvfp4"),
    Pair("nvfp4:row_scaled", "nvfp4", prepacked=True),
    Pair("nvfp4:row_scaled", "nvfp4", quantizes=True),
    Pair("nvfp4", "nvfp4:block=16x16"),
    Pair(None, "nvfp4"),
    Pair("fp8", "fp8"),
    Pair("mxfp8", "mxfp8"),
    Pair("fp8_block", "fp8_block:block=128x128"),
    Pair("fp8_block", "fp8_block:block=128x128", quantizes=True),
    Pair(None, None),
    *(Pair(text, text, accumulates=True) for text in ("nvfp4", "fp8", "mxfp8", "fp8_block", None)),
)
#: Rows of an expert where decoding, mixed and training meet.
_TOKENS = (1, 8, 16, 64, 128, 512, 4096)
_SMALL = GroupedShape("small", "up", 4, 256, 256)
_SMALL_ROWS = 200


def ours(pair: Pair, work: Operands, meter: Meter) -> Contender:
    return Contender(
        name=f"ours{pair.variant}",
        format=pair.text(work.product),
        prepare=partial(_prepare, pair, work, meter),
        error=partial(_error, pair, work),
        bound=_BOUND,
        # What is added to is read and written.
        bytes=work.least_bytes(*_bytes(pair, work), 8.0 if pair.accumulates else 2.0),
        flops=work.flops,
    )


def _bytes(pair: Pair, work: Operands) -> tuple[float, float]:
    a, b = pair.formats
    if pair.quantizes:
        return element_bytes(None), element_bytes(b)
    return element_bytes(a), element_bytes(a if work.is_wgrad else b)


def _operands(pair: Pair, work: Operands) -> tuple[Tensor, Tensor]:
    a_fmt, b_fmt = pair.formats
    a, b = work.a, work.b
    if work.is_wgrad:
        if a_fmt is not None:
            a, b = (
                grouped.quantize(x, a_fmt, rowwise=False, columnwise=True, offs=work.offs)
                for x in (a, b)
            )
        return a, b
    if a_fmt is not None and not pair.quantizes:
        a = grouped.quantize(a, a_fmt, offs=work.offs)
    if b_fmt is not None:
        b = grouped.quantize(b, b_fmt, columnwise=work.product == "dgrad")
        if pair.prepacked:
            b = b.prepack()
    return a, b


def _prepare(pair: Pair, work: Operands, meter: Meter) -> Callable[[], Tensor]:
    a_fmt, b_fmt = pair.formats
    is_mixed = a_fmt is None and b_fmt is not None
    op = "grouped_gemm_w4a16" if is_mixed else "grouped_gemm"
    for fmt in dict.fromkeys((b_fmt,) if is_mixed or pair.prepacked else (a_fmt, b_fmt)):
        require(op, fmt, meter.arch, columnwise=work.product != "fprop", prepacked=pair.prepacked)
    a, b = _operands(pair, work)
    options: dict[str, Any] = {"transpose_b": True} if work.product == "dgrad" else {}
    if pair.quantizes:
        # Squares are not multiplied by squares.
        gradient = a_fmt if b_fmt is not None and b_fmt.is_2d else b_fmt
        recipe = grouped.recipes.Recipe(input=a_fmt, weight=b_fmt, grad_output=gradient)
        return partial(grouped.linear, a, b, None, work.offs, recipe)
    if a_fmt is None:
        options["offs"] = work.offs
    if pair.accumulates:
        options["out"] = torch.zeros(dataclasses.astuple(work.shape)[2:], device=work.device)
        options["accumulate"] = True
    return partial(grouped.grouped_gemm, a, b, **options)


def _error(pair: Pair, work: Operands, out: Tensor) -> float:
    a, b = _operands(dataclasses.replace(pair, quantizes=False), work)
    return work.error(
        out, _values(a), _values(b, "columnwise" if work.product == "dgrad" else None)
    )


def _values(x: Tensor, direction: str | None = None) -> Tensor:
    return x.dequantize(torch.float32, direction) if isinstance(x, grouped.GroupedTensor) else x


def task(
    meter: Meter,
    options: Options,
    shape: GroupedShape,
    rows: int,
    product: str,
    routing: str,
    suite: str = "gemm",
    pairs: Sequence[Pair] = PAIRS,
) -> Task:
    def contenders(copy: int) -> list[Contender]:
        work = Operands(shape, rows, product, routing, meter.device, options.seed, copy)
        found = [ours(pair, work, meter) for pair in pairs if pair.fits(product)]
        return [*found, *options.competing(meter, "products", work)]

    return Task(
        suite, {**shape.case, "rows": rows, "product": product, "routing": routing}, contenders
    )


def _cases(options: Options) -> Iterator[tuple[GroupedShape, int, str, str]]:
    for model, layer in HEADLINE:
        shape = MODELS[model].shape(layer)
        for tokens in _TOKENS:
            yield shape, tokens * shape.experts, "fprop", "balanced"
    first = MODELS[HEADLINE[0][0]].shape(HEADLINE[0][1])
    for product, tokens in itertools.product(("dgrad", "wgrad"), (128, 512)):
        yield first, tokens * first.experts, product, "balanced"
    for routing, tokens in itertools.product(("zipf", "hot", "empty"), (16, 128)):
        yield first, tokens * first.experts, "fprop", routing
    if options.full:
        for every, layer in itertools.product(MODELS.values(), ("up", "down")):
            shape = every.shape(layer)
            for count in (*(n * every.top_k for n in DECODE_TOKENS), *TRAINING_ROWS):
                yield shape, count, "fprop", "random"


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    if meter.kind == "gpu" and not options.quick:
        cases = dict.fromkeys(_cases(options))
    else:
        products = itertools.product(("fprop", "dgrad", "wgrad"), ("balanced", "empty"))
        cases = dict.fromkeys((_SMALL, _SMALL_ROWS, *which) for which in products)
    for case in cases:
        yield task(meter, options, *case)


SUITE = Suite(_tasks, default_meters, True)
