"""NVFP4 quantization and its inverse, exact to the bit.

With g the amax of a group or of a row, a the amax of a block, and fl() one rounding to fp32:

    S_enc = min(fl(2688 / g), FMAX), or 1 where g is 0 or infinite
    S_dec = fl(1 / S_enc)
    s     = e4m3(min(fl(a * fl(S_enc * fl(1/6))), FMAX))                  the stored block scale
    enc   = min(fl(1 / fl(s * S_dec)), FMAX)
    code  = e2m1(fl(x * enc))
    value = fl(code * fl(fl(s * g) * fl(1/2688)))                          what a code decodes to

This is the order of TransformerEngine's PyTorch reference. ``a * (S_enc / 6)`` and ``(a / 6) *
S_enc`` give different bytes, so the order is part of the format. NaN never reaches an amax; as an
element it becomes code 7. Where s rounds to zero, enc is FMAX and the value decodes to zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_kernels.formats import NVFP4
from cute_kernels.layout.shapes import SF_TILE_ROWS, TILE_ROWS, ceil_div, round_up, scale_tiles
from cute_kernels.reference.conversions import (
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack_codes,
    unpack_codes,
)
from cute_kernels.reference.groups import Groups, tile_scales, untile_scales
from cute_kernels.reference.reductions import absmax, group_amax

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "block_values",
    "dequantize_nvfp4",
    "linear_column_scales",
    "linear_row_scales",
    "quantize_nvfp4",
]

_BLOCK = NVFP4.sf_vec_size
_FMAX = torch.finfo(torch.float32).max
#: Elements that are converted at a time: bounds the memory, and stays in the cache.
_CHUNK = 1 << 19


def _f32(value: float) -> float:
    """``value`` rounded to fp32."""
    return float(torch.tensor(value, dtype=torch.float32).item())


_TENSOR_MAX = NVFP4().tensor_max
_RCP_ELEMENT_MAX = _f32(1.0 / NVFP4.element.max)
#: fl(1/2688), the factor between amax and the decode scale; also used by the GEMM's epilogue.
RCP_TENSOR_MAX = _f32(1.0 / _TENSOR_MAX)


def _second_level(g: Tensor) -> tuple[Tensor, Tensor]:
    """(S_dec, fl(S_enc * fl(1/6))) of amaxes ``g``."""
    # Not ``_TENSOR_MAX / g``: torch computes that as a reciprocal and a product, rounding twice.
    s_enc = torch.full_like(g, _TENSOR_MAX).div_(g).clamp_max_(_FMAX).nan_to_num_(nan=_FMAX)
    s_enc = s_enc.masked_fill((g == 0) | (s_enc == 0), 1.0)
    return s_enc.reciprocal(), s_enc * _RCP_ELEMENT_MAX


def _block_scales(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Scale bytes and encode factors of blocks of amax ``a`` under second level ``g``."""
    s_dec, mult = _second_level(g)
    scales = encode_e4m3((a * mult).clamp_max_(_FMAX))
    enc = (decode_e4m3(scales) * s_dec).reciprocal_().clamp_max_(_FMAX)
    return scales, enc


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, elements_each))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def quantize_nvfp4(
    x: Tensor,
    groups: Groups,
    fmt: NVFP4,
    *,
    given_amax: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    amax: Tensor | None,
    codes_t: Tensor | None,
    scales_t: Tensor | None,
    amax_t: Tensor | None,
) -> None:
    """Quantize the groups of ``x`` into the buffers of the directions that are given.

    Args:
        x: (T, K) bf16, fp16 or fp32; K % 16 == 0. Uniform groups lie one after the other.
        groups: where the groups lie.
        fmt: row scaling and block shape.
        given_amax: (G,) fp32 amax per group to use instead of computing it; its sign is dropped.
        codes: (T, K / 2) uint8.
        scales: (tiles, ceil(K / 64), 512) uint8.
        amax: (G,) fp32, or (T,) when row-scaled.
        codes_t: (K, 64 * tiles) uint8 when ragged; (G, K, 64 * tiles of a group) when uniform.
        scales_t: (ceil(K / 128), 2 * tiles, 512) uint8 when ragged; (G, ceil(K / 128),
            2 * tiles of a group, 512) when uniform.
        amax_t: (G,) fp32.
    """
    per_row = absmax(x)
    per_group = group_amax(per_row, groups) if given_amax is None else given_amax.abs()
    if amax is not None:
        if fmt.row_scaled:
            live = groups.group_of_row() < len(groups)
            amax[live] = per_row[live]
        else:
            amax.copy_(per_group)
    if amax_t is not None:
        amax_t.copy_(per_group)
    if codes is not None and scales is not None and not fmt.is_2d:
        row_group = groups.group_of_row().clamp_max_(max(0, len(groups) - 1))
        _quantize_rows(
            x, groups, per_row if fmt.row_scaled else per_group[row_group], codes, scales
        )
    if codes_t is not None or (codes is not None and fmt.is_2d):
        rowwise = (codes, scales) if fmt.is_2d else (None, None)
        _quantize_tiles(x, groups, fmt, per_group, *rowwise, codes_t, scales_t)


def _quantize_rows(x: Tensor, groups: Groups, g: Tensor, codes: Tensor, scales: Tensor) -> None:
    """The rowwise copy with 1x16 blocks; ``g`` is the second level of each row."""
    _, slot = groups.slot_of_row()
    linear = torch.zeros(
        groups.num_tiles * TILE_ROWS, x.shape[1] // _BLOCK, dtype=torch.uint8, device=x.device
    )
    for part in _chunks(len(slot), x.shape[1]):  # the live rows are the first ones
        blocks = x[part].float().unflatten(1, (-1, _BLOCK))
        bytes_, enc = _block_scales(absmax(blocks), g[part, None])
        # Out of place: of fp32 input ``blocks`` is a view.
        codes[part] = pack_codes(encode_e2m1(blocks * enc.unsqueeze(-1)).flatten(1))
        linear[slot[part]] = bytes_
    tile, _, _ = groups.used_tiles()
    by_tile = linear.view(groups.num_tiles, TILE_ROWS, linear.shape[1])
    scales[tile] = tile_scales(by_tile[tile]).squeeze(1)


def _quantize_tiles(
    x: Tensor,
    groups: Groups,
    fmt: NVFP4,
    per_group: Tensor,
    codes: Tensor | None,
    scales: Tensor | None,
    codes_t: Tensor | None,
    scales_t: Tensor | None,
) -> None:
    """The columnwise copy, and the rowwise one of 16x16 blocks, slot tile by slot tile."""
    cols = x.shape[1]
    all_tiles, all_groups, all_rows = groups.used_tiles()
    for part in _chunks(len(all_tiles), TILE_ROWS * cols):
        tile, row = all_tiles[part], all_rows[part]
        live = row >= 0
        values = x[row.clamp_min(0)].float().masked_fill_(~live.unsqueeze(-1), 0.0)  # (t, 128, K)
        blocks = values.unflatten(1, (-1, _BLOCK))  # (t, 8, 16, K)
        a = absmax(blocks, dim=2)
        if fmt.is_2d:
            a = absmax(a.unflatten(2, (-1, _BLOCK))).repeat_interleave(_BLOCK, dim=2)
        bytes_, enc = _block_scales(a, per_group[all_groups[part], None, None])  # (t, 8, K)
        encoded = encode_e2m1(blocks.mul_(enc.unsqueeze(2))).flatten(1, 2)  # (t, 128, K)
        encoded.masked_fill_(~live.unsqueeze(-1), 0)
        if codes_t is not None and scales_t is not None:
            columns = torch.nn.functional.pad(bytes_.mT, (0, 0, 0, -cols % SF_TILE_ROWS))
            code_tiles, block_tiles = _columnwise_tiles(groups, codes_t, scales_t)
            index = _tile_index(groups, tile)
            code_tiles[index] = pack_codes(encoded.mT)
            block_tiles[index] = tile_scales(columns).permute(0, 2, 1, 3)
        if codes is not None and scales is not None:
            codes[row[live]] = pack_codes(encoded[live])
            by_row = bytes_[..., ::_BLOCK].repeat_interleave(_BLOCK, dim=1)  # (t, 128, K / 16)
            by_row = by_row.masked_fill(~live.unsqueeze(-1), 0)
            scales[tile] = tile_scales(by_row).squeeze(1)


def _columnwise_tiles(groups: Groups, codes_t: Tensor, scales_t: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the columnwise buffers with the slot tile first.

    Returns:
        codes ([G,] tiles, K, 64) and scales ([G,] tiles, 2, ceil(K / 128), 512).
    """
    code_tiles = codes_t.unflatten(-1, (-1, TILE_ROWS // 2)).movedim(-2, -3)
    block_tiles = scales_t.unflatten(-2, (-1, scale_tiles(TILE_ROWS, _BLOCK))).movedim(-4, -2)
    return code_tiles, block_tiles


def _tile_index(groups: Groups, tile: Tensor) -> tuple[Tensor, ...]:
    """Index of slot tiles into the views of ``_columnwise_tiles``."""
    if not groups.is_uniform:
        return (tile,)
    each = groups.num_tiles // len(groups)
    return (tile // each, tile % each)


def linear_row_scales(scales: Tensor, slots: Tensor, cols: int) -> Tensor:
    """Scale bytes (R, cols / 16) of the slot rows ``slots``."""
    tile, first = slots // TILE_ROWS, slots % TILE_ROWS
    used, where = torch.unique(tile, return_inverse=True)
    linear = untile_scales(scales[used].unsqueeze(1), ceil_div(cols, _BLOCK))
    return linear[where, first]


def linear_column_scales(codes_t: Tensor, scales_t: Tensor) -> Tensor:
    """Scale bytes (K, 8 t) of a columnwise copy.

    Args:
        codes_t: (K, 64 t) uint8, the columns of t slot tiles.
        scales_t: (ceil(K / 128), 2 t, 512) uint8.
    """
    return untile_scales(scales_t, codes_t.shape[1] * 2 // _BLOCK)[: codes_t.shape[0]]


def block_values(codes: Tensor, linear: Tensor) -> Tensor:
    """Code times block scale (R, K), exact in fp32.

    Args:
        codes: (R, K / 2) uint8.
        linear: (R, K / 16) uint8 scale bytes.
    """
    blocks: Tensor = unpack_codes(codes).unflatten(1, (-1, _BLOCK))
    return (blocks * decode_e4m3(linear).unsqueeze(-1)).flatten(1)


def dequantize_nvfp4(
    groups: Groups,
    fmt: NVFP4,
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    columnwise: bool,
    out: Tensor,
) -> None:
    """Decode one direction into ``out``; rows of the tail are left as they are.

    Args:
        groups: where the groups lie.
        fmt: whether ``amax`` is per row.
        codes: as ``quantize_nvfp4`` writes them, rowwise or columnwise.
        scales: likewise.
        amax: likewise.
        columnwise: which direction it is.
        out: (T, K), any floating dtype; one rounding from fp32.
    """
    cols = out.shape[1]
    if not columnwise:
        row, slot = groups.slot_of_row()
        group = groups.group_of_row()
        for part in _chunks(len(row), cols):
            source = row[part]
            g = amax[source] if fmt.row_scaled else amax[group[source]]
            linear = linear_row_scales(scales, slot[part], cols)
            out[source] = _decode(unpack_codes(codes[source]), linear, g[:, None]).to(out.dtype)
        return
    # Slot-tile views of both buffers: codes (tiles, K, 64), scales (tiles, 2, ceil(K / 128), 512).
    code_tiles, block_tiles = _columnwise_tiles(groups, codes, scales)
    tiles, tile_group, rows = groups.used_tiles()
    for part in _chunks(len(tiles), TILE_ROWS * round_up(cols, SF_TILE_ROWS)):
        tile, row = tiles[part], rows[part]
        index = _tile_index(groups, tile)
        linear = untile_scales(block_tiles[index].movedim(1, 2), TILE_ROWS // _BLOCK)[:, :cols]
        g = amax[tile_group[part]][:, None, None]
        values = _decode(unpack_codes(code_tiles[index]), linear, g).mT  # (t, 128, K)
        live = row >= 0
        out[row[live]] = values[live].to(out.dtype)


def _decode(values: Tensor, linear: Tensor, g: Tensor) -> Tensor:
    factor = (decode_e4m3(linear) * g) * RCP_TENSOR_MAX
    blocks: Tensor = values.unflatten(-1, (-1, _BLOCK))
    return (blocks * factor.unsqueeze(-1)).flatten(-2)
