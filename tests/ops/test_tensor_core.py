"""Backends ``reference:sm_90a`` and ``reference:sm_100a``: GEMMs with a tensor core's bits."""

import itertools

import pytest
import torch

from cute_kernels import UnsupportedError, active_backend, backend
from cute_kernels.formats import NVFP4
from cute_kernels.reference.codecs import codec_of
from cute_kernels.reference.scales import untile_scales
from cute_kernels.reference.tensor_core import tensor_core_gemm
from tests.helpers import (
  assert_all_same,
  assert_same_bytes,
  each,
  end_rows,
  k_grouped_arguments,
  m_grouped_arguments,
  offsets,
  ops,
  poisoned,
  sample,
)

CORES = ("sm_90a", "sm_100a")
SPLITS = (37, 0, 129, 5)
TAIL = 3
OFFS = offsets(SPLITS)
SPANS = list(zip([0, *end_rows(SPLITS)], end_rows(SPLITS), strict=False))
RCP_TENSOR_MAX = torch.tensor(1.0 / 2688.0)

every_core = each("core", CORES)


def columnwise_copy(x, offs=None):
  return ops.grouped_quantize(x, "nvfp4", offs, rowwise=False, columnwise=True)


def block_values(codes, scales):
  """Code times block scale."""
  return codec_of(NVFP4()).values(codes, scales)


def member(x):
  """Codes, scale bytes and amax of one matrix by itself, blocks along its rows."""
  codes, scales, amax = ops.grouped_quantize(x, "nvfp4", offsets((len(x),)))
  used = scales[: -(-len(x) // 128), :, :]
  linear = untile_scales(used.unsqueeze(1), x.shape[1] // 16).flatten(0, 1)[: len(x)]
  return codes, linear, amax


def transposed_member(x):
  """The same of its columnwise copy, blocks along its columns; rows up to a multiple of 16."""
  codes, scales, amax = columnwise_copy(x, offsets((len(x),)))
  linear = untile_scales(scales, codes.shape[1] // 8)[: x.shape[1]]
  blocks = -(-len(x) // 16)
  return codes[:, : 8 * blocks], linear[:, :blocks], amax


def hopper_order(values):
  """Values (R, K) as ``reference.gemm`` says that sm_90a contracts them: 16 at a time."""
  values = torch.nn.functional.pad(values, (0, -values.shape[1] % 128))
  at = [
    piece + 16 * (2 * j + p) + 8 * w + 2 * h + e
    for piece in range(0, values.shape[1], 128)
    for p, w, h in itertools.product(range(2), repeat=3)
    for j in range(4)
    for e in (0, 1, 4, 5)
  ]
  return values[:, at]


def nvfp4_product(core, a, b, decoded):
  if core == "sm_100a":
    a_scales, b_scales = (x[1].view(torch.float8_e4m3fn) for x in (a, b))
    return tensor_core_gemm(core, a[0], b[0], a_scales=a_scales, b_scales=b_scales)
  values = {"a": hopper_order(block_values(*a[:2])), "b": hopper_order(block_values(*b[:2]))}
  values[decoded] *= 2.0**-14
  return tensor_core_gemm(core, values["a"].half(), values["b"].half()) * 2.0**14


def nvfp4_factor(a, b):
  return (a[2] * RCP_TENSOR_MAX) * (b[2] * RCP_TENSOR_MAX)


def on_core(core, op, *arguments):
  """What is not the plain reference's, or a test would not see which order was used."""
  with backend(f"reference:{core}"):
    got = op(*arguments)
  assert not torch.equal(op(*arguments), got)
  return got


@every_core
@each("transpose_b", [False, True])
@each("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_m_grouped_gemm(core, transpose_b, dtype):
  depth, cols = 200, 24
  a = sample(sum(SPLITS) + TAIL, depth, dtype=dtype)
  b = sample(len(SPLITS), *((depth, cols) if transpose_b else (cols, depth)), dtype=dtype)

  got = on_core(core, ops.m_grouped_gemm, a, b, OFFS, None, None, transpose_b, torch.float32)
  for g, (start, end) in enumerate(SPANS):
    weight = b[g].T if transpose_b else b[g]
    assert_same_bytes(got[start:end], tensor_core_gemm(core, a[start:end], weight))
  assert not got[SPANS[-1][1] :].any()


@every_core
def test_k_grouped_gemm(core):
  a, b = (sample(sum(SPLITS) + TAIL, cols) for cols in (20, 9))

  got = on_core(core, ops.k_grouped_gemm, a, b, OFFS, None, torch.float32)
  for g, (start, end) in enumerate(SPANS):
    assert_same_bytes(got[g], tensor_core_gemm(core, a[start:end].T, b[start:end].T))


@every_core
@each("transpose_b", [False, True])
def test_m_grouped_gemm_nvfp4(core, transpose_b):
  depth, cols = 208, 48  # the depth is no multiple of 64
  x = sample(sum(SPLITS) + TAIL, depth)
  w = sample(len(SPLITS), *((depth, cols) if transpose_b else (cols, depth)))
  a = ops.grouped_quantize(x, "nvfp4", OFFS)
  b = columnwise_copy(w) if transpose_b else ops.grouped_quantize(w, "nvfp4")
  arguments = m_grouped_arguments(a, b, OFFS, None, None, transpose_b, torch.float32)

  got = on_core(core, ops.m_grouped_gemm, *arguments)
  for g, (start, end) in enumerate(SPANS):
    if start == end:
      continue
    pair = member(x[start:end]), (transposed_member if transpose_b else member)(w[g])
    want = nvfp4_product(core, *pair, "b") * nvfp4_factor(*pair)
    assert_same_bytes(got[start:end], want, f"group {g}")


@every_core
@each("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_m_grouped_gemm_w4a16(core, dtype):
  depth, cols = 208, 48
  a = sample(sum(SPLITS) + TAIL, depth, dtype=dtype)
  w = sample(len(SPLITS), cols, depth)
  b = ops.grouped_quantize(w, "nvfp4")
  arguments = m_grouped_arguments(a, b, OFFS, out_dtype=torch.float32)

  got = on_core(core, ops.m_grouped_gemm, *arguments)
  for g, (start, end) in enumerate(SPANS):
    codes, linear, amax = member(w[g])
    weights, rows, scale = block_values(codes, linear), a[start:end], 1.0
    if core == "sm_90a":
      scale = 2.0**-14 if dtype == torch.float16 else 2.0**-7
      weights, rows = hopper_order(weights) * scale, hopper_order(rows.float()).to(dtype)
    product = tensor_core_gemm(core, rows, weights.to(dtype)) / scale
    assert_same_bytes(got[start:end], product * (amax * RCP_TENSOR_MAX), f"group {g}")
  assert not got[SPANS[-1][1] :].any()


@every_core
def test_k_grouped_gemm_nvfp4(core):
  dy, x = (sample(sum(SPLITS) + TAIL, cols) for cols in (48, 32))
  copies = [columnwise_copy(t, OFFS) for t in (dy, x)]
  arguments = k_grouped_arguments(*copies, OFFS, None, torch.float32)

  got = on_core(core, ops.k_grouped_gemm, *arguments)
  for g, (start, end) in enumerate(SPANS):
    if start == end:
      assert not got[g].any()
      continue
    pair = transposed_member(dy[start:end]), transposed_member(x[start:end])
    want = nvfp4_product(core, *pair, "a") * nvfp4_factor(*pair)
    assert_same_bytes(got[g], want, f"group {g}")


@every_core
def test_epilogue_is_that_of_the_reference(core):
  a, b = sample(sum(SPLITS) + TAIL, 64), sample(len(SPLITS), 8, 64)
  bias, alpha = sample(len(SPLITS), 8), torch.rand(len(SPLITS))
  held = torch.randn(len(a), 8).bfloat16()
  out = held.clone()
  with backend(f"reference:{core}"):
    operands = (a, b, OFFS, bias, alpha, False, torch.bfloat16)
    ops.m_grouped_gemm_out(*operands, out=out, accumulate=True)
  for g, (start, end) in enumerate(SPANS):
    acc = tensor_core_gemm(core, a[start:end], b[g])
    want = acc * alpha[g] + bias[g].float() + held[start:end].float()
    assert_same_bytes(out[start:end], want.bfloat16())
  assert_same_bytes(out[SPANS[-1][1] :], held[SPANS[-1][1] :])


@every_core
def test_fp32_operands_are_refused(core):
  a, b = torch.ones(4, 16), torch.ones(1, 8, 16)
  out = poisoned(torch.empty(4, 8))
  before = out.clone()
  with backend(f"reference:{core}"):
    for name, operands in (
      ("m_grouped_gemm", (a, b, offsets((4,)), None, None, False, torch.float32)),
      ("k_grouped_gemm", (a, a, offsets((4,)), None, torch.float32)),
    ):
      with pytest.raises(UnsupportedError, match=f"on reference:{core}: a tensor core cuts"):
        getattr(ops, name)(*operands)
    with pytest.raises(UnsupportedError, match="cuts float32"):
      ops.m_grouped_gemm_out(a, b, offsets((4,)), out=out)
  assert_same_bytes(out, before)


@every_core
def test_backend_names_its_tensor_core(core):
  device = torch.device("cpu")
  assert active_backend(device).tensor_core is None
  with backend(f"reference:{core}"):
    chosen = active_backend(device)
    assert (chosen.arch, chosen.tensor_core) == ("reference", core)
    # Everything that is no GEMM is the reference's.
    x = sample(20, 32)
    got = ops.grouped_quantize(x, "nvfp4", offsets((20,)), columnwise=True)
  want = ops.grouped_quantize(x, "nvfp4", offsets((20,)), columnwise=True)
  assert_all_same(got, want)
