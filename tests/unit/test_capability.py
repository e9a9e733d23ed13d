"""The support table: answers, reasons, and that calls obey it."""

import itertools

import pytest
import torch

from cute_kernels import capability, support
from cute_kernels.capability import ARCHITECTURES, OPS, UnsupportedError, markdown_table, require
from cute_kernels.formats import FP8, MXFP8, NVFP4, FP8Block

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


COMBINATIONS = list(itertools.product(OPS, FORMATS, ARCHITECTURES))


@pytest.mark.parametrize(("op", "fmt", "arch"), COMBINATIONS)
def test_every_no_has_a_reason_and_require_repeats_it(op, fmt, arch):
    status = support(op, fmt, arch)
    if status:
        assert status.reason == ""
        require(op, fmt, arch)
        return
    assert status.reason
    with pytest.raises(UnsupportedError) as caught:
        require(op, fmt, arch)
    for word in (op, arch, status.reason):
        assert word in str(caught.value)


def test_unsupported_is_not_implemented():
    assert issubclass(UnsupportedError, NotImplementedError)


def test_dtypes_that_an_op_does_not_take():
    status = support("grouped_gemm_w4a16", NVFP4(), "sm_90a", dtype=torch.float32)
    assert not status and "bfloat16 or float16, not float32" in status.reason
    status = support("grouped_gemm", None, "sm_90a", dtype=torch.float32)
    assert not status and "tf32" in status.reason
    # Quantized on the way.
    assert support("grouped_gemm", NVFP4(), "sm_90a", dtype=torch.float32)


@pytest.mark.parametrize("fmt", [NVFP4(), NVFP4(row_scaled=True), NVFP4(block=(16, 16))], ids=str)
@pytest.mark.parametrize("op", ["grouped_quantize", "grouped_dequantize", "grouped_gemm"])
def test_reference_runs_nvfp4(op, fmt):
    assert support(op, fmt, "reference")


@pytest.mark.parametrize("op", ["compute_offsets", "grouped_amax", "grouped_dbias", "grouped_gemm"])
def test_reference_runs_plain_tensors(op):
    assert support(op, None, "reference")


@pytest.mark.parametrize("op", ["grouped_quantize", "grouped_dequantize"])
def test_quantizing_needs_a_format(op):
    assert "needs a format" in support(op, None, "reference").reason


@pytest.mark.parametrize("op", ["compute_offsets", "grouped_amax", "grouped_dbias"])
def test_reductions_take_no_format(op):
    assert "plain tensors" in support(op, NVFP4(), "reference").reason


def test_a_class_stands_for_its_defaults():
    for op, cls in itertools.product(OPS, (NVFP4, MXFP8, FP8Block, FP8)):
        assert support(op, cls, "reference") == support(op, cls(), "reference")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("gemm", None, "reference"), ValueError, ["op", "'gemm'", "grouped_gemm"]),
        (("grouped_gemm", None, "sm_80"), ValueError, ["arch", "'sm_80'", "sm_90a"]),
        (("grouped_gemm", "nvfp4", "reference"), TypeError, ["fmt", "'nvfp4'"]),
        (("grouped_gemm", torch.bfloat16, "reference"), TypeError, ["fmt", "bfloat16"]),
    ],
)
def test_unknown_names_raise(arguments, error, words):
    with pytest.raises(error) as caught:
        support(*arguments)
    for word in words:
        assert word in str(caught.value)


def test_the_printed_table_says_what_support_says():
    lines = markdown_table().splitlines()
    assert lines[0].split("|")[3:-1] == [f" {arch} " for arch in ARCHITECTURES]
    cells = {}
    for line in lines[2:]:
        _, op, titles, *answers, _ = (cell.strip() for cell in line.split("|"))
        for title in titles.split(", "):
            cells[op.strip("`"), title] = [answer == "yes" for answer in answers]
    assert len(cells) > 20
    rows = {
        "bf16": (None, torch.bfloat16),
        "fp32": (None, torch.float32),
        "row-scaled NVFP4": (NVFP4(row_scaled=True), None),
        "prepacked NVFP4": (NVFP4(prepacked=True), None),
        "FP8": (FP8(), None),
    }
    for op, (title, (fmt, dtype)) in itertools.product(OPS, rows.items()):
        if op == "compute_offsets":
            dtype = dtype and torch.int32
        answers = [bool(support(op, fmt, arch, dtype=dtype)) for arch in ARCHITECTURES]
        if op == "compute_offsets" and fmt is None:
            title = "int32"
        assert cells.get((op, title), [False] * len(ARCHITECTURES)) == answers


def test_ops_ask_the_table(monkeypatch):
    asked = []

    def no(op, fmt, arch, *, dtype=None):
        asked.append((op, fmt, arch, dtype))
        return capability.Support(False, "because of the test")

    monkeypatch.setattr(capability, "support", no)
    offs = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="because of the test"):
        torch.ops.cute_kernels.grouped_quantize_nvfp4(torch.ones(4, 16), offs, row_scaled=True)
    assert asked == [("grouped_quantize", NVFP4(row_scaled=True), "reference", None)]
