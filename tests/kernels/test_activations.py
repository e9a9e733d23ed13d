"""Activations before quantization, against the reference backend, bit for bit."""

import itertools

import pytest
import torch

from cute_kernels import backend
from cute_kernels.formats import parse
from cute_kernels.formats.activations import ACTIVATIONS, Activation, is_gated, parse_activation
from cute_kernels.kernels.quantize.choose import choose_row_config, choose_tile_config
from cute_kernels.kernels.quantize.config import Prologue, QuantizeProblem
from cute_kernels.reference.activations import activate, activate_gradient
from tests.helpers import (
    BF16,
    DTYPES,
    U8,
    assert_same_bytes,
    offs_of_many_groups,
    offs_tensor,
    ops,
    poisoned,
    seeded_generator,
)

from .op_support import ARCHITECTURES, array_of, check, check_code, check_touched, each_mode
from .quantize_support import compiled, random_input, special_input

from .activation_kernel import ActivationConfig  # isort: skip


CLAMPED = "clamped_swiglu:alpha=1.5,limit=2.0"
#: An activation of each curve by the name of the curve, gated if there is one.
OF_CURVE = {Activation(name).curve: name for name in sorted(ACTIVATIONS, key=is_gated)}
OF_CURVE |= {"clamped_silu": CLAMPED}
#: (rows of the buffer, K, end rows, contents). Halves have 136 or 144 columns.
RAGGED = {
    "odd rows, odd K": (300, 288, offs_tensor(7, 136, 137, 300), random_input),
    "empty first, middle, last; tail": (
        210,
        96,
        offs_tensor(0, 0, 65, 65, 65, 190, 200, 200),
        None,
    ),
    "one row": (1, 32, offs_tensor(1), random_input),
    "special values": (150, 256, offs_tensor(3, 40, 150), special_input),
    "all empty": (64, 32, offs_tensor(0, 0), random_input),
}


def inputs(act, leading_shape, cols, contents=None, dtype=BF16):
    """Return values for ``cols`` output columns: twice as many if the activation is gated."""
    width = cols * (2 if parse_activation(act).is_gated else 1)
    padded_width = -(-width // 16) * 16
    x = (
        special_input(*leading_shape, padded_width, dtype)
        if contents is special_input
        else random_input((*leading_shape, padded_width), dtype)
    )
    return x[..., :width].contiguous()


def quantize(text, act, x, offs, direction, amax=None):
    """Quantize into poisoned buffers and return their bytes as one tensor."""
    fmt, groups = parse(text), len(x) if offs is None else len(offs)
    options = {"activation": act, "amax": amax, "rowwise": direction != "columnwise"}
    options["columnwise"] = direction != "rowwise"
    if fmt.has_given_scale:
        options["scale"] = torch.exp2(torch.arange(groups) % 17 - 8.0) * 1.3
    if fmt.is_stochastic:
        options["seed"] = torch.tensor([3, 4])
    with backend("reference"):
        reference_outputs = ops.grouped_quantize(x, text, offs, **options)
    out = [poisoned(t) for t in reference_outputs]
    ops.grouped_quantize_out(x, text, offs, **options, out=out)
    return torch.cat([t.view(U8).flatten() for t in out])


def numbers_near_all_steps():
    """Return all bf16 numbers, and fp32 numbers next to those where the arithmetic changes."""
    edges = torch.cat([torch.linspace(-110, 110, 4001), torch.logspace(-42, 38, 1001)])
    near = torch.tensor([0.0, 1.5, 2.0, 10.0, 80.0, 89.0, 104.0, 2.0**32])[:, None]
    near = (near * (1 + torch.arange(-4, 5) * 2.0**-23)).flatten()
    return torch.cat([torch.arange(65536).short().view(BF16).float(), edges, near, -near])


@pytest.mark.parametrize(
    ("arch", "uses_table", "act"),
    [
        *itertools.product(ARCHITECTURES, [False], [*OF_CURVE.values(), "gelu"]),
        *itertools.product(["sm_90a"], [True], ["geglu", "swiglu", "qgeglu", CLAMPED, "gelu"]),
    ],
)
def test_every_curve_has_the_bits_of_the_reference(arch, uses_table, act):
    """Compare every activation curve with the bits of the reference."""
    a, record = numbers_near_all_steps(), parse_activation(act)
    a = a[: 65536 if uses_table else len(a) // 2 * 2]
    b, grad = torch.randn(2, len(a), generator=seeded_generator(0)) * 4
    b[:: len(a) // 7] = torch.nan
    b[1 :: len(a) // 7] = torch.inf
    got = [torch.zeros_like(a) for _ in range(3)]
    b = b.bfloat16().float() if uses_table else b
    compiled(ActivationConfig(act, arch, uses_table))(a, b, grad, *got)
    x = torch.stack([a, b], 1) if record.is_gated else a[:, None]
    want = [activate(x, record), *activate_gradient(x, grad[:, None], record).chunk(x.shape[1], 1)]
    for actual, reference_values in zip(got[: 1 if uses_table else 3], want, strict=False):
        assert_same_bytes(actual, reference_values.flatten(), any_nan=True)


#: Each format with a unary and a gated activation, in different directions.
CASES = [
    ("sm_100a", "nvfp4", "silu", "both"),
    ("sm_90a", "nvfp4", "swiglu", "both"),
    ("sm_90a", "nvfp4:row_scaled", "gelu", "both"),
    ("sm_100a", "nvfp4:row_scaled", "swiglu", "rowwise"),
    ("sm_100a", "nvfp4:block=16x16", CLAMPED, "columnwise"),
    ("sm_90a", "nvfp4:stochastic_rounding", "swiglu", "columnwise"),
    ("sm_100a", "nvfp4:hadamard", "swiglu", "both"),
    ("sm_100a", "fp8", "swiglu", "both"),
    ("sm_90a", "fp8", CLAMPED, "rowwise"),
    ("sm_90a", "fp8:dtype=e5m2,scaling=delayed", "swiglu", "both"),
    ("sm_100a", "fp8:scaling=delayed", "qgelu", "rowwise"),
    ("sm_90a", "fp8_block", "geglu", "both"),
    ("sm_100a", "fp8_block", "srelu", "rowwise"),
    ("sm_100a", "fp8_block:block=128x128", "reglu", "both"),
    ("sm_100a", "mxfp8", "swiglu", "both"),
    ("sm_90a", "mxfp8:block=32x32", "relu", "both"),
    ("sm_90a", "mxfp8", "swiglu", "rowwise"),
]


@pytest.mark.parametrize(("arch", "text", "act", "direction"), CASES)
def test_codes_of_every_format(arch, text, act, direction):
    for rows, cols, offs, fill in RAGGED.values():
        x = inputs(act, (rows,), cols, fill)
        x[int(offs[-1]) :] = torch.nan
        check(arch, lambda x=x, offs=offs: quantize(text, act, x, offs, direction))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_fp16_and_fp32_inputs(dtype):
    """Compare quantized activations of fp16 and fp32 inputs with the reference."""
    for text in ("mxfp8", "fp8"):
        x = inputs("swiglu", (3, 70), 96, dtype=DTYPES[dtype])
        check("sm_90a", lambda a=(text, "swiglu", x): quantize(*a, None, "both"))
    x = inputs("swiglu", (150,), 272, dtype=DTYPES[dtype])
    offs = offs_tensor(20, 149)
    check("sm_100a", lambda: quantize("nvfp4:row_scaled", "swiglu", x, offs, "rowwise"))


@each_mode
def test_any_order_of_events(mode):
    x = inputs("swiglu", (300,), 272)
    offs = offs_tensor(0, 130, 131, 290)
    for arch, text, direction in (
        ("sm_90a", "nvfp4:stochastic_rounding", "columnwise"),
        ("sm_100a", "nvfp4:row_scaled", "rowwise"),
        ("sm_90a", "fp8:dtype=e5m2,scaling=delayed", "both"),
        ("sm_90a", "fp8_block", "rowwise"),
    ):
        check(arch, lambda a=(text, "swiglu", x, offs, direction): quantize(*a), **mode)


def test_given_amaxes_and_many_groups():
    """Compare given amaxes and many groups with the reference."""
    offs = offs_of_many_groups()
    x = inputs("swiglu", (int(offs[-1]) + 5,), 48)
    amax = torch.rand(len(offs)) - 0.5
    check("sm_90a", lambda: quantize("nvfp4", "swiglu", x, offs, "both", amax))


def test_only_rows_of_groups_are_read():
    """Check that kernels read no rows outside of the groups."""
    offs = offs_tensor(3, 131, 219)
    x = inputs("swiglu", (260,), 160)
    options = {"activation": "swiglu"}
    for text, direction in (
        ("nvfp4:row_scaled", "rowwise"),
        ("fp8:dtype=e5m2,scaling=delayed", "both"),
    ):
        options["scale"] = torch.ones(3) if "delayed" in text else None
        options["columnwise"] = direction == "both"
        out = ops.grouped_quantize(x, text, offs, **options)
        readable = [offs, options["scale"], *(array_of(t.view(U8)) for t in out)]
        with backend("emulated:sm_90a" if direction == "both" else "emulated:sm_100a"):
            check_touched(
                lambda text=text, out=out: ops.grouped_quantize_out(
                    x, text, offs, **options, out=out
                ),
                [array_of(x)[:219]],
                readable,
            )


def test_generated_code_is_exact_without_spills():
    """Only approximate reciprocals are allowed, because they are rounded afterwards."""
    problem = QuantizeProblem("bfloat16", 256, "ragged", Prologue("bfloat16", "swiglu"))
    for arch, text in itertools.product(ARCHITECTURES, ("nvfp4", "mxfp8")):
        tiles = choose_tile_config(parse(text), problem, arch, columnwise=True, compute_amax=True)
        for config in (tiles, choose_row_config(parse(text), problem, arch)):
            check_code(config, arch, r"(?<!rcp)\.approx|(?<!rcp\.approx)\.ftz")
