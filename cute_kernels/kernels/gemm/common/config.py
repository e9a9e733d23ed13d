"""Common base of the configurations of all grouped GEMM kernels.

A configuration is the spec of a kernel (``runtime.spec``). Group boundaries and the number of SMs
are not in it: they may differ from launch to launch.

Configurations say what is legal, in rules (``rules.Rule``): ``field_rules``, ``tile_rules`` and
``problem_rules``. The ``choose`` modules say which legal tile is preferred, and why. They import
configurations, never the other way round.
"""

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.capability import Support, why_result_unsupported
from cute_kernels.formats import Format, parse
from cute_kernels.formats.activations import Activation, parse_activation
from cute_kernels.layout.shapes import SF_TILE_ROWS, ceil_div

from .operand_kinds import DTYPE_BYTES, OPERANDS, OperandKind, operand_of
from .problem import (
    N_ALIGN,
    RAGGED_ROWS,
    GemmGrouping,
    GemmProblem,
    RowRange,
    TileShape,
)
from .rules import Rule, check_rules

#: Columns of a block of a quantized output with fp32 block scales.
QUANTIZED_COLS = 128
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class GemmConfig(abc.ABC):
    """One variant of the grouped GEMM: what it computes, and how an architecture tiles it.

    Attributes:
        operand: Name of the operand kind of A, see ``OPERANDS``.
        grouping: "m_grouped" or "k_grouped".
        out_dtype: Dtype of the output, or to which it is rounded before it is quantized.
        row_scaled: True if A has one global scale per row instead of one per group.
        bias_dtype: Dtype of a (G, N) bias. None means no bias.
        has_alpha: True if there is one fp32 factor per group.
        accumulate: True if the product is added to the output.
        transpose_b: True if B of an m_grouped product is (G, K, N) instead of (G, N, K).
        zero_tail: True if rows of the tail become zeros.
        tile: Tile that the tensor core works on.
        b_operand: Name of the operand kind of B. None if it is the same as that of A.
        pow2_scales: True if the fp32 block scales of both operands are powers of two.
        gathered: True if rows of A (in a k_grouped product, of B) are read by an index.
        activation: Activation of the product. The product is rounded to ``out_dtype`` first.
        interleaved: True if rows of B for the two inputs of a gated activation alternate. Otherwise
            they are two halves, and a tile has rows of both.
        stores_preactivation: True if the input of the activation is stored, too. Its columns have
            the order of the rows of B.
        quantizes_to: Text of the format to which the activation's result, rounded to ``out_dtype``,
            is quantized rowwise. The output is then codes and block scales. The rows of the
            block scales are in slots.
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
    stores_preactivation: bool = False
    quantizes_to: str | None = None

    #: Architecture that it runs on.
    arch: ClassVar[str]
    #: The class of the kernel, which the runtime imports.
    kernel: ClassVar[str]
    #: The tiles that an architecture's kernel is built for.
    tile_shapes: ClassVar[tuple[TileShape, ...]]
    #: Number of buffers for the blocks of output that an epilogue stages.
    num_store_stage: ClassVar[int] = 2
    #: Number of tiles that the scheduler is ahead.
    num_sched_stage: ClassVar[int] = 4

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: A field or the tile is invalid; the message has the rule and the value.
        """
        if not (support := check_rules(self.field_rules())):
            raise ValueError(support.reason)
        if reason := self.why_unsupported(self.tile):
            raise ValueError(f"this product cannot have the tile {self.tile}: {reason}")

    def field_rules(self) -> Iterator[Rule]:
        """Yield the rules of all fields. The rules of the tile are apart, see ``tile_rules``."""
        yield from self._known_names()
        yield from self._operand_rules()
        yield from self._output_rules()

    def _known_names(self) -> Iterator[Rule]:
        """Yield the rules of fields that name something of a table."""
        tables: dict[str, Mapping[str, Any]] = {"operand": OPERANDS, "out_dtype": DTYPE_BYTES}
        optional: dict[str, Mapping[str, Any]] = {"b_operand": OPERANDS, "bias_dtype": DTYPE_BYTES}
        for name, known in (tables | optional).items():
            value = getattr(self, name)
            if value not in known and (name in tables or value is not None):
                yield Rule(False, name, value, f"{name} must be one of {', '.join(known)}")
        groupings = ("m_grouped", "k_grouped")
        holds = self.grouping in groupings
        yield Rule(holds, "grouping", self.grouping, "grouping must be m_grouped or k_grouped")
        holds = self.tile in self.tile_shapes
        yield Rule(holds, "tile", self.tile, "tile must be one of tile_shapes")

    def _operand_rules(self) -> Iterator[Rule]:
        """Yield the rules of both operands and of how they are read."""
        is_m_grouped = self.grouping == "m_grouped"
        yield Rule(
            self.is_alike or self.decoded_to is not None and is_m_grouped,
            "b_operand",
            self.b_operand,
            f"{self.operand} is not multiplied by {self.b_operand}",
        )
        yield Rule(
            not self.row_scaled or self.kind.global_scale_factor is not None and is_m_grouped,
            "row_scaled",
            self.row_scaled,
            "row_scaled needs operands of an m_grouped product with a global scale",
        )
        yield Rule(
            not self.transpose_b or not self.b_kind.is_transposed and is_m_grouped,
            "transpose_b",
            self.transpose_b,
            "transpose_b needs an m_grouped product of operands without a transposed copy",
        )
        yield Rule(
            not self.pow2_scales or self.kind.has_row_scales,
            "pow2_scales",
            self.pow2_scales,
            f"{self.operand} has no fp32 block scales",
        )
        is_plain = self.kind.fmt is None and (
            self.b_kind.fmt is None or self.decoded_to is not None
        )
        yield Rule(
            not self.gathered or is_plain,
            "gathered",
            self.gathered,
            "rows can be gathered by an index from plain operands only",
        )
        yield Rule(
            not (self.kind.has_squares and self.b_kind.has_squares),
            "b_operand",
            self.b_operand or self.operand,
            "one operand must have a scale for each row",
        )

    def _output_rules(self) -> Iterator[Rule]:
        """Yield the rules of the output, and of what is added to it or done with it."""
        is_k_grouped = self.grouping == "k_grouped"
        yield Rule(
            self.bias_dtype is None or not is_k_grouped,
            "bias_dtype",
            self.bias_dtype,
            "a k_grouped product takes no bias",
        )
        yield Rule(
            not self.zero_tail or not (is_k_grouped or self.accumulate),
            "zero_tail",
            self.zero_tail,
            "zero_tail needs an m_grouped product that does not accumulate",
        )
        yield Rule(
            self.activation is None or not (is_k_grouped or self.accumulate or self.transpose_b),
            "activation",
            self.activation,
            "activation needs an m_grouped product without accumulate and transpose_b",
        )
        yield Rule(
            not self.stores_preactivation or self.activation is not None,
            "stores_preactivation",
            self.stores_preactivation,
            "stores_preactivation needs an activation",
        )
        yield Rule(
            not self.interleaved or self.is_gated,
            "interleaved",
            self.interleaved,
            "interleaved needs a gated activation",
        )
        yield Rule(
            self.quantizes_to is None
            or self.activation is not None
            and not self.stores_preactivation,
            "quantizes_to",
            self.quantizes_to,
            "quantizes_to needs an activation, and the input of the activation is not stored",
        )
        if self.result is not None:
            reason = why_result_unsupported("grouped_gemm", self.result, self.arch)
            yield Rule(not reason, "quantizes_to", self.quantizes_to, reason)

    @abc.abstractmethod
    def tile_rules(self, tile: Any) -> Iterator[Rule]:
        """Yield the rules of ``tile``, one of ``tile_shapes``, for the other fields."""

    def why_unsupported(self, tile: TileShape) -> str:
        """Return why this configuration cannot have a tile of ``tile_shapes``, or '' if it can."""
        return check_rules(self.tile_rules(tile)).reason

    @classmethod
    @abc.abstractmethod
    def any_tile(cls, grouping: GemmGrouping) -> TileShape:
        """Return a tile that every product of a grouping can have."""

    @property
    def handled_rows(self) -> RowRange:
        """Row tiles of an m_grouped product that this kernel takes. By default it takes all."""
        return RowRange(self.tile.rows, 0, self.tile.rows)

    @property
    def uses_dynamic_scheduling(self) -> bool:
        """True if clusters take tiles from a ``counter``."""
        return False

    @property
    def balances_row_tiles(self) -> bool:
        """True if the rows of a group are divided evenly over its tiles.

        Otherwise all tiles but the last are full.
        """
        return False

    def has_whole_blocks(self, tile: Any) -> bool:
        """Return True unless a tile would cut a block of a quantized output."""
        return self.quantizes_to is None

    @property
    def kind(self) -> OperandKind:
        """Operand kind of A."""
        return OPERANDS[self.operand]

    @property
    def b_kind(self) -> OperandKind:
        """Operand kind of B."""
        return OPERANDS[self.b_operand or self.operand]

    @property
    def act(self) -> Activation | None:
        """Record of the activation, if any."""
        return None if self.activation is None else parse_activation(self.activation)

    @property
    def result(self) -> Format | None:
        """Format of a quantized output, if any."""
        return None if self.quantizes_to is None else parse(self.quantizes_to)

    @property
    def per_element(self) -> int:
        """Columns of the result per element of the output: the codes of a byte, or 1."""
        return 1 if self.result is None else self.result.element.per_byte

    @property
    def is_gated(self) -> bool:
        """True if the activation has two inputs."""
        return self.act is not None and self.act.is_gated

    @property
    def interleaves_halves(self) -> bool:
        """True if row 2 i + h of a tile of B is row i of half h."""
        return self.is_gated and not self.interleaved

    @property
    def interleaves_scales(self) -> bool:
        """True if a kernel before this one puts block scales of B into that order."""
        return False

    @property
    def is_alike(self) -> bool:
        """True if both operands have elements of one width and the same block scales."""
        return (self.kind.bits, self.kind.scale) == (self.b_kind.bits, self.b_kind.scale)

    @property
    def decoded_to(self) -> OperandKind | None:
        """Kind to which codes are decoded, or None if they are not.

        It is the kind of a plain A, or bf16 if A has 8-bit codes.
        """
        if self.b_kind.fmt is None or self.is_alike:
            return None
        if self.kind.fmt is None:
            return self.kind
        return OPERANDS["bfloat16"] if self.b_kind.bits < self.kind.bits else None

    @property
    def m_kind(self) -> OperandKind:
        """Operand kind of operand M."""
        return self.b_kind if self.tile.swap_ab else self.kind

    @property
    def n_kind(self) -> OperandKind:
        """Operand kind of operand N."""
        return self.kind if self.tile.swap_ab else self.b_kind

    @property
    def instruction_k(self) -> int:
        """Elements of K of one MMA instruction."""
        return self.kind.instruction_k

    @property
    @abc.abstractmethod
    def k_blocks(self) -> int:
        """Instructions along K for one stage of shared memory."""

    @property
    def ragged_k(self) -> bool:
        """True if K begins and ends at any row. Otherwise it starts at a slot or at 0."""
        return self.grouping == "k_grouped" and not self.kind.has_slots

    @property
    def reads_scale_tiles(self) -> bool:
        """True if fp32 block scales come as tiles of E8M0."""
        return False

    @property
    def loads_row_scales(self) -> bool:
        """True if the kernel reads fp32 block scales of A."""
        return self.kind.has_row_scales and not self.reads_scale_tiles

    @property
    def mn_major(self) -> tuple[bool, bool]:
        """True for operands M and N if they are contiguous along M and N instead of along K."""
        a = self.grouping == "k_grouped" and not self.kind.is_transposed
        b = a or self.transpose_b
        return (b, a) if self.tile.swap_ab else (a, b)

    @property
    def writes_zeros(self) -> bool:
        """True if there are tiles with nothing to multiply, whose output is zeros."""
        return self.zero_tail or self.grouping == "k_grouped" and not self.accumulate

    def can_implement(self, problem: GemmProblem) -> Support:
        """Return whether the kernel can compute ``problem``, and if not, why.

        Only this method and the rules of fields and of the tile decide what is possible.
        ``kernels.gemm.choose`` decides what is preferred.
        """
        return check_rules(self.problem_rules(problem))

    def problem_rules(self, problem: GemmProblem) -> Iterator[Rule]:
        """Yield the rules of a problem's kinds and sizes."""
        for name in ("operand", "grouping", "out_dtype"):
            compiled, value = getattr(self, name), getattr(problem, name)
            yield Rule(value == compiled, name, value, f"compiled for {name} {compiled}")
        yield Rule(problem.groups >= 1, "groups", problem.groups, "needs at least one group")
        yield Rule(problem.rows >= 1, "rows", problem.rows, "needs at least one row")
        yield from self._column_rules(problem)
        yield from self._block_rules(problem)
        if self.grouping == "m_grouped":
            align = max(self.kind.k_align, self.b_kind.k_align)
            yield _multiple("K", problem.k, align)
        else:
            # TMA must be able to address rows of elements, or of their scales.
            align = N_ALIGN if self.mn_major[0] or self.loads_row_scales else 1
            yield _multiple("M", problem.m, align, "M, the columns of A,")
            if self.ragged_k:
                limit = "a k_grouped product has at most 2^30 rows"
                yield Rule(problem.rows <= RAGGED_ROWS, "rows", problem.rows, limit)
        num_tiles = self._num_tiles(problem)
        limit = "a product has at most 2^31 - 1 tiles"
        yield Rule(num_tiles <= _MAX_INT32, "number of tiles", num_tiles, limit)

    def _column_rules(self, problem: GemmProblem) -> Iterator[Rule]:
        """Yield the rules of the columns of the output."""
        halves = 1 + self.is_gated
        yield _multiple("N", problem.n, N_ALIGN * halves)
        if self.result is not None and operand_of(self.result).has_row_scales:
            width = problem.n // halves
            yield Rule(
                width % QUANTIZED_COLS == 0,
                "columns",
                width,
                f"a result in {self.quantizes_to} has whole blocks of {QUANTIZED_COLS} columns",
            )

    def _block_rules(self, problem: GemmProblem) -> Iterator[Rule]:
        """Yield the rules of blocks of a quantized output, and of B's rows with block scales."""
        yield Rule(
            self.has_whole_blocks(self.tile),
            "tile",
            self.tile,
            f"a tile must have whole blocks of {self.quantizes_to} after {self.activation}",
        )
        if not (self.interleaves_halves and self.b_kind.is_block_scaled) or self.interleaves_scales:
            return
        yield Rule(
            self.b_kind.has_squares or not self.b_kind.has_row_scales,
            "interleaved",
            self.interleaved,
            "rows of B with fp32 block scales of their own must be interleaved",
        )
        yield Rule(
            problem.n % (2 * SF_TILE_ROWS) == 0,
            "N",
            problem.n,
            f"each half of B must have a multiple of {SF_TILE_ROWS} rows beside block scales, "
            "unless B is interleaved",
        )

    def _num_tiles(self, problem: GemmProblem) -> int:
        """Return an upper bound of the number of tiles, whatever the groups."""
        cols = ceil_div(problem.n, self.tile.cols)
        if self.grouping == "m_grouped":
            groups = problem.groups + self.zero_tail
            return (problem.rows // self.tile.rows + groups) * cols
        return problem.groups * ceil_div(problem.m, self.tile.rows) * cols


def _multiple(argument: str, value: int, align: int, subject: str = "") -> Rule:
    """Return the rule that a size is positive and a multiple of ``align``."""
    requirement = f"{subject or argument} must be a positive multiple of {align}"
    return Rule(value >= 1 and value % align == 0, argument, value, requirement)
