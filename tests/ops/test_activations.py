"""Activations in front of quantization: the codes of what an activation makes."""

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
    *(NVFP4(), NVFP4(row_scaled=True), NVFP4(block=(16, 16)), NVFP4(four_over_six=True)),
    *(FP8(), FP8(E5M2), MXFP8(), MXFP8(block=(32, 32))),
    *(FP8Block(), FP8Block(block=(128, 128), pow2_scales=False)),
)
FORMATS = [fmt for fmt in _RECORDS if support("grouped_quantize", fmt, "reference")]
EVERY = [*map(Activation, ACTIVATIONS), Activation("clamped_swiglu", alpha=1.0, limit=0.5)]
#: One of each shape, for what does not depend on the arithmetic.
SOME = [Activation("gelu"), Activation("swiglu"), Activation("clamped_swiglu", limit=0.5)]
K = 64


def texts(records):
    return {"argvalues": records, "ids": [r.text for r in records]}


each_format = pytest.mark.parametrize("fmt", **texts(FORMATS))


def case(act, rows, dtype):
    return sample(*rows, K * 2 if act.is_gated else K, dtype=dtype)


def made(act, x):
    """The fp32 elements, all at once."""
    return activate(x.float(), act)


def stored(fmt, elements, dtype):
    """The elements as a tensor of its own, which quantizes to the same codes."""
    return elements.to(dtype) if fmt.rounds_activation else elements


def names(fmt, x, num_groups, directions):
    rowwise, columnwise = directions
    return list(buffers(fmt, x.shape, num_groups, rowwise=rowwise, columnwise=columnwise))


def check(fmt, act, x, offs, directions=(True, True), amax=None):
    """That an activation and codes at once are those one after the other."""
    got = ops.grouped_quantize(x, fmt.text, offs, amax, *directions, activation=act.text)
    # NaN in what no group has must not matter: the tail of the elements is left as it comes.
    elements = made(act, x)
    want = ops.grouped_quantize(stored(fmt, elements, x.dtype), fmt.text, offs, amax, *directions)
    for name, a, b in zip(names(fmt, x, 1, directions), got, want, strict=True):
        assert_same_bytes(a, b, f"{fmt.text} {act.text} {name}")
    return got


@pytest.mark.parametrize("act", **texts(EVERY))
@each_format
def test_codes_of_every_activation(fmt, act):
    x = case(act, (150,), BF16)
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
    for act in SOME:
        for splits in ("one row", "tile edges", "empty first", "all empty"):
            x = case(act, (sum(SPLITS[splits]) + 2,), dtype)
            check(fmt, act, x, offs_from_splits(SPLITS[splits]), directions)
        for uniform in ((3, 21), (2, 0)):
            check(fmt, act, case(act, uniform, dtype), None, directions)


def test_truncation_makes_a_difference():
    """Codes of what is not rounded where it should be, and the other way round, are others."""
    x, offs = torch.randn(128, 256).to(BF16), offs_from_splits((128,))
    exact = made(SOME[0], x)
    for fmt in FORMATS:
        got = check(fmt, SOME[0], x, offs, (True, False))
        other = exact if fmt.rounds_activation else exact.to(BF16)
        assert not got[0].view(U8).equal(ops.grouped_quantize(other, fmt.text, offs)[0].view(U8))


@each_format
def test_many_groups_and_strided_inputs(fmt):
    act, offs = SOME[1], offs_of_many_groups()
    check(fmt, act, case(act, (int(offs[-1]) + 5,), BF16), offs)
    x = case(act, (2 * 45,), BF16)
    for strided in (x[::2], x.mT.contiguous().mT[::2]):
        assert not strided.is_contiguous()
        check(fmt, act, strided, offs_from_splits((30, 15)))


@pytest.mark.parametrize(
    "fmt", **texts([f for f in FORMATS if f.global_scale_for(columnwise=True)])
)
def test_given_amax(fmt):
    check(
        fmt,
        SOME[1],
        case(SOME[1], (40,), BF16),
        offs_from_splits((10, 30)),
        (True, True),
        torch.tensor([3.0, -5.0]),
    )


@pytest.mark.parametrize("act", **texts(SOME))
def test_transformed_and_stochastic_codes(act):
    """Both copies are of the rounded elements; draws count elements, not columns of the input."""
    fmt, seed = NVFP4(hadamard=True, stochastic_rounding=True), torch.tensor([5, 7])
    arguments = (fmt.text, offs_from_splits((131, 0, 9)), None, True, True, None, seed)
    x = case(act, (143,), BF16)
    got = ops.grouped_quantize(x, *arguments, activation=act.text)
    assert_all_same(got, ops.grouped_quantize(stored(fmt, made(act, x), BF16), *arguments))


def test_given_scale():
    """Delayed FP8: the scale is given, the amax is that of elements that are not rounded."""
    x = case(SOME[1], (40,), BF16)
    elements, offs, scale = made(SOME[1], x), offs_from_splits((10, 30)), torch.tensor([2.0, 0.125])
    arguments = ("fp8:scaling=delayed", offs, None, True, True, scale)
    got = ops.grouped_quantize(x, *arguments, activation="swiglu")
    assert_all_same(got, ops.grouped_quantize(elements, *arguments))
    assert_same_bytes(
        got[names(FP8(), x, 2, (True, True)).index("amax")], ops.grouped_amax(elements, offs)
    )


def split(flat, shapes):
    parts = flat[: sum(m * n for m, n in shapes)].split([m * n for m, n in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@each_format
def test_groups_that_have_shapes_of_their_own(fmt):
    shapes = [(5, 128), (0, 64), (130, 192)]  # of x
    count = sum(m * n for m, n in shapes)
    for act in SOME:
        x = torch.cat([sample(count), torch.full((7,), torch.nan).to(BF16)])
        members = [made(act, member) for member in split(x, shapes)]
        elements = stored(fmt, torch.cat([t.flatten() for t in members]), BF16)
        arguments = (fmt.text, None, None, True, True)
        options = {"shapes": [*itertools.chain(*((m, act.width(n)) for m, n in shapes))]}
        got = ops.grouped_quantize(x, *arguments, activation=act.text, **options)
        assert_all_same(got, ops.grouped_quantize(elements, *arguments, **options))


# What is refused


X, OFFS = sample(8, K), offs_from_splits((3, 5))
#: What is changed in a call, by the message.
REFUSED = {
    "activation must be one of gelu": {"activation": "swish"},
    "K must be a positive multiple of 16 (nvfp4, x is (..., 2K)), got 24": {
        "x": sample(8, 48),
        "activation": "reglu",
    },
    "shapes[1], (4, 48), must end within the 256 elements of the tensor, but ends at 320": (
        {"activation": "swiglu", "x": X.flatten(), "offs": None, "shapes": [4, 32, 4, 48]}
    ),
}


@pytest.mark.parametrize("message", [*REFUSED])
def test_refused(message):
    arguments = {"x": X, "format": "nvfp4", "offs": OFFS} | REFUSED[message]
    for call in (ops.grouped_quantize, cute_kernels.ops.grouped_quantize):
        order = [f.name for f in dataclasses.fields(cute_kernels.ops.quantize.op.GroupedQuantize)]
        given = dict.fromkeys(order) | {"rowwise": True, "columnwise": False} | arguments
        with pytest.raises(ValueError, match=re.escape(message)):
            call(*(given[name] for name in order))


def test_ops_that_take_none_say_so():
    for op in ("grouped_amax", "grouped_dbias", "grouped_dequantize"):
        fmt = NVFP4() if op == "grouped_dequantize" else None
        assert support(op, fmt, "reference", activation=True).reason == f"{op} takes no activation"
    assert all(support("grouped_quantize", FP8(), arch, activation=True) for arch in ARCHITECTURES)
    assert support("grouped_gemm", NVFP4(), "sm_90a", activation=True)
    assert support("grouped_gemm", NVFP4(), "sm_100a", activation=True)
