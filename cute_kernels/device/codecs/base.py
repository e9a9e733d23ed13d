"""Interface of the codecs: how kernels encode and decode the bytes of a format.

A kernel makes one codec when it is traced and calls its methods, which emit code. The format's
record, the dtype of the plain tensor and the architecture of a codec never change.
"""

import abc
from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Uint16, Uint32

from ...arch import get_arch
from ...formats import Format
from ..ptx import asm

#: Global scale of a row or of a group: DSL scalars that only the codec reads, so that kernels can
#: carry them through loops.
GlobalScaleRegisters = tuple["Float32", ...]


def nan_if_infinite(a: Float32, number: Float32) -> Float32:
    """Return a positive ``number``, or NaN if ``a`` is infinite or NaN.

    One instruction is enough, because 0 times infinity is NaN.
    """
    return asm("fma.rn.f32 $0, $1, 0f00000000, $2;", [Float32], [a, number])


class Codec(abc.ABC):
    """One format on one architecture.

    Words have 32 bits. A word of input holds two 16-bit elements, the first in the low half, or one
    fp32 element. A word of codes holds codes in the order of their elements, the first in the
    lowest bits.

    Args:
        fmt: Record of the format.
        dtype: Data type of the plain tensor: of the input, or of the decoded output.
        arch: Name of the architecture whose instructions are used. None for codecs that only
            decode, which is the same code everywhere.

    Attributes:
        block: Number of elements that are encoded together, a multiple of 16. If blocks have
            scales, these elements share one.
        code_words: Words of codes of a block.
        has_scales: True if blocks have scales. Otherwise the encode factor depends only on the
            global scale.
        table_size: Number of encode factors that ``encode_factor`` distinguishes. It is 0 if
            looking them up in shared memory does not pay.
        searches_scale: True if ``block_scales`` takes the number that ``choose_row``,
            ``choose_columns`` or ``choose_square`` returns, and not the amax of the block.
        global_scale_names: Buffers of the global scale, except the amax. ``global_scale_outputs``
            returns their numbers.
    """

    table_size: int = 0

    def __init__(self, fmt: Format, dtype: str, arch: str | None = None):
        self.fmt = fmt
        self.dtype = dtype
        self.arch = arch
        self.has_f32x2 = arch is not None and get_arch(arch).has_f32x2
        self.has_fp4_convert = arch is not None and get_arch(arch).has_fp4_convert
        self.has_scales = fmt.scale is not None
        self.searches_scale = fmt.searches_scale
        self.block = fmt.k_multiple if fmt.scale is None else fmt.scale.vec_size
        self.code_words = self.block * fmt.element.bits // 32
        global_scale = fmt.global_scale
        stored = () if global_scale is None else global_scale.buffers
        self.global_scale_names = tuple(name for name in stored if name != "amax")

    def code_bytes(self, elements: Any) -> Any:
        """Return the bytes of the codes of ``elements`` elements, a Python or DSL integer."""
        per_byte = self.fmt.element.per_byte
        return elements if per_byte == 1 else elements // per_byte

    # ---- encoding

    def global_scale(self, amax: Float32) -> GlobalScaleRegisters:
        """Return the global scale of a group or row, in registers.

        ``amax`` is its fp32 amax, or the scale that the caller gives. By default there is no global
        scale.
        """
        return ()

    def zero_global_scale(self) -> GlobalScaleRegisters:
        """Return a placeholder that a loop can carry before it has a global scale."""
        return ()

    def global_scale_outputs(self, global_scale: GlobalScaleRegisters) -> tuple[Float32, ...]:
        """Return the stored numbers of a global scale, in order of ``global_scale_names``."""
        return ()

    @abc.abstractmethod
    def block_scale(
        self, a: Float32, global_scale: GlobalScaleRegisters
    ) -> tuple[Uint32 | None, Float32]:
        """Return the scale of a block with amax ``a``, and its encode factor.

        The scale is a word as it is stored, or None if blocks have no scales. ``encode_row`` and
        ``encode_columns`` take the encode factor.
        """

    def two_scales(
        self, a: Float32, b: Float32, global_scale: GlobalScaleRegisters
    ) -> tuple[list[Uint32 | None], list[Float32]]:
        """Return ``block_scale`` of two blocks: both scales and both factors.

        The bits above a scale may be arbitrary.
        """
        stored, factors = zip(*(self.block_scale(x, global_scale) for x in (a, b)), strict=True)
        return list(stored), list(factors)

    def scale_bytes(self, a: Float32, b: Float32, global_scale: GlobalScaleRegisters) -> Uint16:
        """Return the scale bytes of two blocks, for codecs with a table of factors."""
        raise NotImplementedError(f"{type(self).__name__} has no table of encode factors")

    def encode_factor(self, index: Uint32, global_scale: GlobalScaleRegisters) -> Float32:
        """Return the encode factor of scale byte ``index``."""
        raise NotImplementedError(f"{type(self).__name__} has no table of encode factors")

    @abc.abstractmethod
    def encode_row(self, words: Sequence[Uint32], factor: Float32) -> list[Uint32]:
        """Return the code words of a block whose consecutive elements are in ``words``."""

    @abc.abstractmethod
    def encode_columns(
        self, words: Sequence[Uint32], factors: Sequence[Float32], swizzle_xor: Int32 | int = 0
    ) -> list[list[Uint32]]:
        """Return the code words of each column of a block of rows.

        Args:
            words: One word per row of the block: two columns of 16-bit elements, or one fp32
                column.
            factors: Encode factor of each column.
            swizzle_xor: Word i belongs to row i ^ swizzle_xor. 0, 2, 4 or 6. For byte codes 0 or 4.
        """

    def choose_row(
        self, words: Sequence[Uint32], a: Float32, global_scale: GlobalScaleRegisters
    ) -> Float32:
        """Return the scale of a block of a row with amax ``a``."""
        raise NotImplementedError(f"{type(self).__name__} chooses no scales")

    def choose_columns(
        self, words: Sequence[Uint32], a: Sequence[Float32], global_scale: GlobalScaleRegisters
    ) -> list[Float32]:
        """Return the scales of a block of rows, one per column."""
        raise NotImplementedError(f"{type(self).__name__} chooses no scales")

    def choose_square(
        self, words: Sequence[Uint32], a: Float32, global_scale: GlobalScaleRegisters
    ) -> Float32:
        """Return the scale of a square block, of which 16 neighbouring lanes have a row each."""
        raise NotImplementedError(f"{type(self).__name__} chooses no scales")

    def round_row(
        self, words: Sequence[Uint32], factor: Float32, random_words: Sequence[Uint32]
    ) -> list[Uint32]:
        """Return ``encode_row``, rounded stochastically by four words of random bytes."""
        raise NotImplementedError(f"{type(self).__name__} does not round stochastically")

    def round_columns(
        self,
        words: Sequence[Uint32],
        factors: Sequence[Float32],
        random_words: Sequence[Sequence[Uint32]],
        swizzle_xor: Int32 | int = 0,
    ) -> list[list[Uint32]]:
        """Return ``encode_columns``, rounded stochastically.

        ``random_words`` has four words of bytes per column. Byte i belongs to ``words[i]``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not round stochastically")

    # ---- decoding

    @abc.abstractmethod
    def decode(self, words: Sequence[Uint32]) -> list[Float32]:
        """Return the fp32 numbers that the codes in ``words`` stand for, before any scale."""

    def decode_scales(self, pair: Uint32) -> tuple[Float32, Float32]:
        """Return the fp32 numbers of the two scales in the lowest bytes of ``pair``."""
        raise NotImplementedError(f"{type(self).__name__} has no block scales")

    @abc.abstractmethod
    def decode_factor(self, scale: Float32 | None, global_scale: Float32 | None) -> Float32:
        """Return the factor of decoded codes, from the block's scale and the stored global scale.

        Either is None if the format does not have it.
        """
