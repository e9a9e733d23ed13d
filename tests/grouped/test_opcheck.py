"""``torch.library.opcheck`` of every op of ``torch.ops.grouped``."""

import pytest
import torch
from torch.library import opcheck

import grouped
from tests.helpers import BF16, F16, F32, offs_from_splits, sample

from .cases import ALL_RECIPES, EVERY_FORMAT, FORMATS, RECIPES, WEIGHT_FORMAT, weight

OFFS = offs_from_splits((5, 0, 8))
ROWS, G, K, N = 15, 3, 64, 48  # two rows of tail
ops = torch.ops.grouped


def ragged(cols=K, fmt=FORMATS["1x16"]):
    return grouped.quantize(sample(ROWS, cols), fmt, offs=OFFS, columnwise=True)


def uniform(grad=False):
    return grouped.quantize(weight(), WEIGHT_FORMAT, columnwise=True).requires_grad_(grad)


def shaped(grad=False):
    x = sample(ROWS * K)
    q = grouped.quantize(x, FORMATS["1x16"], shapes=[(2, 16), (0, 32), (5, 48)], columnwise=True)
    return q.requires_grad_(grad)


def leaf(*shape, dtype=BF16):
    return sample(*shape, dtype=dtype).requires_grad_()


def linear(recipe, weight, bias):
    return leaf(ROWS, K), weight, bias, OFFS, *recipe.texts, recipe.propagate_nonfinite


def experts(recipe, recompute=False):
    """Return arguments of the op ``experts``."""
    routing = grouped.compute_routing(torch.tensor([[2, 0], [-1, 2]] * 4), G)
    p, bias = torch.rand(8, 2, requires_grad=True), (leaf(G, K), leaf(G, K))
    layers = (leaf(G, K, K), bias[0], leaf(G, K, K // 2), bias[1])
    flags = (recipe.propagate_nonfinite,) * 2
    style = ("swiglu", False, recompute, F32, False)
    return leaf(8, K), p, *routing, *layers, *recipe.texts, *recipe.texts, *flags, *style, *NONE


NONE = (None,) * 4
#: Arguments of each case, by op.
BY_OP = {
    "dequantize": {
        "ragged": lambda: (ragged(), None, None),
        "columnwise": lambda: (ragged(), F32, "columnwise"),
        "uniform, of a parameter": lambda: (uniform(True), F16, "rowwise"),
        "shapes": lambda: (shaped(), None, None),
        "shapes, columnwise": lambda: (shaped(True), F32, "columnwise"),
    },
    "gemm": {
        "fprop": lambda: (ragged(), uniform(), None, None, False, BF16, None),
        "dgrad with everything": lambda: (
            *(ragged(N, FORMATS["row-scaled"]), uniform()),
            *(torch.rand(3, K), torch.rand(3), True, F32, None),
        ),
        "wgrad": lambda: (ragged(N), ragged(K), None, None, False, F32, None),
    },
    "gemm_out": {
        "fprop": lambda: (ragged(), uniform(), None, None, False, False, sample(ROWS, N)),
        "wgrad that adds": lambda: (
            *(ragged(N), ragged(K), None, torch.rand(3)),
            *(False, True, torch.rand(3, N, K)),
        ),
    },
    "gemm_w4a16": {
        "fprop": lambda: (leaf(ROWS, K), uniform(True), OFFS, leaf(3, N), None, False, BF16),
        "dgrad": lambda: (
            *(leaf(ROWS, N, dtype=F16), uniform(), OFFS),
            *(None, torch.rand(3), True, F32),
        ),
    },
    "gemm_w4a16_out": {
        "fprop": lambda: (
            *(sample(ROWS, K), uniform(), OFFS, None, None),
            *(False, True, sample(ROWS, N)),
        )
    },
    "experts": {
        "bf16": lambda: experts(RECIPES["bf16"]),
        "nvfp4, z made again": lambda: experts(RECIPES["nvfp4"], recompute=True),
    },
    "router_logits": {
        "bf16": lambda: (leaf(ROWS, K), leaf(6, K)),
        "parts": lambda: (leaf(ROWS, K), leaf(6, K, dtype=F32)),
    },
    "linear": {
        "W4A16": lambda: linear(RECIPES["bf16"], uniform(True), leaf(G, N)),
        "of a quantized weight": lambda: linear(RECIPES["nvfp4"], uniform(True), None),
    },
    "quantize_out": {
        "ragged": lambda: (sample(ROWS, K), OFFS, None, ragged()),
        "shapes": lambda: (sample(ROWS * K), None, torch.ones(3), shaped()),
        "uniform": lambda: (weight(), None, torch.ones(3), uniform()),
    },
}
CASES = [*[(op, name, make) for op, cases in BY_OP.items() for name, make in cases.items()]]
#: A shared level, and none: every format is in the tests of the ops below.
for name in ("fp8", "mxfp8"):
    CASES += [
        (
            "dequantize",
            f"{name}, columnwise",
            lambda fmt=EVERY_FORMAT[name]: (ragged(fmt=fmt), None, "columnwise"),
        ),
        (
            "quantize_out",
            name,
            lambda fmt=EVERY_FORMAT[name]: (sample(ROWS, K), OFFS, None, ragged(fmt=fmt)),
        ),
    ]
for name in ("bf16", "hadamard", "fp8"):
    CASES.append(
        ("linear", name, lambda r=ALL_RECIPES[name]: linear(r, leaf(G, 2 * N, K), leaf(G, 2 * N)))
    )


def registered():
    return {
        n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("grouped::")
    }


def test_every_op_has_a_case():
    assert {name for name, _, _ in CASES} == registered()


@pytest.mark.usefixtures("comparable")
@pytest.mark.parametrize(
    ("name", "make"),
    [(name, make) for name, _, make in CASES],
    ids=[f"{name}: {case}" for name, case, _ in CASES],
)
def test_op(name, make):
    opcheck(getattr(ops, name).default, make())
