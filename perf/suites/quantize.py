"""Quantizers, decoding and reductions, in each format of this package, and of peers."""

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
#: Copies by name: (rowwise, columnwise).
DIRECTIONS = {"row": (True, False), "column": (False, True), "row+column": (True, True)}
#: Rows, columns and groups, by the kind of the meter.
_SHAPES = {
    "gpu": ((65536, 7168, 8), (131072, 2048, 8)),
    "cpu": ((4096, 4096, 8),),
    "emulator": ((512, 4096, 4),),
}
#: Relative error of column sums, which depend on the order of additions.
_SUM_BOUND = 1e-5


class Input:
    """A bf16 input (rows, cols) of ragged groups whose rows differ in magnitude.

    Attributes:
        x: Input.
        offs: End row of each group.
        amax: Largest magnitude of each group.
    """

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
        bounds = itertools.pairwise([0, *self.offs.tolist()])
        amaxes = [row_amax[start:end] for start, end in bounds]
        self.amax = torch.stack(
            [values.amax() if len(values) else values.new_zeros(()) for values in amaxes]
        )


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A request to a quantizer.

    Attributes:
        directions: A key of ``DIRECTIONS``.
        gives_amax: True if the amaxes of the groups are given.
        activates: True if SwiGLU of the input is quantized.
    """

    directions: str
    gives_amax: bool
    activates: bool = False

    @property
    def copies(self) -> list[bool]:
        """An entry per requested copy: True for the columnwise one."""
        rowwise, columnwise = DIRECTIONS[self.directions]
        return [False] * rowwise + [True] * columnwise

    def is_valid_for(self, fmt: Format) -> bool:
        """Return True unless amaxes of groups are given to a format that has none."""
        return not self.gives_amax or self.has_group_scale(fmt)

    def has_group_scale(self, fmt: Format) -> bool:
        """Return True if a copy in a format has one global scale per group."""
        scales = [fmt.global_scale_for(columnwise) for columnwise in self.copies]
        return any(scale is not None and scale.per == "group" for scale in scales)

    def moved_bytes(self, data: Input, fmt: Format) -> float:
        """Return the bytes of the input and of the copies."""
        outputs = data.x.numel() // (1 + self.activates)
        return data.x.nbytes + outputs * (len(self.copies) * element_bytes(fmt))

    @property
    def case(self) -> dict[str, str]:
        """Fields for the case of a record."""
        amax = "given" if self.gives_amax else "computed"
        return {
            "op": "swiglu+quantize" if self.activates else "quantize",
            "directions": self.directions,
            "amax": amax,
        }


#: Quantizations in the order of the tables.
QUANTIZATIONS = tuple(itertools.starmap(Quantization, itertools.product(DIRECTIONS, (True, False))))
_FUSED = tuple(Quantization(directions, False, True) for directions in ("row", "row+column"))


def amax_and_seed(
    fmt: Format, amax: Tensor | None, request: Quantization, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the arguments ``amax`` and ``seed`` of a call.

    Args:
        fmt: Format of the copies.
        amax: (groups,). It is repeated for each copy of a transformed format.
        request: Requested copies.
        device: Device of the seed.
    """
    if amax is not None and fmt.is_transformed and len(request.copies) > 1:
        amax = amax.expand(2, -1)
    return amax, torch.tensor([1, 2], device=device) if fmt.is_stochastic else None


def _quantize(data: Input, text: str, request: Quantization) -> list[Tensor]:
    """Quantize an input as requested, and return the buffers of the copies."""
    group_amax = data.amax if request.gives_amax else None
    amax, seed = amax_and_seed(parse(text), group_amax, request, data.x.device)
    rowwise, columnwise = DIRECTIONS[request.directions]
    return ops.grouped_quantize(
        data.x,
        text,
        data.offs,
        amax,
        rowwise=rowwise,
        columnwise=columnwise,
        seed=seed,
        activation="swiglu" if request.activates else None,
    )


def quantized_operand(
    fmt: Format | None, x: Tensor, offs: Tensor | None = None, columnwise: bool = False
) -> tuple[Tensor, list[Tensor] | None]:
    """Return the codes and the scales of a copy of ``x``, or ``x`` and None without a format."""
    if fmt is None:
        return x, None
    buffers = ops.grouped_quantize(x, fmt.text, offs, rowwise=not columnwise, columnwise=columnwise)
    named = dict(zip(fmt.buffer_names(columnwise), buffers, strict=True))
    codes, *scales = (named[name] for name in fmt.operand_names(columnwise))
    return codes, scales


def dequantize_copies(
    fmt: Format,
    request: Quantization,
    buffers: list[Tensor],
    offs: Tensor | None,
    rows: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the buffers after those of the copies, then the decoded copies."""
    copies = request.copies
    names = list(dict.fromkeys(name for copy in copies for name in fmt.buffer_names(copy)))
    named = dict(zip(names, buffers, strict=False))
    values = []
    for columnwise in copies:
        codes, *scales = (named[name] for name in fmt.operand_names(columnwise))
        values.append(
            ops.grouped_dequantize(codes, scales, fmt.text, rows, dtype, offs, columnwise)
        )
    return [*buffers[len(names) :], *values]


def bit_error(actual: Tensor, expected: Tensor) -> float:
    """Return 0 for equal tensors, else their relative error, or 1 if that is 0."""
    return 0.0 if torch.equal(actual, expected) else relative_error(actual, expected) or 1.0


def _quantize_error(
    data: Input, fmt: Format, request: Quantization, buffers: list[Tensor]
) -> float:
    """Return 0 if all copies decode to the same bits as those of the reference."""
    with cute_kernels.backend("reference"):
        actual, expected = (
            dequantize_copies(fmt, request, copies, data.offs, len(data.x), torch.float32)
            for copies in (buffers, _quantize(data, fmt.text, request))
        )
        return max(map(bit_error, actual, expected))


def ours(data: Input, text: str, request: Quantization, meter: Meter) -> Contender:
    """Return the quantizer of this package."""
    fmt = parse(text)

    def prepare() -> Callable[[], Any]:
        require(
            "grouped_quantize",
            fmt,
            meter.arch,
            columnwise=True in request.copies,
            activation=request.activates,
        )
        return functools.partial(_quantize, data, text, request)

    return Contender(
        "ours",
        text,
        prepare,
        functools.partial(_quantize_error, data, fmt, request),
        bytes=request.moved_bytes(data, fmt),
    )


def _decoder(data: Input, text: str, columnwise: bool, meter: Meter) -> Contender:
    """Return the decoding of a copy to bf16."""
    fmt = parse(text)
    request = Quantization("column" if columnwise else "row", False)

    def prepare() -> Callable[[], Any]:
        """Quantize by the reference, and return the call that decodes."""
        require("grouped_dequantize", fmt, meter.arch, columnwise=columnwise)
        with cute_kernels.backend("reference"):
            buffers = _quantize(data, text, request)
        rows = len(data.x)
        return lambda: dequantize_copies(fmt, request, buffers, data.offs, rows, torch.bfloat16)[0]

    def error(result: Tensor) -> float:
        with cute_kernels.backend("reference"):
            return bit_error(result, prepare()())

    return Contender(
        "ours",
        text,
        prepare,
        error,
        bytes=data.x.numel() * (data.x.element_size() + element_bytes(fmt)),
    )


def _reduction(data: Input, op: str, meter: Meter) -> Contender:
    """Return the reduction ``"amax"`` or ``"dbias"``."""
    run = {"amax": ops.grouped_amax, "dbias": ops.grouped_dbias}[op]

    def prepare() -> Callable[[], Any]:
        require(f"grouped_{op}", None, meter.arch, dtype=data.x.dtype)
        return functools.partial(run, data.x, data.offs)

    def error(result: Tensor) -> float:
        with cute_kernels.backend("reference"):
            return relative_error(result, run(data.x, data.offs))

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
    """All tasks on inputs of one shape.

    Attributes:
        meter: Measures the tasks.
        options: Options of the run.
        shape: Rows, columns and groups.
        suite: Name of the suite.
    """

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

    def quantize(self, request: Quantization) -> Task:
        """Return the task of a quantization, in all formats."""

        def contenders(data: Input) -> Iterator[Contender]:
            for text in FORMATS:
                if request.is_valid_for(parse(text)):
                    yield ours(data, text, request, self.meter)
            if not request.activates:
                yield from self.options.competing(self.meter, "quantizers", data, request)

        return self._task(request.case, contenders)

    def __iter__(self) -> Iterator[Task]:
        yield from map(self.quantize, (*QUANTIZATIONS, *_FUSED))

        def decoders(data: Input, columnwise: bool) -> list[Contender]:
            return [_decoder(data, text, columnwise, self.meter) for text in FORMATS]

        for name, columnwise in (("row", False), ("column", True)):
            yield self._task(
                {"op": "dequantize", "directions": name},
                functools.partial(decoders, columnwise=columnwise),
            )

        def reductions(data: Input, op: str) -> list[Contender]:
            return [_reduction(data, op, self.meter)]

        for op in ("amax", "dbias"):
            yield self._task({"op": op}, functools.partial(reductions, op=op))


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    for shape in ((320, 512, 3),) if options.quick else _SHAPES[meter.kind]:
        yield from Tasks(meter, options, shape)


SUITE = Suite(_tasks, default_meters, has_peers=True)
