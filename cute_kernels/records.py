"""Records: frozen dataclasses of facts, each of which one text stands for.

A text such as ``"nvfp4:row_scaled"`` is the name of the record and the fields that differ from
their defaults, in the record's order. It is what crosses the boundary of ops, kernels'
configurations and caches, so equal records have equal texts, and a text has one spelling.
"""

import dataclasses
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

#: The field that says which record of a class it is; it is the first word of the text.
_NAME = "name"


class UnsupportedError(NotImplementedError):
    """A combination of op, format and architecture that this version does not run."""


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(str, choices))}, got {value!r}")


#: What ``check_kind`` takes for a class, and calls it; others are themselves.
_KINDS = {
    bool: (bool, "a bool"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
}


def check_kind(kind: type, **values: object) -> None:
    """Raise TypeError unless ``values``, by the names of arguments, are of ``kind``; a bool is no
    number.
    """
    cls, what = _KINDS.get(kind, (kind, f"a {kind.__name__.lower()}"))
    for name, value in values.items():
        if not isinstance(value, cls) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"{name} must be {what}, got {reprlib.repr(value)}")


class Record:
    """Base of records, which are frozen dataclasses with a name; it makes their text.

    The name is an attribute of the class, or a field where one class has several names.

    Attributes:
        words: values by the words that stand for them in texts, for types that have no text.
        text: the one text of this record; ``read`` reads it.
    """

    name: ClassVar[str]
    words: ClassVar[Mapping[str, Any]] = {}
    text: str

    def __str__(self) -> str:
        # Messages show it.
        return getattr(self, "text", None) or repr(self)

    @property
    def resolved(self) -> dict[str, object]:
        """What fields whose default is None stand for in this record, by name."""
        return {}

    def __post_init__(self) -> None:
        for name, value in self.resolved.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        # Made once: a compiler that traces the use of a record would trace how it is made.
        defaults = _defaults(self) | self.resolved
        values = {name: getattr(self, name) for name in defaults}
        changed = [name for name, default in defaults.items() if values[name] != default]
        facts = ",".join(_field_text(name, values[name], self.words) for name in changed)
        object.__setattr__(self, "text", f"{self.name}:{facts}" if facts else self.name)


R = TypeVar("R", bound=Record)


def read(what: str, records: Mapping[str, type[R]], text: str) -> R:
    """The record that a text stands for.

    Args:
        what: what the records are, for messages.
        records: their classes by name.
        text: the text.

    Raises:
        ValueError: there is no such name, field or value, or the record has another text:
            fields at their defaults are left out, the others in the record's order.
    """
    check_kind(str, **{what: text})
    name, _, facts = text.partition(":")
    if name not in records:
        raise ValueError(f"{what} must be one of {', '.join(records)}, got {text!r}")
    cls = records[name]
    defaults = _defaults(cls)
    values: dict[str, Any] = {}
    if any(f.name == _NAME for f in dataclasses.fields(cls)):  # type: ignore[arg-type]
        values[_NAME] = name
    for fact in facts.split(",") if facts else ():
        field, is_given, value = fact.partition("=")
        if field not in defaults:
            raise ValueError(
                f"{what} {name} has the fields {', '.join(defaults)}, got {field!r} in {text!r}"
            )
        try:
            values[field] = _field_value(defaults[field], value if is_given else "true", cls.words)
        except ValueError as error:
            raise ValueError(f"{what} {text!r}: {field} {error}") from None
    try:
        made = cls(**values)
    except ValueError as error:
        raise ValueError(f"{what} {text!r}: {error}") from None
    if made.text != text:
        raise ValueError(f"{what} {text!r} must be written {made.text!r}")
    return made


def _defaults(record: Record | type[Record]) -> dict[str, Any]:
    """The defaults of the fields that a text says, by name."""
    # Of a record, not of its class, where there is one: Dynamo traces only that.
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    return {f.name: f.default for f in fields if f.name != _NAME}


def _field_text(name: str, value: object, words: Mapping[str, Any]) -> str:
    if value is True:
        return name
    if value is False:
        value = "false"
    elif isinstance(value, tuple):
        value = "x".join(map(str, value))
    else:
        value = next((word for word, meant in words.items() if meant == value), value)
    return f"{name}={value}"


def _field_value(default: Any, text: str, words: Mapping[str, Any]) -> Any:
    """The value that ``text`` stands for; ValueError that says what it must be."""
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
        # What depends on other fields is a number.
        default = 0
    try:
        return (
            tuple(map(int, text.split("x"))) if isinstance(default, tuple) else type(default)(text)
        )
    except ValueError:
        shown = _field_text("", default, words)[1:]
        raise ValueError(f"must be a value such as {shown}, got {text!r}") from None
