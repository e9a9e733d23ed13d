"""Grouped GEMM kernels. Only ``config`` can be imported without the CuTe DSL."""
