"""``grouped.grouped_gemm`` on grouped and on plain tensors."""

import pytest
import torch

import grouped
from tests.grouped.cases import FORMATS, WEIGHT_FORMAT, OpCounter
from tests.helpers import SPLITS, assert_same_bytes, end_rows, sample

N, K = 48, 64


def operands(splits=(7, 0, 26), tail=3, fmt=FORMATS["row-scaled"]):
    ends = end_rows(splits)
    x = grouped.quantize(sample(ends[-1] + tail, K), fmt, offs=ends, columnwise=True)
    w = grouped.quantize(sample(len(splits), N, K), WEIGHT_FORMAT, columnwise=True)
    dy = grouped.quantize(sample(ends[-1] + tail, N), FORMATS["1x16"], offs=ends, columnwise=True)
    return x, w, dy


def spans(splits):
    return [(end - rows, end) for rows, end in zip(splits, end_rows(splits), strict=True)]


def close(got, want):
    """fp32 accumulation over at most a few hundred products, and one factor."""
    scale = want.abs().max().clamp_min(1e-30)
    assert (got.double() - want).abs().max() <= 2e-6 * scale


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_products_of_the_decoded_members(splits, fmt):
    """fprop, dgrad and wgrad against fp64 products of what the operands decode to."""
    x, w, dy = operands(splits, fmt=fmt)
    f = torch.float32
    y = grouped.grouped_gemm(x, w, out_dtype=f)
    dx = grouped.grouped_gemm(dy, w, transpose_b=True, out_dtype=f)
    dw = grouped.grouped_gemm(dy, x, out_dtype=f)
    assert y.shape == (x.shape[0], N) and dx.shape == x.shape and dw.shape == w.shape
    row, column = x.dequantize(f).double(), x.dequantize(f, "columnwise").double()
    dy_row, dy_column = dy.dequantize(f).double(), dy.dequantize(f, "columnwise").double()
    weights = w.dequantize(f).double()
    for g, (start, end) in enumerate(spans(splits)):
        if start == end:
            assert not dw[g].any()
            continue
        close(y[start:end], row[start:end] @ weights[g].T)
        close(dx[start:end], dy_row[start:end] @ weights[g])
        close(dw[g], dy_column[start:end].T @ column[start:end])
    assert not y[splits and end_rows(splits)[-1] :].any()
    assert not dx[end_rows(splits)[-1] :].any()


def test_default_dtype_bias_and_alpha():
    x, w, _ = operands()
    f = torch.float32
    plain = grouped.grouped_gemm(x, w, out_dtype=f)
    bias, alpha = torch.randn(3, N), torch.tensor([2.0, 3.0, -0.5])
    got = grouped.grouped_gemm(x, w, bias=bias, alpha=alpha, out_dtype=f)
    want = plain.clone()
    for g, (start, end) in enumerate(spans((7, 0, 26))):
        want[start:end] = plain[start:end] * alpha[g] + bias[g]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * float(plain.abs().max()))
    assert not got[33:].any()
    assert grouped.grouped_gemm(x, w).dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float16):
        assert_same_bytes(grouped.grouped_gemm(x, w, out_dtype=dtype), plain.to(dtype))


def test_out_is_written_where_there_are_rows():
    x, w, dy = operands()
    y = grouped.grouped_gemm(x, w, out_dtype=torch.float32)
    out = torch.full((36, N), 7.0)
    assert grouped.grouped_gemm(x, w, out=out) is out
    assert_same_bytes(out[:33], y[:33])
    assert (out[33:] == 7).all()
    assert grouped.grouped_gemm(x, w, out=out, accumulate=True) is out
    assert_same_bytes(out[:33], 2 * y[:33])
    assert (out[33:] == 7).all()


def test_wgrad_accumulates_in_fp32_and_leaves_empty_groups():
    x, _, dy = operands()
    dw = grouped.grouped_gemm(dy, x, out_dtype=torch.float32)
    main_grad = torch.randn(3, N, K)
    before = main_grad.clone()
    assert grouped.grouped_gemm(dy, x, out=main_grad, accumulate=True) is main_grad
    assert_same_bytes(main_grad, before + dw)
    assert_same_bytes(main_grad[1], before[1])
    grouped.grouped_gemm(dy, x, out=main_grad)
    assert_same_bytes(main_grad, dw)


def test_out_of_another_view_of_a_buffer():
    """A slice of a larger buffer keeps its neighbours."""
    x, w, _ = operands()
    buffer = torch.full((40, N), 3.0)
    grouped.grouped_gemm(x, w, out=buffer[2:38])
    assert (buffer[:2] == 3).all() and (buffer[35:] == 3).all()
    assert_same_bytes(buffer[2:35], grouped.grouped_gemm(x, w, out_dtype=torch.float32)[:33])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", [list, torch.tensor])
def test_plain_operands(dtype, form):
    ends = [7, 7, 33]
    x, w, dy = sample(36, K, dtype=dtype), sample(3, N, K, dtype=dtype), sample(36, N, dtype=dtype)
    offs, f = form(ends), torch.float32
    y = grouped.grouped_gemm(x, w, offs=offs, out_dtype=f)
    dx = grouped.grouped_gemm(dy, w, offs=offs, transpose_b=True, out_dtype=f)
    dw = grouped.grouped_gemm(dy, x, offs=offs, out_dtype=f)
    for g, (start, end) in enumerate(spans((7, 0, 26))):
        if start == end:
            assert not dw[g].any()
            continue
        close(y[start:end], x[start:end].double() @ w[g].double().T)
        close(dx[start:end], dy[start:end].double() @ w[g].double())
        close(dw[g], dy[start:end].double().T @ x[start:end].double())


def test_plain_product_is_differentiable():
    x, w = sample(20, 16, dtype=torch.float32), sample(2, 32, 16, dtype=torch.float32)
    bias = torch.randn(2, 32)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    y = grouped.grouped_gemm(x, w, offs=[9, 17], bias=bias, out_dtype=torch.float32)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, leaves, dy)
    blocks = ((0, 9), (9, 17))
    want_y = [x[a:b] @ w[g].T + bias[g] for g, (a, b) in enumerate(blocks)]
    want = torch.autograd.grad(torch.cat(want_y), leaves, dy[:17])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def test_a_product_of_quantized_parameters_has_no_derivative():
    x, w, _ = operands()
    y = grouped.grouped_gemm(x, torch.nn.Parameter(w))
    with pytest.raises(RuntimeError, match=r"no derivative.*grouped\.nn"):
        y.sum().backward()


def test_a_dispatch_mode_sees_a_product_of_quantized_operands():
    x, w, _ = operands()
    want = grouped.grouped_gemm(x, w)
    with OpCounter() as counter:
        got = grouped.grouped_gemm(x, w)
    assert [args[0] for args in counter.arguments("gemm")] == [x]
    assert_same_bytes(got, want)


def test_one_group_of_the_whole():
    """Permuting whole groups permutes the product: no group reads another's slots."""
    parts, w = [sample(m, K) for m in (5, 130, 17)], sample(3, N, K)
    order = [2, 0, 1]
    fmt = FORMATS["1x16"]

    def product(pick):
        x = torch.cat([parts[i] for i in pick])
        ends = end_rows(tuple(len(parts[i]) for i in pick))
        quantized = grouped.quantize(x, fmt, offs=ends)
        y = grouped.grouped_gemm(quantized, grouped.quantize(w[pick], WEIGHT_FORMAT))
        return y.tensor_split(ends[:-1])

    first, second = product([0, 1, 2]), product(order)
    for place, i in enumerate(order):
        assert_same_bytes(second[place], first[i])


X, W, DY = operands()
PLAIN = {"a": sample(36, K), "b": sample(3, N, K), "offs": [7, 7, 33]}


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        ({"a": X, "b": W.dequantize()}, TypeError, "GroupedTensor and Tensor"),
        ({"a": PLAIN["a"], "b": W}, ValueError, "offs is missing"),
        ({"a": PLAIN["a"], "b": X, "offs": [7, 7, 33]}, ValueError, "b must be uniform"),
        ({"a": PLAIN["a"].float(), "b": W, "offs": [7, 7, 33]}, TypeError, "a must be bfloat16"),
        ({"a": PLAIN["a"][:, 16:], "b": W, "offs": [7, 7, 33]}, ValueError, "b contracts, 64"),
        ({"a": PLAIN["a"], "b": W, "offs": [7, 33]}, ValueError, "offs"),
        ({"a": PLAIN["a"], "b": PLAIN["b"]}, ValueError, "offs is missing"),
        ({"a": X, "b": W, "offs": [1]}, ValueError, "operands carry their own"),
        ({"a": W, "b": W}, ValueError, "a must be ragged"),
        ({"a": X, "b": W, "accumulate": True}, ValueError, "out, which is missing"),
        (
            {"a": X, "b": W, "out": torch.zeros(36, N), "out_dtype": torch.float16},
            ValueError,
            "out_dtype is torch.float16, but out is torch.float32",
        ),
        ({"a": X, "b": W, "out": torch.zeros(35, N)}, ValueError, "out must have shape"),
        ({"a": X, "b": W, "out": torch.zeros(N, 36).T}, ValueError, "row-major"),
        ({"a": X, "b": W, "out_dtype": torch.float64}, TypeError, "out_dtype"),
        ({"a": X, "b": W, "bias": torch.zeros(3, N + 1)}, ValueError, "bias"),
        ({"a": X, "b": W, "bias": torch.zeros(3, N).double()}, TypeError, "bias"),
        ({"a": X, "b": W, "alpha": torch.zeros(2)}, ValueError, "alpha"),
        ({"a": X, "b": W, "alpha": torch.zeros(3).half()}, TypeError, "alpha"),
        ({"a": X, "b": X, "bias": torch.zeros(3, K)}, ValueError, "bias has no meaning"),
        ({"a": X, "b": X, "transpose_b": True}, ValueError, "transpose_b has no meaning"),
        (PLAIN | {"b": PLAIN["a"], "transpose_b": True}, ValueError, "transpose_b has no meaning"),
        ({"a": X, "b": operands((7, 26))[2]}, ValueError, "cut alike: 3 groups.*2 groups"),
        ({"a": X, "b": operands(tail=4)[2]}, ValueError, "cut alike"),
        ({"a": X, "b": operands((5, 28))[1]}, ValueError, "3 groups|2 groups"),
        ({"a": DY, "b": W}, ValueError, "as many columns as b contracts, 64"),
        ({"a": X, "b": W, "transpose_b": True}, ValueError, "as b contracts, 48"),
        (PLAIN | {"b": sample(3, N, 48)}, ValueError, "b must have size 64"),
        (PLAIN | {"b": sample(3, N, K).float()}, TypeError, "b must be bfloat16"),
        (PLAIN | {"offs": [36]}, ValueError, "offs must have one end row"),
        (PLAIN | {"offs": [7, 8, 37]}, ValueError, "within the 36 rows"),
    ],
)
def test_grouped_gemm_refuses(call, error, match):
    call = dict(call)
    with pytest.raises(error, match=match):
        grouped.grouped_gemm(call.pop("a"), call.pop("b"), **call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_plain_activations_times_quantized_weights(splits, dtype):
    ends = end_rows(splits)
    a, dy = (sample(ends[-1] + 3, cols, dtype=dtype) for cols in (K, N))
    w = grouped.quantize(sample(len(splits), N, K), WEIGHT_FORMAT, columnwise=True)
    bias, alpha = torch.randn(len(splits), N), torch.rand(len(splits))
    f = torch.float32
    y = grouped.grouped_gemm(a, w, offs=ends, bias=bias, alpha=alpha, out_dtype=f)
    dx = grouped.grouped_gemm(dy, w, offs=ends, transpose_b=True, out_dtype=f)
    out = torch.full_like(y, 7.0)
    added = grouped.grouped_gemm(a, w, offs=ends, out=out, accumulate=True)
    weights = w.dequantize(f).double()
    for g, (start, end) in enumerate(spans(splits)):
        if start < end:
            product = a[start:end].double() @ weights[g].T
            close(y[start:end], product * alpha[g].double() + bias[g].double())
            close(added[start:end], product + 7)
            close(dx[start:end], dy[start:end].double() @ weights[g])
    assert not y[ends[-1] :].any() and not dx[ends[-1] :].any()
    assert (out[ends[-1] :] == 7).all()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_beside_quantized_weights(compiled):
    ends = [7, 7, 33]
    w = grouped.quantize(sample(3, N, K), WEIGHT_FORMAT, columnwise=True)
    a = sample(36, K).requires_grad_()
    bias = torch.randn(3, N, requires_grad=True)
    offs = torch.tensor(ends, dtype=torch.int32)

    def run(a, w, bias):
        return grouped.grouped_gemm(a, w, offs=offs, bias=bias)

    y = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(a, w, bias)
    dy = sample(36, N)
    y.backward(dy)
    assert_same_bytes(a.grad, grouped.grouped_gemm(dy, w, offs=offs, transpose_b=True))
    assert_same_bytes(bias.grad, torch.ops.cute_kernels.grouped_dbias(dy, offs))
    rowwise = grouped.quantize(sample(3, N, K), WEIGHT_FORMAT)
    with pytest.raises(RuntimeError, match="b has no columnwise copy"):
        run(a, rowwise, None).sum().backward()


def test_a_direction_that_is_missing_is_named():
    x = grouped.quantize(sample(36, K), FORMATS["1x16"], offs=[36])
    column = grouped.quantize(
        sample(36, K), FORMATS["1x16"], offs=[36], rowwise=False, columnwise=True
    )
    w = grouped.quantize(sample(1, N, K), WEIGHT_FORMAT)
    with pytest.raises(RuntimeError, match="a has no rowwise copy"):
        grouped.grouped_gemm(column, w)
    with pytest.raises(RuntimeError, match="b has no columnwise copy"):
        grouped.grouped_gemm(x, w, transpose_b=True)
    with pytest.raises(RuntimeError, match="a has no columnwise copy"):
        grouped.grouped_gemm(x, column)
    with pytest.raises(RuntimeError, match="b has no columnwise copy"):
        grouped.grouped_gemm(column, x)


def test_a_row_scaled_weight_is_refused():
    w = grouped.quantize(sample(3, N, K), FORMATS["row-scaled"])
    with pytest.raises(ValueError, match="one second-level scale a group, got 'nvfp4:row_scaled'"):
        grouped.grouped_gemm(X, w)
