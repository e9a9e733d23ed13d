"""Variants of NVFP4 as specified, for ``oracle.buffers``. Independent of the package."""

import functools
import math

import numpy as np

from .oracle import (
    E2M1_VALUES,
    FMAX,
    Rule,
    e2m1_value,
    e4m3_value,
    encode_scale,
    f32,
    round_e2m1,
    round_e4m3,
)

WORD = 0xFFFFFFFF
#: TransformerEngine's fixed signs.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def philox4x32(counter, key, rounds):
    """Return Philox4x32 as in Salmon et al. 2011."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & WORD, p0 >> 32 ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


@functools.cache
def block_bytes(seed, columnwise, number):
    """Return the 16 random bytes of a block; the seed's numbers are read as unsigned 64 bits."""
    key, stream = (s % 2**64 for s in seed)
    high = stream >> 32 & 0x7FFFFFFF | columnwise << 31
    counter = (number & WORD, number >> 32, stream & WORD, high)
    return b"".join(
        word.to_bytes(4, "little") for word in philox4x32(counter, (key & WORD, key >> 32), 7)
    )


def round_e2m1_stochastic(y, r):
    """Return the E2M1 code of ``y`` for the random byte ``r``; fp64 is exact."""
    y = float(y)
    if math.isnan(y):
        return 7
    m = min(abs(y), 6.0)
    t = 0.5 if m < 2 else 1.0 if m < 4 else 2.0
    value = min(6.0, math.floor(m / t + r / 256) * t)
    return E2M1_VALUES.index(value) | (8 if math.copysign(1.0, y) < 0 else 0)


class Stochastic(Rule):
    """Stochastic rounding by the bytes of ``block_bytes``."""

    def __init__(self, seed):
        self.seed = seed

    def encode(self, values, enc, positions):
        return [
            round_e2m1_stochastic(v * enc, self.byte(*position))
            for v, position in zip(values, positions, strict=False)
        ]

    def byte(self, columnwise, number, element):
        return block_bytes(self.seed, columnwise, number)[element]


def round_bf16(v):
    """Round fp32 to bf16, to nearest even; large numbers become infinite, NaN stays."""
    bits = v.view(np.uint32)
    return np.where(np.isnan(v), v, (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(f32))


def butterflies(v):
    """Multiply H16 by 16 rows in fp32: i with i + 8, then i + 4, i + 2, i + 1."""
    v = list(v)
    for distance in (8, 4, 2, 1):
        for i in range(16):
            if not i & distance:
                v[i], v[i + distance] = v[i] + v[i + distance], v[i] - v[i + distance]
    return v


class Hadamard(Rule):
    """The columnwise copy encodes transformed rows, 16 at a time."""

    def columns(self, values):
        """Return the transformed rows, rounded to bf16 and padded to 16."""
        rows, cols = values.shape
        padded = np.zeros((-(-rows // 16) * 16, cols), f32)
        padded[:rows] = values
        for row in range(0, rows, 16):
            chunk = padded[row : row + 16]
            signed = [row * f32(0.25 * s) for row, s in zip(chunk, SIGNS, strict=True)]
            chunk[:] = [round_bf16(row) for row in butterflies(signed)]
        return padded


def undo_hadamard(chunk):
    return [
        y * f32(s) for y, s in zip(butterflies([y * f32(0.25) for y in chunk]), SIGNS, strict=True)
    ]


class StochasticHadamard(Stochastic, Hadamard):
    """Stochastic rounding with the Hadamard transform."""


class FourOverSix(Rule):
    """Each block has the better of two scales."""

    def __init__(self, bound, error):
        self.bound, self.error = f32(bound), error

    def scale(self, block, a, g):
        """Return the candidate with the smaller error; on a tie the one that maps the amax to 6."""
        s_enc = encode_scale(f32(6) * self.bound, g)
        base = a / f32(6) * s_enc
        six, four = (self._candidate(base * f32(factor), s_enc) for factor in (1, 1.5))
        return four if self._error(block, *four, g) < self._error(block, *six, g) else six

    def _candidate(self, scale, s_enc):
        byte = round_e4m3(min(max(scale, f32(-448)), f32(448)))
        return byte, min(f32(1) / (f32(e4m3_value(byte)) * (f32(1) / s_enc)), FMAX)

    def _error(self, block, byte, enc, g):
        """Return the error of a block: the sum over its row, or a tree sum over 16 rows."""
        rows = [self._row_error(row, byte, enc, g) for row in block]
        if not self.is_square:
            return rows[0]
        rows += [self._row_error(np.zeros(16, f32), byte, enc, g)] * (16 - len(rows))
        for half in (8, 4, 2, 1):
            rows = [rows[i] + rows[i + half] for i in range(half)]
        return rows[0]

    #: True for square blocks, where missing rows count as zeros.
    is_square = False

    def _row_error(self, row, byte, enc, g):
        total = f32(0)
        for i, x in enumerate([*row, *[f32(0)] * (16 - len(row))]):
            value = f32(e2m1_value(round_e2m1(x * enc))) * f32(e4m3_value(byte))
            d = value * g / (f32(6) * self.bound) - x
            term = abs(d) if self.error == "mae" else d * d
            total = term if i == 0 else total + term
        return total


class SquareFourOverSix(FourOverSix):
    """Four over six for square blocks."""

    is_square = True
