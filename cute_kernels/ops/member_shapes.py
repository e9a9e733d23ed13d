"""Shapes of groups that differ, as ops take them: a flat list [m0, n0, m1, n1, ...].

The members are consecutive in a tensor of one dimension, each contiguous and row-major. Member i
starts at element m0 * n0 + ... + m(i-1) * n(i-1). The tensor may be longer: its capacity.
"""

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor


def pairs(shapes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (m, n) of each member."""
    if len(shapes) % 2:
        raise ValueError(
            f"shapes must be pairs of m and n, one per member, got {len(shapes)} sizes"
        )
    return list(zip(shapes[::2], shapes[1::2], strict=True))


def element_offsets(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the first element of each member, and the end of the last one."""
    return [0, *itertools.accumulate(m * n for m, n in shapes)]


def check_shapes(shapes: Sequence[tuple[int, int]], capacity: int, multiple: int, why: str) -> None:
    """Check (m, n) of each member of a tensor of ``capacity`` elements.

    Args:
        shapes: (m, n) of the members.
        capacity: Number of elements of the tensor, which may be more than the members have.
        multiple: Number that must divide each n.
        why: Reason for the multiple, for the message.

    Raises:
        ValueError: There is no member, or a member is invalid.
    """
    if not shapes:
        raise ValueError("shapes must have at least one member, got none")
    for i, ((m, n), end) in enumerate(zip(shapes, element_offsets(shapes)[1:], strict=True)):
        if m < 0:
            raise ValueError(f"shapes[{i}] must have m >= 0 rows, got ({m}, {n})")
        if n < 1 or n % multiple != 0:
            raise ValueError(
                f"shapes[{i}] must have a positive multiple of {multiple} columns ({why}), "
                f"got ({m}, {n})"
            )
        if end > capacity:
            raise ValueError(
                f"shapes[{i}], ({m}, {n}), must end within the {capacity} elements of the "
                f"tensor, but ends at {end}"
            )


def member_views(x: Tensor, shapes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Yield each member of ``x`` as a view of a uniform tensor of one group, (1, m, n)."""
    for (m, n), start in zip(shapes, element_offsets(shapes), strict=False):
        yield x.narrow(0, start, m * n).view(1, m, n)
