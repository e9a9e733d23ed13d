"""The example that users see first, with smaller sizes, compiled by Inductor."""

import re
from pathlib import Path

import pytest
import torch

import cute_kernels
import grouped
from tests.helpers import assert_same_bytes, needs_compiler

README = Path(__file__).parents[2] / "README.md"
SIZES = {"4096": "64", "1024": "48"}


def example(word: str) -> str:
  """The code of the README's block with this word in it, with small sizes."""
  blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
  code = next(block for block in blocks if word in block)
  for large, small in SIZES.items():
    code = code.replace(large, small)
  return code


@needs_compiler
def test_the_example_runs_and_says_what_is_true():
  torch._dynamo.reset()
  names = {}
  exec(compile(example("torch.compile"), str(README), "exec"), names)
  x, w, offs = names["x"], names["w"], names["offs"]
  xq, wq, layer, y = names["xq"], names["wq"], names["layer"], names["y"]
  assert type(xq) is type(wq) is grouped.GroupedTensor
  assert (xq.num_groups, wq.num_groups) == (4, 4) and xq.offs is not None and wq.offs is None
  assert y.shape == (256, 48) and y.dtype == torch.bfloat16
  assert names["x2"].shape == x.shape and names["x2"].dtype == x.dtype
  assert_same_bytes(y.detach(), layer(x, offs).detach())
  got = grouped.grouped_gemm(xq, wq)
  for g, (start, end) in enumerate(((0, 80), (80, 128), (128, 128), (128, 256))):
    want = x[start:end].float() @ w[g].float().T
    error = (got[start:end].float() - want).norm()
    assert error <= 0.2 * want.norm()
  compiled = layer.weight.grad.clone()
  assert not compiled[2].any() and compiled[3].any()
  layer.zero_grad()
  layer(x, offs).sum().backward()
  assert_same_bytes(layer.weight.grad, compiled)


def test_the_mixture_runs():
  torch._dynamo.reset()
  names = {"torch": torch, "grouped": grouped}
  code = example("grouped.nn.MoE(").replace("fullgraph=True", "fullgraph=True, backend='eager'")
  exec(compile(code, str(README), "exec"), names)
  moe, y, losses = names["moe"], names["y"], names["losses"]
  assert y.shape == (64, 48) and losses.tokens_per_expert.sum() == 64 * 4
  assert all(p.grad is not None for p in moe.parameters())
  assert moe.router.selection_bias.any()


def test_the_emulated_example_gives_the_bits_of_a_tensor_core():
  pytest.importorskip("cutlass")
  torch._dynamo.reset()
  names = {"cute_kernels": cute_kernels}
  code = example("torch.compile").split("layer =")[0] + example("emulator.stats")
  exec(compile(code, str(README), "exec"), names)
  with cute_kernels.backend("reference:sm_100a"):
    want = grouped.grouped_gemm(names["xq"], names["wq"])
  assert_same_bytes(names["y"], want)
  assert cute_kernels.emulator.stats()["mma_flops"] > 0


def test_the_page_on_groups_says_what_is_true():
  page = (README.parent / "docs" / "groups.md").read_text()
  (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
  names = {"torch": torch, "grouped": grouped}
  exec(compile(code, "groups.md", "exec"), names)
  q, shapes = names["q"], names["shapes"]
  assert q.element_offsets[-1] == sum(m * n for m, n in shapes) == 29_696
  assert q.shapes.tolist() == [list(shape) for shape in shapes]
  assert q.member(1).codes.shape == (1, 2048) and q.dequantize().shape == (40_000,)
  assert not q.dequantize()[29_696:].any()
