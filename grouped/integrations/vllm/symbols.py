"""All names of vLLM that the plug-in uses.

Their places change between releases. The plug-in does not compare versions: it runs if it finds
these names. ``docs/guide/vllm.md`` lists the releases that were run.
"""

import importlib
from typing import Any

#: Names by module. Importing this module imports them, or raises ImportError.
SYMBOLS: dict[str, tuple[str, ...]] = {
    "vllm": ("envs",),
    "vllm.config": ("get_current_vllm_config",),
    "vllm.logger": ("init_logger",),
    "vllm.model_executor.layers.fused_moe.config": ("FUSED_MOE_UNQUANTIZED_CONFIG",),
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base": ("FusedMoEMethodBase",),
    "vllm.model_executor.layers.fused_moe.routed_experts": (
        "FusedMoeWeightScaleSupported",
        "RoutedExperts",
    ),
    "vllm.model_executor.layers.linear": ("LinearBase", "UnquantizedLinearMethod"),
    "vllm.model_executor.layers.quantization": (
        "QUANTIZATION_METHODS",
        "get_quantization_config",
        "register_quantization_config",
    ),
    "vllm.model_executor.layers.quantization.base_config": ("QuantizationConfig",),
    "vllm.model_executor.layers.quantization.utils.quant_utils": ("is_layer_skipped",),
    "vllm.model_executor.model_loader.reload.layerwise": ("initialize_online_processing",),
    "vllm.model_executor.utils": ("set_weight_attrs",),
}


def _find(module_name: str, name: str) -> Any:
    """Return a name of vLLM, or raise ImportError that says what was not found."""
    version = importlib.import_module("vllm").__version__
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"grouped-kernels does not support vLLM {version}, which has no {module_name}.{name}: "
            "install a release that docs/guide/vllm.md lists"
        ) from error


globals().update({name: _find(module, name) for module, names in SYMBOLS.items() for name in names})


def __getattr__(name: str) -> Any:
    # For type checkers: the names above are set at run time.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
