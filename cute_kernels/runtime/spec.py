"""Kernel variants as data, and the text that identifies one in the on-disk cache."""

import dataclasses
import enum
import hashlib
import importlib
import re
from typing import Any, Protocol


class KernelSpec(Protocol):
    """One kernel variant: a frozen, hashable, picklable dataclass.

    Its fields are the facts that code generation needs (dtype names, flags, tile sizes), never
    tensors, devices or problem sizes, so that one compiled object serves every shape.
    """

    @property
    def kernel(self) -> str:
        """The class to compile, by name: ``"package.module:Class"``, see ``resolve``.

        ``Class(spec)`` is what ``cute.compile`` takes, and ``Class.fake_args(spec)`` are the
        arguments to trace it with: fake tensors whose common extents share a ``cute.sym_int``,
        plain scalars, and last ``make_fake_stream(use_tvm_ffi_env_stream=True)``. A name rather
        than an import, because kernels need the CuTe DSL and what the spec says.
        """
        ...


def resolve(name: str) -> Any:
    """Import what ``"package.module:Name"`` names.

    Raises:
        ImportError: there is no such module, or it has no such name.
        ValueError: ``name`` has another form.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"a kernel's name must be 'package.module:Class', got {name!r}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        raise ImportError(f"module {module} has no {attribute!r}") from error


def canonical_text(value: object) -> str:
    """A text that is equal for equal values, in any process and Python version.

    ``repr`` will not do: a field may be left out of it, and an object may show its address.

    Raises:
        TypeError: ``value`` holds something other than dataclasses, enums, classes, tuples,
            frozensets, strings, numbers, booleans and None.
    """
    if (
        value is None
        or isinstance(value, (bool, int, float, str))
        and not isinstance(value, enum.Enum)
    ):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{_type_name(type(value))}.{value.name}"
    if isinstance(value, type):
        return _type_name(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(canonical_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(canonical_text, value)))}}}"
    if dataclasses.is_dataclass(value):
        fields = (
            f"{field.name}={canonical_text(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
        )
        return f"{_type_name(type(value))}({', '.join(fields)})"
    raise TypeError(f"a kernel spec cannot hold {value!r}: it has no stable text for the cache key")


def short_name(spec: object) -> str:
    """A name for files and generated kernels: the spec's class and a digest of its fields."""
    digest = hashlib.sha256(canonical_text(spec).encode()).hexdigest()[:10]
    return f"{re.sub(r'[^A-Za-z0-9]', '', type(spec).__name__)[:40]}_{digest}"


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
