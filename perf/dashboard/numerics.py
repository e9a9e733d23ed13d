"""Files that ``grouped.inspect`` saved, as the page reads them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Versions of the file format that are read. Version 1 called the list ``global_scale``
#: ``second_level``.
_SCHEMAS = (1, 2)
#: Lists that the page shows, with one number per expert.
QUANTITIES = ("snr_db", "saturated", "underflow", "amax", "rows", "global_scale", "nonfinite")
_NAMES = ("run", "step", "layer", "role", "direction", "format")


def read_numerics(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the records of numerics of files.

    A later record replaces an earlier one of the same run, step, layer and operand.

    Raises:
        ValueError: A line is not a record of numerics, or of another version.
    """
    records: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                if record["numerics"] not in _SCHEMAS:
                    raise ValueError(f"its version is {record['numerics']}, not one of {_SCHEMAS}")
                if record["numerics"] == 1:
                    record["global_scale"] = record["second_level"]
                shown = {name: record[name] for name in (*_NAMES, *QUANTITIES)}
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}, is not a record of numerics: {error}"
                ) from error
            records[tuple(record[name] for name in _NAMES)] = shown
    return list(records.values())
