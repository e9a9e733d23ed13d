"""``perf run``: the choice of cases and contenders, measurements, and records."""

import dataclasses
import functools
import re
import unittest.mock

import pytest
import torch

import grouped
from cute_kernels.capability import UnsupportedError
from perf.__main__ import main
from perf.cases import GroupedShape
from perf.contender import Contender, Task, relative_error
from perf.measure import meter_of
from perf.measure.base import Measurement
from perf.measure.emulator import count
from perf.operands import Operands
from perf.peers import all_peers
from perf.peers.pytorch import PEER
from perf.records import FAILURE, read
from perf.run import Report, Selection, measure_suite, measure_task
from perf.suites import gemm, layer, moe
from perf.suites.base import Options, element_bytes
from perf.suites.quantize import Input, Quantization
from tests.helpers import has_compiler

CPU = torch.device("cpu")
SHAPE = GroupedShape("small", "up", 3, 64, 32)
METER, ALL = meter_of("reference", "", True, {}), Selection()


def contender(name, value, bound=0.1, raises=None):
    def prepare():
        if raises is not None:
            raise raises
        return lambda: value

    return Contender(name, "f", prepare, lambda got: got, bound, bytes=8.0, versions={name: "1"})


def measured(task, choice=ALL, kind="cpu", **facts):
    report = Report()
    return measure_task(task, METER, {"kind": kind, **facts}, choice, report), report


def test_who_is_wrong_is_not_timed():
    """Check that contenders with wrong results are not timed."""
    nan, wrong = contender("nan", float("nan")), contender("wrong", 0.2)
    broken = contender("broken", 0.0, raises=RuntimeError("no such symbol\nmore"))
    missing = contender("missing", 0.0, raises=UnsupportedError("op: no kernel yet"))
    right = contender("right", 0.1)
    task = Task("s", {"rows": 1}, lambda copy: [nan, wrong, broken, missing, right])
    records, report = measured(task, versions={"t": "2"})
    assert [r.contender for r in records if r.quantity == "time"] == ["right"]
    assert [r.contender for r in records if r.quantity == FAILURE] == ["nan", "wrong", "broken"]
    assert records[0].error == 0.1 and records[0].versions == {"t": "2", "right": "1"}
    assert records[-1].note == "RuntimeError: no such symbol"
    assert len(report.wrong) == 2 and "relative error 0.2, at most 0.1" in report.wrong[1]
    assert report.failed == ["s rows=1: broken [f]: RuntimeError: no such symbol"]
    assert report.unsupported == ["missing [f]: no kernel yet"]
    # Peers may be wrong; if we are, the command fails.
    assert not report.is_bad
    for ours in (contender("ours", 0.2), contender("ours, kept", 0.0, raises=ValueError("no"))):
        records, report = measured(
            Task("s", {"rows": 1}, functools.partial(lambda c, copy: [c], ours))
        )
        assert {r.quantity for r in records} == {FAILURE} and report.is_bad


def test_who_cannot_be_timed_does_not_disturb_the_others():
    """Check that a contender that fails to run does not affect others."""
    calls = []

    def prepare():
        def run():
            calls.append(1)
            if len(calls) > 1:
                raise RuntimeError("not under capture")

        return run

    broken = Contender("broken", "f", prepare, lambda got: 0.0)
    records, report = measured(Task("s", {}, lambda copy: [contender("right", 0.0), broken]))
    assert [(r.contender, r.quantity) for r in records] == [("right", "time"), ("broken", FAILURE)]
    assert report.failed == ["s : broken [f]: RuntimeError: not under capture"]


def test_only_times_of_all_the_work_have_a_rate():
    """On a GPU a step has parts, some of which take no time at all."""
    times = {"time": 2.0, "eager time": 4.0, "GPU time of GEMM": 0.0}
    records_value = [[Measurement(quantity, us, "us", "p") for quantity, us in times.items()]]
    task = Task("s", {}, lambda copy: [contender("ours", 0.0)])
    with unittest.mock.patch.object(METER, "measure", lambda contenders, runs: records_value):
        records, _ = measured(task, kind="gpu", ceilings={"copy": 1.0})
    assert [r.share("copy") for r in records] == [8e-6 / 2, 8e-6 / 4, None]
    assert dataclasses.replace(records[0], value=0.0).share("copy") is None


def test_contenders_are_chosen_by_name_and_format():
    task = Task("s", {"rows": 1}, lambda copy: [contender("ours", 0.0), contender("torch", 0.0)])
    for (contender_value, fmt), wanted in {
        ("tor", ""): ["torch"],
        ("", "g"): [],
        ("s$", "f"): ["ours"],
    }.items():
        records, _ = measured(task, Selection(contender=contender_value, format=fmt))
        assert [r.contender for r in records] == wanted
    assert task.matches("rows=1$") and not task.matches("rows=2")


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
def test_products_are_checked_against_fp32(product):
    """A result that is right passes, and one with a group, a row or a scale wrong does not."""
    work = Operands(SHAPE, 40, product, "17 0 23", CPU, seed=1)
    a, b = work.a.double(), work.b.double()
    texts = []
    for group, text in enumerate(torch.arange(40).split([17, 0, 23])):
        if product == "wgrad":
            texts.append(a[text].T @ b[text])
        else:
            texts.append(a[text] @ (b[group] if product == "dgrad" else b[group].T))
    right = (torch.stack if product == "wgrad" else torch.cat)(texts).bfloat16()
    assert work.error(right) < 3e-3
    assert work.error(right * 1.02) > 1e-2
    assert work.error(right.flip(0)) > 0.5
    poisoned = right.clone()
    poisoned[0, 0] = float("nan")
    assert not work.error(poisoned) <= 1
    if product == "wgrad":
        dirty = right.clone()
        dirty[1, 0, 0] = 1.0
        assert work.error(dirty) >= 1.0


def test_least_bytes_count_each_input_once():
    """Check that the least bytes count each input and output once."""
    work = Operands(SHAPE, 40, "fprop", "17 0 23", CPU)
    # Weights of the group without rows are not read.
    assert work.least_bytes(2, 0.5) == 40 * 32 * 2 + 2 * 64 * 32 * 0.5 + 40 * 64 * 2
    assert work.least_bytes(2, 0.5, 4) == work.least_bytes(2, 0.5) + 40 * 64 * 2
    assert work.flops == 2 * 40 * 64 * 32
    # SwiGLU halves the columns.
    data, fmt = Input(8, 64, 1, CPU), grouped.FP8()
    for activates, moved in ((False, 2 + 1), (True, 2 + 0.5)):
        assert Quantization("row", False, activates).moved_bytes(data, fmt) == 8 * 64 * moved
    assert (
        Operands(SHAPE, 40, "wgrad", "balanced", CPU).least_bytes(1, 2)
        == 40 * 64 + 40 * 32 * 2 + 3 * 64 * 32 * 2
    )
    formats = (
        None,
        grouped.NVFP4(),
        grouped.MXFP8(),
        grouped.FP8Block(),
        grouped.FP8Block(block=(128, 128)),
    )
    assert [element_bytes(fmt) for fmt in formats] == [
        2,
        0.5625,
        1 + 1 / 32,
        1 + 4 / 128,
        1 + 4 / 128**2,
    ]


def test_gemm_on_the_reference():
    options = Options(peers=[PEER({})])
    for product in ("fprop", "dgrad", "wgrad"):
        records, report = measured(gemm.task(METER, options, SHAPE, 30, product, "11 0 19"))
        assert not report.failed and not report.wrong
        contender = {(r.contender, r.format) for r in records}
        assert {("ours", "bfloat16"), ("torch", "bfloat16")} < contender
        assert all(r.value > 0 and r.repeats == 2 and r.flops for r in records)
        assert (
            "ours, tokens quantized too",
            "nvfp4:row_scaled x nvfp4",
        ) in contender or product != "fprop"
        assert (("ours, accumulating", "fp8 x fp8") in contender) == (product == "wgrad")
        moved = {r.contender: r.bytes for r in records if r.format == "bfloat16"}
        if product == "wgrad":
            # Its fp32 is read and written, where the others write bf16.
            assert moved["ours, accumulating"] - moved["ours"] == 6 * 3 * 64 * 32


@pytest.mark.parametrize(
    "work",
    [
        (layer.LayerWork, "mlp", layer._TINY, 20, "7 0 6 7"),
        (moe.MoEWork, "moe", moe.TINY, 20, "zipf"),
    ],
)
def test_layers_are_compared_with_fp32(work):
    """Check that the results of layers are compared with fp32."""
    kind, *name = work
    work = kind(*name, layer.PASSES[1], CPU)
    results = [t.clone() for t in work.expected]
    assert work.error(results) == 0.0 and len(results) == 2 + len(work.weights)
    for index in range(len(results)):
        wrong = [t.clone() for t in results]
        wrong[index] *= 1.1
        assert work.error(wrong) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize(
    "case",
    [
        "=tiny .*=zipf pass=forward.backward$",
        "=random pass=forward.backward scope=model",
        "scope=experts",
    ],
)
def test_mixtures_on_the_reference(case):
    tasks = moe.SUITE.tasks(
        METER, Options(peers=[p for p in all_peers({}) if not p.missing(METER)])
    )
    for task in (t for t in tasks if t.matches(case)):
        records, report = measured(task)
        assert not report.failed and not report.wrong
        saved_records = {
            (f"ours{how}", name)
            for how in ("", ", cached weight")
            for name in ("FP8Block", "NVFP4RowScaled")
        }
        assert {(r.contender, r.format) for r in records} >= {
            ("ours", "BF16"),
            ("torch", "BF16"),
            *saved_records,
        }


@pytest.mark.parametrize("name", ["host", "memory"])
def test_suites_without_a_gpu(name):
    """Run the suites that need no GPU."""
    records = []
    report = measure_suite(name, Options(quick=True), Selection(), records.extend)
    assert not report.failed and not report.wrong
    assert records and {r.suite for r in records} == {name}
    if name == "host":
        launches = {r.format: r.value for r in records if r.quantity == "launches"}
        assert launches["BF16"] < launches["FP8Block"]
        assert launches["nvfp4:row_scaled x nvfp4:block=16x16"] == 2 and launches["bfloat16"] == 1


def test_the_command(tmp_path, capsys):
    """Run the command with filters, and check its records."""
    out = tmp_path / "r.jsonl"
    command = ["run", "quantize", "--backend", "reference", "--quick", "--no-peers"]
    chosen = ["--filter", "op=amax|directions=row amax=given", "--format", "nvfp4$|bfloat16"]
    assert main([*command, *chosen, "--out", str(out)]) == 0
    assert re.search(r"ours \[nvfp4\] time [\d.]+", capsys.readouterr().out)
    assert {r.format for r in read(out)} == {"nvfp4", "bfloat16"}
    assert main([*command, "--list"]) == 0
    assert "directions=row+column amax=computed" in capsys.readouterr().out
    assert main([*command, "--path", "nonsense"]) == 2
    if not torch.cuda.is_available():
        assert main(["run", "gemm", "--backend", "cuda"]) == 2


def test_a_count_needs_the_emulator():
    with pytest.raises(RuntimeError, match="nothing ran"):
        count(lambda: None)


@pytest.mark.emulated
@pytest.mark.skipif(not has_compiler(), reason="the emulator needs g++")
def test_counts_are_the_committed_ones():
    assert main(["run", "counts", "--check", "--no-peers", "--filter", "op=(amax|dbias)"]) == 0


def test_relative_errors():
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == pytest.approx(0.75)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(4), torch.zeros(4)) == 2.0


def test_contender_filters_that_match_nothing(capsys):
    """Check that a contender or format that nothing has is an error with a suggestion."""
    run = ["run", "gemm", "--backend", "reference", "--quick", "--no-peers", "--filter", "fprop"]
    assert main([*run, "--contender", "ourz"]) == 2
    assert "no contender here matches --contender 'ourz': did you mean" in capsys.readouterr().err
    assert main([*run, "--contender", "zzz", "--format", "qqq"]) == 2
    assert "--contender 'zzz' and --format 'qqq': they are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--filter", "no case here matches --filter 'absent'"),
        ("--contender", "no contender here matches --contender 'absent'"),
        ("--format", "no contender here matches --format 'absent'"),
    ],
)
def test_a_check_of_no_count_fails(option, message, capsys):
    """Check that ``--check`` with a pattern that matches nothing is an error that names it."""
    chosen = ["--filter", "op=dbias"] if option != "--filter" else []
    command = ["run", "counts", "--check", "--no-peers", *chosen, option, "absent"]
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_filters_that_match_nothing(capsys):
    for pattern, why in (
        ("no such case", "no case here matches"),
        ("(", "unterminated subpattern"),
    ):
        assert main(["run", "gemm", "--backend", "reference", "--filter", pattern]) == 2
        assert why in capsys.readouterr().err
