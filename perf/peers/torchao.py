"""torchao 0.18: its training recipes of grouped products, and its compiled quantizers."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..contender import Contender, Run, relative_error
from ..suites.layer import LayerWork, Step
from ..suites.quantize import Input, Quantization
from .base import Peer
from .pytorch import mxfp8_values, nvfp4_values, plain_layer

_TRAINING = "torchao.prototype.moe_training"
_FORMATS = "torchao.prototype.mx_formats"
#: Functions of ``_TRAINING`` by format, and major compute capabilities that run them.
_LAYERS = {
    "FP8 rowwise": ("_to_fp8_rowwise_then_scaled_grouped_mm", (9,)),
    "MXFP8": ("_to_mxfp8_then_scaled_grouped_mm", (10,)),
}


class TorchAo(Peer):
    """torchao. Its functions pad groups to multiples of their block size."""

    name = "torchao"
    module = "torchao"
    kinds = ("gpu", "cpu")

    def quantizers(self, data: Input, request: Quantization) -> Iterator[Contender]:
        """Yield rowwise quantizers to MXFP8, and to NVFP4 with one global scale."""
        if request.directions != "row":
            return
        make = _nvfp4 if request.gives_amax else _mxfp8

        def prepare() -> Run:
            quantize = make(data)
            if data.x.device.type == "cuda":
                quantize = torch.compile(quantize, dynamic=False)
            return partial(quantize, data.x)

        yield self.quantizer(
            data, "nvfp4" if request.gives_amax else "mxfp8", prepare, partial(_error, data)
        )

    def layers(self, work: LayerWork) -> Iterator[Contender]:
        """Yield the layers in its recipes."""
        if work.device.type != "cuda":
            return
        major = torch.cuda.get_device_capability()[0]
        for text, (function, capabilities) in _LAYERS.items():
            if major in capabilities:
                yield work.contender("torchao", text, partial(_layer, work, function))


def _mxfp8(data: Input) -> Callable[[Tensor], Any]:
    tensor = importlib.import_module(f"{_FORMATS}.mx_tensor")
    return lambda x: tensor.to_mx(x, torch.float8_e4m3fn, 32)


def _nvfp4(data: Input) -> Callable[[Tensor], Any]:
    """Return the quantizer to NVFP4 with the amax of the whole input."""
    tensor = importlib.import_module(f"{_FORMATS}.nvfp4_tensor")
    scale = tensor.per_tensor_amax_to_scale(data.amax.amax())

    def quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        quantized = tensor.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
        return quantized.qdata, quantized.scale, quantized.per_tensor_scale

    return quantize


def _error(data: Input, result: tuple[Tensor, ...]) -> float:
    """Return the error of decoded rows in MXFP8 (scales, codes) or NVFP4."""
    if len(result) == 2:
        scales, codes = result
        return relative_error(mxfp8_values(codes, scales.view(torch.uint8)), data.x)
    codes, scales, global_scale = result
    values = nvfp4_values(codes.view(torch.uint8), scales, torch.ones((), device=codes.device))
    return relative_error(values * global_scale, data.x)


def _layer(work: LayerWork, function: str) -> Step:
    multiply = getattr(importlib.import_module(_TRAINING), function)
    return plain_layer(
        work, partial(multiply, offs=work.offs, pad_token_groups_for_grouped_mm=True)
    )


PEER = TorchAo
