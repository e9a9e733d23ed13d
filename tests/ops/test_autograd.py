"""Derivatives of the ops: gradients of GEMMs against fp64, and errors where there are none."""

import re

import pytest
import torch
from torch.autograd import forward_ad

import cute_kernels
from tests.helpers import BF16, DTYPES, F16, F32, U8, assert_same_bytes, offs_from_splits, ops

from .test_layouts import CALLS
from .test_schemas import outputs_like, tensors

SPLITS = [(9, 0, 20), (0, 30), (16, 5, 3, 0)]
#: Tolerance of gradients by dtype: they are rounded once, from products of rounded gradients.
TOLERANCE = {F32: 1e-5, BF16: 2e-2, F16: 3e-3}


def exact_m_grouped(a, b, splits, bias, alpha, transpose_b, tail):
    products = []
    for g, rows in enumerate(a.split((*splits, tail))[:-1]):
        products.append(alpha[g] * (rows @ (b[g] if transpose_b else b[g].T)) + bias[g])
    return torch.cat([*products, products[0].new_zeros(tail, bias.shape[1])])


def exact_k_grouped(a, b, splits, alpha, tail):
    pairs = zip(a.split((*splits, tail)), b.split((*splits, tail)), alpha, strict=False)
    return torch.stack([scale * (x.T @ y) for x, y, scale in pairs])


def doubled(tensor):
    return tensor.detach().double().requires_grad_()


def assert_near(got, want, dtype):
    assert got.dtype == dtype
    scale = float(want.abs().max()) or 1.0
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[dtype] * scale)


def check_gradients(product, exact, *shapes, dtype):
    """Compare the output and the gradients of a product with fp64 and return the operands."""
    operands = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    inputs = [doubled(t) for t in operands]
    out, want = product(*operands), exact(*inputs)
    dy = torch.randn(out.shape).to(dtype)
    out.backward(dy)
    want.backward(dy.double())
    assert_near(out.detach(), want.detach(), dtype)
    for got, exact_operand in zip(operands, inputs, strict=True):
        assert_near(got.grad, exact_operand.grad, dtype)
    return operands


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_gradients_of_m_grouped_gemm(splits, transpose_b, dtype):
    """Compare gradients of ``m_grouped_gemm`` with those of an fp64 product."""
    groups, tail, offs = len(splits), 4, offs_from_splits(splits)
    alpha = torch.rand(groups) + 0.5
    a, b, _ = check_gradients(
        lambda a, b, bias: ops.m_grouped_gemm(a, b, offs, bias, alpha, transpose_b),
        lambda a, b, bias: exact_m_grouped(a, b, splits, bias, alpha, transpose_b, tail),
        *((sum(splits) + tail, 12), (groups, 12, 7) if transpose_b else (groups, 7, 12)),
        (groups, 7),
        dtype=dtype,
    )
    assert not a.grad[sum(splits) :].any()
    assert not b.grad[torch.tensor(splits) == 0].any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_gradients_of_k_grouped_gemm(splits, dtype):
    rows, alpha, offs = sum(splits) + 4, torch.rand(len(splits)) + 0.5, offs_from_splits(splits)
    check_gradients(
        lambda a, b: ops.k_grouped_gemm(a, b, offs, alpha),
        lambda a, b: exact_k_grouped(a, b, splits, alpha, 4),
        *((rows, 6), (rows, 10)),
        dtype=dtype,
    )


@pytest.mark.parametrize("required", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_required_gradients_are_computed(required):
    """Check that only the required gradients are computed."""
    operands = [torch.randn(8, 4), torch.randn(2, 3, 4), torch.randn(2, 3)]
    for i in required:
        operands[i].requires_grad_()
    a, b, bias = operands
    ops.m_grouped_gemm(a, b, offs_from_splits((5, 3)), bias).sum().backward()
    assert [i for i, t in enumerate(operands) if t.grad is not None] == list(required)


def test_second_derivative_of_m_grouped_gemm():
    """Compare a second derivative of ``m_grouped_gemm`` with fp64."""
    a = torch.randn(8, 4, requires_grad=True)
    b = torch.randn(2, 3, 4, requires_grad=True)
    y = ops.m_grouped_gemm(a, b, offs_from_splits((5, 3)))
    (da,) = torch.autograd.grad((y * y).sum(), a, create_graph=True)
    (db,) = torch.autograd.grad((da * da).sum(), b)
    exact_a, exact_b = doubled(a), doubled(b)
    no_bias = torch.zeros(2, 3, dtype=torch.float64)
    alpha = torch.ones(2, dtype=torch.float64)
    y = exact_m_grouped(exact_a, exact_b, (5, 3), no_bias, alpha, False, 0)
    (da,) = torch.autograd.grad((y * y).sum(), exact_a, create_graph=True)
    (want,) = torch.autograd.grad((da * da).sum(), exact_b)
    assert_near(db, want, F32)


def test_gradient_of_bias_keeps_its_dtype_and_is_summed_in_fp32():
    """Check that the gradient of the bias has its dtype, and that its sum is in fp32."""
    a, b = torch.randn(300, 4).bfloat16(), torch.randn(1, 3, 4).bfloat16()
    bias = torch.zeros(1, 3, dtype=F16, requires_grad=True)
    out = ops.m_grouped_gemm(a, b, offs_from_splits((300,)), bias)
    out.backward(torch.full_like(out, 1.0))
    assert bias.grad.dtype == F16
    assert bias.grad.tolist() == [[300.0] * 3]  # bf16 sums stop at 256


@pytest.mark.parametrize("name", ["m_grouped_gemm", "k_grouped_gemm"])
def test_alpha_has_no_derivative(name):
    """Check that a required gradient of alpha raises."""
    a, offs = torch.randn(8, 4, requires_grad=True), offs_from_splits((5, 3))
    alpha = torch.ones(2, requires_grad=True)
    if name == "m_grouped_gemm":
        out = ops.m_grouped_gemm(a, torch.randn(2, 3, 4), offs, None, alpha)
    else:
        out = ops.k_grouped_gemm(a, a.detach(), offs, alpha)
    with pytest.raises(RuntimeError, match="alpha"):
        out.sum().backward()


#: Operands of calls that can require gradients; for lists, the last tensor does.
OUT_FORMS = {
    "fprop": ("a", "b", "bias", "alpha"),
    "wgrad": ("a", "b", "alpha"),
    "nvfp4 fprop": ("a_scales", "b_scales", "bias", "alpha"),
    **dict.fromkeys(("w4a16", "quantizing fprop"), ("a", "b_scales", "bias", "alpha")),
    "nvfp4 wgrad": ("a_scales", "b_scales", "alpha"),
    "quantize with amax": ("x", "amax"),
    "quantize activated": ("x",),
    "dequantize": ("scales",),
    "amax": ("x",),
    "dbias": ("dy",),
}
OPERANDS = [(call, operand) for call, operands in OUT_FORMS.items() for operand in operands]


def arguments_by_name(call):
    """Return the op's name and its arguments by name; none requires a gradient."""
    name, make = CALLS[call]
    return name, {
        f.name: value
        for f, value in zip(getattr(ops, name).default._schema.arguments, make(), strict=False)
    }


def operand_tensor(arguments, operand):
    value = arguments[operand]
    return value[-1] if isinstance(value, list) else value


def replace_operand(arguments, operand, tensor):
    value = arguments[operand]
    return arguments | {operand: [*value[:-1], tensor] if isinstance(value, list) else tensor}


def require_gradient(arguments, operand):
    return replace_operand(
        arguments, operand, operand_tensor(arguments, operand).clone().requires_grad_()
    )


def operand_label(arguments, operand):
    value = arguments[operand]
    return f"{operand}[{len(value) - 1}]" if isinstance(value, list) else operand


def zero_outputs(name, arguments):
    return outputs_like(name, getattr(ops, name)(**arguments), torch.zeros_like)


@pytest.mark.parametrize(
    ("case", "operand"), [(c, operand) for c, operand in OPERANDS if c not in ("fprop", "wgrad")]
)
def test_ops_without_a_derivative_raise(case, operand):
    """Check that backward through an op without a derivative raises."""
    name, arguments = arguments_by_name(case)
    arguments = require_gradient(arguments, operand)
    result = next(t for t in tensors(getattr(ops, name)(**arguments)) if t.requires_grad)
    with pytest.raises(RuntimeError, match=f"{name} (of quantized operands )?has no derivative"):
        result.sum().backward()


@pytest.mark.parametrize(("case", "operand"), [*OPERANDS, *((case, None) for case in OUT_FORMS)])
def test_out_forms_refuse_tensors_that_require_gradients(case, operand):
    """The tensor is an operand, or an output if the operand is None."""
    name, arguments = arguments_by_name(case)
    outputs = zero_outputs(name, arguments)
    if operand is None:
        (label,) = outputs
        next(t for t in tensors(outputs) if t.is_floating_point()).requires_grad_()
    else:
        label, arguments = (
            re.escape(operand_label(arguments, operand)),
            require_gradient(arguments, operand),
        )
    with pytest.raises(RuntimeError, match=f"{name}_out.*{label} requires a gradient"):
        getattr(ops, f"{name}_out")(**arguments, **outputs)
    assert not any(t.detach().view(U8).any() for t in tensors(outputs)), "nothing is written"
    with torch.no_grad():
        getattr(ops, f"{name}_out")(**arguments, **outputs)


@pytest.mark.parametrize(("case", "operand"), OPERANDS)
@pytest.mark.parametrize("api", ["func.jvp", "dual level"])
def test_forward_mode_is_refused(case, operand, api):
    """A zero tangent would be the derivative of a constant."""
    name, arguments = arguments_by_name(case)
    primal = operand_tensor(arguments, operand)
    tangent = torch.ones_like(primal)

    def call(x):
        return getattr(ops, name)(**replace_operand(arguments, operand, x))

    def call_out(x):
        outputs = zero_outputs(name, arguments)
        getattr(ops, f"{name}_out")(**replace_operand(arguments, operand, x), **outputs)
        return next(iter(outputs.values()))

    def call_directly(x):
        changed = replace_operand(arguments, operand, x)
        ordered = [
            changed.get(a.name, a.default_value)
            for a in getattr(ops, name).default._schema.arguments
        ]
        return getattr(cute_kernels.ops, name)(*ordered)

    for function in (call, call_directly, call_out):
        with pytest.raises((NotImplementedError, RuntimeError), match="no forward-mode|in forward"):
            if api == "func.jvp":
                torch.func.jvp(function, (primal,), (tangent,))
            else:
                with forward_ad.dual_level():
                    function(forward_ad.make_dual(primal, tangent))


def test_operands_without_a_tangent_work_in_a_dual_level():
    _, arguments = arguments_by_name("fprop")
    with forward_ad.dual_level():
        assert_same_bytes(ops.m_grouped_gemm(**arguments), ops.m_grouped_gemm(**arguments))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in cute_kernels.ops.__all__
        if not isinstance(getattr(cute_kernels.ops, name), type)
    ],
)
def test_every_form_is_documented(name):
    """Check that every op and its out form have a docstring with arguments and results."""
    text = getattr(ops, name).__doc__
    assert "Args:" in text
    if not hasattr(ops, f"{name}_out"):
        return  # an op that writes its arguments and returns nothing
    assert "Returns:" in text
    assert text in getattr(ops, f"{name}_out").__doc__
    direct = getattr(cute_kernels.ops, name)
    assert direct.__doc__ == text and direct.__name__ == name
