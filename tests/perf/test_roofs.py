"""Upper bounds of rates: records beyond the hardware's limits are refused."""

import unittest.mock
from dataclasses import replace

import pytest

from perf.__main__ import main
from perf.contender import Contender, Task
from perf.dashboard.entries import roofs_of
from perf.measure import meter_of
from perf.measure.base import Measurement
from perf.records import FAILURE, RESULTS, load, write
from perf.roofs import PUBLISHED, published, why_impossible
from perf.run import Report, Selection, measure_task, print_report
from perf.traffic import layer_work

from .test_records import BASE

MB = 1e6
#: 100 us: an H200 moves at most 504 MB in them, an H100 352 MB.
PRODUCT = replace(BASE, format="bfloat16", ceilings={}, bytes=400 * MB, flops=None)
METER = meter_of("reference", "", True, {})


def changed(**fields):
    return why_impossible(replace(PRODUCT, **fields))


def test_more_bytes_than_the_memory_moves_are_refused():
    """Check that records with impossible memory rates are refused."""
    assert changed() == ""
    assert (
        "its bytes take 5.1 TB/s, NVIDIA H200 has at most 5.04: work or time are wrong"
        in changed(bytes=510 * MB)
    )
    assert "has at most 3.518" in changed(gpu="NVIDIA H100 80GB HBM3")
    assert changed(unit="ms", bytes=490e9) == "" and "TB/s" in changed(unit="ms", bytes=510e9)
    for slower in (
        {"kind": "cpu"},
        {"gpu": "NVIDIA A100"},
        {"unit": "1"},
        {"value": 0.0},
        {"bytes": None},
    ):
        assert changed(**{"bytes": 510 * MB, **slower}) == "", slower


def test_l2_may_hold_operands_unless_the_protocol_is_cold():
    """Its size is 50 MB."""
    small = {"bytes": 49 * MB, "value": 1.0}
    assert "49 TB/s" in changed(**small)
    for protocol in ("sustained", "back to back, host included", "sustained, L2-cold, quick"):
        assert changed(protocol=protocol, **small) == ""
        assert changed(protocol=protocol, bytes=550 * MB) == "" and "5.1" in changed(
            protocol=protocol, bytes=560 * MB
        )


def test_l2_may_hold_what_a_pass_writes_and_reads_again():
    """Check that bytes that fit in L2 are counted once."""
    case = {
        "layer": "linear",
        "experts": 8,
        "hidden": 1024,
        "intermediate": 1024,
        "rows": 8,
        "routing": "balanced",
    }
    case |= {"pass": "forward"}
    work = layer_work(case, "ours", "FP8Block")
    (codes,) = work.reused
    assert codes < 50 * MB
    layer = {"suite": "layer", "case": case, "format": "FP8Block", "bytes": work.bytes}
    least = work.once / 5.04e6
    assert changed(**layer, value=1.01 * least) == "" and "TB/s" in changed(
        **layer, value=0.99 * least
    )
    # Codes of large weights do not fit.
    large = {**case, "hidden": 8192, "intermediate": 8192}
    work = layer_work(large, "ours", "FP8Block")
    least = (work.once + 2 * (work.reused[0] - 50 * MB)) / 5.04e6
    layer |= {"case": large, "bytes": work.bytes}
    assert changed(**layer, value=1.01 * least) == "" and "TB/s" in changed(
        **layer, value=0.99 * least
    )


@pytest.mark.parametrize(
    ("text", "gpu", "most"),
    [
        ("bfloat16", "NVIDIA H200", 989),
        ("BF16", "NVIDIA H200", 989),
        ("bfloat16 x nvfp4", "NVIDIA H200", 989),
        ("fp8_block x fp8_block:block=128x128", "NVIDIA H200", 1979),
        ("FP8 rowwise", "NVIDIA H100 80GB HBM3", 1979),
        # Hopper may decode FP4 to FP8.
        ("nvfp4:row_scaled x nvfp4", "NVIDIA H200", 1979),
        ("nvfp4 x nvfp4", "NVIDIA B200", 9000),
        ("NVFP4RowScaled", "NVIDIA B200", 9000),
        ("mxfp8 x mxfp4", "NVIDIA GB200", 5000),
    ],
)
def test_more_operations_than_the_tensor_cores_do_are_refused(text, gpu, most):
    fields = {"format": text, "gpu": gpu, "bytes": None}
    assert changed(**fields, flops=1.09 * most * 100 * MB) == ""
    assert f"{gpu} has at most {1.1 * most:.4g}" in changed(**fields, flops=1.11 * most * 100 * MB)


def test_ceilings_are_below_the_data_sheet():
    assert changed(ceilings={"copy": 4.3, "read": 4.6, "bfloat16": 800.0, "another": 1e9}) == ""
    for kind, rate in {"copy": 5.1, "read": 5.1, "bfloat16": 1100.0, "fp8": 2200.0}.items():
        assert f"the ceiling {kind} take" in changed(ceilings={kind: rate})


def test_the_longest_name_counts():
    """Check that the longest matching GPU name determines the published rates."""
    assert (
        published("NVIDIA GH200 480GB")["copy"] == 4.9
        and published("NVIDIA H100 PCIe")["copy"] == 2.0
    )
    assert [rate for _, _, rate, _ in roofs_of("NVIDIA H100 NVL", [])] == [3.9, 835.0, 1671.0]
    assert published("NVIDIA A100") == {}
    assert all({"copy", "bfloat16", "l2"} <= sheet.keys() for sheet in PUBLISHED.values())


def test_bytes_of_the_case_would_be_refused():
    """Check that bytes of bf16 weights are refused: they would mean 12 TB/s on an H200."""
    case = {"model": "gpt-oss-120b", "tokens": 64, "pass": "forward", "routing": "random"}
    where = {
        "contender": "ours, cached weight",
        "format": "NVFP4RowScaled",
        "suite": "moe",
        "quantity": "time",
    }
    got = [
        r
        for r in load(RESULTS)
        if case.items() <= r.case.items() and all(getattr(r, n) == w for n, w in where.items())
    ]
    assert got
    for record in got:
        case_records = layer_work(record.case, "torch", "BF16").bytes
        assert why_impossible(record) == "" and "TB/s" in why_impossible(
            replace(record, bytes=case_records)
        )


@pytest.mark.parametrize("contender_name", ["ours", "torch"])
def test_an_impossible_record_is_not_kept(contender_name, capsys):
    """Neither are the others of the contender; what else was measured is."""
    report = Report()
    fast, slow = (
        Contender(name, "bfloat16", lambda: int, lambda got: 0.0, bytes=510 * MB)
        for name in (contender_name, "slow")
    )
    times = [
        [Measurement(quantity, us, "us", "L2-cold") for quantity in ("eager time", "time")]
        for us in (100.0, 200.0)
    ]
    times[0][0] = replace(times[0][0], value=300.0)
    facts = {"kind": "gpu", "gpu": "NVIDIA H200"}
    with unittest.mock.patch.object(METER, "measure", lambda contenders, runs: times):
        got_value = measure_task(
            Task("s", {"rows": 1}, lambda copy: [fast, slow]), METER, facts, Selection(), report
        )
    assert [(r.contender, r.quantity) for r in got_value] == [
        ("slow", "eager time"),
        ("slow", "time"),
        (contender_name, FAILURE),
    ]
    assert "5.1 TB/s" in got_value[-1].note and report.is_bad == (contender_name == "ours")
    assert print_report(report) == report.is_bad
    assert (
        f"IMPOSSIBLE, so not kept: s rows=1: {contender_name} [bfloat16]: its bytes take 5.1 TB/s"
        in capsys.readouterr().err
    )


def test_an_impossible_record_is_not_loaded(tmp_path, capsys):
    """Check that files with impossible records are refused."""
    path = tmp_path / "r.jsonl"
    write(path, [PRODUCT, replace(PRODUCT, bytes=510 * MB)])
    with pytest.raises(
        ValueError, match="r.jsonl: gemm .*: ours .* time 100 us: its bytes take 5.1 TB/s"
    ):
        load(path)
    for command in (["dashboard", "--out", str(tmp_path / "page.html")], ["compare", str(path)]):
        assert main([*command, str(path)]) == 2
        assert "its bytes take 5.1 TB/s" in capsys.readouterr().err
