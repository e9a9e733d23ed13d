"""Replay of the effects of a function on tensors, without the Python code that decides on them.

On the host, the checks, choices and look-ups of ops take longer than launches, and give the same
result for tensors with the same metadata. So the second call with such tensors is recorded. Later
calls repeat the recording: allocations, launches and PyTorch's own functions in their order, on the
current stream.

The recording takes place below the dispatcher and divides this package's ops into their launches. A
function that reads values on the host, or uses a tensor that was neither passed in nor created
inside, is never replayed.
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

#: Result of a function: tensors and Nones, and anything else that follows from metadata alone.
ReplayResult: TypeAlias = "tuple[Sequence[Any], Any]"
#: Function, numbers of its arguments, number of its result (0: none), and numbers of the values
#: that no later step needs.
_Step: TypeAlias = "tuple[Callable[..., Any], Sequence[int], int, Sequence[int]]"

_aten = torch.ops.aten
#: Op classes by their overloads, which ``ops.registration`` fills.
OPS_BY_OVERLOAD: dict[Any, Any] = {}
#: Functions that compute the ``_out`` forms of ops, by overload: (make_plan, args, kwargs) -> None.
OUT_FORMS: dict[Any, Callable[..., None]] = {}
#: Equivalent functions that skip the dispatcher's parsing of schemas, which takes a microsecond.
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
#: Tags of functions whose results depend on values, which are not in the key.
_VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Dynamo's guards of tensors: one C++ call takes 2 us for 14 tensors, whose metadata take 9 us in
#: Python.
_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
#: Largest number of recordings that share a key without metadata, such as the routed experts and
#: the shared expert of a layer.
_MAX_GUARDED = 8
#: Plans of calls that will be recorded next time, and of calls that cannot be recorded.
_RECORD_NEXT, _NEVER = object(), object()


def replayed(
    key: Hashable,
    inputs: list[Any],
    function: Callable[[list[Any]], ReplayResult],
    plain: frozenset[type] = PLAIN_TENSOR_TYPES,
) -> ReplayResult:
    """Return ``function(inputs)``, replayed if nothing observes the call.

    Args:
        key: Everything that determines the function's behaviour, except the metadata of
            ``inputs`` and the backend.
        inputs: All tensors that the function reads or returns without creating them, and Nones; the
            first is a tensor. A replayed call empties the list, and releases tensors as soon as
            it has read them.
        function: It writes to tensors that it creates, and by the ``_out`` form of an op to inputs.
            A replay does not count the versions of these inputs.
        plain: Classes of tensors that need no dispatcher.
    """
    if is_any_call_observed():
        return function(inputs)
    choice, plans = chosen_backend(), PLANS
    # Few recordings share this short key; their guards then check all tensors at once.
    state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    short = (key, choice, state, len(inputs), inputs[0].shape)
    guarded: Sequence[tuple[Any, Recording]] = plans.get(short) or ()
    for check, recording in guarded:
        if recording.matches(inputs, check):
            return recording.repeat(inputs)
    if is_any_argument_observed(inputs, plain, state[0]):
        return function(inputs)
    full = plan_key(key, choice, inputs)
    plan = plans.get(full)
    if type(plan) is Recording:
        if not plan.matches(inputs, _anything):
            return function(inputs)
        if _Guards is not None and _are_distinct(inputs):
            plans.add(short, ((plan.guard(inputs), plan), *guarded[: _MAX_GUARDED - 1]))
        return plan.repeat(inputs)
    if plan is None:
        device = inputs[0].device
        has_kernels = device.type != "meta" and resolve_backend(choice, device).arch != "reference"
        plans.add(full, _RECORD_NEXT if has_kernels else _NEVER)
    # Two inputs that are one tensor now may be two tensors next time.
    elif plan is _RECORD_NEXT and _are_distinct(inputs):
        with _Recorder(choice, inputs) as recorder:
            result = function(inputs)
        plans.add(full, recorder.recording(*result) or _NEVER)
        return result
    return function(inputs)


def _are_distinct(inputs: Sequence[Any]) -> bool:
    """Return True if no tensor occurs twice."""
    ids = [id(t) for t in inputs if t is not None]
    return len(set(ids)) == len(ids)


def _anything(*_: Any) -> bool:
    """Return True."""
    return True


class Recording:
    """A call that can be replayed. It holds none of the call's tensors.

    Values are numbered: first the inputs, then constants and results.

    Args:
        count: Number of inputs.
        offsets: Distances of input tensors from an aligned address, by number. None for a tensor
            that wraps others.
        index: Index of the GPU of the inputs. Optional.
        constants: Constants by number.
        steps: Calls to repeat.
        outputs: Numbers of the returned values.
        more: Second part of the result.
    """

    def __init__(
        self,
        count: int,
        offsets: dict[int, int | None],
        index: int | None,
        constants: dict[int, Any],
        steps: list[_Step],
        outputs: list[int],
        more: Any,
    ) -> None:
        self.steps, self._tensor_numbers = steps, tuple(offsets)
        unpacking = f"{_value_list(range(count))} = inputs"
        # Straight-line Python code: a loop over the steps would take 1.5 times as long.
        body, functions = [unpacking, "inputs.clear()"], [step[0] for step in steps]
        for k, (_, arguments, number, last_used) in enumerate(steps):
            body.append(f"{f'v{number} = ' * bool(number)}f{k}({_value_list(arguments)})")
            body += [f"v{i} = None" for i in last_used]
        body.append(f"return ({_value_list(outputs)}), more")
        names = {f"v{i}": value for i, value in constants.items()} | {
            f"f{k}": f for k, f in enumerate(functions)
        }
        self._repeat = _function("inputs", body, {**names, "more": more})
        aligned = " | ".join(f"v{i}.data_ptr()" for i, offset in offsets.items() if offset == 0)
        conditions = [f"v{i} is None" for i in range(count) if i not in offsets]
        conditions += [f"check({_value_list(offsets)})", f"not ({aligned or 0}) % {ALIGNMENT}"]
        conditions += [
            f"v{i}.data_ptr() % {ALIGNMENT} == {offset}" for i, offset in offsets.items() if offset
        ]
        conditions += [] if index is None else [f"device() == {index}"]
        device = allocator.get_current_device
        body = [unpacking, f"return {' and '.join(conditions)}"]
        #: Called with (inputs, check): True if ``check`` accepts the tensors, their addresses have
        #: the recorded alignment, and new tensors go to the same device.
        self.matches: Callable[..., bool] = _function("inputs, check", body, {"device": device})

    def repeat(self, inputs: list[Any]) -> ReplayResult:
        """Replay the call with other inputs."""
        result: ReplayResult = self._repeat(inputs)
        return result

    def guard(self, inputs: Sequence[Any]) -> Any:
        """Return a check for tensors like these.

        It compares class, dtype, device, shape, strides, and PyTorch's modes.
        """
        return _Guards(
            *(inputs[i] for i in self._tensor_numbers),
            dynamic_dims_sizes=None,
            dynamic_dims_strides=None,
        ).check


def _value_list(numbers: Iterable[int]) -> str:
    """Return the source text of a list of numbered values."""
    return "".join(f"v{i}, " for i in numbers)


def _function(arguments: str, body: Sequence[str], names: dict[str, Any]) -> Any:
    """Compile a function from its body."""
    exec("\n\t".join([f"def function({arguments}):", *body]), names)
    return names["function"]


class _Recorder(TorchDispatchMode):
    """Dispatch mode that records a call."""

    def __init__(self, choice: Choice, inputs: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choice, self._count = choice, len(inputs)
        self._values: list[Any] = [None] * len(inputs)
        # A tensor that wraps others has no address.
        self._offsets = {
            i: t.data_ptr() % ALIGNMENT if type(t) in PLAIN_TENSOR_TYPES else None
            for i, t in enumerate(inputs)
            if t is not None
        }
        self._index = inputs[0].device.index if inputs[0].is_cuda else None
        #: Function, numbers of arguments, number of the result, and True if it writes an argument.
        self._steps: list[tuple[Callable[..., Any], list[int], int, bool]] = []
        #: Weak references, so that temporary tensors are freed as usual.
        self._numbers = {id(t): (weakref.ref(t), i) for i, t in enumerate(inputs) if t is not None}
        self._created: set[int] = set()
        self._is_complete = True
        self._launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cls, out_form, before = OPS_BY_OVERLOAD.get(func), OUT_FORMS.get(func), self._launches
        if cls is not None:
            op = cls(*args, **kwargs)
            with self:
                outputs = self._plan(op).compute(op)
            result = outputs if cls.returns_list else outputs[0]
        elif out_form is not None:
            with self:
                result = out_form(self._plan, args, kwargs)
        else:
            result = func(*args, **kwargs)
            self._note_function(func, args, kwargs, result)
            return result
        # If nothing was launched, the reference computed the result: kernels do not support the
        # call.
        self._is_complete &= self._launches > before
        return result

    def _plan(self, op: Any) -> Any:
        """Return a plan of an op that records its launches."""
        return op.plan(resolve_backend(self._choice, op.device), self._launcher)

    def _launcher(self, launch: Launcher) -> Any:
        """Return a launcher that records its launches."""

        def kernel(spec: Any) -> Callable[..., None]:
            kernel = launch.kernel(spec)

            def run(*arguments: Any) -> None:
                self._launches += 1
                self._note(kernel, arguments)
                with _disable_current_modes():  # An emulated kernel reads tensors.
                    kernel(*arguments)

            return run

        noted: Any = copy.copy(launch)
        noted.kernel = kernel
        return noted

    def _note_function(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a function of PyTorch."""
        if (
            not isinstance(result, Tensor)
            or func.namespace != "aten"
            or _VALUE_DEPENDENT.intersection(func.tags)
        ):
            self._is_complete = False
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
        """Record a step."""
        numbers, new = [self._number(a) for a in arguments], 0
        if result is not None and self._find(result) is None:
            self._values.append(None)
            new = len(self._values) - 1
            self._created.add(new)
            self._numbers[id(result)] = weakref.ref(result), new
        self._steps.append((function, numbers, new, writes))

    def _find(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor, or None."""
        known, number = self._numbers.get(id(tensor), (None, 0))
        return number if known is not None and known() is tensor else None

    def _number(self, value: Any) -> int:
        """Return the number of an argument, which is new unless it is a known tensor."""
        if isinstance(value, Tensor):
            number = self._find(value)
            self._is_complete &= number is not None
            return number or 0
        self._values.append(value)
        return len(self._values) - 1

    def recording(self, outputs: Sequence[Any], more: Any) -> Recording | None:
        """Return the recording of a call with these results, or None if it cannot be replayed."""
        numbers = [self._number(t) for t in outputs]
        if not self._is_complete:
            return None
        # Go backward: drop steps whose results nothing needs, and find the last use of each value.
        steps: list[_Step] = []
        live, tensors = set(numbers), self._created.union(self._offsets)
        for function, arguments, result, writes in reversed(self._steps):
            if writes or result in live:
                read = tensors.intersection(arguments)
                steps.insert(0, (function, arguments, result, sorted(read - live)))
                live |= read
        constants = {
            i: v for i, v in enumerate(self._values) if i >= self._count and i not in self._created
        }
        return Recording(self._count, self._offsets, self._index, constants, steps, numbers, more)


def _unflattened(function: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
    """Call a function with its flattened arguments."""
    args, kwargs = tree_unflatten(leaves, spec)
    return function(*args, **kwargs)
