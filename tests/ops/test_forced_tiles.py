"""Every tile that can be forced, with hundreds of groups: the bits of the reference."""

import functools
import itertools

import pytest
import torch

import cute_kernels
from cute_kernels.formats import parse
from cute_kernels.gemm.variants import CONFIGS
from cute_kernels.ops.launch.gemm import force_tile
from tests.helpers import assert_same_bytes, each, k_grouped_arguments, m_grouped_arguments, ops, sample

pytest.importorskip("cutlass")

K, N, GROUPS = 32, 48, 300


def many_ends():
  """Most groups are empty or have a row or two; some have a tile's rows, or one more."""
  sizes = torch.randint(0, 3, (GROUPS,))
  sizes[100:180] = 0
  sizes[[0, 50, 181, 299]] = torch.tensor([129, 33, 257, 64])
  return sizes.cumsum(0).int()


def quantized(x, offs=None, columnwise=False, text="nvfp4"):
  """What products take of one direction."""
  with cute_kernels.backend("reference"):
    buffers = ops.grouped_quantize(x, text, offs, None, not columnwise, columnwise)
  fmt = parse(text)
  named = dict(zip(fmt.buffer_names(columnwise), buffers, strict=True))
  return [named[name] for name in fmt.operand_names(columnwise)]


def fprop(offs, text="nvfp4"):
  x, w = quantized(sample(int(offs[-1]) + 5, K), offs, text=text), quantized(sample(GROUPS, N, K), text=text)
  arguments = m_grouped_arguments(x, w, offs, out_dtype=torch.float32, a_format=text, b_format=text)
  return ops.m_grouped_gemm_out, arguments, (len(x[0]), N)


def wgrad(offs):
  rows = int(offs[-1]) + 5
  copies = [quantized(sample(rows, cols), offs, columnwise=True) for cols in (N, K)]
  arguments = k_grouped_arguments(*copies, offs, out_dtype=torch.float32)
  return ops.k_grouped_gemm_out, arguments, (GROUPS, N, K)


PRODUCTS = {"m_grouped": fprop, "k_grouped": wgrad}


def product(backend, multiply, arguments, shape):
  out = torch.full(shape, 3.0)
  with cute_kernels.backend(backend):
    multiply(*arguments, out=out)
  return out


@functools.cache
def problem(grouping, arch, *text):
  """A call and what it gives."""
  torch.manual_seed(0)
  call = PRODUCTS[grouping](many_ends(), *text)
  return call, product(f"reference:{arch}", *call)


def cases():
  for arch, grouping in itertools.product(CONFIGS, PRODUCTS):
    base = CONFIGS[arch]("nvfp4", grouping, tile=CONFIGS[arch].any_tile(grouping))
    for tile in filter(base.takes, CONFIGS[arch].tile_shapes):
      yield pytest.param(arch, grouping, tile, id=f"{arch} {grouping} {tile}")


@each(("arch", "grouping", "tile"), [*cases()])
def test_hundreds_of_groups(arch, grouping, tile):
  call, want = problem(grouping, arch)
  with force_tile(tile):
    assert_same_bytes(product(f"emulated:{arch}", *call), want)


@each(("i", "tile"), [*enumerate(CONFIGS["sm_100a"].tile_shapes)], ids=str)
def test_hundreds_of_groups_of_other_kinds(i, tile):
  """Kinds of tensor cores by turns, each with tiles of one CTA and of two, swapped and not."""
  call, want = problem("m_grouped", "sm_100a", ("mxfp8", "fp8", "fp8_block")[i % 3])
  with force_tile(tile):
    assert_same_bytes(product("emulated:sm_100a", *call), want)
