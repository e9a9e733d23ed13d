"""The page: assets and records in one file."""

import base64
import functools
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..records import Record
from .entries import payload

#: Scripts, in the order in which they depend on each other.
SCRIPTS = ("data", "tables", "plots", "views")


def _asset(name: str) -> str:
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@functools.cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            "perf dashboard needs plotly: pip install 'grouped-kernels[perf]'"
        ) from error
    return _packed(get_plotlyjs())


def page(records: Sequence[Record], data: str = "", numerics: Sequence[Any] = ()) -> str:
    """Return the page.

    Args:
        records: Records to show.
        data: Address of a file of the records next to the page, if there is one.
        numerics: Records of ``grouped.inspect``.

    Raises:
        ImportError: plotly is not installed.
        ValueError: There are no records.
    """
    contents = {
        "style": _asset("style.css"),
        "records": _packed(json.dumps(payload(records, numerics), separators=(",", ":"))),
        "plotly": _plotly(),
        "script": "\n".join(_asset(f"{name}.js") for name in SCRIPTS),
        "data": f'<a href="{data}" download>All records</a>' if data else "",
    }
    # One pass, so that marks inside the contents are left alone.
    pieces = _asset("page.html").split("@@")
    return "".join(contents[piece] if i % 2 else piece for i, piece in enumerate(pieces))
