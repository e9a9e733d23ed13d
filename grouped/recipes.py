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
import functools
import inspect
from typing import Any, ClassVar

import torch

from cute_kernels.capability import UnsupportedError, support
from cute_kernels.formats import FP8, MXFP8, Format, FP8Block
from cute_kernels.formats import NVFP4 as _NVFP4

__all__ = ["BF16", "NVFP4", "NVFP4RowScaled", "Recipe", "check_format"]

ROLES = ("input", "weight", "grad_output")
_FORMATS: dict[str, type[Any]] = {f.name: f for f in (_NVFP4, MXFP8, FP8Block, FP8)}


def check_format(name: str, fmt: object) -> None:
    """Raise ``TypeError`` unless ``fmt`` is a format record."""
    if isinstance(fmt, Format):
        return
    if inspect.isclass(fmt) and fmt in _FORMATS.values():
        raise TypeError(f"{name} must be a format record: {fmt.__name__}(), not {fmt.__name__}")
    raise TypeError(f"{name} must be a format record such as grouped.NVFP4(), got {fmt!r}")


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
        ValueError: some roles have a format and some have none, or a weight is row-scaled.
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
        if isinstance(self.weight, _NVFP4) and self.weight.row_scaled:
            raise ValueError("weight must have one second-level scale a group, got row_scaled=True")
        for name, fmt in roles.items():
            if isinstance(fmt, _NVFP4) and fmt.prepacked:
                raise ValueError(f"{name} cannot be prepacked: that is for weights once quantized")
            if fmt is not None:
                _require_built(name, fmt)
        texts = tuple(format_text(fmt) for fmt in roles.values())
        # Made once: a compiler that traces a layer would otherwise trace how they are made.
        object.__setattr__(self, "texts", texts)

    #: The format of each role as text, as the op ``grouped::linear`` takes it.
    texts: ClassVar[tuple[str | None, ...]]

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


def format_text(fmt: Format | None) -> str | None:
    """``fmt`` as text, such as ``"nvfp4:row_scaled"``: an argument of ops, and of saved graphs."""
    if fmt is None:
        return None
    changed = [
        _field_text(field.name, value)
        for field in dataclasses.fields(fmt)
        if (value := getattr(fmt, field.name)) != field.default
    ]
    return f"{fmt.name}:{','.join(changed)}" if changed else fmt.name


def _field_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"{name}=no"
    if isinstance(value, tuple):
        value = "x".join(map(str, value))
    return f"{name}={str(value).removeprefix('torch.')}"


@functools.cache
def parse_format(text: str | None) -> Format | None:
    """The format that ``format_text`` wrote.

    Raises:
        ValueError: ``text`` names no format, or a field that it does not have.
    """
    if text is None:
        return None
    name, _, rest = text.partition(":")
    if name not in _FORMATS:
        raise ValueError(f"{text!r} names no format: one of {', '.join(_FORMATS)}")
    defaults = {field.name: field.default for field in dataclasses.fields(_FORMATS[name])}
    values = {}
    for part in filter(None, rest.split(",")):
        field, _, value = part.partition("=")
        if field not in defaults:
            raise ValueError(f"{text!r}: {name} has no {field!r}")
        values[field] = _field_value(defaults[field], value)
    fmt: Format = _FORMATS[name](**values)
    return fmt


def _field_value(default: object, text: str) -> object:
    if isinstance(default, bool):
        return text != "no"
    if isinstance(default, tuple):
        return tuple(map(int, text.split("x")))
    if isinstance(default, torch.dtype):
        return getattr(torch, text)
    return type(default)(text)
