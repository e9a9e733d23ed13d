"""What a function does to tensors, done again without the Python that decides on it.

A function of several ops takes longer on the host than their launches do: checks, choices, look-ups
of plans, objects for arguments. Of tensors with the same metadata all of that comes to the same. So
the first call with such tensors runs as it is, the second is recorded, and later ones repeat it:
allocations, launches, and calls of PyTorch's own functions, in their order, on the stream that is
current then, with the tensors of the call in the places of those that were recorded.

Nothing is repeated that was not seen whole. A call is recorded below the dispatcher, where each
function of PyTorch passes, with ops of this package taken apart to launches of kernels; what reads
values on the host, or takes a tensor that is neither given nor made inside, is never repeated.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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

_aten = torch.ops.aten
#: The same without the dispatcher's reading of schemas, which takes a microsecond.
_QUICK: dict[Any, Callable[..., Any]] = {
	_aten.view.default: Tensor.view,
	_aten.unsqueeze.default: Tensor.unsqueeze,
	_aten.transpose.int: Tensor.transpose,
	_aten.full.default: torch.full,
	_aten.empty_strided.default: torch.empty_strided,
	_aten.zero_.default: Tensor.zero_,
}
#: What depends on values, which are not in the key.
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Plans of calls that are to be recorded, and of those that cannot be.
_SEEN, _NEVER = object(), object()


def replayed(
	key: Hashable,
	tensors: Sequence[Tensor | None],
	function: Callable[[], Found],
	plain: frozenset[type] = registry.PLAIN,
) -> Found:
	"""``function()``: tensors, and what else it found; repeated where nothing observes the call.

	Args:
	  key: all that decides what the function does, but for the metadata of ``tensors`` and the
	    backend; no values of tensors decide on anything.
	  tensors: all that it reads, or returns without having made it.
	  function: it writes tensors that it makes and no others, and changes nothing else.
	  plain: classes of tensors that need no dispatcher.
	"""
	if registry.is_observed(tensors, plain):
		return function()
	choice, plans = chosen_backend(), registry.plans()
	full = plan_key(key, choice, tensors)
	plan = plans.get(full)
	if type(plan) is Recording:
		return plan.repeat(tensors) if plan.fits(tensors) else function()
	if plan is None:
		plans.add(full, _SEEN if _has_kernels(choice, tensors) else _NEVER)
	elif plan is _SEEN and _are_distinct(tensors):
		recorder = _Recorder(choice, tensors)
		with recorder:
			found = function()
		plans.add(full, recorder.recording(found) or _NEVER)
		return found
	return function()


def _has_kernels(choice: Choice, tensors: Sequence[Tensor | None]) -> bool:
	device = next(t.device for t in tensors if t is not None)
	return device.type != "meta" and resolve_backend(choice, device).arch != "reference"


def _are_distinct(tensors: Sequence[Tensor | None]) -> bool:
	"""Whether a recording can tell the tensors apart, which may be others next time."""
	given = [id(t) for t in tensors if t is not None]
	return len(set(given)) == len(given)


class _Step(NamedTuple):
	"""A call: of what, its arguments from the values, where its result goes (0: nowhere), and what ends."""

	function: Callable[..., Any]
	arguments: Callable[[list[Any]], Sequence[Any]]
	result: int
	ended: tuple[int, ...]


class Recording:
	"""A call that can be repeated. It holds none of its tensors."""

	def __init__(
		self, tensors: Sequence[Tensor | None], rest: list[Any], steps: list[_Step], found: list[int], more: Any
	) -> None:
		# A tensor that wraps others has no address.
		plain = ((i, t) for i, t in enumerate(tensors) if type(t) in registry.PLAIN and t is not None)
		self._offsets = [(i, t.data_ptr() % ALIGNMENT) for i, t in plain]
		devices = {t.device for t in tensors if t is not None and t.is_cuda}
		self._index = next(iter(devices)).index if devices else None
		self._rest, self._steps, self._found, self._more = rest, steps, _getter(found), more

	def fits(self, tensors: Sequence[Any]) -> bool:
		"""Whether tensors of the same metadata lie where these could, and new ones go there."""
		if self._index is not None and (registry._get_device or torch.cuda.current_device)() != self._index:
			return False
		return all(tensors[i].data_ptr() % ALIGNMENT == offset for i, offset in self._offsets)

	def repeat(self, tensors: Sequence[Tensor | None]) -> Found:
		"""Do it again with these."""
		values: list[Any] = [*tensors, *self._rest]
		for function, arguments, place, ended in self._steps:
			result = function(*arguments(values))
			if place:
				values[place] = result
			for i in ended:
				values[i] = None
		return self._found(values), self._more


def _getter(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
	"""What reads a tuple of values; there is at least one place."""
	if len(places) == 1:
		return lambda values: (values[places[0]],)
	return operator.itemgetter(*places)


class _Launcher:
	"""A launcher whose kernels tell a recorder of their launches."""

	def __init__(self, launch: Launcher, recorder: _Recorder) -> None:
		self.arch, self.num_sms, self._launch, self._recorder = launch.arch, launch.num_sms, launch, recorder

	def kernel(self, spec: Any) -> Callable[..., object]:
		kernel = self._launch.kernel(spec)

		def run(*arguments: Any) -> None:
			self._recorder.launches += 1
			self._recorder.note(kernel, arguments)
			with _disable_current_modes():  # An emulated kernel looks into tensors.
				kernel(*arguments)

		return run


class _Recorder(TorchDispatchMode):
	"""Notes what a call does."""

	def __init__(self, choice: Choice, tensors: Sequence[Tensor | None]) -> None:
		super().__init__()  # type: ignore[no-untyped-call]
		self._choice, self._given = choice, tensors
		self._values: list[Any] = [None] * len(tensors)
		#: Function, places of arguments, place of the result, whether it writes what is there.
		self._steps: list[tuple[Callable[..., Any], list[int], int, bool]] = []
		#: Weak, for temporary tensors to be freed as ever.
		self._places = {id(t): (weakref.ref(t), i) for i, t in enumerate(tensors) if t is not None}
		self._made: set[int] = set()
		self._is_whole = True
		self.launches = 0

	def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
		kwargs = kwargs or {}
		cls = registry.FUNCTIONAL.get(func)
		if cls is None:
			result = func(*args, **kwargs)
			self._note_function(func, args, kwargs, result)
			return result
		op, before = cls(*args, **kwargs), self.launches
		with self:
			backend = resolve_backend(self._choice, op.device)
			outputs = op.plan(backend, lambda launch: _Launcher(launch, self)).compute(op)
		# The reference computes then, as it does for what kernels do not take.
		self._is_whole &= self.launches > before
		return outputs if cls.returns_list else outputs[0]

	def _note_function(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
		if not isinstance(result, Tensor) or func.namespace != "aten" or _OF_VALUES.intersection(func.tags):
			self._is_whole = False
			return
		function: Callable[..., Any] = _QUICK.get(func, func)
		leaves, spec = tree_flatten((args, kwargs))
		count = sum(isinstance(t, Tensor) for t in leaves)
		if func is _aten.empty_strided.default and result.is_cuda and registry._empty_strided_cuda is not None:
			function, args = registry._empty_strided_cuda, (*args, result.dtype)
		elif count > sum(isinstance(t, Tensor) for t in args):
			function, args = functools.partial(_unflattened, function, spec), leaves
		elif kwargs:
			function = functools.partial(function, **kwargs)
		self.note(function, args, result, func._schema.is_mutable)

	def note(
		self, function: Callable[..., Any], arguments: Sequence[Any], result: Tensor | None = None, writes: bool = True
	) -> None:
		"""Note a call."""
		places, new = [self._place(a) for a in arguments], 0
		if result is not None and self._find(result) is None:
			new = self._add(None)
			self._made.add(new)
			self._places[id(result)] = weakref.ref(result), new
		self._steps.append((function, places, new, writes))

	def _add(self, value: Any) -> int:
		self._values.append(value)
		return len(self._values) - 1

	def _find(self, tensor: Tensor) -> int | None:
		known, place = self._places.get(id(tensor), (None, 0))
		return place if known is not None and known() is tensor else None

	def _place(self, value: Any) -> int:
		"""Where an argument is among the values."""
		if not isinstance(value, Tensor):
			return self._add(value)
		place = self._find(value)
		# A tensor that is neither given nor made here.
		self._is_whole &= place is not None
		return place or 0

	def recording(self, found: Found) -> Recording | None:
		"""The recording of a call that found this; None if it cannot be repeated."""
		outputs, more = found
		places = [self._place(t) for t in outputs]
		if not self._is_whole:
			return None
		# From the last: whose results nothing needs, and who is the last to need something.
		steps, given, live = [], len(self._given), set(places)
		for function, arguments, result, writes in reversed(self._steps):
			if writes or result in live:
				read = self._made.intersection(arguments)
				steps.append(_Step(function, _getter(arguments), result, tuple(read - live)))
				live |= read
		return Recording(self._given, self._values[given:], steps[::-1], places, more)


def _unflattened(function: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
	args, kwargs = tree_unflatten(leaves, spec)
	return function(*args, **kwargs)
