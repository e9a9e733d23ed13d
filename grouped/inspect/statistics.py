"""What a quantized copy lost, expert by expert: computed and kept on the device."""

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

from ..functional.linear_passes import Copies
from ..tensor.grouped_tensor import GroupedTensor

#: What is added up over the calls of a step, and what the largest is taken of.
SUMS = ("rows", "signal", "noise", "saturated", "underflow", "nonfinite", "nonfinite_copy")
MAXIMA = ("amax", "second_level")
#: Elements that are looked at together.
_PART = 1 << 24


class Key(NamedTuple):
    """What statistics are of; ``format`` is the text of one, or the dtype of a plain copy."""

    layer: str
    role: str
    direction: str
    format: str


@dataclasses.dataclass(frozen=True)
class Found:
    """The statistics of one operand in one direction.

    Attributes:
        columns: elements of a row.
        sums: (G, len(SUMS)) fp64.
        maxima: (G, len(MAXIMA)) fp64.
        known: the names that mean something, of both.
    """

    columns: int
    sums: Tensor
    maxima: Tensor
    known: frozenset[str]

    def joined(self, other: "Found") -> "Found":
        """Of both calls together."""
        maxima = torch.maximum(self.maxima, other.maxima)
        return Found(self.columns, self.sums + other.sums, maxima, self.known & other.known)


class Step:
    """The statistics of one step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.found: dict[Key, Found] = {}
        #: What forward passes gave that were not repeated inside a backward pass.
        self._forward: set[Key] = set()

    def wants(self, key: Key) -> bool:
        """Whether to look at an operand, as far as that depends on what was looked at before.

        At weights once a step; and not again at what activation checkpointing computes again. What
        the first pass did not make, for it was under ``no_grad``, is new in the second.
        """
        if key.role == "weight":
            return key not in self.found
        if key.role == "input" and torch._C._current_graph_task_id() != -1:
            return key not in self._forward
        return True

    def add(self, key: Key, found: Found) -> None:
        """Note what was found."""
        if torch._C._current_graph_task_id() == -1:
            self._forward.add(key)
        before = self.found.get(key)
        self.found[key] = found if before is None else before.joined(found)


@dataclasses.dataclass(frozen=True)
class Probe:
    """What looks at the operands of one layer in one step."""

    layer: str
    roles: tuple[str, ...]
    step: Step

    def see(
        self,
        role: str,
        x: Tensor | Sequence[Tensor],
        copies: Copies,
        fmt: Format | None,
        offs: Tensor | None = None,
    ) -> None:
        """Look at an operand: (T, K) with ``offs``, or without (G, N, K), or (N, K) of each group.

        A GroupedTensor is what it was quantized from. Without a format the copy is plain, in
        ``copies.rowwise``.

        Raises:
            RuntimeError: the stream is being captured into a CUDA graph.
        """
        if role not in self.roles:
            return
        first = x if isinstance(x, Tensor) else x[0]
        shape = tuple(x.shape) if isinstance(x, Tensor) else (len(x), *first.shape)
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "grouped.debug.inspect looks at eager calls: a CUDA graph would look at the "
                "operands of its capture only; capture outside of it"
            )
        for direction, copy in (("rowwise", copies.rowwise), ("columnwise", copies.columnwise)):
            if copy is None:
                continue
            text = str(copy[0].dtype).removeprefix("torch.") if fmt is None else fmt.text
            key = Key(self.layer, role, direction, text)
            if self.step.wants(key):
                with _undisturbed(first.device):
                    self.step.add(
                        key, _measure(x, shape, copy, fmt, offs, direction == "columnwise")
                    )


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Compute what is asked for, whatever the model does."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        # That turned gradients on.
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cpu":
            # All backends agree to the bit, and this is the fastest here.
            stack.enter_context(cute_kernels.backend("reference"))
        yield


def _measure(
    x: Tensor | Sequence[Tensor],
    shape: tuple[int, ...],
    copy: list[Tensor],
    fmt: Format | None,
    offs: Tensor | None,
    columnwise: bool,
) -> Found:
    codes, rest = copy[0], copy[1:]
    if isinstance(x, GroupedTensor) and x.prepacked:
        codes = cute_kernels.unpack(codes)
    groups = Groups.of(shape, offs, codes.device)
    group_of_row = groups.group_of_row()
    known = {*SUMS, *MAXIMA}

    def decoded(codes: Tensor) -> Tensor:
        if fmt is None:
            return codes.flatten(0, -2)
        y: Tensor = ops.grouped_dequantize(
            codes, rest, fmt.text, shape[-2], torch.float32, offs, columnwise
        )
        return y.flatten(0, -2)

    values = decoded(codes)
    if isinstance(x, GroupedTensor):
        # What it was made from is gone.
        known -= {"signal", "noise", "saturated", "underflow", "nonfinite"}
        x = values
    if fmt is not None and columnwise and fmt.is_transformed:
        # Its codes belong to no element.
        known -= {"saturated", "underflow"}
    parts = _parts(x, shape)
    sums, amax = map(
        torch.cat,
        zip(*(_row_statistics(part, values[place]) for place, part in parts), strict=True),
    )
    del values
    if fmt is not None and "saturated" in known:
        limit = decoded(_filled(codes, _largest(fmt.element)[0]))
        limit *= _largest(fmt.element)[1]
        sums[:, SUMS.index("saturated")] = _saturated(parts, limit)
    level = None if fmt is None else fmt.global_scale_for(columnwise)
    second = torch.zeros_like(amax)
    if level is None:
        known.remove("second_level")
    else:
        vector = rest[-1].flatten().double().abs() * level.factor
        second = vector if level.per == "row" else torch.cat([vector, vector[:1]])[group_of_row]
    return Found(
        shape[-1],
        # The last is of the tail.
        sums.new_zeros(len(groups) + 1, len(SUMS)).index_add_(0, group_of_row, sums)[:-1],
        _largest_of_groups(torch.stack([amax, second], dim=1), group_of_row, len(groups)),
        frozenset(known),
    )


def _largest_of_groups(values: Tensor, group_of_row: Tensor, num_groups: int) -> Tensor:
    index = group_of_row[:, None].expand_as(values)
    return values.new_zeros(num_groups + 1, 2).scatter_reduce_(0, index, values, "amax")[:-1]


def _parts(x: Tensor | Sequence[Tensor], shape: tuple[int, ...]) -> list[tuple[slice, Tensor]]:
    tensors = [x.flatten(0, -2)] if isinstance(x, Tensor) else [t.detach() for t in x]
    step, found, start = max(1, _PART // shape[-1]), [], 0
    for t in tensors:
        for part in t.split(step):
            found.append((slice(start, start + len(part)), part))
            start += len(part)
    return found


def _row_statistics(x: Tensor, copy: Tensor) -> tuple[Tensor, Tensor]:
    """What is added up of each row, (rows, len(SUMS)), and its largest finite magnitude, fp64."""
    y, copy = x.float(), copy.float()
    finite, finite_copy = y.isfinite(), copy.isfinite()
    both = finite & finite_copy
    columns = {
        "rows": torch.ones(len(y), device=y.device),
        # In fp64, for squares of fp32 leave its range.
        "signal": torch.where(both, y, 0).double().square().sum(-1),
        "noise": torch.where(both, y - copy, 0).double().square().sum(-1),
        # Of a plain copy; formats do not become infinite.
        "saturated": (finite & ~finite_copy).sum(-1),
        "underflow": (finite & (y != 0) & (copy == 0)).sum(-1),
        "nonfinite": (~finite).sum(-1),
        "nonfinite_copy": (~finite_copy).sum(-1),
    }
    sums = torch.stack([columns[name].double() for name in SUMS], dim=1)
    return sums, torch.where(finite, y, 0).abs().amax(-1).double()


def _saturated(parts: list[tuple[slice, Tensor]], limit: Tensor) -> Tensor:
    """How many elements of each row exceed what its codes can be rounded from."""
    counts = [
        ((x.abs() > limit[place]) & (limit[place] > 0) & x.isfinite()).sum(-1) for place, x in parts
    ]
    return torch.cat(counts).double()


def _filled(codes: Tensor, byte: int) -> Tensor:
    filled = torch.empty_strided(
        codes.shape, codes.stride(), dtype=torch.uint8, device=codes.device
    )
    return filled.fill_(byte).view(codes.dtype)


@functools.cache
def _largest(element: ElementType) -> tuple[int, float]:
    """A byte of codes of the largest number, and what this is times half a step more."""
    largest = encode(element, torch.full((1, element.per_byte), element.max, device="cpu"))
    byte = pack(element, largest)
    lower = decode(element, pack(element, largest - 1)).flatten()[0].item()
    return int(byte.item()), 1 + (element.max - lower) / 2 / element.max
