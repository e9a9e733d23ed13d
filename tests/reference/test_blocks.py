"""MXFP8 and FP8Block on the reference backend, byte for byte against their oracle."""

import numpy as np
import pytest
import torch

from cute_kernels.formats import parse
from tests.helpers import (
    DTYPES,
    SENTINEL,
    SPLITS,
    assert_same_buffers,
    assert_same_bytes,
    dequantize_arguments,
    ends,
    many_groups,
    offsets,
    ops,
    poisoned,
    sample,
    weird_values,
)
from tests.reference import oracle
from tests.reference.block_oracle import Rules
from tests.reference.block_oracle import quantize as expect

#: The texts of the formats, and what they are in the words of the specification.
RULES = {
    "mxfp8": Rules("mxfp8", "e4m3", 1, 32),
    "mxfp8:dtype=e5m2": Rules("mxfp8", "e5m2", 1, 32),
    "mxfp8:block=32x32": Rules("mxfp8", "e4m3", 32, 32),
    "mxfp8:dtype=e5m2,block=32x32": Rules("mxfp8", "e5m2", 32, 32),
    "fp8_block": Rules("fp8_block", "e4m3", 1, 128),
    "fp8_block:dtype=e5m2,pow2_scales=false": Rules("fp8_block", "e5m2", 1, 128, pow2=False),
    "fp8_block:amax_epsilon=0.25": Rules("fp8_block", "e4m3", 1, 128, epsilon=0.25),
    "fp8_block:block=128x128": Rules("fp8_block", "e4m3", 128, 128),
    "fp8_block:block=128x128,dtype=e5m2": Rules("fp8_block", "e5m2", 128, 128),
    "fp8_block:block=128x128,pow2_scales=false": Rules("fp8_block", "e4m3", 128, 128, pow2=False),
    "fp8_block:block=128x128,pow2_scales=false,amax_epsilon=0.25": Rules(
        "fp8_block", "e4m3", 128, 128, pow2=False, epsilon=0.25
    ),
}
every_format = pytest.mark.parametrize("text", RULES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
NAMES = ("codes", "scales", "codes_t", "scales_t")


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def quantize(x, text, offs=None, rowwise=True, columnwise=True):
    """Buffers of the op by name."""
    fmt = parse(text)
    found = ops.grouped_quantize(x, text, offs, None, rowwise, columnwise)
    asked = [way for way, on in ((False, rowwise), (True, columnwise)) if on]
    return dict(zip([n for way in asked for n in fmt.buffer_names(way)], found, strict=True))


def expected(x, text, offs, fill=0):
    """The oracle's buffers by name, shaped as the op returns them, and both directions' values."""

    def ragged(x, rows):
        groups, tiles = oracle.ragged_groups(rows, len(x))
        made = expect(x.float().numpy(), groups, tiles, RULES[text], name_of(x.dtype), fill)
        return vars(made)

    if offs is not None:
        found = {name: torch.from_numpy(t) for name, t in ragged(x, offs.tolist()).items()}
    else:
        # Each group of a uniform tensor has the buffers of a tensor of its own, save for a tile
        # that ragged groups need when their rows fill their tiles.
        each = [ragged(group, [len(group)]) for group in x]
        tiles = oracle.ceil_div(x.shape[1], 128)
        found = {name: torch.from_numpy(np.stack([e[name] for e in each])) for name in each[0]}
        slots, is_mx = 128 * tiles, RULES[text].is_mx
        found["codes_t"] = found["codes_t"][:, :slots] if is_mx else found["codes_t"][..., :slots]
        found["scales_t"] = (
            found["scales_t"][:, :, :tiles] if is_mx else found["scales_t"][:, :tiles]
        )
        if is_mx or RULES[text].rows > 1:
            found["scales"] = found["scales"][:, :tiles]
        else:
            found["scales"] = found["scales"][..., :slots]
    element = parse(text).element.dtype
    codes = {name: found[name].view(element) for name in ("codes", "codes_t")}
    return found | codes


def check(x, text, offs=None):
    """Functional and out form, each direction alone and both together, against the oracle."""
    want = {name: t for name, t in expected(x, text, offs).items() if name in NAMES}
    before = x.clone()
    got = quantize(x, text, offs)
    assert_same_buffers(got, want)
    for alone in (quantize(x, text, offs, columnwise=False), quantize(x, text, offs, False)):
        assert_same_buffers(alone, {name: want[name] for name in alone})
    check_out_form(x, text, offs, got)
    assert_same_bytes(x, before, "input")


def check_out_form(x, text, offs, like):
    """Buffers of sentinels: only what the layout says is written, pitch padding is not."""
    outputs = {name: poisoned(t) for name, t in like.items()}
    ops.grouped_quantize_out(x, text, offs, None, True, True, out=list(outputs.values()))
    want = expected(x, text, offs, SENTINEL)
    assert_same_buffers(outputs, {name: want[name] for name in NAMES})
    for name in ("codes", "codes_t"):
        codes = outputs[name]
        storage = torch.empty(0, dtype=torch.uint8).set_(codes.untyped_storage())
        written = torch.zeros(len(storage), dtype=torch.bool)
        written.as_strided(codes.shape, codes.stride())[:] = True
        assert (storage[~written] == SENTINEL).all(), "pitch padding"


@every_format
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_ragged_splits(splits, text):
    check(sample(sum(splits), 96), text, offsets(splits))


@every_format
@pytest.mark.parametrize("cols", [1, 2, 3, 4, 5, 9, 17])
def test_widths(cols, text):
    check(sample(47, cols * parse(text).k_multiple), text, offsets((17, 0, 30)))


@every_format
@every_dtype
def test_extreme_values(dtype, text):
    # Groups with and without Inf, NaN and maxima, and a tail.
    check(weird_values(190, 160, dtype), text, offsets((22, 3, 140, 10)))


@every_format
@every_dtype
def test_amaxes_from_denormal_to_the_largest(dtype, text):
    info = torch.finfo(dtype)
    sizes = [info.tiny * info.eps, info.tiny, 1e-37, 3e-36, 1e-4, 1.0, info.max / 8]
    x = torch.randn(7, 6, 64).clamp(-7, 7).double() * torch.tensor(sizes)[:, None, None].double()
    x = x.to(dtype)
    check(x.flatten(0, 1), text, offsets((6,) * 7))
    check(x.flatten(0, 1), text, offsets((42,)))


@every_format
@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3.4e38])
def test_constant_input(value, text):
    check(torch.full((18, 64), value), text, offsets((1, 17)))


@every_format
@pytest.mark.parametrize("shape", [(1, 1, 32), (2, 40, 96), (3, 128, 32), (2, 130, 160)], ids=str)
def test_uniform_groups(shape, text):
    check(sample(*shape), text)


@every_format
def test_more_than_a_thousand_groups(text):
    offs = many_groups()
    check(sample(int(offs[-1]) + 3, 32), text, offs)


@every_format
def test_the_tail_is_neither_read_nor_written(text):
    x, offs = sample(335, 64), offsets((20, 0, 115))
    x[135:] = torch.nan
    got = quantize(x, text, offs)
    check_out_form(x, text, offs, got)
    x[135:] = 1e30
    assert_same_buffers(quantize(x, text, offs), got)


@every_format
@pytest.mark.parametrize(
    "rows", [[-5, 30], [30, 10], [10, 999], [2**31 - 1, -(2**31)], [-1, -1]], ids=str
)
def test_garbage_offsets_act_as_their_clamped_values(rows, text):
    x = sample(40, 32)
    check_out_form(x, text, ends(*rows), quantize(x, text, ends(*rows)))


@every_format
def test_non_contiguous_input(text):
    wide = sample(64, 128)
    for x in (wide[:, 32:96], wide[::2, :96], wide.T[:, :32]):
        offs = offsets((7, x.shape[0] - 7))
        assert_same_buffers(quantize(x, text, offs), quantize(x.contiguous(), text, offs))
    weights = sample(3, 64, 48).mT
    assert_same_buffers(quantize(weights, text), quantize(weights.contiguous(), text))


def decoded(buffers, text, columnwise, rows, dtype, offs):
    copy = [buffers[name] for name in parse(text).operand_names(columnwise)]
    return dequantize_arguments(copy, text, rows, dtype, offs, columnwise)


@every_format
@every_dtype
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_dequantize(columnwise, dtype, text):
    x, offs = weird_values(205, 160, torch.float32), offsets((19, 0, 41, 130, 0))
    buffers, values = quantize(x, text, offs), "values_t" if columnwise else "values"
    want = expected(x, text, offs)[values].to(dtype)
    arguments = decoded(buffers, text, columnwise, 205, dtype, offs)
    assert_same_bytes(ops.grouped_dequantize(*arguments), want, any_nan=True)
    out = poisoned(want)
    ops.grouped_dequantize_out(*arguments, out=out)
    assert_same_bytes(out[:190], want[:190], any_nan=True)
    assert_same_bytes(out[190:], poisoned(want)[190:])


@every_format
@pytest.mark.parametrize("rows", [1, 128, 140])
def test_dequantize_uniform(rows, text):
    x = sample(3, rows, 160)
    buffers, want = quantize(x, text), expected(x, text, None)
    for columnwise, values in ((False, "values"), (True, "values_t")):
        arguments = decoded(buffers, text, columnwise, rows, torch.float32, None)
        assert_same_bytes(ops.grouped_dequantize(*arguments), want[values])


@pytest.mark.parametrize("text", [t for t, rules in RULES.items() if rules.rows > 1])
def test_square_blocks_hold_the_same_values_in_both_directions(text):
    x, offs = weird_values(333, 160, torch.bfloat16), offsets((33, 0, 300))
    buffers = quantize(x, text, offs)
    rowwise, columnwise = (
        ops.grouped_dequantize(*decoded(buffers, text, way, 333, torch.float32, offs))
        for way in (False, True)
    )
    assert_same_bytes(rowwise, columnwise)


@every_format
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_buffers_that_are_no_copy_of_the_format_are_refused(columnwise, text):
    x, offs = sample(40, 160), offsets((10, 30))
    codes, scales, *rest = decoded(quantize(x, text, offs), text, columnwise, 40, x.dtype, offs)
    name = "scales_t" if columnwise else "scales"
    for wrong in (scales[0][..., :-1], scales[0][:-1], scales[0].unsqueeze(0)):
        with pytest.raises(ValueError, match=rf"scales\[0\], the {name} of {text}, must have"):
            ops.grouped_dequantize(codes, [wrong], *rest)
    with pytest.raises(TypeError, match=rf"scales\[0\], the {name} of {text}, must be"):
        ops.grouped_dequantize(codes, [scales[0].to(torch.int64)], *rest)
    with pytest.raises(ValueError, match=f"must be {name} of {text}, got 2 tensors"):
        ops.grouped_dequantize(codes, [*scales, torch.ones(2)], *rest)
    with pytest.raises(TypeError, match="codes must be float8"):
        ops.grouped_dequantize(codes.view(torch.uint8), scales, *rest)
