"""A folder has one writer, and nothing half written loads."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.helpers import BF16

pytest.importorskip("safetensors")

from safetensors import SafetensorError
from safetensors.torch import save_file

from grouped import checkpoint
from grouped.checkpoint import convert, files
from grouped.nn import GroupedMLP


def mlp(value=1.0):
    module = GroupedMLP(2, 32, 32, dtype=BF16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def source_in(folder):
    """Write a folder of plain experts."""
    folder.mkdir()
    tensors = {
        f"experts.{g}.{p}.weight": torch.ones(32, 32)
        for g in range(2)
        for p in ("gate_proj", "up_proj", "down_proj")
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_second_writer_is_refused_at_once(tmp_path):
    """Check that a second writer to a folder is refused."""
    folder, source = tmp_path / "a", source_in(tmp_path / "source")
    with files.Writer(folder, 1000) as writer:
        writer.add("x", torch.ones(2))
        for write_again in (
            lambda: checkpoint.save(mlp(), folder, "modelopt"),
            lambda: convert.convert(source, folder),
            lambda: files.Writer(folder, 1000),
        ):
            with pytest.raises(
                FileExistsError,
                match=rf"a is in use: process {os.getpid()} on .* remove .*{files.CLAIM}",
            ):
                write_again()
        with pytest.raises(ValueError, match="a is not finished: process"):
            checkpoint.load(mlp(), folder)
        writer.close()
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    with pytest.raises(
        FileExistsError, match=r"safetensors files \(model.safetensors\): choose another"
    ):
        checkpoint.save(mlp(), folder, "modelopt")
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_one_of_many_writers_wins_and_its_checkpoint_is_whole(tmp_path):
    """Check that exactly one of four concurrent writers succeeds, and that its files are whole."""
    start, errors = threading.Barrier(4), []

    def write(value):
        model = mlp(value)
        start.wait()
        try:
            checkpoint.save(model, tmp_path / "a", "modelopt", shard_bytes=700)
        except FileExistsError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(float(2**i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = mlp()
    checkpoint.load(model, tmp_path / "a")
    values = {
        value
        for layer in (model.gate_up, model.down)
        for value in layer.weight.dequantize().unique().tolist()
    }
    assert len(errors) == 3 and len(values) == 1
    assert not [
        path for path in (tmp_path / "a").iterdir() if path.name.endswith((".partial", files.CLAIM))
    ]


def test_a_writer_that_fails_removes_its_own_files_and_no_others(tmp_path):
    """Check that a writer that fails removes only its own files."""
    for name in ("notes.txt", "shard-0.1-abc.partial"):
        (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyError, match="stop"), files.Writer(tmp_path, 8) as writer:
        for i in range(3):
            writer.add(str(i), torch.ones(2))
        assert (
            len(list(tmp_path.glob("shard-*.partial"))) == 3 and (tmp_path / files.CLAIM).exists()
        )
        raise KeyError("stop")
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_crashed_writer_left_is_named(tmp_path):
    """Check that the error names the files of a writer that crashed."""
    crash = "import os, sys, torch\nfrom grouped.checkpoint import files\n"
    crash += "w = files.Writer(sys.argv[1], 8); w.add('a', torch.ones(2)); w.add('b', torch.ones(2)); os._exit(1)"  # noqa: E501
    assert (
        subprocess.run([sys.executable, "-W", "ignore", "-c", crash, str(tmp_path)]).returncode == 1
    )
    message = rf"process \d+ wrote a checkpoint there and has ended before it finished. If .* remove .*{files.CLAIM}"  # noqa: E501
    with pytest.raises(FileExistsError, match=message):
        checkpoint.save(mlp(), tmp_path, "modelopt")
    with pytest.raises(ValueError, match=message):
        checkpoint.load(mlp(), tmp_path)
    (tmp_path / files.CLAIM).unlink()
    next(tmp_path.glob("*.partial")).unlink()
    checkpoint.save(mlp(), tmp_path, "modelopt")
    checkpoint.load(mlp(), tmp_path)
    (tmp_path / files.CLAIM).write_text("no JSON")
    with pytest.raises(ValueError, match="is not finished: process unknown on unknown"):
        checkpoint.load(mlp(), tmp_path)


def test_nothing_loads_before_the_last_file_has_its_name(tmp_path, monkeypatch):
    """Check that a folder cannot be loaded before its last file has its final name."""

    def watched(name):
        """Record the calls of a method of Path, during which nothing loads."""
        move, targets = getattr(Path, name), []

        def call(self, target):
            with pytest.raises(ValueError, match="not finished"):
                files.Reader(tmp_path)
            targets.append(target.name)
            return move(self, target)

        monkeypatch.setattr(Path, name, call)
        return targets

    renamed, replaced = watched("rename"), watched("replace")
    checkpoint.save(mlp(), tmp_path, "modelopt", shard_bytes=700)
    assert len(renamed) > 2 and replaced == [
        "config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
    ]
    files.Reader(tmp_path)


def test_a_claim_that_was_removed_is_noticed(tmp_path):
    """Check that a writer raises if another process removed its claim."""
    with (
        pytest.raises(FileExistsError, match=f"{files.CLAIM} was removed or replaced"),
        files.Writer(tmp_path, 8) as writer,
    ):
        writer.add("x", torch.ones(2))
        writer.add("y", torch.ones(2))
        (tmp_path / files.CLAIM).unlink()
        other_writer = files.Writer(tmp_path, 8)
        other_writer.add("x", torch.zeros(2))
        other_writer.add("y", torch.zeros(2))
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2  # The claim and a file of the other writer.
    other_writer.close()
    reader = files.Reader(tmp_path)
    assert not reader["x"].any() and not reader["y"].any()


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "hf_quant_config.json", "z.safetensors"]
)
def test_left_files_that_would_be_mixed_in_are_refused(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(FileExistsError, match=rf"{name}\): choose another folder"):
        checkpoint.save(mlp(), tmp_path, "deepseek")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("value", ["5GB", 0, -1, 2.5, True, None], ids=repr)
def test_shard_bytes_is_a_positive_integer(value, tmp_path):
    source = source_in(tmp_path / "source")
    for call in (
        lambda: checkpoint.save(mlp(), tmp_path / "a", "modelopt", shard_bytes=value),
        lambda: convert.convert(source, tmp_path / "a", shard_bytes=value),
    ):
        with pytest.raises(
            ValueError, match=f"shard_bytes must be a positive integer, .* got {value!r}"
        ):
            call()
    assert not (tmp_path / "a").exists()


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, capsys):
    """Check that a full disk gives a one-line error."""
    source = source_in(tmp_path / "source")

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match=r"shard-0.*partial cannot be written: .*No space left"):
        checkpoint.save(mlp(), tmp_path / "a", "modelopt")
    with pytest.raises(SystemExit, match="1"):
        convert.main([str(source), str(tmp_path / "b"), "--to", "nvfp4"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "No space left" in error and "Traceback" not in error
    assert not list((tmp_path / "a").iterdir()) and not list((tmp_path / "b").iterdir())
    monkeypatch.undo()

    def full_later(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_later)
    with pytest.raises(OSError, match=r"config.json.*partial cannot be written: No space left"):
        checkpoint.save(mlp(), tmp_path / "a", "modelopt")
    assert not list((tmp_path / "a").iterdir())


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda source: (source / "config.json").write_text('{"a": '),
            "config.json is not valid JSON: Expecting value",
        ),
        (
            lambda source: (source / "config.json").write_text("[]"),
            "config.json must hold a JSON object, got list",
        ),
        (lambda source: (source / "model.safetensors").unlink(), "no safetensors file in"),
        (
            lambda source: (source / "model.safetensors").write_bytes(b"abc"),
            "is not a complete safetensors file",
        ),
    ],
    ids=["json", "list", "missing", "damaged"],
)
def test_faults_of_the_source_are_one_line(change, message, tmp_path, capsys):
    """Check that each fault of the source gives a one-line error and no output."""
    source = source_in(tmp_path / "source")
    change(source)
    with pytest.raises(SystemExit, match="1"):
        convert.main([str(source), str(tmp_path / "b"), "--to", "nvfp4"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "b").exists() or not list((tmp_path / "b").iterdir())


@pytest.mark.parametrize(
    "more, message",
    [
        (["--device", "nope"], "no device 'nope'"),
        (["--report", "nowhere/r.html"], "no folder .*nowhere"),
    ],
)
def test_options_that_fail_later_fail_at_once(more, message, tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        convert.main(
            [str(source_in(tmp_path / "source")), str(tmp_path / "b"), "--to", "nvfp4", *more]
        )
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(message, error) and not (tmp_path / "b").exists()


def test_other_files_are_copied_before_the_folder_is_finished(tmp_path):
    """Check that the converter copies other files before it finishes the folder."""
    source = source_in(tmp_path / "source")
    for name in ("tokenizer.json", "hf_quant_config.json", files.CLAIM + ".txt"):
        (source / name).write_text("{}")
    convert.convert(source, tmp_path / "b", layout="deepseek")
    copied = {path.name for path in (tmp_path / "b").iterdir()}
    assert copied == {"config.json", "model.safetensors", "tokenizer.json", files.CLAIM + ".txt"}
    assert (
        json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]["quant_method"]
        == "fp8"
    )


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors", "deepseek"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(layout, number, tmp_path):
    """Codes would turn an infinity into a finite number, or levels make a folder that no reader
    takes.
    """
    mlp = GroupedMLP(2, 128, 128, dtype=BF16)
    with torch.no_grad():
        mlp.down.weight[1, 3, 5] = number
    with pytest.raises(ValueError, match="down.weight has a NaN or an infinity"):
        checkpoint.save(mlp, tmp_path / "saved", layout=layout)
    (tmp_path / "plain").mkdir()
    save_file(
        {
            f"experts.{g}.down_proj.weight": w.detach()
            for g, w in enumerate(mlp.down.weight.clone())
        },
        tmp_path / "plain/a.safetensors",
    )
    with pytest.raises(ValueError, match="experts.1.down_proj.weight has a NaN or an infinity"):
        convert.convert(tmp_path / "plain", tmp_path / "converted", layout=layout)
    for name in ("saved", "converted"):
        assert not [*(tmp_path / name).iterdir()]


def test_all_files_have_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        checkpoint.save(mlp(), tmp_path / "a", "modelopt", config={})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()} == {0o640}
