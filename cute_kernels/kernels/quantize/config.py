"""Configurations of the quantization kernels, and the problems that each of them can run.

A configuration is the spec of one compiled kernel (``cute_kernels.runtime.spec``). It stores a
format as its canonical text, such as ``"nvfp4:row_scaled"``; the format's record decides what the
kernel computes.

This module says what is possible: ``can_implement`` returns a ``Support`` with the reason.
``choose`` picks one of the possible configurations and holds the measured preferences.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from cute_kernels.arch import get_arch
from cute_kernels.capability import Support, why_unsupported
from cute_kernels.formats import E4M3, Format, parse
from cute_kernels.formats.activations import parse_activation
from cute_kernels.records import UnsupportedError

from .prologue import DTYPE_BYTES, Grouping, Prologue

#: Return an unsupported ``Support`` with a reason.
_no = functools.partial(Support, False)
#: K is a multiple of this for every format: a lane loads 32 bytes of 16-bit input at once.
K_MULTIPLE = 16
#: Shared memory of a CTA, in bytes, that tiles in flight leave to scales, factors and barriers.
_RESERVED_BYTES = 35 * 1024


@dataclasses.dataclass(frozen=True)
class QuantizeProblem:
    """Properties of a call that decide which kernels can run it.

    Attributes:
        dtype: Data type of the plain tensor, or of the elements that the prologue computes.
        cols: Columns of the elements, K.
        grouping: ``"ragged"`` for a (T, K) tensor with offs, ``"uniform"`` for (G, N, K).
        prologue: Gather or activation before quantization, if any.
    """

    dtype: str
    cols: int
    grouping: Grouping = "ragged"
    prologue: Prologue | None = None


def _has_row_scale(format: str, columnwise: bool = False) -> bool:
    """Return True if one direction of the format has a global scale per row."""
    global_scale = parse(format).global_scale_for(columnwise)
    return global_scale is not None and global_scale.per == "row"


def _matches(config: RowsConfig, problem: QuantizeProblem) -> Support:
    """Check that ``config`` was compiled for the problem's dtype and grouping, and check K."""
    if (problem.dtype, problem.grouping) != (config.dtype, config.grouping):
        return _no(f"compiled for {config.dtype} {config.grouping} groups")
    if problem.prologue != config.prologue:
        return _no("compiled for another activation or gather")
    if problem.dtype not in DTYPE_BYTES:
        names = ", ".join(DTYPE_BYTES)
        return _no(f"input dtype must be one of {names}, got {problem.dtype}")
    k_multiple = config.fmt.k_multiple
    if problem.cols <= 0 or problem.cols % k_multiple:
        return _no(f"K must be a positive multiple of {k_multiple}, got {problem.cols}")
    return Support(True)


@dataclasses.dataclass(frozen=True)
class CopyConfig:
    """Fields that all kernels have which read or write quantized copies.

    Attributes:
        format: Canonical text of the format.
        dtype: Data type of the plain tensor.
        grouping: ``"ragged"`` or ``"uniform"``.

    Raises:
        UnsupportedError: No kernel supports the record of the format.
    """

    format: str
    dtype: str
    grouping: Grouping = "ragged"

    def __post_init__(self) -> None:
        if reason := why_unsupported(self.fmt):
            raise UnsupportedError(f"no kernel of {self.format}: {reason}")

    @property
    def fmt(self) -> Format:
        """Record of the format."""
        return parse(self.format)


@dataclasses.dataclass(frozen=True)
class RowsConfig(CopyConfig):
    """The rowwise copy, computed row by row from one read of the input.

    A global scale per row is an output. A global scale per group is an input.

    A team of warps holds rows in registers: either ``warps_per_row`` warps hold one row, or one
    warp holds ``rows_per_warp`` short rows. ``num_stages`` times the rows of a team are in flight.

    Attributes:
        warps_per_row: 1, 2, 4, 8 or 16.
        num_stages: Stages of the team's pipeline in shared memory.
        rows_per_warp: 1, 2, 4 or 8. More than 1 only if ``warps_per_row`` is 1.
        arch: Name of the architecture.
        prologue: Gather or activation before quantization, if any.
    """

    warps_per_row: int = 4
    num_stages: int = 3
    rows_per_warp: int = 1
    arch: str = "sm_100a"
    prologue: Prologue | None = None

    #: The compiled function takes (x, index, offs, amax, codes, scales, scale_inv, scale, num_sms).
    #: ``x``: (T, K) or (G, N, K), contiguous; its width follows from the prologue. ``index``: (R,)
    #: int32 if the prologue gathers, else None. ``offs``: (G,) int32, None if uniform. ``amax``:
    #: (T,) fp32 if the kernel computes it, (G,) fp32 if it is an input, None without a global
    #: scale. ``codes``, ``scales``: see ``layout.buffers``; ``scales`` is None if blocks have none.
    #: ``scale_inv``, ``scale``: (G,) fp32 outputs, or None if the format does not store them.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.row_quantizer:RowsQuantizer"
    #: True if teams read tokens in order and write all rows of a token, instead of row by row.
    reads_tokens: ClassVar[bool] = False
    #: The possible teams by increasing ``max_cols``: (warps_per_row, rows_per_warp).
    teams: ClassVar[tuple[tuple[int, int], ...]] = (
        (1, 8),
        (1, 4),
        (1, 2),
        (1, 1),
        (2, 1),
        (4, 1),
        (8, 1),
        (16, 1),
    )

    @property
    def computes_amax(self) -> bool:
        """True if the kernel computes the amax of each row."""
        return _has_row_scale(self.format)

    @property
    def is_light(self) -> bool:
        """True if elements are only multiplied and rounded.

        A row then needs few registers, so few warps hold long rows.
        """
        has_f32x2 = get_arch(self.arch).has_f32x2
        return has_f32x2 and self.fmt.scale is None and self.prologue is None

    @property
    def num_compute_warps(self) -> int:
        """Warps of a CTA that quantize."""
        return 8 if self.is_light else 16

    @property
    def bytes_per_warp(self) -> int:
        """Bytes of input per warp: four 1x16 blocks per lane of 16-bit types, or two of fp32.

        Light kernels hold twice as much.
        """
        return 8192 if self.is_light else 4096

    @property
    def takes_amax(self) -> bool:
        """True if the amax of each group is an input."""
        return self.fmt.global_scale is not None and not self.computes_amax

    @property
    def num_teams(self) -> int:
        """Teams of a CTA."""
        return self.num_compute_warps // self.warps_per_row

    @property
    def max_cols(self) -> int:
        """Largest K that a team holds."""
        size = DTYPE_BYTES[self.dtype]
        if self.prologue is not None:
            size = max(size, self.prologue.bytes_read)
        return self.warps_per_row * self.bytes_per_warp // size // self.rows_per_warp

    def can_implement(self, problem: QuantizeProblem) -> Support:
        """Return whether the compiled kernel can run ``problem``, and why not."""
        if self.rows_per_warp > 1 and self.warps_per_row > 1:
            return _no("only a team of one warp holds several rows")
        if self.warps_per_row > self.num_compute_warps:
            return _no(
                f"warps_per_row = {self.warps_per_row} exceeds {self.num_compute_warps} warps"
            )
        fmt = self.fmt
        if fmt.is_2d:
            return _no(f"{self.format} has blocks of several rows")
        if fmt.scale is not None and fmt.scale.vec_size // K_MULTIPLE * self.rows_per_warp > 32:
            return _no(f"blocks of {self.format} need more lanes than a row has")
        if fmt.is_stochastic:
            return _no(f"random numbers of {self.format} are generated tile by tile")
        if fmt.searches_scale:
            return _no(f"scales of {self.format} are searched tile by tile")
        if fmt.has_given_scale:
            return _no(f"{self.format} takes scales of groups and returns their amaxes")
        if (
            fmt.scale is not None
            and self.max_cols // fmt.scale.vec_size * fmt.scale.element.bits % 32
        ):
            return _no(f"the scales of a row of {self.max_cols} do not fill 32-bit words")
        supported = _matches(self, problem)
        if supported and problem.cols > self.max_cols:
            return _no(f"K = {problem.cols} exceeds the {self.max_cols} that a team holds")
        return supported


@dataclasses.dataclass(frozen=True)
class ValuesConfig(RowsConfig):
    """``RowsConfig``, but the output is fp16 values instead of codes and scales.

    A value is code times block scale, which the GEMM of sm_90a multiplies. For ragged operands on
    architectures whose tensor cores apply no block scales.
    """

    #: The compiled function takes the arguments of ``RowsConfig``, with None for the scales and the
    #: outputs after them, and fp16 values for the codes: (T, K rounded up to a multiple of 128), in
    #: the order of the GEMM's expansion.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.row_values:RowValuesQuantizer"
    #: Eight lanes together reorder the values of eight neighbouring blocks.
    teams: ClassVar[tuple[tuple[int, int], ...]] = RowsConfig.teams[1:]

    def can_implement(self, problem: QuantizeProblem) -> Support:
        """Return whether the compiled kernel can run ``problem``, and why not."""
        if self.grouping != "ragged" or get_arch(self.arch).has_block_scaled_mma:
            return _no("values are for ragged operands on sm_90a")
        if (scale := self.fmt.scale) is None or (scale.element, scale.vec_size) != (E4M3, 16):
            return _no(f"values need codes with e4m3 scales of 16, not {self.format}")
        if self.rows_per_warp > 4:
            return _no("values of a row take at least eight lanes")
        return super().can_implement(problem)


@dataclasses.dataclass(frozen=True)
class TokensConfig(RowsConfig):
    """``RowsConfig`` for gathered rows, token by token: one read of a token serves all its rows."""

    #: The compiled function takes the arguments of ``RowsConfig``, with the inverse index for the
    #: index: (T, top_k) int32, the rows of each token.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.token_quantizer:TokensQuantizer"
    reads_tokens: ClassVar[bool] = True
    teams: ClassVar[tuple[tuple[int, int], ...]] = tuple(
        team for team in RowsConfig.teams if team[1] == 1
    )

    def can_implement(self, problem: QuantizeProblem) -> Support:
        """Return whether the compiled kernel can run ``problem``, and why not."""
        if self.prologue is None or not self.prologue.gathered:
            return _no("only gathered rows belong to tokens")
        if self.rows_per_warp > 1:
            return _no("a team holds one token at a time")
        if self.takes_amax:
            return _no(f"the rows of a token differ in {self.format}, which has scales of groups")
        return super().can_implement(problem)


@dataclasses.dataclass(frozen=True)
class TokenValuesConfig(TokensConfig, ValuesConfig):
    """``ValuesConfig``, token by token."""

    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.token_quantizer:TokenValuesQuantizer"


@dataclasses.dataclass(frozen=True)
class TileConfig(CopyConfig):
    """One or both copies, computed in 128x128 tiles from one read once the amaxes are known.

    With ``compute_amax`` the amaxes are outputs: another kernel computes them first. The input is
    then read twice, the second time from L2 if it fits there.

    Attributes:
        rowwise: Write the rowwise copy.
        columnwise: Write the columnwise copy.
        compute_amax: Compute the amaxes first. Else they are inputs.
        arch: Name of the architecture.
        prologue: Gather or activation before quantization, if any.
        is_member: True if the tensor is one of several that share a seed, and takes the offset of
            its random numbers.

    Raises:
        UnsupportedError: No kernel computes such copies in tiles.
    """

    rowwise: bool = True
    columnwise: bool = False
    compute_amax: bool = False
    arch: str = "sm_100a"
    prologue: Prologue | None = None
    is_member: bool = False

    #: The compiled function takes (x, index, offs, row_amax, group_amax, codes, scales, codes_t,
    #: scales_t, scale_inv, scale, amax, column_amax, seed, rng_offset, rng_offset_t, num_sms), with
    #: None for each one that the configuration or the format does not use. ``x``: at least one
    #: row. ``row_amax``: (T,) fp32 if ``uses_row_amax``. ``group_amax``: (G,) fp32 if
    #: ``uses_group_amax``; the scales if the caller gives them. ``scale_inv``, ``scale``: (G,) fp32
    #: outputs. ``amax``: (G,) fp32 output if the caller gives scales. ``column_amax``: (G,) fp32 if
    #: ``has_column_amax``. ``seed``: (2,) int64 for stochastic formats. ``rng_offset``,
    #: ``rng_offset_t``: int64 if ``is_member``, the blocks that precede the first block of each
    #: copy.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.tiles.kernel:TileQuantizer"
    #: Warps that convert one 128x128 tile together.
    warps_per_team: ClassVar[int] = 4
    #: Slot tiles of a column of tiles that CTAs take before the next column begins.
    band: ClassVar[int] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fmt.element.per_byte == 1 and self.uses_row_amax:
            raise UnsupportedError(
                f"no kernel computes {self.format} in tiles: it has a global scale per row"
            )

    @property
    def has_column_amax(self) -> bool:
        """True if both copies are written and the columnwise copy has amaxes of its own."""
        return self.rowwise and self.columnwise and self.fmt.is_transformed

    @property
    def tile_bytes(self) -> int:
        """Bytes of a 128x128 tile in shared memory."""
        return 128 * 128 * DTYPE_BYTES[self.dtype]

    @property
    def fills_tiles(self) -> bool:
        """True if a team computes the elements of its tile, instead of a loader copying them."""
        return self.prologue is not None and self.prologue.activation is not None

    @property
    def gathers_rows(self) -> bool:
        """True if the loader warps copy rows by an index."""
        return self.prologue is not None and self.prologue.gathered and not self.fills_tiles

    @property
    def num_loaders(self) -> int:
        """Loader warps. Each has stages and teams of its own."""
        return 2 if self.gathers_rows and DTYPE_BYTES[self.dtype] == 2 else 1

    @property
    def num_tiles(self) -> int:
        """Tiles in shared memory: as many as fit, or one per team that fills its tile."""
        if self.fills_tiles:
            return self.num_teams
        return (get_arch(self.arch).smem_bytes - _RESERVED_BYTES) // self.tile_bytes

    @property
    def num_stages(self) -> int:
        """Tile descriptors in flight; at most two per team."""
        return 2 * self.num_teams if self.fills_tiles else self.num_tiles

    @property
    def num_teams(self) -> int:
        """Tiles that a CTA converts at the same time; at least half of ``num_stages``."""
        if self.fills_tiles:
            # With four teams, 4-bit codes lack registers, and fp32 tiles lack shared memory.
            return 4 if self.fmt.element.bits == 8 and self.tile_bytes <= 32768 else 3
        return 4 if self.num_tiles > 4 else 2

    @property
    def uses_row_amax(self) -> bool:
        """True if the kernel reads an amax per row."""
        return _has_row_scale(self.format)

    @property
    def uses_group_amax(self) -> bool:
        """True if the kernel reads an amax, or a given scale, per group.

        Columnwise copies never have a global scale per row.
        """
        if self.fmt.global_scale is None:
            return False
        return self.columnwise or not self.uses_row_amax


@dataclasses.dataclass(frozen=True)
class AdamWTileConfig(TileConfig):
    """``TileConfig`` of fp32 master weights that an AdamW step updates first.

    Attributes:
        gradient: Data type of the gradients.
    """

    gradient: str = "bfloat16"

    #: The compiled function takes the arguments of ``TileConfig``, with those of ``adamw.Update``
    #: for the index.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.adamw:AdamWTileQuantizer"
    fills_tiles: ClassVar[bool] = True  # type: ignore


@dataclasses.dataclass(frozen=True)
class GradientConfig:
    """The gradient of an activation in both directions, and the weighted activation columnwise.

    Both come from one read of the inputs, and both are rounded to ``dtype`` first.

    Attributes:
        format: Format of the gradient.
        scaled_format: Format of the weighted activation, p times the activation.
        dtype: Data type of the inputs.
        activation: Text of the activation.
        arch: Name of the architecture.
    """

    format: str
    scaled_format: str
    dtype: str
    activation: str
    arch: str

    #: The compiled function takes (x, grad, offs, weight, pair, given_scale, scaled_given_scale,
    #: then of the gradient codes, scales, codes_t, scales_t, scale_inv, scale, amax, then of the
    #: weighted activation None, None, codes_t, ..., amax, then sums, dweight, num_sms, counter).
    #: ``x``: (R, W). ``grad``: (R, N). ``weight``, ``dweight``: (T * top_k,) fp32. ``pair``: (R,)
    #: int32. ``sums``: (tiles along N, R) fp32, a workspace. ``given_scale``, ``scale_inv``,
    #: ``scale``, ``amax``: (G,) fp32 if the format takes scales, else None; the last three are
    #: outputs. ``counter``: int32, as of GEMMs.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.tiles.gradient:GradientQuantizer"
    #: CTAs take tiles from a counter, because some tiles have few rows.
    uses_dynamic_scheduling: ClassVar[bool] = True
    num_stages: ClassVar[int] = 2
    band: ClassVar[int] = TileConfig.band

    @property
    def has_column_amax(self) -> bool:
        """True if the weighted activation takes scales, which descriptors carry as a second one."""
        return parse(self.scaled_format).has_given_scale

    @property
    def copies(self) -> tuple[TileConfig, TileConfig]:
        """Configurations that convert tiles of the gradient and of the weighted activation."""
        gradient = TileConfig(self.format, self.dtype, columnwise=True, arch=self.arch)
        return gradient, dataclasses.replace(gradient, format=self.scaled_format, rowwise=False)

    @property
    def num_tiles(self) -> int:
        """128x128 tiles of the gradient per tile of the activation: 2 if it is gated, else 1."""
        return 1 + parse_activation(self.activation).is_gated

    @property
    def tile_bytes(self) -> int:
        """Bytes of a stage: the tiles of the gradient and one of the activation."""
        return (self.num_tiles + 1) * self.copies[0].tile_bytes

    @property
    def has_table_room(self) -> bool:
        """True if a table of sigmoids fits in shared memory.

        It does not fit if there are two stages of three tiles each and scale tiles.
        """
        return self.num_tiles == 1 or not any(copy.fmt.has_scale_tiles for copy in self.copies)

    def can_implement(self, cols: int) -> Support:
        """Return whether the compiled kernel can run ``cols`` columns (N), and why not."""
        for fmt in map(parse, (self.format, self.scaled_format)):
            if (
                fmt.is_2d
                or fmt.element.per_byte > 1
                or (fmt.global_scale is not None and not fmt.has_given_scale)
            ):
                return _no(
                    "formats must have 8-bit codes and given scales or 1D block scales, got "
                    f"{fmt.text}"
                )
        if DTYPE_BYTES[self.dtype] != 2:
            return _no(f"inputs must have 16 bits, got {self.dtype}")
        if self.num_tiles > 1 and cols % 128:
            return _no(f"columns of a gated activation must be a multiple of 128, got {cols}")
        return Support(True)


@dataclasses.dataclass(frozen=True)
class DequantizeConfig(CopyConfig):
    """One copy of a quantized tensor, columnwise or rowwise, decoded to a plain tensor."""

    columnwise: bool = False

    #: The compiled function takes (codes, scales, global_scale, offs, out, fresh, num_sms).
    #: ``codes`` and ``scales`` are as the quantizers write them. ``scales`` is None if blocks have
    #: none. ``global_scale`` is the (T,) or (G,) fp32 amax, or scale_inv if the format stores one.
    #: It is None if the format has no global scale. ``offs`` is (G,) int32, or None if uniform.
    #: ``out`` is a contiguous (T, K) or (G, N, K) tensor. If ``fresh`` is not 0, the tail becomes
    #: zeros.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.dequantize:Dequantizer"

    @property
    def has_row_scale(self) -> bool:
        """True if the copy has a global scale per row."""
        return _has_row_scale(self.format, self.columnwise)
