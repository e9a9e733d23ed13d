"""Grouped GEMM of ragged rows by one matrix a group, and of two ragged operands over their rows.

NVFP4 operands: the values (code times block scale) have at most 6 significant bits, so the
products of one block of 16 add exactly in fp32 in any order. The accumulator takes one block after
the other in ascending order, each with one fp32 rounding. Plain operands are multiplied and added
in fp64 and rounded to fp32 once. The epilogue works in fp32, each step rounded:

    f   = fl(fl(amax_a * fl(1/2688)) * fl(amax_b * fl(1/2688)))         only for NVFP4
    f   = fl(f * alpha)                                                 if alpha is given
    out = cast(fl(fl(fl(acc * f) + bias) + out))                        bias and out if asked for
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_kernels.formats import NVFP4
from cute_kernels.reference.nvfp4 import RCP_TENSOR_MAX, columnwise_values, rowwise_values
from cute_kernels.shapes import TILE_ROWS, ceil_div, scale_tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from cute_kernels.reference.groups import Groups

__all__ = ["k_grouped_gemm", "k_grouped_gemm_nvfp4", "m_grouped_gemm", "m_grouped_gemm_nvfp4"]

_BLOCK = NVFP4.sf_vec_size
#: Scale tiles side by side in a columnwise copy for one slot tile.
_SCALE_TILES = scale_tiles(TILE_ROWS, _BLOCK)


def _dot_blocks(a: Tensor, b: Tensor) -> Tensor:
    """A (M, K) @ B (N, K)^T of NVFP4 values: exact blocks of 16, added in fp32 ascending."""
    acc = torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], _BLOCK):
        acc += a[:, start : start + _BLOCK] @ b[:, start : start + _BLOCK].T
    return acc


def _dot_plain(a: Tensor, b: Tensor) -> Tensor:
    """A (M, K) @ B (N, K)^T in fp64, rounded to fp32 once."""
    return (a.double() @ b.double().T).float()


def _store(
    out: Tensor,
    acc: Tensor,
    factor: Tensor | None,
    alpha: Tensor | None,
    bias: Tensor | None,
    accumulate: bool,
) -> None:
    if alpha is not None:
        factor = alpha if factor is None else factor * alpha
    if factor is not None:
        acc = acc * factor
    if bias is not None:
        acc = acc + bias.float()
    if accumulate:
        acc = acc + out.float()
    out.copy_(acc)


def _spans(groups: Groups) -> list[tuple[int, int, int]]:
    """(group, first row, end row) of the groups that have rows."""
    starts, rows = groups.starts.tolist(), groups.rows.tolist()
    return [(g, s, s + m) for g, (s, m) in enumerate(zip(starts, rows, strict=True)) if m > 0]


def _m_grouped(
    groups: Groups,
    out: Tensor,
    product: Callable[[int, int, int], Tensor],
    factor: Callable[[int, int, int], Tensor | None],
    alpha: Tensor | None,
    bias: Tensor | None,
    accumulate: bool,
) -> None:
    for g, start, end in _spans(groups):
        _store(
            out[start:end],
            product(g, start, end),
            factor(g, start, end),
            None if alpha is None else alpha[g],
            None if bias is None else bias[g],
            accumulate,
        )


def m_grouped_gemm(
    a: Tensor,
    b: Tensor,
    groups: Groups,
    out: Tensor,
    *,
    transpose_b: bool,
    alpha: Tensor | None,
    bias: Tensor | None,
    accumulate: bool,
) -> None:
    """Rows of group g of ``a`` (T, K) times ``b[g]`` (N, K)^T into ``out`` (T, N).

    With ``transpose_b`` b[g] is (K, N). Rows of empty groups and of the tail are not written.
    """

    def product(g: int, start: int, end: int) -> Tensor:
        return _dot_plain(a[start:end], b[g].T if transpose_b else b[g])

    _m_grouped(groups, out, product, lambda *_: None, alpha, bias, accumulate)


def m_grouped_gemm_nvfp4(
    a_codes: Tensor,
    a_scales: Tensor,
    a_amax: Tensor,
    b_codes: Tensor,
    b_scales: Tensor,
    b_amax: Tensor,
    groups: Groups,
    out: Tensor,
    *,
    row_scaled: bool,
    alpha: Tensor | None,
    bias: Tensor | None,
    accumulate: bool,
) -> None:
    """Rows of group g of A times B[g]^T into ``out`` (T, N).

    Args:
        a_codes: (T, K / 2) uint8, a rowwise ragged copy.
        a_scales: (tiles, ceil(K / 64), 512) uint8.
        a_amax: (G,) fp32, or (T,) when ``row_scaled``.
        b_codes: (G, N, >= K / 2) uint8, blocks along the last dimension: a uniform tensor's rowwise
            copy, or its columnwise copy, whose padding past K is left out.
        b_scales: (G, ceil(N / 128), >= ceil(K / 64), 512) uint8.
        b_amax: (G,) fp32.
        groups: where the groups lie.
        out: (T, N), any floating dtype.
        row_scaled: ``a_amax`` is per row.
        alpha: (G,) fp32.
        bias: (G, N).
        accumulate: add to what ``out`` holds.
    """
    row, slot = groups.slot_of_row()
    slot_of = torch.zeros(groups.num_rows, dtype=torch.int64, device=a_codes.device)
    slot_of[row] = slot
    width = a_codes.shape[1]
    scale_width = a_scales.shape[1]

    def product(g: int, start: int, end: int) -> Tensor:
        rows = torch.arange(start, end, device=a_codes.device)
        values = rowwise_values(a_codes, a_scales, rows, slot_of[start:end])
        out_rows = torch.arange(b_codes.shape[1], device=a_codes.device)
        other = rowwise_values(
            b_codes[g, :, :width], b_scales[g, :, :scale_width], out_rows, out_rows
        )
        return _dot_blocks(values, other)

    def factor(g: int, start: int, end: int) -> Tensor:
        first = a_amax[start:end, None] if row_scaled else a_amax[g]
        return (first * RCP_TENSOR_MAX) * (b_amax[g] * RCP_TENSOR_MAX)

    _m_grouped(groups, out, product, factor, alpha, bias, accumulate)


def _k_grouped(
    groups: Groups,
    out: Tensor,
    product: Callable[[int, int, int], Tensor],
    factor: Callable[[int], Tensor | None],
    alpha: Tensor | None,
    accumulate: bool,
) -> None:
    if not accumulate:
        out[groups.rows == 0] = 0
    for g, start, end in _spans(groups):
        scale = None if alpha is None else alpha[g]
        _store(out[g], product(g, start, end), factor(g), scale, None, accumulate)


def k_grouped_gemm(
    a: Tensor, b: Tensor, groups: Groups, out: Tensor, *, alpha: Tensor | None, accumulate: bool
) -> None:
    """Rows of g of ``a`` (m, N), transposed, times those of ``b`` (m, K) into ``out[g]`` (N, K).

    An empty group gives zeros, or leaves ``out[g]`` alone when accumulating.
    """

    def product(g: int, start: int, end: int) -> Tensor:
        return _dot_plain(a[start:end].T, b[start:end].T)

    _k_grouped(groups, out, product, lambda _: None, alpha, accumulate)


def k_grouped_gemm_nvfp4(
    a_codes_t: Tensor,
    a_scales_t: Tensor,
    a_amax: Tensor,
    b_codes_t: Tensor,
    b_scales_t: Tensor,
    b_amax: Tensor,
    groups: Groups,
    out: Tensor,
    *,
    alpha: Tensor | None,
    accumulate: bool,
) -> None:
    """A's group g (m, N)^T times B's group g (m, K) into ``out[g]`` (N, K), both columnwise copies.

    Args:
        a_codes_t: (N, 64 * tiles) uint8, a ragged columnwise copy.
        a_scales_t: (ceil(N / 128), 2 * tiles, 512) uint8.
        a_amax: (G,) fp32.
        b_codes_t: (K, 64 * tiles) uint8, in the same slots.
        b_scales_t: (ceil(K / 128), 2 * tiles, 512) uint8.
        b_amax: (G,) fp32.
        groups: where the groups lie.
        out: (G, N, K), any floating dtype.
        alpha: (G,) fp32.
        accumulate: add to what ``out`` holds.
    """
    first_tile = groups.first_tile.tolist()

    def values(codes_t: Tensor, scales_t: Tensor, g: int, rows: int) -> Tensor:
        tiles = slice(first_tile[g], first_tile[g] + ceil_div(rows, TILE_ROWS))
        codes = codes_t.unflatten(1, (-1, TILE_ROWS // 2))[:, tiles].flatten(1)
        scales = scales_t.unflatten(1, (-1, _SCALE_TILES))[:, tiles].flatten(1, 2)
        return columnwise_values(codes, scales)[:, : ceil_div(rows, _BLOCK) * _BLOCK]

    def product(g: int, start: int, end: int) -> Tensor:
        a = values(a_codes_t, a_scales_t, g, end - start)
        return _dot_blocks(a, values(b_codes_t, b_scales_t, g, end - start))

    def factor(g: int) -> Tensor:
        return (a_amax[g] * RCP_TENSOR_MAX) * (b_amax[g] * RCP_TENSOR_MAX)

    _k_grouped(groups, out, product, factor, alpha, accumulate)
