"""FP8 with given scales (delayed scaling), code by code."""

import pytest
import torch

import grouped
from tests.helpers import (
    BF16,
    DIRECTIONS,
    DTYPES,
    F32,
    SPLITS,
    U8,
    assert_same_bytes,
    offs_from_splits,
    offs_of_many_groups,
    ops,
    row_ranges,
    sample,
    save_and_load,
    special_values,
)

FP8 = grouped.FP8
FORMATS = {d: FP8(d, "delayed") for d in (torch.float8_e4m3fn, torch.float8_e5m2)}
IDS = [str(d).removeprefix("torch.") for d in FORMATS]
E4M3 = FORMATS[torch.float8_e4m3fn]


def scales(groups):
    """Return ordinary scales, one that saturates nearly everything, and the extremes."""
    values = torch.rand(groups).add(0.1) * torch.arange(-3, groups - 3).clamp(-8, 8).float().exp2()
    values[0] = 1000.0
    for i, value in enumerate((torch.finfo(F32).max, 1e-38)):
        if groups > i + 2:
            values[-1 - i] = value
    return values


def codes_of(x, scale, dtype):
    """Return the codes of x * scale; NaN stays.

    Values are clamped first, because torch's casts do not saturate.
    """
    y = x.float() * scale
    largest = torch.finfo(dtype).max
    # NaN loses its sign.
    return torch.where(
        y.isnan(), torch.tensor(0x7F, dtype=U8), y.clamp(-largest, largest).to(dtype).view(U8)
    )


def amax_of(x):
    numbers = x.float().abs().flatten()
    numbers = numbers[~numbers.isnan()]
    return float(numbers.max()) if len(numbers) else 0.0


def check(q, x, scale, dtype, bounds):
    """Compare codes, scales and amaxes of each group."""
    for g, (start, end) in enumerate(bounds):
        rows = x[start:end] if q.offs is not None else x[g]
        want, member = codes_of(rows, scale[g], dtype), q.member(g)
        if q.rowwise is not None:
            assert_same_bytes(member.codes.view(U8), want, f"codes of {g}")
        if q.columnwise is not None:
            assert_same_bytes(
                member.codes_t.view(U8).contiguous(), want.T.contiguous(), f"codes_t of {g}"
            )
            columns = q.columnwise.codes.view(U8)
            columns, slot = (
                (columns[g], 0) if q.offs is None else (columns, 128 * (start // 128 + g))
            )
            padding = columns[:, slot + len(rows) : slot + -(-len(rows) // 128) * 128]
            assert not padding.any()
        copy = q.rowwise or q.columnwise
        assert copy.amax[g].item() == amax_of(rows)
        assert_same_bytes(copy.scale[g : g + 1], scale[g : g + 1])
        assert_same_bytes(copy.scale_inv[g : g + 1], torch.ones(1).div_(scale[g : g + 1]))


@pytest.mark.parametrize("dtype", [*FORMATS], ids=IDS)
@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_ragged_groups(splits, directions, dtype):
    """Check codes, scales and amaxes of ragged groups with given scales."""
    offs, total = offs_from_splits(splits), sum(splits)
    options = dict(zip(("rowwise", "columnwise"), directions, strict=True))
    scale = scales(len(splits))
    for source in DTYPES.values():
        x = special_values(total + 3, 48, source)  # three rows of tail
        q = grouped.quantize(x, FORMATS[dtype], offs=offs, scale=scale, **options)
        check(q, x, scale, dtype, row_ranges(splits))


def test_many_groups_and_views():
    """Check many groups, and strided x and scales."""
    offs = offs_of_many_groups()
    total = int(offs[-1])
    x = sample(2 * total, 64)[::2, 16:48]
    scale = scales(2 * len(offs))[::2]
    q = grouped.quantize(x, E4M3, offs=offs, scale=scale, columnwise=True)
    group = torch.bucketize(torch.arange(total), offs.long(), right=True)
    assert_same_bytes(
        q.rowwise.codes.view(U8).contiguous(), codes_of(x, scale[group, None], E4M3.dtype)
    )
    assert_same_bytes(q.rowwise.scale, scale.contiguous())
    assert_same_bytes(q.rowwise.amax, ops.grouped_amax(x, offs))
    x[:] = torch.nan
    nothing = grouped.quantize(x, E4M3, offs=offs, scale=scale)
    assert not nothing.amax.any() and nothing.dequantize().isnan().all()


def test_every_bf16_value():
    x = torch.arange(1 << 16).int().to(torch.int16).view(BF16).view(-1, 64)
    for dtype, fmt in FORMATS.items():
        for number in (1.0, 0.7, 2.0**-120, 3e38):
            scale = torch.tensor([number])
            q = grouped.quantize(x, fmt, offs=[len(x)], scale=scale)
            assert_same_bytes(q.rowwise.codes.view(U8).contiguous(), codes_of(x, scale, dtype))
            assert q.amax.item() == torch.inf


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("dtype", [*FORMATS], ids=IDS)
def test_decoding_multiplies_by_the_inverse_scale(dtype, direction):
    """Check that decoding multiplies by the reciprocal of the scale."""
    x, offs, scale = sample(70, 48), offs_from_splits((33, 0, 35)), torch.tensor([3.0, 5.0, 0.7])
    q = grouped.quantize(x, FORMATS[dtype], offs=offs, scale=scale, columnwise=True)
    s = scale[torch.bucketize(torch.arange(68), offs, right=True), None]
    values = codes_of(x[:68], s, dtype).view(dtype).float() * (1 / s)
    for out in DTYPES.values():
        got = q.dequantize(out, direction)
        assert_same_bytes(got[:68], values.to(out))
        assert not got[68:].any()


def test_in_place_ops_keep_the_scale_of_the_tensor():
    """Check that in-place ops keep the scale of the tensor."""
    w, scale = sample(3, 48, 64), torch.tensor([0.5, 1.0, 300.0])
    q = grouped.quantize(w, E4M3, scale=scale, columnwise=True)
    for change in (lambda t: t.mul_(3), lambda t: t.add_(0.25), lambda t: t.copy_(w * 1000)):
        values = change(q.dequantize())
        change(q)
        want = grouped.quantize(values, E4M3, scale=scale, columnwise=True)
        for direction in ("rowwise", "columnwise"):
            pairs = zip(getattr(q, direction), getattr(want, direction), strict=True)
            assert all(a.view(U8).equal(b.view(U8)) for a, b in pairs)
    # Group 2 saturates: its largest value is 448 / 300.
    assert q.dequantize()[2].abs().max() <= 448 / 300 * 1.01 < q.amax[2]


def test_copying_takes_over_scales():
    """Check that ``copy_`` takes the scales of a tensor of the same format only."""
    w = sample(2, 48, 64)
    target, source = (grouped.quantize(w, E4M3, scale=torch.full((2,), s)) for s in (2.0, 3.0))
    target.copy_(source)
    assert target.rowwise.scale.tolist() == [3.0, 3.0]
    assert target.dequantize().equal(source.dequantize())
    target.copy_(grouped.quantize(w, FP8()))
    assert target.rowwise.scale.tolist() == [3.0, 3.0]


def test_quantizing_into_a_tensor_uses_the_given_scale():
    """Check that quantizing into a tensor uses the given scale."""
    x, offs = sample(40, 64), [10, 40]
    q = grouped.quantize(x, E4M3, offs=offs, scale=torch.ones(2), columnwise=True)
    scale = torch.tensor([4.0, 0.5])
    result = grouped.quantize(2 * x, E4M3, offs=offs, scale=scale, columnwise=True, out=q)
    want = grouped.quantize(2 * x, E4M3, offs=offs, scale=scale, columnwise=True)
    assert result is q
    assert q.dequantize().equal(want.dequantize()) and q.amax.equal(want.amax)
    # The tensor's own scale is accepted.
    tensor_scale = q.rowwise.scale
    grouped.quantize(x, E4M3, offs=offs, scale=tensor_scale, columnwise=True, out=q)
    assert tensor_scale.tolist() == [4.0, 0.5]
    with pytest.raises(ValueError, match="scale is missing"):
        grouped.quantize(x, E4M3, offs=offs, columnwise=True, out=q)


def test_saving_keeps_the_scales():
    """Check that saving and loading keeps the scales."""
    x, scale = sample(40, 64), torch.tensor([2.0, 3.0])
    q = grouped.quantize(x, E4M3, offs=[10, 40], scale=scale, columnwise=True)
    loaded = save_and_load(q)
    assert loaded.format == E4M3 and loaded.rowwise.scale.equal(scale)
    assert_same_bytes(loaded.dequantize(), q.dequantize())
    assert q.member(1).scale.item() == 3.0


@pytest.mark.compile
def test_compiled_quantizing_has_the_same_bits():
    """Check that compiled quantization has the eager bits."""
    x, scale = sample(40, 64), torch.tensor([2.0, 3.0])
    q = grouped.quantize(x, E4M3, offs=[10, 40], scale=scale, columnwise=True)
    compiled = torch.compile(
        lambda x, s: grouped.quantize(x, E4M3, offs=[10, 40], scale=s).dequantize(),
        fullgraph=True,
        backend="aot_eager",
    )
    assert_same_bytes(compiled(x, scale), q.dequantize())


def test_the_fused_gemm_refuses_delayed_scaling():
    w = grouped.quantize(sample(1, 16, 32), FP8())
    codes, scales_ = w.rowwise.operand
    with pytest.raises(ValueError, match="quantize a first"):
        ops.m_grouped_quantize_gemm(
            sample(8, 32), codes, offs_from_splits((8,)), scales_, E4M3.text, FP8().text
        )
