"""humming-kernels 0.1: bf16 rows times NVFP4 weights (W4A16)."""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..operands import Operands
from .base import W4A16Peer, linear_nvfp4


class Humming(W4A16Peer):
    """Humming: its grouped contiguous product, in the tiles that its heuristics choose."""

    name = "Humming"
    module = "humming"
    distribution = "humming-kernels"

    def prepare(self, work: Operands) -> Callable[[], Tensor]:
        """Load the weights into a layer, and return its call."""
        layer = (
            importlib.import_module("humming.layer")
            .HummingLayer(
                shape_n=work.shape.n,
                shape_k=work.shape.k,
                weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
                num_experts=work.shape.experts,
                torch_dtype=torch.bfloat16,
            )
            .to(work.device)
        )
        codes, scales, global_scale = linear_nvfp4(work.b)
        layer.load_from_tensors(
            {"weight": codes, "weight_scale": scales, "weight_scale_2": global_scale.view(-1, 1)}
        )
        layer.transform()
        starts = F.pad(work.offs, (1, 0)).long()
        kind = {"gemm_type": "grouped_contiguous"}
        config = importlib.import_module("humming.tune").get_heuristics_config(
            layer_config=layer.humming_config, gemm_type=kind["gemm_type"], device=work.device
        )
        return functools.partial(
            layer, work.a, expert_layout=starts, compute_config=kind, tuning_config=config
        )


PEER = Humming
