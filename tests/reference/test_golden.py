import math

import torch

from tests.helpers import ends, ops


def above(value):
	return torch.tensor(value).nextafter(torch.tensor(math.inf)).item()


def below(value):
	return torch.tensor(value).nextafter(torch.tensor(-math.inf)).item()


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
