"""``torch.ops.cute_kernels.*``: the flat ops on plain tensors, registered on import."""

from cute_kernels.ops import gemm, quantize

__all__ = ["gemm", "quantize"]
