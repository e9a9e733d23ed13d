"""A quantized weight that outlives a call, with what it was made from."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..passes import Copies
from ..recipes import Recipe
from ..shards import local_part


def can_keep(sources: Sequence[Tensor]) -> bool:
	"""Whether a change of these weights would be seen, and a copy of them outlive this call.

	Not so while something traces or transforms the call, and not for weights made under
	``inference_mode``, which count no versions.
	"""
	if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
		return False
	return all(type(local_part(t)) in (Tensor, nn.Parameter) and not t.is_inference() for t in sources)


def is_static(sources: Sequence[Tensor]) -> bool:
	"""Whether calls may read a copy of these weights though nobody said so.

	They are parameters, and the call is not captured or traced to be replayed after they change.
	"""
	if not all(isinstance(t, nn.Parameter) for t in sources):
		return False
	if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
		return False
	on_gpu = any(t.is_cuda for t in sources)
	return not (on_gpu and torch.cuda.is_current_stream_capturing())


def local(t: Any) -> Tensor:
	"""This rank's part of a DTensor, differentiable; else the tensor."""
	part: Tensor = t.to_local() if hasattr(t, "_local_tensor") else t
	return part


class KeptWeight:
	"""Quantized copies of a weight.

	A change of the weight is seen on the host, without reading it: it is another tensor, has
	another storage (``.data = ...``), or was written in place, which its version counts. Writes
	through ``.data`` count no version, in all of PyTorch, and are not seen.

	Args:
	  sources: the parameters that the weight consists of, and those that it was gathered from:
	    FSDP gathers into one tensor again and again without counting a version.
	  recipe: the recipe whose format the copies have.
	"""

	def __init__(self, sources: Sequence[Tensor], recipe: Recipe, copies: Copies) -> None:
		self.copies = copies
		self._recipe = recipe
		# Weak: a replaced weight is not kept alive. A weakly held storage is no other's address.
		self._tensors = [weakref.ref(t) for t in sources]
		self._storages = [StorageWeakRef(local_part(t).untyped_storage()) for t in sources]
		self._views = [_view(t) for t in sources]
		self._versions = [_version(t) for t in sources]

	@classmethod
	def of(cls, sources: Sequence[Tensor], recipe: Recipe, copies: Copies) -> KeptWeight | None:
		"""The copies, unless they are no tensors with data of their own (fake ones, say)."""
		if any(type(t) is not Tensor for copy in copies[:2] for t in copy or ()):
			return None
		return cls(sources, recipe, copies)

	@property
	def has_columnwise(self) -> bool:
		"""Whether the copy that the gradient of the input reads is kept."""
		return self.copies.columnwise is not None

	def change(self, sources: Sequence[Tensor], recipe: Recipe) -> str | None:
		"""What differs from the weight that was quantized; None if nothing does."""
		if recipe is not self._recipe and _weight_options(recipe) != _weight_options(self._recipe):
			return f"the recipe is {recipe}, and was {self._recipe}"
		if len(sources) != len(self._tensors):
			return "it is another tensor"
		for i, t in enumerate(sources):
			if self._tensors[i]() is not t:
				return "it is another tensor"
			storage = local_part(t).untyped_storage()._cdata
			if storage != self._storages[i].cdata or _view(t) != self._views[i]:
				return "its data is another tensor (.data = ...)"
			if _version(t) != self._versions[i]:
				return "it was written in place"
		return None


def _weight_options(recipe: Recipe) -> tuple[object, ...]:
	return recipe.weight, recipe.propagate_nonfinite


def _view(t: Tensor) -> tuple[object, ...]:
	local = local_part(t)
	return local.storage_offset(), local.dtype, local.shape, local.stride()


def _version(t: Tensor) -> tuple[int, int]:
	return t._version, local_part(t)._version
