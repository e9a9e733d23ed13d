"""Recipes: the formats of their roles, their options, and the combinations that they refuse."""

import dataclasses
import pickle

import pytest
import torch

import cute_kernels
import grouped
from cute_kernels.capability import support
from grouped import recipes
from grouped.nn import GroupedLinear
from grouped.recipes import Recipe
from tests.helpers import BF16, E4M3, E5M2, forward_backward, sample

from .cases import ALL_RECIPES

NVFP4, MXFP8, FP8Block, FP8 = grouped.NVFP4, grouped.MXFP8, grouped.FP8Block, grouped.FP8
DELAYED = recipes.FP8Delayed
W = NVFP4(block=(16, 16))


def output(recipe):
    """Return output, gradient of x, and gradient of the weight of a step."""
    torch.manual_seed(1)
    layer = GroupedLinear(2, 64, 96, recipe=recipe)
    layer.weight = torch.nn.Parameter(sample(2, 96, 64))
    return forward_backward(layer, sample(40, 64), sample(40, 96), [13, 35])[:3]


def assert_honoured(recipe, plain):
    assert not all(torch.equal(a, b) for a, b in zip(output(recipe), output(plain), strict=True))


@pytest.mark.parametrize(
    "roles", [("input", "grad_output"), ("grad_output",), ("input",), ("weight",)], ids=str
)
@pytest.mark.parametrize("flag", ["hadamard", "stochastic_rounding", "four_over_six", "row_scaled"])
def test_a_flag_is_refused_or_honoured(flag, roles):
    """Check that each format option in a role has an effect or is refused."""
    fmt, formats = NVFP4(**{flag: True}), dict.fromkeys(recipes.ROLES, NVFP4())
    changed = formats | dict.fromkeys(roles, fmt)
    status = support("grouped_quantize", fmt, "reference")
    if not status:
        with pytest.raises(cute_kernels.UnsupportedError, match=rf"{roles[0]} cannot be.*{flag}"):
            Recipe(**changed)
        assert status.reason
    elif flag == "row_scaled" and "weight" in roles:
        with pytest.raises(ValueError, match="one global scale per group"):
            Recipe(**changed)
    elif flag == "hadamard" and len(roles) == 1:
        with pytest.raises(ValueError, match="must be transformed alike"):
            Recipe(**changed)
    else:
        assert_honoured(Recipe(**changed), Recipe(**formats))


def variants(recipe, **options):
    return [(recipe, name, value) for name, value in options.items()]


@pytest.mark.parametrize(
    ("recipe", "name", "value"),
    [
        *variants(recipes.NVFP4, hadamard=True, stochastic_rounding=True),
        *variants(recipes.NVFP4RowScaled, stochastic_rounding=True),
        *variants(recipes.MXFP8, grad_dtype=E5M2, weight_block=(32, 32)),
        *variants(recipes.FP8Block, grad_dtype=E5M2, pow2_scales=False, amax_epsilon=100.0),
        *variants(recipes.FP8Current, grad_dtype=E4M3),
        *variants(recipes.FP8Delayed, grad_dtype=E4M3),
    ],
)
def test_an_option_reaches_the_formats(recipe, name, value):
    """Check that each option of a recipe reaches its formats or is refused."""
    try:
        changed = recipe(**{name: value})
    except cute_kernels.UnsupportedError as error:
        assert name in str(error)
        return
    again = dataclasses.replace(recipe(), **{name: value})
    assert again == changed and again.texts == changed.texts and value in vars(changed).values()
    assert_honoured(changed, recipe())


def test_roles_of_the_named_recipes():
    """Check the formats of each named recipe."""
    assert recipes.BF16().texts == (None, None, None)
    assert recipes.NVFP4().texts == ("nvfp4", "nvfp4:block=16x16", "nvfp4")
    assert recipes.NVFP4RowScaled().texts == ("nvfp4:row_scaled", "nvfp4:block=16x16", "nvfp4")
    nvidia = recipes.NVFP4(hadamard=True, stochastic_rounding=True)
    assert nvidia.texts[::2] == ("nvfp4:hadamard", "nvfp4:hadamard,stochastic_rounding")
    assert recipes.MXFP8().texts == ("mxfp8",) * 3
    assert recipes.FP8Block().texts == ("fp8_block", "fp8_block:block=128x128", "fp8_block")
    assert recipes.FP8Current().texts == ("fp8", "fp8", "fp8:dtype=e5m2")
    delayed = "fp8:scaling=delayed"
    assert recipes.FP8Delayed().texts == (delayed, delayed, "fp8:dtype=e5m2,scaling=delayed")
    defaults = recipes.FP8Delayed()
    assert (defaults.history_length, defaults.margin, defaults.algorithm) == (1024, 0, "max")
    mixed = recipes.MXFP8(weight_block=(32, 32), grad_dtype=E5M2)
    assert mixed.texts == ("mxfp8", "mxfp8:block=32x32", "mxfp8:dtype=e5m2")


@pytest.mark.parametrize("roles", [(FP8Block(), FP8Block(), FP8Block()), (MXFP8(), W, MXFP8())])
def test_supported_products(roles):
    output(Recipe(*roles))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ((FP8Block((128, 128)), FP8Block((128, 128)), FP8Block()), "fprop multiplies"),
        ((FP8Block(), FP8Block((128, 128)), FP8Block((128, 128))), "dgrad multiplies"),
        ((FP8Block((128, 128)), FP8Block(), FP8Block((128, 128))), "wgrad multiplies"),
        ((FP8(), MXFP8(), FP8()), "fprop multiplies input by weight: .*one kind"),
        ((NVFP4(), W, FP8()), "wgrad multiplies grad_output by input: .*one kind"),
        ((FP8(E5M2), FP8(), FP8()), "input must have E4M3 codes, got fp8:dtype=e5m2"),
        ((FP8(), FP8(E5M2), FP8()), "weight must have E4M3 codes, got fp8:dtype=e5m2"),
    ],
)
def test_unsupported_products(roles, message):
    with pytest.raises(ValueError, match=message):
        Recipe(*roles)


@pytest.mark.parametrize(
    ("fmt", "message"),
    [
        *(
            (cls, rf": {cls.__name__}\(\), not {cls.__name__}")
            for cls in (NVFP4, MXFP8, FP8Block, FP8)
        ),
        *((fmt, " such as") for fmt in ("nvfp4", 4, E4M3)),
        (recipes.NVFP4(), ".*: a recipe, which has one"),
    ],
)
def test_formats_must_be_records(fmt, message):
    with pytest.raises(TypeError, match=f"weight must be a format record{message}"):
        Recipe(NVFP4(), fmt, NVFP4())
    with pytest.raises(TypeError, match=f"fmt must be a format record{message}"):
        grouped.quantize(sample(2, 48, 64), fmt)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Recipe(NVFP4(), None, NVFP4()),
            ValueError,
            r"all roles or none; no format for \['weight'\]",
        ),
        (
            lambda: recipes.NVFP4(propagate_nonfinite=1),
            TypeError,
            "propagate_nonfinite must be a bool, got 1",
        ),
        (
            lambda: recipes.FP8Block(E5M2),
            TypeError,
            "float8_e5m2; options have names: grad_dtype, pow2",
        ),
        (lambda: recipes.NVFP4(hadamard=1), TypeError, "hadamard must be a bool, got 1"),
        (lambda: recipes.NVFP4(input=NVFP4()), TypeError, "unexpected keyword argument 'input'"),
        (lambda: recipes.MXFP8(grad_dtype=BF16), ValueError, "dtype must be"),
        (
            lambda: Recipe(*[FP8(scaling="delayed")] * 3),
            ValueError,
            "input .* have a history: use FP8Delayed",
        ),
        (
            lambda: Recipe(FP8(), FP8(), FP8(scaling="delayed")),
            ValueError,
            "grad_output is .* use FP8Delayed",
        ),
        (lambda: DELAYED(history_length=0), ValueError, "history_length must be positive, got 0"),
        (
            lambda: DELAYED(history_length=2.0),
            TypeError,
            "history_length must be an integer, got 2.0",
        ),
        # The format with the larger numbers decides.
        (lambda: DELAYED(margin=-115), ValueError, r"margin must leave 57344.0 \* 2\^-margin"),
        (
            lambda: DELAYED(algorithm="mean"),
            ValueError,
            "algorithm must be max or most_recent, got 'mean'",
        ),
        (lambda: DELAYED(amax_group=3), TypeError, "amax_group must be a torch.distributed group"),
    ],
)
def test_recipes_check_their_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_messages_say_what_differs_from_the_defaults():
    """Check that the text of a recipe shows only differences from the defaults."""
    assert f"{recipes.BF16()} {recipes.NVFP4(hadamard=True)}" == "BF16() NVFP4(hadamard=True)"
    custom = Recipe(NVFP4(), NVFP4(block=(16, 16)), NVFP4(), propagate_nonfinite=False)
    roles = "input=nvfp4, weight=nvfp4:block=16x16, grad_output=nvfp4"
    assert str(custom) == f"Recipe({roles}, propagate_nonfinite=False)"


@pytest.mark.parametrize("recipe", [recipes.BF16(), recipes.NVFP4(hadamard=True)])
def test_a_transformed_weight_is_refused_before_any_work(recipe):
    """Check that a transformed weight is refused if x requires a gradient."""
    layer = GroupedLinear(2, 32, 32, recipe=recipe, dtype=BF16)
    q = grouped.quantize(layer.weight.detach(), NVFP4(hadamard=True), columnwise=True)
    layer.weight = torch.nn.Parameter(q, requires_grad=False)
    x = torch.randn(4, 32, dtype=BF16)
    assert layer(x, [2, 4]).shape == (4, 32)
    with pytest.raises(ValueError, match="nvfp4:hadamard, whose .* without hadamard where x requ"):
        layer(x.requires_grad_(), [2, 4])


@pytest.mark.parametrize(
    "recipe",
    [
        *(recipes.BF16(), recipes.NVFP4RowScaled(), recipes.FP8Block(pow2_scales=False)),
        recipes.FP8Delayed(margin=1),
        Recipe(NVFP4(), W, NVFP4(stochastic_rounding=True)),
    ],
)
def test_recipes_are_values(recipe):
    """Check that recipes are immutable and hashable, and can be pickled."""
    same = pickle.loads(pickle.dumps(recipe))
    assert same == recipe and hash(same) == hash(recipe) and same.texts == recipe.texts
    with pytest.raises(AttributeError):
        recipe.input = None
    assert recipe.takes_scales == isinstance(recipe, recipes.FP8Delayed)
    changed = dataclasses.replace(recipe, propagate_nonfinite=False)
    assert changed != recipe and changed.texts == recipe.texts
    assert all(fmt is None or fmt.nan_scales for fmt in recipe.formats)
    assert not any(fmt and fmt.nan_scales for fmt in changed.formats)


@pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES)
def test_sizes_that_the_blocks_do_not_divide(recipe):
    """Check that layers refuse sizes that the blocks do not divide."""
    multiple = recipe.multiple
    assert multiple == {"mxfp8": 32, None: 1}.get(recipe.weight and recipe.weight.name, 16)
    GroupedLinear(2, multiple, 3 * multiple, recipe=recipe)
    if multiple > 1:
        for sizes in ((multiple // 2, multiple), (multiple, multiple + multiple // 2)):
            with pytest.raises(ValueError, match=f"must be a multiple of {multiple}"):
                GroupedLinear(2, *sizes, recipe=recipe)
