"""Checks of the parts of a GroupedTensor, and of the format of one that comes from a file."""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels.capability import require
from cute_kernels.formats import RECORDS, Format
from cute_kernels.formats.base import suggest_record
from cute_kernels.layout.buffers import buffers
from cute_kernels.ops.checks import (
    INPUT_DTYPES,
    check_dtype,
    check_end_rows_of,
    check_multiple,
    check_offs,
    check_tensor,
    same_device,
)
from cute_kernels.ops.member_shapes import check_shapes
from cute_kernels.records import check_kind

from .members import QuantizedCopy


def check_format(name: str, fmt: object) -> None:
    """Raise ``TypeError`` unless ``fmt`` is a format record."""
    if isinstance(fmt, Format):
        return
    for cls in RECORDS.values():
        if fmt is cls:
            raise TypeError(f"{name} must be a format record: {cls.__name__}(), not {cls.__name__}")
    hint = ""
    if isinstance(getattr(fmt, "input", None), Format):
        hint = ": a recipe, which has one for each role (input, weight, grad_output)"
    hint = hint or suggest_record(fmt)
    raise TypeError(f"{name} must be a format record such as grouped.NVFP4(), got {fmt!r}{hint}")


def check_is_tensor(name: str, value: object) -> None:
    """Raise ``TypeError`` unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def check_size(name: str, size: Any, multiple: int = 1, why: str = "") -> None:
    """Raise unless ``size`` is a positive integer and a multiple of ``multiple``.

    Args:
        name: Name of the argument.
        size: Value of the argument.
        multiple: Required divisor of the size.
        why: Reason of the requirement, for the message.
    """
    check_kind(int, **{name: size})
    if size < 1:
        raise ValueError(f"{name} must be positive, got {size}")
    if size % multiple:
        raise ValueError(f"{name} must be a multiple of {multiple} for {why}, got {size}")


def check_parts(
    shape: Sequence[int],
    dtype: torch.dtype,
    fmt: Format,
    offs: Tensor | None,
    rowwise: QuantizedCopy | None,
    columnwise: QuantizedCopy | None,
    prepacked: bool,
    shapes: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Check that plain tensors fit the shape and format of a quantized tensor.

    Raises:
        TypeError: A dtype does not match, or ``fmt`` is not a format record.
        ValueError: A shape or a device does not match.
        cute_kernels.UnsupportedError: The format is not built yet.
    """
    check_format("fmt", fmt)
    require("grouped_quantize", fmt, "reference")
    if rowwise is None and columnwise is None:
        raise ValueError("rowwise and columnwise are both None: a GroupedTensor holds data")
    _check_groups(shape, fmt, offs, shapes)
    check_dtype("dtype", dtype, INPUT_DTYPES)
    for name, grouping in (("offs", offs), ("shapes", shapes)):
        if prepacked and grouping is not None:
            raise ValueError(f"prepacked weights are uniform, but {name} is given for {fmt}")
    num_groups = None if offs is None else offs.shape[0]
    tensors = {}
    for direction, copy in (("rowwise", rowwise), ("columnwise", columnwise)):
        if copy is None:
            continue
        is_columnwise = direction == "columnwise"
        specs = buffers(
            fmt,
            shape,
            num_groups,
            rowwise=not is_columnwise,
            columnwise=is_columnwise,
            shapes=shapes,
        )
        for tensor, (name, spec) in zip(copy, specs.items(), strict=True):
            label = f"{direction} {name.removesuffix('_t')}"
            check_tensor(label, tensor, dtypes=(spec.dtype,), shape=spec.shape)
            tensors[label] = tensor
    level = fmt.global_scale
    if level is not None and level.is_shared and rowwise is not None and columnwise is not None:
        for name in level.buffers:
            if getattr(rowwise, name) is not getattr(columnwise, name):
                raise ValueError(
                    f"both directions of {fmt.text} share {name}: rowwise and columnwise must "
                    "hold the same tensor"
                )
    label, tensor = next(iter(tensors.items()))
    same_device(label, tensor.device, offs=offs, **tensors)


def _check_groups(
    shape: Sequence[int], fmt: Format, offs: Tensor | None, shapes: Sequence[tuple[int, int]] | None
) -> None:
    """Raise ValueError unless the groups match the shape."""
    if shapes is not None:
        if offs is not None:
            raise ValueError("offs and shapes are both given: pass only one of them")
        if len(shape) != 1:
            raise ValueError(f"shape must be (capacity,) with shapes, got {tuple(shape)}")
        check_shapes(shapes, shape[0], fmt.k_multiple, fmt.text)
        return
    wanted = "(G, N, K) without offs" if offs is None else "(T, K) with offs"
    if len(shape) != (3 if offs is None else 2):
        raise ValueError(f"shape must be {wanted}, got {tuple(shape)}")
    if offs is None and shape[0] < 1:
        raise ValueError(f"shape must have at least one group, got {tuple(shape)}")
    check_multiple("K", shape[-1], fmt.k_multiple, f"shape is {wanted}")
    if offs is not None:
        check_offs(offs)
        check_end_rows_of(offs, shape[0], "the tensor")


@functools.cache
def package_version() -> str:
    """Return the version of this package."""
    try:
        return importlib.metadata.version("grouped-kernels")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def saved_format(name: str, fields: dict[str, Any], written_by: str) -> Format:
    """Return the format record of a file.

    Args:
        name: Name of the format.
        fields: Fields of the record.
        written_by: Version of this package that wrote the file.

    Raises:
        ValueError: This version knows no such format or field.
    """
    versions = f"the file was written by grouped-kernels {written_by}, this is {package_version()}"
    if name not in RECORDS:
        raise ValueError(f"format must be one of {', '.join(RECORDS)}, got {name!r}: {versions}")
    cls = RECORDS[name]
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = ", ".join(repr(field) for field in fields if field not in known)
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {unknown}: {versions}")
    return cls(**fields)
