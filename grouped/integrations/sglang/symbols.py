"""All names of SGLang that the plug-in uses.

Their places change between releases. The plug-in does not compare versions: it runs if it finds
these names. ``docs/guide/sglang.md`` lists the releases that were run.
"""

import importlib
from importlib import metadata
from typing import Any

_LAYERS = "sglang.srt.layers"

#: Names by module. Importing this module imports them, or raises ImportError.
SYMBOLS: dict[str, tuple[str, ...]] = {
    "sglang.srt.arg_groups.choices": ("add_moe_runner_backend_choices",),
    "sglang.srt.model_loader.loader": ("_initialize_model",),
    "sglang.srt.plugins.hook_registry": ("HookRegistry", "HookType"),
    "sglang.srt.runtime_context": (
        "get_exec",
        "get_flags",
        "get_lora",
        "get_model",
        "get_parallel",
        "get_schedule",
        "get_spec",
        "process_model_config",
    ),
    "sglang.srt.utils": ("set_weight_attrs",),
    f"{_LAYERS}.moe.fused_moe_triton.layer": ("FusedMoE", "FusedMoeWeightScaleSupported"),
    f"{_LAYERS}.moe.moe_runner": ("MoeRunner", "MoeRunnerConfig", "register_moe_runner_core"),
    f"{_LAYERS}.moe.moe_runner.base": ("DispatchMoeRunnerCore", "MoeQuantInfo"),
    f"{_LAYERS}.moe.token_dispatcher.standard": ("StandardCombineInput", "StandardDispatchOutput"),
    f"{_LAYERS}.moe.topk": ("StandardTopKOutput",),
    f"{_LAYERS}.moe.utils": (
        "get_moe_a2a_backend",
        "get_moe_runner_backend",
        "resolve_moe_runner_backend",
    ),
    f"{_LAYERS}.quantization.base_config": ("FusedMoEMethodBase",),
    f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors": ("CompressedTensorsConfig",),
    f"{_LAYERS}.quantization.fp8": ("Fp8Config",),
    f"{_LAYERS}.quantization.modelopt_quant": ("ModelOptFp4Config",),
    f"{_LAYERS}.quantization.utils": ("is_layer_skipped",),
}


def _find(module_name: str, name: str) -> Any:
    """Return a name of SGLang, or raise ImportError that says what was not found."""
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"grouped-kernels does not support SGLang {metadata.version('sglang')}, which has no "
            f"{module_name}.{name} ({error}): install a release that docs/guide/sglang.md lists"
        ) from error


globals().update({name: _find(module, name) for module, names in SYMBOLS.items() for name in names})


def __getattr__(name: str) -> Any:
    # For type checkers: the names above are set at run time.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
