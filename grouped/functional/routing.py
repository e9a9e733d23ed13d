"""Routing of tokens to experts."""

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.runtime.replay import replayed

from ..tensor.validation import check_is_tensor


class Routing(NamedTuple):
    """Tokens sorted by expert: the result of ``torch.ops.cute_kernels.compute_routing``.

    All tensors are int32. R is the number of rows, one for each pair of a token and an expert.

    Attributes:
        offs: (E,). End row of each expert.
        token: (R,). Token of each row.
        pair: (R,). Pair of each row: token * k + the position of the expert among the token's.
        row: (T, k). Row of each pair; -1 if its id is not an expert's.
    """

    offs: Tensor
    token: Tensor
    pair: Tensor
    row: Tensor


class PresortedRouting(NamedTuple):
    """Routing of rows that are sorted by expert already: there is nothing to gather or combine.

    Attributes:
        offs: (E,) end row of each expert.
        token: None.
        pair: None.
        row: None.
    """

    offs: Tensor
    token: None = None
    pair: None = None
    row: None = None


def compute_routing(
    expert_ids: Tensor, num_experts: int, expert_map: Tensor | None = None
) -> Routing:
    """Sort tokens by expert: ``torch.ops.cute_kernels.compute_routing``.

    Args:
        expert_ids: (T, k) int32 or int64. The experts of each token. An id outside [0, E), such as
            -1, has no row.
        num_experts: E, at least 1.
        expert_map: (N,) int32. Expert of each id, as for the op. None maps each id to itself.

    Returns:
        End rows of the experts, and the index of rows, tokens and pairs, on the device.
    """
    check_is_tensor("expert_ids", expert_ids)
    if torch.compiler.is_compiling():
        return Routing(*ops.compute_routing(expert_ids, num_experts, expert_map))
    outputs, _ = replayed(
        ("routing", num_experts),
        [expert_ids, expert_map],
        lambda _: (ops.compute_routing(expert_ids, num_experts, expert_map), None),
    )
    return Routing(*outputs)
