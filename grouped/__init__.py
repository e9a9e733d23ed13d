"""Grouped low-precision tensors, recipes and modules for mixture-of-experts models.

A grouped tensor holds many 2D members in one buffer: the tokens of each expert (ragged: ``offs``
gives the end row of each group) or the weights of each expert (uniform: (G, N, K)).
"""

from typing import TYPE_CHECKING

from cute_kernels import __version__
from cute_kernels.formats import FP8, MXFP8, NVFP4, Format, FP8Block
from cute_kernels.formats.activations import Activation
from grouped import inspect, nn, optim, recipes
from ptx_emulator.host.suggestions import module_attributes

from .functional.delayed_scaling import delayed_scaling_update
from .functional.experts import Routing, compute_routing
from .functional.gemm import grouped_gemm
from .functional.linear_autograd import linear
from .functional.moe import moe
from .functional.quantization import compute_offsets, quantize
from .preparation import prepare
from .tensor.grouped_tensor import GroupedTensor
from .tensor.members import GroupedMember, QuantizedCopy

__all__ = [
    "FP8",
    "MXFP8",
    "NVFP4",
    "Activation",
    "FP8Block",
    "Format",
    "GroupedMember",
    "GroupedTensor",
    "QuantizedCopy",
    "Routing",
    "__version__",
    "checkpoint",
    "compute_offsets",
    "compute_routing",
    "convert",
    "delayed_scaling_update",
    "grouped_gemm",
    "inspect",
    "integrations",
    "linear",
    "moe",
    "nn",
    "optim",
    "parallel",
    "prepare",
    "quantize",
    "recipes",
]

#: Modules that are imported when they are first used, and deprecated names of modules.
_LAZY = ("checkpoint", "convert", "integrations", "parallel", "debug", "distributed")

if TYPE_CHECKING:
    from grouped import checkpoint, convert, integrations, parallel
else:
    __getattr__ = module_attributes(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)
