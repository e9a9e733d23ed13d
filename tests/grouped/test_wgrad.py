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
    each_copy,
    sample,
    whole_graph,
)

from .cases import ALL_RECIPES, RECIPES, WEIGHT_FORMAT, OpCounter

K, N, GROUPS, ENDS = 64, 96, 3, [13, 13, 35]
NVFP4 = RECIPES["nvfp4"]
FORMS = ("single", "discrete", "one buffer")
#: Every recipe, and every form of the parameters.
RECIPES_AND_FORMS = [(name, "single") for name in ALL_RECIPES] + [
    (name, form) for name in ("bf16", "nvfp4", "fp8-block") for form in FORMS[1:]
]


def layer_of(recipe, form="single", **options):
    torch.manual_seed(3)
    options.setdefault("dtype", BF16)
    return GroupedLinear(GROUPS, K, N, recipe=recipe, single_parameter=form == "single", **options)


def weights(layer):
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


def give_main_grads(layer, form="single", dtype=F32, value=1.5):
    """As Megatron does: views of one buffer, or else tensors of their own."""
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
    held = [p.main_grad for p in weights(layer)]
    return held[0] if held[0].dim() == 3 else torch.stack(held)


def fp32_wgrad(recipe, x, dy):
    layer = layer_of(recipe).float()
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
def test_gradients_add_up_in_main_grad(name, form, dtype, x, dy):
    """In fp32 before the one cast; the input's and the bias's are what they always are."""
    recipe = ALL_RECIPES[name]
    layer, plain = layer_of(recipe, form, fuse_wgrad_accumulation=True), layer_of(recipe, form)
    give_main_grads(layer, form, dtype)
    held = [p.main_grad for p in weights(layer)]
    versions = [t._version for t in held]
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
    assert all(p.main_grad is t for p, t in zip(weights(layer), held, strict=True))
    assert all(t._version > v for t, v in zip(held, versions, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["is_first_microbatch", "overwrite_main_grad"])
def test_overwriting(way, form, x, dy):
    recipe = RECIPES["row-scaled"]
    layer = layer_of(recipe, form, fuse_wgrad_accumulation=True)
    give_main_grads(layer, form, value=torch.nan)
    dw = fp32_wgrad(recipe, x, dy)
    for p in weights(layer):
        p.overwrite_main_grad = way == "overwrite_main_grad"
    first = way == "is_first_microbatch" or None
    layer(x, ENDS, is_first_microbatch=first).backward(dy)
    assert_same_bytes(main_grads(layer), dw)
    assert not main_grads(layer)[1].any()
    for p in weights(layer):
        p.overwrite_main_grad = False
    layer(x, ENDS, is_first_microbatch=None if first is None else False).backward(dy)
    assert_same_bytes(main_grads(layer), dw + dw)


def test_one_expert_overwrites_and_one_is_frozen(x, dy):
    layer = layer_of(NVFP4, "discrete", fuse_wgrad_accumulation=True)
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
def test_what_hooks_find(form, x, dy):
    layer = layer_of(NVFP4, form, fuse_wgrad_accumulation=True)
    give_main_grads(layer, form)
    seen, kept = [], []

    def hook_of(name, p):
        def hook(*_):
            assert p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == p.dtype
            added = getattr(p, "grad_added_to_main_grad", False)
            assert added == name.startswith("weight") and bool(p.grad.any()) != added
            seen.append(name)
            p.grad = None

        return hook

    for name, p in layer.named_parameters():
        p.grad_added_to_main_grad = False
        if p.dim() > 1 or name in ("bias0", "bias2"):  # the second expert has no tokens
            kept.append(p.expand_as(p).grad_fn.next_functions[0][0])
            kept[-1].register_hook(hook_of(name, p))
    before = main_grads(layer).clone()
    for _ in range(2):
        layer(x, ENDS).backward(dy)
    assert len(seen) == 2 * len(kept) and not torch.equal(main_grads(layer), before)


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
def test_a_main_grad_that_does_not_fit(single, delay, make, error, match, x, dy):
    layer = layer_of(
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
    if delay:  # What waited is there still.
        give_main_grads(layer)
        layer.backward_dw()
        assert (main_grads(layer) != 1.5).any()


def test_a_quantized_parameter(x, dy):
    layer = layer_of(NVFP4, fuse_wgrad_accumulation=True)
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
    recipe = ALL_RECIPES.get(name, FP8Delayed(history_length=4))
    delayed, plain = (
        layer_of(recipe, form, fuse_wgrad_accumulation=fuse, delay_wgrad=delay)
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
    layer = layer_of(recipe, delay_wgrad=True)
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
def test_delayed_beside_frozen_parameters(form, frozen, x, dy):
    results = []
    for delay in (True, False):
        # Frozen weights need no main_grad.
        layer = layer_of(
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


def test_hooks_run_when_the_gradients_are_there(x, dy):
    layer = layer_of(NVFP4, delay_wgrad=True)
    assert all(p.skip_backward_post_hook for p in layer.parameters())
    seen = []
    layer.weight.register_hook(lambda grad: seen.append("weight") or grad * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    layer.register_full_backward_hook(lambda *_: seen.append("layer"))
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append("reduce"))
    layer(x.requires_grad_(), ENDS).backward(dy)
    assert seen == ["layer"]
    layer.backward_dw()
    assert seen == ["layer", "weight", "accumulated", "reduce"]
    want = layer_of(NVFP4)
    want(x, ENDS).backward(dy)
    assert_same_bytes(layer.weight.grad, 2 * want.weight.grad)


def test_delayed_under_activation_checkpointing_and_in_other_grad_modes(x, dy):
    plain = layer_of(NVFP4)
    plain(x, ENDS).backward(dy)
    for reentrant in (True, False):
        layer = layer_of(NVFP4, delay_wgrad=True)
        y = torch.utils.checkpoint.checkpoint(
            layer, x.clone().requires_grad_(), ENDS, use_reentrant=reentrant
        )
        y.backward(dy)
        with torch.no_grad():
            layer.backward_dw()
        assert_same_bytes(layer.weight.grad, plain.weight.grad)


def test_without_the_option_and_without_parameters_to_train(x, dy):
    with pytest.raises(RuntimeError, match="made with delay_wgrad=True"):
        layer_of(RECIPES["bf16"]).backward_dw()
    layer = layer_of(RECIPES["bf16"], delay_wgrad=True).requires_grad_(False)
    layer(x.requires_grad_(), ENDS).backward(dy)
    layer.backward_dw()


@each_copy
def test_copies_wait_for_nothing(copied, x, dy):
    layer = layer_of(NVFP4, delay_wgrad=True)
    layer(x, ENDS).backward(dy)
    with pytest.raises(RuntimeError, match="nothing to compute"):
        copied(layer).backward_dw()
    layer.backward_dw()


@pytest.mark.parametrize("options", [{"fuse_wgrad_accumulation": True}, {"delay_wgrad": True}])
def test_compiled_and_transformed(options, x, dy, fresh_dynamo):
    """A graph breaks at such a layer; who wants one graph, or a transform, hears of it."""
    recipe, offs = NVFP4, torch.tensor(ENDS)
    layer, eager = layer_of(recipe, **options), layer_of(recipe, **options)
    for module in (layer, eager):
        give_main_grads(module)
        run = torch.compile(module, backend="aot_eager") if module is layer else module
        leaf = x.clone().requires_grad_()
        run(leaf, offs).backward(dy)
        if "delay_wgrad" in options:
            module.backward_dw()
    assert_same_bytes(layer.weight.grad, eager.weight.grad)
    assert_same_bytes(main_grads(layer), main_grads(eager))

    message = "trains in eager mode only"
    torch._dynamo.reset()
    whole = whole_graph(layer)
    with pytest.raises(Exception, match=message):
        whole(x, offs)
    for strict in (True, False):
        with pytest.raises(Exception, match=message):
            torch.export.export(layer, (x, offs), strict=strict)
    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(lambda x: layer(x, offs).sum())(x)
    # Nothing is lost where nobody asks for gradients of parameters.
    with torch.no_grad():
        assert_same_bytes(whole(x, offs), eager(x, offs))
    layer.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    whole(leaf, offs).backward(dy)
    assert leaf.grad.any()


@pytest.mark.parametrize("single", [True, False])
def test_a_step_without_delayed_gradients_warns(single, x, dy, recwarn):
    """Of parameters that the optimizer has, and only as long as gradients wait."""
    layer = layer_of(RECIPES["bf16"], "single" if single else "discrete", delay_wgrad=True)
    other = nn.Parameter(torch.zeros(2))
    both, alone = (torch.optim.SGD(ps, lr=0.1) for ps in ([other, *layer.parameters()], [other]))
    other.grad = torch.ones(2)
    both.step()
    layer(x, ENDS).backward(dy)
    layer(x, ENDS).backward(dy)
    alone.step()
    assert not recwarn.list
    count = 2 if single else 2 * GROUPS
    with pytest.warns(
        UserWarning, match=rf"SGD.step\(\) without the gradients of {count} parameters.*backward_dw"
    ):
        both.step()
    assert layer.weight.grad is None if single else layer.weight0.grad is None
    layer.backward_dw()
    with pytest.warns(UserWarning, match="backward_dw"):
        both.step()
    layer.backward_dw()
    recwarn.clear()
    both.step()
    assert not recwarn.list


def test_a_copy_of_a_layer_with_delayed_gradients_warns_of_its_own(x, dy, recwarn):
    layer = layer_of(RECIPES["bf16"], delay_wgrad=True)
    layer(x, ENDS).backward(dy)
    again = copy.deepcopy(layer)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    optimizer.step()
    assert not recwarn.list
    again(x, ENDS).backward(dy)
    with pytest.warns(UserWarning, match="backward_dw"):
        optimizer.step()
