"""Tensors that users give to ``grouped.optim.AdamW``: it copies them and takes any strides."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import grouped
from grouped import MXFP8, optim, quantize
from tests.helpers import BF16, sample, seeded_generator

SHAPE = (3, 64, 80)


def draw(seed):
    return torch.randn(SHAPE, generator=seeded_generator(seed))


def test_masters_are_detached():
    w = nn.Parameter(draw(0))
    for master in (w, w * 1.0):
        p = nn.Parameter(grouped.quantize(w.detach().mT.contiguous(), grouped.FP8()))
        ours = optim.AdamW([p], masters={p: master.mT})
        assert not ours.state[p]["master"].requires_grad
        p.grad = draw(1).mT.to(p.dtype)
        ours.step()
        copy.deepcopy(ours).state_dict()
    assert torch.equal(w, draw(0)) and w.grad is None


def test_strided_parameters_get_contiguous_masters():
    """The fused kernel takes elements in the order of memory."""
    p, want = nn.Parameter(draw(0).to(BF16).mT), nn.Parameter(draw(0).to(BF16).mT.contiguous())
    ours, theirs = (optim.AdamW([q], lr=0.1, master_weights=True) for q in (p, want))
    for seed in (1, 2):
        p.grad = want.grad = draw(seed).to(BF16).mT
        ours.step(), theirs.step()
    assert torch.equal(p, want) and not torch.equal(want, draw(0).to(BF16).mT)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_loaded_state_may_be_strided(quantized):
    """Check that a loaded state may be strided."""
    start = draw(0).mT.contiguous()
    values = [
        grouped.quantize(start, grouped.FP8()) if quantized else start.clone() for _ in range(2)
    ]
    p, q = map(nn.Parameter, values)
    saved = optim.AdamW([p], masters={p: start} if quantized else None)
    p.grad = draw(1).mT.to(p.dtype)
    saved.step()
    state = copy.deepcopy(saved.state_dict())
    for name, t in state["state"][0].items():
        if name != "step":
            state["state"][0][name] = t.mT.contiguous().mT
    loaded = optim.AdamW([q])
    loaded.load_state_dict(state)
    with torch.no_grad():
        q.copy_(p)
    p.grad = q.grad = draw(2).mT.to(p.dtype)
    saved.step(), loaded.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(saved.state[p][name], loaded.state[q][name]), name
    assert torch.equal(p.dequantize() if quantized else p, q.dequantize() if quantized else q)


def test_an_unused_main_grad_is_ignored():
    """Megatron-LM gives every parameter a main_grad, also where the layer writes ``grad``."""
    p, want = (nn.Parameter(draw(0)) for _ in range(2))
    p.main_grad, p.grad, want.grad = draw(3), draw(1), draw(1)
    for q in (p, want):
        optim.AdamW([q], lr=0.1).step()
    assert torch.equal(p, want)


def test_masters_of_some_parameters_make_states_of_all():
    """PyTorch's checkpoints expect a state of every parameter if there is one of any."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(grouped.nn.GroupedLinear(2, 32, 32, bias=False, dtype=BF16) for _ in range(3))
    )
    w = [layer.weight.detach().clone() for layer in model]
    for layer in model[:2]:
        layer.weight = nn.Parameter(grouped.quantize(layer.weight.detach(), grouped.FP8()))
    ours = optim.AdamW(model.parameters(), masters={model[0].weight: w[0]})
    states = get_optimizer_state_dict(model, ours)["state"]
    assert {name: "master" in state for name, state in states.items()} == {
        "0.weight": True,
        "1.weight": True,
        "2.weight": False,
    }
    assert not any(t.requires_grad for state in states.values() for t in state.values())


@pytest.mark.parametrize("has_step", [False, True])
@pytest.mark.parametrize("write", ["load_state_dict", "copy_"])
def test_values_written_beside_a_master_raise(write, has_step):
    """A step from the old master would silently restore the old values."""
    w = sample(2, 32, 64)
    layer = nn.Module()
    layer.weight = nn.Parameter(quantize(w, MXFP8(), columnwise=True))
    names = layer.named_parameters() if has_step else [layer.weight]
    optimizer = optim.AdamW(names, lr=1e-3, masters={layer.weight: w})

    def step():
        layer.weight.grad = torch.ones(2, 32, 64, dtype=BF16)
        optimizer.step()

    if has_step:
        step()
    values = quantize(sample(2, 32, 64) + 1, MXFP8(), columnwise=True)
    before = layer.weight.dequantize()
    if write == "copy_":
        with torch.no_grad():
            layer.weight.copy_(values)
    else:
        layer.load_state_dict({"weight": values})
    assert not torch.equal(layer.weight.dequantize(), before)
    name = "'weight'" if has_step else r"0 of param_groups\[0\]"
    message = rf"a master of parameter {name} of shape .* that load_state_dict\(\) or .* wrote"
    with pytest.raises(RuntimeError, match=f"{message}.*or load the optimizer's state as well$"):
        step()
    assert torch.equal(layer.weight.dequantize(), values.dequantize())


@pytest.mark.parametrize("loaded_first", ["optimizer", "module"])
def test_a_resume_loads_module_and_optimizer_in_any_order(loaded_first):
    """Check that module and optimizer states load in either order."""
    w, states = sample(2, 32, 64), []
    for _ in range(2):
        layer = nn.Module()
        layer.weight = nn.Parameter(quantize(w, MXFP8(), columnwise=True))
        optimizer = optim.AdamW([layer.weight], lr=1e-2, masters={layer.weight: w})
        for _ in range(2):
            layer.weight.grad = torch.ones(2, 32, 64, dtype=BF16)
            optimizer.step()
            if states:
                break
        if not states:
            states = [copy.deepcopy(layer.state_dict()), copy.deepcopy(optimizer.state_dict())]
    loads = [lambda: layer.load_state_dict(states[0]), lambda: optimizer.load_state_dict(states[1])]
    for load in loads if loaded_first == "module" else loads[::-1]:
        load()
    layer.weight.grad = torch.ones(2, 32, 64, dtype=BF16)
    optimizer.step()
    assert int(optimizer.state[layer.weight]["step"]) == 3
