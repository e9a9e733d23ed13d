"""Check that a device runs the products of a layer of experts."""

from typing import NamedTuple

import torch

from cute_kernels import active_backend
from cute_kernels.records import UnsupportedError

from ...functional.quantization import quantize
from ...preparation import check_product
from ...tensor.grouped_tensor import GroupedTensor
from .schemes import LoadedFormat
from .weights import Sizes, check_sizes


class Choice(NamedTuple):
    """The user's choice of a scheme, in the words of an engine.

    Attributes:
        option: The option with its value, such as ``--quantization grouped``.
        omit: Advice that gives the engine's own kernels.
        larger_parts: Advice that gives each rank a larger part of a weight.
    """

    option: str
    omit: str
    larger_parts: str


def check_device(
    device: torch.device,
    formats: LoadedFormat,
    sizes: tuple[Sizes, Sizes],
    dtype: torch.dtype,
    choice: Choice,
    prefix: str,
) -> None:
    """Raise unless ``device`` runs the products of a layer. No memory is allocated.

    Args:
        device: Device of the weights.
        formats: Formats of the experts.
        sizes: Sizes of both weights.
        dtype: Dtype of the model.
        choice: The user's choice, for messages.
        prefix: Name of the layer, for messages.

    Raises:
        ValueError: The sizes do not fit the formats, or a recipe does not multiply the weights.
        cute_kernels.UnsupportedError: The device has no kernel.
    """
    try:
        active_backend(device)
    except UnsupportedError as error:
        raise UnsupportedError(f"{choice.option}: {error}: {choice.omit}") from None
    if formats.weight is None:
        return
    for weight_sizes in sizes:
        check_sizes(weight_sizes, formats.weight, prefix, choice.larger_parts, formats.layout)
        shape = (weight_sizes.experts, weight_sizes.rows, weight_sizes.columns)
        weight: GroupedTensor = quantize(
            torch.empty(shape, dtype=dtype, device="meta"), formats.weight
        )
        try:
            check_product(weight, formats.recipe, device, needs_dx=False)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"{choice.option} cannot serve {prefix}: {error}") from None
