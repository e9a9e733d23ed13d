"""Format records: their values, texts, derived properties and errors."""

import copy
import itertools
import pickle

import pytest
import torch

from cute_kernels.capability import why_unsupported
from cute_kernels.formats import E4M3, E5M2, FP8, MXFP8, NVFP4, FP8Block, parse
from tests.helpers import F16, assert_value_semantics, contains_all

ALL_FORMATS = (NVFP4(), NVFP4(row_scaled=True), MXFP8(), FP8Block(), FP8())


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_records_are_values(fmt):
    assert_value_semantics(fmt)


@pytest.mark.parametrize(("bound", "per"), [*itertools.product((None, 256, 448), ("group", "row"))])
def test_the_largest_block_scale_sets_the_global_scale(bound, per):
    """Check that ``e4m3_max`` sets the factor of the global scale."""
    fmt = NVFP4(row_scaled=per == "row", four_over_six=True, e4m3_max=bound)
    want = bound or 256
    assert fmt.e4m3_max == want and fmt.tensor_max == 6.0 * want
    assert fmt.global_scale.factor == 1 / (6.0 * want) and fmt.global_scale.per == per
    assert fmt.columnwise_global_scale.factor == 1 / (6.0 * want)
    assert NVFP4().e4m3_max == 448 and NVFP4(e4m3_max=448) == NVFP4()


def test_messages_show_texts():
    fmt = NVFP4(block=(16, 16))
    assert str(fmt) == f"{fmt}" == fmt.text and "row_scaled=False" in repr(fmt)


def test_a_block_may_be_a_list():
    assert NVFP4(block=[16, 16]) == NVFP4(block=(16, 16))
    hash(NVFP4(block=[16, 16]))


@pytest.mark.parametrize("cls", [MXFP8, FP8Block, FP8])
@pytest.mark.parametrize(
    ("dtype", "element"), [(torch.float8_e4m3fn, E4M3), (torch.float8_e5m2, E5M2)]
)
def test_fp8_element_follows_the_dtype(cls, dtype, element):
    assert cls(dtype=dtype).element is element


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: NVFP4(block=(1, 32)), ValueError, ["block", "(1, 16) or (16, 16)", "(1, 32)"]),
        (lambda: NVFP4(row_scaled=1), TypeError, ["row_scaled", "bool", "1"]),
        (
            lambda: NVFP4(row_scaled=True, block=(16, 16)),
            ValueError,
            ["row_scaled", "block=(1, 16)", "block=(16, 16)"],
        ),
        (lambda: NVFP4(row_scaled=True, hadamard=True), ValueError, ["row_scaled", "hadamard"]),
        (lambda: NVFP4(block=(16, 16), hadamard=True), ValueError, ["hadamard", "block=(1, 16)"]),
        (
            lambda: NVFP4(four_over_six=True, hadamard=True),
            ValueError,
            ["four_over_six", "hadamard"],
        ),
        (lambda: NVFP4(e4m3_max=256), ValueError, ["e4m3_max=256 needs four_over_six"]),
        (
            lambda: NVFP4(four_over_six=True, e4m3_max=300),
            ValueError,
            ["e4m3_max", "448 or 256", "300"],
        ),
        (lambda: NVFP4(four_over_six_error="mse"), ValueError, ["'mse' needs four_over_six"]),
        (
            lambda: NVFP4(four_over_six=True, four_over_six_error="max"),
            ValueError,
            ["four_over_six_error", "mae or mse", "'max'"],
        ),
        (lambda: MXFP8(dtype=F16), ValueError, ["dtype", "torch.float16"]),
        (lambda: FP8Block(torch.float8_e5m2), TypeError, ["(1, 128) or (128, 128)", "as dtype="]),
        (lambda: MXFP8(block=32), TypeError, ["block must be (1, 32) or (32, 32), got 32"]),
        (lambda: FP8Block(pow2_scales=1), TypeError, ["pow2_scales", "1"]),
        (lambda: FP8Block(amax_epsilon=-1.0), ValueError, ["amax_epsilon", "-1.0"]),
        (lambda: FP8Block(amax_epsilon=float("nan")), ValueError, ["amax_epsilon", "nan"]),
        (lambda: FP8(scaling="later"), ValueError, ["scaling", "current or delayed", "'later'"]),
    ],
)
def test_invalid_records_raise(make, error, words):
    with pytest.raises(error, match=contains_all(*words)):
        make()


TEXTS = {
    "nvfp4": NVFP4(),
    "nvfp4:row_scaled": NVFP4(row_scaled=True),
    "nvfp4:block=16x16,stochastic_rounding": NVFP4(block=(16, 16), stochastic_rounding=True),
    "nvfp4:hadamard,stochastic_rounding": NVFP4(hadamard=True, stochastic_rounding=True),
    "nvfp4:row_scaled,four_over_six": NVFP4(row_scaled=True, four_over_six=True, e4m3_max=256),
    "nvfp4:four_over_six,e4m3_max=448,four_over_six_error=mse": NVFP4(
        four_over_six=True, e4m3_max=448, four_over_six_error="mse"
    ),
    "mxfp8": MXFP8(),
    "mxfp8:dtype=e5m2,block=32x32": MXFP8(torch.float8_e5m2, (32, 32)),
    "fp8_block:pow2_scales=false,amax_epsilon=1e-12": FP8Block(
        pow2_scales=False, amax_epsilon=1e-12
    ),
    "fp8:scaling=delayed": FP8(scaling="delayed"),
}


@pytest.mark.parametrize(("text", "fmt"), TEXTS.items(), ids=TEXTS)
def test_a_record_has_one_text(text, fmt):
    assert fmt.text == text
    assert parse(text) == fmt


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fp6", ["mxfp8, nvfp4", "'fp6'"]),
        ("nvfp4:rows", ["row_scaled, block", "'rows'"]),
        ("nvfp4:block=1x8", ["'nvfp4:block=1x8'", "block", "(1, 8)"]),
        ("nvfp4:block=axb", ["'nvfp4:block=axb'", "block", "1x16", "'axb'"]),
        ("nvfp4:row_scaled,block=16x16", ["'nvfp4:row_scaled,block=16x16'", "row_scaled needs"]),
        ("nvfp4:", ["must be written 'nvfp4'"]),
        ("nvfp4:row_scaled,row_scaled=false", ["must be written 'nvfp4'"]),
        ("nvfp4:block=1x16", ["must be written 'nvfp4'"]),
        ("nvfp4:four_over_six,e4m3_max=big", ["e4m3_max", "'big'"]),
        ("mxfp8:dtype=e3m4", ["'mxfp8:dtype=e3m4'", "dtype", "e4m3 or e5m2", "'e3m4'"]),
        ("fp8_block:pow2_scales=no", ["pow2_scales", "true or false", "'no'"]),
        ("fp8_block:amax_epsilon=small", ["amax_epsilon", "0.0", "'small'"]),
    ],
)
def test_invalid_texts_raise(text, words):
    with pytest.raises(ValueError, match=contains_all(*words)):
        parse(text)


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_records_describe_their_buffers_and_global_scales(fmt):
    """Check that records describe their buffers and global scales."""
    global_scale = fmt.global_scale
    assert global_scale is fmt.global_scale  # cached, because every call of an op reads it
    assert not why_unsupported(fmt)
    assert (fmt.columnwise_global_scale is None) == (global_scale is None)
    assert global_scale is None or fmt.global_scale_for(columnwise=True).per == "group"
    assert {name.removesuffix("_t") for name in fmt.buffer_names(True)} == set(
        fmt.buffer_names(False)
    )


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_pickles_and_copies_omit_cached_names(fmt):
    state = pickle.dumps(fmt)
    assert b"operand_names" not in state and b"global_scale" not in state
    for duplicate in (pickle.loads(state), copy.copy(fmt), copy.deepcopy(fmt)):
        assert duplicate == fmt and duplicate.operand_names(True) == fmt.operand_names(True)
        assert duplicate.global_scale_for(True) == fmt.columnwise_global_scale
