"""The page: its parts and the records, put into one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from perf.dashboard.payload import payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perf.records import Record

__all__ = ["ASSETS", "VENDORED", "page"]

ASSETS = Path(__file__).parent / "assets"
#: The plotting library, as its package has it; ``origin.json`` says which.
VENDORED = Path(__file__).parent / "vendor" / "uplot"
#: In the order in which they need each other.
SCRIPTS = ("dom", "data", "filters", "plot", "tables", "plots", "views", "main")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()


def page(records: Sequence[Record], data: str = "") -> str:
    """The whole page.

    Args:
        records: all that it shows.
        data: address of a file of them, if there is one beside the page.

    Raises:
        ValueError: there are no records.
    """
    # Inside of a script element only "<" could end it; JSON may say it another way.
    text = json.dumps(payload(records), separators=(",", ":"), ensure_ascii=False)
    parts = {
        "style": f"{_text(VENDORED / 'uPlot.min.css')}\n{_text(ASSETS / 'style.css')}",
        "license": _text(VENDORED / "LICENSE"),
        "plotting": _text(VENDORED / "uPlot.iife.min.js"),
        "records": text.replace("<", "\\u003c"),
        "script": "\n".join(_text(ASSETS / f"{name}.js") for name in SCRIPTS),
        "data": f'<a href="{data}" download>All records</a>' if data else "",
    }
    made = _text(ASSETS / "page.html")
    # One pass: no part is looked at for the marks of another.
    pieces = made.split("@@")
    return "".join(parts[p] if i % 2 else p for i, p in enumerate(pieces)) + "\n"
