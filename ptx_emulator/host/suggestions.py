"""Suggestions: messages about unknown names end in the name that was probably meant."""

import difflib
import importlib
import sys
from collections.abc import Callable, Collection, Iterable
from types import ModuleType
from typing import Any


def closest(name: object, choices: Iterable[object]) -> str | None:
    """Return the text among ``choices`` that a misspelled name is closest to, or None.

    Upper and lower case are alike.
    """
    texts = {choice.casefold(): choice for choice in choices if isinstance(choice, str)}
    if not isinstance(name, str):
        return None
    matches = difflib.get_close_matches(name.casefold(), texts, n=1)
    return texts[matches[0]] if matches else None


def did_you_mean(name: object, choices: Iterable[object]) -> str:
    """Return ``": did you mean 'nvfp4'?"`` if a name is close to a choice, else an empty text.

    Messages about unknown names end in it.
    """
    match = closest(name, choices)
    return "" if match is None else f": did you mean {match!r}?"


def missing_attribute(
    module: str, name: str, choices: Iterable[str] | None = None
) -> AttributeError:
    """Return the error for an unknown attribute of a module, which suggests a public name.

    Args:
        module: Name of the module. It is imported.
        name: Name of the attribute. If a public submodule that is imported has it, the message
            names that attribute; otherwise the closest choice.
        choices: Names that the module has. The default are those that its ``dir`` shows.
    """
    # The error has no ``obj``: Python would add a second suggestion to the first one.
    message = f"module {module!r} has no attribute {name!r}"
    if name.startswith("__"):  # Python and libraries ask for such names, and expect no answer.
        return AttributeError(message, name=name)
    loaded = sys.modules[module]
    choices = dir(loaded) if choices is None else list(choices)
    for key in choices:
        value = vars(loaded).get(key)
        if isinstance(value, ModuleType) and name in dir(value):
            return AttributeError(f"{message}: did you mean {module}.{key}.{name}?", name=name)
    return AttributeError(message + did_you_mean(name, choices), name=name)


def module_attributes(module: str, lazy: Collection[str] = ()) -> Callable[[str], Any]:
    """Return a module ``__getattr__`` that imports submodules lazily and suggests names.

    Args:
        module: Name of the module.
        lazy: Names of submodules that are imported when they are first used.
    """

    def attribute(name: str) -> Any:
        """Return a submodule."""
        if name not in lazy:
            raise missing_attribute(module, name)
        return importlib.import_module(f"{module}.{name}")

    return attribute
