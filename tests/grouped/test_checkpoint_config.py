"""Configs: what ``save`` says is true and under the keys of its readers; what ``load`` cannot do is
refused.
"""

import json
import warnings

import pytest
import torch

from tests.helpers import BF16

pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

from grouped import checkpoint
from grouped.checkpoint import convert
from grouped.checkpoint.config import QuantizedWeight, check_config, config_files
from grouped.checkpoint.layouts import LAYOUTS
from grouped.nn import MoE

EXPERTS, PROJECTIONS = 2, ("gate_proj", "up_proj", "down_proj")


class Block(torch.nn.Module):
    """A model with experts, a tied head and the names of checkpoints."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(8, 64, dtype=BF16)
        self.model.q_proj = torch.nn.Linear(64, 64, dtype=BF16)
        self.model.mlp = MoE(64, 64, EXPERTS, 1, dtype=BF16)
        self.lm_head = torch.nn.Linear(64, 8, bias=False, dtype=BF16)
        self.lm_head.weight = self.model.embed_tokens.weight


PLAIN = ["model.embed_tokens", "model.q_proj", "model.mlp.router", "lm_head"]


def read_config(folder, name="config.json"):
    content = json.loads((folder / name).read_text())
    return content["quantization_config"] if name == "config.json" else content


def scales(suffix, experts=EXPERTS):
    return {
        f"model.mlp.experts.{g}.{p}{suffix}": torch.tensor(0.5)
        for g in range(experts)
        for p in PROJECTIONS
    }


def test_modelopt_says_that_activations_are_quantized_only_if_all_scales_are_there(tmp_path):
    """Check that ModelOpt's config has quantized activations only if all input scales are there."""
    module = Block()
    checkpoint.save(module, tmp_path / "none", "modelopt")
    with pytest.warns(
        UserWarning,
        match="3 of 6 quantized weights have no input scale, such as model.mlp.experts.1.gate_",
    ):
        checkpoint.save(
            module, tmp_path / "some", "modelopt", input_scales=scales(".input_scale", 1)
        )
    for name in ("none", "some"):
        config, older = (
            read_config(tmp_path / name),
            read_config(tmp_path / name, "hf_quant_config.json"),
        )
        assert config["quant_algo"] == older["quantization"]["quant_algo"] == "W4A16_NVFP4"
        assert config["config_groups"]["group_0"].keys() == {"weights", "targets"}
    checkpoint.save(module, tmp_path / "all", "modelopt", input_scales=scales(".input_scale"))
    config, older = (
        read_config(tmp_path / "all"),
        read_config(tmp_path / "all", "hf_quant_config.json"),
    )
    group = config["config_groups"]["group_0"]
    assert config["quant_algo"] == "NVFP4" and group["input_activations"] == group["weights"]
    assert config["ignore"] == older["quantization"]["exclude_modules"] == PLAIN
    assert older["producer"]["name"] == config["producer"]["name"] == "modelopt"
    assert older["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": PLAIN,
    }
    loaded = Block()
    report = checkpoint.load(loaded, tmp_path / "all")
    assert report.input_scales == scales(".input_scale")
    checkpoint.save(loaded, tmp_path / "again", "modelopt", input_scales=report.input_scales)
    assert read_config(tmp_path / "again") == config


def test_compressed_tensors_matches_its_config_with_its_own_code(tmp_path):
    """Check with compressed-tensors itself that its config matches the saved modules."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16
    from compressed_tensors.utils import is_match

    for i, (more, preset) in enumerate(
        (({}, NVFP4A16), ({"input_scales": scales(".input_global_scale")}, NVFP4))
    ):
        folder = tmp_path / str(i)
        checkpoint.save(Block(), folder, "compressed-tensors", **more)
        config, names = (
            QuantizationConfig.model_validate(read_config(folder)),
            load_file(folder / "model.safetensors"),
        )
        (scheme,) = config.config_groups.values()
        for args, wanted in (
            (scheme.weights, preset["weights"]),
            (scheme.input_activations, preset.get("input_activations")),
        ):
            assert (args is None) == (wanted is None)
            for key in (
                ("num_bits", "type", "group_size", "strategy", "symmetric", "dynamic")
                if args
                else ()
            ):
                assert getattr(args, key) == getattr(wanted, key)
        linear = torch.nn.Linear(16, 16)
        modules = {name.rpartition(".")[0] for name in names if ".weight" in name} | {"lm_head"}
        matched = {
            name for name in modules if is_match(name, linear, scheme.targets, config.ignore)
        }
        assert matched == {
            name.removesuffix(".weight_packed") for name in names if name.endswith(".weight_packed")
        }
        for name in matched:
            assert f"{name}.weight_global_scale" in names and (
                f"{name}.input_global_scale" in names
            ) == bool(i)


def test_stacked_experts_are_targets_by_name(tmp_path):
    """Check that the config names stacked experts as targets."""
    checkpoint.save(Block(), tmp_path / "a", "compressed-tensors", stacked=True)
    assert read_config(tmp_path / "a")["config_groups"]["group_0"]["targets"] == [
        "model.mlp.experts"
    ]
    assert LAYOUTS["compressed-tensors"].config["config_groups"]["group_0"]["targets"] == ["Linear"]
    stacked = {
        f"model.mlp.experts.{p}_input_scale": torch.ones(EXPERTS)
        for p in ("gate_up_proj", "down_proj")
    }
    checkpoint.save(Block(), tmp_path / "b", "modelopt", stacked=True, input_scales=stacked)
    assert read_config(tmp_path / "b")["quant_algo"] == "NVFP4"


def test_the_configs_of_transformers_know_what_stays_plain(tmp_path):
    """Check that the config classes of transformers find the modules that stay plain."""
    pytest.importorskip("transformers")
    from transformers import CompressedTensorsConfig, FineGrainedFP8Config

    checkpoint.save(Block(), tmp_path / "a", "deepseek")
    config = read_config(tmp_path / "a")
    loaded = FineGrainedFP8Config.from_dict(config)
    assert loaded.modules_to_not_convert == PLAIN and tuple(loaded.weight_block_size) == (128, 128)
    assert config["ignored_layers"] == PLAIN and "ignore" not in config
    pytest.importorskip("compressed_tensors")
    checkpoint.save(Block(), tmp_path / "b", "compressed-tensors")
    loaded = CompressedTensorsConfig.from_dict(read_config(tmp_path / "b"))
    assert loaded.quantization_config.ignore == PLAIN


def test_the_config_of_a_model_names_its_class_and_dtype(tmp_path):
    """A model that was made from a config has neither in it; engines choose by them."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "intermediate_size": 32,
        "num_experts": 2,
        "head_dim": 32,
    }
    few = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 16,
    }
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, **few, num_experts_per_tok=1, tie_word_embeddings=True)
    ).to(BF16)
    checkpoint.save(model, tmp_path, "modelopt")
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["Qwen3MoeForCausalLM"] and config.dtype == BF16
    assert "lm_head" in read_config(tmp_path)["ignore"]


def test_convert_excludes_a_tied_head_and_drops_what_was_said_before(tmp_path):
    """Check that the converter excludes a tied head and removes older quantization configs."""
    source = tmp_path / "source"
    source.mkdir()
    tensors = {
        f"model.mlp.experts.{g}.{p}.weight": torch.ones(32, 32)
        for g in range(2)
        for p in PROJECTIONS
    }
    tensors |= {
        "model.embed_tokens.weight": torch.ones(8, 32),
        "model.conv.weight": torch.ones(8, 1, 4),
    }
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(
        '{"text_config": {"a": 1, "quantization_config": {"quant_method": "fp8"}}}'
    )
    convert.convert(source, tmp_path / "a")
    assert sorted(read_config(tmp_path / "a")["ignore"]) == [
        "lm_head",
        "model.conv",
        "model.embed_tokens",
    ]
    assert json.loads((tmp_path / "a/config.json").read_text())["text_config"] == {"a": 1}


def test_a_promise_without_its_tensor_is_refused(tmp_path):
    """Check that a config for tensors that were not written is refused."""
    layout, weights = LAYOUTS["modelopt"], [QuantizedWeight("experts.0.down_proj", False)]
    names = {f"experts.0.down_proj{suffix}" for suffix in layout.suffixes}
    config_files({}, layout, weights, ["router"], names)
    names.remove("experts.0.down_proj.weight_scale_2")
    with pytest.raises(
        ValueError,
        match=r"would promise experts.0.down_proj.weight_scale_2, which was not written \(1 such",
    ):
        config_files({}, layout, weights, ["router"], names)
    module = Block()
    rename = {"^model.q_proj": "model.mlp.experts.0.gate_proj"}
    with pytest.raises(
        ValueError,
        match="model.mlp.experts.0.gate_proj is quantized, but another weight of that name is plain",  # noqa: E501
    ):
        checkpoint.save(module, tmp_path, "compressed-tensors", rename=rename)
    module.model.q_proj.weight_scale = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(
        ValueError,
        match="model.q_proj is written plain, but model.q_proj.weight_scale is written too",
    ):
        checkpoint.save(module, tmp_path, "modelopt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "config, message",
    [
        ({"dtype": BF16}, r"config\['dtype'\] cannot be written to config.json: .* dtype"),
        ([], "got list"),
    ],
)
def test_a_config_that_json_cannot_hold_is_refused_first(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        checkpoint.save(Block(), tmp_path / "a", "modelopt", config=config)
    assert not (tmp_path / "a").exists()


def test_other_weights_must_be_plain(tmp_path):
    """Check that saving and converting refuse weights of other layers that are not plain."""
    module, source = Block(), tmp_path / "source"
    module.model.q_proj.weight = torch.nn.Parameter(
        torch.ones(64, 64).to(torch.float8_e4m3fn), requires_grad=False
    )
    with pytest.raises(
        ValueError, match="model.q_proj.weight is float8_e4m3fn: only experts are quantized"
    ):
        checkpoint.save(module, tmp_path / "a", "modelopt")
    source.mkdir()
    tensors = {f"experts.0.{p}.weight": torch.ones(32, 32) for p in PROJECTIONS}
    save_file(
        {**tensors, "q_proj.weight": torch.ones(32, 32).to(torch.float8_e4m3fn)},
        source / "model.safetensors",
    )
    with pytest.raises(ValueError, match="q_proj.weight is F8_E4M3: only experts"):
        convert.convert(source, tmp_path / "a")
    # The config that describes such tensors is replaced, so they must not be there.
    save_file(
        {**tensors, "q_proj.qweight": torch.ones(4, 32, dtype=torch.int32)},
        source / "model.safetensors",
    )
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(ValueError, match="q_proj.qweight is I32: only experts"):
        convert.convert(source, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_input_scales_have_the_names_and_values_of_the_layout(tmp_path):
    """Check that input scales with wrong names or values are refused."""
    module, projection = Block(), "model.mlp.experts.0.down_proj"
    for layout, input_scales, message in (
        (
            "deepseek",
            {f"{projection}.input_scale": torch.ones(())},
            "layout deepseek has no input scales",
        ),
        (
            "compressed-tensors",
            {f"{projection}.input_scale": torch.ones(())},
            "are called ....input_global_scale, got",
        ),
        (
            "modelopt",
            {f"{projection}.input_scale": torch.tensor(float("nan"))},
            "must be finite and positive, got",
        ),
        (
            "modelopt",
            {f"{projection}.input_scale": torch.zeros(())},
            "must be finite and positive, got",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoint.save(module, tmp_path / "a", layout, input_scales=input_scales)
    assert not (tmp_path / "a").exists()
    aliases = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    input_scales = {
        name.replace(p := name.split(".")[-2], aliases[p]): t
        for name, t in scales(".input_scale").items()
    }
    input_scales["model.q_proj.input_scale"] = torch.ones(())
    with pytest.warns(
        UserWarning,
        match="1 input scales are left out, .* not quantized in this file: model.q_proj.input_",
    ):
        checkpoint.save(module, tmp_path / "a", "modelopt", input_scales=input_scales)
    written = {
        name for name in load_file(tmp_path / "a/model.safetensors") if name.endswith("input_scale")
    }
    assert (
        written == scales(".input_scale").keys()
        and read_config(tmp_path / "a")["quant_algo"] == "NVFP4"
    )


def test_a_folder_that_transformers_misreads_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="from_pretrained .* ignores weight_global_scale"):
        checkpoint.save(
            Block(), tmp_path / "a", "compressed-tensors", config={"model_type": "qwen3_moe"}
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, layout in enumerate(("modelopt", "deepseek")):
            checkpoint.save(Block(), tmp_path / str(i), layout, config={"model_type": "qwen3_moe"})
        checkpoint.save(Block(), tmp_path / "c", "compressed-tensors")


_BITS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_BYTES = {"dynamic": False, "num_bits": 8, "type": "float"}
_W4 = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 16,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "tensor_group",
    "symmetric": True,
    "type": "float",
}
MODELOPT = {
    "config_groups": {
        "group_0": {"input_activations": _BITS, "weights": _BITS, "targets": ["Linear"]}
    },
    "ignore": ["lm_head", "model.layers.0.mlp*"],
    "quant_algo": "NVFP4",
    "kv_cache_scheme": _BYTES,
    "producer": {"name": "modelopt", "version": "0.33.1"},
    "quant_method": "modelopt",
}
COMPRESSED = {
    "config_groups": {
        "group_0": {
            "input_activations": {**_W4, "dynamic": "local"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": _W4,
        }
    },
    "format": "nvfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.3.a20251013",
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def changed(config, path, value):
    """A copy of a config with another value at a dotted path."""
    copied = json.loads(json.dumps(config))
    *outer, last_key = path.split(".")
    inner = copied
    for key in outer:
        inner = inner.setdefault(key, {})
    inner[last_key] = value
    return copied


#: The quantization_config of published models, or its shape.
PUBLISHED = {
    "DeepSeek-V3": FP8,
    "DeepSeek-V3.1": {**FP8, "scale_fmt": "ue8m0"},
    "Qwen3-30B-A3B-FP8": {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
    "nvidia NVFP4, 0.33": MODELOPT,
    "nvidia NVFP4, 0.37, no KV cache": {
        key: value for key, value in MODELOPT.items() if key != "kv_cache_scheme"
    },
    "nvidia NVFP4, modelopt_fp4": {**MODELOPT, "quant_method": "modelopt_fp4", "group_size": 16},
    "W4A16_NVFP4": {
        **MODELOPT,
        "quant_algo": "W4A16_NVFP4",
        "config_groups": {"group_0": {"weights": _BITS, "targets": ["Linear"]}},
    },
    "NVFP4 of some layers": {
        **MODELOPT,
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "a.experts.0.w1": {"quant_algo": "NVFP4", "group_size": 16},
            "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        },
    },
    "the older file's content": {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    },
    "RedHatAI NVFP4": COMPRESSED,
    "RedHatAI NVFP4A16": changed(COMPRESSED, "config_groups.group_0.input_activations", None),
    "llm-compressor, newer": changed(
        changed(COMPRESSED, "config_groups.group_0.format", "nvfp4-pack-quantized"),
        "config_groups.group_0.weights.scale_dtype",
        "torch.float8_e4m3fn",
    ),
    "mixed formats that are one": changed(
        changed(COMPRESSED, "format", "mixed-precision"),
        "config_groups.group_0.format",
        "nvfp4-pack-quantized",
    ),
    "preset": changed(COMPRESSED, "config_groups", {"NVFP4A16": ["Linear"]}),
    "offline rotations": changed(
        COMPRESSED,
        "transform_config.config_groups.R1",
        {"type": "hadamard", "apply": [{"targets": ["re:.*o_proj$"], "location": "weight_output"}]},
    ),
    "gpt-oss": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    },
    "nothing": None,
}


@pytest.mark.parametrize("name", [*PUBLISHED])
def test_configs_of_published_models_pass(name, tmp_path):
    """Check that the quantization configs of published models are accepted."""
    config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "x", "quantization_config": config})
    )
    check_config(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"quantization_config": config}})
    )
    if config and "modelopt" in (config.get("quant_method", "modelopt")):
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(config))
    check_config(tmp_path)


def _r4(location):
    return {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": location}]}


GROUP = "config_groups.group_0"
#: The config, and the message, which names the key, the value and what load reads.
REFUSED = {
    "online rotation": (
        changed(COMPRESSED, "transform_config.config_groups.R4", _r4("input")),
        r'transform_config.config_groups.R4.apply\[0\].location is "input", but load reads only "weight_input" or',  # noqa: E501
    ),
    "rotation of the output": (
        changed(COMPRESSED, "transform_config.config_groups.R4", _r4("output")),
        'is "output"',
    ),
    "rotation of queries": (
        changed(COMPRESSED, "transform_config.config_groups.R3", _r4("q_attn")),
        'is "q_attn"',
    ),
    "spin_quant": (
        {**MODELOPT, "spinquant": {"r4": True}},
        "spinquant is .* whose activations are not transformed",
    ),
    "online hadamard": (changed(FP8, "online_hadamard", True), "online_hadamard is true"),
    "rotation in a group": (changed(MODELOPT, f"{GROUP}.rotate", True), "group_0.rotate is true"),
    "group size": (
        changed(COMPRESSED, f"{GROUP}.weights.group_size", 32),
        "weights.group_size is 32, but load reads only 16",
    ),
    "bits": (
        changed(COMPRESSED, f"{GROUP}.weights.num_bits", 8),
        "weights.num_bits is 8, but load reads only 4",
    ),
    "integers": (changed(COMPRESSED, f"{GROUP}.weights.type", "int"), 'weights.type is "int"'),
    "asymmetric": (changed(COMPRESSED, f"{GROUP}.weights.symmetric", False), "symmetric is false"),
    "strategy": (
        changed(COMPRESSED, f"{GROUP}.weights.strategy", "channel"),
        'strategy is "channel"',
    ),
    "activation order": (
        changed(COMPRESSED, f"{GROUP}.weights.actorder", "group"),
        'actorder is "group"',
    ),
    "activations": (
        changed(COMPRESSED, f"{GROUP}.input_activations.num_bits", 8),
        "input_activations.num_bits is 8",
    ),
    "outputs": (changed(COMPRESSED, f"{GROUP}.output_activations", _W4), "output_activations is"),
    "format": (
        changed(COMPRESSED, "format", "pack-quantized"),
        'format is "pack-quantized", .* "nvfp4-pack-quantized"',
    ),
    "format of a group": (
        changed(COMPRESSED, f"{GROUP}.format", "naive-quantized"),
        'group_0.format is "naive-quantized"',
    ),
    "mixed formats": (changed(COMPRESSED, "format", "mixed-precision"), "group_0.format is null"),
    "other preset": (
        changed(COMPRESSED, "config_groups", {"FP8": ["Linear"]}),
        "config_groups.FP8 is .* NVFP4, NVFP4A16",
    ),
    "sparsity": (
        changed(COMPRESSED, "sparsity_config.format", "sparse-24-bitmask"),
        'format is "sparse-24-bitmask"',
    ),
    "AWQ": (
        {**MODELOPT, "quant_algo": "NVFP4_AWQ"},
        r'quant_algo is "NVFP4_AWQ", but load reads only "NVFP4" or "W4A16',
    ),
    "FP8": ({**MODELOPT, "quant_algo": "FP8"}, 'quant_algo is "FP8"'),
    "mixed": (
        {
            **MODELOPT,
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a.q_proj": {"quant_algo": "FP8"}},
        },
        'quantized_layers.a.q_proj.quant_algo is "FP8"',
    ),
    "smoothed": (
        changed(MODELOPT, f"{GROUP}.pre_quant_scale", True),
        "pre_quant_scale is true, but load reads only false",
    ),
    "ModelOpt's group": ({**MODELOPT, "group_size": 32}, "group_size is 32"),
    "per tensor": (
        {k: v for k, v in FP8.items() if k != "weight_block_size"},
        r"weight_block_size is null, .* \[128, 128\]",
    ),
    "blocks": (
        {**FP8, "weight_block_size": [1, 128]},
        r"weight_block_size is \[1, 128\], but load reads only \[128, 128\]",
    ),
    "static": ({**FP8, "activation_scheme": "static"}, 'activation_scheme is "static"'),
    "E5M2": ({**FP8, "fmt": "e5m2"}, 'fmt is "e5m2"'),
    "MXFP4 under FP8": (
        {**FP8, "store_dtype": "mxfp4"},
        'store_dtype is "mxfp4", but load reads only no such key',
    ),
    "method": ({"quant_method": "awq", "bits": 4}, 'quant_method is "awq", .* "mxfp4"'),
    "no method": ({"bits": 4}, "quant_method is null"),
    "kind of method": ({"quant_method": ["fp8"]}, r'quant_method is \["fp8"\]'),
    "no object": ("fp8", ' is "fp8", but load reads only an object'),
    "no groups": (
        changed(COMPRESSED, "config_groups", [1]),
        "config_groups is .1., but load reads only an object",
    ),
}


@pytest.mark.parametrize("name", [*REFUSED])
def test_what_load_does_not_do_is_refused(name, tmp_path):
    """Check that each unsupported quantization config is refused with its message."""
    config, message = REFUSED[name]
    module = MoE(64, 64, EXPERTS, 1, dtype=BF16)
    before = module.router.weight.clone()
    checkpoint.save(MoE(64, 64, EXPERTS, 1, dtype=BF16), tmp_path, "modelopt")
    for content in (
        {"quantization_config": config},
        {"text_config": {"quantization_config": config}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(
            ValueError, match=rf"config.json: (text_config.)?quantization_config.*{message}"
        ):
            checkpoint.load(module, tmp_path)
    assert torch.equal(module.router.weight, before) and module.experts.down.weight.dtype == BF16


def test_the_older_file_of_modelopt_is_read_too(tmp_path):
    """Check that ModelOpt's older ``hf_quant_config.json`` is checked, too."""
    checkpoint.save(MoE(64, 64, EXPERTS, 1, dtype=BF16), tmp_path, "modelopt")
    path = tmp_path / "hf_quant_config.json"
    for content, message in (
        (
            '{"quantization": {"quant_algo": "NVFP4_AWQ"}}',
            'hf_quant_config.json: quantization.quant_algo is "NVFP4_AWQ"',
        ),
        (
            '{"quantization": {"quant_algo": "NVFP4", "group_size": 32}}',
            "quantization.group_size is 32",
        ),
        (
            '{"quantization": {"quant_algo": "NVFP4", "rotation": {"r": 1}}}',
            "quantization.rotation is",
        ),
        ("{", "hf_quant_config.json is not valid JSON"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            checkpoint.load(MoE(64, 64, EXPERTS, 1, dtype=BF16), tmp_path)
    path.write_text('{"quantization": {"quant_algo": null}}')
    checkpoint.load(MoE(64, 64, EXPERTS, 1, dtype=BF16), tmp_path)
    (tmp_path / "config.json").write_text('{"a"')
    with pytest.raises(ValueError, match="config.json is not valid JSON: Expecting"):
        checkpoint.load(MoE(64, 64, EXPERTS, 1, dtype=BF16), tmp_path)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors", "deepseek"])
@pytest.mark.parametrize("stacked", [False, True], ids=["experts", "stacked"])
def test_what_save_says_load_takes(layout, stacked, tmp_path):
    checkpoint.save(Block(), tmp_path, layout, stacked=stacked)
    checkpoint.load(Block(), tmp_path)
