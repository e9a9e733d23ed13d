"""NVFP4 as specified, scalar by scalar, by search among all values; shares nothing with the
package.
"""

import bisect
import dataclasses
import math

import numpy as np

f32 = np.float32
np.seterr(all="ignore")

FMAX = f32(np.finfo(f32).max)
ONE_SIXTH = f32(1.0 / 6.0)
RCP_2688 = f32(1.0 / 2688.0)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def ceil_div(a, b):
    return -(-a // b)


#: Exponent bits, mantissa bits, bias and largest finite code.
ELEMENTS = {"e4m3": (4, 3, 7, 0x7E), "e5m2": (5, 2, 15, 0x7B)}


def fp8_value(code, element):
    _, mantissa_bits, bias, _ = ELEMENTS[element]
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (1 << mantissa_bits) - 1
    sign = -1.0 if code & 0x80 else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def e4m3_value(byte):
    return math.nan if byte & 0x7F == 0x7F else fp8_value(byte, "e4m3")


def nearest(v, magnitudes, sign, nan):
    """The code of the magnitude nearest to ``v``, ties to the even code, saturating, with the
    sign's bit.
    """
    v = float(v)
    if math.isnan(v):
        return nan
    magnitude = min(abs(v), magnitudes[-1])
    code = bisect.bisect_right(magnitudes, magnitude) - 1
    if magnitudes[code] != magnitude:
        middle = (magnitudes[code] + magnitudes[code + 1]) / 2
        code += magnitude > middle or (magnitude == middle and code % 2 == 1)
    return code | (sign if math.copysign(1.0, v) < 0 else 0)


_E4M3_MAGNITUDES = [e4m3_value(byte) for byte in range(0x7F)]


def round_e4m3(v):
    return nearest(v, _E4M3_MAGNITUDES, 0x80, 0x7F)


def round_e2m1(y):
    return nearest(y, E2M1_VALUES, 8, 7)


def e2m1_value(code):
    return -E2M1_VALUES[code & 7] if code & 8 else E2M1_VALUES[code]


def absmax(values):
    """Largest magnitude; NaN is passed over; 0 of nothing."""
    largest = f32(0)
    for v in np.abs(values).ravel():
        if v > largest:
            largest = v
    return largest


def encode_scale(largest, g):
    s_enc = largest / g
    if not s_enc <= FMAX:
        s_enc = FMAX
    return f32(1) if g == 0 or s_enc == 0 else s_enc


def global_scale(g):
    s_enc = encode_scale(f32(2688), g)
    return f32(1) / s_enc, s_enc * ONE_SIXTH


def block_scale(a, g):
    s_dec, mult = global_scale(g)
    d = min(a * mult, FMAX)
    byte = round_e4m3(min(max(d, f32(-448)), f32(448)))
    enc = min(f32(1) / (f32(e4m3_value(byte)) * s_dec), FMAX)
    return byte, enc


class Rule:
    """What a variant of NVFP4 does otherwise; this one nothing."""

    def scale(self, block, a, g):
        """Stored byte and encode factor of a block (rows, 16) of amax ``a``."""
        return block_scale(a, g)

    def encode(self, values, enc, places):
        """Codes; a place is direction (1 is columnwise), number of the block in it, and place in
        the block.
        """
        return [round_e2m1(v * enc) for v in values]

    def columns(self, values):
        """What the columnwise copy of a group's rows is of."""
        return values


def scale_byte(row, block, blocks):
    """Address of a scale in a matrix of 128x4 tiles; ``blocks`` is a multiple of 4."""
    tile = (row // 128) * (blocks // 4) + block // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + block % 4


@dataclasses.dataclass
class Group:
    start: int
    end: int
    tile: int
    tiles: int


def ragged_groups(offs, rows):
    """Groups that end at ``offs``, made monotonic and cut to the input; and the tiles in all."""
    groups, start = [], 0
    for g, end in enumerate(offs):
        end = max(start, min(max(end, 0), rows))
        groups.append(Group(start, end, start // 128 + g, ceil_div(end - start, 128)))
        start = end
    return groups, rows // 128 + len(offs)


def uniform_groups(count, rows):
    each = ceil_div(rows, 128)
    return [Group(g * rows, (g + 1) * rows, g * each, each) for g in range(count)], count * each


def group_amaxes(x, groups):
    return [absmax(x[g.start : g.end]) for g in groups]


def filled(shape, dtype, fill):
    size = np.dtype(dtype).itemsize * math.prod(shape)
    return np.full(size, fill, np.uint8).view(dtype).reshape(shape)


def buffers(
    x,
    offs,
    *,
    row_scaled=False,
    block_2d=False,
    given_amax=None,
    given_amax_t=None,
    rule=Rule(),  # noqa: B008  (it has no state)
    fill=0,
):
    """Both copies of fp32 values (T, K), or of (G, M, K) without ``offs``, by name, shaped as by
    the op.

    ``given_amax_t`` is that of a transformed columnwise copy. Bytes that nobody writes keep the
    fill value.
    """
    uniform, (*batch, rows, cols) = offs is None, x.shape
    groups, tiles = uniform_groups(*batch, rows) if uniform else ragged_groups(offs, rows)
    x, each = x.reshape(-1, cols), tiles // len(groups) if uniform else tiles
    columns = [rule.columns(x[g.start : g.end]) for g in groups]
    per_group = group_amaxes(x, groups) if given_amax is None else [f32(a) for a in given_amax]
    given_t = given_amax if given_amax_t is None else given_amax_t
    per_group_t = [absmax(c) for c in columns] if given_t is None else [f32(a) for a in given_t]
    found = {
        "codes": filled((*batch, rows, cols // 2), np.uint8, fill),
        "scales": filled((*batch, each, ceil_div(cols, 64), 512), np.uint8, fill),
        "amax": filled((*batch, rows), f32, fill) if row_scaled else np.array(per_group, f32),
        "codes_t": filled((*batch, cols, 64 * each), np.uint8, fill),
        "scales_t": filled((*batch, ceil_div(cols, 128), 2 * each, 512), np.uint8, fill),
        "amax_t": np.array(per_group_t, f32),
    }
    codes, scales = (
        found["codes"].reshape(len(x), cols // 2),
        found["scales"].reshape(tiles, ceil_div(cols, 64), 512),
    )
    for g, (group, amax) in enumerate(zip(groups, per_group, strict=True)):
        values = x[group.start : group.end]
        second = [absmax(v) if row_scaled else amax for v in values]
        if row_scaled:
            found["amax"].reshape(-1)[group.start : group.end] = second
        squares = _square_scales(values, amax, rule) if block_2d else None
        _write_rowwise(codes, scales, group, values, second, squares, rule)
        own = [found[name][g] if uniform else found[name] for name in ("codes_t", "scales_t")]
        _write_columnwise(
            *own, group, 0 if uniform else group.tile, columns[g], per_group_t[g], squares, rule
        )
    return found


def _square_scales(values, amax, rule):
    rows, cols = values.shape

    def scale(r, c):
        square = values[r : r + 16, c : c + 16]
        return rule.scale(square, absmax(square), amax)

    return [[scale(r, c) for c in range(0, cols, 16)] for r in range(0, rows, 16)]


def _write_rowwise(codes, scales, group, values, second, squares, rule):
    scales[group.tile : group.tile + group.tiles] = 0
    first, blocks, flat = group.tile * 128, 4 * scales.shape[1], scales.reshape(-1)
    for r, row in enumerate(values):
        for block in range(len(row) // 16):
            chunk = row[16 * block : 16 * block + 16]
            if squares is None:
                byte, enc = rule.scale(chunk[None], absmax(chunk), second[r])
            else:
                byte, enc = squares[r // 16][block]
            flat[scale_byte(first + r, block, blocks)] = byte
            number = (group.start + r) * (len(row) // 16) + block
            code = rule.encode(chunk, enc, [(0, number, i) for i in range(16)])
            for j in range(8):
                codes[group.start + r, 8 * block + j] = code[2 * j] | code[2 * j + 1] << 4


def _write_columnwise(codes_t, scales_t, group, first_tile, values, amax, squares, rule):
    rows, cols = values.shape
    last_tile, blocks, flat = first_tile + group.tiles, 4 * scales_t.shape[1], scales_t.reshape(-1)
    codes_t[:, 64 * first_tile : 64 * last_tile] = 0
    scales_t[:, 2 * first_tile : 2 * last_tile] = 0
    for column in range(cols):
        for block in range(ceil_div(rows, 16)):
            chunk = values[16 * block : 16 * block + 16, column]
            if squares is None:
                byte, enc = rule.scale(chunk[None], absmax(chunk), amax)
                number = (8 * group.tile + block) * cols + column
                places = [(1, number, i) for i in range(16)]
            else:
                byte, enc = squares[block][column // 16]
                first = group.start + 16 * block
                numbers = ((first + i) * (cols // 16) + column // 16 for i in range(16))
                places = [(0, number, column % 16) for number in numbers]
            flat[scale_byte(column, 8 * first_tile + block, blocks)] = byte
            for i, code in enumerate(rule.encode(chunk, enc, places)):
                at = 64 * first_tile + (16 * block + i) // 2
                codes_t[column, at] |= code << 4 * (i % 2)
