"""What a quantization kernel is compiled for, and which problems it takes.

A configuration holds facts of code generation only, so it can be hashed, pickled and used as a
cache key; shapes, group boundaries and the number of SMs stay dynamic. It names the kernel and does
not import it: kernels need the CuTe DSL, configurations do not.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from cute_kernels.capability import Support
from cute_kernels.formats import NVFP4

__all__ = [
    "AmaxConfig",
    "DbiasConfig",
    "DequantizeConfig",
    "OffsetsConfig",
    "QuantizeProblem",
    "RowScaledConfig",
    "TileConfig",
]

Grouping = Literal["ragged", "uniform"]
#: Bytes of one element, by the dtype names that configurations use.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_BLOCK = NVFP4.sf_vec_size


@dataclasses.dataclass(frozen=True)
class QuantizeProblem:
    """The facts of a call that decide which kernels can run it.

    Attributes:
        dtype: name of the input's dtype, such as ``"bfloat16"``.
        cols: K.
        grouping: ``"ragged"`` for (T, K) with offs, ``"uniform"`` for (G, N, K).
    """

    dtype: str
    cols: int
    grouping: Grouping = "ragged"


def _supported_input(dtype: str, cols: int) -> Support:
    if dtype not in DTYPE_BYTES:
        return Support(False, f"input dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype}")
    if cols <= 0 or cols % _BLOCK:
        return Support(False, f"K must be a positive multiple of {_BLOCK}, got {cols}")
    return Support(True)


@dataclasses.dataclass(frozen=True)
class RowScaledConfig:
    """Rowwise NVFP4, row by row, from one read of the input: row-scaled, or with given amaxes.

    A team of ``warps_per_row`` warps holds one row in registers at a time, or a team of one warp
    holds several short rows.

    Attributes:
        dtype: name of the input's dtype.
        grouping: how the rows fall into groups.
        warps_per_row: warps of a team: 1, 2, 4, 8 or 16.
        num_stages: how many times what a team holds is in flight.
        rows_per_warp: rows that a team of one warp holds: 1, 2, 4 or 8.
        group_amax: the second level is per group and given, instead of per row and a result.
        as_values: write code times block scale in fp16, as the GEMM of sm_90a takes it, instead of
            codes and scales.
        arch: whose instructions it uses, ``"sm_90a"`` or ``"sm_100a"``.
    """

    dtype: str
    grouping: Grouping = "ragged"
    warps_per_row: int = 4
    num_stages: int = 3
    rows_per_warp: int = 1
    group_amax: bool = False
    as_values: bool = False
    arch: str = "sm_100a"

    #: Warps that convert; one more loads.
    num_compute_warps = 16
    #: 4096 bytes of input a warp: four 1x16 blocks a lane for 16-bit types, two for fp32.
    bytes_per_warp = 4096
    #: What ``choose`` chooses from, by rising ``max_cols``: (warps_per_row, rows_per_warp).
    teams = ((1, 8), (1, 4), (1, 2), (1, 1), (2, 1), (4, 1), (8, 1), (16, 1))

    @property
    def num_teams(self) -> int:
        """Rows that a CTA works on at the same time."""
        return self.num_compute_warps // self.warps_per_row

    @property
    def max_cols(self) -> int:
        """The longest row that a team holds."""
        held = self.warps_per_row * self.bytes_per_warp // DTYPE_BYTES[self.dtype]
        return held // self.rows_per_warp

    @classmethod
    def choose(
        cls,
        problem: QuantizeProblem,
        arch: str = "sm_100a",
        group_amax: bool = False,
        as_values: bool = False,
    ) -> RowScaledConfig:
        """The configuration with the fewest lanes a row that holds the row."""
        # The values of eight neighbouring blocks are put in order by eight lanes.
        for warps, rows in cls.teams[1:] if as_values else cls.teams:
            config = cls(
                problem.dtype,
                problem.grouping,
                warps,
                rows_per_warp=rows,
                group_amax=group_amax,
                as_values=as_values,
                arch=arch,
            )
            if problem.cols <= config.max_cols:
                break
        return config

    def can_implement(self, problem: QuantizeProblem) -> Support:
        """Whether the kernel takes ``problem``."""
        if (problem.dtype, problem.grouping) != (self.dtype, self.grouping):
            return Support(False, f"compiled for {self.dtype} {self.grouping} groups")
        if self.rows_per_warp > 1 and self.warps_per_row > 1:
            return Support(False, "only a team of one warp holds several rows")
        if self.as_values and (self.arch, self.grouping) != ("sm_90a", "ragged"):
            return Support(False, "values are for ragged operands on sm_90a")
        if self.as_values and self.rows_per_warp > 4:
            return Support(False, "values of a row take at least eight lanes")
        supported = _supported_input(problem.dtype, problem.cols)
        if supported and problem.cols > self.max_cols:
            return Support(
                False, f"K = {problem.cols} exceeds the {self.max_cols} that a team holds"
            )
        return supported

    @property
    def kernel(self) -> str:
        """The kernel's class.

        The compiled function takes (x, offs, amax, codes, scales, num_sms): x (T, K) or (G, N, K)
        contiguous; offs (G,) int32, None when uniform; amax (T,) fp32, or (G,); codes (T, K/2) or
        (G, N, K/2) uint8 of padded pitch; scales (tiles, K/64, 512) or (G, tiles, K/64, 512) uint8.
        With ``as_values`` codes are values (T, K up to a multiple of 128) fp16 in the order of
        ``gemm.sm90.fp4.expand``, and scales None.
        """
        if self.as_values:
            return "cute_kernels.quantize.nvfp4_values:RowValuesQuantizer"
        return "cute_kernels.quantize.nvfp4_rows:RowScaledQuantizer"


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """NVFP4 in one or both directions, tile by tile.

    Attributes:
        dtype: name of the input's dtype.
        grouping: how the rows fall into groups.
        rowwise: write the rowwise copy.
        columnwise: write the columnwise copy.
        row_scaled: the rowwise copy has one second-level scale a row.
        square_blocks: one scale for each 16x16 block, the same in both directions.
        compute_amax: the amaxes are results: a first kernel computes them, so the input is read
            twice, the second time from L2 where it fits.
        arch: whose instructions it uses, ``"sm_90a"`` or ``"sm_100a"``.
    """

    dtype: str
    grouping: Grouping = "ragged"
    rowwise: bool = True
    columnwise: bool = False
    row_scaled: bool = False
    square_blocks: bool = False
    compute_amax: bool = False
    arch: str = "sm_100a"

    #: The compiled function takes (x, offs, row_amax, group_amax, codes, scales, codes_t,
    #: scales_t, num_sms), with None for what the configuration does not use: row_amax (T,) fp32 is
    #: used when row-scaled, group_amax (G,) fp32 when columnwise or not row-scaled. x needs at
    #: least one row.
    kernel: ClassVar[str] = "cute_kernels.quantize.nvfp4_tiles:TileQuantizer"

    #: Warps that convert one 128x128 tile together.
    warps_per_team = 4
    #: Slot tiles that a column of tiles goes through before the next begins.
    band = 8

    @property
    def tile_bytes(self) -> int:
        """Bytes of a 128x128 tile of the input."""
        return 128 * 128 * DTYPE_BYTES[self.dtype]

    @property
    def num_stages(self) -> int:
        """Tiles in flight: 192 KiB of them."""
        return 6 * 32768 // self.tile_bytes

    @property
    def num_teams(self) -> int:
        """Tiles that a CTA converts at the same time; at least half of ``num_stages``."""
        return 4 if self.num_stages > 4 else 2

    @property
    def uses_group_amax(self) -> bool:
        """Whether there are amaxes of groups."""
        return self.columnwise or not self.row_scaled

    @property
    def tables_factors(self) -> bool:
        """Whether a team keeps the encode factors of its group's scales in shared memory."""
        return self.uses_group_amax and self.arch == "sm_90a"

    def can_implement(self, problem: QuantizeProblem) -> Support:
        """Whether the kernel takes ``problem``."""
        if (problem.dtype, problem.grouping) != (self.dtype, self.grouping):
            return Support(False, f"compiled for {self.dtype} {self.grouping} groups")
        if not (self.rowwise or self.columnwise):
            return Support(False, "neither direction is asked for")
        if self.row_scaled and (self.square_blocks or not self.rowwise):
            return Support(False, "row_scaled needs the rowwise direction and 1x16 blocks")
        return _supported_input(problem.dtype, problem.cols)


@dataclasses.dataclass(frozen=True)
class AmaxConfig:
    """max |x| of each row, of each group, or both, from one read.

    Attributes:
        dtype: name of the input's dtype.
        grouping: how the rows fall into groups.
        per_row: write one amax a row.
        per_group: write one amax a group.
        arch: whose instructions it uses, ``"sm_90a"`` or ``"sm_100a"``.
    """

    dtype: str
    grouping: Grouping = "ragged"
    per_row: bool = False
    per_group: bool = True
    arch: str = "sm_100a"

    #: The compiled function takes (x, offs, row_amax, group_amax, num_sms): row_amax (T,) and
    #: group_amax (G,) fp32, None where not written. Rows of the tail are left alone; an empty
    #: group gives 0.
    kernel: ClassVar[str] = "cute_kernels.quantize.amax:AmaxReducer"

    def can_implement(self, problem: QuantizeProblem) -> Support:
        """Whether the kernel takes ``problem``."""
        if (problem.dtype, problem.grouping) != (self.dtype, self.grouping):
            return Support(False, f"compiled for {self.dtype} {self.grouping} groups")
        return _supported_input(problem.dtype, problem.cols)


@dataclasses.dataclass(frozen=True)
class OffsetsConfig:
    """End offsets of groups from their sizes.

    Attributes:
        splits: ``"int32"`` or ``"int64"``.
        out: likewise.
    """

    splits: str = "int64"
    out: str = "int32"

    #: The compiled function takes (splits, out, multiplier): splits (G,), out (G,), and the
    #: factor of every offset.
    kernel: ClassVar[str] = "cute_kernels.quantize.offsets:OffsetsKernel"

    def can_implement(self, splits: str, out: str) -> Support:
        """Whether the kernel takes these dtypes."""
        if (splits, out) != (self.splits, self.out):
            return Support(False, f"compiled for {self.splits} splits and {self.out} offsets")
        if {splits, out} <= {"int32", "int64"}:
            return Support(True)
        return Support(False, f"splits and offsets must be int32 or int64, got {splits} and {out}")


@dataclasses.dataclass(frozen=True)
class DbiasConfig:
    """Column sums of ragged groups.

    Attributes:
        dtype: name of the input's dtype.
        vectorized: rows are a multiple of 16 bytes long and are read 16 bytes at a time; otherwise
            element by element.
    """

    dtype: str
    vectorized: bool = True

    #: The compiled function takes (dy, offs, dbias, num_sms): dy (T, N) contiguous, offs (G,)
    #: int32, dbias (G, N) fp32.
    kernel: ClassVar[str] = "cute_kernels.quantize.dbias:DbiasReducer"

    @property
    def columns_per_lane(self) -> int:
        """Columns that one load covers."""
        return 16 // DTYPE_BYTES[self.dtype] if self.vectorized else 1

    @classmethod
    def choose(cls, dtype: str, cols: int) -> DbiasConfig:
        """The configuration for rows of ``cols`` elements."""
        return cls(dtype, cols * DTYPE_BYTES[dtype] % 16 == 0)

    def can_implement(self, dtype: str, cols: int) -> Support:
        """Whether the kernel takes rows of ``cols`` elements of ``dtype``."""
        if dtype != self.dtype:
            return Support(False, f"compiled for {self.dtype}")
        if dtype not in DTYPE_BYTES:
            return Support(False, f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype}")
        if cols <= 0 or cols % self.columns_per_lane:
            multiple = self.columns_per_lane
            return Support(False, f"N must be a positive multiple of {multiple}, got {cols}")
        return Support(True)


@dataclasses.dataclass(frozen=True)
class DequantizeConfig:
    """One direction of an NVFP4 tensor back to a plain one.

    Attributes:
        dtype: name of the result's dtype.
        grouping: how the rows fall into groups.
        row_scaled: the second level is per row; rowwise only.
        columnwise: which direction.
    """

    dtype: str
    grouping: Grouping = "ragged"
    row_scaled: bool = False
    columnwise: bool = False

    #: The compiled function takes (codes, scales, amax, offs, out, fresh, num_sms): codes, scales
    #: and amax as the quantizers write them, rowwise or columnwise; offs (G,) int32, None when
    #: uniform; out (T, K) or (G, N, K) contiguous; fresh, not 0 to write zeros to the tail.
    kernel: ClassVar[str] = "cute_kernels.quantize.dequantize:Dequantizer"

    def can_implement(self, problem: QuantizeProblem) -> Support:
        """Whether the kernel takes ``problem``, whose dtype is the result's."""
        if (problem.dtype, problem.grouping) != (self.dtype, self.grouping):
            return Support(False, f"compiled for {self.dtype} {self.grouping} groups")
        if self.row_scaled and self.columnwise:
            return Support(False, "the columnwise copy has no second level per row")
        return _supported_input(problem.dtype, problem.cols)
