"""Codes in the order of Hopper's registers: the layout bit by bit, and products of them."""

import pytest
import torch

import cute_kernels
import grouped
from tests.helpers import (
    F32,
    I32,
    U8,
    assert_all_same,
    assert_same_bytes,
    compile_full_graph,
    sample,
    save_and_load,
)

from .cases import FORMATS, WEIGHT_FORMAT, assert_same_tensor

K, N, ENDS = 96, 48, [7, 7, 33]


def weights():
    return grouped.quantize(sample(3, N, K), WEIGHT_FORMAT, columnwise=True)


def test_the_place_of_every_bit():
    bits = [(15, 9), (14, 3), (13, 0), (12, 6)]  # of s and of eem, by t
    for nibble in range(8):
        for code in range(16):
            codes = torch.tensor([code << (4 * nibble), 0x89ABCDEF]).int().view(U8)
            packed = cute_kernels.prepack(codes).view(I32)
            sign, magnitude = bits[nibble % 4]
            assert int(packed[0]) & 0xFFFFFFFF == (
                (code >> 3) << sign | (code & 7) << magnitude
            ) << (16 * (nibble // 4))
            assert_same_bytes(cute_kernels.unpack(packed.view(U8)), codes)


def test_strides_are_kept():
    """Check that prepacking keeps the strides."""
    codes = torch.randint(0, 256, (5, 48), dtype=U8)[:, :40]
    packed = cute_kernels.prepack(codes)
    assert packed.stride() == (48, 1)
    assert not torch.equal(packed, codes)
    assert_same_bytes(cute_kernels.unpack(packed).contiguous(), codes.contiguous())


@pytest.mark.parametrize(
    ("codes", "error", "match"),
    [
        (torch.zeros(2, 8), TypeError, "codes must be uint8, got torch.float32"),
        (torch.zeros(2, 12, dtype=U8), ValueError, "whole blocks of 16.*(2, 12)"),
        (torch.zeros(8, 2, dtype=U8).T, ValueError, "strides (1, 2)"),
    ],
)
def test_bad_codes(codes, error, match):
    with pytest.raises(error, match=match.replace("(", r"\(").replace(")", r"\)")):
        cute_kernels.prepack(codes)


def test_prepack_and_unpack():
    """Check that ``unpack`` restores a prepacked tensor, and that both decode alike."""
    w = weights()
    packed = w.prepack()
    assert (
        packed.prepacked
        and packed.format == w.format
        and packed.shape == w.shape
        and packed.dtype == w.dtype
    )
    assert not torch.equal(packed.rowwise.codes, w.rowwise.codes)
    assert packed.prepack() is packed and w.unpack() is w
    assert_same_tensor(packed.unpack(), w)
    assert_same_tensor(save_and_load(packed), packed)
    for direction in ("rowwise", "columnwise"):
        assert_same_bytes(packed.dequantize(F32, direction), w.dequantize(F32, direction))
    for got, want in zip(packed.unbind(), w.unbind(), strict=True):
        assert_same_bytes(got.codes, want.codes)
        assert_same_bytes(got.codes_t, want.codes_t)
    written = packed.clone()
    written.copy_(w.dequantize())
    assert_same_tensor(
        written, grouped.quantize(w.dequantize(), w.format, columnwise=True).prepack()
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_products_have_the_same_bits(compiled):
    """Check that prepacked weights give the same bits."""
    w = weights()
    x, dy = sample(36, K), sample(36, N)
    a = grouped.quantize(x, FORMATS["row-scaled"], offs=ENDS)
    grad = grouped.quantize(dy, FORMATS["1x16"], offs=ENDS)

    def products(w):
        return (grouped.grouped_gemm(a, w), grouped.grouped_gemm(grad, w, transpose_b=True))

    run = compile_full_graph(products) if compiled else products
    assert_all_same(run(w.prepack()), products(w))


def test_plain_activations_are_refused():
    packed = weights().prepack()
    with pytest.raises(cute_kernels.UnsupportedError, match=r"unpack\(\) them"):
        grouped.grouped_gemm(sample(36, K), packed, offs=ENDS)


def test_only_weights_can_be_prepacked():
    ragged = grouped.quantize(sample(36, K), FORMATS["1x16"], offs=ENDS)
    with pytest.raises(ValueError, match="only uniform weights"):
        ragged.prepack()
    with pytest.raises(ValueError, match="nvfp4:row_scaled cannot be combined with prepacked"):
        grouped.quantize(sample(3, N, K), FORMATS["row-scaled"]).prepack()


@pytest.mark.emulated
def test_other_architectures_refuse_prepacked_weights():
    a = grouped.quantize(sample(36, K), FORMATS["1x16"], offs=ENDS)
    with (
        cute_kernels.backend("emulated:sm_100a"),
        pytest.raises(cute_kernels.UnsupportedError, match=r"for sm_90a, not sm_100a: unpack\(\)"),
    ):
        grouped.grouped_gemm(a, weights().prepack())
