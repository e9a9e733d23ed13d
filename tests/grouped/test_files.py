"""Bytes in a file of another kind: names, plain tensors and the format's text say everything."""

import pytest
import torch

import grouped
from cute_kernels import formats
from tests.grouped.cases import EVERY_FORMAT
from tests.helpers import assert_all_same, assert_same_bytes, each, sample, saved

DIRECTIONS = ("rowwise", "columnwise")


@each("ragged", [False, True])
@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_plain_tensors_make_the_tensor_again(name, ragged):
  fmt = EVERY_FORMAT[name]
  shape = (35, 64) if ragged else (3, 32, 64)
  offs = torch.tensor([13, 13, 35], dtype=torch.int32) if ragged else None
  given = {"scale": torch.full((3,), 8.0)} if fmt.takes_scale else {}
  q = grouped.quantize(sample(*shape), fmt, offs=offs, columnwise=True, **given)
  names = fmt.buffer_names(False)
  # What both directions share is stored once, as of files that refuse tensors twice.
  shared = [name for name in names if name in fmt.buffer_names(True)]
  buffers = {
    f"{way}.{name}": tensor
    for way in DIRECTIONS
    for name, tensor in zip(names, getattr(q, way), strict=True)
    if way == "rowwise" or name not in shared
  }
  assert len({t.data_ptr() for t in buffers.values()}) == len(buffers)
  read = saved({"format": fmt.text, "tensors": buffers})
  fmt, tensors = formats.parse(read["format"]), read["tensors"]
  copies = [
    grouped.QuantizedCopy(fmt, [tensors.get(f"{way}.{name}", tensors[f"rowwise.{name}"]) for name in names])
    for way in DIRECTIONS
  ]
  again = grouped.GroupedTensor(shape, torch.bfloat16, fmt, offs, *copies)
  assert again.format == q.format
  for way in DIRECTIONS:
    assert_same_bytes(again.dequantize(direction=way), q.dequantize(direction=way))
    assert_all_same(getattr(again, way), getattr(q, way))
