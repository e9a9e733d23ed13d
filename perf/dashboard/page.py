"""The page: its parts and the records, put into one file."""

import base64
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..records import Record
from .things import payload

#: In the order in which they need each other.
SCRIPTS = ("dom", "data", "filters", "canvas", "plot", "tables", "plots", "views", "numerics", "main")


def _asset(name: str) -> str:
	return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def page(records: Sequence[Record], data: str = "", numerics: Sequence[Any] = ()) -> str:
	"""The whole page; ``data`` is the address of a file of the records, if there is one beside it.

	Raises:
		ValueError: there are no records.
	"""
	text = json.dumps(payload(records, numerics), separators=(",", ":"))
	parts = {
		"style": _asset("style.css"),
		"records": base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode(),
		"script": "\n".join(_asset(f"{name}.js") for name in SCRIPTS),
		"data": f'<a href="{data}" download>All records</a>' if data else "",
	}
	# One pass: no part is looked at for the marks of another.
	pieces = _asset("page.html").split("@@")
	return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
