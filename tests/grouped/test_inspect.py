"""The inspector of quantization losses against numpy, and the bits of inspected layers."""

import contextlib
import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import grouped
from grouped import recipes
from grouped.functional.operands import OperandCopy, QuantizedOperand
from grouped.inspect import inspect_quantization
from grouped.inspect.statistics import Probe, Step
from grouped.nn import GroupedLinear, GroupedMLP
from tests.helpers import (
    BF16,
    E5M2,
    F16,
    F32,
    U8,
    assert_all_same,
    compile_full_graph,
    forward_backward,
    sample,
)

from .cases import ALL_RECIPES, WEIGHT_FORMAT

K, N, ENDS = 64, 96, [13, 13, 35]
#: The largest number that is rounded to the largest code, divided by that code's value.
HEADROOM = {"e2m1": 7 / 6, "e4m3": 464 / 448, "e5m2": 61440 / 57344}
#: A byte of the largest codes: one code, or two of E2M1.
LARGEST = {"e2m1": 0x77, "e4m3": 0x7E, "e5m2": 0x7B}
RECIPES_OF_EVERY_KIND = ALL_RECIPES | {
    "stochastic": recipes.NVFP4(stochastic_rounding=True),
    "hybrid": recipes.MXFP8(grad_dtype=E5M2, weight_block=(32, 32)),
    "delayed": recipes.FP8Delayed(initial_scale="one"),
}


def wild(*shape):
    """Rows of magnitudes so different that codes underflow and scales are badly rounded."""
    powers = torch.exp2(torch.randint(-17, 1, (*shape[:-1], shape[-1] // 16)))
    return (sample(*shape) * powers.repeat_interleave(16, dim=-1)).bfloat16()


def make_layer(recipe, n=N, dtype=BF16, **options):
    """Return a layer whose weight has rows of very different magnitudes."""
    torch.manual_seed(3)
    layer = GroupedLinear(3, K, n, recipe=recipe, dtype=dtype, **options)
    layer.load_state_dict({"weight": wild(3, n, K)}, strict=False)
    return layer


def operands(n=N, seed=5):
    """Return x: (40, K) and dy: (40, n), bfloat16, with NaN in the tail."""
    torch.manual_seed(seed)
    x, dy = wild(40, K), wild(40, n)
    x[35:], dy[35:] = torch.nan, torch.nan
    return x, dy


def train(layer, x, dy, function=None, **options):
    return forward_backward(layer, x, dy, torch.tensor(ENDS), function=function, **options)


def records_by_operand(inspector):
    return {(r["role"], r["direction"]): r for r in inspector.records()}


def split_groups(x):
    x = x.detach().double().numpy()
    return list(x) if x.ndim == 3 else [x[a:b] for a, b in zip([0, *ENDS], ENDS, strict=False)]


def decoded(q, direction):
    """Return the values of each group, and the values that the largest codes would have."""
    top = q.clone()
    getattr(top, direction).codes.view(U8).fill_(LARGEST[q.format.element.name])
    return [split_groups(t.dequantize(F32, direction)) for t in (q, top)]


def expected(x, q, columnwise):
    """Return the record of an operand, computed in fp64 with numpy."""
    entries = []
    values, limits = (
        (None, None) if q is None else decoded(q, "columnwise" if columnwise else "rowwise")
    )
    for g, a in enumerate(split_groups(x)):
        if q is None:
            copied, limit = split_groups(x.bfloat16())[g], np.inf
        else:
            copied, limit = values[g], limits[g] * HEADROOM[q.format.element.name]
        entry = {"rows": len(a), "nonfinite": 0, "nonfinite_copy": 0, "amax": abs(a).max(initial=0)}
        entry["signal"] = signal = (a**2).sum()
        entry["noise"] = noise = ((a - copied) ** 2).sum()
        entry["snr_db"] = 10 * math.log10(signal / noise) if signal and noise else None
        entry["saturated"] = ((abs(a) > limit) & (limit > 0)).mean() if len(a) else None
        entry["underflow"] = ((a != 0) & (copied == 0)).mean() if len(a) else None
        entries.append(entry)
    return {name: [entry[name] for entry in entries] for name in entries[0]}


@pytest.mark.parametrize("name", [n for n in RECIPES_OF_EVERY_KIND if n != "stochastic"])
def test_records_agree_with_numpy(name):
    """Compare the recorded statistics with NumPy."""
    recipe = RECIPES_OF_EVERY_KIND[name]
    layer, (x, dy) = make_layer(recipe), operands()
    if layer.scaling is not None:
        # With these scales gradients saturate and inputs underflow.
        layer.scaling.input_scale.fill_(2**-6), layer.scaling.grad_output_scale.fill_(2**16)
    with inspect_quantization(layer) as inspector:
        train(layer, x, dy)
    records = records_by_operand(inspector)
    assert len(records) == (6 if recipe.is_quantized else 3)
    operands_by_role = {"input": x, "weight": layer.weight, "grad_output": dy}
    for (role, direction), record in records.items():
        fmt, columnwise = getattr(recipe, role), direction == "columnwise"
        offs, q = None if role == "weight" else torch.tensor(ENDS), None
        if fmt is not None:
            scale = layer.scaling.scale(role) if fmt.has_given_scale else None
            q = grouped.quantize(
                operands_by_role[role], fmt, offs=offs, columnwise=True, scale=scale
            )
        if fmt is not None and columnwise and fmt.is_transformed:
            assert record["saturated"] == record["underflow"] == [None] * 3
            pairs = zip(
                split_groups(operands_by_role[role]),
                split_groups(q.dequantize(F32, "columnwise")),
                strict=True,
            )
            assert record["noise"] == pytest.approx(
                [((a - b) ** 2).sum() for a, b in pairs], rel=1e-5
            )
            continue
        for field, numbers in expected(operands_by_role[role], q, columnwise).items():
            for got, number in zip(record[field], numbers, strict=True):
                assert got == (number if number is None else pytest.approx(number, rel=1e-5)), (
                    role,
                    direction,
                    field,
                )
        assert record["format"] == ("bfloat16" if fmt is None else fmt.text)
    if name == "delayed":
        assert all(v is None or v > 0.1 for v in records["grad_output", "rowwise"]["saturated"])
    if name == "nvfp4":
        levels = records["input", "columnwise"]["global_scale"]
        assert levels == pytest.approx([v / 2688 for v in records["input", "rowwise"]["amax"]])
        assert records["input", "rowwise"]["saturated"][2] > 0
        assert records["input", "rowwise"]["underflow"][2] > 0.1


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", [*RECIPES_OF_EVERY_KIND])
def test_inspection_changes_no_bit(name, frozen):
    """Check that inspection changes no bit of results, random numbers or states."""

    def results(is_inspected):
        """Return the inspector, and the results of a step with the states it leaves."""
        layer, (x, dy) = make_layer(RECIPES_OF_EVERY_KIND[name]), operands()
        layer.requires_grad_(not frozen)
        inspector = inspect_quantization(layer)
        with inspector if is_inspected else contextlib.nullcontext():
            tensors = train(layer, x, dy)
        state = layer.scaling.state_dict().values() if layer.scaling else ()
        return inspector, [*tensors, torch.get_rng_state(), *state]

    (inspector, inspected), (_, plain) = results(True), results(False)
    assert_all_same(inspected, plain)
    # The copies that exist depend on the gradients that are needed.
    assert ("input", "rowwise") in records_by_operand(inspector)
    has_columnwise = RECIPES_OF_EVERY_KIND[name].is_quantized and not frozen
    assert (("input", "columnwise") in records_by_operand(inspector)) == has_columnwise


def nonfinite_operands():
    """Return x with 13 rows of zeros and two NaN, and dy with an infinity."""
    x, dy = operands()
    x[:13], dy[14, 5] = 0, torch.inf
    x[20, 3], x[34, 7] = torch.nan, torch.nan
    return x, dy


def test_rows_of_zeros_of_no_group_and_of_nan():
    """Check the statistics of rows of zeros, of an empty group and of NaN."""
    layer = make_layer(recipes.NVFP4(propagate_nonfinite=False))
    with inspect_quantization(layer) as inspector:
        train(layer, *nonfinite_operands())
    records = {(r["role"], r["direction"], r["expert"]): r for r in inspector.rows()}
    zeros, empty, with_nan = (records["input", "rowwise", g] for g in range(3))
    assert (zeros["rows"], empty["rows"], with_nan["rows"]) == (13, 0, 22)
    assert zeros["signal"] == zeros["underflow"] == zeros["amax"] == 0
    assert zeros["snr_db"] is None
    assert empty["saturated"] is empty["underflow"] is empty["snr_db"] is None
    assert (with_nan["nonfinite"], with_nan["nonfinite_copy"]) == (2, 0)
    assert with_nan["snr_db"] > 10
    gradient = records["grad_output", "rowwise", 2]
    assert (gradient["nonfinite"], gradient["nonfinite_copy"]) == (1, 22 * N)
    assert gradient["signal"] == 0 and math.isfinite(gradient["amax"]) and gradient["amax"] > 0


def test_fp8_copies_count_their_nonfinite_values():
    """Check that nonfinite values of FP8 copies are counted."""
    layer = make_layer(recipes.FP8Current())
    with inspect_quantization(layer) as inspector:
        train(layer, *nonfinite_operands())
    counts = {r["role"]: r["nonfinite_copy"] for r in inspector.records()}
    assert counts == {"input": [0, 0, 2], "weight": [0, 0, 0], "grad_output": [0, 0, 22 * N]}


def rows_by_operand(inspector):
    """Return the number of rows that were recorded per role and direction."""
    return {(r["role"], r["direction"]): sum(r["rows"]) for r in inspector.records()}


ACTIVATION_ROWS = {
    (role, direction): 35
    for role in ("input", "grad_output")
    for direction in ("rowwise", "columnwise")
}
WEIGHT_ROWS = {("weight", "rowwise"): 3 * N, ("weight", "columnwise"): 3 * N}


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_microbatches_and_checkpointing(reentrant):
    """Check that microbatches are summed and checkpointing counts once."""
    layer = make_layer(recipes.NVFP4())
    batches = [operands(seed=seed) for seed in (5, 6)]
    inspector = inspect_quantization(layer, every=2)

    def function(x, offs):
        return (
            layer(x, offs)
            if reentrant is None
            else checkpoint(layer, x, offs, use_reentrant=reentrant)
        )

    with inspector:
        for _ in range(3):
            for x, dy in batches:
                train(layer, x, dy, function)
            inspector.step()
    step_0, step_2 = inspector.records()[:6], inspector.records()[6:]
    assert {r["step"] for r in step_0} == {0} and {r["step"] for r in step_2} == {2}
    assert [r | {"step": 0} for r in step_2] == step_0
    twice = {key: 2 * rows for key, rows in ACTIVATION_ROWS.items()} | WEIGHT_ROWS
    assert rows_by_operand(inspector) == twice
    records_by_batch = []
    for x, dy in batches:
        with inspect_quantization(layer) as inspector_of_batch:
            train(layer, x, dy)
        records_by_batch.append(records_by_operand(inspector_of_batch))
    for r in step_0:
        a, b = (records[r["role"], r["direction"]] for records in records_by_batch)
        if r["role"] != "weight":
            assert r["noise"] == pytest.approx(
                [*map(sum, zip(a["noise"], b["noise"], strict=True))]
            )
            assert r["amax"] == [*map(max, a["amax"], b["amax"])]
    inspector.clear()
    assert inspector.records() == []


QUANTIZED_KINDS = ("quantized", "prepacked", "w4a16")


@pytest.mark.parametrize("kind", ["cached", "discrete", "delayed wgrad", "eval", *QUANTIZED_KINDS])
def test_kinds_of_weights(kind):
    """Check the records of every kind of weight."""
    kinds = {"single_parameter": kind != "discrete", "delay_wgrad": kind == "delayed wgrad"}
    layer, (x, dy) = make_layer(recipes.NVFP4(), **kinds), operands()
    options, want = {}, ACTIVATION_ROWS | WEIGHT_ROWS
    if kind == "cached":
        train(layer, x, dy, is_first_microbatch=True)
        options["is_first_microbatch"] = False
    if kind in QUANTIZED_KINDS:
        q = grouped.quantize(layer.weight.detach(), WEIGHT_FORMAT, columnwise=True)
        q = q.prepack() if kind == "prepacked" else q
        layer.weight = nn.Parameter(q, requires_grad=False)
        want = {key: v for key, v in ACTIVATION_ROWS.items() if key[1] == "rowwise"} | WEIGHT_ROWS
        if kind == "w4a16":
            layer.recipe = recipes.BF16()
    with inspect_quantization(layer) as inspector:
        if kind == "eval":
            layer.eval()
            with torch.inference_mode():
                for _ in range(2):
                    layer(x, torch.tensor(ENDS))
            want = {("input", "rowwise"): 70, ("weight", "rowwise"): 3 * N}
        else:
            train(layer, x, dy, **options)
    assert rows_by_operand(inspector) == want
    with inspect_quantization(make_layer(recipes.NVFP4())) as inspector_of_plain:
        train(next(iter(inspector_of_plain._layers.values())), x, dy)
    for r in inspector.records():
        plain = records_by_operand(inspector_of_plain)[r["role"], r["direction"]]
        if r["role"] == "weight" and kind in QUANTIZED_KINDS:
            assert r["global_scale"] == plain["global_scale"] and r["snr_db"] == [None] * 3
            decoded = layer.weight.dequantize(F32, r["direction"])
            assert r["amax"] == decoded.abs().amax((1, 2)).tolist() and r["noise"] == [None] * 3
        elif kind not in ("w4a16", "eval"):
            assert r == plain | {"layer": r["layer"]}


@pytest.mark.parametrize("dtype", [F16, F32])
def test_plain_operands(dtype):
    """Check the records of plain fp16 and fp32 operands."""
    layer = GroupedLinear(2, 4, 2, bias=False, dtype=F32)
    with torch.no_grad():
        layer.weight.fill_(1 + 2**-9), layer.weight[1, 0, 0].fill_(1e6)
    with inspect_quantization(layer) as inspector:
        layer(torch.tensor([[1.0, 2, 3, 0]], dtype=dtype), [0, 1])
    x, w = sorted(inspector.records(), key=lambda r: r["role"])
    is_half = dtype == F16
    assert {x["format"], w["format"]} == {"float16" if is_half else "bfloat16"}
    assert x["snr_db"] == [None, None] and x["signal"] == [0, 14] and x["rows"] == [0, 1]
    assert w["saturated"] == [0, is_half / 8] and w["nonfinite_copy"] == [0, is_half]
    if not is_half:
        assert w["snr_db"][0] == pytest.approx(20 * math.log10((1 + 2**-9) * 2**9))


@pytest.mark.compile
def test_compiled_layers(fresh_dynamo):
    """Check that compiled layers are inspected eagerly, and that full graphs raise."""
    layer, (x, dy) = make_layer(recipes.NVFP4()), operands()
    function = torch.compile(layer, backend="aot_eager")
    graph = compile_full_graph(layer)
    plain = train(layer, x, dy, graph)
    with inspect_quantization(layer) as inspector:
        with pytest.raises(
            Exception, match=r"grouped\.inspect\.inspect_quantization looks at the operands"
        ):
            train(layer, x, dy, graph)
        inspected = train(layer, x, dy, function)
        with pytest.raises(
            RuntimeError, match=r"grouped\.inspect\.inspect_quantization looks at the operands"
        ):
            torch.func.grad(lambda x: layer(x, torch.tensor(ENDS)).sum())(x)
    assert rows_by_operand(inspector) == ACTIVATION_ROWS | WEIGHT_ROWS
    assert_all_same(inspected, plain)
    train(layer, x, dy, graph)


@pytest.mark.parametrize("name", ["nvfp4", "row-scaled", "mxfp8", "fp8-block", "fp8", "bf16"])
def test_nothing_is_read_on_the_host(name):
    """Fake tensors have no values."""
    fmt = RECIPES_OF_EVERY_KIND[name].input
    q = grouped.quantize(
        operands()[0], fmt or WEIGHT_FORMAT, offs=torch.tensor(ENDS), columnwise=True
    )
    with inspect_quantization(make_layer(RECIPES_OF_EVERY_KIND[name])) as inspector:
        # A first step fills the caches, which fake tensors could not.
        train(next(iter(inspector._layers.values())), *operands())
    with FakeTensorMode() as mode:
        fake = [
            OperandCopy.from_tensors(
                q.format, *(mode.from_tensor(t) for t in (c.operand[0], *c.operand[1]))
            )
            for c in (q.rowwise, q.columnwise)
        ]
        x, offs = mode.from_tensor(operands()[0]), mode.from_tensor(q.offs)
        step = Step(0)
        quantized = QuantizedOperand(*([OperandCopy(x)] if fmt is None else fake))
        Probe("layer", ("input",), step).observe("input", x, quantized, fmt, offs)
    assert all(
        f.sums.shape == (3, 7) and f.maxima.shape == (3, 2) for f in step.statistics.values()
    )


@pytest.fixture
def model():
    return nn.ModuleDict({"a": GroupedMLP(3, K, 32, recipe=recipes.MXFP8()), "b": nn.Linear(2, 2)})


def forward(model):
    return model.a(operands()[0], torch.tensor(ENDS))


@pytest.fixture
def inspector(model):
    """An inspector that has recorded two steps of one role of one layer, and has ended."""
    inspector = inspect_quantization(model, layers=["*.down"], roles=["input"])
    with inspector:
        for _ in range(2):
            with torch.no_grad():
                forward(model)
            inspector.step()
    return inspector


def test_steps_of_selected_layers(inspector, model):
    forward(model)
    steps = [(r["step"], r["layer"]) for r in inspector.records()]
    assert steps == [(0, "a.down"), (1, "a.down")]


def test_a_layer_has_one_inspector_at_a_time(model):
    with (
        inspect_quantization(model, layers=["*.down"]),
        pytest.raises(RuntimeError, match="a.down is inspected already"),
        inspect_quantization(model),
    ):
        pass


def test_copies_of_an_inspected_model_are_not_inspected(model):
    with inspect_quantization(model, layers=["*.down"]) as inspector:
        forward(pickle.loads(pickle.dumps(copy.deepcopy(model))))
        inspector.step()
    assert inspector.records() == []


def test_save_appends_json_lines(inspector, tmp_path):
    """Check that ``save`` appends one JSON line per record."""
    path = tmp_path / "numerics.jsonl"
    inspector.save(path, run="one")
    inspector.save(path, run="two", append=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["numerics"], r["run"], r["step"]) for r in lines] == [
        (2, run, step) for run in ("one", "two") for step in (0, 1)
    ]
    assert lines[0]["noise"] == pytest.approx(inspector.records()[0]["noise"], rel=1e-5)


def test_summary_and_table(inspector):
    """Check the totals in ``summary`` and the text of ``table``."""
    (total,) = inspector.summary(1)
    record = inspector.records()[-1]
    assert total["snr_db"] == pytest.approx(
        10 * math.log10(sum(record["signal"]) / sum(record["noise"]))
    )
    assert total["worst_snr_db"] == min(v for v in record["snr_db"] if v is not None)
    assert record["snr_db"][total["worst_expert"]] == total["worst_snr_db"]
    assert (total["idle"], total["load"], total["amax"]) == (1, 22 * 3 / 35, max(record["amax"]))
    head, line = inspector.table().splitlines()
    assert "snr dB" in head and line.split()[:4] == ["a.down", "input", "rowwise", "mxfp8"]
    assert f"{total['snr_db']:.1f}" in line


def test_inspect_checks_its_arguments():
    layer = make_layer(recipes.BF16())
    for options, error, message in (
        ({"every": 0}, ValueError, "every must be positive, got 0"),
        ({"every": True}, TypeError, "got True"),
        ({"roles": ["output"]}, ValueError, "grad_output, got 'output'"),
        ({"roles": "input"}, TypeError, "roles must be a sequence of names, got the string"),
        ({"layers": ["up"]}, ValueError, "layers: 'up' is none of GroupedLinear"),
    ):
        with pytest.raises(error, match=message):
            inspect_quantization(layer, **options)


def test_tables_need_a_recorded_step():
    layer = make_layer(recipes.BF16())
    with pytest.raises(ValueError, match="no step was looked at"):
        inspect_quantization(layer).table()
    with pytest.raises(ValueError, match="step 3 was not looked at"):
        inspect_quantization(layer).summary(3)


def test_old_names_of_the_inspector_warn():
    with pytest.warns(DeprecationWarning, match=r"use grouped\.inspect\.inspect_quantization"):
        assert grouped.debug.inspect is inspect_quantization
    with pytest.warns(DeprecationWarning, match=r"use grouped\.inspect\.inspect_quantization"):
        assert grouped.inspect.inspect is inspect_quantization
    with pytest.warns(DeprecationWarning, match=r"use grouped\.inspect\.check_offsets"):
        assert grouped.debug.check_offsets is grouped.inspect.check_offsets
