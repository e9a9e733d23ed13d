"""The plug-in's classes in other releases of vLLM, from their Python files alone.

    python -m tests.serving.releases VERSION=ROOT ...

Compiled parts are missing, so no model runs. The release's own layer of routed experts creates the
plug-in's method, its own loader fills the parameters from a checkpoint, and the result is compared
to the bit with ``grouped.moe`` of the weights that ``grouped.checkpoint`` loads.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tests.serving import folders

LAYER = "model.layers.0.mlp.experts"
#: Checkpoint, scheme, and implementation of transformers with the same formats.
CASES = (
    ("plain", "grouped_bf16", "grouped_bf16"),
    ("plain", "grouped_nvfp4_row_scaled", "grouped_nvfp4_row_scaled"),
    ("modelopt", "grouped_w4a16", "grouped_bf16"),
    ("modelopt, calibrated", "grouped", "grouped_nvfp4_row_scaled"),
    ("compressed-tensors", "grouped", "grouped_bf16"),
    ("compressed-tensors, calibrated", "grouped", "grouped_nvfp4_row_scaled"),
    ("deepseek", "grouped", "grouped_fp8_block"),
    ("fp8-block", "grouped", "grouped_fp8_block"),
)
_SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def make_layer(quant_config: Any, num_ranks: int, rank: int) -> Any:
    """Make the release's layer of routed experts on one of some expert-parallel ranks."""
    import dataclasses

    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    parallel = dataclasses.replace(
        FusedMoEParallelConfig.make_no_parallel(),
        ep_size=num_ranks,
        ep_rank=rank,
        use_ep=num_ranks > 1,
        enable_eplb=num_ranks > 1,
    )
    manager = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=2,
        global_num_experts=8,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    config = FusedMoEConfig(
        num_experts=8,
        experts_per_token=2,
        hidden_dim=256,
        intermediate_size=128,
        num_local_experts=manager.local_num_experts,
        num_logical_experts=8,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )
    return RoutedExperts(LAYER, torch.bfloat16, config, quant_config, manager)


def load(layer: Any, folder: Path) -> None:
    """Fill the parameters of a layer by its own loader, in the order of the files."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if not name.startswith(f"{LAYER}."):
                continue
            expert, projection, suffix = name.removeprefix(f"{LAYER}.").split(".")
            shard = _SHARDS[projection]
            parameter_name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
            parameter = getattr(layer, parameter_name)
            parameter.weight_loader(
                param=parameter,
                loaded_weight=file.get_tensor(name),
                weight_name=f"{LAYER}.{parameter_name}",
                shard_id=shard,
                expert_id=int(expert),
                return_success=True,
            )


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, routing weights and expert ids."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(37, 256, generator=generator).bfloat16()
    ids = torch.rand(37, 8, generator=generator).topk(2).indices.to(torch.int32)
    return x, torch.rand(37, 2, generator=generator), ids


def check_case(root: Path, name: str, scheme: str, implementation: str, num_ranks: int) -> bool:
    """Compare the sum of all ranks' outputs with transformers' experts, and print the result."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization import get_quantization_config

    from grouped.integrations.vllm import SCHEMES

    config_class: Any = get_quantization_config(scheme)
    section = getattr(folders.AutoConfig.from_pretrained(root / name), "quantization_config", None)
    quant_config = config_class() if section is None else config_class.from_config(dict(section))
    model = folders.load(root / name, implementation, SCHEMES[scheme].weight)
    x, p, ids = inputs()
    total = torch.zeros_like(x)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        for rank in range(num_ranks):
            layer = make_layer(quant_config, num_ranks, rank)
            load(layer, root / name)
            layer.quant_method.process_weights_after_loading(layer)
            parameters = list(layer.get_expert_weights())
            assert {len(t) for t in parameters} == {8 // num_ranks}, "EPLB moves whole experts"
            total += layer.forward_modular(x, p, ids)
    with torch.no_grad():
        want = model.get_submodule(LAYER)(x, ids.long(), p)
    is_right = torch.equal(total, want)
    if num_ranks > 1:
        # Each rank rounds its sum to bf16.
        is_right = bool((total - want).norm() / want.norm() < 0.01)
    print(f"{'right' if is_right else 'WRONG'}  {num_ranks} ranks: {name} / {scheme}", flush=True)
    return is_right


def check_release(root: Path) -> bool:
    """Check all cases with the release that ``import vllm`` finds."""
    import vllm

    from grouped.integrations.vllm import register

    print(f"vLLM {vllm.__version__} ({Path(vllm.__file__).parent})", flush=True)
    register()
    folders.integration.register()
    results = [check_case(root, *case, ranks) for case in CASES for ranks in (1, 2)]
    return all(results)


def main(releases: list[str]) -> int:
    """Check each release in a process of its own, and return the exit status."""
    if releases[0] == "--folders":
        return int(not check_release(Path(releases[1])))
    status = 0
    with tempfile.TemporaryDirectory() as root:
        folders.write(Path(root), ("modelopt", "compressed-tensors", "deepseek"))
        for release in releases:
            path = os.pathsep.join((release.partition("=")[2], os.environ.get("PYTHONPATH", "")))
            environment = os.environ | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
            command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--folders", root]
            status |= subprocess.run(command, env=environment, check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
