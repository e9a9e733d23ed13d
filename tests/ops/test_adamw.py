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
#: The dtype of gradients by format.
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
    fmt, random = parse(text), seeded_generator(sum(shape))
    master, m, v, grad = (
        torch.randn(shape, generator=random) * factor for factor in (1, 0.1, 0.01, 1)
    )
    for t in (master, m, v, grad) * special:
        at = torch.rand(shape, generator=random) < 0.1
        t[at] = SPECIALS[torch.randint(len(SPECIALS), (int(at.sum()),), generator=random)]
    scale = torch.tensor([0.5, 3.0] * shape[0])[: shape[0]] if fmt.has_given_scale else None
    out = ops.grouped_quantize(torch.zeros(shape), text, None, None, True, True, scale)
    for t in out:
        t.view(U8).fill_(0x5A)  # poison
    numbers = torch.tensor([3e-3, 0.9**3, 0.999**3, -3.0 if special else 3.0, found_inf])
    grad = (grad.mT.contiguous().mT if special else grad).to(GRADIENTS[text])
    held = (master, m, v.abs(), grad, numbers, out)
    return (*held, text, True, True, 0.9, 0.999, 1e-8, 0.0 if special else 0.1, scale)


def result(given, name="reference", **options):
    *held, out = ([t.clone() for t in g] if isinstance(g, list) else g.clone() for g in given[:6])
    # What lies otherwise is copied to where nobody watches.
    watched = watching(*held, *out, *given) if held[3].is_contiguous() else contextlib.nullcontext()
    with backend(name, **options), watched:
        ops.adamw_quantize(*held, out, *given[6:])
    return [*held[:3], *out]


@pytest.mark.emulated
@each_arch
@pytest.mark.parametrize("text", [*GRADIENTS])
def test_kernels_have_the_bits_of_the_reference(text, arch):
    shapes = [(1, 1, 32), SHAPE, (3, 0, 64)] + [MANY] * (
        (text, arch) in (("mxfp8", "sm_90a"), ("fp8", "sm_100a"))
    )
    cases = [*({"shape": shape} for shape in shapes), {"special": True}, {"found_inf": 1.0}]
    for what, options in [*((case, {}) for case in cases), *(({}, mode) for mode in MODES)]:
        given = arguments(text, **what)
        assert_all_same(result(given, f"emulated:{arch}", **options), result(given))


def test_the_reference_rounds_as_stated():
    """Beside exact fractions, rounded where the op says so; and quantizes what it made."""

    def fl(x):
        return Fraction(fp32(Fraction(x)))

    given = arguments(SQUARES, (1, 4, 32))
    *made, codes, scales, codes_t, scales_t = result(given)
    assert_all_same(
        [codes, scales, codes_t, scales_t],
        ops.grouped_quantize(made[0], SQUARES, None, None, True, True),
    )
    lr, power1, power2, scale, _ = map(Fraction, given[4].tolist())
    beta1, beta2, eps, decay = map(fl, given[9:13])
    for p, m, v, g, *new in zip(*(t.flatten().tolist() for t in (*given[:4], *made)), strict=True):
        g = fl(Fraction(g) / scale)
        p = fl(Fraction(p) - fl(lr * decay) * Fraction(p))
        m = fl(beta1 * Fraction(m) + fl(g - beta1 * g))
        v = fl(beta2 * Fraction(v) + fl(fl(g * g) - beta2 * fl(g * g)))
        root = fl(fl(math.sqrt(v)) / fl(math.sqrt(fl(1 - power2))))
        p = fl(p - fl(fl(fl(lr / fl(1 - power1)) * m) / fl(root + eps)))
        assert new == [p, m, v]


@pytest.mark.emulated
@each_arch
def test_code(arch):
    for config in kernel_specs(arch):
        if isinstance(config, (AdamWConfig, AdamWTileConfig)):
            check_code(config, arch, inexact=r"\.ftz|\.approx")


def test_faults():
    master, _, _, grad, _, out, *_ = given = arguments("nvfp4:block=16x16", (2, 3, 32))
    for at, value, error, message in (
        (1, grad, TypeError, "exp_avg must be float32, got bfloat16"),
        (
            2,
            master.mT.contiguous().mT,
            ValueError,
            "exp_avg_sq is written in place and must be contiguous",
        ),
        (3, master[:1], ValueError, "grad must have size 2 in dimension 0"),
        (5, out[:-1], ValueError, "out must be 6 tensors"),
        (9, 1.0, ValueError, "beta1 must be at least 0 and below 1, got 1"),
        (11, float("nan"), ValueError, "eps must be at least 0 and below inf, got nan"),
        (
            6,
            "nvfp4:row_scaled",
            ValueError,
            "weights need a global scale per group, got nvfp4:row_scaled",
        ),
    ):
        with pytest.raises(error, match=message):
            ops.adamw_quantize(*given[:at], value, *given[at + 1 :])
