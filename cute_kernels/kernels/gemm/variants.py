"""The class of configurations of each architecture, and the kernels to compile ahead of time.

``CONFIG_CLASSES`` is where ops get their configurations from (``ops/gemm/launcher.py``).

``kernel_specs`` lists the kernels that training and inference with a recipe use. Options multiply
to thousands of variants (bias, factors and output of any dtype). The others are compiled when they
are first used.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, TypeAlias

from cute_kernels.arch import get_arch
from cute_kernels.capability import support

from .choose import preferred_tiles, prefers
from .common.config import GemmConfig
from .common.operand_kinds import OPERANDS, OperandKind
from .common.problem import GemmGrouping
from .sm90.config import Sm90GemmConfig
from .sm90.fp4.config import ArrangeConfig, ExpandConfig
from .sm90.split_launches import all_split_launches
from .sm100.config import ScaleTilesConfig, Sm100GemmConfig

#: The specs of this family: GEMMs, and the kernels that prepare their operands.
GemmSpec: TypeAlias = GemmConfig | ScaleTilesConfig | ArrangeConfig | ExpandConfig

#: FP8 products of the recipes: operands A and B, and other fields of their configurations.
_FP8_FPROP_DGRAD: tuple[tuple[str, str, dict[str, bool]], ...] = (
    ("mxfp8", "mxfp8", {}),
    ("mxfp8", "mxfp8", {"transpose_b": True}),
    ("fp8", "fp8", {}),
    ("fp8:dtype=e5m2", "fp8", {"split": True}),
    ("fp8_block", "fp8_block:block=128x128", {"pow2_scales": True}),
)
_FP8_WGRAD: tuple[tuple[str, str, dict[str, bool]], ...] = (
    ("mxfp8", "mxfp8", {}),
    ("fp8:dtype=e5m2", "fp8", {"split": True}),
    ("fp8_block", "fp8_block", {"pow2_scales": True}),
)

#: The class of the configurations of each architecture's kernel.
CONFIG_CLASSES: dict[str, type[GemmConfig]] = {"sm_90a": Sm90GemmConfig, "sm_100a": Sm100GemmConfig}


def kernel_specs(arch: str) -> Iterator[GemmSpec]:
    """Yield the configurations of the kernels for ``"sm_90a"`` or ``"sm_100a"``.

    Activations are bf16, or fp16 with fp16 operands, and a bias has their dtype. They are written
    into fresh outputs. Gradients of weights have that dtype or fp32, which may be added to.
    """
    multiplies_codes = get_arch(arch).has_block_scaled_mma
    yield from _fp8(arch)
    if multiplies_codes:
        yield from _scale_tiles()
    for operand, kind in OPERANDS.items():
        is_rare = kind.has_short_sums or (kind.fmt is not None and kind.fmt.searches_scale)
        if not support("grouped_gemm", kind.fmt, arch) or is_rare:
            continue
        dtype = "bfloat16" if kind.fmt else operand
        cls = CONFIG_CLASSES[arch]
        yield from _m_grouped(cls, kind, dtype)
        yield from _k_grouped(cls, kind, dtype)
        if multiplies_codes and kind.bits < 8:
            w4a16 = cls("bfloat16", b_operand=operand, zero_tail=True)
            for tile in preferred_tiles(w4a16):
                yield dataclasses.replace(w4a16, tile=tile)
        if operand == "bfloat16" or multiplies_codes and kind.bits < 8:
            yield from _experts(cls, kind)
        if not (multiplies_codes or kind.is_wgmma):
            yield from (ExpandConfig(is_ragged) for is_ragged in (False, True))
            yield from _served(kind)


def _scale_tiles() -> Iterator[ScaleTilesConfig]:
    """Yield the kernels that prepare block scales for sm_100a.

    The first one runs before wgrad of FP8Block, the second one before its fprop and dgrad. The
    others run before products that activate, of FP8Block and of NVFP4.
    """
    for uniform in (False, True):
        yield ScaleTilesConfig(a_squares=False, b_squares=uniform, is_b_uniform=uniform)
    for has_tiles in (False, True):
        yield ScaleTilesConfig(
            a_squares=False,
            b_squares=not has_tiles,
            is_b_uniform=True,
            interleaves_halves=True,
            has_tiles=has_tiles,
        )


def _experts(cls: type[GemmConfig], kind: OperandKind) -> Iterator[GemmConfig]:
    """Yield products of experts: with an activation, and of bf16 also with gathered tokens.

    A mixture of bf16 experts reads tokens by their index, also for the gradient of W1.
    """
    is_plain = kind.fmt is None
    base = cls(kind.name, tile=cls.any_tile("m_grouped"), zero_tail=True, activation="swiglu")
    base = dataclasses.replace(base, row_scaled=kind.global_scale_factor is not None)
    for gathered, tile, stores_z in itertools.product(
        (False, True) if is_plain else (False,), cls.tile_shapes, (False, True)
    ):
        config = dataclasses.replace(base, gathered=gathered)
        if prefers(config, tile) and not (stores_z and base.row_scaled):
            yield dataclasses.replace(config, tile=tile, stores_preactivation=stores_z)
    if is_plain:
        base = cls(kind.name, "k_grouped", tile=cls.any_tile("k_grouped"), gathered=True)
        for tile in preferred_tiles(base):
            yield dataclasses.replace(base, tile=tile)


def _fp8(arch: str) -> Iterator[GemmConfig]:
    """Yield products of FP8 recipes, into bf16 without a bias; gradients of weights also into fp32.

    Other products are compiled when they are first used, since each has as many tiles.
    """
    cls = CONFIG_CLASSES[arch]
    known = {field.name for field in dataclasses.fields(cls)}
    groupings: tuple[tuple[GemmGrouping, Any], ...] = (
        ("m_grouped", _FP8_FPROP_DGRAD),
        ("k_grouped", _FP8_WGRAD),
    )
    for grouping, products in groupings:
        for operand, b, fields in products:
            if not support("grouped_gemm", OPERANDS[operand].fmt, arch):
                continue
            options: dict[str, Any] = {name: x for name, x in fields.items() if name in known}
            options["b_operand"] = None if b == operand else b
            base = cls(operand, grouping, tile=cls.any_tile(grouping), **options)
            if grouping == "k_grouped":
                yield from _outputs(base, "bfloat16")
                continue
            bases = [dataclasses.replace(base, zero_tail=True)]
            if base.b_kind.is_block_scaled and not base.transpose_b:
                # The first product of experts in serving, with a quantized output and without.
                fmt = OPERANDS[operand].fmt
                quantized = (
                    (operand,)
                    if support("grouped_gemm", fmt, arch, activation=True, result=fmt)
                    else ()
                )
                for text in (None, *quantized):
                    bases.append(
                        dataclasses.replace(
                            base, activation="swiglu", zero_tail=not text, quantizes_to=text
                        )
                    )
            for config in bases:
                for tile in filter(config.has_whole_blocks, preferred_tiles(config)):
                    yield dataclasses.replace(config, tile=tile)


def _served(kind: OperandKind) -> Iterator[GemmSpec]:
    """Yield kernels of sm_90a for weights that are quantized once: prepacked, and W4A16."""
    base = Sm90GemmConfig(kind.name, tile=Sm90GemmConfig.any_tile("m_grouped"), zero_tail=True)
    yield ArrangeConfig("bfloat16")
    yield ArrangeConfig("bfloat16", gathered=True)
    for tile in preferred_tiles(base):
        yield dataclasses.replace(base, tile=tile, activations="bfloat16")
        for row_scaled in (False, True):
            yield dataclasses.replace(base, tile=tile, prepacked=True, row_scaled=row_scaled)
    for row_scaled in (False, True):
        shared = dataclasses.replace(base, row_scaled=row_scaled)
        yield from all_split_launches(shared)
        yield from all_split_launches(dataclasses.replace(shared, prepacked=True))
    yield from all_split_launches(dataclasses.replace(base, activations="bfloat16"))


def _m_grouped(cls: type[GemmConfig], kind: OperandKind, dtype: str) -> Iterator[GemmConfig]:
    """Yield m_grouped products in all preferred tiles, with and without a bias."""
    any_tile = cls(kind.name, tile=cls.any_tile("m_grouped"))
    tiles = preferred_tiles(any_tile)
    for flag, bias_dtype, tile in itertools.product((False, True), (None, dtype), tiles):
        yield cls(
            kind.name,
            out_dtype=dtype,
            row_scaled=flag and kind.global_scale_factor is not None,
            transpose_b=flag and not kind.is_transposed,
            bias_dtype=bias_dtype,
            zero_tail=True,
            tile=tile,
        )


def _k_grouped(cls: type[GemmConfig], kind: OperandKind, dtype: str) -> Iterator[GemmConfig]:
    """Yield k_grouped products in all preferred tiles."""
    yield from _outputs(cls(kind.name, "k_grouped", tile=cls.any_tile("k_grouped")), dtype)


def _outputs(base: GemmConfig, dtype: str) -> Iterator[GemmConfig]:
    """Yield a k_grouped product in all tiles, into ``dtype`` and into fp32.

    Products into fp32 come twice: one of them adds to the output.
    """
    outputs = ((dtype, False), ("float32", False), ("float32", True))
    tiles = preferred_tiles(base)
    for (out_dtype, accumulate), tile in itertools.product(outputs, tiles):
        yield dataclasses.replace(base, out_dtype=out_dtype, accumulate=accumulate, tile=tile)
