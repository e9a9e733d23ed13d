"""Promotion: sums of a stage of K from accumulators to fp32 registers, times block scales.

Accumulators of sm_90a keep 13 fraction bits of a sum of FP8 products. A fresh accumulator for every
128 of K, moved to fp32 registers, keeps the error of 128 products:

  y = fl(y + partial)                   without block scales y = fma(fl(partial * s), t, y)
  with fp32 block scales, see ``reference.dots`` y = fma(partial, s * t, y)            if all of
  them are powers of two

The last form gives the bits of the one before unless a product overflows or is subnormal. It is
used if one operand has scales of squares: then s * t belongs to a row, or to a column, and not to
each sum.

Scales of single rows come with the stage. Scales of squares, one or two numbers per warpgroup and
stage, are read from global memory a stage ahead. Reading them by a lane for 32 stages, with
shuffles, was 5% slower (H200).
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
#: Number of eights of columns whose scales are read before the products of a stage are complete:
#: registers allow no more. Shared memory is busy with operands.
_AHEAD = 4


def _fma(a: Float32, b: Float32, c: Float32) -> Float32:
    result: Float32 = asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], [a, b, c])
    return result


class StageScales(NamedTuple):
    """Scales of one stage that a thread has in registers.

    Attributes:
        m: Scales of its two rows of operand M.
        n: Scales of operand N's squares. None if columns have scales of their own.
    """

    m: tuple[Any, Any]
    n: list[Any] | None


class Promoter:
    """Promotion of one warpgroup's partial sums, 64 rows of operand M by ``partial_n`` columns.

    A thread has rows r and r + 8 of the 16 of a warp, and columns 8 j + 2 q and the next one, for
    its number q in a quad.

    Args:
        config: Configuration of the kernel.
        stages: Stages in shared memory.
        squares: Scales of squares of operands M and N, (blocks along rows, blocks along K, groups)
            fp32. None if absent.
        cta: Number of this CTA in the cluster.
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
        first_row = group * WARPGROUP_M
        self.first_m = cta * config.tile.m + first_row
        row = first_row + thread % WARPGROUP_SIZE // WARP_SIZE * 16 + lane // 4
        if stages.m_scales is not None:
            self.m_rows = stages.m_scales.iterator.toint() + row * 4
        if stages.n_scales is not None:
            self.n_rows = stages.n_scales.iterator.toint() + lane % 4 * 8
        #: Half of B to which the rows of the thread belong, if operand M alternates between halves.
        self.half = lane // 4 % 2
        self.num_squares = int(self.m_squares is not None)
        if self.n_squares is not None:
            self.num_squares += 2 if config.interleaves_halves else max(1, config.tile.n // _SQUARE)
        self.squares = cute.make_rmem_tensor(max(1, self.num_squares), Float32)
        #: True if columns have scales: then a stage is read after its products are complete.
        self.has_columns = config.row_scales[1] > 0
        #: True if s * t is multiplied first.
        self.folds = config.pow2_scales and 0 in config.row_scales
        #: True if s is the scale of rows of operand M.
        self.m_is_first = config.row_scales[0] > 0 and not (
            config.tile.swap_ab and self.has_columns
        )

    def read_squares(self, tile: WorkTile, k_tile: Int32) -> None:
        """Read the scales of squares of a tile's ``k_tile``-th block, for ``stage_scales``."""
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
                half_row = tile.m_sf_row + self.first_m if swapped else tile.n_sf_row
                square = half_row // 2 // _SQUARE + (self.half if swapped else i) * (
                    squares.shape[0] // 2
                )
            self.squares[i] = scale_at(squares, square, block, group)

    def stage_scales(self, stage: Int32) -> StageScales | None:
        """Return the scales of a stage that has arrived, with the squares that were just read."""
        if not self.config.kind.has_row_scales:
            return None
        squares = [self.squares[i] for i in range(self.num_squares)]
        n = None if self.n_squares is None else squares
        if self.config.row_scales[0]:
            address = self.m_rows + stage * (self.config.row_scales[0] * 4)
            (upper,), (lower,) = load_shared(address, 1), load_shared(address + 32, 1)
            return StageScales((bits_as_f32(upper), bits_as_f32(lower)), n)
        return StageScales((squares[0], squares[0]), n)

    def first_columns(self, index: int, stage: Int32) -> list[tuple[Float32, Float32]]:
        """Return the scales of the first columns of partial sums."""
        if not self.has_columns:
            return []
        count = min(_AHEAD, self.config.partial_n // 8)
        return [self.column_pair(index, j, stage) for j in range(count)]

    def column_pair(self, index: int, j: int, stage: Int32) -> tuple[Float32, Float32]:
        """Return the scales of this thread's two columns of the ``j``-th eight."""
        position = index * self.config.partial_n + j * 8 + stage * self.config.row_scales[1]
        even_scale, odd_scale = load_shared(self.n_rows + position * 4, 2)
        return bits_as_f32(even_scale), bits_as_f32(odd_scale)

    def promote(
        self,
        acc: cute.Tensor,
        partial: cute.Tensor,
        index: int,
        stage: Int32,
        scales: StageScales | None,
        columns: list[tuple[Float32, Float32]],
    ) -> None:
        """Add partial sums to the ``index``-th ``partial_n`` columns of ``acc``, of compact layout.

        Args:
            acc: fp32 sums.
            partial: Partial sums.
            index: Number of the group of ``partial_n`` columns.
            stage: The stage.
            scales: Scales of the stage. None if absent.
            columns: Result of ``first_columns``.
        """
        size, eights = cute.size(partial), self.config.partial_n // 8
        for j in range(eights):
            if self.has_columns and j + _AHEAD < eights:
                columns.append(self.column_pair(index, j + _AHEAD, stage))
            for i in range(4):
                position = index * size + j * 4 + i
                value, total = partial[j * 4 + i], acc[position]
                if scales is None:
                    acc[position] = add_rn(total, value)
                    continue
                if scales.n is None:
                    n = columns[j][i % 2]
                else:
                    n = scales.n[
                        i % 2
                        if self.config.interleaves_halves
                        else index * self.config.partial_n // _SQUARE
                    ]
                acc[position] = self.scaled(value, scales.m[i // 2], n, total)

    def scaled(self, value: Float32, m: Float32, n: Float32, total: Float32) -> Float32:
        """Return ``total`` plus a partial sum times both scales."""
        if self.folds:
            return _fma(value, mul_rn(m, n), total)
        inner, outer = (m, n) if self.m_is_first else (n, m)
        return _fma(mul_rn(value, inner), outer, total)
