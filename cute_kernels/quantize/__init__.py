"""Quantization kernels for sm_100a: configurations here, kernels in modules that need the DSL."""

from cute_kernels.quantize.config import QuantizeProblem, RowScaledConfig

__all__ = ["QuantizeProblem", "RowScaledConfig"]
