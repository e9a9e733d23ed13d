"""Codecs of the formats inside kernels, one file per format.

Code for one architecture is in a file named after the element type and the architecture. ``base``
defines the interface of a codec. ``bytes`` and ``nibbles`` have what 8-bit and 4-bit codes share.
"""

from ...formats import parse
from .base import Codec, GlobalScaleRegisters
from .fp8 import FP8Codec
from .fp8_block import FP8BlockCodec
from .mxfp8 import MXFP8Codec
from .nvfp4 import NVFP4Codec

__all__ = ["CODECS", "Codec", "GlobalScaleRegisters", "codec_of"]

#: Codec class by the name of the format's record.
CODECS: dict[str, type[Codec]] = {
    "fp8": FP8Codec,
    "fp8_block": FP8BlockCodec,
    "mxfp8": MXFP8Codec,
    "nvfp4": NVFP4Codec,
}


def codec_of(text: str, dtype: str, arch: str | None = None) -> Codec:
    """Return the codec of the format whose canonical text is ``text``. See ``Codec``."""
    fmt = parse(text)
    return CODECS[fmt.name](fmt, dtype, arch)
