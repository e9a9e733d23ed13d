"""The quantizer that transformers runs for a ``GroupedConfig``."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from cute_kernels.formats import Format

from ...checkpoint.declarations import declares_quantized_inputs
from ...checkpoint.weights import expert_weights
from ...functional.quantization import quantize
from ...preparation import check_product, expert_layers, reorder
from ...tensor.grouped_tensor import GroupedTensor
from .config import METHOD, GroupedConfig
from .experts import EXTENSIONS, RECIPES, experts_of, guard_methods
from .loading import IGNORED, Names, QuantizedReads, QuantizeJoined, Work, find_work

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN = "grouped_bf16"
#: Attribute of models with names in the files that transformers does not report.
_UNEXPECTED = "_keys_to_ignore_on_load_unexpected"


class GroupedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loader of models whose experts are quantized: see ``GroupedConfig``."""

    is_compileable = True
    is_trainable = False
    quantization_config: GroupedConfig

    def __init__(self, quantization_config: GroupedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # transformers then reads one tensor at a time, when it is needed, and casts it.
        self.pre_quantized = False
        self._work: Work | None = None
        self._requested: str | None = None
        self._folder: Path | None = None
        self._device = torch.device("cpu")

    def is_serializable(self) -> bool:
        """Return False: ``grouped.checkpoint.save`` writes these models."""
        return False

    # ---- checks of the arguments

    def validate_environment(self, device_map: Any = None, **others: Any) -> None:
        """Raise ValueError for a ``device_map`` that offloads to disk."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map has 'disk', and quantized experts cannot be offloaded to disk: use "
                "devices, or accelerate.cpu_offload after loading"
            )

    def update_attn_implementation(self, config: Any) -> Any:
        """Note the ``experts_implementation`` that the user passed, and return ``config``."""
        self._requested = config._experts_implementation
        return config

    #: Earlier versions of transformers call this one.
    update_tp_plan = update_attn_implementation

    def update_ep_plan(self, config: Any) -> Any:
        """Return ``config``. Earlier versions of transformers call this."""
        return config

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Raise ValueError for a dtype that models with quantized experts cannot have."""
        if dtype not in _DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}: pass "
                "dtype=torch.bfloat16"
            )
        return dtype

    # ---- before loading

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: list[str] | None = None,
        device_map: Any = None,
        **others: Any,
    ) -> None:
        """Check that transformers loads safetensors files into whole experts."""
        if not any(experts_of(model)):
            raise ValueError(
                f"{type(model).__name__} has no experts that use transformers' interface, and "
                "GroupedConfig quantizes nothing else"
            )
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(
                "GroupedConfig does not load sharded models: load the model without "
                "distributed_config, or shard it and call grouped.checkpoint.load"
            )
        files = [Path(file) for file in checkpoint_files or ()]
        if not files or any(file.suffix != ".safetensors" for file in files):
            raise ValueError(
                "GroupedConfig needs a folder of safetensors files, got "
                f"{files[0] if files else 'none'}"
            )
        self._folder, self._model = files[0].parent, model
        self._device = _main_device(device_map)
        self._known_unexpected = vars(model).get(_UNEXPECTED)
        setattr(model, _UNEXPECTED, {*(getattr(model, _UNEXPECTED, None) or ()), IGNORED})

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> Any:
        """Check the folder, choose the experts implementation, and add the converter."""
        model, self._model = self._model, None
        assert self._folder is not None
        names = Names(model, weight_conversions)
        config = self.quantization_config
        work = find_work(model, self._folder, names, config.format, config.weight is not None)
        if not work.formats:
            raise ValueError(
                f"{self._folder} has no quantized experts: pass "
                "GroupedConfig(recipe='nvfp4_row_scaled'), or another recipe, to quantize them, or "
                "no quantization_config"
            )
        implementation = self._implementation(work)
        model.set_experts_implementation(implementation)
        _check_products(model, work, implementation, self._device)
        config.recipe = implementation
        self._work = work
        return [QuantizedReads.from_work(work, names), *weight_conversions]

    def _implementation(self, work: Work) -> str:
        """Return the experts implementation of the model.

        Raises:
            ValueError: The user chose two, or one that is not of ``RECIPES``.
        """
        requested, recipe = self._requested, self.quantization_config.recipe
        if requested is not None and requested not in RECIPES:
            raise ValueError(
                f"experts_implementation={requested!r} cannot multiply quantized weights: choose "
                f"one of {', '.join(RECIPES)}, or leave it out"
            )
        if requested is not None and recipe is not None and requested != recipe:
            raise ValueError(
                f"experts_implementation={requested!r} and GroupedConfig(recipe={recipe!r}) differ:"
                " pass one of them"
            )
        return requested or recipe or self._default(work)

    def _default(self, work: Work) -> str:
        """Return the implementation for the folder: that of its format, or W4A16 and W8A16."""
        assert self._folder is not None
        formats = list(dict.fromkeys(work.formats.values()))
        if len(formats) > 1 or not declares_quantized_inputs(self._folder):
            return _PLAIN
        (fmt,) = formats
        return next(
            (name for name, recipe in RECIPES.items() if _stores_alike(recipe.weight, fmt)), _PLAIN
        )

    # ---- sizes, for device_map="auto"

    def param_needs_quantization(self, model: Any, param_name: str, **others: Any) -> bool:
        """Return True for the weights of experts that become GroupedTensors."""
        return self._work is not None and param_name in self._work.formats

    def get_quantize_ops(self) -> QuantizeJoined:
        """Return the operation that quantizes weights which transformers joins."""
        assert self._work is not None
        return QuantizeJoined(self._work)

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Return the bytes per element of a parameter."""
        if self._work is None or param_name not in self._work.formats:
            return float(param.element_size())
        return _bytes_per_element(self._work.formats[param_name])

    # ---- after loading

    def _process_model_after_weight_loading(self, model: Any, **others: Any) -> Any:
        """Give the weights the order that the device reads fastest, and guard the model."""
        work, self._work = self._work, None
        assert work is not None
        delattr(model, _UNEXPECTED)  # The class keeps its own.
        if self._known_unexpected is not None:
            setattr(model, _UNEXPECTED, self._known_unexpected)
        for layer in expert_layers(model):
            for weight in layer:
                if isinstance(weight.parameter, GroupedTensor):
                    reorder(weight)
        guard_methods(model)
        #: Report of the folder, as of ``grouped.checkpoint.load``.
        self.report = work.report
        return model


def _main_device(device_map: Any) -> torch.device:
    """Return the device that runs experts, as far as ``device_map`` tells before it is resolved."""
    if device_map is None:
        return torch.device("cpu")
    if isinstance(device_map, dict):
        devices = [
            torch.device("cuda", d) if isinstance(d, int) else torch.device(d)
            for d in device_map.values()
        ]
        return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _check_products(model: nn.Module, work: Work, name: str, device: torch.device) -> None:
    """Raise ValueError unless ``device`` multiplies all weights under an implementation."""
    weights = {
        (work.formats[weight.key], weight.shape, weight.parameter.dtype): weight.key
        for weight in expert_weights(model)
        if weight.key in work.formats
    }
    for (fmt, shape, dtype), key in weights.items():
        plain = torch.empty(shape, dtype=dtype, device="meta")
        _check_product(key, plain, fmt, name, device)


def _check_product(key: str, plain: Tensor, fmt: Format, name: str, device: torch.device) -> None:
    """Raise ValueError unless a weight on the meta device can be quantized and multiplied."""
    try:
        check_product(quantize(plain, fmt), RECIPES[name], device, needs_dx=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"experts_implementation={name!r} cannot multiply {key} in {fmt}: {error}"
        ) from None


def _stores_alike(a: Format | None, b: Format) -> bool:
    """Return True if two formats store the same numbers."""
    if a is None or (a.element, a.scale, a.global_scale) != (b.element, b.scale, b.global_scale):
        return False
    # Scale tiles store a scale per row, also for square blocks.
    return a.has_scale_tiles or a.is_2d == b.is_2d


def _bytes_per_element(fmt: Format) -> float:
    """Return the bytes of codes and block scales per element."""
    scale = fmt.scale
    block = scale.vec_size * (scale.vec_size if fmt.is_2d else 1) if scale is not None else 1
    scale_bits = scale.element.bits / block if scale is not None else 0
    return (fmt.element.bits + scale_bits) / 8


class ModelOptConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Config of ModelOpt folders, which transformers cannot load by itself."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError with the remedy."""
        raise ValueError(
            "transformers has no quantizer for quant_method modelopt: pass "
            "quantization_config=grouped.integrations.transformers.GroupedConfig()"
        )


def register_quantizer() -> None:
    """Add ``GroupedConfig`` and its quantizer to transformers. A second call changes nothing."""
    if METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    auto.register_quantization_config(METHOD)(GroupedConfig)
    auto.register_quantizer(METHOD)(GroupedQuantizer)
    if "modelopt" not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config("modelopt")(ModelOptConfig)
    merge = auto.AutoHfQuantizer.merge_quantization_configs

    @functools.wraps(merge)
    def merge_or_replace(
        cls: type, quantization_config: Any, quantization_config_from_args: Any
    ) -> Any:
        """Return a ``GroupedConfig`` of the arguments; merge any other as before."""
        if isinstance(quantization_config_from_args, GroupedConfig):
            return quantization_config_from_args
        return merge(quantization_config, quantization_config_from_args)

    setattr(auto.AutoHfQuantizer, merge.__name__, classmethod(merge_or_replace))


EXTENSIONS.append(register_quantizer)
