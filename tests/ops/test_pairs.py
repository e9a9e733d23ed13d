"""Formats of A and B that multiply, and the accumulations that they allow."""

import itertools
import re

import pytest
import torch

from cute_kernels.formats import FP8, MXFP8, NVFP4, FP8Block, parse
from cute_kernels.formats.base import GlobalScale
from cute_kernels.layout.buffers import buffers
from cute_kernels.ops.format_pairs import check_pair
from cute_kernels.reference import Operand
from tests.helpers import E5M2, k_grouped_arguments, m_grouped_arguments, offs_from_splits, ops

OFFS = offs_from_splits((5, 3))
KINDS = (NVFP4(), MXFP8(), FP8Block(), FP8())


def zeros(fmt, columnwise=False, uniform=False):
    """Return the tensors of one copy, full of zeros."""
    shape, groups = ((2, 32, 32), None) if uniform else ((8, 32), 2)
    specs = buffers(fmt, shape, groups, rowwise=not columnwise, columnwise=columnwise)
    device = torch.device("cpu")
    return [specs[name].allocate(device, True) for name in fmt.operand_names(columnwise)]


def m_grouped(a, b, transpose_b=False, **options):
    operands = (zeros(a), zeros(b, transpose_b, uniform=True), OFFS, None, None, transpose_b)
    return ops.m_grouped_gemm(
        *m_grouped_arguments(*operands, a_format=a.text, b_format=b.text), **options
    )


def quantize_gemm(a, b, transpose_b=False, **options):
    """Call the GEMM that quantizes A on the fly."""
    codes, *scales = zeros(b, transpose_b, uniform=True)
    x = torch.zeros(8, 32)
    options |= {"transpose_b": transpose_b}
    return ops.m_grouped_quantize_gemm(x, codes, OFFS, scales, a.text, b.text, **options)


def k_grouped(a, b, **options):
    operands = (zeros(a, columnwise=True), zeros(b, columnwise=True), OFFS)
    return ops.k_grouped_gemm(
        *k_grouped_arguments(*operands, a_format=a.text, b_format=b.text), **options
    )


CALLS = {"m_grouped_gemm": m_grouped, "m_grouped_quantize_gemm": quantize_gemm}
CALLS["k_grouped_gemm"] = k_grouped
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@each_call
@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(KINDS, 2)), ids=str)
def test_formats_of_different_kinds_raise(call, a, b):
    if b == NVFP4() and call is not k_grouped:
        # FP8 activations times NVFP4 weights (W4A8).
        assert call(a, b).shape == (8, 32)
        return
    with pytest.raises(ValueError, match=f"of one kind.*a_format='{a.text}'.*b_format='{b.text}'"):
        call(a, b)


@pytest.mark.parametrize("cls", [FP8, FP8Block, MXFP8])
def test_elements_and_flags_may_differ(cls):
    """Check products of formats with different elements or options."""
    check_pair(cls(), cls(dtype=E5M2))
    check_pair(FP8Block(pow2_scales=False), FP8Block(block=(128, 128)))
    check_pair(MXFP8(block=(32, 32)), MXFP8(block=(32, 32)))
    check_pair(NVFP4(row_scaled=True), NVFP4(block=(16, 16)))


@each_call
def test_one_operand_needs_scales_per_row(call):
    """Check that at least one operand must have scales per row."""
    square = FP8Block(block=(128, 128))
    with pytest.raises(ValueError, match="a or b must have a scale for each row.*128x128"):
        call(square, square)
    check_pair(square, FP8Block())
    check_pair(FP8Block(), square)


def test_both_operands_of_wgrad_must_be_transformed():
    plain, transformed = NVFP4(), NVFP4(hadamard=True)
    for a, b in ((plain, transformed), (transformed, plain)):
        with pytest.raises(ValueError, match=re.escape(f"got '{a.text}' for a and '{b.text}'")):
            k_grouped(a, b)
    for call in (m_grouped, quantize_gemm):
        for a in (plain, transformed):
            with pytest.raises(
                ValueError, match=f"got no transform for a and '{transformed.text}' for b"
            ):
                call(a, transformed, transpose_b=True)


@each_call
def test_unknown_accumulations_raise(call):
    with pytest.raises(ValueError, match="accumulation must be fast or split, got 'slow'"):
        call(FP8(), FP8(), accumulation="slow")


@each_call
@pytest.mark.parametrize("value", ["fast", "split"])
@pytest.mark.parametrize("fmt", [NVFP4(), MXFP8(), FP8Block()], ids=str)
def test_accumulation_of_block_scaled_operands_raises(call, fmt, value):
    if call is m_grouped:
        with pytest.raises(ValueError, match=f"={value!r} for fp8 and nvfp4"):
            call(FP8(), NVFP4(), accumulation=value)
    with pytest.raises(ValueError, match=f"accumulation={value!r} for {fmt.text} and {fmt.text}"):
        call(fmt, fmt, accumulation=value)


def test_accumulation_of_plain_operands_raises():
    """Check that ``accumulation`` raises if an operand is plain."""
    x, w = torch.zeros(8, 32), torch.zeros(2, 32, 32)
    message = "accumulation='fast' for plain tensors and"
    with pytest.raises(ValueError, match=f"{message} plain tensors"):
        ops.m_grouped_gemm(x, w, OFFS, accumulation="fast")
    with pytest.raises(ValueError, match=f"{message} plain tensors"):
        ops.k_grouped_gemm(x, x, OFFS, accumulation="fast")
    b = zeros(FP8(), uniform=True)
    arguments = m_grouped_arguments(x.half(), b, OFFS, b_format="fp8")
    with pytest.raises(ValueError, match=f"{message} fp8"):
        ops.m_grouped_gemm(*arguments, accumulation="fast")


def test_the_factor_comes_from_the_operands_record():
    """It is a property of the record and the direction, not a constant of the format."""

    class Halved(NVFP4):
        global_scale = GlobalScale("group", ("amax",), 0.5)

    global_scale = torch.tensor([3.0])
    for columnwise in (False, True):
        assert (
            Operand(global_scale, Halved(), global_scale, global_scale, columnwise)
            .factor(0, slice(0, 1))
            .item()
            == 1.5
        )
    assert parse("nvfp4").global_scale.factor == 1 / 2688
