"""Kernels of the experts are compiled, or loaded from disk, before SGLang captures graphs."""

import logging
from typing import Any

import torch
from torch import Tensor

from ..serving import warmup
from ..serving.warmup import TokenCounts
from .symbols import (
    StandardDispatchOutput,
    StandardTopKOutput,
    get_exec,
    get_parallel,
    get_schedule,
    get_spec,
    process_model_config,
)

logger = logging.getLogger(f"sglang.{__name__}")


def token_counts() -> TokenCounts:
    """Return the numbers of tokens in calls, from SGLang's configuration.

    A batch is a part of prompts, up to ``--chunked-prefill-size`` tokens, and with
    ``--enable-mixed-chunk`` also one token of each running request; or some tokens of each running
    request. Under ``--enable-dp-attention``, experts get the tokens of all ranks.
    """
    schedule, spec, graphs = get_schedule(), get_spec(), get_exec().graph.cuda_graph_config
    per_request = (spec.speculative_num_draft_tokens or 1) if spec.speculative_algorithm else 1
    requests = schedule.max_running_requests or (graphs.decode.max_bs if graphs else 0) or 0
    if (chunk := schedule.chunked_prefill_size or 0) > 0:
        largest = chunk
    else:
        largest = max(schedule.max_prefill_tokens or 0, process_model_config().context_len)
    if schedule.enable_mixed_chunk:
        largest += requests
    ranks = get_parallel().attn_dp_size
    captured: set[int] = set()
    if graphs is not None:
        captured |= {count * per_request for count in graphs.decode.bs or ()}
        captured |= set(graphs.prefill.bs or ())
    largest = max(largest, requests * per_request, *captured, 1)
    return TokenCounts(largest * ranks, tuple(sorted(count * ranks for count in captured)))


def warm_up(method: Any, layer: Any) -> None:
    """Compile and load the kernels of a layer's calls, unless an equal layer did.

    Args:
        method: The layer's method.
        layer: SGLang's ``FusedMoE``.
    """
    config = layer.moe_runner_config
    device = method.operands(layer)[0].device
    like = torch.empty(0, dtype=layer.params_dtype, device=device)
    # Shared experts in slots of the layer are columns of the routing.
    sizes = layer.hidden_size, layer.top_k, layer.num_local_experts

    def call(count: int) -> Tensor:
        """Call the experts with a number of tokens."""
        x, weights, ids = warmup.spread_tokens(count, *sizes, like)
        routing = StandardTopKOutput(weights, ids, None)
        tokens = StandardDispatchOutput(
            hidden_states=x, hidden_states_scale=None, topk_output=routing
        )
        result: Tensor = method.apply(layer, tokens).hidden_states
        return result

    key = (
        (*method.formats[:2], *sizes, like.dtype, method.activation),
        (config.apply_router_weight_on_input, config.routed_scaling_factor),
    )
    warmup.warm_up(method, call, token_counts(), key, logger)
