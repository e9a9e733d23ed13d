"""Kernels of the experts are compiled, or loaded from disk, before vLLM's server is ready."""

from typing import Any

import torch
from torch import Tensor

from ..serving import warmup
from ..serving.warmup import TokenCounts
from .symbols import init_logger

logger = init_logger(f"vllm.{__name__}")


def token_counts(config: Any, moe: Any) -> TokenCounts:
    """Return the numbers of tokens in calls, from vLLM's configuration.

    With data parallelism, experts get the tokens of all ranks.
    """
    ranks = moe.moe_parallel_config.dp_size
    sizes = config.compilation_config.cudagraph_capture_sizes or ()
    largest = config.scheduler_config.max_num_batched_tokens * ranks
    counts = sorted({size * ranks for size in sizes})
    return TokenCounts(largest, tuple(count for count in counts if count <= largest))


def warm_up(method: Any, layer: Any, counts: TokenCounts) -> None:
    """Compile and load the kernels of a layer's calls, unless an equal layer did.

    Args:
        method: The layer's method.
        layer: vLLM's ``RoutedExperts``.
        counts: Numbers of tokens in calls.
    """
    device = method.operands(layer)[0].device
    like = torch.empty(0, dtype=method.moe.in_dtype, device=device)
    sizes = layer.hidden_size, layer.top_k, layer.global_num_experts

    def call(count: int) -> Tensor:
        result: Tensor = method.apply(layer, *warmup.spread_tokens(count, *sizes, like))
        return result

    key = (
        (*method.formats[:2], *sizes, method.moe.in_dtype),
        (layer.activation.value, layer.apply_router_weight_on_input, layer.expert_map is None),
    )
    warmup.warm_up(method, call, counts, key, logger)
