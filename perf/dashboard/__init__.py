"""``perf dashboard``: all records as one page that needs no network.

The same records and plotly give the same bytes, on every machine.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..records import RESULTS, Record, load, write
from .badge import badge
from .numerics import read_numerics
from .page import page


def publish(folder: Path, records: Sequence[Record], numerics: Sequence[Any] = ()) -> list[Path]:
    """Write a static site: the page, its records and the badge.

    The folder is created if it is missing; files of the same names are replaced.

    Returns:
        The paths of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index, data, image = (folder / n for n in ("index.html", "records.jsonl", "badge.svg"))
    index.write_text(page(records, data.name, numerics), encoding="utf-8")
    write(data, records)
    image.write_text(badge(records), encoding="utf-8")
    return [index, data, image]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``perf dashboard``."""
    parser.add_argument(
        "records", nargs="*", type=Path, help=f"files or folders (default: {RESULTS})"
    )
    text = "file that grouped.inspect saved, for the view Numerics; may be repeated"
    parser.add_argument(
        "--numerics", action="append", type=Path, default=[], metavar="FILE", help=text
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page")
    parser.add_argument("--publish", type=Path, metavar="DIR", help="write a static site")
    parser.add_argument("--badge", type=Path, metavar="FILE", help="write the badge")


def main(arguments: argparse.Namespace) -> int:
    """Write the page, the site or the badge.

    Raises:
        ValueError: No output is named, or there are no records.
    """
    if not (arguments.out or arguments.publish or arguments.badge):
        raise ValueError("name an output: --out FILE, --publish DIR or --badge FILE")
    records = load(*(arguments.records or [RESULTS]))
    numerics = read_numerics(arguments.numerics)
    written = [path for path in (arguments.out, arguments.badge) if path]
    if arguments.out:
        arguments.out.write_text(page(records, numerics=numerics), encoding="utf-8")
    if arguments.badge:
        arguments.badge.write_text(badge(records), encoding="utf-8")
    if arguments.publish:
        written += publish(arguments.publish, records, numerics)
    for path in written:
        print(f"{path}: {path.stat().st_size / 1000:.0f} KB")
    return 0
