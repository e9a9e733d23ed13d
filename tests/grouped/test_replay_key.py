"""The key under which the experts are replayed covers every field of a layer."""

import pytest
import torch

import grouped
from grouped import recipes
from grouped.functional.expert_layer import REPLAY_KEY_EXCLUDES, Layer
from grouped.functional.operands import OperandCopy, QuantizedOperand, Scaling


def _tensor() -> torch.Tensor:
    return torch.zeros(2, 32, 32, dtype=torch.bfloat16)


def _scaling(may_be_zero: bool) -> Scaling:
    return Scaling([torch.ones(2)] * 3, may_be_zero=(may_be_zero,) * 3)


#: Two values of each field that must not share a recording.
CHANGES = {
    "weights": ([_tensor()], [_tensor()]),
    "bias": (None, torch.zeros(2, 32)),
    "recipe": (recipes.MXFP8(), recipes.FP8Block()),
    "quantized": (
        QuantizedOperand(OperandCopy(_tensor())),
        QuantizedOperand(None, OperandCopy(_tensor())),
    ),
    "scaling": (_scaling(True), _scaling(False)),
}


def _split_key(layer: Layer) -> tuple[object, list[int]]:
    """Return the options of a layer's key and the ids of its tensors."""
    key = layer.replay_key()
    assert key is not None
    options, tensors = key
    return options, [id(t) for t in tensors]


def test_each_field_is_covered_or_excluded_by_name():
    assert not CHANGES.keys() & REPLAY_KEY_EXCLUDES.keys()
    assert set(Layer._fields) == CHANGES.keys() | REPLAY_KEY_EXCLUDES.keys()


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_changes_the_key(field):
    """Check that changing any field changes the key."""
    layer = Layer([_tensor()], None, recipes.MXFP8())
    item, two = (layer._replace(**{field: value}) for value in CHANGES[field])
    assert _split_key(item) != _split_key(two)
    assert _split_key(item) == _split_key(item._replace())


def test_a_grouped_weight_gives_its_layout_and_its_plain_tensors():
    """Check that the key of a grouped weight has its copies and their tensors."""
    weights = [
        grouped.quantize(_tensor(), grouped.MXFP8(), columnwise=keys) for keys in (False, True)
    ]
    item, two = (Layer([w], None, recipes.MXFP8()).replay_key() for w in weights)
    assert item[0] != two[0]
    for (_, tensors), weight in zip((item, two), weights, strict=True):
        ids = {id(t) for t in tensors}
        assert all(id(t) in ids for t in weight._inner().values())


@pytest.mark.parametrize("field", ["probe", "flags"])
def test_observed_layers_are_not_replayed(field):
    layer = Layer([_tensor()], None, recipes.MXFP8())
    assert layer._replace(**{field: torch.zeros(4)}).replay_key() is None
