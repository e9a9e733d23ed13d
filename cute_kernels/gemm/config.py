"""What a grouped GEMM kernel is compiled for, and which problems it takes.

A configuration holds facts of code generation only, so it can be hashed, pickled and used as a
cache key; shapes, group boundaries and the number of SMs stay dynamic. It names the kernel and does
not import it: kernels need the CuTe DSL, configurations do not.

Sizes are named by the product that a tile of the output is made of, ``D[M, N] = sum over K``:

=========== ============================ ============================ =========================
grouping    M                            N                            K
=========== ============================ ============================ =========================
m_grouped   rows of the ragged tensor    columns of the output        contracted, uniform
k_grouped   columns of A                 columns of B                 rows of a group, ragged
=========== ============================ ============================ =========================

With ``swap_ab`` M and N of an m_grouped product change places: a tile of the tensor core has at
least 128 rows of M, which few rows a group would leave empty, but may be narrow in N. With
``swap_tails`` only the last tile of a group does so, if it is not whole. Block-scaled operands then
multiply only as many rows of N as the tile has, rounded up to ``N_STEP``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from cute_kernels.capability import Support
from cute_kernels.formats import NVFP4
from cute_kernels.layout.shapes import PITCH_ALIGNMENT, SF_TILE_BYTES, SF_TILE_ROWS, ceil_div

__all__ = ["OPERANDS", "TILE_SHAPES", "GemmConfig", "GemmProblem", "OperandKind", "TileShape"]


@dataclasses.dataclass(frozen=True)
class OperandKind:
    """What the tensor core needs to know of an operand format.

    Attributes:
        name: how configurations name it.
        bits: of one element.
        instruction_k: elements of K that one MMA instruction contracts.
        sf_vec_size: elements that share a block scale; 0 without block scales.
    """

    name: str
    bits: int
    instruction_k: int
    sf_vec_size: int = 0

    @property
    def is_block_scaled(self) -> bool:
        """Whether block scales are read beside the elements."""
        return self.sf_vec_size > 0

    @property
    def k_align(self) -> int:
        """K must be a multiple of this in an m_grouped product: rows TMA can address."""
        return self.sf_vec_size or PITCH_ALIGNMENT * 8 // self.bits


#: Operand kinds by name; both operands are of the same kind.
OPERANDS = {
    kind.name: kind
    for kind in (
        OperandKind(NVFP4.name, NVFP4.element.bits, 64, NVFP4.sf_vec_size),
        OperandKind("bfloat16", 16, 16),
        OperandKind("float16", 16, 16),
    )
}
#: Bytes of one element, by the dtype names that configurations use.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: N of every output must be a multiple of this: 16 bytes of the narrowest output type.
N_ALIGN = 8
#: Columns of tensor memory, and the rows of block scales that share one.
TMEM_COLUMNS = 512
TMEM_LANES = 32
#: Bytes of one row of output that the epilogue handles at a time.
STORE_BYTES = 128
#: Rows of N by which instructions differ that fit themselves to the rows of a tile.
N_STEP = 16
#: Rows of A that are loaded at a time where a tile has swapped tails.
TAIL_BOX_ROWS = 32
#: Rows and columns of the output that an epilogue warp with swapped operands handles at a time.
SWAPPED_BLOCK = 32
#: MMA instructions along K for one stage of shared memory: 128 bytes a row.
K_BLOCKS = 4
#: Rows of a buffer whose groups bound K, at most: TMA addresses them in a mode of this extent.
RAGGED_ROWS = 2**30
_SMEM_CAPACITY = 232448
#: Barriers, tile records and alignment.
_SMEM_RESERVED = 2048
_MAX_INT32 = 2**31 - 1

Grouping = Literal["m_grouped", "k_grouped"]


@dataclasses.dataclass(frozen=True)
class TileShape:
    """What the tensor core works on at a time.

    Attributes:
        m: rows of operand M.
        n: rows of operand N.
        num_ctas: CTAs that share the tile; each holds half of both operands.
        swap_ab: operand M is B and operand N is A, see the module.
        swap_tails: the same, only in the last tile of a group and if that is not whole.
    """

    m: int
    n: int
    num_ctas: int = 1
    swap_ab: bool = False
    swap_tails: bool = False

    @property
    def may_swap(self) -> bool:
        """Whether some tiles have swapped operands."""
        return self.swap_ab or self.swap_tails

    @property
    def rows(self) -> int:
        """Rows of the output that a tile of an m_grouped product covers."""
        return self.n if self.swap_ab else self.m

    @property
    def cols(self) -> int:
        """Columns of the output that a tile covers."""
        return self.m if self.swap_ab else self.n


#: The tiles that kernels are built for.
TILE_SHAPES = (
    TileShape(256, 256, 2, swap_tails=True),
    TileShape(128, 128, swap_tails=True),
    TileShape(256, 256, 2),
    TileShape(256, 128, 2),
    TileShape(128, 128),
    TileShape(128, 64),
    TileShape(128, 64, swap_ab=True),
    TileShape(128, 32, swap_ab=True),
)


@dataclasses.dataclass(frozen=True)
class GemmProblem:
    """The facts of a call that decide which kernels can run it; all known on the host.

    Attributes:
        operand: name of the operand kind.
        grouping: ``"m_grouped"`` for (T, K) x (G, N, K), ``"k_grouped"`` for two ragged operands.
        out_dtype: name of the output's dtype.
        groups: G.
        rows: T, the rows of the buffer; in a k_grouped product of slots, the most they hold.
        m: columns of A in a k_grouped product; otherwise unused.
        n: columns of the output.
        k: K of an m_grouped product; otherwise unused.
    """

    operand: str
    grouping: Grouping
    out_dtype: str
    groups: int
    rows: int
    n: int
    m: int = 0
    k: int = 0


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """One variant of the grouped GEMM for sm_100a.

    Attributes:
        operand: name of the operand kind, see ``OPERANDS``.
        grouping: see the module.
        out_dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        row_scaled: the second level of A is one amax per row instead of one per group.
        bias_dtype: dtype of a (G, N) bias, None without one.
        has_alpha: one fp32 factor a group.
        accumulate: add to what the output holds.
        transpose_b: plain B of an m_grouped product is (G, K, N) instead of (G, N, K).
        zero_tail: write zeros into the rows after the last group of an m_grouped product.
        tile: one of ``TILE_SHAPES``.
    """

    operand: str
    grouping: Grouping = "m_grouped"
    out_dtype: str = "bfloat16"
    row_scaled: bool = False
    bias_dtype: str | None = None
    has_alpha: bool = False
    accumulate: bool = False
    transpose_b: bool = False
    zero_tail: bool = False
    tile: TileShape = TileShape(128, 128)

    kernel: ClassVar[str] = "cute_kernels.gemm.kernel:GroupedGemmKernel"
    #: The tiles that this architecture's kernel is built for.
    tile_shapes: ClassVar[tuple[TileShape, ...]] = TILE_SHAPES
    #: MMA instructions along K for one stage of shared memory.
    k_blocks: ClassVar[int] = K_BLOCKS
    #: The operand, "a" or "b", whose block scales are multiplied in before the product, and the
    #: type of its values; dtype of A where only B is quantized. For tensor cores that know no FP4.
    expanded: ClassVar[str | None] = None
    multiplied: ClassVar[str] = ""
    activations: ClassVar[str | None] = None
    #: Blocks of output of one epilogue warp that are staged for TMA.
    num_store_stage = 2
    #: Tiles that the scheduler is ahead.
    num_sched_stage = 4

    def __post_init__(self) -> None:
        if self.operand not in OPERANDS:
            raise ValueError(f"operand must be one of {', '.join(OPERANDS)}, got {self.operand!r}")
        if self.grouping not in ("m_grouped", "k_grouped"):
            raise ValueError(f"grouping must be m_grouped or k_grouped, got {self.grouping!r}")
        for name in ("out_dtype", "bias_dtype"):
            dtype = getattr(self, name)
            if dtype not in DTYPE_BYTES and (name == "out_dtype" or dtype is not None):
                raise ValueError(f"{name} must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
        if self.tile not in self.tile_shapes:
            raise ValueError(f"tile must be one of tile_shapes, got {self.tile}")
        if self.row_scaled and not (self.kind.is_block_scaled and self.grouping == "m_grouped"):
            raise ValueError("row_scaled needs block-scaled operands of an m_grouped product")
        if self.bias_dtype is not None and self.grouping == "k_grouped":
            raise ValueError("a k_grouped product takes no bias")

        if self.zero_tail and (self.grouping == "k_grouped" or self.accumulate):
            raise ValueError("zero_tail needs an m_grouped product that does not accumulate")
        if not self.takes(self.tile):
            reason = "swap_tails" if self.tile.swap_tails else "swap_ab"
            raise ValueError(f"this product cannot have the tile {self.tile}: {reason}")
        if self.transpose_b and (self.kind.is_block_scaled or self.grouping == "k_grouped"):
            raise ValueError("transpose_b needs plain operands of an m_grouped product")

    @classmethod
    def any_tile(cls, grouping: Grouping) -> TileShape:
        """A tile that every product of a grouping may have."""
        return TileShape(128, 128)

    def takes(self, tile: TileShape) -> bool:
        """Whether this configuration means something with another tile."""
        if tile.swap_tails and not self.kind.is_block_scaled:
            return False
        return not (tile.may_swap and self.grouping == "k_grouped")

    def may_choose(self, tile: TileShape) -> bool:
        """Whether the choice of a tile considers this one.

        In an m_grouped product of block-scaled operands, tiles that cannot fit themselves to the
        rows of a group multiply up to a tile of rows for each that no group has; they have to be
        forced.
        """
        fits = tile.may_swap or not self.kind.is_block_scaled or self.grouping == "k_grouped"
        return fits and self.takes(tile)

    @property
    def kind(self) -> OperandKind:
        """What the operands are made of."""
        return OPERANDS[self.operand]

    @property
    def ragged_k(self) -> bool:
        """Whether K begins and ends at any row; otherwise it starts at a slot or at 0."""
        return self.grouping == "k_grouped" and not self.kind.is_block_scaled

    @property
    def mn_major(self) -> tuple[bool, bool]:
        """Whether operands M and N are contiguous along M and N instead of along K.

        Blocks of a quantized tensor run along K, so its copies always are contiguous there.
        """
        a, b = self.ragged_k, self.ragged_k or self.transpose_b
        return (b, a) if self.tile.swap_ab else (a, b)

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
        """Tiles of block scales, for each K block, of operands M and N in one CTA.

        A pair of CTAs splits those of M; both need all of N.
        """
        if not self.kind.is_block_scaled:
            return 0, 0
        m_cta = self.tile.m // self.tile.num_ctas
        return ceil_div(m_cta, SF_TILE_ROWS), ceil_div(self.tile.n, SF_TILE_ROWS)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of both operands in one CTA."""
        scales = sum(self.scale_tiles) * K_BLOCKS * SF_TILE_BYTES
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
        return (_SMEM_CAPACITY - _SMEM_RESERVED - self.staged_bytes) // self.stage_bytes

    @property
    def store_columns(self) -> int:
        """Columns of the output that a thread of the epilogue handles at a time."""
        return STORE_BYTES // DTYPE_BYTES[self.out_dtype]

    @property
    def sf_columns(self) -> tuple[int, int]:
        """Columns of tensor memory for the block scales of operands M and N."""
        each = K_BLOCKS * SF_TILE_ROWS // TMEM_LANES
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
        """Whether tiles whose operands are not swapped may reach past the end of a group."""
        return self.grouping == "m_grouped" and not self.tile.may_swap

    @property
    def writes_zeros(self) -> bool:
        """Whether there are tiles of which nothing is multiplied."""
        return self.zero_tail or self.grouping == "k_grouped" and not self.accumulate

    @property
    def num_acc_stage(self) -> int:
        """Accumulators that the MMA may fill freely."""
        return 1 if self.acc_overlap else 2

    def can_implement(self, problem: GemmProblem) -> Support:
        """Whether the kernel takes ``problem``: the one statement of its constraints."""
        mine = (self.operand, self.grouping, self.out_dtype)
        asked = (problem.operand, problem.grouping, problem.out_dtype)
        if asked != mine:
            return Support(False, f"compiled for {' '.join(mine)}, not {' '.join(asked)}")
        if problem.groups < 1 or problem.rows < 1:
            return Support(False, "needs at least one group and one row")
        if problem.n < 1 or problem.n % N_ALIGN:
            return Support(False, f"N must be a positive multiple of {N_ALIGN}, got {problem.n}")
        if self.grouping == "m_grouped":
            align = self.kind.k_align
            if problem.k < 1 or problem.k % align:
                return Support(False, f"K must be a positive multiple of {align}, got {problem.k}")
        elif problem.m < 1 or self.ragged_k and problem.m % N_ALIGN:
            align = N_ALIGN if self.ragged_k else 1
            return Support(
                False, f"columns of A must be a positive multiple of {align}, got {problem.m}"
            )
        elif self.ragged_k and problem.rows > RAGGED_ROWS:
            return Support(False, f"at most 2^30 rows, got {problem.rows}")
        if self._num_tiles(problem) > _MAX_INT32:
            return Support(False, "more than 2^31 - 1 tiles")
        return Support(True)

    def _num_tiles(self, problem: GemmProblem) -> int:
        """At most this many tiles, whatever the groups."""
        cols = ceil_div(problem.n, self.tile.cols)
        if self.grouping == "m_grouped":
            groups = problem.groups + self.zero_tail
            return (problem.rows // self.tile.rows + groups) * cols
        return problem.groups * ceil_div(problem.m, self.tile.m) * cols
