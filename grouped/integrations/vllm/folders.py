"""Checkpoints with quantized experts: what their ``quantization_config`` says about a layer."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...checkpoint.config import check_quantization_config
from ..serving.experts import PLAIN, StoredExperts
from .symbols import is_layer_skipped


class Folder(NamedTuple):
    """A kind of checkpoint.

    Attributes:
        method: vLLM's name of the method whose configuration reads it.
        find: Returns how the experts of a layer are stored. Its arguments are vLLM's configuration,
            the layer and the layer's name.
    """

    method: str
    find: Callable[[Any, Any, str], StoredExperts]


def _find_modelopt(config: Any, layer: Any, prefix: str) -> StoredExperts:
    """Read a ``ModelOptNvFp4Config``."""
    if config.is_layer_excluded(prefix):
        return PLAIN
    has_inputs = config.quant_method != "W4A16_NVFP4"
    return StoredExperts("modelopt", has_inputs, has_inputs)


def _find_compressed(config: Any, layer: Any, prefix: str) -> StoredExperts:
    """Read a ``CompressedTensorsConfig``."""
    # vLLM's own method of experts does the same: patterns of targets name Linear modules.
    config._add_fused_moe_to_target_scheme_map()
    names = [getattr(layer, f"ckpt_{p}_proj_name", f"{p}_proj") for p in ("gate", "up", "down")]
    schemes = [
        config.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names if name is not None
    ]
    if any(scheme != schemes[0] for scheme in schemes):
        raise ValueError(f"the projections of {prefix} are quantized in different ways")
    scheme = schemes[0]
    if scheme is None or scheme.get("weights") is None:
        return PLAIN
    weights, inputs = scheme["weights"], scheme.get("input_activations")
    layout_name = {4: "compressed-tensors", 8: "fp8-block"}[weights.num_bits]
    # Inputs of NVFP4 have static global scales if they are "local"ly dynamic.
    has_scale = inputs is not None and inputs.dynamic is not True
    return StoredExperts(layout_name, inputs is not None, has_scale)


def _find_fp8(config: Any, layer: Any, prefix: str) -> StoredExperts:
    """Read an ``Fp8Config``."""
    match_mode = getattr(config, "ignored_layers_match_mode", None)
    options = {} if match_mode is None else {"match_mode": match_mode}
    if is_layer_skipped(
        prefix=prefix,
        ignored_layers=config.ignored_layers,
        fused_mapping=config.packed_modules_mapping,
        **options,
    ):
        return PLAIN
    return StoredExperts("deepseek", True)


def _find_gpt_oss(config: Any, layer: Any, prefix: str) -> StoredExperts:
    """Return the layout of gpt-oss, whose experts are all quantized."""
    if layer.activation.value != "swigluoai":
        raise ValueError(
            f"{prefix} is in MXFP4, which --quantization grouped serves for gpt-oss only: omit "
            "--quantization to use vLLM's own kernels"
        )
    return StoredExperts("gpt-oss")


#: Kinds of checkpoints by the ``quant_method`` in their configuration.
FOLDERS: Mapping[str, Folder] = {
    "modelopt": Folder("modelopt_fp4", _find_modelopt),
    "modelopt_fp4": Folder("modelopt_fp4", _find_modelopt),
    "compressed-tensors": Folder("compressed-tensors", _find_compressed),
    "fp8": Folder("fp8", _find_fp8),
    # vLLM renames the method of gpt-oss.
    "mxfp4": Folder("gpt_oss_mxfp4", _find_gpt_oss),
    "gpt_oss_mxfp4": Folder("gpt_oss_mxfp4", _find_gpt_oss),
}


def find_folder(config: Mapping[str, Any], scheme_name: str) -> Folder:
    """Return the kind of a checkpoint from its ``quantization_config``.

    Raises:
        ValueError: Its experts cannot be served. The message has the key and the supported values.
    """
    method = config.get("quant_method")
    if method is None and ("quant_algo" in config or "quantization" in config):
        method = "modelopt"
    folder = FOLDERS.get(str(method).lower())
    if folder is None:
        raise ValueError(
            f"--quantization {scheme_name} serves checkpoints in {', '.join(FOLDERS)} and plain "
            f"ones, but quant_method of this checkpoint is {method!r}: omit --quantization to use "
            "vLLM's own kernels"
        )
    section = copy.deepcopy(dict(config))
    if method == "gpt_oss_mxfp4":
        section["quant_method"] = "mxfp4"
    check_quantization_config(section, f"--quantization {scheme_name}")
    return folder
