"""Layers with delayed scaling, against quantize, grouped_gemm and a scalar rule of the update."""

import copy
import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import grouped
from grouped import recipes
from grouped.nn import DelayedScaling, GroupedLinear, GroupedMLP, MoE
from grouped.recipes import ROLES
from tests.helpers import (
    BF16,
    F16,
    F32,
    I32,
    assert_all_same,
    assert_same_buffers,
    assert_same_bytes,
    compile_full_graph,
    forward_backward,
    sample,
    save_and_load,
)
from tests.ops.test_delayed_update import apply_oracle

G, K, N = 3, 64, 48
RECIPE = recipes.FP8Delayed(history_length=4)
OFFS = torch.tensor([13, 13, 35], dtype=I32)  # an empty group, and a tail
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def make_layer(recipe=RECIPE, **options):
    """Return a bf16 layer with the same weights at each call."""
    torch.manual_seed(1)
    return GroupedLinear(G, K, N, recipe=recipe, dtype=BF16, **options)


def step_data(steps):
    """Return inputs and gradients of ``steps`` steps, of very different magnitudes."""
    torch.manual_seed(2)
    factors = (2.0 ** torch.randint(-5, 6, (steps, 2)).float()).tolist()
    return [(sample(40, K) * a, sample(40, N) * b) for a, b in factors]


def run(module, x, dy, function=None):
    return forward_backward(module, x, dy, OFFS, function=function)


def with_data():
    return make_layer(), *step_data(1)[0]


def trained():
    """Return a layer after three steps, and the data of the steps."""
    layer, data = make_layer(), step_data(3)
    for x, dy in data:
        run(layer, x, dy)
    return layer, data


def state_of(module):
    return {k: v.clone() for k, v in module.state_dict().items() if "scaling" in k}


def assert_same_state(got, want):
    a, b = state_of(got), state_of(want)
    assert a.keys() == b.keys() and a
    assert_same_buffers(a, b)


class ComposedLayer:
    """The layer composed of quantize, grouped_gemm, and the scalar rule of the update."""

    def __init__(self, recipe):
        self.recipe = recipe
        self.history = {role: torch.zeros(recipe.history_length, G) for role in ROLES}
        self.scale = {
            role: torch.full((G,), float(recipe.initial_scale == "one")) for role in ROLES
        }

    def update(self):
        recipe = self.recipe
        for role in ROLES:
            self.history[role], self.scale[role] = apply_oracle(
                self.history[role],
                self.scale[role],
                getattr(recipe, role).dtype,
                margin=recipe.margin,
                algorithm=recipe.algorithm,
            )

    def quantize(self, role, x, offs=None):
        """Quantize x with the scale of its role and record the amaxes of its groups."""
        fmt, scale = getattr(self.recipe, role), self.scale[role]
        amaxes = [
            torch.cat([m.flatten().float().abs(), torch.zeros(1)]).max()
            for m in self.members(x, offs)
        ]
        current = [
            torch.tensor(torch.finfo(fmt.dtype).max) / amax if amax else torch.ones(())
            for amax in amaxes
        ]
        # A scale of 0 marks a group that has not started.
        scale = torch.where(scale == 0, torch.stack(current), scale)
        q = grouped.quantize(x, fmt, offs=offs, columnwise=True, scale=scale)
        for g, amax in enumerate(amaxes):
            self.history[role][0, g] = max(self.history[role][0, g], amax)
        return q

    def members(self, x, offs):
        return x.unbind() if offs is None else self.split(x, offs)

    @staticmethod
    def split(x, offs):
        ends = offs.tolist()
        return [x[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def step(self, w, bias, x, dy, offs, is_first_microbatch=True):
        """Return the output and the gradients of x, weight and bias."""
        if is_first_microbatch:
            self.update()
        xq, wq = self.quantize("input", x, offs), self.quantize("weight", w)
        y = grouped.grouped_gemm(xq, wq, bias=bias, out_dtype=x.dtype)
        dyq = self.quantize("grad_output", dy, offs)
        dx = grouped.grouped_gemm(dyq, wq, transpose_b=True, out_dtype=x.dtype)
        dw = grouped.grouped_gemm(dyq, xq, out_dtype=w.dtype)
        db = torch.ops.cute_kernels.grouped_dbias(dy, offs).to(bias.dtype)
        return y, dx, dw, db

    def assert_state_of(self, layer):
        for role in ROLES:
            assert_same_bytes(layer.scaling.scale(role), self.scale[role], role)
            assert_same_bytes(layer.scaling.amax_history(role), self.history[role], role)


def stacked(tensors, single):
    """Return copies of weights and biases, each as one tensor."""
    copies = [t.detach().clone() for t in tensors]
    return copies if single else (torch.stack(copies[:G]), torch.stack(copies[G:]))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("single", [True, False])
def test_training_is_the_composition(single, algorithm):
    """Two of the steps have several microbatches."""
    is_first = (True, False, False, True, True, False, True, True)
    recipe = recipes.FP8Delayed(history_length=3, margin=1, algorithm=algorithm)
    layer = make_layer(recipe, single_parameter=single)
    composed = ComposedLayer(recipe)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for i, (x, dy) in enumerate(step_data(8)):
        if is_first[i]:
            optimizer.step()
        offs = torch.tensor([[13, 13, 35], [5, 20, 40], [0, 0, 40]][i % 3], dtype=I32)
        w, b = stacked(layer.parameters(), single)
        y, dx, *grads = forward_backward(layer, x, dy, offs, is_first_microbatch=is_first[i])
        want = composed.step(w, b, x, dy, offs, is_first[i])
        assert_all_same((y, dx, *stacked(grads, single)), want)
        composed.assert_state_of(layer)
    # By now the scales follow the amaxes.
    for role in ROLES:
        assert (layer.scaling.scale(role) != 1).sum() >= 2


def test_no_grad_and_eval_leave_the_state():
    """Check that ``no_grad`` and ``eval`` leave the delayed scaling state unchanged."""
    layer, [*_, (x, dy)] = trained()
    before = state_of(layer)
    with torch.no_grad():
        y = layer(x, OFFS)
    layer.eval()
    assert_same_bytes(layer(x, OFFS).detach(), y)
    run(layer, x, dy)
    with torch.inference_mode():
        assert_same_bytes(layer(x, OFFS).clone(), y)
    assert_same_buffers(state_of(layer), before)


def test_no_grad_quantizes_with_the_scales_of_the_state():
    """Check that a call under ``no_grad`` quantizes with the scales of the state."""
    layer, [*_, (x, _)] = trained()
    with torch.no_grad():
        y = layer(x, OFFS)
    scale = layer.scaling
    xq = grouped.quantize(x, RECIPE.input, offs=OFFS, scale=scale.scale("input"))
    wq = grouped.quantize(layer.weight, RECIPE.weight, scale=scale.scale("weight"))
    assert_same_bytes(y, grouped.grouped_gemm(xq, wq, bias=layer.bias.detach(), out_dtype=x.dtype))


def test_a_backward_pass_has_the_scale_of_its_forward():
    """Check that a backward pass uses the scale of its forward pass, despite a later update."""
    layer, data = trained()
    want = run(copy.deepcopy(layer), *data[0])
    leaf = data[0][0].clone().requires_grad_()
    y = layer(leaf, OFFS)
    layer(data[1][0], OFFS)  # another step, which updates the scales; no amax is new
    layer.scaling.grad_output_scale.mul_(64)
    y.backward(data[0][1])
    assert_same_bytes(leaf.grad, want[1])


def has_amax(layer, role):
    return bool(layer.scaling.amax_history(role)[0, 0] > 0)


def test_a_call_without_its_backward_pass_records_no_amax():
    layer, x, _ = with_data()
    layer(x, OFFS)
    assert not any(layer.scaling.amax_history(role).any() for role in ROLES)


def test_a_frozen_layer_records_amaxes_in_its_forward_pass():
    """Check that a frozen layer records the amaxes of input and weight, but not of the gradient."""
    layer, x, _ = with_data()
    layer.requires_grad_(False)
    layer(x, OFFS)
    assert has_amax(layer, "input") and has_amax(layer, "weight")
    assert not layer.scaling.amax_history("grad_output").any()


def test_a_frozen_layer_with_a_gradient_of_x_records_all_amaxes():
    """Check that a frozen layer records all amaxes if x requires a gradient."""
    layer, x, dy = with_data()
    layer.requires_grad_(False)
    layer(x.clone().requires_grad_(), OFFS).backward(dy)
    assert all(has_amax(layer, role) for role in ROLES)


def test_a_gradient_of_the_bias_alone_records_no_amax_of_the_output_gradient():
    """The gradient of the output is not quantized then."""
    layer, x, dy = with_data()
    layer.requires_grad_(False)
    layer.bias.requires_grad_(True)
    layer(x, OFFS).backward(dy)
    assert has_amax(layer, "input") and has_amax(layer, "weight")
    assert not layer.scaling.amax_history("grad_output").any()


def test_weights_cached_in_eval_follow_their_scale():
    """Check that a weight cached in ``eval`` is quantized again if its scale changes."""
    layer, [*_, (x, dy)] = trained()
    layer.eval()
    with torch.no_grad():
        y = layer(x, OFFS)
        cached = layer._cached_weight
        layer(x, OFFS)
        assert layer._cached_weight is cached
        layer.scaling.weight_scale.mul_(0.3)
        rescaled = layer(x, OFFS)
        assert layer._cached_weight is not cached
        assert_same_bytes(copy.deepcopy(layer)(x, OFFS), rescaled)
    assert not torch.equal(y, rescaled)


def test_a_quantized_weight_has_its_own_scales():
    """Check that a quantized weight keeps its own scales and records no amax."""
    layer, x, dy = with_data()
    scale = torch.tensor([100.0, 200.0, 300.0])
    q = grouped.quantize(layer.weight, RECIPE.weight, columnwise=True, scale=scale)
    layer.weight = nn.Parameter(q)
    for _ in range(2):
        y = layer(x.clone().requires_grad_(), OFFS)
        y.backward(dy)
    assert layer.weight.rowwise.scale.tolist() == scale.tolist()
    assert not layer.scaling.amax_history("weight").any()
    assert layer.scaling.scale("input")[0] != 1
    with torch.no_grad():
        layer.weight.add_(layer.weight.grad, alpha=-1e-4)
    assert layer.weight.rowwise.scale.tolist() == scale.tolist()


def test_delayed_scaling_update_of_a_quantized_weight():
    """Check that ``delayed_scaling_update`` takes the amax of a quantized weight."""
    layer = make_layer()
    scale = torch.tensor([100.0, 200.0, 300.0])
    q = grouped.quantize(layer.weight, RECIPE.weight, columnwise=True, scale=scale)
    layer.weight = nn.Parameter(q)
    history = torch.zeros(4, G)
    with torch.no_grad():
        grouped.delayed_scaling_update(
            history, layer.weight.rowwise.scale, RECIPE.weight, amax=layer.weight.amax
        )
    assert_same_bytes(layer.weight.rowwise.scale, torch.full((G,), 448.0).div_(layer.weight.amax))


class Block(nn.Module):
    """Two layers under activation checkpointing, if ``recompute``; compiled inside of it or not."""

    def __init__(self, recompute, is_compiled=False):
        super().__init__()
        torch.manual_seed(1)
        self.up = GroupedLinear(G, K, N, recipe=RECIPE, dtype=BF16)
        self.down = GroupedLinear(G, N, N, recipe=RECIPE, dtype=BF16)
        self.recompute = recompute
        self.layers = compile_full_graph(self.run_layers) if is_compiled else self.run_layers

    def run_layers(self, x, offs):
        return self.down(self.up(x, offs).relu(), offs)

    def forward(self, x, offs):
        if self.recompute:
            return checkpoint(self.layers, x, offs, use_reentrant=False)
        return self.layers(x, offs)


@pytest.mark.parametrize("compiled", ["nothing", "inside", "outside"])
def test_recomputation_changes_nothing(compiled):
    plain, recomputing = Block(False), Block(True, compiled == "inside")
    function = compile_full_graph(recomputing) if compiled == "outside" else recomputing
    for x, dy in step_data(4):
        assert_all_same(run(recomputing, x, dy, function), run(plain, x, dy))
        assert_same_state(recomputing, plain)


def test_reentrant_recomputation_raises():
    layer, x, dy = with_data()
    y = checkpoint(layer, x.clone().requires_grad_(), OFFS, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        y.backward(dy)


def test_state_is_copied_saved_and_loaded():
    """Check that copies and both parameter layouts exchange the state."""
    layer, data = trained()
    discrete = make_layer(single_parameter=False)
    discrete.load_state_dict(layer.state_dict())
    loaded = make_layer()
    loaded.load_state_dict(discrete.state_dict())
    twins = [copy.deepcopy(layer), save_and_load(layer, weights_only=False), loaded]
    for twin in (*twins, discrete):
        assert_same_state(twin, layer)
    want = run(layer, *data[0])
    for twin in twins:
        assert_all_same(run(twin, *data[0]), want)
        assert_same_state(twin, layer)
    assert state_of(discrete)["scaling.input_amax_history"][0].any()


def test_state_dict_keys_and_shapes():
    """Check the names and shapes of the state in ``state_dict``."""
    layer = make_layer()
    keys = {k: tuple(v.shape) for k, v in state_of(layer).items()}
    assert keys == {
        **{f"scaling.{role}_scale": (G,) for role in ROLES},
        **{f"scaling.{role}_amax_history": (4, G) for role in ROLES},
    }
    assert not any("scaling" in k for k in make_layer(recipes.BF16()).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*scaling.input_scale"):
        layer.load_state_dict(make_layer(recipes.BF16()).state_dict())


def test_casts_leave_the_state_in_fp32():
    """Check that casting a layer leaves the state in fp32."""
    layer, _ = trained()
    before = state_of(layer)
    layer.half()
    assert layer.weight.dtype == F16
    assert_same_buffers(state_of(layer), before)


def test_reset_parameters_resets_the_state_of_a_layer_that_was_on_meta():
    """Check that ``reset_parameters`` resets the state after ``to_empty``."""
    layer, _ = trained()
    layer.to("meta")
    assert all(t.is_meta and t.dtype == F32 for t in layer.scaling.buffers())
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert_same_buffers(state_of(layer), state_of(make_layer()))


def test_reset_returns_to_the_initial_state():
    layer, _ = trained()
    layer.scaling.reset()
    assert_same_buffers(state_of(layer), state_of(make_layer()))


def test_the_functional_form_takes_the_state():
    """Compare ``grouped.linear`` with a scaling state to the module."""
    layer, data = make_layer(), step_data(3)
    scaling = DelayedScaling(RECIPE, G)
    weight, bias = (p.detach().clone().requires_grad_() for p in layer.parameters())
    for x, dy in data:
        want = run(layer, x, dy)
        leaf = x.clone().requires_grad_()
        scaling.update()
        y = grouped.linear(leaf, weight, bias, OFFS, RECIPE, scaling=scaling)
        y.backward(dy)
        assert_all_same((y.detach(), leaf.grad, weight.grad, bias.grad), want)
        weight.grad = bias.grad = None
        assert_same_buffers(scaling.state_dict(), layer.scaling.state_dict())


def test_the_functional_form_checks_its_state():
    x, w = sample(40, K), sample(G, N, K)
    for recipe, scaling, message in (
        (RECIPE, None, "pass a grouped.nn.DelayedScaling"),
        (recipes.BF16(), DelayedScaling(RECIPE, G), "scaling is for recipes with delayed scaling"),
        (RECIPE, DelayedScaling(RECIPE, 2), "scaling was made for 2 groups"),
        (RECIPE, DelayedScaling(recipes.FP8Delayed(), G), "scaling was made for 3 groups"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped.linear(x, w, None, OFFS, recipe, scaling=scaling)


def test_delayed_scaling_checks_its_arguments():
    with pytest.raises(TypeError, match="must be a grouped.recipes.FP8Delayed"):
        DelayedScaling(recipes.BF16(), G)
    with pytest.raises(ValueError, match="num_groups must be positive"):
        DelayedScaling(RECIPE, 0)


def test_a_layer_made_with_another_recipe_has_no_state():
    layer, x = make_layer(recipes.BF16()), sample(40, K)
    layer.recipe = RECIPE
    with pytest.raises(RuntimeError, match="create the layer with this recipe"):
        layer(x, OFFS)


def test_transforms_take_an_evaluated_layer():
    """Check that ``torch.func`` works in ``eval`` and is refused in training."""
    layer, x, dy = with_data()
    for _ in range(2):
        run(layer, x, dy)
    layer.eval()
    want = run(layer, x, dy)[1]

    def loss(x):
        return (layer(x, OFFS).float() * dy.float()).sum()

    before = state_of(layer)
    assert_same_bytes(torch.func.grad(loss)(x), want)
    assert_same_buffers(state_of(layer), before)
    layer.train()
    with pytest.raises(RuntimeError, match=r"call eval\(\) on the layer"):
        torch.func.grad(loss)(x)
    assert_same_buffers(state_of(layer), before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_inputs_reach_the_output_and_no_scale(value):
    """Check that NaN and infinity reach the output, and that the scales stay finite."""
    layer, (x, dy) = make_layer(recipes.FP8Delayed(history_length=4)), step_data(1)[0]
    finite = x.clone()
    finite[20, 3] = 0
    x[20, 3] = value
    for _ in range(2):
        y, dx, dw, _ = run(layer, x, dy)
        assert y[20].isnan().all() and y[:13].isfinite().all() and y[35:].isfinite().all()
        assert dw[2, :, 3].isnan().all() and dw[0].isfinite().all() and dx.isfinite().all()
    # An infinite amax makes the step not count for its group; the amax ignores NaN.
    amax = finite[13:35].float().abs().max() if value != value else 0
    assert layer.scaling.amax_history("input")[-1][2] == amax
    assert (layer.scaling.scale("input")[2] == 0) == (amax == 0)


@pytest.mark.parametrize("recipe", [recipes.BF16(), recipes.FP8Current(), recipes.NVFP4()])
def test_the_state_is_unchanged_under_another_recipe(recipe):
    """Check that another recipe leaves the state of delayed scaling unchanged."""
    layer = GroupedLinear(G, K, N, recipe=RECIPE)
    plain = GroupedLinear(G, K, N, recipe=recipe)
    assert plain.load_state_dict(layer.state_dict(), strict=False).missing_keys == []
    x = sample(40, K)
    layer(x, OFFS).sum().backward()
    state = {name: t.clone() for name, t in layer.scaling.state_dict().items()}
    layer.recipe = recipe
    layer.zero_grad()
    y, expected = layer(x, OFFS), plain(x, OFFS)
    assert_same_bytes(y, expected)
    y.sum().backward()
    expected.sum().backward()
    assert_same_bytes(layer.weight.grad, plain.weight.grad)
    assert_same_buffers(layer.scaling.state_dict(), state)
    layer.recipe = RECIPE
    layer(x, OFFS).sum().backward()
    assert not torch.equal(layer.scaling.scale("input"), state["input_scale"])


def first_steps(kind, recipe, data, **options):
    """Run the first steps of a new module.

    Returns:
        The module; its outputs, their gradients of x, and the gradients of all parameters.
    """
    torch.manual_seed(1)
    module = kind(recipe, **options)
    results = []
    for x, dy, arguments, is_first in data:
        leaf = x.clone().requires_grad_()
        y = module(leaf, *arguments, is_first_microbatch=is_first)
        y.backward(dy)
        results += [y.detach(), leaf.grad]
    return module, [*results, *(p.grad for p in module.parameters())]


def make_linear(recipe, **options):
    return GroupedLinear(G, K, K, recipe=recipe, dtype=BF16, **options)


def make_mlp(recipe, **options):
    return GroupedMLP(G, K, 32, recipe=recipe, dtype=BF16, **options)


def make_moe(recipe, **options):
    return MoE(K, 32, 4, 2, recipe=recipe, dtype=BF16, **options)


MODULE_CASES = {
    "linear": (make_linear, {}),
    "mlp": (make_mlp, {}),
    "moe": (make_moe, {}),
    "recompute": (make_moe, {"recompute": True}),
}


def microbatches(kind, count, scale=2.0**-20):
    """Return x, dy, further arguments and ``is_first_microbatch`` of ``count`` microbatches."""
    torch.manual_seed(3)
    arguments = () if kind is make_moe else (OFFS,)
    return [
        (sample(40, K) * scale, sample(40, K) * scale, arguments, None if count == 1 else i == 0)
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", [*MODULE_CASES])
def test_groups_start_with_the_scales_of_their_amaxes(name, count):
    """All microbatches of the first step have the bits of FP8Current."""
    kind, options = MODULE_CASES[name]
    data = microbatches(kind, count)
    _, got = first_steps(kind, RECIPE, data, **options)
    _, want = first_steps(kind, recipes.FP8Current(), data, **options)
    assert_all_same(got, want)


@pytest.mark.parametrize("count", [1, 3])
def test_scales_of_one_underflow_where_scales_of_amaxes_do_not(count):
    """Scales of one are TransformerEngine's start: such small numbers have no code."""
    data = microbatches(make_linear, count)
    _, results = first_steps(make_linear, RECIPE, data)
    recipe = dataclasses.replace(RECIPE, initial_scale="one")
    module, results_of_one = first_steps(make_linear, recipe, data)
    assert all((module.scaling.scale(role) == 1).all() for role in ROLES)
    weight_gradient, weight_gradient_of_one = results[-2], results_of_one[-2]
    assert weight_gradient.any() and not weight_gradient_of_one.any()


def test_a_group_without_rows_starts_later():
    """Its scale is 0 until an update has an amax; the host learns when no scale is 0.

    ``ComposedLayer`` has the numbers.
    """
    layer, data = make_layer(), step_data(3)
    for x, dy in data:
        run(layer, x, dy)  # The second group has no rows.
    has_not_started = [(layer.scaling.scale(role) == 0).tolist() for role in ROLES]
    assert has_not_started == [[False, True, False], [False] * 3, [False, True, False]]
    assert layer.scaling._may_be_zero == [True, False, True]
    for _ in range(2):
        forward_backward(layer, x, dy, torch.tensor([13, 20, 40], dtype=I32))
    assert all((layer.scaling.scale(role) > 0).all() for role in ROLES)
    assert layer.scaling._may_be_zero == [False] * 3
    layer.scaling.reset()
    assert layer.scaling._may_be_zero == [True] * 3


@pytest.mark.parametrize("initial", ["current", "one"])
def test_state_of_another_initial_scale_loads(initial):
    """Groups that have started keep their scales; the others start as the recipe says."""
    recipe, (x, dy) = dataclasses.replace(RECIPE, initial_scale=initial), step_data(1)[0]
    for saved_initial in ("current", "one"):
        source = make_layer(dataclasses.replace(RECIPE, initial_scale=saved_initial))
        fresh = copy.deepcopy(source.state_dict())
        for _ in range(2):
            run(source, x, dy)
        layer = make_layer(recipe)
        layer.load_state_dict(fresh)
        assert all((layer.scaling.scale(role) == (initial == "one")).all() for role in ROLES)
        layer.load_state_dict(source.state_dict())
        for role in ROLES:
            has_started = source.scaling.amax_history(role).any(0)
            assert_same_bytes(
                layer.scaling.scale(role)[has_started], source.scaling.scale(role)[has_started]
            )
            assert (layer.scaling.scale(role)[~has_started] == (initial == "one")).all()


def test_an_overflow_does_not_change_later_scales():
    """Its infinite amaxes are not recorded, so scales follow the next steps.

    With ``propagate_nonfinite=False`` they are recorded, and the scale stays as it was, at 0.
    """
    for propagate in (True, False):
        layer = make_layer(dataclasses.replace(RECIPE, propagate_nonfinite=propagate))
        (x, dy), *data = step_data(3)
        dy[3, 5] = torch.inf
        run(layer, x, dy)
        for x, dy in data:
            run(layer, x, dy)
        layer.scaling.update()
        assert (layer.scaling.scale("grad_output")[0] > 0) == propagate


@pytest.mark.compile
def test_a_compiled_new_layer_has_the_bits_of_eager_mode():
    layer, compiled = make_layer(), make_layer()
    function = compile_full_graph(compiled)
    for x, dy in step_data(3):
        assert_all_same(run(layer, x, dy), run(compiled, x, dy, function))
        compiled.scaling.poll()
        assert_same_state(compiled, layer)


@pytest.mark.parametrize("name", [*MODULE_CASES])
def test_polling_changes_no_bit(name):
    """The host may learn that all groups have started, or may compute current amaxes forever."""
    kind, options = MODULE_CASES[name]
    data = [(x, dy, arguments, None) for x, dy, arguments, _ in microbatches(kind, 4, 1.0)]
    got, results = first_steps(kind, RECIPE, data, **options)
    with mock.patch.object(DelayedScaling, "poll", lambda self: None):
        want, results_without_polling = first_steps(kind, RECIPE, data, **options)
    assert_all_same(results, results_without_polling)
    assert_same_state(got, want)


@pytest.mark.parametrize("initial", ["current", "one"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_amax_of_weighted_activations_counts(recompute, initial):
    """The gradient of W2 multiplies p a: amaxes of its input with p = 4 are 4 times those of 1."""
    recipe, amaxes = dataclasses.replace(RECIPE, initial_scale=initial), []
    for factor in (1.0, 4.0):
        torch.manual_seed(1)
        moe = MoE(
            K,
            32,
            4,
            1,
            recipe=recipe,
            dtype=BF16,
            routed_scaling_factor=factor,
            recompute=recompute,
        )
        torch.manual_seed(2)
        x, dy = sample(40, K), sample(40, K)
        forward_backward(moe, x, dy)
        amaxes.append(moe.experts.down.scaling.amax_history("input")[0].clone())
    assert amaxes[0].all()
    assert_same_bytes(amaxes[1], 4 * amaxes[0])


@pytest.mark.parametrize("name", [*MODULE_CASES])
def test_two_forwards_before_a_backward_keep_their_scales(name):
    """The first call keeps its scales, though the buffers are written before its backward pass."""
    kind, options = MODULE_CASES[name]
    (x, dy, arguments, _), *data = [(*batch[:3], None) for batch in microbatches(kind, 3, 1.0)]
    module, _ = first_steps(kind, RECIPE, data, **options)
    module.zero_grad()
    twin = copy.deepcopy(module)
    leaf, twin_leaf = (x.clone().requires_grad_() for _ in range(2))
    twin(twin_leaf, *arguments).backward(dy)
    y = module(leaf, *arguments)
    for scaling in (m for m in module.modules() if isinstance(m, DelayedScaling)):
        for role in ROLES:
            scaling.scale(role).mul_(0.25)
    module(x, *arguments)
    y.backward(dy)
    assert_same_bytes(leaf.grad, twin_leaf.grad)
    assert_all_same([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])


def test_a_later_microbatch_needs_the_copy_of_the_first():
    """Check that a later microbatch needs the copies that the first one cached."""
    layer, x, dy = with_data()
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="a call with True cached; there is none"):
        layer(x, OFFS, is_first_microbatch=False)
    with torch.no_grad():
        layer(x, OFFS, is_first_microbatch=True)
        want = layer(leaf, OFFS, is_first_microbatch=False)
    # Without a gradient of x no GEMM reads the columnwise copy.
    assert_same_bytes(layer(x, OFFS, is_first_microbatch=False).detach(), want)
    with pytest.raises(RuntimeError, match="needs the columnwise weight for the gradient of x"):
        layer(leaf, OFFS, is_first_microbatch=False)
    layer(leaf, OFFS, is_first_microbatch=True).backward(dy)
    layer(leaf, OFFS, is_first_microbatch=False).backward(dy)
    layer.scaling.update()
    with pytest.raises(RuntimeError, match="Pass True after each step"):
        layer(x, OFFS, is_first_microbatch=False)
