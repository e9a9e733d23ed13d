import torch

from cute_kernels.formats import FP8, NVFP4, parse
from cute_kernels.layout.buffers import buffers, member_parts
from tests.helpers import each

T, K, G, N = 300, 416, 5, 200


def test_a_row_scaled_uniform_tensor_has_one_level_a_row():
	assert buffers(NVFP4(row_scaled=True), (G, N, K), None)["amax"].shape == (G, N)


@each("fmt", [NVFP4(), FP8()], ids=lambda fmt: fmt.text)
@each("cols", [16, 48, 416])
def test_rows_of_codes_are_16_bytes_apart(fmt, cols):
	codes = buffers(fmt, (3, cols), 1)["codes"]
	assert codes.strides[0] * codes.dtype.itemsize % 16 == 0
	assert 0 <= codes.strides[0] - codes.shape[1] < 16
	assert codes.allocate(torch.device("cpu"), True).stride() == codes.strides


def test_a_shared_level_is_there_once():
	assert list(buffers(FP8(), (T, K), G, columnwise=True)) == [*("codes", "scale_inv", "scale", "amax"), "codes_t"]


SHAPES = [(5, 48), (0, 32), (130, 16), (1, 160)]
_CODES, _CODES_T = [5 * 48, 0, 130 * 16, 160], [48 * 128, 0, 16 * 256, 160 * 128]
#: format -> entries of each member's part of each buffer, worked out by hand for SHAPES: rows of
#: codes are padded to 16 bytes, and columnwise rows to whole tiles of 128.
PARTS = {
	"nvfp4:row_scaled": {
		"codes": [5 * 32, 0, 130 * 16, 80],
		"scales": [512, 0, 2 * 512, 3 * 512],
		"amax": [5, 0, 130, 1],
		"codes_t": [48 * 64, 0, 16 * 128, 160 * 64],
		"scales_t": [1024, 0, 2048, 2 * 1024],
		"amax_t": [1, 1, 1, 1],
	},
	"mxfp8": {
		"codes": _CODES,
		"scales": [512, 0, 2 * 512, 2 * 512],
		"codes_t": [128 * 48, 0, 256 * 16, 128 * 160],
		"scales_t": [512, 0, 2 * 512, 2 * 512],
	},
	"fp8_block": {
		"codes": _CODES,
		"scales": [128, 0, 256, 2 * 128],
		"codes_t": _CODES_T,
		"scales_t": [48, 0, 2 * 16, 160],
	},
	"fp8": {"codes": _CODES, **dict.fromkeys(("scale_inv", "scale", "amax"), [1] * 4), "codes_t": _CODES_T},
}


@each(("text", "wanted"), PARTS.items(), PARTS)
def test_flat_buffers_hold_members_one_after_the_other(text, wanted):
	fmt = parse(text)
	found = buffers(fmt, (10_000,), None, columnwise=True, shapes=SHAPES)
	parts = member_parts(fmt, SHAPES, columnwise=True)
	assert list(found) == list(parts) == list(wanted)
	for name, sizes in wanted.items():
		spec, is_vector = found[name], "amax" in name or name in ("scale", "scale_inv")
		step, start = 1 if is_vector else 128 // spec.dtype.itemsize, 0
		for part, size in zip(parts[name], sizes, strict=True):
			assert (part.start, part.spec.extent, part.spec.dtype) == (start, size, spec.dtype)
			start = -(-(start + size) // step) * step
		assert spec.shape == (start,) and spec.pitch is None and not spec.zeroed


@each("text", [*PARTS])
def test_a_part_is_the_buffer_of_a_group_alone(text):
	fmt = parse(text)
	flat = buffers(fmt, (10_000,), None, columnwise=True, shapes=SHAPES)
	for name, parts in member_parts(fmt, SHAPES, columnwise=True).items():
		buffer = flat[name].allocate(torch.device("cpu"), zeroed=True)
		for part, shape in zip(parts, SHAPES, strict=True):
			assert part.spec == buffers(fmt, (1, *shape), None, columnwise=True)[name]
			view = part.of(buffer)
			assert view.shape == part.spec.shape
			assert not view.numel() or view.stride() == part.spec.strides
			assert view.data_ptr() - buffer.data_ptr() == part.start * buffer.itemsize or (not view.numel())


def test_each_direction_has_its_own_flat_buffers():
	asked = {"rowwise": False, "columnwise": True}
	both = buffers(NVFP4(), (9,), None, columnwise=True, shapes=SHAPES)
	columnwise = buffers(NVFP4(), (9,), None, shapes=SHAPES, **asked)
	assert columnwise == {name: both[name] for name in ("codes_t", "scales_t", "amax_t")}
