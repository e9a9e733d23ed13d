"""FP8 with one scale per group as specified, in fp32 scalars. Independent of the package."""

import numpy as np

from .block_oracle import fp8_max, round_fp8
from .oracle import FMAX, absmax, ceil_div, f32, fp8_value

np.seterr(all="ignore")


def current_scale(amax, element):
    """Return the scale that follows from the amax of a group."""
    if amax == 0 or not np.isfinite(amax):
        return f32(1)
    scale = fp8_max(element) / amax
    return FMAX if np.isinf(scale) else scale


def quantize(x, end_rows, element, scales=None, nan_scales=False):
    """Return the buffers of both copies of (T, K) fp32 rows by name.

    Slots without a row are zeros.

    Args:
        x: (T, K) fp32 rows.
        end_rows: End row of each group.
        element: ``"e4m3"`` or ``"e5m2"``.
        scales: Scale of each group (delayed scaling), or None to compute it (current scaling).
        nan_scales: Infinities make ``scale_inv`` NaN.
    """
    rows, cols = x.shape
    slots = 128 * (ceil_div(rows, 128) + len(end_rows))
    out = {name: np.zeros(len(end_rows), f32) for name in ("scale_inv", "scale", "amax")}
    out |= {"codes": np.zeros((rows, cols), np.uint8), "codes_t": np.zeros((cols, slots), np.uint8)}
    start = 0
    for group, end in enumerate(end_rows):
        values = x[start:end]
        amax = absmax(values)
        scale = current_scale(amax, element) if scales is None else f32(scales[group])
        is_marked = nan_scales and np.isinf(amax)
        out["scale_inv"][group] = f32(np.nan) if is_marked else f32(1) / scale
        out["scale"][group], out["amax"][group] = scale, amax
        codes = round_fp8(values * scale, element)
        slot = 128 * (start // 128 + group)
        out["codes"][start:end], out["codes_t"][:, slot : slot + len(codes)] = codes, codes.T
        start = end
    return out


def dequantize(codes, scale_inv, end_rows, element):
    """Return the fp32 values of (T, K) codes; rows of no group are zeros."""
    table = np.array([fp8_value(code, element) for code in range(256)], f32)
    largest = {"e4m3": 0x7E, "e5m2": 0x7B}[element]
    table[np.arange(256) % 128 > largest] = np.nan
    values, start = np.zeros(codes.shape, f32), 0
    for group, end in enumerate(end_rows):
        values[start:end] = table[codes[start:end]] * scale_inv[group]
        start = end
    return values
