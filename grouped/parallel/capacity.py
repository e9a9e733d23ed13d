"""Rows that ranks reserve for each other:

``capacity`` of ``grouped.distributed.ExpertParallel``.
"""

import math

from cute_kernels.records import check_kind

from ..tensor.validation import check_size


def as_capacity(capacity: object) -> tuple[int, int] | None:
    """Pairs and tokens of ``ExpertParallel``'s argument."""
    if capacity is None:
        return None
    numbers = (capacity, capacity) if isinstance(capacity, int) else capacity
    if not isinstance(numbers, (tuple, list)) or any(type(n) is not int for n in numbers):
        raise TypeError(
            f"capacity must be an int or a tuple (pairs, tokens) of two ints, got {capacity!r}"
        )
    if len(numbers) != 2 or min(numbers) < 1:
        raise ValueError(
            f"capacity must be one positive number or two, (pairs, tokens), got {capacity!r}"
        )
    return numbers[0], numbers[1]


def expert_capacity(
    num_tokens: int, top_k: int, num_experts: int, num_ranks: int, slack: float = 1.25
) -> tuple[int, int]:
    """``capacity`` of ``ExpertParallel``: what a rank sends to each rank if routing is even, times
    ``slack``.

    Args:
        num_tokens: T, tokens of a rank in a call.
        top_k: k, experts of each token.
        num_experts: E, of the whole mixture.
        num_ranks: R, ranks of the mesh.
        slack: how much more than an even share is taken, at least 1.

    Returns:
        (pairs, tokens): T k / R pairs of a token and an expert; and the tokens that have at
        least one of their k different experts among the E / R of a rank, T (1 - C(E - E / R, k)
        / C(E, k)). Both are times ``slack``, rounded up, and at most what drops nothing, (T
        min(k, E / R), T).

    Raises:
        TypeError: a number of another kind.
        ValueError: sizes that are not positive, that the ranks do not divide, or a slack below
            1.
    """
    for name, size in (("num_tokens", num_tokens), ("top_k", top_k), ("num_ranks", num_ranks)):
        check_size(name, size)
    check_size("num_experts", num_experts, num_ranks, "the ranks of the mesh")
    check_kind(float, slack=slack)
    if top_k > num_experts:
        raise ValueError(f"top_k must be at most num_experts = {num_experts}, got {top_k}")
    if not 1 <= slack < math.inf:
        raise ValueError(f"slack must be at least 1 and finite, got {slack}")
    local = num_experts // num_ranks
    share = 1 - math.comb(num_experts - local, top_k) / math.comb(num_experts, top_k)
    pairs = min(math.ceil(slack * num_tokens * top_k / num_ranks), num_tokens * min(top_k, local))
    return pairs, min(math.ceil(slack * num_tokens * share), num_tokens)
