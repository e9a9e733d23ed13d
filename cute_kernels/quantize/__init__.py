"""Quantization kernels for sm_100a: configurations here, kernels in modules that need the DSL."""

from cute_kernels.quantize.config import (
    AmaxConfig,
    OffsetsConfig,
    QuantizeProblem,
    RowScaledConfig,
    TileConfig,
)

__all__ = ["AmaxConfig", "OffsetsConfig", "QuantizeProblem", "RowScaledConfig", "TileConfig"]
