"""PTX text to statements, operands and literals."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
# Line information ends with its line, not with a semicolon.
_LINE_INFO = re.compile(r"^[ \t]*\.(?:loc|file)\b[^\n]*$", re.MULTILINE)
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_FLOAT_BITS = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}")
_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_DECIMAL = re.compile(r"[-+]?\d+\.\d*(e[-+]?\d+)?")


class PtxError(ValueError):
    """PTX that the parser cannot read."""


def strip_comments(text: str) -> str:
    """Blank out comments and line information. Line numbers stay the same."""
    text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)
    return _LINE_INFO.sub("", text)


def split_operands(text: str) -> list[str]:
    """Split a list of operands at the commas outside brackets."""
    operands: list[str] = []
    depth = start = 0
    for i, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and depth == 0:
            operands.append(text[start:i].strip())
            start = i + 1
    if remainder := text[start:].strip():
        operands.append(remainder)
    return operands


def matching_brace(text: str, start: int) -> int:
    """Return the position of the brace that closes the one at ``start``."""
    depth = 0
    for m in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if m.group() == "{" else -1
        if depth == 0:
            return m.start()
    raise PtxError("a brace is not closed")


@dataclass(frozen=True)
class Statement:
    """One step of a function body.

    Attributes:
        kind: ``"open"`` or ``"close"`` (a scope), ``"label"``, or ``"statement"``.
        text: Name of the label, or the statement without its semicolon.
        line: Line of the PTX text.
    """

    kind: str
    text: str
    line: int


def statements(body: str, line: int) -> Iterator[Statement]:
    """Yield the statements of a function body that starts at ``line``."""
    pos = 0
    while pos < len(body):
        ch = body[pos]
        if ch.isspace():
            line += ch == "\n"
            pos += 1
        elif ch in "{}":
            yield Statement("open" if ch == "{" else "close", "", line)
            pos += 1
        elif m := _LABEL.match(body, pos):
            yield Statement("label", m.group(1), line)
            line += m.group().count("\n")
            pos = m.end()
        else:
            end = body.find(";", pos)
            if end < 0:
                raise PtxError(f"line {line}: a statement has no end")
            yield Statement("statement", body[pos:end].strip(), line)
            line += body.count("\n", pos, end)
            pos = end + 1


def literal(text: str) -> int | None:
    """Return the bits of a literal, or None if ``text`` is none. A decimal float is an f32."""
    if _FLOAT_BITS.fullmatch(text):
        return int("0x" + text[2:], 0)
    if _INTEGER.fullmatch(text):
        text = text.rstrip("U")
        return int(text, 8) if re.fullmatch(r"0\d+", text) else int(text, 0)
    return (
        int(struct.unpack("<I", struct.pack("<f", float(text)))[0])
        if _DECIMAL.fullmatch(text)
        else None
    )


def literals(text: str) -> list[int]:
    """Return the bits of all literals in ``text``."""
    return [value for word in re.split(r"[{},\s]+", text) if (value := literal(word)) is not None]
