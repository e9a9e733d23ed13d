"""Reading of token ids, or of text, from the file that calibrates a model."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Keys of ids and of text, in rows and in files of tensors.
_IDS, _TEXT = "input_ids", "text"


def read_ids(path: str | Path, model: str | Path | None = None) -> list[Tensor]:
    """Read the token ids of a file.

    Args:
        path: The file. Its extension decides the form:

            * ``.json``: A list of ids, or of rows.
            * ``.jsonl``: One row per line.
            * ``.npy``, ``.safetensors``, ``.pt``: One tensor, or the tensor ``input_ids``. It has
              one sequence, or one sequence per row.
            * Other files with numbers only: One sequence of ids per line.
            * Other files: Text.

            A row is a list of ids, a text, or an object with ``input_ids`` or ``text``. The
            tokenizer of ``model`` converts text to ids.
        model: The folder with the tokenizer.

    Returns:
        A tensor (tokens,), int64, per sequence.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, has no ids, or has text and there is no tokenizer.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path} to calibrate with")
    sequences = [ids for ids in _READERS.get(path.suffix, _from_text)(path, model) if ids.numel()]
    if not sequences:
        raise ValueError(f"{path} has no token ids")
    return sequences


def _sequences(path: Path, row: Any, model: str | Path | None) -> Iterator[Tensor]:
    """Yield the sequences of a row or of an array. Raise ValueError unless they are integers."""
    if isinstance(row, dict):
        row = row.get(_IDS, row.get(_TEXT))
    if isinstance(row, str):
        yield _tokenize(path, row, model)
        return
    try:
        ids = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{path} must hold token ids, text, or lists of them, got {str(row)[:60]}"
        ) from None
    is_integer = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.numel() and not (is_integer and ids.dim() in (1, 2)):
        array = f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise ValueError(
            f"{path} must hold integers, one sequence or a sequence a row, got {array}"
        )
    yield from ids.long() if ids.dim() == 2 else [ids.long()]


def _tokenize(path: Path, text: str, model: str | Path | None) -> Tensor:
    """Return the ids (tokens,) of a text, by the tokenizer of ``model``."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # transformers raises many kinds for a folder without a tokenizer.
        raise ValueError(
            f"{path} has text, and {model} has no tokenizer: {str(error).splitlines()[0]}"
        ) from None
    return torch.tensor(tokenizer(text, verbose=False)[_IDS], dtype=torch.long)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from None


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def _from_json(path: Path, model: str | Path | None) -> Iterator[Tensor]:
    """Return the sequences of a list of ids, or of a list of rows."""
    value = _json(path, _text(path))
    if not isinstance(value, list):
        raise ValueError(
            f"{path} must hold a list of token ids, or of rows, got {type(value).__name__}"
        )
    has_rows = any(isinstance(row, list | str | dict) for row in value)
    return (ids for row in (value if has_rows else [value]) for ids in _sequences(path, row, model))


def _from_json_lines(path: Path, model: str | Path | None) -> Iterator[Tensor]:
    lines = [line for line in _text(path).splitlines() if line.strip()]
    return (ids for line in lines for ids in _sequences(path, _json(path, line), model))


def _from_npy(path: Path, model: object) -> Iterator[Tensor]:
    """Return the sequences of a file of NumPy."""
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not an array of numbers: {error}") from None
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{path} must hold integers, one sequence or a sequence a row, got {array.dtype}"
        )
    return _sequences(path, array.astype(np.int64), None)


def _from_tensors(path: Path, tensors: Any) -> Iterator[Tensor]:
    """Return the sequences of a tensor, or of a dictionary of tensors."""
    if isinstance(tensors, dict):
        if len(tensors) != 1 and _IDS not in tensors:
            raise ValueError(
                f"{path} must have one tensor, or one called {_IDS}, got "
                f"{', '.join(tensors) or 'none'}"
            )
        tensors = tensors[_IDS] if _IDS in tensors else next(iter(tensors.values()))
    return _sequences(path, tensors, None)


def _from_safetensors(path: Path, model: object) -> Iterator[Tensor]:
    """Return the sequences of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from None
    return _from_tensors(path, tensors)


def _from_pt(path: Path, model: object) -> Iterator[Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for files that it did not save.
        raise ValueError(f"{path} is not a file of tensors: {str(error).splitlines()[0]}") from None
    return _from_tensors(path, tensors)


def _from_text(path: Path, model: str | Path | None) -> Iterator[Tensor]:
    text = _text(path)
    if re.fullmatch(r"[\d\s,]*", text):
        return (
            torch.tensor([int(i) for i in re.findall(r"\d+", line)], dtype=torch.long)
            for line in text.splitlines()
        )
    return _sequences(path, text, model)


#: Functions that read a file, by its extension.
_READERS: dict[str, Callable[[Path, str | Path | None], Iterator[Tensor]]] = {
    ".json": _from_json,
    ".jsonl": _from_json_lines,
    ".npy": _from_npy,
    ".safetensors": _from_safetensors,
    ".pt": _from_pt,
}
