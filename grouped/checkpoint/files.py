"""Folders of safetensors files: read by name, written shard by shard."""

import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError as error:
    raise ImportError(
        "grouped.checkpoint needs safetensors: pip install 'grouped-kernels[checkpoint]'"
    ) from error

#: The most bytes of a file, by default.
SHARD_BYTES = 5 * 10**9
#: The configuration files of a folder, of which ModelOpt writes the second one, too.
CONFIG, MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
#: The file that a writer makes first in its folder and removes last.
CLAIM = ".writing-checkpoint"
_INDEX = "model.safetensors.index.json"
#: How the names of files end that a new checkpoint would be mixed with.
OF_CHECKPOINTS = (".safetensors", ".safetensors.index.json", MODELOPT_CONFIG)


def progress(items: Any, what: str) -> Any:
    """``items`` with a progress bar on a terminal, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, what, disable=None)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file has; {} if there is no such file.

    Raises:
        ValueError: the file is no JSON, or is not an object.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _read_index(path: Path) -> dict[str, str]:
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(file, str) and file for file in files.values()
    ):
        raise ValueError(
            f"{path} has no weight_map of files: it must map names of tensors to names of files"
        )
    outside = [
        file for file in files.values() if Path(file).is_absolute() or ".." in Path(file).parts
    ]
    if outside:
        raise ValueError(f"{path} names files outside of its folder: {outside[0]}")
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from None


class Header(NamedTuple):
    """Shape and dtype of a tensor, as its file states them; the dtype by its name in safetensors,
    such as ``"BF16"``.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


#: Names that safetensors gives to floating-point dtypes which need no scales.
PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")


class Reader:
    """The tensors of a folder by name; each is read when it is asked for.

    Attributes:
        folder: the folder.
        bytes_read: bytes of all tensors, and parts of tensors, that were read.

    Raises:
        FileNotFoundError: the folder has no safetensors file, or lacks one that its index
            names.
        ValueError: a file or the index is damaged, two files have a tensor of one name and no
            index says which counts, or the index names files outside of the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.bytes_read = Path(folder), 0
        if (self.folder / CLAIM).exists():
            raise ValueError(f"{self.folder} is not finished: {claim_message(self.folder)}")
        index = self.folder / _INDEX
        indexed = _read_index(index) if index.exists() else None
        names = sorted(
            {path.name for path in self.folder.glob("*.safetensors")}
            if indexed is None
            else {*indexed.values()}
        )
        missing = [str(self.folder / name) for name in names if not (self.folder / name).exists()]
        if missing or not names:
            raise FileNotFoundError(
                f"no safetensors file {', '.join(missing) or f'in {self.folder}'}"
            )
        files = {name: _open(self.folder / name) for name in names}
        if indexed is None:
            indexed = {}
            for file, opened in files.items():
                for name in opened.keys():  # noqa: SIM118
                    if indexed.setdefault(name, file) != file:
                        raise ValueError(
                            f"{self.folder / indexed[name]} and {file} both have {name}: remove one of them"
                        )
        tensors = {file: set(opened.keys()) for file, opened in files.items()}
        for name, file in indexed.items():
            if name not in tensors[file]:
                raise ValueError(f"{index} is wrong: {file} has no {name}")
        self._files, self._file_names = files, indexed

    def __contains__(self, name: object) -> bool:
        return name in self._file_names

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_names)

    def __len__(self) -> int:
        return len(self._file_names)

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name, lambda file: file.get_tensor(name))

    def rows(self, name: str, rows: slice) -> Tensor:
        """Rows of a tensor, along its first dimension; nothing else of it is read."""
        return self._read(name, lambda file: file.get_slice(name)[rows])

    def header(self, name: str) -> Header:
        """Shape and dtype of a tensor, without reading it."""
        stored = self._files[self._file_names[name]].get_slice(name)
        return Header(tuple(stored.get_shape()), stored.get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self.header(name).shape

    def path(self, name: str) -> Path:
        """The file that has a tensor."""
        return self.folder / self._file_names[name]

    def where(self, name: str) -> str:
        """A tensor and its file, for messages."""
        return f"{name} in {self.path(name)}"

    def config(self) -> dict[str, Any]:
        """``config.json``; {} if there is none.

        Raises:
            ValueError: it is no JSON object.
        """
        return read_json(self.folder / CONFIG)

    def _read(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        try:
            tensor = read(self._files[self._file_names[name]])
        except (SafetensorError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"{self.where(name)} cannot be read as {self.header(name)}: {error}"
            ) from None
        self.bytes_read += tensor.nbytes
        return tensor


class Writer:
    """Writes tensors to files of at most ``shard_bytes``, and their index.

    Tensors are held until a file is full, so up to ``shard_bytes`` and one tensor are in memory.

    The folder belongs to one writer from the constructor to ``close``: a file named ``CLAIM`` says
    so, and ``Reader`` refuses a folder that has one. Temporary files are renamed at the end, the
    index last. If there is an error inside the ``with`` block, the writer removes its own files and
    no others.

    Raises:
        FileExistsError: the folder has files of a checkpoint, or another writer's claim.
        ValueError: ``shard_bytes`` is no positive integer, or a name is added twice.
        OSError: a file cannot be written.
    """

    def __init__(self, folder: str | Path, shard_bytes: int) -> None:
        if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes <= 0:
            raise ValueError(
                f"shard_bytes must be a positive integer, such as 5 * 10**9 for 5 GB, got {shard_bytes!r}"
            )
        self._folder, self._most = Path(folder), shard_bytes
        self._folder.mkdir(parents=True, exist_ok=True)
        self._token = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        _claim(self._folder, self._token)
        self._written: list[Path] = []
        self._held: dict[str, Tensor] = {}
        self._shards: list[tuple[str, ...]] = []
        self._names = set[str]()
        self._bytes = self._total = 0
        present = sorted(
            path.name for path in self._folder.iterdir() if path.name.endswith(OF_CHECKPOINTS)
        )
        if present:
            self._release()
            kind = (
                "safetensors files"
                if present[0].endswith(".safetensors")
                else "files of a checkpoint"
            )
            raise FileExistsError(
                f"{self._folder} has {kind} ({present[0]}): choose another folder"
            )

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for path in self._written if kind else ():
            path.unlink(missing_ok=True)
        self._release()

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors that were added."""
        return self._names

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; a full file is written."""
        if name in self._names:
            raise ValueError(f"two tensors would be called {name!r}")
        self._names.add(name)
        if self._held and self._bytes + tensor.nbytes > self._most:
            self._flush()
        self._held[name] = tensor.detach().cpu().contiguous().clone()
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def close(
        self, write_json: Callable[[], dict[str, Any]] = dict, copies: Sequence[Path] = ()
    ) -> None:
        """Finish the folder.

        Args:
            write_json: returns the content of JSON files by name. It is called when all tensors
                are written.
            copies: files to copy into the folder.
        """
        self._flush()
        contents = {name: json.dumps(content, indent=2) for name, content in write_json().items()}
        self._check_claim()
        for path in copies:
            shutil.copy2(path, self._own(path.name))
        for name, text in contents.items():
            self._write_text(name, text)
        count, files = len(self._shards), dict[str, str]()
        for i, shard in enumerate(self._shards):
            file = (
                "model.safetensors"
                if count == 1
                else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            )
            self._part(i).rename(self._own(file))
            files |= dict.fromkeys(shard, file)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": files}
            self._write_text(_INDEX, json.dumps(index, indent=2))
        self._release()

    def _own(self, name: str) -> Path:
        """The path of a file that this writer makes, and removes if there is an error."""
        self._written.append(self._folder / name)
        return self._written[-1]

    def _write_text(self, name: str, text: str) -> None:
        part = self._own(f"{name}.{self._token}.partial")
        try:
            part.write_text(text)
        except OSError as error:  # Where a disk is full, the system's error names no file.
            raise OSError(error.errno, f"{part} cannot be written: {error.strerror}") from None
        part.replace(self._own(name))

    def _part(self, index: int) -> Path:
        return self._folder / f"shard-{index}.{self._token}.partial"

    def _flush(self) -> None:
        if self._held:
            part = self._own(self._part(len(self._shards)).name)
            try:
                save_file(self._held, part, {"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{part} cannot be written: {error}") from None
            self._shards.append(tuple(self._held))
        self._held, self._bytes = {}, 0

    def _check_claim(self) -> None:
        if _claimed(self._folder).get("token") != self._token:
            raise FileExistsError(
                f"{self._folder / CLAIM} was removed or replaced while this process wrote to the folder: choose another folder"
            )

    def _release(self) -> None:
        if _claimed(self._folder).get("token") == self._token:
            (self._folder / CLAIM).unlink(missing_ok=True)


def _claim(folder: Path, token: str) -> None:
    """Make the claim file of a folder, which fails if there is one."""
    text = json.dumps(
        {"pid": os.getpid(), "host": socket.gethostname(), "time": time.ctime(), "token": token}
    )
    try:
        with (folder / CLAIM).open("x") as file:
            file.write(text)
    except FileExistsError:
        raise FileExistsError(f"{folder} is in use: {claim_message(folder)}") from None


def _claimed(folder: Path) -> dict[str, Any]:
    """The content of the claim file; {} if there is none that can be read."""
    try:
        content = json.loads((folder / CLAIM).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def claim_message(folder: Path) -> str:
    """The process that claims a folder, and how to free the folder."""
    claim = _claimed(folder)
    pid, host = claim.get("pid", "unknown"), claim.get("host", "unknown")
    text = f"process {pid} on {host} writes a checkpoint there since {claim.get('time', 'an unknown time')}"
    if host == socket.gethostname() and isinstance(pid, int) and not _is_running(pid):
        text = f"process {pid} wrote a checkpoint there and has ended before it finished"
    out = f"If no process writes to it, remove {folder / CLAIM} and the *.partial files, or choose another folder"
    return f"{text}. {out}"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
