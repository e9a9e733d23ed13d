"""The configuration files of a checkpoint: written for other readers, and checked before ``load``."""

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


class Quantized(NamedTuple):
    """A quantized weight of a file: of one projection of one expert, or of all experts if
    ``is_stacked``.

    Attributes:
        name: its name without a suffix, ``...experts.0.gate_proj`` or
            ``...experts.gate_up_proj``.
        is_stacked: all experts are one tensor.
    """

    name: str
    is_stacked: bool

    def tensor(self, suffix: str) -> str:
        """The name of one of its tensors."""
        return self.name + (stacked_suffix(suffix) if self.is_stacked else suffix)


def without_quantization(config: Any) -> Any:
    """A model's configuration without what it says of an earlier quantization, also of its parts."""
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
    weights: Collection[Quantized],
    plain: Iterable[str],
    names: Collection[str],
) -> dict[str, Any]:
    """The content of the configuration files by name, true of the tensors that were written.

    It says that activations are quantized only if each quantized weight has the static scale of its
    input.

    Args:
        config: the model's configuration.
        layout: the layout of the quantized weights.
        weights: the quantized weights.
        plain: names of modules whose weights are not quantized.
        names: the names of the tensors in the files.

    Raises:
        ValueError: a tensor is missing that the configuration promises, or a module is said to
            be plain that is not.
    """
    suffix = layout.input_scale
    scaled = [weight for weight in weights if suffix and weight.tensor(suffix) in names]
    if 0 < len(scaled) < len(weights):
        lacking = next(weight.name for weight in weights if weight not in scaled)
        warnings.warn(
            f"{len(weights) - len(scaled)} of {len(weights)} quantized weights have no input scale, such as {lacking}: the "
            "config says that weights alone are quantized",
            stacklevel=4,
        )
    if layout.misread and "model_type" in config:
        warnings.warn(layout.misread, stacklevel=4)
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
    weights: Collection[Quantized],
    ignored: Collection[str],
    names: Collection[str],
    has_inputs: bool,
) -> None:
    """Compare what the configuration says with the names of the tensors that were written."""
    suffixes = (*layout.suffixes, layout.input_scale) if has_inputs else layout.suffixes
    promised = [weight.tensor(suffix) for weight in weights for suffix in suffixes if suffix]
    missing = [name for name in promised if name not in names]
    if missing:
        raise ValueError(
            f"the config would promise {missing[0]}, which was not written ({len(missing)} such tensors)"
        )
    duplicates = {weight.name for weight in weights} & set(ignored)
    if duplicates:
        raise ValueError(
            f"{min(duplicates)} is quantized, but another weight of that name is plain: rename them apart"
        )
    for name in ignored:
        scale = next(
            (name + suffix for suffix in layout.suffixes[1:] if name + suffix in names), None
        )
        if scale:
            raise ValueError(
                f"{name} is written plain, but {scale} is written too: no reader would know it is plain"
            )


def check_model_config(config: Any) -> None:
    """Raise ValueError for a model's configuration that is no mapping, or has a value that JSON
    cannot hold.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config must be a mapping, such as model.config.to_dict(), got {type(config).__name__}"
        )
    for key, value in config.items():
        if fault := _json_fault({key: value}):
            raise ValueError(f"config[{key!r}] cannot be written to {CONFIG}: {fault}")


def _json_fault(value: Any) -> str | None:
    """The reason why JSON cannot hold a value; None if it can."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def describes_quantization(config: Mapping[str, Any]) -> bool:
    """Tell whether a model's configuration, or that of one of its parts, says that weights are
    quantized.
    """
    return any(True for _ in _sections(config, ""))


def check_plain(name: str, dtype: str, is_weight: bool = False) -> None:
    """Raise ValueError for a weight that is to be copied as it is, but is no plain one.

    Args:
        name: the tensor.
        dtype: its dtype, as torch or safetensors call it.
        is_weight: it is one, though its name does not end in ``.weight``.
    """
    if (is_weight or name.endswith(".weight")) and not re.fullmatch(
        r"(b?float|BF|F)(16|32|64)", dtype
    ):
        raise ValueError(
            f"{name} is {dtype}: only experts are quantized, other weights must be plain (bf16, fp16 or fp32). "
            "Dequantize the model first"
        )


def checked_scales(
    scales: Mapping[str, Tensor] | None, layout: Layout, weights: Collection[Quantized]
) -> dict[str, Tensor]:
    """Static scales of activations by the names that they have in the files.

    Raises:
        ValueError: the layout has none, a name does not end as the layout's do, or a scale is
            not finite and positive.
    """
    if not scales:
        return {}
    suffix = layout.input_scale
    if suffix is None:
        raise ValueError(
            f"layout {layout.name} has no input scales: its readers scale activations as they run"
        )
    known, accepted, unknown = (
        {weight.tensor(suffix) for weight in weights},
        dict[str, Tensor](),
        list[str](),
    )
    ends = (suffix, stacked_suffix(suffix))
    for name, scale in scales.items():
        if not name.endswith(ends):
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
            f"{len(unknown)} input scales are left out, as their weights are not quantized in this file: {unknown[0]}",
            stacklevel=3,
        )
    return accepted


def _with_other_projection(name: str) -> str:
    """A name with Mixtral's word for the projection replaced: w1 by gate_proj."""
    words = {alias: projection for projection, alias in ALIASES.items()}
    return ".".join(words.get(word, word) for word in name.split("."))


def check_config(folder: str | Path) -> None:
    """Refuse a checkpoint whose configuration asks for what ``load`` does not do.

    ``load`` reads weights. So it cannot honour online transforms of activations, and it knows the
    formats of ``LAYOUTS`` only. It passes over what the configuration says of the KV cache and of
    modules to leave out.

    Raises:
        ValueError: ``config.json`` or ``hf_quant_config.json`` is no JSON, or asks for such a
            thing. The message has the file, the key, the value and what ``load`` reads.
    """
    path = Path(folder) / CONFIG
    for key, content in _sections(read_json(path), ""):
        _check_section(_Section(path, key, content))
    path = Path(folder) / MODELOPT_CONFIG
    content = read_json(path)
    if content:
        section = _Section(path, "", content)
        _check_transforms(section)
        _check_modelopt(section)


def _sections(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """All quantization configs of a model and of its parts, with the path of their keys."""
    for key, value in config.items():
        if key in _QUANTIZATION:
            if value:
                yield prefix + key, value
        elif isinstance(value, Mapping):
            yield from _sections(value, f"{prefix}{key}.")


class _Section:
    """A part of a configuration file."""

    def __init__(self, path: Path, key: str, content: Any) -> None:
        self.path, self.key = path, key
        if not isinstance(content, dict):
            self._fail(key, content, "an object")
        self.content: dict[str, Any] = content

    def get(self, key: str, default: Any = None) -> Any:
        return self.content.get(key, default)

    def inner(self, key: str) -> "_Section":
        return _Section(self.path, self._key(key), self.content[key])

    def items(self, key: str) -> "list[_Section]":
        """The parts of the object ``key``, if there is one."""
        value = self.content.get(key)
        if not value:
            return []
        inner = self.inner(key)
        return [inner.inner(name) for name in inner.content]

    def must(self, key: str, *accepted: Any, default: Any = None) -> None:
        """Raise unless the value of ``key`` is one of ``accepted``;

        ``default`` stands for a missing one.
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
        self._fail(self._key(key), self.content.get(key), accepted)

    def _key(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else key

    def _fail(self, key: str, value: Any, accepted: str) -> None:
        text = json.dumps(value)
        text = text if len(text) < 200 else f"{text[:200]}..."
        raise ValueError(f"{self.path}: {key} is {text}, but load reads only {accepted}")


def _check_section(section: _Section) -> None:
    """Check one quantization config by its method."""
    method = section.get("quant_method")
    if method is None and ("quant_algo" in section.content or "quantization" in section.content):
        method = "modelopt"
    check = _METHODS.get(method) if isinstance(method, str) else None
    if check is None:
        section.refuse("quant_method", " or ".join(json.dumps(name) for name in _METHODS))
        return
    _check_transforms(section)
    check(section)


#: Locations of compressed-tensors where a transform acts on weights alone: files hold the
#: transformed weights.
_OFFLINE = ("weight_input", "weight_output")
#: Keys of other exporters that ask for a rotation or a smoothing of activations at run time.
_ONLINE_KEYS = re.compile(r"(?i)rotat|hadamard|spin_?quant|quarot|smooth_?quant|online_")


def _check_transforms(section: _Section) -> None:
    """Refuse transforms of activations, at any depth."""
    for key, value in section.content.items():
        if key == "transform_config" and value:
            _check_locations(section.inner(key))
        elif value and _ONLINE_KEYS.search(key):
            section.refuse(key, "checkpoints whose activations are not transformed")
        elif isinstance(value, dict) and key != "quantized_layers":
            _check_transforms(section.inner(key))


def _check_locations(transforms: _Section) -> None:
    for scheme in transforms.items("config_groups"):
        applied = scheme.get("apply")
        for i, apply in enumerate(applied if isinstance(applied, list) else [applied]):
            part = _Section(scheme.path, f"{scheme.key}.apply[{i}]", apply)
            if part.get("location") not in _OFFLINE:
                part.refuse(
                    "location",
                    f"{' or '.join(map(json.dumps, _OFFLINE))}: it transforms no activations",
                )


#: The algorithms of ModelOpt whose weights are plain NVFP4.
_NVFP4 = ("NVFP4", "W4A16_NVFP4")


def _check_modelopt(section: _Section) -> None:
    """Accept NVFP4 weights without smoothing, in the form of either file."""
    if isinstance(section.get("quantization"), dict):
        _check_modelopt(section.inner("quantization"))
        return
    algo = section.get("quant_algo")
    if algo is None and not section.get("config_groups") and not section.get("quantized_layers"):
        return  # Nothing is quantized.
    section.content["quant_algo"] = algo.upper() if isinstance(algo, str) else algo
    section.must("quant_algo", *_NVFP4, "MIXED_PRECISION")
    layers = section.items("quantized_layers")
    for part in (section, *layers, *section.items("config_groups")):
        part.must("group_size", 16, default=16)
        part.must("pre_quant_scale", False, default=False)
        part.must("has_zero_point", False, default=False)
    for layer in layers:
        layer.must("quant_algo", *_NVFP4)
    _check_groups(section, {"num_bits": 4, "type": "float", "group_size": 16})


def _check_groups(section: _Section, numbers: dict[str, Any]) -> None:
    """Check that weights and inputs of each config group are numbers of this kind."""
    for group in section.items("config_groups"):
        _check_group(group, numbers, numbers)


def _check_group(group: _Section, weights: dict[str, Any], inputs: dict[str, Any]) -> None:
    for key, numbers in (("weights", weights), ("input_activations", inputs)):
        if group.get(key) is not None:
            part = group.inner(key)
            for name, value in numbers.items():
                part.must(name, value, default=value)
    group.must("output_activations", None)


_PACKED = "nvfp4-pack-quantized"
#: Presets of compressed-tensors that may stand for a group.
_PRESETS = ("NVFP4", "NVFP4A16", "FP8_BLOCK")
_NVFP4_NUMBERS = {
    "num_bits": 4,
    "type": "float",
    "group_size": 16,
    "strategy": "tensor_group",
    "symmetric": True,
}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
#: By the format of a group: the numbers of its weights and of its inputs.
_COMPRESSED = {
    _PACKED: (_NVFP4_NUMBERS, _NVFP4_NUMBERS),
    "float-quantized": ({**_FP8, "strategy": "block", "block_structure": [128, 128]}, _FP8),
}


def _check_compressed(section: _Section) -> None:
    """Accept ``nvfp4-pack-quantized`` groups."""
    groups = section.inner("config_groups").content if section.get("config_groups") else {}
    written = {name: group for name, group in groups.items() if not isinstance(group, list)}
    for name in groups:
        if name not in written and name not in _PRESETS:
            section.inner("config_groups").refuse(
                name, f"groups that are written out, or the presets {', '.join(_PRESETS)}"
            )
    section.content["config_groups"] = written
    section.must("format", *_COMPRESSED, "mixed-precision", default=_PACKED)
    for group in section.items("config_groups"):
        group.must("format", *_COMPRESSED, default=section.get("format", _PACKED))
        _check_group(group, *_COMPRESSED[group.get("format") or section.get("format") or _PACKED])
        if group.get("weights") is not None:
            group.inner("weights").must("dynamic", False, default=False)
            group.inner("weights").must("actorder", None, False, "static", "weight")
    sparsity = section.get("sparsity_config")
    if sparsity:
        section.inner("sparsity_config").must("format", "dense", default="dense")


def _check_fp8(section: _Section) -> None:
    """Accept E4M3 in 128x128 blocks."""
    section.must("weight_block_size", [128, 128])
    section.must("activation_scheme", "dynamic", default="dynamic")
    section.must("fmt", "e4m3", default="e4m3")
    section.must("store_dtype", None)


def _check_mxfp4(section: _Section) -> None:
    """Accept gpt-oss's blocks of 32."""
    section.must("weight_block_size", None)


#: By the ``quant_method`` of a configuration: the check of what it asks for.
_METHODS: dict[str, Callable[[_Section], None]] = {
    "modelopt": _check_modelopt,
    "modelopt_fp4": _check_modelopt,
    "compressed-tensors": _check_compressed,
    "fp8": _check_fp8,
    "mxfp4": _check_mxfp4,
}
