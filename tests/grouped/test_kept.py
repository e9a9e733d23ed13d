import warnings

import pytest
import torch
from torch import nn

from grouped import NVFP4, optim, quantize, recipes
from grouped.nn import GroupedLinear, GroupedMLP
from grouped.nn import cached_weight as kept
from tests.helpers import assert_same_bytes, compile_full_graph, each_copy, offs_tensor, sample

from .cases import RECIPES, OpCounter, weights_quantized

K, N, ENDS = 64, 48, [13, 13, 35]


def layer_of(single=True, recipe=RECIPES["row-scaled"], **options):
    return GroupedLinear(3, K, N, recipe=recipe, single_parameter=single, **options)


def name_of_first(layer):
    return "weight" if layer.single_parameter else "weight2"


def first_weight(layer):
    return getattr(layer, name_of_first(layer))


def step(layer, optimizer=torch.optim.SGD, **options):
    layer(sample(40, K), ENDS).sum().backward()
    optimizer(layer.parameters(), lr=1.0, **options).step()


def in_place(layer, mode=torch.no_grad):
    with mode():
        first_weight(layer).mul_(2)


def data(layer):
    first_weight(layer).data = first_weight(layer).data * 2


def on_the_same_storage(layer):
    """A parameter whose version is that of the old one, written through it."""
    old = first_weight(layer).detach()
    parameter = nn.Parameter(old.data)
    with torch.no_grad():
        while parameter._version < old._version:
            parameter.mul_(2)
        parameter.mul_(2)
    setattr(layer, name_of_first(layer), parameter)


WRITTEN, OTHER_DATA, OTHER = (
    "written in place",
    r"its data is another tensor \(\.data",
    "it is another tensor",
)
CHANGES = {
    "step": (step, WRITTEN),
    # PyTorch counts no version.
    "fused step": (lambda layer: step(layer, torch.optim.AdamW, fused=True), WRITTEN),
    "step of ours": (lambda layer: step(layer, optim.AdamW), WRITTEN),
    "in place": (in_place, WRITTEN),
    "in inference mode": (lambda layer: in_place(layer, torch.inference_mode), WRITTEN),
    "data": (data, OTHER_DATA),
    "data again": (lambda layer: [data(layer), data(layer)], OTHER_DATA),
    "parameter": (
        lambda layer: setattr(layer, name_of_first(layer), nn.Parameter(first_weight(layer) * 2)),
        OTHER,
    ),
    "parameter on the same storage": (on_the_same_storage, OTHER),
    "recipe": (
        lambda layer: setattr(layer, "recipe", recipes.Recipe(*[RECIPES["nvfp4"].input] * 3)),
        "the recipe is Recipe.*and was NVFP4RowScaled",
    ),
}
changes = pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)


@pytest.mark.parametrize("single", [True, False])
@changes
def test_a_changed_weight_is_not_used(change, message, single):
    layer = layer_of(single)
    x = sample(40, K)
    step(layer)
    layer(x, ENDS, is_first_microbatch=True)
    layer(x, ENDS, is_first_microbatch=False)
    change(layer)
    with pytest.raises(RuntimeError, match=f"the weight changed since: .*{message}"):
        layer(x, ENDS, is_first_microbatch=False)
    fresh = layer(x, ENDS, is_first_microbatch=True).detach()
    assert_same_bytes(fresh, layer(x, ENDS).detach())
    assert_same_bytes(fresh, layer(x, ENDS, is_first_microbatch=False).detach())


@pytest.mark.parametrize("single", [True, False])
@changes
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_inference_keeps_a_weight_until_it_changes(grad_mode, change, message, single):
    layer = layer_of(single).eval()
    x = sample(40, K)

    def run():
        with grad_mode(), OpCounter() as counter:
            ys = [layer(x, torch.tensor(ENDS)) for _ in range(3)]
        assert weights_quantized(counter) == 1
        for y in ys[1:]:
            assert_same_bytes(ys[0], y)
        return ys[0].clone()

    before = run()
    change(layer)
    after = run()
    assert not torch.equal(before, after)
    layer.train()
    with torch.no_grad():
        assert_same_bytes(layer(x, ENDS), after)


def test_what_is_kept_in_inference_holds_only_what_it_reads():
    mlp = GroupedMLP(3, K, N, recipe=RECIPES["nvfp4"]).eval()
    x = sample(40, K)
    with torch.no_grad(), OpCounter() as counter:
        for _ in range(3):
            mlp(x, ENDS)
    assert weights_quantized(counter) == 2
    assert not mlp.down._kept.has_columnwise
    kept = mlp.down._kept
    leaf = x.clone().requires_grad_()
    mlp(leaf, ENDS).sum().backward()  # gradients quantize for themselves
    assert leaf.grad.any() and mlp.down._kept is kept


def test_separate_parameters_are_not_stacked_for_a_kept_weight():
    layer = layer_of(single=False).eval()
    x = sample(40, K)
    with torch.no_grad():
        want = layer(x, ENDS)
        with OpCounter() as counter:
            assert_same_bytes(layer(x, ENDS), want)
    assert [a[0][0].shape for a in counter.arguments("stack")] == [(N,)]  # biases


@pytest.mark.parametrize(
    ("mode", "grad_mode"), [("train", torch.no_grad), ("eval", torch.enable_grad)]
)
def test_training_keeps_nothing_by_itself(mode, grad_mode):
    layer = getattr(layer_of(), mode)()
    with grad_mode(), OpCounter() as counter:
        for _ in range(2):
            layer(sample(40, K), torch.tensor(ENDS))
    assert weights_quantized(counter) == 2 and layer._kept is None


def test_a_change_of_mode_drops_a_kept_weight():
    """Writes through ``.data`` count no version; people who make them change the mode after."""
    layer, x = layer_of().eval(), sample(40, K)
    with torch.no_grad():
        layer(x, ENDS)
        layer.weight.data.mul_(2)
        layer.eval()
        got = layer(x, ENDS)
    assert_same_bytes(got, layer.train()(x, ENDS).detach())


@pytest.mark.parametrize("first", [None, True, False])
def test_weights_without_versions_are_not_kept(first):
    with torch.inference_mode():
        layer, x = layer_of().eval(), sample(40, K)
        before = layer(x, ENDS, is_first_microbatch=first)
        layer.weight.mul_(2)
        assert layer._kept is None and not torch.equal(
            before, layer(x, ENDS, is_first_microbatch=first)
        )


@pytest.mark.parametrize("first", [None, True])
def test_a_swapped_weight_is_another(first):
    """``torch.utils.swap_tensors`` takes a weight of which a quantized copy is kept, and the copy
    is not used.
    """
    layers, x = [layer_of().eval(), layer_of().eval()], sample(40, K)
    with torch.no_grad():
        layers[1].weight.mul_(2)
        wants = [layer(x, ENDS, is_first_microbatch=first) for layer in reversed(layers)]
        assert all(layer._kept is not None for layer in layers)
        for pair in zip(*(layer.parameters() for layer in layers), strict=True):
            torch.utils.swap_tensors(*pair)
        if first:
            with pytest.raises(RuntimeError, match="the weight changed since"):
                layers[0](x, ENDS, is_first_microbatch=False)
        for layer, want in zip(layers, wants, strict=True):
            assert_same_bytes(layer(x, ENDS, is_first_microbatch=first), want)


@each_copy
@pytest.mark.parametrize("first", [None, True])
def test_copies_have_their_own(copied, first):
    layer, x = layer_of().eval(), sample(40, K)
    with torch.no_grad():
        layer(x, ENDS, is_first_microbatch=first)
        other = copied(layer)
        assert layer._kept is not None and other._kept is None
        other.weight = nn.Parameter(other.weight * 2)
        assert not torch.equal(other(x, ENDS), layer(x, ENDS))


@pytest.mark.compile
@pytest.mark.parametrize("first", [None, True, False])
def test_compiled_calls_see_every_change(first, fresh_dynamo):
    layer, x, offs = layer_of().eval(), sample(40, K), offs_tensor(*ENDS)
    run = compile_full_graph(layer)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        layer(x, offs, is_first_microbatch=True)
        for name in ("in place", "data", "in inference mode", None):
            if name:
                CHANGES[name][0](layer)
            assert_same_bytes(
                run(x, offs, is_first_microbatch=first), layer(x, offs, is_first_microbatch=True)
            )


def test_traces_and_transforms_keep_nothing():
    layer, x, offs = layer_of().eval(), sample(40, K), offs_tensor(*ENDS)
    with torch.no_grad():
        graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: layer(x, offs))(x)
        assert layer._kept is None
        in_place(layer)
        want = layer(x, offs)
    layer._kept = None
    for first in (None, True):
        torch.func.grad(lambda x, f=first: layer(x, offs, is_first_microbatch=f).sum())(x)
        assert layer._kept is None
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        layer(x, offs)
    assert layer._kept is None
    with torch.no_grad():
        assert_same_bytes(graph(x), want)


def test_a_captured_call_that_quantizes_a_weight_warns_once(monkeypatch):
    """Each replay would quantize again: 3 times the time of a layer whose weights were prepared."""
    monkeypatch.setattr(kept, "is_captured", lambda weight: True)
    layers, x = [layer_of().eval() for _ in range(2)], sample(40, K)
    kept._warn_of_captured_quantization.cache_clear()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for layer in layers:
            layer(x, ENDS)
            assert layer._kept is None
        layers[0].weight = nn.Parameter(
            quantize(layers[0].weight.detach(), NVFP4()), requires_grad=False
        )
        layers[0](x, ENDS)
    assert ["grouped.prepare(model)" in str(w.message) for w in caught] == [True]


@pytest.mark.parametrize("case", ["training", "gradients", "bf16", "quantized"])
def test_other_captured_calls_do_not_warn(case, monkeypatch):
    monkeypatch.setattr(kept, "is_captured", lambda weight: True)
    layer = layer_of(recipe=RECIPES["bf16"] if case == "bf16" else RECIPES["row-scaled"]).train(
        case == "training"
    )
    if case == "quantized":
        layer.weight = nn.Parameter(quantize(layer.weight.detach(), NVFP4()), requires_grad=False)
    kept._warn_of_captured_quantization.cache_clear()
    with warnings.catch_warnings(), torch.set_grad_enabled(case == "gradients"):
        warnings.simplefilter("error")
        layer(sample(40, K), ENDS)
