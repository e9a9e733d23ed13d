"""Grouped products of a layer's shapes, in each format of this package, and of peers."""

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

#: Relative error of a correct result: rounding to bf16 gives 1.7e-3, sums in fp32 are exact enough.
_BOUND = 4e-3


@dataclasses.dataclass(frozen=True)
class Pair:
    """Formats of the two operands of a product.

    Attributes:
        a: Text of the format of A, None for bf16. ``b`` is that of B.
        prepacked: True if B is prepacked.
        quantizes: True if the call also quantizes A.
        accumulates: True if the product is added to fp32, as gradients of weights are.
    """

    a: str | None
    b: str | None
    prepacked: bool = False
    quantizes: bool = False
    accumulates: bool = False

    def text(self, product: str) -> str:
        """Return ``Record.format`` for one of ``cases.PRODUCTS``."""
        if self.a == self.b is None:
            return "bfloat16"
        return f"{self.a or 'bfloat16'} x {self.a if product == 'wgrad' else self.b}"

    @property
    def variant(self) -> str:
        """Suffix of the contender's name."""
        options = {
            "prepacked": self.prepacked,
            "tokens quantized too": self.quantizes,
            "accumulating": self.accumulates,
        }
        return "".join(f", {text}" for text, is_set in options.items() if is_set)

    def is_valid_for(self, product: str) -> bool:
        """Return True if the pair is possible for one of ``cases.PRODUCTS``.

        A wgrad has no weights, and no operand with one global scale per row.
        """
        if product != "wgrad":
            return not self.accumulates and (product == "fprop" or not self.quantizes)
        a, b = self.formats
        scale = None if a is None else a.global_scale
        is_row_scaled = scale is not None and scale.per == "row"
        return not (
            is_row_scaled or self.prepacked or self.quantizes or (a is None and b is not None)
        )

    @property
    def formats(self) -> tuple[Format | None, Format | None]:
        """Formats of A and B, None for bf16."""
        return (self.a and parse(self.a)) or None, (self.b and parse(self.b)) or None


#: Pairs that are measured; in wgrad both operands have the first format.
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
#: Tokens per expert, from decoding over mixed batches to training.
_TOKENS = (1, 8, 16, 64, 128, 512, 4096)
_SMALL = GroupedShape("small", "up", 4, 256, 256)
_SMALL_ROWS = 200


def ours(pair: Pair, work: Operands, meter: Meter) -> Contender:
    """Return the product of this package."""
    return Contender(
        name=f"ours{pair.variant}",
        format=pair.text(work.product),
        prepare=partial(_prepare, pair, work, meter),
        error=partial(_error, pair, work),
        bound=_BOUND,
        # An fp32 output that is added to is read and written.
        bytes=work.least_bytes(*_bytes(pair, work), 8.0 if pair.accumulates else 2.0),
        flops=work.flops,
    )


def _bytes(pair: Pair, work: Operands) -> tuple[float, float]:
    """Return the bytes per element of both operands."""
    a, b = pair.formats
    if pair.quantizes:
        return element_bytes(None), element_bytes(b)
    return element_bytes(a), element_bytes(a if work.is_wgrad else b)


def _operands(pair: Pair, work: Operands) -> tuple[Tensor, Tensor]:
    """Return both operands, quantized as the pair says."""
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
    """Quantize the operands and return the call of the product."""
    a_fmt, b_fmt = pair.formats
    is_mixed = a_fmt is None and b_fmt is not None
    op = "grouped_gemm_w4a16" if is_mixed else "grouped_gemm"
    for fmt in dict.fromkeys((b_fmt,) if is_mixed or pair.prepacked else (a_fmt, b_fmt)):
        require(op, fmt, meter.arch, columnwise=work.product != "fprop", prepacked=pair.prepacked)
    a, b = _operands(pair, work)
    options: dict[str, Any] = {"transpose_b": True} if work.product == "dgrad" else {}
    if pair.quantizes:
        # Operands with square blocks are not multiplied by each other.
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
    """Return the error relative to the fp32 product of the decoded operands."""
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
    """Return the task of a product, of all valid ``pairs`` and of peers."""

    def contenders(copy: int) -> list[Contender]:
        work = Operands(shape, rows, product, routing, meter.device, options.seed, copy)
        mine = [ours(pair, work, meter) for pair in pairs if pair.is_valid_for(product)]
        return [*mine, *options.competing(meter, "products", work)]

    return Task(
        suite, {**shape.case, "rows": rows, "product": product, "routing": routing}, contenders
    )


def cases(options: Options) -> Iterator[tuple[GroupedShape, int, str, str]]:
    """Yield shape, rows, product and routing of each case on a GPU; some come twice."""
    for model, layer in HEADLINE:
        shape = MODELS[model].shape(layer)
        for tokens in _TOKENS:
            yield shape, tokens * shape.experts, "fprop", "balanced"
    model, layer = HEADLINE[0]
    main = MODELS[model].shape(layer)
    for product, tokens in itertools.product(("dgrad", "wgrad"), (128, 512)):
        yield main, tokens * main.experts, product, "balanced"
    for routing, tokens in itertools.product(("zipf", "hot", "empty"), (16, 128)):
        yield main, tokens * main.experts, "fprop", routing
    if options.full:
        for config, layer in itertools.product(MODELS.values(), ("up", "down")):
            shape = config.shape(layer)
            for rows in (*(n * config.top_k for n in DECODE_TOKENS), *TRAINING_ROWS):
                yield shape, rows, "fprop", "random"


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    if meter.kind == "gpu" and not options.quick:
        distinct = dict.fromkeys(cases(options))
    else:
        products = itertools.product(("fprop", "dgrad", "wgrad"), ("balanced", "empty"))
        distinct = dict.fromkeys((_SMALL, _SMALL_ROWS, *product) for product in products)
    for case in distinct:
        yield task(meter, options, *case)


SUITE = Suite(_tasks, default_meters, has_peers=True)
