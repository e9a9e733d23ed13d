"""``grouped.demo``: results, files and errors of a short training."""

import contextlib
import csv
import dataclasses
import io
import json
import math

import pytest
import torch

import cute_kernels
import grouped
from grouped.demo import __main__ as command
from grouped.demo import report
from grouped.demo.data import Corpus, load_corpus, sample_batch, unigram_entropy
from grouped.demo.model import LanguageModel, ModelConfig
from grouped.demo.train import TrainConfig
from tests.helpers import U8, seeded_generator

RECIPES = ("BF16", "NVFP4", "NVFP4RowScaled")
STEPS = 3
SMALL = ModelConfig(hidden=32, intermediate=48, layers=1, heads=2, experts=4, context=16)
#: The same on the command line.
TINY = (
    *("--steps", str(STEPS), "--batch", "2", "--context", "16", "--hidden", "32"),
    *("--intermediate", "48", "--layers", "1", "--heads", "2", "--experts", "4"),
)


def run_demo(out, *arguments):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = command.main([*TINY, "--out", str(out), *arguments])
    return status, printed.getvalue(), json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Output folder, printed text and results of a run of several recipes."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    # Another order than the one that they run in.
    status, printed, results = run_demo(out, "--plot", "always", "--recipe", *reversed(RECIPES))
    assert status == 0
    return out, printed, results


def test_results(everything):
    """Check the results of the demo."""
    _, _, results = everything
    runs = {run["recipe"]: run for run in results["runs"]}
    assert tuple(runs) == RECIPES
    assert results["backend"] == "reference"
    assert results["model"] == dataclasses.asdict(SMALL)
    assert results["training"]["steps"] == STEPS
    assert 3.2 < results["unigram_entropy"] < 3.4
    for run in runs.values():
        assert len(run["losses"]) == len(run["step_seconds"]) == STEPS
        assert not run["interrupted"]
        # Untrained logits are close to zero, so all 256 bytes are about equally likely.
        assert run["start_loss"] == pytest.approx(math.log(256), abs=0.1)
        assert run["end_loss"] < run["start_loss"] - 0.01
        gap = 100 * (run["end_loss"] / runs["BF16"]["end_loss"] - 1)
        assert run["gap_to_bf16_percent"] == pytest.approx(gap)
        assert 1 <= run["load"]["max_over_mean"] <= SMALL.experts / SMALL.top_k
    assert runs["BF16"]["snr_db"]["weights"] > 50
    assert runs["BF16"]["snr_db"]["activations"] is runs["BF16"]["snr_db"]["gradients"] is None
    for name in RECIPES[1:]:
        assert all(15 < ratio < 25 for ratio in runs[name]["snr_db"].values())


def test_every_recipe_trains(tmp_path):
    """Check that the demo trains with every recipe."""
    sizes = ("--intermediate", "64", "--steps", "2")
    status, printed, results = run_demo(tmp_path, "--recipe", "all", "--plot", "never", *sizes)
    assert status == 0
    runs = {run["recipe"]: run for run in results["runs"]}
    assert {*runs} == {*grouped.recipes.__all__} - {"Recipe"} and next(iter(runs)) == "BF16"
    for name, run in runs.items():
        assert run["end_loss"] < run["start_loss"] and f"\n{name} " in printed
        if "FP8" in name:
            # E5M2 has 25 dB. Scales from earlier steps are guesses, wild ones after two steps.
            least = 10 if "Delayed" in name else 24
            assert least < min(run["snr_db"].values()) <= max(run["snr_db"].values()) < 36


def test_table_and_files(everything):
    """Check the printed table and the written files."""
    out, printed, results = everything
    lines = printed.splitlines()
    for run in results["runs"]:
        (line,) = [line for line in lines if line.startswith(run["recipe"] + " ")]
        assert f"{run['start_loss']:.3f}" in line and f"{run['end_loss']:.3f}" in line
        assert f"{run['gap_to_bf16_percent']:+.2f}" in line
        assert f"{run['snr_db']['weights']:.1f}" in line
    assert f"{results['unigram_entropy']:.3f}" in printed
    for name in ("results.json", "loss.csv", "loss.png"):
        assert str(out / name) in printed
    with (out / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    for run in results["runs"]:
        assert [float(row[run["recipe"]]) for row in rows] == run["losses"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def assert_refused(capsys, message, *arguments):
    with pytest.raises(SystemExit) as stop:
        command.main([*TINY, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


REFUSED = {
    "--steps 0": "steps must be positive, got 0",
    "--recipe MXFP8": "intermediate must be a multiple of 32 for MXFP8, got 48",
    "--heads 5": "heads must divide hidden = 32, got 5",
    "--top-k 9": "top_k must be at most experts = 4, got 9",
    "--context 1000000": "context must be less than the",
    "--device abacus": "device 'abacus' cannot be used",
    "--recipe FP3": "invalid choice: 'FP3'",
}


@pytest.mark.parametrize("arguments", [*REFUSED])
def test_bad_arguments(arguments, tmp_path, capsys):
    assert_refused(capsys, REFUSED[arguments], "--out", str(tmp_path), *arguments.split())
    assert not list(tmp_path.iterdir())


def test_interrupted(tmp_path, monkeypatch):
    """Check that an interrupted demo reports its completed steps."""
    rate = TrainConfig.learning_rate_at

    def interrupt(config, step):
        if step == 2:
            raise KeyboardInterrupt
        return rate(config, step)

    monkeypatch.setattr(TrainConfig, "learning_rate_at", interrupt)
    status, printed, results = run_demo(tmp_path, "--recipe", *RECIPES, "--plot", "always")
    assert status == 130
    (run,) = results["runs"]
    assert run["recipe"] == "BF16" and run["interrupted"] and len(run["losses"]) == 2
    assert run["end_loss"] < run["start_loss"]
    assert "BF16 (stopped at step 2)" in printed
    assert (tmp_path / "loss.png").exists()


def test_unsupported_recipe(tmp_path, monkeypatch, capsys):
    """Check that the demo reports a recipe that is not supported."""

    def refuse(*_):
        raise cute_kernels.UnsupportedError("no kernel of it")

    monkeypatch.setattr("grouped.nn.linear.quantize_weight", refuse)
    monkeypatch.setattr("grouped.functional.linear_passes.quantize_weight", refuse)
    status, printed, results = run_demo(tmp_path, "--recipe", "BF16", "NVFP4", "--plot", "never")
    assert status == 1
    assert [run["recipe"] for run in results["runs"]] == ["BF16"]
    assert "NVFP4" in (message := capsys.readouterr().err) and "no kernel of it" in message
    assert "BF16 " in printed


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    """Check that the demo runs without matplotlib."""
    monkeypatch.setattr(report, "can_plot", lambda: False)
    status, printed, _ = run_demo(tmp_path, "--recipe", "BF16", "--steps", "1")
    assert status == 0 and "max/mean" in printed and "loss.png" not in printed
    advice = "pip install 'grouped-kernels[demo]'"
    assert advice in capsys.readouterr().err
    assert_refused(capsys, advice, "--out", str(tmp_path), "--plot", "always")


def test_unigram_entropy():
    data = torch.tensor(list(b"aabc"), dtype=U8)
    # p = 1/2, 1/4, 1/4
    assert unigram_entropy(data) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy(data[:2]) == 0


def test_batches():
    """Check the training and validation batches."""
    corpus = load_corpus()
    assert len(corpus.validation) == pytest.approx(len(corpus.train) / 9, rel=0.1)
    inputs, targets = sample_batch(corpus.train, 5, 7, seeded_generator(0))
    assert inputs.shape == targets.shape == (5, 7)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = bytes(corpus.train.tolist())
    assert all(
        bytes([*row.tolist(), last_target]) in text
        for row, last_target in zip(inputs, targets[:, -1], strict=True)
    )
    # The longest context leaves room for one target.
    short = Corpus(*[torch.arange(4, dtype=U8)] * 2)
    short.check_context(3)
    assert sample_batch(short.train, 1, 3, seeded_generator(0))[1].tolist() == [[1, 2, 3]]
    with pytest.raises(ValueError, match="less than the 4 bytes of text, got 4"):
        short.check_context(4)


# Not with NVFP4: a group's second-level scale comes from all of its tokens, later ones too.
@pytest.mark.parametrize("recipe", [grouped.recipes.BF16(), grouped.recipes.NVFP4RowScaled()])
def test_model_is_causal(recipe):
    """Check that the model is causal."""
    model = LanguageModel(dataclasses.replace(SMALL, layers=2), recipe).requires_grad_(False)
    inputs = torch.randint(256, (2, 16))
    changed = inputs.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(inputs).logits, model(changed).logits
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-5)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 1e-4
