"""Activations of the reference: bits of the NumPy oracle, and values near fp64."""

import pytest
import torch
import torch.nn.functional as F

from cute_kernels.formats.activations import ACTIVATIONS, Activation
from cute_kernels.reference.activations import activate, activate_gradient, exp, sigmoid, tanh
from tests.helpers import all_16_bit_values, assert_same_bytes
from tests.reference import activation_oracle as oracle

CLAMPED = Activation("clamped_swiglu", alpha=1.5, limit=2.0)
ALL_ACTIVATIONS = [*map(Activation, ACTIVATIONS), CLAMPED]
every_activation = pytest.mark.parametrize("act", ALL_ACTIVATIONS, ids=lambda a: a.text)
FUNCTIONS = {
    "exp": (exp, oracle.exp),
    "tanh": (tanh, oracle.tanh),
    "sigmoid": (sigmoid, oracle.sigmoid),
}


def random_bits(count):
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32).view(torch.float32)


def all_kinds_of_numbers():
    """Return every bf16 and fp16 number, random bits, and random values between -100 and 100."""
    values = (
        all_16_bit_values(torch.bfloat16).float(),
        all_16_bit_values(torch.float16).float(),
        random_bits(1 << 18),
        torch.empty(1 << 18).uniform_(-100, 100),
        torch.randn(1 << 18),
    )
    return torch.cat(values)


def moderate_values(*shape):
    """Return numbers of many magnitudes, but none whose sigmoid is subnormal."""
    return torch.randn(shape) * torch.randint(-8, 4, shape).float().exp2()


def call_numpy(function, *arguments):
    """Call a NumPy function on tensors."""
    with oracle.no_errors():
        return torch.from_numpy(function(*(x.numpy() for x in arguments)))


@pytest.mark.parametrize("name", [*FUNCTIONS])
def test_elementary_functions_have_the_bits_of_the_oracle(name):
    """Compare elementary functions with the bits of a NumPy oracle."""
    function, oracle_function = FUNCTIONS[name]
    x = all_kinds_of_numbers()
    before = x.clone()
    assert_same_bytes(function(x), call_numpy(oracle_function, x), name, any_nan=True)
    assert_same_bytes(x, before, "the argument")


@every_activation
def test_values_and_gradients_have_the_bits_of_the_oracle(act):
    """Compare activations and their gradients with the bits of a NumPy oracle."""
    x = all_kinds_of_numbers()
    if act.is_gated:
        x = x[torch.randperm(len(x))[: 1 << 17]].view(64, -1)
        x[0, ::2] = torch.randn(x[0, ::2].shape)
    g = random_bits(x.numel() // (1 + act.is_gated)).view(*x.shape[:-1], -1)
    if act.is_gated:
        g[:32] = torch.randn(g[:32].shape)
    before = x.clone(), g.clone()
    want = call_numpy(lambda x: oracle.elements(act, x), x)
    assert_same_bytes(activate(x, act), want, act.text, any_nan=True)
    want = call_numpy(lambda x, g: oracle.elements(act, x, g), x, g)
    assert_same_bytes(activate_gradient(x, g, act), want, f"gradient of {act}", any_nan=True)
    assert_same_bytes(x, before[0], "x")
    assert_same_bytes(g, before[1], "grad")


def clamped(x, act):
    a, b = x.chunk(2, -1)
    a, b = a.clamp(max=act.limit), b.clamp(-act.limit, act.limit)
    return a * torch.sigmoid(act.alpha * a) * (b + 1)


PLAIN = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "srelu": lambda x: F.relu(x).square(),
}


def compute_fp64(act, x):
    """Return the activation of fp64 values by PyTorch."""
    if act.is_clamped:
        return clamped(x, act)
    if not act.is_gated:
        return PLAIN[act.name](x)
    a, b = x.chunk(2, -1)
    return PLAIN[act.curve](a) * b


@every_activation
def test_values_are_near_fp64(act):
    """Check that activations are close to fp64."""
    x = moderate_values(256, 512).clamp(-40, 40)
    got, want = activate(x, act).double(), compute_fp64(act, x.double())
    a = x.chunk(2, -1)[0] if act.is_gated else x
    if act.curve == "gelu":
        # In the tail 0.5 + 0.5 tanh cancels, so the error is relative to |x|.
        bound = 4 * (a if not act.is_gated else a * x.chunk(2, -1)[1]).abs()
    else:
        # A relative error of the sigmoid's argument is an absolute error of its exponent.
        bound = (5 + 2 * act.alpha * a.abs()) * want.abs()
    assert ((got - want).abs() <= 2.0**-24 * bound).all()


@every_activation
def test_gradients_are_near_fp64(act):
    """Check that gradients of activations are close to fp64."""
    x = moderate_values(256, 512).clamp(-40, 40)
    exact = x.double().requires_grad_()
    y = compute_fp64(act, exact)
    grad = torch.randn(y.shape)
    (want,) = torch.autograd.grad(y, exact, grad.double())
    got = activate_gradient(x, grad, act).double()
    # A few roundings contribute. Their sum is relative to the gradient, and to 1 + |x| where terms
    # of a slope cancel.
    size = grad.abs() * (1 + (x.abs() if not act.is_gated else 0))
    if act.is_gated:
        a, b = x.chunk(2, -1)
        size = torch.cat([size * (1 + a.abs()) * (1 + b.abs()), size * (1 + a.abs()) ** 2], -1)
    assert ((got - want).abs() <= 8 * 2.0**-24 * (size + want.abs())).all()


@every_activation
def test_views_and_odd_widths(act):
    """Check activations of strided inputs and of odd widths."""
    buffer = moderate_values(7, 2 * 26)
    x = buffer[:, ::2]  # not contiguous, and vector code has a remainder
    assert_same_bytes(activate(x, act), activate(x.contiguous(), act))
    grad = moderate_values(7, act.width(26))
    assert_same_bytes(activate_gradient(x, grad, act), activate_gradient(x.contiguous(), grad, act))


@every_activation
def test_no_rows(act):
    x = torch.empty(0, 26)
    assert_same_bytes(activate(x, act), torch.empty(0, act.width(26)))
