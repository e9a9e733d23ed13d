"""Deprecated name of ``grouped.inspect``."""

from cute_kernels.deprecation import deprecated_module

__getattr__ = deprecated_module(__name__, "grouped.inspect")
