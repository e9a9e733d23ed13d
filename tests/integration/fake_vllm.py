"""A few names of vLLM, so that the plug-in's method runs where vLLM is not installed."""

import contextlib
import enum
import logging
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

#: The configuration that ``get_current_vllm_config`` returns.
CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(enable_sleep_mode=False),
    compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4]),
    scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
)


class _MethodBase:
    def __init__(self, moe: Any) -> None:
        self.moe = moe


class _ScaleKinds(enum.Enum):
    BLOCK = "block"
    TENSOR = "tensor"


class _Config:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return "theirs"


class _ModelOptConfig(_Config):
    """Stands for ``ModelOptNvFp4Config``."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        self = cls()
        self.quant_method, self.ignored = config["quant_algo"], config.get("ignore", [])
        return self

    def is_layer_excluded(self, prefix: str) -> bool:
        return prefix in self.ignored


class RoutedExperts(torch.nn.Module):
    """Stands for vLLM's layer of routed experts."""

    def __init__(
        self, experts: int = 4, *, activation: str = "silu", expert_map: Any = None, **options: Any
    ) -> None:
        super().__init__()
        parallel = SimpleNamespace(
            dp_size=1, use_all2all_kernels=False, all2all_backend="allgather_reducescatter"
        )
        self.moe_config = SimpleNamespace(
            is_lora_enabled=False,
            moe_parallel_config=parallel,
            has_bias=False,
            in_dtype=torch.bfloat16,
        )
        self.layer_name, self.hidden_size, self.top_k = "model.layers.0.mlp.experts", 64, 2
        self.activation, self.expert_map = SimpleNamespace(value=activation), expert_map
        self.global_num_experts = experts if expert_map is None else len(expert_map)
        self.apply_router_weight_on_input = False
        for name, value in options.items():
            setattr(self, name, value)


METHODS: list[str] = ["fp8", "modelopt_fp4", "compressed-tensors"]
REGISTERED: dict[str, type] = {}


def _register(name: str) -> Any:
    METHODS.append(name)
    return lambda cls: REGISTERED.setdefault(name, cls)


def _set_attributes(parameter: Any, attributes: dict[str, Any] | None) -> None:
    vars(parameter).update(attributes or {})


_LAYERS = "vllm.model_executor.layers"
NAMES: dict[str, dict[str, Any]] = {
    "vllm": {"envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False), "__version__": "0.0"},
    "vllm.config": {"get_current_vllm_config": lambda: CONFIG},
    "vllm.logger": {"init_logger": logging.getLogger},
    f"{_LAYERS}.fused_moe.config": {"FUSED_MOE_UNQUANTIZED_CONFIG": object()},
    f"{_LAYERS}.fused_moe.fused_moe_method_base": {"FusedMoEMethodBase": _MethodBase},
    f"{_LAYERS}.fused_moe.routed_experts": {
        "FusedMoeWeightScaleSupported": _ScaleKinds,
        "RoutedExperts": RoutedExperts,
    },
    f"{_LAYERS}.linear": {
        "LinearBase": torch.nn.Linear,
        "UnquantizedLinearMethod": type("UnquantizedLinearMethod", (), {}),
    },
    f"{_LAYERS}.quantization": {
        "QUANTIZATION_METHODS": METHODS,
        "get_quantization_config": {"modelopt_fp4": _ModelOptConfig}.get,
        "register_quantization_config": _register,
    },
    f"{_LAYERS}.quantization.base_config": {"QuantizationConfig": _Config},
    f"{_LAYERS}.quantization.utils.quant_utils": {"is_layer_skipped": lambda **_: False},
    "vllm.model_executor.model_loader.reload.layerwise": {
        "initialize_online_processing": lambda layer: None
    },
    "vllm.model_executor.utils": {"set_weight_attrs": _set_attributes},
}
#: Modules of the plug-in that import these names.
_USERS = [
    f"grouped.integrations.vllm.{name}"
    for name in ("symbols", "folders", "warmup", "checks", "method", "config")
]


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Let imports of vLLM find these names in a ``with`` block."""
    real = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.partition(".")[0] == "vllm" or name in _USERS
    }
    for module_name, names in NAMES.items():
        module = types.ModuleType(module_name)
        vars(module).update(names)
        sys.modules[module_name] = module
    try:
        yield
    finally:
        for name in (*NAMES, *_USERS):
            sys.modules.pop(name, None)
        sys.modules |= real
