"""Grouped GEMM of ragged rows by one matrix a group, and of two ragged operands over their rows.

By default no tensor core is imitated. NVFP4 operands: the values (code times block scale) have at
most 6 significant bits, so the products of one block of 16 add exactly in fp32 in any order. The
accumulator takes one block after the other in ascending order, each with one fp32 rounding. Plain
operands are multiplied and added in fp64 and rounded to fp32 once.

With ``tensor_core`` the accumulator has the bits of that GPU (``reference.tensor_core``). On
sm_100a mxf4nvf4 instructions multiply NVFP4 operands. sm_90a has none: fp16 instructions multiply
the values, which are exact in fp16. How the kernels feed them decides two things:

- The side that they decode in registers (the weights; A of a k_grouped product) is 2^-14 times its
  values, as the bits of a code, dropped into fp16, are the code times 2^-14; the sum is multiplied
  by 2^14. (Beside bf16 activations the weights are bf16, 2^-7 times their values.) A value below 1
  then is subnormal in fp16 and its exponent counts as that of 1, so E may come out too high, by 10
  at most. The products cannot lose bits to that: they are multiples of 2^(E - 25) all the same. An
  accumulator far smaller than the other side's values can.
- K is cut into pieces of 128, filled up with zeros. Instruction ``4 p + 2 w + h`` of a piece takes
  elements ``e = 8 w + 2 h + {0, 1, 4, 5}`` of the four blocks ``2 j + p``.

The epilogue works in fp32, each step rounded:

    f   = fl(fl(amax_a * fl(1/2688)) * fl(amax_b * fl(1/2688)))         only for NVFP4
    f   = fl(amax_b * fl(1/2688))                                       only B is NVFP4
    f   = fl(f * alpha)                                                 if alpha is given
    out = cast(fl(fl(fl(acc * f) + bias) + out))                        bias and out if asked for
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from cute_kernels.formats import NVFP4
from cute_kernels.layout.shapes import PIECE_K, TILE_ROWS, ceil_div, scale_tiles
from cute_kernels.reference.nvfp4 import (
    RCP_TENSOR_MAX,
    block_values,
    linear_column_scales,
    linear_row_scales,
)
from cute_kernels.reference.tensor_core import tensor_core_gemm

if TYPE_CHECKING:
    from collections.abc import Callable

    from cute_kernels.reference.groups import Groups

__all__ = [
    "k_grouped_gemm",
    "k_grouped_gemm_nvfp4",
    "m_grouped_gemm",
    "m_grouped_gemm_nvfp4",
    "m_grouped_gemm_w4a16",
]

_BLOCK = NVFP4.sf_vec_size
#: Scale tiles side by side in a columnwise copy for one slot tile.
_SCALE_TILES = scale_tiles(TILE_ROWS, _BLOCK)

#: By the type that is multiplied, what kernels for sm_90a multiply the values of the side by that
#: they decode.
_HOPPER_DECODED = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-7}


class _Blocks(NamedTuple):
    """Rows of an NVFP4 operand: codes (R, K / 2) and scale bytes (R, K / 16)."""

    codes: Tensor
    scales: Tensor


def _dot_blocks(a: Tensor, b: Tensor) -> Tensor:
    """A (M, K) @ B (N, K)^T of NVFP4 values: exact blocks of 16, added in fp32 ascending."""
    acc = torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], _BLOCK):
        acc += a[:, start : start + _BLOCK] @ b[:, start : start + _BLOCK].T
    return acc


def _hopper_order(values: Tensor) -> Tensor:
    """Values (R, K) in the order in which kernels for sm_90a contract them, K padded."""
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % PIECE_K))
    # The factors of K: pieces, blocks as j and p, elements as w, e // 4, h and e % 2.
    split: Tensor = values.unflatten(1, (-1, 4, 2, 2, 2, 2, 2))
    return split.permute(0, 1, 3, 4, 6, 2, 5, 7).flatten(1)


def _dot_nvfp4(
    a: _Blocks, b: _Blocks, tensor_core: str | None, decoded: Literal["a", "b"]
) -> Tensor:
    """A (M, K) @ B (N, K)^T of NVFP4 values, block scales included, fp32.

    ``decoded`` is the side that kernels for sm_90a decode in registers.
    """
    if tensor_core == "sm_100a":
        a_scales, b_scales = (x.scales.view(torch.float8_e4m3fn) for x in (a, b))
        return tensor_core_gemm(tensor_core, a.codes, b.codes, a_scales=a_scales, b_scales=b_scales)
    left, right = block_values(*a), block_values(*b)
    if tensor_core is None:
        return _dot_blocks(left, right)
    if decoded == "a":
        return _dot_hopper(right, left, torch.float16).T
    return _dot_hopper(left, right, torch.float16)


def _dot_hopper(other: Tensor, decoded: Tensor, dtype: torch.dtype) -> Tensor:
    """``other`` (M, K) @ ``decoded`` (N, K)^T of fp32 values as kernels for sm_90a add them."""
    scale = _HOPPER_DECODED[dtype]
    left, right = _hopper_order(other), _hopper_order(decoded) * scale
    return tensor_core_gemm("sm_90a", left.to(dtype), right.to(dtype)) / scale


def _dot_plain(a: Tensor, b: Tensor, tensor_core: str | None) -> Tensor:
    """A (M, K) @ B (N, K)^T, fp32: in fp64 and rounded once, or as ``tensor_core`` adds."""
    if tensor_core is not None:
        return tensor_core_gemm(tensor_core, a, b)
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
    tensor_core: str | None,
) -> None:
    """Rows of group g of ``a`` (T, K) times ``b[g]`` (N, K)^T into ``out`` (T, N).

    With ``transpose_b`` b[g] is (K, N). Rows of empty groups and of the tail are not written.
    ``tensor_core`` is None, or the architecture whose tensor core gives the accumulator's bits; it
    takes bf16 and fp16.
    """

    def product(g: int, start: int, end: int) -> Tensor:
        return _dot_plain(a[start:end], b[g].T if transpose_b else b[g], tensor_core)

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
    tensor_core: str | None,
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
        tensor_core: None, or the architecture whose tensor core gives the accumulator's bits.
    """
    row, slot = groups.slot_of_row()
    slot_of = torch.zeros(groups.num_rows, dtype=torch.int64, device=a_codes.device)
    slot_of[row] = slot
    width = a_codes.shape[1]
    scale_width = a_scales.shape[1]

    def product(g: int, start: int, end: int) -> Tensor:
        rows = torch.arange(start, end, device=a_codes.device)
        left = _Blocks(a_codes[rows], linear_row_scales(a_scales, slot_of[start:end], 2 * width))
        out_rows = torch.arange(b_codes.shape[1], device=a_codes.device)
        right = _Blocks(
            b_codes[g, :, :width],
            linear_row_scales(b_scales[g, :, :scale_width], out_rows, 2 * width),
        )
        return _dot_nvfp4(left, right, tensor_core, decoded="b")

    def factor(g: int, start: int, end: int) -> Tensor:
        first = a_amax[start:end, None] if row_scaled else a_amax[g]
        return (first * RCP_TENSOR_MAX) * (b_amax[g] * RCP_TENSOR_MAX)

    _m_grouped(groups, out, product, factor, alpha, bias, accumulate)


def m_grouped_gemm_w4a16(
    a: Tensor,
    b_codes: Tensor,
    b_scales: Tensor,
    b_amax: Tensor,
    groups: Groups,
    out: Tensor,
    *,
    alpha: Tensor | None,
    bias: Tensor | None,
    accumulate: bool,
    tensor_core: str | None,
) -> None:
    """Rows of group g of plain ``a`` (T, K) times NVFP4 B[g]^T into ``out`` (T, N).

    B is as for ``m_grouped_gemm_nvfp4``. ``tensor_core`` is None or ``"sm_90a"``; the first adds in
    fp64 and rounds once.
    """
    scale_width = scale_tiles(a.shape[1], _BLOCK)

    def product(g: int, start: int, end: int) -> Tensor:
        rows = torch.arange(b_codes.shape[1], device=a.device)
        scales = linear_row_scales(b_scales[g, :, :scale_width], rows, a.shape[1])
        values = block_values(b_codes[g, :, : a.shape[1] // 2], scales)
        if tensor_core is None:
            return _dot_plain(a[start:end], values, None)
        return _dot_hopper(a[start:end].float(), values, a.dtype)

    def factor(g: int, start: int, end: int) -> Tensor:
        return b_amax[g] * RCP_TENSOR_MAX

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
    a: Tensor,
    b: Tensor,
    groups: Groups,
    out: Tensor,
    *,
    alpha: Tensor | None,
    accumulate: bool,
    tensor_core: str | None,
) -> None:
    """Rows of g of ``a`` (m, N), transposed, times those of ``b`` (m, K) into ``out[g]`` (N, K).

    An empty group gives zeros, or leaves ``out[g]`` alone when accumulating. With ``tensor_core``
    (as for ``m_grouped_gemm``) instructions start at the group's first row, and rows past its last
    count as zeros.
    """

    def product(g: int, start: int, end: int) -> Tensor:
        return _dot_plain(a[start:end].T, b[start:end].T, tensor_core)

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
    tensor_core: str | None,
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
        tensor_core: None, or the architecture whose tensor core gives the accumulator's bits.
    """
    first_tile = groups.first_tile.tolist()

    def blocks(codes_t: Tensor, scales_t: Tensor, g: int, rows: int) -> _Blocks:
        tiles = slice(first_tile[g], first_tile[g] + ceil_div(rows, TILE_ROWS))
        codes = codes_t.unflatten(1, (-1, TILE_ROWS // 2))[:, tiles].flatten(1)
        scales = scales_t.unflatten(1, (-1, _SCALE_TILES))[:, tiles].flatten(1, 2)
        used = ceil_div(rows, _BLOCK)
        linear = linear_column_scales(codes, scales)[:, :used]
        return _Blocks(codes[:, : used * _BLOCK // 2], linear)

    def product(g: int, start: int, end: int) -> Tensor:
        left = blocks(a_codes_t, a_scales_t, g, end - start)
        right = blocks(b_codes_t, b_scales_t, g, end - start)
        return _dot_nvfp4(left, right, tensor_core, decoded="a")

    def factor(g: int) -> Tensor:
        return (a_amax[g] * RCP_TENSOR_MAX) * (b_amax[g] * RCP_TENSOR_MAX)

    _k_grouped(groups, out, product, factor, alpha, accumulate)
