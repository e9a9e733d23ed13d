"""Version counters of GroupedTensors: writes between a forward and its backward pass raise."""

import pytest
import torch
from torch import nn

import grouped
from tests.helpers import BF16, compile_full_graph, offs_tensor, sample

from .cases import FORMATS, RECIPES, WEIGHT_FORMAT, parameter, weight

G, N, K = 3, 48, 64
OFFS = [13, 13, 35]

WRITES = {
    "zero_": lambda w: w.zero_(),
    "add_": lambda w: w.add_(1),
    "copy_ plain": lambda w: w.copy_(weight()),
    "copy_ grouped": lambda w: w.copy_(parameter()),
    "quantize out": lambda w: grouped.quantize(weight(), w.format, columnwise=True, out=w),
    "foreach": lambda w: torch._foreach_mul_([w], 2),
    "through detach": lambda w: w.detach().zero_(),
    "through data": lambda w: w.data.zero_(),
    "through its parts": lambda w: w.__tensor_unflatten__(
        {n: getattr(w, n) for n in w.__tensor_flatten__()[0]},
        w.__tensor_flatten__()[1],
        w.shape,
        w.stride(),
    ).zero_(),
}
writes = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


def frozen():
    return parameter(False)


def frozen_layer(recipe):
    layer = grouped.nn.GroupedLinear(G, K, N, recipe=RECIPES[recipe], dtype=BF16)
    layer.weight = frozen()
    return layer


def versions(w):
    return [w._version, *(t._version for copy in (w.rowwise, w.columnwise) for t in copy)]


@writes
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_backward_through_a_frozen_weight_that_was_written(recipe, write):
    """Check that backward raises if a frozen weight was written since the forward pass."""
    layer = frozen_layer(recipe)
    x = sample(40, K).requires_grad_()
    y = layer(x, OFFS)
    with torch.no_grad():
        write(layer.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    layer(x, OFFS).sum().backward()


@writes
def test_every_write_bumps_the_wrapper_and_all_that_it_holds(write):
    for prepacked in (False, True):
        w = frozen()
        w = nn.Parameter(w.prepack(), False) if prepacked else w
        before = versions(w)
        write(w)
        after = versions(w)
        assert all(a > b for a, b in zip(after[1:], before[1:], strict=True))
        assert (after[0] > before[0]) is (
            write not in (WRITES["through data"], WRITES["through its parts"])
        )


def test_offsets_that_were_written_count_and_others_do_not():
    """Check that writing the offsets changes their version, and that other writes do not."""
    x = grouped.quantize(sample(40, K), FORMATS["1x16"], offs=OFFS)
    before = x.offs._version
    x.mul_(2)
    assert x.offs._version == before
    grouped.quantize(sample(40, K), FORMATS["1x16"], offs=[1, 2, 3], out=x)
    assert x.offs._version > before


def test_assigning_data_between_forward_and_backward():
    x = sample(40, K).requires_grad_()
    for recipe in ("bf16", "nvfp4"):
        layer = frozen_layer(recipe)
        x.grad = None
        layer(x, OFFS).sum().backward()
        want, y = x.grad.clone(), layer(x, OFFS)
        layer.weight.data = grouped.quantize(weight(), WEIGHT_FORMAT, columnwise=True)
        x.grad = None
        if recipe == "bf16":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            y.sum().backward()
            assert torch.equal(x.grad, want)


def test_inference_tensors_have_no_version():
    with torch.inference_mode():
        w = frozen()
        for name, write in WRITES.items():
            if name != "through data":
                write(w)


@pytest.mark.compile
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_compiled(recipe):
    """Check that compiled writes change the versions of a weight."""
    layer = frozen_layer(recipe)
    x = sample(40, K).requires_grad_()
    y = compile_full_graph(layer)(x, offs_tensor(*OFFS))
    before = versions(layer.weight)

    @compile_full_graph
    def requantize(w, dense):
        grouped.quantize(dense, WEIGHT_FORMAT, columnwise=True, out=w)

    requantize(layer.weight, weight())
    assert all(a > b for a, b in zip(versions(layer.weight), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


OPERANDS = {
    "W4A16": lambda: (sample(40, K), frozen(), {"offs": OFFS}),
    "plain": lambda: (sample(40, K), weight(), {"offs": OFFS}),
    "NVFP4": lambda: (grouped.quantize(sample(40, K), FORMATS["1x16"], offs=OFFS), frozen(), {}),
}


@pytest.mark.parametrize("kind", [*OPERANDS])
@pytest.mark.parametrize("argument", ["a", "b", "bias", "out"])
def test_out_refuses_tensors_that_require_a_gradient(kind, argument):
    """Check that ``out`` is refused if an operand requires a gradient."""
    a, b, options = OPERANDS[kind]()
    tensors = {"a": a, "b": b, "bias": torch.zeros(G, N), "out": torch.zeros(40, N)}
    tensors[argument] = tensors[argument].detach().requires_grad_()
    options |= {"bias": tensors["bias"], "out": tensors["out"]}
    with pytest.raises(RuntimeError, match=f"{argument} requires a gradient.*leave out= away"):
        grouped.grouped_gemm(tensors["a"], tensors["b"], **options)
    assert not tensors["out"].detach().any()
    with torch.no_grad():
        assert grouped.grouped_gemm(tensors["a"], tensors["b"], **options) is tensors["out"]
    assert tensors["out"].detach().any()


def test_quantizing_into_a_leaf_that_requires_a_gradient():
    """Check that quantizing into a leaf that requires a gradient needs ``no_grad``."""
    p = parameter()
    before = p.rowwise.codes.clone()
    with pytest.raises(RuntimeError, match=r"out requires a gradient.*torch.no_grad\(\)"):
        grouped.quantize(weight(), WEIGHT_FORMAT, columnwise=True, out=p)
    assert torch.equal(p.rowwise.codes, before)
    with torch.no_grad():
        assert grouped.quantize(weight(), WEIGHT_FORMAT, columnwise=True, out=p) is p
    assert not torch.equal(p.rowwise.codes, before)
