"""``grouped.quantize`` and members of its tensors, against tensors that are quantized alone."""

import pytest
import torch

import grouped
from tests.helpers import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    SPLITS,
    U8,
    assert_all_same,
    assert_same_buffers,
    assert_same_bytes,
    end_rows,
    sample,
)

from .cases import EVERY_FORMAT, FORMATS, bytes_of, decode_member

every_format = pytest.mark.parametrize("fmt", EVERY_FORMAT.values(), ids=EVERY_FORMAT)


def assert_same_member(got, want):
    assert_same_buffers(vars(got), vars(want))


def ceil_div(a, b):
    return -(-a // b)


def fp8_member(m, k, dtype, scales, scales_t):
    return {"codes": ((m, k), dtype), "codes_t": ((k, m), dtype)} | {
        "scales": (scales, F32),
        "scales_t": (scales_t, F32),
    }


#: Shapes and dtypes of members of m rows and k columns.
MEMBERS = {
    "1x16": lambda m, k: {
        "codes": ((m, k // 2), U8),
        "scales": ((m, k // 16), E4M3),
        "amax": ((), F32),
        "codes_t": ((k, ceil_div(m, 2)), U8),
        "scales_t": ((k, ceil_div(m, 16)), E4M3),
        "amax_t": ((), F32),
    },
    "16x16": lambda m, k: MEMBERS["1x16"](m, k),
    # Whole blocks of rows.
    "hadamard": lambda m, k: MEMBERS["1x16"](m, k) | {"codes_t": ((k, 8 * ceil_div(m, 16)), U8)},
    "row-scaled": lambda m, k: MEMBERS["1x16"](m, k) | {"amax": ((m,), F32)},
    "fp8": lambda m, k: {
        "codes": ((m, k), E4M3),
        **dict.fromkeys(("scale_inv", "scale", "amax"), ((), F32)),
        "codes_t": ((k, m), E4M3),
    },
    "mxfp8": lambda m, k: {
        "codes": ((m, k), E5M2),
        "scales": ((m, k // 32), U8),
        "codes_t": ((m, k), E5M2),
        "scales_t": ((ceil_div(m, 32), k), U8),
    },
    "32x32": lambda m, k: (
        MEMBERS["mxfp8"](m, k) | dict.fromkeys(("codes", "codes_t"), ((m, k), E4M3))
    ),
    "fp8_block": lambda m, k: fp8_member(m, k, E4M3, (m, ceil_div(k, 128)), (k, ceil_div(m, 128))),
    "128x128": lambda m, k: fp8_member(
        *(m, k, E5M2), (ceil_div(m, 128), ceil_div(k, 128)), (ceil_div(k, 128), ceil_div(m, 128))
    ),
}


@pytest.mark.parametrize("name", [*MEMBERS])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_members_equal_tensors_quantized_alone(splits, name):
    """Groups of rows, and those with shapes of their own."""
    ends, k, fmt = end_rows(splits), 160, EVERY_FORMAT.get(name, grouped.NVFP4(hadamard=True))
    x = sample(ends[-1] + 5, k)
    x[ends[-1] :] = torch.nan
    xq = grouped.quantize(x, fmt, offs=ends, columnwise=True)
    shaped = grouped.quantize(
        x.flatten(), fmt, shapes=[(rows, k) for rows in splits], columnwise=True
    )
    assert xq.num_groups == shaped.num_groups == len(splits)
    for direction in ("rowwise", "columnwise"):
        values = shaped.dequantize(F32, direction).view_as(x)
        assert_same_bytes(values, xq.dequantize(F32, direction))
        assert not values[ends[-1] :].any()
    for g, (rows, end) in enumerate(zip(splits, ends, strict=True)):
        rows_of_group = x[end - rows : end].contiguous()
        got = xq.member(g)
        assert_same_member(shaped.member(g), got)
        assert {n: (tuple(t.shape), t.dtype) for n, t in vars(got).items()} == MEMBERS[name](
            rows, k
        )
        assert_same_member(
            got, grouped.quantize(rows_of_group, fmt, offs=[rows], columnwise=True).member(0)
        )
        if rows:
            assert_same_member(
                got, grouped.quantize(rows_of_group[None], fmt, columnwise=True).member(0)
            )


@pytest.mark.parametrize("name", [*EVERY_FORMAT])
@pytest.mark.parametrize("uniform", [True, False])
def test_members_decode_to_what_dequantize_gives(uniform, name):
    """Compare the values of decoded members with ``dequantize``."""
    rows, cols, fmt = 149, 160, EVERY_FORMAT[name]
    x = sample(3, rows, cols)
    options = {} if uniform else {"offs": [rows, 2 * rows, 3 * rows]}
    xq = grouped.quantize(x if uniform else x.flatten(0, 1), fmt, columnwise=True, **options)
    heights = {"32x32": 1, "128x128": 128}  # the scales of 32x32 blocks are repeated
    for direction, suffix in (("rowwise", ""), ("columnwise", "_t")):
        decoded = xq.dequantize(F32, direction).view(3, rows, cols)
        for got, m in zip(decoded, xq.unbind(), strict=True):
            codes, scales = (
                getattr(m, f"{rows_of_group}{suffix}", None)
                for rows_of_group in ("codes", "scales")
            )
            if name in FORMATS:
                values = decode_member(
                    codes, scales, getattr(m, f"amax{suffix}"), rows if suffix else cols
                )
            elif fmt.scale is None:
                values = codes.float() * m.scale_inv
            else:
                factor = scales.float() if scales.is_floating_point() else 2.0 ** (scales - 127.0)
                steps = [heights.get(name, 1), fmt.scale.vec_size]
                if suffix and fmt.columnwise == "untransposed":
                    steps.reverse()
                factor = factor.repeat_interleave(steps[0], 0).repeat_interleave(steps[1], 1)
                values = codes.float() * factor[: codes.shape[0], : codes.shape[1]]
            assert_same_bytes(
                values.T if suffix and fmt.columnwise == "transposed" else values, got
            )
        assert (
            (decoded - x).abs().amax((1, 2)) <= x.abs().amax((1, 2)) / (6 if name in FORMATS else 8)
        ).all()


@every_format
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_one_direction(direction, fmt):
    """Check that a tensor with one direction has the same bytes for it."""
    x = sample(40, 32)
    xq = grouped.quantize(
        x, fmt, offs=[10, 40], rowwise=direction == "rowwise", columnwise=direction == "columnwise"
    )
    two_directions = grouped.quantize(x, fmt, offs=[10, 40], columnwise=True)
    missing = "columnwise" if direction == "rowwise" else "rowwise"
    assert getattr(xq, missing) is None
    assert_all_same(getattr(xq, direction), getattr(two_directions, direction))
    assert_same_bytes(xq.dequantize(), two_directions.dequantize(direction=direction))
    assert xq.amax is getattr(getattr(xq, direction), "amax", None)
    member = xq.member(0)
    assert (member.codes is None) == (direction == "columnwise")
    assert (member.codes_t is None) == (direction == "rowwise")
    with pytest.raises(RuntimeError, match=f"no {missing} copy"):
        xq.dequantize(direction=missing)


def test_member_indices():
    """Check positive, negative and invalid indices of members."""
    xq = grouped.quantize(sample(40, 32), FORMATS["1x16"], offs=[10, 10, 40])
    assert_same_member(xq.member(-1), xq.member(2))
    assert len(xq.unbind()) == 3 and len(list(xq)) == 3
    for wrong in (3, -4):
        with pytest.raises(IndexError, match="3"):
            xq.member(wrong)
    with pytest.raises(ValueError, match="dim must be 0"):
        xq.unbind(1)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@every_format
def test_dequantize_rounds_once(fmt, dtype):
    """Check that ``dequantize`` rounds the exact fp32 values once."""
    x = sample(24, 32, dtype=dtype)
    xq = grouped.quantize(x, fmt, offs=[20])
    assert xq.dequantize().dtype == dtype
    exact = xq.dequantize(F32)
    for out in (BF16, F16):
        assert_same_bytes(xq.dequantize(out), exact.to(out))
    assert not exact[20:].any()
    with pytest.raises(TypeError, match="dtype must be"):
        xq.dequantize(torch.float64)
    with pytest.raises(ValueError, match="direction must be"):
        xq.dequantize(direction="both")


@every_format
def test_out_reuses_the_storage_with_other_boundaries(fmt):
    """Check that quantizing into ``out`` reuses its storage with new end rows."""
    x, y = sample(70, 32), sample(70, 32)
    out = grouped.quantize(x, fmt, offs=[10, 20, 70], columnwise=True)
    view = out.detach()
    pointers_before = [t.data_ptr() for t in (*out.rowwise, *out.columnwise, out.offs)]
    got = grouped.quantize(y, fmt, offs=[0, 60, 69], columnwise=True, out=out)
    assert got is out
    assert pointers_before == [t.data_ptr() for t in (*out.rowwise, *out.columnwise, out.offs)]
    want = grouped.quantize(y, fmt, offs=[0, 60, 69], columnwise=True)
    for tensor in (out, view):
        for a, b in zip(tensor.unbind(), want.unbind(), strict=True):
            assert_same_member(a, b)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"fmt": FORMATS["row-scaled"]}, ValueError, "another format"),
        ({"x": sample(41, 32)}, ValueError, "another shape"),
        ({"columnwise": True}, ValueError, "another columnwise"),
        ({"columnwise": True, "rowwise": False}, ValueError, "another rowwise"),
        ({"offs": [40]}, ValueError, "out has 2 groups, offs has 1"),
        ({"out": torch.zeros(40, 32)}, TypeError, "out must be a GroupedTensor, got Tensor"),
    ],
)
def test_out_that_does_not_fit_is_refused_untouched(change, error, match):
    """Check that an ``out`` that does not fit is refused and unchanged."""
    out = grouped.quantize(sample(40, 32), FORMATS["1x16"], offs=[10, 40])
    before = bytes_of(out)
    call = {"x": sample(40, 32), "fmt": FORMATS["1x16"], "offs": [20, 40], "out": out} | change
    with pytest.raises(error, match=match):
        grouped.quantize(call.pop("x"), call.pop("fmt"), **call)
    assert_same_buffers(bytes_of(out), before)


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("capturing", [True, False])
def test_members_are_not_read_while_a_graph_is_captured(monkeypatch, capturing):
    """Reading offs would synchronize; a uniform tensor has none."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    ragged = grouped.quantize(sample(40, 64), FORMATS["1x16"], offs=[13, 40])
    uniform = grouped.quantize(sample(2, 16, 64), FORMATS["1x16"])
    ragged._offs = ragged.offs.as_subclass(OnGpu)
    if capturing:
        for read in (lambda: ragged.member(0), lambda: ragged.member(-1), ragged.unbind):
            with pytest.raises(RuntimeError, match="capturing"):
                read()
    else:
        assert len(ragged.unbind()) == 2 and ragged.member(1).codes.shape == (27, 32)
    assert len(uniform.unbind()) == 2 and uniform.member(0).codes.shape == (16, 32)
