"""Checkpoint files of compressed-tensors and ModelOpt, and of models of transformers."""

import json

import pytest
import torch

from tests.helpers import BF16, F32

pytest.importorskip("safetensors")


from grouped import checkpoint
from grouped.nn import GroupedMLP

from .checkpoint_support import EXPERTS, HIDDEN, INNER, files_of, same_files, write


def weights_by_expert(mlp):
    """Yield expert, projection, rows and amax of the tensor that the projection is stored in."""
    for names, layer in ((("gate_proj", "up_proj"), mlp.gate_up), (("down_proj",), mlp.down)):
        for g, rows in enumerate(layer.weight.detach()):
            for name, projection in zip(names, rows.chunk(len(names)), strict=True):
                yield g, name, projection, rows.abs().amax().float()


def compare(quantize, dequantize, layout, tmp_path):
    """Compare the files of another package with ours, in both directions.

    Its files load, and are saved again with equal bytes. Its decoder gives our values for its
    files and for ours.

    Args:
        quantize: Function of a weight and an amax that returns the package's tensors by suffix.
        dequantize: Function of such tensors that returns the weight.
        layout: Name of the layout.
        tmp_path: Folder for the files.
    """
    mlp = GroupedMLP(EXPERTS, HIDDEN, INNER, dtype=BF16)
    tensors = {
        f"{g}.{name}.{suffix}": t.contiguous()
        for g, name, rows, amax in weights_by_expert(mlp)
        for suffix, t in quantize(rows, amax).items()
    }
    write(tensors, tmp_path)
    assert not checkpoint.load(mlp, tmp_path).reconciled
    checkpoint.save(mlp, tmp_path / "again", layout)
    assert same_files(tmp_path, tmp_path / "again")
    plain = GroupedMLP(EXPERTS, HIDDEN, INNER, dtype=BF16)
    checkpoint.save(plain, tmp_path / "ours", layout)
    checkpoint.load(plain, tmp_path / "ours")
    for module, folder in ((mlp, tmp_path), (plain, tmp_path / "ours")):
        tensors = files_of(folder)
        weight = module.gate_up.weight.dequantize(F32)
        for g in range(EXPERTS):
            rows = []
            for prefix in (f"{g}.gate_proj.", f"{g}.up_proj."):
                stored = {
                    n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)
                }
                rows.append(dequantize(stored))
            torch.testing.assert_close(torch.cat(rows).float(), weight[g], rtol=5e-3, atol=0)


def test_compressed_tensors(tmp_path):
    """Compare codes and scales with the compressor of compressed-tensors."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    checkpoint.save(GroupedMLP(1, 16, 16), tmp_path / "c", "compressed-tensors")
    config = json.loads((tmp_path / "c/config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])

    def quantize(t, amax):
        """Return the tensors of a weight; level is the package's global scale."""
        level = generate_gparam(-amax, amax).reshape(1)
        blocks = t.float().unflatten(-1, (-1, 16)).abs().amax(-1)
        scale, _ = calculate_qparams(-blocks, blocks, scheme.weights, level)
        return NVFP4PackedCompressor.compress(
            {"weight": t, "weight_scale": scale, "weight_global_scale": level}, scheme
        )

    compare(
        quantize,
        lambda t: NVFP4PackedCompressor.decompress(t, scheme)["weight"],
        "compressed-tensors",
        tmp_path,
    )


def test_modelopt(tmp_path):
    """Compare codes and scales with ModelOpt's quantizer."""
    modelopt = pytest.importorskip("modelopt.torch.quantization.qtensor")

    def quantize(t, amax):
        q, scale, global_scale = modelopt.NVFP4QTensor.quantize(
            t.clone(), 16, weights_scaling_factor_2=amax / 2688
        )
        return {"weight": q._quantized_data, "weight_scale": scale, "weight_scale_2": global_scale}

    def dequantize(t):
        shape = (len(t["weight"]), 2 * t["weight"].shape[1])
        q = modelopt.NVFP4QTensor(shape, F32, t["weight"])
        return q.dequantize(
            F32, scale=t["weight_scale"], double_scale=t["weight_scale_2"], block_sizes={-1: 16}
        )

    compare(quantize, dequantize, "modelopt", tmp_path)


def test_experts_of_transformers(tmp_path):
    """Check that transformers loads saved experts with the same results."""
    pytest.importorskip("transformers")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from grouped.integrations.transformers import register

    register()
    sizes = {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "intermediate_size": 32,
        "num_experts": 4,
    }
    few = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 64,
    }
    config = Qwen3MoeConfig(
        **sizes, **few, num_experts_per_tok=2, experts_implementation="grouped_bf16"
    )
    model, loaded = (Qwen3MoeForCausalLM(config).bfloat16().eval() for _ in range(2))
    checkpoint.save(model, tmp_path, "modelopt")
    names = files_of(tmp_path)
    assert (
        "model.layers.1.mlp.experts.3.gate_proj.weight_scale_2" in names
        and "lm_head.weight" in names
    )
    assert len(checkpoint.load(loaded, tmp_path).layouts) == 4
    ids = torch.arange(12)[None]
    with torch.no_grad():
        a, b = model(ids).logits, loaded(ids).logits
    assert 0 < (a - b).norm() < 0.15 * a.norm()
