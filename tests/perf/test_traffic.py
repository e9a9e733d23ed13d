"""Bytes that ops move by the model of ``perf.traffic``."""

import json
from dataclasses import replace

import pytest
import torch

from cute_kernels import ops
from cute_kernels.formats import parse
from perf.cases import MOE_OPTIONS
from perf.measure import meter_of
from perf.peers import all_peers
from perf.records import RESULTS, SCHEMA, load, read, write
from perf.suites import layer, moe
from perf.suites.base import Options, element_bytes
from perf.traffic import _routed, layer_work, work_of

from .test_records import BASE

FORWARD, TRAINING = layer.PASSES
GROUPS, HIDDEN, WIDE, ROWS = 4, 256, 128, 40
UP, DOWN = 2 * WIDE * HIDDEN, HIDDEN * WIDE
#: Bytes of an element in each format of a weight, its scales included.
BLOCK, FP4 = 1 + 4 / 128**2, 0.5 + 1 / 16
CASE = {
    "layer": "mlp",
    "experts": GROUPS,
    "hidden": HIDDEN,
    "intermediate": WIDE,
    "rows": ROWS,
    "routing": "40 0 0 0",
}
MIXTURE = {
    "experts": 512,
    "hidden": HIDDEN,
    "intermediate": WIDE,
    "top_k": 2,
    "tokens": 64,
    "routing": "random",
}
METER = meter_of("reference", "", True, {})


def moved(recipe, contender="ours", case=CASE, passes=FORWARD):
    return layer_work({**case, "pass": passes}, contender, recipe).bytes


def test_a_forward_pass_reads_weights_as_the_contender_has_them():
    """One of four groups has rows; quantizing takes all of them."""
    rows = 2 * 2 * ROWS * HIDDEN
    assert moved("BF16") == moved("BF16", "torch") == rows + 2 * (UP + DOWN)
    assert moved("FP8Block", "ours, cached weight") == rows + BLOCK * (UP + DOWN)
    assert moved("NVFP4RowScaled", "ours, cached weight") == rows + FP4 * (UP + DOWN)
    assert moved("FP8Block") == rows + (2 * GROUPS + BLOCK * GROUPS + BLOCK) * (UP + DOWN)
    linear = {**CASE, "layer": "linear"}
    assert (
        moved("FP8Block", "ours, cached weight", linear)
        == 2 * ROWS * (HIDDEN + 2 * WIDE) + BLOCK * UP
    )


def test_a_training_step_reads_weights_twice_and_writes_their_gradients():
    """Check the bytes of training steps."""
    rows, gradients, z = 4 * 2 * ROWS * HIDDEN, 2 * GROUPS * (UP + DOWN), 2 * 2 * ROWS * 2 * WIDE
    # In bf16 the input itself is read again.
    assert (
        moved("BF16", passes=TRAINING)
        == rows + 2 * ROWS * HIDDEN + 2 * 2 * (UP + DOWN) + gradients + z
    )
    x = 2 * element_bytes(parse("fp8_block")) * ROWS * HIDDEN
    saved = rows + x + 2 * BLOCK * (UP + DOWN) + gradients + z
    assert moved("FP8Block", "ours, cached weight", passes=TRAINING) == saved
    quantizing = (2 + 2 * BLOCK) * GROUPS * (UP + DOWN)
    assert moved("FP8Block", passes=TRAINING) == pytest.approx(saved + quantizing)


def test_a_mixture_reads_the_experts_that_tokens_chose():
    """Check the bytes and operations of a mixture, whose idle experts are not read."""
    router, tokens = 2 * 512 * HIDDEN, 2 * 2 * 64 * HIDDEN
    filled = 512 * (1 - (1 - 2 / 512) ** 64)
    assert 110 < filled < 115
    assert moved("BF16", case=MIXTURE) == pytest.approx(router + tokens + 2 * filled * (UP + DOWN))
    work = layer_work({**MIXTURE, "pass": FORWARD}, "ours", "BF16")
    assert work.flops == 2 * 64 * (512 * HIDDEN + 2 * (UP + DOWN))
    assert layer_work({**MIXTURE, "pass": TRAINING}, "ours", "BF16").flops == 3 * work.flops
    assert moved("BF16", case={**MIXTURE, "routing": "zipf"}) < moved("BF16", case=MIXTURE)
    package = {**MIXTURE, "model": "DeepSeek-V3", "scope": "model"}
    shared = 3 * HIDDEN * MOE_OPTIONS["DeepSeek-V3"]["shared_intermediate_size"]
    assert moved("BF16", case=package) == pytest.approx(moved("BF16", case=MIXTURE) + 2 * shared)
    alone = moved("BF16", case={**MIXTURE, "scope": "experts"})
    assert alone == pytest.approx(2 * 64 * HIDDEN + 2 * 128 * HIDDEN + 2 * filled * (UP + DOWN))


@pytest.mark.parametrize("routing", ["random", "zipf"])
def test_experts_that_have_rows_are_about_those_of_a_router(routing):
    """Compare the expected number of chosen experts with a router."""
    shape = moe.MoEShape("m", 128, 256, 32, 4)
    work = moe.MoEWork("moe", shape, 64, routing, FORWARD, torch.device("cpu"))
    (router, *_), _, _ = work.split_weights(work.weights)
    chosen = len(work.choose(work.x, router)[1].unique())
    assert _routed(work.case, 0)[2] == pytest.approx(chosen, rel=0.1)


@pytest.mark.parametrize("suite", [layer.SUITE, moe.SUITE], ids=["layer", "moe"])
def test_contenders_have_the_work_that_their_records_say(suite):
    """Check that contenders record the bytes and operations that ``work_of`` computes."""
    peers = [peer for peer in all_peers({}) if not peer.missing(METER)]
    tasks = list(suite.tasks(METER, Options(peers=peers)))
    assert tasks
    for task in tasks:
        counts = {}
        for record in task.contenders(0):
            facts = {
                "suite": task.suite,
                "case": task.case,
                "contender": record.name,
                "format": record.format,
            }
            work = work_of(facts)
            assert (record.bytes, record.flops) == (work.bytes, work.flops), task
            counts[record.name, record.format] = record
        quantized, saved = (counts[name, "FP8Block"] for name in ("ours", "ours, cached weight"))
        assert saved.bytes < quantized.bytes and saved.flops == quantized.flops


def test_other_records_keep_their_work():
    assert work_of(vars(BASE)) is None
    assert work_of({"suite": "counts", "case": {"op": "amax"}}) is None
    with pytest.raises(ValueError, match="recipe must be one of BF16, .*FP8 rowwise, .*got 'INT8'"):
        layer_work({**CASE, "pass": FORWARD}, "ours", "INT8")


def test_work_of_older_records_is_that_of_the_contender(tmp_path):
    """Records of schema 1 had the bytes of bf16 weights, whatever the contender had kept."""
    path = tmp_path / "r.jsonl"
    case = {**MIXTURE, "model": "M", "pass": FORWARD}
    record = replace(
        BASE,
        suite="moe",
        case=case,
        contender="ours, cached weight",
        format="FP8Block",
        bytes=1e12,
        flops=1.0,
    )
    pieces = [
        replace(record, quantity=quantity, unit=unit)
        for quantity, unit in (("GPU time of GEMM", "us"), ("failure", "1"))
    ]
    write(path, [record, *pieces])
    assert [got.bytes for got in read(path)] == [1e12] * 3
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["what"], row["schema"] = row.pop("quantity"), 1
    path.write_text("\n".join(map(json.dumps, rows)))
    base, *remaining = read(path)
    work = layer_work(case, "ours, cached weight", "FP8Block")
    assert (base.bytes, base.flops, base.schema) == (work.bytes, work.flops, SCHEMA)
    assert [got.bytes for got in remaining] == [1e12] * 2
    del rows[0]["what"]
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(ValueError, match="line 1"):
        read(path)


def test_committed_rates_are_below_the_memory_of_the_gpu():
    """Check that committed rates are below the memory bandwidth."""
    got = [
        r
        for r in load(RESULTS)
        if r.kind == "gpu" and r.quantity == "time" and r.suite in ("layer", "moe")
    ]
    saved = [r for r in got if r.contender == "ours, cached weight" and r.gpu == "NVIDIA H200"]
    assert len(got) > 150 and len(saved) > 40
    assert all(r.tbs < 4.8 for r in got)
    sizes = {(r.format, *r.case.items()): r.bytes for r in saved if r.case["pass"] == FORWARD}
    assert all(size < 2**33 for size in sizes.values())


def test_bytes_of_an_element_are_those_of_the_buffers():
    """Compare ``element_bytes`` with quantized weights, which have up to three numbers per
    group."""
    x = torch.ones(2, 256, 512, dtype=torch.bfloat16)
    numbers = 3 * 4 * len(x)  # Amax, level and scale.
    for name, recipe in layer.recipes().items():
        if recipe.weight is not None and not recipe.takes_scales:
            for columnwise in (False, True):
                buffers = ops.grouped_quantize(
                    x, recipe.weight.text, None, None, not columnwise, columnwise
                )
                size = sum(buffer.nbytes for buffer in buffers)
                assert 0 <= size - element_bytes(recipe.weight) * x.numel() <= numbers, name
