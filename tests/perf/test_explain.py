"""``perf explain`` on records written here."""

import math
import re
import statistics
from dataclasses import replace

import pytest

from perf import explain
from perf.__main__ import main
from perf.planner import layer, observed
from perf.planner.gpus import GPUS
from perf.planner.work import Counts, Kernel
from perf.records import RESULTS, load, write
from perf.suites.layer import recipes

H200, B200 = GPUS["H200"], GPUS["B200"]
SIZES = ["--hidden=256", "--intermediate=128", "--experts=8", "--top-k=2", "--tokens=64"]


@pytest.fixture(scope="module")
def records():
    return load(RESULTS)


@pytest.fixture(scope="module")
def fitted(records):
    return observed.fitted(records)


def error(prediction, call):
    return abs(
        math.log(
            sum(prediction.time(kernel, call.gpu)[0] for kernel in call.kernels) / call.microseconds
        )
    )


def test_held_out_times_on_an_h200_are_predicted_within_15_percent(records, fitted):
    """Check that predictions of measured H200 calls are within 15 percent."""
    calls = observed.ours(records)
    assert {row.suite for row in calls} == {"gemm", "quantize", "layer"}
    assert fitted.count == len(calls) > 200
    assert fitted.error < 0.15
    assert statistics.median(error(fitted, row) for row in calls) <= fitted.error + 0.01


def test_an_h100_differs_by_its_bandwidth(records, fitted):
    errors = [error(fitted, row) for row in observed.ours(records, "H100")]
    assert len(errors) > 20
    assert statistics.median(errors) < 0.1 and max(errors) < 0.25


def test_published_times_on_a_b200(records, fitted):
    """Check the predictions of published B200 times."""
    calls = observed.published(records, "B200")
    assert statistics.median(error(fitted, row) for row in calls) <= B200.doubt
    inside = 0
    for row in calls:
        low, high = map(
            sum, zip(*[fitted.range(kernel, B200) for kernel in row.kernels], strict=True)
        )
        inside += low <= row.microseconds <= high
    assert inside > 0.75 * len(calls) > 20


def test_times_follow_the_formula(fitted):
    """Check that predicted times follow the documented formula."""
    names = ("launch product", "memory product", "overlap product", "multiply fp8, fp8")
    values = dict(zip(names, (2.0, 1.0, 1.0, 1.0), strict=True)) | {"fill product": 1.0}
    got = replace(fitted, values=values, spread=0.0)
    memory, core = 300.0, 400.0
    kernel = Kernel(
        name="",
        kind="product",
        bytes=memory * 4.25e6,
        useful=390 * 1270e6,
        flops=390 * 1270e6,
        mma_type="fp8",
        multiply="multiply fp8, fp8",
        waves=10,
    )
    total, key = got.time(kernel, H200)
    assert total == pytest.approx(2 + math.hypot(memory, core))
    assert key["power"] == pytest.approx(390)
    assert got.range(kernel, H200) == pytest.approx((total, total))

    def bound(kernel):
        _, key = got.time(kernel, H200)
        return max(key, key=key.get)

    bounds = {
        "power": kernel,
        # Half of what is multiplied is padding.
        "tensor core": replace(kernel, useful=kernel.useful / 4),
        "memory": replace(kernel, bytes=kernel.bytes * 2),
        "launch": Kernel("", "product", 1.0),
    }
    assert [bound(k) for k in bounds.values()] == list(bounds)
    decoded = replace(kernel, instructions=1e11, decode="decode x")
    assert bound(decoded) == "issue rate"
    # A kernel that no record covers gets a range of times.
    low, high = got.range(decoded, H200)
    assert low < got.time(decoded, H200)[0] < high


def test_it_prints_a_plan(capsys):
    """Check that ``explain`` prints a plan."""
    assert main(["explain", *SIZES, "--recipe", "BF16,NVFP4", "--ep", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "4 experts of 256 x 128 with SwiGLU on one H200 of 2: 128 rows, 32 to 32"
    )
    steps = dict(re.findall(r"^(\w+)  .*?([\d.]+) \(", text, re.MULTILINE))
    assert f"Fastest step: {min(steps, key=lambda name: float(steps[name]))}, " in text
    assert steps.keys() == {"BF16", "NVFP4"}
    for words in ("fitted", "SwiGLU backward", "saved of activations", "held-out"):
        assert words in text


def test_plans_add_up(records, fitted):
    counts, rank_rows = Counts(records, B200.arch), layer.Layer((100, 20, 0, 8), 256, 128)
    for recipe in recipes().values():
        got = explain.plan(rank_rows, recipe, B200, fitted, counts)
        assert got.basis == "prediction"
        for time in got.times.values():
            assert 0 < time.low < time.value < time.high
        assert sum(got.bounds.values()) == pytest.approx(1)
        pairs = got.times["forward"].value + got.times["backward"].value
        assert got.times["step"].value == pytest.approx(pairs)


def test_recipes_say_which_sizes_they_do_not_take(capsys):
    assert main(["explain", *SIZES, "--hidden", "40", "--recipe", "BF16,NVFP4"]) == 0
    assert "NVFP4 does not accept these sizes: hidden must be a multiple of 16, got 40" in (
        capsys.readouterr().out
    )
    assert main(["explain", *SIZES, "--hidden", "40", "--recipe", "NVFP4"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "tokens must be at least 1, got 0"),
        (["--ep", "3"], "ep must divide the 8 experts, got 3"),
        (["--top-k", "9"], "top-k must be at most the 8 experts, got 9"),
        (["--gpu", "A100"], "gpu must be one of H200, H100, B200, got 'A100'"),
        (["--recipe", "BF16,FP3"], "recipe must be all, or some of BF16, FP8Block"),
    ],
)
def test_errors_name_the_argument(capsys, options, message):
    assert main(["explain", *SIZES, *options]) == 2
    assert message in capsys.readouterr().err


def test_records_are_needed(tmp_path, capsys):
    write(tmp_path / "none.jsonl", [])
    assert main(["explain", *SIZES, "--records", str(tmp_path)]) == 2
    assert "records must have times of ours on an H200, got 0" in capsys.readouterr().err
