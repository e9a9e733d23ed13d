"""Serve small models of several architectures: ``python -m tests.serving.architectures``.

Their routers, activations, shared experts and names of weights differ. Experts must have the bits
of transformers' experts for the tokens that vLLM gave them. Log-probabilities in bf16 must be close
to those of vLLM with its own experts.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from grouped import checkpoint
from grouped.integrations.vllm import SCHEMES
from tests.serving import folders
from tests.serving.__main__ import Recorder, difference, served

_COMMON = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": folders.VOCABULARY,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "dtype": "bfloat16",
    "num_experts_per_tok": 2,
}
#: Fields of the configurations in which architectures differ, by the prefix of their classes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 128, "num_local_experts": 8, "head_dim": 64},
    # Has a shared expert.
    "Qwen2Moe": {
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_experts": 8,
    },
    # Biases, a clamped activation, and rows of gate and up that alternate.
    "GptOss": {
        "intermediate_size": 256,
        "num_local_experts": 8,
        "head_dim": 64,
        "layer_types": ["full_attention"] * 2,
    },
    # Groups of experts, a shared expert, and a first layer without experts.
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
    },
}
#: Largest differences in norm where transformers rounds the activation's steps to bf16.
_LARGEST = {"GptOss": 0.01}


def write(name: str, folder: Path) -> Any:
    """Write a model with random weights and biases, and return its class."""
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **ARCHITECTURES[name]})
    cls = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = cls(config).bfloat16()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "bias" in key or "sinks" in key:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return cls


def write_mxfp4(folder: Path) -> Any:
    """Write gpt-oss with random MXFP4 experts, and return the model that transformers loads."""
    cls = write("GptOss", folder)
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, t in load_file(path).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = t
            continue
        experts, columns, rows = t.shape  # Stored as (E, K, N) if they are plain.
        blocks = (experts, rows, columns // 32)
        codes = torch.randint(256, (*blocks, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(118, 123, blocks, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    model = cls(transformers.GptOssConfig(**config)).bfloat16().eval()
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*plain, "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    model.set_experts_implementation("grouped_bf16")
    checkpoint.load(model, folder)
    return model


def check_mxfp4(scheme: str) -> bool:
    """Compare gpt-oss in MXFP4 under a scheme with transformers, and print the result."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_mxfp4(Path(folder))
        with Recorder() as recorder:
            got = served(Path(folder), scheme)
    error = difference(got, folders.logits(model))
    different = recorder.count_different(model, _LARGEST["GptOss"])
    is_right = bool(recorder.calls) and not different and error < 0.05
    print(
        f"{'right' if is_right else 'WRONG'}  {error:.4f} from transformers, {different} of "
        f"{len(recorder.calls)} calls of experts with other results: GptOss MXFP4 / {scheme}",
        flush=True,
    )
    return is_right


def check(name: str, scheme: str) -> bool:
    """Compare a model under a scheme with transformers, and print the result."""
    with tempfile.TemporaryDirectory() as folder:
        cls = write(name, Path(folder))
        model = cls.from_pretrained(folder, dtype=torch.bfloat16).eval()
        model.set_experts_implementation("grouped_bf16")
        if SCHEMES[scheme].weight is not None:
            folders.integration.prepare(model, SCHEMES[scheme].weight)
        with Recorder() as recorder:
            got = served(Path(folder), scheme)
        error = difference(got, served(Path(folder), None))
    different = recorder.count_different(model, _LARGEST.get(name, 0))
    is_right = bool(recorder.calls) and not different
    if SCHEMES[scheme].weight is None:
        is_right &= error < 0.02
    print(
        f"{'right' if is_right else 'WRONG'}  {error:.4f} from vLLM in bf16, {different} of "
        f"{len(recorder.calls)} calls of experts with other results: {name} / {scheme}",
        flush=True,
    )
    return is_right


def main(names: list[str]) -> int:
    """Serve all architectures, or those named, and return the exit status."""
    folders.integration.register()
    results = [
        check(name, scheme)
        for name in ARCHITECTURES
        if not names or name in names
        for scheme in ("grouped_bf16", "grouped_w4a16")
    ]
    if not names or "MXFP4" in names:
        results.append(check_mxfp4("grouped"))
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
