"""Arithmetic of each format, one file per format."""

import torch

from ...formats import Format
from .base import Codec
from .fp8 import FP8Codec
from .fp8_block import FP8BlockCodec
from .mxfp8 import MXFP8Codec
from .nvfp4 import NVFP4Codec

__all__ = ["CODECS", "Codec", "codec_of"]

#: Codecs by the name of their format.
CODECS: dict[str, type[Codec]] = {
    c.format.name: c for c in (NVFP4Codec, FP8Codec, FP8BlockCodec, MXFP8Codec)
}


def codec_of(fmt: Format, dtype: torch.dtype = torch.float32) -> Codec:
    """Return the codec of a format in the capability table, for elements of ``dtype``."""
    return CODECS[fmt.name](fmt, dtype)
