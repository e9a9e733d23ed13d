"""Kernel variants as data, and the text that identifies a variant in the on-disk cache."""

import dataclasses
import enum
import hashlib
import importlib
import re
from typing import Any, Protocol


class KernelSpec(Protocol):
    """One kernel variant: a frozen, hashable, picklable dataclass.

    Its fields are the facts that code generation needs (dtype names, flags, tile sizes). They are
    never tensors, devices or problem sizes, so one compiled object serves every shape.
    """

    @property
    def kernel(self) -> str:
        """Name of the class to compile: ``"package.module:Class"``, see ``resolve``.

        ``cute.compile`` takes ``Class(spec)``. ``Class.fake_args(spec)`` returns the arguments for
        tracing: fake tensors whose common extents share a ``cute.sym_int``, plain scalars, and last
        ``make_fake_stream(use_tvm_ffi_env_stream=True)``. It is a name, not an import, because the
        class needs the CuTe DSL and imports the spec.
        """
        ...


def resolve(name: str) -> Any:
    """Import the object with the name ``"package.module:Name"``.

    Raises:
        ImportError: There is no such module, or it has no such name.
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
    """Return a text that is equal for equal values, in any process and Python version.

    ``repr`` does not suffice: it may omit a field, and an object may show its address.

    Raises:
        TypeError: ``value`` contains anything other than dataclasses, enums, classes, tuples,
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
    """Return a name for files and kernels: the spec's class and a digest of its fields."""
    digest = hashlib.sha256(canonical_text(spec).encode()).hexdigest()[:10]
    return f"{re.sub(r'[^A-Za-z0-9]', '', type(spec).__name__)[:40]}_{digest}"


def _type_name(cls: type) -> str:
    """Return the full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
