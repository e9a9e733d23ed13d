"""``from_pretrained`` with a ``GroupedConfig``, for every layout and for plain folders."""

import copy
import json
import pickle
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import grouped
from grouped import GroupedTensor, checkpoint
from grouped.checkpoint.layouts import LAYOUTS
from grouped.checkpoint.plain_tensors import quantize_weight
from tests.helpers import BF16, F16, F32, U8, assert_same_bytes, contains_all, seeded_generator

transformers = pytest.importorskip("transformers", minversion="5.17")
safetensors = pytest.importorskip("safetensors.torch")
from grouped.convert import convert  # noqa: E402
from grouped.integrations import transformers as integration  # noqa: E402
from grouped.integrations.transformers import GroupedConfig  # noqa: E402

from .test_transformers import EXPERTS, HIDDEN, INNER, MODELS, ids_of, model_of  # noqa: E402

LAYOUT_NAMES = ("modelopt", "compressed-tensors", "deepseek")
AUTO = transformers.AutoModelForCausalLM
#: Default implementation of a folder that declares no static scales of inputs.
DEFAULTS = {
    "modelopt": "grouped_bf16",
    "compressed-tensors": "grouped_bf16",
    "deepseek": "grouped_fp8_block",
}


@pytest.fixture(autouse=True)
def registered():
    integration.register()


def save(name, folder, layout, **options):
    """Write a random model in a layout, and return the folder."""
    model = model_of(name)
    model.set_experts_implementation("grouped_bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        checkpoint.save(model, folder, layout, **options)
    return folder


def save_plain(name, folder):
    """Write a random model by ``save_pretrained``, under transformers' names, and return it."""
    model = model_of(name)
    model.save_pretrained(folder)
    return folder


def from_pretrained(folder, config=None, **options):
    return AUTO.from_pretrained(folder, quantization_config=config or GroupedConfig(), **options)


def plain_model(folder, implementation, dtype=BF16):
    """Return a model of the folder's config with random weights."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AUTO.from_config(config, dtype=dtype).eval()
    model.set_experts_implementation(implementation)
    return model


def loaded(folder, implementation, dtype=BF16, **options):
    """Return a model that ``grouped.checkpoint.load`` loads."""
    model = plain_model(folder, implementation, dtype)
    checkpoint.load(model, folder, **options)
    return model


def logits(model):
    with torch.no_grad():
        return model(ids_of()).logits


def experts_of(model):
    return [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def assert_same_model(got, want):
    """Compare logits, and the bytes and attributes of all parameters."""
    assert_same_bytes(logits(got), logits(want))
    for (name, a), (_, b) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        assert type(a.data) is type(b.data) and a.dtype == b.dtype, name
        if isinstance(a, GroupedTensor):
            assert not a.requires_grad
            for buffer, t in a.to_parts().items():
                assert_same_bytes(t, b.to_parts()[buffer], name)
        else:
            assert_same_bytes(a, b, name)


def rewrite(folder, change, config=None):
    """Apply a function to the tensors of a folder of one file, and merge entries in the config."""
    path = folder / "model.safetensors"
    tensors = dict(safetensors.load_file(path))
    change(tensors)
    path.unlink()
    safetensors.save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    if config is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))


def quantize_matrices(layout):
    """Return a function that quantizes the matrices of attention in a dictionary of tensors."""
    record = LAYOUTS[layout]

    def change(tensors):
        for name in [n for n in tensors if "self_attn" in n and n.endswith("proj.weight")]:
            weight = quantize_weight(tensors.pop(name)[None], record.fmt).expert(0)
            for suffix, t in record.stored(weight).items():
                tensors[name.removesuffix(".weight") + suffix] = t

    return change


# ---- folders with quantized experts


@pytest.mark.parametrize("stacked", [False, True], ids=["experts", "stacked"])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("name", [*MODELS])
def test_every_layout_gives_the_bits_of_load(name, layout, stacked, tmp_path):
    """Check that from_pretrained equals grouped.checkpoint.load, to the bit."""
    save(name, tmp_path, layout, stacked=stacked)
    got = from_pretrained(tmp_path)
    assert got.config._experts_implementation == DEFAULTS[layout]
    for experts in experts_of(got):
        assert isinstance(experts.gate_up_proj, GroupedTensor) and not experts.is_transposed
    assert_same_model(got, loaded(tmp_path, DEFAULTS[layout]))
    report = got.hf_quantizer.report
    assert {*report.layouts.values()} == {layout} and not report.unexpected


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_converted_folders_with_names_of_the_hub(name, layout, tmp_path):
    """Check folders of convert, which keeps names such as block_sparse_moe.experts.0.w1."""
    convert(save_plain(name, tmp_path / "plain"), tmp_path / "q", layout=layout)
    renames = {"Mixtral": {r"\bmlp\b": "block_sparse_moe"}}
    got = from_pretrained(tmp_path / "q")
    want = loaded(tmp_path / "q", DEFAULTS[layout], rename=renames.get(name))
    assert_same_model(got, want)


def test_calibrated_folders_run_with_quantized_activations(tmp_path):
    """Check that input scales choose the recipe of the weights' format, and are not reported."""
    source = save_plain("Qwen3Moe", tmp_path / "plain")
    (tmp_path / "ids.json").write_text(json.dumps(ids_of().tolist()))
    for layout in ("modelopt", "compressed-tensors"):
        convert(source, tmp_path / layout, layout=layout, calibrate=tmp_path / "ids.json")
        got, info = from_pretrained(tmp_path / layout, output_loading_info=True)
        assert got.config._experts_implementation == "grouped_nvfp4"
        assert not any(info.values()), info
        assert_same_model(got, loaded(tmp_path / layout, "grouped_nvfp4"))
        weights = from_pretrained(tmp_path / layout, GroupedConfig("bf16"))
        assert weights.config._experts_implementation == "grouped_bf16"
        assert_same_model(weights, loaded(tmp_path / layout, "grouped_bf16"))


def test_fp8_block_of_compressed_tensors(tmp_path):
    """Check a folder of the scheme FP8_BLOCK, with FP8 attention."""
    save("Qwen3Moe", tmp_path, "deepseek")

    def change(tensors):
        quantize_matrices("deepseek")(tensors)
        for name in [n for n in tensors if n.endswith("_scale_inv")]:
            tensors[name.removesuffix("_inv")] = tensors.pop(name)

    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "block", "block_structure": [128, 128]},
        "input_activations": {**number, "strategy": "group", "group_size": 128, "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    rewrite(tmp_path, change, {"quantization_config": quantization})
    got = from_pretrained(tmp_path)
    assert got.config._experts_implementation == "grouped_fp8_block"
    assert_same_model(got, loaded(tmp_path, "grouped_fp8_block"))


def mxfp4(rows, columns, seed):
    """Return random blocks and scales (EXPERTS, rows, columns) of MXFP4."""
    generator = seeded_generator(seed)
    shape = (EXPERTS, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=U8)
    return blocks, torch.randint(118, 124, shape, generator=generator, dtype=U8)


def test_gpt_oss_in_mxfp4_has_the_values_of_transformers(tmp_path):
    """Compare with transformers' own decoding, and with load."""
    save_plain("GptOss", tmp_path)

    def change(tensors):
        for name in [
            n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))
        ]:
            columns, rows = tensors.pop(name).shape[1:]
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = mxfp4(rows, columns, len(name))

    rewrite(tmp_path, change, {"quantization_config": {"quant_method": "mxfp4"}})
    got = from_pretrained(tmp_path)
    assert got.config._experts_implementation == "grouped_bf16"
    assert_same_model(got, loaded(tmp_path, "grouped_bf16"))
    decoded = AUTO.from_pretrained(
        tmp_path, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    for ours, theirs in zip(experts_of(got), experts_of(decoded), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            value = getattr(ours, name).dequantize(BF16).transpose(1, 2)
            assert_same_bytes(value.contiguous(), getattr(theirs, name).detach().contiguous())


# ---- values of quantized matrices outside of experts


@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3"])
def test_fp8_folders_have_the_values_of_transformers(name, tmp_path, monkeypatch):
    """Compare FP8 experts and attention with transformers' dequantize, and with fp64."""
    monkeypatch.setitem(MODELS[name], "moe_intermediate_size", 128)  # Blocks of gate or up alone.
    if name == "DeepseekV3":
        monkeypatch.setitem(MODELS[name], "q_lora_rank", 32)
    save(name, tmp_path, "deepseek")
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    for key in ("modules_to_not_convert", "ignored_layers"):
        quantization[key] = [n for n in quantization[key] if "self_attn" not in n]
    rewrite(tmp_path, quantize_matrices("deepseek"), {"quantization_config": quantization})
    got = from_pretrained(tmp_path)
    assert_same_model(got, loaded(tmp_path, "grouped_fp8_block"))
    theirs = AUTO.from_pretrained(
        tmp_path, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    tensors, count = safetensors.load_file(tmp_path / "model.safetensors"), 0
    values = dict(theirs.named_parameters())
    for key, p in got.named_parameters():
        value = p.dequantize(BF16) if isinstance(p, GroupedTensor) else p.detach()
        assert_same_bytes(value.contiguous(), values[key].detach().contiguous(), key)
        if (scales := tensors.get(f"{key}_scale_inv")) is not None:
            count += 1
            blocks = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
            exact = tensors[key].double() * blocks[: p.shape[0], : p.shape[1]]
            torch.testing.assert_close(value.double(), exact, rtol=2**-8, atol=0)
    assert count >= 8


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_nvfp4_attention_is_decoded(layout, tmp_path):
    """Compare NVFP4 attention with load, and with the decompression of compressed-tensors."""
    save("Qwen3Moe", tmp_path, layout)
    rewrite(tmp_path, quantize_matrices(layout))
    got = from_pretrained(tmp_path)
    assert_same_model(got, loaded(tmp_path, "grouped_bf16"))
    if layout != "compressed-tensors":
        return
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    tensors = safetensors.load_file(tmp_path / "model.safetensors")

    def decompressed(base):
        stored = {
            name.removeprefix(f"{base}."): t
            for name, t in tensors.items()
            if name.startswith(f"{base}.")
        }
        return NVFP4PackedCompressor.decompress(stored, scheme)["weight"].float()

    for i, layer in enumerate(got.model.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            want = decompressed(f"model.layers.{i}.self_attn.{name}")
            value = getattr(layer.self_attn, name).weight.detach().float()
            torch.testing.assert_close(value, want, rtol=5e-3, atol=0)
        weight = layer.mlp.experts.down_proj.dequantize(F32)
        for g in range(EXPERTS):
            want = decompressed(f"model.layers.{i}.mlp.experts.{g}.down_proj")
            torch.testing.assert_close(weight[g], want, rtol=5e-3, atol=0)


# ---- plain folders, quantized while they load


@pytest.mark.parametrize(
    ("config", "fmt"),
    [
        (lambda: GroupedConfig(recipe="nvfp4_row_scaled"), None),
        (lambda: GroupedConfig(recipe="grouped_fp8_block"), None),
        (lambda: GroupedConfig(recipe=grouped.recipes.MXFP8()), None),
        (lambda: GroupedConfig(recipe="fp8_current"), None),
        (lambda: GroupedConfig("bf16", weight="nvfp4"), grouped.NVFP4()),
    ],
    ids=["row-scaled", "fp8-block", "mxfp8", "fp8", "w4a16"],
)
@pytest.mark.parametrize("name", [*MODELS])
def test_plain_folders_equal_prepare(name, config, fmt, tmp_path):
    """Check that experts that are quantized while they load have the bits of prepare."""
    config = config()
    got = from_pretrained(save_plain(name, tmp_path), config)
    want = AUTO.from_pretrained(tmp_path, experts_implementation=config.recipe)
    integration.prepare(want, fmt)
    assert_same_model(got, want)
    assert got.get_memory_footprint() == want.get_memory_footprint()
    with torch.no_grad():
        assert got.generate(ids_of(), max_new_tokens=2, do_sample=False).shape == (2, 11)


def test_experts_under_other_names_equal_prepare(tmp_path):
    """Check a model whose files have other names of the experts, which transformers joins."""
    config = transformers.GraniteMoeConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=EXPERTS,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
    )
    AUTO.from_config(config, dtype=BF16).save_pretrained(tmp_path)
    assert not any(
        "gate_up_proj" in n for n in safetensors.load_file(tmp_path / "model.safetensors")
    )
    got = from_pretrained(tmp_path, GroupedConfig("nvfp4_row_scaled"))
    want = AUTO.from_pretrained(tmp_path, experts_implementation="grouped_nvfp4_row_scaled")
    assert integration.prepare(want) == 2
    assert_same_model(got, want)


class LargestTensor(TorchDispatchMode):
    """Mode that records the largest number of elements of a plain floating tensor."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_plain = isinstance(out, torch.Tensor) and not isinstance(out, GroupedTensor)
        if is_plain and not out.is_meta and out.dtype in (BF16, F16, F32):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("layout", [*LAYOUT_NAMES, None])
def test_no_plain_copy_of_a_layer_of_experts(layout, tmp_path):
    """Check that no tensor in bf16 or fp32 has all experts of a layer."""
    save_plain("Mixtral", tmp_path / "plain")
    folder, config = tmp_path / "plain", GroupedConfig("nvfp4_row_scaled")
    if layout is not None:
        folder, config = tmp_path / "q", GroupedConfig()
        convert(tmp_path / "plain", folder, layout=layout)
    with LargestTensor() as largest:
        model = from_pretrained(folder, config)
    assert 0 < largest.numel < model.model.layers[0].mlp.experts.gate_up_proj.numel()


# ---- options


@pytest.mark.parametrize("dtype", [F16, F32])
def test_dtype(dtype, tmp_path):
    """Check that weights take the dtype of the model."""
    save("Qwen3Moe", tmp_path, "modelopt")
    got = from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in got.parameters()} == {dtype}
    assert_same_model(got, loaded(tmp_path, "grouped_bf16", dtype))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_map(device_map, tmp_path):
    """Check that a device map changes nothing on one device."""
    pytest.importorskip("accelerate")
    save("GptOss", tmp_path, "modelopt")
    got = from_pretrained(tmp_path, device_map=device_map, max_memory={"cpu": "8GiB"})
    assert_same_model(got, loaded(tmp_path, "grouped_bf16"))


def test_experts_implementation_of_the_arguments(tmp_path):
    """Check that experts_implementation is used, and that set_experts_implementation is guarded."""
    save("Qwen3Moe", tmp_path, "modelopt")
    got = from_pretrained(tmp_path, experts_implementation="grouped_nvfp4")
    assert_same_model(got, loaded(tmp_path, "grouped_nvfp4"))
    got.set_experts_implementation("grouped_nvfp4_row_scaled")
    with pytest.raises(ValueError, match="cannot multiply the quantized weights"):
        got.set_experts_implementation("grouped_mm")


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_save_writes_the_same_folder(layout, tmp_path, monkeypatch):
    """Check that checkpoint.save writes the bytes that from_pretrained read."""
    monkeypatch.setitem(MODELS["Qwen3Moe"], "moe_intermediate_size", 128)
    save("Qwen3Moe", tmp_path / "a", layout)
    model = from_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match=contains_all("save_pretrained", "checkpoint.save")):
        model.save_pretrained(tmp_path / "b")
    assert not (tmp_path / "b").exists()
    checkpoint.save(model, tmp_path / "b", layout)
    a, b = (safetensors.load_file(tmp_path / f / "model.safetensors") for f in "ab")
    assert a.keys() == b.keys()
    for name in a:
        assert_same_bytes(a[name], b[name], name)
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in "ab"]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert_same_model(from_pretrained(tmp_path / "b"), model)


def test_models_and_configs_can_be_copied(tmp_path):
    """Check copies of a model, and the JSON of its config."""
    model = from_pretrained(save("Qwen3Moe", tmp_path, "modelopt"))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_model(copied, model)
    again = GroupedConfig.from_dict(
        json.loads(model.config.to_json_string(False))["quantization_config"]
    )
    assert again.to_dict() == {"quant_method": "grouped", "recipe": "grouped_bf16", "weight": None}
    assert GroupedConfig("fp8_block").format == grouped.recipes.FP8Block().weight


def test_base_model_and_nested_names(tmp_path):
    """Check that AutoModel reads the folder of a model with a head."""
    save("Mixtral", tmp_path, "deepseek")
    got = transformers.AutoModel.from_pretrained(tmp_path, quantization_config=GroupedConfig())
    want = loaded(tmp_path, "grouped_fp8_block")
    with torch.no_grad():
        a, b = got(ids_of()).last_hidden_state, want.model(ids_of()).last_hidden_state
    assert_same_bytes(a, b)


def test_other_quantizers_are_unchanged(tmp_path):
    """Check that folders without a GroupedConfig keep their quantizer, and that ModelOpt raises."""
    pytest.importorskip("compressed_tensors")
    fp8 = AUTO.from_pretrained(save("Qwen3Moe", tmp_path / "fp8", "deepseek"))
    assert not isinstance(fp8.model.layers[0].mlp.experts.gate_up_proj, GroupedTensor)
    assert not isinstance(getattr(fp8.config, "quantization_config", None), GroupedConfig)
    with pytest.raises(ValueError, match="quantized with FineGrainedFP8Config"):
        AUTO.from_pretrained(
            tmp_path / "fp8", quantization_config=transformers.CompressedTensorsConfig()
        )
    with pytest.raises(ValueError, match=contains_all("modelopt", "GroupedConfig()")):
        AUTO.from_pretrained(save("Qwen3Moe", tmp_path / "modelopt", "modelopt"))


# ---- errors


def drop(suffix):
    """Return a function that removes the first tensor with a suffix."""
    return lambda tensors: tensors.pop(next(n for n in sorted(tensors) if n.endswith(suffix)))


def set_nan(tensors):
    name = next(n for n in sorted(tensors) if n.endswith("weight_scale_2"))
    tensors[name] = torch.full_like(tensors[name], float("nan"))


def add_smoothing(tensors):
    tensors["model.layers.0.mlp.experts.0.gate_proj.pre_quant_scale"] = torch.full((HIDDEN,), 2.0)


def without_scales(tensors):
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "config", "error", "words"),
    [
        (drop("0.gate_proj.weight_scale"), None, KeyError, ["lacks", "0.gate_proj.weight_scale"]),
        (set_nan, None, ValueError, ["weight_scale_2", "nan"]),
        (add_smoothing, None, ValueError, ["pre_quant_scale", "changes the results"]),
        (without_scales, None, ValueError, ["q_proj.weight", "F8_E4M3", "without the scales"]),
        (None, {"quant_method": "awq", "bits": 4}, ValueError, ["quant_method", "awq"]),
        (None, {"quant_method": "fp8", "weight_block_size": [64, 64]}, ValueError, ["[64, 64]"]),
    ],
    ids=["missing", "nan", "smoothing", "no-scales", "awq", "blocks"],
)
def test_bad_folders_raise_before_weights_are_read(change, config, error, words, tmp_path):
    """Check the errors of folders."""
    save("Qwen3Moe", tmp_path, "modelopt")
    rewrite(tmp_path, change or (lambda tensors: None), config and {"quantization_config": config})
    with pytest.raises(error, match=contains_all(*words)):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"layout": "deepseek", "config": ("nvfp4",)},
            ["grouped_nvfp4", "cannot multiply", "gate_up_proj"],
        ),
        ({"config": (None, "nvfp4")}, ["quantized already", "GroupedConfig()"]),
        ({"experts_implementation": "eager"}, ["'eager'", "cannot multiply", "grouped_bf16"]),
        (
            {"config": ("bf16",), "experts_implementation": "grouped_nvfp4"},
            ["grouped_nvfp4", "grouped_bf16", "differ"],
        ),
        ({"device_map": {"model": "cpu", "lm_head": "disk"}}, ["disk"]),
        ({"dtype": torch.float64}, ["dtype", "float64"]),
    ],
    ids=["recipe", "weight", "eager", "two", "disk", "dtype"],
)
def test_bad_options(options, words, tmp_path):
    """Check the errors of arguments of from_pretrained."""
    options = dict(options)
    config = GroupedConfig(*options.pop("config", ()))
    save("Qwen3Moe", tmp_path, options.pop("layout", "modelopt"))
    with pytest.raises(ValueError, match=contains_all(*words)):
        from_pretrained(tmp_path, config, **options)


def test_bad_configs(tmp_path):
    """Check the errors of GroupedConfig, of plain folders and of dense models."""
    with pytest.raises(ValueError, match=contains_all("recipe", "grouped_nvfp4", "nvfp5")):
        GroupedConfig("nvfp5")
    with pytest.raises(TypeError, match="recipe must be"):
        GroupedConfig(4)
    with pytest.raises(TypeError, match="weight must be"):
        GroupedConfig("bf16", weight=4)
    with pytest.raises(ValueError, match=contains_all("register(mine=recipe)")):
        GroupedConfig(grouped.recipes.NVFP4(hadamard=False, stochastic_rounding=True))
    with pytest.raises(ValueError, match="no option bits=4"):
        GroupedConfig(bits=4)
    plain = save_plain("Qwen3Moe", tmp_path / "plain")
    for config in (GroupedConfig(), GroupedConfig("bf16")):
        with pytest.raises(ValueError, match=contains_all("no quantized experts", "recipe")):
            from_pretrained(plain, config)
    dense = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, vocab_size=64
    )
    AUTO.from_config(dense).save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=contains_all("LlamaForCausalLM", "no experts")):
        from_pretrained(tmp_path / "dense", GroupedConfig("nvfp4"))
