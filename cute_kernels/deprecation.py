"""Old names that keep working for one release, each with a ``DeprecationWarning``."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ptx_emulator.host.suggestions import missing_attribute


def warn_deprecated(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that ``old`` is deprecated and name its replacement.

    Args:
        old: The deprecated name, as users write it.
        new: The name to use instead.
        stacklevel: Frames between this function and the user's line, plus one.
    """
    warnings.warn(
        f"{old} is deprecated and will be removed in the next release; use {new}",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def _is_probe() -> bool:
    """Return True if an import statement calls a module's ``__getattr__`` only to probe a name.

    ``from package import name`` first asks whether the package has the name, in importlib, and
    then reads it. Only the second access warns.
    """
    frame = sys._getframe(2)
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) == (
        "importlib._bootstrap",
        "_handle_fromlist",
    )


def deprecated_attributes(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module ``__getattr__`` that forwards old names.

    Args:
        module: Name of the module that has the old names.
        names: Old names and their replacements as ``"package.module:Name"``.
    """

    def forward(name: str) -> Any:
        """Return the replacement of an old name."""
        if name == "__all__":  # For ``from module import *``.
            return list(names)
        if name not in names:
            raise missing_attribute(module, name)
        target, _, attribute = names[name].partition(":")
        if not _is_probe():
            warn_deprecated(f"{module}.{name}", f"{target}.{attribute}")
        return getattr(importlib.import_module(target), attribute)

    return forward


class DeprecatedAttribute:
    """Descriptor that forwards an old attribute of a class and its instances to the new name.

    Args:
        old: The deprecated name.
        new: The name to use instead.
    """

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def __get__(self, instance: Any, owner: type) -> Any:
        warn_deprecated(f"{owner.__name__}.{self.old}", f"{owner.__name__}.{self.new}")
        return getattr(owner if instance is None else instance, self.new)


def deprecated_module(old: str, new: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module that moved as a whole from ``old`` to ``new``."""

    def forward(name: str) -> Any:
        """Return the attribute of the new module."""
        target = importlib.import_module(new)
        if name == "__all__":  # For ``from module import *``.
            return list(target.__all__)
        if name.startswith("__") or not hasattr(target, name):
            raise missing_attribute(old, name, dir(target))
        if not _is_probe():
            warn_deprecated(f"{old}.{name}", f"{new}.{name}")
        return getattr(target, name)

    return forward
