"""Which formats a GEMM multiplies with which, and how it may add their products."""

from ..formats import Format

#: Sums in one accumulator; or in a fresh one every 128 of K, each added to an fp32 sum.
ACCUMULATIONS = ("fast", "split")


def is_w4a8(a: Format | None, b: Format | None) -> bool:
    """Whether B has codes of four bits beside those of a byte of A."""
    return a is not None and b is not None and (a.element.bits, b.element.bits) == (8, 4)


def check_pair(a: Format, b: Format, *, weights: bool = False) -> None:
    """Two formats must have codes of one width and the same kind of block scales.

    E4M3 and E5M2 may meet. Of block scales that are fp32 numbers one side's must be those of single
    rows: theirs is the one that is multiplied first. If B is ``weights``, one matrix a group, its
    codes may have four bits beside those of a byte.
    """
    if weights and is_w4a8(a, b):
        return
    if a.element.bits != b.element.bits or a.scale != b.scale:
        raise ValueError(
            f"a and b must have formats of one kind, got a_format={a.text!r} and b_format={b.text!r}"
        )
    if a.has_squares and b.has_squares:
        raise ValueError(
            "a or b must have a scale for each row: 128x128 blocks are not multiplied by "
            f"128x128 blocks, got a_format={a.text!r} and b_format={b.text!r}"
        )


def check_transforms(a: Format | None, b: Format | None) -> None:
    """The transforms of columnwise copies that are read must cancel each other.

    Args:
        a: the format of A; None if plain, or if its rowwise copy is read, which has none.
        b: likewise of B.
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
    """``accumulation`` must be known, and is only of codes that have no block scales."""
    if value is None:
        return
    if value not in ACCUMULATIONS:
        raise ValueError(f"accumulation must be {' or '.join(ACCUMULATIONS)}, got {value!r}")
    if a is None or b is None or a.scale is not None or b.scale is not None:
        raise ValueError(
            "accumulation is a choice for quantized operands without block scales, such as fp8; "
            f"got accumulation={value!r} for {' and '.join('plain tensors' if fmt is None else fmt.text for fmt in (a, b))}"
        )
