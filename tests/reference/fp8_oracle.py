"""Values and products of quantized buffers.

Values follow the layout contract, sums the order documented in ``reference.dots``.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

from cute_kernels.formats import parse
from tests.helpers import E4M3, U8, e2m1_values

from .rational import fp32

#: All codes are multiples of this unit.
_UNIT = Fraction(1, 2**16)


class Member(NamedTuple):
    """One group.

    Attributes:
        codes: Values of the codes, (R, K).
        scales: Values of the block scales, (R, blocks), or None.
        level: The global scale, fp32, or (R, 1) if row-scaled, or None.
        per_row: True if each row has block scales of its own.
        vec: The number of elements per block along K.
        bound: The largest block scale of NVFP4, otherwise 0.
    """

    codes: np.ndarray
    scales: np.ndarray | None
    level: np.float32 | np.ndarray | None
    per_row: bool
    vec: int
    bound: int = 0

    @property
    def factor(self):
        """Factor of a product by the global scale, or None without one."""
        return self.level * np.float32(1 / (6 * self.bound)) if self.bound else self.level

    def values(self):
        if self.scales is None:
            return self.codes
        return self.codes * np.repeat(self.scales, self.vec, 1)[:, : self.codes.shape[1]]


def member(text, copy, group, rows, start=None, columnwise=False):
    """Return one group of the tensors that a GEMM takes: codes, block scales, global scale.

    Without ``start`` the tensor is uniform.
    """
    fmt, (codes, *scale_tensors) = parse(text), copy
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
    level = None if fmt.global_scale is None else scale_tensors[-1].numpy()
    if level is not None:
        is_per_row = fmt.global_scale_for(columnwise).per == "row"
        level = level[start : start + rows] if is_per_row and not is_uniform else level[group]
        level = level[:, None] if is_per_row else level
    if fmt.scale is None:
        return Member(values, None, level, True, values.shape[1])
    vec, scales = fmt.scale.vec_size, scale_tensors[0]
    if copy[0].dim() == 3:
        scales = scales[group]
    values_of_scales = np.zeros((len(values), math.ceil(values.shape[1] / vec)))
    stored = _scale_values(fmt, scales)
    for i, j in np.ndindex(*values_of_scales.shape):
        # Position in a matrix with the group's slots along one of its dimensions.
        row, block = (i, slot // vec + j) if columnwise else (slot + i, j)
        values_of_scales[i, j] = stored[_scale_index(fmt, row, block, columnwise)]
    return Member(
        values,
        values_of_scales,
        level,
        not fmt.is_2d or vec < 128,
        vec,
        fmt.e4m3_max if vec == 16 else 0,
    )


def _code_values(codes):
    """Return fp64 values of FP8 codes or packed E2M1 codes."""
    return e2m1_values(codes) if codes.dtype == U8 else codes.double()


def _scale_values(fmt, scales):
    """Return fp64 values of scales; bytes are E8M0, or E4M3 for NVFP4."""
    if fmt.scale.vec_size == 16:
        scales = scales.view(E4M3)
    return (
        np.exp2(scales.numpy().astype(np.float64) - 127)
        if scales.dtype == U8
        else scales.double().numpy()
    )


def _scale_index(fmt, row, block, columnwise):
    """Return the index of a block's scale in its buffer."""
    if fmt.scale.layout == "tiles_128x4":
        byte = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        return row // 128, block // 4, byte
    if fmt.is_2d:
        return (block, row // 128) if columnwise else (row // 128, block)
    return block, row


def dequantized(text, copy, rows, offs=None, columnwise=False, undo=None):
    """Return fp32 values of one copy: (T, K), or (G, M, K) without ``offs``.

    Rows of the tail are 0. ``undo`` inverts the transform of 16 rows; the last 16 rows of a group
    include slots behind its last row.
    """
    values, end_rows = [], [rows] * len(copy[0]) if offs is None else offs.tolist()
    start = None if offs is None else 0
    for group, end in enumerate(end_rows):
        rows_of_group = end - (start or 0)
        group_member = member(
            text,
            copy,
            group,
            -(-rows_of_group // 16) * 16 if undo else rows_of_group,
            start,
            columnwise,
        )
        factors = group_member.scales.astype(np.float32)
        if group_member.level is not None:
            factors = factors * group_member.level * np.float32(1 / (6 * group_member.bound))
        group_values = (
            group_member.codes.astype(np.float32)
            * np.repeat(factors, group_member.vec, 1)[:, : group_member.codes.shape[1]]
        )
        group_values = group_values.T if columnwise else group_values
        for row in range(0, len(group_values), 16) if undo else ():
            group_values[row : row + 16] = undo(group_values[row : row + 16].copy())
        values.append(torch.from_numpy(group_values[:rows_of_group]))
        start = None if offs is None else end
    if offs is None:
        return torch.stack(values)
    return torch.cat([*values, torch.zeros(rows - end, values[0].shape[1])])


def dot_fp64(a, b):
    return (a.values() @ b.values().T).astype(np.float32)


def dot_sixteen(a, b):
    """Sum blocks of 16 exactly in fp64, and add each to an fp32 accumulator."""
    a_values, b_values = a.values(), b.values()
    total = np.zeros((len(a_values), len(b_values)), np.float32)
    for start in range(0, a_values.shape[1], 16):
        block = slice(start, start + 16)
        total = (total.astype(np.float64) + a_values[:, block] @ b_values[:, block].T).astype(
            np.float32
        )
    return total


def dot_blocks(a, b):
    """Sum blocks of 128, promoted by fma: scales per row first, A's first if both have them."""
    a_codes, b_codes = _integers(a), _integers(b)
    out = np.zeros((len(a_codes), len(b_codes)), np.float32)
    for i, j in np.ndindex(*out.shape):
        total = 0.0
        for block, start in enumerate(range(0, a_codes.shape[1], 128)):
            depth = slice(start, start + 128)
            partial = fp32(
                sum(x * y for x, y in zip(a_codes[i, depth], b_codes[j, depth], strict=True))
                * _UNIT**2
            )
            inner_scale, outer_scale = a.scales[i, block], b.scales[j, block]
            if not a.per_row:
                inner_scale, outer_scale = outer_scale, inner_scale
            total = fp32(
                Fraction(fp32(Fraction(partial) * Fraction(inner_scale))) * Fraction(outer_scale)
                + Fraction(total)
            )
        out[i, j] = total
    return out


def _integers(x):
    """Return codes as Python integers, in units of ``_UNIT``."""
    return np.vectorize(int, otypes=[object])(x.codes / float(_UNIT))
