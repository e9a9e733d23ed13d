"""The quantized copy of a weight that a layer caches between calls, and when it is dropped."""

import warnings

import pytest
import torch
from torch import nn

from grouped import NVFP4, optim, quantize, recipes
from grouped.nn import GroupedLinear, GroupedMLP, cached_weight
from tests.helpers import assert_same_bytes, compile_full_graph, each_copy, offs_tensor, sample

from .cases import RECIPES, OpCounter, weights_quantized

K, N, ENDS = 64, 48, [13, 13, 35]


def make_layer(single=True, recipe=RECIPES["row-scaled"], **options):
    return GroupedLinear(3, K, N, recipe=recipe, single_parameter=single, **options)


def weight_name(layer):
    return "weight" if layer.single_parameter else "weight2"


def weight_of(layer):
    return getattr(layer, weight_name(layer))


def step(layer, optimizer=torch.optim.SGD, **options):
    layer(sample(40, K), ENDS).sum().backward()
    optimizer(layer.parameters(), lr=1.0, **options).step()


def scale_in_place(layer, mode=torch.no_grad):
    with mode():
        weight_of(layer).mul_(2)


def replace_data(layer):
    weight_of(layer).data = weight_of(layer).data * 2


def replace_on_the_same_storage(layer):
    """Replace the weight by a parameter on its storage, whose version is not smaller."""
    old = weight_of(layer).detach()
    parameter = nn.Parameter(old.data)
    with torch.no_grad():
        while parameter._version < old._version:
            parameter.mul_(2)
        parameter.mul_(2)
    setattr(layer, weight_name(layer), parameter)


WRITTEN, DATA_REPLACED, REPLACED = (
    "written in place",
    r"its data is another tensor \(\.data",
    "it is another tensor",
)
CHANGES = {
    "step": (step, WRITTEN),
    # PyTorch does not count this write as a version.
    "fused step": (lambda layer: step(layer, torch.optim.AdamW, fused=True), WRITTEN),
    "step of grouped.optim": (lambda layer: step(layer, optim.AdamW), WRITTEN),
    "in place": (scale_in_place, WRITTEN),
    "in inference mode": (lambda layer: scale_in_place(layer, torch.inference_mode), WRITTEN),
    "data": (replace_data, DATA_REPLACED),
    "data twice": (lambda layer: [replace_data(layer), replace_data(layer)], DATA_REPLACED),
    "parameter": (
        lambda layer: setattr(layer, weight_name(layer), nn.Parameter(weight_of(layer) * 2)),
        REPLACED,
    ),
    "parameter on the same storage": (replace_on_the_same_storage, REPLACED),
    "recipe": (
        lambda layer: setattr(layer, "recipe", recipes.Recipe(*[RECIPES["nvfp4"].input] * 3)),
        "the recipe is Recipe.*and was NVFP4RowScaled",
    ),
}
changes = pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)


@pytest.mark.parametrize("single", [True, False])
@changes
def test_a_changed_weight_is_not_used(change, message, single):
    """Check that later microbatches refuse a cached weight if the weight has changed."""
    layer = make_layer(single)
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
def test_inference_caches_a_weight_until_it_changes(grad_mode, change, message, single):
    """Check that inference quantizes a weight once, and again after a change."""
    layer = make_layer(single).eval()
    x = sample(40, K)

    def run():
        """Return the output of three calls, in which the weight is quantized once."""
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


def test_inference_caches_only_the_rowwise_copy():
    """Check that inference caches no columnwise copy, and that training does not use its cache."""
    mlp = GroupedMLP(3, K, N, recipe=RECIPES["nvfp4"]).eval()
    x = sample(40, K)
    with torch.no_grad(), OpCounter() as counter:
        for _ in range(3):
            mlp(x, ENDS)
    assert weights_quantized(counter) == 2
    assert not mlp.down._cached_weight.has_columnwise
    cached = mlp.down._cached_weight
    leaf = x.clone().requires_grad_()
    mlp(leaf, ENDS).sum().backward()  # gradients quantize for themselves
    assert leaf.grad.any() and mlp.down._cached_weight is cached


def test_separate_parameters_are_not_stacked_for_a_cached_weight():
    """Check that separate parameters are not stacked again once their weight is cached."""
    layer = make_layer(single=False).eval()
    x = sample(40, K)
    with torch.no_grad():
        want = layer(x, ENDS)
        with OpCounter() as counter:
            assert_same_bytes(layer(x, ENDS), want)
    assert [a[0][0].shape for a in counter.arguments("stack")] == [(N,)]  # biases


@pytest.mark.parametrize(
    ("mode", "grad_mode"), [("train", torch.no_grad), ("eval", torch.enable_grad)]
)
def test_training_caches_nothing_by_itself(mode, grad_mode):
    layer = getattr(make_layer(), mode)()
    with grad_mode(), OpCounter() as counter:
        for _ in range(2):
            layer(sample(40, K), torch.tensor(ENDS))
    assert weights_quantized(counter) == 2 and layer._cached_weight is None


def test_a_change_of_mode_drops_a_cached_weight():
    """Writes through ``.data`` count no version; users change the mode after them."""
    layer, x = make_layer().eval(), sample(40, K)
    with torch.no_grad():
        layer(x, ENDS)
        layer.weight.data.mul_(2)
        layer.eval()
        got = layer(x, ENDS)
    assert_same_bytes(got, layer.train()(x, ENDS).detach())


@pytest.mark.parametrize("is_first", [None, True, False])
def test_weights_without_versions_are_not_cached(is_first):
    with torch.inference_mode():
        layer, x = make_layer().eval(), sample(40, K)
        before = layer(x, ENDS, is_first_microbatch=is_first)
        layer.weight.mul_(2)
        assert layer._cached_weight is None and not torch.equal(
            before, layer(x, ENDS, is_first_microbatch=is_first)
        )


@pytest.mark.parametrize("is_first", [None, True])
def test_swapped_weights_are_not_used(is_first):
    """``torch.utils.swap_tensors`` swaps weights; the cached copies are not used for the others."""
    layers, x = [make_layer().eval(), make_layer().eval()], sample(40, K)
    with torch.no_grad():
        layers[1].weight.mul_(2)
        wants = [layer(x, ENDS, is_first_microbatch=is_first) for layer in reversed(layers)]
        assert all(layer._cached_weight is not None for layer in layers)
        for pair in zip(*(layer.parameters() for layer in layers), strict=True):
            torch.utils.swap_tensors(*pair)
        if is_first:
            with pytest.raises(RuntimeError, match="the weight changed since"):
                layers[0](x, ENDS, is_first_microbatch=False)
        for layer, want in zip(layers, wants, strict=True):
            assert_same_bytes(layer(x, ENDS, is_first_microbatch=is_first), want)


@each_copy
@pytest.mark.parametrize("is_first", [None, True])
def test_copies_of_layers_have_their_own_cache(copied, is_first):
    layer, x = make_layer().eval(), sample(40, K)
    with torch.no_grad():
        layer(x, ENDS, is_first_microbatch=is_first)
        copy = copied(layer)
        assert layer._cached_weight is not None and copy._cached_weight is None
        copy.weight = nn.Parameter(copy.weight * 2)
        assert not torch.equal(copy(x, ENDS), layer(x, ENDS))


@pytest.mark.compile
@pytest.mark.parametrize("is_first", [None, True, False])
def test_compiled_calls_see_every_change(is_first, fresh_dynamo):
    layer, x, offs = make_layer().eval(), sample(40, K), offs_tensor(*ENDS)
    run = compile_full_graph(layer)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        layer(x, offs, is_first_microbatch=True)
        for name in ("in place", "data", "in inference mode", None):
            if name:
                CHANGES[name][0](layer)
            assert_same_bytes(
                run(x, offs, is_first_microbatch=is_first), layer(x, offs, is_first_microbatch=True)
            )


def test_traces_and_transforms_cache_nothing():
    """Check that traces and functional transforms leave no cached weight."""
    layer, x, offs = make_layer().eval(), sample(40, K), offs_tensor(*ENDS)
    with torch.no_grad():
        graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: layer(x, offs))(x)
        assert layer._cached_weight is None
        scale_in_place(layer)
        want = layer(x, offs)
    layer._cached_weight = None
    for is_first in (None, True):
        torch.func.grad(lambda x, f=is_first: layer(x, offs, is_first_microbatch=f).sum())(x)
        assert layer._cached_weight is None
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        layer(x, offs)
    assert layer._cached_weight is None
    with torch.no_grad():
        assert_same_bytes(graph(x), want)


def test_a_captured_call_that_quantizes_a_weight_warns_once(monkeypatch):
    """Each replay would quantize again, which takes 3 times as long as with a prepared weight."""
    monkeypatch.setattr(cached_weight, "is_captured", lambda weight: True)
    layers, x = [make_layer().eval() for _ in range(2)], sample(40, K)
    cached_weight._warn_of_captured_quantization.cache_clear()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for layer in layers:
            layer(x, ENDS)
            assert layer._cached_weight is None
        layers[0].weight = nn.Parameter(
            quantize(layers[0].weight.detach(), NVFP4()), requires_grad=False
        )
        layers[0](x, ENDS)
    assert ["grouped.prepare(model)" in str(w.message) for w in caught] == [True]


@pytest.mark.parametrize("case", ["training", "gradients", "bf16", "quantized"])
def test_other_captured_calls_do_not_warn(case, monkeypatch):
    """Check that captured calls that quantize no weight for inference give no warning."""
    monkeypatch.setattr(cached_weight, "is_captured", lambda weight: True)
    layer = make_layer(recipe=RECIPES["bf16"] if case == "bf16" else RECIPES["row-scaled"]).train(
        case == "training"
    )
    if case == "quantized":
        layer.weight = nn.Parameter(quantize(layer.weight.detach(), NVFP4()), requires_grad=False)
    cached_weight._warn_of_captured_quantization.cache_clear()
    with warnings.catch_warnings(), torch.set_grad_enabled(case == "gradients"):
        warnings.simplefilter("error")
        layer(sample(40, K), ENDS)
