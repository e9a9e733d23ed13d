"""Every quantization kernel that the ops use, for compilation ahead of time."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from cute_kernels.capability import support
from cute_kernels.formats import NVFP4
from cute_kernels.quantize.config import (
    DTYPE_BYTES,
    AmaxConfig,
    DbiasConfig,
    DequantizeConfig,
    OffsetsConfig,
    RowScaledConfig,
    TileConfig,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["kernel_specs"]

Config = AmaxConfig | DbiasConfig | DequantizeConfig | OffsetsConfig | RowScaledConfig | TileConfig

_DIRECTIONS = ((True, False), (False, True), (True, True))


def kernel_specs(arch: str) -> Iterator[Config]:
    """Configurations of the kernels for ``"sm_90a"`` or ``"sm_100a"``."""
    if support("compute_offsets", None, arch):
        for splits, out in itertools.product(("int32", "int64"), repeat=2):
            yield OffsetsConfig(splits, out)
    if support("grouped_dbias", None, arch):
        for dtype, vectorized in itertools.product(DTYPE_BYTES, (True, False)):
            yield DbiasConfig(dtype, vectorized)
    for dtype, grouping in itertools.product(DTYPE_BYTES, ("ragged", "uniform")):
        if support("grouped_amax", None, arch):
            yield AmaxConfig(dtype, grouping, arch=arch)
        if support("grouped_dequantize", NVFP4(), arch):
            for row_scaled, columnwise in ((False, False), (True, False), (False, True)):
                yield DequantizeConfig(dtype, grouping, row_scaled, columnwise)
        if support("grouped_quantize", NVFP4(), arch):
            # For row-scaled tiles whose amaxes of groups are given.
            yield AmaxConfig(dtype, grouping, per_row=True, per_group=False, arch=arch)
            for warps, rows in RowScaledConfig.teams:
                config = RowScaledConfig(dtype, grouping, warps, rows_per_warp=rows, arch=arch)
                yield config
                if arch == "sm_90a":
                    yield dataclasses.replace(config, group_amax=True)
            yield from _tiles(dtype, grouping, arch)
            if (arch, grouping) == ("sm_90a", "ragged"):
                yield from _values(dtype)


def _values(dtype: str) -> Iterator[RowScaledConfig]:
    for (warps, rows), group_amax in itertools.product(RowScaledConfig.teams[1:], (False, True)):
        yield RowScaledConfig(
            dtype,
            "ragged",
            warps,
            rows_per_warp=rows,
            group_amax=group_amax,
            as_values=True,
            arch="sm_90a",
        )


def _tiles(dtype: str, grouping: str, arch: str) -> Iterator[TileConfig]:
    flags = itertools.product(_DIRECTIONS, ((False, False), (True, False), (False, True)), (0, 1))
    for (rowwise, columnwise), (row_scaled, square_blocks), compute_amax in flags:
        if rowwise or not row_scaled:
            yield TileConfig(
                dtype,
                grouping,
                rowwise=rowwise,
                columnwise=columnwise,
                row_scaled=row_scaled,
                square_blocks=square_blocks,
                compute_amax=bool(compute_amax),
                arch=arch,
            )
