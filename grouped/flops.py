"""What this package's ops cost for ``torch.utils.flop_counter``, as ``cute_kernels.ops.flops`` has
it.
"""

from typing import Any

import torch
from torch import Tensor

from cute_kernels.ops.flops import register_flops
from grouped import autograd, experts, products  # noqa: F401 - they define the ops.

from .nn import router  # noqa: F401


def _product(x: Tensor, *args: Any, out_val: Tensor | None = None, **kwargs: Any) -> int:
    """Rows times matrices, or two operands over their common rows; the result or ``out`` says what
    of.
    """
    out = next(
        t for t in (out_val, kwargs.get("out"), *reversed(args)) if isinstance(t, torch.Tensor)
    )
    return int(2 * x.numel() * out.shape[-1])


def _experts(x: Tensor, p: Tensor, *args: Any, **kwargs: Any) -> int:
    """Both layers of all pairs of a token and an expert."""
    _, token, _, _, first, _, second = args[:7]  # After the routing weights and biases.
    return int(2 * token.shape[0] * sum(w.shape[1] * w.shape[2] for w in (first, second)))


register_flops(
    torch.ops.grouped,
    _product,
    "linear",
    "router_logits",
    "gemm",
    "gemm_out",
    "gemm_w4a16",
    "gemm_w4a16_out",
)
register_flops(torch.ops.grouped, _experts, "experts")
