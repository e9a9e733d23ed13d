"""Quantization of grouped rows for every format: codecs compute, this lays out.

Rows are converted with blocks along K, slot tiles of 128 rows with blocks along the rows. Square
blocks are converted by slot tiles for both directions.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.reference import hadamard

from ..formats import Format
from ..layout.shapes import ceil_div
from ..layout.slots import TILE_ROWS
from .absmax import absmax
from .codecs import Codec, codec_of
from .conversions import pack
from .copies import by_name, code_tiles, rows_first, slices, tile_index, tile_parts
from .elements import Elements
from .groups import Groups
from .random_numbers import Draws
from .reductions import group_amax
from .scales import lay_scales, tile_view


class Given(NamedTuple):
    """What the caller gives beside the elements.

    Attributes:
        amax: (G,) fp32 amax per group to use instead of computing it; its sign is dropped. (2,
            G), rowwise and columnwise, where both are asked for of a format whose
            columnwise copy is transformed.
        scale: (G,) fp32 scale per group, of formats that take it (``Format.has_given_scale``).
        draws: what codes of stochastic formats are rounded by.
    """

    amax: Tensor | None = None
    scale: Tensor | None = None
    draws: Draws | None = None


def quantize(
    elements: Elements,
    groups: Groups,
    fmt: Format,
    out: Mapping[str, Tensor],
    given: Given = Given(),  # noqa: B008  (immutable)
) -> None:
    """Quantize groups of elements into the buffers of one or both directions.

    They are named as in ``layout.buffers`` for the directions that are asked for. What is ``given``
    is not computed.
    """
    codec = codec_of(fmt, elements.dtype)
    rowwise, columnwise = (_named(fmt, out, direction) for direction in (False, True))
    if rowwise and groups.is_uniform:
        rowwise = rows_first(rowwise)
    if fmt.global_scale is None:
        # Nobody asks for amaxes of whole rows, which take a pass over all elements.
        per_row = torch.zeros(1, dtype=torch.float32, device=elements.device).expand(elements.rows)
    else:
        per_row = elements.absmax(nan=fmt.amaxes_keep_nan)
    per_group = _group_amaxes(elements, groups, fmt, per_row, given.amax, bool(columnwise))
    for is_columnwise, copy in ((False, rowwise), (True, columnwise)):
        if copy:
            _store_level(
                codec, groups, copy, per_row, per_group[is_columnwise], given.scale, is_columnwise
            )
    # What the scales of blocks follow from.
    second = per_group if given.scale is None else (given.scale, given.scale)
    if rowwise and not fmt.is_2d:
        level = fmt.global_scale
        if level is not None and level.per == "row":
            g = per_row
        else:
            g = second[0][groups.group_of_row().clamp_max_(max(0, len(groups) - 1))]
        _quantize_rows(codec, elements, groups, g, rowwise, given.draws)
    if columnwise or (rowwise and fmt.is_2d):
        _quantize_tiles(
            codec,
            elements,
            groups,
            second[1],
            rowwise if fmt.is_2d else {},
            columnwise,
            given.draws,
        )


def _group_amaxes(
    elements: Elements,
    groups: Groups,
    fmt: Format,
    per_row: Tensor,
    given: Tensor | None,
    is_columnwise: bool,
) -> tuple[Tensor, Tensor]:
    """(G,) amaxes of the groups rowwise, and columnwise if that is asked for."""
    if given is not None:
        rowwise, columnwise = given.abs().expand(2, -1)
        return rowwise, columnwise
    rowwise = group_amax(per_row, groups)
    is_own = is_columnwise and fmt.is_transformed
    return rowwise, _transformed_amax(elements, groups, fmt.amaxes_keep_nan) if is_own else rowwise


def _transformed_amax(elements: Elements, groups: Groups, nan: bool) -> Tensor:
    out = torch.zeros(len(groups), dtype=torch.float32, device=elements.device)
    for _, group, row in tile_parts(groups, elements.cols):
        out.scatter_reduce_(
            0,
            group,
            absmax(_tile_values(elements, row, is_transformed=True).flatten(1), nan=nan),
            "amax",
        )
    return out


def _named(fmt: Format, out: Mapping[str, Tensor], columnwise: bool) -> dict[str, Tensor]:
    """The buffers of one direction by their rowwise names; none if it is not asked for."""
    if ("codes_t" if columnwise else "codes") not in out:
        return {}
    return by_name(
        fmt.buffer_names(columnwise=False), [out[name] for name in fmt.buffer_names(columnwise)]
    )


def _store_level(
    codec: Codec,
    groups: Groups,
    copy: Mapping[str, Tensor],
    per_row: Tensor,
    per_group: Tensor,
    scale: Tensor | None,
    columnwise: bool,
) -> None:
    level = codec.fmt.global_scale_for(columnwise)
    if level is None:
        return
    if level.per == "group":
        for name, vector in zip(level.buffers, codec.level(per_group, scale), strict=True):
            copy[name].copy_(vector)
        return
    live = groups.group_of_row() < len(groups)
    for name, vector in zip(level.buffers, codec.level(per_row), strict=True):
        copy[name][live] = vector[live]


def _quantize_rows(
    codec: Codec,
    elements: Elements,
    groups: Groups,
    g: Tensor,
    copy: Mapping[str, Tensor],
    draws: Draws | None,
) -> None:
    """The rowwise copy, blocks along K; ``g`` is the amax of each row, or of its group."""
    fmt, scale, cols = codec.fmt, codec.fmt.scale, elements.cols
    vec = cols if scale is None else scale.vec_size
    row, slot = groups.slot_of_row()
    linear = None
    if scale is not None:
        shape = groups.num_tiles * TILE_ROWS, ceil_div(cols, vec)
        linear = torch.zeros(shape, dtype=scale.dtype, device=elements.device)
    for part in slices(len(slot), cols):  # the live rows are the first ones
        blocks = _whole_blocks(elements.take(part), vec).unflatten(1, (-1, vec))
        drawn = None if draws is None else draws.rows(row[part]).unflatten(1, (-1, vec))
        encoded, stored = codec.encode(
            blocks, absmax(blocks, nan=fmt.amaxes_keep_nan), g[part, None], drawn
        )
        copy["codes"][part] = pack(fmt.element, encoded.flatten(1)[:, :cols])
        if linear is not None and stored is not None:
            linear[slot[part]] = stored
    if linear is not None:
        tile, _, _ = groups.used_tiles()
        by_tile = linear.view(groups.num_tiles, TILE_ROWS, linear.shape[1])
        tiles = tile_view(fmt, copy["scales"], columnwise=False)
        tiles[tile_index(groups, tile)] = lay_scales(fmt, by_tile[tile], columnwise=False)


def _whole_blocks(x: Tensor, vec: int) -> Tensor:
    """``x`` with zeros after its last dimension up to a multiple of ``vec``: no amax sees them."""
    missing = -x.shape[-1] % vec
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _quantize_tiles(
    codec: Codec,
    elements: Elements,
    groups: Groups,
    per_group: Tensor,
    rowwise: Mapping[str, Tensor],
    columnwise: Mapping[str, Tensor],
    draws: Draws | None,
) -> None:
    """The columnwise copy, and the rowwise one of square blocks, slot tile by slot tile."""
    fmt, scale, cols = codec.fmt, codec.fmt.scale, elements.cols
    vec = TILE_ROWS if scale is None else scale.vec_size
    for tile, group, row in tile_parts(groups, cols):
        live = row >= 0
        blocks = _column_blocks(_tile_values(elements, row, fmt.is_transformed), vec)
        a = absmax(blocks, nan=fmt.amaxes_keep_nan)
        if fmt.is_2d:
            squares = absmax(_whole_blocks(a, vec).unflatten(2, (-1, vec)), nan=fmt.amaxes_keep_nan)
            a = squares.repeat_interleave(vec, dim=2)[..., :cols]
        drawn = None
        if draws is not None:
            # Both directions of square blocks have one rule.
            drawn = (
                _column_blocks(draws.rows(row.clamp_min(0)), vec)
                if fmt.is_2d
                else draws.tiles(tile)
            )
        encoded, stored = codec.encode(blocks, a, per_group[group, None, None], drawn)
        codes = encoded.movedim(-1, 2).flatten(1, 2)  # (t, 128, K)
        codes = codes.masked_fill(~_held(fmt, live).unsqueeze(-1), 0)
        index = tile_index(groups, tile)
        if columnwise:
            lying = codes if fmt.columnwise == "untransposed" else codes.mT
            code_tiles(fmt, columnwise["codes"])[index] = pack(fmt.element, lying)
            if stored is not None:
                tiles = tile_view(fmt, columnwise["scales"], columnwise=True)
                tiles[index] = lay_scales(fmt, stored.mT, columnwise=True)
        if rowwise:
            rowwise["codes"][row[live]] = pack(fmt.element, codes[live])
            if stored is not None:
                by_row = stored[..., ::vec].repeat_interleave(vec, dim=1)  # (t, 128, K / vec)
                by_row = by_row.masked_fill(~live.unsqueeze(-1), 0)
                tiles = tile_view(fmt, rowwise["scales"], columnwise=False)
                tiles[index] = lay_scales(fmt, by_row, columnwise=False)


def _tile_values(elements: Elements, row: Tensor, is_transformed: bool) -> Tensor:
    """(t, 128, K) fp32 values of slot tiles, zeros where ``row`` (t, 128) is negative."""
    values = elements.take(row.clamp_min(0)).masked_fill_((row < 0).unsqueeze(-1), 0.0)
    if not is_transformed:
        return values
    return (
        hadamard.transform(values.unflatten(1, (-1, hadamard.CHUNK)))
        .flatten(1, 2)
        .bfloat16()
        .float()
    )


def _column_blocks(values: Tensor, vec: int) -> Tensor:
    """Blocks (t, 128 / vec, K, vec) along the rows of tiles (t, 128, K)."""
    return values.unflatten(1, (-1, vec)).movedim(2, -1)


def _held(fmt: Format, live: Tensor) -> Tensor:
    """Which slots (t, 128) hold codes: those of rows, or the whole chunks that they spread over."""
    if not fmt.is_transformed:
        return live
    chunks = live.unflatten(1, (-1, hadamard.CHUNK))
    return chunks.any(2, keepdim=True).expand_as(chunks).flatten(1)
