"""Errors of public functions: types and values of arguments, and the messages that name them."""

import re

import pytest
import torch

import grouped
from grouped import recipes
from tests.helpers import (
    BF16,
    I32,
    offs_tensor,
)

from .cases import EVERY_FORMAT

OFFS = offs_tensor(4, 4, 9)
X = torch.zeros(9, 64, dtype=BF16)
W = torch.zeros(3, 32, 64, dtype=BF16)
SQUARE = torch.zeros(3, 64, 64, dtype=BF16)
DELAYED = grouped.FP8(scaling="delayed")


def quantize(x=X, fmt=None, **options):
    return grouped.quantize(x, fmt or grouped.NVFP4(), offs=OFFS, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(x=[[1.0]]), "x must be a tensor, got list"),
        (lambda: quantize(amax=1.0), "amax must be a tensor, got 1.0"),
        (lambda: quantize(activation="silu", grad=1.0), "grad must be a tensor, got float"),
        (lambda: grouped.quantize(X, DELAYED, offs=9), "offs must hold the end row of each group"),
        (lambda: grouped.grouped_gemm([1.0], W, offs=OFFS), "a must be a tensor, got list"),
        (lambda: grouped.grouped_gemm(X, 2.0, offs=OFFS), "b must be a tensor, got float"),
        (lambda: grouped.grouped_gemm(X, W, offs=OFFS, out=2.0), "out must be a tensor, got float"),
        (lambda: grouped.grouped_gemm(X, W, offs=OFFS, alpha=2.0), "alpha must be a tensor"),
        (lambda: grouped.grouped_gemm(X, W, offs=OFFS, bias=2.0), "bias must be a tensor"),
        (lambda: grouped.linear(X, W, 2.0, OFFS, recipes.BF16()), "bias must be a tensor"),
        (
            lambda: grouped.linear(X.double(), W, None, OFFS, recipes.BF16()),
            "x must be bfloat16 or float16 or float32",
        ),
        (lambda: grouped.linear(X, None, None, OFFS, recipes.BF16()), "weight must be a tensor"),
        (lambda: quantize().dequantize("rowwise"), "dtype must be a torch.dtype, got 'rowwise'"),
        (lambda: grouped.linear(X, W, None, OFFS, recipes.MXFP8), "MXFP8(), not MXFP8"),
        (
            lambda: grouped.nn.MoE(64, 32, 3, 1, recipe=grouped.MXFP8()),
            "a format, which a recipe has",
        ),
        (lambda: quantize(rowwise="no"), "rowwise must be a bool, got 'no'"),
        (
            lambda: grouped.grouped_gemm(X, W, offs=OFFS, transpose_b=1),
            "transpose_b must be a bool, got 1",
        ),
        (lambda: grouped.compute_offsets([1]), "splits must be a tensor, got [1]"),
        (
            lambda: grouped.compute_routing(OFFS[None], 4.0),
            "num_experts must be an integer, got 4.0",
        ),
        (
            lambda: grouped.linear(X, W.long(), None, OFFS, recipes.BF16()),
            "weight must be bfloat16",
        ),
        (lambda: grouped.nn.GroupedLinear(3, 64, 32, "no"), "bias must be a bool, got 'no'"),
        (
            lambda: grouped.nn.GroupedLinear(3, 64, 32, dtype=I32),
            "dtype must be bfloat16 or float16 or float32",
        ),
        (lambda: grouped.optim.AdamW([X], amsgrad=1), "amsgrad must be a bool, got 1"),
        (
            lambda: grouped.linear(X, W.mT, None, OFFS, recipes.BF16()),
            "a weight stored (G, K, N) is given as weight.mT",
        ),
        (
            lambda: grouped.inspect.detect_nonfinite(torch.nn.Identity()),
            "model holds no grouped layers",
        ),
        (
            lambda: grouped.grouped_gemm(X, SQUARE, offs=OFFS, out=X),
            "out must not lie where a does",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()


SCALE_AND_AMAX = {"scale": torch.ones(3), "amax": torch.ones(3)}
STOCHASTIC = grouped.NVFP4(stochastic_rounding=True)
#: Changed arguments of ``quantize``, and the message.
WRONG_TYPES = [
    ({"x": quantize()}, r"\.dequantize\(\)"),
    ({"fmt": DELAYED, "scale": torch.ones(3).double()}, "scale must be float32"),
    ({"activation": "silu", "grad": X.float()}, "grad must be bfloat16, got float32"),
    ({"activation": 3}, "activation must be a name such as 'swiglu' or a grouped"),
    ({"fmt": STOCHASTIC, "seed": True}, "seed must be an int, a .* got True"),
    ({"fmt": STOCHASTIC, "seed": 1.0}, "seed must be an int, a .* got 1.0"),
    ({"fmt": STOCHASTIC, "seed": torch.tensor([1.0, 2.0])}, "seed must be int64, got float32"),
]
WRONG_VALUES = [
    ({"offs": None}, "offs is missing.*uniform x is 3D"),
    ({"x": X[:, :16], "fmt": EVERY_FORMAT["mxfp8"]}, " 32 .*16"),
    ({"x": X[:, :48], "fmt": EVERY_FORMAT["32x32"]}, " 32 .*48"),
    ({"x": X[:, :24], "fmt": EVERY_FORMAT["fp8_block"]}, " 16 .*24"),
    ({"fmt": DELAYED}, "scale is missing: fp8:scaling=delayed"),
    ({"fmt": DELAYED, "scale": torch.ones(4)}, "scale must have size 3"),
    ({"fmt": DELAYED, **SCALE_AND_AMAX}, "takes scales, not amaxes"),
    (
        {"fmt": grouped.FP8(), "scale": torch.ones(3)},
        r"omit it, or use FP8\(scaling='delayed'\)",
    ),
    ({"grad": X}, "grad needs an activation: it is the gradient of"),
    ({"activation": "swiglu", "grad": X}, "grad must have size 32 in dimension 1"),
    (
        {"activation": "silu", "grad": X, "offs": None, "shapes": [(9, 64)]},
        "grad goes with offs or uniform x, not with",
    ),
    ({"activation": "swish"}, "activation must be one of gelu, silu"),
    ({"activation": "swiglu", "out": quantize()}, "out was made with another shape"),
    (
        {"fmt": STOCHASTIC, "seed": 2**63},
        r"seed must be in \[-2\^63, 2\^63\), got 9223372036854775808",
    ),
    ({"fmt": STOCHASTIC, "seed": torch.tensor([1])}, "seed must have size 2"),
]


def quantize_with_changes(change):
    grouped.quantize(**{"x": X, "fmt": grouped.NVFP4(), "offs": OFFS} | change)


@pytest.mark.parametrize(("case", "message"), WRONG_TYPES)
def test_quantize_refuses_types(case, message):
    with pytest.raises(TypeError, match=message):
        quantize_with_changes(case)


@pytest.mark.parametrize(("case", "message"), WRONG_VALUES)
def test_quantize_refuses_values(case, message):
    with pytest.raises(ValueError, match=message):
        quantize_with_changes(case)
