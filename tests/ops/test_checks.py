"""Every refusal: raised before any work, naming the argument, its value and the rule."""

import re

import pytest
import torch

import cute_kernels
from cute_kernels.formats import parse
from cute_kernels.layout.buffers import buffers
from cute_kernels.ops.dequantize import op as dequantize
from cute_kernels.ops.gemm import op as gemm
from cute_kernels.ops.op import Op
from cute_kernels.ops.quantize import op as quantize
from cute_kernels.ops.reductions import op as reductions
from cute_kernels.runtime.plan_cache import PLANS
from tests.helpers import (
    BF16,
    F32,
    I32,
    U8,
    dequantize_arguments,
    k_grouped_arguments,
    m_grouped_arguments,
    offs_from_splits,
    ops,
    sample,
)

OFFS = offs_from_splits((5, 3))
X = torch.ones(8, 32)
W = torch.ones(2, 16, 32)
ROW = torch.zeros(3, 2, dtype=I32)
META_OFFS = OFFS.to("meta")
NVFP4, ROWS = "nvfp4", "nvfp4:row_scaled"
Q = ops.grouped_quantize(X, NVFP4, OFFS, columnwise=True)
V = ops.grouped_quantize(W, NVFP4, columnwise=True)
U = ops.grouped_quantize(torch.ones(2, 5, 32), NVFP4)

OFFS_RULES = [
    (OFFS.long(), TypeError, "offs must be int32, got int64"),
    (OFFS.float(), TypeError, "offs must be int32, got float32"),
    (OFFS[None], ValueError, "offs must have 1 dimensions, got shape (1, 2)"),
    (OFFS[:0], ValueError, "offs must have at least one entry, got shape (0,)"),
    (META_OFFS, ValueError, "offs must be on the device of"),
]


def change(arguments, index, value):
    """Arguments with another one at ``index``, or within the list at the first of two indices."""
    if isinstance(index, tuple):
        index, inner = index
        value = list(change(arguments[index], inner, value))
    return (*arguments[:index], value, *arguments[index + 1 :])


def offs_of(name, arguments):
    at = [field.name for field in getattr(ops, name).default._schema.arguments].index("offs")
    return [(name, change(arguments, at, offs), *rest) for offs, *rest in OFFS_RULES]


def operand_cases(name, arguments, index, label):
    fine = arguments[index[0]][index[1]] if isinstance(index, tuple) else arguments[index]
    other = torch.int16 if fine.dtype != torch.int16 else U8
    return [
        (name, change(arguments, index, fine.to(other)), TypeError, f"{label} must be"),
        (name, change(arguments, index, fine[None]), ValueError, f"{label} must have"),
        (name, change(arguments, index, fine.to("meta")), ValueError, "must be on the device of"),
    ]


def copy_cases(name, arguments, codes, scales, label, ending=""):
    lists = "scales" if label == "codes" else f"{label}_scales"
    rest = [
        ((scales, i), f"{lists}[{i}], the {of}{ending} of nvfp4,")
        for i, of in enumerate(("scales", "amax"))
    ]
    return [
        case
        for at, what in ((codes, label), *rest)
        for case in operand_cases(name, arguments, at, what)
    ]


def m_grouped(a, b=tuple(V[:3]), offs=OFFS, *rest, **formats):
    return m_grouped_arguments(a, b, offs, *rest, **formats)


def rows_of(a, b, rows, inverse=None):
    return (a, b, OFFS, None, None, False, *[None] * 5, False, None, rows, inverse)


def k_grouped(a, b=tuple(Q[3:]), offs=OFFS, *rest):
    return k_grouped_arguments(a, b, offs, *rest)


def dequantized(copy, rows=8, dtype=F32, text=NVFP4, offs=OFFS, columnwise=False):
    return dequantize_arguments(copy, text, rows, dtype, offs, columnwise)


FPROP = m_grouped(Q[:3])
DGRAD = m_grouped(
    Q[:3], ops.grouped_quantize(W.mT, NVFP4, rowwise=False, columnwise=True), OFFS, None, None, True
)
WGRAD = k_grouped(Q[3:])
X16 = X.bfloat16()
W4A16 = m_grouped(X16)
BLOCKS, DELAYED = ("fp8_block", "mxfp8"), "fp8:scaling=delayed"
FUSED = (X16, V[0], OFFS, V[1:3], NVFP4, NVFP4)
#: Where the lists of scales are in the arguments of ``m_grouped_gemm`` and ``k_grouped_gemm``.
M_SCALES, K_SCALES = {"a": 7, "b": 8}, {"a": 5, "b": 6}
#: Where formats are in the arguments of products.
FORMATS_AT = [("m_grouped_gemm", FPROP, 10), ("m_grouped_quantize_gemm", FUSED, 5)]
FORMATS_AT += [("k_grouped_gemm", WGRAD, at) for at in (7, 8)]

#: Arguments that raise a TypeError, and its message, by op.
WRONG_TYPES = {
    "compute_offsets": [((torch.ones(3),), "splits must be int32 or int64, got float32")],
    "compute_routing": [((X, 4), "expert_ids must be int32 or int64, got float32")],
    "moe_route": [
        ((X.half(), None, None, 2), "logits must be float32, got float16"),
        ((X, X.half(), None, 2), "selection_bias must be float32, got float16"),
    ],
    "moe_route_gradient": [((X, None, OFFS, X), "ids must be int64, got int32")],
    "moe_gather": [((X, OFFS.long()), "index must be int32, got int64")],
    "moe_activate_gradient": [((X, X.half(), "silu"), "grad must be float32, got float16")],
    "moe_quantize_gradient": [
        ((X, X.half(), *BLOCKS, "silu", OFFS, False, X, OFFS), "grad must be float32")
    ],
    "grouped_quantize": [
        ((X, NVFP4, OFFS, torch.ones(2).double()), "amax must be float32, got float64"),
        (
            (X, BLOCKS[0], OFFS, None, True, False, *[None] * 4, OFFS, ROW.long()),
            "inverse must be int32, got int64",
        ),
    ],
    "grouped_dequantize": [
        (dequantized(Q[:3], dtype=I32), "dtype must be bfloat16 or float16 or float32, got int32")
    ],
    "m_grouped_gemm": [
        ((X, W.bfloat16(), OFFS), "b must be float32, got bfloat16"),
        ((X, W, OFFS, None, torch.ones(2).bfloat16()), "alpha must be float32, got bfloat16"),
        (
            (X, W, OFFS, None, None, False, torch.float64),
            "out_dtype must be bfloat16 or float16 or float32, got float64",
        ),
        (m_grouped(X), "a must be bfloat16 or float16, got float32"),
        (rows_of(X, W, OFFS.long()), "rows must be int32, got int64"),
    ],
    "k_grouped_gemm": [((X, X.half(), OFFS), "b must be float32, got float16")],
}
#: Likewise a ValueError.
WRONG_VALUES = {
    "compute_offsets": [
        ((torch.ones(3, 1, dtype=I32),), "splits must have 1 dimensions, got shape (3, 1)")
    ],
    "compute_routing": [
        ((OFFS, 4), "expert_ids must have 2 dimensions, got shape (2,)"),
        ((ROW, 0), "num_experts must be positive, got 0"),
    ],
    "moe_route": [
        ((X, None, None, 33), "top_k must be in [1, 32]"),
        ((X, None, None, 9, "softmax", True, 4, 1), "top_k must be in [1, 8]"),
        ((X, None, None, 2, "softmax", True, 3), "expert_groups must divide E = 32"),
        ((X, None, None, 2, "tanh"), "score must be softmax or sigmoid"),
    ],
    "moe_route_gradient": [
        ((X, X[:, 1:], torch.ones(8, 32).long(), X), "dscores must have size 32 in dimension 1")
    ],
    "moe_gather": [((X, OFFS, ROW), "row must have size 8 in dimension 0, got shape (3, 2)")],
    "moe_activate": [
        ((X, "silly"), "silly"),
        ((X, "silu", None, True), "interleaved is of gated activations, which silu is not"),
        ((X[:, :3], "swiglu"), "must have an even number of columns, got 3"),
    ],
    "moe_activate_gradient": [
        ((X, X, "swiglu"), "grad must have size 16 in dimension 1, got shape (8, 32)"),
        ((X, X, "silu", None, False, X), "weight and pair go together"),
        ((X, X, "silu", None, False, X, OFFS), "pair must have size 8 in dimension 0"),
    ],
    "moe_quantize_gradient": [
        ((X, X, *BLOCKS, "silu", OFFS, False, X, OFFS), "pair must have size 8 in dimension 0"),
        (
            (X, X, BLOCKS[1], DELAYED, "silu", OFFS, False, X, OFFS, OFFS),
            "scale is for formats that take one, mxfp8",
        ),
        (
            (X, X, BLOCKS[1], DELAYED, "silu", OFFS, False, X, OFFS),
            "scaled_scale is missing: fp8:scaling=delayed takes",
        ),
    ],
    "moe_combine": [((X, ROW, X), "weight must have size 3 in dimension 0, got shape (8, 32)")],
    "grouped_amax": [
        ((X,), "x must have 3 dimensions, got shape (8, 32)"),
        ((W[:0],), "x must have at least one group, got shape (0, 16, 32)"),
    ],
    "grouped_quantize": [
        ((X, NVFP4), "x must have 3 dimensions, got shape (8, 32)"),
        (
            (X, "nvfp4:row_scaled,block=16x16", OFFS),
            "row_scaled needs block=(1, 16), got block=(16, 16)",
        ),
        ((X, NVFP4, OFFS, None, False, False), "rowwise and columnwise are both False"),
        *(
            (
                (X, text, OFFS, torch.ones(2)),
                f"amax is the global scale of groups, which {text} does not use",
            )
            for text in (ROWS, "mxfp8", "fp8_block")
        ),
        *(
            (
                (torch.ones(8, k), NVFP4, OFFS),
                f"K must be a positive multiple of 16 (nvfp4, x is (..., K)), got {k}",
            )
            for k in (0, 1, 8, 24, 31)
        ),
        ((X, NVFP4, OFFS, torch.ones(3)), "amax must have size 2 in dimension 0, got shape (3,)"),
    ],
    "grouped_dequantize": [
        (dequantized(Q[:3], -1), "rows must be >= 0, got -1"),
        (dequantized(Q[:3], 9), "codes must have size 9 in dimension 0, got shape (8, 16)"),
        (
            dequantized(Q[:3], text=ROWS),
            "scales[1], the amax of nvfp4:row_scaled, must have size 8 in dimension 0",
        ),
        (
            dequantized(Q[3:], 300, columnwise=True),
            "codes must have size 256 in dimension 1, got shape (32, 128)",
        ),
        (
            dequantized((Q[3][:8], *Q[4:]), columnwise=True),
            "K must be a positive multiple of 16 (codes are of nvfp4), got 8",
        ),
        (
            dequantized([t[:0] for t in U], 5, offs=None),
            "codes must have at least one group, got shape (0, 5, 16)",
        ),
        (dequantized(Q[:3], offs=None), "codes must have 3 dimensions, got shape (8, 16)"),
    ],
    "m_grouped_gemm": [
        ((X, W[0], OFFS), "b must have 3 dimensions, got shape (16, 32)"),
        ((X, W[:, :, :31], OFFS), "b must have size 32 in dimension 2"),
        (
            (X, W, OFFS, None, None, True),
            "b must have size 32 in dimension 1, got shape (2, 16, 32)",
        ),
        ((X, W, OFFS[:1]), "offs must have one end row for each of the 2 groups, got 1 entries"),
        (
            (X, W, OFFS, torch.ones(2, 17)),
            "bias must have size 16 in dimension 1, got shape (2, 17)",
        ),
        (
            (X, W, OFFS, None, torch.ones(3)),
            "alpha must have size 2 in dimension 0, got shape (3,)",
        ),
        (
            m_grouped((Q[0][:, :4], *Q[1:3])),
            "K must be a positive multiple of 16 (the columns of a, beside nvfp4), got 8",
        ),
        (
            m_grouped(Q[:3], (V[0][..., :8], *V[1:3])),
            "b must have size 16 in dimension 2, got shape (2, 16, 8)",
        ),
        (
            m_grouped((Q[0][:7], *Q[1:3]), a_format=ROWS),
            "a_scales[1], the amax of nvfp4:row_scaled, must have size 7 in dimension 0",
        ),
        (m_grouped(Q[:3], W), "b must be quantized if a is, got a_format='nvfp4' alone"),
        (
            m_grouped(Q[:3], b_format=ROWS),
            "b_format must have one global scale per group, got 'nvfp4:row_scaled'",
        ),
        (rows_of(X, W, ROW), "rows must have 1 dimensions, got shape (3, 2)"),
        (rows_of(X, W, OFFS, ROW), "inverse must have size 8 in dimension 0, got shape (3, 2)"),
        (rows_of(X, W, None, ROW), "inverse is that of rows: give both"),
        (
            (*FPROP, None, OFFS),
            "rows needs an a_format whose scales belong to single rows, got 'nvfp4'",
        ),
        (
            (*m_grouped(X, W)[:-1], True),
            "prepacked needs weights with several codes per byte, got b_format=None",
        ),
    ],
    "k_grouped_gemm": [
        ((X, X[:7], OFFS), "b must have size 8 in dimension 0, got shape (7, 32)"),
        ((X, X, OFFS, torch.ones(1)), "alpha must have size 2"),
        ((X, X, OFFS, *[None] * 7, OFFS), "rows must have size 8 in dimension 0, got shape (2,)"),
        (
            (*WGRAD, None, OFFS),
            "rows and inverse need plain operands: blocks of a_format='nvfp4' run along",
        ),
        (
            k_grouped((Q[3][:, :100], *Q[4:])),
            "slot rows must be a positive multiple of 128 (a is a columnwise copy), got 200",
        ),
        (
            k_grouped(Q[3:], Q[3:], offs_from_splits((2, 2, 4))),
            "a must have at least one tile for each of the 3 groups of offs",
        ),
        (k_grouped(Q[3:], X), "b must be quantized if a is, got a_format='nvfp4' alone"),
        (k_grouped(X, Q[3:]), "a must be quantized if b is, got b_format='nvfp4' alone"),
    ],
    "m_grouped_quantize_gemm": [
        (
            change(FUSED, 0, X16[:, :24]),
            "K must be a positive multiple of 16 (the columns of a, beside nvfp4), got 24",
        )
    ],
}
CASES = [
    *[
        (name, arguments, error, text)
        for error, table in ((TypeError, WRONG_TYPES), (ValueError, WRONG_VALUES))
        for name, rows in table.items()
        for arguments, text in rows
    ],
    *[
        (name, (x, *rest), error, f"{label} {text}")
        for name, label, *rest in (
            *(("moe_gather", "x", OFFS), ("moe_activate", "x", "silu"), ("moe_combine", "h", ROW)),
            *(
                ("grouped_amax", "x", OFFS),
                ("grouped_dbias", "dy", OFFS),
                ("grouped_quantize", "x", NVFP4, OFFS),
            ),
        )
        for x, error, text in (
            (X.int(), TypeError, "must be bfloat16 or float16 or float32, got int32"),
            (W, ValueError, "must have 2 dimensions, got shape (2, 16, 32)"),
        )
    ],
    *[
        (
            "compute_offsets",
            (torch.ones(3, dtype=I32), multiplier, dtype),
            ValueError,
            f"multiplier must be in [1, {torch.iinfo(dtype or I32).max}], the offsets' dtype, got {multiplier}",
        )
        for multiplier, dtype in (
            (0, None),
            (-1, I32),
            (1 << 31, None),
            (1 << 40, I32),
            (-1, torch.int64),
        )
    ],
    *offs_of("grouped_amax", (X, OFFS)),
    *offs_of("grouped_dbias", (X, OFFS)),
    *offs_of("grouped_quantize", (X, NVFP4, OFFS)),
    *offs_of("grouped_dequantize", dequantized(Q[:3])),
    *copy_cases("grouped_dequantize", dequantized(Q[:3]), 0, 1, "codes"),
    *copy_cases("grouped_dequantize", dequantized(Q[3:], columnwise=True), 0, 1, "codes", "_t"),
    *[
        (
            "grouped_dequantize",
            dequantized(copy),
            ValueError,
            f"scales must be scales, amax of nvfp4, got {len(copy) - 1} tensors",
        )
        for copy in (Q[:1], Q[:2], Q[:4])
    ],
    *offs_of("m_grouped_gemm", (X, W, OFFS)),
    *offs_of("k_grouped_gemm", (X, X, OFFS)),
    *[
        case
        for name, b in (("m_grouped_gemm", W), ("k_grouped_gemm", X))
        for i in (0, 1)
        for case in operand_cases(name, (X, b, OFFS), i, "ab"[i])
    ],
    *offs_of("m_grouped_gemm", FPROP),
    *[
        case
        for codes, (side, at) in enumerate(M_SCALES.items())
        for arguments, ending in ((FPROP, ""), (DGRAD, "_t" * codes))
        for case in copy_cases("m_grouped_gemm", arguments, codes, at, side, ending)
    ],
    *offs_of("m_grouped_gemm", W4A16),
    *operand_cases("m_grouped_gemm", W4A16, 0, "a"),
    *copy_cases("m_grouped_gemm", W4A16, 1, M_SCALES["b"], "b"),
    *offs_of("m_grouped_quantize_gemm", FUSED),
    *operand_cases("m_grouped_quantize_gemm", FUSED, 0, "a"),
    *copy_cases("m_grouped_quantize_gemm", FUSED, 1, 3, "b"),
    *offs_of("k_grouped_gemm", WGRAD),
    *[
        case
        for codes, (side, at) in enumerate(K_SCALES.items())
        for case in copy_cases("k_grouped_gemm", WGRAD, codes, at, side, "_t")
    ],
    *[
        (name, change(arguments, first + i, None), ValueError, f"{side}_scales and {side}_format")
        for name, arguments, first in (("m_grouped_gemm", FPROP, 7), ("k_grouped_gemm", WGRAD, 5))
        for i, side in enumerate("abab")
    ],
    *[
        (name, change(arguments, at, fmt), ValueError, text)
        for name, arguments, at in FORMATS_AT
        for fmt, text in (
            ("mxfp8", "a and b must have formats of one kind"),
            ("NVFP4", "got 'NVFP4'"),
        )
    ],
    ("grouped_quantize", (X, "NVFP4", OFFS), ValueError, "got 'NVFP4'"),
    ("grouped_dequantize", dequantized(Q[:3], text="NVFP4"), ValueError, "got 'NVFP4'"),
    *[
        (
            name,
            change(arguments, at, arguments[at][:1] if is_short else [*arguments[at], Q[2]]),
            ValueError,
            f"{side}_scales must be {names} of nvfp4, got {1 if is_short else 3} tensors",
        )
        for name, arguments, side, at, names in (
            *(("m_grouped_gemm", FPROP, side, at, "scales, amax") for side, at in M_SCALES.items()),
            ("m_grouped_gemm", DGRAD, "b", 8, "scales_t, amax_t"),
            ("m_grouped_quantize_gemm", FUSED, "b", 3, "scales, amax"),
            *(
                ("k_grouped_gemm", WGRAD, side, at, "scales_t, amax_t")
                for side, at in K_SCALES.items()
            ),
        )
        for is_short in (True, False)
    ],
]


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    """Fail if a check comes after the computation began."""

    def run(self, outputs, **options):
        raise AssertionError(f"{self.name} ran")

    monkeypatch.setattr(PLANS, "_plans", {})
    for module in (dequantize, gemm, quantize, reductions):
        for op in vars(module).values():
            if isinstance(op, type) and issubclass(op, Op):
                monkeypatch.setattr(op, "run_reference", run)


def nothing_to_write(name):
    schema = getattr(ops, f"{name}_out").default._schema
    (out,) = (a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return {out.name: [] if str(out.type) == "List[Tensor]" else torch.zeros(0)}


@pytest.mark.parametrize("suffix", ["", "_out"])
@pytest.mark.parametrize(("name", "arguments", "error", "text"), CASES)
def test_bad_arguments(name, arguments, error, text, suffix):
    outputs = nothing_to_write(name) if suffix else {}
    with pytest.raises(error, match=re.escape(text)):
        getattr(ops, name + suffix)(*arguments, **outputs)


def good_outputs():
    return {
        name: spec.allocate(X.device, True)
        for name, spec in buffers(parse(NVFP4), X.shape, len(OFFS)).items()
    }


def quantize_out(**changes):
    ops.grouped_quantize_out(X, NVFP4, OFFS, out=list((good_outputs() | changes).values()))


def test_good_outputs_pass():
    with pytest.raises(AssertionError, match="ran"):
        quantize_out()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"codes": torch.zeros(8, 16, dtype=torch.int8)},
            TypeError,
            "out[0] must be torch.uint8, got torch.int8",
        ),
        (
            {"codes": torch.zeros(9, 16, dtype=U8)},
            ValueError,
            "out[0] must have shape (8, 16), got (9, 16)",
        ),
        (
            {"scales": torch.zeros(2, 1, 513, dtype=U8)},
            ValueError,
            "out[1] must have shape (2, 1, 512), got (2, 1, 513)",
        ),
        ({"amax": torch.zeros(8)}, ValueError, "out[2] must have shape (2,), got (8,)"),
        (
            {"codes": torch.zeros(16, 8, dtype=U8).T},
            ValueError,
            "out[0] must be row-major with strides (16, 1), got (1, 8)",
        ),
        (
            {"codes": torch.zeros(1, 16, dtype=U8).expand(8, 16)},
            ValueError,
            "out[0] must be row-major with strides (16, 1), got (0, 1)",
        ),
        ({"amax": torch.zeros(2, device="meta")}, ValueError, "out[2] must be on cpu, got meta"),
    ],
)
def test_bad_outputs(changes, error, text):
    with pytest.raises(error, match=re.escape(f"grouped_quantize_out: {text}")):
        quantize_out(**changes)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_a_list_of_outputs_has_the_length_of_what_is_asked(count):
    given = [*good_outputs().values(), torch.zeros(0)][:count]
    text = "out must be 3 tensors, of shapes (8, 16), (2, 1, 512), (2,); got"
    with pytest.raises(ValueError, match=re.escape(f"grouped_quantize_out: {text} {count}")):
        ops.grouped_quantize_out(X, NVFP4, OFFS, out=given)


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [
        ("m_grouped_gemm", (X, W, OFFS), (8, 16)),
        ("k_grouped_gemm", (X, X, OFFS), (2, 32, 32)),
        ("m_grouped_gemm", m_grouped(Q[:3], V[:3], OFFS, None, None, False, F32), (8, 16)),
        ("m_grouped_gemm", m_grouped(X16, V[:3], OFFS, None, None, False, F32), (8, 16)),
        ("m_grouped_quantize_gemm", (*FUSED, None, None, False, F32), (8, 16)),
        ("k_grouped_gemm", k_grouped(Q[3:], Q[3:], OFFS, None, F32), (2, 32, 32)),
        ("grouped_dequantize", dequantized(Q[:3]), (8, 32)),
    ],
    ids=["plain", "plain k", "nvfp4", "w4a16", "quantizing", "nvfp4 k", "dequantize"],
)
def test_bad_result_buffers(name, arguments, shape):
    call = getattr(ops, f"{name}_out")
    with pytest.raises(RuntimeError, match="missing value for argument 'out'"):
        call(*arguments)
    with pytest.raises(TypeError, match=r"out must be torch.float32, got torch.bfloat16"):
        call(*arguments, out=torch.zeros(shape, dtype=BF16))
    with pytest.raises(ValueError, match=re.escape(f"out must have shape {shape}")):
        call(*arguments, out=torch.zeros(*shape, 1))
    with pytest.raises(ValueError, match="out must be row-major with strides"):
        call(*arguments, out=torch.zeros(*shape[:-1], shape[-1] + 1)[..., :-1])


@pytest.mark.parametrize("call", [ops.m_grouped_gemm, cute_kernels.ops.m_grouped_gemm])
def test_meta_tensors_of_one_device_are_fine(call):
    y = call(X.to("meta"), W.to("meta"), META_OFFS)
    assert y.device.type == "meta" and y.shape == (8, 16)


def test_a_dtype_by_name_is_refused_by_the_schema():
    with pytest.raises(RuntimeError):
        ops.m_grouped_gemm(sample(8, 32), sample(2, 16, 32), OFFS, out_dtype="float32")
