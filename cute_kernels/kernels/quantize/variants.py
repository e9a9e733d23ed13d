"""Quantization kernels that the ops use, for compilation ahead of time."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.arch import get_arch
from cute_kernels.capability import support
from cute_kernels.formats import FP8, MXFP8, NVFP4, Format, FP8Block
from cute_kernels.formats.base import FP8_ELEMENTS

from .choose import choose_dequantize_config, choose_tile_config, prefers_rows
from .config import (
    AdamWTileConfig,
    DequantizeConfig,
    GradientConfig,
    QuantizeProblem,
    RowsConfig,
    TileConfig,
    TokensConfig,
    TokenValuesConfig,
    ValuesConfig,
)
from .pass_config import AdamWConfig, AmaxConfig, DbiasConfig, DelayedConfig, OffsetsConfig
from .prologue import DTYPE_BYTES, Grouping, Prologue

Config = (
    AdamWConfig
    | AmaxConfig
    | DbiasConfig
    | DelayedConfig
    | DequantizeConfig
    | GradientConfig
    | OffsetsConfig
    | RowsConfig
    | TileConfig
)


def _with_nan_scales(*formats: Any) -> tuple[Any, ...]:
    """Return the records, then the same records with ``nan_scales``.

    ``grouped.quantize`` uses the former, recipes use the latter.
    """
    return (*formats, *(dataclasses.replace(fmt, nan_scales=True) for fmt in formats))


#: Formats that are compiled for all dtypes and groupings, row by row and in tiles.
_FORMATS: tuple[Format, ...] = _with_nan_scales(
    NVFP4(),
    NVFP4(row_scaled=True),
    NVFP4(block=(16, 16)),
    *(FP8(dtype) for dtype in FP8_ELEMENTS),
)
#: Formats that are compiled for bf16 and one grouping only: recipes use the ragged ones for
#: activations and gradients, and the uniform ones for weights.
_FROM_BF16: tuple[tuple[Format, Grouping], ...] = (
    *(
        (fmt, "ragged")
        for fmt in _with_nan_scales(
            NVFP4(hadamard=True), NVFP4(hadamard=True, stochastic_rounding=True)
        )
    ),
    *((fmt, "ragged") for fmt in _with_nan_scales(FP8Block())),
    *((fmt, "uniform") for fmt in _with_nan_scales(FP8Block(block=(128, 128)))),
)
#: Formats of a quantized SwiGLU; training needs both directions.
_ACTIVATED: tuple[Format, ...] = _with_nan_scales(
    NVFP4(), NVFP4(row_scaled=True), FP8(), FP8Block(), MXFP8()
)
_GROUPINGS: tuple[Grouping, ...] = ("ragged", "uniform")
#: (rowwise, columnwise).
_DIRECTIONS = ((True, False), (False, True), (True, True))


def kernel_specs(arch: str) -> Iterator[Config]:
    """Yield the configurations to compile for the architecture ``arch``."""
    if support("compute_offsets", None, arch):
        for splits, out in itertools.product(("int32", "int64"), repeat=2):
            yield OffsetsConfig(splits, out)
    if support("grouped_dbias", None, arch):
        for dtype, vectorized in itertools.product(DTYPE_BYTES, (True, False)):
            yield DbiasConfig(dtype, vectorized)
    if support("delayed_scaling_update", FP8(scaling="delayed"), arch):
        for is_max, takes_amax in itertools.product((True, False), repeat=2):
            yield DelayedConfig(is_max, takes_amax)
            yield DelayedConfig(is_max, takes_amax, skip_nonfinite=True)
    for dtype in ("bfloat16", "float32"):
        yield AdamWConfig(dtype, arch)
        for fmt in (FP8Block(block=(128, 128)), MXFP8()):
            master = QuantizeProblem("float32", fmt.k_multiple, "uniform")
            yield choose_tile_config(
                fmt, master, arch, AdamWTileConfig, columnwise=True, gradient=dtype
            )
    for dtype, grouping in itertools.product(DTYPE_BYTES, _GROUPINGS):
        if support("grouped_amax", None, arch):
            yield from _amax_reducers(dtype, grouping, arch)
        for fmt in _FORMATS:
            if support("grouped_dequantize", fmt, arch):
                yield from _dequantizers(fmt, dtype, grouping)
            if support("grouped_quantize", fmt, arch):
                yield from _row_quantizers(fmt, dtype, grouping, arch)
                yield from _tile_quantizers(fmt, dtype, grouping, arch)
    for fmt, grouping in _FROM_BF16:
        if support("grouped_quantize", fmt, arch):
            yield from _row_quantizers(fmt, "bfloat16", grouping, arch)
            yield from _tile_quantizers(fmt, "bfloat16", grouping, arch)
    for fmt in _ACTIVATED:
        if support("grouped_quantize", fmt, arch, activation=True):
            problem = QuantizeProblem(
                dtype="bfloat16" if fmt.rounds_activation else "float32",
                cols=fmt.k_multiple,
                prologue=Prologue("bfloat16", "swiglu"),
            )
            yield choose_tile_config(fmt, problem, arch, columnwise=True, compute_amax=True)
    for fmt in _with_nan_scales(FP8Block(), MXFP8(), FP8(torch.float8_e5m2, "delayed")):
        if support("moe_quantize_gradient", fmt, arch):
            scaled = (
                FP8(scaling="delayed", nan_scales=fmt.nan_scales) if fmt.has_given_scale else fmt
            )
            yield GradientConfig(fmt.text, scaled.text, "bfloat16", "swiglu", arch)
    yield from _gathered_quantizers(arch)


def _amax_reducers(dtype: str, grouping: Grouping, arch: str) -> Iterator[AmaxConfig]:
    """Yield the reductions that run before quantizers."""
    for keeps_nan in (False, True):
        # For row quantizers that take amaxes of groups; sm_100a quantizes those formats in tiles.
        if not keeps_nan or get_arch(arch).tuned_by == "time":
            yield AmaxConfig(dtype, grouping, arch=arch, keeps_nan=keeps_nan)
        # For tiles with amaxes of rows, if the caller gives the amaxes of groups.
        yield AmaxConfig(
            dtype, grouping, per_row=True, per_group=False, arch=arch, keeps_nan=keeps_nan
        )


def _gathered_quantizers(arch: str) -> Iterator[Config]:
    """Yield the quantizers of tokens that have several rows each, with 1025 to 8192 columns."""
    prologue = Prologue("bfloat16", None, gathered=True)
    for fmt in _with_nan_scales(FP8Block(), NVFP4(row_scaled=True)):
        if not support("grouped_quantize", fmt, arch):
            continue
        is_expanded = not get_arch(arch).has_block_scaled_mma and fmt.element.per_byte > 1
        classes = [TokensConfig]
        if is_expanded and support("grouped_gemm", fmt, arch):
            classes.append(TokenValuesConfig)
        for config_class, warps in itertools.product(classes, (1, 2, 4)):
            yield config_class(
                fmt.text, "bfloat16", warps_per_row=warps, arch=arch, prologue=prologue
            )
        if fmt.global_scale is None:
            problem = QuantizeProblem("bfloat16", fmt.k_multiple, prologue=prologue)
            for rowwise in (False, True):
                yield choose_tile_config(fmt, problem, arch, rowwise=rowwise, columnwise=True)


def _dequantizers(fmt: Format, dtype: str, grouping: Grouping) -> Iterator[DequantizeConfig]:
    """Yield the dequantizers of both directions, unless they are those of another format."""
    for columnwise in (False, True):
        config = choose_dequantize_config(fmt, dtype, grouping, columnwise)
        if config.format == fmt.text:
            yield config


def _row_quantizers(fmt: Format, dtype: str, grouping: Grouping, arch: str) -> Iterator[RowsConfig]:
    """Yield the row quantizers of all team sizes, and those that write values for the GEMM."""
    # The rowwise copy does not depend on a transform of the columnwise one.
    if fmt.is_2d or fmt.is_transformed:
        return
    for warps, rows in RowsConfig.teams:
        config = RowsConfig(fmt.text, dtype, grouping, warps, rows_per_warp=rows, arch=arch)
        shortest = QuantizeProblem(dtype, fmt.k_multiple, config.grouping)
        if prefers_rows(config) and config.can_implement(shortest):
            yield config
        # Tensor cores without block scales take values, not codes that share bytes.
        is_expanded = (
            grouping == "ragged"
            and fmt.element.per_byte > 1
            and not get_arch(arch).has_block_scaled_mma
        )
        if (
            is_expanded
            and support("grouped_gemm", fmt, arch)
            and (warps, rows) in ValuesConfig.teams
        ):
            yield ValuesConfig(**vars(config))


def _tile_quantizers(
    fmt: Format, dtype: str, grouping: Grouping, arch: str
) -> Iterator[TileConfig]:
    """Yield the tile quantizers of all directions, with given and with computed amaxes."""
    compute_amax_options = (False,) if fmt.global_scale is None else (False, True)
    for (rowwise, columnwise), compute_amax in itertools.product(_DIRECTIONS, compute_amax_options):
        problem = QuantizeProblem(dtype, fmt.k_multiple, grouping)
        config = choose_tile_config(
            fmt,
            problem,
            arch,
            rowwise=rowwise,
            columnwise=columnwise,
            compute_amax=compute_amax,
        )
        # Otherwise the kernel is another format's, too.
        if config.format == fmt.text:
            yield config
