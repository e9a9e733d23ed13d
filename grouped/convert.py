"""Quantize the experts of a checkpoint: ``python -m grouped.convert SRC DST --to nvfp4``.

The implementation is in ``grouped.checkpoint.convert``.
"""

import sys

from .checkpoint.convert import convert, main

__all__ = ["convert", "main"]

if __name__ == "__main__":
    sys.exit(main())
