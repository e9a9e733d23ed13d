"""Deprecated name of ``grouped.parallel``."""

from cute_kernels.deprecation import deprecated_module

__getattr__ = deprecated_module(__name__, "grouped.parallel")
