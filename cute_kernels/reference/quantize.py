"""Quantization of grouped rows for every format: codecs compute, this module arranges the results.

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
from .copies import buffers_by_name, code_tiles, rows_first, slices, tile_index, tile_parts
from .elements import Elements
from .groups import Groups
from .random_numbers import RandomNumbers
from .reductions import group_amax
from .scales import lay_scales, tile_view


class QuantizeInputs(NamedTuple):
    """Inputs of quantization besides the elements.

    Attributes:
        amax: (G,) fp32. Amax per group to use instead of computing it. Its sign is dropped. (2, G),
            rowwise and columnwise, if both directions are requested and the format transforms its
            columnwise copy.
        scale: (G,) fp32. Scale per group, for formats that take it (``Format.has_given_scale``).
        random: Random bytes for stochastic formats.
    """

    amax: Tensor | None = None
    scale: Tensor | None = None
    random: RandomNumbers | None = None


def quantize(
    elements: Elements,
    groups: Groups,
    fmt: Format,
    out: Mapping[str, Tensor],
    inputs: QuantizeInputs = QuantizeInputs(),  # noqa: B008  (immutable)
) -> None:
    """Quantize groups of elements into the buffers of one or both directions.

    ``out`` has the buffers of the requested directions by the names of ``layout.buffers``. Amaxes,
    scales and random numbers in ``inputs`` are used instead of being computed.
    """
    codec = codec_of(fmt, elements.dtype)
    rowwise, columnwise = (_named(fmt, out, direction) for direction in (False, True))
    if rowwise and groups.is_uniform:
        rowwise = rows_first(rowwise)
    if fmt.global_scale is None:
        # Amaxes of whole rows would take a pass over all elements, and are not needed.
        per_row = torch.zeros(1, dtype=torch.float32, device=elements.device).expand(elements.rows)
    else:
        per_row = elements.absmax(nan=fmt.amaxes_keep_nan)
    per_group = _group_amaxes(elements, groups, fmt, per_row, inputs.amax, bool(columnwise))
    for is_columnwise, copy in ((False, rowwise), (True, columnwise)):
        if copy:
            _store_global_scale(
                codec, groups, copy, per_row, per_group[is_columnwise], inputs.scale, is_columnwise
            )
    # Amaxes or given scales, from which block scales follow.
    basis = per_group if inputs.scale is None else (inputs.scale, inputs.scale)
    if rowwise and not fmt.is_2d:
        global_scale = fmt.global_scale
        if global_scale is not None and global_scale.per == "row":
            g = per_row
        else:
            g = basis[0][groups.group_of_row().clamp_max_(max(0, len(groups) - 1))]
        _quantize_rows(codec, elements, groups, g, rowwise, inputs.random)
    if columnwise or (rowwise and fmt.is_2d):
        _quantize_tiles(
            codec,
            elements,
            groups,
            basis[1],
            rowwise if fmt.is_2d else {},
            columnwise,
            inputs.random,
        )


def _group_amaxes(
    elements: Elements,
    groups: Groups,
    fmt: Format,
    per_row: Tensor,
    amax: Tensor | None,
    is_columnwise: bool,
) -> tuple[Tensor, Tensor]:
    """Return (G,) amaxes of the groups, rowwise and columnwise."""
    if amax is not None:
        rowwise, columnwise = amax.abs().expand(2, -1)
        return rowwise, columnwise
    rowwise = group_amax(per_row, groups)
    is_own = is_columnwise and fmt.is_transformed
    return rowwise, _transformed_amax(elements, groups, fmt.amaxes_keep_nan) if is_own else rowwise


def _transformed_amax(elements: Elements, groups: Groups, nan: bool) -> Tensor:
    """Return (G,) amaxes of the transformed values."""
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
    """Return the buffers of one direction by their rowwise names; empty if it is not requested."""
    if ("codes_t" if columnwise else "codes") not in out:
        return {}
    return buffers_by_name(
        fmt.buffer_names(columnwise=False), [out[name] for name in fmt.buffer_names(columnwise)]
    )


def _store_global_scale(
    codec: Codec,
    groups: Groups,
    copy: Mapping[str, Tensor],
    per_row: Tensor,
    per_group: Tensor,
    scale: Tensor | None,
    columnwise: bool,
) -> None:
    """Write the vectors of the global scale."""
    global_scale = codec.fmt.global_scale_for(columnwise)
    if global_scale is None:
        return
    if global_scale.per == "group":
        for name, vector in zip(
            global_scale.buffers, codec.global_scale_vectors(per_group, scale), strict=True
        ):
            copy[name].copy_(vector)
        return
    live = groups.group_of_row() < len(groups)
    for name, vector in zip(global_scale.buffers, codec.global_scale_vectors(per_row), strict=True):
        copy[name][live] = vector[live]


def _quantize_rows(
    codec: Codec,
    elements: Elements,
    groups: Groups,
    g: Tensor,
    copy: Mapping[str, Tensor],
    random: RandomNumbers | None,
) -> None:
    """Write the rowwise copy, blocks along K; ``g`` is the amax of each row or of its group."""
    fmt, scale, cols = codec.fmt, codec.fmt.scale, elements.cols
    vec = cols if scale is None else scale.vec_size
    row, slot = groups.slot_of_row()
    linear = None
    if scale is not None:
        shape = groups.num_tiles * TILE_ROWS, ceil_div(cols, vec)
        linear = torch.zeros(shape, dtype=scale.dtype, device=elements.device)
    for rows in slices(len(slot), cols):  # the live rows are the first ones
        blocks = _whole_blocks(elements.take(rows), vec).unflatten(1, (-1, vec))
        random_bytes = None if random is None else random.rows(row[rows]).unflatten(1, (-1, vec))
        encoded, stored = codec.encode(
            blocks, absmax(blocks, nan=fmt.amaxes_keep_nan), g[rows, None], random_bytes
        )
        copy["codes"][rows] = pack(fmt.element, encoded.flatten(1)[:, :cols])
        if linear is not None and stored is not None:
            linear[slot[rows]] = stored
    if linear is not None:
        tile, _, _ = groups.used_tiles()
        tiled = linear.view(groups.num_tiles, TILE_ROWS, linear.shape[1])
        tiles = tile_view(fmt, copy["scales"], columnwise=False)
        tiles[tile_index(groups, tile)] = lay_scales(fmt, tiled[tile], columnwise=False)


def _whole_blocks(x: Tensor, vec: int) -> Tensor:
    """Pad the last dimension with zeros to a multiple of ``vec``; zeros do not change an amax."""
    missing = -x.shape[-1] % vec
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _quantize_tiles(
    codec: Codec,
    elements: Elements,
    groups: Groups,
    per_group: Tensor,
    rowwise: Mapping[str, Tensor],
    columnwise: Mapping[str, Tensor],
    random: RandomNumbers | None,
) -> None:
    """Write the columnwise copy, and the rowwise copy of square blocks, tile by tile."""
    fmt, scale, cols = codec.fmt, codec.fmt.scale, elements.cols
    vec = TILE_ROWS if scale is None else scale.vec_size
    for tile, group, row in tile_parts(groups, cols):
        live = row >= 0
        blocks = _column_blocks(_tile_values(elements, row, fmt.is_transformed), vec)
        a = absmax(blocks, nan=fmt.amaxes_keep_nan)
        if fmt.is_2d:
            squares = absmax(_whole_blocks(a, vec).unflatten(2, (-1, vec)), nan=fmt.amaxes_keep_nan)
            a = squares.repeat_interleave(vec, dim=2)[..., :cols]
        random_bytes = None
        if random is not None:
            # Both directions of square blocks follow the rowwise rule.
            random_bytes = (
                _column_blocks(random.rows(row.clamp_min(0)), vec)
                if fmt.is_2d
                else random.tiles(tile)
            )
        encoded, stored = codec.encode(blocks, a, per_group[group, None, None], random_bytes)
        codes = encoded.movedim(-1, 2).flatten(1, 2)  # (t, 128, K)
        codes = codes.masked_fill(~_occupied_slots(fmt, live).unsqueeze(-1), 0)
        index = tile_index(groups, tile)
        if columnwise:
            oriented = codes if fmt.columnwise == "untransposed" else codes.mT
            code_tiles(fmt, columnwise["codes"])[index] = pack(fmt.element, oriented)
            if stored is not None:
                tiles = tile_view(fmt, columnwise["scales"], columnwise=True)
                tiles[index] = lay_scales(fmt, stored.mT, columnwise=True)
        if rowwise:
            rowwise["codes"][row[live]] = pack(fmt.element, codes[live])
            if stored is not None:
                row_scales = stored[..., ::vec].repeat_interleave(vec, dim=1)  # (t, 128, K / vec)
                row_scales = row_scales.masked_fill(~live.unsqueeze(-1), 0)
                tiles = tile_view(fmt, rowwise["scales"], columnwise=False)
                tiles[index] = lay_scales(fmt, row_scales, columnwise=False)


def _tile_values(elements: Elements, row: Tensor, is_transformed: bool) -> Tensor:
    """Return (t, 128, K) fp32 values of slot tiles, zeros where ``row`` (t, 128) is negative."""
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
    """Return blocks (t, 128 / vec, K, vec) along the rows of tiles (t, 128, K)."""
    return values.unflatten(1, (-1, vec)).movedim(2, -1)


def _occupied_slots(fmt: Format, live: Tensor) -> Tensor:
    """Return the mask (t, 128) of slots with codes: of rows, or of chunks that mix rows."""
    if not fmt.is_transformed:
        return live
    chunks = live.unflatten(1, (-1, hadamard.CHUNK))
    return chunks.any(2, keepdim=True).expand_as(chunks).flatten(1)
