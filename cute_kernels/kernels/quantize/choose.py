"""Preferred configurations of the quantization kernels, with the measurements behind them.

``config`` says which configurations are possible, and imports nothing from here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from cute_kernels.arch import get_arch
from cute_kernels.formats import Format

from .config import DequantizeConfig, QuantizeProblem, RowsConfig, TileConfig
from .pass_config import DbiasConfig
from .prologue import DTYPE_BYTES, Grouping

RowsConfigT = TypeVar("RowsConfigT", bound=RowsConfig)
TileConfigT = TypeVar("TileConfigT", bound=TileConfig)


def choose_row_config(
    fmt: Format,
    problem: QuantizeProblem,
    arch: str = "sm_100a",
    config_class: type[RowsConfigT] = RowsConfig,  # type: ignore[assignment]
) -> RowsConfigT:
    """Return the configuration with the fewest lanes per row that can hold a row.

    Args:
        fmt: Record of the format.
        problem: Dtype, K, grouping and prologue of the call.
        arch: Name of the architecture.
        config_class: ``RowsConfig`` or a subclass.

    Returns:
        The configuration. If no team can hold a row, the one with the largest team, which says why
        in ``can_implement(problem)``.
    """
    fmt = fmt.for_direction(columnwise=False)
    options: dict[str, Any] = {}
    if (
        get_arch(arch).tuned_by == "time"
        and problem.prologue is not None
        and problem.prologue.activation is not None
    ):
        options["num_stages"] = 2  # a table of factors takes the place of the third stage
    for warps_per_row, rows_per_warp in config_class.teams:
        config = config_class(
            format=fmt.text,
            dtype=problem.dtype,
            grouping=problem.grouping,
            warps_per_row=warps_per_row,
            rows_per_warp=rows_per_warp,
            arch=arch,
            prologue=problem.prologue,
            **options,
        )
        if config.can_implement(problem):
            break
    return config


def prefers_rows(config: RowsConfig) -> bool:
    """Return True if a rowwise copy should be computed row by row rather than in tiles.

    If each row has its own amax, working row by row needs one read instead of two. On an H200 other
    formats are 0 to 6 % faster row by row, and twice as fast with SwiGLU
    (perf/results/quantize_h200.md). sm_100a has not been measured. In tiles it executes fewer
    instructions if blocks have scales.
    """
    is_measured = get_arch(config.arch).tuned_by == "time"
    return config.computes_amax or is_measured or config.fmt.scale is None


def choose_tile_config(
    fmt: Format,
    problem: QuantizeProblem,
    arch: str = "sm_100a",
    config_class: type[TileConfigT] = TileConfig,  # type: ignore[assignment]
    **options: Any,
) -> TileConfigT:
    """Return the configuration that computes copies in tiles.

    Calls whose kernels would be equal get the same configuration: ``compute_amax`` is dropped for
    formats without an amax to compute, and a single copy uses the record of its direction.

    Args:
        fmt: Record of the format.
        problem: Dtype, grouping and prologue of the call.
        arch: Name of the architecture.
        config_class: ``TileConfig`` or ``AdamWTileConfig``.
        options: Further fields, such as ``rowwise`` and ``columnwise``.
    """
    config = config_class(
        format=fmt.text,
        dtype=problem.dtype,
        grouping=problem.grouping,
        arch=arch,
        prologue=problem.prologue,
        **options,
    )
    if fmt.global_scale is None or fmt.has_given_scale:
        config = dataclasses.replace(config, compute_amax=False)
    if config.rowwise and config.columnwise:
        return config
    return dataclasses.replace(config, format=fmt.for_direction(config.columnwise).text)


def choose_dbias_config(dtype: str, cols: int) -> DbiasConfig:
    """Return the configuration for rows of ``cols`` columns, vectorized if their bytes allow it."""
    return DbiasConfig(dtype, vectorized=cols * DTYPE_BYTES[dtype] % 16 == 0)


def choose_dequantize_config(
    fmt: Format, dtype: str, grouping: Grouping, columnwise: bool
) -> DequantizeConfig:
    """Return the configuration that decodes a copy. Formats with equal bytes share one."""
    text = fmt.for_decoding.for_direction(columnwise).text
    return DequantizeConfig(text, dtype, grouping, columnwise)
