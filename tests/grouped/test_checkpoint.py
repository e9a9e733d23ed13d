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
from grouped.checkpoint import files as ckpt_files
from grouped.checkpoint.plain_tensors import quantize_weight
from grouped.nn import GroupedLinear, GroupedMLP, MoE

from .checkpoint_support import (
    EXPERT_STYLES,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYOUTS,
    decoded,
    files_of,
    make_moe,
    same_files,
    stacked_or_not,
    write,
)


def save_then_load(layout, style, stacked, folder):
    """Return a saved module, a module that loaded it, and the report."""
    saved, model = make_moe(style), make_moe(style, seed=1)
    checkpoint.save(saved, folder, layout, stacked=stacked, shard_bytes=20_000)
    return saved, model, checkpoint.load(model, folder)


@stacked_or_not
@pytest.mark.parametrize("style", EXPERT_STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_save_and_load(layout, style, stacked, tmp_path):
    """Save modules in each layout, load them, and compare the weights."""
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
    """Check that saving a loaded module writes the same bytes."""
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
    """Decode the saved files with NumPy, and compare with the weights of the module."""
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
    """Check that renamed experts are loaded together with their input scales."""
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
    """The half of the larger scale keeps its bytes; the other is quantized with that scale."""
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
    """Check that blocks that span gate and up weights are quantized again, with a small error."""
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
    """Check that loading MXFP4 as NVFP4 is exact if the exponents are close enough."""
    blocks, exponents = random_mxfp4(span)
    model = make_moe("gpt-oss")
    write_mxfp4(model, blocks, exponents, tmp_path)
    checkpoint.load(model, tmp_path)
    values = e2m1_values(blocks).numpy() * np.exp2(exponents.numpy()[..., None] - 127.0)
    want = values.reshape(EXPERTS, 2 * INNER, HIDDEN).astype(np.float32)
    np.testing.assert_array_equal(model.experts.gate_up.weight.dequantize(F32).numpy(), want)


@pytest.mark.parametrize("span", [18, 30])
def test_mxfp4_without_an_exact_nvfp4_is_refused(span, tmp_path):
    """Check that MXFP4 whose exponents differ too much for NVFP4 is refused."""
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
    """Check that a checkpoint with too few experts is refused, and that the module is unchanged."""
    larger = MoE(HIDDEN, INNER, EXPERTS + 1, 2, dtype=BF16)
    before = larger.router.weight.clone()
    message = r"lacks experts.3.gate_proj.weight, .*: it has other tensors of these weights"
    with pytest.raises(KeyError, match=message):
        checkpoint.load(larger, sharded_folder)
    assert torch.equal(larger.router.weight, before)


def test_load_into_another_width(sharded_folder):
    message = r"\(3, 512, 32\), the checkpoint has \(3, 256, 32\)"
    with pytest.raises(ValueError, match=message):
        checkpoint.load(make_moe(inner=2 * INNER), sharded_folder)


def test_unexpected_tensors_are_errors_unless_not_strict(sharded_folder):
    """Check that unexpected tensors raise, or are reported with ``strict=False``."""
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
    """Check that layers with one expert and tied weights survive saving and loading."""

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
    """Check that each kind of wrong tensor is refused with its message."""
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
    message = r"would be experts.0.gate_proj.weight, .* keeps them apart"
    with pytest.raises(ValueError, match=message):
        checkpoint.load(two_mixtures(), sharded_folder, rename={r"^\d\.": ""})


def test_an_index_needs_a_weight_map(index, sharded_folder):
    index[0].write_text(json.dumps({}))
    assert_folder_refused(sharded_folder, "no weight_map")


def test_an_index_must_not_point_outside_of_its_folder(index, sharded_folder):
    """Check that an index that names a file outside of its folder is refused."""
    path, files = index
    outside = f"../{sharded_folder.name}/{min(files.values())}"
    path.write_text(json.dumps({"weight_map": {"x": outside}}))
    assert_folder_refused(sharded_folder, "outside of its folder")


def test_an_index_must_point_to_the_right_files(index, sharded_folder):
    """Check that an index that names the wrong file for a tensor is refused."""
    path, files = index
    file = max(files.values())
    path.write_text(json.dumps({"weight_map": dict.fromkeys(files, file)}))
    assert_folder_refused(sharded_folder, f"is wrong: {file} has no")


def test_two_files_must_not_have_one_tensor(index, sharded_folder):
    """Check that a tensor that is in two files is refused."""
    path, files = index
    path.unlink()
    file = min(files.values())
    save_file(load_file(sharded_folder / file), sharded_folder / "z.safetensors")
    assert_folder_refused(sharded_folder, f"{file} and z.safetensors both have")


def test_a_truncated_file_is_refused(index, sharded_folder):
    """Check that a file that ends too early is refused."""
    path, files = index
    path.unlink()
    file = sharded_folder / min(files.values())
    file.write_bytes(file.read_bytes()[:-9])
    assert_folder_refused(sharded_folder, "not a complete safetensors file")


def test_save_must_not_rename_two_tensors_to_one(tmp_path):
    with pytest.raises(ValueError, match="two tensors would be called"):
        checkpoint.save(
            two_mixtures(), tmp_path / "b", "modelopt", rename={r"^\d\.": ""}, shard_bytes=9000
        )
    assert not list((tmp_path / "b").iterdir())


def test_save_refuses_an_amax_without_a_global_scale(tmp_path):
    """Check that saving refuses an amax whose global scale is not representable."""
    model = make_moe().float()
    with torch.no_grad():
        model.experts.down.weight.mul_(1e-37)
    with pytest.raises(ValueError, match="in fp32, which has none for the amax"):
        checkpoint.save(model, tmp_path / "b", "modelopt")
    assert not list((tmp_path / "b").iterdir())


def test_save_holds_at_most_a_shard(tmp_path, monkeypatch):
    """Check that saving holds at most one shard in memory."""
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_weights_of_other_layers_are_decoded(layout, tmp_path):
    """Check that quantized weights outside of experts are decoded."""
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


def test_transposed_experts_are_all_quantized_or_all_plain(tmp_path):
    """Check that transposed experts with only some quantized weights are refused."""

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
