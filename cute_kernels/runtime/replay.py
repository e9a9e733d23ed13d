"""What a function does to tensors, done again without the Python that decides on it.

Checks, choices and look-ups of ops take longer on the host than launches, and come to the same for
tensors with the same metadata. So the second call with such tensors is recorded, and later ones
repeat it: allocations, launches and PyTorch's own functions in their order, on the current stream.

It is recorded below the dispatcher, ops of this package taken apart. What reads values on the host,
or takes a tensor that is neither given nor made inside, is never repeated.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import allocator
from .allocator import ALIGNMENT
from .backend import Choice, chosen_backend, resolve_backend
from .launch import Launcher
from .observers import PLAIN_TENSOR_TYPES, is_any_argument_observed, is_any_call_observed
from .plan_cache import PLANS, plan_key

#: Tensors and Nones, and anything else that follows from metadata alone.
Found: TypeAlias = "tuple[Sequence[Any], Any]"
#: A function, the places of its arguments among the values and of its result (0: none), and which
#: end.
_Step: TypeAlias = "tuple[Callable[..., Any], Sequence[int], int, Sequence[int]]"

_aten = torch.ops.aten
#: Op classes by their overloads, which ``ops.registration`` fills.
OPS_BY_OVERLOAD: dict[Any, Any] = {}
#: The same without the dispatcher's reading of schemas, which takes a microsecond.
_QUICK: dict[Any, Callable[..., Any]] = {
    _aten.view.default: Tensor.view,
    _aten.view.dtype: Tensor.view,
    _aten.zero_.default: Tensor.zero_,
    _aten.repeat.default: Tensor.repeat,
    _aten.sum.dim_IntList: torch.sum,
    _aten.unsqueeze.default: Tensor.unsqueeze,
    _aten.full.default: torch.full,
    _aten.empty_strided.default: torch.empty_strided,
}
#: What depends on values, which are not in the key.
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: What Dynamo guards tensors with, in one call of C++: 2 us for 14 of them, whose metadata take 9
#: in Python.
_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
#: Recordings that share a key without metadata, such as those of a mixture's experts and its shared
#: one.
_ALIKE = 8
#: Plans of calls that are to be recorded, and of those that cannot be.
_SEEN, _NEVER = object(), object()


def replayed(
    key: Hashable,
    given: list[Any],
    function: Callable[[list[Any]], Found],
    plain: frozenset[type] = PLAIN_TENSOR_TYPES,
) -> Found:
    """``function(given)``, repeated where nothing observes the call.

    Args:
        key: what decides what the function does, but for the metadata of ``given`` and the
            backend.
        given: all tensors that it reads or returns without having made them, and Nones; the
            first is a tensor. A repeated call empties the list, and lets tensors go as it
            has read them.
        function: it writes what it makes, and changes nothing else.
        plain: classes of tensors that need no dispatcher.
    """
    if is_any_call_observed():
        return function(given)
    choice, plans = chosen_backend(), PLANS
    # What few recordings share, which then look at all tensors at once.
    state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    short = (key, choice, state, len(given), given[0].shape)
    guarded: Sequence[tuple[Any, Recording]] = plans.get(short) or ()
    for check, recording in guarded:
        if recording.fits(given, check):
            return recording.repeat(given)
    if is_any_argument_observed(given, plain, state[0]):
        return function(given)
    full = plan_key(key, choice, given)
    plan = plans.get(full)
    if type(plan) is Recording:
        if not plan.fits(given, _anything):
            return function(given)
        if _Guards is not None and _are_distinct(given):
            plans.add(short, ((plan.guard(given), plan), *guarded[: _ALIKE - 1]))
        return plan.repeat(given)
    if plan is None:
        device = given[0].device
        has_kernels = device.type != "meta" and resolve_backend(choice, device).arch != "reference"
        plans.add(full, _SEEN if has_kernels else _NEVER)
    # Tensors that are the same now may be others next time.
    elif plan is _SEEN and _are_distinct(given):
        with _Recorder(choice, given) as recorder:
            found = function(given)
        plans.add(full, recorder.recording(*found) or _NEVER)
        return found
    return function(given)


def _are_distinct(given: Sequence[Any]) -> bool:
    ids = [id(t) for t in given if t is not None]
    return len(set(ids)) == len(ids)


def _anything(*_: Any) -> bool:
    return True


class Recording:
    """A call that can be repeated. It holds none of its tensors.

    ``count`` values are given; those of constants and of what is made have places behind them.
    ``offsets`` are of given tensors by their places, how far from an aligned address they are; None
    of one that wraps others. ``index`` is that of their GPU, ``found`` are places of what it
    returns, beside ``more``.
    """

    def __init__(
        self,
        count: int,
        offsets: dict[int, int | None],
        index: int | None,
        constants: dict[int, Any],
        steps: list[_Step],
        found: list[int],
        more: Any,
    ) -> None:
        self.steps, self._there = steps, tuple(offsets)
        given = f"{_listed(range(count))} = given"
        # Straight-line Python: a loop over steps and places takes half as long again.
        body, functions = [given, "given.clear()"], [step[0] for step in steps]
        for k, (_, arguments, place, ended) in enumerate(steps):
            body.append(f"{f'v{place} = ' * bool(place)}f{k}({_listed(arguments)})")
            body += [f"v{i} = None" for i in ended]
        body.append(f"return ({_listed(found)}), more")
        names = {f"v{i}": value for i, value in constants.items()} | {
            f"f{k}": f for k, f in enumerate(functions)
        }
        self._repeat = _function("given", body, {**names, "more": more})
        aligned = " | ".join(f"v{i}.data_ptr()" for i, offset in offsets.items() if offset == 0)
        fits = [f"v{i} is None" for i in range(count) if i not in offsets]
        fits += [f"check({_listed(offsets)})", f"not ({aligned or 0}) % {ALIGNMENT}"]
        fits += [
            f"v{i}.data_ptr() % {ALIGNMENT} == {offset}" for i, offset in offsets.items() if offset
        ]
        fits += [] if index is None else [f"device() == {index}"]
        device = allocator.get_current_device
        body = [given, f"return {' and '.join(fits)}"]
        #: Of (given, check): whether tensors that ``check`` says are alike lie where these could,
        #: and new ones go there.
        self.fits: Callable[..., bool] = _function("given, check", body, {"device": device})

    def repeat(self, given: list[Any]) -> Found:
        """Do it again with these."""
        found: Found = self._repeat(given)
        return found

    def guard(self, given: Sequence[Any]) -> Any:
        """What checks that tensors are as these: class, dtype, device, shape, strides, and
        PyTorch's modes.
        """
        return _Guards(
            *(given[i] for i in self._there), dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check


def _listed(places: Iterable[int]) -> str:
    return "".join(f"v{i}, " for i in places)


def _function(arguments: str, body: Sequence[str], names: dict[str, Any]) -> Any:
    exec("\n\t".join([f"def function({arguments}):", *body]), names)
    return names["function"]


class _Recorder(TorchDispatchMode):
    """Notes what a call does."""

    def __init__(self, choice: Choice, given: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choice, self._count = choice, len(given)
        self._values: list[Any] = [None] * len(given)
        # A tensor that wraps others has no address.
        self._offsets = {
            i: t.data_ptr() % ALIGNMENT if type(t) in PLAIN_TENSOR_TYPES else None
            for i, t in enumerate(given)
            if t is not None
        }
        self._index = given[0].device.index if given[0].is_cuda else None
        #: Function, places of arguments, place of the result, whether it writes what is there.
        self._steps: list[tuple[Callable[..., Any], list[int], int, bool]] = []
        #: Weak, for temporary tensors to be freed as ever.
        self._places = {id(t): (weakref.ref(t), i) for i, t in enumerate(given) if t is not None}
        self._made: set[int] = set()
        self._is_whole = True
        self._launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cls = OPS_BY_OVERLOAD.get(func)
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

        noted: Any = copy.copy(launch)
        noted.kernel = kernel
        return noted

    def _note_function(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if (
            not isinstance(result, Tensor)
            or func.namespace != "aten"
            or _OF_VALUES.intersection(func.tags)
        ):
            self._is_whole = False
            return
        function: Callable[..., Any] = _QUICK.get(func, func)
        leaves, spec = tree_flatten((args, kwargs))
        if func is _aten.empty_strided.default and result.is_cuda and allocator.empty_strided_cuda:
            function, args = (
                allocator.empty_strided_cuda,
                (tuple(args[0]), tuple(args[1]), result.dtype),
            )
        elif func is _aten._to_copy.default and list(kwargs) == ["dtype"]:
            function = functools.partial(Tensor.to, dtype=kwargs["dtype"], copy=True)
        elif sum(isinstance(t, Tensor) for t in leaves) > sum(isinstance(t, Tensor) for t in args):
            function, args = functools.partial(_unflattened, function, spec), leaves
        elif kwargs:
            function = functools.partial(function, **kwargs)
        self._note(function, args, result, func._schema.is_mutable)

    def _note(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        result: Tensor | None = None,
        writes: bool = True,
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
        if not self._is_whole:
            return None
        # From the last: whose results nothing needs, and who is the last to need something.
        steps: list[_Step] = []
        live, tensors = set(found), self._made.union(self._offsets)
        for function, arguments, result, writes in reversed(self._steps):
            if writes or result in live:
                read = tensors.intersection(arguments)
                steps.insert(0, (function, arguments, result, sorted(read - live)))
                live |= read
        constants = {
            i: v for i, v in enumerate(self._values) if i >= self._count and i not in self._made
        }
        return Recording(self._count, self._offsets, self._index, constants, steps, found, more)


def _unflattened(function: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
    args, kwargs = tree_unflatten(leaves, spec)
    return function(*args, **kwargs)
