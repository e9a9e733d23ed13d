"""Sums of a stage of K from accumulators to fp32 registers, times block scales.

Accumulators of sm_90a keep 13 fraction bits of a sum of FP8 products. A fresh one for every 128 of
K, moved to fp32 registers, keeps the error that of 128 products:

  y = fl(y + partial)                   without block scales
  y = fma(fl(partial * s), t, y)        with fp32 block scales, see ``reference.dots``
  y = fma(partial, s * t, y)            if all of them are powers of two

The last form gives the bits of the one before unless a product overflows or is subnormal. It is
taken where one operand has scales of squares: then s * t is of a row, or of a column, and not of
each sum.

Scales of single rows come with the stage. Those of squares, one or two numbers a warpgroup and
stage, are read from global memory a stage ahead: a lane reading them for 32 stages and shuffles
were 5% slower (H200).
"""

from typing import Any, NamedTuple

from cutlass import Float32, Int32, cute

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.memory import load_shared
from cute_kernels.device.ptx import add_rn, asm, bits_as_f32, mul_rn

from ..common.promotion_scales import scale_at
from ..common.scheduler import WorkTile
from .config import WARPGROUP_M, Sm90GemmConfig
from .storage import Stages
from .warp_schedule import WARPGROUP_SIZE

#: Rows and columns of a square.
_SQUARE = 128
#: Eights of columns whose scales are read before the products of a stage are complete: as many as
#: there are registers for. Shared memory is busy with operands.
_AHEAD = 4


def _fma(a: Float32, b: Float32, c: Float32) -> Float32:
    return asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], [a, b, c])  # type: ignore[no-any-return]


class StageScales(NamedTuple):
    """Scales of one stage that a thread has in registers: ``m`` of its two rows of operand M.

    ``n`` are of operand N's square of each part; None where columns have scales of their own.
    """

    m: tuple[Any, Any]
    n: list[Any] | None


class Promoter:
    """Promotes the partial sums of one warpgroup, 64 rows of operand M by ``partial_n`` columns.

    A thread has rows r and r + 8 of 16 a warp, and columns 8 j + 2 q and the next for its place q
    in a quad. ``squares`` are scales of squares of operands M and N, (blocks along rows, blocks
    along K, groups); None each where there are none.
    """

    def __init__(
        self,
        config: Sm90GemmConfig,
        stages: Stages,
        squares: tuple[cute.Tensor | None, ...],
        cta: Int32,
    ):
        self.config = config
        self.m_squares, self.n_squares = squares
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
        lane = thread % WARP_SIZE
        #: First row of this warpgroup, in the CTA's tile and in the cluster's.
        first = group * WARPGROUP_M
        self.first_m = cta * config.tile.m + first
        row = first + thread % WARPGROUP_SIZE // WARP_SIZE * 16 + lane // 4
        if stages.m_scales is not None:
            self.m_rows = stages.m_scales.iterator.toint() + row * 4
        if stages.n_scales is not None:
            self.n_rows = stages.n_scales.iterator.toint() + lane % 4 * 8
        #: Which half of B the thread's rows are of, where operand M has its rows by turns.
        self.half = lane // 4 % 2
        self.num_squares = int(self.m_squares is not None)
        if self.n_squares is not None:
            self.num_squares += 2 if config.interleaves_halves else max(1, config.tile.n // _SQUARE)
        self.squares = cute.make_rmem_tensor(max(1, self.num_squares), Float32)
        #: Whether columns have scales: then a stage is read once its products are complete.
        self.has_columns = config.row_scales[1] > 0
        #: Whether s * t is multiplied first.
        self.folds = config.pow2_scales and 0 in config.row_scales
        #: Whether s is of rows of operand M.
        self.m_is_first = config.row_scales[0] > 0 and not (
            config.tile.swap_ab and self.has_columns
        )

    def read_squares(self, tile: WorkTile, k_tile: Int32) -> None:
        """Read the scales of squares of a tile's ``k_tile``-th block along K, for ``of_stage``."""
        config = self.config
        block = tile.k_start // config.stage_k + k_tile
        swapped, k_grouped = config.tile.swap_ab, config.grouping == "k_grouped"
        for i in range(self.num_squares):
            if self.m_squares is not None:
                squares, row = self.m_squares, tile.m_sf_row + self.first_m
                is_ragged = k_grouped or not swapped
            else:
                squares, row = self.n_squares, tile.n_sf_row + i * _SQUARE
                is_ragged = k_grouped or swapped
            group = None if is_ragged else tile.group
            square = row // config.kind.sf_vec_size
            if config.interleaves_halves:
                # The tile's columns of the output are in one square of each half.
                first = tile.m_sf_row + self.first_m if swapped else tile.n_sf_row
                square = first // 2 // _SQUARE + (self.half if swapped else i) * (
                    squares.shape[0] // 2
                )
            self.squares[i] = scale_at(squares, square, block, group)

    def of_stage(self, stage: Int32) -> StageScales | None:
        """Scales of rows of operand M for a stage that is there, and of the squares just read."""
        if not self.config.kind.has_row_scales:
            return None
        squares = [self.squares[i] for i in range(self.num_squares)]
        n = None if self.n_squares is None else squares
        if self.config.row_scales[0]:
            at = self.m_rows + stage * (self.config.row_scales[0] * 4)
            (first,), (second,) = load_shared(at, 1), load_shared(at + 32, 1)
            return StageScales((bits_as_f32(first), bits_as_f32(second)), n)
        return StageScales((squares[0], squares[0]), n)

    def first_columns(self, part: int, stage: Int32) -> list[tuple[Float32, Float32]]:
        if not self.has_columns:
            return []
        count = min(_AHEAD, self.config.partial_n // 8)
        return [self.column_pair(part, j, stage) for j in range(count)]

    def column_pair(self, part: int, j: int, stage: Int32) -> tuple[Float32, Float32]:
        at = part * self.config.partial_n + j * 8 + stage * self.config.row_scales[1]
        first, second = load_shared(self.n_rows + at * 4, 2)
        return bits_as_f32(first), bits_as_f32(second)

    def promote(
        self,
        acc: cute.Tensor,
        partial: cute.Tensor,
        part: int,
        stage: Int32,
        scales: StageScales | None,
        columns: list[tuple[Float32, Float32]],
    ) -> None:
        """Add partial sums to those of the ``part``-th ``partial_n`` columns of ``acc``, of compact
        layout.

        ``scales`` are the stage's, None where there are none; ``columns`` what ``first_columns``
        gave.
        """
        size, eights = cute.size(partial), self.config.partial_n // 8
        for j in range(eights):
            if self.has_columns and j + _AHEAD < eights:
                columns.append(self.column_pair(part, j + _AHEAD, stage))
            for i in range(4):
                at = part * size + j * 4 + i
                value, total = partial[j * 4 + i], acc[at]
                if scales is None:
                    acc[at] = add_rn(total, value)
                    continue
                if scales.n is None:
                    n = columns[j][i % 2]
                else:
                    n = scales.n[
                        i % 2
                        if self.config.interleaves_halves
                        else part * self.config.partial_n // _SQUARE
                    ]
                acc[at] = self.scaled(value, scales.m[i // 2], n, total)

    def scaled(self, value: Float32, m: Float32, n: Float32, total: Float32) -> Float32:
        if self.folds:
            return _fma(value, mul_rn(m, n), total)
        first, second = (m, n) if self.m_is_first else (n, m)
        return _fma(mul_rn(value, first), second, total)
