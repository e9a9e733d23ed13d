"""Shapes of the buffers of every format: the layout contract, cell by cell."""

import pytest
import torch

from cute_kernels.formats import FP8, MXFP8, NVFP4, FP8Block, parse
from cute_kernels.layout.buffers import buffers, member_parts
from tests.helpers import each

T, K, G, N = 300, 416, 5, 200
P = 128 * (T // 128 + G)
TILES = P // 128
E5M2 = torch.float8_e5m2

#: format -> (ragged rowwise, ragged columnwise): shapes by name, as the contract has them.
RAGGED = {
  "nvfp4": (
    {"codes": (T, K // 2), "scales": (TILES, 7, 512), "amax": (G,)},
    {"codes_t": (K, P // 2), "scales_t": (4, P // 16 // 4, 512), "amax_t": (G,)},
  ),
  "nvfp4:row_scaled": (
    {"codes": (T, K // 2), "scales": (TILES, 7, 512), "amax": (T,)},
    {"codes_t": (K, P // 2), "scales_t": (4, P // 16 // 4, 512), "amax_t": (G,)},
  ),
  "mxfp8": ({"codes": (T, K), "scales": (TILES, 4, 512)}, {"codes_t": (P, K), "scales_t": (4, P // 32 // 4, 512)}),
  "fp8_block": ({"codes": (T, K), "scales": (4, P)}, {"codes_t": (K, P), "scales_t": (P // 128, K)}),
  "fp8_block:block=128x128": (
    {"codes": (T, K), "scales": (P // 128, 4)},
    {"codes_t": (K, P), "scales_t": (P // 128, 4)},
  ),
  "fp8": (
    {"codes": (T, K), "scale_inv": (G,), "scale": (G,), "amax": (G,)},
    {"codes_t": (K, P), "scale_inv": (G,), "scale": (G,), "amax": (G,)},
  ),
}
UNIFORM = {
  "nvfp4:block=16x16": (
    {"codes": (G, N, K // 2), "scales": (G, 2, 7, 512), "amax": (G,)},
    {"codes_t": (G, K, 128), "scales_t": (G, 4, 4, 512), "amax_t": (G,)},
  ),
  "mxfp8": ({"codes": (G, N, K), "scales": (G, 2, 4, 512)}, {"codes_t": (G, 256, K), "scales_t": (G, 4, 2, 512)}),
  "fp8_block:block=128x128": (
    {"codes": (G, N, K), "scales": (G, 2, 4)},
    {"codes_t": (G, K, 256), "scales_t": (G, 2, 4)},
  ),
}


@each("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize(("text", "wanted"), RAGGED.items(), ids=RAGGED)
def test_ragged_buffers(text, wanted, columnwise):
  found = buffers(parse(text), (T, K), G, rowwise=not columnwise, columnwise=columnwise)
  assert {name: spec.shape for name, spec in found.items()} == wanted[columnwise]
  assert tuple(found) == parse(text).buffer_names(columnwise)


@pytest.mark.parametrize(("text", "wanted"), UNIFORM.items(), ids=UNIFORM)
def test_uniform_buffers_of_both_directions(text, wanted):
  found = buffers(parse(text), (G, N, K), None, columnwise=True)
  assert {name: spec.shape for name, spec in found.items()} == wanted[0] | wanted[1]


def test_a_row_scaled_uniform_tensor_has_one_level_a_row():
  assert buffers(NVFP4(row_scaled=True), (G, N, K), None)["amax"].shape == (G, N)


@each(
  ("fmt", "codes", "scales"),
  [
    (NVFP4(), torch.uint8, torch.uint8),
    (MXFP8(E5M2), E5M2, torch.uint8),
    (FP8Block(), torch.float8_e4m3fn, torch.float32),
    (FP8(), torch.float8_e4m3fn, None),
  ],
  ids=lambda value: getattr(value, "text", None),
)
def test_dtypes(fmt, codes, scales):
  found = buffers(fmt, (T, K), G, columnwise=True)
  assert found["codes"].dtype == found["codes_t"].dtype == codes
  assert scales is None or found["scales"].dtype == found["scales_t"].dtype == scales
  vectors = set(found) - {"codes", "scales", "codes_t", "scales_t"}
  assert all(found[name].dtype == torch.float32 for name in vectors)


@each("fmt", [NVFP4(), FP8()], ids=lambda fmt: fmt.text)
@each("cols", [16, 48, 416])
def test_rows_of_codes_are_16_bytes_apart(fmt, cols):
  codes = buffers(fmt, (3, cols), 1)["codes"]
  assert codes.strides[0] * codes.dtype.itemsize % 16 == 0
  assert 0 <= codes.strides[0] - codes.shape[1] < 16
  assert codes.allocate(torch.device("cpu"), True).stride() == codes.strides


def test_a_shared_level_is_there_once():
  assert list(buffers(FP8(), (T, K), G, columnwise=True)) == [*("codes", "scale_inv", "scale", "amax"), "codes_t"]


# Groups that have shapes of their own

SHAPES = [(5, 48), (0, 32), (130, 16), (1, 160)]
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
    "codes": [5 * 48, 0, 130 * 16, 160],
    "scales": [512, 0, 2 * 512, 2 * 512],
    "codes_t": [128 * 48, 0, 256 * 16, 128 * 160],
    "scales_t": [512, 0, 2 * 512, 2 * 512],
  },
  "fp8_block": {
    "codes": [5 * 48, 0, 130 * 16, 160],
    "scales": [128, 0, 256, 2 * 128],
    "codes_t": [48 * 128, 0, 16 * 256, 160 * 128],
    "scales_t": [48, 0, 2 * 16, 160],
  },
  "fp8": {
    "codes": [5 * 48, 0, 130 * 16, 160],
    **dict.fromkeys(("scale_inv", "scale", "amax"), [1, 1, 1, 1]),
    "codes_t": [48 * 128, 0, 16 * 256, 160 * 128],
  },
}


@pytest.mark.parametrize(("text", "wanted"), PARTS.items(), ids=PARTS)
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


@pytest.mark.parametrize("text", PARTS)
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
