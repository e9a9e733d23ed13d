"""Groups with shapes of their own: each is quantized and decoded as it is alone."""

import functools
import itertools

import pytest
import torch

from cute_kernels import backend
from cute_kernels.formats import FP8, NVFP4, parse
from cute_kernels.layout.buffers import buffers, member_spans
from tests.helpers import (
    BF16,
    DIRECTIONS,
    F16,
    F32,
    I32,
    REFERENCE_FORMATS,
    SENTINEL,
    U8,
    assert_all_same,
    assert_same_bytes,
    ops,
    poisoned,
    sample,
    seeded_generator,
    special_values,
)

#: Shapes of members, by the case that they cover.
SHAPES = {
    "both vary": [(5, 64), (130, 32), (1, 160), (33, 96)],
    "last varies": [(40, 32), (40, 288), (40, 64)],
    "equal": [(7, 64), (7, 64)],
    "one": [(129, 96)],
    "empty first": [(0, 64), (3, 32)],
    "empty middle": [(2, 32), (0, 64), (0, 32), (4, 96)],
    "empty last": [(128, 32), (0, 160)],
    "all empty": [(0, 32), (0, 64)],
    "single rows": [(1, 32)] * 5,
}
each_format = pytest.mark.parametrize("fmt", REFERENCE_FORMATS.values(), ids=REFERENCE_FORMATS)


def flatten_shapes(shapes):
    return list(itertools.chain.from_iterable(shapes))


def count_elements(shapes):
    return sum(m * n for m, n in shapes)


def quantize_separately(fmt, members, directions, amax=None, scale=None):
    """Yield the buffers of each member, quantized as a tensor of its own."""
    for i, x in enumerate(members):
        amax_of_member, factor = (None if t is None else t[..., i : i + 1] for t in (amax, scale))
        out = ops.grouped_quantize(x[None], fmt.text, None, amax_of_member, *directions, factor)
        names = buffers(fmt, (1, *x.shape), None, rowwise=directions[0], columnwise=directions[1])
        yield dict(zip(names, out, strict=True))


def named_buffers(fmt, shapes, directions, out):
    options = dict(zip(("rowwise", "columnwise"), directions, strict=True))
    return dict(zip(buffers(fmt, (0,), None, shapes=shapes, **options), out, strict=True))


def decode(fmt, copy, rows, columnwise, shapes=None, dtype=F32):
    """Dequantize one copy."""
    codes, *scales = (copy[name] for name in fmt.operand_names(columnwise))
    return ops.grouped_dequantize(codes, scales, fmt.text, rows, dtype, None, columnwise, shapes)


def check_against_members(fmt, members, directions, amax=None):
    """Compare the flat tensor's buffers and values with those of separate members."""
    shapes, dtype = [tuple(x.shape) for x in members], members[0].dtype
    x = torch.cat(
        [*(member.flatten() for member in members), torch.full((9,), torch.nan, dtype=dtype)]
    )
    scale = torch.arange(0.25, 9)[: len(members)] if fmt.has_given_scale else None
    out = ops.grouped_quantize(
        x, fmt.text, None, amax, *directions, scale, shapes=flatten_shapes(shapes)
    )
    got, want = (
        named_buffers(fmt, shapes, directions, out),
        quantize_separately(fmt, members, directions, amax, scale),
    )
    options = dict(zip(("rowwise", "columnwise"), directions, strict=True))
    spans = member_spans(fmt, shapes, **options)
    decoded = {
        columnwise: decode(fmt, got, len(x), columnwise, flatten_shapes(shapes))
        for columnwise, is_present in zip((False, True), directions, strict=True)
        if is_present
    }
    offset = 0
    for i, (copy, (m, n)) in enumerate(zip(want, shapes, strict=True)):
        for name, buffer in copy.items():
            assert_same_bytes(spans[name][i].view_of(got[name]), buffer, f"{name} of member {i}")
        for columnwise, values in decoded.items():
            assert_same_bytes(
                values[offset : offset + m * n],
                decode(fmt, copy, m, columnwise).flatten(),
                f"values of member {i}",
            )
        offset += m * n
    for values in decoded.values():
        assert values.shape == x.shape and not values[offset:].any()


REFERENCE_AND_DELAYED_FORMATS = REFERENCE_FORMATS | {"delayed": FP8(scaling="delayed")}


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize(
    "fmt",
    REFERENCE_AND_DELAYED_FORMATS.values(),
    ids=REFERENCE_AND_DELAYED_FORMATS,
)
def test_members_have_the_bytes_of_separate_tensors(fmt, directions):
    for shapes in SHAPES.values():
        check_against_members(fmt, [sample(*shape) for shape in shapes], directions)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@each_format
def test_dtypes_and_special_values(fmt, dtype):
    members = [special_values(*shape, dtype) for shape in SHAPES["both vary"]]
    if fmt == NVFP4(hadamard=True) and dtype != BF16:
        with pytest.raises(TypeError, match="bfloat16"):
            check_against_members(fmt, members, (True, True))
        return
    check_against_members(fmt, members, (True, True))


@each_format
def test_given_amaxes(fmt):
    """Check quantization with given amaxes against each member."""
    directions = tuple(
        level is not None and level.per == "group"
        for level in (fmt.global_scale_for(False), fmt.global_scale_for(True))
    )
    if not any(directions):
        with pytest.raises(ValueError, match="amax is the global scale of groups"):
            ops.grouped_quantize(sample(32), fmt.text, None, torch.ones(1), shapes=[1, 32])
        return
    amax = torch.tensor([2.0, -3.0, 0.0, 50.0])
    if fmt.is_transformed:
        amax = torch.stack([amax, 2 * amax])
    check_against_members(
        fmt, [sample(*shape) for shape in SHAPES["empty middle"]], directions, amax
    )


@pytest.mark.parametrize("text", ["nvfp4:row_scaled", "fp8"])
def test_many_members(text):
    """Compare over a thousand members with separate tensors."""
    fmt = REFERENCE_FORMATS[text]
    rows = torch.randint(0, 3, (1030,), generator=seeded_generator(5)).tolist()
    shapes = [(m, 32 if i % 3 else 64) for i, m in enumerate(rows)]
    x = sample(count_elements(shapes))
    out = ops.grouped_quantize(x, fmt.text, None, None, True, False, shapes=flatten_shapes(shapes))
    got = named_buffers(fmt, shapes, (True, False), out)
    spans = member_spans(fmt, shapes)
    start = 0
    for i, (m, n) in enumerate(shapes):
        if i % 103 == 0:
            (want,) = quantize_separately(fmt, [x[start : start + m * n].view(m, n)], (True, False))
            for name, buffer in want.items():
                assert_same_bytes(spans[name][i].view_of(got[name]), buffer, name)
        start += m * n


@each_format
def test_only_spans_of_members_are_written(fmt):
    """Check that elements outside of the members are not written."""
    shapes = SHAPES["both vary"]
    x = sample(count_elements(shapes))
    want = ops.grouped_quantize(x, fmt.text, None, None, True, True, shapes=flatten_shapes(shapes))
    out = [poisoned(t) for t in want]
    ops.grouped_quantize_out(
        x, fmt.text, None, None, True, True, shapes=flatten_shapes(shapes), out=out
    )
    got = named_buffers(fmt, shapes, (True, True), out)
    for name, spans in member_spans(fmt, shapes, columnwise=True).items():
        outside = got[name].view(U8).clone()
        size = got[name].itemsize
        for span in spans:
            outside[span.start * size : (span.start + span.spec.extent) * size] = SENTINEL
        assert outside.eq(SENTINEL).all(), name
    for columnwise in (False, True):
        values = decode(fmt, got, len(x), columnwise, flatten_shapes(shapes))
        assert_same_bytes(
            values,
            decode(
                fmt,
                named_buffers(fmt, shapes, (True, True), want),
                len(x),
                columnwise,
                flatten_shapes(shapes),
            ),
        )


#: (changed arguments, message).
WRONG = {
    "no members": ({"shapes": []}, "at least one member"),
    "an odd size": ({"shapes": [5, 64, 2]}, "got 3 sizes"),
    "negative rows": (
        {"shapes": [5, 64, -1, 32]},
        r"shapes\[1\] must have m >= 0 rows, got \(-1, 32\)",
    ),
    "columns": (
        {"shapes": [5, 64, 2, 24]},
        r"shapes\[1\] must have a positive multiple of 16 columns \(nvfp4\), got \(2, 24\)",
    ),
    "too many elements": (
        {"shapes": [5, 64, 2, 48]},
        r"shapes\[1\], \(2, 48\), must end within the 400 elements of the tensor, but ends at 416",
    ),
    "offs": ({"offs": torch.tensor([5, 6], dtype=I32)}, "offs and shapes are both given"),
    "amaxes": ({"amax": torch.ones(3)}, "amax must have size 2 in dimension 0"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_invalid_shapes_raise(change, message):
    with pytest.raises(ValueError, match=message):
        ops.grouped_quantize(torch.ones(400), "nvfp4", **{"shapes": [5, 64, 2, 32]} | change)


def test_invalid_arguments_of_decoding_raise():
    """Check that invalid arguments of ``grouped_dequantize`` raise."""
    shapes = [5, 64, 2, 32]
    codes, *scales = ops.grouped_quantize(torch.ones(384), "nvfp4", shapes=shapes)
    arguments = (codes, scales, "nvfp4", 384, BF16)
    assert ops.grouped_dequantize(*arguments, shapes=shapes).eq(1).all()
    offs = torch.tensor([5, 6], dtype=I32)
    with pytest.raises(ValueError, match="offs and shapes are both given"):
        ops.grouped_dequantize(*arguments, offs=offs, shapes=shapes)
    with pytest.raises(ValueError, match="must end within the 383 elements"):
        ops.grouped_dequantize(codes, scales, "nvfp4", 383, BF16, shapes=shapes)
    with pytest.raises(ValueError, match="codes must have size 2560 in dimension 0"):
        ops.grouped_dequantize(*arguments[:3], 9999, BF16, shapes=[5, 64, 70, 64])
    with pytest.raises(ValueError, match="codes must have 3 dimensions"):
        ops.grouped_dequantize(*arguments)


def test_other_shapes_use_another_plan():
    """Check that different shapes use different plans."""
    x = sample(256)
    call = functools.partial(ops.grouped_quantize, x, "fp8")
    tall, wide = ([4, 32, 4, 32], [2, 64, 2, 64])
    for shapes in (tall, wide, tall):
        got = call(shapes=shapes)
        assert got[3].tolist() == [member.abs().max() for member in x.view(2, 128).float()]
        (m, n), codes = shapes[:2], got[0]
        assert_same_bytes(
            codes[: m * n].view(m, n), ops.grouped_quantize(x.view(2, m, n), "fp8")[0][0]
        )
    assert call(shapes=[1, 32, 7, 32])[0].shape == (128 + 256,)
    with pytest.raises(ValueError, match="must have a positive multiple of 16 columns"):
        call(shapes=[4, 24, 4, 32])


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("arch", "text", "act"),
    [
        *(("sm_90a", "nvfp4", None), ("sm_100a", "mxfp8", None), ("sm_100a", "fp8_block", None)),
        *((arch, "nvfp4:stochastic_rounding", None) for arch in ("sm_90a", "sm_100a")),
        ("sm_100a", "nvfp4:block=16x16,stochastic_rounding", None),
        *(("sm_90a", "fp8", None), ("sm_100a", "nvfp4:row_scaled", "swiglu")),
    ],
)
def test_kernels_have_the_bits_of_the_reference(arch, text, act):
    """Compare kernels for given shapes with the reference."""
    shapes = [(5, 64), (0, 32), (130, 96), (1, 2048), (128, 32)]
    count = sum(m * n for m, n in shapes)
    x = torch.cat([sample(count * (2 if act else 1)), torch.full((40,), torch.nan).bfloat16()])
    arguments = {"columnwise": True, "activation": act, "shapes": flatten_shapes(shapes)}
    fmt = parse(text)
    if fmt.is_stochastic:
        arguments["seed"] = torch.tensor([7, 2**62 + 1])
    want = ops.grouped_quantize(x, text, **arguments)
    outs = [poisoned(t) for t in want], [poisoned(t) for t in want]
    ops.grouped_quantize_out(x, text, **arguments, out=outs[0])
    with backend(f"emulated:{arch}"):
        ops.grouped_quantize_out(x, text, **arguments, out=outs[1])
    assert_all_same([t.view(U8) for t in outs[1]], [t.view(U8) for t in outs[0]])
    if act is not None:
        return
    directions = (False, True)
    named_buffers = dict(
        zip(list(buffers(fmt, (1, 2, 32), None, columnwise=True)), want, strict=True)
    )
    for columnwise in directions:
        codes, *scales = (named_buffers[name] for name in fmt.operand_names(columnwise))
        op_arguments = (codes, scales, text, count + 7, BF16, None, columnwise, arguments["shapes"])
        decoded = ops.grouped_dequantize(*op_arguments)
        with backend(f"emulated:{arch}"):
            assert_same_bytes(ops.grouped_dequantize(*op_arguments), decoded)
            out = poisoned(decoded)
            ops.grouped_dequantize_out(*op_arguments, out=out)
        assert_same_bytes(out[:count], decoded[:count])
        assert not out[count:].view(torch.int16).eq(0).any()
