"""``grouped.grouped_gemm`` of GroupedTensors against products of the decoded members, in fp64."""

import functools

import pytest
import torch

import grouped
from grouped import MXFP8, FP8Block
from tests.helpers import (
    BF16,
    E5M2,
    F16,
    F32,
    I32,
    SPLITS,
    assert_same_bytes,
    end_rows,
    row_ranges,
    sample,
)

from . import cases
from .cases import FORMATS, WEIGHT_FORMAT

N, K = 96, 160
SQUARE = (128, 128)
#: Formats of activations, weights and gradients.
TRIOS = {
    **{name: (fmt, WEIGHT_FORMAT, FORMATS["1x16"]) for name, fmt in FORMATS.items()},
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


#: fp32 accumulation over at most a few hundred products, and one factor.
close = functools.partial(cases.close, relative=2e-6)


def tensors(splits):
    rows = end_rows(splits)[-1] + 3
    return sample(rows, K), sample(len(splits), N, K), sample(rows, N)


def quantize_trio(trio, splits, x_w_dy):
    """Quantize x, w and dy in both directions."""
    ends = end_rows(splits)
    return [
        grouped.quantize(t, fmt, offs=None if t.dim() == 3 else ends, columnwise=True)
        for t, fmt in zip(x_w_dy, trio, strict=True)
    ]


def operands(splits=(7, 0, 26)):
    return quantize_trio(TRIOS["row-scaled"], splits, tensors(splits))


def products(x, w, dy, **options):
    return (
        grouped.grouped_gemm(x, w, **options),
        grouped.grouped_gemm(dy, w, transpose_b=True, **options),
        grouped.grouped_gemm(dy, x, **options),
    )


@each_trio
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_products_are_those_of_decoded_members(trio, splits):
    """Compare all three products with float64 products of the decoded members."""
    x, w, dy = quantize_trio(trio, splits, tensors(splits))
    y, dx, dw = products(x, w, dy, out_dtype=F32)
    assert y.shape == (x.shape[0], N) and dx.shape == x.shape and dw.shape == w.shape
    names = "rowwise", "columnwise"
    (row, column), (weight, weight_t), (dy_row, dy_column) = (
        [t.dequantize(F32, name).double() for name in names] for t in (x, w, dy)
    )
    for g, (start, end) in enumerate(row_ranges(splits)):
        if start == end:
            assert not dw[g].any()
            continue
        close(y[start:end], row[start:end] @ weight[g].T)
        close(dx[start:end], dy_row[start:end] @ weight_t[g])
        close(dw[g], dy_column[start:end].T @ column[start:end])
    assert not y[end_rows(splits)[-1] :].any() and not dx[end_rows(splits)[-1] :].any()


@each_trio
def test_alpha_bias_and_out_dtype(trio):
    """Check that alpha, bias and the output dtype apply to the fp32 product."""
    splits = (20, 0, 12)
    x, w, _ = quantize_trio(trio, splits, tensors(splits))
    bias, alpha = torch.randn(3, N), torch.tensor([2.0, 0.5, -1.0])  # powers of two: no rounding
    y = grouped.grouped_gemm(x, w, out_dtype=F32)
    scaled = torch.cat([y[a:b] * alpha[g] + bias[g] for g, (a, b) in enumerate(row_ranges(splits))])
    for dtype in (BF16, F16, F32):
        got = grouped.grouped_gemm(x, w, bias=bias, alpha=alpha, out_dtype=dtype)
        assert_same_bytes(got[:32], scaled.to(dtype))
        assert not got[32:].any()
    assert grouped.grouped_gemm(x, w).dtype == BF16


@each_trio
def test_out_is_written_or_added_to(trio):
    """Check that ``out`` is overwritten or accumulated to, and that the tail is untouched."""
    splits = (20, 0, 12)
    x, w, dy = quantize_trio(trio, splits, tensors(splits))
    y, dx, dw = products(x, w, dy, out_dtype=F32)
    for result, operands, options in (
        (y[:32], (x, w), {}),
        (dx[:32], (dy, w), {"transpose_b": True}),
        (dw, (dy, x), {}),
    ):
        rows = len(result)
        out = torch.randn(rows + 3 * (result.dim() == 2), *result.shape[1:])  # with the tail
        for accumulate in (False, True):
            before = out.clone()
            got = grouped.grouped_gemm(*operands, out=out, accumulate=accumulate, **options)
            assert got is out
            assert_same_bytes(out[:rows], before[:rows] + result if accumulate else result)
            assert_same_bytes(out[rows:], before[rows:])


@each_trio
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_gradients_of_plain_activations(trio, dtype):
    """Check the gradients of plain activations multiplied by quantized weights."""
    ends = torch.tensor(end_rows((0, 130, 0, 7)), dtype=I32)
    x, weight, dy = (t.to(dtype) for t in tensors((0, 130, 0, 7)))
    w, bias = (
        grouped.quantize(weight, trio[1], columnwise=True),
        torch.randn(4, N, requires_grad=True),
    )
    y = grouped.grouped_gemm(x.requires_grad_(), w, offs=ends, bias=bias, out_dtype=F32)
    y.backward(dy.float())
    assert_same_bytes(
        x.grad, grouped.grouped_gemm(dy, w, offs=ends, transpose_b=True, out_dtype=dtype)
    )
    assert_same_bytes(bias.grad, torch.ops.cute_kernels.grouped_dbias(dy.float(), ends))
    for g, (start, end) in enumerate(row_ranges((0, 130, 0, 7))):
        if start < end:
            close(
                y[start:end],
                x[start:end].double() @ w.dequantize(F32)[g].double().T + bias[g].double(),
            )


def test_products_of_quantized_operands_have_no_derivative():
    x, w, _ = operands()
    y = grouped.grouped_gemm(x, torch.nn.Parameter(w))
    with pytest.raises(RuntimeError, match=r"no derivative.*grouped\.nn"):
        y.sum().backward()


X, W, _ = operands()
PLAIN = {"a": sample(36, K), "b": sample(3, N, K), "offs": [7, 7, 33]}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"a": X, "b": W.dequantize()}, TypeError, "GroupedTensor and Tensor"),
        ({"a": PLAIN["a"], "b": X, "offs": [7, 7, 33]}, ValueError, "b must be uniform"),
        ({"a": PLAIN["a"][:, 16:], "b": W, "offs": [7, 7, 33]}, ValueError, "b contracts, 160"),
        ({"a": PLAIN["a"], "b": PLAIN["b"]}, ValueError, "offs is missing"),
        ({"a": X, "b": W, "offs": [1]}, ValueError, "operands carry their own"),
        ({"a": W, "b": W}, ValueError, "a must be ragged"),
        ({"a": X, "b": W, "accumulate": True}, ValueError, "out, which is missing"),
        ({"a": X, "b": W, "out": torch.zeros(36, N), "out_dtype": F16}, ValueError, "out_dtype is"),
        ({"a": X, "b": W, "out": torch.zeros(N, 36).T}, ValueError, "row-major"),
        ({"a": X, "b": X, "bias": torch.zeros(3, K)}, ValueError, "bias has no meaning"),
        ({"a": X, "b": X, "transpose_b": True}, ValueError, "transpose_b has no meaning"),
        (PLAIN | {"b": PLAIN["a"], "transpose_b": True}, ValueError, "transpose_b has no meaning"),
        ({"a": X, "b": operands((7, 26))[2]}, ValueError, "equal groups: 3 groups.*2 groups"),
        ({"a": X, "b": W, "transpose_b": True}, ValueError, "as b contracts, 96.*looks transposed"),
        ({"a": X, "b": W[:2]}, ValueError, "a has 3, by its offs, and b has 2, by its shape"),
    ],
)
def test_grouped_gemm_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        grouped.grouped_gemm(**arguments)


def test_missing_directions_are_named():
    """Check that an operand without the needed copy is refused with its name."""
    x = grouped.quantize(sample(36, K), FORMATS["1x16"], offs=[36])
    column = grouped.quantize(
        sample(36, K), FORMATS["1x16"], offs=[36], rowwise=False, columnwise=True
    )
    w = grouped.quantize(sample(1, N, K), WEIGHT_FORMAT)
    plain = grouped.grouped_gemm(sample(36, K).requires_grad_(), w, offs=[36]).sum()
    for message, call in (
        ("a has no rowwise copy", lambda: grouped.grouped_gemm(column, w)),
        ("b has no columnwise copy", lambda: grouped.grouped_gemm(x, w, transpose_b=True)),
        ("a has no columnwise copy", lambda: grouped.grouped_gemm(x, column)),
        ("b has no columnwise copy", lambda: grouped.grouped_gemm(column, x)),
        ("b has no columnwise copy", plain.backward),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
