"""NVFP4 as specified, scalar by scalar, by search among all values. Independent of the package."""

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
    """Return the value of an FP8 code that is a number."""
    _, mantissa_bits, bias, _ = ELEMENTS[element]
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (1 << mantissa_bits) - 1
    sign = -1.0 if code & 0x80 else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def e4m3_value(byte):
    return math.nan if byte & 0x7F == 0x7F else fp8_value(byte, "e4m3")


def nearest(v, magnitudes, sign, nan):
    """Return the code of the nearest magnitude with the sign bit: ties to even, saturating.

    NaN gives ``nan``.
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
    """Return the largest magnitude: NaN is ignored, and no values give 0."""
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
    """Return stored byte and encode factor of a block with amax ``a`` in a group with amax g."""
    s_dec, mult = global_scale(g)
    d = min(a * mult, FMAX)
    byte = round_e4m3(min(max(d, f32(-448)), f32(448)))
    enc = min(f32(1) / (f32(e4m3_value(byte)) * s_dec), FMAX)
    return byte, enc


class Rule:
    """Rounding, scales and columnwise values of plain NVFP4; variants override them."""

    def scale(self, block, a, g):
        """Return stored byte and encode factor of a block (rows, 16) with amax ``a``."""
        return block_scale(a, g)

    def encode(self, values, enc, positions):
        """Return codes.

        A position is (direction, number of the block, index in the block). Direction 1 is
        columnwise.
        """
        return [round_e2m1(v * enc) for v in values]

    def columns(self, values):
        """Return the values that the columnwise copy of a group's rows encodes."""
        return values


def scale_byte(row, block, blocks):
    """Return the address of a scale in 128x4 tiles; ``blocks`` is a multiple of 4."""
    tile = (row // 128) * (blocks // 4) + block // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + block % 4


@dataclasses.dataclass
class Group:
    """Rows ``start`` to ``end`` of one group, its first slot tile and its number of tiles."""

    start: int
    end: int
    tile: int
    tiles: int


def ragged_groups(offs, rows):
    """Return groups with monotonic end rows within the input, and the number of tiles."""
    groups, start = [], 0
    for g, end in enumerate(offs):
        end = max(start, min(max(end, 0), rows))
        groups.append(Group(start, end, start // 128 + g, ceil_div(end - start, 128)))
        start = end
    return groups, rows // 128 + len(offs)


def uniform_groups(count, rows):
    tiles_per_group = ceil_div(rows, 128)
    return [
        Group(g * rows, (g + 1) * rows, g * tiles_per_group, tiles_per_group) for g in range(count)
    ], count * tiles_per_group


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
    rule=Rule(),  # noqa: B008  (has no state)
    fill=0,
):
    """Return both copies of fp32 values by name, shaped as by the op.

    Values are (T, K), or (G, M, K) without ``offs``. ``given_amax_t`` is the amax of a transformed
    columnwise copy. Unwritten bytes keep ``fill``.
    """
    uniform, (*batch, rows, cols) = offs is None, x.shape
    groups, tiles = uniform_groups(*batch, rows) if uniform else ragged_groups(offs, rows)
    x, tiles_per_group = x.reshape(-1, cols), tiles // len(groups) if uniform else tiles
    columns = [rule.columns(x[g.start : g.end]) for g in groups]
    per_group = group_amaxes(x, groups) if given_amax is None else [f32(a) for a in given_amax]
    amaxes_t = given_amax if given_amax_t is None else given_amax_t
    per_group_t = [absmax(c) for c in columns] if amaxes_t is None else [f32(a) for a in amaxes_t]
    out = {
        "codes": filled((*batch, rows, cols // 2), np.uint8, fill),
        "scales": filled((*batch, tiles_per_group, ceil_div(cols, 64), 512), np.uint8, fill),
        "amax": filled((*batch, rows), f32, fill) if row_scaled else np.array(per_group, f32),
        "codes_t": filled((*batch, cols, 64 * tiles_per_group), np.uint8, fill),
        "scales_t": filled((*batch, ceil_div(cols, 128), 2 * tiles_per_group, 512), np.uint8, fill),
        "amax_t": np.array(per_group_t, f32),
    }
    codes, scales = (
        out["codes"].reshape(len(x), cols // 2),
        out["scales"].reshape(tiles, ceil_div(cols, 64), 512),
    )
    for g, (group, amax) in enumerate(zip(groups, per_group, strict=True)):
        values = x[group.start : group.end]
        row_amaxes = [absmax(v) if row_scaled else amax for v in values]
        if row_scaled:
            out["amax"].reshape(-1)[group.start : group.end] = row_amaxes
        squares = _square_scales(values, amax, rule) if block_2d else None
        _write_rowwise(codes, scales, group, values, row_amaxes, squares, rule)
        columnwise_buffers = [
            out[name][g] if uniform else out[name] for name in ("codes_t", "scales_t")
        ]
        _write_columnwise(
            *columnwise_buffers,
            group,
            0 if uniform else group.tile,
            columns[g],
            per_group_t[g],
            squares,
            rule,
        )
    return out


def _square_scales(values, amax, rule):
    rows, cols = values.shape

    def scale(r, c):
        square = values[r : r + 16, c : c + 16]
        return rule.scale(square, absmax(square), amax)

    return [[scale(r, c) for c in range(0, cols, 16)] for r in range(0, rows, 16)]


def _write_rowwise(codes, scales, group, values, row_amaxes, squares, rule):
    """Write codes and scales of a group's rowwise copy."""
    scales[group.tile : group.tile + group.tiles] = 0
    first_slot, blocks, flat = group.tile * 128, 4 * scales.shape[1], scales.reshape(-1)
    for r, row in enumerate(values):
        for block in range(len(row) // 16):
            chunk = row[16 * block : 16 * block + 16]
            if squares is None:
                byte, enc = rule.scale(chunk[None], absmax(chunk), row_amaxes[r])
            else:
                byte, enc = squares[r // 16][block]
            flat[scale_byte(first_slot + r, block, blocks)] = byte
            number = (group.start + r) * (len(row) // 16) + block
            code = rule.encode(chunk, enc, [(0, number, i) for i in range(16)])
            for j in range(8):
                codes[group.start + r, 8 * block + j] = code[2 * j] | code[2 * j + 1] << 4


def _write_columnwise(codes_t, scales_t, group, first_tile, values, amax, squares, rule):
    """Write codes and scales of a group's columnwise copy."""
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
                positions = [(1, number, i) for i in range(16)]
            else:
                byte, enc = squares[block][column // 16]
                first_row = group.start + 16 * block
                numbers = ((first_row + i) * (cols // 16) + column // 16 for i in range(16))
                positions = [(0, number, column % 16) for number in numbers]
            flat[scale_byte(column, 8 * first_tile + block, blocks)] = byte
            for i, code in enumerate(rule.encode(chunk, enc, positions)):
                byte_index = 64 * first_tile + (16 * block + i) // 2
                codes_t[column, byte_index] |= code << 4 * (i % 2)
