import torch

from cute_kernels import ops
from cute_kernels.formats import FP8
from cute_kernels.layout.buffers import buffers
from tests.helpers import DTYPES, F32, assert_same_bytes, each, ends, weird_values

FORMATS = {"e4m3": FP8(), "e5m2": FP8(torch.float8_e5m2)}
OFFSETS = {"ragged": ends(0, 7, 136, 136, 290), "one row": ends(1), "uniform": None}


def quantized(x, fmt):
	magnitudes = x.float().abs().nan_to_num(0.0, torch.inf)
	amax = magnitudes.amax() if len(x) else torch.tensor(0.0)
	scale = (torch.tensor(fmt.element.max) / amax).clamp(max=torch.finfo(F32).max)
	if amax == 0 or not amax.isfinite():
		scale = torch.tensor(1.0)
	y = (x.float() * scale).clamp(-fmt.element.max, fmt.element.max)
	codes = y.to(fmt.dtype).view(torch.uint8)
	return torch.where(y.isnan(), 0x7F, codes), 1 / scale, scale, amax


@each("offs", OFFSETS)
@each("dtype", DTYPES)
@each("fmt", FORMATS)
def test_both_directions(fmt, dtype, offs):
	x = weird_values(300, 144, dtype)
	x[:7] = torch.finfo(dtype).tiny / 4  # the scale of fp32 and bf16 would be infinite
	groups = x.view(3, 100, 144) if offs is None else x.tensor_split(offs.tolist())[:-1]
	x = groups if offs is None else x
	names = buffers(fmt, x.shape, None if offs is None else len(offs), columnwise=True)
	out = dict(zip(names, ops.grouped_quantize(x, fmt.text, offs, None, True, True), strict=True))
	starts = [0, *([100, 200] if offs is None else offs.tolist())]
	for g, group in enumerate(groups):
		codes, *vectors = quantized(group, fmt)
		for name, want in zip(("scale_inv", "scale", "amax"), vectors, strict=True):
			assert_same_bytes(out[name][g], want)
		rowwise = out["codes"].flatten(0, -2).view(torch.uint8)[starts[g] :][: len(codes)]
		assert_same_bytes(rowwise, codes)
		slot = 0 if offs is None else (starts[g] // 128 + g) * 128
		columns = out["codes_t"][g] if offs is None else out["codes_t"][:, slot:]
		assert_same_bytes(columns.view(torch.uint8)[:, : len(codes)].T, codes)
		padding = columns.view(torch.uint8)[:, len(codes) : -(-len(codes) // 128) * 128]
		assert not padding.any()
