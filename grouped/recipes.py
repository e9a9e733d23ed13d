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
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from cute_kernels.capability import UnsupportedError, support
from cute_kernels.formats import FP8 as _FP8
from cute_kernels.formats import NVFP4 as _NVFP4
from cute_kernels.formats import Format
from cute_kernels.formats.base import check_choice
from cute_kernels.ops.delayed import ALGORITHMS, check_margin
from grouped.validation import check_format

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BF16", "NVFP4", "FP8Delayed", "NVFP4RowScaled", "Recipe"]

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
        self._check_scales()
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

    def _check_scales(self) -> None:
        """Refuse formats whose scales nobody would update."""
        for name in ROLES:
            fmt: Format | None = getattr(self, name)
            if fmt is not None and fmt.takes_scale:
                raise ValueError(f"{name} is {fmt}, whose scales have a history: use FP8Delayed")

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

    @property
    def takes_scales(self) -> bool:
        """Whether the scales are those of earlier steps: calls need a ``DelayedScaling``."""
        return self.weight is not None and self.weight.takes_scale


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


@dataclasses.dataclass(frozen=True)
class FP8Delayed(Recipe):
    """FP8 with a scale a group from the amaxes of earlier steps: E4M3, and E5M2 for gradients.

    An operand is quantized in one pass, for its scale is there before it is. The scales, and the
    history that they follow from, are the state of a layer: ``grouped.nn.DelayedScaling`` says when
    they are updated, ``grouped.delayed_scaling_update`` how.

    Args:
        propagate_nonfinite: as in ``Recipe``.
        grad_dtype: of the codes of gradients: by default E5M2, TransformerEngine's HYBRID.
        history_length: steps whose amaxes count.
        margin: the scales are divided by two to this power.
        algorithm: ``"max"`` follows the largest amax of the history, ``"most_recent"`` the last.
        amax_group: processes that share the scales: their amaxes are reduced to the largest at each
            update, so all of them must take the same steps. A ``torch.distributed`` group or its
            name, which is what is kept. ``DistributedDataParallel`` needs
            ``broadcast_buffers=False`` beside it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    input: Format | None = dataclasses.field(default=None, init=False, repr=False)
    weight: Format | None = dataclasses.field(default=None, init=False, repr=False)
    grad_output: Format | None = dataclasses.field(default=None, init=False, repr=False)
    grad_dtype: torch.dtype = dataclasses.field(default=torch.float8_e5m2, kw_only=True)
    history_length: int = dataclasses.field(default=1024, kw_only=True)
    margin: int = dataclasses.field(default=0, kw_only=True)
    algorithm: str = dataclasses.field(default="max", kw_only=True)
    amax_group: ProcessGroup | str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        x, gradient = _FP8(scaling="delayed"), _FP8(self.grad_dtype, "delayed")
        for name, fmt in zip(ROLES, (x, x, gradient), strict=True):
            object.__setattr__(self, name, fmt)
            check_margin(self.margin, fmt)
        super().__post_init__()
        length = self.history_length
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"history_length must be an integer, got {length!r}")
        if length < 1:
            raise ValueError(f"history_length must be positive, got {length}")
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        # Its name alone is the same on all processes, and can be copied and saved.
        group: Any = self.amax_group
        group = getattr(group, "group_name", group)
        if not (group is None or isinstance(group, str)):
            raise TypeError(
                f"amax_group must be a torch.distributed group or its name, got {group!r}"
            )
        object.__setattr__(self, "amax_group", group)

    def _check_scales(self) -> None:
        """Their updates are what this recipe is about."""


@dataclasses.dataclass(frozen=True)
class OfCall(Recipe):
    """Formats of a call whose scales, if they take any, are given with it: for ops."""

    def _check_scales(self) -> None:
        """Whoever gave them updates them."""
