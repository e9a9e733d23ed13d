"""Every refusal: raised before any work, naming the argument, its value and the rule."""

import re

import pytest
import torch

from cute_kernels.ops import gemm, quantize, registry
from cute_kernels.runtime.plan import PlanCache
from tests.helpers import offsets, ops, sample

I32, F32, U8, BF16 = torch.int32, torch.float32, torch.uint8, torch.bfloat16
OFFS = offsets((5, 3))
X = torch.ones(8, 32)
W = torch.ones(2, 16, 32)
META_OFFS = OFFS.to("meta")
Q = ops.grouped_quantize_nvfp4(X, OFFS, columnwise=True)
R = ops.grouped_quantize_nvfp4(X, OFFS, row_scaled=True)
V = ops.grouped_quantize_nvfp4(W, columnwise=True)
U = ops.grouped_quantize_nvfp4(torch.ones(2, 5, 32))

OFFS_RULES = [
    (OFFS.long(), TypeError, "offs must be int32, got int64"),
    (OFFS.float(), TypeError, "offs must be int32, got float32"),
    (OFFS[None], ValueError, "offs must have 1 dimensions, got shape (1, 2)"),
    (OFFS[:0], ValueError, "offs must have at least one entry, got shape (0,)"),
    (META_OFFS, ValueError, "offs must be on the device of"),
]


def offs_cases(name, *before, after=()):
    return [(name, (*before, offs, *after), *rest) for offs, *rest in OFFS_RULES]


def change(arguments, index, value):
    return (*arguments[:index], value, *arguments[index + 1 :])


def operand_cases(name, arguments, index, label, fine):
    """Wrong dtype, rank, shape and device of one tensor argument."""
    other = torch.int16 if fine.dtype != torch.int16 else U8
    return [
        (name, change(arguments, index, fine.to(other)), TypeError, f"{label} must be"),
        (name, change(arguments, index, fine[None]), ValueError, f"{label} must have"),
        (name, change(arguments, index, fine.to("meta")), ValueError, "must be on the device of"),
    ]


FPROP = (*Q[:3], *V[:3], OFFS)
DGRAD = (*Q[:3], *ops.grouped_quantize_nvfp4(W.mT, columnwise=True)[3:], OFFS)
WGRAD = (*Q[3:], *Q[3:], OFFS)
W4A16 = (X.bfloat16(), *V[:3], OFFS)

CASES = [
    # compute_offsets
    ("compute_offsets", (torch.ones(3),), TypeError, "splits must be int32 or int64, got float32"),
    (
        "compute_offsets",
        (torch.ones(3, 1, dtype=I32),),
        ValueError,
        "splits must have 1 dimensions, got shape (3, 1)",
    ),
    (
        "compute_offsets",
        (torch.ones(3, dtype=I32), 1, F32),
        TypeError,
        "dtype must be int32 or int64, got float32",
    ),
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
    # amax, dbias
    (
        "grouped_amax",
        (X.int(), OFFS),
        TypeError,
        "x must be bfloat16 or float16 or float32, got int",
    ),
    ("grouped_amax", (X.double(), OFFS), TypeError, "x must be bfloat16 or float16 or float32"),
    ("grouped_amax", (X,), ValueError, "x must have 3 dimensions, got shape (8, 32)"),
    ("grouped_amax", (W, OFFS), ValueError, "x must have 2 dimensions, got shape (2, 16, 32)"),
    ("grouped_amax", (W[:0],), ValueError, "x must have at least one group, got shape (0, 16, 32)"),
    *offs_cases("grouped_amax", X),
    ("grouped_dbias", (X.int(), OFFS), TypeError, "dy must be"),
    ("grouped_dbias", (W, OFFS), ValueError, "dy must have 2 dimensions, got shape (2, 16, 32)"),
    *offs_cases("grouped_dbias", X),
    # quantize
    *offs_cases("grouped_quantize_nvfp4", X),
    ("grouped_quantize_nvfp4", (X.int(), OFFS), TypeError, "x must be"),
    ("grouped_quantize_nvfp4", (X,), ValueError, "x must have 3 dimensions, got shape (8, 32)"),
    (
        "grouped_quantize_nvfp4",
        (X[0], OFFS),
        ValueError,
        "x must have 2 dimensions, got shape (32,)",
    ),
    ("grouped_quantize_nvfp4", (W[:0],), ValueError, "x must have at least one group"),
    *[
        (
            "grouped_quantize_nvfp4",
            (torch.ones(8, cols), OFFS),
            ValueError,
            f"K must be a positive multiple of 16 (blocks of 16, x is (..., K)), got {cols}",
        )
        for cols in (0, 1, 8, 24, 31)
    ],
    (
        "grouped_quantize_nvfp4",
        (X, OFFS, None, True, True),
        ValueError,
        "row_scaled needs block=(1, 16), got block=(16, 16)",
    ),
    (
        "grouped_quantize_nvfp4",
        (X, OFFS, None, False, False, False, False),
        ValueError,
        "rowwise and columnwise are both False",
    ),
    (
        "grouped_quantize_nvfp4",
        (X, OFFS, torch.ones(2), True),
        ValueError,
        "amax is the second level of groups",
    ),
    (
        "grouped_quantize_nvfp4",
        (X, OFFS, torch.ones(3)),
        ValueError,
        "amax must have size 2 in dimension 0, got shape (3,)",
    ),
    (
        "grouped_quantize_nvfp4",
        (X, OFFS, torch.ones(2).double()),
        TypeError,
        "amax must be float32, got float64",
    ),
    (
        "grouped_quantize_nvfp4",
        (X, OFFS, torch.ones(2, device="meta")),
        ValueError,
        "amax must be on the device of x (cpu), got meta",
    ),
    # dequantize
    *offs_cases("grouped_dequantize_nvfp4", *Q[:3], after=(8, F32)),
    *operand_cases("grouped_dequantize_nvfp4", (*Q[:3], OFFS, 8, F32), 0, "codes", Q[0]),
    *operand_cases("grouped_dequantize_nvfp4", (*Q[:3], OFFS, 8, F32), 1, "scales", Q[1]),
    *operand_cases("grouped_dequantize_nvfp4", (*Q[:3], OFFS, 8, F32), 2, "amax", Q[2]),
    (
        "grouped_dequantize_nvfp4",
        (*Q[:3], OFFS, 8, I32),
        TypeError,
        "dtype must be bfloat16 or float16 or float32, got int32",
    ),
    (
        "grouped_dequantize_nvfp4",
        (*Q[:3], OFFS, -1, F32),
        ValueError,
        "rows must be >= 0, got -1",
    ),
    (
        "grouped_dequantize_nvfp4",
        (*Q[:3], OFFS, 9, F32),
        ValueError,
        "codes must have size 9 in dimension 0, got shape (8, 16)",
    ),
    (
        "grouped_dequantize_nvfp4",
        (*Q[:3], OFFS, 8, F32, True),
        ValueError,
        "amax must have size 8 in dimension 0, got shape (2,)",
    ),
    (
        "grouped_dequantize_nvfp4",
        (*R[:3], OFFS, 8, F32),
        ValueError,
        "amax must have size 2 in dimension 0, got shape (8,)",
    ),
    (
        "grouped_dequantize_nvfp4",
        (*Q[3:], OFFS, 8, F32, True, True),
        ValueError,
        "row_scaled belongs to the rowwise copy",
    ),
    (
        "grouped_dequantize_nvfp4",
        (*Q[3:], OFFS, 300, F32, False, True),
        ValueError,
        "codes must have size 256 in dimension 1, got shape (32, 128)",
    ),
    (
        "grouped_dequantize_nvfp4",
        (Q[0][:, :4], *Q[1:3], OFFS, 8, F32),
        ValueError,
        "K must be a positive multiple of 16 (blocks of 16, codes are (..., K / 2)), got 8",
    ),
    (
        "grouped_dequantize_nvfp4",
        (Q[3][:8], *Q[4:], OFFS, 8, F32, False, True),
        ValueError,
        "K must be a positive multiple of 16 (blocks of 16, codes are (..., K, slots / 2)), got 8",
    ),
    (
        "grouped_dequantize_nvfp4",
        (U[0][:0], U[1][:0], U[2][:0], None, 5, F32),
        ValueError,
        "codes must have at least one group, got shape (0, 5, 16)",
    ),
    (
        "grouped_dequantize_nvfp4",
        (*Q[:3], None, 8, F32),
        ValueError,
        "codes must have 3 dimensions, got shape (8, 16)",
    ),
    # plain GEMMs
    *offs_cases("m_grouped_gemm", X, W),
    *operand_cases("m_grouped_gemm", (X, W, OFFS), 0, "a", X),
    *operand_cases("m_grouped_gemm", (X, W, OFFS), 1, "b", W),
    ("m_grouped_gemm", (X, W.bfloat16(), OFFS), TypeError, "b must be float32, got bfloat16"),
    ("m_grouped_gemm", (X, W[0], OFFS), ValueError, "b must have 3 dimensions, got shape (16, 32)"),
    ("m_grouped_gemm", (X, torch.tensor(1.0), OFFS), ValueError, "b must have 3 dimensions"),
    ("m_grouped_gemm", (X, W[:, :, :31], OFFS), ValueError, "b must have size 32 in dimension 2"),
    (
        "m_grouped_gemm",
        (X, W, OFFS, None, None, True),
        ValueError,
        "b must have size 32 in dimension 1, got shape (2, 16, 32)",
    ),
    (
        "m_grouped_gemm",
        (X, W, OFFS[:1]),
        ValueError,
        "offs must have one end row for each of the 2 groups, got 1 entries",
    ),
    (
        "m_grouped_gemm",
        (X, W, OFFS, torch.ones(2, 17)),
        ValueError,
        "bias must have size 16 in dimension 1, got shape (2, 17)",
    ),
    ("m_grouped_gemm", (X, W, OFFS, torch.ones(2, 16).int()), TypeError, "bias must be"),
    (
        "m_grouped_gemm",
        (X, W, OFFS, torch.ones(2, 16, device="meta")),
        ValueError,
        "bias must be on the device of a (cpu), got meta",
    ),
    (
        "m_grouped_gemm",
        (X, W, OFFS, None, torch.ones(3)),
        ValueError,
        "alpha must have size 2 in dimension 0, got shape (3,)",
    ),
    (
        "m_grouped_gemm",
        (X, W, OFFS, None, torch.ones(2).bfloat16()),
        TypeError,
        "alpha must be float32, got bfloat16",
    ),
    (
        "m_grouped_gemm",
        (X, W, OFFS, None, None, False, torch.float64),
        TypeError,
        "out_dtype must be bfloat16 or float16 or float32, got float64",
    ),
    *offs_cases("k_grouped_gemm", X, X),
    *operand_cases("k_grouped_gemm", (X, X, OFFS), 0, "a", X),
    *operand_cases("k_grouped_gemm", (X, X, OFFS), 1, "b", X),
    (
        "k_grouped_gemm",
        (X, X[:7], OFFS),
        ValueError,
        "b must have size 8 in dimension 0, got shape (7, 32)",
    ),
    ("k_grouped_gemm", (X, X.half(), OFFS), TypeError, "b must be float32, got float16"),
    ("k_grouped_gemm", (X, X, OFFS, torch.ones(1)), ValueError, "alpha must have size 2"),
    (
        "k_grouped_gemm",
        (X, X, OFFS, None, torch.int32),
        TypeError,
        "out_dtype must be bfloat16 or float16 or float32, got int32",
    ),
    # quantized GEMMs
    *offs_cases("m_grouped_gemm_nvfp4", *FPROP[:6]),
    *[
        case
        for i, label in enumerate(
            ("a_codes", "a_scales", "a_amax", "b_codes", "b_scales", "b_amax")
        )
        for arguments in (FPROP, DGRAD)
        for case in operand_cases("m_grouped_gemm_nvfp4", arguments, i, label, arguments[i])
    ],
    (
        "m_grouped_gemm_nvfp4",
        (Q[0][:, :4], *FPROP[1:]),
        ValueError,
        "K must be a positive multiple of 16 (blocks of 16 along the columns of a_codes), got 8",
    ),
    (
        "m_grouped_gemm_nvfp4",
        (*FPROP[:3], V[0][..., :8], *FPROP[4:]),
        ValueError,
        "b_codes must be blocked along the K = 32 of a_codes, got shape (2, 16, 8)",
    ),
    (
        "m_grouped_gemm_nvfp4",
        (Q[0][:7], *FPROP[1:], None, None, True),
        ValueError,
        "a_amax must have size 7 in dimension 0, got shape (2,)",
    ),
    (
        "m_grouped_gemm_nvfp4",
        (*R[:3], *FPROP[3:]),
        ValueError,
        "a_amax must have size 2 in dimension 0, got shape (8,)",
    ),
    (
        "m_grouped_gemm_nvfp4",
        (*FPROP[:6], offsets((5, 2, 1))),
        ValueError,
        "offs must have one end row for each of the 2 groups, got 3 entries",
    ),
    ("m_grouped_gemm_nvfp4", (*FPROP, torch.ones(2, 15)), ValueError, "bias must have size 16"),
    ("m_grouped_gemm_nvfp4", (*FPROP, None, torch.ones(3)), ValueError, "alpha must have size 2"),
    (
        "m_grouped_gemm_nvfp4",
        (*FPROP, None, None, False, U8),
        TypeError,
        "out_dtype must be bfloat16 or float16 or float32, got uint8",
    ),
    *offs_cases("m_grouped_gemm_w4a16", *W4A16[:4]),
    *[
        case
        for i, label in enumerate(("a", "b_codes", "b_scales", "b_amax"))
        for case in operand_cases("m_grouped_gemm_w4a16", W4A16, i, label, W4A16[i])
    ],
    (
        "m_grouped_gemm_w4a16",
        (W4A16[0].float(), *W4A16[1:]),
        TypeError,
        "a must be bfloat16 or float16, got float32",
    ),
    (
        "m_grouped_gemm_w4a16",
        (W4A16[0][:, :16], *W4A16[1:]),
        ValueError,
        "b_codes must be blocked along the K = 16 of a, got shape (2, 16, 16)",
    ),
    ("m_grouped_gemm_w4a16", (*W4A16, torch.ones(2, 15)), ValueError, "bias must have size 16"),
    *offs_cases("m_grouped_quantize_gemm_nvfp4", *W4A16[:4]),
    *[
        case
        for i, label in enumerate(("a", "b_codes", "b_scales", "b_amax"))
        for case in operand_cases("m_grouped_quantize_gemm_nvfp4", W4A16, i, label, W4A16[i])
    ],
    (
        "m_grouped_quantize_gemm_nvfp4",
        (W4A16[0][:, :24], *W4A16[1:]),
        ValueError,
        "K must be a positive multiple of 16 (blocks of 16 along the columns of a), got 24",
    ),
    *offs_cases("k_grouped_gemm_nvfp4", *WGRAD[:6]),
    *[
        case
        for i, label in enumerate(
            ("a_codes_t", "a_scales_t", "a_amax_t", "b_codes_t", "b_scales_t", "b_amax_t")
        )
        for case in operand_cases("k_grouped_gemm_nvfp4", WGRAD, i, label, WGRAD[i])
    ],
    (
        "k_grouped_gemm_nvfp4",
        (Q[3][:, :100], *WGRAD[1:]),
        ValueError,
        "slot bytes must be a positive multiple of 64 (a_codes_t is (N, 64 * tiles)), got 100",
    ),
    (
        "k_grouped_gemm_nvfp4",
        (*WGRAD[:6], offsets((2, 2, 4))),
        ValueError,
        "a_codes_t must have at least one tile for each of the 3 groups of offs",
    ),
    (
        "k_grouped_gemm_nvfp4",
        (*WGRAD[:3], Q[3][:, :64], *WGRAD[4:]),
        ValueError,
        "b_codes_t must have size 128 in dimension 1, got shape (32, 64)",
    ),
    ("k_grouped_gemm_nvfp4", (*WGRAD, torch.ones(3)), ValueError, "alpha must have size 2"),
    (
        "k_grouped_gemm_nvfp4",
        (*WGRAD, None, torch.int64),
        TypeError,
        "out_dtype must be bfloat16 or float16 or float32, got int64",
    ),
]


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    """Fail if a check comes after the computation began."""

    def run(self, outputs, **options):
        raise AssertionError(f"{self.name} ran")

    monkeypatch.setattr(registry, "_plans", PlanCache())
    for module in (gemm, quantize):
        for op in vars(module).values():
            if isinstance(op, type) and issubclass(op, registry.Op):
                monkeypatch.setattr(op, "run_reference", run)


@pytest.mark.parametrize("suffix", ["", "_out"])
@pytest.mark.parametrize(("name", "arguments", "error", "text"), CASES)
def test_bad_arguments(name, arguments, error, text, suffix):
    with pytest.raises(error, match=re.escape(text)):
        getattr(ops, name + suffix)(*arguments)


def quantize_out(**changes):
    outputs = {
        "out_codes": torch.zeros(8, 16, dtype=U8),
        "out_scales": torch.zeros(2, 1, 512, dtype=U8),
        "out_amax": torch.zeros(2),
        **changes,
    }
    ops.grouped_quantize_nvfp4_out(X, OFFS, **outputs)


def test_good_outputs_pass():
    with pytest.raises(AssertionError, match="ran"):
        quantize_out()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"out_codes": None}, ValueError, "out_codes is missing, of shape (8, 16)"),
        ({"out_scales": None}, ValueError, "out_scales is missing, of shape (2, 1, 512)"),
        ({"out_amax": None}, ValueError, "out_amax is missing, of shape (2,)"),
        ({"out_codes_t": torch.zeros(0)}, ValueError, "out_codes_t is given but was not asked for"),
        (
            {"out_codes": torch.zeros(8, 16, dtype=torch.int8)},
            TypeError,
            "out_codes must be torch.uint8, got torch.int8",
        ),
        (
            {"out_codes": torch.zeros(9, 16, dtype=U8)},
            ValueError,
            "out_codes must have shape (8, 16), got (9, 16)",
        ),
        (
            {"out_amax": torch.zeros(8)},
            ValueError,
            "out_amax must have shape (2,), got (8,)",
        ),
        (
            {"out_codes": torch.zeros(16, 8, dtype=U8).T},
            ValueError,
            "out_codes must be row-major with strides (16, 1), got (1, 8)",
        ),
        (
            {"out_codes": torch.zeros(8, 32, dtype=U8)[:, ::2]},
            ValueError,
            "out_codes must be row-major with strides (16, 1), got (32, 2)",
        ),
        (
            {"out_codes": torch.zeros(1, 16, dtype=U8).expand(8, 16)},
            ValueError,
            "out_codes must be row-major with strides (16, 1), got (0, 1)",
        ),
        (
            {"out_codes": torch.zeros(128, dtype=U8).as_strided((8, 16), (8, 1))},
            ValueError,
            "out_codes must be row-major with strides (16, 1), got (8, 1)",
        ),
        (
            {"out_scales": torch.zeros(2, 1, 1024, dtype=U8)[..., ::2]},
            ValueError,
            "out_scales must be row-major with strides (512, 512, 1)",
        ),
        (
            {"out_amax": torch.zeros(2, device="meta")},
            ValueError,
            "out_amax must be on cpu, got meta",
        ),
    ],
)
def test_bad_outputs(changes, error, text):
    with pytest.raises(error, match=re.escape(f"grouped_quantize_nvfp4_out: {text}")):
        quantize_out(**changes)


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [
        ("m_grouped_gemm", (X, W, OFFS), (8, 16)),
        ("k_grouped_gemm", (X, X, OFFS), (2, 32, 32)),
        ("m_grouped_gemm_nvfp4", (*FPROP, None, None, False, F32), (8, 16)),
        ("m_grouped_gemm_w4a16", (*W4A16, None, None, F32), (8, 16)),
        ("m_grouped_quantize_gemm_nvfp4", (*W4A16, None, None, False, F32), (8, 16)),
        ("k_grouped_gemm_nvfp4", (*WGRAD, None, F32), (2, 32, 32)),
        ("grouped_dequantize_nvfp4", (*Q[:3], OFFS, 8, F32), (8, 32)),
    ],
)
def test_bad_result_buffers(name, arguments, shape):
    call = getattr(ops, f"{name}_out")
    with pytest.raises(ValueError, match=re.escape(f"out is missing, of shape {shape}")):
        call(*arguments)
    with pytest.raises(TypeError, match=r"out must be torch.float32, got torch.bfloat16"):
        call(*arguments, out=torch.zeros(shape, dtype=BF16))
    with pytest.raises(ValueError, match=re.escape(f"out must have shape {shape}")):
        call(*arguments, out=torch.zeros(*shape, 1))
    with pytest.raises(ValueError, match="out must be row-major with strides"):
        call(*arguments, out=torch.zeros(*shape[:-1], shape[-1] + 1)[..., :-1])


def test_meta_tensors_of_one_device_are_fine():
    y = ops.m_grouped_gemm(X.to("meta"), W.to("meta"), META_OFFS)
    assert y.device.type == "meta" and y.shape == (8, 16)


def test_a_dtype_by_name_is_refused_by_the_schema():
    with pytest.raises(RuntimeError):
        ops.m_grouped_gemm(sample(8, 32), sample(2, 16, 32), OFFS, out_dtype="float32")
