"""What the quantizers' skeletons ask of a format: how its bytes are made and read on the device.

A kernel makes one codec when it is traced and calls its methods, which emit code. What a codec is
for (the format's record, the dtype of the plain side, the architecture) never changes afterwards.
"""

import abc
from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Uint16, Uint32

from ...arch import get_arch
from ...formats import Format
from ..ptx import asm

#: What the codes of a row or of a group are relative to: DSL scalars that only the codec reads, so
#: that a skeleton can carry them through loops.
GlobalScaleRegisters = tuple["Float32", ...]


def nan_if_infinite(a: Float32, number: Float32) -> Float32:
    """A positive ``number``, or NaN where ``a`` is infinite or NaN: one instruction, as 0 times
    infinity is NaN.
    """
    return asm("fma.rn.f32 $0, $1, 0f00000000, $2;", [Float32], [a, number])


class Codec(abc.ABC):
    """One format on one architecture.

    Words are 32 bits. Words of inputs hold two 16-bit elements, the first in the low half, or one
    of fp32. Words of codes hold codes in the order of their elements, the first in the lowest bits.

    Args:
        fmt: the format's record.
        dtype: name of the dtype of the plain side: the input, or what is decoded to.
        arch: whose instructions it uses, ``"sm_90a"`` or ``"sm_100a"``; None where it only
            decodes, which is the same code everywhere.

    Attributes:
        block: elements that are encoded together, a multiple of 16; those that share a scale
            where blocks have scales.
        code_words: words of codes of a block.
        has_scales: whether a block has a scale of its own. Without, its encode factor depends
            on the second level alone.
        table_size: encode factors that ``encode_factor`` tells apart; 0 if looking them up in
            shared memory does not pay.
        searches_scale: what ``block_scales`` takes is not the amax of a block, but the number
            that ``choose_row``, ``choose_columns`` or ``choose_square`` gives.
        global_scale_names: what ``global_scale_outputs`` gives: the buffers of the second level but the amax.
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
        level = fmt.global_scale
        kept = () if level is None else level.buffers
        self.global_scale_names = tuple(name for name in kept if name != "amax")

    def code_bytes(self, elements: Any) -> Any:
        """Bytes of the codes of so many elements: a number of Python or of the DSL."""
        per_byte = self.fmt.element.per_byte
        return elements if per_byte == 1 else elements // per_byte

    # ---- encoding

    def global_scale(self, amax: Float32) -> GlobalScaleRegisters:
        """What the codes of a group or row are relative to, from its amax, or the scale given;
        nothing by default.
        """
        return ()

    def zero_global_scale(self) -> GlobalScaleRegisters:
        """Any level, as what a loop carries before it has one."""
        return ()

    def global_scale_outputs(self, level: GlobalScaleRegisters) -> tuple[Float32, ...]:
        """The numbers of a group's level that are kept in buffers, in order of ``global_scale_names``."""
        return ()

    @abc.abstractmethod
    def block_scale(self, a: Float32, level: GlobalScaleRegisters) -> tuple[Uint32 | None, Float32]:
        """The scale of a block with amax ``a``, and what ``encode_row`` and ``encode_columns`` take
        for it.

        As it is stored, a word of it alone; None if blocks have no scales.
        """

    def two_scales(
        self, a: Float32, b: Float32, level: GlobalScaleRegisters
    ) -> tuple[list[Uint32 | None], list[Float32]]:
        """``block_scale`` of two blocks: both scales, above whose bits may be others, and both
        factors.
        """
        stored, factors = zip(*(self.block_scale(x, level) for x in (a, b)), strict=True)
        return list(stored), list(factors)

    def scale_bytes(self, a: Float32, b: Float32, level: GlobalScaleRegisters) -> Uint16:
        """The scale bytes of two blocks alone, for codecs with a table of factors."""
        raise NotImplementedError(f"{type(self).__name__} has no table of encode factors")

    def encode_factor(self, index: Uint32, level: GlobalScaleRegisters) -> Float32:
        raise NotImplementedError(f"{type(self).__name__} has no table of encode factors")

    @abc.abstractmethod
    def encode_row(self, words: Sequence[Uint32], factor: Float32) -> list[Uint32]:
        """Code words of a block whose elements follow each other in ``words``."""

    @abc.abstractmethod
    def encode_columns(
        self, words: Sequence[Uint32], factors: Sequence[Float32], swizzle_xor: Int32 | int = 0
    ) -> list[list[Uint32]]:
        """Code words of a block of rows, one word a row, for each column of the words.

        Args:
            words: one a row of the block: two columns of 16-bit elements, or one of fp32.
            factors: the encode factor of each column.
            swizzle_xor: 0, 2, 4 or 6, of codes of a byte 0 or 4: word i is that of row i ^ swizzle_xor.
        """

    def choose_row(
        self, words: Sequence[Uint32], a: Float32, level: GlobalScaleRegisters
    ) -> Float32:
        """The scale of a block of a row with amax ``a``."""
        raise NotImplementedError(f"{type(self).__name__} chooses no scales")

    def choose_columns(
        self, words: Sequence[Uint32], a: Sequence[Float32], level: GlobalScaleRegisters
    ) -> list[Float32]:
        """The scales of a block of rows, one a column."""
        raise NotImplementedError(f"{type(self).__name__} chooses no scales")

    def choose_square(
        self, words: Sequence[Uint32], a: Float32, level: GlobalScaleRegisters
    ) -> Float32:
        """The scale of a square block, of which 16 neighbouring lanes have a row each."""
        raise NotImplementedError(f"{type(self).__name__} chooses no scales")

    def round_row(
        self, words: Sequence[Uint32], factor: Float32, random_words: Sequence[Uint32]
    ) -> list[Uint32]:
        """``encode_row``, rounded by the bytes of ``random_words``, four words."""
        raise NotImplementedError(f"{type(self).__name__} does not round stochastically")

    def round_columns(
        self,
        words: Sequence[Uint32],
        factors: Sequence[Float32],
        random_words: Sequence[Sequence[Uint32]],
        swizzle_xor: Int32 | int = 0,
    ) -> list[list[Uint32]]:
        """``encode_columns``, rounded by the bytes of ``random_words``, four words a column.

        A byte is that of the row of the same number, or with a ``swizzle_xor`` of the word.
        """
        raise NotImplementedError(f"{type(self).__name__} does not round stochastically")

    # ---- decoding

    @abc.abstractmethod
    def decode(self, words: Sequence[Uint32]) -> list[Float32]:
        """The numbers that the codes of ``words`` stand for, before any scale."""

    def decode_scales(self, pair: Uint32) -> tuple[Float32, Float32]:
        """The numbers that the two lowest bytes of ``pair``, scales of blocks, stand for."""
        raise NotImplementedError(f"{type(self).__name__} has no block scales")

    @abc.abstractmethod
    def decode_factor(self, scale: Float32 | None, level: Float32 | None) -> Float32:
        """What codes are multiplied by, of the block's scale and the record's first level, None
        where there is none.
        """
