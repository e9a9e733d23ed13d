"""The experts of a layer in an engine: how they are stored, and the weights that kernels read."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...preparation import prepacks
from ...tensor.grouped_tensor import GroupedTensor
from . import weights
from .schemes import LoadedFormat


class StoredExperts(NamedTuple):
    """How a checkpoint stores the experts of a layer.

    Attributes:
        layout_name: Name of the layout in ``LAYOUTS``. None for plain weights.
        has_inputs: True if the checkpoint asks for quantized activations.
        has_input_scale: True if it has static scales of activations, which are read and not used.
    """

    layout_name: str | None
    has_inputs: bool = False
    has_input_scale: bool = False


PLAIN = StoredExperts(None)


def make_sizes(
    num_experts: int, hidden_size: int, intermediate_size: int, is_gated: bool
) -> tuple[weights.Sizes, weights.Sizes]:
    """Return the sizes of both weights; ``intermediate_size`` is that of this rank."""
    projections = 2 if is_gated else 1
    return (
        weights.Sizes(
            "w13", num_experts, projections * intermediate_size, hidden_size, projections
        ),
        weights.Sizes("w2", num_experts, hidden_size, intermediate_size, 1),
    )


def prepare_weights(
    layer: Any, sizes: tuple[weights.Sizes, weights.Sizes], formats: LoadedFormat, prefix: str
) -> tuple[GroupedTensor, GroupedTensor] | None:
    """Put loaded weights into the form that kernels multiply.

    Returns:
        The weights on the meta device, whose plain tensors are now parameters of the layer. None if
        the weights stay plain.

    Raises:
        ValueError: A weight is incomplete.
    """
    if formats.weight is not None:
        return _prepare(layer, sizes[0], formats, prefix), _prepare(
            layer, sizes[1], formats, prefix
        )
    for name in ("w13_weight", "w2_weight"):
        weights.check_loaded(getattr(layer, name).data, f"{prefix}.{name}")
    return None


def _prepare(layer: Any, sizes: weights.Sizes, formats: LoadedFormat, prefix: str) -> GroupedTensor:
    """Make the quantized weight of one product, and parameters of its plain tensors."""
    fmt = formats.weight
    assert fmt is not None
    if formats.layout is None:
        weight = weights.quantize_weight(layer, sizes, fmt, prefix)
    else:
        weight = weights.load_weight(layer, sizes, formats.layout, prefix)
    if prepacks(formats.recipe, fmt, weight.device):
        weight = weight.prepack()
    weights.set_buffers(layer, sizes.name, weight)
    template: Any = weight.to("meta")
    return template


def wrap_operands(
    layer: Any,
    sizes: tuple[weights.Sizes, weights.Sizes],
    templates: tuple[GroupedTensor, GroupedTensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return both weights around the present parameters of the layer."""
    with torch.inference_mode(False):
        if templates is None:
            return layer.w13_weight.data, layer.w2_weight.data
        return (
            weights.wrap_buffers(layer, sizes[0].name, templates[0]),
            weights.wrap_buffers(layer, sizes[1].name, templates[1]),
        )
