"""FLOP counts of the ops ``torch.ops.grouped.*``."""

from typing import Any

import torch
from torch import Tensor


def product_flops(x: Tensor, *args: Any, out_val: Tensor | None = None, **kwargs: Any) -> int:
    """Return the FLOP count of a product of rows with matrices, or over the rows of two operands.

    Args:
        x: (T, K), the first operand.
        *args: Other arguments of the op; the last tensor is the result if there is no other.
        out_val: The result, (T, N) or (G, M, N).
        **kwargs: Keyword arguments of the op, such as ``out``.
    """
    candidates = (out_val, kwargs.get("out"), *reversed(args))
    out = next(t for t in candidates if isinstance(t, torch.Tensor))
    return int(2 * x.numel() * out.shape[-1])


def experts_flops(x: Tensor, p: Tensor, *args: Any, **kwargs: Any) -> int:
    """Return the FLOP count of both layers for all pairs of a token and an expert."""
    _, token, _, _, gate_up, _, down = args[
        :7
    ]  # offs, token, pair, row, weight_1, bias_1, weight_2.
    return int(2 * token.shape[0] * sum(w.shape[1] * w.shape[2] for w in (gate_up, down)))
