"""The support table against the ops: what it says runs, runs; what it denies raises its reason."""

import importlib.util
import itertools
import re

import pytest
import torch

import cute_kernels
import grouped
from cute_kernels import UnsupportedError, capability, support
from cute_kernels.capability import ARCHITECTURES, OPS
from cute_kernels.formats import FP8, MXFP8, NVFP4, FP8Block
from tests.helpers import offsets, ops, sample

FORMATS = (
    None,
    NVFP4(),
    NVFP4(row_scaled=True),
    NVFP4(block=(16, 16)),
    NVFP4(prepacked=True),
    NVFP4(hadamard=True),
    NVFP4(stochastic_rounding=True),
    NVFP4(four_over_six=True),
    MXFP8(),
    FP8Block(),
    FP8(),
)
#: What no call says: a format of an op that takes none, or none of one that decodes.
UNSAYABLE = {
    *itertools.product(("compute_offsets", "grouped_amax", "grouped_dbias"), FORMATS[1:]),
    *itertools.product(("grouped_dequantize", "grouped_gemm_w4a16"), FORMATS[:1]),
}
OFFS = offsets((4, 0, 2))
K, N = 32, 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)


def combinations():
    for op, fmt, arch in itertools.product(OPS, FORMATS, ARCHITECTURES):
        if (op, fmt) in UNSAYABLE:
            continue
        taken = [d for d in DTYPES if d in capability._DTYPES[op]]
        allowed = [d for d in taken if support(op, fmt, arch, dtype=d)]
        for dtype in DTYPES if allowed else taken[:1]:
            # On the emulator one dtype runs; tests of the kernels have the others.
            if dtype not in allowed or arch == "reference" or dtype == allowed[0]:
                name = "-".join((op, fmt.text if fmt else "plain", arch, str(dtype)))
                yield pytest.param(op, fmt, arch, dtype, id=name)


def quantized(fmt, dtype=torch.bfloat16, uniform=False):
    """A tensor of a format that the reference made; of one that nothing makes, the constructor."""
    x = sample(len(OFFS), N, K, dtype=dtype) if uniform else sample(6, K, dtype=dtype)
    offs = None if uniform else OFFS
    if support("grouped_quantize", fmt, "reference"):
        with cute_kernels.backend("reference"):
            return grouped.quantize(x, fmt, offs=offs, columnwise=True)
    parts = ops.grouped_quantize_nvfp4(x, offs)
    held = grouped.QuantizedCopy(*parts[:3])
    return grouped.GroupedTensor(x.shape, dtype, fmt, offs, held, None)


def is_weight(fmt):
    return isinstance(fmt, NVFP4) and (fmt.is_2d or fmt.prepacked)


def grouped_quantize(fmt, dtype):
    x = sample(len(OFFS), N, K, dtype=torch.float32).to(dtype)
    grouped.quantize(x, fmt, columnwise=True)
    if not is_weight(fmt):
        grouped.quantize(x[0], fmt, offs=OFFS, columnwise=True)


def grouped_dequantize(fmt, dtype):
    for uniform in (True,) if is_weight(fmt) else (False, True):
        for direction in ("rowwise", "columnwise"):
            quantized(fmt, uniform=uniform).dequantize(dtype, direction)


def grouped_gemm(fmt, dtype):
    if fmt is None:
        a, b = (sample(*shape, dtype=torch.float32).to(dtype) for shape in ((6, K), (3, N, K)))
        ops.m_grouped_gemm(a, b, OFFS)
        ops.m_grouped_gemm(a, b.mT.contiguous(), OFFS, transpose_b=True)
        ops.k_grouped_gemm(a, a, OFFS)
        return
    if is_weight(fmt):
        a, b = quantized(NVFP4()), quantized(fmt, uniform=True)
    else:
        a, b = quantized(fmt), quantized(NVFP4(), uniform=True)
        grouped.grouped_gemm(a, a)
    plain = sample(6, K, dtype=torch.float32).to(dtype)
    options = (OFFS, None, None, a.format.row_scaled, None, b.format.prepacked)
    ops.m_grouped_quantize_gemm_nvfp4(plain, *b.rowwise, *options)
    grouped.grouped_gemm(a, b)


def grouped_gemm_w4a16(fmt, dtype):
    x = sample(6, K, dtype=torch.float32).to(dtype)
    grouped.grouped_gemm(x, quantized(fmt, uniform=True), offs=OFFS)


CALLS = {
    "compute_offsets": lambda fmt, dtype: ops.compute_offsets(torch.tensor([4, 0, 2]).to(dtype)),
    "grouped_amax": lambda fmt, dtype: ops.grouped_amax(torch.ones(6, K).to(dtype), OFFS),
    "grouped_dbias": lambda fmt, dtype: ops.grouped_dbias(torch.ones(6, K).to(dtype), OFFS),
    "grouped_quantize": grouped_quantize,
    "grouped_dequantize": grouped_dequantize,
    "grouped_gemm": grouped_gemm,
    "grouped_gemm_w4a16": grouped_gemm_w4a16,
}


@pytest.mark.parametrize(("op", "fmt", "arch", "dtype"), list(combinations()))
def test_ops_do_what_the_table_says(op, fmt, arch, dtype):
    status = support(op, fmt, arch, dtype=dtype)
    name = arch if arch == "reference" else f"emulated:{arch}"
    if status and arch != "reference" and importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs the CuTe DSL")
    with cute_kernels.backend(name):
        if status:
            CALLS[op](fmt, dtype)
        elif support(op, fmt, arch):
            # Nothing takes this dtype, or no tensor core does.
            error = UnsupportedError if support(op, fmt, "reference", dtype=dtype) else TypeError
            with pytest.raises(error, match=re.escape(str(dtype).removeprefix("torch."))):
                CALLS[op](fmt, dtype)
        else:
            with pytest.raises(UnsupportedError, match=re.escape(status.reason)):
                CALLS[op](fmt, dtype)


@pytest.mark.parametrize("core", ["sm_90a", "sm_100a"])
def test_a_reference_that_adds_like_a_tensor_core_takes_what_that_does(core):
    with cute_kernels.backend(f"reference:{core}"):
        for fmt, dtype in ((NVFP4(prepacked=True), torch.bfloat16), (None, torch.float32)):
            status = support("grouped_gemm", fmt, core, dtype=dtype)
            if status:
                grouped_gemm(fmt, dtype)
            else:
                with pytest.raises(UnsupportedError, match=re.escape(status.reason)):
                    grouped_gemm(fmt, dtype)
