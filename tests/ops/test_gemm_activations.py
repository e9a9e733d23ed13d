"""GEMMs with an activation in the epilogue: the bits of the GEMM, then ``moe_activate``."""

import pytest
import torch

import cute_kernels
from cute_kernels import backend
from cute_kernels.capability import UnsupportedError
from cute_kernels.formats import parse
from cute_kernels.formats.activations import ACTIVATIONS, is_gated
from cute_kernels.kernels.gemm.sm90.config import SM90_TILES
from cute_kernels.kernels.gemm.sm100.config import SM100_TILES
from cute_kernels.ops.gemm.fused_activation import activates
from cute_kernels.ops.gemm.launcher import force_tile
from cute_kernels.runtime.backend import chosen_backend
from tests.helpers import (
    BF16,
    DTYPES,
    F16,
    NVFP4_TEXTS,
    assert_all_same,
    assert_same_bytes,
    m_grouped_arguments,
    offs_from_splits,
    ops,
    poisoned,
    quantize_operand,
    sample,
)

from .test_gathered import random_index


def _tile_name(t):
    suffix = " fitted" * getattr(t, "row_fitted", False) + " partial" * getattr(
        t, "swap_partial", False
    )
    return f"{t.m}x{t.n}{'x2' * (t.num_ctas - 1)}{' swapped' * t.swap_ab}{suffix}"


TILES = {
    "sm_90a": {_tile_name(t): t for t in SM90_TILES},
    "sm_100a": {_tile_name(t): t for t in SM100_TILES},
}
SQUARES, BY_ROW = "fp8_block:block=128x128", NVFP4_TEXTS["row-scaled"]
ANY_SCALES = f"fp8_block:pow2_scales=false {SQUARES},pow2_scales=false"
#: Row counts of groups: empty ones, one row, and more than a tile.
SIZES, TAIL = (0, 9, 0, 1, 130, 0), 30
LARGE = {"sizes": (0, 90, 0, 150), "keeps_z": False}
MODES = [{}, {"mode": "chaos", "seed": 1}, {"races": True}, {"mode": "chaos", "seed": 2}]


def arguments(
    kind, n, k, activation, interleaved=False, keeps_z=True, bias=None, dtype=None, sizes=SIZES
):
    """Return arguments of ``m_grouped_gemm_activate``.

    ``kind`` names the formats of A and B, "plain" for none.
    """
    offs, groups = offs_from_splits(sizes), len(sizes)
    a_format, b_format, *prepacked = kind.split(" ")
    x, w = sample(sum(sizes) + TAIL, k), sample(groups, n, k)
    x[sum(sizes) :] = torch.nan
    texts = {}
    if a_format != "plain":
        x, texts["a_format"] = quantize_operand(x, a_format, offs), a_format
    if b_format != "plain":
        w, texts["b_format"] = quantize_operand(w, b_format), b_format
    if prepacked:
        w[0] = cute_kernels.prepack(w[0])
    vectors = (None, None)
    if bias is not None:
        special = torch.tensor([-88.0, torch.nan, -torch.inf, -300.0, torch.inf, 90.0, -0.0])
        vectors = sample(groups, n).to(DTYPES[bias]), torch.rand(groups)
        vectors[0][:, 3 : 3 + len(special)] = special.to(DTYPES[bias])
    gemm_arguments = m_grouped_arguments(
        x, w, offs, *vectors, False, dtype and DTYPES[dtype], prepacked=bool(prepacked), **texts
    )
    return (
        *gemm_arguments[:11],
        bool(prepacked),
        None,
        None,
        None,
        activation,
        interleaved,
        keeps_z,
    )


def expected(arch, op_arguments):
    """Return the results of separate ops on the tensor-core reference."""
    *product, activation, interleaved, keeps_z = op_arguments
    with backend(f"reference:{arch}".strip(":")):
        z = ops.m_grouped_gemm(*product)
        return [ops.moe_activate(z, activation, None, interleaved), *[z] * keeps_z]


CASES = {
    "bf16": (("plain plain", 272, 72, "swiglu"), "256x16 swapped", {"bias": "bfloat16"}),
    "bf16, cluster": (
        ("plain plain", 272, 72, "clamped_swiglu:limit=2.0"),
        "256x128x2 swapped",
        {"interleaved": True},
    ),
    "bf16, serving": (
        ("plain plain", 48, 40, "qgeglu"),
        "256x8 swapped",
        {"keeps_z": False, "dtype": "float32"},
    ),
    "bf16, spread": (
        ("plain plain", 528, 72, "swiglu"),
        "256x144x2 swapped fitted",
        {"sizes": (0, 290, 0, 150)},
    ),
    "fp8": (("fp8 fp8", 264, 80, "gelu"), "128x128", {"bias": "float32", "dtype": "float16"}),
    "fp8, cluster": (("fp8 fp8", 80, 80, "geglu"), "256x128x2 swapped", {}),
    "fp8_block": ((f"fp8_block {SQUARES}", 768, 144, "swiglu"), "128x256", {"bias": "bfloat16"}),
    "fp8_block, swapped": ((f"fp8_block {SQUARES}", 512, 144, "reglu"), "256x32 swapped", {}),
    "fp8_block, rows": (
        ("fp8_block fp8_block", 48, 144, "swiglu"),
        "128x128",
        {"interleaved": True},
    ),
    "nvfp4, cluster": (
        (f"{BY_ROW} nvfp4 prepacked", 512, 272, "sreglu"),
        "256x128x2 swapped",
        {"sizes": (0, 120, 0, 150)},
    ),
    "nvfp4": (("nvfp4 nvfp4", 512, 144, "swiglu"), "256x8 swapped", {}),
    "w4a16": (("plain nvfp4", 512, 144, "swiglu"), "256x32 swapped fitted", {"bias": "bfloat16"}),
    "w8a16": (("plain fp8", 48, 144, "silu"), "256x8 swapped", {}),
    "nvfp4, 96": ((f"{BY_ROW} nvfp4", 512, 144, "swiglu"), "256x96x2 swapped", LARGE),
}
SM100_CASES = {
    "bf16": (("plain plain", 272, 72, "swiglu"), "256x256x2 partial", {"bias": "bfloat16"}),
    "bf16, interleaved": (
        ("plain plain", 272, 72, "geglu"),
        "128x128 partial",
        {"interleaved": True},
    ),
    "bf16, serving": (
        ("plain plain", 48, 40, "qgeglu"),
        "128x32 swapped",
        {"keeps_z": False, "dtype": "float32"},
    ),
    "fp8": (("fp8 fp8", 264, 80, "gelu"), "128x64", {"bias": "float32", "dtype": "float16"}),
    "fp8_block": ((f"fp8_block {SQUARES}", 272, 144, "reglu"), "256x128x2", {"bias": "bfloat16"}),
    "fp8_block, any scales": ((ANY_SCALES, 512, 144, "swiglu"), "128x128", {}),
    "fp8_block, any scales, swapped": ((ANY_SCALES, 512, 144, "swiglu"), "128x64 swapped", {}),
    "nvfp4": (
        (f"{BY_ROW} nvfp4", 304, 144, "clamped_swiglu:limit=2.0"),
        "128x64 swapped",
        {"bias": "float32"},
    ),
    "mxfp8": (("mxfp8 mxfp8", 272, 160, "sreglu"), "128x128 partial", {}),
    "w4a16": (("plain nvfp4", 272, 144, "swiglu"), "256x256x2 partial", {"bias": "bfloat16"}),
    "w8a16": ((f"plain {SQUARES}", 512, 144, "swiglu"), "128x32 swapped", {}),
}
ALL = [
    pytest.param(i, arch, *case, id=f"{arch}, {name}")
    for arch, cases in (("sm_90a", CASES), ("sm_100a", SM100_CASES))
    for i, (name, case) in enumerate(cases.items())
]


@pytest.mark.emulated
@pytest.mark.parametrize(("i", "arch", "args", "tile", "options"), ALL)
def test_kernels_have_the_bits_of_separate_ops(i, arch, args, tile, options):
    """Compare the fused kernel with separate ops."""
    mode = MODES[i % len(MODES)]
    op_arguments = arguments(*args, **{"sizes": SIZES if i < 2 else (0, 5, 0, 36)} | options)
    want = expected(arch, op_arguments)
    with backend(f"emulated:{arch}", **mode), force_tile(TILES[arch][tile]):
        if i % 3:
            assert_all_same(ops.m_grouped_gemm_activate(*op_arguments), want, any_nan=True)
            return
        # The out form leaves rows of the tail unchanged.
        outputs = [torch.full_like(t, 3.0) for t in want]
        ops.m_grouped_gemm_activate_out(*op_arguments, out=outputs)
    live = op_arguments[2][-1]
    assert all((t[live:] == 3).all() for t in outputs) and all((t[live:] == 0).all() for t in want)
    assert_all_same([t[:live] for t in outputs], [t[:live] for t in want], any_nan=True)


BLOCKS = f"fp8_block {SQUARES}"
MANY = {"sizes": (0, 9, 0, 300, 1, 0)}
QUANTIZED = {
    "sm_90a, 128 rows": (
        "fp8_block",
        (BLOCKS, 768, 144, "swiglu"),
        "128x256",
        {"bias": "bfloat16"},
    ),
    "sm_90a, 32": (
        "fp8_block:pow2_scales=false,amax_epsilon=0.1",
        (BLOCKS, 512, 144, "geglu"),
        "256x32 swapped",
        {},
    ),
    "sm_90a, 8": (
        "fp8_block:dtype=e5m2",
        (BLOCKS, 256, 48, "swiglu"),
        "256x8 swapped",
        {"interleaved": True, "dtype": "float16", "bias": "float32"},
    ),
    "sm_90a, groups": (
        "fp8_block",
        (BLOCKS, 256, 16, "swiglu"),
        "256x8 swapped",
        {"sizes": (0, 1, 0, 2) * 260},
    ),
    "sm_90a, plain": ("fp8_block", (BLOCKS, 384, 144, "srelu"), "128x256", {"bias": "bfloat16"}),
    "sm_90a, plain, 16": (
        "fp8_block:pow2_scales=false",
        (BLOCKS, 384, 48, "silu"),
        "256x16 swapped",
        {},
    ),
    "sm_90a, mxfp8": (
        "mxfp8",
        (BLOCKS, 320, 144, "swiglu"),
        "128x256",
        {"interleaved": True, "sizes": (0, 300, 1, 0)},
    ),
    "sm_90a, mxfp8, 32": (
        "mxfp8:dtype=e5m2",
        (BLOCKS, 320, 48, "geglu"),
        "256x32 swapped",
        {"interleaved": True},
    ),
    "sm_90a, mxfp8, plain": ("mxfp8", (BLOCKS, 416, 48, "gelu"), "128x256", {"dtype": "float16"}),
    "sm_90a, mxfp8, plain, 8": (
        "mxfp8",
        (BLOCKS, 160, 16, "relu"),
        "256x8 swapped",
        {"bias": "float32"},
    ),
    "sm_90a, nvfp4": (
        "nvfp4",
        (BLOCKS, 768, 144, "swiglu"),
        "128x256",
        MANY | {"bias": "bfloat16"},
    ),
    "sm_90a, nvfp4, plain": (
        "nvfp4:four_over_six",
        (BLOCKS, 400, 48, "gelu"),
        "128x256",
        {"dtype": "float16"},
    ),
    "sm_90a, nvfp4, 32": (
        "nvfp4:four_over_six",
        (BLOCKS, 352, 144, "geglu"),
        "256x32 swapped",
        {"interleaved": True},
    ),
    "sm_90a, nvfp4, plain, 8": (
        "nvfp4",
        (BLOCKS, 144, 16, "relu"),
        "256x8 swapped",
        {"bias": "float32"},
    ),
    "sm_90a, nvfp4, of nvfp4": (
        "nvfp4:four_over_six",
        (f"{BY_ROW} nvfp4 prepacked", 544, 144, "swiglu"),
        "256x64 swapped",
        {"interleaved": True, "sizes": (0, 9, 0, 70, 1, 0)},
    ),
    "sm_90a, nvfp4, of nvfp4, fitted": (
        "nvfp4",
        ("nvfp4 nvfp4", 512, 144, "swiglu"),
        "256x32 swapped fitted",
        {},
    ),
    "sm_90a, nvfp4, smallest": (
        "nvfp4",
        ("plain nvfp4", 16, 16, "gelu"),
        "256x16 swapped",
        {"bias": "float32"},
    ),
    "sm_90a, fp8_block, of bf16": (
        "fp8_block",
        ("plain plain", 512, 72, "swiglu"),
        "256x16 swapped",
        {},
    ),
    "sm_90a, mxfp8, of fp8": (
        "mxfp8",
        ("fp8 fp8", 64, 80, "silu"),
        "256x64 swapped",
        {"dtype": "float16"},
    ),
    "sm_100a, mxfp8": (
        "mxfp8",
        ("mxfp8 mxfp8", 320, 64, "swiglu"),
        "256x256x2 partial",
        MANY | {"bias": "bfloat16"},
    ),
    "sm_100a, mxfp8, smallest": (
        "mxfp8:dtype=e5m2",
        ("plain plain", 64, 8, "swiglu"),
        "128x32 swapped",
        {"dtype": "float16", "bias": "float32", "interleaved": True},
    ),
    "sm_100a, mxfp8, plain": ("mxfp8", ("mxfp8 nvfp4", 160, 64, "srelu"), "128x64 swapped", {}),
    "sm_100a, mxfp8, plain, 64 columns": (
        "mxfp8",
        ("mxfp8 mxfp8", 160, 64, "gelu"),
        "128x128 partial",
        MANY,
    ),
    "sm_100a, fp8_block": (
        "fp8_block",
        (BLOCKS, 768, 144, "swiglu"),
        "256x256x2",
        MANY | {"bias": "bfloat16"},
    ),
    "sm_100a, fp8_block, plain": (
        "fp8_block:pow2_scales=false",
        (ANY_SCALES, 384, 144, "relu"),
        "128x128",
        {},
    ),
    "sm_100a, fp8_block, swapped": (
        "fp8_block",
        ("plain plain", 384, 72, "silu"),
        "128x64 swapped",
        {},
    ),
    "sm_100a, nvfp4": ("nvfp4", ("nvfp4 nvfp4", 288, 144, "swiglu"), "256x256x2 partial", MANY),
    "sm_100a, nvfp4, swapped": (
        "nvfp4:four_over_six",
        (f"{BY_ROW} nvfp4", 288, 144, "geglu"),
        "128x64 swapped",
        {},
    ),
    "sm_100a, nvfp4, smallest": (
        "nvfp4",
        ("plain nvfp4", 16, 16, "gelu"),
        "128x32 swapped",
        {"bias": "float32"},
    ),
    "sm_100a, nvfp4, plain": ("nvfp4", ("plain plain", 48, 72, "relu"), "128x128 partial", {}),
}


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("arch", "case"),
    [(name.split(",")[0], case) for name, case in QUANTIZED.items()],
    ids=list(QUANTIZED),
)
def test_quantized_outputs(arch, case):
    """The kernel writes the bytes of ``grouped_quantize`` of the activated result, no others."""
    text, args, tile, options = case
    op_arguments = arguments(*args, **{"keeps_z": False} | options)
    offs, live = op_arguments[2], op_arguments[2][-1]
    amax = None if parse(text).global_scale is None else torch.linspace(-3.0, 40.0, len(offs))
    with backend(f"reference:{arch}"):
        (a,) = ops.m_grouped_gemm_activate(*op_arguments)
        want = ops.grouped_quantize(a, text, offs, amax)
        assert_all_same(ops.m_grouped_gemm_activate(*op_arguments, text, amax), want)
    with backend(f"emulated:{arch}"):
        quantized = [poisoned(t) for t in want]
        ops.grouped_quantize_out(a, text, offs, amax, out=quantized)
    assert_same_bytes(quantized[0][:live], want[0][:live])
    for mode in MODES if len(offs) < 9 else MODES[:1]:
        outputs = [poisoned(t) for t in want]
        with backend(f"emulated:{arch}", **mode), force_tile(TILES[arch][tile]):
            ops.m_grouped_gemm_activate_out(*op_arguments, text, amax, out=outputs)
        assert_all_same(outputs, quantized)


@pytest.mark.parametrize(
    ("formats", "is_fused"),
    [((None, None), False), (("nvfp4", "nvfp4"), False), (("fp8_block", SQUARES), True)],
)
def test_layers_fuse_quantization_where_it_was_timed(formats, is_fused):
    shape, device = (512, 128), torch.device("cpu")
    with backend("emulated:sm_90a"):
        fuses = activates(
            chosen_backend(), device, BF16, formats, shape, "swiglu", False, 2048, True, "fp8_block"
        )
    assert fuses is is_fused


@pytest.mark.parametrize("kind", ["plain plain", "mxfp8 mxfp8", "mxfp8 nvfp4"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_on_the_reference(activation, kind):
    interleaved = is_gated(activation) and kind != "mxfp8 mxfp8"
    op_arguments = arguments(kind, 48, 64, activation, interleaved, dtype="float16")
    assert_all_same(ops.m_grouped_gemm_activate(*op_arguments), expected("", op_arguments))


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("tile", "mode"),
    [("256x16 swapped", {"races": True}), ("256x160 swapped fitted", {"mode": "chaos", "seed": 1})],
)
def test_rows_selected_by_an_index(tile, mode):
    """Compare the fused kernel of gathered rows with separate ops."""
    op_arguments = arguments("plain plain", 272, 72, "swiglu")
    rows = random_index(len(op_arguments[0]), len(op_arguments[0]))
    want = expected("sm_90a", (ops.moe_gather(op_arguments[0], rows), *op_arguments[1:]))
    with backend("emulated:sm_90a", **mode), force_tile(TILES["sm_90a"][tile]):
        assert_all_same(
            ops.m_grouped_gemm_activate(*op_arguments[:13], rows, *op_arguments[14:]),
            want,
            any_nan=True,
        )


@pytest.mark.emulated
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("index", [None, random_index(20, 15).clamp(0, 19)], ids=["rows", "index"])
def test_rows_quantized_on_the_fly(index, arch):
    for fmt, b_format, n in ((BY_ROW, "nvfp4", 512), ("fp8_block", SQUARES, 256)):
        a, offs = sample(20, 144), offs_from_splits((5, 0, 12))
        codes, *scales = quantize_operand(sample(3, n, 144), b_format)
        op_arguments = (
            a,
            codes,
            offs,
            scales,
            fmt,
            b_format,
            None,
            None,
            False,
            F16,
            False,
            None,
            None,
            None,
            index,
            None,
        )
        with backend(f"reference:{arch}"):
            picked = a if index is None else ops.moe_gather(a, index)
            z = ops.m_grouped_quantize_gemm(picked, *op_arguments[1:-2])
            want = [ops.moe_activate(z, "swiglu"), z]
            assert_all_same(
                ops.m_grouped_quantize_gemm_activate(*op_arguments, "swiglu", False, True), want
            )
        with backend(f"emulated:{arch}"):
            assert_all_same(
                ops.m_grouped_quantize_gemm_activate(*op_arguments, "swiglu", False, True),
                want,
                any_nan=True,
            )


@pytest.mark.emulated
def test_no_rows_and_no_columns():
    for sizes, n in (((0, 0), 16), ((3, 0), 0)):
        op_arguments = arguments("plain plain", n, 16, "swiglu", sizes=sizes)
        with backend("emulated:sm_90a"):
            assert_all_same(
                ops.m_grouped_gemm_activate(*op_arguments), expected("sm_90a", op_arguments)
            )


def test_the_global_scale_without_rows():
    """The global scale belongs to groups, so it is written even without rows."""
    op_arguments = arguments("plain plain", 288, 144, "swiglu", keeps_z=False, sizes=(0, 0))
    op_arguments, amax = (op_arguments[0][:0], *op_arguments[1:]), torch.tensor([1.0, -2.0])
    for kind in ("reference", "emulated"):
        with backend(f"{kind}:sm_100a"):
            outputs = [
                poisoned(t) for t in ops.m_grouped_gemm_activate(*op_arguments, "nvfp4", amax)
            ]
            ops.m_grouped_gemm_activate_out(*op_arguments, "nvfp4", amax, out=outputs)
        assert_all_same(outputs[-1:], [amax.abs()])


def call_with_changes(change):
    op_arguments = {"kind": "plain plain", "n": 16, "k": 16, "activation": "swiglu"} | change
    output_format = op_arguments.pop("output_format", None)
    ops.m_grouped_gemm_activate(*arguments(**op_arguments), output_format)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"activation": "silu", "interleaved": True},
            "interleaved needs a gated activation, which silu is not",
        ),
        ({"activation": "swish"}, "activation"),
        ({"n": 7}, "must have an even number of rows for swiglu, which is gated, got 7 rows"),
        ({"output_format": "fp8_block"}, "keeps_z needs a result that is not quantized"),
        ({"output_format": "fp8_block", "keeps_z": False}, "N must be a positive multiple of 16"),
        (
            {"output_format": "nvfp4", "keeps_z": False, "n": 32},
            "amax must be given if, and only if, quantize_to is a format with a global scale",
        ),
    ],
)
def test_invalid_arguments_raise(change, message):
    with pytest.raises(ValueError, match=message):
        call_with_changes(change)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("arch", "kind", "n", "message"),
    [
        (
            "sm_90a",
            f"fp8_block {SQUARES}",
            384,
            "multiple of 128 rows beside block scales, unless B is interleaved",
        ),
        (
            "sm_100a",
            f"plain {SQUARES}",
            384,
            "multiple of 128 rows beside block scales, unless B is interleaved",
        ),
        (
            "sm_90a",
            "fp8_block fp8_block",
            256,
            "rows of B with fp32 block scales of their own must be interleaved",
        ),
        (
            "sm_100a",
            "plain fp8_block",
            256,
            "rows of B with fp32 block scales of their own must be interleaved",
        ),
        ("sm_100a", "plain plain", 24, "multiple of 16"),
    ],
)
def test_unsupported_products_give_a_reason(arch, kind, n, message):
    pytest.importorskip("cutlass")
    with backend(f"emulated:{arch}"), pytest.raises(UnsupportedError, match=message):
        ops.m_grouped_gemm_activate(*arguments(kind, n, 128, "swiglu"))


@pytest.mark.parametrize(
    ("name", "kind", "n", "activation", "text", "message"),
    [
        (
            "emulated:sm_90a",
            BLOCKS,
            320,
            "silu",
            "fp8_block",
            "has whole blocks of 128 columns, got columns=320",
        ),
        (
            "emulated:sm_90a",
            "plain plain",
            384,
            "swiglu",
            "fp8_block",
            "has whole blocks of 128 columns, got columns=192",
        ),
        (
            "emulated:sm_100a",
            BLOCKS,
            384,
            "swiglu",
            "fp8_block",
            "has whole blocks of 128 columns, got columns=192",
        ),
        (
            "emulated:sm_100a",
            ANY_SCALES,
            512,
            "swiglu",
            "fp8_block",
            "must have whole blocks of fp8_block after swiglu",
        ),
        (
            "reference",
            "plain plain",
            512,
            "swiglu",
            "fp8",
            "blocks of single rows, to nearest even, not to fp8",
        ),
        ("reference", "plain plain", 512, "swiglu", SQUARES, "blocks of single rows"),
        (
            "reference",
            "plain plain",
            512,
            "swiglu",
            BY_ROW,
            "a tile of a GEMM holds part of a row",
        ),
    ],
)
def test_unsupported_output_formats_give_a_reason(name, kind, n, activation, text, message):
    """Check that unsupported output formats raise with a reason."""
    pytest.importorskip("cutlass")
    op_arguments = arguments(kind, n, 128, activation, keeps_z=False)
    amax = torch.ones(6) if parse(text).global_scale else None
    with backend(name), pytest.raises(UnsupportedError, match=message):
        ops.m_grouped_gemm_activate(*op_arguments, text, amax)


def test_it_has_no_derivative():
    op_arguments = arguments("plain plain", 16, 16, "swiglu")
    op_arguments[0].requires_grad_()
    with pytest.raises(RuntimeError, match="m_grouped_gemm_activate has no derivative"):
        ops.m_grouped_gemm_activate(*op_arguments)[0].sum().backward()
