"""The command line, ``python -m perf COMMAND``."""

import argparse
import importlib
import re
import sys
from collections.abc import Sequence

#: Commands. Each is a module of this package with ``add_arguments`` and ``main``.
COMMANDS = {
    "run": "measure suites, and keep records",
    "compare": "two sets of records: what got slower?",
    "explain": "time and memory of a layer of experts, predicted for each recipe",
    "docs": "the measured tables of docs/performance.md, from the records",
    "dashboard": "all records as one page, or a site",
    "freeze": "hashes of all kernels and chosen tiles, to show that a change moves neither",
    "sanitize": "kernels under compute-sanitizer on a GPU",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status, 2 for an error."""
    parser = argparse.ArgumentParser(prog="python -m perf", description="Measurements.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(f"perf.{name}") for name in COMMANDS}
    for name, summary in COMMANDS.items():
        modules[name].add_arguments(commands.add_parser(name, help=summary, description=summary))
    parsed = parser.parse_args(arguments)
    try:
        status: int = modules[parsed.command].main(parsed)
    except (ValueError, OSError, ImportError, re.error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
