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

from cute_kernels.layout.pieces import DECODED_SCALE, in_pieces
from cute_kernels.layout.shapes import TILE_ROWS, ceil_div, scale_tiles
from cute_kernels.reference.codecs import codec_of
from cute_kernels.reference.conversions import f32
from cute_kernels.reference.scales import linear_column_scales, linear_row_scales
from cute_kernels.reference.tensor_core import tensor_core_gemm

if TYPE_CHECKING:
    from cute_kernels.formats import Format
    from cute_kernels.reference.groups import Groups

__all__ = ["Operand", "k_grouped_gemm", "m_grouped_gemm"]


class Operand(NamedTuple):
    """One operand of a product: a plain tensor, or one direction of a quantized one.

    Attributes:
        codes: the plain values, or the codes.
        fmt: the format; None if plain.
        scales: the block scales.
        level: the vector of the second level that decodes.
        per_row: it has one entry a row.
    """

    codes: Tensor
    fmt: Format | None = None
    scales: Tensor | None = None
    level: Tensor | None = None
    per_row: bool = False

    def factor(self, group: int, rows: slice) -> Tensor | None:
        """The second level of a group, or of rows of it, as the epilogue multiplies by it."""
        if self.fmt is None or self.level is None:
            return None
        second = self.fmt.second_level
        assert second is not None
        level = self.level[rows, None] if self.per_row else self.level[group]
        return level * f32(second.factor)


class _Rows(NamedTuple):
    """Rows that a product contracts: (R, K) as they are stored, and (R, K / block) scales."""

    codes: Tensor
    fmt: Format | None = None
    scales: Tensor | None = None

    def values(self) -> Tensor:
        """(R, K), block scales included, exact in fp32."""
        if self.fmt is None:
            return self.codes.float()
        return codec_of(self.fmt).values(self.codes, self.scales)


def _dot_blocks(a: Tensor, b: Tensor, block: int) -> Tensor:
    """A (M, K) @ B (N, K)^T of NVFP4 values: exact blocks of 16, added in fp32 ascending."""
    acc = torch.zeros(len(a), len(b), dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], block):
        acc += a[:, start : start + block] @ b[:, start : start + block].T
    return acc


def _dot(a: _Rows, b: _Rows, tensor_core: str | None, decoded: Literal["a", "b"]) -> Tensor:
    """A (M, K) @ B (N, K)^T, block scales included, fp32.

    ``decoded`` is the side that kernels for sm_90a decode in registers, where one is quantized.
    """
    if a.fmt is None and b.fmt is None:
        return _dot_plain(a.codes, b.codes, tensor_core)
    if a.fmt is None or b.fmt is None:
        if tensor_core is None:
            return _dot_plain(a.values(), b.values(), None)
        plain = a if a.fmt is None else b
        return _dot_hopper(a.values(), b.values(), plain.codes.dtype)
    if tensor_core == "sm_100a":
        return _dot_block_scaled(a, b, tensor_core)
    left, right = a.values(), b.values()
    if tensor_core is None:
        assert a.fmt.scale is not None
        return _dot_blocks(left, right, a.fmt.scale.vec_size)
    if decoded == "a":
        return _dot_hopper(right, left, torch.float16).T
    return _dot_hopper(left, right, torch.float16)


def _dot_block_scaled(a: _Rows, b: _Rows, tensor_core: str) -> Tensor:
    """As a tensor core multiplies that takes block scales."""
    scales = []
    for rows in (a, b):
        assert rows.fmt is not None and rows.fmt.scale is not None and rows.scales is not None
        scales.append(rows.scales.view(rows.fmt.scale.element.dtype))
    return tensor_core_gemm(tensor_core, a.codes, b.codes, a_scales=scales[0], b_scales=scales[1])


def _dot_hopper(other: Tensor, decoded: Tensor, dtype: torch.dtype) -> Tensor:
    """``other`` (M, K) @ ``decoded`` (N, K)^T of fp32 values as kernels for sm_90a add them."""
    scale = DECODED_SCALE[str(dtype).removeprefix("torch.")]
    left, right = in_pieces(other), in_pieces(decoded) * scale
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


def m_grouped_gemm(
    a: Operand,
    b: Operand,
    groups: Groups,
    out: Tensor,
    *,
    transpose_b: bool,
    alpha: Tensor | None,
    bias: Tensor | None,
    accumulate: bool,
    tensor_core: str | None,
) -> None:
    """Rows of group g of A times B[g]^T into ``out`` (T, N).

    Rows of empty groups and of the tail are not written.

    Args:
        a: (T, K), plain or a rowwise ragged copy.
        b: (G, N, K), or (G, K, N) with ``transpose_b``; or the copy of a uniform tensor whose
            blocks run along K, whose padding past K is left out.
        groups: where the groups lie.
        out: (T, N), any floating dtype.
        transpose_b: contract over the second dimension of a plain B.
        alpha: (G,) fp32.
        bias: (G, N).
        accumulate: add to what ``out`` holds.
        tensor_core: None, or the architecture whose tensor core gives the accumulator's bits.
    """
    if a.fmt is not None:
        row, slot = groups.slot_of_row()
        slot_of = torch.zeros(groups.num_rows, dtype=torch.int64, device=out.device)
        slot_of[row] = slot
    depth = a.codes.shape[1]
    if a.fmt is not None:
        depth = depth * a.codes.element_size() * 8 // a.fmt.element.bits

    def left(start: int, end: int) -> _Rows:
        if a.fmt is None:
            return _Rows(a.codes[start:end])
        scale, scales = a.fmt.scale, None
        if scale is not None and a.scales is not None:
            scales = linear_row_scales(a.fmt, a.scales, slot_of[start:end], depth)
        return _Rows(a.codes[start:end], a.fmt, scales)

    def right(g: int) -> _Rows:
        if b.fmt is None:
            return _Rows(b.codes[g].T if transpose_b else b.codes[g])
        scale, scales = b.fmt.scale, None
        if scale is not None and b.scales is not None:
            tiles = b.scales[g, :, : scale_tiles(depth, scale.vec_size)]
            rows = torch.arange(b.codes.shape[1], device=out.device)
            scales = linear_row_scales(b.fmt, tiles, rows, depth)
        width = depth * b.fmt.element.bits // (b.codes.element_size() * 8)
        return _Rows(b.codes[g, :, :width], b.fmt, scales)

    for g, start, end in _spans(groups):
        rows = slice(start, end)
        _store(
            out[rows],
            _dot(left(start, end), right(g), tensor_core, decoded="b"),
            _product(a.factor(g, rows), b.factor(g, rows)),
            None if alpha is None else alpha[g],
            None if bias is None else bias[g],
            accumulate,
        )


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second


def k_grouped_gemm(
    a: Operand,
    b: Operand,
    groups: Groups,
    out: Tensor,
    *,
    alpha: Tensor | None,
    accumulate: bool,
    tensor_core: str | None,
) -> None:
    """A's group g (m, N), transposed, times B's group g (m, K) into ``out[g]`` (N, K).

    An empty group gives zeros, or leaves ``out[g]`` alone when accumulating. With ``tensor_core``
    instructions start at the group's first row, and rows past its last count as zeros.

    Args:
        a: (T, N), plain or a columnwise ragged copy.
        b: (T, K), likewise, in the same slots.
        groups: where the groups lie.
        out: (G, N, K), any floating dtype.
        alpha: (G,) fp32.
        accumulate: add to what ``out`` holds.
        tensor_core: None, or the architecture whose tensor core gives the accumulator's bits.
    """
    first_tile = groups.first_tile.tolist()

    def rows_of(x: Operand, g: int, start: int, end: int) -> _Rows:
        if x.fmt is None:
            return _Rows(x.codes[start:end].T)
        first, count = first_tile[g], end - start
        return _slot_columns(x, first, first + ceil_div(count, TILE_ROWS), count)

    if not accumulate:
        out[groups.rows == 0] = 0
    for g, start, end in _spans(groups):
        _store(
            out[g],
            _dot(rows_of(a, g, start, end), rows_of(b, g, start, end), tensor_core, decoded="a"),
            _product(a.factor(g, slice(start, end)), b.factor(g, slice(start, end))),
            None if alpha is None else alpha[g],
            None,
            accumulate,
        )


def _slot_columns(x: Operand, first: int, end: int, rows: int) -> _Rows:
    """The part of a transposed columnwise copy in slot tiles [first, end), up to ``rows`` rows."""
    assert x.fmt is not None
    scale, bits = x.fmt.scale, x.fmt.element.bits
    per_byte = x.codes.element_size() * 8 // bits
    codes = x.codes.unflatten(1, (-1, TILE_ROWS // per_byte))[:, first:end].flatten(1)
    used, scales = rows, None
    if scale is not None and x.scales is not None:
        blocks = ceil_div(rows, scale.vec_size)
        used = blocks * scale.vec_size
        tiles = slice(first, end)
        scales = linear_column_scales(x.fmt, x.scales, len(codes), tiles)[:, :blocks]
    return _Rows(codes[:, : ceil_div(used, per_byte)], x.fmt, scales)
