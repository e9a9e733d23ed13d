"""Type stub of ``cute_kernels.ops``, generated from the ``Op`` dataclasses.

An op such as ``ops.grouped_quantize`` is built at import, so tools cannot see its signature. The
stub ``__init__.pyi`` declares each op as a typed function with its docstring. It names the class
and the launcher that define the op.

    python -m cute_kernels.ops.stub --write    # write __init__.pyi
    python -m cute_kernels.ops.stub --check    # exit with status 1 if __init__.pyi is out of date
"""

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cute_kernels import ops

from .op import Op, builder_of

STUB = Path(ops.__file__).with_suffix(".pyi")
_ROOT = STUB.parents[2]
_HEADER = '''"""Typed signatures of the flat ops: see ``__init__.py``.

``python -m cute_kernels.ops.stub --write`` generates this file from the ``Op`` dataclasses.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
'''


def op_classes() -> dict[str, type[Op]]:
    """Return the classes of the ops in ``cute_kernels.ops`` by name, in alphabetical order."""

    def subclasses(cls: type[Op]) -> Iterator[type[Op]]:
        for subclass in cls.__subclasses__():
            yield subclass
            yield from subclasses(subclass)

    classes = {
        cls.name: cls
        for cls in subclasses(Op)  # type: ignore[type-abstract]
        if "name" in vars(cls) and getattr(ops, cls.name, None) is cls.fast_call
    }
    return dict(sorted(classes.items()))


def signature(cls: type[Op]) -> str:
    """Return the stub of one op."""
    arguments = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        # Ops accept tuples as well as lists.
        kind = str(field.type).replace("list[", "Sequence[")
        is_required = field.default is dataclasses.MISSING
        default = "" if is_required else f" = {_literal(field.default)}"
        arguments.append(f"    {field.name}: {kind}{default},\n")
    outputs = "list[Tensor]" if cls.returns_list else "Tensor"
    lines = [
        *inspect.getdoc(cls).splitlines(),  # type: ignore[union-attr]
        "",
        "Defined by:",
        f"    Op class: ``{cls.__module__}.{cls.__qualname__}``",
        f"    Launcher: ``{_launcher(cls)}``",
    ]
    doc = "\n".join(f"    {line}".rstrip() for line in lines).strip()
    return (
        f"def {cls.name}(\n{''.join(arguments)}) -> {'None' if cls.written else outputs}:\n"
        f'    """{doc}\n    """\n'
    )


def generate() -> str:
    """Return the text of the stub."""
    return "\n".join((_HEADER, *(signature(cls) for cls in op_classes().values())))


def _literal(value: object) -> str:
    """Return the source text of a default value."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _launcher(cls: type[Op]) -> str:
    """Return the path of the file that launches an op's kernels, and the function in it."""
    build = inspect.unwrap(builder_of(cls))
    path = Path(inspect.getfile(build)).relative_to(_ROOT)
    return f"{path.as_posix()}:{build.__name__}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the stub and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cute_kernels.ops.stub", description=(__doc__ or "").partition("\n")[0]
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the stub")
    mode.add_argument("--check", action="store_true", help="fail if the stub is out of date")
    options = parser.parse_args(arguments)
    if options.write:
        STUB.write_text(generate(), encoding="utf-8")
        return 0
    if not STUB.exists() or STUB.read_text(encoding="utf-8") != generate():
        print(
            f"{STUB} is out of date: run python -m cute_kernels.ops.stub --write", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
