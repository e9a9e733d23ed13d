"""Statistics of what a quantized copy loses, by expert: computed and kept on the device."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import cute_kernels
from cute_kernels import ops
from cute_kernels.formats import ElementType, Format
from cute_kernels.reference.conversions import decode, encode, pack
from cute_kernels.reference.groups import Groups

from ..functional.operands import OperandCopy, QuantizedOperand
from ..tensor.grouped_tensor import GroupedTensor

#: Statistics that add up over the calls of a step.
SUMS = ("rows", "signal", "noise", "saturated", "underflow", "nonfinite", "nonfinite_copy")
#: Statistics whose largest value over the calls of a step counts.
MAXIMA = ("amax", "global_scale")
#: Number of elements that are processed together.
_CHUNK_ELEMENTS = 1 << 24


class Key(NamedTuple):
    """Operand that statistics belong to.

    Attributes:
        layer: Name of the layer.
        role: ``"input"``, ``"weight"`` or ``"grad_output"``.
        direction: ``"rowwise"`` or ``"columnwise"``.
        format: Text of the format, or the dtype of a plain copy.
    """

    layer: str
    role: str
    direction: str
    format: str


@dataclasses.dataclass(frozen=True)
class OperandStatistics:
    """Statistics of one operand in one direction.

    Attributes:
        columns: Elements of a row.
        sums: (G, len(SUMS)) fp64.
        maxima: (G, len(MAXIMA)) fp64.
        known: Names of the sums and maxima that mean something.
    """

    columns: int
    sums: Tensor
    maxima: Tensor
    known: frozenset[str]

    def merge(self, call: "OperandStatistics") -> "OperandStatistics":
        """Return the statistics of both calls together."""
        maxima = torch.maximum(self.maxima, call.maxima)
        return OperandStatistics(
            self.columns, self.sums + call.sums, maxima, self.known & call.known
        )


class Step:
    """Statistics of one step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.statistics: dict[Key, OperandStatistics] = {}
        #: Operands of forward passes that were not repeated inside a backward pass.
        self._forward_keys: set[Key] = set()

    def wants(self, key: Key) -> bool:
        """Return True if an operand is to be measured, given what was measured before.

        Weights are measured once per step. Operands that activation checkpointing computes again
        are not measured again. Copies that the first pass did not make, since it ran under
        ``no_grad``, are new in the second.
        """
        if key.role == "weight":
            return key not in self.statistics
        if key.role == "input" and torch._C._current_graph_task_id() != -1:
            return key not in self._forward_keys
        return True

    def add(self, key: Key, statistics: OperandStatistics) -> None:
        """Add the statistics of one call."""
        if torch._C._current_graph_task_id() == -1:
            self._forward_keys.add(key)
        total = self.statistics.get(key)
        self.statistics[key] = statistics if total is None else total.merge(statistics)


@dataclasses.dataclass(frozen=True)
class Probe:
    """Hook of an inspector in one layer, for one step.

    Attributes:
        layer: Name of the layer.
        roles: Roles of the operands that are measured.
        step: Receives the statistics.
    """

    layer: str
    roles: tuple[str, ...]
    step: Step

    def observe(
        self,
        role: str,
        x: Tensor | Sequence[Tensor],
        quantized: QuantizedOperand,
        fmt: Format | None,
        offs: Tensor | None = None,
    ) -> None:
        """Measure what the copies of an operand lose.

        Args:
            role: Role of the operand.
            x: Values that were quantized: (T, K) with ``offs``, (G, N, K), or (N, K) per group. A
                GroupedTensor stands for values that are gone.
            quantized: The copies; a plain copy is in ``quantized.rowwise``.
            fmt: Format of the copies. None if the copy is plain.
            offs: (G,) end rows.

        Raises:
            RuntimeError: The stream is being captured into a CUDA graph.
        """
        if role not in self.roles:
            return
        tensor = x if isinstance(x, Tensor) else x[0]
        shape = tuple(x.shape) if isinstance(x, Tensor) else (len(x), *tensor.shape)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "grouped.inspect.inspect_quantization looks at eager calls: a CUDA graph would "
                "look at the "
                "operands of its capture only; capture outside of it"
            )
        for direction, copy in (
            ("rowwise", quantized.rowwise),
            ("columnwise", quantized.columnwise),
        ):
            if copy is None:
                continue
            text = str(copy.codes.dtype).removeprefix("torch.") if fmt is None else fmt.text
            key = Key(self.layer, role, direction, text)
            if self.step.wants(key):
                with _isolated(tensor.device):
                    statistics = _measure(x, shape, copy, fmt, offs, direction == "columnwise")
                    self.step.add(key, statistics)


@contextlib.contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Compute independently of the model's inference mode, gradients, autocast and backend."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        # Leaving inference mode enabled gradients.
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cpu":
            # All backends agree to the bit, and the reference is the fastest here.
            stack.enter_context(cute_kernels.backend("reference"))
        yield


def _measure(
    x: Tensor | Sequence[Tensor],
    shape: tuple[int, ...],
    copy: OperandCopy,
    fmt: Format | None,
    offs: Tensor | None,
    columnwise: bool,
) -> OperandStatistics:
    """Measure one copy. The arguments are those of ``Probe.observe``."""
    codes = copy.codes
    if isinstance(x, GroupedTensor) and x.prepacked:
        codes = cute_kernels.unpack(codes)
    groups = Groups.from_shape(shape, offs, codes.device)
    group_of_row = groups.group_of_row()
    known = {*SUMS, *MAXIMA}

    def decoded(codes: Tensor) -> Tensor:
        if fmt is None:
            return codes.flatten(0, -2)
        y: Tensor = ops.grouped_dequantize(
            codes, copy.scales, fmt.text, shape[-2], torch.float32, offs, columnwise
        )
        return y.flatten(0, -2)

    values = decoded(codes)
    if isinstance(x, GroupedTensor):
        # The values that it was quantized from are gone.
        known -= {"signal", "noise", "saturated", "underflow", "nonfinite"}
        x = values
    if fmt is not None and columnwise and fmt.is_transformed:
        # Its codes belong to no element.
        known -= {"saturated", "underflow"}
    chunks = _row_chunks(x, shape)
    row_statistics = (_row_statistics(chunk, values[rows]) for rows, chunk in chunks)
    sums, amax = map(torch.cat, zip(*row_statistics, strict=True))
    del values
    if fmt is not None and "saturated" in known:
        limit = decoded(_filled(codes, _largest(fmt.element)[0]))
        limit *= _largest(fmt.element)[1]
        sums[:, SUMS.index("saturated")] = _count_saturated(chunks, limit)
    level = None if fmt is None else fmt.global_scale_for(columnwise)
    global_scale = torch.zeros_like(amax)
    if level is None or copy.global_scale is None:
        known.remove("global_scale")
    else:
        vector = copy.global_scale.flatten().double().abs() * level.factor
        per_row = level.per == "row"
        global_scale = vector if per_row else torch.cat([vector, vector[:1]])[group_of_row]
    # The last group is the tail.
    group_sums = sums.new_zeros(len(groups) + 1, len(SUMS)).index_add_(0, group_of_row, sums)
    maxima = torch.stack([amax, global_scale], dim=1)
    return OperandStatistics(
        shape[-1],
        group_sums[:-1],
        _largest_of_groups(maxima, group_of_row, len(groups)),
        frozenset(known),
    )


def _largest_of_groups(values: Tensor, group_of_row: Tensor, num_groups: int) -> Tensor:
    index = group_of_row[:, None].expand_as(values)
    return values.new_zeros(num_groups + 1, 2).scatter_reduce_(0, index, values, "amax")[:-1]


def _row_chunks(x: Tensor | Sequence[Tensor], shape: tuple[int, ...]) -> list[tuple[slice, Tensor]]:
    """Split the rows into chunks and return the position and the rows of each."""
    tensors = [x.flatten(0, -2)] if isinstance(x, Tensor) else [t.detach() for t in x]
    step, chunks, start = max(1, _CHUNK_ELEMENTS // shape[-1]), [], 0
    for t in tensors:
        for chunk in t.split(step):
            chunks.append((slice(start, start + len(chunk)), chunk))
            start += len(chunk)
    return chunks


def _row_statistics(x: Tensor, copy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of each row, (rows, len(SUMS)), and its largest finite magnitude, in fp64."""
    y, copy = x.float(), copy.float()
    finite, finite_copy = y.isfinite(), copy.isfinite()
    is_compared = finite & finite_copy
    columns = {
        "rows": torch.ones(len(y), device=y.device),
        # In fp64, since squares of fp32 leave its range.
        "signal": torch.where(is_compared, y, 0).double().square().sum(-1),
        "noise": torch.where(is_compared, y - copy, 0).double().square().sum(-1),
        # For a plain copy; formats do not become infinite.
        "saturated": (finite & ~finite_copy).sum(-1),
        "underflow": (finite & (y != 0) & (copy == 0)).sum(-1),
        "nonfinite": (~finite).sum(-1),
        "nonfinite_copy": (~finite_copy).sum(-1),
    }
    sums = torch.stack([columns[name].double() for name in SUMS], dim=1)
    return sums, torch.where(finite, y, 0).abs().amax(-1).double()


def _count_saturated(chunks: list[tuple[slice, Tensor]], limit: Tensor) -> Tensor:
    """Count the elements of each row that exceed the limit of what rounds to their codes."""
    counts = [
        ((x.abs() > limit[rows]) & (limit[rows] > 0) & x.isfinite()).sum(-1) for rows, x in chunks
    ]
    return torch.cat(counts).double()


def _filled(codes: Tensor, byte: int) -> Tensor:
    filled = torch.empty_strided(
        codes.shape, codes.stride(), dtype=torch.uint8, device=codes.device
    )
    return filled.fill_(byte).view(codes.dtype)


@functools.cache
def _largest(element: ElementType) -> tuple[int, float]:
    """Return a byte whose codes are the largest number, and the factor that adds half a step."""
    largest = encode(element, torch.full((1, element.per_byte), element.max, device="cpu"))
    byte = pack(element, largest)
    lower = decode(element, pack(element, largest - 1)).flatten()[0].item()
    return int(byte.item()), 1 + (element.max - lower) / 2 / element.max
