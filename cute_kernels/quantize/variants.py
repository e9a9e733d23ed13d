"""Every quantization kernel that the ops use, for compilation ahead of time."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, get_args

from cute_kernels.capability import support
from cute_kernels.formats import NVFP4
from cute_kernels.quantize.config import (
    DTYPE_BYTES,
    AmaxConfig,
    Grouping,
    OffsetsConfig,
    QuantizeProblem,
    RowScaledConfig,
    TileConfig,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["kernel_specs"]

Config = AmaxConfig | OffsetsConfig | RowScaledConfig | TileConfig

#: Lengths of rows among which each choice of ``RowScaledConfig`` has one.
_ROW_LENGTHS = tuple(16 << i for i in range(13))
_DIRECTIONS = ((True, False), (False, True), (True, True))


def kernel_specs(arch: str) -> Iterator[Config]:
    """Configurations of the kernels for ``"sm_90a"`` or ``"sm_100a"``."""
    if support("compute_offsets", None, arch):
        for splits, out in itertools.product(("int32", "int64"), repeat=2):
            yield OffsetsConfig(splits, out)
    for dtype, grouping in itertools.product(DTYPE_BYTES, get_args(Grouping)):
        if support("grouped_amax", None, arch):
            yield AmaxConfig(dtype, grouping)
        if support("grouped_quantize", NVFP4(), arch):
            # For row-scaled tiles whose amaxes of groups are given.
            yield AmaxConfig(dtype, grouping, per_row=True, per_group=False)
            yield from _row_scaled(dtype, grouping)
            yield from _tiles(dtype, grouping)


def _row_scaled(dtype: str, grouping: Grouping) -> Iterator[RowScaledConfig]:
    problems = (QuantizeProblem(dtype, cols, grouping) for cols in _ROW_LENGTHS)
    chosen = ((RowScaledConfig.choose(problem), problem) for problem in problems)
    yield from dict.fromkeys(config for config, problem in chosen if config.can_implement(problem))


def _tiles(dtype: str, grouping: Grouping) -> Iterator[TileConfig]:
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
            )
