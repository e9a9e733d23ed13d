"""``grouped.grouped_gemm`` of FP8, FP8Block and MXFP8 tensors, and of plain ones beside them."""

import pytest
import torch

import grouped
from grouped import MXFP8, FP8Block
from tests.grouped.test_gemm import close, spans
from tests.helpers import SPLITS, assert_same_bytes, end_rows, sample

N, K = 96, 160
E5M2, F32 = torch.float8_e5m2, torch.float32
SQUARE = (128, 128)
#: Formats of activations, weights and gradients.
TRIOS = {
    "fp8": (grouped.FP8(), grouped.FP8(), grouped.FP8(E5M2)),
    "fp8_block": (FP8Block(), FP8Block(SQUARE), FP8Block()),
    "fp8_block, fp32 scales": (
        FP8Block(pow2_scales=False),
        FP8Block(SQUARE, pow2_scales=False),
        FP8Block(dtype=E5M2, pow2_scales=False),
    ),
    "mxfp8": (MXFP8(), MXFP8(), MXFP8(E5M2)),
    "mxfp8, square weights": (MXFP8(), MXFP8(block=(32, 32)), MXFP8()),
}
each_trio = pytest.mark.parametrize("trio", TRIOS.values(), ids=TRIOS)
each_split = pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)


def tensors(splits, tail=3):
    rows = end_rows(splits)[-1] + tail
    return sample(rows, K), sample(len(splits), N, K), sample(rows, N)


def quantized(trio, splits, held):
    ends = end_rows(splits)
    return [
        grouped.quantize(t, fmt, offs=None if t.dim() == 3 else ends, columnwise=True)
        for t, fmt in zip(held, trio, strict=True)
    ]


def products(x, w, dy, **options):
    """fprop, dgrad and wgrad."""
    return (
        grouped.grouped_gemm(x, w, **options),
        grouped.grouped_gemm(dy, w, transpose_b=True, **options),
        grouped.grouped_gemm(dy, x, **options),
    )


@each_trio
@each_split
def test_products_of_the_decoded_members(trio, splits):
    x, w, dy = quantized(trio, splits, tensors(splits))
    y, dx, dw = products(x, w, dy, out_dtype=F32)
    assert y.shape == (x.shape[0], N) and dx.shape == x.shape and dw.shape == w.shape
    ways = "rowwise", "columnwise"
    (row, column), (weight, weight_t), (dy_row, dy_column) = (
        [t.dequantize(F32, way).double() for way in ways] for t in (x, w, dy)
    )
    for g, (start, end) in enumerate(spans(splits)):
        if start == end:
            assert not dw[g].any()
            continue
        close(y[start:end], row[start:end] @ weight[g].T)
        close(dx[start:end], dy_row[start:end] @ weight_t[g])
        close(dw[g], dy_column[start:end].T @ column[start:end])
    assert not y[end_rows(splits)[-1] :].any() and not dx[end_rows(splits)[-1] :].any()


@each_trio
def test_groups_equal_tensors_of_their_own(trio):
    splits = (130, 0, 7)
    held = tensors(splits, tail=0)
    got = products(*quantized(trio, splits, held))
    for g, (start, end) in enumerate(spans(splits)):
        if start == end:
            continue
        own = held[0][start:end], held[1][g : g + 1], held[2][start:end]
        want = products(*quantized(trio, (end - start,), own))
        for whole, part, rows in zip(got, want, (True, True, False), strict=True):
            assert_same_bytes(whole[start:end] if rows else whole[g : g + 1], part)


@each_trio
def test_out_alpha_bias_and_accumulate(trio):
    splits = (20, 0, 12)
    x, w, dy = quantized(trio, splits, tensors(splits))
    bias, alpha = torch.randn(3, N), torch.tensor([2.0, 0.5, -1.0])  # powers of two: no rounding
    y, dx, dw = products(x, w, dy, out_dtype=F32)
    scaled = torch.cat([y[a:b] * alpha[g] + bias[g] for g, (a, b) in enumerate(spans(splits))])
    for dtype in (torch.bfloat16, torch.float16, F32):
        got = grouped.grouped_gemm(x, w, bias=bias, alpha=alpha, out_dtype=dtype)
        assert_same_bytes(got[:32], scaled.to(dtype))
    for result, out, call in (
        (y[:32], torch.randn_like(y), lambda o: grouped.grouped_gemm(x, w, out=o, accumulate=True)),
        (
            dx[:32],
            torch.randn_like(dx),
            lambda o: grouped.grouped_gemm(dy, w, out=o, accumulate=True, transpose_b=True),
        ),
        (dw, torch.randn_like(dw), lambda o: grouped.grouped_gemm(dy, x, out=o, accumulate=True)),
    ):
        before = out.clone()
        assert call(out) is out
        rows = len(result)
        assert_same_bytes(out[:rows], before[:rows] + result)
        assert_same_bytes(out[rows:], before[rows:])


@each_trio
def test_a_compiled_product_is_the_eager_one(trio):
    splits = (20, 0, 12)
    held = quantized(trio, splits, tensors(splits))
    compiled = torch.compile(products, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*held), products(*held), strict=True):
        assert_same_bytes(got, want)


@each_trio
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_plain_activations_and_their_gradients(trio, dtype):
    splits = (20, 0, 12)
    ends = torch.tensor(end_rows(splits), dtype=torch.int32)
    x, weight, dy = (t.to(dtype) for t in tensors(splits))
    w = grouped.quantize(weight, trio[1], columnwise=True)
    x.requires_grad_()
    bias = torch.randn(3, N, requires_grad=True)
    y = grouped.grouped_gemm(x, w, offs=ends, bias=bias, out_dtype=F32)
    y.backward(dy.float())
    values, values_t = (w.dequantize(F32, way).double() for way in ("rowwise", "columnwise"))
    with torch.no_grad():
        for g, (start, end) in enumerate(spans(splits)):
            want = x[start:end].double() @ values[g].T + bias[g].double()
            torch.testing.assert_close(y[start:end].double(), want, rtol=0, atol=2e-6 * peak(want))
            want = dy[start:end].double() @ values_t[g]
            got = x.grad[start:end].double()
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(got, want, rtol=eps, atol=2e-6 * peak(want))
    assert_same_bytes(bias.grad, torch.ops.cute_kernels.grouped_dbias(dy.float(), ends))
    assert not y[32:].any() and not x.grad[32:].any()


def peak(x):
    return float(x.abs().max()) if x.numel() else 0.0


def test_square_blocks_meet_rows_only():
    splits = (20, 0, 12)
    x, w, _ = tensors(splits)
    square = FP8Block(SQUARE)
    a = grouped.quantize(x, square, offs=end_rows(splits), columnwise=True)
    with pytest.raises(ValueError, match="128x128 blocks are not multiplied by 128x128"):
        grouped.grouped_gemm(a, grouped.quantize(w, square))
    with pytest.raises(ValueError, match="128x128 blocks are not multiplied by 128x128"):
        grouped.grouped_gemm(a, a)
    # With one scale a row on the other side they do.
    y = grouped.grouped_gemm(a, grouped.quantize(w, FP8Block()), out_dtype=F32)
    assert y.isfinite().all()


def test_accumulation_that_does_not_apply():
    splits = (20, 0, 12)
    x, w, _ = tensors(splits)
    a = grouped.quantize(x, MXFP8(), offs=end_rows(splits))
    b = grouped.quantize(w, MXFP8())
    with pytest.raises(ValueError, match="accumulation='fast' for mxfp8 and mxfp8"):
        grouped.grouped_gemm(a, b, accumulation="fast")
    with pytest.raises(ValueError, match="accumulation='split' for plain tensors and plain"):
        grouped.grouped_gemm(x, w, offs=end_rows(splits), accumulation="split")
    with pytest.raises(ValueError, match="accumulation='split' for plain tensors and fp8"):
        b = grouped.quantize(w, grouped.FP8())
        grouped.grouped_gemm(x, b, offs=end_rows(splits), accumulation="split")
