"""What a function does to tensors, done again without the Python that decides on it.

Checks, choices and look-ups of ops take longer on the host than launches, and come to the same for
tensors with the same metadata. So the second call with such tensors is recorded, and later ones
repeat it: allocations, launches and PyTorch's own functions in their order, on the current stream.

It is recorded below the dispatcher, ops of this package taken apart. What reads values on the host,
or takes a tensor that is neither given nor made inside, is never repeated.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..runtime.backend import Choice, chosen_backend, resolve_backend
from ..runtime.plan import plan_key
from . import registry
from .arguments import ALIGNMENT

if TYPE_CHECKING:
	from ..runtime.launch import Launcher

#: Tensors and Nones, and anything else that follows from metadata alone.
Found: TypeAlias = "tuple[Sequence[Any], Any]"
#: A function, what reads its arguments from the values, the place of its result (0: none), and what ends.
_Step: TypeAlias = "tuple[Callable[..., Any], Callable[[list[Any]], Sequence[Any]], int, Sequence[int]]"

_aten = torch.ops.aten
#: The same without the dispatcher's reading of schemas, which takes a microsecond.
_QUICK: dict[Any, Callable[..., Any]] = {
	_aten.view.default: Tensor.view,
	_aten.unsqueeze.default: Tensor.unsqueeze,
	_aten.full.default: torch.full,
	_aten.empty_strided.default: torch.empty_strided,
}
#: What depends on values, which are not in the key.
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Plans of calls that are to be recorded, and of those that cannot be.
_SEEN, _NEVER = object(), object()


def replayed(
	key: Hashable, given: Sequence[Any], function: Callable[[], Found], plain: frozenset[type] = registry.PLAIN
) -> Found:
	"""``function()``, repeated where nothing observes the call.

	Args:
	  key: what decides what the function does, but for the metadata of ``given`` and the backend.
	  given: all tensors that it reads or returns without having made them, and Nones.
	  function: it writes what it makes, and changes nothing else.
	  plain: classes of tensors that need no dispatcher.
	"""
	if registry.is_observed(given, plain):
		return function()
	choice, plans = chosen_backend(), registry._plans
	full = plan_key(key, choice, given)
	plan = plans.get(full)
	if type(plan) is Recording:
		return plan.repeat(given) if plan.fits(given) else function()
	tensors = [t for t in given if t is not None]
	if plan is None:
		device = tensors[0].device
		has_kernels = device.type != "meta" and resolve_backend(choice, device).arch != "reference"
		plans.add(full, _SEEN if has_kernels else _NEVER)
	# Tensors that are the same now may be others next time.
	elif plan is _SEEN and len(set(map(id, tensors))) == len(tensors):
		with _Recorder(choice, given) as recorder:
			found = function()
		plans.add(full, recorder.recording(*found) or _NEVER)
		return found
	return function()


class Recording:
	"""A call that can be repeated. It holds none of its tensors."""

	def __init__(self, given: Sequence[Any], constants: list[Any], steps: list[_Step], found: list[int], more: Any):
		# A tensor that wraps others has no address.
		self._offsets = [(i, t.data_ptr() % ALIGNMENT) for i, t in enumerate(given) if type(t) in registry.PLAIN]
		self._index = next((t.device.index for t in given if t is not None and t.is_cuda), None)
		self._constants, self.steps, self._found, self._more = constants, steps, _getter(found), more

	def fits(self, given: Sequence[Any]) -> bool:
		"""Whether tensors of the same metadata lie where these could, and new ones go there."""
		if self._index is not None and (registry._get_device or torch.cuda.current_device)() != self._index:
			return False
		return self._offsets == [(i, given[i].data_ptr() % ALIGNMENT) for i, _ in self._offsets]

	def repeat(self, given: Sequence[Any]) -> Found:
		"""Do it again with these."""
		values: list[Any] = [*given, *self._constants]
		for function, arguments, place, ended in self.steps:
			result = function(*arguments(values))
			if place:
				values[place] = result
			for i in ended:
				values[i] = None
		return self._found(values), self._more


def _getter(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
	"""What reads a tuple of values, of at least one place."""
	return operator.itemgetter(*places) if len(places) > 1 else lambda values: (values[places[0]],)


class _Recorder(TorchDispatchMode):
	"""Notes what a call does."""

	def __init__(self, choice: Choice, given: Sequence[Any]) -> None:
		super().__init__()  # type: ignore[no-untyped-call]
		self._choice, self._given = choice, given
		self._values: list[Any] = [None] * len(given)
		#: Function, places of arguments, place of the result, whether it writes what is there.
		self._steps: list[tuple[Callable[..., Any], list[int], int, bool]] = []
		#: Weak, for temporary tensors to be freed as ever.
		self._places = {id(t): (weakref.ref(t), i) for i, t in enumerate(given) if t is not None}
		self._made: set[int] = set()
		self._is_whole = True
		self._launches = 0

	def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
		kwargs = kwargs or {}
		cls = registry.FUNCTIONAL.get(func)
		if cls is None:
			result = func(*args, **kwargs)
			self._note_function(func, args, kwargs, result)
			return result
		op, before = cls(*args, **kwargs), self._launches
		with self:
			outputs = op.plan(resolve_backend(self._choice, op.device), self._launcher).compute(op)
		# Else the reference computes, as for what kernels do not take.
		self._is_whole &= self._launches > before
		return outputs if cls.returns_list else outputs[0]

	def _launcher(self, launch: Launcher) -> Any:
		"""A launcher whose launches are noted."""

		def kernel(spec: Any) -> Callable[..., None]:
			kernel = launch.kernel(spec)

			def run(*arguments: Any) -> None:
				self._launches += 1
				self._note(kernel, arguments)
				with _disable_current_modes():  # An emulated kernel looks into tensors.
					kernel(*arguments)

			return run

		return types.SimpleNamespace(arch=launch.arch, num_sms=launch.num_sms, kernel=kernel)

	def _note_function(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
		if not isinstance(result, Tensor) or func.namespace != "aten" or _OF_VALUES.intersection(func.tags):
			self._is_whole = False
			return
		function: Callable[..., Any] = _QUICK.get(func, func)
		leaves, spec = tree_flatten((args, kwargs))
		if func is _aten.empty_strided.default and result.is_cuda and registry._empty_strided_cuda:
			function, args = registry._empty_strided_cuda, (tuple(args[0]), tuple(args[1]), result.dtype)
		elif sum(isinstance(t, Tensor) for t in leaves) > sum(isinstance(t, Tensor) for t in args):
			function, args = functools.partial(_unflattened, function, spec), leaves
		elif kwargs:
			function = functools.partial(function, **kwargs)
		self._note(function, args, result, func._schema.is_mutable)

	def _note(
		self, function: Callable[..., Any], arguments: Sequence[Any], result: Tensor | None = None, writes: bool = True
	) -> None:
		places, new = [self._place(a) for a in arguments], 0
		if result is not None and self._find(result) is None:
			self._values.append(None)
			new = len(self._values) - 1
			self._made.add(new)
			self._places[id(result)] = weakref.ref(result), new
		self._steps.append((function, places, new, writes))

	def _find(self, tensor: Tensor) -> int | None:
		known, place = self._places.get(id(tensor), (None, 0))
		return place if known is not None and known() is tensor else None

	def _place(self, value: Any) -> int:
		"""Where an argument is among the values."""
		if isinstance(value, Tensor):
			place = self._find(value)
			self._is_whole &= place is not None
			return place or 0
		self._values.append(value)
		return len(self._values) - 1

	def recording(self, outputs: Sequence[Any], more: Any) -> Recording | None:
		"""The recording of a call that found this; None if it cannot be repeated."""
		found = [self._place(t) for t in outputs]
		# From the last: whose results nothing needs, and who is the last to need something.
		steps: list[_Step] = []
		live = set(found)
		for function, arguments, result, writes in reversed(self._steps):
			if writes or result in live:
				read = self._made.intersection(arguments)
				steps.insert(0, (function, _getter(arguments), result, tuple(read - live)))
				live |= read
		return Recording(self._given, self._values[len(self._given) :], steps, found, more) if self._is_whole else None


def _unflattened(function: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
	args, kwargs = tree_unflatten(leaves, spec)
	return function(*args, **kwargs)
