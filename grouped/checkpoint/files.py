"""Folders of safetensors files: tensors are read by name and written shard by shard."""

import contextlib
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

#: Default limit of the bytes in a file.
SHARD_BYTES = 5 * 10**9
#: Names of the configuration files in a folder. ModelOpt writes the latter.
CONFIG, MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
#: Name of the file that a writer creates first in its folder and removes last.
CLAIM = ".writing-checkpoint"
_INDEX = "model.safetensors.index.json"
#: Name suffixes of checkpoint files, which must not be in the folder of a new checkpoint.
CHECKPOINT_SUFFIXES = (".safetensors", ".safetensors.index.json", MODELOPT_CONFIG)


def progress(items: Any, label: str) -> Any:
    """Return ``items`` with a progress bar on a terminal, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, label, disable=None)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is no such file.

    Raises:
        ValueError: The file is not valid JSON, or has no object.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor name in an index.

    Raises:
        ValueError: There is no such mapping, or it names files outside of the folder.
    """
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
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from None


class Header(NamedTuple):
    """Shape and dtype of a tensor in a file.

    Attributes:
        shape: The shape.
        dtype: The name of the dtype in safetensors, such as ``"BF16"``.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


#: Names in safetensors of the floating-point dtypes that need no scales.
PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")


class Reader:
    """Mapping from names to the tensors of a folder. Each access reads a tensor.

    Attributes:
        folder: The folder.
        bytes_read: Bytes of all tensors and slices that were read.

    Raises:
        FileNotFoundError: The folder has no safetensors file, or lacks a file that its index
            names.
        ValueError: A file or the index is damaged. Or two files have a tensor of the same name and
            there is no index. Or the index names files outside of the folder.
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
                            f"{self.folder / indexed[name]} and {file} both have {name}: remove "
                            "one of them"
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
        """Read rows of a tensor along its leading dimension, and nothing else of it."""
        return self._read(name, lambda file: file.get_slice(name)[rows])

    def header(self, name: str) -> Header:
        """Return shape and dtype of a tensor without reading it."""
        stored = self._files[self._file_names[name]].get_slice(name)
        return Header(tuple(stored.get_shape()), stored.get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self.header(name).shape

    def path(self, name: str) -> Path:
        """Return the path of the file that has a tensor."""
        return self.folder / self._file_names[name]

    def describe(self, name: str) -> str:
        """Return the names of a tensor and its file, for messages."""
        return f"{name} in {self.path(name)}"

    def config(self) -> dict[str, Any]:
        """Return the content of ``config.json``, or {} if there is none.

        Raises:
            ValueError: The file has no JSON object.
        """
        return read_json(self.folder / CONFIG)

    def _read(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        """Call ``read`` on the open file of a tensor, and count the bytes."""
        try:
            tensor = read(self._files[self._file_names[name]])
        except (SafetensorError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"{self.describe(name)} cannot be read as {self.header(name)}: {error}"
            ) from None
        self.bytes_read += tensor.nbytes
        return tensor


class Writer:
    """Writer of tensors to files of at most ``shard_bytes``, with an index of the files.

    Tensors stay in memory until a file is full: up to ``shard_bytes`` plus one tensor.

    The folder belongs to one writer from the constructor to ``close``. The file ``CLAIM`` marks
    this, and ``Reader`` refuses a folder that has one. Temporary files are renamed at the end, the
    index after all others. If there is an error inside the ``with`` block, the writer removes its
    files and no others.

    Args:
        folder: The folder. It is created if it does not exist.
        shard_bytes: Limit of the bytes in a file. A larger tensor gets a file by itself.

    Raises:
        FileExistsError: The folder has files of a checkpoint, or another writer's claim.
        ValueError: ``shard_bytes`` is not a positive integer, or a name is added twice.
        OSError: A file cannot be written.
    """

    def __init__(self, folder: str | Path, shard_bytes: int) -> None:
        if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes <= 0:
            raise ValueError(
                "shard_bytes must be a positive integer, such as 5 * 10**9 for 5 GB, got "
                f"{shard_bytes!r}"
            )
        self._folder, self._shard_bytes = Path(folder), shard_bytes
        self._folder.mkdir(parents=True, exist_ok=True)
        self._token = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        _claim(self._folder, self._token)
        self._written: list[Path] = []
        self._pending: dict[str, Tensor] = {}
        self._shards: list[tuple[str, ...]] = []
        self._names = set[str]()
        self._bytes = self._total = 0
        present = sorted(
            path.name for path in self._folder.iterdir() if path.name.endswith(CHECKPOINT_SUFFIXES)
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
        """Add a tensor, and write a file if it is full."""
        if name in self._names:
            raise ValueError(f"two tensors would be called {name!r}")
        self._names.add(name)
        if self._pending and self._bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().cpu().contiguous().clone()
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def close(
        self, write_json: Callable[[], dict[str, Any]] = dict, copies: Sequence[Path] = ()
    ) -> None:
        """Finish the folder.

        Args:
            write_json: Returns the content of JSON files by name. It is called after all tensors
                are written.
            copies: Paths of files to copy into the folder.
        """
        self._flush()
        contents = {name: json.dumps(content, indent=2) for name, content in write_json().items()}
        self._check_claim()
        for path in copies:
            shutil.copy2(path, self._register(path.name))
        for name, text in contents.items():
            self._write_text(name, text)
        count, files = len(self._shards), dict[str, str]()
        for i, shard in enumerate(self._shards):
            file = (
                "model.safetensors"
                if count == 1
                else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            )
            self._shard_path(i).rename(self._register(file))
            files |= dict.fromkeys(shard, file)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": files}
            self._write_text(_INDEX, json.dumps(index, indent=2))
        self._release()

    def _register(self, name: str) -> Path:
        """Return the path of a file that this writer creates, and removes if there is an error."""
        self._written.append(self._folder / name)
        return self._written[-1]

    def _write_text(self, name: str, text: str) -> None:
        """Write a text file under a temporary name, and rename it."""
        partial = self._register(f"{name}.{self._token}.partial")
        try:
            partial.write_text(text)
        except OSError as error:  # The system's error for a full disk names no file.
            raise OSError(error.errno, f"{partial} cannot be written: {error.strerror}") from None
        partial.replace(self._register(name))

    def _shard_path(self, index: int) -> Path:
        return self._folder / f"shard-{index}.{self._token}.partial"

    def _flush(self) -> None:
        """Write the pending tensors to a temporary file."""
        if self._pending:
            partial = self._register(self._shard_path(len(self._shards)).name)
            try:
                save_file(self._pending, partial, {"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{partial} cannot be written: {error}") from None
            # safetensors makes files that only their owner reads; the claim has the umask's mode.
            with contextlib.suppress(FileNotFoundError):
                partial.chmod((self._folder / CLAIM).stat().st_mode & 0o777)
            self._shards.append(tuple(self._pending))
        self._pending, self._bytes = {}, 0

    def _check_claim(self) -> None:
        if _read_claim(self._folder).get("token") != self._token:
            raise FileExistsError(
                f"{self._folder / CLAIM} was removed or replaced while this process wrote to the "
                "folder: choose another folder"
            )

    def _release(self) -> None:
        if _read_claim(self._folder).get("token") == self._token:
            (self._folder / CLAIM).unlink(missing_ok=True)


def _claim(folder: Path, token: str) -> None:
    """Create the claim file of a folder. Raise FileExistsError if there is one."""
    text = json.dumps(
        {"pid": os.getpid(), "host": socket.gethostname(), "time": time.ctime(), "token": token}
    )
    try:
        with (folder / CLAIM).open("x") as file:
            file.write(text)
    except FileExistsError:
        raise FileExistsError(f"{folder} is in use: {claim_message(folder)}") from None


def _read_claim(folder: Path) -> dict[str, Any]:
    """Return the content of the claim file, or {} if there is none that can be read."""
    try:
        content = json.loads((folder / CLAIM).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def claim_message(folder: Path) -> str:
    """Return a message about the process that claims a folder, and how to free the folder."""
    claim = _read_claim(folder)
    pid, host = claim.get("pid", "unknown"), claim.get("host", "unknown")
    start = claim.get("time", "an unknown time")
    text = f"process {pid} on {host} writes a checkpoint there since {start}"
    if host == socket.gethostname() and isinstance(pid, int) and not _is_running(pid):
        text = f"process {pid} wrote a checkpoint there and has ended before it finished"
    return (
        f"{text}. If no process writes to it, remove {folder / CLAIM} and the *.partial files, or "
        "choose another folder"
    )


def _is_running(pid: int) -> bool:
    """Return True if a process with this id exists on this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
