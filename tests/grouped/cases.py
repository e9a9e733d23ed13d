"""Recipes, formats, tensors and comparisons that the tests of ``grouped`` share."""

from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import grouped
from grouped import recipes
from tests.helpers import BF16, E5M2, F32, assert_same_buffers, e2m1_values, sample

RECIPES = {"bf16": recipes.BF16(), "nvfp4": recipes.NVFP4(), "row-scaled": recipes.NVFP4RowScaled()}
#: Recipes of FP8 codes; sizes are multiples of 32.
FP8_RECIPES = {
    "mxfp8": recipes.MXFP8(),
    "mxfp8-hybrid": recipes.MXFP8(grad_dtype=E5M2, weight_block=(32, 32)),
    "fp8-block": recipes.FP8Block(),
    "fp8-block-fp32": recipes.FP8Block(grad_dtype=E5M2, pow2_scales=False, amax_epsilon=1e-3),
    "fp8": recipes.FP8Current(),
}
#: One recipe of each kind without random numbers; inputs are bf16.
ALL_RECIPES = RECIPES | {name: FP8_RECIPES[name] for name in ("mxfp8", "fp8-block", "fp8")}
ALL_RECIPES["hadamard"] = recipes.NVFP4(hadamard=True)
QUANTIZED = {name: recipe for name, recipe in RECIPES.items() if recipe.is_quantized}
FORMATS = {
    "1x16": grouped.NVFP4(),
    "16x16": grouped.NVFP4(block=(16, 16)),
    "row-scaled": grouped.NVFP4(row_scaled=True),
}
WEIGHT_FORMAT = FORMATS["16x16"]
#: One format per kind of element, scale, scale layout, global scale and columnwise copy.
EVERY_FORMAT = {
    **FORMATS,
    "fp8": grouped.FP8(),
    "mxfp8": grouped.MXFP8(E5M2),
    "32x32": grouped.MXFP8(block=(32, 32)),
    "fp8_block": grouped.FP8Block(),
    "128x128": grouped.FP8Block((128, 128), E5M2, pow2_scales=False),
}


def weight(groups=3, rows=48, cols=64):
    """Return a weight: (groups, rows, cols), bfloat16."""
    return torch.randn(groups, rows, cols, dtype=BF16)


def ragged(fmt=FORMATS["row-scaled"], **options):
    """Return a quantized tensor of three ragged groups and a tail."""
    return grouped.quantize(sample(36, 64), fmt, offs=[7, 7, 33], **{"columnwise": True, **options})


def uniform(fmt=WEIGHT_FORMAT, **options):
    return grouped.quantize(weight(), fmt, **{"columnwise": True, **options})


#: (m, n) of the members of ``shaped``.
SHAPES = [(5, 64), (0, 32), (130, 32), (1, 160)]


def shaped(fmt=FORMATS["row-scaled"], **options):
    """Return a quantized tensor whose members have different shapes, and a tail."""
    return grouped.quantize(sample(4700), fmt, **{"shapes": SHAPES, "columnwise": True, **options})


def parameter(requires_grad=True, fmt=WEIGHT_FORMAT, **options):
    return nn.Parameter(uniform(fmt, **options), requires_grad)


def weights_quantized(counter):
    """Return the number of quantizations of weights, which have no offs."""
    return sum(args[2] is None for args in counter.arguments("grouped_quantize"))


def bytes_of(x):
    """Return a copy of every tensor inside of a GroupedTensor, by name."""
    inner = {name: getattr(x, name) for name in ("offs", "shapes", "element_offsets")}
    for direction in ("rowwise", "columnwise"):
        operand = getattr(x, direction)
        if operand is not None:
            inner |= {f"{direction} {name}": t for name, t in operand._asdict().items()}
    return {name: t.clone() for name, t in inner.items() if t is not None}


def pointers(x):
    return [getattr(x, name).data_ptr() for name in x.__tensor_flatten__()[0]]


def assert_same_tensor(got, want):
    assert type(got) is type(want) is grouped.GroupedTensor and got.format == want.format
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
    assert_same_buffers(bytes_of(got), bytes_of(want))


def close(got, want, relative=2e-2):
    """Compare the largest difference with the largest magnitude that is expected."""
    torch.testing.assert_close(
        got.double(), want.double(), rtol=0, atol=relative * float(want.detach().abs().max())
    )


def decode_member(codes, scales, amax, cols):
    """Decode compact NVFP4 codes (R, C / 2) by the text of the format: (R, cols), float32."""
    global_scale = amax.reshape(-1, 1) if amax.dim() else amax
    factor = scales.float() * global_scale * torch.tensor(1 / 2688, dtype=F32)
    return e2m1_values(codes)[:, :cols].float() * factor.repeat_interleave(16, dim=1)[:, :cols]


class OpCounter(TorchDispatchMode):
    """Records the ops that run inside, with the arguments of each call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Trailing arguments that have their default values are left out of args.
        defaults = tuple(a.default_value for a in func._schema.arguments[len(args) :])
        self.calls.append((func._schema.name.split("::")[1], args + defaults))
        return func(*args, **(kwargs or {}))

    @property
    def counts(self):
        return Counter(name for name, _ in self.calls)

    def arguments(self, name):
        return [args for called, args in self.calls if called == name]
