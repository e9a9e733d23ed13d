"""Quantization and dequantization of the reference, byte by byte against the oracles."""

import numpy as np
import pytest
import torch

from cute_kernels.formats import parse
from cute_kernels.ops.checks import unchecked_end_rows
from tests.helpers import (
    DTYPES,
    F32,
    SENTINEL,
    SPLITS,
    assert_same_buffers,
    assert_same_bytes,
    dequantize_arguments,
    offs_from_splits,
    offs_of_many_groups,
    offs_tensor,
    ops,
    poisoned,
    quantize_operand,
    sample,
    special_values,
)
from tests.reference import fp8_oracle, oracle

from .block_oracle import quantize as expect
from .block_oracle import rules_of
from .oracle_variants import (
    FourOverSix,
    Hadamard,
    SquareFourOverSix,
    Stochastic,
    StochasticHadamard,
)
from .test_gemm import INVALID_END_ROWS

SQUARE, ROWS = {"block_2d": True}, {"row_scaled": True}
#: Format texts of NVFP4, with the oracle's options: flags, and the rule of a variant.
NVFP4 = {"nvfp4": {}, "nvfp4:block=16x16": SQUARE, "nvfp4:row_scaled": ROWS}
SEED = (-0x123456789ABCDEF, 0x7EDCBA9876543210)
_448_MSE = "four_over_six,e4m3_max=448,four_over_six_error=mse"
VARIANTS = {
    "nvfp4:hadamard": {"rule": Hadamard()},
    "nvfp4:stochastic_rounding": {"rule": Stochastic(SEED)},
    "nvfp4:hadamard,stochastic_rounding": {"rule": StochasticHadamard(SEED)},
    "nvfp4:block=16x16,stochastic_rounding": {"rule": Stochastic(SEED), **SQUARE},
    "nvfp4:four_over_six": {"rule": FourOverSix(256, "mae")},
    f"nvfp4:{_448_MSE}": {"rule": FourOverSix(448, "mse")},
    "nvfp4:block=16x16,four_over_six": {"rule": SquareFourOverSix(256, "mae"), **SQUARE},
    f"nvfp4:block=16x16,{_448_MSE}": {"rule": SquareFourOverSix(448, "mse"), **SQUARE},
    "nvfp4:row_scaled,four_over_six": {"rule": FourOverSix(256, "mae"), **ROWS},
}
_BLOCKS = (
    "mxfp8",
    "mxfp8:dtype=e5m2",
    "mxfp8:block=32x32",
    "mxfp8:dtype=e5m2,block=32x32",
    "fp8_block",
    "fp8_block:dtype=e5m2,pow2_scales=false",
    "fp8_block:amax_epsilon=0.25",
    "fp8_block:block=128x128",
    "fp8_block:block=128x128,dtype=e5m2",
    "fp8_block:block=128x128,pow2_scales=false",
    "fp8_block:block=128x128,pow2_scales=false,amax_epsilon=0.25",
)
RULES = {text: rules_of(text) for text in _BLOCKS}
TEXTS = [*NVFP4, *RULES]
every_format = pytest.mark.parametrize("text", TEXTS)
every_text = pytest.mark.parametrize("text", [*TEXTS, *VARIANTS])
every_nvfp4 = pytest.mark.parametrize("text", [*NVFP4])
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def buffer_names(text, rowwise=True, columnwise=True):
    fmt = parse(text)
    directions = [
        is_columnwise
        for is_columnwise, is_present in ((False, rowwise), (True, columnwise))
        if is_present
    ]
    return [name for is_columnwise in directions for name in fmt.buffer_names(is_columnwise)]


def seed_of(text):
    return torch.tensor(SEED) if "stochastic" in text else None


def quantize(x, text, offs=None, rowwise=True, columnwise=True, amax=None):
    """Quantize by the op and return buffers by name."""
    tensors = ops.grouped_quantize(x, text, offs, amax, rowwise, columnwise, None, seed_of(text))
    return dict(zip(buffer_names(text, rowwise, columnwise), tensors, strict=True))


def expected(x, text, offs, fill=0, amax=None):
    """Return the oracle's buffers by name."""
    if text in RULES:
        return expected_blocks(x, text, offs, fill)
    options = (NVFP4 | VARIANTS)[text] | {"fill": fill}
    if amax is not None:
        options |= zip(("given_amax", "given_amax_t"), np.atleast_2d(amax.numpy()), strict=False)
    rows = None if offs is None else offs.tolist()
    return {
        name: torch.from_numpy(array)
        for name, array in oracle.buffers(x.float().numpy(), rows, **options).items()
    }


def expected_blocks(x, text, offs, fill):
    """Return the buffers of the oracle of MXFP8 and FP8Block."""

    def quantize_groups(x, groups, tiles):
        return expect(
            x.float().numpy(), groups, tiles, RULES[text], str(x.dtype).removeprefix("torch."), fill
        )

    if offs is not None:
        arrays = quantize_groups(x, *oracle.ragged_groups(offs.tolist(), len(x)))
    else:
        members = [quantize_groups(member, *oracle.uniform_groups(1, len(member))) for member in x]
        arrays = {name: np.stack([e[name] for e in members]) for name in members[0]}
    arrays = {name: torch.from_numpy(t) for name, t in arrays.items()}
    element = parse(text).element.dtype
    return arrays | {name: arrays[name].view(element) for name in ("codes", "codes_t")}


def check(x, text, offs=None, amax=None):
    """Check both copies together, each alone, and the out form.

    An ``amax`` of shape (2, G) has one row per copy.
    """
    buffers, before = expected(x, text, offs, amax=amax), x.clone()
    want = {name: buffers[name] for name in buffer_names(text)}
    got = quantize(x, text, offs, amax=amax)
    assert_same_buffers(got, want)
    for rowwise in (False, True):
        if rowwise and amax is not None and "row_scaled" in text:
            continue  # refused, because the amax of a group would be unused
        amax_of_copy = amax if amax is None or amax.dim() == 1 else amax[int(not rowwise)]
        copy = quantize(x, text, offs, rowwise, not rowwise, amax_of_copy)
        assert_same_buffers(copy, {name: want[name] for name in copy})
    check_out_form(x, text, offs, got, amax)
    assert_same_bytes(x, before, "input")


def check_out_form(x, text, offs, like, amax=None):
    """Check that the op writes exactly the bytes of the layout, and no pitch padding."""
    outputs = {name: poisoned(t) for name, t in like.items()}
    ops.grouped_quantize_out(
        x, text, offs, amax, True, True, None, seed_of(text), out=list(outputs.values())
    )
    want = expected(x, text, offs, SENTINEL, amax)
    assert_same_buffers(outputs, {name: want[name] for name in outputs})
    for name in ("codes", "codes_t"):
        codes = outputs[name]
        assert codes.stride(-2) % 16 == 0 or not codes.numel()
        storage = torch.empty(0, dtype=torch.uint8).set_(codes.untyped_storage())
        written = torch.zeros(len(storage), dtype=torch.bool)
        written.as_strided(codes.shape, codes.stride())[:] = True
        assert (storage[~written] == SENTINEL).all(), "pitch padding"


@every_text
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_ragged_groups(splits, text):
    check(sample(sum(splits), 96 if text in RULES else 48), text, offs_from_splits(splits))


@every_text
@pytest.mark.parametrize("cols", [1, 2, 3, 4, 5, 9, 17])
def test_all_widths(cols, text):
    check(sample(47, cols * parse(text).k_multiple), text, offs_from_splits((17, 0, 30)))


@every_format
@every_dtype
def test_special_values(dtype, text):
    # Groups with and without Inf, NaN and maxima, and a tail.
    check(special_values(190, 160, dtype), text, offs_from_splits((22, 3, 140, 10)))


@every_format
@every_dtype
def test_amaxes_from_denormal_to_the_largest(dtype, text):
    """Quantize groups with amaxes from the smallest to the largest."""
    info = torch.finfo(dtype)
    sizes = [info.tiny * info.eps, info.tiny, 1e-37, 3e-36, 1e-4, 1.0, info.max / 8]
    x = torch.randn(7, 6, 64).clamp(-7, 7).double() * torch.tensor(sizes)[:, None, None].double()
    x = x.to(dtype)
    check(x.flatten(0, 1), text, offs_from_splits((6,) * 7))
    check(x.flatten(0, 1), text, offs_from_splits((42,)))


@every_format
@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3.4e38])
def test_constant_inputs(value, text):
    check(torch.full((18, 64), value), text, offs_from_splits((1, 17)))


@every_text
@pytest.mark.parametrize(
    "shape", [(1, 1, 32), (2, 0, 32), (2, 40, 96), (3, 128, 32), (2, 130, 160)], ids=str
)
def test_uniform_groups(shape, text):
    check(sample(*shape), text)


@pytest.mark.parametrize("text", ["nvfp4", *RULES])
def test_more_than_a_thousand_groups(text):
    offs = offs_of_many_groups()
    check(sample(int(offs[-1]) + 3, parse(text).k_multiple), text, offs)


@every_text
def test_the_tail_is_neither_read_nor_written(text):
    """Check that the tail is neither read nor written."""
    x, offs = sample(160, 64), offs_from_splits((20, 0, 115))
    x[135:] = torch.nan
    got = quantize(x, text, offs)
    check_out_form(x, text, offs, got)
    x[135:] = 1e30
    assert_same_buffers(quantize(x, text, offs), got)


@every_format
@pytest.mark.parametrize("rows", INVALID_END_ROWS, ids=str)
@unchecked_end_rows()
def test_invalid_end_rows_act_as_their_clamped_values(rows, text):
    x = sample(40, 32)
    check_out_form(x, text, offs_tensor(*rows), quantize(x, text, offs_tensor(*rows)))


@every_dtype
@every_format
@pytest.mark.parametrize("columnwise", [False, True])
def test_dequantizing_ragged_groups(text, columnwise, dtype):
    """Compare decoded ragged groups with a NumPy oracle."""
    x, offs = special_values(205, 160, F32), offs_from_splits((19, 0, 41, 130, 0))
    copy = quantize_operand(x, text, offs, columnwise=columnwise)
    want = fp8_oracle.dequantized(text, copy, 205, offs, columnwise).to(dtype)
    arguments = dequantize_arguments(copy, text, 205, dtype, offs, columnwise)
    assert_same_bytes(ops.grouped_dequantize(*arguments), want, any_nan=True)
    out = poisoned(want)
    ops.grouped_dequantize_out(*arguments, out=out)
    assert_same_bytes(out[:190], want[:190], any_nan=True)
    assert_same_bytes(out[190:], poisoned(want)[190:])


@every_format
@pytest.mark.parametrize("rows", [1, 128, 140])
@pytest.mark.parametrize("columnwise", [False, True])
def test_dequantizing_uniform_groups(columnwise, rows, text):
    copy = quantize_operand(sample(3, rows, 160), text, columnwise=columnwise)
    arguments = dequantize_arguments(copy, text, rows, F32, None, columnwise)
    assert_same_bytes(
        ops.grouped_dequantize(*arguments),
        fp8_oracle.dequantized(text, copy, rows, None, columnwise),
    )


@every_nvfp4
@pytest.mark.parametrize("uniform", [False, True])
def test_given_amaxes(uniform, text):
    amax = torch.tensor([0.3, 1e4, 0.0])  # smaller than the values, larger, and none
    x = sample(3, 20, 32)
    check(
        *((x, text) if uniform else (x.flatten(0, 1), text, offs_from_splits((20, 20, 20)))),
        amax=amax,
    )


@pytest.mark.parametrize("amax", [torch.nan, torch.inf, 1e-45, 1e-36, 3.4e38])
def test_extreme_given_amaxes(amax):
    x = special_values(20, 32, F32)
    check(x, "nvfp4", offs_tensor(20), amax=torch.tensor([amax]))


@every_nvfp4
def test_ties_of_codes_and_of_scales(text):
    """Quantize values at the midpoints between codes and between scales."""
    # The group's and each row's amax is 2688, so S_enc is 1; blocks of amax 6 have scale 1.
    quarter = torch.randint(-24, 25, (32, 48)) / 4
    quarter[:, 16] = 6.0  # codes tie wherever the value ends in .25 or .75
    quarter[:, 32:] *= torch.randint(1, 120, (32, 1))  # scales between E4M3 numbers
    quarter[:, 0] = 2688.0
    check(quarter, text, offs_tensor(32))
