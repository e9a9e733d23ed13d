"""NVFP4's variants as tensors and in layers: seeds, members, saved files, recipes, compilation."""

import dataclasses

import pytest
import torch

import cute_kernels
import grouped
from grouped import NVFP4
from grouped.nn import GroupedLinear
from grouped.recipes import Recipe
from grouped.validation import saved_format
from tests.helpers import Graphs, assert_same_bytes, each, offsets, sample, saved
from tests.reference.oracle_variants import round_bf16, undo_hadamard

STOCHASTIC = NVFP4(stochastic_rounding=True)
SQUARES = NVFP4(block=(16, 16), stochastic_rounding=True)
HADAMARD = NVFP4(hadamard=True)
ROLES = Recipe(HADAMARD, NVFP4(block=(16, 16)), NVFP4(hadamard=True, stochastic_rounding=True))


def bytes_of(x):
  return [t.clone() for copy in (x.rowwise, x.columnwise) if copy for t in copy]


def same(a, b):
  return all(map(torch.equal, bytes_of(a), bytes_of(b)))


# Seeds


@each("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
def test_an_int_is_itself_and_zero(seed):
  x = sample(40, 32)
  one = grouped.quantize(x, STOCHASTIC, offs=[13, 40], columnwise=True, seed=seed)
  pair = torch.tensor([seed, 0])
  assert same(one, grouped.quantize(x, STOCHASTIC, offs=[13, 40], columnwise=True, seed=pair))


@each(
  ("seed", "error", "words"),
  [
    (2**63, ValueError, r"seed must be in \[-2\^63, 2\^63\), got 9223372036854775808"),
    (True, TypeError, "seed must be an int, a .* got True"),
    (1.0, TypeError, "seed must be an int, a .* got 1.0"),
    (torch.tensor([1]), ValueError, "seed must have size 2"),
    (torch.tensor([1.0, 2.0]), TypeError, "seed must be int64, got float32"),
  ],
)
def test_what_is_no_seed(seed, error, words):
  with pytest.raises(error, match=words):
    grouped.quantize(sample(40, 32), STOCHASTIC, offs=[40], seed=seed)


@each("seed", [3, torch.tensor([3, 4])])
def test_a_seed_of_a_format_that_takes_none(seed):
  with pytest.raises(ValueError, match="seed is of stochastic rounding, which nvfp4 does not"):
    grouped.quantize(sample(40, 32), NVFP4(), offs=[40], seed=seed)
  out = grouped.quantize(sample(40, 32), NVFP4(), offs=[40])
  with pytest.raises(ValueError, match="seed is of stochastic rounding"):
    grouped.quantize(sample(40, 32), NVFP4(), offs=[40], seed=seed, out=out)


def test_manual_seed_governs_what_is_not_given():
  x, found = sample(40, 32), []
  for state in (1, 1, 2):
    torch.manual_seed(state)
    found += [grouped.quantize(x, STOCHASTIC, offs=[13, 40], columnwise=True) for _ in "ab"]
  first, second, again, other = found[0], found[1], found[2], found[4]
  assert same(first, again) and same(second, found[3])
  assert not same(first, second) and not same(first, other)


def test_nothing_is_drawn_for_other_formats():
  torch.manual_seed(5)
  want = torch.rand(3)
  torch.manual_seed(5)
  grouped.quantize(sample_of(40, 32), HADAMARD, offs=[40], columnwise=True)
  assert torch.equal(torch.rand(3), want)


def sample_of(*shape):
  """Numbers that draw nothing from the generator."""
  return torch.linspace(-3, 3, shape[0] * shape[1]).view(shape).bfloat16()


@each("fmt", [STOCHASTIC, SQUARES, NVFP4(four_over_six=True), HADAMARD], ids=str)
def test_into_a_tensor_and_in_place(fmt):
  x, y = sample(40, 32), sample(40, 32)
  seed = 9 if fmt.is_stochastic else None
  out = grouped.quantize(x, fmt, offs=[13, 40], columnwise=True)
  grouped.quantize(y, fmt, offs=[20, 40], columnwise=True, seed=seed, out=out)
  assert same(out, grouped.quantize(y, fmt, offs=[20, 40], columnwise=True, seed=seed))
  torch.manual_seed(3)
  out.copy_(x)
  torch.manual_seed(3)
  assert same(out, grouped.quantize(x, fmt, offs=[20, 40], columnwise=True))
  decoded = out.dequantize()
  torch.manual_seed(4)
  out.mul_(3.0)
  torch.manual_seed(4)
  assert same(out, grouped.quantize(decoded * 3.0, fmt, offs=[20, 40], columnwise=True))


# Members


def test_members_of_a_transformed_tensor_hold_whole_blocks():
  x, splits = sample(72, 32), (5, 0, 35, 32)
  q = grouped.quantize(x, HADAMARD, offs=offsets(splits), columnwise=True)
  start = 0
  for member, rows in zip(q.unbind(), splits, strict=True):
    blocks = -(-rows // 16)
    assert member.codes_t.shape == (32, 8 * blocks)
    assert member.scales_t.shape == (32, blocks)
    nibbles = torch.stack([member.codes_t & 15, member.codes_t >> 4], -1).flatten(1)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.where(nibbles >= 8, -1.0, 1.0) * table[(nibbles & 7).long()]
    factor = member.scales_t.float() * member.amax_t * torch.tensor(1 / 2688)
    values *= factor.repeat_interleave(16, 1)
    back = torch.zeros(blocks * 16, 32)
    for block in range(blocks):
      for k in range(32):
        chunk = [v.numpy()[()] for v in values[k, 16 * block : 16 * block + 16]]
        back[16 * block : 16 * block + 16, k] = torch.tensor(undo_hadamard(chunk))
    got = q.dequantize(torch.float32, "columnwise")[start : start + rows]
    assert_same_bytes(got, back[:rows])
    start += rows


def test_a_transformed_copy_decodes_to_what_was_quantized():
  """With an outlier, which the transform spreads, better than without."""
  x = torch.randn(64, 64)
  x[5] *= 40
  x, errors = x.bfloat16(), {}
  for fmt in (HADAMARD, NVFP4()):
    q = grouped.quantize(x, fmt, offs=[64], columnwise=True)
    errors[fmt] = (q.dequantize(torch.float32, "columnwise") - x.float())[6:16].norm()
    assert_same_bytes(q.rowwise.codes, grouped.quantize(x, NVFP4(), offs=[64]).rowwise.codes)
  assert errors[HADAMARD] < 0.2 * x.float().norm()
  assert round_bf16(x[0, 0].float().numpy()[()]) == x[0, 0].float()


# Saved files


def test_records_of_old_files():
  """Written before the bound and the error of four over six were fields."""
  fields = {
    "row_scaled": False,
    "block": (1, 16),
    "hadamard": True,
    "stochastic_rounding": False,
    "four_over_six": False,
  }
  assert saved_format("nvfp4", fields, "0.1.0") == HADAMARD
  assert saved_format("nvfp4", fields | {"hadamard": False}, "0.1.0") == NVFP4()


@each("fmt", [HADAMARD, SQUARES, NVFP4(four_over_six=True, e4m3_max=448, four_over_six_error="mse")], ids=str)
def test_saved_and_loaded(fmt):
  q = grouped.quantize(sample(40, 32), fmt, offs=[13, 40], columnwise=True)
  loaded = saved(q)
  assert loaded.format == fmt and same(loaded, q)


# Recipes


def gradients(layer, x, dy, offs, state=0):
  torch.manual_seed(state)
  x = x.clone().requires_grad_()
  layer.zero_grad()
  y = layer(x, offs)
  y.backward(dy)
  return y.detach(), x.grad, layer.weight.grad.clone()


def test_the_roles_of_nvfp4_training():
  """Products of the decoded operands, whose transforms cancel in wgrad."""
  torch.manual_seed(0)
  layer, offs = GroupedLinear(2, 64, 48, bias=False, recipe=ROLES), offsets((32, 16))
  x, dy = torch.randn(48, 64).bfloat16(), torch.randn(48, 48).bfloat16()
  y, dx, dweight = gradients(layer, x, dy, offs)
  xq = grouped.quantize(x, ROLES.input, offs=offs, columnwise=True)
  torch.manual_seed(0)
  dyq = grouped.quantize(dy, ROLES.grad_output, offs=offs, columnwise=True)
  weight = grouped.quantize(layer.weight.detach(), ROLES.weight, columnwise=True)
  w = weight.dequantize(torch.float32).double()
  rows = [t.dequantize(torch.float32).double() for t in (xq, dyq)]
  columns = [t.dequantize(torch.float32, "columnwise").double() for t in (dyq, xq)]
  spans = (slice(32), slice(32, 48))
  wanted = (
    torch.cat([rows[0][span] @ w[g].T for g, span in enumerate(spans)]),
    torch.cat([rows[1][span] @ w[g] for g, span in enumerate(spans)]),
    torch.stack([columns[0][span].T @ columns[1][span] for span in spans]),
  )
  for got, want in zip((y, dx, dweight), wanted, strict=True):
    assert (got.double() - want).abs().max() <= 2.0**-8 * want.abs().max()


def test_gradients_follow_the_generator():
  layer, x, dy = GroupedLinear(2, 64, 48, recipe=ROLES), sample(40, 64), sample(40, 48)
  first, again, other = (gradients(layer, x, dy, offsets((13, 27)), s) for s in (1, 1, 2))
  assert all(map(torch.equal, first, again))
  assert torch.equal(first[0], other[0])
  assert not torch.equal(first[1], other[1]) and not torch.equal(first[2], other[2])


@each("frozen", ["weight", "input", None])
def test_whatever_gradients_are_wanted(frozen):
  """One op quantizes and multiplies where wgrad is not wanted."""
  torch.manual_seed(0)
  layer, x = GroupedLinear(2, 64, 48, recipe=ROLES), sample(40, 64)
  layer.weight.requires_grad_(frozen != "weight")
  x.requires_grad_(frozen != "input")
  layer(x, offsets((13, 27))).backward(sample(40, 48))
  assert (x.grad is None) == (frozen == "input")
  assert (layer.weight.grad is None) == (frozen == "weight")


def test_a_compiled_layer_draws_anew():
  layer = GroupedLinear(2, 64, 48, recipe=ROLES)
  compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
  for rows in (40, 56):
    x, dy, offs = sample(rows, 64), sample(rows, 48), offsets((13, rows - 13))

    def step(state, x=x, dy=dy, offs=offs):
      torch.manual_seed(state)
      leaf = x.clone().requires_grad_()
      layer.zero_grad()
      compiled(leaf, offs).backward(dy)
      return leaf.grad, layer.weight.grad.clone()

    first, again, other = step(1), step(1), step(2)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


def test_a_compiled_quantize_is_one_graph_for_all_sizes():
  graphs = Graphs()

  def step(x, offs):
    return grouped.quantize(x, STOCHASTIC, offs=offs, columnwise=True).dequantize()

  compiled = torch.compile(step, fullgraph=True, backend=graphs, dynamic=True)
  for rows in (40, 56, 72):
    x, offs = sample(rows, 32), offsets((13, rows - 13))
    torch.manual_seed(6)
    got = compiled(x, offs)
    torch.manual_seed(6)
    assert_same_bytes(got, step(x, offs))
  assert len(graphs) == 1


@each("dtype", [torch.float32, torch.float16])
def test_only_bf16_is_transformed(dtype):
  layer = GroupedLinear(2, 64, 48, recipe=ROLES)
  with torch.no_grad():
    layer(sample(40, 64, dtype=dtype), offsets((13, 27)))
  with pytest.raises(TypeError, match="nvfp4:hadamard transforms .*: cast it, as x.bfloat16"):
    layer(sample(40, 64, dtype=dtype), offsets((13, 27)))
  status = cute_kernels.support("grouped_quantize", HADAMARD, "reference", dtype=dtype, columnwise=True)
  assert not status and "bfloat16 only" in status.reason


@each("propagate", [False, True])
def test_infinities_that_meet_in_a_transform(propagate):
  """Four in a chunk of 16 may leave no infinity; the flag then says that the group is lost."""
  recipe = dataclasses.replace(ROLES, propagate_nonfinite=propagate)
  layer, x = GroupedLinear(2, 64, 48, recipe=recipe), sample(40, 64)
  for i, row in enumerate((0, 1, 2, 3)):
    x[row, 5] = torch.inf * (1 if i % 2 else -1)
  y, _, dweight = gradients(layer, x, sample(40, 48), offsets((20, 20)))
  assert not y[:4].isfinite().any() and dweight[1].isfinite().all()
  if propagate:
    assert not dweight[0].isfinite().any()


def test_four_over_six_loses_less():
  x, plain = sample(64, 64), NVFP4()
  errors = [
    (grouped.quantize(x, fmt, offs=[64]).dequantize(torch.float32) - x.float()).square().sum()
    for fmt in (NVFP4(four_over_six=True, four_over_six_error="mse"), plain)
  ]
  assert errors[0] < errors[1]
  layer = GroupedLinear(2, 64, 48, recipe=Recipe(NVFP4(four_over_six=True), plain, plain))
  assert layer(x, offsets((30, 34))).isfinite().all()
