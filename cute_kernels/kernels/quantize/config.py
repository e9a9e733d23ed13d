"""What a quantization kernel is compiled for, and which problems it takes.

Configurations are specs of kernels (``runtime.spec``). A format is its canonical text, such as
``"nvfp4:row_scaled"``; what it says decides what a kernel does.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from cute_kernels.capability import Support, UnsupportedError, refuses
from cute_kernels.formats import E4M3, Format, parse
from cute_kernels.formats.activations import parse_activation

from .prologue import DTYPE_BYTES, Prologue

if TYPE_CHECKING:
    from typing_extensions import Self

Grouping = Literal["ragged", "uniform"]
#: What says that a problem is not taken, and why.
_no = functools.partial(Support, False)
#: K is a multiple of this whatever the format: 32 bytes of 16-bit input, which lanes load at once.
K_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class QuantizeProblem:
    """The facts of a call that decide which kernels can run it.

    ``dtype`` is that of the plain side, or of what its prologue makes, ``cols`` K; ``grouping`` is
    ``"ragged"`` for (T, K) with offs, ``"uniform"`` for (G, N, K).
    """

    dtype: str
    cols: int
    grouping: Grouping = "ragged"
    prologue: Prologue | None = None


def _is_per_row(format: str, columnwise: bool = False) -> bool:
    level = parse(format).global_scale_for(columnwise)
    return level is not None and level.per == "row"


def _takes(config: RowsConfig, problem: QuantizeProblem) -> Support:
    """Whether dtype and grouping are those of ``config``, and K is one that kernels take."""
    if (problem.dtype, problem.grouping) != (config.dtype, config.grouping):
        return _no(f"compiled for {config.dtype} {config.grouping} groups")
    if problem.prologue != config.prologue:
        return _no("compiled for another activation")
    if problem.dtype not in DTYPE_BYTES:
        names = ", ".join(DTYPE_BYTES)
        return _no(f"input dtype must be one of {names}, got {problem.dtype}")
    k_multiple = config.fmt.k_multiple
    if problem.cols <= 0 or problem.cols % k_multiple:
        return _no(f"K must be a positive multiple of {k_multiple}, got {problem.cols}")
    return Support(True)


@dataclasses.dataclass(frozen=True)
class CopyConfig:
    """What all kernels of copies of a format are compiled for: its canonical text, and the dtype of
    the plain side.

    Raises:
        UnsupportedError: the kernel does not take what the record of the format says.
    """

    format: str
    dtype: str
    grouping: Grouping = "ragged"

    def __post_init__(self) -> None:
        if reason := refuses(self.fmt):
            raise UnsupportedError(f"no kernel of {self.format}: {reason}")

    @property
    def fmt(self) -> Format:
        return parse(self.format)


@dataclasses.dataclass(frozen=True)
class RowsConfig(CopyConfig):
    """The rowwise copy, row by row, from one read of the input.

    A second level per row is a result; one per group is given. A team of ``warps_per_row`` (1, 2,
    4, 8 or 16) warps holds one row in registers at a time, or a team of one warp holds
    ``rows_per_warp`` (1, 2, 4 or 8) short rows; ``num_stages`` times what a team holds is in
    flight.
    """

    warps_per_row: int = 4
    num_stages: int = 3
    rows_per_warp: int = 1
    arch: str = "sm_100a"
    prologue: Prologue | None = None

    #: The compiled function takes (x, index, offs, amax, codes, scales, scale_inv, scale, num_sms):
    #: x (T, K) or (G, N, K) contiguous, as wide as the prologue asks; index (R,) int32 where it
    #: gathers, else None; offs (G,) int32, None when uniform; amax (T,) fp32 where it is computed,
    #: (G,) where given, None where there is no second level; codes and scales as ``layout.buffers``
    #: says, scales None where blocks have none; scale_inv and scale (G,) fp32 results where the
    #: format keeps them, else None.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.row_quantizer:RowsQuantizer"
    #: Whether ``x`` is read in the order of tokens that rows are made of.
    by_token: ClassVar[bool] = False
    #: What ``choose`` chooses from, by rising ``max_cols``: (warps_per_row, rows_per_warp).
    teams: ClassVar[tuple[tuple[int, int], ...]] = (
        *((1, 8), (1, 4), (1, 2), (1, 1)),
        *((2, 1), (4, 1), (8, 1), (16, 1)),
    )

    @property
    def computes_amax(self) -> bool:
        return _is_per_row(self.format)

    @property
    def is_light(self) -> bool:
        """Whether elements are only multiplied and rounded: then few warps have much of a row each."""
        return self.arch == "sm_100a" and self.fmt.scale is None and self.prologue is None

    @property
    def num_compute_warps(self) -> int:
        return 8 if self.is_light else 16

    @property
    def bytes_per_warp(self) -> int:
        """Bytes of input a warp: as a rule four 1x16 blocks a lane for 16-bit types, two for fp32.

        Elements that take more bytes than they have, or more registers to make, are fewer.
        """
        return 8192 if self.is_light else 4096

    @property
    def takes_amax(self) -> bool:
        return self.fmt.global_scale is not None and not self.computes_amax

    @property
    def is_preferred(self) -> bool:
        """Whether rowwise copies are made this way where tile by tile would do, too.

        Rows with amaxes of their own take one read instead of two. Others are 0 to 6% faster on an
        H200, of SwiGLU twice as fast (perf/results/quantize_h200.md). sm_100a was not measured;
        tile by tile it executes fewer instructions where blocks have scales.
        """
        return self.computes_amax or self.arch == "sm_90a" or self.fmt.scale is None

    @property
    def num_teams(self) -> int:
        return self.num_compute_warps // self.warps_per_row

    @property
    def max_cols(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        if self.prologue is not None:
            size = max(size, self.prologue.bytes_read)
        return self.warps_per_row * self.bytes_per_warp // size // self.rows_per_warp

    @classmethod
    def choose(cls, fmt: Format, problem: QuantizeProblem, arch: str = "sm_100a") -> Self:
        """The configuration with the fewest lanes a row that holds the row."""
        fmt = fmt.for_direction(columnwise=False)
        for warps, rows in cls.teams:
            what: dict[str, Any] = {
                "rows_per_warp": rows,
                "arch": arch,
                "prologue": problem.prologue,
            }
            if (
                arch == "sm_90a"
                and problem.prologue is not None
                and problem.prologue.activation is not None
            ):
                what["num_stages"] = 2  # a table of factors takes the room of the third
            config = cls(fmt.text, problem.dtype, problem.grouping, warps, **what)
            if config.can_implement(problem):
                break
        return config

    def can_implement(self, problem: QuantizeProblem) -> Support:
        if self.rows_per_warp > 1 and self.warps_per_row > 1:
            return _no("only a team of one warp holds several rows")
        if self.warps_per_row > self.num_compute_warps:
            return _no(f"there are {self.num_compute_warps} warps")
        fmt = self.fmt
        if fmt.is_2d:
            return _no(f"{self.format} has blocks of several rows")
        if fmt.scale is not None and fmt.scale.vec_size // K_MULTIPLE * self.rows_per_warp > 32:
            return _no(f"blocks of {self.format} take more lanes than a row has")
        if fmt.is_stochastic:
            return _no(f"random bytes of {self.format} are drawn tile by tile")
        if fmt.searches_scale:
            return _no(f"scales of {self.format} are chosen tile by tile")
        if fmt.has_given_scale:
            return _no(f"{self.format} takes scales of groups and gives their amaxes")
        if (
            fmt.scale is not None
            and self.max_cols // fmt.scale.vec_size * fmt.scale.element.bits % 32
        ):
            return _no(f"scales of a row of {self.max_cols} are no whole words")
        supported = _takes(self, problem)
        if supported and problem.cols > self.max_cols:
            return _no(f"K = {problem.cols} exceeds the {self.max_cols} that a team holds")
        return supported


@dataclasses.dataclass(frozen=True)
class ValuesConfig(RowsConfig):
    """``RowsConfig``, but what comes out is fp16 values instead of codes and scales.

    Code times block scale, as the GEMM of sm_90a takes it. For ragged operands on sm_90a.
    """

    #: The compiled function takes what that of ``RowsConfig`` does, with None after the codes, and
    #: for those values (T, K up to a multiple of 128) fp16 in the order of the GEMM's expansion.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.row_values:RowValuesQuantizer"
    #: The values of eight neighbouring blocks are put in order by eight lanes.
    teams: ClassVar[tuple[tuple[int, int], ...]] = RowsConfig.teams[1:]

    def can_implement(self, problem: QuantizeProblem) -> Support:
        if (self.arch, self.grouping) != ("sm_90a", "ragged"):
            return _no("values are for ragged operands on sm_90a")
        if (scale := self.fmt.scale) is None or (scale.element, scale.vec_size) != (E4M3, 16):
            return _no(f"values are of codes with e4m3 scales of 16, not of {self.format}")
        if self.rows_per_warp > 4:
            return _no("values of a row take at least eight lanes")
        return super().can_implement(problem)


@dataclasses.dataclass(frozen=True)
class TokensConfig(RowsConfig):
    """``RowsConfig`` of rows by an index, but token by token: one read of each for all of its rows."""

    #: The compiled function takes what that of ``RowsConfig`` does, and for the index its inverse
    #: (T, k) int32.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.token_quantizer:TokensQuantizer"
    by_token: ClassVar[bool] = True
    teams: ClassVar[tuple[tuple[int, int], ...]] = tuple(
        team for team in RowsConfig.teams if team[1] == 1
    )

    def can_implement(self, problem: QuantizeProblem) -> Support:
        if self.prologue is None or not self.prologue.gathered:
            return _no("tokens are rows by an index")
        if self.rows_per_warp > 1:
            return _no("a team has one token at a time")
        if self.takes_amax:
            return _no(f"rows of a token differ in {self.format}, by their groups")
        return super().can_implement(problem)


@dataclasses.dataclass(frozen=True)
class TokenValuesConfig(TokensConfig, ValuesConfig):
    """``ValuesConfig``, token by token."""

    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.token_quantizer:TokenValuesQuantizer"


@dataclasses.dataclass(frozen=True)
class TileConfig(CopyConfig):
    """One or both copies, tile by tile, from one read once the amaxes are known.

    With ``compute_amax`` they are results: a first kernel computes them, so the input is read
    twice, the second time from L2 where it fits. With ``is_member`` others are quantized by the
    same seed, and have blocks before it.
    """

    rowwise: bool = True
    columnwise: bool = False
    compute_amax: bool = False
    arch: str = "sm_100a"
    prologue: Prologue | None = None
    is_member: bool = False

    #: The compiled function takes (x, index, offs, row_amax, group_amax, codes, scales, codes_t,
    #: scales_t, scale_inv, scale, amax, column_amax, seed, drawn, drawn_t, num_sms), with None for
    #: what the configuration or the format does not use: row_amax (T,) fp32 is used when
    #: ``uses_row_amax``, group_amax (G,) fp32 when ``uses_group_amax``, the scales where the format
    #: takes them; scale_inv, scale and, where the format takes its scales, amax (G,) fp32 are
    #: results; column_amax (G,) fp32 is used when ``has_own_columns``; seed (2,) int64 is of
    #: stochastic formats, drawn and drawn_t, if ``is_member``, blocks before each copy's first one.
    #: x needs at least one row.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.tiles.kernel:TileQuantizer"
    #: Warps that convert one 128x128 tile together.
    warps_per_team: ClassVar[int] = 4
    #: Slot tiles that a column of tiles goes through before the next begins.
    band: ClassVar[int] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fmt.element.per_byte == 1 and self.uses_row_amax:
            raise UnsupportedError(
                f"no kernel makes {self.format} tile by tile: its rows have second levels of their own"
            )

    @classmethod
    def choose(
        cls, fmt: Format, problem: QuantizeProblem, arch: str = "sm_100a", **what: Any
    ) -> TileConfig:
        facts: dict[str, Any] = {**what, "arch": arch, "prologue": problem.prologue}
        config = cls(fmt.text, problem.dtype, problem.grouping, **facts)
        if fmt.global_scale is None or fmt.has_given_scale:
            config = dataclasses.replace(config, compute_amax=False)
        if config.rowwise and config.columnwise:
            return config
        return dataclasses.replace(config, format=fmt.for_direction(config.columnwise).text)

    @property
    def has_own_columns(self) -> bool:
        """Whether both copies are written, and the columnwise one has amaxes of its own."""
        return self.rowwise and self.columnwise and self.fmt.is_transformed

    @property
    def tile_bytes(self) -> int:
        return 128 * 128 * DTYPE_BYTES[self.dtype]

    @property
    def makes_tiles(self) -> bool:
        """Whether a team makes the elements of its tile, instead of the loader loading them."""
        return self.prologue is not None and self.prologue.activation is not None

    @property
    def copies_rows(self) -> bool:
        """Whether warps load rows by an index."""
        return self.prologue is not None and self.prologue.gathered and not self.makes_tiles

    @property
    def num_loaders(self) -> int:
        """Warps that load, each for its own stages and teams."""
        return 2 if self.copies_rows and DTYPE_BYTES[self.dtype] == 2 else 1

    @property
    def num_tiles(self) -> int:
        """Tiles in shared memory: those in flight, 192 KiB of them, or one a team that makes it."""
        return self.num_teams if self.makes_tiles else 6 * 32768 // self.tile_bytes

    @property
    def num_stages(self) -> int:
        """Tiles that the loader has described; at most two a team."""
        return 2 * self.num_teams if self.makes_tiles else self.num_tiles

    @property
    def num_teams(self) -> int:
        """Tiles that a CTA converts at the same time; at least half of ``num_stages``."""
        if self.makes_tiles:
            # More have no registers for codes of four bits, and no shared memory for tiles of fp32.
            return 4 if self.fmt.element.bits == 8 and self.tile_bytes <= 32768 else 3
        return 4 if self.num_tiles > 4 else 2

    @property
    def uses_row_amax(self) -> bool:
        return _is_per_row(self.format)

    @property
    def uses_group_amax(self) -> bool:
        """Whether there are amaxes, or given scales, of groups; those of columns always are."""
        if self.fmt.global_scale is None:
            return False
        return self.columnwise or not self.uses_row_amax


@dataclasses.dataclass(frozen=True)
class AdamWTileConfig(TileConfig):
    """``TileConfig`` of fp32 masters that a step of AdamW updates first, by gradients of this
    dtype.
    """

    gradient: str = "bfloat16"

    #: The compiled function takes what that of ``TileConfig`` does, for the index what
    #: ``adamw.Update`` says.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.adamw:AdamWTileQuantizer"
    makes_tiles: ClassVar[bool] = True  # type: ignore


@dataclasses.dataclass(frozen=True)
class GradientConfig:
    """The gradient of an activation in both directions and p times its result columnwise, from one
    read.

    ``format`` is that of the gradient, ``scaled_format`` that of p times the result; both are
    rounded to ``dtype``, that of the inputs, first.
    """

    format: str
    scaled_format: str
    dtype: str
    activation: str
    arch: str

    #: The compiled function takes (x, grad, offs, weight, pair, given, scaled_given, codes, scales,
    #: codes_t, scales_t, scale_inv, scale, amax, of p a None, None, then codes_t to amax, sums,
    #: dweight, num_sms, counter): x (R, W), grad (R, N), weight and dweight (T * k,) fp32, pair
    #: (R,) int32, sums (tiles along N, R) fp32 to work in; a counter, as of GEMMs. Of a format that
    #: takes scales these are given (G,) fp32, of which scale_inv, scale and amax (G,) are results,
    #: else None.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.tiles.gradient:GradientQuantizer"
    #: Tiles are taken from a counter: some have few rows.
    mixes_groups: ClassVar[bool] = True
    num_stages: ClassVar[int] = 2
    band: ClassVar[int] = TileConfig.band

    @property
    def has_own_columns(self) -> bool:
        """Whether p times the result has scales that are given."""
        return parse(self.scaled_format).has_given_scale

    @property
    def copies(self) -> tuple[TileConfig, TileConfig]:
        """What becomes of tiles of the gradient, and of those of p times the result."""
        both = TileConfig(self.format, self.dtype, columnwise=True, arch=self.arch)
        return both, dataclasses.replace(both, format=self.scaled_format, rowwise=False)

    @property
    def num_tiles(self) -> int:
        """128x128 tiles of the gradient to one of the result."""
        return 1 + parse_activation(self.activation).is_gated

    @property
    def tile_bytes(self) -> int:
        return (self.num_tiles + 1) * self.copies[0].tile_bytes

    @property
    def has_room(self) -> bool:
        """Whether a table of sigmoids fits; beside two stages of three tiles and tiles of scales it
        does not.
        """
        return self.num_tiles == 1 or not any(copy.fmt.has_scale_tiles for copy in self.copies)

    def can_implement(self, cols: int) -> Support:
        for fmt in map(parse, (self.format, self.scaled_format)):
            if (
                fmt.is_2d
                or fmt.element.per_byte > 1
                or (fmt.global_scale is not None and not fmt.has_given_scale)
            ):
                return _no(
                    f"codes are bytes with scales that are given or of parts of a row, not {fmt.text}"
                )
        if DTYPE_BYTES[self.dtype] != 2:
            return _no("inputs have 16 bits")
        if self.num_tiles > 1 and cols % 128:
            return _no("halves are a multiple of 128 columns")
        return Support(True)


@dataclasses.dataclass(frozen=True)
class AmaxConfig:
    """max |x| of each row, of each group, or both, from one read; the rest as ``RowsConfig``."""

    dtype: str
    grouping: Grouping = "ragged"
    per_row: bool = False
    per_group: bool = True
    arch: str = "sm_100a"
    prologue: Prologue | None = None
    #: The amax of numbers with a NaN among them is NaN, see ``Format.amaxes_keep_nan``.
    keeps_nan: bool = False

    #: The compiled function takes (x, offs, row_amax, group_amax, num_sms): row_amax (T,) and
    #: group_amax (G,) fp32, None where not written. Rows of the tail are left alone; an empty
    #: group gives 0.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.amax:AmaxReducer"


@dataclasses.dataclass(frozen=True)
class AdamWConfig:
    """A step of AdamW on fp32 masters by gradients of a dtype, and amaxes of their groups."""

    gradient: str
    arch: str = "sm_100a"
    #: As ``AmaxConfig`` has it.
    keeps_nan: bool = False

    #: The compiled function takes (master, *update, group_amax, num_sms).
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.adamw:AdamWKernel"


@dataclasses.dataclass(frozen=True)
class OffsetsConfig:
    """End offsets of groups, ``"int32"`` or ``"int64"`` as their sizes."""

    splits: str = "int64"
    out: str = "int32"

    #: The compiled function takes (splits, out, multiplier): splits (G,), out (G,), and the
    #: factor of every offset.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.offsets:OffsetsKernel"


@dataclasses.dataclass(frozen=True)
class DelayedConfig:
    """The update of delayed scaling.

    With ``is_max`` scales follow from the largest amax of the history, else from the last one; with
    ``takes_amax`` amaxes of the present step are given besides. With ``skip_nonfinite`` an amax
    that is infinite or NaN counts as 0.
    """

    is_max: bool = True
    takes_amax: bool = False
    skip_nonfinite: bool = False

    #: The compiled function takes (amax_history, scale, amax, largest): amax_history (L, n), scale
    #: (n,) and amax (n,) fp32, None where not given, n not 0; largest, what amaxes are scaled to.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.delayed_scaling:DelayedKernel"


@dataclasses.dataclass(frozen=True)
class DbiasConfig:
    """Column sums of ragged groups.

    With ``vectorized`` rows are a multiple of 16 bytes long and are read 16 bytes at a time;
    otherwise element by element.
    """

    dtype: str
    vectorized: bool = True

    #: The compiled function takes (dy, offs, dbias, num_sms): dy (T, N) contiguous, offs (G,)
    #: int32, dbias (G, N) fp32.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.dbias:DbiasReducer"

    @property
    def columns_per_lane(self) -> int:
        return 16 // DTYPE_BYTES[self.dtype] if self.vectorized else 1

    @classmethod
    def choose(cls, dtype: str, cols: int) -> DbiasConfig:
        return cls(dtype, cols * DTYPE_BYTES[dtype] % 16 == 0)


@dataclasses.dataclass(frozen=True)
class DequantizeConfig(CopyConfig):
    """One copy of a quantized tensor, columnwise or rowwise, back to a plain one."""

    columnwise: bool = False

    #: The compiled function takes (codes, scales, level, offs, out, fresh, num_sms): codes and
    #: scales as the quantizers write them, rowwise or columnwise, no scales where blocks have none;
    #: level (T,) fp32, or (G,): the amax, or scale_inv where the format keeps one, None where there
    #: is no second level; offs (G,) int32, None when uniform; out (T, K) or (G, N, K) contiguous;
    #: fresh, not 0 to write zeros to the tail.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.dequantize:Dequantizer"

    @classmethod
    def choose(
        cls, fmt: Format, dtype: str, grouping: Grouping, columnwise: bool
    ) -> DequantizeConfig:
        """The configuration that reads a copy of ``fmt``; formats with equal bytes share one."""
        return cls(fmt.for_decoding.for_direction(columnwise).text, dtype, grouping, columnwise)

    @property
    def row_level(self) -> bool:
        return _is_per_row(self.format, self.columnwise)
