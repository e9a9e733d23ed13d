"""Ask the configuration classes of other systems what they make of a folder."""

import importlib
import json
import runpy
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .stubs import Package

#: Layers that engines fuse, and their names in checkpoints.
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
EXPERTS = "model.layers.1.mlp.experts"
LINEAR = (
    "model.layers.0.self_attn.qkv_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.mlp.gate",
)
HEAD = "lm_head"


class Answer(NamedTuple):
    """The answer of a reader about a folder.

    Attributes:
        config: Configuration class.
        experts: Class that the reader chooses for experts.
        weight_only: True if activations stay as they are. None if the reader has no such choice.
        block: Group or block size.
        quantized: Attention, router and head layers that the reader takes for quantized. There
            should be none.
    """

    config: str
    experts: str
    weight_only: bool | None
    block: Any
    quantized: list[str]


def section(folder: Path) -> dict[str, Any]:
    """The ``quantization_config`` of a folder."""
    return json.loads((folder / "config.json").read_text())["quantization_config"]


class Layers(NamedTuple):
    """A reader's own classes of layers, and how it says that activations stay as they are."""

    experts: type
    linear: type
    head: type | None
    weight_only: Callable[[Any, str], bool | None]


def _ask(config: Any, layers: Layers) -> Answer:
    """Ask a configuration for the methods of layers."""

    def layer(name: str, base: type) -> Any:
        projections = {
            "ckpt_gate_proj_name": "gate_proj",
            "ckpt_up_proj_name": "up_proj",
            "ckpt_down_proj_name": "down_proj",
        }
        return type(name, (base,), projections)()

    config.packed_modules_mapping = FUSED
    experts = layer(layers.experts.__name__, layers.experts)
    method = config.get_quant_method(experts, EXPERTS)
    chosen = type(vars(experts).get("scheme", method)).__name__
    weight_only = layers.weight_only(config, chosen)
    plain = [
        (name, config.get_quant_method(layer("Linear", layers.linear), name)) for name in LINEAR
    ]
    if layers.head is not None:
        plain.append((HEAD, config.get_quant_method(layer("ParallelLMHead", layers.head), HEAD)))
    quantized = [
        name
        for name, owner in plain
        if owner is not None and "Unquantized" not in type(owner).__name__
    ]
    return Answer(type(config).__name__, chosen, weight_only, _block(config), quantized)


def _ask_folder(cls: Any, layers: Layers, folder: Path) -> Answer:
    """Ask about ``config.json`` and, if there is one, ``hf_quant_config.json``, which must say the
    same.
    """
    answer = _ask(cls.from_config(section(folder)), layers)
    older = folder / "hf_quant_config.json"
    if older.exists():
        name = _ask(cls.from_config(json.loads(older.read_text())), layers)
        if name != answer:
            raise AssertionError(
                f"{folder}: config.json gives {answer}, hf_quant_config.json {name}"
            )
    return answer


def _block(config: Any) -> Any:
    """Group or block size of a configuration, which has it at one of three places."""
    scheme = vars(config).get("target_scheme_map")
    if scheme:
        return next(iter(scheme.values()))["weights"].group_size
    return vars(config).get("weight_block_size") or vars(config).get("group_size")


_VLLM = "vllm.model_executor.layers.quantization"
_VLLM_CT = f"{_VLLM}.compressed_tensors"
_VLLM_REAL = (
    "vllm.scalar_type",
    f"{_VLLM}.base_config",
    f"{_VLLM}.modelopt",
    f"{_VLLM}.fp8",
    f"{_VLLM}.utils.quant_utils",
    f"{_VLLM}.utils.config_utils",
    f"{_VLLM_CT}.compressed_tensors",
    f"{_VLLM_CT}.utils",
    f"{_VLLM_CT}.compressed_tensors_moe",
    f"{_VLLM_CT}.compressed_tensors_moe.compressed_tensors_moe",
    f"{_VLLM_CT}.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4",
)
_ORACLE = "vllm.model_executor.layers.fused_moe.oracle"


def _pair(*args: Any, **named: Any) -> tuple[None, None]:
    return None, None


def _supported(*args: Any, **named: Any) -> bool:
    """As on a GPU that has the kernels."""
    return True


def vllm(root: Path, folders: Sequence[Path]) -> list[Answer]:
    """vLLM's answers."""
    keys = []

    def select(*args: Any, activation_key: Any = None, **named: Any) -> tuple[None, None]:
        keys.append(activation_key)
        return None, None

    # A record of two values, and functions whose two results are unpacked: of modules that are
    # stubs.
    values = {
        "vllm.config.quantization:QuantSpec": types.SimpleNamespace,
        f"{_ORACLE}.nvfp4:select_nvfp4_moe_backend": select,
        f"{_ORACLE}.fp8:select_fp8_moe_backend": _pair,
        f"{_ORACLE}.fp8:resolve_fp8_moe_weight_block_shape": lambda config, block, *others: (
            block,
            1,
        ),
        f"{_VLLM_CT}.transform.linear:get_linear_transform_schemes": _pair,
    }
    with Package("vllm", root, _VLLM_REAL, values=values):
        modelopt = importlib.import_module(f"{_VLLM}.modelopt")
        fp8 = importlib.import_module(f"{_VLLM}.fp8")
        compressed = importlib.import_module(f"{_VLLM_CT}.compressed_tensors")
        compressed.CompressedTensorsConfig._check_scheme_supported = _supported
        head = importlib.import_module(
            "vllm.model_executor.layers.vocab_parallel_embedding"
        ).ParallelLMHead
        layers_value = {
            "modelopt": (modelopt.ModelOptFp8Config, modelopt, head),
            "modelopt_fp4": (modelopt.ModelOptNvFp4Config, modelopt, head),
            "fp8": (fp8.Fp8Config, fp8, None),  # It leaves a head alone.
            "compressed-tensors": (compressed.CompressedTensorsConfig, compressed, head),
        }
        answers = []
        for folder in folders:
            quantized = section(folder)
            names = [
                cls.override_quantization_method(quantized, None)
                for cls, *_ in layers_value.values()
            ]
            cls, module, head = layers_value[next(filter(None, names), quantized["quant_method"])]
            nvfp4 = module is not fp8
            layers = Layers(
                module.RoutedExperts,
                module.LinearBase,
                head,
                lambda config, of, nvfp4=nvfp4: keys[-1] is None if nvfp4 else None,
            )
            answers.append(_ask_folder(cls, layers, folder))
        return answers


_SGLANG = "sglang.srt.layers.quantization"
_SGLANG_CT = f"{_SGLANG}.compressed_tensors"
_SGLANG_REAL = (
    f"{_SGLANG}.base_config",
    f"{_SGLANG}.modelopt_quant",
    f"{_SGLANG}.fp8",
    f"{_SGLANG}.utils",
    f"{_SGLANG_CT}.compressed_tensors",
    f"{_SGLANG_CT}.utils",
)


def sglang(root: Path, folders: Sequence[Path]) -> list[Answer]:
    """SGLang's answers."""
    with Package("sglang", root, _SGLANG_REAL, stubbed=("sgl_kernel",)):
        modelopt = importlib.import_module(f"{_SGLANG}.modelopt_quant")
        fp8 = importlib.import_module(f"{_SGLANG}.fp8")
        compressed = importlib.import_module(f"{_SGLANG_CT}.compressed_tensors")
        linear = importlib.import_module("sglang.srt.layers.linear").LinearBase
        experts = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton").FusedMoE
        head = importlib.import_module("sglang.srt.layers.vocab_parallel_embedding").ParallelLMHead
        layers_value = {
            "modelopt": modelopt.ModelOptFp4Config,
            "fp8": fp8.Fp8Config,
            "compressed-tensors": compressed.CompressedTensorsConfig,
        }
        compressed.CompressedTensorsConfig._check_scheme_supported = _supported

        def weight_only(config: Any, chosen: str) -> bool | None:
            named = {"W4A16": True, "W4A4": False}
            return next(
                (value for word, value in named.items() if word in chosen),
                vars(config).get("is_w4a16"),
            )

        layers = Layers(experts, linear, head, weight_only)
        return [
            _ask_folder(layers_value[section(folder)["quant_method"]], layers, folder)
            for folder in folders
        ]


def modelopt(root: Path, folders: Sequence[Path]) -> list[bool]:
    """Compare ``config.json`` with what ModelOpt makes of ``hf_quant_config.json``;

    True for folders without one.
    """
    file = root / "modelopt/torch/export/convert_hf_config.py"
    convert: Callable[[dict[str, Any]], dict[str, Any]] = runpy.run_path(str(file))[
        "convert_hf_quant_config_format"
    ]
    older = [folder / "hf_quant_config.json" for folder in folders]
    return [
        not path.exists() or convert(json.loads(path.read_text())) == section(path.parent)
        for path in older
    ]
