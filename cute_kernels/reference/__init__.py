"""Exact PyTorch implementations of every op: the CPU backend and the oracle of the kernels.

The functions write into buffers that the caller allocated, as kernels do, and write only what the
layout defines. They run on any device. Grouped GEMM and the columnwise copies read ``offs`` on the
host, which synchronizes with a GPU.
"""

from .delayed_scaling import delayed_scaling_update
from .dequantize import dequantize
from .elements import Elements
from .gemm import k_grouped_gemm, m_grouped_gemm
from .operands import Operand
from .quantize import QuantizeInputs, quantize
from .random_numbers import GivenRandomNumbers, RandomNumbers, SeededRandomNumbers
from .reductions import compute_offsets, grouped_amax, grouped_dbias

__all__ = [
    "RandomNumbers",
    "Elements",
    "QuantizeInputs",
    "GivenRandomNumbers",
    "SeededRandomNumbers",
    "Operand",
    "compute_offsets",
    "delayed_scaling_update",
    "dequantize",
    "grouped_amax",
    "grouped_dbias",
    "k_grouped_gemm",
    "m_grouped_gemm",
    "quantize",
]
