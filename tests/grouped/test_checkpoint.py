"""``torch.distributed.checkpoint``: both ways of saving keep the bytes."""

import pytest
import torch
from torch import nn

import grouped
from tests.grouped.cases import EVERY_FORMAT, FORMATS, WEIGHT_FORMAT, bytes_of, parameter, weight
from tests.helpers import assert_same_buffers, assert_same_bytes, each, sample

dcp = pytest.importorskip("torch.distributed.checkpoint")
pytestmark = [
  pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
  pytest.mark.filterwarnings("ignore:TypedStorage"),
]


def save(state, folder):
  dcp.save(state, checkpoint_id=folder, no_dist=True)


def async_save(state, folder):
  dcp.async_save(state, checkpoint_id=folder, no_dist=True).result()


def state_of():
  """Rows of codes that are padded to 16 bytes, a weight, and a plain tensor."""
  return {
    "tokens": grouped.quantize(sample(40, 48), FORMATS["row-scaled"], offs=[13, 40]),
    "weight": parameter(),
    **{name: parameter(fmt=fmt) for name, fmt in EVERY_FORMAT.items()},
    "prepacked": nn.Parameter(grouped.quantize(weight(), WEIGHT_FORMAT).prepack(), False),
    "plain": torch.randn(5),
  }


@each("write", [save, async_save])
def test_saving_and_loading_keeps_the_bytes(tmp_path, write):
  torch.manual_seed(5)
  state = state_of()
  write(state, tmp_path)
  held = {name: bytes_of(t) for name, t in state.items() if name != "plain"}
  loaded = {name: t.detach() for name, t in state_of().items()}
  assert not torch.equal(loaded["weight"].rowwise.codes, state["weight"].rowwise.codes)
  dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
  for name, want in held.items():
    got = bytes_of(loaded[name])
    assert loaded[name].format == state[name].format
    for part, value in want.items():
      assert_same_bytes(got[part], value, f"{name} {part}")
  assert torch.equal(loaded["plain"], state["plain"])


def test_a_staged_tensor_does_not_follow_later_writes(tmp_path):
  p = parameter(requires_grad=False)
  before = bytes_of(p)
  future = dcp.async_save({"w": p}, checkpoint_id=tmp_path, no_dist=True)
  p.zero_()
  future.result()
  loaded = {"w": parameter(requires_grad=False)}
  dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
  assert_same_buffers(bytes_of(loaded["w"]), before)


def test_what_staging_asks_for():
  p = parameter()
  like = p.new_empty(p.shape, device="cpu")
  assert type(like) is grouped.GroupedTensor and like.format == p.format
  assert like.rowwise.codes.data_ptr() != p.rowwise.codes.data_ptr()
  assert type(p.new_empty(p.shape)) is torch.Tensor
  assert type(p.new_empty((3,), device="cpu")) is torch.Tensor
  assert not p.is_pinned()
