"""Quantizing, decoding and the reductions beside them: each format of ours, and peers."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import cute_kernels
from cute_kernels import ops
from cute_kernels.capability import require
from cute_kernels.formats import Format, parse

from ..contender import Contender, Task, relative_error
from ..measure import Meter
from ..operands import generator_of
from .base import Options, Suite, default_meters, element_bytes

FORMATS = (
    "nvfp4",
    "nvfp4:row_scaled",
    "nvfp4:block=16x16",
    "nvfp4:hadamard",
    "nvfp4:stochastic_rounding",
    "nvfp4:hadamard,stochastic_rounding",
    "nvfp4:four_over_six",
    "fp8",
    "mxfp8",
    "fp8_block",
    "fp8_block:block=128x128",
)
#: Which copies: by its name, whether rowwise and whether columnwise.
DIRECTIONS = {"row": (True, False), "column": (False, True), "row+column": (True, True)}
#: Rows, columns and groups, by the kind of what measures.
_SHAPES = {
    "gpu": ((65536, 7168, 8), (131072, 2048, 8)),
    "cpu": ((4096, 4096, 8),),
    "emulator": ((512, 4096, 4),),
}
#: Sums of columns differ by the order in which they are added.
_SUM_BOUND = 1e-5


class Input:
    """A bf16 input of ragged groups whose rows differ in size."""

    def __init__(
        self, rows: int, cols: int, groups: int, device: torch.device, seed: int = 0, copy: int = 0
    ) -> None:
        generator = generator_of(device, seed, copy)
        self.x = torch.randn(rows, cols, dtype=torch.bfloat16, device=device, generator=generator)
        self.x *= torch.exp2(torch.randn(rows, 1, device=device, generator=generator))
        cuts = torch.rand(groups, device=device, generator=generator) + 0.5
        self.offs = (cuts.cumsum(0) / cuts.sum() * rows).round().int()
        self.offs[-1] = rows
        row_amax = self.x.abs().amax(1).float()
        parts = (row_amax[start:end] for start, end in itertools.pairwise([0, *self.offs.tolist()]))
        self.amax = torch.stack(
            [part.amax() if len(part) else part.new_zeros(()) for part in parts]
        )


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What is asked of a quantizer.

    Attributes:
        directions: a key of ``DIRECTIONS``.
        gives_amax: the amaxes of groups are given.
        activates: SwiGLU of the input is quantized.
    """

    directions: str
    gives_amax: bool
    activates: bool = False

    @property
    def ways(self) -> list[bool]:
        """Whether columnwise, of each copy that is asked for."""
        rowwise, columnwise = DIRECTIONS[self.directions]
        return [False] * rowwise + [True] * columnwise

    def fits(self, fmt: Format) -> bool:
        """Whether it makes sense for a format: amaxes are given to what has one a group."""
        return not self.gives_amax or self.has_group_level(fmt)

    def has_group_level(self, fmt: Format) -> bool:
        levels = [fmt.global_scale_for(way) for way in self.ways]
        return any(level is not None and level.per == "group" for level in levels)

    def moved(self, data: Input, fmt: Format) -> float:
        return data.x.nbytes + data.x.numel() // (1 + self.activates) * (
            len(self.ways) * element_bytes(fmt)
        )

    @property
    def case(self) -> dict[str, str]:
        amax = "given" if self.gives_amax else "computed"
        return {
            "op": "swiglu+quantize" if self.activates else "quantize",
            "directions": self.directions,
            "amax": amax,
        }


#: What users ask for, in the order of the tables.
QUANTIZATIONS = tuple(itertools.starmap(Quantization, itertools.product(DIRECTIONS, (True, False))))
_FUSED = tuple(Quantization(directions, False, True) for directions in ("row", "row+column"))


def given(
    fmt: Format, amax: Tensor | None, asked: Quantization, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """The amaxes and the seed that a call gives: one amax a group, or one for each copy."""
    if amax is not None and fmt.is_transformed and len(asked.ways) > 1:
        amax = amax.expand(2, -1)
    return amax, torch.tensor([1, 2], device=device) if fmt.is_stochastic else None


def _quantize(data: Input, text: str, asked: Quantization) -> list[Tensor]:
    amax, seed = given(parse(text), data.amax if asked.gives_amax else None, asked, data.x.device)
    options = (None, seed, "swiglu" if asked.activates else None)
    return ops.grouped_quantize(
        data.x, text, data.offs, amax, *DIRECTIONS[asked.directions], *options
    )


def operand(
    fmt: Format | None, x: Tensor, offs: Tensor | None = None, columnwise: bool = False
) -> tuple[Tensor, list[Tensor] | None]:
    """Codes of a copy and what else it needs to be read, or ``x`` itself."""
    if fmt is None:
        return x, None
    buffers = ops.grouped_quantize(x, fmt.text, offs, None, not columnwise, columnwise)
    named = dict(zip(fmt.buffer_names(columnwise), buffers, strict=True))
    codes, *scales = (named[name] for name in fmt.operand_names(columnwise))
    return codes, scales


def decoded(
    fmt: Format,
    asked: Quantization,
    buffers: list[Tensor],
    offs: Tensor | None,
    rows: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """What follows the copies, then what each stands for."""
    names = list(dict.fromkeys(name for way in asked.ways for name in fmt.buffer_names(way)))
    named, found = dict(zip(names, buffers, strict=False)), []
    for way in asked.ways:
        codes, *rest = (named[name] for name in fmt.operand_names(way))
        found.append(ops.grouped_dequantize(codes, rest, fmt.text, rows, dtype, offs, way))
    return [*buffers[len(names) :], *found]


def bit_error(got: Tensor, want: Tensor) -> float:
    return 0.0 if torch.equal(got, want) else relative_error(got, want) or 1.0


def _quantize_error(data: Input, fmt: Format, asked: Quantization, buffers: list[Tensor]) -> float:
    """0 if all copies decode to the bits that the reference's do."""
    with cute_kernels.backend("reference"):
        both = (buffers, _quantize(data, fmt.text, asked))
        return max(
            map(
                bit_error,
                *(decoded(fmt, asked, of, data.offs, len(data.x), torch.float32) for of in both),
            )
        )


def ours(data: Input, text: str, asked: Quantization, meter: Meter) -> Contender:
    fmt = parse(text)

    def prepare() -> Callable[[], Any]:
        require(
            "grouped_quantize",
            fmt,
            meter.arch,
            columnwise=True in asked.ways,
            activation=asked.activates,
        )
        return functools.partial(_quantize, data, text, asked)

    return Contender(
        "ours",
        text,
        prepare,
        functools.partial(_quantize_error, data, fmt, asked),
        bytes=asked.moved(data, fmt),
    )


def _decoder(data: Input, text: str, way: bool, meter: Meter) -> Contender:
    fmt = parse(text)
    asked = Quantization("column" if way else "row", False)

    def prepare() -> Callable[[], Any]:
        require("grouped_dequantize", fmt, meter.arch, columnwise=way)
        with cute_kernels.backend("reference"):
            buffers = _quantize(data, text, asked)
        return lambda: decoded(fmt, asked, buffers, data.offs, len(data.x), torch.bfloat16)[0]

    def error(got: Tensor) -> float:
        with cute_kernels.backend("reference"):
            return bit_error(got, prepare()())

    return Contender(
        "ours",
        text,
        prepare,
        error,
        bytes=data.x.numel() * (data.x.element_size() + element_bytes(fmt)),
    )


def _reduction(data: Input, op: str, meter: Meter) -> Contender:
    run = getattr(ops, f"grouped_{op}")

    def prepare() -> Callable[[], Any]:
        require(f"grouped_{op}", None, meter.arch, dtype=data.x.dtype)
        return functools.partial(run, data.x, data.offs)

    def error(got: Tensor) -> float:
        with cute_kernels.backend("reference"):
            return relative_error(got, run(data.x, data.offs))

    bound = _SUM_BOUND if op == "dbias" else 0.0
    return Contender(
        "ours",
        "bfloat16",
        prepare,
        error,
        bound,
        bytes=float(data.x.numel() * data.x.element_size()),
    )


@dataclasses.dataclass(frozen=True)
class Tasks:
    """All tasks on inputs of a shape: rows, columns and groups."""

    meter: Meter
    options: Options
    shape: tuple[int, int, int]
    suite: str = "quantize"

    def _task(
        self, case: dict[str, str], contenders: Callable[[Input], Iterable[Contender]]
    ) -> Task:
        data = functools.partial(Input, *self.shape, self.meter.device, self.options.seed)
        sizes: dict[str, Any] = dict(zip(("rows", "cols", "groups"), self.shape, strict=True))
        return Task(
            self.suite, case | sizes | {"dtype": "bfloat16"}, lambda copy: [*contenders(data(copy))]
        )

    def quantize(self, asked: Quantization) -> Task:
        def contenders(data: Input) -> Iterator[Contender]:
            yield from (
                ours(data, text, asked, self.meter) for text in FORMATS if asked.fits(parse(text))
            )
            if not asked.activates:
                yield from self.options.competing(self.meter, "quantizers", data, asked)

        return self._task(asked.case, contenders)

    def __iter__(self) -> Iterator[Task]:
        yield from map(self.quantize, (*QUANTIZATIONS, *_FUSED))

        def decoders(data: Input, way: bool) -> list[Contender]:
            return [_decoder(data, text, way, self.meter) for text in FORMATS]

        for name, way in (("row", False), ("column", True)):
            yield self._task(
                {"op": "dequantize", "directions": name}, functools.partial(decoders, way=way)
            )

        def reductions(data: Input, op: str) -> list[Contender]:
            return [_reduction(data, op, self.meter)]

        for op in ("amax", "dbias"):
            yield self._task({"op": op}, functools.partial(reductions, op=op))


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    for shape in ((320, 512, 3),) if options.quick else _SHAPES[meter.kind]:
        yield from Tasks(meter, options, shape)


SUITE = Suite(_tasks, default_meters, True)
