"""The ``capacity`` of ``ExpertParallel``: rows that ranks reserve for each other."""

import math

from cute_kernels.records import check_kind

from ..tensor.validation import check_size


def parse_capacity(capacity: object) -> tuple[int, int] | None:
    """Return the argument ``capacity`` of ``ExpertParallel`` as (pairs, tokens), or None."""
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
    """Return a ``capacity`` for ``ExpertParallel``: an even share per rank, times ``slack``.

    Args:
        num_tokens: T, tokens of a rank in a call.
        top_k: k, experts per token.
        num_experts: E, experts of the whole layer.
        num_ranks: R, ranks of the mesh.
        slack: Factor above an even share, at least 1.

    Returns:
        (pairs, tokens). Even routing sends T k / R pairs of a token and an expert to each rank. It
        sends T (1 - C(E - E / R, k) / C(E, k)) tokens, those with at least one of their k experts
        among the E / R of the rank. Both are multiplied by ``slack``, rounded up, and limited to
        (T min(k, E / R), T), which drops nothing.

    Raises:
        TypeError: A number has another type.
        ValueError: A size is not positive, the ranks do not divide E, or slack is below 1.
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
