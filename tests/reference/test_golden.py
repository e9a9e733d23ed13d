"""Vectors worked out by hand from the formulas, with the steps in the comments."""

import math

import torch

from tests.helpers import assert_same_bytes, ends, ops

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
