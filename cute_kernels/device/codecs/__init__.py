"""How the bytes of each format are made and read inside kernels: one file a format.

What only one architecture needs stands beside it, in a file that is named after both. ``base`` says
what a codec has to offer, ``bytes`` what formats of FP8 codes share.
"""

from ...formats import parse
from .base import Codec, GlobalScaleRegisters
from .fp8 import FP8Codec
from .fp8_block import FP8BlockCodec
from .mxfp8 import MXFP8Codec
from .nvfp4 import NVFP4Codec

__all__ = ["CODECS", "Codec", "GlobalScaleRegisters", "codec_of"]

#: The codec of each format, by the name of its record.
CODECS: dict[str, type[Codec]] = {
    "fp8": FP8Codec,
    "fp8_block": FP8BlockCodec,
    "mxfp8": MXFP8Codec,
    "nvfp4": NVFP4Codec,
}


def codec_of(text: str, dtype: str, arch: str | None = None) -> Codec:
    """The codec of the format whose canonical text is ``text``; see ``Codec`` for the rest."""
    fmt = parse(text)
    return CODECS[fmt.name](fmt, dtype, arch)
