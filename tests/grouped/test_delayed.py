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
    sample,
    saved,
    step,
    whole_graph,
)
from tests.ops.test_delayed_update import by_column

G, K, N = 3, 64, 48
RECIPE = recipes.FP8Delayed(history_length=4)
OFFS = torch.tensor([13, 13, 35], dtype=I32)  # an empty group, and a tail
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def layer_of(recipe=RECIPE, **options):
    torch.manual_seed(1)
    return GroupedLinear(G, K, N, recipe=recipe, dtype=BF16, **options)


def step_data(steps):
    torch.manual_seed(2)
    factors = (2.0 ** torch.randint(-5, 6, (steps, 2)).float()).tolist()
    return [(sample(40, K) * a, sample(40, N) * b) for a, b in factors]


def run(module, x, dy, function=None):
    return step(module, x, dy, OFFS, function=function)


def with_data():
    return layer_of(), *step_data(1)[0]


def trained():
    layer, data = layer_of(), step_data(3)
    for x, dy in data:
        run(layer, x, dy)
    return layer, data


def state_of(module):
    return {k: v.clone() for k, v in module.state_dict().items() if "scaling" in k}


def assert_same_state(got, want):
    a, b = state_of(got), state_of(want)
    assert a.keys() == b.keys() and a
    assert_same_buffers(a, b)


class ByHand:
    """The layer from its parts: quantize, grouped_gemm, and the scalar rule of the update."""

    def __init__(self, recipe):
        self.recipe = recipe
        self.history = {r: torch.zeros(recipe.history_length, G) for r in ROLES}
        self.scale = {r: torch.full((G,), float(recipe.initial_scale == "one")) for r in ROLES}

    def update(self):
        r = self.recipe
        for role in ROLES:
            self.history[role], self.scale[role] = by_column(
                self.history[role],
                self.scale[role],
                getattr(r, role).dtype,
                margin=r.margin,
                algorithm=r.algorithm,
            )

    def quantize(self, role, x, offs=None):
        fmt, scale = getattr(self.recipe, role), self.scale[role]
        amaxes = [
            torch.cat([m.flatten().float().abs(), torch.zeros(1)]).max()
            for m in self.members(x, offs)
        ]
        current = [
            torch.tensor(torch.finfo(fmt.dtype).max) / amax if amax else torch.ones(())
            for amax in amaxes
        ]
        # Of groups that have not begun.
        scale = torch.where(scale == 0, torch.stack(current), scale)
        q = grouped.quantize(x, fmt, offs=offs, columnwise=True, scale=scale)
        for g, seen in enumerate(amaxes):
            self.history[role][0, g] = max(self.history[role][0, g], seen)
        return q

    def members(self, x, offs):
        return x.unbind() if offs is None else self.split(x, offs)

    @staticmethod
    def split(x, offs):
        ends = offs.tolist()
        return [x[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def step(self, w, bias, x, dy, offs, first=True):
        if first:
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
    held = [t.detach().clone() for t in tensors]
    return held if single else (torch.stack(held[:G]), torch.stack(held[G:]))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("single", [True, False])
def test_training_is_the_composition_by_hand(single, algorithm):
    """Two of the steps are of several microbatches."""
    firsts = (True, False, False, True, True, False, True, True)
    recipe = recipes.FP8Delayed(history_length=3, margin=1, algorithm=algorithm)
    layer = layer_of(recipe, single_parameter=single)
    hand = ByHand(recipe)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for i, (x, dy) in enumerate(step_data(8)):
        if firsts[i]:
            optimizer.step()
        offs = torch.tensor([[13, 13, 35], [5, 20, 40], [0, 0, 40]][i % 3], dtype=I32)
        w, b = stacked(layer.parameters(), single)
        y, dx, *grads = step(layer, x, dy, offs, is_first_microbatch=firsts[i])
        assert_all_same((y, dx, *stacked(grads, single)), hand.step(w, b, x, dy, offs, firsts[i]))
        hand.assert_state_of(layer)
    # By now the scales follow what was seen.
    for role in ROLES:
        assert (layer.scaling.scale(role) != 1).sum() >= 2


def test_no_gradients_and_eval_change_nothing_and_use_the_scales():
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
    scale = layer.scaling
    xq = grouped.quantize(x, RECIPE.input, offs=OFFS, scale=scale.scale("input"))
    wq = grouped.quantize(layer.weight, RECIPE.weight, scale=scale.scale("weight"))
    assert_same_bytes(y, grouped.grouped_gemm(xq, wq, bias=layer.bias.detach(), out_dtype=x.dtype))


def test_a_backward_pass_has_the_scale_of_its_forward():
    layer, data = trained()
    want = run(copy.deepcopy(layer), *data[0])
    leaf = data[0][0].clone().requires_grad_()
    y = layer(leaf, OFFS)
    layer(data[1][0], OFFS)  # a step of its own: nothing new was seen
    layer.scaling.grad_output_scale.mul_(64)
    y.backward(data[0][1])
    assert_same_bytes(leaf.grad, want[1])


def test_a_call_without_a_backward_pass_is_not_seen_but_one_that_needs_none_is():
    layer, x, dy = with_data()
    layer(x, OFFS)
    assert not any(layer.scaling.amax_history(role).any() for role in ROLES)
    layer.requires_grad_(False)
    layer(x, OFFS)
    for role in ROLES[:2]:
        assert layer.scaling.amax_history(role)[0, 0] > 0
    assert not layer.scaling.amax_history("grad_output").any()
    layer.scaling.reset()
    # Frozen weights below something that trains: the gradient of x alone.
    leaf = x.clone().requires_grad_()
    layer(leaf, OFFS).backward(dy)
    assert all(layer.scaling.amax_history(role)[0, 0] > 0 for role in ROLES)
    # A bias alone: the gradient of the output is not quantized, and has no amax.
    layer.scaling.reset()
    layer.bias.requires_grad_(True)
    layer(x, OFFS).backward(dy)
    assert all(layer.scaling.amax_history(role)[0, 0] > 0 for role in ROLES[:2])
    assert not layer.scaling.amax_history("grad_output").any()


def test_weights_kept_in_eval_follow_their_scale():
    layer, [*_, (x, dy)] = trained()
    layer.eval()
    with torch.no_grad():
        y = layer(x, OFFS)
        kept = layer._kept
        layer(x, OFFS)
        assert layer._kept is kept
        layer.scaling.weight_scale.mul_(0.3)
        other = layer(x, OFFS)
        assert layer._kept is not kept
        assert_same_bytes(copy.deepcopy(layer)(x, OFFS), other)
    assert not torch.equal(y, other)


def test_a_weight_that_is_quantized_already_has_its_own_scales():
    layer, x, dy = with_data()
    scale = torch.tensor([100.0, 200.0, 300.0])
    held = grouped.quantize(layer.weight, RECIPE.weight, columnwise=True, scale=scale)
    layer.weight = nn.Parameter(held)
    for _ in range(2):
        y = layer(x.clone().requires_grad_(), OFFS)
        y.backward(dy)
    assert layer.weight.rowwise.scale.tolist() == scale.tolist()
    assert not layer.scaling.amax_history("weight").any()
    assert layer.scaling.scale("input")[0] != 1
    with torch.no_grad():
        layer.weight.add_(layer.weight.grad, alpha=-1e-4)
    assert layer.weight.rowwise.scale.tolist() == scale.tolist()
    # Its next scales, by the same function.
    history = torch.zeros(4, G)
    with torch.no_grad():
        grouped.delayed_scaling_update(
            history, layer.weight.rowwise.scale, RECIPE.weight, amax=layer.weight.amax
        )
    assert_same_bytes(layer.weight.rowwise.scale, torch.full((G,), 448.0).div_(layer.weight.amax))


class Block(nn.Module):
    def __init__(self, again, compiled=False):
        super().__init__()
        torch.manual_seed(1)
        options = {"recipe": RECIPE, "dtype": BF16}
        self.up = GroupedLinear(G, K, N, **options)
        self.down = GroupedLinear(G, N, N, **options)
        self.again = again
        self.inner = self.both
        if compiled:
            self.inner = whole_graph(self.both)

    def both(self, x, offs, first=None):
        return self.down(
            self.up(x, offs, is_first_microbatch=first).relu(), offs, is_first_microbatch=first
        )

    def forward(self, x, offs, first=None):
        return (
            checkpoint(self.inner, x, offs, first, use_reentrant=False)
            if self.again
            else self.inner(x, offs, first)
        )


@pytest.mark.parametrize("compiled", ["nothing", "inside", "outside"])
def test_recomputation_changes_nothing(compiled):
    plain, again = Block(False), Block(True, compiled == "inside")
    function = again
    if compiled == "outside":
        function = whole_graph(again)
    for x, dy in step_data(4):
        assert_all_same(run(again, x, dy, function), run(plain, x, dy))
        assert_same_state(again, plain)


def test_reentrant_recomputation_raises():
    layer, x, dy = with_data()
    y = checkpoint(layer, x.clone().requires_grad_(), OFFS, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        y.backward(dy)


def test_state_is_copied_saved_and_loaded():
    layer, data = trained()
    discrete = layer_of(single_parameter=False)
    discrete.load_state_dict(layer.state_dict())
    other = layer_of()
    other.load_state_dict(discrete.state_dict())
    twins = [copy.deepcopy(layer), saved(layer, weights_only=False), other]
    for twin in (*twins, discrete):
        assert_same_state(twin, layer)
    want = run(layer, *data[0])
    for twin in twins:
        assert_all_same(run(twin, *data[0]), want)
        assert_same_state(twin, layer)
    assert state_of(discrete)["scaling.input_amax_history"][0].any()


def test_state_dict_keys_and_shapes():
    layer = layer_of()
    keys = {k: tuple(v.shape) for k, v in state_of(layer).items()}
    assert keys == {
        **{f"scaling.{role}_scale": (G,) for role in ROLES},
        **{f"scaling.{role}_amax_history": (4, G) for role in ROLES},
    }
    assert not any("scaling" in k for k in layer_of(recipes.BF16()).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*scaling.input_scale"):
        layer.load_state_dict(layer_of(recipes.BF16()).state_dict())


def test_casts_leave_the_state_in_fp32():
    layer, x, dy = with_data()
    fresh = state_of(layer)
    for _ in range(2):
        run(layer, x, dy)
    before = state_of(layer)
    layer.half()
    assert layer.weight.dtype == F16
    assert_same_buffers(state_of(layer), before)
    layer.to("meta")
    assert all(t.is_meta and t.dtype == F32 for t in layer.scaling.buffers())
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert_same_buffers(state_of(layer), fresh)
    layer.load_state_dict(before, strict=False)
    layer.scaling.reset()
    assert_same_buffers(state_of(layer), fresh)


def test_the_functional_form_takes_the_state():
    layer, data = layer_of(), step_data(3)
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


def test_the_functional_form_refuses_what_it_cannot_honour():
    x, w = sample(40, K), sample(G, N, K)
    for recipe, scaling, message in (
        (RECIPE, None, "pass a grouped.nn.DelayedScaling"),
        (recipes.BF16(), DelayedScaling(RECIPE, G), "scaling is for recipes with delayed scaling"),
        (RECIPE, DelayedScaling(RECIPE, 2), "scaling was made for 2 groups"),
        (RECIPE, DelayedScaling(recipes.FP8Delayed(), G), "scaling was made for 3 groups"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped.linear(x, w, None, OFFS, recipe, scaling=scaling)
    with pytest.raises(TypeError, match="must be a grouped.recipes.FP8Delayed"):
        DelayedScaling(recipes.BF16(), G)
    with pytest.raises(ValueError, match="num_groups must be positive"):
        DelayedScaling(RECIPE, 0)
    layer = layer_of(recipes.BF16())
    layer.recipe = RECIPE
    with pytest.raises(RuntimeError, match="make it with this recipe"):
        layer(x, OFFS)


def test_transforms_take_an_evaluated_layer():
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
def test_what_is_not_finite_reaches_the_output_and_no_scale(value):
    layer, (x, dy) = layer_of(recipes.FP8Delayed(history_length=4)), step_data(1)[0]
    finite = x.clone()
    finite[20, 3] = 0
    x[20, 3] = value
    for _ in range(2):
        y, dx, dw, _ = run(layer, x, dy)
        assert y[20].isnan().all() and y[:13].isfinite().all() and y[35:].isfinite().all()
        assert dw[2, :, 3].isnan().all() and dw[0].isfinite().all() and dx.isfinite().all()
    # An infinity is the amax of its group, which this step then does not count for; a NaN is passed
    # over.
    seen = finite[13:35].float().abs().max() if value != value else 0
    assert layer.scaling.amax_history("input")[-1][2] == seen and (
        layer.scaling.scale("input")[2] == 0
    ) == (seen == 0)


@pytest.mark.parametrize("other", [recipes.BF16(), recipes.FP8Current(), recipes.NVFP4()])
def test_the_state_rests_under_another_recipe(other):
    layer = GroupedLinear(G, K, N, recipe=RECIPE)
    plain = GroupedLinear(G, K, N, recipe=other)
    assert plain.load_state_dict(layer.state_dict(), strict=False).missing_keys == []
    x = sample(40, K)
    layer(x, OFFS).sum().backward()
    state = {name: t.clone() for name, t in layer.scaling.state_dict().items()}
    layer.recipe = other
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
    """What calls give under ``recipe``, and all gradients, of a module that begins."""
    torch.manual_seed(1)
    module = kind(recipe, **options)
    made = []
    for x, dy, given, is_first in data:
        leaf = x.clone().requires_grad_()
        y = module(leaf, *given, is_first_microbatch=is_first)
        y.backward(dy)
        made += [y.detach(), leaf.grad]
    return module, [*made, *(p.grad for p in module.parameters())]


def a_linear(recipe, **options):
    return GroupedLinear(G, K, K, recipe=recipe, dtype=BF16, **options)


def an_mlp(recipe, **options):
    return GroupedMLP(G, K, 32, recipe=recipe, dtype=BF16, **options)


def a_moe(recipe, **options):
    return MoE(K, 32, 4, 2, recipe=recipe, dtype=BF16, **options)


MODULES = {
    "linear": (a_linear, {}),
    "mlp": (an_mlp, {}),
    "moe": (a_moe, {}),
    "recompute": (a_moe, {"recompute": True}),
}


def microbatches(kind, count, scale=2.0**-20):
    torch.manual_seed(3)
    given = () if kind is a_moe else (OFFS,)
    return [
        (sample(40, K) * scale, sample(40, K) * scale, given, None if count == 1 else i == 0)
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", [*MODULES])
def test_groups_begin_with_the_scales_of_their_current_amaxes(name, count):
    """In all microbatches of the first step, to the bit of FP8Current."""
    kind, options = MODULES[name]
    data = microbatches(kind, count)
    _, got = first_steps(kind, RECIPE, data, **options)
    _, want = first_steps(kind, recipes.FP8Current(), data, **options)
    assert_all_same(got, want)
    if name == "linear":
        # TransformerEngine's way: by ones such small numbers have no code.
        module, by_ones = first_steps(
            kind, dataclasses.replace(RECIPE, initial_scale="one"), data, **options
        )
        assert all((module.scaling.scale(role) == 1).all() for role in ROLES)
        assert not by_ones[-2].any() and got[-2].any()


def test_a_group_without_rows_begins_later():
    """Its scale is 0 until an update has seen it; the host learns when none is.

    ``ByHand`` has the numbers.
    """
    layer, data = layer_of(), step_data(3)
    for x, dy in data:
        run(layer, x, dy)  # The second group has no rows.
    begins = [(layer.scaling.scale(role) == 0).tolist() for role in ROLES]
    assert begins == [[False, True, False], [False] * 3, [False, True, False]]
    assert layer.scaling._may_be_zero == [True, False, True]
    for _ in range(2):
        step(layer, x, dy, torch.tensor([13, 20, 40], dtype=I32))
    assert all((layer.scaling.scale(role) > 0).all() for role in ROLES)
    assert layer.scaling._may_be_zero == [False] * 3
    layer.scaling.reset()
    assert layer.scaling._may_be_zero == [True] * 3


@pytest.mark.parametrize("initial", ["current", "one"])
def test_state_of_another_beginning_loads(initial):
    """Of what has begun everything is kept; what has not begins as the recipe says."""
    recipe, (x, dy) = dataclasses.replace(RECIPE, initial_scale=initial), step_data(1)[0]
    for other in ("current", "one"):
        old = layer_of(dataclasses.replace(RECIPE, initial_scale=other))
        fresh, begun = copy.deepcopy(old.state_dict()), old
        for _ in range(2):
            run(begun, x, dy)
        layer = layer_of(recipe)
        layer.load_state_dict(fresh)
        assert all((layer.scaling.scale(role) == (initial == "one")).all() for role in ROLES)
        layer.load_state_dict(begun.state_dict())
        for role in ROLES:
            has_begun = begun.scaling.amax_history(role).any(0)
            assert_same_bytes(
                layer.scaling.scale(role)[has_begun], begun.scaling.scale(role)[has_begun]
            )
            assert (layer.scaling.scale(role)[~has_begun] == (initial == "one")).all()


def test_a_step_that_overflows_does_not_hold_the_scales():
    """Its infinite amaxes are not recorded, so scales follow those of the next steps; by the option
    they rest.
    """
    for propagate in (True, False):
        layer = layer_of(dataclasses.replace(RECIPE, propagate_nonfinite=propagate))
        (x, dy), *data = step_data(3)
        dy[3, 5] = torch.inf
        run(layer, x, dy)
        for x, dy in data:
            run(layer, x, dy)
        layer.scaling.update()
        assert (layer.scaling.scale("grad_output")[0] > 0) == propagate


def test_what_a_new_layer_has_seen_decides_no_bit_of_a_compiled_one():
    layer, other = layer_of(), layer_of()
    function = whole_graph(other)
    for x, dy in step_data(3):
        assert_all_same(run(layer, x, dy), run(other, x, dy, function))
        other.scaling.poll()
        assert_same_state(other, layer)


@pytest.mark.parametrize("name", [*MODULES])
def test_what_the_host_knows_changes_no_bit(name):
    """Whether it has learnt that all groups have begun, or asks for their amaxes on and on."""
    kind, options = MODULES[name]
    data = [(x, dy, given, None) for x, dy, given, _ in microbatches(kind, 4, 1.0)]
    got, known = first_steps(kind, RECIPE, data, **options)
    with mock.patch.object(DelayedScaling, "poll", lambda self: None):
        want, asking = first_steps(kind, RECIPE, data, **options)
    assert_all_same(known, asking)
    assert_same_state(got, want)


@pytest.mark.parametrize("initial", ["current", "one"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_amax_of_weighted_activations_counts(recompute, initial):
    """The gradient of W2 multiplies p a: with all p 4 the amaxes of its input are 4 times those of
    p = 1.
    """
    recipe, seen = dataclasses.replace(RECIPE, initial_scale=initial), []
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
        step(moe, x, dy)
        seen.append(moe.experts.down.scaling.amax_history("input")[0].clone())
    assert seen[0].all()
    assert_same_bytes(seen[1], 4 * seen[0])


@pytest.mark.parametrize("name", [*MODULES])
def test_two_forwards_before_a_backward_have_scales_of_their_own(name):
    """The first keeps the scales of its call, though the buffers are written before its gradients
    are computed.
    """
    kind, options = MODULES[name]
    (x, dy, given, _), *data = [(*batch[:3], None) for batch in microbatches(kind, 3, 1.0)]
    module, _ = first_steps(kind, RECIPE, data, **options)
    module.zero_grad()
    other = copy.deepcopy(module)
    leaf, alone = (x.clone().requires_grad_() for _ in range(2))
    other(alone, *given).backward(dy)
    y = module(leaf, *given)
    for scaling in (m for m in module.modules() if isinstance(m, DelayedScaling)):
        for role in ROLES:
            scaling.scale(role).mul_(0.25)
    module(x, *given)
    y.backward(dy)
    assert_same_bytes(leaf.grad, alone.grad)
    assert_all_same([p.grad for p in module.parameters()], [p.grad for p in other.parameters()])


def test_a_later_microbatch_needs_the_copy_of_the_first():
    layer, x, dy = with_data()
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="a call with True kept; none was"):
        layer(x, OFFS, is_first_microbatch=False)
    with torch.no_grad():
        layer(x, OFFS, is_first_microbatch=True)
        want = layer(leaf, OFFS, is_first_microbatch=False)
    # Of rows alone no product reads the columnwise copy, which no gradient asked for.
    assert_same_bytes(layer(x, OFFS, is_first_microbatch=False).detach(), want)
    with pytest.raises(RuntimeError, match="needs the columnwise weight for the gradient of x"):
        layer(leaf, OFFS, is_first_microbatch=False)
    layer(leaf, OFFS, is_first_microbatch=True).backward(dy)
    layer(leaf, OFFS, is_first_microbatch=False).backward(dy)
    layer.scaling.update()
    with pytest.raises(RuntimeError, match="Pass True after each step"):
        layer(x, OFFS, is_first_microbatch=False)
