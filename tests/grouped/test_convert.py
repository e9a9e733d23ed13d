"""``grouped.convert``: its command and function write the files that ``checkpoint.save`` writes."""

import pytest
import torch

pytest.importorskip("safetensors")


from grouped import checkpoint
from grouped.checkpoint import convert

from .checkpoint_support import (
    EXPERTS,
    HIDDEN,
    INNER,
    files_of,
    make_moe,
    same_files,
    stacked_or_not,
    write,
)

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


@pytest.mark.parametrize("shared", ["shared_experts", "shared_expert"])
@pytest.mark.parametrize("layout", ["modelopt", "deepseek"])
def test_convert_leaves_shared_experts_plain(shared, layout, tmp_path):
    """Check that the converter leaves shared experts plain."""
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
    """Check that the converter refuses transposed experts unless ``transposed`` is given."""
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


def test_convert_names_the_plain_checkpoint_for_a_quantized_one(tmp_path, capsys):
    """Check the error for a source that is quantized already."""
    checkpoint.save(make_moe(), tmp_path / "fp8", "deepseek")
    with pytest.raises(SystemExit):
        convert.main([str(tmp_path / "fp8"), str(tmp_path / "a"), "--to", "nvfp4"])
    message = capsys.readouterr().err
    assert "quantized already" in message and "convert the plain checkpoint" in message
