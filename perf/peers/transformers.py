"""transformers 5: the experts of its Qwen3-MoE and gpt-oss, by grouped products."""

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
    """transformers: its experts with the implementation ``grouped_mm``.

    They apply the routing weights and sum the results. Router and shared expert are PyTorch's.
    """

    name = "transformers"
    module = "transformers"
    kinds = ("gpu", "cpu")

    def mixtures(self, work: MoEWork) -> Iterator[Contender]:
        """Yield the layer in bf16."""
        yield work.contender("transformers", "BF16", lambda: _layer(work), PEER_BOUND)


def _layer(work: MoEWork) -> Step:
    """Return the pass with the experts of Qwen3-MoE, or of gpt-oss if there are biases."""
    is_biased, shape = "bias" in work.options, work.shape
    name, title = ("gpt_oss", "GptOss") if is_biased else ("qwen3_moe", "Qwen3Moe")
    models: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    sizes = {
        "hidden_size": shape.hidden,
        "num_experts": shape.experts,
        "num_local_experts": shape.experts,
    }
    sizes |= dict.fromkeys(("intermediate_size", "moe_intermediate_size"), shape.intermediate)
    config = getattr(models, f"{title}Config")(**sizes, hidden_act="silu")
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = getattr(models, f"{title}Experts")(config)
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")

    def experts(x: Tensor, p: Tensor, ids: Tensor, *weights: Tensor) -> Tensor:
        # The weights of gpt-oss are (E, K, N).
        ordered = [w.transpose(1, 2) if is_biased and w.dim() == 3 else w for w in weights]
        tensors = dict(zip(names, ordered, strict=False))
        return torch.func.functional_call(module, tensors, (x, ids, p.to(x.dtype)))

    return work.plain(experts)


PEER = Transformers
