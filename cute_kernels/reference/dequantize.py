"""Inverse of quantization for every format: codecs compute, this module finds the codes."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from cute_kernels.reference import hadamard

from ..formats import Format
from ..layout.slots import TILE_ROWS
from .codecs import Codec, codec_of
from .codecs.base import scaled
from .conversions import decode
from .copies import buffers_by_name, code_tiles, rows_first, slices, tile_index, tile_parts
from .groups import Groups
from .scales import linear_row_scales, linear_scales, tile_view


def dequantize(
    groups: Groups, fmt: Format, copy: Sequence[Tensor], columnwise: bool, out: Tensor
) -> None:
    """Decode one direction into ``out``, except for rows of the tail.

    The transform of a transformed copy is undone in fp32, before the only rounding. ``copy`` has
    the buffers of the direction that decode, in the order of ``fmt.operand_names``.
    """
    codec, out = codec_of(fmt), out.flatten(0, -2)
    buffers = buffers_by_name(fmt.operand_names(columnwise=False), copy)
    if columnwise:
        _dequantize_tiles(codec, groups, buffers, out)
        return
    if groups.is_uniform:
        buffers = rows_first(buffers)
    _dequantize_rows(codec, groups, buffers, out)


def _dequantize_rows(codec: Codec, groups: Groups, copy: Mapping[str, Tensor], out: Tensor) -> None:
    """Decode a rowwise copy, row by row."""
    scale, global_scale, cols = codec.fmt.scale, codec.fmt.global_scale, out.shape[1]
    vec = cols if scale is None else scale.vec_size
    row, slot = groups.slot_of_row()
    group = groups.group_of_row()
    for rows in slices(len(row), cols):
        source = row[rows]
        stored = vector = None
        if scale is not None:
            stored = linear_row_scales(codec.fmt, copy["scales"], slot[rows], cols)
        if global_scale is not None:
            index = source if global_scale.per == "row" else group[source]
            vector = copy[global_scale.buffers[0]][index, None]
        values = decode(codec.fmt.element, copy["codes"][source])
        out[source] = scaled(values, codec.decode_factor(stored, vector), vec).to(out.dtype)


def _dequantize_tiles(
    codec: Codec, groups: Groups, copy: Mapping[str, Tensor], out: Tensor
) -> None:
    """Decode a columnwise copy, tile by tile."""
    fmt, scale, cols = codec.fmt, codec.fmt.scale, out.shape[1]
    global_scale = fmt.columnwise_global_scale
    vec = TILE_ROWS if scale is None else scale.vec_size
    codes = code_tiles(fmt, copy["codes"])
    for tile, group, row in tile_parts(groups, cols):
        index = tile_index(groups, tile)
        stored = vector = None
        if scale is not None:
            stored = linear_scales(
                fmt, tile_view(fmt, copy["scales"], columnwise=True)[index], True, cols
            )
        if global_scale is not None:
            vector = copy[global_scale.buffers[0]][group][:, None, None]
        columns = decode(fmt.element, codes[index])
        if fmt.columnwise == "untransposed":
            columns = columns.mT
        values = scaled(columns, codec.decode_factor(stored, vector), vec).mT  # (t, 128, K)
        if fmt.is_transformed:
            values = hadamard.undo(values.unflatten(1, (-1, hadamard.CHUNK))).flatten(1, 2)
        live = row >= 0
        out[row[live]] = values[live].to(out.dtype)
