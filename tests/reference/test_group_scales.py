"""FP8 with one scale per group, current and delayed, against a NumPy oracle: every byte."""

import numpy as np
import pytest
import torch

from cute_kernels.formats import parse
from tests.helpers import (
    BF16,
    DTYPES,
    F32,
    SPLITS,
    U8,
    assert_same_bytes,
    offs_from_splits,
    offs_tensor,
    ops,
    sample,
    special_values,
)

from . import group_scale_oracle as oracle

ELEMENTS = ("e4m3", "e5m2")
every_element = pytest.mark.parametrize("element", ELEMENTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
nan_scales = pytest.mark.parametrize("nan_scales", [False, True])


def text_of(element, scales, nan_scales=False):
    """Return the text of a format."""
    options = {
        "dtype=e5m2": element == "e5m2",
        "scaling=delayed": scales is not None,
        "nan_scales": nan_scales,
    }
    return f"fp8:{','.join(name for name, is_set in options.items() if is_set)}".rstrip(":")


def check(x, splits, element, scales=None, nan_scales=False):
    """Compare all buffers of both copies, and the values that they decode to."""
    text, offs = text_of(element, scales, nan_scales), offs_from_splits(splits)
    fmt, rows = parse(text), sum(splits)
    scale = None if scales is None else torch.from_numpy(scales)
    got = ops.grouped_quantize(x, text, offs, columnwise=True, scale=scale)
    names = dict.fromkeys((*fmt.buffer_names(False), *fmt.buffer_names(True)))
    named = dict(zip(names, got, strict=True))
    want = oracle.quantize(x.float().numpy(), offs.tolist(), element, scales, nan_scales)
    assert named.keys() == want.keys()
    for name in ("scale", "scale_inv", "amax"):
        assert_same_bytes(named[name], torch.from_numpy(want[name]), name, any_nan=True)
    codes = named["codes"].view(U8)[:rows]
    assert_same_bytes(codes, torch.from_numpy(want["codes"])[:rows], "codes")
    start = 0
    for group, size in enumerate(splits):
        # Slots of tiles that no group owns are unspecified.
        slots = slice(128 * (start // 128 + group), 128 * (start // 128 + group) + size)
        columns = torch.from_numpy(want["codes_t"])[:, slots]
        assert_same_bytes(named["codes_t"].view(U8)[:, slots], columns, f"codes_t of {group}")
        start += size
    stored = [named[name] for name in fmt.operand_names(False)]
    values = ops.grouped_dequantize(stored[0], stored[1:], text, len(x), F32, offs, False)
    decoded = oracle.dequantize(want["codes"], want["scale_inv"], offs.tolist(), element)
    assert_same_bytes(values[:rows], torch.from_numpy(decoded)[:rows], "values", any_nan=True)


def extreme_scales(groups):
    """Return scales from the smallest normal number to the largest one."""
    exponents = np.linspace(-126, 127, groups + 1)[1:]
    scales = (np.exp2(exponents.round()) * np.linspace(1, 1.9, groups)).astype(np.float32)
    scales[0] = 0.7
    return scales


@every_element
@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_ragged_groups(splits, is_delayed, element):
    scales = extreme_scales(len(splits)) if is_delayed else None
    check(sample(sum(splits) + 3, 48), splits, element, scales)


@every_element
@every_dtype
@nan_scales
@pytest.mark.parametrize("is_delayed", [False, True])
def test_special_values(is_delayed, nan_scales, dtype, element):
    """Quantize groups with and without infinities, NaN, denormals and the largest numbers."""
    splits = (22, 3, 0, 140, 10)
    scales = extreme_scales(len(splits)) if is_delayed else None
    check(special_values(178, 48, dtype), splits, element, scales, nan_scales)


@every_element
@every_dtype
def test_current_scales_of_all_magnitudes(dtype, element):
    """Check that zeros and infinities have scale 1, and denormals the largest scale."""
    info = torch.finfo(dtype)
    sizes = [0.0, info.tiny * info.eps, info.tiny / 4, info.tiny, 1e-37, 1e-4, 1 / 3, 448, info.max]
    sizes += [torch.inf, torch.nan]
    x = torch.rand(len(sizes), 5, 32, dtype=torch.float64).mul_(0.5)
    x[:, 0, 0] = 1.0
    x *= torch.tensor(sizes, dtype=torch.float64)[:, None, None]
    check(x.to(dtype).flatten(0, 1), (5,) * len(sizes), element)


@every_element
def test_uniform_groups_have_the_bytes_of_ragged_ones(element):
    """Quantize (G, N, K) with current scales."""
    x, text = special_values(300, 48, BF16).view(3, 100, 48), text_of(element, None)
    got = ops.grouped_quantize(x, text)
    named = dict(zip(parse(text).buffer_names(False), got, strict=True))
    want = oracle.quantize(x.flatten(0, 1).float().numpy(), [100, 200, 300], element)
    for name in ("scale", "scale_inv", "amax"):
        assert_same_bytes(named[name], torch.from_numpy(want[name]), name)
    codes = torch.from_numpy(want["codes"]).view(3, 100, 48)
    assert_same_bytes(named["codes"].view(U8), codes, "codes")


@every_element
@pytest.mark.parametrize("scale", [None, 1.0, 0.7, 2.0**-120, 3e38])
def test_every_bf16_value(scale, element):
    """Compare all 65,536 bf16 values with the oracle."""
    x = torch.arange(1 << 16).int().to(torch.int16).view(BF16).view(-1, 64)
    scales = None if scale is None else np.array([scale], np.float32)
    check(x, (len(x),), element, scales)
    if scale is None:
        finite = x[x.isfinite().all(dim=1)]
        check(finite, (len(finite),), element)


def test_scales_are_not_powers_of_two():
    """Check the example of the documentation: fl(448 / 3), and its reciprocal."""
    x = torch.full((4, 16), 3.0)
    names = parse("fp8").buffer_names(False)
    got = ops.grouped_quantize(x, "fp8", offs_tensor(4))
    buffers = dict(zip(names, got, strict=True))
    assert buffers["scale"].item() == np.float32(448) / np.float32(3)
    assert buffers["scale_inv"].item() == np.float32(1) / (np.float32(448) / np.float32(3))
