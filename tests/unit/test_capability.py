"""The capability table: what ``support`` answers, its reasons, and the printed table."""

import itertools

import pytest
import torch

from cute_kernels import capability, support
from cute_kernels.capability import ARCHITECTURES, OPS, add_support, markdown_table, require
from cute_kernels.formats import FP8, MXFP8, NVFP4, RECORDS, FP8Block
from tests.helpers import BF16, F32, contains_all

FORMATS = (
    None,
    NVFP4(),
    NVFP4(row_scaled=True),
    NVFP4(block=(16, 16)),
    NVFP4(hadamard=True, stochastic_rounding=True),
    NVFP4(four_over_six=True),
    MXFP8(),
    FP8Block(),
    FP8(),
    FP8(scaling="delayed"),
)


OPTIONS = [
    {},
    {"columnwise": True},
    {"prepacked": True},
    {"columnwise": True, "prepacked": True},
    {"shapes": True},
    {"columnwise": True, "shapes": True},
]


@pytest.mark.parametrize(("op", "fmt", "arch"), [*itertools.product(OPS, FORMATS, ARCHITECTURES)])
def test_every_refusal_has_a_reason_and_require_repeats_it(op, fmt, arch):
    plain = support(op, fmt, arch)
    assert not plain or arch in capability._RUNS.get((op, None if fmt is None else fmt.name), ())
    for options in OPTIONS:
        status = support(op, fmt, arch, **options)
        assert plain or not status, "an option must not add support"
        if status:
            assert status.reason == ""
            require(op, fmt, arch, **options)
            continue
        assert status.reason
        with pytest.raises(NotImplementedError, match=contains_all(op, arch, status.reason)):
            require(op, fmt, arch, **options)


def test_the_table_names_existing_ops_formats_and_architectures():
    for (op, name), archs in capability._RUNS.items():
        assert op in OPS
        assert name is None or name in RECORDS
        assert set(archs) <= set(ARCHITECTURES)


@pytest.fixture
def no_mxfp8(monkeypatch):
    monkeypatch.setattr(
        capability,
        "_RUNS",
        {key: archs for key, archs in capability._RUNS.items() if key[1] != "mxfp8"},
    )


def test_adding_support_adds_a_format(no_mxfp8):
    """Check that a new row of the table adds a format."""
    assert support("grouped_quantize", MXFP8(), "reference").reason == "MXFP8 is not built yet"
    add_support(MXFP8, ("grouped_quantize",), ("reference", "sm_100a"))
    assert support("grouped_quantize", MXFP8(), "reference")
    assert support("grouped_quantize", MXFP8(), "sm_100a")
    assert (
        support("grouped_quantize", MXFP8(), "sm_90a").reason
        == "no sm_90a kernel of grouped_quantize yet"
    )
    assert support("grouped_gemm", MXFP8(), "reference").reason == "no grouped_gemm of MXFP8 yet"
    assert "| `grouped_quantize` | MXFP8 | yes | not yet | yes |" in markdown_table()


def test_prepacked_weights_are_for_the_reference_and_sm_90a():
    """Check that only the reference and sm_90a support prepacked weights."""
    for fmt in (NVFP4(), NVFP4(block=(16, 16))):
        assert [bool(support("grouped_gemm", fmt, a, prepacked=True)) for a in ARCHITECTURES] == [
            True,
            True,
            False,
        ]
    reason = support("grouped_gemm", NVFP4(), "sm_100a", prepacked=True).reason
    assert reason == "prepacked weights are for sm_90a, not sm_100a: unpack() them"
    for arch in ("reference", "sm_90a"):
        assert (
            "unpack() them" in support("grouped_gemm_w4a16", NVFP4(), arch, prepacked=True).reason
        )


def test_the_reason_about_the_format_comes_first(no_mxfp8):
    assert (
        support("grouped_gemm", MXFP8(), "sm_100a", prepacked=True).reason
        == "MXFP8 is not built yet"
    )


def test_reasons_name_the_dtypes_of_an_op():
    assert (
        "bfloat16 or float16, not float32"
        in support("grouped_gemm_w4a16", NVFP4(), "sm_90a", dtype=F32).reason
    )
    assert "tf32" in support("grouped_gemm", None, "sm_90a", dtype=F32).reason
    # The op quantizes fp32 activations on the fly.
    assert support("grouped_gemm", NVFP4(), "sm_90a", dtype=F32)


def test_a_compiler_target_stands_for_its_family():
    """Check that sm_103a (B300) is answered as sm_100a, whose kernels it runs."""
    for op, fmt in itertools.product(OPS, FORMATS):
        assert support(op, fmt, "sm_103a") == support(op, fmt, "sm_100a")


def test_the_table_tells_missing_kernels_from_impossible_combinations():
    lines = {tuple(line.split(" | ")[:2]): line for line in markdown_table().splitlines()}
    assert lines["| `grouped_gemm`", "fp32"].endswith("| yes | - | - |")
    assert lines["| `grouped_gemm`", "MXFP8, MXFP8 to MXFP8"].endswith("| yes | not yet | yes |")


@pytest.mark.parametrize("op", ["grouped_quantize", "grouped_dequantize"])
def test_quantizing_needs_a_format(op):
    assert "needs a format" in support(op, None, "reference").reason


@pytest.mark.parametrize("op", ["compute_offsets", "grouped_amax", "grouped_dbias", "moe_combine"])
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
        (("grouped_gemm", None, "H200"), ValueError, ["arch", "H200 is 'sm_90a'"]),
        (("grouped_gemm", "nvfp4", "reference"), TypeError, ["fmt", "'nvfp4'", "NVFP4()"]),
        (("grouped_gemm", object(), "reference"), TypeError, ["fmt", "recipe.weight"]),
        (("grouped_gemm", BF16, "reference"), TypeError, ["fmt", "bfloat16"]),
    ],
)
def test_unknown_names_raise(arguments, error, words):
    with pytest.raises(error, match=contains_all(*words)):
        support(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((MXFP8, ("gemm",), ARCHITECTURES), ["op", "'gemm'", "grouped_gemm"]),
        ((MXFP8, OPS, ("sm_80",)), ["arch", "'sm_80'", "sm_90a"]),
        ((type("Other", (MXFP8,), {}), OPS, ARCHITECTURES), ["Other", "not registered"]),
    ],
)
def test_adding_support_checks_its_arguments(arguments, words, no_mxfp8):
    with pytest.raises(ValueError, match=contains_all(*words)):
        add_support(*arguments)


def test_the_printed_table_agrees_with_support():
    """Check that the printed table agrees with ``support``."""
    lines = markdown_table().splitlines()
    assert lines[0].split("|")[3:-1] == [f" {arch} " for arch in ARCHITECTURES]
    cells = {}
    for line in lines[2:]:
        _, op, format_titles, *supported, _ = (cell.strip() for cell in line.split("|"))
        for title in format_titles.split(", "):
            cells[op.strip("`"), title] = [answer == "yes" for answer in supported]
    assert len(cells) > 20
    rows = {
        "bf16": (None, BF16),
        "fp32": (None, F32),
        "row-scaled NVFP4": (NVFP4(row_scaled=True), None),
        "prepacked NVFP4": (NVFP4(), None),
        "FP8": (FP8(), None),
    }
    for op, (title, (fmt, dtype)) in itertools.product(OPS, rows.items()):
        prepacked = title.startswith("prepacked")
        if op.startswith("compute_"):
            dtype = dtype and torch.int32
        supported = [
            bool(support(op, fmt, arch, dtype=dtype, prepacked=prepacked)) for arch in ARCHITECTURES
        ]
        if op.startswith("compute_") and fmt is None:
            title = "int32"
        assert cells.get((op, title), [False] * len(ARCHITECTURES)) == supported
