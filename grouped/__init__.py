"""Grouped low-precision tensors, recipes and modules for mixture-of-experts models.

A grouped tensor holds many 2D members in one buffer: the tokens of each expert (ragged: ``offs``
gives the end row of each group) or the weights of each expert (uniform: (G, N, K)).
"""

from cute_kernels import __version__
from cute_kernels.activations import Activation
from cute_kernels.formats import FP8, MXFP8, NVFP4, Format, FP8Block
from grouped import debug, flops, nn, optim, recipes  # noqa: F401 - flops counts.

from .autograd import linear
from .delayed import delayed_scaling_update
from .experts import Routing, compute_routing
from .functional import compute_offsets, quantize
from .members import GroupedMember, QuantizedCopy
from .preparation import prepare
from .products import grouped_gemm
from .tensor import GroupedTensor

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
    "compute_offsets",
    "compute_routing",
    "debug",
    "delayed_scaling_update",
    "grouped_gemm",
    "linear",
    "nn",
    "optim",
    "prepare",
    "quantize",
    "recipes",
]
