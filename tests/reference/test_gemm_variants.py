"""Products of NVFP4's variants: their codes as they are, each tensor's own bound, transforms."""

import itertools

import numpy as np
import pytest
import torch

import cute_kernels
from cute_kernels.formats import parse
from tests.helpers import assert_same_bytes, k_grouped_arguments, m_grouped_arguments, offsets, ops, sample
from tests.reference import oracle
from tests.reference.oracle_variants import FourOverSix, Hadamard, SquareFourOverSix

SPLITS = (5, 0, 18)
OFFS = offsets(SPLITS)
N, K = 16, 48
F32 = torch.float32
BOUNDS = {256: "nvfp4:four_over_six", 448: "nvfp4:four_over_six,e4m3_max=448"}
SQUARES = "nvfp4:block=16x16,four_over_six"
STOCHASTIC = "nvfp4:stochastic_rounding"
TRANSFORMED = "nvfp4:hadamard"


def copy_of(text, *shape, columnwise=False):
  """One direction of a ragged tensor (T, K), or of a uniform one."""
  fmt, offs = parse(text), OFFS if len(shape) == 2 else None
  seed = torch.tensor([1, 2]) if fmt.is_stochastic else None
  return ops.grouped_quantize(sample(*shape), text, offs, None, not columnwise, columnwise, None, seed)


def factor(amax, bound):
  return amax * np.float32(1 / (6 * bound))


@pytest.mark.parametrize(("a_bound", "b_bound"), [*itertools.product((256, 448), (256, 448))])
@pytest.mark.parametrize("by_row", [False, True])
def test_each_side_has_its_own_bound(a_bound, b_bound, by_row):
  x, w = sample(sum(SPLITS), K), sample(3, N, K)
  a_text = BOUNDS[a_bound].replace("nvfp4:", "nvfp4:row_scaled,") if by_row else BOUNDS[a_bound]
  b_text = SQUARES if b_bound == 256 else SQUARES + ",e4m3_max=448"
  groups, tiles = oracle.ragged_groups(OFFS.tolist(), len(x))
  members, all_tiles = oracle.uniform_groups(3, N)
  a = oracle.quantize(x.float().numpy(), groups, tiles, row_scaled=by_row, rule=FourOverSix(a_bound, "mae"))
  b = oracle.quantize(
    w.float().flatten(0, 1).numpy(),
    members,
    all_tiles,
    uniform=True,
    block_2d=True,
    rule=SquareFourOverSix(b_bound, "mae"),
  )
  left, right = oracle.row_values(a, groups, K), oracle.row_values(b, members, K)
  want = np.zeros((len(x), N), np.float32)
  for g, group in enumerate(groups):
    for r, n in itertools.product(range(group.start, group.end), range(N)):
      level = factor(a.amax[r if by_row else g], a_bound) * factor(b.amax[g], b_bound)
      want[r, n] = oracle.dot_blocks(left[r], right[g * N + n]) * level
  args = m_grouped_arguments(
    ops.grouped_quantize(x, a_text, OFFS),
    ops.grouped_quantize(w, b_text),
    OFFS,
    out_dtype=F32,
    a_format=a_text,
    b_format=b_text,
  )
  assert_same_bytes(ops.m_grouped_gemm(*args), torch.from_numpy(want))


def as_whole_blocks(group):
  """As if all slots of a group's blocks were rows, and those lay as slots do."""
  first, blocks = 128 * group.tile, -(-(group.end - group.start) // 16)
  return oracle.Group(first, first + 16 * blocks, group.tile, group.tiles)


def test_wgrad_reads_whole_blocks_of_a_transformed_copy():
  """Also the slots behind a group's last row, over which its rows are spread."""
  dy, x = sample(sum(SPLITS), N), sample(sum(SPLITS), K)
  groups, tiles = oracle.ragged_groups(OFFS.tolist(), len(x))
  sides = []
  for t in (dy, x):
    q = oracle.quantize(t.float().numpy(), groups, tiles, rule=Hadamard())
    whole = [as_whole_blocks(group) for group in groups]
    q.codes = np.zeros((tiles * 128, t.shape[1] // 2), np.uint8)
    sides.append((oracle.column_values(q, whole, t.shape[1]), q.amax_t, whole))
  want = np.zeros((3, N, K), np.float32)
  (left, amax_a, whole), (right, amax_b, _) = sides
  for g, group in enumerate(whole):
    rows = slice(group.start, group.end)
    for n, k in itertools.product(range(N), range(K)):
      if group.end > group.start:
        level = oracle.nvfp4_factor(amax_a[g], amax_b[g])
        want[g, n, k] = oracle.dot_blocks(left[rows, n], right[rows, k]) * level
  copies = [ops.grouped_quantize(t, TRANSFORMED, OFFS, None, False, True) for t in (dy, x)]
  arguments = k_grouped_arguments(*copies, OFFS, out_dtype=F32, a_format=TRANSFORMED, b_format=TRANSFORMED)
  got = ops.k_grouped_gemm(*arguments)
  assert_same_bytes(got, torch.from_numpy(want))
  starts = (0, 5, 5)
  for g, (start, rows) in enumerate(zip(starts, SPLITS, strict=True)):
    exact = dy[start : start + rows].double().T @ x[start : start + rows].double()
    assert (got[g] - exact).norm() <= 0.3 * exact.norm()


@pytest.mark.parametrize("text", [TRANSFORMED, STOCHASTIC])
@pytest.mark.parametrize("backend", ["reference", "reference:sm_90a", "reference:sm_100a"])
def test_codes_are_multiplied_as_those_of_plain_nvfp4(text, backend):
  """A variant is in how codes come about: any accumulator gives the bits of the same codes."""
  a, w = copy_of(text, sum(SPLITS), K), copy_of(text, 3, N, K)
  a_t, b_t = (copy_of(text, sum(SPLITS), cols, columnwise=True) for cols in (N, K))
  found = {}
  with cute_kernels.backend(backend):
    for name in (text, "nvfp4"):
      texts = {"a_format": name, "b_format": name}
      found[name] = (
        ops.m_grouped_gemm(*m_grouped_arguments(a, w, OFFS, **texts)),
        ops.k_grouped_gemm(*k_grouped_arguments(a_t, b_t, OFFS, **texts)),
      )
  for got, want in zip(*found.values(), strict=True):
    assert_same_bytes(got, want)


def test_w4a16_reads_variants():
  x = sample(sum(SPLITS), K)
  for text in (TRANSFORMED, STOCHASTIC, BOUNDS[256], BOUNDS[448], SQUARES):
    w = copy_of(text, 3, N, K)
    values = ops.grouped_dequantize(w[0], w[1:], text, N, F32)
    got = ops.m_grouped_gemm(*m_grouped_arguments(x, w, OFFS, out_dtype=F32, b_format=text))
    spans = zip(values, ((0, 5), (5, 5), (5, 23)), strict=True)
    want = torch.cat([x[s:e].double() @ v.double().T for v, (s, e) in spans])
    assert (got - want).abs().max() <= 1e-5 * want.abs().max(), text
