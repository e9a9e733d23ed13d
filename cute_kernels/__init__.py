"""Grouped low-precision kernels on plain tensors: quantize, dequantize and GEMM of ragged groups."""

from cute_kernels.capability import UnsupportedError, support

__all__ = ["UnsupportedError", "support"]
