"""Activations before quantization: the op gives the codes of activating first, then quantizing."""

import dataclasses
import itertools
import re

import pytest
import torch

import cute_kernels
from cute_kernels import support
from cute_kernels.capability import ARCHITECTURES
from cute_kernels.formats import FP8, MXFP8, NVFP4, FP8Block
from cute_kernels.formats.activations import ACTIVATIONS, Activation
from cute_kernels.layout.buffers import buffers
from cute_kernels.reference.activations import activate
from tests.helpers import (
    BF16,
    DTYPES,
    E5M2,
    SPLITS,
    U8,
    assert_all_same,
    assert_same_bytes,
    offs_from_splits,
    offs_of_many_groups,
    ops,
    sample,
)

_RECORDS = (
    NVFP4(),
    NVFP4(row_scaled=True),
    NVFP4(block=(16, 16)),
    NVFP4(four_over_six=True),
    FP8(),
    FP8(E5M2),
    MXFP8(),
    MXFP8(block=(32, 32)),
    FP8Block(),
    FP8Block(block=(128, 128), pow2_scales=False),
)
FORMATS = [fmt for fmt in _RECORDS if support("grouped_quantize", fmt, "reference")]
ALL_ACTIVATIONS = [
    *map(Activation, ACTIVATIONS),
    Activation("clamped_swiglu", alpha=1.0, limit=0.5),
]
#: One unary, one gated and one clamped activation, where the arithmetic does not matter.
ONE_PER_SHAPE = [Activation("gelu"), Activation("swiglu"), Activation("clamped_swiglu", limit=0.5)]
K = 64


def parametrize_by_text(records):
    """Return values and ids for ``parametrize``."""
    return {"argvalues": records, "ids": [r.text for r in records]}


each_format = pytest.mark.parametrize("fmt", **parametrize_by_text(FORMATS))


def make_input(act, rows, dtype):
    return sample(*rows, K * 2 if act.is_gated else K, dtype=dtype)


def activate_fp32(act, x):
    """Return the fp32 elements."""
    return activate(x.float(), act)


def round_as_stored(fmt, elements, dtype):
    """Return the elements as a tensor that quantizes to the same codes."""
    return elements.to(dtype) if fmt.rounds_activation else elements


def names(fmt, x, num_groups, directions):
    rowwise, columnwise = directions
    return list(buffers(fmt, x.shape, num_groups, rowwise=rowwise, columnwise=columnwise))


def check(fmt, act, x, offs, directions=(True, True), amax=None):
    """Check that activating and quantizing at once equals doing one after the other."""
    got = ops.grouped_quantize(x, fmt.text, offs, amax, *directions, activation=act.text)
    # The tail of the elements may be NaN: it must not matter.
    elements = activate_fp32(act, x)
    want = ops.grouped_quantize(
        round_as_stored(fmt, elements, x.dtype), fmt.text, offs, amax, *directions
    )
    for name, a, b in zip(names(fmt, x, 1, directions), got, want, strict=True):
        assert_same_bytes(a, b, f"{fmt.text} {act.text} {name}")
    return got


@pytest.mark.parametrize("act", **parametrize_by_text(ALL_ACTIVATIONS))
@each_format
def test_codes_of_every_activation(fmt, act):
    x = make_input(act, (150,), BF16)
    x[-3:] = torch.nan
    check(fmt, act, x, offs_from_splits((131, 0, 16)))


@pytest.mark.parametrize(
    ("dtype", "directions"),
    [
        *(("bfloat16", (True, False)), ("bfloat16", (False, True))),
        *(("float16", (True, True)), ("float32", (True, True))),
    ],
    ids=str,
)
@each_format
def test_directions_dtypes_and_groups(fmt, directions, dtype):
    dtype = DTYPES[dtype]
    for act in ONE_PER_SHAPE:
        for splits in ("one row", "tile edges", "empty first", "all empty"):
            x = make_input(act, (sum(SPLITS[splits]) + 2,), dtype)
            check(fmt, act, x, offs_from_splits(SPLITS[splits]), directions)
        for uniform in ((3, 21), (2, 0)):
            check(fmt, act, make_input(act, uniform, dtype), None, directions)


def test_rounding_of_elements_changes_codes():
    """Rounding elements where the format does not, or not rounding them where it does, shows."""
    x, offs = torch.randn(128, 256).to(BF16), offs_from_splits((128,))
    exact = activate_fp32(ONE_PER_SHAPE[0], x)
    for fmt in FORMATS:
        got = check(fmt, ONE_PER_SHAPE[0], x, offs, (True, False))
        wrongly_rounded = exact if fmt.rounds_activation else exact.to(BF16)
        assert (
            not got[0]
            .view(U8)
            .equal(ops.grouped_quantize(wrongly_rounded, fmt.text, offs)[0].view(U8))
        )


@each_format
def test_many_groups_and_strided_inputs(fmt):
    """Quantize activations of many groups and of strided inputs."""
    act, offs = ONE_PER_SHAPE[1], offs_of_many_groups()
    check(fmt, act, make_input(act, (int(offs[-1]) + 5,), BF16), offs)
    x = make_input(act, (2 * 45,), BF16)
    for strided in (x[::2], x.mT.contiguous().mT[::2]):
        assert not strided.is_contiguous()
        check(fmt, act, strided, offs_from_splits((30, 15)))


@pytest.mark.parametrize(
    "fmt", **parametrize_by_text([f for f in FORMATS if f.global_scale_for(columnwise=True)])
)
def test_given_amaxes(fmt):
    check(
        fmt,
        ONE_PER_SHAPE[1],
        make_input(ONE_PER_SHAPE[1], (40,), BF16),
        offs_from_splits((10, 30)),
        (True, True),
        torch.tensor([3.0, -5.0]),
    )


@pytest.mark.parametrize("act", **parametrize_by_text(ONE_PER_SHAPE))
def test_transformed_and_stochastic_codes(act):
    """Both copies encode rounded elements; random numbers count elements, not input columns."""
    fmt, seed = NVFP4(hadamard=True, stochastic_rounding=True), torch.tensor([5, 7])
    arguments = (fmt.text, offs_from_splits((131, 0, 9)), None, True, True, None, seed)
    x = make_input(act, (143,), BF16)
    got = ops.grouped_quantize(x, *arguments, activation=act.text)
    assert_all_same(
        got, ops.grouped_quantize(round_as_stored(fmt, activate_fp32(act, x), BF16), *arguments)
    )


def test_given_scales_of_delayed_fp8():
    """The amax is that of unrounded elements."""
    x = make_input(ONE_PER_SHAPE[1], (40,), BF16)
    elements, offs, scale = (
        activate_fp32(ONE_PER_SHAPE[1], x),
        offs_from_splits((10, 30)),
        torch.tensor([2.0, 0.125]),
    )
    arguments = ("fp8:scaling=delayed", offs, None, True, True, scale)
    got = ops.grouped_quantize(x, *arguments, activation="swiglu")
    assert_all_same(got, ops.grouped_quantize(elements, *arguments))
    assert_same_bytes(
        got[names(FP8(), x, 2, (True, True)).index("amax")], ops.grouped_amax(elements, offs)
    )


def split(flat, shapes):
    members = flat[: sum(m * n for m, n in shapes)].split([m * n for m, n in shapes])
    return [member.view(shape) for member, shape in zip(members, shapes, strict=True)]


@each_format
def test_members_with_own_shapes(fmt):
    shapes = [(5, 128), (0, 64), (130, 192)]  # of x
    count = sum(m * n for m, n in shapes)
    for act in ONE_PER_SHAPE:
        x = torch.cat([sample(count), torch.full((7,), torch.nan).to(BF16)])
        members = [activate_fp32(act, member) for member in split(x, shapes)]
        elements = round_as_stored(fmt, torch.cat([t.flatten() for t in members]), BF16)
        arguments = (fmt.text, None, None, True, True)
        options = {"shapes": [*itertools.chain(*((m, act.width(n)) for m, n in shapes))]}
        got = ops.grouped_quantize(x, *arguments, activation=act.text, **options)
        assert_all_same(got, ops.grouped_quantize(elements, *arguments, **options))


X, OFFS = sample(8, K), offs_from_splits((3, 5))
#: Changed arguments of a call, by the message of the error.
INVALID_ARGUMENTS = {
    "activation must be one of gelu": {"activation": "swish"},
    "K must be a positive multiple of 16 (nvfp4, x is (..., 2K)), got 24": {
        "x": sample(8, 48),
        "activation": "reglu",
    },
    "shapes[1], (4, 48), must end within the 256 elements of the tensor, but ends at 320": (
        {"activation": "swiglu", "x": X.flatten(), "offs": None, "shapes": [4, 32, 4, 48]}
    ),
}


@pytest.mark.parametrize("message", [*INVALID_ARGUMENTS])
def test_invalid_arguments_raise(message):
    arguments = {"x": X, "format": "nvfp4", "offs": OFFS} | INVALID_ARGUMENTS[message]
    for call in (ops.grouped_quantize, cute_kernels.ops.grouped_quantize):
        order = [f.name for f in dataclasses.fields(cute_kernels.ops.quantize.op.GroupedQuantize)]
        all_arguments = dict.fromkeys(order) | {"rowwise": True, "columnwise": False} | arguments
        with pytest.raises(ValueError, match=re.escape(message)):
            call(*(all_arguments[name] for name in order))


def test_support_names_the_ops_with_activations():
    """Check which ops support activations."""
    for op in ("grouped_amax", "grouped_dbias", "grouped_dequantize"):
        fmt = NVFP4() if op == "grouped_dequantize" else None
        assert support(op, fmt, "reference", activation=True).reason == f"{op} takes no activation"
    assert all(support("grouped_quantize", FP8(), arch, activation=True) for arch in ARCHITECTURES)
    assert support("grouped_gemm", NVFP4(), "sm_90a", activation=True)
    assert support("grouped_gemm", NVFP4(), "sm_100a", activation=True)
