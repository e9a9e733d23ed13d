"""TransformerEngine 2: ``GroupedLinear`` in its recipes, and its quantizers of one group."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..contender import Contender, Run, relative_error
from ..suites.layer import LayerWork, Step
from ..suites.quantize import Input, Quantization
from .base import Peer
from .pytorch import grouped_mlp

_PYTORCH = "transformer_engine.pytorch"
_RECIPES = "transformer_engine.common.recipe"
#: Recipes by the name in records: class, major compute capabilities, and multiple to which the rows
#: of a group are padded.
_LAYERS: dict[str, tuple[str | None, tuple[int, ...], int]] = {
    "BF16": (None, (9, 10), 1),
    "FP8 current": ("Float8CurrentScaling", (9, 10), 16),
    "FP8Block": ("Float8BlockScaling", (9,), 16),
    "MXFP8": ("MXFP8BlockScaling", (10,), 32),
    "NVFP4": ("NVFP4BlockScaling", (10,), 128),
}


class TransformerEngine(Peer):
    """TransformerEngine. Its ``GroupedLinear`` gets the group sizes on the host."""

    name = "TransformerEngine"
    module = "transformer_engine"
    distribution = "transformer-engine"
    capabilities = (9, 10)

    def quantizers(self, data: Input, request: Quantization) -> Iterator[Contender]:
        """Yield quantizers of all rows as one group.

        Its quantizers of several groups are not public, but inside its layers.
        """
        if request.gives_amax:
            return
        major = torch.cuda.get_device_capability()[0]
        for text, (make, capabilities) in _QUANTIZERS.items():
            if major not in capabilities:
                continue

            def prepare(make: Any = make) -> Run:
                te = importlib.import_module(_PYTORCH)
                return functools.partial(
                    make(te, rowwise=False in request.copies, columnwise=True in request.copies),
                    data.x,
                )

            yield self.quantizer(
                data,
                text,
                prepare,
                lambda result: relative_error(result.dequantize(dtype=torch.float32), data.x),
                copies=len(request.copies),
                note="one group",
            )

    def layers(self, work: LayerWork) -> Iterator[Contender]:
        """Yield the layer in its recipes; padding to blocks is part of the layer."""
        major = torch.cuda.get_device_capability()[0]
        for text, (recipe, capabilities, multiple) in _LAYERS.items():
            if major in capabilities:
                make = functools.partial(_layer, work, recipe, multiple)
                # Group sizes on the host cannot change in a captured graph.
                yield work.contender("TransformerEngine", text, make, capturable=False)


def _e4m3() -> Any:
    return importlib.import_module("transformer_engine_torch").DType.kFloat8E4M3


def _fp8(te: Any, **directions: bool) -> Any:
    return te.Float8CurrentScalingQuantizer(
        _e4m3(), torch.device("cuda", torch.cuda.current_device()), **directions
    )


#: Functions that make quantizers, and major compute capabilities, by format.
_QUANTIZERS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "fp8": (_fp8, (9, 10)),
    "fp8_block": (
        lambda te, **directions: te.Float8BlockQuantizer(
            _e4m3(), block_scaling_dim=1, **directions
        ),
        (9,),
    ),
    "mxfp8": (lambda te, **directions: te.MXFP8Quantizer(_e4m3(), **directions), (10,)),
    "nvfp4": (lambda te, **directions: te.NVFP4Quantizer(**directions), (10,)),
}


def _layer(work: LayerWork, recipe: str | None, multiple: int) -> Step:
    """Return the pass of a layer in a recipe; None is bf16."""
    te = importlib.import_module(_PYTORCH)
    layers = [_linear(te, weight) for weight in work.weights]
    pad = te.Fp8Padding(work.shape.experts, multiple)
    unpad = te.Fp8Unpadding(work.shape.experts, multiple)
    scope: Any = contextlib.nullcontext
    if recipe is not None:
        chosen = getattr(importlib.import_module(_RECIPES), recipe)()
        scope = functools.partial(te.autocast, enabled=True, recipe=chosen)

    def product(rows: Tensor, layer: Any) -> Tensor:
        padded, sizes = pad(rows, work.sizes) if multiple > 1 else (rows, work.sizes)
        y: Tensor = layer(padded, sizes)
        return unpad(y, work.sizes) if multiple > 1 else y

    def forward(x: Tensor) -> Tensor:
        with scope():
            return grouped_mlp(product, x, layers)

    experts = range(work.shape.experts)
    weights = [[getattr(layer, f"weight{g}") for g in experts] for layer in layers]
    return work.step(forward, weights)


def _linear(te: Any, weight: Tensor) -> Any:
    """Return a ``GroupedLinear`` with a weight (G, N, K)."""
    experts, out_features, in_features = weight.shape
    options = {"bias": False, "params_dtype": weight.dtype, "device": weight.device}
    layer = te.GroupedLinear(experts, in_features, out_features, **options)
    with torch.no_grad():
        for group in range(experts):
            getattr(layer, f"weight{group}").copy_(weight[group])
    return layer


PEER = TransformerEngine
