"""Checkpoints of a small Qwen3-MoE, and logits of transformers for them."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from cute_kernels.formats import Format
from grouped import checkpoint
from grouped.checkpoint.convert import convert
from grouped.integrations import transformers as integration

VOCABULARY = 64
#: Lengths of the prompts.
LENGTHS = (17, 5, 29, 40)


def prompts() -> list[list[int]]:
    """Token ids of the prompts."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def write(root: Path, layouts: tuple[str, ...]) -> dict[str, Path]:
    """Write folders by name: ``plain``, each layout, and layouts with scales of activations."""
    integration.register()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=256,
        moe_intermediate_size=128,
        intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.1,
        dtype="bfloat16",
    )
    folders = {"plain": root / "plain"}
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folders["plain"])
    ids = root / "ids.json"
    ids.write_text(str(prompts()[3:]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, which misreads compressed experts
        for layout in layouts:
            folders[layout] = root / layout
            convert(folders["plain"], folders[layout], layout=layout)
            if checkpoint.layouts.LAYOUTS[layout].input_scale is not None:
                name = f"{layout}, calibrated"
                folders[name] = root / name
                convert(folders["plain"], folders[name], layout=layout, calibrate=ids)
    if "deepseek" in folders:
        folders["fp8-block"] = root / "fp8-block"
        write_fp8_block(folders["deepseek"], folders["fp8-block"])
    return folders


def write_fp8_block(source: Path, target: Path) -> None:
    """Write a DeepSeek checkpoint as the scheme ``FP8_BLOCK`` of compressed-tensors."""
    tensors = load_file(source / "model.safetensors")
    names = {name: name.replace(".weight_scale_inv", ".weight_scale") for name in tensors}
    target.mkdir()
    save_file({names[name]: t for name, t in tensors.items()}, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    blocks = {**numbers, "strategy": "block", "block_structure": [128, 128], "dynamic": False}
    inputs = {**numbers, "strategy": "group", "group_size": 128, "dynamic": True}
    group = {"targets": ["Linear"], "weights": blocks, "input_activations": inputs}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": config["quantization_config"]["modules_to_not_convert"],
    }
    (target / "config.json").write_text(json.dumps(config))


def load(folder: Path, implementation: str, weight: Format | None) -> Any:
    """Load a model of transformers with an implementation of its experts.

    Args:
        folder: The checkpoint.
        implementation: Name of an experts implementation.
        weight: Format that plain weights are quantized to. None leaves them as they are.
    """
    config = AutoConfig.from_pretrained(folder)
    is_plain = getattr(config, "quantization_config", None) is None
    if is_plain:
        model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        del config.quantization_config
        model = Qwen3MoeForCausalLM(config).bfloat16()
    model.set_experts_implementation(implementation)
    if not is_plain:
        checkpoint.load(model, folder)
    elif weight is not None:
        integration.prepare(model.eval(), weight)
    return model.eval()


def logits(model: Any) -> Tensor:
    """Log-probabilities after all tokens but the last of each prompt, in fp32."""
    with torch.no_grad():
        rows = [model(torch.tensor([ids])).logits[0, :-1] for ids in prompts()]
    return torch.cat(rows).float().log_softmax(-1)
