"""What ``grouped.inspect.inspect_quantization(...).save`` wrote, as the page reads it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Version of the form that is read.
_SCHEMA = 1
#: Lists with a number for each expert that the page shows.
QUANTITIES = ("snr_db", "saturated", "underflow", "amax", "rows", "second_level", "nonfinite")
_NAMES = ("run", "step", "layer", "role", "direction", "format")


def read_numerics(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """What the page draws of files; equal runs, layers and steps of later ones replace those of
    earlier ones.

    Raises:
        ValueError: a line is no record of numerics of the version that is read.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                if record["numerics"] != _SCHEMA:
                    raise ValueError(f"it is of version {record['numerics']}, not {_SCHEMA}")
                shown = {name: record[name] for name in (*_NAMES, *QUANTITIES)}
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}, is no record of numerics: {error}"
                ) from error
            found[tuple(record[name] for name in _NAMES)] = shown
    return list(found.values())
