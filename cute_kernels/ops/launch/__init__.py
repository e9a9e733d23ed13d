"""Ops on CuTe DSL kernels: the choice of a kernel, its buffers, and its launch."""
