"""What the grouped GEMM for sm_100a is compiled for, and how it uses a CTA's memory.

The tensor core takes 128 rows of operand M but any 16 of N. With ``swap_ab`` the rows of a group
are therefore operand N; with ``swap_partial`` only the last tile of a group has swapped operands,
if it is partial. Instructions then multiply only as many rows of N as the tile has, rounded up to
``N_STEP``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from cute_kernels.formats import FP8, MXFP8
from cute_kernels.gemm.operands import DTYPE_BYTES, OperandKind, operand_of
from cute_kernels.gemm.problem import GemmConfig, GemmGrouping, GemmProblem, TileShape
from cute_kernels.gemm.sm100.heuristics import estimated_cycles
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_ROWS, ceil_div

__all__ = [
    "BOX_ROWS",
    "K_BLOCKS",
    "SM100_TILES",
    "SWAPPED_BLOCK",
    "ScaleTilesConfig",
    "TMEM_COLUMNS",
    "TMEM_LANES",
    "Sm100GemmConfig",
    "Sm100Tile",
]

#: Columns of tensor memory, and the rows of block scales that share one.
TMEM_COLUMNS = 512
TMEM_LANES = 32
#: Bytes of one row of output that the epilogue handles at a time.
STORE_BYTES = 128
#: Rows of N by which instructions differ that fit themselves to the rows of a tile.
N_STEP = 16
#: Rows of A that are loaded at a time where partial tiles have swapped operands.
BOX_ROWS = 32
#: Rows and columns of the output that an epilogue warp with swapped operands handles at a time.
SWAPPED_BLOCK = 32
#: MMA instructions along K for one stage of shared memory: 128 bytes a row.
K_BLOCKS = 4
#: Columns of accumulators whose sums a thread has registers for.
_PROMOTED_N = 128
_SMEM_CAPACITY = 232448
#: Barriers, tile records and alignment.
_SMEM_RESERVED = 2048


@dataclasses.dataclass(frozen=True)
class Sm100Tile(TileShape):
    """What the tensor core works on at a time.

    Attributes:
        m: rows of operand M.
        n: rows of operand N.
        num_ctas: CTAs that share the tile; each holds half of both operands.
        swap_ab: operand M is B and operand N is A.
        swap_partial: the same, only in the last tile of a group and if that is partial.
    """

    swap_partial: bool = False

    @property
    def may_swap(self) -> bool:
        """Whether some tiles have swapped operands."""
        return self.swap_ab or self.swap_partial


#: The tiles that the kernel is built for.
SM100_TILES = (
    Sm100Tile(256, 256, 2, swap_partial=True),
    Sm100Tile(128, 128, swap_partial=True),
    Sm100Tile(256, 256, 2),
    Sm100Tile(256, 128, 2),
    Sm100Tile(128, 128),
    Sm100Tile(128, 64),
    Sm100Tile(128, 64, swap_ab=True),
    Sm100Tile(128, 32, swap_ab=True),
)


@dataclasses.dataclass(frozen=True)
class Sm100GemmConfig(GemmConfig):
    """One variant of the grouped GEMM for sm_100a; attributes as ``GemmConfig``."""

    tile: Sm100Tile = Sm100Tile(128, 128)

    kernel: ClassVar[str] = "cute_kernels.gemm.sm100.kernel:Sm100Gemm"
    tile_shapes: ClassVar[tuple[TileShape, ...]] = SM100_TILES

    @classmethod
    def any_tile(cls, grouping: GemmGrouping) -> Sm100Tile:
        """A tile that every product of a grouping may have."""
        return Sm100Tile(128, 128)

    def refuses(self, tile: Sm100Tile) -> str:
        """Why this configuration cannot have a tile of ``tile_shapes``; empty if it can."""
        if self.m_kind.tcgen05 is None:
            return f"there is no kernel for {self.operand} yet"
        if tile.may_swap and self.grouping == "k_grouped":
            return "only operands of an m_grouped product may be swapped"
        if self.promotes and (tile.swap_partial or tile.n > _PROMOTED_N):
            return f"sums of {self.operand} go to registers: no swap_partial, n <= {_PROMOTED_N}"
        return ""

    def may_choose(self, tile: Sm100Tile) -> bool:  # type: ignore[override]
        """Whether the choice of a tile considers this one.

        Instructions fit themselves to the rows of a group; tiles where they cannot multiply up to a
        tile of rows for each that no group has, and have to be forced.
        """
        is_fitted = tile.may_swap or self.grouping == "k_grouped" or self.promotes
        return is_fitted and self.takes(tile)

    def estimated_cycles(self, problem: GemmProblem, num_sms: int) -> float:
        """What a call costs, by a model of time."""
        return estimated_cycles(self, problem, num_sms)

    @property
    def has_row_scales(self) -> bool:
        """Whether the kernel reads fp32 block scales; powers of two come as tiles of E8M0."""
        return self.kind.has_row_scales and not self.pow2_scales

    @property
    def promotes(self) -> bool:
        """Whether sums of every 128 of K go to fp32 registers, times fp32 block scales."""
        return self.has_row_scales

    @property
    def row_scales(self) -> tuple[bool, bool]:
        """Whether single rows of operands M and N have scales that are multiplied by in fp32."""
        a, b = (self.promotes and not kind.has_squares for kind in (self.kind, self.b_kind))
        return (b, a) if self.tile.swap_ab else (a, b)

    @property
    def column_scale_bytes(self) -> int:
        """Shared memory for scales of columns of accumulators: of two blocks of K, of each warp."""
        return 4 * 2 * self.tile.n * 4 if self.row_scales[1] else 0

    @property
    def m_kind(self) -> OperandKind:
        """What instructions take for operand M."""
        return self._taken(super().m_kind)

    @property
    def n_kind(self) -> OperandKind:
        """What instructions take for operand N."""
        return self._taken(super().n_kind)

    def _taken(self, kind: OperandKind) -> OperandKind:
        """The kind as instructions take it: none take fp32 scales."""
        if not self.kind.has_row_scales or kind.fmt is None:
            return kind
        cls = MXFP8 if self.pow2_scales else FP8
        return operand_of(cls(kind.fmt.element.dtype))

    @property
    def k_blocks(self) -> int:
        """Instructions along K for one stage of shared memory."""
        return K_BLOCKS

    @property
    def mma_tiler_mnk(self) -> tuple[int, int, int]:
        """M, N and K of one pipeline stage's tile."""
        return self.tile.m, self.tile.n, K_BLOCKS * self.kind.instruction_k

    @staticmethod
    def instruction_n(rows: Any) -> Any:
        """N of the instructions for a tile of so many rows of N, which need not be known yet."""
        return (rows + (N_STEP - 1)) & -N_STEP

    @property
    def element_stage_bytes(self) -> tuple[int, int]:
        """Shared memory of one stage of the elements of operands M and N in one CTA."""
        m, n, k = self.mma_tiler_mnk
        row_bytes = k * self.kind.bits // 8
        return m // self.tile.num_ctas * row_bytes, n // self.tile.num_ctas * row_bytes

    @property
    def scale_tiles(self) -> tuple[int, int]:
        """Tiles of block scales side by side along operands M and N in one CTA.

        A pair of CTAs splits those of M; both need all of N.
        """
        if not self.m_kind.is_block_scaled:
            return 0, 0
        m_cta = self.tile.m // self.tile.num_ctas
        return ceil_div(m_cta, SF_TILE_ROWS), ceil_div(self.tile.n, SF_TILE_ROWS)

    @property
    def k_scale_tiles(self) -> int:
        """Tiles of block scales of a stage along K."""
        if not self.m_kind.is_block_scaled:
            return 0
        return K_BLOCKS // self.m_kind.k_blocks_of_scale_tile

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of both operands in one CTA."""
        scales = sum(self.scale_tiles) * self.k_scale_tiles * SF_TILE_BYTES
        return sum(self.element_stage_bytes) + scales

    @property
    def staged_bytes(self) -> int:
        """Shared memory for blocks of output on their way out."""
        if self.tile.swap_ab:
            return 4 * SWAPPED_BLOCK * SWAPPED_BLOCK * DTYPE_BYTES[self.out_dtype]
        return 128 * STORE_BYTES * self.num_store_stage

    @property
    def num_ab_stage(self) -> int:
        """Stages of both operands that fit in shared memory."""
        taken = _SMEM_RESERVED + self.staged_bytes + self.column_scale_bytes
        return (_SMEM_CAPACITY - taken) // self.stage_bytes

    @property
    def store_columns(self) -> int:
        """Columns of the output that a thread of the epilogue handles at a time."""
        return STORE_BYTES // DTYPE_BYTES[self.out_dtype]

    @property
    def sf_columns(self) -> tuple[int, int]:
        """Columns of tensor memory for the block scales of operands M and N."""
        each = self.k_scale_tiles * SF_TILE_ROWS // TMEM_LANES
        m_tiles, n_tiles = self.scale_tiles
        return each * m_tiles, each * n_tiles

    @property
    def acc_overlap(self) -> int:
        """Columns that the two accumulators in tensor memory have in common.

        There are two, so that the MMA of one tile overlaps the epilogue of the one before.
        """
        return max(0, 2 * self.tile.n + sum(self.sf_columns) - TMEM_COLUMNS)

    @property
    def has_partial_tiles(self) -> bool:
        """Whether tiles whose operands are not swapped may be partial."""
        return self.grouping == "m_grouped" and not self.tile.may_swap

    @property
    def num_acc_stage(self) -> int:
        """Accumulators that the MMA may fill freely; where it promotes, sums are behind them."""
        if self.promotes:
            return TMEM_COLUMNS // _PROMOTED_N - 1
        return 1 if self.acc_overlap else 2


@dataclasses.dataclass(frozen=True)
class ScaleTilesConfig:
    """One variant of the kernel that makes E8M0 tiles of fp32 scales.

    Attributes:
        a_squares: those of A are of squares.
        b_squares: those of B are.
        is_b_uniform: B has a matrix of them for each group.
    """

    a_squares: bool
    b_squares: bool
    is_b_uniform: bool

    kernel: ClassVar[str] = "cute_kernels.gemm.sm100.scale_tiles:ScaleTilesKernel"

    @classmethod
    def before(cls, config: Sm100GemmConfig) -> ScaleTilesConfig | None:
        """What a GEMM's scales go through; None if they stay as they are."""
        if not config.pow2_scales:
            return None
        squares = config.kind.has_squares, config.b_kind.has_squares
        return cls(*squares, config.grouping == "m_grouped")
