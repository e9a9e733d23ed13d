"""Peers: what they are given and how their results are read, where that can be wrong."""

import sys
import types

import pytest
import torch

import grouped
from cute_kernels.reference.scales import tile_scales
from perf.cases import GroupedShape
from perf.measure import meter_of
from perf.operands import Operands
from perf.peers import PEERS, all_peers, pytorch, quack
from perf.peers.base import NOISE, linear_nvfp4, padded_rows, row_scales, unpadded_rows
from perf.suites import layer
from perf.suites.quantize import Input, Quantization
from tests.helpers import each

CPU = torch.device("cpu")
SHAPE = GroupedShape("small", "up", 4, 32, 128)
SIZES = "17 0 130 1"
ROWS = 148


@pytest.fixture
def install(monkeypatch):
  """Put a module with these functions where an import finds it."""

  def put(name, **functions):
    module = types.ModuleType(name)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    return module

  return put


def error_of(contender):
  return contender.error(contender.prepare()())


def product(kind="fprop"):
  return Operands(SHAPE, ROWS, kind, SIZES, CPU, seed=2)


def matmul_of_groups(a, b, ends):
  """What every grouped product is, of rows (T, K) and (G, K, N)."""
  out, start = a.new_zeros(len(a), b.shape[2]), 0
  for group, end in enumerate(ends):
    out[start:end] = (a[start:end].float() @ b[group].float()).to(a.dtype)
    start = end
  return out


def test_every_peer_says_whether_it_is_here():
  peers = all_peers({})
  assert len(peers) == len(PEERS) and len({p.name for p in peers}) == len(peers)
  meter = meter_of("reference", "", True, {})
  missing = {peer.name: peer.missing(meter) for peer in peers}
  assert missing["torch"] == "" and "does not run on" in missing["quack"]
  assert set(all_peers({})[0].versions) == {"torch"}


def test_torch_products():
  for kind in ("fprop", "dgrad", "wgrad"):
    (contender,) = pytorch.PEER({}).products(product(kind))
    assert error_of(contender) <= contender.bound == NOISE["bfloat16"]


@each(
  ("quantize", "decode", "bound"),
  [
    (pytorch.nvfp4_given, pytorch.nvfp4_values, 0.12),
    (pytorch.nvfp4_rows, pytorch.nvfp4_values, 0.1),
    (pytorch.mxfp8_rows, pytorch.mxfp8_values, 0.03),
  ],
)
def test_torch_quantizers(quantize, decode, bound):
  x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
  got = quantize(x, x.abs().amax().float().view(1))
  values = decode(*got)
  assert (values - x.float()).norm() / x.float().norm() < bound
  # Codes in the wrong nibble are no noise.
  if got[0].dtype == torch.uint8:
    swapped = got[0] << 4 | got[0] >> 4
    assert (decode(swapped, *got[1:]) - x.float()).norm() / x.float().norm() > 1


def test_torch_quantizers_fit_the_task():
  data = Input(40, 64, 3, CPU)
  peer = pytorch.PEER({})
  given = [c.format for c in peer.quantizers(data, Quantization("row", True))]
  computed = [c.format for c in peer.quantizers(data, Quantization("row", False))]
  assert (given, computed) == (["nvfp4"], ["nvfp4:row_scaled", "mxfp8"])
  assert not list(peer.quantizers(data, Quantization("row+column", True)))


def test_padding_keeps_rows_apart():
  x = torch.arange(1, 9).float().view(8, 1)
  padded, owner = padded_rows(x, [3, 0, 5], 4)
  assert padded.flatten().tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0]
  assert owner.tolist() == [0, 0, 0, -1, 2, 2, 2, 2, 2, -1, -1, -1]
  assert torch.equal(unpadded_rows(padded, [3, 0, 5], 4), x)


def test_scales_come_out_of_tiles():
  scales = torch.randint(0, 256, (256, 6), dtype=torch.uint8)
  assert torch.equal(row_scales(tile_scales(scales[None])[0], 200, 6), scales[:200])


def test_weights_for_other_libraries_are_ours():
  weight = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
  codes, scales, level = linear_nvfp4(weight)
  values = torch.stack([pytorch.nvfp4_values(c, s, 1 / n) for c, s, n in zip(codes, scales, level, strict=True)])
  want = grouped.quantize(weight, grouped.NVFP4()).dequantize(torch.float32)
  assert torch.allclose(values, want, rtol=1e-6)


def swiglu(pre):
  gate, value = pre.unflatten(-1, (-1, 2)).unbind(-1)
  return torch.nn.functional.silu(gate.float()) * value.float()


def fake_quack(install):
  """quack 0.6.5's calls: the starts of groups, (G, K, N) weights, gate and value interleaved."""

  def gemm(a, b, cu_seqlens_m=None, cu_seqlens_k=None):
    bounds = (cu_seqlens_m if cu_seqlens_k is None else cu_seqlens_k).tolist()
    assert bounds[0] == 0
    if cu_seqlens_k is None:
      return matmul_of_groups(a, b, bounds[1:])
    pairs = list(zip(bounds, bounds[1:], strict=False))
    parts = [(a[:, s:e].float() @ b[s:e].float()).to(b.dtype) for s, e in pairs]
    return torch.stack(parts)

  def gated(a, b, activation, store_preact, cu_seqlens_m):
    assert activation == "swiglu"
    pre = gemm(a, b, cu_seqlens_m)
    return pre if store_preact else None, swiglu(pre).to(a.dtype)

  def dgated(a, b, pre, activation, cu_seqlens_m):
    assert activation == "swiglu"
    d_post = gemm(a, b, cu_seqlens_m)
    leaf = pre.detach().float().requires_grad_()
    post = swiglu(leaf)
    post.backward(d_post.float())
    return leaf.grad.to(a.dtype), post.detach().to(a.dtype)

  install("quack")
  install("quack.gemm_interface", gemm=gemm, gemm_gated=gated, gemm_dgated=dgated)


@each("kind", ["fprop", "dgrad", "wgrad"])
def test_quack_products(install, kind):
  fake_quack(install)
  (contender,) = quack.PEER({}).products(product(kind))
  assert error_of(contender) <= contender.bound


@pytest.mark.parametrize("passes", layer.PASSES)
def test_quack_mlp(install, passes):
  fake_quack(install)
  work = layer.LayerWork("mlp", layer._TINY, 40, "17 0 22 1", passes, CPU)
  (contender,) = quack.PEER({}).layers(work)
  assert error_of(contender) <= contender.bound
  linear = layer.LayerWork("linear", layer._TINY, 40, "17 0 22 1", passes, CPU)
  assert not list(quack.PEER({}).layers(linear))


def test_torchao_quantizers():
  """With the library itself, where it is installed."""
  pytest.importorskip("torchao")
  from perf.peers import torchao

  data = Input(64, 256, 2, CPU)
  for gives in (True, False):
    (contender,) = torchao.PEER({}).quantizers(data, Quantization("row", gives))
    assert error_of(contender) <= contender.bound


def test_checkouts_are_named(tmp_path):
  names = ("CUTLASS", "FlashInfer")
  peers = {peer.name: peer for peer in all_peers({})}
  wrong = {p.name: p for p in all_peers(dict.fromkeys(names, tmp_path))}
  blackwell, hopper = (meter_of(f"emulated:sm_{n}", "", True, {}) for n in ("100a", "90a"))
  for name in names:
    assert f"--path {name}=FOLDER" in peers[name].missing(blackwell)
    assert "sm_100a" in peers[name].missing(hopper)
    assert f"is no checkout of {name}" in wrong[name].missing(blackwell)
