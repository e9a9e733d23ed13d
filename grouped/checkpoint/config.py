"""Configuration files of a checkpoint: ``save`` writes them, ``load`` checks them."""

import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .files import CONFIG, MODELOPT_CONFIG, read_json
from .layouts import Layout, stacked_suffix
from .weights import ALIASES

#: The keys of ``config.json`` that describe a quantization.
_QUANTIZATION = ("quantization_config", "compression_config")


class QuantizedWeight(NamedTuple):
    """A quantized weight in a checkpoint: one projection of one expert, or of all experts.

    Attributes:
        name: Name without a suffix. It is ``...experts.0.gate_proj`` or
            ``...experts.gate_up_proj``.
        is_stacked: True if one tensor has all experts.
    """

    name: str
    is_stacked: bool

    def tensor(self, suffix: str) -> str:
        """Return the name of its tensor with this suffix in the layout."""
        return self.name + (stacked_suffix(suffix) if self.is_stacked else suffix)


def without_quantization(config: Any) -> Any:
    """Return a model's configuration without quantization configs, at any depth."""
    if not isinstance(config, Mapping):
        return config
    return {
        key: without_quantization(value)
        for key, value in config.items()
        if key not in _QUANTIZATION
    }


def config_files(
    config: Mapping[str, Any],
    layout: Layout,
    weights: Collection[QuantizedWeight],
    plain: Iterable[str],
    names: Collection[str],
) -> dict[str, Any]:
    """Return the content of the configuration files by name, for the tensors that were written.

    It says that activations are quantized only if each quantized weight has the static scale of its
    input.

    Args:
        config: The model's configuration.
        layout: Layout of the quantized weights.
        weights: The quantized weights.
        plain: Names of modules whose weights are not quantized.
        names: Names of all tensors that were written.

    Raises:
        ValueError: The configuration would name a tensor that was not written, or list a quantized
            module as plain.

    Warns:
        UserWarning: Some quantized weights have no input scale, or a reader misreads the layout.
    """
    suffix = layout.input_scale
    scaled = [weight for weight in weights if suffix and weight.tensor(suffix) in names]
    if 0 < len(scaled) < len(weights):
        lacking = next(weight.name for weight in weights if weight not in scaled)
        warnings.warn(
            f"{len(weights) - len(scaled)} of {len(weights)} quantized weights have no input "
            f"scale, such as {lacking}: the config says that weights alone are quantized",
            stacklevel=4,
        )
    if layout.reader_warning and "model_type" in config:
        warnings.warn(layout.reader_warning, stacklevel=4)
    has_inputs = bool(weights) and len(scaled) == len(weights)
    ignored = list(dict.fromkeys(plain))
    targets = sorted(
        {
            weight.name.rpartition(".")[0]
            for weight in weights
            if weight.is_stacked and "." in weight.name
        }
    )
    _check_promises(layout, weights, ignored, names, has_inputs)
    described = layout.describe(ignored, has_inputs, targets)
    return {
        CONFIG: {**without_quantization(config), "quantization_config": described},
        **layout.extra_files(described),
    }


def _check_promises(
    layout: Layout,
    weights: Collection[QuantizedWeight],
    ignored: Collection[str],
    names: Collection[str],
    has_inputs: bool,
) -> None:
    """Raise ValueError if the configuration would not match the tensors that were written."""
    suffixes = (*layout.suffixes, layout.input_scale) if has_inputs else layout.suffixes
    promised = [weight.tensor(suffix) for weight in weights for suffix in suffixes if suffix]
    missing = [name for name in promised if name not in names]
    if missing:
        raise ValueError(
            f"the config would promise {missing[0]}, which was not written ({len(missing)} such "
            "tensors)"
        )
    duplicates = {weight.name for weight in weights} & set(ignored)
    if duplicates:
        raise ValueError(
            f"{min(duplicates)} is quantized, but another weight of that name is plain: rename one "
            "of them"
        )
    for name in ignored:
        scale = next(
            (name + suffix for suffix in layout.suffixes[1:] if name + suffix in names), None
        )
        if scale:
            raise ValueError(
                f"{name} is written plain, but {scale} is written too: no reader would know it is "
                "plain"
            )


def check_model_config(config: Any) -> None:
    """Raise ValueError if a model's configuration is not a mapping, or JSON cannot represent it."""
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config must be a mapping, such as model.config.to_dict(), got {type(config).__name__}"
        )
    for key, value in config.items():
        if fault := _json_fault({key: value}):
            raise ValueError(f"config[{key!r}] cannot be written to {CONFIG}: {fault}")


def _json_fault(value: Any) -> str | None:
    """Return the reason why JSON cannot represent a value, or None if it can."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def describes_quantization(config: Mapping[str, Any]) -> bool:
    """Return True if a model's configuration has a quantization config, at any depth."""
    return any(True for _ in quantization_sections(config))


def is_plain_dtype(dtype: str) -> bool:
    """Return True if a name of torch or safetensors is of a dtype that is not quantized."""
    return re.fullmatch(r"(b?float|BF|F)(16|32|64)", dtype) is not None


def check_plain(name: str, dtype: str, is_weight: bool = False) -> None:
    """Raise ValueError for a weight that would be copied, but is not plain.

    Args:
        name: Name of the tensor.
        dtype: Name of its dtype in torch or safetensors.
        is_weight: True checks a tensor whose name does not end in ``.weight``, too.
    """
    if (is_weight or name.endswith(".weight")) and not is_plain_dtype(dtype):
        raise ValueError(
            f"{name} is {dtype}: only experts are quantized, other weights must be plain (bf16, "
            "fp16 or fp32). Dequantize the model first"
        )


def resolve_input_scales(
    scales: Mapping[str, Tensor] | None, layout: Layout, weights: Collection[QuantizedWeight]
) -> dict[str, Tensor]:
    """Return the static scales of activations, fp32, by their names in the files.

    Args:
        scales: Scales by name. A name may have Mixtral's names of the projections.
        layout: Layout of the weights.
        weights: The quantized weights.

    Raises:
        ValueError: The layout has no input scales, a name does not have its suffix, or a scale is
            not finite and positive.

    Warns:
        UserWarning: A scale belongs to no quantized weight.
    """
    if not scales:
        return {}
    suffix = layout.input_scale
    if suffix is None:
        raise ValueError(
            f"layout {layout.name} has no input scales: its readers scale activations as they run"
        )
    known = {weight.tensor(suffix) for weight in weights}
    accepted: dict[str, Tensor] = {}
    unknown: list[str] = []
    suffixes = (suffix, stacked_suffix(suffix))
    for name, scale in scales.items():
        if not name.endswith(suffixes):
            raise ValueError(
                f"input_scales of layout {layout.name} are called ...{suffix}, got {name!r}"
            )
        if not scale.is_floating_point() or not bool(((scale > 0) & scale.isfinite()).all()):
            raise ValueError(f"{name} must be finite and positive, got {scale}")
        alias = _with_other_projection(name)
        target = name if name in known else alias if alias in known else None
        if target is None:
            unknown.append(name)
        else:
            accepted[target] = scale.to(torch.float32)
    if unknown:
        warnings.warn(
            f"{len(unknown)} input scales are left out, as their weights are not quantized in this "
            f"file: {unknown[0]}",
            stacklevel=3,
        )
    return accepted


def _with_other_projection(name: str) -> str:
    """Return a name with Mixtral's names of projections replaced, such as w1 by gate_proj."""
    words = {alias: projection for projection, alias in ALIASES.items()}
    return ".".join(words.get(word, word) for word in name.split("."))


def check_config(folder: str | Path) -> None:
    """Raise ValueError for a checkpoint whose configuration ``load`` does not support.

    ``load`` reads weights. So it cannot apply online transforms of activations, and it supports the
    formats of ``LAYOUTS`` only. It ignores entries about the KV cache and about modules to leave
    out.

    Raises:
        ValueError: ``config.json`` or ``hf_quant_config.json`` is not valid JSON, or is not
            supported. Then the message has the file, the key, the value and the supported values.
    """
    path = Path(folder) / CONFIG
    for key, content in quantization_sections(read_json(path)):
        _check_section(_Section(path, key, content))
    path = Path(folder) / MODELOPT_CONFIG
    content = read_json(path)
    if content:
        section = _Section(path, "", content)
        _check_transforms(section)
        _check_modelopt(section)


def check_quantization_config(config: dict[str, Any], source: str) -> None:
    """Raise ValueError for a ``quantization_config`` that ``check_config`` would refuse.

    Args:
        config: The object in ``config.json``. Its entries may be normalized in place.
        source: Name of its origin, for messages.
    """
    _check_section(_Section(Path(source), "quantization_config", config))


def quantization_sections(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all quantization configs at any depth, with the path of their keys."""
    for key, value in config.items():
        if key in _QUANTIZATION:
            if value:
                yield prefix + key, value
        elif isinstance(value, Mapping):
            yield from quantization_sections(value, f"{prefix}{key}.")


class _Section:
    """An object in a configuration file.

    Attributes:
        path: Path of the file.
        key: Path of the keys to the object.
        content: The object.
    """

    def __init__(self, path: Path, key: str, content: Any) -> None:
        self.path, self.key = path, key
        if not isinstance(content, dict):
            self._fail(key, content, "an object")
        self.content: dict[str, Any] = content

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key."""
        return self.content.get(key, default)

    def inner(self, key: str) -> "_Section":
        """Return the object of a key."""
        return _Section(self.path, self._key(key), self.content[key])

    def items(self, key: str) -> "list[_Section]":
        """Return the objects in the object ``key``, or [] if there is none."""
        value = self.content.get(key)
        if not value:
            return []
        inner = self.inner(key)
        return [inner.inner(name) for name in inner.content]

    def require(self, key: str, *accepted: Any, default: Any = None) -> None:
        """Raise ValueError unless the value of ``key`` is one of ``accepted``.

        Args:
            key: The key.
            accepted: Supported values.
            default: Value if the key is missing or null.
        """
        value = self.content.get(key)
        value = default if value is None else value
        if not any(type(value) is type(choice) and value == choice for choice in accepted):
            self.refuse(
                key,
                " or ".join(json.dumps(choice) for choice in accepted if choice is not None)
                or "no such key",
            )

    def refuse(self, key: str, accepted: str) -> None:
        """Raise ValueError for the value of a key. ``accepted`` describes supported values."""
        self._fail(self._key(key), self.content.get(key), accepted)

    def _key(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else key

    def _fail(self, key: str, value: Any, accepted: str) -> None:
        """Raise ValueError with the file, the key, the value and the supported values."""
        text = json.dumps(value)
        text = text if len(text) < 200 else f"{text[:200]}..."
        raise ValueError(f"{self.path}: {key} is {text}, but load reads only {accepted}")


def _check_section(section: _Section) -> None:
    """Check one quantization config with the function of its method."""
    method = section.get("quant_method")
    if method is None and ("quant_algo" in section.content or "quantization" in section.content):
        method = "modelopt"
    check = _METHODS.get(method) if isinstance(method, str) else None
    if check is None:
        section.refuse("quant_method", " or ".join(json.dumps(name) for name in _METHODS))
        return
    _check_transforms(section)
    check(section)


#: Locations in compressed-tensors at which a transform acts on weights only. The files have the
#: transformed weights.
_OFFLINE = ("weight_input", "weight_output")
#: Keys of other exporters for a rotation or smoothing of activations at run time.
_ONLINE_KEYS = re.compile(r"(?i)rotat|hadamard|spin_?quant|quarot|smooth_?quant|online_")


def _check_transforms(section: _Section) -> None:
    """Raise ValueError for transforms of activations, at any depth."""
    for key, value in section.content.items():
        if key == "transform_config" and value:
            _check_locations(section.inner(key))
        elif value and _ONLINE_KEYS.search(key):
            section.refuse(key, "checkpoints whose activations are not transformed")
        elif isinstance(value, dict) and key != "quantized_layers":
            _check_transforms(section.inner(key))


def _check_locations(transforms: _Section) -> None:
    """Raise ValueError for transforms of compressed-tensors that act on activations."""
    for scheme in transforms.items("config_groups"):
        applied = scheme.get("apply")
        for i, apply in enumerate(applied if isinstance(applied, list) else [applied]):
            transform = _Section(scheme.path, f"{scheme.key}.apply[{i}]", apply)
            if transform.get("location") not in _OFFLINE:
                transform.refuse(
                    "location",
                    f"{' or '.join(map(json.dumps, _OFFLINE))}: it transforms no activations",
                )


#: Algorithms of ModelOpt with plain NVFP4 weights.
_NVFP4 = ("NVFP4", "W4A16_NVFP4")


def _check_modelopt(section: _Section) -> None:
    """Accept NVFP4 weights without smoothing, in the form of each of the two files."""
    if isinstance(section.get("quantization"), dict):
        _check_modelopt(section.inner("quantization"))
        return
    algo = section.get("quant_algo")
    if algo is None and not section.get("config_groups") and not section.get("quantized_layers"):
        return  # Nothing is quantized.
    section.content["quant_algo"] = algo.upper() if isinstance(algo, str) else algo
    section.require("quant_algo", *_NVFP4, "MIXED_PRECISION")
    layers = section.items("quantized_layers")
    for options in (section, *layers, *section.items("config_groups")):
        options.require("group_size", 16, default=16)
        options.require("pre_quant_scale", False, default=False)
        options.require("has_zero_point", False, default=False)
    for layer in layers:
        layer.require("quant_algo", *_NVFP4)
    _check_groups(section, {"num_bits": 4, "type": "float", "group_size": 16})


def _check_groups(section: _Section, numbers: dict[str, Any]) -> None:
    """Raise ValueError unless weights and inputs of each config group have these options."""
    for group in section.items("config_groups"):
        _check_group(group, numbers, numbers)


def _check_group(group: _Section, weights: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Raise ValueError unless weights and inputs of a group have these options, if any."""
    for key, numbers in (("weights", weights), ("input_activations", inputs)):
        if group.get(key) is not None:
            options = group.inner(key)
            for name, value in numbers.items():
                options.require(name, value, default=value)
    group.require("output_activations", None)


_PACKED = "nvfp4-pack-quantized"
#: Presets of compressed-tensors that may replace a group.
_PRESETS = ("NVFP4", "NVFP4A16", "FP8_BLOCK")
_NVFP4_NUMBERS = {
    "num_bits": 4,
    "type": "float",
    "group_size": 16,
    "strategy": "tensor_group",
    "symmetric": True,
}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
#: Options of weights and of inputs, by the format of the group.
_COMPRESSED = {
    _PACKED: (_NVFP4_NUMBERS, _NVFP4_NUMBERS),
    "float-quantized": ({**_FP8, "strategy": "block", "block_structure": [128, 128]}, _FP8),
}


def _check_compressed(section: _Section) -> None:
    """Accept groups of the formats ``nvfp4-pack-quantized`` and ``float-quantized``."""
    groups = section.inner("config_groups").content if section.get("config_groups") else {}
    written = {name: group for name, group in groups.items() if not isinstance(group, list)}
    for name in groups:
        if name not in written and name not in _PRESETS:
            section.inner("config_groups").refuse(
                name, f"groups that are written out, or the presets {', '.join(_PRESETS)}"
            )
    section.content["config_groups"] = written
    section.require("format", *_COMPRESSED, "mixed-precision", default=_PACKED)
    for group in section.items("config_groups"):
        group.require("format", *_COMPRESSED, default=section.get("format", _PACKED))
        _check_group(group, *_COMPRESSED[group.get("format") or section.get("format") or _PACKED])
        if group.get("weights") is not None:
            group.inner("weights").require("dynamic", False, default=False)
            group.inner("weights").require("actorder", None, False, "static", "weight")
    sparsity = section.get("sparsity_config")
    if sparsity:
        section.inner("sparsity_config").require("format", "dense", default="dense")


def _check_fp8(section: _Section) -> None:
    """Accept E4M3 in 128x128 blocks."""
    section.require("weight_block_size", [128, 128])
    section.require("activation_scheme", "dynamic", default="dynamic")
    section.require("fmt", "e4m3", default="e4m3")
    section.require("store_dtype", None)


def _check_mxfp4(section: _Section) -> None:
    """Accept gpt-oss's blocks of 32."""
    section.require("weight_block_size", None)


#: Functions that check a configuration, by its ``quant_method``.
_METHODS: dict[str, Callable[[_Section], None]] = {
    "modelopt": _check_modelopt,
    "modelopt_fp4": _check_modelopt,
    "compressed-tensors": _check_compressed,
    "fp8": _check_fp8,
    "mxfp4": _check_mxfp4,
}
