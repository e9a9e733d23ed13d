"""``grouped.checkpoint``: what save writes, load reads, for every layout and kind of experts."""

import itertools
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
EXPERT_STYLES = {
    "swiglu": {},
    "gpt-oss": {"bias": True, "interleaved": True, "activation": "clamped_swiglu"},
    "plain": {"activation": "gelu"},
}
LAYOUTS = ("modelopt", "compressed-tensors", "deepseek")


def make_moe(style="swiglu", seed=0, inner=INNER):
    torch.manual_seed(seed)
    return MoE(HIDDEN, inner, EXPERTS, 2, dtype=BF16, **EXPERT_STYLES[style])


def raw_bytes(t):
    return t.flatten().view(U8)


def files_of(folder):
    """Return the tensors of all safetensors files in a folder."""
    return {
        name: t
        for path in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(path).items()
    }


def write(tensors, folder):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")


def same_files(a, b):
    tensors, want = files_of(a), files_of(b)
    return tensors.keys() == want.keys() and all(
        torch.equal(raw_bytes(t), raw_bytes(want[n])) for n, t in tensors.items()
    )


def decoded(tensors, name, layout):
    """Decode the tensors of the weight ``name`` in fp32, with numpy, by the text of its layout."""
    if layout == "deepseek":
        codes = tensors[f"{name}.weight"].float().numpy()
        scales = tensors[f"{name}.weight_scale_inv"].numpy()
        return codes * scales.repeat(128, 0).repeat(128, 1)[: codes.shape[0], : codes.shape[1]]
    codes = tensors[f"{name}.{'weight' if layout == 'modelopt' else 'weight_packed'}"]
    values = e2m1_values(codes).float().numpy()
    scales = tensors[f"{name}.weight_scale"].float().numpy().repeat(16, 1)
    if layout == "modelopt":
        return values * scales * tensors[f"{name}.weight_scale_2"].numpy()
    return values * scales / tensors[f"{name}.weight_global_scale"].numpy()


stacked_or_not = pytest.mark.parametrize("stacked", [False, True], ids=["experts", "stacked"])


def save_then_load(layout, style, stacked, folder):
    """Return a saved module, a module that loaded it, and the report."""
    saved, model = make_moe(style), make_moe(style, seed=1)
    checkpoint.save(saved, folder, layout, stacked=stacked, shard_bytes=20_000)
    return saved, model, checkpoint.load(model, folder)


@stacked_or_not
@pytest.mark.parametrize("style", EXPERT_STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_save_and_load(layout, style, stacked, tmp_path):
    saved, model, report = save_then_load(layout, style, stacked, tmp_path / "a")
    if layout != "deepseek":
        assert set(report.layouts.values()) == {layout} and not report.reconciled
    for name in ("gate_up", "down"):
        plain = getattr(saved.experts, name).weight
        loaded = getattr(model.experts, name).weight
        assert isinstance(loaded, grouped.GroupedTensor) and not loaded.requires_grad
        assert (loaded.dequantize() - plain).norm() < 0.12 * plain.norm()
    assert torch.equal(model.router.weight, saved.router.weight)
    if style == "gpt-oss":
        assert torch.equal(model.experts.gate_up.bias, saved.experts.gate_up.bias)


@pytest.mark.parametrize(
    ("layout", "style", "stacked"),
    [
        case
        for case in itertools.product(LAYOUTS, EXPERT_STYLES, (False, True))
        if case != ("deepseek", "gpt-oss", False)
    ],
)
def test_a_loaded_module_is_saved_with_equal_bytes(layout, style, stacked, tmp_path):
    _, model, report = save_then_load(layout, style, stacked, tmp_path / "a")
    assert not report.reconciled
    checkpoint.save(model, tmp_path / "b", layout, stacked=stacked)
    assert same_files(tmp_path / "a", tmp_path / "b")


def test_blocks_that_span_gate_and_up_cannot_be_saved(tmp_path):
    """Interleaved rows of gate and up share blocks of 128 rows."""
    _, model, report = save_then_load("deepseek", "gpt-oss", False, tmp_path / "a")
    assert report.reconciled
    with pytest.raises(ValueError, match="span gate and up"):
        checkpoint.save(model, tmp_path / "b", "deepseek")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_decode_to_the_weights_of_the_module(layout, tmp_path):
    model = make_moe()
    checkpoint.save(make_moe(), tmp_path, layout)
    checkpoint.load(model, tmp_path)
    tensors = files_of(tmp_path)
    weight = model.experts.gate_up.weight.dequantize(F32)
    for expert in range(EXPERTS):
        projections = [
            decoded(tensors, f"experts.{expert}.{name}", layout)
            for name in ("gate_proj", "up_proj")
        ]
        np.testing.assert_allclose(weight[expert].numpy(), np.concatenate(projections), rtol=3e-7)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    keys = checkpoint.LAYOUTS[layout].ignore_keys
    assert [config[key] for key in keys] == [["router"]] * len(keys) and "quant_method" in config


def test_renamed_experts_and_their_input_scales(tmp_path):
    checkpoint.save(
        make_moe(), tmp_path, "modelopt", rename={"^experts": "block_sparse_moe.experts"}
    )
    to = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = {
        n.replace(p, to[p]) if (p := n.split(".")[-2]) in to else n: t
        for n, t in files_of(tmp_path).items()
    }
    scale = "block_sparse_moe.experts.0.w1.input_scale"
    write({**tensors, scale: torch.tensor(0.5)}, tmp_path)
    model = make_moe(seed=1)
    report = checkpoint.load(model, tmp_path, rename={"^experts": "block_sparse_moe.experts"})
    assert report.input_scales == {scale: torch.tensor(0.5)} and not report.unexpected
    want = make_moe()
    checkpoint.save(want, tmp_path / "b", "modelopt")
    checkpoint.load(want, tmp_path / "b")
    assert torch.equal(
        model.experts.down.weight.rowwise.codes, want.experts.down.weight.rowwise.codes
    )


def test_gate_and_up_of_different_global_scales_are_reconciled(tmp_path):
    """The half of the larger scale keeps its bytes; the other is quantized again with that scale."""
    model = make_moe()
    with torch.no_grad():
        model.experts.gate_up.weight[1, INNER:] *= 0.037
    checkpoint.save(model, tmp_path / "a", "modelopt")
    tensors = files_of(tmp_path / "a")
    up = model.experts.gate_up.weight[1:2, INNER:].detach()
    up_tensors = quantize_weight(up, grouped.NVFP4()).expert(0)
    tensors |= {
        f"experts.1.up_proj{s}": t
        for s, t in checkpoint.LAYOUTS["modelopt"].stored(up_tensors).items()
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
    model = make_moe(inner=96)
    with torch.no_grad():
        model.experts.gate_up.weight[:, 96:] *= 3.3
    checkpoint.save(model, tmp_path, "deepseek")
    report = checkpoint.load(make_moe(inner=96), tmp_path)
    assert len(report.reconciled) == EXPERTS and all(
        25 < snr < 60 for snr in report.reconciled.values()
    )


def random_mxfp4(span):
    """Return MXFP4 blocks and exponents that span ``span`` powers of two."""
    blocks = torch.randint(0, 256, (EXPERTS, 2 * INNER, HIDDEN // 32, 16), dtype=U8)
    exponents = torch.randint(120, 121 + span, blocks.shape[:3], dtype=U8)
    exponents[:, 0, 0], exponents[:, 0, 1] = 120, 120 + span
    blocks[:, 1, 0], exponents[:, 1, 0] = 0x80, 3  # The scale of a block of zeros is ignored.
    return blocks, exponents


def write_mxfp4(model, blocks, exponents, folder):
    """Write the parameters of a gpt-oss ``model`` with a gate_up weight in MXFP4."""
    plain = {
        name.replace("experts.down.", "experts.0.down_proj."): t
        for name, t in model.state_dict().items()
    }
    down, _ = plain.pop("experts.0.down_proj.weight"), plain.pop("experts.gate_up.weight")
    tensors = {
        "experts.gate_up_proj_bias": plain.pop("experts.gate_up.bias"),
        "experts.down_proj_bias": plain.pop("experts.0.down_proj.bias"),
        "experts.gate_up_proj_blocks": blocks,
        "experts.gate_up_proj_scales": exponents,
        "experts.down_proj": down,
    }
    write(plain | tensors, folder)


@pytest.mark.parametrize("span", [0, 5, 17])
def test_mxfp4_is_loaded_as_nvfp4(span, tmp_path):
    blocks, exponents = random_mxfp4(span)
    model = make_moe("gpt-oss")
    write_mxfp4(model, blocks, exponents, tmp_path)
    checkpoint.load(model, tmp_path)
    values = e2m1_values(blocks).numpy() * np.exp2(exponents.numpy()[..., None] - 127.0)
    want = values.reshape(EXPERTS, 2 * INNER, HIDDEN).astype(np.float32)
    np.testing.assert_array_equal(model.experts.gate_up.weight.dequantize(F32).numpy(), want)


@pytest.mark.parametrize("span", [18, 30])
def test_mxfp4_without_an_exact_nvfp4_is_refused(span, tmp_path):
    model = make_moe("gpt-oss")
    write_mxfp4(model, *random_mxfp4(span), tmp_path)
    message = rf"more than 2\^17 below .* {span - 17} powers of two too large"
    with pytest.raises(ValueError, match=message):
        checkpoint.load(model, tmp_path)


@pytest.fixture
def sharded_folder(tmp_path):
    """A checkpoint of several files, in ModelOpt's layout."""
    checkpoint.save(make_moe(), tmp_path / "sharded", "modelopt", shard_bytes=30_000)
    return tmp_path / "sharded"


def test_save_needs_an_empty_folder(sharded_folder):
    with pytest.raises(FileExistsError, match="choose another folder"):
        checkpoint.save(make_moe(), sharded_folder, "modelopt")


def test_save_checks_the_layout(tmp_path):
    with pytest.raises(ValueError, match="'deepseek', got 'gpt-oss'"):
        checkpoint.save(make_moe(), tmp_path / "c", "gpt-oss")


def test_quantized_weights_are_saved_in_layouts_of_their_format(sharded_folder, tmp_path):
    model = make_moe()
    checkpoint.load(model, sharded_folder)
    with pytest.raises(ValueError, match="is nvfp4, deepseek holds fp8_block"):
        checkpoint.save(model, tmp_path / "c", "deepseek")


def test_load_needs_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no safetensors file in"):
        checkpoint.load(make_moe(), tmp_path)


def test_load_needs_stacked_parameters(sharded_folder):
    with pytest.raises(ValueError, match="=False"):
        checkpoint.load(GroupedLinear(2, 16, 16, single_parameter=False), sharded_folder)


def test_load_into_more_experts(sharded_folder):
    larger = MoE(HIDDEN, INNER, EXPERTS + 1, 2, dtype=BF16)
    before = larger.router.weight.clone()
    message = r"lacks experts.3.gate_proj.weight, .* and has, beyond"
    with pytest.raises(KeyError, match=message):
        checkpoint.load(larger, sharded_folder)
    assert torch.equal(larger.router.weight, before)


def test_load_into_another_width(sharded_folder):
    message = r"\(3, 512, 32\), the checkpoint has \(3, 256, 32\)"
    with pytest.raises(ValueError, match=message):
        checkpoint.load(make_moe(inner=2 * INNER), sharded_folder)


def test_unexpected_tensors_are_errors_unless_not_strict(sharded_folder):
    mlp, rename = GroupedMLP(EXPERTS, HIDDEN, INNER), {"^": "experts"}
    with pytest.raises(KeyError, match="beyond the module, router"):
        checkpoint.load(mlp, sharded_folder, rename=rename)
    report = checkpoint.load(mlp, sharded_folder, rename=rename, strict=False)
    assert report.unexpected == ["router.weight"]


def test_a_missing_file_is_named(sharded_folder):
    next(sharded_folder.glob("*-00002-*")).unlink()
    with pytest.raises(FileNotFoundError, match="00002"):
        checkpoint.load(make_moe(), sharded_folder)


def test_single_experts_and_tied_weights(tmp_path):
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
#: Changed tensors of a deepseek file, and the message.
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
def test_wrong_tensors_are_refused(fault, tmp_path):
    change, message = WRONG[fault]
    checkpoint.save(make_moe(), tmp_path, "deepseek")
    tensors = files_of(tmp_path)
    tensors |= change(tensors)
    write({n: t for n, t in tensors.items() if fault != "no scales" or "_inv" not in n}, tmp_path)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(make_moe(), tmp_path, strict=False)


def two_mixtures():
    return torch.nn.ModuleList([make_moe(), make_moe()])


@pytest.fixture
def index(sharded_folder):
    """The path of the index, which maps tensors to files, and its content."""
    path = sharded_folder / "model.safetensors.index.json"
    return path, json.loads(path.read_text())["weight_map"]


def assert_folder_refused(folder, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.load(make_moe(), folder)


def test_rename_must_not_map_two_tensors_to_one(sharded_folder):
    message = r"would be experts.0.gate_proj.weight, .* rename them apart"
    with pytest.raises(ValueError, match=message):
        checkpoint.load(two_mixtures(), sharded_folder, rename={r"^\d\.": ""})


def test_an_index_needs_a_weight_map(index, sharded_folder):
    index[0].write_text(json.dumps({}))
    assert_folder_refused(sharded_folder, "no weight_map")


def test_an_index_must_not_point_outside_of_its_folder(index, sharded_folder):
    path, files = index
    outside = f"../{sharded_folder.name}/{min(files.values())}"
    path.write_text(json.dumps({"weight_map": {"x": outside}}))
    assert_folder_refused(sharded_folder, "outside of its folder")


def test_an_index_must_point_to_the_right_files(index, sharded_folder):
    path, files = index
    file = max(files.values())
    path.write_text(json.dumps({"weight_map": dict.fromkeys(files, file)}))
    assert_folder_refused(sharded_folder, f"is wrong: {file} has no")


def test_two_files_must_not_have_one_tensor(index, sharded_folder):
    path, files = index
    path.unlink()
    file = min(files.values())
    save_file(load_file(sharded_folder / file), sharded_folder / "z.safetensors")
    assert_folder_refused(sharded_folder, f"{file} and z.safetensors both have")


def test_a_truncated_file_is_refused(index, sharded_folder):
    path, files = index
    path.unlink()
    file = sharded_folder / min(files.values())
    file.write_bytes(file.read_bytes()[:-9])
    assert_folder_refused(sharded_folder, "no whole safetensors file")


def test_save_must_not_rename_two_tensors_to_one(tmp_path):
    with pytest.raises(ValueError, match="two tensors would be called"):
        checkpoint.save(
            two_mixtures(), tmp_path / "b", "modelopt", rename={r"^\d\.": ""}, shard_bytes=9000
        )
    assert not list((tmp_path / "b").iterdir())


def test_save_refuses_an_amax_without_a_global_scale(tmp_path):
    model = make_moe().float()
    with torch.no_grad():
        model.experts.down.weight.mul_(1e-37)
    with pytest.raises(ValueError, match="in fp32, which has none for the amax"):
        checkpoint.save(model, tmp_path / "b", "modelopt")
    assert not list((tmp_path / "b").iterdir())


def test_save_holds_at_most_a_shard(tmp_path, monkeypatch):
    sizes = []

    def save(tensors, path, metadata):
        sizes.append(sum(t.nbytes for t in tensors.values()))
        save_file(tensors, path)

    monkeypatch.setattr(ckpt_files, "save_file", save)
    checkpoint.save(make_moe(), tmp_path, "compressed-tensors", shard_bytes=10_000)
    assert len(sizes) > 3 and max(sizes) <= 10_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(files_of(tmp_path))
    assert index["metadata"]["total_size"] == sum(sizes)


to_each_layout = pytest.mark.parametrize(
    "to", [["nvfp4"], ["nvfp4", "--layout", "compressed-tensors"], ["fp8_block"]], ids=" ".join
)


def write_plain(model, folder, stacked):
    """Write the plain weights of a mixture: stacked and transposed, or one tensor per expert."""
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
    write(tensors, folder)


@to_each_layout
@stacked_or_not
def test_convert(to, stacked, tmp_path, capsys):
    """The command writes the files that ``save`` writes."""
    model, source = make_moe(), tmp_path / "source"
    write_plain(model, source, stacked)
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


@to_each_layout
@stacked_or_not
def test_convert_needs_an_empty_folder(to, stacked, tmp_path):
    write_plain(make_moe(), tmp_path / "source", stacked)
    write_plain(make_moe(), tmp_path / "a", stacked)
    with pytest.raises(SystemExit, match="1"):
        convert.main([str(tmp_path / "source"), str(tmp_path / "a"), "--to", *to])


@to_each_layout
@stacked_or_not
def test_convert_refuses_quantized_weights(to, stacked, tmp_path):
    layout = to[-1] if len(to) > 1 else {"nvfp4": "modelopt", "fp8_block": "deepseek"}[to[0]]
    checkpoint.save(make_moe(), tmp_path / "b", layout, stacked=stacked)
    with pytest.raises(SystemExit, match="1"):
        convert.main([str(tmp_path / "b"), str(tmp_path / "c"), "--to", *to])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_weights_of_other_layers_are_decoded(layout, tmp_path):
    model, record = make_moe(), checkpoint.LAYOUTS[layout]
    checkpoint.save(model, tmp_path / "a", layout)
    router = quantize_weight(torch.randn(EXPERTS, HIDDEN).bfloat16()[None], record.fmt).expert(0)
    tensors = files_of(tmp_path / "a")
    del tensors["router.weight"]
    router_tensors = {f"router{suffix}": t for suffix, t in record.stored(router).items()}
    write(tensors | router_tensors, tmp_path / "b")
    checkpoint.load(model, tmp_path / "b")
    want = decoded(files_of(tmp_path / "b"), "router", layout)
    np.testing.assert_allclose(model.router.weight.detach().float().numpy(), want, rtol=4e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_refuses_a_module_on_the_meta_device(layout, tmp_path):
    checkpoint.save(make_moe(), tmp_path, layout)
    with pytest.raises(ValueError, match="meta device"):
        checkpoint.load(make_moe().to("meta"), tmp_path)


def test_transposed_experts_are_all_quantized_or_all_plain(tmp_path):
    def experts():
        """Return a module with transposed experts, as transformers has them for gpt-oss."""
        module = torch.nn.Module()
        module.has_gate = module.is_transposed = True
        module.gate_up_proj, module.down_proj = (
            torch.nn.Parameter(torch.ones(2, 64, n)) for n in (128, 64)
        )
        return torch.nn.ModuleDict({"x": module})

    checkpoint.save(experts(), tmp_path, "modelopt", stacked=True)
    tensors = {n: t for n, t in files_of(tmp_path).items() if "down" not in n}
    write({**tensors, "x.down_proj": torch.ones(2, 64, 64)}, tmp_path)
    with pytest.raises(ValueError, match=r"x.down_proj is plain, other weights"):
        checkpoint.load(experts(), tmp_path)


@pytest.mark.parametrize("shared", ["shared_experts", "shared_expert"])
@pytest.mark.parametrize("layout", ["modelopt", "deepseek"])
def test_convert_leaves_shared_experts_plain(shared, layout, tmp_path):
    names = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    plain = {
        f"mlp.{shared}.{name}.weight": torch.randn(shape).bfloat16()
        for name, shape in names.items()
    }
    routed = {
        f"mlp.experts.{g}.{n}.weight": torch.randn(s).bfloat16()
        for g in range(2)
        for n, s in names.items()
    }
    write(plain | routed, tmp_path / "a")
    convert.convert(tmp_path / "a", tmp_path / "b", layout=layout)
    converted = files_of(tmp_path / "b")
    assert all(torch.equal(converted[name], t) for name, t in plain.items())
    assert all(converted[name].dtype != torch.bfloat16 for name in routed)
    text = (tmp_path / "b/config.json").read_text()
    assert all(name.removesuffix(".weight") in text for name in plain)


def test_convert_checks_if_experts_are_transposed(tmp_path):
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


def converted(tensors, folder):
    """Return the tensors of a converted file."""
    write(tensors, folder / "source")
    convert.convert(folder / "source", folder / "target")
    return files_of(folder / "target")


def test_convert_of_separate_gate_and_up_stacks(tmp_path):
    """They share their global scales."""
    gate, up = torch.ones(2, 8, 32), torch.full((2, 8, 32), 4.0)
    tensors = converted({"x.experts.gate_proj": gate, "x.experts.up_proj": up}, tmp_path)
    assert len(tensors) == 6
    assert torch.equal(
        *(tensors[f"x.experts.{name}_proj_weight_scale_2"] for name in ("gate", "up"))
    )


UNCONVERTIBLE = {
    "no experts": ({"w": (2, 2)}, "no weights of experts"),
    "odd columns": (
        {"experts.0.w1.weight": (8, 24)},
        r"experts.0.w1.weight must .* multiple of 16 columns",
    ),
    "no rows": (
        {"experts.0.w1.weight": (8, 16), "experts.0.w3.weight": (0, 16)},
        "w3.weight must",
    ),
}


@pytest.mark.parametrize(("shapes", "message"), UNCONVERTIBLE.values(), ids=UNCONVERTIBLE)
def test_convert_refuses_unsuitable_files(shapes, message, tmp_path):
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        converted(tensors, tmp_path)


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
