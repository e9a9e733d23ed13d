"""Deprecated name of ``cute_kernels.formats.activations``."""

from .deprecation import deprecated_module

__getattr__ = deprecated_module(__name__, "cute_kernels.formats.activations")
