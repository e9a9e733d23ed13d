"""transformers 5: the experts of its Qwen3-MoE, by grouped products."""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..contender import Contender
from ..suites.layer import Step
from ..suites.moe import PEER_BOUND, MoEWork
from .base import Peer


class Transformers(Peer):
	"""``Qwen3MoeExperts`` as ``grouped_mm``, which weights and adds up as well; its router is PyTorch's."""

	name = "transformers"
	module = "transformers"
	kinds = ("gpu", "cpu")

	def mixtures(self, work: MoEWork) -> Iterator[Contender]:
		yield work.contender("transformers", "BF16", lambda: _layer(work), PEER_BOUND, versions=self.versions)


def _layer(work: MoEWork) -> Step:
	config_of: Any = importlib.import_module("transformers").Qwen3MoeConfig
	models: Any = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
	shape = work.shape
	sizes = {"hidden_size": shape.hidden, "moe_intermediate_size": shape.intermediate, "num_experts": shape.experts}
	config = config_of(**sizes, hidden_act="silu")
	config._experts_implementation = "grouped_mm"
	with torch.device("meta"):
		module = models.Qwen3MoeExperts(config)

	def experts(x: Tensor, p: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> Tensor:
		module.gate_up_proj, module.down_proj = up, down
		y: Tensor = module(x, ids, p.to(x.dtype))
		return y

	return work.plain(experts)


PEER = Transformers
