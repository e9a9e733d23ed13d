"""Functions on plain and grouped tensors: quantization, GEMM, linear layers and experts.

``grouped`` exports the public ones.
"""
