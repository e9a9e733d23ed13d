"""Checkpoints as real exporters write them: other dtypes, shapes and extra tensors."""

import pytest
import torch
from torch import nn

from tests.helpers import BF16, assert_same_bytes

pytest.importorskip("safetensors")


import grouped
from grouped import checkpoint
from grouped.checkpoint.extras import find_harmless

from .damaged_checkpoints import (
    E8M0,
    EXPERTS,
    F16,
    F64,
    HIDDEN,
    LAST,
    STACK,
    assert_refused,
    make_layers,
    save_layers,
    set_byte,
    write_folder,
)


@pytest.mark.parametrize("dtype", [BF16, F16, E8M0, F64], ids=str)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("suffix", "layout"), [("weight_scale_inv", "deepseek"), ("weight_scale", "fp8-block")]
)
def test_scales_of_square_blocks_have_several_dtypes(dtype, stacked, suffix, layout, tmp_path):
    """DeepSeek calls them weight_scale_inv, and compressed-tensors weight_scale."""
    tensors = save_layers(tmp_path / "a", "deepseek", stacked)
    scales = {n: t.log2().floor().exp2() for n, t in tensors.items() if n.endswith("_inv")}
    plain = {n: t for n, t in tensors.items() if n not in scales}
    converted = {n.replace("weight_scale_inv", suffix): t.to(dtype) for n, t in scales.items()}
    want, got = make_layers(1), make_layers(2)
    checkpoint.load(want, write_folder(plain | scales, tmp_path / "b"))
    report = checkpoint.load(got, write_folder(plain | converted, tmp_path / "c"))
    assert set(report.layouts.values()) == {layout}
    for a, b in zip(got.parameters(), want.parameters(), strict=True):
        assert_same_bytes(decode(a), decode(b))


def decode(p):
    return p.dequantize() if isinstance(p, grouped.GroupedTensor) else p


def test_a_compressed_tensors_config_of_square_blocks(tmp_path):
    """The scheme is FP8_BLOCK, and the config that of the package itself."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, format="float-quantized"
    )
    config = config.model_dump(mode="json") | {"quant_method": "compressed-tensors"}
    tensors = {
        n.replace("_scale_inv", "_scale"): t.bfloat16() if "_inv" in n else t
        for n, t in save_layers(tmp_path / "a", "deepseek").items()
    }
    model = make_layers(1)
    report = checkpoint.load(
        model, write_folder(tensors, tmp_path / "b", {"quantization_config": config})
    )
    assert set(report.layouts.values()) == {"fp8-block"}
    config["config_groups"]["group_0"]["weights"]["strategy"] = "channel"
    assert_refused(
        make_layers(2),
        write_folder(tensors, tmp_path / "c", {"quantization_config": config}),
        ValueError,
        "strategy is .*channel",
    )


def test_fp64_scales_that_fp32_does_not_hold_are_refused(tmp_path):
    """Check that fp64 scales are refused if fp32 cannot represent them."""
    tensors = save_layers(tmp_path / "a", "deepseek")
    name = f"{LAST}.weight_scale_inv"
    wrong = {name: torch.full((1, 1), 1 + 2.0**-40, dtype=F64)}
    path = write_folder(tensors | wrong, tmp_path / "b")
    assert_refused(make_layers(1), path, ValueError, f"{name} in .* torch.float32 cannot represent")


def test_fp32_scales_that_e4m3_holds_are_loaded(tmp_path):
    """Check that fp32 scales are loaded if E4M3 represents them exactly."""
    tensors = save_layers(tmp_path / "a", "modelopt")
    wide = {n: t.float() for n, t in tensors.items() if n.endswith("weight_scale")}
    got, want = make_layers(1), make_layers(2)
    checkpoint.load(got, write_folder(tensors | wide, tmp_path / "b"))
    checkpoint.load(want, tmp_path / "a")
    assert_same_bytes(*(m.layers[1].experts.down.weight.dequantize() for m in (got, want)))


def test_fp32_scales_that_e4m3_does_not_hold_are_refused(tmp_path):
    """Check that fp32 scales are refused if E4M3 cannot represent them."""
    tensors = save_layers(tmp_path / "a", "modelopt")
    name = f"{LAST}.weight_scale"
    tensors[name] = tensors[name].float()
    tensors[name][0, 0] = 1.03
    path = write_folder(tensors, tmp_path / "b")
    message = f"{name} in .* torch.float8_e4m3fn cannot represent"
    assert_refused(make_layers(1), path, ValueError, message)


GLOBAL_SCALE_SHAPES = {
    "()": (),
    "(1,)": (1,),
    "(G,)": (EXPERTS,),
    "(G, 1)": (EXPERTS, 1),
    "(G, 1, 1)": (EXPERTS, 1, 1),
}


@pytest.mark.parametrize("shape", GLOBAL_SCALE_SHAPES.values(), ids=GLOBAL_SCALE_SHAPES)
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_shapes_of_global_scales_of_a_stack(layout, shape, tmp_path):
    """Scales of any of these shapes load like scales of the layout's own shape."""
    tensors = save_layers(tmp_path / "a", layout, True)
    suffix = checkpoint.LAYOUTS[layout].suffixes[2].replace(".", "_")
    scales = {n: t.view(-1)[0] for n, t in tensors.items() if n.endswith(suffix)}
    reshaped = {n: t.expand(shape).clone() for n, t in scales.items()}
    usual_shape = (EXPERTS,) if layout == "modelopt" else (EXPERTS, 1)
    usual = {n: t.expand(usual_shape).clone() for n, t in scales.items()}
    got, want = make_layers(1), make_layers(2)
    checkpoint.load(got, write_folder(tensors | reshaped, tmp_path / "b"))
    checkpoint.load(want, write_folder(tensors | usual, tmp_path / "c"))
    assert_same_bytes(*(m.layers[1].experts.down.weight.dequantize() for m in (got, want)))


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_transposed_stacks(layout, tmp_path):
    """ModelOpt quantizes along K, and writes (G, K, N) for models that store it, as Llama 4."""
    tensors = save_layers(tmp_path / "a", layout, True)
    transposed = {n: t.mT if t.dim() == 3 else t for n, t in tensors.items()}
    want, got = make_layers(1), make_layers(2)
    checkpoint.load(want, tmp_path / "a")
    checkpoint.load(got, write_folder(transposed, tmp_path / "b"))
    for a, b in zip(
        got.layers[1].experts.parameters(),
        want.layers[1].experts.parameters(),
        strict=True,
    ):
        assert_same_bytes(a.dequantize(), b.dequantize())
    name = f"{STACK}_weight_scale"
    transposed[name] = transposed[name].contiguous()
    set_byte(name, 0x7F)(transposed)
    assert_refused(
        make_layers(1),
        write_folder(transposed, tmp_path / "c"),
        ValueError,
        f"{name} in .* has nan",
    )


#: Extra tensors of a layer, and the attribute of the report that names them.
EXTRA_TENSORS = {
    "layers.0.self_attn.k_proj.k_scale": "ignored",
    "layers.0.self_attn.v_proj.v_scale": "ignored",
    "layers.0.self_attn.k_proj.k_bias": "ignored",
    "layers.0.self_attn.k_proj.output_scale": "ignored",
    "layers.0.self_attn.qkv_proj.output_scale": "ignored",
    "layers.0.self_attn.k_scale": "ignored",
    "layers.0.self_attn.attn.q_scale": "ignored",
    "layers.0.self_attn.attn.prob_scale": "ignored",
    "layers.0.self_attn.kv_scale": "ignored",
    "layers.0.self_attn.k_zero_point": "ignored",
    "layers.0.self_attn.k_global_scale": "ignored",
    "transformer.layers.0.attention.kv_cache_scaling_factor": "ignored",
    "layers.0.self_attn.rotary_emb.inv_freq": "ignored",
    "rotary_emb.inv_freq": "ignored",
    "embeddings.position_ids": "ignored",
    "mtp.layers.0.experts.0.gate_proj.weight": "ignored",
    "mtp.fc.weight": "ignored",
    "model.mtp_layers.0.input_proj.weight": "ignored",
    "layers.2.eh_proj.weight": "ignored",
    "layers.2.shared_head.norm.weight": "ignored",
    "layers.2.experts.0.down_proj.weight": "ignored",
    "layers.2.experts.0.down_proj.pre_quant_scale": "ignored",
    "layers.0.experts.0.down_proj.input_scale": "input_scales",
    "layers.0.experts.down_proj_input_scale": "input_scales",
    "layers.0.experts.0.down_proj.activation_scale": "input_scales",
    "layers.0.experts.0.down_proj.input_global_scale": "input_scales",
    "layers.0.experts.1.down_proj.pre_quant_scale": "ignored",
    "layers.0.experts.1.down_proj.weight_zero_point": "ignored",
}


@pytest.fixture
def with_extra_tensors(tmp_path):
    """A folder of two layers with all extra tensors."""
    tensors = save_layers(tmp_path / "a", "modelopt")
    extra = {name: torch.full((3,), 0.0 if "zero" in name else 1.0) for name in EXTRA_TENSORS}
    return write_folder(tensors | extra, tmp_path / "b")


@pytest.mark.parametrize("strict", [True, False])
def test_extra_tensors_of_exporters(strict, with_extra_tensors):
    """Check that known extra tensors of exporters are reported and not unexpected."""
    report = checkpoint.load(make_layers(1), with_extra_tensors, strict=strict)
    assert not report.unexpected
    for name, attribute in EXTRA_TENSORS.items():
        assert name in getattr(report, attribute), name
    assert len(report.ignored) + len(report.input_scales) == len(EXTRA_TENSORS)


def test_a_layer_that_the_module_has_is_not_a_prediction_layer():
    assert find_harmless(["layers.2.enorm.weight"], ["layers.2.router.weight"]) == []


def test_a_layer_that_the_module_lacks_is_unexpected(with_extra_tensors):
    """Only layers behind all layers of the checkpoint predict further tokens, and are ignored."""
    message = "beyond the module, layers.1.experts.0.down_proj"
    assert_refused(make_layers(1, 1), with_extra_tensors, KeyError, message)
    report = checkpoint.load(make_layers(1, 1), with_extra_tensors, strict=False)
    assert "layers.1.router.weight" in report.unexpected
    assert "layers.2.eh_proj.weight" in report.ignored


#: Tensors that change results, and the value that does not, or None.
RESULT_CHANGING = {
    "experts.1.down_proj.pre_quant_scale": 1.0,
    "experts.1.down_proj.weight_zero_point": 0.0,
    "experts.1.down_proj.input_offset": 0.0,
    "experts.1.down_proj.smoothing_factor": 1.0,
    "experts.1.down_proj.svdquant_lora_a": None,
    "experts.1.down_proj.weight_g_idx": None,
    "experts.1.down_proj.R4_input.weight": None,
    "router.pre_quant_scale": 1.0,
}


def result_changing_tensor(name, stacked, value):
    """Return the name of the tensor in a file, and the tensor."""
    name = f"layers.1.{name}"
    if stacked:
        name = name.replace("experts.1.", "experts.").replace("down_proj.", "down_proj_")
        name = name.replace("_R4", ".R4")
    return name, torch.full((HIDDEN,), value)


result_changing = pytest.mark.parametrize(
    ("name", "neutral"), RESULT_CHANGING.items(), ids=RESULT_CHANGING
)


@result_changing
@pytest.mark.parametrize("stacked", [False, True])
def test_tensors_that_change_results_are_refused(name, neutral, stacked, tmp_path):
    """Check that extra tensors that would change the results are refused."""
    tensors = save_layers(tmp_path / "a", "modelopt", stacked)
    name, t = result_changing_tensor(name, stacked, 1.0 if neutral is None else neutral)
    t[3] = 1.5
    path = write_folder(tensors | {name: t}, tmp_path / "b")
    for strict in (True, False):
        message = f"{name} in .* changes the results"
        assert_refused(make_layers(1), path, ValueError, message, strict=strict)
    # The module with one layer does not have the layer of the tensor.
    assert name in checkpoint.load(make_layers(1, 1), path, strict=False).unexpected


@pytest.mark.parametrize(
    ("name", "neutral"),
    [item for item in RESULT_CHANGING.items() if item[1] is not None],
    ids=[name for name, neutral in RESULT_CHANGING.items() if neutral is not None],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_neutral_values_of_such_tensors_are_ignored(name, neutral, stacked, tmp_path):
    """Check that such tensors are ignored if their values change nothing."""
    tensors = save_layers(tmp_path / "a", "modelopt", stacked)
    name, t = result_changing_tensor(name, stacked, neutral)
    path = write_folder(tensors | {name: t}, tmp_path / "b")
    assert checkpoint.load(make_layers(1), path).ignored == [name]


class Tied(nn.Module):
    """An embedding and a head, which may share one weight."""

    def __init__(self, is_tied=True):
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, 32, bias=False)
        self.embed = nn.Embedding(32, HIDDEN)
        if is_tied:
            self.lm_head.weight = self.embed.weight


def write_tied(names, folder):
    """Write one weight under several names, and return it and the folder."""
    values = torch.randn(32, HIDDEN)
    tensors = {f"{name}.weight": values.clone() for name in names}
    return values, write_folder(tensors, folder, {"tie_word_embeddings": True})


@pytest.mark.parametrize("names", [["embed"], ["lm_head"], ["embed", "lm_head"]], ids=" ".join)
def test_a_tied_head(names, tmp_path):
    """Check that a tied embedding and head load from either name or from both."""
    values, path = write_tied(names, tmp_path)
    model = Tied()
    report = checkpoint.load(model, path)
    assert torch.equal(model.embed.weight, values) and model.lm_head.weight is model.embed.weight
    assert len(report.ignored) == len(names) - 1


def test_tied_weights_must_not_differ_in_the_file(tmp_path):
    values = torch.randn(32, HIDDEN)
    path = write_folder({"embed.weight": values, "lm_head.weight": values + 1}, tmp_path)
    assert_refused(Tied(), path, ValueError, "ties .*lm_head.weight.* but they differ")


def test_a_missing_head_is_tied_in_the_file(tmp_path):
    _, path = write_tied(["embed"], tmp_path)
    message = "tie the head of the module to its embedding first"
    assert_refused(Tied(False), path, KeyError, message)


HINTS = {
    "extra tensor": (
        lambda t: t | {"vision.weight": torch.ones(2)},
        "strict=False ignores the tensors",
    ),
    "missing scale": (
        lambda t: {
            n: v for n, v in t.items() if not n.endswith("0.experts.1.up_proj.weight_scale")
        },
        "weight_scale: it has other tensors of these weights",
    ),
    "other names": (
        lambda t: {n.replace("experts", "block_sparse_moe"): v for n, v in t.items()},
        "pass rename=",
    ),
    "missing layer": (
        lambda t: {n: v for n, v in t.items() if "layers.1" not in n},
        "incomplete, or of a module with fewer layers",
    ),
    "other layout": (
        lambda t: {
            n.replace("down_proj.weight", "down_proj.qweight") if "scale" not in n else n: v
            for n, v in t.items()
        },
        "not a layout of modelopt",
    ),
}


@pytest.mark.parametrize(("change", "hint"), HINTS.values(), ids=HINTS)
def test_hints_of_key_errors(change, hint, tmp_path):
    tensors = save_layers(tmp_path / "a", "modelopt")
    path = write_folder(change(tensors), tmp_path / "b")
    assert_refused(make_layers(1), path, KeyError, hint)
