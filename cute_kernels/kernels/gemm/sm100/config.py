"""Configurations of the grouped GEMM for sm_100a, and how it uses a CTA's memory.

The tensor core multiplies 128 rows of operand M, but any multiple of 8 rows of N, or of 16 with a
pair of CTAs. With ``swap_ab`` the rows of a group are therefore operand N. With ``swap_partial``
only the last tile of a group has swapped operands, if it is partial. Instructions then multiply
only as many rows of N as the tile has, rounded up.

Codes that no instruction multiplies by the other operand have stages of their own. These are twice
as long along K as the stages of elements to which warps decode them: see ``decode``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.arch import get_arch
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
#: Step of N of instructions that are as narrow as the rows of a tile, in each CTA.
N_STEP = 8
#: Rows of A that are loaded at a time where partial tiles have swapped operands.
BOX_ROWS = 32
#: Epilogue warps.
EPILOGUE_WARPS = 4
#: Rows and columns of the output that an epilogue warp with swapped operands handles at a time.
SWAPPED_BLOCK = 32
#: MMA instructions along K for one stage of shared memory: 128 bytes per row.
K_BLOCKS = 4
#: Number of columns of accumulators for whose sums a thread has registers.
_PROMOTED_N = 128
#: Least number of stages of codes, and number of stages of elements that one of them becomes.
_MIN_CODES_STAGES, CODES_STAGES = 3, 2
_SMEM_CAPACITY = get_arch("sm_100a").smem_bytes
#: Barriers, tile records and alignment.
_SMEM_RESERVED = 2048


@dataclass(frozen=True)
class Sm100Tile(TileShape):
    """Tile that the tensor core works on at a time.

    Attributes:
        swap_partial: As ``swap_ab``, but only in the last tile of a group and only if it is
            partial.
    """

    swap_partial: bool = False

    @property
    def may_swap(self) -> bool:
        """True if some tiles have swapped operands."""
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
class DecodedOperand:
    """An operand of codes that are decoded, in one CTA.

    Attributes:
        side: "m" or "n".
        kind: Kind of the operand.
        rows: Rows of the operand in a tile.
        interleaves_halves: True if its rows belong to the two halves alternately.
    """

    side: str
    kind: OperandKind
    rows: int
    interleaves_halves: bool = False

    @property
    def tiler(self) -> tuple[Any, int]:
        """Rows and bytes of one stage."""
        return (2, self.rows // 2) if self.interleaves_halves else self.rows, self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of codes of a row in one stage."""
        return DECODED_CHUNK_K * self.kind.bits // 8

    @property
    def scales(self) -> tuple[int, ...]:
        """Extents of the block scales in a stage: scale tiles as words, or fp32 of rows.

        Empty without block scales, and for squares, of which a stage has one.
        """
        if self.kind.has_squares or not self.kind.is_block_scaled:
            return ()
        if self.kind.has_row_scales:
            return self.rows, 1
        return 1, DECODED_CHUNK_K // self.kind.scale_tile_k, SF_TILE_WORDS

    @property
    def scale_bytes(self) -> int:
        """Bytes of block scales in a stage."""
        return 4 * math.prod(self.scales) if self.scales else 0

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage, with block scales."""
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
        """Return a tile that every configuration of the grouping can have."""
        return Sm100Tile(128, 128)

    def tile_rules(self, tile: Sm100Tile) -> Iterator[Rule]:
        """Yield the rules of what the kernel has code, registers and tensor memory for."""
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
        """Number of warps with swapped operands that share a block of a quantized output."""
        scale = self.result and self.result.scale
        return max(1, scale.vec_size * (1 + self.is_gated) // SWAPPED_BLOCK) if scale else 1

    def has_whole_blocks(self, tile: Sm100Tile) -> bool:
        """Return True if a tile holds whole blocks of a quantized output.

        With swapped operands the warps of a CTA must hold them. Otherwise each thread must, with
        all blocks whose scales share a word.
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
        """True if the kernel reads block scales as E8M0 tiles."""
        return self.pow2_scales

    @property
    def interleaves_scales(self) -> bool:
        """True if the scales of both halves of B are rearranged before the GEMM."""
        return (
            self.interleaves_halves
            and self.b_kind.is_block_scaled
            and (self.pow2_scales or not self.b_kind.has_row_scales)
        )

    @property
    def promotes(self) -> bool:
        """True if sums of every 128 of K go to fp32 registers, times fp32 block scales."""
        return self.loads_row_scales and self.decoded_to is None

    @property
    def row_scales(self) -> tuple[bool, bool]:
        """True for operands M and N if single rows have scales that are multiplied in fp32."""
        a, b = (self.promotes and not kind.has_squares for kind in (self.kind, self.b_kind))
        return (b, a) if self.tile.swap_ab else (a, b)

    @property
    def column_scale_bytes(self) -> int:
        """Shared memory for scales of columns of accumulators: two blocks of K for each warp."""
        return 4 * 2 * self.tile.n * 4 if self.row_scales[1] else 0

    def _multiplied_kind(self, kind: OperandKind) -> OperandKind:
        """Return the kind of an operand as instructions multiply it.

        No instruction supports fp32 scales, so it is the kind with the same elements and other
        scales, or none.
        """
        if self.decoded_to is not None:
            return self.decoded_to
        if not kind.has_row_scales:
            return kind
        candidates = (k for k in OPERANDS.values() if k.element == kind.element and k.tcgen05)
        return next(k for k in candidates if k.is_block_scaled == self.pow2_scales)

    @property
    def mma_kind(self) -> OperandKind:
        """Kind of A as instructions multiply it."""
        return self._multiplied_kind(self.kind)

    @property
    def multiplied(self) -> tuple[OperandKind, OperandKind]:
        """Kinds of operands M and N as instructions multiply them."""
        return self._multiplied_kind(self.m_kind), self._multiplied_kind(self.n_kind)

    @property
    def instruction_k(self) -> int:
        """Elements of K of one MMA instruction."""
        return self.mma_kind.instruction_k

    @property
    def k_blocks(self) -> int:
        """MMA instructions along K of one stage."""
        return K_BLOCKS

    @property
    def mma_tiler_mnk(self) -> tuple[int, int, int]:
        """Rows of M and N, and K, of one stage."""
        return self.tile.m, self.tile.n, K_BLOCKS * self.instruction_k

    def instruction_n(self, rows: Any) -> Any:
        """Return N of the instructions for a tile with ``rows`` rows of N, known or dynamic."""
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
        """Number of tiles of block scales along operands M and N in one CTA.

        A pair of CTAs splits those of M; both need all of N.
        """
        if not self.mma_kind.is_block_scaled:
            return 0, 0
        m_cta = self.tile.m // self.tile.num_ctas
        return ceil_div(m_cta, SF_TILE_ROWS), ceil_div(self.tile.n, SF_TILE_ROWS)

    @property
    def k_scale_tiles(self) -> int:
        """Number of tiles of block scales along K of one stage."""
        if not self.mma_kind.is_block_scaled:
            return 0
        return K_BLOCKS // self.mma_kind.k_blocks_of_scale_tile

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of elements and block scales in one CTA."""
        scales = sum(self.scale_tiles) * self.k_scale_tiles * SF_TILE_BYTES
        return sum(self.element_stage_bytes) + scales

    @property
    def loaded_bytes(self) -> int:
        """Bytes that are loaded for a stage in one CTA, without elements that are decoded."""
        side_bytes = dict(zip(("m", "n"), self.element_stage_bytes, strict=True))
        return self.stage_bytes - sum(side_bytes[codes.side] for codes in self.codes)

    @property
    def codes(self) -> tuple[DecodedOperand, ...]:
        """Operands that are decoded."""
        if self.decoded_to is None:
            return ()
        sides = ((self.m_kind, self.tile.m), (self.n_kind, self.tile.n))
        return tuple(
            DecodedOperand(
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
        """Shared memory of a stage of codes and their block scales, or 0 if none are decoded."""
        return sum(codes.stage_bytes for codes in self.codes)

    @property
    def num_codes_stage(self) -> int:
        """Number of stages of codes."""
        remaining = self._stage_capacity - self.num_ab_stage * self.stage_bytes
        return remaining // self.codes_stage_bytes

    @property
    def _stage_capacity(self) -> int:
        """Shared memory for all stages."""
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
        """Number of stages of elements."""
        codes_bytes, capacity = self.codes_stage_bytes, self._stage_capacity
        balanced = capacity // (self.stage_bytes + codes_bytes // CODES_STAGES)
        return min(balanced, (capacity - _MIN_CODES_STAGES * codes_bytes) // self.stage_bytes)

    @property
    def store_columns(self) -> int:
        """Columns of the output that a thread of the epilogue handles at a time."""
        return STORE_BYTES // DTYPE_BYTES[self.out_dtype]

    @property
    def sf_columns(self) -> tuple[int, int]:
        """Columns of tensor memory for the block scales of operands M and N in one stage."""
        tile_columns = self.k_scale_tiles * SF_TILE_ROWS // TMEM_LANES
        m_tiles, n_tiles = self.scale_tiles
        return tile_columns * m_tiles, tile_columns * n_tiles

    @property
    def acc_overlap(self) -> int:
        """Number of columns that the two accumulators in tensor memory have in common.

        There are two, so that the MMA of one tile overlaps the epilogue of the previous one.
        """
        return max(0, 2 * self.tile.n + sum(self.sf_columns) - TMEM_COLUMNS)

    @property
    def has_partial_tiles(self) -> bool:
        """True if tiles whose operands are not swapped may be partial."""
        return self.grouping == "m_grouped" and not self.tile.may_swap

    @property
    def num_acc_stage(self) -> int:
        """Number of accumulators that the MMA may fill freely; promoted sums come after them."""
        if self.promotes:
            return TMEM_COLUMNS // _PROMOTED_N - 1
        return 1 if self.acc_overlap else 2


@dataclass(frozen=True)
class ScaleTilesConfig:
    """One variant of the kernel that prepares block scales before a GEMM.

    It converts fp32 scales to E8M0 tiles, or permutes the tiles of B.

    Attributes:
        a_squares: True if scales of A belong to squares.
        b_squares: True if scales of B belong to squares.
        is_b_uniform: True if B has a matrix of scales per group.
        interleaves_halves: True if row 2 i + h of tiles of B is row i of half h.
        has_tiles: True if the scales are tiles already, and only those of B change.
    """

    a_squares: bool
    b_squares: bool
    is_b_uniform: bool
    interleaves_halves: bool = False
    has_tiles: bool = False

    kernel: ClassVar[str] = "cute_kernels.kernels.gemm.sm100.scale_tiles:ScaleTilesKernel"

    @classmethod
    def for_gemm(cls, config: Sm100GemmConfig) -> "ScaleTilesConfig | None":
        """Return the configuration for the scales of a GEMM, or None if they stay as they are."""
        if not (config.reads_scale_tiles or config.interleaves_scales):
            return None
        squares = config.kind.has_squares, config.b_kind.has_squares
        return cls(
            *squares,
            config.grouping == "m_grouped",
            config.interleaves_scales,
            not config.reads_scale_tiles,
        )
