"""FP8 products on ``reference:sm_90a`` and ``reference:sm_100a``, against loops of instructions."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import grouped
from cute_kernels import UnsupportedError, backend
from cute_kernels.formats import parse
from cute_kernels.reference.tensor_core import tensor_core_gemm
from tests.helpers import assert_same_bytes, each, m_grouped_arguments, ops
from tests.reference.oracle import RCP_2688
from tests.reference.rational import fp32
from tests.reference.test_gemm_fp8 import F32, FP8_KINDS, FP8_PAIRS, Product, Wgrad, scaled

CORES = ("sm_90a", "sm_100a")
SPLITS = (3, 0, 5)
#: No whole number of instructions or of pieces of 128.
DEPTH = 304 // 32 * 32

each_core = each("core", CORES)
each_way = each("transpose_b", [False, True], ids=["fprop", "dgrad"])


def padded(x):
  return torch.nn.functional.pad(x, (0, -x.shape[1] % 32))


def elements(x, text):
  """Codes (R, K up to a multiple of 32) in their dtype."""
  codes = padded(torch.from_numpy(x.codes))
  return codes.to(parse(text).element.dtype)


def chain(core, a, b, acc=None, scales=None):
  """Instructions of K 32 one after the other, or two of K 16."""
  acc = torch.zeros(len(a), len(b)) if acc is None else acc
  for i, k in enumerate(range(0, a.shape[1], 32)):
    given = {} if scales is None else {"a_scales": scales[0][:, i : i + 1]}
    given |= {} if scales is None else {"b_scales": scales[1][:, i : i + 1]}
    acc = tensor_core_gemm(core, a[:, k : k + 32], b[:, k : k + 32], acc=acc, **given)
  return acc


def split(core, a, b):
  acc = torch.zeros(len(a), len(b))
  for k in range(0, a.shape[1], 128):
    acc = acc + chain(core, a[:, k : k + 128], b[:, k : k + 128])
  return acc


def assert_product(core, got, members, pair, add):
  """``got[index]`` of each group against ``add`` of its operands and the second levels."""
  for index, a, b in members:
    acc = add(core, a, b, elements(a, pair[0]), elements(b, pair[1]))
    levels = [torch.tensor(x.level) for x in (a, b) if x.level is not None]
    factor = levels[0] * levels[1] if levels else None
    assert_same_bytes(got[index], scaled(acc, factor))


def run_m(core, case, accumulation=None):
  with backend(f"reference:{core}"):
    return ops.m_grouped_gemm(*case.arguments(), accumulation=accumulation)


def run_k(core, case, accumulation=None):
  with backend(f"reference:{core}"):
    return ops.k_grouped_gemm(*case.arguments(), accumulation=accumulation)


def m_members(case):
  return [(rows, a, b) for _, rows, a, b in case.members()]


def added(way):
  """How a product of FP8 with one scale a group is added."""
  return lambda core, a, b, left, right: way(core, left, right)


def promoted(core, a, b, left, right):
  """Partial sums of a block, times both scales, each by a fresh accumulator."""
  vec, powers = a.vec, a.vec == 32
  first, second = (a.scales, b.scales) if a.per_row else (b.scales, a.scales)
  acc = np.zeros((len(left), len(right)), np.float32)
  for block, k in enumerate(range(0, left.shape[1], vec)):
    partial = chain(core, left[:, k : k + vec], right[:, k : k + vec])
    for i, j in np.ndindex(*acc.shape):
      at = (i, j) if a.per_row else (j, i)
      s, t = Fraction(first[at[0], block]), Fraction(second[at[1], block])
      p = Fraction(partial[i, j].item())
      product = p * s * t if powers else Fraction(fp32(p * s)) * t
      acc[i, j] = fp32(product + Fraction(float(acc[i, j])))
  return torch.from_numpy(acc)


def block_scaled(core, a, b, left, right):
  """Instructions that take scales of 32 elements."""
  scales = []
  for x in (a, b):
    each = np.repeat(x.scales, x.vec // 32, axis=1)[:, : -(-x.codes.shape[1] // 32)]
    scales.append(torch.from_numpy(each).float().to(torch.float8_e8m0fnu))
    assert np.array_equal(scales[-1].double().numpy(), each)
  return chain(core, left, right, scales=scales)


def way_of(core, pair):
  """How products with block scales are added."""
  records = [parse(text) for text in pair]
  if core == "sm_100a" and all(getattr(r, "pow2_scales", True) for r in records):
    return block_scaled
  return promoted


PLAIN_PAIRS = {name: pair for name, pair in FP8_PAIRS.items() if parse(pair[0]).scale is None}
BLOCK_PAIRS = {name: pair for name, pair in FP8_PAIRS.items() if name not in PLAIN_PAIRS}


@each_core
@each_way
@each("pair", BLOCK_PAIRS)
def test_block_scales(core, pair, transpose_b):
  case = Product(pair, SPLITS, 32, DEPTH, transpose_b=transpose_b)
  got = run_m(core, case)
  assert_product(core, got, m_members(case), pair, way_of(core, pair))
  assert not torch.equal(got, case.run())


@each_core
@each("pair", BLOCK_PAIRS)
def test_block_scales_wgrad(core, pair):
  case = Wgrad(pair, (131, 0, 5), 32, 32)
  got = run_k(core, case)
  assert_product(core, got, case.members(), pair, way_of(core, pair))
  assert not got[1].any()


@each_core
def test_k_of_16_over(core):
  """The last instruction, and the last scale, of K = 144: half of them are zeros."""
  for name in ("fp8", "fp8_block 1D x 2D", "fp32 scales, 2D x 1D"):
    pair = FP8_PAIRS[name]
    case = Product(pair, SPLITS, 16, 144)
    way = added(chain) if name == "fp8" else way_of(core, pair)
    assert_product(core, run_m(core, case), m_members(case), pair, way)


@each_core
@each_way
@each("pair", PLAIN_PAIRS)
@each("accumulation", [None, "fast", "split"])
def test_fp8(core, pair, transpose_b, accumulation):
  case = Product(pair, SPLITS, 32, DEPTH, transpose_b=transpose_b)
  is_split = accumulation == "split" or (accumulation is None and transpose_b)
  way = split if is_split and core == "sm_90a" else chain
  got = run_m(core, case, accumulation)
  assert_product(core, got, m_members(case), pair, added(way))
  assert not got[sum(SPLITS) :].any()


@each_core
@each("pair", PLAIN_PAIRS)
@each("accumulation", [None, "fast", "split"])
def test_fp8_wgrad(core, pair, accumulation):
  case = Wgrad(pair, (200, 0, 131), 16, 32)
  way = chain if accumulation == "fast" or core == "sm_100a" else split
  got = run_k(core, case, accumulation)
  assert_product(core, got, case.members(), pair, added(way))
  assert not got[1].any()


@each_core
def test_quantizing_on_the_way_takes_the_choice(core):
  for transpose_b in (False, True):
    case = Product(FP8_KINDS["fp8"], SPLITS, 32, DEPTH, transpose_b=transpose_b)
    for accumulation in (None, "fast", "split"):
      with backend(f"reference:{core}"):
        got = ops.m_grouped_quantize_gemm(
          *(case.x, case.b[0], case.offs, case.b[1:], *case.pair),
          *(None, None, transpose_b, F32),
          accumulation=accumulation,
        )
      assert_same_bytes(got, run_m(core, case, accumulation))


@each_core
def test_grouped_takes_the_choice(core):
  fmt = grouped.FP8()
  x = grouped.quantize(torch.randn(40, 256), fmt, offs=[10, 40], columnwise=True)
  w = grouped.quantize(torch.randn(2, 48, 256), fmt, columnwise=True)
  dy = grouped.quantize(torch.randn(40, 48), fmt, offs=[10, 40], columnwise=True)
  products = ((x, w, {}), (dy, w, {"transpose_b": True}), (dy, x, {}))
  defaults = ("fast", "split", "split")
  with backend(f"reference:{core}"):
    for (a, b, way), default in zip(products, defaults, strict=True):
      found = {}
      for accumulation in (None, "fast", "split"):
        options = {"out_dtype": F32, "accumulation": accumulation, **way}
        found[accumulation] = grouped.grouped_gemm(a, b, **options)
        out = torch.empty_like(found[accumulation])
        options = {"accumulation": accumulation, **way}
        grouped.grouped_gemm(a, b, out=out, **options)
        assert_same_bytes(out, found[accumulation])
      assert_same_bytes(found[None], found[default])


def decoded(x, dtype):
  """Codes times block scales, rounded to fp32 and to ``dtype``."""
  scales = np.ones((len(x.codes), 1)) if x.scales is None else x.scales
  scales = np.repeat(scales, x.vec, axis=1)[:, : x.codes.shape[1]]
  wide = np.float64 if dtype == torch.float64 else np.float32
  return torch.from_numpy(wide(x.codes) * wide(scales)).to(dtype)


@each_way
@each("text", ["fp8:dtype=e5m2", "fp8_block", "fp8_block:block=128x128,pow2_scales=false", "mxfp8"])
def test_w4a8(text, transpose_b):
  """Both operands are decoded to bf16; without a tensor core products are exact."""
  case = Product((text, "nvfp4"), SPLITS, 32, DEPTH, transpose_b=transpose_b)
  got, exact = run_m("sm_100a", case), case.run()
  for _, rows, a, b in case.members():
    left, right = (decoded(x, torch.bfloat16) for x in (a, b))
    levels = [torch.tensor(x.level) for x in (a, b) if x.level is not None]
    levels[-1] *= torch.tensor(RCP_2688)
    factor = levels[0] * levels[1] if len(levels) > 1 else levels[0]
    assert_same_bytes(got[rows], scaled(chain("sm_100a", left, right), factor))
    left, right = (decoded(x, torch.float64) for x in (a, b))
    assert_same_bytes(exact[rows], scaled((left @ right.T).float(), factor))
  with pytest.raises(UnsupportedError, match="no sm_90a kernel of grouped_gemm_w4a8"):
    run_m("sm_90a", case)


@each_core
@each("pair", FP8_KINDS)
@each("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_are_decoded_beside_plain_operands(core, pair, dtype):
  """Code times block scale, rounded to fp32 and to the other operand's dtype; then one chain."""
  case = Product(pair, SPLITS, 24, 304 // 32 * 32)
  x = case.x.to(dtype)
  arguments = m_grouped_arguments(x, case.b, case.offs, out_dtype=F32, b_format=pair[1])
  with backend(f"reference:{core}"):
    got = ops.m_grouped_gemm(*arguments)
  for _, rows, _, b in case.members():
    acc = chain(core, x[rows], decoded(b, dtype))
    assert_same_bytes(got[rows], scaled(acc, b.level))
