import json

import numpy as np
import pytest
import torch

from tests.helpers import BF16, E4M3, E5M2, F32, U8, e2m1_values

pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

import grouped
from grouped import checkpoint
from grouped.checkpoint import convert
from grouped.checkpoint import files as ckpt_files
from grouped.checkpoint.plain_tensors import quantize_weight
from grouped.nn import GroupedLinear, GroupedMLP, MoE

HIDDEN, INNER, EXPERTS = 64, 128, 3
STYLES = {
    "swiglu": {},
    "gpt-oss": {"bias": True, "interleaved": True, "activation": "clamped_swiglu"},
    "plain": {"activation": "gelu"},
}
LAYOUTS = ("modelopt", "compressed-tensors", "deepseek")


def moe(style="swiglu", seed=0, inner=INNER):
    torch.manual_seed(seed)
    return MoE(HIDDEN, inner, EXPERTS, 2, dtype=BF16, **STYLES[style])


def raw(t):
    return t.flatten().view(U8)


def files_of(folder):
    return {
        name: t
        for path in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(path).items()
    }


def write(tensors, folder):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")


def same_files(a, b):
    first, second = files_of(a), files_of(b)
    return first.keys() == second.keys() and all(
        torch.equal(raw(t), raw(second[n])) for n, t in first.items()
    )


def decoded(tensors, name, layout):
    if layout == "deepseek":
        codes, scales = (
            tensors[f"{name}.weight"].float().numpy(),
            tensors[f"{name}.weight_scale_inv"].numpy(),
        )
        return codes * scales.repeat(128, 0).repeat(128, 1)[: codes.shape[0], : codes.shape[1]]
    values = (
        e2m1_values(tensors[f"{name}.{'weight' if layout == 'modelopt' else 'weight_packed'}"])
        .float()
        .numpy()
    )
    scales = tensors[f"{name}.weight_scale"].float().numpy().repeat(16, 1)
    if layout == "modelopt":
        return values * scales * tensors[f"{name}.weight_scale_2"].numpy()
    return values * scales / tensors[f"{name}.weight_global_scale"].numpy()


@pytest.mark.parametrize("stacked", [False, True], ids=["experts", "stacked"])
@pytest.mark.parametrize("style", [*STYLES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_loaded_is_what_was_saved(layout, style, stacked, tmp_path):
    saved, model = moe(style), moe(style, seed=1)
    checkpoint.save(saved, tmp_path / "a", layout, stacked=stacked, shard_bytes=20_000)
    report = checkpoint.load(model, tmp_path / "a")
    assert (
        set(report.layouts.values()) == {layout} and not report.reconciled or layout == "deepseek"
    )
    for name in ("gate_up", "down"):
        plain, held = getattr(saved.experts, name).weight, getattr(model.experts, name).weight
        assert isinstance(held, grouped.GroupedTensor) and not held.requires_grad
        assert (held.dequantize() - plain).norm() < 0.12 * plain.norm()
    assert torch.equal(model.router.weight, saved.router.weight)
    if style == "gpt-oss":
        assert torch.equal(model.experts.gate_up.bias, saved.experts.gate_up.bias)
    if report.reconciled:
        with pytest.raises(ValueError, match="span gate and up"):
            checkpoint.save(model, tmp_path / "b", layout)
        return
    checkpoint.save(model, tmp_path / "b", layout, stacked=stacked)
    assert same_files(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_decode_to_what_the_module_holds(layout, tmp_path):
    model = moe()
    checkpoint.save(moe(), tmp_path, layout)
    checkpoint.load(model, tmp_path)
    tensors = files_of(tmp_path)
    weight = model.experts.gate_up.weight.dequantize(F32)
    for expert in range(EXPERTS):
        parts = [
            decoded(tensors, f"experts.{expert}.{name}", layout)
            for name in ("gate_proj", "up_proj")
        ]
        np.testing.assert_allclose(weight[expert].numpy(), np.concatenate(parts), rtol=3e-7)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    keys = checkpoint.LAYOUTS[layout].ignore_keys
    assert [config[key] for key in keys] == [["router"]] * len(keys) and "quant_method" in config


def test_other_names_and_scales_of_activations(tmp_path):
    checkpoint.save(moe(), tmp_path, "modelopt", rename={"^experts": "block_sparse_moe.experts"})
    tensors = files_of(tmp_path)
    to = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = {
        n.replace(p, to[p]) if (p := n.split(".")[-2]) in to else n: t for n, t in tensors.items()
    }
    scale = "block_sparse_moe.experts.0.w1.input_scale"
    write({**tensors, scale: torch.tensor(0.5)}, tmp_path)
    model = moe(seed=1)
    report = checkpoint.load(model, tmp_path, rename={"^experts": "block_sparse_moe.experts"})
    assert report.input_scales == {scale: torch.tensor(0.5)} and not report.unexpected
    want = moe()
    checkpoint.save(want, tmp_path / "b", "modelopt")
    checkpoint.load(want, tmp_path / "b")
    assert torch.equal(
        model.experts.down.weight.rowwise.codes, want.experts.down.weight.rowwise.codes
    )


def test_gate_and_up_of_different_second_levels_are_reconciled(tmp_path):
    """The one of the larger level keeps its bytes, the other is quantized again under that level."""
    model = moe()
    with torch.no_grad():
        model.experts.gate_up.weight[1, INNER:] *= 0.037
    checkpoint.save(model, tmp_path / "a", "modelopt")
    tensors = files_of(tmp_path / "a")
    up = model.experts.gate_up.weight[1:2, INNER:].detach()
    alone = quantize_weight(up, grouped.NVFP4()).expert(0)
    tensors |= {
        f"experts.1.up_proj{s}": t for s, t in checkpoint.LAYOUTS["modelopt"].stored(alone).items()
    }
    write(tensors, tmp_path / "b")
    report = checkpoint.load(model, tmp_path / "b")
    assert list(report.reconciled) == ["experts.1"] and 15 < report.reconciled["experts.1"] < 40
    assert torch.equal(
        model.experts.gate_up.weight.rowwise.codes[1, :INNER], tensors["experts.1.gate_proj.weight"]
    )
    got = model.experts.gate_up.weight.dequantize(F32)[1, INNER:].numpy()
    want = decoded(tensors, "experts.1.up_proj", "modelopt")
    noise = np.square(got - want).sum() / np.square(want).sum()
    assert abs(-10 * np.log10(noise) - report.reconciled["experts.1"]) < 0.1


def test_blocks_that_span_gate_and_up_are_quantized_again(tmp_path):
    model = moe(inner=96)
    with torch.no_grad():
        model.experts.gate_up.weight[:, 96:] *= 3.3
    checkpoint.save(model, tmp_path, "deepseek")
    report = checkpoint.load(moe(inner=96), tmp_path)
    assert len(report.reconciled) == EXPERTS and all(
        25 < snr < 60 for snr in report.reconciled.values()
    )


def mxfp4(span):
    blocks = torch.randint(0, 256, (EXPERTS, 2 * INNER, HIDDEN // 32, 16), dtype=U8)
    exponents = torch.randint(120, 121 + span, blocks.shape[:3], dtype=U8)
    exponents[:, 0, 0], exponents[:, 0, 1] = 120, 120 + span
    blocks[:, 1, 0], exponents[:, 1, 0] = 0x80, 3  # Zeros, of which no scale counts.
    return blocks, exponents


@pytest.mark.parametrize("span", [0, 5, 17, 18, 30])
def test_mxfp4_is_nvfp4_where_exact(span, tmp_path):
    blocks, exponents = mxfp4(span)
    model = moe("gpt-oss")
    plain = {
        name.replace("experts.down.", "experts.0.down_proj."): t
        for name, t in model.state_dict().items()
    }
    biases = {"experts.gate_up_proj_bias": plain.pop("experts.gate_up.bias")}
    biases["experts.down_proj_bias"] = plain.pop("experts.0.down_proj.bias")
    down, _ = plain.pop("experts.0.down_proj.weight"), plain.pop("experts.gate_up.weight")
    gate_up = {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": exponents}
    write({**plain, **biases, **gate_up, "experts.down_proj": down}, tmp_path)
    if span > 17:
        with pytest.raises(
            ValueError, match=rf"more than 2\^17 below .* {span - 17} powers of two too large"
        ):
            checkpoint.load(model, tmp_path)
        return
    checkpoint.load(model, tmp_path)
    values = e2m1_values(blocks).numpy() * np.exp2(exponents.numpy()[..., None] - 127.0)
    want = values.reshape(EXPERTS, 2 * INNER, HIDDEN).astype(np.float32)
    np.testing.assert_array_equal(model.experts.gate_up.weight.dequantize(F32).numpy(), want)


def test_faults(tmp_path):
    model, other = moe(), tmp_path / "other"
    checkpoint.save(model, other, "modelopt", shard_bytes=30_000)
    checkpoint.load(model, other)
    larger = MoE(HIDDEN, INNER, EXPERTS + 1, 2, dtype=BF16)
    before = larger.router.weight.clone()
    mlp, renamed = GroupedMLP(EXPERTS, HIDDEN, INNER), {"rename": {"^": "experts"}}
    for call, arguments, error, message in (
        (checkpoint.save, (model, other, "modelopt"), FileExistsError, "choose another folder"),
        (
            checkpoint.save,
            (model, tmp_path / "c", "gpt-oss"),
            ValueError,
            "'deepseek', got 'gpt-oss'",
        ),
        (
            checkpoint.save,
            (model, tmp_path / "c", "deepseek"),
            ValueError,
            "is nvfp4, deepseek holds fp8_block",
        ),
        (checkpoint.load, (model, tmp_path), FileNotFoundError, "no safetensors file in"),
        (
            checkpoint.load,
            (GroupedLinear(2, 16, 16, single_parameter=False), other),
            ValueError,
            "=False",
        ),
        (
            checkpoint.load,
            (larger, other),
            KeyError,
            r"lacks experts.3.gate_proj.weight, .* and has, beyond",
        ),
        (
            checkpoint.load,
            (moe(inner=2 * INNER), other),
            ValueError,
            r"\(3, 512, 32\), the checkpoint has \(3, 256, 32\)",
        ),
    ):
        with pytest.raises(error, match=message):
            call(*arguments)
    assert torch.equal(larger.router.weight, before)
    with pytest.raises(KeyError, match="beyond the module, router"):
        checkpoint.load(mlp, other, **renamed)
    assert checkpoint.load(mlp, other, **renamed, strict=False).unexpected == ["router.weight"]
    next(other.glob("*-00002-*")).unlink()
    with pytest.raises(FileNotFoundError, match="00002"):
        checkpoint.load(model, other)


def test_one_expert_in_one_tensor_and_tied_weights(tmp_path):
    def model():
        a, b = (GroupedMLP(1, HIDDEN, INNER, dtype=BF16) for _ in range(2))
        b.down.weight = a.down.weight
        return torch.nn.ModuleList([a, b])

    saved, loaded = model(), model()
    checkpoint.save(saved, tmp_path, "modelopt", stacked=True)
    checkpoint.load(loaded, tmp_path)
    assert loaded[1].down.weight is loaded[0].down.weight
    for ours, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert (ours.dequantize() - theirs).norm() < 0.12 * theirs.norm()


U, R = "experts.1.up_proj.weight", "router.weight"
#: What was loaded in silence.
WRONG = {
    "dtype": (lambda t: {U: t[U].float().to(E5M2)}, r"1.up_proj.weight is F8_E5M2 of"),
    "heights": (
        lambda t: {U: t[U][:96].clone()},
        r"\(96, 64\), but experts.0.gate_proj.weight is F8_E4M3 of",
    ),
    "integers": (lambda t: {R: t[R].to(torch.int8)}, "is torch.int8 without the scales"),
    "codes": (
        lambda t: {R: t[R].to(E4M3)},
        "router.weight is torch.float8_e4m3fn without the scales",
    ),
    "no scales": (lambda t: {}, "without the scales of a"),
}


@pytest.mark.parametrize("fault", [*WRONG])
def test_what_a_file_has_wrong_is_found(fault, tmp_path):
    change, message = WRONG[fault]
    checkpoint.save(moe(), tmp_path, "deepseek")
    tensors = files_of(tmp_path)
    tensors |= change(tensors)
    write({n: t for n, t in tensors.items() if fault != "no scales" or "_inv" not in n}, tmp_path)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(moe(), tmp_path, strict=False)


def test_folders_that_are_wrong(tmp_path):
    a, b, two = tmp_path / "a", tmp_path / "b", torch.nn.ModuleList([moe(), moe()])
    checkpoint.save(moe(), a, "modelopt", shard_bytes=30_000)
    index = a / "model.safetensors.index.json"
    whole = json.loads(index.read_text())["weight_map"]
    first, last = min(whole.values()), max(whole.values())

    def check(message):
        with pytest.raises(ValueError, match=message):
            checkpoint.load(two, a, rename={r"^\d\.": ""})

    check(r"would be experts.0.gate_proj.weight, .* keeps them apart")
    for content, message in (
        ({}, "no weight_map"),
        ({"weight_map": {"x": "../a/" + first}}, "outside of its folder"),
        ({"weight_map": dict.fromkeys(whole, last)}, f"is wrong: {last} has no"),
    ):
        index.write_text(json.dumps(content))
        check(message)
    index.unlink()
    save_file(load_file(a / first), a / "z.safetensors")
    check(f"{first} and z.safetensors both have")
    (a / first).write_bytes((a / first).read_bytes()[:-9])
    check("no whole safetensors file")
    with pytest.raises(ValueError, match="two tensors would be called"):
        checkpoint.save(two, b, "modelopt", rename={r"^\d\.": ""}, shard_bytes=9000)
    with torch.no_grad():
        two.float()[0].experts.down.weight.mul_(1e-37)
    with pytest.raises(ValueError, match="in fp32, which has none for the amax"):
        checkpoint.save(two, b, "modelopt")
    assert not list(b.iterdir())


def test_at_most_a_shard_is_held(tmp_path, monkeypatch):
    held = []
    monkeypatch.setattr(
        ckpt_files,
        "save_file",
        lambda t, path, meta: (held.append(sum(x.nbytes for x in t.values())), save_file(t, path)),
    )
    checkpoint.save(moe(), tmp_path, "compressed-tensors", shard_bytes=10_000)
    assert len(held) > 3 and max(held) <= 10_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(files_of(tmp_path)) and index["metadata"][
        "total_size"
    ] == sum(held)


@pytest.mark.parametrize(
    "to", [["nvfp4"], ["nvfp4", "--layout", "compressed-tensors"], ["fp8_block"]], ids=" ".join
)
@pytest.mark.parametrize("stacked", [False, True], ids=["experts", "stacked"])
def test_convert(to, stacked, tmp_path, capsys):
    model, source = moe(), tmp_path / "source"
    gate_up, down = model.experts.gate_up.weight.detach(), model.experts.down.weight.detach()
    tensors = {"router.weight": model.router.weight.detach()}
    if stacked:
        tensors |= {
            "experts.gate_up_proj": gate_up.mT.contiguous(),
            "experts.down_proj": down.mT.contiguous(),
        }
    else:
        for g in range(EXPERTS):
            gate, up = gate_up[g].chunk(2)
            rows = {"gate_proj": gate, "up_proj": up, "down_proj": down[g]}
            tensors |= {f"experts.{g}.{name}.weight": t.contiguous() for name, t in rows.items()}
    write(tensors, source)
    (source / "tokenizer.json").write_text("{}")
    (source / "config.json").write_text('{"model_type": "x"}')
    options = ["--report", str(tmp_path / "r.html"), *["--transposed"] * stacked]
    assert convert.main([str(source), str(tmp_path / "a"), "--to", *to, *options]) == 0
    assert "SNR" in capsys.readouterr().out and "<table>" in (tmp_path / "r.html").read_text()
    layout = to[-1] if len(to) > 1 else {"nvfp4": "modelopt", "fp8_block": "deepseek"}[to[0]]
    checkpoint.save(model, tmp_path / "b", layout, stacked=stacked, config={"model_type": "x"})
    assert same_files(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "b/config.json").read_text()
    assert (tmp_path / "a/tokenizer.json").exists()
    for again in (source, tmp_path / "b"):  # The folder has files; weights are quantized already.
        with pytest.raises(SystemExit, match="1"):
            convert.main(
                [str(again), str(tmp_path / ("a" if again == source else "c")), "--to", *to]
            )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_weights_that_are_quantized_are_decoded(layout, tmp_path):
    model, record = moe(), checkpoint.LAYOUTS[layout]
    checkpoint.save(model, tmp_path / "a", layout)
    parts = quantize_weight(torch.randn(EXPERTS, HIDDEN).bfloat16()[None], record.fmt).expert(0)
    tensors = files_of(tmp_path / "a")
    del tensors["router.weight"]
    write({**tensors, **{f"router{s}": t for s, t in record.stored(parts).items()}}, tmp_path / "b")
    checkpoint.load(model, tmp_path / "b")
    want = decoded(files_of(tmp_path / "b"), "router", layout)
    np.testing.assert_allclose(model.router.weight.detach().float().numpy(), want, rtol=4e-3)
    with pytest.raises(ValueError, match="meta device"):
        checkpoint.load(model.to("meta"), tmp_path / "a")


def test_transposed_experts_are_quantized_whole_or_not_at_all(tmp_path):
    def experts():
        made = torch.nn.Module()
        made.has_gate = made.is_transposed = True
        made.gate_up_proj, made.down_proj = (
            torch.nn.Parameter(torch.ones(2, 64, n)) for n in (128, 64)
        )
        return torch.nn.ModuleDict({"x": made})

    checkpoint.save(experts(), tmp_path, "modelopt", stacked=True)
    tensors = {n: t for n, t in files_of(tmp_path).items() if "down" not in n}
    write({**tensors, "x.down_proj": torch.ones(2, 64, 64)}, tmp_path)
    with pytest.raises(ValueError, match=r"x.down_proj is plain, other weights"):
        checkpoint.load(experts(), tmp_path)


@pytest.mark.parametrize("shared", ["shared_experts", "shared_expert"])
@pytest.mark.parametrize("layout", ["modelopt", "deepseek"])
def test_convert_leaves_the_shared_experts_of_a_layer(shared, layout, tmp_path):
    names = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    plain = {
        f"mlp.{shared}.{name}.weight": torch.randn(shape).bfloat16()
        for name, shape in names.items()
    }
    one = {
        f"mlp.experts.{g}.{n}.weight": torch.randn(s).bfloat16()
        for g in range(2)
        for n, s in names.items()
    }
    write(plain | one, tmp_path / "a")
    convert.convert(tmp_path / "a", tmp_path / "b", layout=layout)
    found = files_of(tmp_path / "b")
    assert all(torch.equal(found[name], t) for name, t in plain.items())
    assert all(found[name].dtype != torch.bfloat16 for name in one)
    text = (tmp_path / "b/config.json").read_text()
    assert all(name.removesuffix(".weight") in text for name in plain)


def test_convert_of_experts_that_are_turned_otherwise_than_said(tmp_path):
    gate_up, down = (
        torch.randn(2, 64, 96).bfloat16(),
        torch.randn(2, 48, 64).bfloat16(),
    )  # (E, K, N), as gpt-oss
    write({"x.experts.gate_up_proj": gate_up, "x.experts.down_proj": down}, tmp_path / "a")
    with pytest.raises(ValueError, match="convert with --transposed"):
        convert.convert(tmp_path / "a", tmp_path / "b")
    convert.convert(tmp_path / "a", tmp_path / "b", transposed=True)
    rows = {
        "x.experts.gate_up_proj": gate_up.mT.contiguous(),
        "x.experts.down_proj": down.mT.contiguous(),
    }
    write(rows, tmp_path / "c")
    with pytest.raises(ValueError, match="not --transposed"):
        convert.convert(tmp_path / "c", tmp_path / "d", transposed=True)
    convert.convert(tmp_path / "c", tmp_path / "d")
    assert same_files(tmp_path / "b", tmp_path / "d")


def test_convert_of_odd_files(tmp_path):
    def converted(tensors, name):
        write(tensors, tmp_path / name)
        convert.convert(tmp_path / name, tmp_path / f"{name}-to")
        return files_of(tmp_path / f"{name}-to")

    gate, up = torch.ones(2, 8, 32), torch.full((2, 8, 32), 4.0)
    found = converted({"x.experts.gate_proj": gate, "x.experts.up_proj": up}, "apart")
    assert len(found) == 6 and torch.equal(
        *[found[f"x.experts.{name}_proj_weight_scale_2"] for name in ("gate", "up")]
    )
    for i, (tensors, message) in enumerate(
        (
            ({"w": torch.zeros(2, 2)}, "no weights of experts"),
            (
                {"experts.0.w1.weight": torch.zeros(8, 24)},
                r"experts.0.w1.weight must .* multiple of 16 columns",
            ),
            (
                {
                    "experts.0.w1.weight": torch.zeros(8, 16),
                    "experts.0.w3.weight": torch.zeros(0, 16),
                },
                "w3.weight must",
            ),
        )
    ):
        with pytest.raises(ValueError, match=message):
            converted(tensors, str(i))


def compare(quantize, dequantize, layout, tmp_path):
    """Bytes that another package makes load to what they decode to; ours decode there to what we
    hold.

    ``quantize`` gives its tensors by suffix.
    """
    mlp = GroupedMLP(EXPERTS, HIDDEN, INNER, dtype=BF16)
    tensors = {}
    for names in (("gate_proj", "up_proj"), ("down_proj",)):
        for g, rows in enumerate((mlp.gate_up if len(names) > 1 else mlp.down).weight.detach()):
            for name, part in zip(names, rows.chunk(len(names)), strict=True):
                made = quantize(part, rows.abs().amax().float())
                tensors |= {f"{g}.{name}.{suffix}": t.contiguous() for suffix, t in made.items()}
    write(tensors, tmp_path)
    assert not checkpoint.load(mlp, tmp_path).reconciled
    checkpoint.save(mlp, tmp_path / "again", layout)
    assert same_files(tmp_path, tmp_path / "again")
    plain = GroupedMLP(EXPERTS, HIDDEN, INNER, dtype=BF16)
    checkpoint.save(plain, tmp_path / "ours", layout)
    checkpoint.load(plain, tmp_path / "ours")
    for module, folder in ((mlp, tmp_path), (plain, tmp_path / "ours")):
        tensors = files_of(folder)
        for g in range(EXPERTS):
            parts = []
            for name in ("gate_proj", "up_proj"):
                prefix = f"{g}.{name}."
                parts.append(
                    dequantize(
                        {
                            n.removeprefix(prefix): t
                            for n, t in tensors.items()
                            if n.startswith(prefix)
                        }
                    )
                )
            torch.testing.assert_close(
                torch.cat(parts).float(),
                module.gate_up.weight.dequantize(F32)[g],
                rtol=5e-3,
                atol=0,
            )


def test_compressed_tensors(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    checkpoint.save(GroupedMLP(1, 16, 16), tmp_path / "c", "compressed-tensors")
    config = json.loads((tmp_path / "c/config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])

    def quantize(t, amax):
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
    modelopt = pytest.importorskip("modelopt.torch.quantization.qtensor")

    def quantize(t, amax):
        made, scale, level = modelopt.NVFP4QTensor.quantize(
            t.clone(), 16, weights_scaling_factor_2=amax / 2688
        )
        return {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": level}

    def dequantize(t):
        made = modelopt.NVFP4QTensor((len(t["weight"]), 2 * t["weight"].shape[1]), F32, t["weight"])
        return made.dequantize(
            F32, scale=t["weight_scale"], double_scale=t["weight_scale_2"], block_sizes={-1: 16}
        )

    compare(quantize, dequantize, "modelopt", tmp_path)


def test_a_model_of_transformers(tmp_path):
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
    model, other = (Qwen3MoeForCausalLM(config).bfloat16().eval() for _ in range(2))
    checkpoint.save(model, tmp_path, "modelopt")
    names = files_of(tmp_path)
    assert (
        "model.layers.1.mlp.experts.3.gate_proj.weight_scale_2" in names
        and "lm_head.weight" in names
    )
    assert len(checkpoint.load(other, tmp_path).layouts) == 4
    ids = torch.arange(12)[None]
    with torch.no_grad():
        a, b = model(ids).logits, other(ids).logits
    assert 0 < (a - b).norm() < 0.15 * a.norm()
