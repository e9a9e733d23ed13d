"""Exact PyTorch implementations of every op: the CPU backend and the oracle of the kernels.

The functions write into buffers that the caller allocated, as the kernels do, and touch only what
the layout contract says is written. They run on any device; grouped GEMM and the columnwise copies
read ``offs`` on the host, which on a GPU means a synchronization.
"""

from .delayed_scaling import delayed_scaling_update
from .dequantize import dequantize
from .elements import Elements
from .gemm import k_grouped_gemm, m_grouped_gemm
from .operands import Operand
from .quantize import Given, quantize
from .random_numbers import Draws, GivenDraws, KeyedDraws
from .reductions import compute_offsets, grouped_amax, grouped_dbias

__all__ = [
    "Draws",
    "Elements",
    "Given",
    "GivenDraws",
    "KeyedDraws",
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
