"""Values and products of buffers, by the layout contract and the order of sums of
``reference.dots``.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

from cute_kernels.formats import parse
from tests.helpers import E4M3, U8, e2m1_values

from .rational import fp32

#: Codes are multiples of this.
_UNIT = Fraction(1, 2**16)


class Member(NamedTuple):
    """One group: values of codes (R, K), of scales (R, blocks) or None;

    ``level``: fp32, (R, 1) or None.

    ``bound`` is the largest block scale of NVFP4, otherwise 0.
    """

    codes: np.ndarray
    scales: np.ndarray | None
    level: np.float32 | np.ndarray | None
    per_row: bool
    vec: int
    bound: int = 0

    @property
    def factor(self):
        """What a level does to a product; None without one."""
        return self.level * np.float32(1 / (6 * self.bound)) if self.bound else self.level

    def values(self):
        if self.scales is None:
            return self.codes
        return self.codes * np.repeat(self.scales, self.vec, 1)[:, : self.codes.shape[1]]


def member(text, copy, group, rows, start=None, columnwise=False):
    """Group ``group`` of what a GEMM takes (codes, scales, level); without ``start`` the tensor is
    uniform.
    """
    fmt, (codes, *rest) = parse(text), copy
    slot, is_uniform = 0, start is None
    if is_uniform:
        codes, start = codes[group], 0
    else:
        slot = 128 * (start // 128 + group)
    if not columnwise:
        codes = _code_values(codes[start : start + rows])
    elif fmt.columnwise == "transposed":
        a_byte = 2 if codes.dtype == U8 else 1
        codes = _code_values(codes[:, slot // a_byte : -(-(slot + rows) // a_byte)])[:, :rows]
    else:
        codes = _code_values(codes[slot : slot + rows]).T
    values = codes.numpy()
    level = None if fmt.global_scale is None else rest[-1].numpy()
    if level is not None:
        by_row = fmt.global_scale_for(columnwise).per == "row"
        level = level[start : start + rows] if by_row and not is_uniform else level[group]
        level = level[:, None] if by_row else level
    if fmt.scale is None:
        return Member(values, None, level, True, values.shape[1])
    vec, scales = fmt.scale.vec_size, rest[0]
    if copy[0].dim() == 3:
        scales = scales[group]
    found = np.zeros((len(values), math.ceil(values.shape[1] / vec)))
    numbers = _scale_values(fmt, scales)
    for i, j in np.ndindex(*found.shape):
        # Row and block of a matrix that has the group's slots along one of its dimensions.
        row, block = (i, slot // vec + j) if columnwise else (slot + i, j)
        found[i, j] = numbers[_place(fmt, row, block, columnwise)]
    return Member(
        values, found, level, not fmt.is_2d or vec < 128, vec, fmt.e4m3_max if vec == 16 else 0
    )


def _code_values(codes):
    """fp64."""
    return e2m1_values(codes) if codes.dtype == U8 else codes.double()


def _scale_values(fmt, scales):
    """fp64 values; bytes are E8M0, of NVFP4 E4M3."""
    if fmt.scale.vec_size == 16:
        scales = scales.view(E4M3)
    return (
        np.exp2(scales.numpy().astype(np.float64) - 127)
        if scales.dtype == U8
        else scales.double().numpy()
    )


def _place(fmt, row, block, columnwise):
    if fmt.scale.layout == "tiles_128x4":
        byte = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        return row // 128, block // 4, byte
    if fmt.is_2d:
        return (block, row // 128) if columnwise else (row // 128, block)
    return block, row


def dequantized(text, copy, rows, offs=None, columnwise=False, undo=None):
    """fp32 values of a direction as the contract says: (T, K), or (G, M, K) without ``offs``; rows
    of the tail are 0.

    ``undo`` is of 16 rows, those behind a group's last one among them, over which its rows are
    spread.
    """
    parts, ends = [], [rows] * len(copy[0]) if offs is None else offs.tolist()
    start = None if offs is None else 0
    for group, end in enumerate(ends):
        count = end - (start or 0)
        of = member(text, copy, group, -(-count // 16) * 16 if undo else count, start, columnwise)
        factors = of.scales.astype(np.float32)
        if of.level is not None:
            factors = factors * of.level * np.float32(1 / (6 * of.bound))
        part = of.codes.astype(np.float32) * np.repeat(factors, of.vec, 1)[:, : of.codes.shape[1]]
        part = part.T if columnwise else part
        for first in range(0, len(part), 16) if undo else ():
            part[first : first + 16] = undo(part[first : first + 16].copy())
        parts.append(torch.from_numpy(part[:count]))
        start = None if offs is None else end
    if offs is None:
        return torch.stack(parts)
    return torch.cat([*parts, torch.zeros(rows - end, parts[0].shape[1])])


def dot_fp64(a, b):
    return (a.values() @ b.values().T).astype(np.float32)


def dot_sixteen(a, b):
    """Blocks of 16, whose sums are exact in fp64, each added to an fp32 accumulator."""
    left, right = a.values(), b.values()
    total = np.zeros((len(left), len(right)), np.float32)
    for start in range(0, left.shape[1], 16):
        part = slice(start, start + 16)
        total = (total.astype(np.float64) + left[:, part] @ right[:, part].T).astype(np.float32)
    return total


def dot_blocks(a, b):
    """Partial sums of 128, promoted by fma: the scale of single rows first, A's if both have."""
    left, right = _integers(a), _integers(b)
    out = np.zeros((len(left), len(right)), np.float32)
    for i, j in np.ndindex(*out.shape):
        total = 0.0
        for block, start in enumerate(range(0, left.shape[1], 128)):
            part = slice(start, start + 128)
            partial = fp32(
                sum(x * y for x, y in zip(left[i, part], right[j, part], strict=True)) * _UNIT**2
            )
            first, second = a.scales[i, block], b.scales[j, block]
            if not a.per_row:
                first, second = second, first
            total = fp32(
                Fraction(fp32(Fraction(partial) * Fraction(first))) * Fraction(second)
                + Fraction(total)
            )
        out[i, j] = total
    return out


def _integers(x):
    """Codes in units, as Python's integers."""
    return np.vectorize(int, otypes=[object])(x.codes / float(_UNIT))
