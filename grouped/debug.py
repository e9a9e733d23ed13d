"""Deprecated name of ``grouped.inspect``."""

from cute_kernels.deprecation import deprecated_attributes

__getattr__ = deprecated_attributes(
    __name__,
    {
        "check_offsets": "grouped.inspect:check_offsets",
        "detect_nonfinite": "grouped.inspect:detect_nonfinite",
        "inspect": "grouped.inspect:inspect_quantization",
    },
)
