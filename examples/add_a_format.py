"""Add a format at run time: MXFP4, 4-bit codes with a power of two for each block of 32.

Run it:

    python examples/add_a_format.py

The second half runs kernels on the emulator, for which it needs the CuTe DSL and g++.

A format is a record, which says what is stored, and two codecs, which compute it. It prints the
error of MXFP4 on the reference backend, and checks that kernels for two GPUs write the same bytes.
"""

import dataclasses
import importlib.util
import os
from typing import ClassVar

# The cache of kernels on disk knows the sources of the package, but not those of this file.
os.environ["CUTE_KERNELS_CACHE"] = "0"

import torch

import cute_kernels
import grouped
from cute_kernels.capability import ARCHITECTURES, add_support
from cute_kernels.formats import E2M1, E8M0, BlockScale, ElementType, Format, record
from cute_kernels.reference import codecs as reference_codecs
from cute_kernels.reference.codecs.mxfp8 import MXFP8Codec as ReferenceMXFP8


@record  # makes the name known
@dataclasses.dataclass(frozen=True)
class MXFP4(Format):
    """E2M1 codes (4 bits) with an E8M0 scale, a power of two, for each 32 elements of a row."""

    name: ClassVar[str] = "mxfp4"
    element: ClassVar[ElementType] = E2M1
    scale: ClassVar[BlockScale] = BlockScale(E8M0, 32, "tiles_128x4")
    global_scale: ClassVar[None] = None
    columnwise: ClassVar[str] = "transposed"
    k_multiple: ClassVar[int] = 32


class ReferenceMXFP4(ReferenceMXFP8):
    """Arithmetic in PyTorch. MXFP8 has the same scales, from the largest number of its record."""

    format = MXFP4


def kernel_codec():
    """Return the arithmetic in kernels: the codes of NVFP4 with the scales of MXFP8."""
    from cutlass import Uint16

    from cute_kernels.device.codecs.mxfp8 import MXFP8Codec
    from cute_kernels.device.codecs.nibbles import NibbleCodec

    class KernelMXFP4(NibbleCodec):
        decode_scales, decode_factor = MXFP8Codec.decode_scales, MXFP8Codec.decode_factor

        def block_scales(self, a, b, global_scale):
            # The amaxes of two blocks become two bytes and the factors of their elements.
            low, low_factor = MXFP8Codec.block_scale(self, a, global_scale)
            high, high_factor = MXFP8Codec.block_scale(self, b, global_scale)
            return (low | high << 8).to(Uint16), low_factor, high_factor

    return KernelMXFP4


def main():
    """Quantize with the new format on the reference backend and on the emulator."""
    torch.manual_seed(0)
    reference_codecs.CODECS[MXFP4.name] = ReferenceMXFP4
    add_support(MXFP4, ("grouped_quantize", "grouped_dequantize"), ARCHITECTURES)

    x, offs = torch.randn(100, 64, dtype=torch.bfloat16), torch.tensor([30, 30, 100])
    q = grouped.quantize(x, MXFP4(), offs=offs)
    error = float((q.dequantize().float() - x.float()).norm() / x.float().norm())
    print(f"{q.format}: {q.member(0)}, error {error:.3f}")
    assert 0.05 < error < 0.25

    if importlib.util.find_spec("cutlass") is None:
        print("no CuTe DSL: kernels are left out")
        return
    from cute_kernels.device import codecs as kernel_codecs

    kernel_codecs.CODECS[MXFP4.name] = kernel_codec()
    for arch in ARCHITECTURES[1:]:
        with cute_kernels.backend(f"emulated:{arch}"):
            again = grouped.quantize(x, MXFP4(), offs=offs)
            decoded = again.dequantize()
        for got, want in zip(again.unbind(), q.unbind(), strict=True):
            assert torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)
        assert torch.equal(decoded, q.dequantize())
        print(f"{arch}: the kernel writes and decodes the same bytes")


if __name__ == "__main__":
    main()
