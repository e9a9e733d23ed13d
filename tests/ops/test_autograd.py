"""Derivatives of the plain GEMMs against fp64 autograd; what has none says so."""

import pytest
import torch
from torch.autograd import forward_ad

import cute_kernels
from tests.helpers import assert_same_bytes, offsets, ops, sample

SPLITS = [(9, 0, 20), (0, 30), (16, 5, 3, 0)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Of a gradient that was rounded to the dtype once, through a product of rounded gradients.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def exact_m_grouped(a, b, splits, bias, alpha, transpose_b, tail):
    parts = []
    for g, rows in enumerate(a.split((*splits, tail))[:-1]):
        parts.append(alpha[g] * (rows @ (b[g] if transpose_b else b[g].T)) + bias[g])
    return torch.cat([*parts, parts[0].new_zeros(tail, bias.shape[1])])


def exact_k_grouped(a, b, splits, alpha, tail):
    pairs = zip(a.split((*splits, tail)), b.split((*splits, tail)), alpha, strict=False)
    return torch.stack([scale * (x.T @ y) for x, y, scale in pairs])


def doubled(tensor):
    return tensor.detach().double().requires_grad_()


def assert_near(got, want, dtype):
    assert got.dtype == dtype
    scale = float(want.abs().max()) or 1.0
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_m_grouped_gemm(splits, transpose_b, dtype):
    groups, tail = len(splits), 4
    a = torch.randn(sum(splits) + tail, 12).to(dtype).requires_grad_()
    shape = (12, 7) if transpose_b else (7, 12)
    b = torch.randn(groups, *shape).to(dtype).requires_grad_()
    bias = torch.randn(groups, 7).to(dtype).requires_grad_()
    alpha = torch.rand(groups) + 0.5
    out = ops.m_grouped_gemm(a, b, offsets(splits), bias, alpha, transpose_b)
    dy = torch.randn(out.shape).to(dtype)
    out.backward(dy)
    inputs = [doubled(t) for t in (a, b, bias)]
    want = exact_m_grouped(inputs[0], inputs[1], splits, inputs[2], alpha, transpose_b, tail)
    want.backward(dy.double())
    assert_near(out.detach(), want.detach(), dtype)
    for got, exact in zip((a, b, bias), inputs, strict=True):
        assert_near(got.grad, exact.grad, dtype)
    assert not a.grad[sum(splits) :].any()
    assert not b.grad[torch.tensor(splits) == 0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_k_grouped_gemm(splits, dtype):
    groups, tail = len(splits), 4
    a = torch.randn(sum(splits) + tail, 6).to(dtype).requires_grad_()
    b = torch.randn(sum(splits) + tail, 10).to(dtype).requires_grad_()
    alpha = torch.rand(groups) + 0.5
    out = ops.k_grouped_gemm(a, b, offsets(splits), alpha)
    dw = torch.randn(out.shape).to(dtype)
    out.backward(dw)
    inputs = [doubled(t) for t in (a, b)]
    want = exact_k_grouped(*inputs, splits, alpha, tail)
    want.backward(dw.double())
    assert_near(out.detach(), want.detach(), dtype)
    for got, exact in zip((a, b), inputs, strict=True):
        assert_near(got.grad, exact.grad, dtype)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_the_gradients_that_are_needed(wanted):
    operands = [torch.randn(8, 4), torch.randn(2, 3, 4), torch.randn(2, 3)]
    for i in wanted:
        operands[i].requires_grad_()
    a, b, bias = operands
    ops.m_grouped_gemm(a, b, offsets((5, 3)), bias).sum().backward()
    assert [i for i, t in enumerate(operands) if t.grad is not None] == list(wanted)


def test_second_derivative():
    a = torch.randn(8, 4, requires_grad=True)
    b = torch.randn(2, 3, 4, requires_grad=True)
    y = ops.m_grouped_gemm(a, b, offsets((5, 3)))
    (da,) = torch.autograd.grad((y * y).sum(), a, create_graph=True)
    (db,) = torch.autograd.grad((da * da).sum(), b)
    exact_a, exact_b = doubled(a), doubled(b)
    none = torch.zeros(2, 3, dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    y = exact_m_grouped(exact_a, exact_b, (5, 3), none, one, False, 0)
    (da,) = torch.autograd.grad((y * y).sum(), exact_a, create_graph=True)
    (want,) = torch.autograd.grad((da * da).sum(), exact_b)
    assert_near(db, want, torch.float32)


def test_gradient_of_bias_keeps_its_dtype_and_is_summed_in_fp32():
    a, b = torch.randn(300, 4).bfloat16(), torch.randn(1, 3, 4).bfloat16()
    bias = torch.zeros(1, 3, dtype=torch.float16, requires_grad=True)
    out = ops.m_grouped_gemm(a, b, offsets((300,)), bias)
    out.backward(torch.full_like(out, 1.0))
    assert bias.grad.dtype == torch.float16
    assert bias.grad.tolist() == [[300.0] * 3]  # bf16 sums stop at 256


@pytest.mark.parametrize("name", ["m_grouped_gemm", "k_grouped_gemm"])
def test_alpha_has_no_derivative(name):
    a, offs = torch.randn(8, 4, requires_grad=True), offsets((5, 3))
    alpha = torch.ones(2, requires_grad=True)
    if name == "m_grouped_gemm":
        out = ops.m_grouped_gemm(a, torch.randn(2, 3, 4), offs, None, alpha)
    else:
        out = ops.k_grouped_gemm(a, a.detach(), offs, alpha)
    with pytest.raises(RuntimeError, match="alpha"):
        out.sum().backward()


def test_quantized_ops_refuse_to_differentiate():
    x, offs = sample(8, 32, dtype=torch.float32).requires_grad_(), offsets((5, 3))
    q = ops.grouped_quantize_nvfp4(x, offs)
    with pytest.raises(RuntimeError, match=r"grouped_quantize_nvfp4 has no derivative"):
        q[2].sum().backward()
    for name, arguments in (("grouped_amax", (x, offs)), ("grouped_dbias", (x, offs))):
        with pytest.raises(RuntimeError, match=f"{name} has no derivative"):
            getattr(ops, name)(*arguments).sum().backward()
    w = ops.grouped_quantize_nvfp4(sample(2, 16, 32))
    bias = torch.zeros(2, 16, requires_grad=True)
    y = ops.m_grouped_gemm_nvfp4(*(t.detach() for t in q[:3]), *w[:3], offs, bias)
    with pytest.raises(RuntimeError, match="m_grouped_gemm_nvfp4 has no derivative"):
        y.sum().backward()


#: Ops, and their operands that could require gradients.
OUT_FORMS = {
    "m_grouped_gemm": ("a", "b", "bias", "alpha"),
    "k_grouped_gemm": ("a", "b", "alpha"),
    "m_grouped_gemm_nvfp4": ("a_amax", "b_amax", "bias", "alpha"),
    "m_grouped_gemm_w4a16": ("a", "b_amax", "bias", "alpha"),
    "m_grouped_quantize_gemm_nvfp4": ("a", "bias", "alpha"),
    "k_grouped_gemm_nvfp4": ("a_amax_t", "alpha"),
    "grouped_quantize_nvfp4": ("x", "amax"),
    "grouped_dequantize_nvfp4": ("amax",),
    "grouped_amax": ("x",),
    "grouped_dbias": ("dy",),
}
OPERANDS = [(name, operand) for name, operands in OUT_FORMS.items() for operand in operands]


def arguments_of(name):
    """Arguments by name that give each operand which the op can take; none requires a gradient."""
    offs, x, a16 = offsets((5, 3)), sample(8, 32, dtype=torch.float32), sample(8, 32)
    codes = ops.grouped_quantize_nvfp4(x, offs, columnwise=True)
    w = sample(2, 16, 32)
    held = ops.grouped_quantize_nvfp4(w)[:3]
    b = dict(zip(("b_codes", "b_scales", "b_amax"), held, strict=True))
    vectors = {"bias": torch.zeros(2, 16), "alpha": torch.ones(2)}
    per_op = {
        "m_grouped_gemm": {"a": a16, "b": w, **vectors},
        "k_grouped_gemm": {"a": x, "b": x.clone(), "alpha": torch.ones(2)},
        "m_grouped_gemm_nvfp4": {
            **dict(zip(("a_codes", "a_scales", "a_amax"), codes, strict=False)),
            **b,
            **vectors,
        },
        "m_grouped_gemm_w4a16": {"a": a16, **b, **vectors},
        "m_grouped_quantize_gemm_nvfp4": {"a": a16, **b, **vectors},
        "k_grouped_gemm_nvfp4": {
            **dict(zip(("a_codes_t", "a_scales_t", "a_amax_t"), codes[3:], strict=True)),
            **dict(zip(("b_codes_t", "b_scales_t", "b_amax_t"), codes[3:], strict=True)),
            "alpha": torch.ones(2),
        },
        "grouped_quantize_nvfp4": {"x": x, "amax": torch.ones(2)},
        "grouped_dequantize_nvfp4": {
            **dict(zip(("codes", "scales", "amax"), codes, strict=False)),
            "rows": 8,
            "dtype": torch.float32,
        },
        "grouped_amax": {"x": x},
        "grouped_dbias": {"dy": x},
    }
    return {"offs": offs, **per_op[name]}


def outputs_of(name, arguments):
    results = getattr(ops, name)(**arguments)
    results = results if isinstance(results, tuple) else (results,)
    schema = getattr(ops, f"{name}_out").default._schema
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    pairs = zip(names, results, strict=True)
    return {n: torch.zeros_like(t) for n, t in pairs if t.shape != (0,)}


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_out_forms_refuse_operands_that_require_a_gradient(name, operand):
    arguments = arguments_of(name)
    outputs = outputs_of(name, arguments)
    arguments[operand] = arguments[operand].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name}_out.*{operand} requires a gradient"):
        getattr(ops, f"{name}_out")(**arguments, **outputs)
    assert not any(t.view(torch.uint8).any() for t in outputs.values()), "nothing is written"
    with torch.no_grad():
        getattr(ops, f"{name}_out")(**arguments, **outputs)


@pytest.mark.parametrize("name", OUT_FORMS)
def test_out_forms_refuse_a_leaf_that_requires_a_gradient(name):
    arguments = arguments_of(name)
    outputs = outputs_of(name, arguments)
    given = next(n for n, t in outputs.items() if t.is_floating_point())
    outputs[given].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name}_out.*{given} requires a gradient"):
        getattr(ops, f"{name}_out")(**arguments, **outputs)
    assert not outputs[given].detach().any()
    with torch.no_grad():
        getattr(ops, f"{name}_out")(**arguments, **outputs)


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
@pytest.mark.parametrize("way", ["func.jvp", "dual level"])
def test_forward_mode_is_refused(name, operand, way):
    """A zero tangent would be the derivative of a constant."""
    arguments = arguments_of(name)
    tangent = torch.ones_like(arguments[operand])

    def call(x):
        return getattr(ops, name)(**{**arguments, operand: x})

    def call_out(x):
        outputs = outputs_of(name, arguments)
        getattr(ops, f"{name}_out")(**{**arguments, operand: x}, **outputs)
        return next(iter(outputs.values()))

    def call_directly(x):
        ordered = [
            {**arguments, operand: x}.get(a.name, a.default_value)
            for a in getattr(ops, name).default._schema.arguments
        ]
        return getattr(cute_kernels.ops, name)(*ordered)

    for function in (call, call_directly, call_out):
        with pytest.raises((NotImplementedError, RuntimeError), match="no forward-mode|in forward"):
            if way == "func.jvp":
                torch.func.jvp(function, (arguments[operand],), (tangent,))
            else:
                with forward_ad.dual_level():
                    function(forward_ad.make_dual(arguments[operand], tangent))


def test_operands_without_a_tangent_pass_in_a_dual_level():
    arguments = arguments_of("m_grouped_gemm")
    with forward_ad.dual_level():
        assert_same_bytes(ops.m_grouped_gemm(**arguments), ops.m_grouped_gemm(**arguments))


@pytest.mark.parametrize("name", [*OUT_FORMS, "compute_offsets"])
def test_every_form_is_documented(name):
    text = getattr(ops, name).__doc__
    assert "Args:" in text and "Returns:" in text
    assert text in getattr(ops, f"{name}_out").__doc__
    direct = getattr(cute_kernels.ops, name)
    assert direct.__doc__ == text and direct.__name__ == name
