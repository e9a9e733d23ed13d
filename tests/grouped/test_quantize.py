"""``grouped.quantize``, ``member`` and ``dequantize``."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import cute_kernels
import grouped
from tests.grouped.cases import FORMATS, bytes_of, decode_member
from tests.helpers import SPLITS, assert_same_bytes, end_rows, sample

FIELDS = ("codes", "scales", "amax", "codes_t", "scales_t", "amax_t")
FP8 = torch.float8_e4m3fn


def assert_same_member(got, want):
    for name in FIELDS:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert_same_bytes(a, b, name)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_members_equal_tensors_quantized_alone(splits, fmt):
    ends, k = end_rows(splits), 48
    x = sample(ends[-1] + 5, k)
    xq = grouped.quantize(x, fmt, offs=ends, columnwise=True)
    assert xq.num_groups == len(splits)
    for g, (rows, end) in enumerate(zip(splits, ends, strict=True)):
        part = x[end - rows : end].contiguous()
        got = xq.member(g)
        assert got.codes.shape == (rows, k // 2) and got.codes.dtype == torch.uint8
        assert got.scales.shape == (rows, k // 16) and got.scales.dtype == FP8
        assert got.amax.shape == ((rows,) if fmt.row_scaled else ())
        assert got.codes_t.shape == (k, (rows + 1) // 2) and got.codes_t.dtype == torch.uint8
        assert got.scales_t.shape == (k, (rows + 15) // 16) and got.scales_t.dtype == FP8
        assert got.amax_t.shape == () and got.amax_t.dtype == torch.float32
        assert_same_member(got, grouped.quantize(part, fmt, offs=[rows], columnwise=True).member(0))
        if rows:
            assert_same_member(got, grouped.quantize(part[None], fmt, columnwise=True).member(0))


@settings(max_examples=15)
@given(
    splits=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    tail=st.integers(0, 140),
    blocks=st.integers(1, 9),
    fmt=st.sampled_from(list(FORMATS.values())),
)
def test_members_of_any_split(splits, tail, blocks, fmt):
    ends = end_rows(tuple(splits))
    x = sample(ends[-1] + tail, 16 * blocks)
    xq = grouped.quantize(x, fmt, offs=ends, columnwise=True)
    for g, (rows, end) in enumerate(zip(splits, ends, strict=True)):
        part = x[end - rows : end]
        alone = grouped.quantize(part, fmt, offs=[rows], columnwise=True)
        assert_same_member(xq.member(g), alone.member(0))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("rows", [1, 7, 128, 131])
def test_uniform_members_equal_tensors_quantized_alone(rows, fmt):
    w = sample(3, rows, 80)
    wq = grouped.quantize(w, fmt, columnwise=True)
    assert wq.num_groups == 3 and wq.offs is None
    for g, member in enumerate(wq.unbind()):
        alone = grouped.quantize(w[g].contiguous(), fmt, offs=[rows], columnwise=True)
        assert_same_member(member, alone.member(0))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("uniform", [True, False])
def test_members_decode_to_what_dequantize_gives(uniform, fmt):
    """With a decoder written from the format's text: codes, linear scales, amax; both ways."""
    x = sample(3, 37, 48)
    options = {} if uniform else {"offs": [37, 74, 111]}
    xq = grouped.quantize(x if uniform else x.flatten(0, 1), fmt, columnwise=True, **options)
    row = xq.dequantize(torch.float32, "rowwise").view(3, 37, 48)
    column = xq.dequantize(torch.float32, "columnwise").view(3, 37, 48)
    for g, m in enumerate(xq.unbind()):
        assert_same_bytes(decode_member(m.codes, m.scales, m.amax, 48), row[g])
        assert_same_bytes(decode_member(m.codes_t, m.scales_t, m.amax_t, 37), column[g].T)
        assert (row[g] - x[g]).abs().max() <= x[g].abs().max() / 6
        assert (column[g] - x[g]).abs().max() <= x[g].abs().max() / 6


def test_16x16_blocks_hold_the_same_values_in_both_directions():
    wq = grouped.quantize(sample(2, 48, 64), FORMATS["16x16"], columnwise=True)
    assert_same_bytes(wq.dequantize(direction="rowwise"), wq.dequantize(direction="columnwise"))


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_one_direction(direction):
    x = sample(40, 32)
    only = {"rowwise": direction == "rowwise", "columnwise": direction == "columnwise"}
    xq = grouped.quantize(x, FORMATS["1x16"], offs=[10, 40], **only)
    both = grouped.quantize(x, FORMATS["1x16"], offs=[10, 40], columnwise=True)
    other = "columnwise" if direction == "rowwise" else "rowwise"
    assert getattr(xq, other) is None
    for got, want in zip(getattr(xq, direction), getattr(both, direction), strict=True):
        assert_same_bytes(got, want)
    assert_same_bytes(xq.dequantize(), both.dequantize(direction=direction))
    assert xq.amax is getattr(xq, direction).amax
    member = xq.member(0)
    assert (member.codes is None) == (direction == "columnwise")
    assert (member.codes_t is None) == (direction == "rowwise")
    with pytest.raises(RuntimeError, match=f"no {other} copy"):
        xq.dequantize(direction=other)


def test_member_indices():
    xq = grouped.quantize(sample(40, 32), FORMATS["1x16"], offs=[10, 10, 40])
    assert_same_member(xq.member(-1), xq.member(2))
    assert len(xq.unbind()) == 3 and len(list(xq)) == 3
    for wrong in (3, -4):
        with pytest.raises(IndexError, match="3"):
            xq.member(wrong)
    with pytest.raises(ValueError, match="dim must be 0"):
        xq.unbind(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantize_rounds_once(dtype):
    x = sample(24, 32, dtype=dtype)
    xq = grouped.quantize(x, FORMATS["row-scaled"], offs=[20])
    assert xq.dequantize().dtype == dtype
    exact = xq.dequantize(torch.float32)
    for out in (torch.bfloat16, torch.float16):
        assert_same_bytes(xq.dequantize(out), exact.to(out))
    assert not exact[20:].any()
    with pytest.raises(TypeError, match="dtype must be"):
        xq.dequantize(torch.float64)
    with pytest.raises(ValueError, match="direction must be"):
        xq.dequantize(direction="both")


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_the_tail_is_not_read(fmt, poison):
    x = sample(60, 32)
    clean = grouped.quantize(x, fmt, offs=[20, 41], columnwise=True, dbias=True)
    x[41:] = poison
    dirty = grouped.quantize(x, fmt, offs=[20, 41], columnwise=True, dbias=True)
    for a, b in zip(clean[0].unbind(), dirty[0].unbind(), strict=True):
        assert_same_member(a, b)
    assert_same_bytes(clean[1], dirty[1])
    assert not dirty[0].dequantize()[41:].any()


def test_non_contiguous_input():
    x, w = sample(32, 40), sample(3, 64, 48)
    offs = [8, 40]
    fmt = FORMATS["1x16"]
    strided = grouped.quantize(x.T, fmt, offs=offs, columnwise=True)
    dense = grouped.quantize(x.T.contiguous(), fmt, offs=offs, columnwise=True)
    assert_same_bytes(strided.dequantize(), dense.dequantize())
    strided, dense = (grouped.quantize(v, fmt) for v in (w.mT, w.mT.contiguous()))
    assert_same_bytes(strided.dequantize(), dense.dequantize())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_out_reuses_the_storage_with_other_boundaries(fmt):
    first, second = sample(70, 32), sample(70, 32)
    out = grouped.quantize(first, fmt, offs=[10, 20, 70], columnwise=True)
    view = out.detach()
    held = [t.data_ptr() for t in (*out.rowwise, *out.columnwise, out.offs)]
    got = grouped.quantize(second, fmt, offs=[0, 60, 69], columnwise=True, out=out)
    assert got is out
    assert held == [t.data_ptr() for t in (*out.rowwise, *out.columnwise, out.offs)]
    want = grouped.quantize(second, fmt, offs=[0, 60, 69], columnwise=True)
    for tensor in (out, view):
        for a, b in zip(tensor.unbind(), want.unbind(), strict=True):
            assert_same_member(a, b)


def test_out_of_a_uniform_tensor():
    out = grouped.quantize(sample(2, 16, 32), FORMATS["16x16"])
    w = sample(2, 16, 32)
    assert grouped.quantize(w, FORMATS["16x16"], out=out) is out
    assert_same_bytes(out.dequantize(), grouped.quantize(w, FORMATS["16x16"]).dequantize())


def _out():
    return grouped.quantize(sample(40, 32), FORMATS["1x16"], offs=[10, 40])


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
    out = _out()
    before = bytes_of(out)
    call = {"x": sample(40, 32), "fmt": FORMATS["1x16"], "offs": [20, 40], "out": out} | change
    with pytest.raises(error, match=match):
        grouped.quantize(call.pop("x"), call.pop("fmt"), **call)
    for name, value in bytes_of(out).items():
        assert_same_bytes(value, before[name], name)


def test_a_refused_input_leaves_out_untouched():
    out = _out()
    before = bytes_of(out)
    with pytest.raises(TypeError):
        grouped.quantize(sample(40, 32).double(), FORMATS["1x16"], offs=[20, 40], out=out)
    for name, value in bytes_of(out).items():
        assert_same_bytes(value, before[name], name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dbias(dtype):
    x = torch.randn(50, 32, dtype=dtype)
    xq, dbias = grouped.quantize(x, FORMATS["1x16"], offs=[30, 30, 45], dbias=True)
    assert isinstance(xq, grouped.GroupedTensor)
    assert dbias.shape == (3, 32) and dbias.dtype == dtype
    spans = ((0, 30), (30, 30), (30, 45))
    want = torch.stack([x[a:b].double().sum(0) for a, b in spans])
    torch.testing.assert_close(dbias, want.to(dtype))
    assert not dbias[1].any()


def test_given_amax():
    x = sample(40, 32).clamp(-4, 4)
    amax = torch.tensor([8.0, 16.0])
    xq = grouped.quantize(x, FORMATS["1x16"], offs=[10, 40], amax=amax, columnwise=True)
    assert_same_bytes(xq.rowwise.amax, amax)
    assert_same_bytes(xq.columnwise.amax, amax)
    computed = torch.stack([x[:10].abs().amax(), x[10:].abs().amax()]).float()
    same = grouped.quantize(x, FORMATS["1x16"], offs=[10, 40], amax=computed)
    plain = grouped.quantize(x, FORMATS["1x16"], offs=[10, 40])
    assert_same_bytes(same.rowwise.codes, plain.rowwise.codes)
    assert not torch.equal(same.rowwise.scales, xq.rowwise.scales)
    with pytest.raises(ValueError, match="amax"):
        grouped.quantize(x, FORMATS["1x16"], offs=[10, 40], amax=amax[:1])
    with pytest.raises(TypeError, match="amax"):
        grouped.quantize(x, FORMATS["1x16"], offs=[10, 40], amax=amax.double())


@pytest.mark.parametrize(
    ("x", "options", "error", "match"),
    [
        (sample(40, 32), {}, ValueError, "offs is missing"),
        (sample(40, 24), {"offs": [40]}, ValueError, "K must be a positive multiple of 16"),
        (sample(40, 0), {"offs": [40]}, ValueError, "K must be a positive multiple of 16"),
        (sample(2, 8, 32), {"offs": [2]}, ValueError, "x must have 2 dimensions"),
        (sample(0, 8, 32), {}, ValueError, "at least one group"),
        (sample(32), {"offs": [32]}, ValueError, "dimensions"),
        (sample(40, 32).double(), {"offs": [40]}, TypeError, "x must be bfloat16"),
        (sample(40, 32), {"offs": [40], "rowwise": False}, ValueError, "both False"),
    ],
)
def test_quantize_refuses(x, options, error, match):
    with pytest.raises(error, match=match):
        grouped.quantize(x, FORMATS["1x16"], **options)


@pytest.mark.parametrize(
    "fmt",
    [grouped.MXFP8(), grouped.FP8Block(), grouped.FP8(), grouped.NVFP4(hadamard=True)],
    ids=lambda fmt: fmt.name,
)
def test_what_the_table_denies_raises_with_its_reason(fmt):
    reason = cute_kernels.support("grouped_quantize", fmt, "reference")
    if reason:
        pytest.skip("built by now")
    with pytest.raises(cute_kernels.UnsupportedError, match=reason.reason.split("(")[0]):
        grouped.quantize(sample(40, 32), fmt, offs=[40])


def test_quantizing_twice_is_refused():
    with pytest.raises(TypeError, match=r"\.dequantize\(\)"):
        grouped.quantize(_out(), FORMATS["1x16"], offs=[10, 40])


def test_quantize_does_not_track_gradients():
    x = sample(40, 32).requires_grad_()
    assert not grouped.quantize(x, FORMATS["1x16"], offs=[40]).requires_grad


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

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
