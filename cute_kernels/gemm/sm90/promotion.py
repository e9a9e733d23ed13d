"""Sums of a stage of K from accumulators to fp32 registers, times block scales.

Accumulators of sm_90a keep 13 fraction bits of a sum of FP8 products. A fresh one for every 128 of
K, moved to fp32 registers, keeps the error that of 128 products:

    y = fl(y + partial)                   without block scales
    y = fma(fl(partial * s), t, y)        with fp32 block scales, see ``reference.dots``
    y = fma(partial, s * t, y)            if all of them are powers of two

s is the scale of the operand that has one for each row, A's if both have. The last form gives the
bits of the one before unless a product overflows or is subnormal. It is taken where one operand has
scales of squares: then s * t is of a row, or of a column, and not of each sum.

Scales come with the stage: those of single rows by TMA; those of squares, few numbers, by the load
warp itself (``SquareLoad``), so that no warpgroup waits for memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.memory import load_shared
from cute_kernels.device.ptx import asm, bits_as_f32
from cute_kernels.gemm.sm90.config import SQUARE_WORDS, WARPGROUP_M
from cute_kernels.gemm.sm90.warp_schedule import WARPGROUP_SIZE

if TYPE_CHECKING:
    from cute_kernels.gemm.sm90.config import Sm90GemmConfig
    from cute_kernels.gemm.sm90.storage import Stages

__all__ = ["Promoter", "StageScales"]

#: Eights of columns whose scales are read before the products of a stage are complete: as many as
#: there are registers for. Shared memory is busy with operands.
_AHEAD = 4


def _f32(text: str, *operands: Float32, is_ordered: bool = False) -> Float32:
    names = ", ".join(f"${i}" for i in range(len(operands) + 1))
    result: Float32 = asm(f"{text}.rn.f32 {names};", [Float32], operands, is_ordered)
    return result


class StageScales(NamedTuple):
    """Scales of one stage that a thread has in registers.

    Attributes:
        m: of its two rows of operand M.
        n: of operand N's squares, one for each ``square_step`` columns; None where columns have
            scales of their own.
    """

    m: tuple[Any, Any]
    n: list[Any] | None


class Promoter:
    """Promotes the partial sums of one warpgroup, 64 rows of operand M by ``partial_n`` columns.

    A thread has rows r and r + 8 of 16 a warp, and columns 8 j + 2 q and the next for its place q
    in a quad.

    Args:
        config: the kernel's configuration.
        stages: the stages, whose scales are read.
    """

    def __init__(
        self,
        config: Sm90GemmConfig,
        stages: Stages,
    ):
        self.config = config
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
        lane = thread % WARP_SIZE
        first = group * WARPGROUP_M
        row = first + thread % WARPGROUP_SIZE // WARP_SIZE * 16 + lane // 4
        if stages.m_scales is not None:
            self.m_rows = stages.m_scales.iterator.toint() + row * 4
        if stages.n_scales is not None:
            self.n_rows = stages.n_scales.iterator.toint() + lane % 4 * 8
        if stages.squares is not None:
            self.squares = stages.squares.iterator.toint()
            if config.m_kind.has_squares:
                self.squares += first // config.square_step * 4
        self.has_columns = config.row_scales[1] > 0
        #: Whether s * t is multiplied first.
        self.folds = config.pow2_scales and 0 in config.row_scales
        #: Whether s is of rows of operand M.
        self.m_is_first = config.row_scales[0] > 0 and not (
            config.tile.swap_ab and self.has_columns
        )

    @property
    def reads_last(self) -> bool:
        """Whether a stage is read once its products are complete."""
        return self.has_columns

    def of_stage(self, stage: Int32) -> StageScales | None:
        """Scales of rows of operand M, and of squares, for a stage that is there."""
        config, n = self.config, None
        if not config.kind.has_row_scales:
            return None
        if config.num_squares:
            count = 1 if config.m_kind.has_squares else config.num_squares
            squares = [self.read(self.squares + stage * (SQUARE_WORDS * 4) + i * 4) for i in range(count)]
            if config.m_kind.has_squares:
                return StageScales((squares[0], squares[0]), None)
            n = squares
        at = self.m_rows + stage * (config.row_scales[0] * 4)
        return StageScales((self.read(at), self.read(at + 32)), n)

    def read(self, address: Int32) -> Float32:
        """A scale in shared memory."""
        return bits_as_f32(load_shared(address, 1)[0])

    def first_columns(self, part: int, stage: Int32) -> list[tuple[Float32, Float32]]:
        """Scales of the first columns of a part, ``_AHEAD`` times eight, if columns have them."""
        if not self.has_columns:
            return []
        count = min(_AHEAD, self.config.partial_n // 8)
        return [self.column_pair(part, j, stage) for j in range(count)]

    def column_pair(self, part: int, j: int, stage: Int32) -> tuple[Float32, Float32]:
        """Scales of the thread's two columns of the ``j``-th eight of a part."""
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
        """Add partial sums to those of the ``part``-th ``partial_n`` columns.

        Args:
            acc: sums, of compact layout.
            partial: partial sums.
            part: which columns.
            stage: number of the stage.
            scales: its scales; None where there are none.
            columns: what ``first_columns`` gave.
        """
        size, eights = cute.size(partial), self.config.partial_n // 8
        for j in range(eights):
            if self.has_columns and j + _AHEAD < eights:
                columns.append(self.column_pair(part, j + _AHEAD, stage))
            for i in range(4):
                at = part * size + j * 4 + i
                value, total = partial[j * 4 + i], acc[at]
                if scales is None:
                    acc[at] = _f32("add", total, value, is_ordered=True)
                    continue
                if scales.n is None:
                    n = columns[j][i % 2]
                else:
                    n = scales.n[(part * self.config.partial_n + j * 8) // self.config.square_step]
                acc[at] = self.scaled(value, scales.m[i // 2], n, total)

    def scaled(self, value: Float32, m: Float32, n: Float32, total: Float32) -> Float32:
        """``total`` plus a partial sum times both scales."""
        # Ordered: only what waits for products knows when their sums are complete.
        if self.folds:
            return _f32("fma", value, _f32("mul", m, n), total, is_ordered=True)
        first, second = (m, n) if self.m_is_first else (n, m)
        return _f32("fma", _f32("mul", value, first, is_ordered=True), second, total)
