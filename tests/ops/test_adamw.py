"""adamw_quantize: the reference against exact fractions, kernels against the reference."""

import contextlib
import math
from fractions import Fraction

import pytest
import torch

from cute_kernels import backend
from cute_kernels.formats import parse
from cute_kernels.kernels.quantize.config import AdamWTileConfig
from cute_kernels.kernels.quantize.pass_config import AdamWConfig
from cute_kernels.kernels.quantize.variants import kernel_specs
from tests.helpers import BF16, F16, F32, U8, assert_all_same, each_arch, ops, seeded_generator
from tests.kernels.op_support import MODES, check_code, watching
from tests.reference.rational import fp32

SQUARES = "fp8_block:block=128x128"
#: Dtype of the gradient, by format.
GRADIENTS = {
    "mxfp8": BF16,
    SQUARES: F32,
    "nvfp4:block=16x16": BF16,
    "fp8": F16,
    "fp8:scaling=delayed": BF16,
}
SHAPE, MANY = (2, 131, 160), (1030, 1, 32)
SPECIALS = torch.tensor(
    [0.0, -0.0, 1e-45, -1e-39, 3e38, -3e38, 1.0, 1e-30, torch.inf, -torch.inf, torch.nan]
)


def arguments(text, shape=SHAPE, special=False, found_inf=0.0):
    """Return arguments of the op over poisoned outputs.

    ``special`` adds special values and strides.
    """
    fmt, generator = parse(text), seeded_generator(sum(shape))
    master, m, v, grad = (
        torch.randn(shape, generator=generator) * factor for factor in (1, 0.1, 0.01, 1)
    )
    for t in (master, m, v, grad) * special:
        is_special = torch.rand(shape, generator=generator) < 0.1
        t[is_special] = SPECIALS[
            torch.randint(len(SPECIALS), (int(is_special.sum()),), generator=generator)
        ]
    scale = torch.tensor([0.5, 3.0] * shape[0])[: shape[0]] if fmt.has_given_scale else None
    out = ops.grouped_quantize(torch.zeros(shape), text, None, None, True, True, scale)
    for t in out:
        t.view(U8).fill_(0x5A)  # poison
    numbers = torch.tensor([3e-3, 0.9**3, 0.999**3, -3.0 if special else 3.0, found_inf])
    grad = (grad.mT.contiguous().mT if special else grad).to(GRADIENTS[text])
    tensors = (master, m, v.abs(), grad, numbers, out)
    return (*tensors, text, True, True, 0.9, 0.999, 1e-8, 0.0 if special else 0.1, scale)


def result(op_arguments, name="reference", **options):
    """Run the op on copies of its tensors and return master, moments and outputs."""
    *state, out = (
        [t.clone() for t in g] if isinstance(g, list) else g.clone() for g in op_arguments[:6]
    )
    # Strided gradients are copied to unwatched memory.
    watched = (
        watching(*state, *out, *op_arguments)
        if state[3].is_contiguous()
        else contextlib.nullcontext()
    )
    with backend(name, **options), watched:
        ops.adamw_quantize(*state, out, *op_arguments[6:])
    return [*state[:3], *out]


@pytest.mark.emulated
@each_arch
@pytest.mark.parametrize("text", [*GRADIENTS])
def test_kernels_have_the_bits_of_the_reference(text, arch):
    shapes = [(1, 1, 32), SHAPE, (3, 0, 64)] + [MANY] * (
        (text, arch) in (("mxfp8", "sm_90a"), ("fp8", "sm_100a"))
    )
    cases = [*({"shape": shape} for shape in shapes), {"special": True}, {"found_inf": 1.0}]
    for changes, options in [*((case, {}) for case in cases), *(({}, mode) for mode in MODES)]:
        op_arguments = arguments(text, **changes)
        assert_all_same(result(op_arguments, f"emulated:{arch}", **options), result(op_arguments))


def test_the_reference_rounds_as_documented():
    """Each step equals exact fractions, rounded once; the codes are those of the new master."""

    def round_fp32(x):
        return Fraction(fp32(Fraction(x)))

    op_arguments = arguments(SQUARES, (1, 4, 32))
    *state, codes, scales, codes_t, scales_t = result(op_arguments)
    assert_all_same(
        [codes, scales, codes_t, scales_t],
        ops.grouped_quantize(state[0], SQUARES, None, None, True, True),
    )
    lr, power1, power2, scale, _ = map(Fraction, op_arguments[4].tolist())
    beta1, beta2, eps, decay = map(round_fp32, op_arguments[9:13])
    for p, m, v, g, *actual in zip(
        *(t.flatten().tolist() for t in (*op_arguments[:4], *state)), strict=True
    ):
        g = round_fp32(Fraction(g) / scale)
        p = round_fp32(Fraction(p) - round_fp32(lr * decay) * Fraction(p))
        m = round_fp32(beta1 * Fraction(m) + round_fp32(g - beta1 * g))
        v = round_fp32(
            beta2 * Fraction(v) + round_fp32(round_fp32(g * g) - beta2 * round_fp32(g * g))
        )
        root = round_fp32(round_fp32(math.sqrt(v)) / round_fp32(math.sqrt(round_fp32(1 - power2))))
        p = round_fp32(
            p
            - round_fp32(
                round_fp32(round_fp32(lr / round_fp32(1 - power1)) * m) / round_fp32(root + eps)
            )
        )
        assert actual == [p, m, v]


@pytest.mark.emulated
@each_arch
def test_generated_code_has_no_approximations(arch):
    for config in kernel_specs(arch):
        if isinstance(config, (AdamWConfig, AdamWTileConfig)):
            check_code(config, arch, inexact=r"\.ftz|\.approx")


@pytest.mark.parametrize(
    ("index", "make", "error", "message"),
    [
        (1, lambda args: args[3], TypeError, "exp_avg must be float32, got bfloat16"),
        (
            2,
            lambda args: args[0].mT.contiguous().mT,
            ValueError,
            "exp_avg_sq is written in place and must be contiguous",
        ),
        (3, lambda args: args[0][:1], ValueError, "grad must have size 2 in dimension 0"),
        (5, lambda args: args[5][:-1], ValueError, "out must be 6 tensors"),
        (9, lambda args: 1.0, ValueError, "beta1 must be at least 0 and below 1, got 1"),
        (
            11,
            lambda args: float("nan"),
            ValueError,
            "eps must be at least 0 and below inf, got nan",
        ),
        (
            6,
            lambda args: "nvfp4:row_scaled",
            ValueError,
            "weights need a global scale per group, got nvfp4:row_scaled",
        ),
    ],
    ids=["dtype", "strides", "shape", "outputs", "beta1", "eps", "format"],
)
def test_invalid_arguments_raise(index, make, error, message):
    valid = arguments("nvfp4:block=16x16", (2, 3, 32))
    with pytest.raises(error, match=message):
        ops.adamw_quantize(*valid[:index], make(valid), *valid[index + 1 :])
