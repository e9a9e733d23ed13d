"""Source files that a compiled kernel depends on: its own module and all imports.

The imports are read from the sources.
"""

import ast
import functools
import hashlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = _ROOT.name


def module_file(module: str) -> Path | None:
    """Return the file of a module of this package by its full name, or None if there is none."""
    names = module.split(".")
    if names[0] != _PACKAGE:
        return None
    path = _ROOT.joinpath(*names[1:])
    candidates = (
        (path / "__init__.py", path.with_suffix(".py")) if names[1:] else (path / "__init__.py",)
    )
    return next((file for file in candidates if file.is_file()), None)


def imported_files(source: bytes, package: str) -> Iterator[Path]:
    """Yield files of this package that the source of a module in ``package`` imports.

    Imports inside functions count. ``from a.b import c`` is the file of ``a.b.c`` if that is a
    module, else the file of ``a.b``. Parent packages do not count: nothing is read from a package
    that the source does not name.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            files = [module_file(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            files = [
                module_file(f"{module}.{alias.name}") or module_file(module) for alias in node.names
            ]
        else:
            continue
        yield from filter(None, files)


@functools.cache
def _read(path: Path, modified: int) -> tuple[bytes, tuple[Path, ...]]:
    """Return the digest of a file at a modification time, and the files that it imports."""
    source = path.read_bytes()
    is_ours = path.is_relative_to(_ROOT)
    package = ".".join((_PACKAGE, *path.parent.relative_to(_ROOT).parts)) if is_ours else ""
    return hashlib.sha256(source).digest(), tuple(imported_files(source, package))


def source_files(files: Iterable[Path], latest: float = math.inf) -> dict[Path, bytes] | None:
    """Return digests of the files and of all files of this package that they import, transitively.

    Args:
        files: Paths of Python sources, of this package or of others.
        latest: Time in seconds. A file that was modified later may differ from the loaded module.

    Returns: Digests by path. None if a file is not readable or was modified later.
    """
    digests: dict[Path, bytes] = {}
    pending = list(files)
    try:
        while pending:
            path = pending.pop()
            if path in digests:
                continue
            status = path.stat()
            if status.st_mtime > latest:
                return None
            digests[path], imported = _read(path, status.st_mtime_ns)
            pending += imported
    except (OSError, SyntaxError, ValueError):
        return None
    return digests


def digest_of(files: Iterable[Path], latest: float, root: Path = _ROOT) -> str | None:
    """Return one digest of ``source_files``.

    Files of other packages are named by their path relative to ``root``.
    """
    digests = source_files(files, latest)
    if digests is None:
        return None
    named = {
        path.relative_to(_ROOT if path.is_relative_to(_ROOT) else root).as_posix(): path
        for path in digests
    }
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(f"{name}\0".encode())
        digest.update(digests[named[name]])
    return digest.hexdigest()
