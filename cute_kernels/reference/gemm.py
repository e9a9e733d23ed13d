"""Grouped GEMM of ragged rows by one matrix per group, and of two ragged operands over their rows.

``reference.dots`` defines the accumulator. The epilogue works in fp32, each step rounded:

  l_x = fl(vector_x * factor_x)           global scale of an operand, if it has one: NVFP4's amax
                                          times fl(1/2688), FP8's scale_inv times 1
  f   = fl(l_a * l_b), or the one that exists, or 1
  f   = fl(f * alpha)                     if alpha is given
  out = cast(fl(fl(fl(acc * f) + bias) + out))                  bias and out if requested

``factor_x`` comes from the record of the operand, ``vector_x`` from the copy that is read.
"""

from torch import Tensor

from ..layout.shapes import round_up
from ..layout.slots import TILE_ROWS
from .dots import AccumulationModel, dot
from .groups import Groups
from .operands import Operand, Rows


def _store(
    out: Tensor,
    acc: Tensor,
    factor: Tensor | None,
    alpha: Tensor | None,
    bias: Tensor | None,
    accumulate: bool,
) -> None:
    """Apply the epilogue to an accumulator and write ``out``."""
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
    """Return (group, first row, end row) of the groups that have rows."""
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
    split: bool = False,
) -> None:
    """Multiply the rows of group g of A by B[g]^T, and write ``out`` (T, N).

    Rows of empty groups and of the tail are not written.

    Args:
        a: (T, K), plain or a rowwise ragged copy. If it has an index, the rows that the index
            selects are multiplied.
        b: (G, N, K), or (G, K, N) with ``transpose_b``; or the copy of a uniform tensor with
            blocks along K. The padding of a copy past K is left out.
        groups: Positions of the groups.
        out: (T, N). Any floating dtype.
        transpose_b: Contract over the second dimension of a plain B.
        alpha: (G,) fp32.
        bias: (G, N).
        accumulate: Add to what ``out`` holds.
        tensor_core: None, or the architecture whose tensor core gives the accumulator's bits.
        split: True adds partial sums to fp32 sums every 128 of K. It affects only operands
            without block scales, on tensor cores for which it changes the bits.
    """
    adder = AccumulationModel(tensor_core, "b", split)
    first_tile = groups.first_tile.tolist()
    depth = a.codes.shape[1] if a.fmt is None else a.fmt.element.count(a.codes.shape[1])
    for g, start, end in _spans(groups):
        rows = slice(start, end)
        a_rows = a.rows(rows, first_tile[g] * TILE_ROWS, depth)
        _store(
            out[rows],
            dot(a_rows, _matrix(b.select_group(g), depth, transpose_b), adder),
            _product(a.factor(g, rows), b.factor(g, rows)),
            None if alpha is None else alpha[g],
            None if bias is None else bias[g],
            accumulate,
        )


def _matrix(b: Operand, depth: int, transpose_b: bool) -> Rows:
    """Return the matrix of one group with its rows along N."""
    if b.fmt is None:
        return Rows(b.codes.T if transpose_b else b.codes)
    return b.columns(0, depth) if b.columnwise else b.rows(slice(0, len(b.codes)), 0, depth)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the product of two optional factors."""
    if a is None or b is None:
        return b if a is None else a
    return a * b


def k_grouped_gemm(
    a: Operand,
    b: Operand,
    groups: Groups,
    out: Tensor,
    *,
    alpha: Tensor | None,
    accumulate: bool,
    tensor_core: str | None,
    split: bool = False,
) -> None:
    """Multiply A's group g (m, N), transposed, by B's group g (m, K) into ``out[g]`` (N, K).

    An empty group gives zeros, or leaves ``out[g]`` unchanged when accumulating. With
    ``tensor_core``, instructions start at the group's first row, and rows past its last row count
    as zeros.

    Args:
        a: (T, N), plain or a columnwise ragged copy.
        b: (T, K), plain or a columnwise ragged copy in the same slots. If plain, it may have an
            index.
        groups: Rows of each group.
        out: (G, N, K). Any floating dtype.
        alpha: (G,) fp32. Factors. Optional.
        accumulate: Add to ``out`` in fp32, before the cast.
        tensor_core: Architecture whose tensor core defines the bits. Optional.
        split: Promote partial sums to fp32, as ``m_grouped_gemm`` does.
    """
    adder = AccumulationModel(tensor_core, "a", split)
    first_tile = groups.first_tile.tolist()
    if not accumulate:
        out[groups.rows == 0] = 0
    for g, start, end in _spans(groups):
        rows = slice(start, end)
        a_rows, b_rows = (_transposed(x, rows, first_tile[g] * TILE_ROWS) for x in (a, b))
        _store(
            out[g],
            dot(a_rows, b_rows, adder),
            _product(a.factor(g, rows), b.factor(g, rows)),
            None if alpha is None else alpha[g],
            None,
            accumulate,
        )


def _transposed(x: Operand, rows: slice, first_slot: int) -> Rows:
    """Return the columns of one group, with its rows as K; missing rows of a block are zeros."""
    if x.fmt is None:
        return Rows(x.rows(rows, 0, 0).codes.T)
    vec = 1 if x.fmt.scale is None else x.fmt.scale.vec_size
    return x.columns(first_slot, round_up(rows.stop - rows.start, vec))
