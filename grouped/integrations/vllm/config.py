"""vLLM's quantization configurations with the experts on grouped kernels."""

import functools
from typing import Any

import torch

from ..serving.experts import PLAIN
from ..serving.schemes import SCHEMES, Scheme, load_format
from .folders import Folder, find_folder
from .method import GroupedExpertsMethod
from .symbols import (
    LinearBase,
    QuantizationConfig,
    RoutedExperts,
    UnquantizedLinearMethod,
    get_quantization_config,
    register_quantization_config,
)


class PlainConfig(QuantizationConfig):  # type: ignore[misc]
    """Configuration of a plain checkpoint: only experts have a method of their own."""

    def get_name(self) -> str:
        """Return the name of the method."""
        return "grouped"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of models."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the lowest compute capability of a supported GPU: Hopper."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return []: vLLM puts the quantization of a checkpoint into the model's config."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Return the configuration of a checkpoint with quantized layers."""
        scheme: Scheme = cls.scheme  # type: ignore[attr-defined]
        folder = find_folder(config, scheme.name)
        base = get_quantization_config(folder.method)
        return make_config_class(base, scheme.name, folder).from_config(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return the scheme if the user asked for it, whatever the checkpoint's own method is."""
        name: str = cls.scheme.name  # type: ignore[attr-defined]
        return name if user_quant == name else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return vLLM's plain method for linear layers."""
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class ExpertsMixin:
    """Mixin of configurations: experts run on grouped kernels.

    Attributes:
        scheme: The scheme that the user chose.
        folder: Kind of the checkpoint. None if it is plain.
    """

    scheme: Scheme
    folder: Folder | None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a layer: ours for experts, vLLM's for others."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]
        stored = PLAIN if self.folder is None else self.folder.find(self, layer, prefix)
        formats = load_format(self.scheme, stored.layout_name, stored.has_inputs)
        return GroupedExpertsMethod(
            layer, prefix, self.scheme.name, formats, stored.has_input_scale
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes are made at run time, and vLLM sends configurations to other processes.
        base = type(self).__mro__[2]
        return _rebuild, (base, self.scheme.name, self.folder, self.__dict__)


def make_config_class(base: type, scheme_name: str, folder: Folder | None) -> Any:
    """Return a subclass of one of vLLM's configurations whose experts run in a scheme.

    Being a subclass, it passes the ``isinstance`` checks of vLLM's models.
    """
    return _make_config_class(base, SCHEMES[scheme_name], folder)


@functools.cache
def _make_config_class(base: type, scheme: Scheme, folder: Folder | None) -> type:
    namespace = {"scheme": scheme, "folder": folder, "__module__": __name__}
    return type(f"Grouped{base.__name__}", (ExpertsMixin, base), namespace)


def _rebuild(base: type, scheme_name: str, folder: Folder | None, state: dict[str, Any]) -> Any:
    """Make a configuration again in another process."""
    cls = make_config_class(base, scheme_name, folder)
    config = cls.__new__(cls)
    config.__dict__.update(state)
    return config


def register_scheme(scheme: Scheme) -> None:
    """Add a scheme to vLLM's quantization methods."""
    register_quantization_config(scheme.name)(make_config_class(PlainConfig, scheme.name, None))
