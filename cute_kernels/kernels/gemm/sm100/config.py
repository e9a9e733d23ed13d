"""What the grouped GEMM for sm_100a is compiled for, and how it uses a CTA's memory.

The tensor core takes 128 rows of operand M but any 8 of N, of a pair of CTAs any 16. With
``swap_ab`` the rows of a group are therefore operand N; with ``swap_partial`` only the last tile of
a group has swapped operands, if it is partial. Instructions then multiply only as many rows of N as
the tile has, rounded up.

Codes that no instruction takes with the other operand have stages of their own, twice as long along
K as those of what is multiplied, which warps decode them to: see ``decode``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.layout.shapes import (
    DECODED_CHUNK_K,
    SF_TILE_BYTES,
    SF_TILE_COLS,
    SF_TILE_ROWS,
    SF_TILE_WORDS,
    ceil_div,
)

from ..common.config import GemmConfig
from ..common.operand_kinds import DTYPE_BYTES, OPERANDS, OperandKind
from ..common.problem import GemmGrouping, TileShape
from ..common.rules import Rule

#: Columns of tensor memory, and the rows of block scales that share one.
TMEM_COLUMNS = 512
TMEM_LANES = 32
#: Bytes of one row of output that the epilogue handles at a time.
STORE_BYTES = 128
#: Rows of N by which instructions differ that fit themselves to the rows of a tile, in each CTA.
N_STEP = 8
#: Rows of A that are loaded at a time where partial tiles have swapped operands.
BOX_ROWS = 32
#: Epilogue warps.
EPILOGUE_WARPS = 4
#: Rows and columns of the output that an epilogue warp with swapped operands handles at a time.
SWAPPED_BLOCK = 32
#: MMA instructions along K for one stage of shared memory: 128 bytes a row.
K_BLOCKS = 4
#: Columns of accumulators whose sums a thread has registers for.
_PROMOTED_N = 128
#: Stages of codes that are decoded, at least, and stages of what is multiplied for one of them.
_LEAST_STAGES, CODES_STAGES = 3, 2
_SMEM_CAPACITY = 232448
#: Barriers, tile records and alignment.
_SMEM_RESERVED = 2048


@dataclass(frozen=True)
class Sm100Tile(TileShape):
    """What the tensor core works on at a time.

    ``swap_partial`` is ``swap_ab``, only in the last tile of a group and if that is partial.
    """

    swap_partial: bool = False

    @property
    def may_swap(self) -> bool:
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


@dataclass(frozen=True)
class Codes:
    """An operand, ``"m"`` or ``"n"``, that is decoded, in one CTA.

    With ``interleaves_halves`` its rows are of both halves by turns.
    """

    side: str
    kind: OperandKind
    rows: int
    interleaves_halves: bool = False

    @property
    def tiler(self) -> tuple[Any, int]:
        return (2, self.rows // 2) if self.interleaves_halves else self.rows, self.row_bytes

    @property
    def row_bytes(self) -> int:
        return DECODED_CHUNK_K * self.kind.bits // 8

    @property
    def scales(self) -> tuple[int, ...]:
        """Extents of the block scales in a stage: scale tiles as words, or fp32 of rows.

        Empty where there are none, and of squares, of which a stage has one.
        """
        if self.kind.has_squares or not self.kind.is_block_scaled:
            return ()
        if self.kind.has_row_scales:
            return self.rows, 1
        return 1, DECODED_CHUNK_K // self.kind.scale_tile_k, SF_TILE_WORDS

    @property
    def scale_bytes(self) -> int:
        return 4 * math.prod(self.scales) if self.scales else 0

    @property
    def stage_bytes(self) -> int:
        return self.rows * self.row_bytes + self.scale_bytes


@dataclass(frozen=True)
class Sm100GemmConfig(GemmConfig):
    """One variant of the grouped GEMM for sm_100a."""

    tile: Sm100Tile = Sm100Tile(128, 128)

    arch: ClassVar[str] = "sm_100a"
    kernel: ClassVar[str] = "cute_kernels.kernels.gemm.sm100.kernel:Sm100Gemm"
    tile_shapes: ClassVar[tuple[TileShape, ...]] = SM100_TILES

    @classmethod
    def any_tile(cls, grouping: GemmGrouping) -> Sm100Tile:
        return Sm100Tile(128, 128)

    def tile_rules(self, tile: Sm100Tile) -> Iterator[Rule]:
        yield Rule(
            self.mma_kind.tcgen05 is not None,
            "operand",
            self.operand,
            f"there is no kernel for {self.operand} yet",
        )
        yield Rule(
            not (self.codes and self.transpose_b),
            "transpose_b",
            self.transpose_b,
            "codes that are decoded are contiguous along K",
        )
        yield Rule(
            all(codes.kind.is_decodable for codes in self.codes),
            "b_operand",
            self.b_operand,
            "codes of four bits that are decoded have e4m3 scales of 16",
        )
        yield Rule(
            len(self.codes) < 2 or not tile.swap_partial or tile.num_ctas == 1,
            "swap_partial",
            tile.swap_partial,
            "rows of A that are decoded are not split between CTAs by how many there are",
        )
        yield Rule(
            not tile.may_swap or self.grouping == "m_grouped",
            "grouping",
            self.grouping,
            "only an m_grouped product can have swap_ab or swap_partial",
        )
        yield Rule(
            not self.promotes or not tile.swap_partial and tile.n <= _PROMOTED_N,
            "tile",
            tile,
            f"sums of {self.operand} go to registers: no swap_partial, n <= {_PROMOTED_N}",
        )

    @property
    def sharing_warps(self) -> int:
        """Warps with swapped operands that have a part of a block of the output each."""
        scale = self.result and self.result.scale
        return max(1, scale.vec_size * (1 + self.is_gated) // SWAPPED_BLOCK) if scale else 1

    def has_whole_blocks(self, tile: Sm100Tile) -> bool:
        """Warps of one CTA have them if operands are swapped, otherwise threads, all whose scales
        share a word.
        """
        scale = self.result and self.result.scale
        if scale is None:
            return self.result is None
        columns = (
            scale.vec_size
            * (SF_TILE_COLS if scale.layout == "tiles_128x4" else 1)
            * (1 + self.is_gated)
        )
        is_whole = tile.swap_ab or tile.n % columns == 0
        return (
            is_whole
            and not (tile.may_swap and self.sharing_warps > EPILOGUE_WARPS)
            and self.out_dtype != "float32"
        )

    @property
    def reads_scale_tiles(self) -> bool:
        return self.pow2_scales

    @property
    def interleaves_scales(self) -> bool:
        return (
            self.interleaves_halves
            and self.b_kind.is_block_scaled
            and (self.pow2_scales or not self.b_kind.has_row_scales)
        )

    @property
    def promotes(self) -> bool:
        """Whether sums of every 128 of K go to fp32 registers, times fp32 block scales."""
        return self.loads_row_scales and self.decoded_to is None

    @property
    def row_scales(self) -> tuple[bool, bool]:
        """Whether single rows of operands M and N have scales that are multiplied by in fp32."""
        a, b = (self.promotes and not kind.has_squares for kind in (self.kind, self.b_kind))
        return (b, a) if self.tile.swap_ab else (a, b)

    @property
    def column_scale_bytes(self) -> int:
        """Shared memory for scales of columns of accumulators: of two blocks of K, of each warp."""
        return 4 * 2 * self.tile.n * 4 if self.row_scales[1] else 0

    def _taken(self, kind: OperandKind) -> OperandKind:
        """The kind as instructions take it: none take fp32 scales, but scales of the same elements
        or none.
        """
        if self.decoded_to is not None:
            return self.decoded_to
        if not kind.has_row_scales:
            return kind
        alike = (k for k in OPERANDS.values() if k.element == kind.element and k.tcgen05)
        return next(k for k in alike if k.is_block_scaled == self.pow2_scales)

    @property
    def mma_kind(self) -> OperandKind:
        return self._taken(self.kind)

    @property
    def multiplied(self) -> tuple[OperandKind, OperandKind]:
        return self._taken(self.m_kind), self._taken(self.n_kind)

    @property
    def instruction_k(self) -> int:
        return self.mma_kind.instruction_k

    @property
    def k_blocks(self) -> int:
        return K_BLOCKS

    @property
    def mma_tiler_mnk(self) -> tuple[int, int, int]:
        return self.tile.m, self.tile.n, K_BLOCKS * self.instruction_k

    def instruction_n(self, rows: Any) -> Any:
        """N of the instructions for a tile of so many rows of N, which need not be known yet."""
        step = N_STEP * self.tile.num_ctas
        return (rows + (step - 1)) & -step

    @property
    def element_stage_bytes(self) -> tuple[int, int]:
        """Shared memory of one stage of the elements of operands M and N in one CTA."""
        m, n, k = self.mma_tiler_mnk
        row_bytes = k * self.mma_kind.bits // 8
        return m // self.tile.num_ctas * row_bytes, n // self.tile.num_ctas * row_bytes

    @property
    def scale_tiles(self) -> tuple[int, int]:
        """Tiles of block scales side by side along operands M and N in one CTA.

        A pair of CTAs splits those of M; both need all of N.
        """
        if not self.mma_kind.is_block_scaled:
            return 0, 0
        m_cta = self.tile.m // self.tile.num_ctas
        return ceil_div(m_cta, SF_TILE_ROWS), ceil_div(self.tile.n, SF_TILE_ROWS)

    @property
    def k_scale_tiles(self) -> int:
        if not self.mma_kind.is_block_scaled:
            return 0
        return K_BLOCKS // self.mma_kind.k_blocks_of_scale_tile

    @property
    def stage_bytes(self) -> int:
        scales = sum(self.scale_tiles) * self.k_scale_tiles * SF_TILE_BYTES
        return sum(self.element_stage_bytes) + scales

    @property
    def loaded_bytes(self) -> int:
        """Bytes that are loaded for a stage in one CTA: not those that are decoded."""
        of_side = dict(zip(("m", "n"), self.element_stage_bytes, strict=True))
        return self.stage_bytes - sum(of_side[codes.side] for codes in self.codes)

    @property
    def codes(self) -> tuple[Codes, ...]:
        if self.decoded_to is None:
            return ()
        sides = ((self.m_kind, self.tile.m), (self.n_kind, self.tile.n))
        return tuple(
            Codes(
                side,
                kind,
                rows // self.tile.num_ctas,
                self.interleaves_halves and (side == "m") == self.tile.swap_ab,
            )
            for side, (kind, rows) in zip(("m", "n"), sides, strict=True)
            if kind.fmt is not None
        )

    @property
    def codes_stage_bytes(self) -> int:
        """Shared memory of a stage of codes and their block scales; 0 where none are decoded."""
        return sum(codes.stage_bytes for codes in self.codes)

    @property
    def num_codes_stage(self) -> int:
        left = self._stage_capacity - self.num_ab_stage * self.stage_bytes
        return left // self.codes_stage_bytes

    @property
    def _stage_capacity(self) -> int:
        return _SMEM_CAPACITY - _SMEM_RESERVED - self.staged_bytes - self.column_scale_bytes

    @property
    def staged_bytes(self) -> int:
        """Shared memory for blocks of output on their way out."""
        if self.tile.swap_ab:
            amaxes = 2 * 4 * SWAPPED_BLOCK if self.sharing_warps > 1 else 0
            return EPILOGUE_WARPS * (
                SWAPPED_BLOCK * SWAPPED_BLOCK * DTYPE_BYTES[self.out_dtype] + amaxes
            )
        return 128 * STORE_BYTES * self.num_store_stage

    @property
    def num_ab_stage(self) -> int:
        of_codes, left = self.codes_stage_bytes, self._stage_capacity
        balanced = left // (self.stage_bytes + of_codes // CODES_STAGES)
        return min(balanced, (left - _LEAST_STAGES * of_codes) // self.stage_bytes)

    @property
    def store_columns(self) -> int:
        """Columns of the output that a thread of the epilogue handles at a time."""
        return STORE_BYTES // DTYPE_BYTES[self.out_dtype]

    @property
    def sf_columns(self) -> tuple[int, int]:
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


@dataclass(frozen=True)
class ScaleTilesConfig:
    """One variant of the kernel that makes E8M0 tiles of fp32 scales, or puts those of B in order.

    Scales are of squares or of rows, and B may have a matrix of them for each group. With
    ``interleaves_halves`` row 2 i + h of tiles of B is row i of half h; with ``has_tiles`` there are tiles,
    and only those of B change.
    """

    a_squares: bool
    b_squares: bool
    is_b_uniform: bool
    interleaves_halves: bool = False
    has_tiles: bool = False

    kernel: ClassVar[str] = "cute_kernels.kernels.gemm.sm100.scale_tiles:ScaleTilesKernel"

    @classmethod
    def for_gemm(cls, config: Sm100GemmConfig) -> "ScaleTilesConfig | None":
        """What a GEMM's scales go through; None if they stay as they are."""
        if not (config.reads_scale_tiles or config.interleaves_scales):
            return None
        squares = config.kind.has_squares, config.b_kind.has_squares
        return cls(
            *squares,
            config.grouping == "m_grouped",
            config.interleaves_scales,
            not config.reads_scale_tiles,
        )
