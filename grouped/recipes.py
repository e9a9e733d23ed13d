"""Training recipes: which format each operand of a grouped linear layer is quantized to.

A recipe maps roles to formats and nothing else. It is chosen by role, never by position, and it
knows no tile sizes. ``None`` means that the operand stays in bf16.

| role | fprop reads | dgrad reads | wgrad reads |
|---|---|---|---|
| input | rowwise | | columnwise |
| weight | rowwise | columnwise | |
| grad_output | | rowwise | columnwise |
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cute_kernels.capability import UnsupportedError, support
from cute_kernels.formats import NVFP4 as _NVFP4
from cute_kernels.formats import Format
from grouped.validation import check_format

__all__ = ["BF16", "NVFP4", "NVFP4RowScaled", "Recipe"]

ROLES = ("input", "weight", "grad_output")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The format of each role; all of them, or none.

    Args:
        input: activations that enter the layer.
        weight: the layer's weights.
        grad_output: gradients of the layer's output.
        propagate_nonfinite: a NaN in an operand reaches the output and the gradients. Codes cannot
            hold one, so without this NVFP4 turns it into a finite number, and a run that diverges
            looks healthy. With it, a NaN makes the second-level scale of what it was quantized with
            NaN, and with that every product that reads the scale: the whole group, or the row of a
            row-scaled operand. Costs one more read of each operand; numbers without NaN keep their
            bits. An infinity needs no such help. Weights that are quantized already are taken as
            they are.

    Raises:
        TypeError: a role is no format record.
        ValueError: some roles have a format and some have none, a weight is row-scaled or has
            hadamard, or only one of input and grad_output has it.
        cute_kernels.UnsupportedError: a format, or a flag of one, that is not built.
    """

    input: Format | None = None
    weight: Format | None = None
    grad_output: Format | None = None
    propagate_nonfinite: bool = False

    def __post_init__(self) -> None:
        roles = {name: getattr(self, name) for name in ROLES}
        if not isinstance(self.propagate_nonfinite, bool):
            raise TypeError(f"propagate_nonfinite must be a bool, got {self.propagate_nonfinite!r}")
        missing = [name for name, fmt in roles.items() if fmt is None]
        for name, fmt in roles.items():
            if fmt is not None:
                check_format(name, fmt)
        if missing and len(missing) < len(roles):
            raise ValueError(f"a recipe quantizes all roles or none; no format for {missing}")
        level = None if self.weight is None else self.weight.second_level
        if level is not None and level.per == "row":
            raise ValueError(f"weight must have one second-level scale a group, got {self.weight}")
        for name, fmt in roles.items():
            if fmt is not None:
                _require_built(name, fmt)
        if self.weight is not None and self.weight.is_transformed:
            raise ValueError(
                f"weight cannot have hadamard, which dgrad's other operand has not: {self.weight}"
            )
        ways = [fmt is not None and fmt.is_transformed for fmt in (self.input, self.grad_output)]
        if ways[0] != ways[1]:
            raise ValueError(
                "input and grad_output must both have hadamard, or neither: wgrad contracts the "
                f"rows of both; got {self.input} and {self.grad_output}"
            )
        texts = tuple(fmt and fmt.text for fmt in roles.values())
        # Made once: a compiler that traces a layer would otherwise trace how they are made.
        object.__setattr__(self, "texts", texts)

    #: The format of each role as text, as the op ``grouped::linear`` takes it.
    texts: ClassVar[tuple[str | None, ...]]

    @property
    def multiple(self) -> int:
        """What the sizes of a layer must be a multiple of, since each is K of a product."""
        formats = (self.input, self.weight, self.grad_output)
        return max((fmt.k_multiple for fmt in formats if fmt is not None), default=1)

    @property
    def is_quantized(self) -> bool:
        """Whether the operands are quantized."""
        return self.weight is not None


def _require_built(role: str, fmt: Format) -> None:
    """Refuse a format that nothing runs; what a device lacks is said by its ops."""
    for op in ("grouped_quantize", "grouped_gemm"):
        status = support(op, fmt, "reference")
        if not status:
            raise UnsupportedError(f"{role} cannot be {fmt}: {status.reason}")


@dataclasses.dataclass(frozen=True)
class BF16(Recipe):
    """Operands in bf16."""


@dataclasses.dataclass(frozen=True)
class NVFP4(Recipe):
    """NVFP4 operands: 1x16 blocks for activations and gradients, 16x16 for weights."""

    input: Format | None = _NVFP4()
    weight: Format | None = _NVFP4(block=(16, 16))
    grad_output: Format | None = _NVFP4()


@dataclasses.dataclass(frozen=True)
class NVFP4RowScaled(NVFP4):
    """NVFP4 with one second-level scale per token for the rowwise copy of the input."""

    input: Format | None = _NVFP4(row_scaled=True)
