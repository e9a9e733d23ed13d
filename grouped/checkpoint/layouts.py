"""How other systems store a quantized weight (N, K) in a checkpoint: one record a layout.

A layout says which tensors a weight consists of and what its second level means; a format says what
the bytes are. So a layout is added by a record, unless its numbers have to be converted.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.formats import NVFP4, Format, FP8Block

from .files import MODELOPT_CONFIG
from .plain_tensors import WeightTensors

_TENSOR_MAX = NVFP4().tensor_max


@dataclasses.dataclass(frozen=True)
class Layout:
    """The tensors of a weight, by what follows its name, and what a config says of them.

    Attributes:
        name: what ``save`` calls it.
        fmt: the format of the bytes.
        suffixes: of codes, scales and, where the format has one, the second level.
        level: the stored second level of an amax, and the amax of a stored one, in fp64; each
            undoes the other for every level that was made of an amax.
        input_scale: suffix of the static scale of the activations; None where there is none. It
            is to their amax what the second level is to the weight's.
        config: the ``quantization_config`` of ``config.json`` if weights alone are quantized,
            without modules to leave out.
        input_config: what ``config`` has besides if the inputs of all quantized weights have
            static scales.
        ignore_keys: the keys under which readers look for the modules that are not quantized.
        extra_files: makes further JSON files, by name, of the complete ``quantization_config``.
        misread: a warning of a reader that takes such a checkpoint for another without an
            error.
        read: makes parts of the stored tensors where they are not parts already.
        scale: dtype of the stored block scales; None for that of the format's.
        shapes: shapes of codes and scales of a weight (N, K), of N and K; None for those of the
            format.
        check: raises ValueError for codes, which a function reads, and scales that ``read``
            refuses.
    """

    name: str
    fmt: Format
    suffixes: tuple[str, ...]
    config: dict[str, Any]
    level: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    input_scale: str | None = None
    input_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    ignore_keys: tuple[str, ...] = ("ignore",)
    extra_files: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {}
    misread: str | None = None
    read: Callable[[Tensor, Tensor], WeightTensors] | None = None
    scale: torch.dtype | None = None
    shapes: Callable[[int, int], tuple[tuple[int, ...], tuple[int, ...]]] | None = None
    check: Callable[[Callable[[], Tensor], Tensor], None] | None = None

    def describe(self, ignored: list[str], has_inputs: bool, targets: list[str]) -> dict[str, Any]:
        """The ``quantization_config`` of a checkpoint.

        Args:
            ignored: modules that are not quantized.
            has_inputs: each quantized weight has the static scale of its input.
            targets: modules that are quantized, where the class ``Linear`` does not say it.
        """
        config = merged(self.config, self.input_config if has_inputs else {})
        for group in config.get("config_groups", {}).values() if targets else ():
            group["targets"] = targets
        return config | dict.fromkeys(self.ignore_keys, ignored)

    def input_level(self, amax: Tensor) -> Tensor:
        """The static scale, in fp32, of inputs whose largest absolute value is ``amax``."""
        assert self.level is not None
        return self.level[0](amax.double()).float()

    def parts(self, *stored: Tensor) -> WeightTensors:
        """What the tensors of a file are."""
        if self.read is not None:
            return self.read(*stored)
        codes, scales, *level = stored
        if self.level is None:
            return WeightTensors(codes, scales)
        return WeightTensors(codes, scales, self.amax(level[0]).reshape(codes.shape[:-2]))

    def amax(self, level: Tensor) -> Tensor:
        """The fp32 amax that a stored second level was made of."""
        assert self.level is not None
        return self.level[1](level.double()).float()

    def stored(self, parts: WeightTensors) -> dict[str, Tensor]:
        """The tensors of a file by suffix.

        Raises:
            ValueError: an amax whose level is out of the range of fp32.
        """
        tensors = [parts.codes, parts.scales]
        if self.level is not None and parts.amax is not None:
            amax = parts.amax.double().reshape(-1)
            tensors.append(self.level[0](parts.amax.double()).float())
            if not torch.allclose(
                self.level[1](tensors[-1].double()).reshape(-1),
                amax,
                rtol=1e-6,
                atol=0,
                equal_nan=True,
            ):
                raise ValueError(
                    f"{self.name} stores a second level in fp32, which has none for the amax {amax.min():g}"
                )
        return dict(zip(self.suffixes, tensors, strict=True))


def exact_nvfp4(blocks: Tensor, exponents: Tensor) -> WeightTensors:
    """MXFP4 weights as NVFP4: the same codes, each scale for two blocks of 16.

    A block scale of NVFP4 is E4M3, which has the powers of two from 2^-9 to 2^8; a second level
    2^k a group moves that range.

    Args:
        blocks: (G, N, K / 32, 16) uint8 codes.
        exponents: (G, N, K / 32) E8M0 scales.

    Raises:
        ValueError: the scales of a group span more powers of two than that. Blocks of zeros do
            not count.
    """
    is_zero, e, top = _check_span(blocks, exponents)
    scales = (e - (top - _E4M3_TOP)[:, None, None]).masked_fill(is_zero, 0).float().exp2()
    amax = ((top - _E4M3_TOP).double().exp2() * _TENSOR_MAX).float()
    return WeightTensors(
        blocks.flatten(-2), scales.to(torch.float8_e4m3fn).repeat_interleave(2, -1), amax
    )


def _check_span(blocks: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which blocks are zeros, the exponents, and the largest one of each group; raise if
    they span too much.
    """
    is_zero = (blocks & 0x77 == 0).all(-1)
    e = exponents.view(torch.uint8).int() - 127
    flat, zero = e.flatten(1), is_zero.flatten(1)
    top = flat.masked_fill(zero, -127).amax(1)
    low = top - _E4M3_BINADES
    below = (flat < low.unsqueeze(1)) & ~zero
    if below.any():
        raise ValueError(
            f"these MXFP4 weights have no exact NVFP4: {int(below.sum())} of {below.numel()} blocks, in "
            f"{int(below.any(1).sum())} of {len(top)} experts, have scales more than 2^{_E4M3_BINADES} below their expert's "
            f"largest; the smallest of them would be {int((low.unsqueeze(1) - flat)[below].max())} powers of two too large"
        )
    return is_zero, e, top


def check_mxfp4(blocks: Callable[[], Tensor], exponents: Tensor) -> None:
    """Raise as ``exact_nvfp4`` does; codes are read only if the scales alone do not show that it
    works.
    """
    e = exponents.view(torch.uint8).int().flatten(1)
    if bool((e.amax(1) - e.amin(1) > _E4M3_BINADES).any()):
        _check_span(blocks(), exponents)


#: Exponent of the largest power of two of E4M3, and how many lie below it.
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
    """A copy of ``config`` with the entries of ``more``, dictionary by dictionary."""
    copied = {
        key: merged(value, {}) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    for key, value in more.items():
        copied[key] = merged(copied.get(key, {}), value) if isinstance(value, dict) else value
    return copied


def _modelopt_file(config: dict[str, Any]) -> dict[str, Any]:
    """The older of ModelOpt's two files, which TensorRT-LLM reads first and others without a
    ``quantization_config``.
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


#: By name. ``read`` alone tells one that is loaded only.
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
                # Readers take no other producer. The local version says that the files are like
                # those of that version.
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
            misread="transformers' from_pretrained (seen with 5.24) ignores weight_global_scale of experts and raises no "
            "error, so outputs would be wrong by orders of magnitude: make the model by from_config, then call "
            "grouped.checkpoint.load",
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
        # compressed-tensors' "FP8_BLOCK" scheme, and others that name the scales of such weights
        # so.
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
            read=exact_nvfp4,
            scale=torch.float8_e8m0fnu,
            shapes=lambda rows, columns: ((rows, columns // 32, 16), (rows, columns // 32)),
            check=check_mxfp4,
        ),
    )
}


def writable(name: str) -> Layout:
    """The layout of this name.

    Raises:
        ValueError: there is none, or it is one that is loaded only.
    """
    names = [layout.name for layout in LAYOUTS.values() if layout.read is None]
    if name not in names:
        raise ValueError(f"layout must be one of {', '.join(map(repr, names))}, got {name!r}")
    return LAYOUTS[name]


def stacked_suffix(suffix: str) -> str:
    """What follows the name of a tensor of all experts instead of ``suffix``."""
    return "" if suffix == ".weight" else suffix.replace(".", "_")
