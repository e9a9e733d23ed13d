"""Configurations of the grouped GEMM for sm_90a, and how it uses a CTA's memory.

The tensor cores of sm_90a do not support FP4. A code times its block scale has 6 significant bits
at most, so it is exact in fp16, and fp16 instructions multiply the values. Operand M comes into the
kernel as codes and becomes fp16 in registers on the way to the tensor core. Operand N is read by
several warpgroups, once for each tile of M. It is expanded to fp16 once, by a kernel before this
one.

An m_grouped product has swapped operands: the weights, which are the larger operand and are read
from memory, are M, and the few rows of a group are N, in steps of 8. FP8 weights need not be
swapped if groups have many rows: block scales of rows of M cost less. Two CTAs with neighbouring
tiles along M form a cluster if tiles are large. Each loads half of operand N for both, which saves
a third of the reads from L2, and their power.

FP8 goes into the tensor cores as it is, both operands contiguous along K. Their accumulators keep
13 fraction bits of FP8 sums. So a configuration may promote: it uses a fresh accumulator every 128
of K, whose sums go to fp32 registers, times block scales if there are any (``promotion``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

from cute_kernels.arch import get_arch
from cute_kernels.layout.lane_chunks import DECODED_SCALE
from cute_kernels.layout.shapes import DECODED_CHUNK_K, SF_TILE_ROWS

from ..common.config import GemmConfig
from ..common.operand_kinds import DTYPE_BYTES, OPERANDS
from ..common.problem import N_ALIGN, GemmGrouping, GemmProblem, RowRange, TileShape
from ..common.rules import Rule

#: Bytes along K of one stage: one swizzle atom. If operand M is decoded, a stage has a chunk of 128
#: that the lanes of a quad read at once, see ``decode``. It has two in tiles of up to
#: ``_LONG_STAGE_N`` columns, whose instructions are short compared with the overhead of a stage.
_STAGE_ROW_BYTES = 128
_LONG_STAGE_K = 2 * DECODED_CHUNK_K
_LONG_STAGE_N = 16
#: Columns up to which a tile's instructions are short compared with the overhead per group.
_SHORT_N = 64
#: Columns of a tile between narrow and wide ones, for decoded operands.
DECODED_N = 96
#: Rows of tiles that are scheduled dynamically.
_DYNAMIC_ROWS = 128
#: Columns above which two warpgroups ping-pong: one multiplies while the other stores.
WIDE_N = 128
#: Columns of the instructions of wider row-fitted tiles. Groups of random sizes with 64, 128, 256
#: and 512 rows on average take 3, 20, 13 and 7% less time than in tiles of 128. Groups of equal
#: sizes take the same time (H200).
_ROW_FITTED_N = (64, 96, 128, 144, 160)
#: Columns of a tile whose whole output fits in shared memory with three stages of operands.
STAGED_N = 144
#: Columns whose partial sums a warpgroup holds at a time, in addition to all fp32 sums.
_PARTIAL_N = 128
#: Least number of row scales that TMA copies for a stage: 128 bytes keep each stage aligned.
_MIN_SCALES = 32
#: Rows of M of one instruction, which a warpgroup issues.
WARPGROUP_M = 64
#: Most blocks of output of a tile that TMA stores at a time.
_MAX_TILE_BLOCKS = 4
#: Bytes of output that a warpgroup stages at a time, by the number of consumer warpgroups, and
#: bytes of a row.
_BLOCK_BYTES = {1: 8192, 2: 8192, 4: 2048}
_BLOCK_ROW_BYTES = 128
#: The same for two consumer warpgroups that decode weights as operand M, or promote.
_SMALL_BLOCK_BYTES = 2048
_SMEM_CAPACITY = get_arch("sm_90a").smem_bytes
_SMEM_RESERVED = 2048


@dataclasses.dataclass(frozen=True)
class Sm90Tile(TileShape):
    """Tile that a CTA works on at a time. Its ``m`` and ``n`` are those of one CTA.

    Attributes:
        num_ctas: CTAs of a cluster. They have neighbouring tiles along M and the same one along N.
            Each loads a part of operand N for all of them.
        consumers: Warpgroups that share the tile along M.
        row_fitted: True if instructions are as wide as the group's rows in the tile, instead of N.
            Above 128 columns the rows of a group are divided evenly over its tiles.
    """

    consumers: int = 2
    row_fitted: bool = False

    @property
    def cluster_m(self) -> int:
        """Rows of operand M in a cluster's tile."""
        return self.m * self.num_ctas


def balances_rows(tile: Sm90Tile) -> bool:
    """Return True if the rows of a group are divided evenly over tiles of this shape."""
    return tile.row_fitted and tile.n > WIDE_N


SM90_TILES = (
    Sm90Tile(256, 8, swap_ab=True, consumers=4),
    Sm90Tile(256, 16, swap_ab=True, consumers=4),
    Sm90Tile(256, 32, swap_ab=True, consumers=4),
    # For a router's logits: 512 tokens of 7168 to 32 experts take 17 us, in tiles of 256 x 8 they
    # take 74 us (H200).
    Sm90Tile(64, 32, swap_ab=True, consumers=1),
    Sm90Tile(256, 64, swap_ab=True, consumers=4),
    Sm90Tile(256, 32, swap_ab=True, consumers=4, row_fitted=True),
    Sm90Tile(128, 128, swap_ab=True),
    Sm90Tile(256, 96, num_ctas=2, swap_ab=True),
    Sm90Tile(256, 128, num_ctas=2, swap_ab=True),
    Sm90Tile(128, 256, num_ctas=2, swap_ab=True),
    Sm90Tile(128, 128),
    Sm90Tile(128, 256),
    Sm90Tile(128, 256, num_ctas=2),
    Sm90Tile(256, 128),
    Sm90Tile(256, 160, num_ctas=2, swap_ab=True, row_fitted=True),
    Sm90Tile(256, 160, swap_ab=True, row_fitted=True),
    Sm90Tile(256, 144, num_ctas=2, swap_ab=True, row_fitted=True),
)


@dataclasses.dataclass(frozen=True)
class Sm90GemmConfig(GemmConfig):
    """One variant of the grouped GEMM for sm_90a.

    Attributes:
        activations: Dtype of A if it is plain and B is NVFP4. None if both are of one kind.
        prepacked: True if the codes of B are prepacked. Their bit order takes ``decode`` fewer
            instructions.
        split: True if sums of operands without block scales are promoted.
        row_range: Row tiles that this kernel takes if several kernels share the product. None for
            all.
    """

    tile: Sm90Tile = Sm90Tile(128, 128)
    activations: str | None = None
    prepacked: bool = False
    split: bool = False
    row_range: RowRange | None = None

    arch: ClassVar[str] = "sm_90a"
    kernel: ClassVar[str] = "cute_kernels.kernels.gemm.sm90.kernel:Sm90Gemm"
    tile_shapes: ClassVar[tuple[TileShape, ...]] = SM90_TILES

    def field_rules(self) -> Iterator[Rule]:
        """Yield the rules of all fields, with those that only sm_90a has."""
        yield from super().field_rules()
        yield Rule(
            self.decoded_to is None,
            "b_operand",
            self.b_operand,
            f"{self.operand} is not multiplied by {self.b_operand}",
        )
        if self.activations is not None:
            yield Rule(
                self.activations in DECODED_SCALE,
                "activations",
                self.activations,
                f"activations must be {' or '.join(DECODED_SCALE)}",
            )
            yield Rule(
                self.is_decoded and self.grouping == "m_grouped" and not self.row_scaled,
                "activations",
                self.activations,
                "activations need FP4 weights of an m_grouped product without row_scaled",
            )
        yield Rule(
            not self.prepacked or self.multiplied == "float16" and self.grouping == "m_grouped",
            "prepacked",
            self.prepacked,
            "only FP4 weights of an m_grouped product that are decoded to fp16 can be prepacked",
        )
        yield Rule(
            not self.split or self.kind.has_short_sums and not self.kind.has_row_scales,
            "split",
            self.split,
            f"sums of {self.operand} are not split",
        )
        if self.row_range is not None:
            yield Rule(
                self.grouping == "m_grouped",
                "row_range",
                self.row_range,
                "only an m_grouped product can be split by rows",
            )
            rows = (
                self.row_range.chunk_rows
                if self.row_range.max_rows == self.row_range.chunk_rows
                else self.row_range.max_rows
            )
            yield Rule(
                rows <= self.tile.rows <= self.row_range.chunk_rows,
                "row_range",
                self.row_range,
                f"tiles of {self.tile.rows} rows cannot hold the row tiles of this range",
            )

    @classmethod
    def any_tile(cls, grouping: GemmGrouping) -> Sm90Tile:
        """Return a tile that every configuration of the grouping can have."""
        return Sm90Tile(128, 128, swap_ab=grouping == "m_grouped")

    def tile_rules(self, tile: Sm90Tile) -> Iterator[Rule]:
        """Yield the rules of ``tile``: code that exists, and what registers and memory can hold."""
        yield from self._built_rules(tile)
        yield from self._capacity_rules(tile)

    def _built_rules(self, tile: Sm90Tile) -> Iterator[Rule]:
        """Yield the rules of what the kernel has code for."""
        is_scaled = self.kind.is_block_scaled and not self.kind.has_row_scales
        yield Rule(
            self.kind.is_decodable and (self.is_decoded or not is_scaled),
            "operand",
            self.operand,
            f"there is no kernel for {self.operand} yet",
        )
        has_options = self.gathered or self.activation is not None
        yield Rule(
            tile.m > WARPGROUP_M
            or self.kind.is_wgmma
            and not (self.kind.has_short_sums or has_options),
            "m",
            tile.m,
            "a single warpgroup multiplies plain operands, neither gathered nor activated",
        )
        yield Rule(
            not tile.swap_ab or self.grouping == "m_grouped",
            "swap_ab",
            tile.swap_ab,
            "only an m_grouped product can have swap_ab",
        )
        if not self.kind.has_short_sums:
            yield Rule(
                tile.swap_ab or self.grouping == "k_grouped",
                "swap_ab",
                tile.swap_ab,
                f"an m_grouped product of {self.operand} must have swap_ab",
            )
            yield Rule(
                tile.swap_ab or tile.num_ctas == 1,
                "num_ctas",
                tile.num_ctas,
                f"CTAs share operands of {self.operand} only with swap_ab",
            )
        yield Rule(
            not self.gathered or tile.num_ctas == 1,
            "num_ctas",
            tile.num_ctas,
            "a CTA that gathers rows must gather all of its rows itself",
        )

    def _capacity_rules(self, tile: Sm90Tile) -> Iterator[Rule]:
        """Yield the rules of what registers and shared memory can hold."""
        columns = _ROW_FITTED_N[-1]
        # A third warpgroup, which gathers or activates, leaves 128 registers to each thread. The
        # sums of a wider instruction alone would take as many.
        yield Rule(
            not self.gathered or tile.consumers != 2 or tile.n <= columns,
            "n",
            tile.n,
            f"products that gather rows have instructions of at most {columns} columns",
        )
        yield Rule(
            not self.promotes or tile.m == tile.consumers * WARPGROUP_M,
            "m",
            tile.m,
            "there are no registers for sums and partial sums of two instructions along M",
        )
        yield Rule(
            self.activation is None or self.promotes or tile.n <= columns,
            "n",
            tile.n,
            f"products with an activation have instructions of at most {columns} columns",
        )
        # This width leaves shared memory for all of the output. It was built for that only: of fp32
        # output it would stage blocks of 24 rows, which overwrite other shared memory (emulator).
        yield Rule(
            not balances_rows(tile) or (tile.n == STAGED_N) == self.stages_whole_tile,
            "n",
            tile.n,
            f"a balanced tile has {STAGED_N} columns if all of its output is staged, and only then",
        )

    @property
    def stages_whole_tile(self) -> bool:
        """True if shared memory holds the activated output of a whole tile."""
        return self.activation is not None and self.out_dtype != "float32" and not self.gathered

    def has_whole_blocks(self, tile: Any) -> bool:
        """Return True if a tile holds whole blocks of a quantized output.

        The warps that store a tile must hold them, or all warpgroups of its CTA.
        """
        if self.result is None:
            return True
        # The warps that store a tile have them, or all warpgroups of its CTA.
        is_whole = tile.cols == 4 * WARPGROUP_M and tile.swap_ab == (tile.consumers == 4)
        return is_whole and self.out_dtype != "float32"

    def problem_rules(self, problem: GemmProblem) -> Iterator[Rule]:
        """Yield the rules of a problem's kinds and sizes."""
        yield Rule(
            not (self.is_decoded and self.interleaves_halves) or self.tile.m >= 2 * SF_TILE_ROWS,
            "m",
            self.tile.m,
            "a tile must have whole tiles of block scales of both halves of B",
        )
        yield from super().problem_rules(problem)

    @property
    def handled_rows(self) -> RowRange:
        """The row tiles of an m_grouped product that this kernel takes."""
        return self.row_range or super().handled_rows

    @property
    def uses_dynamic_scheduling(self) -> bool:
        # With group sizes by Zipf's law at 128 rows it is 2 to 9% faster. Other tiles lose as much
        # unless they are balanced: tiles of different lengths drift apart, so that L2 no longer has
        # the data that the next one reads (H200).
        """True if clusters take tiles from a ``counter``."""
        is_dynamic = (
            self.kind.has_short_sums
            and self.tile.rows == _DYNAMIC_ROWS
            and (self.tile.swap_ab or self.promotes)
        )
        return (is_dynamic or self.balances_row_tiles) and self.grouping == "m_grouped"

    @property
    def balances_row_tiles(self) -> bool:
        """True if the rows of a group are divided evenly over its tiles."""
        return balances_rows(self.tile)

    @property
    def num_sched_stage(self) -> int:  # type: ignore[override]
        """Number of tile records in flight between scheduler and readers."""
        # No cluster may take a tile that it does not need yet.
        return 1 if self.uses_dynamic_scheduling else GemmConfig.num_sched_stage

    @property
    def skips_rows(self) -> bool:
        """True if a warpgroup multiplies nothing in a tile that ends before its rows."""
        return self.uses_dynamic_scheduling and not self.tile.swap_ab

    @property
    def instruction_k(self) -> int:
        """Elements of K of one MMA instruction."""
        return OPERANDS[self.multiplied].instruction_k

    @property
    def stage_k(self) -> int:
        """Elements of K of one stage."""
        if not self.is_decoded:
            return _STAGE_ROW_BYTES * 8 // self.multiplied_bits
        return _LONG_STAGE_K if self.tile.n <= _LONG_STAGE_N else DECODED_CHUNK_K

    @property
    def chunks_per_stage(self) -> int:
        """Number of chunks of 128 along K of one stage."""
        return self.stage_k // DECODED_CHUNK_K

    @property
    def promotes(self) -> bool:
        """True if the sums over each stage go from the accumulators to fp32 registers."""
        return self.split or self.kind.has_row_scales

    @property
    def partial_n(self) -> int:
        """Columns of an instruction if sums are promoted."""
        return min(self.tile.n, _PARTIAL_N)

    @property
    def row_scales(self) -> tuple[int, int]:
        """Number of scales of single rows of operands M and N in a stage, or 0 without them."""
        sides = ((self.m_kind, self.tile.m), (self.n_kind, self.tile.n))
        m, n = (
            max(rows, _MIN_SCALES) if kind.has_row_scales and not kind.has_squares else 0
            for kind, rows in sides
        )
        return m, n

    @property
    def k_blocks(self) -> int:
        """Number of MMA instructions along K of one stage."""
        return self.stage_k // self.instruction_k

    @property
    def k_groups(self) -> int:
        """Number of groups of instructions of one stage.

        One group is decoded while another is multiplied. In narrow tiles the overhead of
        more groups exceeds their gain. In wide tiles it does not: 256 x 128 is 4% slower with two
        groups (H200).
        """
        if not self.is_decoded:
            return self.k_blocks
        # Several widths need registers: with fewer groups ptxas would serialize the products.
        return (
            2 if self.tile.n <= _SHORT_N and not self.tile.row_fitted else 4
        ) * self.chunks_per_stage

    @property
    def instruction_groups(self) -> tuple[int, ...]:
        """Number of instructions along K in each group of a stage.

        Operands that are not decoded need two groups: while the product of the first one runs, the
        products of the previous stage are waited for, and that stage is freed.
        """
        if not self.is_decoded:
            return 1, self.k_blocks - 1
        return (self.k_blocks // self.k_groups,) * self.k_groups

    @property
    def is_decoded(self) -> bool:
        """True if operand M comes as codes, which are decoded in registers."""
        return not self.kind.is_wgmma

    @property
    def multiplied(self) -> str:
        """Name of the operand kind that instructions multiply."""
        if not self.is_decoded:
            return self.operand
        return self.activations or "float16"

    @property
    def multiplied_bits(self) -> int:
        """Bits of an element that instructions multiply."""
        return OPERANDS[self.multiplied].bits

    @property
    def expanded(self) -> str | None:
        """Operand, "a" or "b", that a kernel before this one puts into the order of ``decode``.

        It comes as the fp16 values of its codes, or as plain activations. None if no operand is
        decoded.
        """
        if not self.is_decoded:
            return None
        return "a" if self.tile.swap_ab else "b"

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.tile.consumers

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the instructions, of which one width is chosen for each tile."""
        if self.balances_row_tiles:
            return tuple(width for width in _ROW_FITTED_N if width <= self.tile.n)
        if self.uses_dynamic_scheduling and not self.promotes:
            return self.tile.n // 2, self.tile.n
        if not self.tile.row_fitted:
            return (self.tile.n,)
        return tuple(8 << i for i in range((self.tile.n // 8).bit_length()))

    @property
    def is_ping_pong(self) -> bool:
        """True if two warpgroups go through their epilogues one after the other.

        Then they are some stages apart, and one multiplies while the other stores, which gains 2.5%
        at K = 2048. It costs as many stages of prefetch. Few rows, bound by memory, need these
        more: 2% of the time at 128 rows (H200).
        """
        is_hidden = self.stores_by_tma and self.promotes and self.out_dtype != "float32"
        return (
            self.tile.n > WIDE_N
            and not self.balances_row_tiles
            and not self.has_store_warpgroup
            and not is_hidden
        )

    @property
    def m_stage_bytes(self) -> tuple[int, int]:
        """Bytes of operand M in one stage, and of its block scales."""
        if self.is_decoded:
            return (
                self.tile.m * self.stage_k * self.kind.bits // 8,
                self.tile.m * self.stage_k // self.kind.sf_vec_size,
            )
        return self.tile.m * self._multiplied_row_bytes, self.row_scales[0] * 4

    @property
    def n_stage_bytes(self) -> tuple[int, int]:
        """Bytes of operand N in one stage, and of its block scales."""
        return self.tile.n * self._multiplied_row_bytes, self.row_scales[1] * 4

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        return sum(self.m_stage_bytes) + sum(self.n_stage_bytes)

    @property
    def gather_warps(self) -> int:
        """Number of warps that gather rows: two idle warps, or a warpgroup.

        A warp copies 32 vectors in 55 to 75 cycles, so that two of them need 1200 cycles for 128
        rows of a stage, more than the products of these rows (H200).
        """
        return (4 if self.consumers == 2 else 2) if self.gathered else 0

    @property
    def _multiplied_row_bytes(self) -> int:
        return self.stage_k * self.multiplied_bits // 8

    @property
    def has_store_warpgroup(self) -> bool:
        """True if a separate warpgroup activates and stores the tiles that other warpgroups staged.

        An activation takes as many instructions as products of K = 1000, so they run during the
        products.
        """
        return (
            self.activation is not None
            and self.consumers == 2
            and self.out_dtype != "float32"
            and not self.gathered
        )

    @property
    def stores_by_tma(self) -> bool:
        """True if TMA stores the output.

        TMA clips blocks at the ends of a matrix, not of a group's rows. It takes 6 to 19% off the
        time of wgrad.
        """
        return self.grouping == "k_grouped" and not self.accumulate

    @property
    def stores_whole_tiles(self) -> bool:
        """True if TMA stores all of a tile at a time, which takes the memory of a stage.

        Many rows, in clusters, need that stage.
        """
        has_time = (
            self.is_decoded or self.promotes and not (self.row_scales[1] and self.tile.num_ctas > 1)
        )
        return (
            self.stores_by_tma
            and has_time
            and self.tile.n // self.block_shape[1] <= _MAX_TILE_BLOCKS
        )

    @property
    def skips_k(self) -> bool:
        """True if nothing is multiplied past a group's last row.

        16-bit operands gain 3 to 4%; FP8 loses if groups are even (H200).
        """
        return self.grouping == "k_grouped" and not self.is_decoded and not self.kind.has_short_sums

    @property
    def staged_type(self) -> str:
        """Dtype of the output that the epilogue stages: rounded, unless something is added."""
        return "float32" if self.accumulate else self.out_dtype

    @property
    def num_store_stage(self) -> int:  # type: ignore[override]
        """Number of blocks of output that a warpgroup stages in turn.

        It is one if blocks are large and sums are promoted, which makes room for one more stage. It
        is all of a tile if another warpgroup stores them, or TMA at once.
        """
        if self.stores_whole_tiles:
            return self.tile.n // self.block_shape[1]
        if self.has_store_warpgroup:
            rows, cols = self.block_shape
            return self.tile.m * self.tile.n // (self.consumers * rows * cols)
        return 1 if self.promotes and not self.tile.swap_ab else 2

    @property
    def block_shape(self) -> tuple[int, int]:
        """Rows and columns of the output that a warpgroup stages at a time."""
        width = DTYPE_BYTES[self.staged_type]
        if self.tile.swap_ab:
            size = _BLOCK_BYTES[self.consumers]
            if (
                (self.is_decoded or self.promotes)
                and self.consumers == 2
                and not self.has_store_warpgroup
            ):
                # Stages are long, and one more of them gains more than large blocks.
                size = _SMALL_BLOCK_BYTES
            rows = max(N_ALIGN, size // (WARPGROUP_M * width))
            return max(math.gcd(self.tile.n, r) for r in (rows, rows // 4 * 3)), WARPGROUP_M
        return WARPGROUP_M, _BLOCK_ROW_BYTES // width

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of output."""
        rows, cols = self.block_shape
        return rows * cols * DTYPE_BYTES[self.staged_type]

    @property
    def factor_words(self) -> int:
        """Words of shared memory for the factors of a tile's rows, and for amaxes of two blocks."""
        block_rows = self.consumers * self.block_shape[0] if self.quantizes_to is not None else 0
        return self.row_factors + 2 * block_rows

    @property
    def row_factors(self) -> int:
        """Number of factors of a tile's rows, with a copy for each warpgroup."""
        return self.consumers * self.tile.n if self.row_scaled else 0

    @property
    def epilogue_bytes(self) -> int:
        """Bytes of shared memory of the epilogue."""
        return self.consumers * self.num_store_stage * self.block_bytes + self.factor_words * 4

    @property
    def num_ab_stage(self) -> int:
        """Number of stages."""
        return (_SMEM_CAPACITY - _SMEM_RESERVED - self.epilogue_bytes) // self.stage_bytes
