import dataclasses

import pytest
import torch

from grouped import recipes

moe = pytest.importorskip("torchtitan.models.common.moe", exc_type=ImportError)
from torchtitan.config import Configurable  # noqa: E402

from grouped.integrations.torchtitan import GroupedExpertsConverter  # noqa: E402

CONFIG = moe.GroupedExperts.Config(dim=64, hidden_dim=32, num_experts=4)


def converted(recipe, config=CONFIG, **options):
	converter = GroupedExpertsConverter.Config(recipe=recipe, **options).build()
	return converter.convert(config)


@pytest.mark.parametrize("recipe", ["BF16", "FP8Block", recipes.NVFP4()])
def test_converted_experts(recipe):
	theirs, ours = CONFIG.build(), converted(recipe).build()
	assert type(ours).__name__ == "CuteGroupedExperts"
	for p in theirs.parameters():
		torch.nn.init.normal_(p, std=0.1)
	ours.load_state_dict(theirs.state_dict())
	x = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
	counts = torch.tensor([13, 0, 7, 20])  # no padding
	results = []
	for experts in (theirs, ours):
		y = experts(x, counts)
		results.append((y, *torch.autograd.grad(y.square().sum(), (x, *experts.parameters()))))
	for got, want in zip(*results, strict=True):
		noise = (got - want).float().norm() / want.float().norm()
		assert noise < (0.02 if recipe == "BF16" else 0.5)


def test_layers_that_stay():
	nested = moe.RoutedExperts.Config(inner_experts=CONFIG, token_dispatcher=None)
	converted("MXFP8", nested)
	assert isinstance(nested.inner_experts.recipe, recipes.MXFP8)
	for skip in ({"skip": ("inner",)}, {"skip_first": 1}, {"skip_last": 1}):
		with pytest.raises(ValueError, match=f"no experts to convert: .*{next(iter(skip))}"):
			converted("MXFP8", nested, **skip)


def test_first_and_last_layers_stay():
	@dataclasses.dataclass
	class Config(Configurable.Config):
		layers: list

	config = Config(layers=[dataclasses.replace(CONFIG) for _ in range(5)])
	converted("MXFP8", config, skip_first=1, skip_last=2, skip=("layers.2",))
	assert [hasattr(layer, "recipe") for layer in config.layers] == [False, True, False, False, False]


def test_what_is_refused():
	with pytest.raises(ValueError, match="recipe must be one of"):
		converted("FP4")
	with pytest.raises(ValueError, match="keeps scales"):
		converted("FP8Delayed")
	with pytest.raises(ValueError, match="skip_last must not be negative"):
		converted("BF16", skip_last=-1)
