"""How a router may spread rows over experts, for the programs that time grouped products."""

from __future__ import annotations

import random

__all__ = ["ROUTINGS", "split_rows"]

#: All experts alike; Zipf's law with exponent 1.2; half of the rows in one expert; three in ten
#: experts without a row.
ROUTINGS = ("uniform", "zipf", "half", "empty")
_EXPONENT = 1.2
_EMPTY = 0.3


def split_rows(routing: str, groups: int, rows: int, seed: int = 0) -> list[int]:
    """Rows of each expert; who gets many is drawn by lot.

    Args:
        routing: one of ``ROUTINGS``.
        groups: experts.
        rows: rows of all together.
        seed: of the lot.
    """
    weights = [1.0] * groups
    if routing == "zipf":
        weights = [(rank + 1) ** -_EXPONENT for rank in range(groups)]
    elif routing == "half":
        weights[0] = groups - 1.0
    elif routing == "empty":
        weights[: round(_EMPTY * groups)] = [0.0] * round(_EMPTY * groups)
    elif routing != "uniform":
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {routing}")
    random.Random(seed).shuffle(weights)
    # Rounded ends rather than sizes: they add up.
    ends, total = [0], 0.0
    for weight in weights:
        total += weight
        ends.append(round(total / sum(weights) * rows))
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]
