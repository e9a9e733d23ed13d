"""The command line of ``cute_kernels.precompile``: ``python -m cute_kernels.precompile --help``."""

from __future__ import annotations

import sys
import types

from cute_kernels.runtime.aot import main, precompile


class _CallableModule(types.ModuleType):
    """Importing a submodule rebinds the package's name for it: keep that name a function."""

    __call__ = staticmethod(precompile)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    sys.exit(main())
