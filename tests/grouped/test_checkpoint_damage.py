"""Files that are damaged, and those that hold more than weights: what real exporters write."""

import json
import struct

import pytest
import torch
from torch import nn

from tests.helpers import BF16, E4M3, U8, assert_same_bytes

pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

import grouped
from grouped import checkpoint
from grouped.checkpoint.extras import find_harmless
from grouped.checkpoint.files import Reader
from grouped.checkpoint.plain_tensors import quantize_weight
from grouped.nn import GroupedLinear, MoE

HIDDEN, INNER, EXPERTS = 128, 128, 2
F16, F64, E8M0, NAN, INF = torch.float16, torch.float64, torch.float8_e8m0fnu, torch.nan, torch.inf


def layers(seed=0, count=2):
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "layers": nn.ModuleList(
                [MoE(HIDDEN, INNER, EXPERTS, 1, dtype=BF16) for _ in range(count)]
            )
        }
    )


def saved(folder, layout, stacked=False, model=None):
    """Tensors of a checkpoint."""
    checkpoint.save(model or layers(), folder, layout, stacked=stacked)
    return load_file(folder / "model.safetensors")


def written(tensors, folder, config=None):
    folder.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(
            config if isinstance(config, str) else json.dumps(config)
        )
    return folder


def refused(model, folder, error, message, **options):
    """``load`` raises, and the module is as it was."""
    before = {
        name: (t, t._version, t.detach().clone())
        for name, t in model.state_dict(keep_vars=True).items()
    }
    with pytest.raises(error, match=message):
        checkpoint.load(model, folder, **options)
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    for name, (t, version, values) in before.items():
        assert after[name] is t and t._version == version, name
        assert_same_bytes(t.detach(), values, name)


def set_byte(name, byte):
    def change(tensors):
        tensors[name].view(U8).view(-1)[3] = byte

    return change


def set_number(name, number):
    def change(tensors):
        t = tensors[name]
        flat = t.clone().view(-1)
        flat[-1] = number
        tensors[name] = flat.view(t.shape)

    return change


LAST, STACK = "layers.1.experts.1.down_proj", "layers.1.experts.down_proj"
#: Layout, stacked, what is damaged, and what is said of it. The last tensor that is loaded is
#: wrong.
NUMBERS = {
    "a NaN scale": (
        "modelopt",
        False,
        set_byte(f"{LAST}.weight_scale", 0x7F),
        f"{LAST}.weight_scale in .* has nan",
    ),
    "a negative NaN": (
        "modelopt",
        False,
        set_byte(f"{LAST}.weight_scale", 0xFF),
        f"{LAST}.weight_scale in .* has nan",
    ),
    "a negative scale": (
        "modelopt",
        False,
        set_byte(f"{LAST}.weight_scale", 0xB8),
        f"{LAST}.weight_scale in .* has -1",
    ),
    "a scale of a stack": (
        "modelopt",
        True,
        set_byte(f"{STACK}_weight_scale", 0x7F),
        f"{STACK}_weight_scale in .* nan",
    ),
    "another layout": (
        "compressed-tensors",
        False,
        set_byte(f"{LAST}.weight_scale", 0x7F),
        f"{LAST}.weight_scale in .*model.safetensors has nan: block scales must be finite and not negative",
    ),
    **{
        f"a level of {number}": (
            "modelopt",
            False,
            set_number(f"{LAST}.weight_scale_2", number),
            rf"{LAST}.weight_scale_2 in .*model.safetensors has {message}",
        )
        for number, message in (
            (NAN, "nan"),
            (INF, "inf"),
            (-INF, "-inf"),
            (-1.0, "-1"),
            (0.0, "a scale of zero over"),
        )
    },
    **{
        f"a reciprocal level of {number}": (
            "compressed-tensors",
            False,
            set_number(f"{LAST}.weight_global_scale", number),
            rf"{LAST}.weight_global_scale in .*model.safetensors has {message}",
        )
        for number, message in (
            (NAN, "nan"),
            (INF, "a scale of zero over"),
            (-1.0, "-1"),
            (0.0, "0"),
            (1e-38, "1e-38"),
        )
    },
    **{
        f"a level of a stack of {number}": (
            "modelopt",
            True,
            set_number(f"{STACK}_weight_scale_2", number),
            f"{STACK}_weight_scale_2 in .* has {message}",
        )
        for number, message in ((NAN, "nan"), (-2.0, "-2"), (0.0, "a scale of zero over"))
    },
    **{
        f"an inverse scale of {number}": (
            "deepseek",
            False,
            set_number(f"{LAST}.weight_scale_inv", number),
            f"{LAST}.weight_scale_inv in .* has {message}",
        )
        for number, message in (
            (NAN, "nan"),
            (INF, "inf"),
            (-1.0, "-1"),
            (0.0, "a scale of zero over"),
            (1e38, r"1e\+38: codes times"),
        )
    },
}


@pytest.mark.parametrize("fault", [*NUMBERS])
def test_numbers_that_no_scale_has(fault, tmp_path):
    layout, stacked, change, message = NUMBERS[fault]
    tensors = saved(tmp_path / "a", layout, stacked)
    change(tensors)
    for strict in (True, False):
        refused(layers(1), written(tensors, tmp_path / "b"), ValueError, message, strict=strict)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors", "deepseek"])
@pytest.mark.parametrize("stacked", [False, True])
def test_an_expert_of_zeros_has_a_scale_of_zero(layout, stacked, tmp_path):
    model = layers()
    with torch.no_grad():
        model.layers[1].experts.down.weight[1] = 0
        model.layers[0].experts.gate_up.weight[0, INNER:] = 0
    tensors = saved(tmp_path / "a", layout, stacked, model)
    suffix = {
        "modelopt": "weight_scale_2",
        "compressed-tensors": "weight_global_scale",
        "deepseek": "weight_scale_inv",
    }
    name = f"{STACK}_{suffix[layout]}" if stacked else f"{LAST}.{suffix[layout]}"
    zero = INF if layout == "compressed-tensors" else 0
    t = tensors[name].clone()
    (t if not stacked else t[1]).fill_(zero)
    other = layers(1)
    report = checkpoint.load(other, written(tensors | {name: t}, tmp_path / "b"))
    assert name in report.zero_scales
    down = other.layers[1].experts.down.weight.dequantize()
    assert not down[1].any() and down[0].isfinite().all() and down[0].any()


def test_blocks_of_zeros_have_a_scale_of_zero(tmp_path):
    """Square blocks of several rows and columns, of which the last ones are smaller."""
    model = nn.ModuleDict({"experts": GroupedLinear(2, 304, 200, bias=False, dtype=BF16)})
    with torch.no_grad():
        model.experts.weight[1, 128:, :256] = 0
    tensors = saved(tmp_path / "a", "deepseek", model=model)
    name = "experts.1.weight_scale_inv"
    scales = tensors[name].clone()
    scales[1, :2] = 0
    report = checkpoint.load(model, written(tensors | {name: scales}, tmp_path / "b"))
    assert (
        report.zero_scales == [name] and not model.experts.weight.dequantize()[1, 128:, :256].any()
    )
    for row, column in ((0, 0), (0, 2), (1, 2)):
        wrong = scales.clone()
        wrong[row, column] = 0
        with pytest.raises(ValueError, match=f"{name} in .* has a scale of zero over codes"):
            checkpoint.load(model, written(tensors | {name: wrong}, tmp_path / "c"))


def test_weights_of_other_layers_are_decoded_and_checked_alike(tmp_path):
    tensors = saved(tmp_path / "a", "modelopt")
    parts = quantize_weight(torch.randn(1, EXPERTS, HIDDEN).bfloat16(), grouped.NVFP4()).expert(0)
    del tensors["layers.1.router.weight"]
    tensors |= {
        f"layers.1.router{s}": t for s, t in checkpoint.LAYOUTS["modelopt"].stored(parts).items()
    }
    checkpoint.load(layers(1), written(tensors, tmp_path / "b"))
    set_byte("layers.1.router.weight_scale", 0x7F)(tensors)
    refused(
        layers(1),
        written(tensors, tmp_path / "b"),
        ValueError,
        "layers.1.router.weight_scale in .* has nan",
    )


def replace(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


#: What headers show: layout, stacked, the change, and the message.
HEADERS = {
    "codes": (
        "modelopt",
        False,
        replace(f"{LAST}.weight", lambda t: t[:-1]),
        f"{LAST}.weight is U8 of shape .127, 64.",
    ),
    "scales": (
        "modelopt",
        False,
        replace(f"{LAST}.weight_scale", lambda t: t[:, :-1]),
        rf"{LAST}.weight_scale in .* must have the shape \(128, 8\), the checkpoint has \(128, 7\)",
    ),
    "a level": (
        "modelopt",
        False,
        replace(f"{LAST}.weight_scale_2", lambda t: torch.ones(3)),
        rf"{LAST}.weight_scale_2 in .* must have one number, got F32 of shape \(3,\)",
    ),
    "levels of a stack": (
        "modelopt",
        True,
        replace(f"{STACK}_weight_scale_2", lambda t: torch.ones(3)),
        rf"{STACK}_weight_scale_2 in .* must have one number, or 2, got F32 of shape \(3,\)",
    ),
    "a level of integers": (
        "modelopt",
        False,
        replace(f"{LAST}.weight_scale_2", lambda t: torch.ones((), dtype=torch.int64)),
        rf"{LAST}.weight_scale_2 in .* must be F32 or .* in the layout modelopt, got I64 of shape \(\)",
    ),
    "codes of another kind": (
        "modelopt",
        True,
        replace(f"{STACK}", lambda t: t.view(torch.int8)),
        f"{STACK} in .* must be U8 in the layout modelopt, got I8",
    ),
    "square scales": (
        "deepseek",
        False,
        replace(f"{LAST}.weight_scale_inv", lambda t: torch.ones(2, 1)),
        rf"{LAST}.weight_scale_inv in .* must have the shape \(1, 1\), the checkpoint has \(2, 1\)",
    ),
    "scales of integers": (
        "deepseek",
        False,
        replace(f"{LAST}.weight_scale_inv", lambda t: t.to(torch.int32)),
        f"{LAST}.weight_scale_inv in .* must be F32 or .*, got I32",
    ),
    "a router": (
        "deepseek",
        False,
        replace("layers.1.router.weight", lambda t: t[:1]),
        r"layers.1.router.weight in .* must have the shape \(2, 128\), the checkpoint has \(1, 128\)",
    ),
    "a router of FP8": (
        "deepseek",
        False,
        replace("layers.1.router.weight", lambda t: t.to(E4M3)),
        "layers.1.router.weight is torch.float8_e4m3fn without the scales of a layout",
    ),
}


@pytest.mark.parametrize("fault", [*HEADERS])
def test_headers_are_checked_before_anything_is_loaded(fault, tmp_path):
    layout, stacked, change, message = HEADERS[fault]
    tensors = saved(tmp_path / "a", layout, stacked)
    change(tensors)
    refused(layers(1), written(tensors, tmp_path / "b"), ValueError, message)


def test_plain_experts_are_checked_alike(tmp_path):
    model = layers(count=1)
    gate_up = model.layers[0].experts.gate_up.weight.detach()
    tensors = {"layers.0.router.weight": model.layers[0].router.weight.detach()}
    for g in range(EXPERTS):
        named = {
            "gate_proj": gate_up[g, :INNER],
            "up_proj": gate_up[g, INNER:],
            "down_proj": gate_up[g, :INNER],
        }
        tensors |= {f"layers.0.experts.{g}.{name}.weight": t.clone() for name, t in named.items()}
    checkpoint.load(layers(1, 1), written(tensors, tmp_path / "a"))
    name = "layers.0.experts.1.down_proj.weight"
    for change, message in (
        (lambda t: t[:, 1:], f"{name} is BF16 of shape .128, 127.*model.safetensors"),
        (lambda t: t.to(E4M3), f"{name} is torch.float8_e4m3fn without the scales"),
        (lambda t: t.to(torch.complex64), f"{name} is C64 without the scales"),
    ):
        refused(
            layers(1, 1),
            written(tensors | {name: change(tensors[name])}, tmp_path / "b"),
            ValueError,
            message,
        )
    model = layers(1, 1).to(F64)
    refused(model, tmp_path / "b", ValueError, "C64")
    checkpoint.save(layers(1, 1), tmp_path / "c", "modelopt")
    refused(
        model,
        tmp_path / "c",
        ValueError,
        "experts.0.gate_proj.weight is quantized, .* got torch.float64",
    )


def test_exponents_that_are_nan(tmp_path):
    model = MoE(
        64, 64, EXPERTS, 1, bias=True, interleaved=True, activation="clamped_swiglu", dtype=BF16
    )
    tensors = {
        "router.weight": torch.zeros(EXPERTS, 64),
        "experts.gate_up_proj_bias": torch.zeros(EXPERTS, 128),
    }
    for name, rows in (("gate_up", 128), ("down", 64)):
        tensors[f"experts.{name}_proj_blocks"] = torch.randint(
            0, 256, (EXPERTS, rows, 2, 16), dtype=U8
        )
        tensors[f"experts.{name}_proj_scales"] = torch.full((EXPERTS, rows, 2), 120, dtype=U8)
    tensors["experts.down_proj_bias"] = torch.zeros(EXPERTS, 64)
    tensors |= {
        n: t for n, t in model.state_dict().items() if n.startswith("router") and n not in tensors
    }
    checkpoint.load(model, written(tensors, tmp_path / "a"))
    want = model.experts.down.weight.dequantize()
    as_e8m0 = {n: t.view(E8M0) if n.endswith("_scales") else t for n, t in tensors.items()}
    checkpoint.load(model, written(as_e8m0, tmp_path / "b"))
    assert torch.equal(model.experts.down.weight.dequantize(), want)
    tensors["experts.down_proj_scales"][1, 3, 1] = 255
    with pytest.raises(ValueError, match="experts.down_proj_scales in .* has nan"):
        checkpoint.load(model, written(tensors, tmp_path / "c"))
    tensors["experts.down_proj_scales"][1, 3, 1] = 160
    with pytest.raises(
        ValueError, match="experts.down_proj_blocks in .*: these MXFP4 weights have no exact NVFP4"
    ):
        checkpoint.load(model, written(tensors, tmp_path / "d"))
    assert torch.equal(model.experts.down.weight.dequantize(), want)


# ---- files


@pytest.mark.parametrize(
    "content",
    ["{", "", "[1]", '"x"', "\xff\xfe", '{"weight_map": {"a": 3}}', '{"weight_map": [1]}', "{}"],
    ids=repr,
)
def test_an_index_that_is_damaged(content, tmp_path):
    saved(tmp_path, "modelopt")
    (tmp_path / "model.safetensors.index.json").write_bytes(content.encode("latin1"))
    refused(
        layers(1),
        tmp_path,
        ValueError,
        "model.safetensors.index.json (is no JSON|must hold a JSON|has no weight_map)",
    )


@pytest.mark.parametrize(
    "content", ["{", "", "[1]", "\xff\xfe", "[" * 100_000], ids=lambda text: repr(text[:9])
)
def test_a_config_that_is_damaged(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content.encode("latin1"))
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"config.json (is no JSON|must hold a JSON object, got list)"
    ):
        Reader(tmp_path).config()


def raw_file(path, entries, data, length=None):
    header = json.dumps(entries).encode() if isinstance(entries, dict) else entries
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}},
        {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]}},
        {"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [4]}},
        b"{",
        b"",
    ],
    ids=str,
)
def test_headers_that_are_damaged(header, tmp_path):
    raw_file(tmp_path / "model.safetensors", header, bytes(16))
    refused(layers(1), tmp_path, ValueError, "model.safetensors is no whole safetensors file")
    raw_file(tmp_path / "model.safetensors", header, bytes(16), 2**40)
    refused(layers(1), tmp_path, ValueError, "model.safetensors is no whole safetensors file")


def test_dtypes_that_cannot_be_read(tmp_path):
    for dtype, count in (("F6_E2M3", 12), ("F4", 8)):
        raw_file(
            tmp_path / "model.safetensors",
            {"a": {"dtype": dtype, "shape": [8, 2], "data_offsets": [0, count]}},
            bytes(count),
        )
        with pytest.raises(ValueError, match=f"a in .*model.safetensors cannot be read as {dtype}"):
            Reader(tmp_path).rows("a", slice(0, 3))
        model = nn.ParameterDict({"a": nn.Parameter(torch.ones(8, 2))})
        refused(model, tmp_path, ValueError, f"a is {dtype} without the scales")


def test_expressions_that_are_none(tmp_path):
    saved(tmp_path, "modelopt")
    for rename in ({"(": "x"}, {"(a)": r"\2"}):
        refused(
            layers(1), tmp_path, ValueError, "rename has .*no regular expression", rename=rename
        )
    for rename in ([("a", "b")], {"a": 1}, {1: "a"}):
        refused(layers(1), tmp_path, TypeError, "rename must be", rename=rename)


# ---- what exporters write


@pytest.mark.parametrize("dtype", [BF16, F16, E8M0, F64], ids=str)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_scales_of_square_blocks_have_several_dtypes(dtype, stacked, name, tmp_path):
    """DeepSeek's own files and others'; compressed-tensors calls them weight_scale."""
    tensors = saved(tmp_path / "a", "deepseek", stacked)
    for key in [key for key in tensors if key.endswith("_inv")]:
        scales = tensors.pop(key).log2().floor().exp2()
        tensors[key.replace("weight_scale_inv", name)] = scales.to(dtype)
        tensors[key] = scales
    wide = {key: t for key, t in tensors.items() if key.endswith("_inv") or "_scale" not in key}
    narrow = {
        key: t
        for key, t in tensors.items()
        if name == "weight_scale_inv" or not key.endswith("_inv")
    }
    narrow |= {key: t.to(dtype) for key, t in narrow.items() if key.endswith(name)}
    want, got = layers(1), layers(2)
    checkpoint.load(want, written(wide, tmp_path / "b"))
    report = checkpoint.load(got, written(narrow, tmp_path / "c"))
    assert set(report.layouts.values()) == {"deepseek" if name.endswith("inv") else "fp8-block"}
    for a, b in zip(got.parameters(), want.parameters(), strict=True):
        assert_same_bytes(
            a.dequantize() if hasattr(a, "dequantize") else a,
            b.dequantize() if hasattr(b, "dequantize") else b,
        )


def test_the_config_of_square_blocks(tmp_path):
    """compressed-tensors' FP8_BLOCK, as its own package writes it."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, format="float-quantized"
    )
    config = config.model_dump(mode="json") | {"quant_method": "compressed-tensors"}
    tensors = {
        n.replace("_scale_inv", "_scale"): t.bfloat16() if "_inv" in n else t
        for n, t in saved(tmp_path / "a", "deepseek").items()
    }
    model = layers(1)
    report = checkpoint.load(
        model, written(tensors, tmp_path / "b", {"quantization_config": config})
    )
    assert set(report.layouts.values()) == {"fp8-block"}
    config["config_groups"]["group_0"]["weights"]["strategy"] = "channel"
    refused(
        layers(2),
        written(tensors, tmp_path / "c", {"quantization_config": config}),
        ValueError,
        "strategy is .*channel",
    )


def test_scales_that_lose_digits_are_refused(tmp_path):
    tensors = saved(tmp_path / "a", "deepseek")
    name = f"{LAST}.weight_scale_inv"
    wrong = {name: torch.full((1, 1), 1 + 2.0**-40, dtype=F64)}
    refused(
        layers(1),
        written(tensors | wrong, tmp_path / "b"),
        ValueError,
        f"{name} in .* torch.float32 does not hold",
    )
    tensors = saved(tmp_path / "c", "modelopt")
    name = f"{LAST}.weight_scale"
    wide = {n: t.float() for n, t in tensors.items() if n.endswith("weight_scale")}
    got, want = layers(1), layers(2)
    checkpoint.load(got, written(tensors | wide, tmp_path / "d"))
    checkpoint.load(want, tmp_path / "c")
    assert_same_bytes(*(m.layers[1].experts.down.weight.dequantize() for m in (got, want)))
    wide[name][0, 0] = 1.03
    refused(
        layers(1),
        written(tensors | wide, tmp_path / "e"),
        ValueError,
        f"{name} in .* torch.float8_e4m3fn does not hold",
    )


@pytest.mark.parametrize("level", ["()", "(1,)", "(G,)", "(G, 1)", "(G, 1, 1)"])
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_levels_of_a_stack(layout, level, tmp_path):
    tensors = saved(tmp_path / "a", layout, True)
    suffix = checkpoint.LAYOUTS[layout].suffixes[2].replace(".", "_")
    one = {n: t.view(-1)[0] for n, t in tensors.items() if n.endswith(suffix)}
    for name, t in one.items():
        shape = {
            "()": (),
            "(1,)": (1,),
            "(G,)": (EXPERTS,),
            "(G, 1)": (EXPERTS, 1),
            "(G, 1, 1)": (EXPERTS, 1, 1),
        }[level]
        tensors[name] = t.expand(shape).clone()
    got = layers(1)
    checkpoint.load(got, written(tensors, tmp_path / "b"))
    (name,) = (n for n in one if n.startswith(STACK))
    whole = tensors | {
        name: one[name].expand(EXPERTS).clone()
        if layout == "modelopt"
        else one[name].expand(EXPERTS, 1).clone()
    }
    want = layers(2)
    checkpoint.load(want, written(whole, tmp_path / "c"))
    assert_same_bytes(*(m.layers[1].experts.down.weight.dequantize() for m in (got, want)))


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_stacks_that_are_transposed(layout, tmp_path):
    """ModelOpt quantizes along K, and writes (G, K, N) where a model has its weights so:

    Llama 4.
    """
    tensors = saved(tmp_path / "a", layout, True)
    turned = {n: t.mT if t.dim() == 3 else t for n, t in tensors.items()}
    want, got = layers(1), layers(2)
    checkpoint.load(want, tmp_path / "a")
    checkpoint.load(got, written(turned, tmp_path / "b"))
    for a, b in zip(
        got.layers[1].experts.parameters(), want.layers[1].experts.parameters(), strict=True
    ):
        assert_same_bytes(a.dequantize(), b.dequantize())
    name = f"{STACK}_weight_scale"
    turned[name] = turned[name].contiguous()
    set_byte(name, 0x7F)(turned)
    refused(layers(1), written(turned, tmp_path / "c"), ValueError, f"{name} in .* has nan")


#: Names beside the weights of a layer, and where the report has them.
BESIDE = {
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


def test_what_exporters_write_beside_weights(tmp_path):
    tensors = saved(tmp_path / "a", "modelopt")
    beside = {name: torch.full((3,), 0.0 if "zero" in name else 1.0) for name in BESIDE}
    written(tensors | beside, tmp_path / "b")
    for strict in (True, False):
        report = checkpoint.load(layers(1), tmp_path / "b", strict=strict)
        assert not report.unexpected
        for name, attribute in BESIDE.items():
            assert name in getattr(report, attribute), name
        assert len(report.ignored) + len(report.input_scales) == len(BESIDE)
    assert find_harmless(["layers.2.enorm.weight"], ["layers.2.router.weight"]) == []
    # A layer that the module has is not one that predicts further tokens, and is not left out.
    refused(
        layers(1, 1), tmp_path / "b", KeyError, "beyond the module, layers.1.experts.0.down_proj"
    )
    report = checkpoint.load(layers(1, 1), tmp_path / "b", strict=False)
    assert (
        "layers.1.router.weight" in report.unexpected
        and "layers.2.eh_proj.weight" in report.ignored
    )


#: Tensors that change results, and values that do not; None where there are none.
CHANGING = {
    "experts.1.down_proj.pre_quant_scale": 1.0,
    "experts.1.down_proj.weight_zero_point": 0.0,
    "experts.1.down_proj.input_offset": 0.0,
    "experts.1.down_proj.smoothing_factor": 1.0,
    "experts.1.down_proj.svdquant_lora_a": None,
    "experts.1.down_proj.weight_g_idx": None,
    "experts.1.down_proj.R4_input.weight": None,
    "router.pre_quant_scale": 1.0,
}


@pytest.mark.parametrize("name", [*CHANGING])
@pytest.mark.parametrize("stacked", [False, True])
def test_what_changes_results_is_refused(name, stacked, tmp_path):
    tensors, neutral = saved(tmp_path / "a", "modelopt", stacked), CHANGING[name]
    name = f"layers.1.{name}"
    if stacked:
        name = (
            name.replace("experts.1.", "experts.")
            .replace("down_proj.", "down_proj_")
            .replace("_R4", ".R4")
        )
    wrong = torch.full((HIDDEN,), 1.0 if neutral is None else neutral)
    wrong[3] = 1.5
    path = written(tensors | {name: wrong}, tmp_path / "b")
    for strict in (True, False):
        refused(layers(1), path, ValueError, f"{name} in .* changes the results", strict=strict)
    # Of a layer that the module does not have it changes nothing.
    assert name in checkpoint.load(layers(1, 1), path, strict=False).unexpected
    if neutral is not None:
        path = written(tensors | {name: torch.full((HIDDEN,), neutral)}, tmp_path / "c")
        assert checkpoint.load(layers(1), path).ignored == [name]


class Tied(nn.Module):
    def __init__(self, is_tied=True):
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, 32, bias=False)
        self.embed = nn.Embedding(32, HIDDEN)
        if is_tied:
            self.lm_head.weight = self.embed.weight


@pytest.mark.parametrize("names", [["embed"], ["lm_head"], ["embed", "lm_head"]], ids=" ".join)
def test_a_head_that_is_tied(names, tmp_path):
    values = torch.randn(32, HIDDEN)
    path = written(
        {f"{name}.weight": values.clone() for name in names},
        tmp_path / "a",
        {"tie_word_embeddings": True},
    )
    model = Tied()
    report = checkpoint.load(model, path)
    assert torch.equal(model.embed.weight, values) and model.lm_head.weight is model.embed.weight
    assert len(report.ignored) == len(names) - 1
    if len(names) > 1:
        path = written({"embed.weight": values, "lm_head.weight": values + 1}, tmp_path / "b")
        refused(model, path, ValueError, "ties .*lm_head.weight.* but they differ")
    elif names == ["embed"]:
        refused(Tied(False), path, KeyError, "tie the head of the module to its embedding first")


def test_hints_fit(tmp_path):
    tensors = saved(tmp_path / "a", "modelopt")
    for change, hint in (
        (lambda t: t | {"vision.weight": torch.ones(2)}, "strict=False ignores them"),
        (
            lambda t: {n.replace("experts", "block_sparse_moe"): v for n, v in t.items()},
            "say rename=",
        ),
        (
            lambda t: {n: v for n, v in t.items() if "layers.1" not in n},
            "incomplete, or of a module with fewer layers",
        ),
        (
            lambda t: {
                n.replace("down_proj.weight", "down_proj.qweight") if "scale" not in n else n: v
                for n, v in t.items()
            },
            "none of the layouts modelopt",
        ),
    ):
        refused(layers(1), written(change(tensors), tmp_path / "b"), KeyError, hint)
