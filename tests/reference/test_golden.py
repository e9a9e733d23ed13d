"""Vectors worked out by hand from the formulas, with the steps in the comments."""

import math

import torch

from tests.helpers import (
    assert_same_bytes,
    dequantize_arguments,
    ends,
    m_grouped_arguments,
    ops,
)

NAN = math.nan


def above(value):
    return torch.tensor(value).nextafter(torch.tensor(math.inf)).item()


def below(value):
    return torch.tensor(value).nextafter(torch.tensor(-math.inf)).item()


def test_1x16_rowwise():
    # The amax is 2688 = 6 * 448, so S_enc = S_dec = 1, and a block's scale is e4m3(a / 6).
    x = torch.zeros(2, 32)
    # Block (0, 0): a = 2688, s = 448; x / 448 = 6, 3, 1.5, -6, 0, -0, .5, 1, 4, 2.
    x[0, :10] = torch.tensor([2688.0, 1344, 672, -2688, 0.0, -0.0, 224, 448, 1792, 896])
    # Block (0, 1): a = 6, s = 1: every tie, of both signs.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[0, 16:] = torch.cat([ties, -ties])
    # Block (1, 0): a = 12, s = 2: ties halve, one step of fp32 beside them does not; NaN is +6.
    x[1, :16] = torch.tensor(
        [0.5, above(0.5), 1.5, below(1.5), 2.5, above(2.5), 3.5, below(3.5)]
        + [5.0, above(5.0), 7.0, below(7.0), 10.0, above(10.0), 12.0, NAN]
    )
    # Block (1, 1): a = 102, a / 6 = 17 lies between 16 and 18: s = 16, and 102 / 16 > 6 saturates.
    x[1, 16:26] = torch.tensor([102.0, 48, 8, 4, -16, 12, 28, 40, 56, 80])
    codes, scales, amax = ops.grouped_quantize(x, "nvfp4", ends(2))
    assert codes[0].tolist() == [0x57, 0xF3, 0x80, 0x21, 0x46, 0, 0, 0] + [
        0x20, 0x42, 0x64, 0x76, 0xA8, 0xCA, 0xEC, 0xFE,
    ]  # fmt: skip
    assert codes[1].tolist() == [0x10, 0x12, 0x32, 0x34, 0x54, 0x56, 0x76, 0x77] + [
        0x57, 0x01, 0x2A, 0x44, 0x66, 0, 0, 0,
    ]  # fmt: skip
    # Row r of the tile is at byte 16 r: 448 = 0x7E, 1 = 0x38, 2 = 0x40, 16 = 0x58.
    want = torch.zeros(1, 1, 512, dtype=torch.uint8)
    want[0, 0, [0, 1, 16, 17]] = torch.tensor([0x7E, 0x38, 0x40, 0x58], dtype=torch.uint8)
    assert_same_bytes(scales, want)
    assert amax.tolist() == [2688.0]


def test_columnwise_of_two_groups():
    # Group 1 starts at slot tile 1 // 128 + 1 = 1: bytes 64.. of a code row, blocks 8.. of scales.
    x = torch.zeros(3, 16)
    x[0, 0] = 2688.0  # group 0: s = 448, code 7
    x[1, 5], x[2, 5] = 3.0, -6.0  # group 1, given amax 2688: a = 6, s = 1, codes 5 and 15
    x[2, 9] = 12.0  # s = 2, code 7 in the odd row
    given = torch.tensor([2688.0, 2688.0])
    outputs = ops.grouped_quantize(x, "nvfp4", ends(1, 3), given, rowwise=False, columnwise=True)
    codes_t = torch.zeros(16, 128, dtype=torch.uint8)
    codes_t[0, 0], codes_t[5, 64], codes_t[9, 64] = 0x07, 0xF5, 0x70
    # 16 blocks are 4 tiles; block 8 is the first of tile 2; column c is at byte 16 c of its tile.
    scales_t = torch.zeros(1, 4, 512, dtype=torch.uint8)
    scales_t[0, 0, 0], scales_t[0, 2, 5 * 16], scales_t[0, 2, 9 * 16] = 0x7E, 0x38, 0x40
    assert_same_bytes(outputs[0], codes_t)
    assert_same_bytes(outputs[1], scales_t)
    assert outputs[2].tolist() == [2688.0, 2688.0]


def test_row_scaled():
    # Row 0: g = 2688, S_enc = 1. Row 1: g = 5376, S_enc = 1/2, S_dec = 2: twice the row gives the
    # same bytes. Row 2 is zero: S_enc = 1, all zero.
    x = torch.zeros(3, 32)
    x[0, 0], x[0, 16], x[0, 17] = 2688.0, 6.0, 1.25
    x[1] = 2 * x[0]
    codes, scales, amax = ops.grouped_quantize(x, "nvfp4:row_scaled", ends(3))
    row = [7, 0, 0, 0, 0, 0, 0, 0, 0x27, 0, 0, 0, 0, 0, 0, 0]
    assert codes.tolist() == [row, row, [0] * 16]
    want = torch.zeros(1, 1, 512, dtype=torch.uint8)
    want[0, 0, [0, 1, 16, 17]] = torch.tensor([0x7E, 0x38, 0x7E, 0x38], dtype=torch.uint8)
    assert_same_bytes(scales, want)
    assert amax.tolist() == [2688.0, 5376.0, 0.0]


def test_16x16():
    # One block over all 16 rows: a = 12, s = 2 in every row, also in those of small values.
    x = torch.zeros(16, 16)
    x[0, 0], x[7, 3], x[15, 15] = 12.0, 1.0, -2.5
    codes, scales, amax, codes_t, scales_t, amax_t = ops.grouped_quantize(
        x, "nvfp4:block=16x16", ends(16), torch.tensor([2688.0]), columnwise=True
    )
    want = torch.zeros(16, 8, dtype=torch.uint8)
    want[0, 0], want[7, 1], want[15, 7] = 0x07, 0x10, 0xA0  # 6, 0.5, -1.25 -> -1
    assert_same_bytes(codes, want)
    turned = torch.zeros(16, 64, dtype=torch.uint8)  # rows are columns of x; one slot tile
    turned[0, 0], turned[3, 3], turned[15, 7] = 0x07, 0x10, 0xA0
    assert_same_bytes(codes_t, turned)
    replicated = torch.zeros(512, dtype=torch.uint8)
    replicated[0:256:16] = 0x40
    assert_same_bytes(scales.flatten(), replicated)
    assert_same_bytes(scales_t[0, 0], replicated)
    assert amax.tolist() == amax_t.tolist() == [2688.0]


def test_order_of_the_roundings():
    """Inputs on which another order, or division in place of a reciprocal, gives other bytes."""
    offs = ends(1)
    x = torch.zeros(1, 16)
    # Exactly, a * 2688 / g / 6 = 200, a tie between 192 (0x74, even) and 208 (0x75). S_enc =
    # fl(1365.3..) and fl(S_enc * fl(1/6)) round up, so this order ends just above the tie, while
    # fl(fl(a * S_enc) / 6), fl(a / 6) * S_enc and a * fl(S_enc / 6) end on it.
    x[0, 0] = 0.87890625
    _, scales, _ = ops.grouped_quantize(x, "nvfp4", offs, torch.tensor([1.96875]))
    assert scales[0, 0, 0].item() == 0x75
    # With enc = fl(1 / fl(208 * S_dec)), x * enc rounds to the tie 0.75, whose even code is 2; with
    # fl(S_enc / 208), or x divided by fl(208 * S_dec), it stays below.
    x[0, 0], x[0, 1] = 0.7421875, float.fromhex("0x1.7e9246p-4")
    codes, scales, _ = ops.grouped_quantize(x, "nvfp4", offs, torch.tensor([1.609375]))
    assert scales[0, 0, 0].item() == 0x75
    assert codes[0, 0].item() == 0x27


def test_dequantize():
    # Scale 1 and amax 2688: f = fl(fl(1 * 2688) * fl(1/2688)) = 1, so a value is its code's.
    # Scale 2, amax 5376 (exact powers of two): twice and four times that.
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    scales = torch.zeros(1, 1, 512, dtype=torch.uint8)
    offs = ends(1)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for byte, amax, factor in ((0x38, 2688.0, 1.0), (0x40, 2688.0, 2.0), (0x40, 5376.0, 4.0)):
        scales[0, 0, 0] = byte
        copy = codes, scales, torch.tensor([amax])
        arguments = dequantize_arguments(copy, "nvfp4", 1, torch.bfloat16, offs)
        out = ops.grouped_dequantize(*arguments)
        want = torch.tensor([[v * factor for v in values] + [-v * factor for v in values]])
        assert_same_bytes(out, want.bfloat16())


def test_nvfp4_gemm():
    # One row of 6s by one row of 1.5s over 16, both amax 2688 and scale 1: 16 * 6 * 1.5 = 144.
    # f = fl(2688 * fl(1/2688))^2 = 1, alpha 2, bias 0.25: 288.25, which bf16 rounds to 288.
    offs = ends(1)
    scales = torch.zeros(1, 1, 512, dtype=torch.uint8)
    scales[0, 0, 0] = 0x38
    amax = torch.tensor([2688.0])
    a = torch.full((1, 8), 0x77, dtype=torch.uint8)
    b = torch.full((1, 1, 8), 0x33, dtype=torch.uint8)
    copies = (a, scales, amax), (b, scales[None], amax)
    bias, alpha = torch.tensor([[0.25]]), torch.tensor([2.0])

    def arguments(out_dtype=None):
        return m_grouped_arguments(*copies, offs, bias, alpha, out_dtype=out_dtype)

    assert ops.m_grouped_gemm(*arguments(torch.float32)).tolist() == [[288.25]]
    assert ops.m_grouped_gemm(*arguments()).tolist() == [[288.0]]
    # Added before the one rounding: 288.25 + 1 = 289.25 rounds to 290; 288 + 1 would round to 288.
    total = torch.ones(1, 1, dtype=torch.bfloat16)
    ops.m_grouped_gemm_out(*arguments(), out=total, accumulate=True)
    assert total.tolist() == [[290.0]]
