"""Functions on plain and grouped tensors: quantization, GEMM, linear layers and experts.

``grouped`` exports the public ones.
"""

from cute_kernels.deprecation import deprecated_attributes

__getattr__ = deprecated_attributes(
    __name__,
    {
        "compute_offsets": "grouped.functional.quantization:compute_offsets",
        "quantize": "grouped.functional.quantization:quantize",
    },
)
