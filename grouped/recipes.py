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

from cute_kernels.formats import NVFP4 as _NVFP4
from cute_kernels.formats import Format

__all__ = ["BF16", "NVFP4", "NVFP4RowScaled", "Recipe"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The format of each role; all of them, or none.

    Args:
        input: activations that enter the layer.
        weight: the layer's weights.
        grad_output: gradients of the layer's output.

    Raises:
        ValueError: some roles have a format and some have none, or a weight is row-scaled.
    """

    input: Format | None = None
    weight: Format | None = None
    grad_output: Format | None = None

    def __post_init__(self) -> None:
        roles = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        missing = [name for name, fmt in roles.items() if fmt is None]
        if missing and len(missing) < len(roles):
            raise ValueError(f"a recipe quantizes all roles or none; no format for {missing}")
        if isinstance(self.weight, _NVFP4) and self.weight.row_scaled:
            raise ValueError("weight must have one second-level scale a group, got row_scaled=True")
        for name, fmt in roles.items():
            if isinstance(fmt, _NVFP4) and fmt.prepacked:
                raise ValueError(f"{name} cannot be prepacked: that is for weights once quantized")

    @property
    def is_quantized(self) -> bool:
        """Whether the operands are quantized."""
        return self.weight is not None


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
