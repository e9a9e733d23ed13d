"""The buffers of a quantized tensor by name, and one group's part of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cute_kernels.formats import BlockScale, Format
from cute_kernels.layout.buffers import member_spans
from cute_kernels.layout.shapes import ceil_div, round_up
from cute_kernels.layout.slots import TILE_ROWS, slot_tile, uniform_tiles
from cute_kernels.reference.scales import linear_column_scales, linear_row_scales


class QuantizedCopy:
    """One direction of a quantized tensor: its buffers, as attributes and in order.

    Their names are those of the format's rowwise copy in both directions, ``Format.buffer_names``:
    of NVFP4 ``codes``, ``scales`` and ``amax``. Scales in 128x4 tiles are uint8, bytes of a layout
    for kernels, padding included; ``GroupedMember`` has those of a group as the numbers that they
    are.

    Args:
        fmt: the format.
        tensors: all buffers, in the order of their names.
    """

    __slots__ = ("_buffers", "_format")

    def __init__(self, fmt: Format, tensors: Sequence[Tensor]) -> None:
        self._format = fmt
        self._buffers = dict(zip(fmt.buffer_names(columnwise=False), tensors, strict=True))

    def __getattr__(self, name: str) -> Tensor:
        if name in QuantizedCopy.__slots__ or name not in self._buffers:
            raise AttributeError(f"a QuantizedCopy has no {name!r}")
        return self._buffers[name]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._buffers.values())

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={tuple(t.shape)}" for name, t in self._buffers.items())
        return f"QuantizedCopy({self._format.text}: {shapes})"

    @property
    def _fields(self) -> tuple[str, ...]:
        return tuple(self._buffers)

    def _asdict(self) -> dict[str, Tensor]:
        return dict(self._buffers)

    def _replace(self, **buffers: Tensor) -> "QuantizedCopy":
        return QuantizedCopy(self._format, list((self._buffers | buffers).values()))

    @property
    def operand(self) -> tuple[Tensor, list[Tensor]]:
        """The codes, and what else a reader needs, as ops take them."""
        codes, *rest = map(self._buffers.__getitem__, self._format.operand_names(columnwise=False))
        return codes, rest


class GroupedMember:
    """One group of m rows: codes, linear scales without padding, and its second level.

    An attribute of a direction that is not held is None; scales lie as the codes do.

    Attributes:
        codes: (m, K) FP8; of NVFP4 (m, K / 2) uint8, two E2M1 codes a byte, the even column in
            the low nibble.
        scales: (m, K / 16) float8_e4m3fn of NVFP4, (m, K / 32) uint8 E8M0 of MXFP8, (m, ceil(K
            / 128)) fp32 of FP8Block, or (ceil(m / 128), ceil(K / 128)) of its square
            blocks.
        amax: fp32 scalar of NVFP4 and FP8, or (m,) when row-scaled.
        scale: fp32 scalar of FP8, what elements were multiplied by.
        scale_inv: fp32 scalar of FP8, what codes are multiplied by.
        codes_t: (K, m) FP8, of NVFP4 (K, ceil(m / 2)) uint8; (m, K) FP8 of MXFP8. Of a
            transformed copy whole blocks, which the m rows are spread over.
        scales_t: (K, ceil(m / 16)) float8_e4m3fn of NVFP4, (ceil(m / 32), K) uint8 of MXFP8,
            (K, ceil(m / 128)) fp32 of FP8Block, or (ceil(K / 128), ceil(m / 128)).
        amax_t: fp32 scalar of NVFP4.
    """

    def __init__(self, fmt: Format, tensors: Mapping[str, Tensor]) -> None:
        names = (*fmt.buffer_names(columnwise=False), *fmt.buffer_names(columnwise=True))
        self.__dict__.update({name: tensors.get(name) for name in names})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor | None: ...

    def __repr__(self) -> str:
        held = ((name, t) for name, t in vars(self).items() if t is not None)
        return f"GroupedMember({', '.join(f'{name}={tuple(t.shape)}' for name, t in held)})"


class GroupSpan(NamedTuple):
    """Where a group lies: its number, rows [start, start + rows), and its first slot tile."""

    group: int
    start: int
    rows: int
    tile: int


def group_spans(offs: Tensor | None, shape: Sequence[int]) -> list[GroupSpan]:
    """All groups of a (T, K) tensor with ``offs``, read on the host, or of a (G, N, K) one.

    Raises:
        RuntimeError: the stream is being captured into a CUDA graph.
    """
    if offs is None:
        groups, rows = shape[:2]
        tiles = uniform_tiles(rows)
        return [GroupSpan(g, g * rows, rows, g * tiles) for g in range(groups)]
    if offs.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("member() and unbind() read offs on the host: not while capturing")
    ends = offs.tolist()
    return [
        GroupSpan(g, start, end - start, slot_tile(start, g))
        for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]


def member(
    span: GroupSpan,
    fmt: Format,
    columns: int,
    rowwise: QuantizedCopy | None,
    columnwise: QuantizedCopy | None,
) -> GroupedMember:
    """Take one group out of a tensor of ``columns`` columns."""
    found: dict[str, Tensor] = {}
    for copy, is_columnwise, take in ((rowwise, False, _rowwise), (columnwise, True, _columnwise)):
        if copy is not None:
            found |= zip(
                fmt.buffer_names(is_columnwise), take(span, fmt, columns, copy), strict=True
            )
    return GroupedMember(fmt, found)


def shaped_members(
    groups: Iterable[int],
    fmt: Format,
    shapes: Sequence[tuple[int, int]],
    rowwise: QuantizedCopy | None,
    columnwise: QuantizedCopy | None,
) -> Iterator[GroupedMember]:
    """Take ``groups`` out of a tensor whose groups have ``shapes`` of their own."""
    copies = {way: copy for way, copy in ((False, rowwise), (True, columnwise)) if copy is not None}
    parts = member_spans(fmt, shapes, rowwise=False in copies, columnwise=True in copies)
    for group in groups:
        rows, columns = shapes[group]
        # Each is the only group of a uniform tensor.
        of_group = {
            way: QuantizedCopy(
                fmt,
                [
                    parts[name][group].view_of(t)
                    for name, t in zip(fmt.buffer_names(way), copy, strict=True)
                ],
            )
            for way, copy in copies.items()
        }
        yield member(
            GroupSpan(0, 0, rows, 0), fmt, columns, of_group.get(False), of_group.get(True)
        )


def _rowwise(span: GroupSpan, fmt: Format, columns: int, copy: QuantizedCopy) -> Iterator[Tensor]:
    rows, level = slice(span.start, span.start + span.rows), fmt.global_scale
    yield copy.codes.flatten(0, -2)[rows]
    if fmt.scale is not None:
        first = span.tile * TILE_ROWS
        slots = torch.arange(first, first + span.rows, device=copy.scales.device)
        yield numbers_of(
            fmt.scale, linear_row_scales(fmt, copy.scales, slots, columns)[:: _repeats(fmt)]
        )
    for name in level.buffers if level is not None else ():
        vector: Tensor = getattr(copy, name)
        yield (
            vector.flatten()[rows]
            if level is not None and level.per == "row"
            else vector[span.group]
        )


def _columnwise(
    span: GroupSpan, fmt: Format, columns: int, copy: QuantizedCopy
) -> Iterator[Tensor]:
    is_uniform, level = copy.codes.dim() == 3, fmt.columnwise_global_scale
    # Each group of a uniform tensor has tiles of its own.
    tile = 0 if is_uniform else span.tile
    codes = copy.codes[span.group] if is_uniform else copy.codes
    rows, is_transposed = span.rows, fmt.columnwise == "transposed"
    if fmt.is_transformed and fmt.scale is not None:
        # What the last rows became lies in a whole block.
        rows = round_up(rows, fmt.scale.vec_size)
    if is_transposed:
        first, width = fmt.element.width(tile * TILE_ROWS), fmt.element.width(rows)
        yield codes[:, first : first + width]
    else:
        yield codes[tile * TILE_ROWS : tile * TILE_ROWS + rows]
    if fmt.scale is not None:
        scales = copy.scales[span.group] if is_uniform else copy.scales
        linear = linear_column_scales(
            fmt, scales, columns, slice(tile, tile + ceil_div(span.rows, TILE_ROWS))
        )
        linear = linear[:: _repeats(fmt), : ceil_div(span.rows, fmt.scale.vec_size)]
        yield numbers_of(fmt.scale, linear if is_transposed else linear.T)
    for name in level.buffers if level is not None else ():
        vector: Tensor = getattr(copy, name)
        yield vector[span.group]


def _repeats(fmt: Format) -> int:
    """How often linear scales repeat what is stored once: rows of a square block."""
    return fmt.scale.vec_size if fmt.scale and fmt.has_squares else 1


def numbers_of(scale: BlockScale, stored: Tensor) -> Tensor:
    """Scale bytes as the numbers that they are; E8M0 stays bytes, which few ops of torch take."""
    return stored.view(scale.element.dtype) if scale.element.dtype.is_signed else stored
