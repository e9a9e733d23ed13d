"""Fused accumulation of weight gradients, and delayed weight gradients, of grouped layers."""

import copy

import pytest
import torch
from torch import nn

import grouped
from grouped.nn import GroupedLinear
from grouped.recipes import FP8Delayed
from tests.helpers import (
    BF16,
    F32,
    I32,
    assert_same_buffers,
    assert_same_bytes,
    compile_full_graph,
    each_copy,
    sample,
)

from .cases import ALL_RECIPES, RECIPES, WEIGHT_FORMAT, OpCounter

K, N, GROUPS, ENDS = 64, 96, 3, [13, 13, 35]
NVFP4 = RECIPES["nvfp4"]
FORMS = ("single", "discrete", "one buffer")
#: Every recipe, and every form of the parameters.
RECIPES_AND_FORMS = [(name, "single") for name in ALL_RECIPES] + [
    (name, form) for name in ("bf16", "nvfp4", "fp8-block") for form in FORMS[1:]
]


def make_layer(recipe, form="single", **options):
    torch.manual_seed(3)
    options.setdefault("dtype", BF16)
    return GroupedLinear(GROUPS, K, N, recipe=recipe, single_parameter=form == "single", **options)


def weights(layer):
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


def give_main_grads(layer, form="single", dtype=F32, value=1.5):
    """Give each weight a main_grad, as Megatron-LM does: views of one buffer, or single tensors."""
    parameters = weights(layer)
    if form == "one buffer":
        flat = torch.full((sum(p.numel() for p in parameters) + 8,), value, dtype=dtype)
        for p, view in zip(
            parameters, flat[8:].view(len(parameters), *parameters[0].shape), strict=True
        ):
            p.main_grad = view
        return
    for p in parameters:
        p.main_grad = torch.full(p.shape, value, dtype=dtype)


def main_grads(layer):
    tensors = [p.main_grad for p in weights(layer)]
    return tensors[0] if tensors[0].dim() == 3 else torch.stack(tensors)


def fp32_wgrad(recipe, x, dy):
    layer = make_layer(recipe).float()
    layer(x, ENDS).backward(dy)
    return layer.weight.grad


@pytest.fixture
def x():
    return sample(40, K)


@pytest.fixture
def dy():
    return sample(40, N)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("name", "form"), RECIPES_AND_FORMS)
def test_main_grad_accumulates_in_fp32(name, form, dtype, x, dy):
    """Each step rounds once; gradients of x and of the bias are unchanged."""
    recipe = ALL_RECIPES[name]
    layer, plain = make_layer(recipe, form, fuse_wgrad_accumulation=True), make_layer(recipe, form)
    give_main_grads(layer, form, dtype)
    buffers = [p.main_grad for p in weights(layer)]
    versions = [t._version for t in buffers]
    want, dw = torch.full((GROUPS, N, K), 1.5, dtype=dtype), fp32_wgrad(recipe, x, dy)
    for step in range(2):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for module, leaf in zip((layer, plain), leaves, strict=True):
            module.zero_grad()
            module(leaf, ENDS).backward(dy)
        want = (want.float() + dw).to(dtype)
        assert_same_bytes(main_grads(layer), want, f"step {step}")
        assert_same_bytes(*(leaf.grad for leaf in leaves))
        for (name, p), q in zip(layer.named_parameters(), plain.parameters(), strict=True):
            if name.startswith("bias"):
                assert_same_bytes(p.grad, q.grad)
    assert all(p.main_grad is t for p, t in zip(weights(layer), buffers, strict=True))
    assert all(t._version > v for t, v in zip(buffers, versions, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", ["is_first_microbatch", "overwrite_main_grad"])
def test_main_grad_is_overwritten(option, form, x, dy):
    """Check that both ways to request it overwrite ``main_grad``."""
    recipe = RECIPES["row-scaled"]
    layer = make_layer(recipe, form, fuse_wgrad_accumulation=True)
    give_main_grads(layer, form, value=torch.nan)
    dw = fp32_wgrad(recipe, x, dy)
    for p in weights(layer):
        p.overwrite_main_grad = option == "overwrite_main_grad"
    is_first = option == "is_first_microbatch" or None
    layer(x, ENDS, is_first_microbatch=is_first).backward(dy)
    assert_same_bytes(main_grads(layer), dw)
    assert not main_grads(layer)[1].any()
    for p in weights(layer):
        p.overwrite_main_grad = False
    layer(x, ENDS, is_first_microbatch=None if is_first is None else False).backward(dy)
    assert_same_bytes(main_grads(layer), dw + dw)


def test_one_expert_overwrites_and_one_is_frozen(x, dy):
    """Check that each expert parameter decides for itself to overwrite or to accumulate."""
    layer = make_layer(NVFP4, "discrete", fuse_wgrad_accumulation=True)
    give_main_grads(layer)
    layer.weight0.overwrite_main_grad = True
    layer.weight2.requires_grad_(False)
    layer.weight2.main_grad = None
    layer(x, ENDS).backward(dy)
    dw = fp32_wgrad(NVFP4, x, dy)
    assert_same_bytes(layer.weight0.main_grad, dw[0])
    assert_same_bytes(layer.weight1.main_grad, torch.full((N, K), 1.5))
    assert layer.weight2.grad is None and not hasattr(layer.weight2, "grad_added_to_main_grad")


@pytest.mark.parametrize("form", FORMS)
def test_hooks_find_a_gradient_of_zeros(form, x, dy):
    """The weight's gradient is already in main_grad, so ``grad`` is zero."""
    layer = make_layer(NVFP4, form, fuse_wgrad_accumulation=True)
    give_main_grads(layer, form)
    calls, hooked = [], []

    def hook_of(name, p):
        def hook(*_):
            """Check the gradient that the hook of a parameter finds, and drop it."""
            assert p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == p.dtype
            added = getattr(p, "grad_added_to_main_grad", False)
            assert added == name.startswith("weight") and bool(p.grad.any()) != added
            calls.append(name)
            p.grad = None

        return hook

    for name, p in layer.named_parameters():
        p.grad_added_to_main_grad = False
        if p.dim() > 1 or name in ("bias0", "bias2"):  # the second expert has no tokens
            hooked.append(p.expand_as(p).grad_fn.next_functions[0][0])
            hooked[-1].register_hook(hook_of(name, p))
    before = main_grads(layer).clone()
    for _ in range(2):
        layer(x, ENDS).backward(dy)
    assert len(calls) == 2 * len(hooked) and not torch.equal(main_grads(layer), before)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda p: None, RuntimeError, r" is missing: fuse_wgrad_accumulation.*shape \(S"),
        (lambda p: torch.zeros(2), ValueError, r" does not fit.*shape \(S.*got shape \(2,\)"),
        (
            lambda p: torch.zeros(p.shape, dtype=torch.float16),
            TypeError,
            " has.*dtype torch.bfloat16 or torch.f.*16",
        ),
        (
            lambda p: torch.zeros(p.shape[::-1]).permute(*reversed(range(p.dim()))),
            ValueError,
            " does not fit: .*contiguous.*with strides",
        ),
        (
            lambda p: torch.zeros(p.shape, device="meta"),
            ValueError,
            " does not fit: .* on cpu; got.* on meta",
        ),
        (
            lambda p: grouped.quantize(torch.zeros(GROUPS, N, K), WEIGHT_FORMAT),
            TypeError,
            " has the wrong type.*got GroupedTensor",
        ),
    ],
)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("single", [True, False])
def test_an_invalid_main_grad_raises(single, delay, make, error, match, x, dy):
    """Check that an invalid ``main_grad`` raises."""
    layer = make_layer(
        NVFP4, "single" if single else "discrete", fuse_wgrad_accumulation=True, delay_wgrad=delay
    )
    give_main_grads(layer)
    name = "weight" if single else "weight1"
    parameter = getattr(layer, name)
    parameter.main_grad = make(parameter)
    y = layer(x, ENDS)
    match = f"{name}.main_grad{match}".replace("(S", "(3, 96, 64" if single else "(96, 64")
    counter = OpCounter()
    if delay:
        y.backward(dy)
    with counter, pytest.raises(error, match=match):
        layer.backward_dw() if delay else y.backward(dy)
    assert not {name for name in counter.counts if "group" in name}
    if delay:  # The delayed gradients are still there.
        give_main_grads(layer)
        layer.backward_dw()
        assert (main_grads(layer) != 1.5).any()


def test_main_grad_of_a_quantized_parameter(x, dy):
    """Check ``main_grad`` of a quantized parameter."""
    layer = make_layer(NVFP4, fuse_wgrad_accumulation=True)
    layer.weight = nn.Parameter(grouped.quantize(layer.weight, WEIGHT_FORMAT, columnwise=True))
    give_main_grads(layer)
    layer(x, ENDS).backward(dy)
    assert_same_bytes(main_grads(layer), fp32_wgrad(NVFP4, x, dy) + 1.5)
    assert not layer.weight.grad.any() and type(layer.weight.grad) is torch.Tensor


def gradients(layer):
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()
    }


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(("name", "form"), [*RECIPES_AND_FORMS, ("delayed scaling", "single")])
def test_delayed_gradients_are_the_same(name, form, fuse):
    """``backward_dw`` computes the gradients of several batches in order."""
    recipe = ALL_RECIPES.get(name, FP8Delayed(history_length=4))
    delayed, plain = (
        make_layer(recipe, form, fuse_wgrad_accumulation=fuse, delay_wgrad=delay)
        for delay in (True, False)
    )
    for layer in (delayed, plain) if fuse else ():
        give_main_grads(layer, form)
    batches = [(sample(40, K), sample(40, N), ends) for ends in (ENDS, [0, 20, 40], [5, 6, 7])]
    for x, dy, ends in batches:
        leaf = x.clone().requires_grad_()
        delayed(leaf, ends).backward(dy)
        assert leaf.grad.any()
        assert all(grad is None for grad in gradients(delayed).values())
    for x, dy, ends in batches:
        plain(x, ends).backward(dy)
        delayed.backward_dw()
        assert_same_buffers(gradients(delayed), gradients(plain))
        if fuse:
            assert_same_bytes(main_grads(delayed), main_grads(plain))
    assert_same_buffers(delayed.state_dict(), plain.state_dict())
    with pytest.raises(RuntimeError, match="backward_dw has nothing to compute"):
        delayed.backward_dw()


@pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES)
def test_backward_computes_dx_only(recipe, x, dy):
    """Check that a delayed weight gradient is computed in ``backward_dw`` only."""
    layer = make_layer(recipe, delay_wgrad=True)
    y = layer(x.clone().requires_grad_(), torch.tensor(ENDS, dtype=I32))
    with OpCounter() as counter:
        y.backward(dy)
    assert counter.counts["m_grouped_gemm"] == 1 and not counter.counts["k_grouped_gemm"]
    with OpCounter() as counter:
        layer.backward_dw()
    assert counter.counts["k_grouped_gemm"] == 1
    assert not {"m_grouped_gemm", "grouped_quantize"} & set(counter.counts)


@pytest.mark.parametrize("frozen", ["weight", "bias", "x", "weight bias"])
@pytest.mark.parametrize("form", FORMS[:2])
def test_delayed_gradients_with_frozen_parameters(form, frozen, x, dy):
    results = []
    for delay in (True, False):
        # Frozen weights need no main_grad.
        layer = make_layer(
            RECIPES["row-scaled"],
            form,
            delay_wgrad=delay,
            fuse_wgrad_accumulation="weight" in frozen,
        )
        for name, p in layer.named_parameters():
            p.requires_grad_(name.rstrip("012") not in frozen)
        leaf = x.clone().requires_grad_("x" not in frozen)
        layer(leaf, ENDS).backward(dy)
        if delay:
            layer.backward_dw()
        results.append(gradients(layer) | {"x": leaf.grad})
    for name, grad in results[0].items():
        want = results[1][name]
        assert (grad is None) == (want is None) == (name.rstrip("012") in frozen), name
        if grad is not None:
            assert_same_bytes(grad, want, name)


def test_hooks_run_in_backward_dw(x, dy):
    """Check the order in which hooks run in ``backward_dw``."""
    layer = make_layer(NVFP4, delay_wgrad=True)
    assert all(p.skip_backward_post_hook for p in layer.parameters())
    calls = []
    layer.weight.register_hook(lambda grad: calls.append("weight") or grad * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    layer.register_full_backward_hook(lambda *_: calls.append("layer"))
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append("reduce"))
    layer(x.requires_grad_(), ENDS).backward(dy)
    assert calls == ["layer"]
    layer.backward_dw()
    assert calls == ["layer", "weight", "accumulated", "reduce"]
    want = make_layer(NVFP4)
    want(x, ENDS).backward(dy)
    assert_same_bytes(layer.weight.grad, 2 * want.weight.grad)


def test_delayed_gradients_under_activation_checkpointing(x, dy):
    plain = make_layer(NVFP4)
    plain(x, ENDS).backward(dy)
    for reentrant in (True, False):
        layer = make_layer(NVFP4, delay_wgrad=True)
        y = torch.utils.checkpoint.checkpoint(
            layer, x.clone().requires_grad_(), ENDS, use_reentrant=reentrant
        )
        y.backward(dy)
        with torch.no_grad():
            layer.backward_dw()
        assert_same_bytes(layer.weight.grad, plain.weight.grad)


def test_backward_dw_needs_the_option():
    with pytest.raises(RuntimeError, match="made with delay_wgrad=True"):
        make_layer(RECIPES["bf16"]).backward_dw()


def test_backward_dw_of_a_frozen_layer_does_nothing(x, dy):
    layer = make_layer(RECIPES["bf16"], delay_wgrad=True).requires_grad_(False)
    layer(x.requires_grad_(), ENDS).backward(dy)
    layer.backward_dw()


@each_copy
def test_copies_have_no_delayed_gradients(copied, x, dy):
    """Check that copies of a layer have no pending gradients."""
    layer = make_layer(NVFP4, delay_wgrad=True)
    layer(x, ENDS).backward(dy)
    with pytest.raises(RuntimeError, match="nothing to compute"):
        copied(layer).backward_dw()
    layer.backward_dw()


OPTIONS = ({"fuse_wgrad_accumulation": True}, {"delay_wgrad": True})
OPTION_NAMES = ("fused", "delayed")


@pytest.mark.compile
@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_NAMES)
def test_compiled_layers_break_the_graph(options, x, dy, fresh_dynamo):
    """Check that compiled layers with delayed or fused gradients match eager ones."""
    recipe, offs = NVFP4, torch.tensor(ENDS)
    layer, eager = make_layer(recipe, **options), make_layer(recipe, **options)
    for module in (layer, eager):
        give_main_grads(module)
        run = torch.compile(module, backend="aot_eager") if module is layer else module
        leaf = x.clone().requires_grad_()
        run(leaf, offs).backward(dy)
        if "delay_wgrad" in options:
            module.backward_dw()
    assert_same_bytes(layer.weight.grad, eager.weight.grad)
    assert_same_bytes(main_grads(layer), main_grads(eager))


@pytest.mark.compile
@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_NAMES)
def test_one_graph_exports_and_transforms_raise(options, x, fresh_dynamo):
    """Check that full graphs, exports and transforms of such layers raise."""
    layer, offs = make_layer(NVFP4, **options), torch.tensor(ENDS)
    give_main_grads(layer)
    message = "trains in eager mode only"
    with pytest.raises(Exception, match=message):
        compile_full_graph(layer)(x, offs)
    for strict in (True, False):
        with pytest.raises(Exception, match=message):
            torch.export.export(layer, (x, offs), strict=strict)
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(lambda x: layer(x, offs).sum())(x)


@pytest.mark.compile
@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_NAMES)
def test_one_graph_without_gradients_of_parameters(options, x, dy, fresh_dynamo):
    """Check that such layers compile to one graph without parameter gradients."""
    layer, offs = make_layer(NVFP4, **options), torch.tensor(ENDS)
    eager, graph = make_layer(NVFP4, **options), compile_full_graph(layer)
    with torch.no_grad():
        assert_same_bytes(graph(x, offs), eager(x, offs))
    layer.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    graph(leaf, offs).backward(dy)
    assert leaf.grad.any()


@pytest.mark.parametrize("single", [True, False])
def test_a_step_without_delayed_gradients_warns(single, x, dy, recwarn):
    """Only an optimizer with these parameters warns, and only while gradients are delayed."""
    layer = make_layer(RECIPES["bf16"], "single" if single else "discrete", delay_wgrad=True)
    unrelated = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([unrelated, *layer.parameters()], lr=0.1)
    unrelated_optimizer = torch.optim.SGD([unrelated], lr=0.1)
    unrelated.grad = torch.ones(2)
    optimizer.step()
    layer(x, ENDS).backward(dy)
    layer(x, ENDS).backward(dy)
    unrelated_optimizer.step()
    assert not recwarn.list
    count = 2 if single else 2 * GROUPS
    with pytest.warns(
        UserWarning, match=rf"SGD.step\(\) without the gradients of {count} parameters.*backward_dw"
    ):
        optimizer.step()
    assert layer.weight.grad is None if single else layer.weight0.grad is None
    layer.backward_dw()
    with pytest.warns(UserWarning, match="backward_dw"):
        optimizer.step()
    layer.backward_dw()
    recwarn.clear()
    optimizer.step()
    assert not recwarn.list


def test_a_copied_layer_warns_for_its_own_gradients(x, dy, recwarn):
    """Check that a copied layer warns of its own pending gradients only."""
    layer = make_layer(RECIPES["bf16"], delay_wgrad=True)
    layer(x, ENDS).backward(dy)
    again = copy.deepcopy(layer)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    optimizer.step()
    assert not recwarn.list
    again(x, ENDS).backward(dy)
    with pytest.warns(UserWarning, match="backward_dw"):
        optimizer.step()
