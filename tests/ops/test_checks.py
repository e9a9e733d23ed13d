"""Errors of the ops: raised before any work, naming the argument, its value and the rule."""

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


def replace_argument(arguments, index, value):
    """Return the arguments with another value at ``index``.

    A pair of indices selects an element of a list.
    """
    if isinstance(index, tuple):
        index, inner = index
        value = list(replace_argument(arguments[index], inner, value))
    return (*arguments[:index], value, *arguments[index + 1 :])


def offs_cases(name, arguments):
    index = [field.name for field in getattr(ops, name).default._schema.arguments].index("offs")
    return [
        (name, replace_argument(arguments, index, offs), *error_and_message)
        for offs, *error_and_message in OFFS_RULES
    ]


def operand_cases(name, arguments, index, label):
    """Return cases with a wrong dtype, shape and device of one operand."""
    valid = arguments[index[0]][index[1]] if isinstance(index, tuple) else arguments[index]
    other_dtype = torch.int16 if valid.dtype != torch.int16 else U8
    return [
        (
            name,
            replace_argument(arguments, index, valid.to(other_dtype)),
            TypeError,
            f"{label} must be",
        ),
        (name, replace_argument(arguments, index, valid[None]), ValueError, f"{label} must have"),
        (
            name,
            replace_argument(arguments, index, valid.to("meta")),
            ValueError,
            "must be on the device of",
        ),
    ]


def copy_cases(name, arguments, codes, scales, label, ending=""):
    """Return such cases for all tensors of a quantized copy."""
    lists = "scales" if label == "codes" else f"{label}_scales"
    scale_cases = [
        ((scales, i), f"{lists}[{i}], the {name_of_scale}{ending} of nvfp4,")
        for i, name_of_scale in enumerate(("scales", "amax"))
    ]
    return [
        case
        for index, operand in ((codes, label), *scale_cases)
        for case in operand_cases(name, arguments, index, operand)
    ]


def m_grouped(a, b=tuple(V[:3]), offs=OFFS, *options, **formats):
    return m_grouped_arguments(a, b, offs, *options, **formats)


def row_arguments(a, b, rows, inverse=None):
    return (a, b, OFFS, None, None, False, *[None] * 5, False, None, rows, inverse)


def k_grouped(a, b=tuple(Q[3:]), offs=OFFS, *options):
    return k_grouped_arguments(a, b, offs, *options)


def dequantizing(copy, rows=8, dtype=F32, text=NVFP4, offs=OFFS, columnwise=False):
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
#: Positions of the lists of scales in the arguments of ``m_grouped_gemm`` and ``k_grouped_gemm``.
M_SCALES, K_SCALES = {"a": 7, "b": 8}, {"a": 5, "b": 6}
#: Positions of formats in the arguments of products.
FORMAT_POSITIONS = [("m_grouped_gemm", FPROP, 10), ("m_grouped_quantize_gemm", FUSED, 5)]
FORMAT_POSITIONS += [("k_grouped_gemm", WGRAD, index) for index in (7, 8)]

#: Arguments that raise a TypeError, and its message, by op.
WRONG_TYPES = {
    "compute_offsets": [((torch.ones(3),), "splits must be int32 or int64, got float32")],
    "compute_routing": [
        ((X, 4), "expert_ids must be int32 or int64, got float32"),
        ((ROW, 4, ROW[:, 0].long()), "expert_map must be int32, got int64"),
    ],
    "moe_route": [
        ((X.half(), None, None, 2), "logits must be float32, got float16"),
        ((X, X.half(), None, 2), "selection_bias must be float32, got float16"),
    ],
    "moe_route_gradient": [((X, None, OFFS, X), "ids must be int64, got int32")],
    "moe_gather": [((X, OFFS.long()), "index must be int32, got int64")],
    "moe_combine": [
        (
            (X, ROW, ROW.bfloat16()),
            "weight must be float32, got bfloat16: moe_combine mult",
        )
    ],
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
        (dequantizing(Q[:3], dtype=I32), "dtype must be bfloat16 or float16 or float32, got int32")
    ],
    "m_grouped_gemm": [
        ((X, W.bfloat16(), OFFS), "b must be float32, got bfloat16"),
        ((X, W, OFFS, None, torch.ones(2).bfloat16()), "alpha must be float32, got bfloat16"),
        (
            (X, W, OFFS, None, None, False, torch.float64),
            "out_dtype must be bfloat16 or float16 or float32, got float64",
        ),
        (m_grouped(X), "a must be bfloat16 or float16, got float32"),
        (row_arguments(X, W, OFFS.long()), "rows must be int32, got int64"),
    ],
    "k_grouped_gemm": [((X, X.half(), OFFS), "b must be float32, got float16")],
}
#: Arguments that raise a ValueError, and its message, by op.
WRONG_VALUES = {
    "compute_offsets": [
        ((torch.ones(3, 1, dtype=I32),), "splits must have 1 dimensions, got shape (3, 1)")
    ],
    "compute_routing": [
        ((OFFS, 4), "expert_ids must have 2 dimensions, got shape (2,)"),
        ((ROW, 0), "num_experts must be positive, got 0"),
        ((ROW, 4, ROW), "expert_map must have 1 dimensions, got shape (3, 2)"),
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
        (dequantizing(Q[:3], -1), "rows must be >= 0, got -1"),
        (dequantizing(Q[:3], 9), "codes must have size 9 in dimension 0, got shape (8, 16)"),
        (
            dequantizing(Q[:3], text=ROWS),
            "scales[1], the amax of nvfp4:row_scaled, must have size 8 in dimension 0",
        ),
        (
            dequantizing(Q[3:], 300, columnwise=True),
            "codes must have size 256 in dimension 1, got shape (32, 128)",
        ),
        (
            dequantizing((Q[3][:8], *Q[4:]), columnwise=True),
            "K must be a positive multiple of 16 (codes are of nvfp4), got 8",
        ),
        (
            dequantizing([t[:0] for t in U], 5, offs=None),
            "codes must have at least one group, got shape (0, 5, 16)",
        ),
        (dequantizing(Q[:3], offs=None), "codes must have 3 dimensions, got shape (8, 16)"),
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
        (row_arguments(X, W, ROW), "rows must have 1 dimensions, got shape (3, 2)"),
        (
            row_arguments(X, W, OFFS, ROW),
            "inverse must have size 8 in dimension 0, got shape (3, 2)",
        ),
        (row_arguments(X, W, None, ROW), "inverse is the inverse of rows: pass both"),
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
            replace_argument(FUSED, 0, X16[:, :24]),
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
        (name, (x, *more), error, f"{label} {text}")
        for name, label, *more in (
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
            f"multiplier must be in [1, {torch.iinfo(dtype or I32).max}], the offsets' dtype, "
            f"got {multiplier}",
        )
        for multiplier, dtype in (
            (0, None),
            (-1, I32),
            (1 << 31, None),
            (1 << 40, I32),
            (-1, torch.int64),
        )
    ],
    *offs_cases("grouped_amax", (X, OFFS)),
    *offs_cases("grouped_dbias", (X, OFFS)),
    *offs_cases("grouped_quantize", (X, NVFP4, OFFS)),
    *offs_cases("grouped_dequantize", dequantizing(Q[:3])),
    *copy_cases("grouped_dequantize", dequantizing(Q[:3]), 0, 1, "codes"),
    *copy_cases("grouped_dequantize", dequantizing(Q[3:], columnwise=True), 0, 1, "codes", "_t"),
    *[
        (
            "grouped_dequantize",
            dequantizing(copy),
            ValueError,
            f"scales must be scales, amax of nvfp4, got {len(copy) - 1} tensors",
        )
        for copy in (Q[:1], Q[:2], Q[:4])
    ],
    *offs_cases("m_grouped_gemm", (X, W, OFFS)),
    *offs_cases("k_grouped_gemm", (X, X, OFFS)),
    *[
        case
        for name, b in (("m_grouped_gemm", W), ("k_grouped_gemm", X))
        for i in (0, 1)
        for case in operand_cases(name, (X, b, OFFS), i, "ab"[i])
    ],
    *offs_cases("m_grouped_gemm", FPROP),
    *[
        case
        for codes, (side, index) in enumerate(M_SCALES.items())
        for arguments, ending in ((FPROP, ""), (DGRAD, "_t" * codes))
        for case in copy_cases("m_grouped_gemm", arguments, codes, index, side, ending)
    ],
    *offs_cases("m_grouped_gemm", W4A16),
    *operand_cases("m_grouped_gemm", W4A16, 0, "a"),
    *copy_cases("m_grouped_gemm", W4A16, 1, M_SCALES["b"], "b"),
    *offs_cases("m_grouped_quantize_gemm", FUSED),
    *operand_cases("m_grouped_quantize_gemm", FUSED, 0, "a"),
    *copy_cases("m_grouped_quantize_gemm", FUSED, 1, 3, "b"),
    *offs_cases("k_grouped_gemm", WGRAD),
    *[
        case
        for codes, (side, index) in enumerate(K_SCALES.items())
        for case in copy_cases("k_grouped_gemm", WGRAD, codes, index, side, "_t")
    ],
    *[
        (
            name,
            replace_argument(arguments, start + i, None),
            ValueError,
            f"{side}_scales and {side}_format",
        )
        for name, arguments, start in (("m_grouped_gemm", FPROP, 7), ("k_grouped_gemm", WGRAD, 5))
        for i, side in enumerate("abab")
    ],
    *[
        (name, replace_argument(arguments, index, fmt), ValueError, text)
        for name, arguments, index in FORMAT_POSITIONS
        for fmt, text in (
            ("mxfp8", "a and b must have formats of one kind"),
            ("NVFP4", "got 'NVFP4'"),
        )
    ],
    ("grouped_quantize", (X, "NVFP4", OFFS), ValueError, "got 'NVFP4'"),
    ("grouped_dequantize", dequantizing(Q[:3], text="NVFP4"), ValueError, "got 'NVFP4'"),
    *[
        (
            name,
            replace_argument(
                arguments, index, arguments[index][:1] if is_short else [*arguments[index], Q[2]]
            ),
            ValueError,
            f"{side}_scales must be {names} of nvfp4, got {1 if is_short else 3} tensors",
        )
        for name, arguments, side, index, names in (
            *(
                ("m_grouped_gemm", FPROP, side, index, "scales, amax")
                for side, index in M_SCALES.items()
            ),
            ("m_grouped_gemm", DGRAD, "b", 8, "scales_t, amax_t"),
            ("m_grouped_quantize_gemm", FUSED, "b", 3, "scales, amax"),
            *(
                ("k_grouped_gemm", WGRAD, side, index, "scales_t, amax_t")
                for side, index in K_SCALES.items()
            ),
        )
        for is_short in (True, False)
    ],
]


@pytest.fixture(autouse=True)
def forbid_work(monkeypatch):
    """Fail if the computation begins before a check."""

    def run(self, outputs, **options):
        raise AssertionError(f"{self.name} ran")

    monkeypatch.setattr(PLANS, "_plans", {})
    for module in (dequantize, gemm, quantize, reductions):
        for op in vars(module).values():
            if isinstance(op, type) and issubclass(op, Op):
                monkeypatch.setattr(op, "run_reference", run)


def empty_outputs(name):
    schema = getattr(ops, f"{name}_out").default._schema
    (out,) = (a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return {out.name: [] if str(out.type) == "List[Tensor]" else torch.zeros(0)}


@pytest.mark.parametrize("suffix", ["", "_out"])
@pytest.mark.parametrize(("name", "arguments", "error", "text"), CASES)
def test_invalid_arguments_raise(name, arguments, error, text, suffix):
    outputs = empty_outputs(name) if suffix else {}
    with pytest.raises(error, match=re.escape(text)):
        getattr(ops, name + suffix)(*arguments, **outputs)


def valid_outputs():
    return {
        name: spec.allocate(X.device, True)
        for name, spec in buffers(parse(NVFP4), X.shape, len(OFFS)).items()
    }


def quantize_out(**changes):
    ops.grouped_quantize_out(X, NVFP4, OFFS, out=list((valid_outputs() | changes).values()))


def test_valid_outputs_pass_the_checks():
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
def test_invalid_outputs_raise(changes, error, text):
    with pytest.raises(error, match=re.escape(f"grouped_quantize_out: {text}")):
        quantize_out(**changes)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_the_number_of_outputs_is_checked(count):
    outputs = [*valid_outputs().values(), torch.zeros(0)][:count]
    text = "out must be 3 tensors, of shapes (8, 16), (2, 1, 512), (2,); got"
    with pytest.raises(ValueError, match=re.escape(f"grouped_quantize_out: {text} {count}")):
        ops.grouped_quantize_out(X, NVFP4, OFFS, out=outputs)


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [
        ("m_grouped_gemm", (X, W, OFFS), (8, 16)),
        ("k_grouped_gemm", (X, X, OFFS), (2, 32, 32)),
        ("m_grouped_gemm", m_grouped(Q[:3], V[:3], OFFS, None, None, False, F32), (8, 16)),
        ("m_grouped_gemm", m_grouped(X16, V[:3], OFFS, None, None, False, F32), (8, 16)),
        ("m_grouped_quantize_gemm", (*FUSED, None, None, False, F32), (8, 16)),
        ("k_grouped_gemm", k_grouped(Q[3:], Q[3:], OFFS, None, F32), (2, 32, 32)),
        ("grouped_dequantize", dequantizing(Q[:3]), (8, 32)),
    ],
    ids=["plain", "plain k", "nvfp4", "w4a16", "quantizing", "nvfp4 k", "dequantize"],
)
def test_invalid_result_buffers_raise(name, arguments, shape):
    """Check that ``out`` buffers of a wrong shape, dtype or layout raise."""
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
def test_meta_tensors_of_one_device_are_accepted(call):
    y = call(X.to("meta"), W.to("meta"), META_OFFS)
    assert y.device.type == "meta" and y.shape == (8, 16)


def test_the_schema_refuses_a_dtype_by_name():
    with pytest.raises(RuntimeError):
        ops.m_grouped_gemm(sample(8, 32), sample(2, 16, 32), OFFS, out_dtype="float32")
