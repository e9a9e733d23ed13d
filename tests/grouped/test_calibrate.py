"""``convert(calibrate=...)``: static input scales, against hooks in transformers' models."""

import json
import re

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from grouped.checkpoint import convert
from grouped.checkpoint.token_ids import read_ids

EXPERTS, HIDDEN, VOCABULARY = 4, 64, 32
FEW = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "intermediate_size": 32,
}
#: Projections grouped by their input, and the path of the experts in files.
NAMES = {
    "qwen3": ((("gate_proj", "up_proj"), ("down_proj",)), "model.layers.{}.mlp.experts"),
    "mixtral": ((("w1", "w3"), ("w2",)), "model.layers.{}.block_sparse_moe.experts"),
}


def build_model(kind):
    """Return a small model of transformers with 2 layers and 4 experts each."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**FEW, num_local_experts=EXPERTS)).eval()
    more = {
        "moe_intermediate_size": 32,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "head_dim": 32,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**FEW, **more)).eval()


@torch.no_grad()
def expected(model, sequences):
    """Record the amaxes (layers, 2, experts) with hooks, or 0 for an expert without a token."""
    amaxes = torch.zeros(2, 2, EXPERTS)

    def record(layer):
        def hook(experts, arguments):
            x, index, _ = arguments
            for g in index.unique().tolist():
                rows = x[(index == g).any(-1)]
                gate, up = linear(rows, experts.gate_up_proj[g]).chunk(2, -1)
                for i, t in enumerate((rows, experts.act_fn(gate) * up)):
                    amaxes[layer, i, g] = max(amaxes[layer, i, g], t.abs().max())

        return hook

    experts = [layer.mlp.experts for layer in model.model.layers]
    handles = [module.register_forward_pre_hook(record(i)) for i, module in enumerate(experts)]
    for ids in sequences:
        model(ids[None])
    for handle in handles:
        handle.remove()
    return amaxes


@pytest.mark.parametrize("kind", [*NAMES])
def test_scales_of_inputs(kind, tmp_path):
    """Compare the calibrated input scales with those of amaxes computed in PyTorch."""
    model, source, ids = build_model(kind), tmp_path / "source", tmp_path / "ids.json"
    model.save_pretrained(source)
    sequences = [
        torch.tensor([1, 2, 3]),
        torch.tensor([4, 5]),
        torch.tensor([1]),
        torch.tensor([2]),
    ]
    sequences = sequences if kind == "qwen3" else [torch.arange(VOCABULARY)]
    ids.write_text(json.dumps([s.tolist() for s in sequences]))
    amaxes = expected(model, sequences)
    unseen = amaxes == 0
    assert unseen.any() == (kind == "qwen3") and not unseen.all(2).any()
    amaxes = torch.where(unseen, amaxes.amax(2, keepdim=True), amaxes)
    projections, path = NAMES[kind]
    for layout, suffix, scale, algo in (
        ("modelopt", "input_scale", amaxes / 2688, "NVFP4"),
        ("compressed-tensors", "input_global_scale", 2688 / amaxes, None),
    ):
        convert.convert(source, tmp_path / layout, layout=layout, calibrate=ids)
        tensors = load_file(tmp_path / layout / "model.safetensors")
        config = json.loads((tmp_path / layout / "config.json").read_text())["quantization_config"]
        assert (
            "input_activations" in config["config_groups"]["group_0"]
            and config.get("quant_algo") == algo
        )
        assert sum(name.endswith(suffix) for name in tensors) == 2 * 3 * EXPERTS
        for layer in range(2):
            for i, names in enumerate(projections):
                for g in range(EXPERTS):
                    for name in names:
                        got = tensors[f"{path.format(layer)}.{g}.{name}.{suffix}"]
                        torch.testing.assert_close(
                            got.squeeze(), scale[layer, i, g], rtol=1e-5, atol=0
                        )


def test_the_command_calibrates_stacked_experts(tmp_path, capsys):
    """Check that the command calibrates a checkpoint with stacked experts."""
    model, source, ids = build_model("qwen3"), tmp_path / "source", tmp_path / "ids.txt"
    model.save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    for layer, block in enumerate(model.model.layers):
        for name in [n for n in tensors if re.match(rf"model.layers.{layer}.mlp.experts", n)]:
            del tensors[name]
        for name in ("gate_up_proj", "down_proj"):
            tensors[f"model.layers.{layer}.mlp.experts.{name}"] = getattr(
                block.mlp.experts, name
            ).detach()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    ids.write_text("1 2 3\n4, 5\n")
    assert (
        convert.main(
            [
                str(source),
                str(tmp_path / "a"),
                "--to",
                "nvfp4",
                "--calibrate",
                str(ids),
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    written = load_file(tmp_path / "a/model.safetensors")
    amaxes = expected(model, [torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    for i, name in enumerate(("gate_up_proj", "down_proj")):
        want = torch.where(amaxes[1, i] == 0, amaxes[1, i].max(), amaxes[1, i]) / 2688
        torch.testing.assert_close(
            written[f"model.layers.1.mlp.experts.{name}_input_scale"], want, rtol=1e-5, atol=0
        )


@pytest.fixture
def qwen3(tmp_path):
    """Folder with a model of transformers; token ids are in ``ids.json`` beside it."""
    build_model("qwen3").save_pretrained(tmp_path / "source")
    (tmp_path / "ids.json").write_text("[1, 2]")
    return tmp_path / "source"


def assert_convert_fails(source, message, **options):
    """Check that ``convert`` raises ValueError and writes no file."""
    target = source.parent / "target"
    with pytest.raises(ValueError, match=message):
        convert.convert(source, target, calibrate=source.parent / "ids.json", **options)
    assert not target.exists() or not list(target.iterdir())


def test_calibration_needs_a_layout_with_input_scales(qwen3):
    message = "layout deepseek has no input scales to calibrate"
    assert_convert_fails(qwen3, message, layout="deepseek")


def test_the_command_reports_an_error_in_one_line(qwen3, tmp_path, capsys):
    """Check that the command prints one line for an error and writes no files."""
    capsys.readouterr()
    arguments = [str(qwen3), str(tmp_path / "target"), "--to", "fp8_block"]
    with pytest.raises(SystemExit, match="1"):
        convert.main([*arguments, "--calibrate", str(tmp_path / "ids.json")])
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "target").exists() or not list((tmp_path / "target").iterdir())


INVALID_IDS = {
    "too large": (
        f"[1, {VOCABULARY}]",
        f"must hold token ids from 0 to {VOCABULARY - 1}, got 1 to {VOCABULARY}",
    ),
    "negative": ("[[1], [-1]]", "token ids from 0 to"),
    "none": ("[]", "ids.json has no token ids"),
}


@pytest.mark.parametrize(("text", "message"), INVALID_IDS.values(), ids=INVALID_IDS)
def test_invalid_token_ids(text, message, qwen3, tmp_path):
    (tmp_path / "ids.json").write_text(text)
    assert_convert_fails(qwen3, message)


def test_experts_of_a_layer_that_the_model_does_not_run(qwen3):
    """Check that experts in a layer that the model does not have are an error."""
    tensors = load_file(qwen3 / "model.safetensors")
    more = {
        n.replace("layers.1", "layers.2"): t.clone()
        for n, t in tensors.items()
        if "layers.1.mlp.experts" in n
    }
    save_file(tensors | more, qwen3 / "model.safetensors", {"format": "pt"})
    message = r"has 4 experts in model.layers.2.mlp.experts, .* does not run \(no such layer\)"
    assert_convert_fails(qwen3, message)


def test_read_ids_of_every_kind_of_file(tmp_path):
    """Check that token ids are read from each supported type of file."""
    rows = [[1, 2, 3], [4, 5, 6]]
    array = np.array(rows, np.int32)
    np.save(tmp_path / "a.npy", array)
    np.save(tmp_path / "b.npy", array[0])
    save_file({"input_ids": torch.tensor(rows), "mask": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"x": torch.tensor(rows[0])}, tmp_path / "b.safetensors")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text(json.dumps(rows[0]))
    (tmp_path / "a.txt").write_text("1 2 3\n\n4,5,6\n")
    (tmp_path / "b.txt").write_text("1 2 3")
    (tmp_path / "a.jsonl").write_text('[1, 2, 3]\n{"input_ids": [4, 5, 6]}\n')
    (tmp_path / "b.jsonl").write_text('{"input_ids": [1, 2, 3], "text": "x"}')
    (tmp_path / "a.ids").write_text("1 2 3\n4 5 6")
    (tmp_path / "b.ids").write_text("1,2,3")
    torch.save(torch.tensor(rows), tmp_path / "a.pt")
    torch.save({"input_ids": torch.tensor(rows[0]), "mask": 1}, tmp_path / "b.pt")
    for kind in ("npy", "safetensors", "json", "txt", "jsonl", "ids", "pt"):
        assert [ids.tolist() for ids in read_ids(tmp_path / f"a.{kind}")] == rows
        assert [ids.tolist() for ids in read_ids(tmp_path / f"b.{kind}")] == rows[:1]


WRONG = {
    "c.json": ("{", "is not valid JSON"),
    "d.json": ('{"a": 1}', "must hold a list of token ids, or of rows, got dict"),
    "e.json": ("[1.5]", "must hold integers, .* got torch.float32"),
    "f.json": ('["a"]', "has text, and .* has no tokenizer"),
    "i.json": ('[{"x": 1}]', "must hold token ids, text, or lists of them, got None"),
    "c.jsonl": ('[1]\n{"a', "is not valid JSON"),
    "c.pt": ("abc", "is not a file of tensors"),
    "h.json": ("[true]", "must hold integers, .* got torch.bool"),
    "c.npy": ("abc", "is not an array of numbers"),
    "c.safetensors": ("abc", "is not a complete safetensors file"),
    "c.csv": ("1,a", "has text, and .* has no tokenizer"),
    "c.txt": (" \n", "has no token ids"),
    "d.txt": ("some text", "has text, and .* has no tokenizer"),
}


@pytest.mark.parametrize("ending", ["json", "jsonl", "txt"])
def test_binary_files_are_refused(ending, tmp_path):
    (tmp_path / f"x.{ending}").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"x.{ending} is not text"):
        read_ids(tmp_path / f"x.{ending}")


@pytest.mark.parametrize("name", [*WRONG])
def test_files_without_ids_are_refused(name, tmp_path):
    text, message = WRONG[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name} {message}"):
        read_ids(tmp_path / name, tmp_path)


def test_nested_lists_are_rows_of_ids(tmp_path):
    (tmp_path / "g.json").write_text("[[[1]], [[2]]]")
    assert [ids.tolist() for ids in read_ids(tmp_path / "g.json", tmp_path)] == [[1], [2]]


def test_a_missing_file_of_ids(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .* to calibrate with"):
        read_ids(tmp_path / "none.json")


def test_text_is_tokenized_with_the_tokenizer_of_the_folder(tmp_path):
    """Check that text is tokenized with the tokenizer in the model's folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"some": 3, "text": 5, "[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    (tmp_path / "x.txt").write_text("some text\nsome more")
    assert [ids.tolist() for ids in read_ids(tmp_path / "x.txt", tmp_path)] == [[3, 5, 3, 0]]
    (tmp_path / "x.jsonl").write_text('"some"\n{"text": "text"}\n[7]')
    assert [ids.tolist() for ids in read_ids(tmp_path / "x.jsonl", tmp_path)] == [[3], [5], [7]]
