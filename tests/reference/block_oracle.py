"""MXFP8 and FP8Block as specified, by search among all values. Independent of the package."""

import dataclasses

import numpy as np

from .oracle import ELEMENTS, ceil_div, f32, filled, fp8_value, scale_byte

np.seterr(all="ignore")

#: The largest finite number of each input dtype.
LARGEST = {
    "bfloat16": f32(2.0**127 * (2 - 2.0**-7)),
    "float16": f32(65504),
    "float32": f32(2.0**127 * (2 - 2.0**-23)),
}
#: Values of the E8M0 codes 0 to 254.
POWERS = 2.0 ** (np.arange(255, dtype=np.float64) - 127)


def fp8_magnitudes(element):
    return np.array([fp8_value(code, element) for code in range(ELEMENTS[element][3] + 1)])


def fp8_max(element):
    return f32(fp8_magnitudes(element)[-1])


def round_fp8(values, element):
    """Return the nearest FP8 codes, ties to even, saturating; NaN gives 0x7F."""
    table = fp8_magnitudes(element)
    middles = (table[1:] + table[:-1]) / 2
    magnitude = np.abs(values.astype(np.float64))
    below = np.searchsorted(middles, magnitude)  # number of middles below the magnitude
    is_tie = magnitude == middles[np.minimum(below, len(middles) - 1)]
    code = below + (is_tie & (below % 2 == 1))
    code = code | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def round_e8m0(v):
    """Return the code of the smallest power of two that is at least ``v``; 255 for NaN."""
    return np.where(
        np.isnan(v), 255, np.minimum(np.searchsorted(POWERS, v.astype(np.float64)), 254)
    ).astype(np.uint8)


def repeated(per_block, height, width, shape):
    """Repeat the value of each block over its elements, cut to ``shape``."""
    return per_block.repeat(height, 0).repeat(width, 1)[: shape[0], : shape[1]]


def block_amaxes(x, height, width):
    """Return the largest magnitude of each block."""
    padded = np.pad(np.abs(x), [(0, -n % b) for n, b in zip(x.shape, (height, width), strict=True)])
    blocks = padded.reshape(-1, height, padded.shape[1] // width, width)
    return np.fmax.reduce(blocks, axis=(1, 3), initial=f32(0)).astype(f32)


@dataclasses.dataclass(frozen=True)
class Rules:
    """A format.

    ``rows`` is the height of a rowwise block: 1, or ``vec`` for a square block.
    """

    kind: str
    element: str
    rows: int
    vec: int
    pow2: bool
    epsilon: float

    @property
    def is_mx(self):
        return self.kind == "mxfp8"

    @property
    def stored(self):
        return np.uint8 if self.is_mx else f32

    def scales(self, a, dtype):
        """Return stored scales and encode factors of blocks with amaxes ``a``."""
        largest = fp8_max(self.element)
        if self.is_mx:
            code = round_e8m0(a * f32(1 / float(largest)))
            return code, (2.0 ** (127 - code.astype(np.float64))).astype(f32)
        a = np.maximum(a, f32(self.epsilon))
        scale = largest / a
        scale = np.where(np.isinf(scale), LARGEST[dtype], scale)
        scale = np.where((a == 0) | np.isinf(a), f32(1), scale).astype(f32)
        if self.pow2:
            scale = (2.0 ** np.floor(np.log2(scale.astype(np.float64)))).astype(f32)
        return f32(1) / scale, scale

    def blocks(self, x, height, width, dtype):
        """Return codes (R, K) and stored scales of the blocks of x."""
        scales, enc = self.scales(block_amaxes(x, height, width), dtype)
        return round_fp8(x * repeated(enc, height, width, x.shape), self.element), scales


def rules_of(text):
    """Parse a format text."""
    kind, _, options = text.partition(":")
    options_by_name = dict(option.split("=") for option in options.split(",") if option)
    vec = 32 if kind == "mxfp8" else 128
    rows, element = vec if "block" in options_by_name else 1, options_by_name.get("dtype", "e4m3")
    return Rules(
        kind,
        element,
        rows,
        vec,
        options_by_name.get("pow2_scales") != "false",
        float(options_by_name.get("amax_epsilon", 0)),
    )


def quantize(x, groups, num_tiles, rules, dtype, fill=0):
    """Return buffers by name in the layout of the contract; unwritten bytes keep ``fill``."""
    rows, cols = x.shape
    slots, vec = 128 * num_tiles, rules.vec
    wide, padded = ceil_div(cols, vec), 128 * ceil_div(cols, 128)
    if rules.is_mx:
        shape = (num_tiles, ceil_div(wide, 4), 512)
        shape_t, codes_t = (padded // 128, num_tiles, 512), (slots, cols)
    elif rules.rows > 1:
        shape, shape_t, codes_t = (num_tiles, wide), (num_tiles, wide), (cols, slots)
    else:
        shape, shape_t, codes_t = (wide, slots), (num_tiles, cols), (cols, slots)
    out = {
        "codes": filled((rows, cols), np.uint8, fill),
        "scales": filled(shape, rules.stored, fill),
        "codes_t": filled(codes_t, np.uint8, fill),
        "scales_t": filled(shape_t, rules.stored, fill),
    }
    for group in groups:
        if group.end == group.start:
            continue
        rows_of_group, tiles = (
            slice(group.start, group.end),
            slice(group.tile, group.tile + group.tiles),
        )
        values = x[rows_of_group]
        codes, scales = rules.blocks(values, rules.rows, vec, dtype)
        out["codes"][rows_of_group] = codes
        _store_rowwise(out["scales"], scales, group, tiles, rules)
        if rules.rows == 1:
            codes, scales = rules.blocks(values, vec, 1, dtype)
        _store_columnwise(out["codes_t"], out["scales_t"], codes, scales, group, tiles, rules)
    return out


def _store_rowwise(buffer, scales, group, tiles, rules):
    """Store the rowwise scales of one group."""
    first_slot, count = 128 * group.tile, group.end - group.start
    if rules.is_mx:
        buffer[tiles] = 0
        row, block = np.indices((count, scales.shape[1]))
        address = scale_byte(first_slot + row, block, 4 * buffer.shape[1])
        buffer.reshape(-1)[address] = scales[row // rules.rows, block]
    elif rules.rows > 1:
        buffer[tiles] = scales
    else:
        buffer[:, 128 * tiles.start : 128 * tiles.stop] = 0
        buffer[:, first_slot : first_slot + count] = scales.T


def _store_columnwise(codes_t, scales_t, codes, scales, group, tiles, rules):
    """Store the columnwise codes and scales of one group."""
    first_slot, count = 128 * group.tile, group.end - group.start
    slots = slice(128 * tiles.start, 128 * tiles.stop)
    if not rules.is_mx:
        codes_t[:, slots] = 0
        codes_t[:, first_slot : first_slot + count] = codes.T
        scales_t[tiles] = scales
        return
    codes_t[slots] = 0
    codes_t[first_slot : first_slot + count] = codes
    scales_t[:, tiles] = 0
    column, block = np.indices((codes.shape[1], scales.shape[0]))
    address = scale_byte(column, 4 * group.tile + block, 4 * scales_t.shape[1])
    wide = 1 if rules.rows == 1 else rules.vec
    scales_t.reshape(-1)[address] = scales[block, column // wide]
