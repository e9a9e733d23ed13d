"""Folders of safetensors files: read by name, written shard by shard."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

try:
	from safetensors import SafetensorError, safe_open
	from safetensors.torch import save_file
except ImportError as error:
	raise ImportError("grouped.checkpoint needs safetensors: pip install 'grouped-kernels[checkpoint]'") from error

#: The most bytes of a file, by default.
SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"


def progress(items: Any, what: str) -> Any:
	"""``items`` with a progress bar on a terminal, if tqdm is installed."""
	try:
		from tqdm import tqdm
	except ImportError:
		return items
	return tqdm(items, what, disable=None)


def _indexed(path: Path) -> dict[str, str] | None:
	if not path.exists():
		return None
	try:
		named: dict[str, str] = json.loads(path.read_text())["weight_map"]
		outside = [name for name in named.values() if Path(name).is_absolute() or ".." in Path(name).parts]
	except (KeyError, TypeError, AttributeError):
		raise ValueError(f"{path} has no weight_map of files") from None
	if outside:
		raise ValueError(f"{path} names files outside of its folder: {outside[0]}")
	return named


def _opened(path: Path) -> Any:
	try:
		return safe_open(path, "pt")
	except SafetensorError as error:
		raise ValueError(f"{path} is no whole safetensors file: {error}") from None


class Reader:
	"""The tensors of a folder by name; each is read when it is asked for.

	Raises:
		FileNotFoundError: the folder has no safetensors file, or lacks one that its index names.
		ValueError: a file or the index is damaged, two files have a tensor of one name and no index
			says which counts, or the index names files outside of the folder.
	"""

	def __init__(self, folder: str | Path) -> None:
		self.folder = Path(folder)
		named = _indexed(self.folder / _INDEX)
		names = sorted({path.name for path in self.folder.glob("*.safetensors")} if named is None else {*named.values()})
		missing = [str(self.folder / name) for name in names if not (self.folder / name).exists()]
		if missing or not names:
			raise FileNotFoundError(f"no safetensors file {', '.join(missing) or f'in {self.folder}'}")
		files = {name: _opened(self.folder / name) for name in names}
		if named is None:
			named = {}
			for file, opened in files.items():
				for name in opened.keys():  # noqa: SIM118
					if named.setdefault(name, file) != file:
						raise ValueError(f"{self.folder / named[name]} and {file} both have {name}: remove one of them")
		held = {file: set(opened.keys()) for file, opened in files.items()}
		for name, file in named.items():
			if name not in held[file]:
				raise ValueError(f"{self.folder / _INDEX} is wrong: {file} has no {name}")
		self._of = {name: files[file] for name, file in named.items()}

	def __contains__(self, name: object) -> bool:
		return name in self._of

	def __iter__(self) -> Iterator[str]:
		return iter(self._of)

	def __len__(self) -> int:
		return len(self._of)

	def __getitem__(self, name: str) -> Tensor:
		return self._of[name].get_tensor(name)

	def shape(self, name: str) -> tuple[int, ...]:
		"""The shape of a tensor, without reading it."""
		return tuple(self._of[name].get_slice(name).get_shape())

	def facts(self, name: str) -> tuple[tuple[int, ...], str]:
		"""Shape and dtype, likewise."""
		return self.shape(name), self._of[name].get_slice(name).get_dtype()

	def config(self) -> dict[str, Any]:
		"""``config.json``; {} if there is none."""
		path = self.folder / "config.json"
		return json.loads(path.read_text()) if path.exists() else {}


class Writer:
	"""Writes tensors to files of at most ``shard_bytes``, and their index.

	What is not yet written is held, so up to ``shard_bytes`` and one tensor.

	Used as a context, it removes what it wrote if there is an error.

	Raises:
		FileExistsError: the folder has safetensors files.
		ValueError: a name is added twice.
	"""

	def __init__(self, folder: str | Path, shard_bytes: int) -> None:
		self._folder, self._most = Path(folder), shard_bytes
		self._folder.mkdir(parents=True, exist_ok=True)
		if any(self._folder.glob("*.safetensors")):
			raise FileExistsError(f"{self._folder} has safetensors files: choose another folder")
		self._held: dict[str, Tensor] = {}
		self._shards: list[tuple[str, ...]] = []
		self._names = set[str]()
		self._bytes = self._total = 0

	def __enter__(self) -> "Writer":
		return self

	def __exit__(self, kind: object, *_: object) -> None:
		for i in range(len(self._shards) + 1 if kind else 0):
			self._part(i).unlink(missing_ok=True)

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

	def close(self, write_json: Callable[[], dict[str, Any]] = dict) -> None:
		"""Write the rest, the index, and JSON files by name."""
		self._flush()
		count, names = len(self._shards), dict[str, str]()
		for i, shard in enumerate(self._shards):
			file = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
			self._part(i).rename(self._folder / file)
			names |= dict.fromkeys(shard, file)
		files = {_INDEX: {"metadata": {"total_size": self._total}, "weight_map": names}} if count > 1 else {}
		for name, content in (files | write_json()).items():
			(self._folder / name).write_text(json.dumps(content, indent=2))

	def _part(self, index: int) -> Path:
		return self._folder / f"shard-{index}.partial"

	def _flush(self) -> None:
		if self._held:
			save_file(self._held, self._part(len(self._shards)), {"format": "pt"})
			self._shards.append(tuple(self._held))
		self._held, self._bytes = {}, 0
