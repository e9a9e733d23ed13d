"""Every quantization kernel that the ops use, for compilation ahead of time."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.capability import support
from cute_kernels.formats import FP8, MXFP8, NVFP4, Format, FP8Block
from cute_kernels.formats.base import FP8_ELEMENTS

from .config import (
    DTYPE_BYTES,
    AdamWConfig,
    AdamWTileConfig,
    AmaxConfig,
    DbiasConfig,
    DelayedConfig,
    DequantizeConfig,
    GradientConfig,
    Grouping,
    OffsetsConfig,
    Prologue,
    QuantizeProblem,
    RowsConfig,
    TileConfig,
    TokensConfig,
    TokenValuesConfig,
    ValuesConfig,
)

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


def _marking(*formats: Any) -> tuple[Any, ...]:
    """Records as ``grouped.quantize`` has them, and with ``nan_scales``, as recipes do."""
    return (*formats, *(dataclasses.replace(fmt, nan_scales=True) for fmt in formats))


#: What is quantized to, row by row and tile by tile.
_FORMATS: tuple[Format, ...] = _marking(
    *(NVFP4(), NVFP4(row_scaled=True), NVFP4(block=(16, 16))),
    *(FP8(dtype) for dtype in FP8_ELEMENTS),
)
#: Of bf16 and one grouping only, as recipes have them: activations and gradients, and weights.
_FROM_BF16: tuple[tuple[Format, Grouping], ...] = (
    *(
        (fmt, "ragged")
        for fmt in _marking(NVFP4(hadamard=True), NVFP4(hadamard=True, stochastic_rounding=True))
    ),
    *((fmt, "ragged") for fmt in _marking(FP8Block())),
    *((fmt, "uniform") for fmt in _marking(FP8Block(block=(128, 128)))),
)
#: Of which SwiGLU is quantized, in both directions as training has them.
_ACTIVATED: tuple[Format, ...] = _marking(
    NVFP4(), NVFP4(row_scaled=True), FP8(), FP8Block(), MXFP8()
)
_GROUPINGS: tuple[Grouping, ...] = ("ragged", "uniform")
_DIRECTIONS = ((True, False), (False, True), (True, True))


def kernel_specs(arch: str) -> Iterator[Config]:
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
            yield AdamWTileConfig.choose(fmt, master, arch, columnwise=True, gradient=dtype)
    for dtype, grouping in itertools.product(DTYPE_BYTES, _GROUPINGS):
        if support("grouped_amax", None, arch):
            for keeps_nan in (False, True):
                # Before rows with amaxes of groups, which sm_100a converts tile by tile.
                if not keeps_nan or arch == "sm_90a":
                    yield AmaxConfig(dtype, grouping, arch=arch, keeps_nan=keeps_nan)
                # For tiles with amaxes of rows where those of groups are given.
                yield AmaxConfig(
                    dtype, grouping, per_row=True, per_group=False, arch=arch, keeps_nan=keeps_nan
                )
        for fmt in _FORMATS:
            if support("grouped_dequantize", fmt, arch):
                yield from _dequantizers(fmt, dtype, grouping)
            if support("grouped_quantize", fmt, arch):
                yield from _rows(fmt, dtype, grouping, arch)
                yield from _tiles(fmt, dtype, grouping, arch)
    for fmt, grouping in _FROM_BF16:
        if support("grouped_quantize", fmt, arch):
            yield from _rows(fmt, "bfloat16", grouping, arch)
            yield from _tiles(fmt, "bfloat16", grouping, arch)
    for fmt in _ACTIVATED:
        if support("grouped_quantize", fmt, arch, activation=True):
            made = QuantizeProblem(
                dtype="bfloat16" if fmt.rounds_activation else "float32",
                cols=fmt.k_multiple,
                prologue=Prologue("bfloat16", "swiglu"),
            )
            yield TileConfig.choose(fmt, made, arch, columnwise=True, compute_amax=True)
    for fmt in _marking(FP8Block(), MXFP8(), FP8(torch.float8_e5m2, "delayed")):
        if support("moe_quantize_gradient", fmt, arch):
            scaled = (
                FP8(scaling="delayed", nan_scales=fmt.nan_scales) if fmt.has_given_scale else fmt
            )
            yield GradientConfig(fmt.text, scaled.text, "bfloat16", "swiglu", arch)
    yield from _gathered(arch)


def _gathered(arch: str) -> Iterator[Config]:
    """Tokens that have several rows each, of 1025 columns to 8192."""
    prologue = Prologue("bfloat16", None, gathered=True)
    for fmt in _marking(FP8Block(), NVFP4(row_scaled=True)):
        if not support("grouped_quantize", fmt, arch):
            continue
        is_expanded = arch == "sm_90a" and fmt.element.per_byte > 1
        kinds = [TokensConfig]
        if is_expanded and support("grouped_gemm", fmt, arch):
            kinds.append(TokenValuesConfig)
        for kind, warps in itertools.product(kinds, (1, 2, 4)):
            yield kind(fmt.text, "bfloat16", warps_per_row=warps, arch=arch, prologue=prologue)
        if fmt.global_scale is None:
            problem = QuantizeProblem("bfloat16", fmt.k_multiple, prologue=prologue)
            for rowwise in (False, True):
                yield TileConfig.choose(fmt, problem, arch, rowwise=rowwise, columnwise=True)


def _dequantizers(fmt: Format, dtype: str, grouping: str) -> Iterator[DequantizeConfig]:
    for columnwise in (False, True):
        config = DequantizeConfig.choose(fmt, dtype, grouping, columnwise)
        if config.format == fmt.text:
            yield config


def _rows(fmt: Format, dtype: str, grouping: str, arch: str) -> Iterator[RowsConfig]:
    # The rowwise copy of a format that transforms the other is that of one that does not.
    if fmt.is_2d or fmt.is_transformed:
        return
    for warps, rows in RowsConfig.teams:
        config = RowsConfig(fmt.text, dtype, grouping, warps, rows_per_warp=rows, arch=arch)
        shortest = QuantizeProblem(dtype, fmt.k_multiple, config.grouping)
        if config.is_preferred and config.can_implement(shortest):
            yield config
        # Codes that share bytes are no operands there.
        is_expanded = (arch, grouping) == ("sm_90a", "ragged") and fmt.element.per_byte > 1
        if (
            is_expanded
            and support("grouped_gemm", fmt, arch)
            and (warps, rows) in ValuesConfig.teams
        ):
            yield ValuesConfig(**vars(config))


def _tiles(fmt: Format, dtype: str, grouping: Grouping, arch: str) -> Iterator[TileConfig]:
    computes = (False,) if fmt.global_scale is None else (False, True)
    for (rowwise, columnwise), compute_amax in itertools.product(_DIRECTIONS, computes):
        problem = QuantizeProblem(dtype, fmt.k_multiple, grouping)
        what = {"rowwise": rowwise, "columnwise": columnwise, "compute_amax": compute_amax}
        config = TileConfig.choose(fmt, problem, arch, **what)
        # Otherwise it is another format's, too.
        if config.format == fmt.text:
            yield config
