"""Import a few files of a package that is not installed: all its other modules are stubs.

A stub has every attribute. Each is a class of its own, the same at each access, so the package's
``isinstance`` and its decorators work; nothing else of it does.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class _StubClass(type):
    """Classes of stubs: every attribute is a stub, and they may stand in type annotations."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stub_value = stub(name)
        setattr(cls, name, stub_value)
        return stub_value

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__


def _new(cls: type, *args: Any, **named: Any) -> Any:
    # A stub that decorates a function or a class gives it back.
    if len(args) == 1 and not named and isinstance(args[0], types.FunctionType | type):
        return args[0]
    return object.__new__(cls)


def _call(self: Any, *args: Any, **named: Any) -> Any:
    return args[0] if len(args) == 1 and not named else self


def _attribute(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return stub(name)


def stub(name: str) -> Any:
    """Return a class that has every attribute, as its instances have.

    Instances are false, so that ``is_hip()`` is false.
    """
    body = {"__new__": _new, "__call__": _call, "__getattr__": _attribute}
    body |= {"__init__": lambda self, *args, **named: None, "__bool__": lambda self: False}
    return _StubClass(name, (), body)


class _StubModule(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stub_value = stub(name)
        setattr(self, name, stub_value)
        return stub_value


class Package(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of a package in a folder. Modules that are not named become stubs.

    Args:
        name: Name of the package.
        root: Folder that has it.
        real: Modules to import.
        stubbed: Other packages, which consist of stubs.
        values: Values of attributes of stub modules, by ``module:attribute``.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        real: Sequence[str],
        stubbed: Sequence[str] = (),
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self.names, self.root, self.real, self.values = (
            (name, *stubbed),
            root,
            set(real),
            values or {},
        )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not any(name == package or name.startswith(f"{package}.") for package in self.names):
            return None
        if name in self.real:
            base = self.root.joinpath(*name.split("."))
            file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for key, value in self.values.items():
            attribute_value, _, attribute = key.partition(":")
            if attribute_value == module.__name__:
                setattr(module, attribute, value)

    def __enter__(self) -> "Package":
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name in [n for n in sys.modules if n.partition(".")[0] in self.names]:
            del sys.modules[name]
