"""Registers every op in two forms, from one description.

An op is a dataclass whose fields are its arguments. It says what outputs it has (``outputs``),
checks its arguments (``check``) and computes (``run``). From that come the functional op
``torch.ops.cute_kernels.name``, which allocates its outputs, the ``name_out`` op, which writes
into given ones, and the fakes of both. All four share ``check`` and ``outputs``, so they cannot
drift.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from cute_kernels.capability import require
from cute_kernels.runtime.backend import active_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cute_kernels.formats import Format

__all__ = ["Op", "OutputSpec", "register"]

_LIBRARY = torch.library.Library("cute_kernels", "DEF")
_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "bool": "bool",
    "int": "SymInt",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
}


class OutputSpec(NamedTuple):
    """Shape, dtype and row pitch (elements; None if contiguous) of one output."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pitch: int | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Row-major strides, with rows ``pitch`` apart."""
        strides = [1]
        for i, size in enumerate(reversed(self.shape[1:])):
            strides.append(strides[-1] * size if i or self.pitch is None else self.pitch)
        return tuple(reversed(strides))

    def allocate(self, device: torch.device) -> Tensor:
        """A tensor of this shape, zero wherever the op does not write."""
        return torch.empty_strided(
            self.shape, self.strides, dtype=self.dtype, device=device
        ).zero_()


class Op(abc.ABC):
    """Base of all ops; subclasses are frozen dataclasses."""

    #: Name under ``torch.ops.cute_kernels``.
    name: ClassVar[str]
    #: Names of the outputs, in order.
    output_names: ClassVar[tuple[str, ...]]
    #: Whether the ``_out`` form takes ``accumulate``.
    accumulates: ClassVar[bool] = False
    #: For differentiable ops: what to save, and the gradients of the inputs.
    setup_context: ClassVar[Callable[..., None] | None] = None
    backward: ClassVar[Callable[..., Any] | None] = None

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Device of the op's operands."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments that are given, by name."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = {field.name: getattr(self, field.name) for field in fields}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ValueError or TypeError for arguments that break a rule."""

    @abc.abstractmethod
    def outputs(self) -> Sequence[OutputSpec | None]:
        """What the op writes; None for an output that was not asked for."""

    @abc.abstractmethod
    def run_reference(self, outputs: Sequence[Tensor | None], **options: bool) -> None:
        """Compute into ``outputs`` with the reference backend."""

    @abc.abstractmethod
    def capability(self) -> tuple[str, Format | None]:
        """The op and format under which the capability table lists this call."""

    def run(self, outputs: Sequence[Tensor | None], **options: bool) -> None:
        """Compute into ``outputs`` with the active backend."""
        require(*self.capability(), active_backend(self.device).arch)
        # Autocast would run the fp32 products inside in bf16.
        with torch.autocast(self.device.type, enabled=False):
            self.run_reference(outputs, **options)


def _check_outputs(op: Op, given: Sequence[Tensor | None]) -> None:
    for name, spec, tensor in zip(op.output_names, op.outputs(), given, strict=True):
        if spec is None:
            if tensor is not None:
                raise ValueError(f"{op.name}_out: {name} is given but was not asked for")
            continue
        if tensor is None:
            raise ValueError(f"{op.name}_out: {name} is missing, of shape {tuple(spec.shape)}")
        if tensor.dtype != spec.dtype:
            raise TypeError(f"{op.name}_out: {name} must be {spec.dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != tuple(spec.shape):
            raise ValueError(
                f"{op.name}_out: {name} must have shape {tuple(spec.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
        # Functionalization may hand over a dense copy of a padded output: any pitch will do.
        pitch = spec.pitch and tensor.stride(-2)
        if tensor.numel() and tensor.stride() != spec._replace(pitch=pitch).strides:
            raise ValueError(
                f"{op.name}_out: {name} must be row-major with strides {spec.strides}, "
                f"got {tensor.stride()}"
            )
        if tensor.device != op.device:
            raise ValueError(f"{op.name}_out: {name} must be on {op.device}, got {tensor.device}")


def _allocate(op: Op) -> tuple[Tensor, ...]:
    empty = OutputSpec((0,), torch.uint8)
    return tuple((spec or empty).allocate(op.device) for spec in op.outputs())


def _unwrap(outputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return outputs[0] if len(outputs) == 1 else outputs


def _schema(cls: type[Op]) -> tuple[str, str]:
    parts = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        text = f"{_SCHEMA_TYPES[str(field.type)]} {field.name}"
        if field.default is not dataclasses.MISSING:
            text += f"={field.default}"
        parts.append(text)
    arguments = ", ".join(parts)
    results = ", ".join("Tensor" for _ in cls.output_names)
    outs = ", ".join(f"Tensor(o{i}!)? {name}=None" for i, name in enumerate(cls.output_names))
    flag = ", bool accumulate=False" if cls.accumulates else ""
    if len(cls.output_names) > 1:
        results = f"({results})"
    return (
        f"{cls.name}({arguments}) -> {results}",
        f"{cls.name}_out({arguments}, *, {outs}{flag}) -> ()",
    )


def register(cls: type[Op]) -> type[Op]:
    """Class decorator: register the functional and the ``_out`` form of an op, and their fakes."""
    functional, out = _schema(cls)

    def call(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        op = cls(*args, **kwargs)
        op.check()
        outputs = _allocate(op)
        specs = op.outputs()
        op.run([t if s is not None else None for t, s in zip(outputs, specs, strict=True)])
        return _unwrap(outputs)

    def fake(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        op = cls(*args, **kwargs)
        op.check()
        return _unwrap(_allocate(op))

    def split(kwargs: dict[str, Any]) -> tuple[list[Tensor | None], dict[str, bool]]:
        options = {k: kwargs.pop(k) for k in ("accumulate",) if k in kwargs}
        return [kwargs.pop(name, None) for name in cls.output_names], options

    def call_out(*args: Any, **kwargs: Any) -> None:
        outputs, options = split(kwargs)
        op = cls(*args, **kwargs)
        op.check()
        _check_outputs(op, outputs)
        op.run(outputs, **options)

    def fake_out(*args: Any, **kwargs: Any) -> None:
        outputs, _ = split(kwargs)
        op = cls(*args, **kwargs)
        op.check()
        _check_outputs(op, outputs)

    pairs: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any]], ...] = (
        (cls.name, functional, call, fake),
        (f"{cls.name}_out", out, call_out, fake_out),
    )
    for name, schema, implementation, meta in pairs:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cute_kernels::{name}", meta, lib=_LIBRARY)
    torch.library.register_autograd(
        f"cute_kernels::{cls.name}",
        cls.backward or _not_differentiable(cls.name),
        setup_context=cls.setup_context,
        lib=_LIBRARY,
    )
    return cls


def _not_differentiable(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{name} has no derivative; train through grouped.nn, or detach its input"
        )

    return backward
