"""Quantize the experts of a checkpoint: ``python -m grouped.convert SRC DST --to nvfp4``.

The implementation is in ``grouped.checkpoint.convert``.
"""

import sys
from typing import TYPE_CHECKING

from ptx_emulator.host.suggestions import module_attributes

from .checkpoint.convert import convert, main

__all__ = ["convert", "main"]

if not TYPE_CHECKING:
    __getattr__ = module_attributes(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)


if __name__ == "__main__":
    sys.exit(main())
