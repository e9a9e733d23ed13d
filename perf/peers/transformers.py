"""transformers: experts of its Qwen3-MoE, by grouped products."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from perf.peers.base import Peer

if TYPE_CHECKING:
  from collections.abc import Iterator

  from torch import Tensor

  from perf.contender import Contender
  from perf.suites.layer import Step
  from perf.suites.moe import MoEWork


class Transformers(Peer):
  """``Qwen3MoeExperts``; the router is PyTorch's."""

  name = "transformers"
  module = "transformers"
  distribution = "transformers"
  kinds = ("gpu", "cpu")

  def mixtures(self, work: MoEWork) -> Iterator[Contender]:
    """The layer in bf16."""
    yield work.contender("transformers", "BF16", lambda: _layer(work), 0.1, capturable=False, versions=self.versions)


def _layer(work: MoEWork) -> Step:
  config_of: Any = importlib.import_module("transformers").Qwen3MoeConfig
  models: Any = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
  shape = work.shape
  config = config_of(
    hidden_size=shape.hidden, moe_intermediate_size=shape.intermediate, num_experts=shape.experts, hidden_act="silu"
  )
  config._experts_implementation = "grouped_mm"
  router, up, down = parameters = work.parameters
  with torch.device("meta"):
    experts = models.Qwen3MoeExperts(config)
  experts.gate_up_proj, experts.down_proj = (torch.nn.Parameter(p, work.backward) for p in (up, down))
  parameters = [router, experts.gate_up_proj, experts.down_proj]

  def forward(x: Tensor) -> Tensor:
    weights, ids = work.choose(x, router)
    y: Tensor = experts(x, ids, weights.to(x.dtype))
    return y

  return work.step(forward, [[p] for p in parameters])


PEER = Transformers
