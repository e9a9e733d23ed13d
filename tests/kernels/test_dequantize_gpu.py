"""Dequantization and column sums on a GPU: the reference's bits, and replayed graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers import DTYPES, assert_same_bytes, many_groups
from tests.kernels import test_dbias, test_dequantize

if not torch.cuda.is_available():
  pytest.skip("needs a GPU", allow_module_level=True)


def on_gpu(args: list) -> list:
  """Tensors moved, with their strides."""
  moved = []
  for arg in args:
    if isinstance(arg, Tensor):
      copy = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="cuda")
      arg = copy.copy_(arg)
    moved.append(arg)
  return moved


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", test_dequantize.KINDS)
def test_dequantized_bits(kind: str, dtype: str) -> None:
  cases = [((rows, cols), offs) for rows, cols, offs in test_dequantize.RAGGED.values()]
  cases += [((int(many_groups()[-1]) + 5, 16), many_groups())]
  cases += [(shape, None) for shape in test_dequantize.UNIFORM.values()]
  for shape, offs in cases:
    args = test_dequantize.arguments(shape, offs, kind, dtype)
    got = test_dequantize.dequantize(on_gpu(args))
    assert_same_bytes(got.cpu(), test_dequantize.dequantize(args), any_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_sums(dtype: str) -> None:
  cases = [*test_dbias.CASES.values(), (int(many_groups()[-1]) + 5, 16, many_groups())]
  for rows, cols, offs in cases:
    dy = test_dbias.gradient(rows, cols, offs, dtype)
    got = test_dbias.dbias(dy.cuda(), offs.cuda())
    assert_same_bytes(got.cpu(), test_dbias.dbias(dy, offs), any_nan=True)


def test_a_replayed_graph_reads_the_offsets_anew() -> None:
  rows, cols, offs = test_dequantize.RAGGED["tail"]
  args = test_dequantize.arguments((rows, cols), offs, "row-scaled")
  dy = test_dbias.gradient(rows, cols, offs)
  device_args, device_dy = on_gpu(args), dy.cuda()
  offs_buffer = device_args[3]

  def step() -> tuple[Tensor, Tensor]:
    sums = test_dbias.dbias(device_dy, offs_buffer)
    return test_dequantize.dequantize(device_args), sums

  step()  # compiles
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    out, sums = step()
  for changed in (offs, offs - 2, torch.zeros_like(offs)):
    offs_buffer.copy_(changed)
    graph.replay()
    assert_same_bytes(out.cpu(), test_dequantize.dequantize([*args[:3], changed, *args[4:]]), any_nan=True)
    assert_same_bytes(sums.cpu(), test_dbias.dbias(dy, changed), any_nan=True)
