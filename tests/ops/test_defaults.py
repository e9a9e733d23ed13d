"""torch's default dtype, default device and flushed subnormals do not change results silently."""

from contextlib import contextmanager

import pytest
import torch

import grouped
from cute_kernels import backend, support
from grouped import FP8, MXFP8, NVFP4, FP8Block
from ptx_emulator.host import settings
from tests.helpers import (
    BF16,
    E5M2,
    F32,
    assert_same_bytes,
    offs_from_splits,
    ops,
    run_python,
    sample,
)

OFFS = offs_from_splits((5, 0, 18))
#: Formats of activations and of the weights that they are multiplied by.
PAIRS = (
    (NVFP4(row_scaled=True), NVFP4(block=(16, 16))),
    (NVFP4(hadamard=True, stochastic_rounding=True), NVFP4(four_over_six=True)),
    (MXFP8(), MXFP8(block=(32, 32))),
    (FP8Block(), FP8Block(block=(128, 128), pow2_scales=False)),
    (FP8(), FP8(E5M2)),
)


@contextmanager
def defaults(dtype, device):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def results(x, w, alpha, a, b, offs=OFFS):
    """Return all outputs of quantizing, decoding and multiplying these operands."""
    seed = {"seed": 5} if a.is_stochastic else {}
    xq = grouped.quantize(x, a, offs=offs, columnwise=True, **seed)
    wq = grouped.quantize(w, b, columnwise=True)
    activated = grouped.quantize(x, a, offs=offs, activation="gelu", dbias=True, **seed)
    tensors = [
        *xq.rowwise,
        *xq.columnwise,
        *(*wq.rowwise, *wq.columnwise),
        *activated[0].rowwise,
        activated[1],
        xq.dequantize(F32),
        xq.dequantize(F32, "columnwise"),
        grouped.grouped_gemm(xq, wq, alpha=alpha, out_dtype=F32),
        grouped.grouped_gemm(x, w, offs=offs, out_dtype=F32),
        grouped.grouped_gemm(x, x, offs=offs, out_dtype=F32),
        ops.grouped_amax(x, offs),
    ]
    if not (a.is_transformed or a.name == "fp8_block"):
        tensors.append(grouped.grouped_gemm(xq, xq, out_dtype=F32))
    return tensors


@pytest.mark.parametrize("arch", ["reference", "reference:sm_90a", "reference:sm_100a"])
@pytest.mark.parametrize(("a", "b"), PAIRS, ids=[a.text for a, _ in PAIRS])
def test_defaults_do_not_change_bits(a, b, arch):
    if not (support("grouped_gemm", a, arch) and support("grouped_gemm", b, arch)):
        pytest.skip("not built")
    operands = sample(23, 160), sample(3, 16, 160), torch.rand(3)
    with backend(arch):
        want = results(*operands, a, b)
        for dtype, device in ((torch.float64, "cpu"), (BF16, "cpu"), (F32, "meta")):
            with defaults(dtype, device):
                got = results(*operands, a, b)
            for i, (g, w) in enumerate(zip(got, want, strict=True)):
                assert_same_bytes(g, w, f"result {i} under {dtype}, {device}")


def test_the_default_dtype_during_import_has_no_effect():
    code = (
        "import torch; torch.set_default_dtype(torch.float64); import grouped; "
        "x = torch.arange(-8.0, 8.0, dtype=torch.float32).repeat(2, 1, 1); "
        "q = grouped.quantize(x, grouped.NVFP4()); print(q.dequantize().sum().item())"
    )
    x = torch.arange(-8.0, 8.0).repeat(2, 1, 1)
    assert float(run_python(code)) == grouped.quantize(x, NVFP4()).dequantize().sum().item()


def test_flushed_subnormals_give_a_warning(monkeypatch):
    """Check that flushing subnormal numbers gives a warning."""
    monkeypatch.setattr(settings, "_warned", set())
    x = torch.ones(1, 2, 32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        with pytest.warns(RuntimeWarning, match="flushes subnormal numbers to zero"):
            grouped.quantize(x, MXFP8())
    finally:
        torch.set_flush_denormal(False)
