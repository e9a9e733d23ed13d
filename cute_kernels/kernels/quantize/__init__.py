"""Quantization kernels: configurations in ``config``, kernels in modules that need the DSL."""
