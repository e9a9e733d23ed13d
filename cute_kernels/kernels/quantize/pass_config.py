"""Configurations of kernels that run before or after quantizers: reductions, offsets, updates."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from .prologue import DTYPE_BYTES, Grouping, Prologue


@dataclasses.dataclass(frozen=True)
class AmaxConfig:
    """max |x| of each row, of each group, or of both, from one read.

    Attributes:
        dtype: Data type of the elements.
        grouping: ``"ragged"`` or ``"uniform"``.
        per_row: Write the amax of each row.
        per_group: Write the amax of each group.
        arch: Name of the architecture.
        prologue: Activation of the elements, if any.
        keeps_nan: True if the amax of numbers with a NaN is NaN, see ``Format.amaxes_keep_nan``.
    """

    dtype: str
    grouping: Grouping = "ragged"
    per_row: bool = False
    per_group: bool = True
    arch: str = "sm_100a"
    prologue: Prologue | None = None
    keeps_nan: bool = False

    #: The compiled function takes (x, offs, row_amax, group_amax, num_sms). row_amax: (T,) fp32,
    #: group_amax: (G,) fp32, each None if it is not written. Rows of the tail are not written; an
    #: empty group gets 0.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.amax:AmaxReducer"


@dataclasses.dataclass(frozen=True)
class AdamWConfig:
    """An AdamW step on fp32 master weights, and the amaxes of their groups.

    Attributes:
        gradient: Data type of the gradients.
        arch: Name of the architecture.
        keeps_nan: As in ``AmaxConfig``.
    """

    gradient: str
    arch: str = "sm_100a"
    keeps_nan: bool = False

    #: The compiled function takes (master, *update, group_amax, num_sms), see ``adamw.Update``.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.adamw:AdamWKernel"


@dataclasses.dataclass(frozen=True)
class OffsetsConfig:
    """End offsets of groups from their sizes.

    Attributes:
        splits: Data type of the sizes, ``"int32"`` or ``"int64"``.
        out: Data type of the offsets.
    """

    splits: str = "int64"
    out: str = "int32"

    #: The compiled function takes (splits, out, multiplier). splits, out: (G,); multiplier: the
    #: factor of every offset.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.offsets:OffsetsKernel"


@dataclasses.dataclass(frozen=True)
class DelayedConfig:
    """The update of delayed scaling.

    Attributes:
        is_max: Compute scales from the largest amax of the history, else from the latest.
        takes_amax: True if the amaxes of the present step are an input.
        skip_nonfinite: True if an amax that is infinite or NaN counts as 0.
    """

    is_max: bool = True
    takes_amax: bool = False
    skip_nonfinite: bool = False

    #: The compiled function takes (amax_history, scale, amax, largest). amax_history: (L, n) fp32.
    #: scale, amax: (n,) fp32 with n > 0; amax is None unless ``takes_amax``. largest: the number
    #: that amaxes are scaled to.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.delayed_scaling:DelayedKernel"


@dataclasses.dataclass(frozen=True)
class DbiasConfig:
    """Column sums of ragged groups.

    Attributes:
        dtype: Data type of dy.
        vectorized: True if rows are a multiple of 16 bytes long and are read 16 bytes at a time;
            otherwise element by element.
    """

    dtype: str
    vectorized: bool = True

    #: The compiled function takes (dy, offs, dbias, num_sms). dy: (T, N), contiguous. offs: (G,)
    #: int32. dbias: (G, N) fp32.
    kernel: ClassVar[str] = "cute_kernels.kernels.quantize.dbias:DbiasReducer"

    @property
    def columns_per_lane(self) -> int:
        """Columns that a lane loads at once."""
        return 16 // DTYPE_BYTES[self.dtype] if self.vectorized else 1
