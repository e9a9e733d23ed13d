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
    each,
    raises,
    sample,
    step,
    whole_graph,
)

from .cases import ALL_RECIPES, WEIGHT_FORMAT

K, N, ENDS = 64, 96, [13, 13, 35]
#: What is rounded to the largest code, over that.
HEADROOM = {"e2m1": 7 / 6, "e4m3": 464 / 448, "e5m2": 61440 / 57344}
#: Its code; of E2M1 two.
LARGEST = {"e2m1": 0x77, "e4m3": 0x7E, "e5m2": 0x7B}
EVERY = ALL_RECIPES | {
    "stochastic": recipes.NVFP4(stochastic_rounding=True),
    "hybrid": recipes.MXFP8(grad_dtype=E5M2, weight_block=(32, 32)),
    "delayed": recipes.FP8Delayed(initial_scale="one"),
}


def wild(*shape):
    """Rows of magnitudes so different that codes underflow and scales are badly rounded."""
    powers = torch.exp2(torch.randint(-17, 1, (*shape[:-1], shape[-1] // 16)))
    return (sample(*shape) * powers.repeat_interleave(16, dim=-1)).bfloat16()


def layer_of(recipe, n=N, dtype=BF16, **options):
    torch.manual_seed(3)
    layer = GroupedLinear(3, K, n, recipe=recipe, dtype=dtype, **options)
    layer.load_state_dict({"weight": wild(3, n, K)}, strict=False)
    return layer


def operands(n=N, seed=5):
    torch.manual_seed(seed)
    x, dy = wild(40, K), wild(40, n)
    x[35:], dy[35:] = torch.nan, torch.nan
    return x, dy


def train(layer, x, dy, function=None, **options):
    return step(layer, x, dy, torch.tensor(ENDS), function=function, **options)


def by_copy(lens):
    return {(r["role"], r["direction"]): r for r in lens.records()}


def groups_of(x):
    x = x.detach().double().numpy()
    return list(x) if x.ndim == 3 else [x[a:b] for a, b in zip([0, *ENDS], ENDS, strict=False)]


def decoded(q, direction):
    """Values of each group, and the largest that the scale of each stands for: every code the
    largest one.
    """
    top = q.clone()
    getattr(top, direction).codes.view(U8).fill_(LARGEST[q.format.element.name])
    return [groups_of(t.dequantize(F32, direction)) for t in (q, top)]


def expected(x, q, columnwise):
    lists = []
    values, limits = (
        (None, None) if q is None else decoded(q, "columnwise" if columnwise else "rowwise")
    )
    for g, a in enumerate(groups_of(x)):
        if q is None:
            copied, limit = groups_of(x.bfloat16())[g], np.inf
        else:
            copied, limit = values[g], limits[g] * HEADROOM[q.format.element.name]
        entry = {"rows": len(a), "nonfinite": 0, "nonfinite_copy": 0, "amax": abs(a).max(initial=0)}
        entry["signal"] = signal = (a**2).sum()
        entry["noise"] = noise = ((a - copied) ** 2).sum()
        entry["snr_db"] = 10 * math.log10(signal / noise) if signal and noise else None
        entry["saturated"] = ((abs(a) > limit) & (limit > 0)).mean() if len(a) else None
        entry["underflow"] = ((a != 0) & (copied == 0)).mean() if len(a) else None
        lists.append(entry)
    return {name: [entry[name] for entry in lists] for name in lists[0]}


@each("name", [n for n in EVERY if n != "stochastic"])
def test_against_numpy(name):
    recipe = EVERY[name]
    layer, (x, dy) = layer_of(recipe), operands()
    if layer.scaling is not None:
        # Scales of nobody: gradients saturate and inputs underflow.
        layer.scaling.input_scale.fill_(2**-6), layer.scaling.grad_output_scale.fill_(2**16)
    with inspect_quantization(layer) as lens:
        train(layer, x, dy)
    found = by_copy(lens)
    assert len(found) == (6 if recipe.is_quantized else 3)
    seen = {"input": x, "weight": layer.weight, "grad_output": dy}
    for (role, direction), record in found.items():
        fmt, columnwise = getattr(recipe, role), direction == "columnwise"
        offs, q = None if role == "weight" else torch.tensor(ENDS), None
        if fmt is not None:
            scale = layer.scaling.scale(role) if fmt.takes_scale else None
            q = grouped.quantize(seen[role], fmt, offs=offs, columnwise=True, scale=scale)
        if fmt is not None and columnwise and fmt.is_transformed:
            assert record["saturated"] == record["underflow"] == [None] * 3
            pairs = zip(
                groups_of(seen[role]), groups_of(q.dequantize(F32, "columnwise")), strict=True
            )
            assert record["noise"] == pytest.approx(
                [((a - b) ** 2).sum() for a, b in pairs], rel=1e-5
            )
            continue
        for what, numbers in expected(seen[role], q, columnwise).items():
            for got, number in zip(record[what], numbers, strict=True):
                assert got == (number if number is None else pytest.approx(number, rel=1e-5)), (
                    role,
                    direction,
                    what,
                )
        assert record["format"] == ("bfloat16" if fmt is None else fmt.text)
    if name == "delayed":
        assert all(v is None or v > 0.1 for v in found["grad_output", "rowwise"]["saturated"])
    if name == "nvfp4":
        levels = found["input", "columnwise"]["second_level"]
        assert levels == pytest.approx([v / 2688 for v in found["input", "rowwise"]["amax"]])
        assert found["input", "rowwise"]["saturated"][2] > 0
        assert found["input", "rowwise"]["underflow"][2] > 0.1


@each("frozen", [False, True])
@each("name", [*EVERY])
def test_results_keep_their_bits(name, frozen):
    def results(look):
        layer, (x, dy) = layer_of(EVERY[name]), operands()
        layer.requires_grad_(not frozen)
        lens = inspect_quantization(layer)
        with lens if look else contextlib.nullcontext():
            found = train(layer, x, dy)
        state = layer.scaling.state_dict().values() if layer.scaling else ()
        return lens, [*found, torch.get_rng_state(), *state]

    (lens, seen), (_, plain) = results(True), results(False)
    assert_all_same(seen, plain)
    # Which copies there are depends on what is asked for.
    assert ("input", "rowwise") in by_copy(lens)
    has_both = EVERY[name].is_quantized and not frozen
    assert (("input", "columnwise") in by_copy(lens)) == has_both


def test_nothing_finite_and_nothing_at_all():
    layer, (x, dy) = layer_of(recipes.NVFP4(propagate_nonfinite=False)), operands()
    x[:13], dy[14, 5] = 0, torch.inf
    x[20, 3], x[34, 7] = torch.nan, torch.nan
    with inspect_quantization(layer) as lens:
        train(layer, x, dy)
    found = {(r["role"], r["direction"], r["expert"]): r for r in lens.rows()}
    zero, empty, last = (found["input", "rowwise", g] for g in range(3))
    assert (zero["rows"], empty["rows"], last["rows"]) == (13, 0, 22)
    assert zero["signal"] == zero["underflow"] == zero["amax"] == 0 and zero["snr_db"] is None
    assert empty["saturated"] is empty["underflow"] is empty["snr_db"] is None
    assert (last["nonfinite"], last["nonfinite_copy"]) == (2, 0) and last["snr_db"] > 10
    gradient = found["grad_output", "rowwise", 2]
    assert (gradient["nonfinite"], gradient["nonfinite_copy"]) == (1, 22 * N)
    assert gradient["signal"] == 0 and math.isfinite(gradient["amax"]) and gradient["amax"] > 0
    layer = layer_of(recipes.FP8Current())
    with inspect_quantization(layer) as lens:
        train(layer, x, dy)
    counts = {r["role"]: r["nonfinite_copy"] for r in lens.records()}
    assert counts == {"input": [0, 0, 2], "weight": [0, 0, 0], "grad_output": [0, 0, 22 * N]}


def totals(lens):
    return {(r["role"], r["direction"]): sum(r["rows"]) for r in lens.records()}


BOTH = {(role, way): 35 for role in ("input", "grad_output") for way in ("rowwise", "columnwise")}
WEIGHT = {("weight", "rowwise"): 3 * N, ("weight", "columnwise"): 3 * N}


@each("reentrant", [None, False, True])
def test_microbatches_and_checkpointing(reentrant):
    layer = layer_of(recipes.NVFP4())
    batches = [operands(seed=seed) for seed in (5, 6)]
    lens = inspect_quantization(layer, every=2)

    def function(x, offs):
        return (
            layer(x, offs)
            if reentrant is None
            else checkpoint(layer, x, offs, use_reentrant=reentrant)
        )

    with lens:
        for _ in range(3):
            for x, dy in batches:
                train(layer, x, dy, function)
            lens.step()
    first, second = lens.records()[:6], lens.records()[6:]
    assert {r["step"] for r in first} == {0} and {r["step"] for r in second} == {2}
    assert [r | {"step": 0} for r in second] == first
    twice = {key: 2 * rows for key, rows in BOTH.items()} | WEIGHT
    assert totals(lens) == twice
    parts = []
    for x, dy in batches:
        with inspect_quantization(layer) as alone:
            train(layer, x, dy)
        parts.append(by_copy(alone))
    for r in first:
        a, b = (part[r["role"], r["direction"]] for part in parts)
        if r["role"] != "weight":
            assert r["noise"] == pytest.approx(
                [*map(sum, zip(a["noise"], b["noise"], strict=True))]
            )
            assert r["amax"] == [*map(max, a["amax"], b["amax"])]
    lens.clear()
    assert lens.records() == []


GIVEN = ("quantized", "prepacked", "w4a16")


@each("kind", ["kept", "discrete", "delayed wgrad", "eval", *GIVEN])
def test_kinds_of_weights(kind):
    kinds = {"single_parameter": kind != "discrete", "delay_wgrad": kind == "delayed wgrad"}
    layer, (x, dy) = layer_of(recipes.NVFP4(), **kinds), operands()
    options, want = {}, BOTH | WEIGHT
    if kind == "kept":
        train(layer, x, dy, is_first_microbatch=True)
        options["is_first_microbatch"] = False
    if kind in GIVEN:
        q = grouped.quantize(layer.weight.detach(), WEIGHT_FORMAT, columnwise=True)
        q = q.prepack() if kind == "prepacked" else q
        layer.weight = nn.Parameter(q, requires_grad=False)
        want = {key: v for key, v in BOTH.items() if key[1] == "rowwise"} | WEIGHT
        if kind == "w4a16":
            layer.recipe = recipes.BF16()
    with inspect_quantization(layer) as lens:
        if kind == "eval":
            layer.eval()
            with torch.inference_mode():
                for _ in range(2):
                    layer(x, torch.tensor(ENDS))
            want = {("input", "rowwise"): 70, ("weight", "rowwise"): 3 * N}
        else:
            train(layer, x, dy, **options)
    assert totals(lens) == want
    with inspect_quantization(layer_of(recipes.NVFP4())) as usual:
        train(next(iter(usual._layers.values())), x, dy)
    for r in lens.records():
        other = by_copy(usual)[r["role"], r["direction"]]
        if r["role"] == "weight" and kind in GIVEN:
            assert r["second_level"] == other["second_level"] and r["snr_db"] == [None] * 3
            decoded = layer.weight.dequantize(F32, r["direction"])
            assert r["amax"] == decoded.abs().amax((1, 2)).tolist() and r["noise"] == [None] * 3
        elif kind not in ("w4a16", "eval"):
            assert r == other | {"layer": r["layer"]}


@each("dtype", [F16, F32])
def test_plain_copies(dtype):
    layer = GroupedLinear(2, 4, 2, bias=False, dtype=F32)
    with torch.no_grad():
        layer.weight.fill_(1 + 2**-9), layer.weight[1, 0, 0].fill_(1e6)
    with inspect_quantization(layer) as lens:
        layer(torch.tensor([[1.0, 2, 3, 0]], dtype=dtype), [0, 1])
    x, w = sorted(lens.records(), key=lambda r: r["role"])
    is_half = dtype == F16
    assert {x["format"], w["format"]} == {"float16" if is_half else "bfloat16"}
    assert x["snr_db"] == [None, None] and x["signal"] == [0, 14] and x["rows"] == [0, 1]
    assert w["saturated"] == [0, is_half / 8] and w["nonfinite_copy"] == [0, is_half]
    if not is_half:
        assert w["snr_db"][0] == pytest.approx(20 * math.log10((1 + 2**-9) * 2**9))


def test_compiled(fresh_dynamo):
    layer, (x, dy) = layer_of(recipes.NVFP4()), operands()
    function = torch.compile(layer, backend="aot_eager")
    whole = whole_graph(layer)
    plain = train(layer, x, dy, whole)
    with inspect_quantization(layer) as lens:
        with raises(Exception, r"grouped\.inspect\.inspect_quantization looks at the operands"):
            train(layer, x, dy, whole)
        seen = train(layer, x, dy, function)
        with raises(RuntimeError, r"grouped\.inspect\.inspect_quantization looks at the operands"):
            torch.func.grad(lambda x: layer(x, torch.tensor(ENDS)).sum())(x)
    assert totals(lens) == BOTH | WEIGHT
    assert_all_same(seen, plain)
    train(layer, x, dy, whole)


@each("name", ["nvfp4", "row-scaled", "mxfp8", "fp8-block", "fp8", "bf16"])
def test_nothing_is_read_on_the_host(name):
    """Fake tensors have no values."""
    fmt = EVERY[name].input
    q = grouped.quantize(
        operands()[0], fmt or WEIGHT_FORMAT, offs=torch.tensor(ENDS), columnwise=True
    )
    with inspect_quantization(layer_of(EVERY[name])) as lens:
        train(next(iter(lens._layers.values())), *operands())  # What is cached is known then.
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


def test_layers_files_and_tables(tmp_path):
    model = nn.ModuleDict({"a": GroupedMLP(3, K, 32, recipe=recipes.MXFP8()), "b": nn.Linear(2, 2)})
    lens = inspect_quantization(model, layers=["*.down"], roles=["input"])
    x = operands()[0]
    with lens:
        for _ in range(2):
            with torch.no_grad():
                model.a(x, torch.tensor(ENDS))
            lens.step()
        with raises(RuntimeError, "a.down is inspected already"), inspect_quantization(model):
            pass
        pickle.loads(pickle.dumps(copy.deepcopy(model))).a(x, torch.tensor(ENDS))
    model.a(x, torch.tensor(ENDS))
    assert [(r["step"], r["layer"]) for r in lens.records()] == [(0, "a.down"), (1, "a.down")]
    path = tmp_path / "numerics.jsonl"
    lens.save(path, run="one")
    lens.save(path, run="two", append=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["numerics"], r["run"], r["step"]) for r in lines] == [
        (1, run, step) for run in ("one", "two") for step in (0, 1)
    ]
    assert lines[0]["noise"] == pytest.approx(lens.records()[0]["noise"], rel=1e-5)
    (total,) = lens.summary(1)
    last = lens.records()[-1]
    assert total["snr_db"] == pytest.approx(
        10 * math.log10(sum(last["signal"]) / sum(last["noise"]))
    )
    assert total["worst_snr_db"] == min(v for v in last["snr_db"] if v is not None)
    assert last["snr_db"][total["worst_expert"]] == total["worst_snr_db"]
    assert (total["idle"], total["load"], total["amax"]) == (1, 22 * 3 / 35, max(last["amax"]))
    head, line = lens.table().splitlines()
    assert "snr dB" in head and line.split()[:4] == ["a.down", "input", "rowwise", "mxfp8"]
    assert f"{total['snr_db']:.1f}" in line


def test_wrong_arguments():
    layer = layer_of(recipes.BF16())
    for options, error, message in (
        ({"every": 0}, ValueError, "every must be positive, got 0"),
        ({"every": True}, TypeError, "got True"),
        ({"roles": ["output"]}, ValueError, "grad_output, got 'output'"),
        ({"roles": "input"}, TypeError, "roles must be a sequence of names, got the string"),
        ({"layers": ["up"]}, ValueError, "layers: 'up' is none of GroupedLinear"),
    ):
        with raises(error, message):
            inspect_quantization(layer, **options)
    with raises(ValueError, "no step was looked at"):
        inspect_quantization(layer).table()
    with raises(ValueError, "step 3 was not looked at"):
        inspect_quantization(layer).summary(3)


def test_old_names_of_the_inspector_warn():
    with pytest.warns(DeprecationWarning, match=r"use grouped\.inspect\.inspect_quantization"):
        assert grouped.debug.inspect is inspect_quantization
    with pytest.warns(DeprecationWarning, match=r"use grouped\.inspect\.inspect_quantization"):
        assert grouped.inspect.inspect is inspect_quantization
    with pytest.warns(DeprecationWarning, match=r"use grouped\.inspect\.check_offsets"):
        assert grouped.debug.check_offsets is grouped.inspect.check_offsets
