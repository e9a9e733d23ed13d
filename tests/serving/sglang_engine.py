"""Use SGLang's own classes on a CPU: stand-ins for what it lacks there, and configurations.

SGLang's Python files import on a CPU without its CUDA extensions. Two things are missing: the C++
ops of torchvision, whose wheels are for CUDA, and ``vllm._custom_ops``, which the rotary embedding
imports on a CPU. No test calls them.
"""

import contextlib
import os
import socket
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

_EXTENSION_OPS = ("nms", "qnms")


def add_stand_ins() -> None:
    """Let SGLang's modules be imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in _EXTENSION_OPS:
        if not hasattr(torch.ops.torchvision, name):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
    package, module = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    module.rotary_embedding = None  # type: ignore[attr-defined]
    sys.modules.setdefault("vllm", package)
    sys.modules.setdefault(module.__name__, module)


def publish(backend: str, model_path: str = "dummy", **options: Any) -> Any:
    """Make options of a server those of this process, and return them.

    Args:
        backend: Value of ``--moe-runner-backend``.
        model_path: Folder of the model.
        options: Further options.
    """
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    options = {
        "device": "cpu",
        "dtype": "bfloat16",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "chunked_prefill_size": 2048,
        **options,
    }
    args = ServerArgs(model_path=str(model_path), moe_runner_backend=backend, **options)
    args.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=0)
    runtime_context.publish(args, role="test", ranks=ranks)
    initialize_moe_config()
    return args


def start_groups() -> None:
    """Make process groups of one rank, which SGLang's layers ask for."""
    from sglang.srt.distributed import parallel_state

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    parallel_state.initialize_model_parallel(backend="gloo")


def load_model() -> Any:
    """Load the model of the published options by SGLang's loader."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import process_model_config

    config = process_model_config()
    loader = get_model_loader(LoadConfig(), config)
    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))


@contextlib.contextmanager
def experts_rank(kind: str, rank: int, size: int) -> Iterator[None]:
    """Build layers in the block as one rank of several.

    Args:
        kind: ``"ep"`` divides experts, ``"tp"`` divides each expert.
        rank: The rank.
        size: Number of ranks.
    """
    from sglang.srt.runtime_context import get_parallel

    group = types.SimpleNamespace(world_size=size, rank_in_group=rank)
    values = {}
    for name in ("tp", "attn_tp", f"moe_{kind}"):
        values |= {f"{name}_size": size, f"{name}_rank": rank, f"{name}_group": group}
    with get_parallel().override(**values):
        yield
