"""Buffers of a quantized tensor by name, and the part of one group."""

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

    Both directions use the names of the format's rowwise copy, ``Format.buffer_names``: for NVFP4
    ``codes``, ``scales`` and ``amax``. Scales in 128x4 tiles are uint8: the bytes of a layout for
    kernels, padding included. ``GroupedMember`` has the scales of one group as numbers.

    Args:
        fmt: The format.
        tensors: All buffers, in the order of their names.
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
        """Codes, and the scales that a reader needs, as ops take them."""
        names = self._format.operand_names(columnwise=False)
        codes, *scales = map(self._buffers.__getitem__, names)
        return codes, scales


class GroupedMember:
    """One group of m rows: codes, linear scales without padding, and its global scale.

    Attributes of a direction that does not exist are None. Scales have the layout of the codes.
    ``GroupedTensor.member`` makes one.

    Args:
        fmt: The format.
        tensors: Tensors by the names of the format's buffers. Missing ones are None.

    Attributes:
        codes: (m, K) FP8. For NVFP4 (m, K / 2) uint8, two E2M1 codes per byte, the even column in
            the low nibble.
        scales: (m, K / 16). Float8_e4m3fn for NVFP4, (m, K / 32) uint8 E8M0 for MXFP8, (m, ceil(K /
            128)) fp32 for FP8Block, or (ceil(m / 128), ceil(K / 128)) for its square blocks.
        amax: Fp32 scalar for NVFP4 and FP8, or (m,) if row-scaled.
        scale: Fp32 scalar for FP8. The elements were multiplied by it.
        scale_inv: Fp32 scalar for FP8. Decoding multiplies the codes by it.
        codes_t: (K, m) FP8. For NVFP4 (K, ceil(m / 2)) uint8. For MXFP8 (m, K) FP8, not transposed
            despite the name, since the tensor cores of sm_100a read FP8 in both orders. In a
            transformed copy the m rows are spread over whole blocks.
        scales_t: (K, ceil(m / 16)). Float8_e4m3fn for NVFP4, (ceil(m / 32), K) uint8 for MXFP8, (K,
            ceil(m / 128)) fp32 for FP8Block, or (ceil(K / 128), ceil(m / 128)).
        amax_t: Fp32 scalar for NVFP4.
    """

    def __init__(self, fmt: Format, tensors: Mapping[str, Tensor]) -> None:
        names = (*fmt.buffer_names(columnwise=False), *fmt.buffer_names(columnwise=True))
        self.__dict__.update({name: tensors.get(name) for name in names})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor | None: ...

    def __repr__(self) -> str:
        tensors = ((name, t) for name, t in vars(self).items() if t is not None)
        return f"GroupedMember({', '.join(f'{name}={tuple(t.shape)}' for name, t in tensors)})"


class GroupSpan(NamedTuple):
    """Position of a group.

    Attributes:
        group: Number of the group.
        start: First row.
        rows: Number of rows.
        tile: First slot tile.
    """

    group: int
    start: int
    rows: int
    tile: int


def group_spans(offs: Tensor | None, shape: Sequence[int]) -> list[GroupSpan]:
    """Return all groups of a (T, K) tensor with ``offs``, read on the host, or of a (G, N, K) one.

    Raises:
        RuntimeError: The stream is being captured into a CUDA graph.
    """
    if offs is None:
        groups, rows = shape[:2]
        tiles = uniform_tiles(rows)
        return [GroupSpan(g, g * rows, rows, g * tiles) for g in range(groups)]
    if offs.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("member() and unbind() read offs on the host: not while capturing")
    end_rows = offs.tolist()
    return [
        GroupSpan(g, start, end - start, slot_tile(start, g))
        for g, (start, end) in enumerate(zip([0, *end_rows], end_rows, strict=False))
    ]


def member(
    span: GroupSpan,
    fmt: Format,
    columns: int,
    rowwise: QuantizedCopy | None,
    columnwise: QuantizedCopy | None,
) -> GroupedMember:
    """Extract one group from a tensor of ``columns`` columns."""
    tensors: dict[str, Tensor] = {}
    if rowwise is not None:
        names = fmt.buffer_names(columnwise=False)
        tensors |= zip(names, _rowwise_buffers(span, fmt, columns, rowwise), strict=True)
    if columnwise is not None:
        names = fmt.buffer_names(columnwise=True)
        tensors |= zip(names, _columnwise_buffers(span, fmt, columns, columnwise), strict=True)
    return GroupedMember(fmt, tensors)


def shaped_members(
    groups: Iterable[int],
    fmt: Format,
    shapes: Sequence[tuple[int, int]],
    rowwise: QuantizedCopy | None,
    columnwise: QuantizedCopy | None,
) -> Iterator[GroupedMember]:
    """Extract ``groups`` from a tensor whose groups have ``shapes`` of their own."""
    spans = member_spans(
        fmt, shapes, rowwise=rowwise is not None, columnwise=columnwise is not None
    )

    def group_copy(
        group: int, copy: QuantizedCopy | None, columnwise: bool
    ) -> QuantizedCopy | None:
        if copy is None:
            return None
        named = zip(fmt.buffer_names(columnwise), copy, strict=True)
        return QuantizedCopy(fmt, [spans[name][group].view_of(t) for name, t in named])

    for group in groups:
        rows, columns = shapes[group]
        # Each group is the only one of a uniform tensor.
        span = GroupSpan(0, 0, rows, 0)
        copies = group_copy(group, rowwise, False), group_copy(group, columnwise, True)
        yield member(span, fmt, columns, *copies)


def _rowwise_buffers(
    span: GroupSpan, fmt: Format, columns: int, copy: QuantizedCopy
) -> Iterator[Tensor]:
    """Yield the buffers of one group of a rowwise copy."""
    rows, level = slice(span.start, span.start + span.rows), fmt.global_scale
    yield copy.codes.flatten(0, -2)[rows]
    if fmt.scale is not None:
        first_slot = span.tile * TILE_ROWS
        slots = torch.arange(first_slot, first_slot + span.rows, device=copy.scales.device)
        linear = linear_row_scales(fmt, copy.scales, slots, columns)
        yield scale_numbers(fmt.scale, linear[:: _scale_repeats(fmt)])
    if level is None:
        return
    for name in level.buffers:
        vector: Tensor = getattr(copy, name)
        yield vector.flatten()[rows] if level.per == "row" else vector[span.group]


def _columnwise_buffers(
    span: GroupSpan, fmt: Format, columns: int, copy: QuantizedCopy
) -> Iterator[Tensor]:
    """Yield the buffers of one group of a columnwise copy."""
    is_uniform, level = copy.codes.dim() == 3, fmt.columnwise_global_scale
    # Each group of a uniform tensor has its own tiles.
    tile = 0 if is_uniform else span.tile
    codes = copy.codes[span.group] if is_uniform else copy.codes
    rows, is_transposed = span.rows, fmt.columnwise == "transposed"
    if fmt.is_transformed and fmt.scale is not None:
        # The transform spreads the last rows over a whole block.
        rows = round_up(rows, fmt.scale.vec_size)
    if is_transposed:
        start, width = fmt.element.width(tile * TILE_ROWS), fmt.element.width(rows)
        yield codes[:, start : start + width]
    else:
        yield codes[tile * TILE_ROWS : tile * TILE_ROWS + rows]
    if fmt.scale is not None:
        scales = copy.scales[span.group] if is_uniform else copy.scales
        tiles = slice(tile, tile + ceil_div(span.rows, TILE_ROWS))
        linear = linear_column_scales(fmt, scales, columns, tiles)
        linear = linear[:: _scale_repeats(fmt), : ceil_div(span.rows, fmt.scale.vec_size)]
        yield scale_numbers(fmt.scale, linear if is_transposed else linear.T)
    for name in level.buffers if level is not None else ():
        vector: Tensor = getattr(copy, name)
        yield vector[span.group]


def _scale_repeats(fmt: Format) -> int:
    """Return how often linear scales repeat a stored one: the rows of a square block."""
    return fmt.scale.vec_size if fmt.scale and fmt.has_squares else 1


def scale_numbers(scale: BlockScale, stored: Tensor) -> Tensor:
    """View scale bytes as numbers; E8M0 stays bytes, since few ops of torch support it."""
    return stored.view(scale.element.dtype) if scale.element.dtype.is_signed else stored
