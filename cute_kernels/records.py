"""Records: frozen dataclasses of facts, each with one text.

A text such as ``"nvfp4:row_scaled"`` is the name of the record and the fields that differ from
their defaults, in the record's order. It crosses the boundary of ops and is part of kernel
configurations and caches. Equal records have equal texts, and a record has only one text.
"""

import dataclasses
import functools
import inspect
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from ptx_emulator.host.suggestions import did_you_mean

#: Name of the field with the name of the record, which is the first word of the text.
_NAME = "name"


class UnsupportedError(NotImplementedError):
    """A combination of op, format and architecture that this version does not support."""


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(
            f"{name} must be {' or '.join(map(str, choices))}, got {value!r}"
            + did_you_mean(value, choices)
        )


#: Classes that ``check_kind`` accepts, and their description, if they differ from the kind.
_KINDS = {
    bool: (bool, "a bool"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
}


def check_kind(kind: type, **values: object) -> None:
    """Raise TypeError unless all ``values``, by name, are of ``kind``. A bool is not a number."""
    # Dynamo traces this, and cannot trace str.lower: the description is made for an error only.
    cls, description = _KINDS.get(kind, (kind, ""))
    for name, value in values.items():
        if not isinstance(value, cls) or (isinstance(value, bool) and kind is not bool):
            description = description or f"a {kind.__name__.lower()}"
            raise TypeError(f"{name} must be {description}, got {reprlib.repr(value)}")


C = TypeVar("C", bound=type)


def suggest_arguments(cls: C) -> C:
    """Decorate a class: its TypeError for an unknown argument suggests the name that was meant.

    Python 3.13 does so for all functions.
    """
    initialize = cls.__init__  # type: ignore[misc]
    names = tuple(inspect.signature(initialize).parameters)[1:]

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for option in options:
            if option not in names:
                raise TypeError(
                    f"{cls.__name__}() got an unexpected keyword argument {option!r}, it takes "
                    f"{', '.join(names) or 'none'}" + did_you_mean(option, names)
                )
        initialize(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


class Record:
    """Base class of records, which are frozen dataclasses with a name. It computes their text.

    The name is an attribute of the class, or a field if one class has several names.

    Attributes:
        words: Values by the words that stand for them in texts, for types that have no text.
        text: Text of this record, which ``read`` parses.
    """

    name: ClassVar[str]
    words: ClassVar[Mapping[str, Any]] = {}
    text: str

    def __str__(self) -> str:
        # Messages show the text.
        return getattr(self, "text", None) or repr(self)

    @property
    def resolved(self) -> dict[str, object]:
        """Values of the fields whose default is None, by name."""
        return {}

    def __post_init__(self) -> None:
        for name, value in self.resolved.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        # Compute it once: a compiler that traces the use of a record would trace the computation.
        defaults = _defaults(self) | self.resolved
        values = {name: getattr(self, name) for name in defaults}
        changed = [name for name, default in defaults.items() if values[name] != default]
        fields = ",".join(_field_text(name, values[name], self.words) for name in changed)
        object.__setattr__(self, "text", f"{self.name}:{fields}" if fields else self.name)


R = TypeVar("R", bound=Record)


def read(kind: str, records: Mapping[str, type[R]], text: str) -> R:
    """Return the record with a text.

    Args:
        kind: Kind of the records, for messages.
        records: Classes of the records by name.
        text: Text of a record.

    Raises:
        ValueError: There is no such name, field or value; or the record has another text, which
            leaves out fields at their defaults and has the others in the record's order.
    """
    check_kind(str, **{kind: text})
    name, _, fields = text.partition(":")
    if name not in records:
        raise ValueError(
            f"{kind} must be one of {', '.join(records)}, got {text!r}"
            + did_you_mean(name, records)
        )
    cls = records[name]
    defaults = _defaults(cls)
    values: dict[str, Any] = {}
    if any(f.name == _NAME for f in dataclasses.fields(cls)):  # type: ignore[arg-type]
        values[_NAME] = name
    for item in fields.split(",") if fields else ():
        field, is_given, value = item.partition("=")
        if field not in defaults:
            raise ValueError(
                f"{kind} {name} has the fields {', '.join(defaults)}, got {field!r} in {text!r}"
                + did_you_mean(field, defaults)
            )
        try:
            values[field] = _field_value(defaults[field], value if is_given else "true", cls.words)
        except ValueError as error:
            raise ValueError(f"{kind} {text!r}: {field} {error}") from None
    try:
        record = cls(**values)
    except ValueError as error:
        raise ValueError(f"{kind} {text!r}: {error}") from None
    if record.text != text:
        raise ValueError(f"{kind} {text!r} must be written {record.text!r}")
    return record


def _defaults(record: Record | type[Record]) -> dict[str, Any]:
    """Return the defaults of the fields that a text may contain, by name."""
    # Dynamo can trace this for a record, but not for its class.
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    return {f.name: f.default for f in fields if f.name != _NAME}


def _field_text(name: str, value: object, words: Mapping[str, Any]) -> str:
    """Return the text of a field."""
    if value is True:
        return name
    if value is False:
        value = "false"
    elif isinstance(value, tuple):
        value = "x".join(map(str, value))
    else:
        value = next((word for word, stored in words.items() if stored == value), value)
    return f"{name}={value}"


def _field_value(default: Any, text: str, words: Mapping[str, Any]) -> Any:
    """Return the value of a field's text. Raise ValueError if it has none."""
    choices: Mapping[str, Any] = {}
    if isinstance(default, bool):
        choices = {"true": True, "false": False}
    elif default in words.values():
        choices = words
    if choices:
        if text not in choices:
            raise ValueError(f"must be {' or '.join(choices)}, got {text!r}")
        return choices[text]
    if default is None:
        # A field whose default depends on others is a number.
        default = 0
    try:
        return (
            tuple(map(int, text.split("x"))) if isinstance(default, tuple) else type(default)(text)
        )
    except ValueError:
        shown = _field_text("", default, words)[1:]
        raise ValueError(f"must be a value such as {shown}, got {text!r}") from None
