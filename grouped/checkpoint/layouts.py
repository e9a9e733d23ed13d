"""Layouts: how other systems store a quantized weight (N, K) in a checkpoint, one record each.

A layout defines the tensors of a weight and the meaning of its global scale. A format defines the
bytes. So a new layout is one more record, unless its numbers have to be converted.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.formats import NVFP4, Format, FP8Block
from ptx_emulator.host.suggestions import did_you_mean

from .files import MODELOPT_CONFIG
from .plain_tensors import WeightTensors

_TENSOR_MAX = NVFP4().tensor_max


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names and encoding of the tensors of a weight, and their description in a config.

    Attributes:
        name: Name of the layout in ``save``.
        fmt: Format of the bytes.
        suffixes: Suffixes of the names of codes and scales. A format with a global scale has a
            third one.
        config: The ``quantization_config`` of ``config.json``. It is the config if only weights are
            quantized, without the list of unquantized modules.
        global_scale_maps: Two inverse functions in fp64. They map an amax to the stored global
            scale, and a stored global scale to its amax. None for a format without one.
        input_scale: Suffix of the static scale of the activations, or None. It depends on their
            amax as the global scale depends on the amax of the weight.
        input_config: Further entries of ``config``. They are added if the inputs of all quantized
            weights have static scales.
        ignore_keys: Keys of the list of unquantized modules. Different readers use different keys.
        extra_files: Returns further JSON files by name. Its argument is the complete
            ``quantization_config``.
        reader_warning: Warning about a reader. It misreads such a checkpoint without an error.
        read: Converts the stored tensors, or None. Layouts with it are only loaded.
        scale: Dtype of the stored block scales. None is the dtype of the format.
        shapes: Maps N and K to the stored shapes of codes and scales. None uses the shapes of the
            format.
        check: Raises ValueError for tensors that ``read`` cannot convert. Its arguments are a
            function that reads the codes, and the scales.
    """

    name: str
    fmt: Format
    suffixes: tuple[str, ...]
    config: dict[str, Any]
    global_scale_maps: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    input_scale: str | None = None
    input_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    ignore_keys: tuple[str, ...] = ("ignore",)
    extra_files: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {}
    reader_warning: str | None = None
    read: Callable[[Tensor, Tensor], WeightTensors] | None = None
    scale: torch.dtype | None = None
    shapes: Callable[[int, int], tuple[tuple[int, ...], tuple[int, ...]]] | None = None
    check: Callable[[Callable[[], Tensor], Tensor], None] | None = None

    def describe(self, ignored: list[str], has_inputs: bool, targets: list[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint.

        Args:
            ignored: Names of modules that are not quantized.
            has_inputs: True if each quantized weight has the static scale of its input.
            targets: Names of quantized modules. An empty list means all ``Linear`` modules.
        """
        config = merged(self.config, self.input_config if has_inputs else {})
        for group in config.get("config_groups", {}).values() if targets else ():
            group["targets"] = targets
        return config | dict.fromkeys(self.ignore_keys, ignored)

    def static_input_scale(self, amax: Tensor) -> Tensor:
        """Return the static scale, fp32, of inputs with this amax."""
        assert self.global_scale_maps is not None
        return self.global_scale_maps[0](amax.double()).float()

    def weight_tensors(self, *stored: Tensor) -> WeightTensors:
        """Convert the tensors of a file, in the order of ``suffixes``."""
        if self.read is not None:
            return self.read(*stored)
        codes, scales, *global_scales = stored
        if self.global_scale_maps is None:
            return WeightTensors(codes, scales)
        return WeightTensors(codes, scales, self.amax(global_scales[0]).reshape(codes.shape[:-2]))

    def amax(self, global_scale: Tensor) -> Tensor:
        """Return the fp32 amax for a stored global scale."""
        assert self.global_scale_maps is not None
        return self.global_scale_maps[1](global_scale.double()).float()

    def stored(self, weight: WeightTensors) -> dict[str, Tensor]:
        """Return the tensors to store, by suffix.

        Raises:
            ValueError: The global scale of an amax is out of the range of fp32.
        """
        tensors = [weight.codes, weight.scales]
        if self.global_scale_maps is not None and weight.amax is not None:
            amax = weight.amax.double().reshape(-1)
            tensors.append(self.global_scale_maps[0](weight.amax.double()).float())
            stored_amax = self.global_scale_maps[1](tensors[-1].double()).reshape(-1)
            if not torch.allclose(stored_amax, amax, rtol=1e-6, atol=0, equal_nan=True):
                raise ValueError(
                    f"{self.name} stores a global scale in fp32, which has none for the amax "
                    f"{amax.min():g}"
                )
        return dict(zip(self.suffixes, tensors, strict=True))


def nvfp4_from_mxfp4(blocks: Tensor, exponents: Tensor) -> WeightTensors:
    """Convert MXFP4 weights to NVFP4 exactly: the same codes, and each scale for two blocks of 16.

    A block scale of NVFP4 is E4M3, which has the powers of two from 2^-9 to 2^8. A global scale 2^k
    per group moves that range.

    Args:
        blocks: (G, N, K / 32, 16) uint8. The codes.
        exponents: (G, N, K / 32) E8M0. The scales.

    Raises:
        ValueError: The scales of a group span more powers of two. Blocks of zeros do not count.
    """
    is_zero, e, top = _check_span(blocks, exponents)
    scales = (e - (top - _E4M3_TOP)[:, None, None]).masked_fill(is_zero, 0).float().exp2()
    amax = ((top - _E4M3_TOP).double().exp2() * _TENSOR_MAX).float()
    return WeightTensors(
        blocks.flatten(-2), scales.to(torch.float8_e4m3fn).repeat_interleave(2, -1), amax
    )


def _check_span(blocks: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Check that E4M3 can represent the scales of each group.

    Returns:
        (G, N, K / 32) bool, True for blocks of zeros; the exponents, int32; and (G,) the largest
        exponent of each group.

    Raises:
        ValueError: The exponents of a group span too many powers of two.
    """
    is_zero = (blocks & 0x77 == 0).all(-1)
    e = exponents.view(torch.uint8).int() - 127
    flat, zero = e.flatten(1), is_zero.flatten(1)
    top = flat.masked_fill(zero, -127).amax(1)
    low = top - _E4M3_BINADES
    below = (flat < low.unsqueeze(1)) & ~zero
    if below.any():
        raise ValueError(
            f"these MXFP4 weights have no exact NVFP4: {int(below.sum())} of {below.numel()} "
            f"blocks, in {int(below.any(1).sum())} of {len(top)} experts, have scales more than "
            f"2^{_E4M3_BINADES} below their expert's largest; the smallest of them would be "
            f"{int((low.unsqueeze(1) - flat)[below].max())} powers of two too large"
        )
    return is_zero, e, top


def check_mxfp4(blocks: Callable[[], Tensor], exponents: Tensor) -> None:
    """Raise ValueError if ``nvfp4_from_mxfp4`` would.

    Args:
        blocks: Reads the codes. It is called only if the scales alone do not decide.
        exponents: (G, N, K / 32) E8M0. The scales.
    """
    e = exponents.view(torch.uint8).int().flatten(1)
    if bool((e.amax(1) - e.amin(1) > _E4M3_BINADES).any()):
        _check_span(blocks(), exponents)


#: Exponent of the largest power of two in E4M3, and the number of smaller powers of two.
_E4M3_TOP, _E4M3_BINADES = 8, 17

_NUMBER = {"num_bits": 4, "type": "float", "group_size": 16}
_MODELOPT = {"dynamic": False, **_NUMBER}
_COMPRESSED = {
    "symmetric": True,
    "strategy": "tensor_group",
    "dynamic": False,
    "observer": "static_minmax",
    **_NUMBER,
}


def merged(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``config`` with the entries of ``more``, merged recursively."""
    copied = {
        key: merged(value, {}) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    for key, value in more.items():
        copied[key] = merged(copied.get(key, {}), value) if isinstance(value, dict) else value
    return copied


def _modelopt_file(config: dict[str, Any]) -> dict[str, Any]:
    """Return the older of ModelOpt's two configuration files, by name.

    TensorRT-LLM prefers it. Other readers use it if ``config.json`` has no ``quantization_config``.
    """
    quantization = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": config["ignore"],
    }
    return {MODELOPT_CONFIG: {"producer": config["producer"], "quantization": quantization}}


def _inputs(numbers: dict[str, Any]) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"input_activations": numbers}}}


#: Layouts by name. A layout with ``read`` is only loaded, never written.
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            "modelopt",
            NVFP4(),
            (".weight", ".weight_scale", ".weight_scale_2"),
            {
                "quant_method": "modelopt",
                "quant_algo": "W4A16_NVFP4",
                "config_groups": {"group_0": {"weights": _MODELOPT, "targets": ["Linear"]}},
                # Readers accept no other producer. The local version says that the files are like
                # the files of that version.
                "producer": {"name": "modelopt", "version": "0.47.0+grouped"},
            },
            (lambda amax: amax / _TENSOR_MAX, lambda level: level * _TENSOR_MAX),
            ".input_scale",
            {"quant_algo": "NVFP4", **_inputs(_MODELOPT)},
            extra_files=_modelopt_file,
        ),
        Layout(
            "compressed-tensors",
            NVFP4(),
            (".weight_packed", ".weight_scale", ".weight_global_scale"),
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": _COMPRESSED}},
            },
            (lambda amax: _TENSOR_MAX / amax.reshape(-1), lambda level: _TENSOR_MAX / level),
            ".input_global_scale",
            _inputs({**_COMPRESSED, "dynamic": "local"}),
            reader_warning="transformers' from_pretrained (seen with 5.24) ignores "
            "weight_global_scale of experts and raises no error, so outputs would be wrong by "
            "orders of magnitude: pass quantization_config=GroupedConfig() of "
            "grouped.integrations.transformers",
        ),
        Layout(
            "deepseek",
            FP8Block(block=(128, 128), pow2_scales=False),
            (".weight", ".weight_scale_inv"),
            {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
            ignore_keys=("modules_to_not_convert", "ignored_layers"),
        ),
        # The scheme "FP8_BLOCK" of compressed-tensors, and other checkpoints with this suffix of
        # the scales.
        Layout(
            "fp8-block",
            FP8Block(block=(128, 128), pow2_scales=False),
            (".weight", ".weight_scale"),
            {},
            read=WeightTensors,
        ),
        Layout(
            "gpt-oss",
            NVFP4(),
            ("_blocks", "_scales"),
            {},
            read=nvfp4_from_mxfp4,
            scale=torch.float8_e8m0fnu,
            shapes=lambda rows, columns: ((rows, columns // 32, 16), (rows, columns // 32)),
            check=check_mxfp4,
        ),
    )
}


def get_writable_layout(name: str) -> Layout:
    """Return the layout of this name.

    Raises:
        ValueError: There is none, or it can only be loaded.
    """
    names = [layout.name for layout in LAYOUTS.values() if layout.read is None]
    if name not in names:
        raise ValueError(
            f"layout must be one of {', '.join(map(repr, names))}, got {name!r}"
            + did_you_mean(name, names)
        )
    return LAYOUTS[name]


def stacked_suffix(suffix: str) -> str:
    """Return the suffix that replaces ``suffix`` if one tensor has all experts."""
    return "" if suffix == ".weight" else suffix.replace(".", "_")
