"""``grouped.prepare`` of layers of ``grouped.nn``."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import grouped
from cute_kernels import UnsupportedError, backend
from grouped import GroupedTensor, recipes
from grouped.nn import GroupedLinear, GroupedMLP, MoE
from grouped.parallel.expert_parallel import ExpertParallel
from tests.helpers import BF16, F32, assert_same_bytes, contains_all, sample

from .cases import OpCounter, weights_quantized

SQUARE = grouped.FP8Block(block=(128, 128))
RECIPES = {name: getattr(recipes, name)() for name in recipes.NAMES if name != "BF16"}
#: Recipe and format of weights, None for the recipe's.
PAIRS = {
    **{name: (recipe, None) for name, recipe in RECIPES.items()},
    "W4A16": (recipes.BF16(), grouped.NVFP4()),
    "W8A16": (recipes.BF16(), SQUARE),
    "W4A8": (recipes.FP8Block(), grouped.NVFP4()),
}
each_pair = pytest.mark.parametrize(("recipe", "fmt"), PAIRS.values(), ids=PAIRS)


def moe_of(recipe=None, dtype=BF16, **options):
    torch.manual_seed(0)
    return MoE(
        64,
        32,
        num_experts=4,
        top_k=2,
        shared_intermediate_size=32,
        recipe=recipe,
        dtype=dtype,
        **options,
    )


def weights_of(model):
    return [m.weight for m in model.modules() if isinstance(m, GroupedLinear)]


def all_plain(model):
    return not any(isinstance(p, GroupedTensor) for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "FP8Delayed"])
def test_a_prepared_layer_has_the_bits_of_the_plain_one_and_quantizes_no_weight(name):
    model, x = moe_of(RECIPES[name]).eval(), sample(20, 64)
    with torch.no_grad():
        want = model(x)
        assert grouped.prepare(model) == 2
        weights = weights_of(model)
        assert all(
            isinstance(w, GroupedTensor) and not w.requires_grad and w.columnwise is None
            for w in weights
        )
        assert grouped.prepare(model) == 2 and weights_of(model) == weights
        with OpCounter() as counter:
            assert_same_bytes(model(x), want)
    assert weights_quantized(counter) == 0


@each_pair
def test_quantized_weights_train_by_our_optimizer(recipe, fmt):
    """Check that prepared weights train with fp32 masters."""
    model, x, masters = moe_of(recipe), sample(20, 64), {}
    plain = [w.detach().clone() for w in weights_of(model)]
    assert grouped.prepare(model, fmt, trainable=True, masters=masters) == 2
    weights = weights_of(model)
    assert (
        all(torch.equal(masters[w], p) for w, p in zip(weights, plain, strict=True))
        and len(masters) == 4
    )
    optimizer = grouped.optim.AdamW(model.parameters(), lr=1e-2, masters=masters)
    losses = []
    for _ in range(8):
        loss = (model(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for w in weights:
        want = grouped.quantize(optimizer.state[w]["master"], w.format, columnwise=True)
        assert all(map(torch.equal, w.rowwise, want.rowwise))


@each_pair
def test_gradients_pass_frozen_experts_with_a_columnwise_copy(recipe, fmt):
    """Check that gradients of x pass frozen experts that have a columnwise copy."""
    model = moe_of(recipe).eval()
    copied = copy.deepcopy(model)
    grouped.prepare(model, fmt, columnwise=True)
    grouped.prepare(copied, fmt, trainable=True)
    gradients, rows = [], sample(20, 64)
    for m in (model, copied):
        x = rows.clone().requires_grad_()
        m(x).float().square().sum().backward()
        gradients.append(x.grad)
    assert_same_bytes(*gradients)
    assert all(w.grad is None and not w.requires_grad for w in weights_of(model))


def test_advice_where_frozen_weights_have_no_columnwise_copy():
    """Check that a missing columnwise copy raises an error with advice."""
    model = moe_of(recipes.FP8Block())
    grouped.prepare(model)
    with pytest.raises(
        RuntimeError, match="grouped.prepare or grouped.quantize with columnwise=True"
    ):
        model(sample(20, 64).requires_grad_())
    with pytest.raises(
        ValueError,
        match=contains_all("experts.gate_up.weight is quantized already", "columnwise=True"),
    ):
        grouped.prepare(model, columnwise=True)


@each_pair
def test_models_in_fp32_run(recipe, fmt):
    model, x = moe_of(recipe, F32).eval(), sample(20, 64).float()
    with torch.no_grad():
        want = model(x)
        grouped.prepare(model, fmt)
        got = model(x)
    assert got.dtype == F32 and (got - want).norm() < 0.3 * want.norm()


def test_the_recipe_of_each_layer_decides():
    """Check that each layer is prepared with the format of its own recipe."""
    model = nn.ModuleList(
        [
            GroupedMLP(2, 64, 32, recipe=recipes.FP8Block()),
            GroupedLinear(2, 64, 32),
            GroupedLinear(2, 64, 32),
        ]
    )
    model[2].recipe = recipes.MXFP8()
    assert grouped.prepare(model) == 2
    assert [getattr(w, "format", None) for w in weights_of(model)] == [
        SQUARE,
        SQUARE,
        None,
        grouped.MXFP8(),
    ]


def test_under_delayed_scaling_none_takes_the_scales_of_now():
    layer, x = GroupedLinear(2, 64, 32, recipe=recipes.FP8Delayed(), dtype=BF16), sample(9, 64)
    with torch.no_grad():
        layer.weight.mul_(1e-4)
        want = layer.weight.float()
        grouped.prepare(layer)
        assert (layer.weight.dequantize(F32) - want).norm() < 0.05 * want.norm()
        assert layer(x, [4, 9]).isfinite().all()


def test_the_plain_weights_are_gone():
    """Check that nothing keeps the plain weights alive after ``prepare``."""
    model = moe_of(recipes.FP8Block()).eval()
    with torch.no_grad():
        model(sample(9, 64))  # So that layers keep quantized weights.
    references = [weakref.ref(w) for w in weights_of(model)]
    references += [
        weakref.ref(layer._cached_weight)
        for layer in model.modules()
        if isinstance(layer, GroupedLinear)
    ]
    grouped.prepare(model)
    gc.collect()
    assert not any(ref() is not None for ref in references)


def test_what_frameworks_note_on_a_parameter_stays():
    """Check that attributes that frameworks set on a parameter survive ``prepare``."""
    layer = GroupedLinear(2, 64, 32, recipe=recipes.FP8Block(), delay_wgrad=True, dtype=BF16)
    layer.weight.allreduce = False
    grouped.prepare(layer, trainable=True)
    assert layer.weight.skip_backward_post_hook and layer.weight.allreduce is False
    layer(sample(9, 64), [4, 9]).sum().backward()
    layer.backward_dw()
    assert layer.weight.grad is not None


def test_tied_weights_stay_tied():
    """Check that tied weights stay tied, and that different recipes for them raise."""
    model = nn.ModuleList(
        [GroupedLinear(2, 64, 64, recipe=recipes.FP8Block(), dtype=BF16) for _ in range(2)]
    )
    model[1].weight = model[0].weight
    copied = copy.deepcopy(model)
    assert grouped.prepare(model) == 2 and model[0].weight is model[1].weight
    copied[1].recipe = recipes.MXFP8()
    with pytest.raises(ValueError, match="layers with other recipes share it"):
        grouped.prepare(copied)
    copied[1].recipe, copied.head = copied[0].recipe, nn.ParameterList([copied[0].weight])
    with pytest.raises(
        ValueError, match=r"prepare\(\) cannot replace 0\.weight: other modules share it"
    ):
        grouped.prepare(copied)
    assert all_plain(copied)


@pytest.mark.parametrize("make", [torch.optim.AdamW, grouped.optim.AdamW])
def test_an_optimizer_that_was_made_before_raises(make):
    """Check that an optimizer made before ``prepare`` raises."""
    model = moe_of(recipes.FP8Block())
    optimizer = make(model.parameters())
    grouped.prepare(model, trainable=True)
    with pytest.raises(RuntimeError, match=r"prepare\(\) replaced"):
        optimizer.step()


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda m, mesh: fully_shard(m, mesh=mesh), id="fsdp"),
        pytest.param(lambda m, mesh: parallelize_module(m, mesh, ExpertParallel()), id="ep"),
    ],
)
def test_sharded_models_are_refused_and_prepared_ones_are_sharded(mesh, wrap):
    """Check that ``prepare`` refuses sharded models, and that prepared models can be sharded."""
    model, x = moe_of(recipes.FP8Block()).eval(), sample(20, 64)
    sharded = copy.deepcopy(model)
    wrap(sharded, mesh)
    with torch.no_grad():
        want = sharded(x)
        with pytest.raises(
            ValueError, match=r"prepare\(\) cannot replace experts\.gate_up\.weight"
        ):
            grouped.prepare(sharded)
        assert_same_bytes(sharded(x), want)
        grouped.prepare(model)
        wrap(model, mesh)
        assert_same_bytes(model(x), want)


REFUSED = {
    "no experts": (lambda: nn.Linear(2, 2), {}, ValueError, "Linear has no experts"),
    "no format": (moe_of, {}, ValueError, "does not quantize weights: pass fmt"),
    "a recipe as fmt": (
        moe_of,
        {"fmt": recipes.FP8Block()},
        TypeError,
        "fmt must be a format record",
    ),
    "trainable": (moe_of, {"trainable": 1}, TypeError, "trainable must be a bool"),
    "masters": (moe_of, {"fmt": SQUARE, "masters": {}}, ValueError, "pass trainable=True"),
    "columnwise": (
        moe_of,
        {"fmt": SQUARE, "trainable": True, "columnwise": False},
        ValueError,
        "reads the columnwise",
    ),
    "another kind": (
        lambda: moe_of(recipes.NVFP4()),
        {"fmt": grouped.MXFP8()},
        ValueError,
        contains_all("gate_up.weight", "formats of one kind"),
    ),
    "row-scaled": (
        moe_of,
        {"fmt": grouped.NVFP4(row_scaled=True)},
        ValueError,
        "one global scale per group",
    ),
    "transformed": (
        moe_of,
        {"fmt": grouped.NVFP4(hadamard=True), "trainable": True},
        ValueError,
        "gradient of the input does not read",
    ),
    "apart": (
        lambda: moe_of(recipes.FP8Block(), single_parameter=False),
        {},
        ValueError,
        "single_parameter=True",
    ),
    "meta": (
        lambda: moe_of(recipes.FP8Block(), device="meta"),
        {},
        ValueError,
        "is on the meta device",
    ),
    "width": (
        lambda: GroupedLinear(2, 24, 32),
        {"fmt": grouped.NVFP4()},
        ValueError,
        "K must be a positive multiple",
    ),
}


@pytest.mark.parametrize(("make", "options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(make, options, error, message):
    """Check that ``prepare`` refuses invalid calls and changes no parameter."""
    model = make()
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(error, match=message):
        grouped.prepare(model, **options)
    assert {name: id(p) for name, p in model.named_parameters()} == before


def test_what_the_device_does_not_run():
    with backend("emulated:sm_90a"), pytest.raises(UnsupportedError, match="sm_90a"):
        grouped.prepare(moe_of(recipes.MXFP8()))


def test_another_format_is_refused():
    model = moe_of(recipes.FP8Block())
    grouped.prepare(model)
    with pytest.raises(
        ValueError,
        match="experts.gate_up.weight is already fp8_block:block=128x128, but fmt is nvfp4",
    ):
        grouped.prepare(model, grouped.NVFP4())


def test_weights_that_are_quantized_already():
    """As a checkpoint's: they get the order that the GPU reads, and their products are checked."""
    layer = GroupedLinear(2, 64, 64, recipe=recipes.NVFP4(), dtype=BF16)
    layer.weight = nn.Parameter(grouped.quantize(layer.weight.detach(), grouped.NVFP4()))
    weight, values = layer.weight, layer.weight.dequantize()
    for name, prepacked in (("emulated:sm_90a", True), ("reference", False)):
        with backend(name):
            assert grouped.prepare(layer) == grouped.prepare(layer, grouped.NVFP4()) == 1
        assert layer.weight is weight and weight.prepacked is prepacked and not weight.requires_grad
        assert torch.equal(weight.dequantize(), values)
    layer.recipe = recipes.MXFP8()
    assert grouped.prepare(layer) == 1  # W4A8
    layer.weight = nn.Parameter(grouped.quantize(values, grouped.MXFP8()), requires_grad=False)
    layer.recipe = recipes.NVFP4()
    with pytest.raises(
        ValueError,
        match=contains_all(
            r"weight is mxfp8, which NVFP4() does not multiply", "formats of one kind"
        ),
    ):
        grouped.prepare(layer)


@pytest.mark.distributed
def test_prepared_weights_train_sharded_with_their_masters(mesh):
    """``fully_shard`` makes other parameters: the masters follow by name."""
    x, model, masters = sample(20, 64), moe_of(recipes.FP8Block()), {}
    grouped.prepare(model, trainable=True, masters=masters)
    copied = copy.deepcopy(model)
    masters_by_name = {name: masters[p] for name, p in model.named_parameters() if p in masters}
    fully_shard(copied, mesh=mesh)
    results = []
    for m in (model, copied):
        named = {
            p: masters_by_name[name] for name, p in m.named_parameters() if name in masters_by_name
        }
        optimizer = grouped.optim.AdamW(m.parameters(), lr=1e-2, masters=named)
        for _ in range(2):
            m(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            results.append(m(x))
    assert len(masters_by_name) == 4
    assert_same_bytes(*results)
