"""Checkpoints with quantized experts: what SGLang's quantization configurations say of a layer."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from ...checkpoint.config import check_quantization_config
from ..serving.experts import PLAIN, StoredExperts
from .symbols import (
    CompressedTensorsConfig,
    Fp8Config,
    ModelOptFp4Config,
    is_layer_skipped,
    process_model_config,
)

_SERVED = (
    "plain experts, ModelOpt NVFP4, compressed-tensors NVFP4 and FP8 in blocks of 128x128, and "
    "DeepSeek FP8"
)


def _find_modelopt(config: Any, layer: Any, prefix: str) -> StoredExperts | None:
    """Read a ``ModelOptFp4Config``."""
    if config.is_layer_excluded(prefix):
        return PLAIN
    if not config.is_checkpoint_nvfp4_serialized or config.is_awq or config.group_size != 16:
        return None
    return StoredExperts("modelopt", not config.is_w4a16, not config.is_w4a16)


def _find_compressed(config: Any, layer: Any, prefix: str) -> StoredExperts | None:
    """Read a ``CompressedTensorsConfig``."""
    # SGLang's own method of experts does the same: patterns of targets name Linear modules.
    config._add_fused_moe_to_target_scheme_map()
    names = [f"{prefix}.0.{projection}_proj" for projection in ("gate", "up", "down")]
    schemes = [config.get_scheme_dict(layer, name) for name in names]
    if any(scheme != schemes[0] for scheme in schemes):
        raise ValueError(f"the projections of {prefix} are quantized in different ways")
    scheme = schemes[0]
    if scheme is None or scheme.get("weights") is None:
        return PLAIN
    weights, inputs = scheme["weights"], scheme.get("input_activations")
    kind = weights.num_bits, str(getattr(weights.type, "value", weights.type))
    strategy = str(getattr(weights.strategy, "value", weights.strategy))
    layout_name = {
        ((4, "float"), "tensor_group", 16): "compressed-tensors",
        ((8, "float"), "block", (128, 128)): "fp8-block",
    }.get((kind, strategy, weights.group_size or tuple(weights.block_structure or ())))
    if layout_name is None:
        return None
    # Inputs of NVFP4 have static global scales if they are "local"ly dynamic.
    has_scale = inputs is not None and inputs.dynamic is not True
    return StoredExperts(layout_name, inputs is not None, has_scale)


def _find_fp8(config: Any, layer: Any, prefix: str) -> StoredExperts | None:
    """Read an ``Fp8Config``."""
    if is_layer_skipped(prefix, config.ignored_layers, config.packed_modules_mapping):
        return PLAIN
    is_served = (
        config.is_checkpoint_fp8_serialized
        and list(config.weight_block_size or ()) == [128, 128]
        and config.activation_scheme == "dynamic"
        and not (config.use_mxfp8 or config.is_fp4_experts)
    )
    return StoredExperts("deepseek", True) if is_served else None


#: Readers by class of SGLang's configuration. A subclass stores experts in another way.
READERS: dict[type, Callable[[Any, Any, str], StoredExperts | None]] = {
    ModelOptFp4Config: _find_modelopt,
    CompressedTensorsConfig: _find_compressed,
    Fp8Config: _find_fp8,
}


def find_stored_experts(layer: Any, prefix: str, option: str, omit: str) -> StoredExperts:
    """Return how the checkpoint stores the experts of a layer.

    Args:
        layer: SGLang's ``FusedMoE``.
        prefix: Name of the layer.
        option: The user's option, for messages.
        omit: Advice that gives SGLang's own kernels.

    Raises:
        ValueError: They cannot be served.
    """
    config = layer.quant_config
    if config is None:
        return PLAIN
    reader = READERS.get(type(config))
    stored = None if reader is None else reader(config, layer, prefix)
    if stored is None:
        raise ValueError(
            f"{option} serves {_SERVED}, but the experts of {prefix} are stored in another way, "
            f"which SGLang reads as {config.get_name()} by its {type(config).__name__}: {omit}"
        )
    # Facts that SGLang's configurations do not have, such as rotations of activations.
    stored_config = getattr(process_model_config().hf_config, "quantization_config", None)
    if stored.layout_name is not None and isinstance(stored_config, Mapping):
        check_quantization_config(copy.deepcopy(dict(stored_config)), option)
    return stored
