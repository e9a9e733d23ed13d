"""The command line of ``cute_kernels.precompile``: ``python -m cute_kernels.precompile --help``.

To be run, not imported: an import would put this module where the package has the function.
"""

import sys

if __name__ != "__main__":
    raise ImportError("call cute_kernels.precompile(), or run python -m cute_kernels.precompile")

from .runtime.aot import main

sys.exit(main())
