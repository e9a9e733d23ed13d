"""Pairs of formats that a GEMM multiplies, and how it may accumulate their products."""

from ..formats import Format

#: "fast" sums in one accumulator; "split" in a fresh one every 128 of K, added to an fp32 sum.
ACCUMULATIONS = ("fast", "split")


def is_w4a8(a: Format | None, b: Format | None) -> bool:
    """Return True if A has 8-bit codes and B has 4-bit codes."""
    return a is not None and b is not None and (a.element.bits, b.element.bits) == (8, 4)


def check_pair(a: Format, b: Format, *, weights: bool = False) -> None:
    """Check that two formats have codes of one width and the same kind of block scales.

    E4M3 and E5M2 may be mixed. If block scales are fp32, one operand must have scales of single
    rows, which are multiplied first. If B is ``weights``, one matrix per group, its codes may have
    4 bits while those of A have 8.
    """
    if weights and is_w4a8(a, b):
        return
    if a.element.bits != b.element.bits or a.scale != b.scale:
        raise ValueError(
            "a and b must have formats of one kind, "
            f"got a_format={a.text!r} and b_format={b.text!r}"
        )
    if a.has_squares and b.has_squares:
        raise ValueError(
            "a or b must have a scale for each row: 128x128 blocks are not multiplied by "
            f"128x128 blocks, got a_format={a.text!r} and b_format={b.text!r}"
        )


def check_transforms(a: Format | None, b: Format | None) -> None:
    """Check that the transforms of the columnwise copies that are read cancel each other.

    Args:
        a: Format of A. None if it is plain, or if its rowwise copy is read, which has no transform.
        b: Format of B, or None.
    """
    transformed = [fmt is not None and fmt.is_transformed for fmt in (a, b)]
    if transformed[0] == transformed[1]:
        return
    texts = ["no transform" if fmt is None else repr(fmt.text) for fmt in (a, b)]
    raise ValueError(
        "a and b must be transformed alike along the rows that are contracted (hadamard), got "
        f"{texts[0]} for a and {texts[1]} for b"
    )


def check_accumulation(value: str | None, a: Format | None, b: Format | None) -> None:
    """Check that ``accumulation`` is known, and given only for codes without block scales."""
    if value is None:
        return
    if value not in ACCUMULATIONS:
        raise ValueError(f"accumulation must be {' or '.join(ACCUMULATIONS)}, got {value!r}")
    if a is None or b is None or a.scale is not None or b.scale is not None:
        operands = ("plain tensors" if fmt is None else fmt.text for fmt in (a, b))
        raise ValueError(
            "accumulation is a choice for quantized operands without block scales, such as fp8; "
            f"got accumulation={value!r} for {' and '.join(operands)}"
        )
