"""What a grouped GEMM is asked for, and what the configurations of all its kernels have in common.

Configurations are specs of kernels (``runtime.spec``); group boundaries and the number of SMs stay
dynamic, too.

Sizes are named by the product that a tile of the output is made of, ``D[M, N] = sum over K``:

=========== ============================ ============================ =========================
grouping    M                            N                            K
=========== ============================ ============================ =========================
m_grouped   rows of the ragged tensor    columns of the output        contracted, uniform
k_grouped   columns of A                 columns of B                 rows of a group, ragged
=========== ============================ ============================ =========================

With ``swap_ab`` M and N of an m_grouped product change places: a tile of the tensor core has at
least 64 or 128 rows of M, which few rows a group would leave empty, but may be narrow in N.

Two words: the *tail* is what a buffer has after the rows of its last group; the last tile of a
group is *partial* if the group's rows do not fill it.
"""

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from cute_kernels.capability import Support, why_not_result
from cute_kernels.formats import Format, parse
from cute_kernels.formats.activations import Activation, parse_activation
from cute_kernels.layout.shapes import SF_TILE_ROWS, ceil_div

from .operand_kinds import DTYPE_BYTES, OPERANDS, OperandKind, operand_of

#: N of every output must be a multiple of this: 16 bytes of the narrowest output type.
N_ALIGN = 8
#: Columns of a quantized output with fp32 block scales: those of a column of them.
QUANTIZED_COLS = 128
#: Rows of a buffer whose groups bound K, at most: TMA addresses them in a mode of this extent.
RAGGED_ROWS = 2**30
_MAX_INT32 = 2**31 - 1

GemmGrouping = Literal["m_grouped", "k_grouped"]


@dataclass(frozen=True)
class TileShape:
    """What the tensor core works on at a time, rows of operands M and N; architectures add to it.

    ``num_ctas`` CTAs share a tile, or neighbouring tiles: a cluster. With ``swap_ab`` operand M is
    B and operand N is A, see the module.
    """

    m: int
    n: int
    num_ctas: int = 1
    swap_ab: bool = False

    @property
    def cluster_m(self) -> int:
        return self.m

    @property
    def rows(self) -> int:
        return self.n if self.swap_ab else self.cluster_m

    @property
    def cols(self) -> int:
        return self.cluster_m if self.swap_ab else self.n


@dataclass(frozen=True)
class RowPart:
    """The row tiles of an m_grouped product that one kernel takes, where several share it.

    A group is cut into tiles of ``chunk`` rows and one of what is left. Every tile is taken by the
    kernel whose range, from ``least`` (exclusive) to ``most``, holds its rows, so large groups get
    wide tiles and small ones narrow tiles without the host knowing which are which. A part that
    ``follows`` another starts on the SMs that are done with that one.
    """

    chunk: int
    least: int
    most: int
    follows: bool = False


@dataclass(frozen=True)
class GemmProblem:
    """The facts of a call that decide which kernels can run it; all known on the host.

    ``rows`` is T, the rows of the buffer, or of slots in a k_grouped product the most they hold;
    ``n`` are columns of the output, ``m`` those of A in a k_grouped product, ``k`` is K of an
    m_grouped one.
    """

    operand: str
    grouping: GemmGrouping
    out_dtype: str
    groups: int
    rows: int
    n: int
    m: int = 0
    k: int = 0


class GemmArguments(NamedTuple):
    """Arguments of a grouped GEMM kernel, in its order; a stream follows where it is traced.

    Operands and block scales are those of sm_90a; what differs on sm_100a is with its kernel.

    Attributes:
        a: (T, K) elements that are multiplied; in a k_grouped product (T, M), or (M, slots) if
            they are quantized, or (M, 64 * tiles) codes.
        a_scales: scale tiles if it is codes; fp32 scales, see ``FakeArguments``.
        a_amax: (G,) fp32 second level, or (T,) when row-scaled.
        b: (G, N, K) or (G, K, N), or (G, N, >= K / 2) codes; in a k_grouped product (T, N), or
            (N, slots).
        offs: (G,) int32 end rows.
        rows: (T,) int32, which rows of ``a``, or of ``b`` in a k_grouped product, are
            multiplied where they are ``gathered``.
        bias: (G, N).
        alpha: (G,) fp32.
        out: (T, N), or (G, M, N) of a k_grouped product.
        num_sms: CTAs to launch, rounded down to whole clusters; at least one cluster.
        z: (T, N), where the output has what an activation makes of it, if it is kept.
        out_scales: block scales of a quantized output, see ``FakeArguments``.
        out_level: (G,) fp32, the amaxes that those are relative to, of a format with a second
            level.
        counter: (1,) int32, 0 before a launch and after it, of one that ``mixes_groups``.
    """

    a: Any
    a_scales: Any
    a_amax: Any
    b: Any
    b_scales: Any
    b_amax: Any
    offs: Any
    rows: Any
    bias: Any
    alpha: Any
    out: Any
    num_sms: Any
    z: Any = None
    out_scales: Any = None
    out_level: Any = None
    counter: Any = None

    def in_order(self, config: "GemmConfig") -> tuple[Any, Any, Any, Any]:
        if config.tile.swap_ab:
            return self.b, self.a, self.b_scales, self.a_scales
        return self.a, self.b, self.a_scales, self.b_scales


class Extents(NamedTuple):
    """Sizes of a product inside a kernel: rows of the buffer, M and N of one group, and K.

    K is unused in a k_grouped product.
    """

    rows: Any
    m: Any
    n: Any
    k: Any


@dataclass(frozen=True)
class GemmConfig(abc.ABC):
    """One variant of the grouped GEMM: what it computes, and how an architecture tiles it.

    Attributes:
        operand: name of the operand kind, see ``OPERANDS``; of A's where B is of another one,
            ``b_operand``.
        row_scaled: the second level of A is one amax per row instead of one per group.
        bias_dtype: dtype of a (G, N) bias, None without one.
        has_alpha: one fp32 factor a group.
        transpose_b: B of an m_grouped product is (G, K, N) instead of (G, N, K).
        pow2_scales: fp32 block scales of both operands are powers of two.
        gathered: rows of operand N, of A or in a k_grouped product of B, are read by an index.
        activation: what rows go through, rounded to ``out_dtype``, on their way to the output.
        interleaved: rows of B for the two inputs of a gated one alternate; otherwise they are
            halves, whose rows a tile has by turns.
        keeps_z: what goes into the activation is stored, too, with columns as B has rows.
        quantizes_to: text of the format that the activation's result, rounded to ``out_dtype``,
            is quantized to, rowwise: then the output is codes and block scales, whose rows
            lie in slots.
    """

    operand: str
    grouping: GemmGrouping = "m_grouped"
    out_dtype: str = "bfloat16"
    row_scaled: bool = False
    bias_dtype: str | None = None
    has_alpha: bool = False
    accumulate: bool = False
    transpose_b: bool = False
    zero_tail: bool = False
    tile: TileShape = TileShape(128, 128)
    b_operand: str | None = None
    pow2_scales: bool = False
    gathered: bool = False
    activation: str | None = None
    interleaved: bool = False
    keeps_z: bool = False
    quantizes_to: str | None = None

    #: What it runs on.
    arch: ClassVar[str]
    #: The class of the kernel, which the runtime imports.
    kernel: ClassVar[str]
    #: The tiles that an architecture's kernel is built for.
    tile_shapes: ClassVar[tuple[TileShape, ...]]
    #: Blocks of output that an epilogue stages by turns.
    num_store_stage: ClassVar[int] = 2
    #: Tiles that the scheduler is ahead.
    num_sched_stage: ClassVar[int] = 4

    def __post_init__(self) -> None:
        tables: dict[str, dict[str, Any]] = {"operand": OPERANDS, "out_dtype": DTYPE_BYTES}
        optional: dict[str, dict[str, Any]] = {"b_operand": OPERANDS, "bias_dtype": DTYPE_BYTES}
        for name, known in (tables | optional).items():
            value = getattr(self, name)
            if value not in known and (name in tables or value is not None):
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if not (self.is_alike or self.decoded_to is not None and self.grouping == "m_grouped"):
            raise ValueError(f"{self.operand} is not multiplied by {self.b_operand}")
        if self.grouping not in ("m_grouped", "k_grouped"):
            raise ValueError(f"grouping must be m_grouped or k_grouped, got {self.grouping!r}")
        if self.tile not in self.tile_shapes:
            raise ValueError(f"tile must be one of tile_shapes, got {self.tile}")
        if self.row_scaled and (self.kind.level_factor is None or self.grouping == "k_grouped"):
            raise ValueError(
                "row_scaled needs operands of an m_grouped product with a second level"
            )
        if self.bias_dtype is not None and self.grouping == "k_grouped":
            raise ValueError("a k_grouped product takes no bias")
        if self.zero_tail and (self.grouping == "k_grouped" or self.accumulate):
            raise ValueError("zero_tail needs an m_grouped product that does not accumulate")
        if self.transpose_b and (self.b_kind.is_transposed or self.grouping == "k_grouped"):
            raise ValueError(
                "transpose_b needs an m_grouped product of operands without a transposed copy"
            )
        if self.pow2_scales and not self.kind.has_row_scales:
            raise ValueError(f"{self.operand} has no fp32 block scales")
        if self.gathered and (
            self.kind.fmt is not None or self.b_kind.fmt is not None and self.decoded_to is None
        ):
            raise ValueError("rows by an index are those of plain operands")
        if self.kind.has_squares and self.b_kind.has_squares:
            raise ValueError("one operand must have a scale for each row")
        if self.activation is not None and (
            self.grouping == "k_grouped" or self.accumulate or self.transpose_b
        ):
            raise ValueError(
                "activation needs an m_grouped product without accumulate and transpose_b"
            )
        if self.keeps_z and self.activation is None or self.interleaved and not self.is_gated:
            raise ValueError("keeps_z needs an activation, and interleaved a gated one")
        if self.quantizes_to is not None and (self.activation is None or self.keeps_z):
            raise ValueError("quantizes_to needs an activation, and z is not kept")
        if self.result is not None and (
            reason := why_not_result("grouped_gemm", self.result, self.arch)
        ):
            raise ValueError(f"quantizes_to: {reason}")
        if reason := self.refuses(self.tile):
            raise ValueError(f"this product cannot have the tile {self.tile}: {reason}")

    @classmethod
    @abc.abstractmethod
    def any_tile(cls, grouping: GemmGrouping) -> TileShape:
        """A tile that every product of a grouping may have."""

    @abc.abstractmethod
    def refuses(self, tile: Any) -> str:
        """Why this configuration cannot have a tile of ``tile_shapes``; empty if it can."""

    @property
    def rows_taken(self) -> RowPart:
        """The row tiles of an m_grouped product that this kernel takes: all, as a rule."""
        return RowPart(self.tile.rows, 0, self.tile.rows)

    @property
    def mixes_groups(self) -> bool:
        """Whether tiles of groups of several row tiles and of one are multiplied by turns, by a
        ``counter``.
        """
        return False

    @property
    def spreads_rows(self) -> bool:
        """Whether the row tiles of a group have equally many rows; otherwise all but the last are
        full.
        """
        return False

    def parts(
        self, problem: GemmProblem, num_sms: int, bandwidth: float | None = None
    ) -> "tuple[GemmConfig, ...]":
        """The kernels that share a product among them, in the order in which they run."""
        return (self,)

    def takes(self, tile: TileShape) -> bool:
        """Whether this configuration means something with another tile of ``tile_shapes``."""
        return not self.refuses(tile)

    def may_choose(self, tile: TileShape) -> bool:
        return self.takes(tile)

    def has_blocks(self, tile: Any) -> bool:
        """Whether a tile of ``tile_shapes`` has whole blocks of what the output is quantized to, if
        it is.
        """
        return self.quantizes_to is None

    @abc.abstractmethod
    def estimated_cycles(
        self, problem: GemmProblem, num_sms: int, bandwidth: float | None = None
    ) -> float:
        """What a call costs, by a model of time; ``bandwidth`` as in ``choose_config``."""

    @property
    def kind(self) -> OperandKind:
        return OPERANDS[self.operand]

    @property
    def b_kind(self) -> OperandKind:
        return OPERANDS[self.b_operand or self.operand]

    @property
    def act(self) -> Activation | None:
        return None if self.activation is None else parse_activation(self.activation)

    @property
    def result(self) -> Format | None:
        return None if self.quantizes_to is None else parse(self.quantizes_to)

    @property
    def per_element(self) -> int:
        """Columns of the result that an element of the output has: codes of a byte."""
        return 1 if self.result is None else self.result.element.per_byte

    @property
    def is_gated(self) -> bool:
        return self.act is not None and self.act.is_gated

    @property
    def pairs_rows(self) -> bool:
        """Whether row 2 i + h of a tile of B is row i of half h."""
        return self.is_gated and not self.interleaved

    @property
    def pairs_scales(self) -> bool:
        """Whether a kernel before this one puts block scales of B into that order."""
        return False

    @property
    def is_alike(self) -> bool:
        """Whether both operands have elements of one width and the same block scales."""
        return (self.kind.bits, self.kind.scale) == (self.b_kind.bits, self.b_kind.scale)

    @property
    def decoded_to(self) -> OperandKind | None:
        """What codes are decoded to: a plain A's kind, bf16 beside codes of a byte; None if not."""
        if self.b_kind.fmt is None or self.is_alike:
            return None
        if self.kind.fmt is None:
            return self.kind
        return OPERANDS["bfloat16"] if self.b_kind.bits < self.kind.bits else None

    @property
    def m_kind(self) -> OperandKind:
        return self.b_kind if self.tile.swap_ab else self.kind

    @property
    def n_kind(self) -> OperandKind:
        return self.kind if self.tile.swap_ab else self.b_kind

    @property
    def instruction_k(self) -> int:
        return self.kind.instruction_k

    @property
    @abc.abstractmethod
    def k_blocks(self) -> int:
        """Instructions along K for one stage of shared memory."""

    @property
    def ragged_k(self) -> bool:
        """Whether K begins and ends at any row; otherwise it starts at a slot or at 0."""
        return self.grouping == "k_grouped" and not self.kind.has_slots

    @property
    def takes_scale_tiles(self) -> bool:
        """Whether fp32 block scales come as tiles of E8M0."""
        return False

    @property
    def loads_row_scales(self) -> bool:
        """Whether the kernel reads fp32 block scales of A."""
        return self.kind.has_row_scales and not self.takes_scale_tiles

    @property
    def mn_major(self) -> tuple[bool, bool]:
        """Whether operands M and N are contiguous along M and N instead of along K."""
        a = self.grouping == "k_grouped" and not self.kind.is_transposed
        b = a or self.transpose_b
        return (b, a) if self.tile.swap_ab else (a, b)

    @property
    def writes_zeros(self) -> bool:
        """Whether there are tiles of which nothing is multiplied."""
        return self.zero_tail or self.grouping == "k_grouped" and not self.accumulate

    def can_implement(self, problem: GemmProblem) -> Support:
        """Whether the kernel takes ``problem``: the one statement of its constraints."""
        mine = (self.operand, self.grouping, self.out_dtype)
        asked = (problem.operand, problem.grouping, problem.out_dtype)
        if asked != mine:
            return Support(False, f"compiled for {' '.join(mine)}, not {' '.join(asked)}")
        if problem.groups < 1 or problem.rows < 1:
            return Support(False, "needs at least one group and one row")
        align = N_ALIGN * (1 + self.is_gated)
        if problem.n < 1 or problem.n % align:
            return Support(False, f"N must be a positive multiple of {align}, got {problem.n}")
        width = problem.n // (1 + self.is_gated)
        if (
            self.result is not None
            and operand_of(self.result).has_row_scales
            and width % QUANTIZED_COLS
        ):
            return Support(
                False,
                f"a result in {self.quantizes_to} has whole {QUANTIZED_COLS} columns, got {width}",
            )
        if not self.has_blocks(self.tile):
            return Support(
                False,
                f"no whole blocks of {self.quantizes_to} after {self.activation} in {self.tile}",
            )
        if self.pairs_rows and self.b_kind.is_block_scaled and not self.pairs_scales:
            if self.b_kind.has_row_scales and not self.b_kind.has_squares:
                return Support(
                    False,
                    "fp32 block scales of B's single rows are not taken by turns: interleave B",
                )
            if problem.n % (2 * SF_TILE_ROWS):
                return Support(
                    False,
                    f"halves of B must have whole {SF_TILE_ROWS} rows beside block scales: interleave B",
                )
        if self.grouping == "m_grouped":
            align = max(self.kind.k_align, self.b_kind.k_align)
            if problem.k < 1 or problem.k % align:
                return Support(False, f"K must be a positive multiple of {align}, got {problem.k}")
        else:
            # Rows of elements, or of their scales, that TMA can address.
            align = N_ALIGN if self.mn_major[0] or self.loads_row_scales else 1
            if problem.m < 1 or problem.m % align:
                return Support(
                    False, f"columns of A must be a positive multiple of {align}, got {problem.m}"
                )
            if self.ragged_k and problem.rows > RAGGED_ROWS:
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
        return problem.groups * ceil_div(problem.m, self.tile.rows) * cols
