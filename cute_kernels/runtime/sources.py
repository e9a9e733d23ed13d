"""Source files that a compiled kernel depends on: its own module and all that it imports, read from
the sources.
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
    """File of a module of this package by its full name; None if there is none."""
    parts = module.split(".")
    if parts[0] != _PACKAGE:
        return None
    path = _ROOT.joinpath(*parts[1:])
    candidates = (
        (path / "__init__.py", path.with_suffix(".py")) if parts[1:] else (path / "__init__.py",)
    )
    return next((file for file in candidates if file.is_file()), None)


def imported_files(source: bytes, package: str) -> Iterator[Path]:
    """Files of this package that the source of a module in ``package`` imports, also inside of
    functions.

    ``from a.b import c`` is the file of ``a.b.c`` if that is a module, else the file of ``a.b``.
    Parent packages are not among them: nothing is read from a package that the source does not
    name.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [module_file(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found = [
                module_file(f"{module}.{alias.name}") or module_file(module) for alias in node.names
            ]
        else:
            continue
        yield from filter(None, found)


@functools.cache
def _read(path: Path, modified: int) -> tuple[bytes, tuple[Path, ...]]:
    """Digest of a file as it was at a time, and the files of this package that it imports."""
    source = path.read_bytes()
    is_ours = path.is_relative_to(_ROOT)
    package = ".".join((_PACKAGE, *path.parent.relative_to(_ROOT).parts)) if is_ours else ""
    return hashlib.sha256(source).digest(), tuple(imported_files(source, package))


def source_files(files: Iterable[Path], latest: float = math.inf) -> dict[Path, bytes] | None:
    """Digests of the files and of all files of this package that they import, directly or not.

    Args:
        files: paths of Python sources, of this package or of others.
        latest: time in seconds. A file that was modified later may differ from the module that
            runs.

    Returns:
        Digests by path; None if a file is not readable or was modified later.
    """
    found: dict[Path, bytes] = {}
    pending = list(files)
    try:
        while pending:
            path = pending.pop()
            if path in found:
                continue
            status = path.stat()
            if status.st_mtime > latest:
                return None
            found[path], imported = _read(path, status.st_mtime_ns)
            pending += imported
    except (OSError, SyntaxError, ValueError):
        return None
    return found


def digest_of(files: Iterable[Path], latest: float, root: Path = _ROOT) -> str | None:
    """One digest of ``source_files``; files of other packages are named by their place below
    ``root``.
    """
    found = source_files(files, latest)
    if found is None:
        return None
    named = {
        path.relative_to(_ROOT if path.is_relative_to(_ROOT) else root).as_posix(): path
        for path in found
    }
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(f"{name}\0".encode())
        digest.update(found[named[name]])
    return digest.hexdigest()
