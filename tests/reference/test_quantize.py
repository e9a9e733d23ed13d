"""NVFP4 quantization, byte for byte against the scalar oracle."""

import numpy as np
import pytest
import torch

from tests.helpers import (
    DTYPES,
    NVFP4_TEXTS,
    SENTINEL,
    SPLITS,
    assert_same_bytes,
    dequantize_arguments,
    end_rows,
    ends,
    offsets,
    ops,
    poisoned,
    sample,
    weird_values,
)
from tests.reference import oracle

#: What the oracle is told of the second level and block shape, by name.
FLAGS = {"1x16": {}, "16x16": {"block_2d": True}, "row-scaled": {"row_scaled": True}}
KINDS = NVFP4_TEXTS
NAMES = ("codes", "scales", "amax", "codes_t", "scales_t", "amax_t")


def expected(x, offs, kind, *, amax=None, fill=0):
    """The oracle's six buffers, shaped as the op returns them."""
    uniform = offs is None
    cols = x.shape[-1]
    if uniform:
        groups, tiles = oracle.uniform_groups(*x.shape[:2])
    else:
        groups, tiles = oracle.ragged_groups(offs, x.shape[0])
    q = oracle.quantize(
        x.float().flatten(0, -2).numpy(),
        groups,
        tiles,
        uniform=uniform,
        given_amax=None if amax is None else amax.numpy(),
        fill=fill,
        **FLAGS[kind],
    )
    batch = x.shape[:1] if uniform else ()
    each = tiles // len(groups) if uniform else tiles
    row_scaled = kind == "row-scaled"
    shapes = (
        (*x.shape[:-1], cols // 2),
        (*batch, each, -1, 512),
        x.shape[:-1] if row_scaled else (len(groups),),
        (*batch, cols, 64 * each),
        (*batch, -(-cols // 128), 2 * each, 512),
        (len(groups),),
    )
    buffers = (q.codes, q.scales, q.amax, np.stack(q.codes_t), np.stack(q.scales_t), q.amax_t)
    return [torch.from_numpy(b).reshape(s) for b, s in zip(buffers, shapes, strict=True)]


def check(x, splits_or_none, kind, *, amax=None):
    """Functional and out form, alone and together, against the oracle."""
    offs = None if splits_or_none is None else offsets(splits_or_none)
    want = expected(x, None if offs is None else offs.tolist(), kind, amax=amax)
    before = x.clone()
    got = ops.grouped_quantize(x, KINDS[kind], offs, amax, columnwise=True)
    for name, g, w in zip(NAMES, got, want, strict=True):
        assert_same_bytes(g, w, f"{name} of the functional form")
    for rowwise, columnwise in ((True, False), (False, True)):
        if kind == "row-scaled" and amax is not None and not columnwise:
            continue  # refused: the amax of a group would not be used
        alone = ops.grouped_quantize(x, KINDS[kind], offs, amax, rowwise, columnwise)
        asked = slice(0, 3) if rowwise else slice(3, 6)
        for name, a, w in zip(NAMES[asked], alone, want[asked], strict=True):
            assert_same_bytes(a, w, f"{name} alone")
    check_out_form(x, offs, kind, amax, got)
    assert_same_bytes(x, before, "input")


def check_out_form(x, offs, kind, amax, like):
    """Buffers full of sentinels: only what the layout says is written, pitch padding is not."""
    outputs = [poisoned(t) for t in like]
    ops.grouped_quantize_out(x, KINDS[kind], offs, amax, columnwise=True, out=outputs)
    rows = None if offs is None else offs.tolist()
    want = expected(x, rows, kind, amax=amax, fill=SENTINEL)
    for name, got, w in zip(NAMES, outputs, want, strict=True):
        assert_same_bytes(got, w, f"{name} of the out form")
    codes = outputs[0]
    pitch, width = codes.stride(-2), codes.shape[-1]
    assert pitch % 16 == 0
    storage = torch.empty(0, dtype=torch.uint8).set_(codes.untyped_storage())
    last = len(storage) - width if len(storage) else 0
    for start in range(0, last, pitch):
        assert (storage[start + width : start + pitch] == SENTINEL).all(), "pitch padding"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_ragged_splits(splits, kind):
    check(sample(sum(splits), 48), splits, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [16, 32, 80, 272])
def test_widths(cols, kind):
    splits = (17, 0, 30)
    check(sample(sum(splits), cols), splits, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dtypes_with_extreme_values(dtype, kind):
    splits = (22, 3, 20)  # groups with and without Inf, NaN and maxima
    check(weird_values(45, 48, dtype), splits, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_second_levels_from_denormal_to_the_largest(dtype, kind):
    info = torch.finfo(dtype)
    scales = torch.tensor([info.tiny * info.eps, info.tiny, 1e-4, 1.0, info.max / 8])
    x = (torch.randn(5, 6, 32).clamp(-7, 7) * scales[:, None, None].double()).to(dtype)
    check(x.flatten(0, 1), (6,) * 5, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3.4e38])
def test_constant_input(value, kind):
    check(torch.full((18, 32), value), (1, 17), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 40, 48), (3, 128, 16), (2, 130, 80)], ids=str)
def test_uniform_groups(shape, kind):
    check(sample(*shape), None, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("uniform", [False, True])
def test_given_amax(uniform, kind):
    amax = torch.tensor([0.3, 1e4, 0.0])  # smaller than the values, larger, and none
    x = sample(3, 20, 32)
    check(x if uniform else x.flatten(0, 1), None if uniform else (20, 20, 20), kind, amax=amax)


@pytest.mark.parametrize("amax", [torch.nan, torch.inf, 1e-45, 1e-36, 3.4e38])
def test_given_amax_at_the_extremes(amax):
    check(weird_values(20, 32, torch.float32), (20,), "1x16", amax=torch.tensor([amax]))


@pytest.mark.parametrize("kind", KINDS)
def test_ties_of_codes_and_of_scales(kind):
    # The group's and each row's amax is 2688, so S_enc is 1; blocks of amax 6 have scale 1.
    quarter = torch.randint(-24, 25, (32, 48)) / 4
    quarter[:, 16] = 6.0  # codes tie wherever the value ends in .25 or .75
    quarter[:, 32:] *= torch.randint(1, 120, (32, 1))  # scales between E4M3 numbers
    quarter[:, 0] = 2688.0
    check(quarter, (32,), kind)


def test_more_than_a_thousand_groups():
    splits = torch.zeros(1100, dtype=torch.int64)
    splits[::11] = 1
    splits[1050] = 140
    check(sample(int(splits.sum()), 16), tuple(splits.tolist()), "1x16")


@pytest.mark.parametrize("kind", KINDS)
def test_capacity_tail_is_neither_read_nor_written(kind):
    splits, tail = (20, 0, 115), 200
    x = sample(sum(splits) + tail, 32)
    x[sum(splits) :] = torch.nan
    offs = offsets(splits)
    got = ops.grouped_quantize(x, KINDS[kind], offs, columnwise=True)
    check_out_form(x, offs, kind, None, got)
    x[sum(splits) :] = 1e30
    again = ops.grouped_quantize(x, KINDS[kind], offs, columnwise=True)
    for name, a, b in zip(NAMES, got, again, strict=True):
        assert_same_bytes(a, b, name)


@pytest.mark.parametrize(
    "rows", [[-5, 30], [30, 10], [10, 999], [2**31 - 1, -(2**31)], [-1, -1], [0, 0]], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_garbage_offsets_act_as_their_clamped_values(rows, kind):
    x = sample(40, 32)
    given = ends(*rows)
    got = ops.grouped_quantize(x, KINDS[kind], given, columnwise=True)
    check_out_form(x, given, kind, None, got)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_non_contiguous_input(kind, columnwise):
    wide = sample(30, 96)
    for x in (wide[:, 16:64], wide[::2, :48], wide.reshape(96, 30).T[:, :48]):
        offs = offsets((7, x.shape[0] - 7))
        got = ops.grouped_quantize(x, KINDS[kind], offs, columnwise=columnwise)
        want = ops.grouped_quantize(x.contiguous(), KINDS[kind], offs, columnwise=columnwise)
        for name, g, w in zip(NAMES[: len(want)], got, want, strict=True):
            assert_same_bytes(g, w, name)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_rowwise(kind, dtype):
    splits, tail = (19, 0, 40), 5
    x = sample(sum(splits) + tail, 80, dtype=torch.float32)
    groups, tiles = oracle.ragged_groups(end_rows(splits), x.shape[0])
    q = oracle.quantize(x.numpy(), groups, tiles, **FLAGS[kind])
    row_scaled = kind == "row-scaled"
    want = torch.from_numpy(oracle.dequantize_rowwise(q, groups, 80, row_scaled)).to(dtype)
    copy = [torch.from_numpy(b) for b in (q.codes, q.scales.reshape(tiles, -1, 512), q.amax)]
    offs = offsets(splits)
    arguments = dequantize_arguments(copy, KINDS[kind], x.shape[0], dtype, offs)
    assert_same_bytes(ops.grouped_dequantize(*arguments), want)
    out = poisoned(want)
    ops.grouped_dequantize_out(*arguments, out=out)
    untouched = poisoned(want)[sum(splits) :]
    assert_same_bytes(out, torch.cat([want[: sum(splits)], untouched]))


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_uniform_is_dequantize_of_each_member(kind):
    x = sample(3, 140, 48)
    text, whole = KINDS[kind], ends(140)
    for columnwise in (False, True):
        directions = {"rowwise": not columnwise, "columnwise": columnwise}

        def decoded(x, offs, columnwise=columnwise, directions=directions):
            copy = ops.grouped_quantize(x, text, offs, **directions)
            arguments = dequantize_arguments(copy, text, 140, torch.float32, offs, columnwise)
            return ops.grouped_dequantize(*arguments)

        got = decoded(x, None)
        for g in range(3):
            assert_same_bytes(got[g], decoded(x[g], whole))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", ["1x16", "16x16"])
def test_dequantize_columnwise(kind, dtype):
    """Against the rowwise copy of the transposed group, which the columnwise copy equals."""
    splits = (19, 0, 140)
    x = sample(sum(splits) + 5, 48)
    offs = offsets(splits)
    text = KINDS[kind]
    q = ops.grouped_quantize(x, text, offs, rowwise=False, columnwise=True)
    got = ops.grouped_dequantize(*dequantize_arguments(q, text, x.shape[0], dtype, offs, True))
    start = 0
    for end in offs.tolist():
        if end == start:
            continue
        rows = end - start
        turned = torch.nn.functional.pad(x[start:end], (0, 0, 0, -rows % 16)).T
        member = ops.grouped_quantize(turned, text, ends(48))
        want = ops.grouped_dequantize(*dequantize_arguments(member, text, 48, dtype, ends(48)))
        assert_same_bytes(got[start:end], want.T[:rows])
        start = end
    assert not got[start:].any()


def test_16x16_copies_hold_the_same_values():
    x, splits = sample(150, 48), (33, 0, 117)
    offs = offsets(splits)
    text = KINDS["16x16"]
    q = ops.grouped_quantize(x, text, offs, columnwise=True)
    rowwise, columnwise = (
        ops.grouped_dequantize(*dequantize_arguments(copy, text, 150, torch.float32, offs, way))
        for copy, way in ((q[:3], False), (q[3:], True))
    )
    assert_same_bytes(rowwise, columnwise)
