"""Registration of ops with PyTorch, each in two forms from one description.

``register`` turns an ``Op`` dataclass into the functional op ``torch.ops.cute_kernels.name``, which
allocates its outputs, the op ``name_out``, which writes the caller's tensors, and the fake
implementations of both. All four share ``check`` and ``outputs`` and cannot drift apart.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ptx_emulator.host.suggestions import did_you_mean

from ..layout.buffers import BufferSpec
from ..runtime.backend import chosen_backend
from ..runtime.observers import needs_dispatcher
from ..runtime.plan_cache import PLANS, plan_key
from ..runtime.replay import OPS_BY_OVERLOAD, OUT_FORMS
from .derivatives import not_differentiable, refuse_derivatives, register_autograd
from .op import Op
from .plan import CallPlan

_LIBRARY = torch.library.Library("cute_kernels", "DEF")
_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "list[Tensor]": "Tensor[]",
    "list[Tensor] | None": "Tensor[]?",
    "bool": "bool",
    "int": "SymInt",
    "float": "float",
    "list[int] | None": "SymInt[]?",
    "str": "str",
    "str | None": "str?",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
}


def check_outputs(op: Op, specs: Sequence[BufferSpec], targets: Sequence[Tensor]) -> None:
    """Raise ValueError or TypeError unless the caller's output tensors match ``specs``."""
    if len(targets) != len(specs):
        shapes = ", ".join(str(tuple(spec.shape)) for spec in specs)
        raise ValueError(
            f"{op.name}_out: {op.out_name} must be {len(specs)} tensors, of shapes {shapes}; "
            f"got {len(targets)}"
        )
    for i, (spec, tensor) in enumerate(zip(specs, targets, strict=True)):
        name = f"{op.out_name}[{i}]" if op.returns_list else op.out_name
        if tensor.dtype != spec.dtype:
            raise TypeError(f"{op.name}_out: {name} must be {spec.dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != tuple(spec.shape):
            raise ValueError(
                f"{op.name}_out: {name} must have shape {tuple(spec.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
        # Functionalization may pass a dense copy of a padded output: any pitch is accepted.
        pitch = spec.pitch and max(tensor.stride(-2), spec.shape[-1])
        if tensor.numel() and tensor.stride() != spec._replace(pitch=pitch).strides:
            raise ValueError(
                f"{op.name}_out: {name} must be row-major with strides {spec.strides}, "
                f"got {tensor.stride()}"
            )
        if tensor.device != op.device:
            raise ValueError(f"{op.name}_out: {name} must be on {op.device}, got {tensor.device}")


def _schema_arguments(cls: type[Op]) -> str:
    """Return the arguments of an op as text of a PyTorch schema."""
    arguments = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        kind = _SCHEMA_TYPES[str(field.type)]
        if field.name in cls.written:
            alias = chr(ord("a") + cls.written.index(field.name))
            kind = kind.replace("Tensor", f"Tensor({alias}!)")
        default = field.default
        text = f"{kind} {field.name}"
        if default is not dataclasses.MISSING:
            text += f'="{default}"' if isinstance(default, str) else f"={default}"
        arguments.append(text)
    return ", ".join(arguments)


def _schemas(cls: type[Op]) -> tuple[str, str]:
    """Return the schemas of the functional and of the ``_out`` form."""
    arguments, brackets = _schema_arguments(cls), "[]" if cls.returns_list else ""
    flag = ", bool accumulate=False" if cls.accumulates else ""
    return (
        f"{cls.name}({arguments}) -> Tensor{brackets}",
        f"{cls.name}_out({arguments}, *, Tensor(o!){brackets} {cls.out_name}{flag}) -> ()",
    )


def register(cls: type[Op]) -> type[Op]:
    """Register the functional and the ``_out`` form of an op and their fakes (class decorator)."""
    functional_schema, out_schema = _schemas(cls)
    cls.has_offs = any(field.name == "offs" for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    def result(outputs: list[Tensor]) -> Tensor | list[Tensor]:
        return outputs if cls.returns_list else outputs[0]

    def call(*args: Any, **kwargs: Any) -> Tensor | list[Tensor]:
        op = cls(*args, **kwargs)
        return result(op.cached_plan().compute(op))

    def fake(*args: Any, **kwargs: Any) -> Tensor | list[Tensor]:
        op = cls(*args, **kwargs)
        op.check()
        return result([spec.allocate(op.device, False) for spec in op.outputs()])

    def pop_outputs(kwargs: dict[str, Any]) -> tuple[list[Tensor], dict[str, bool]]:
        options = {name: kwargs.pop(name) for name in ("accumulate",) if name in kwargs}
        out = kwargs.pop(cls.out_name)
        return out if cls.returns_list else [out], options

    def check_no_gradients(op: Op, outputs: list[Tensor]) -> None:
        written = ((cls.out_name, out) for out in outputs)
        refuse_derivatives(f"{cls.name}_out", (*op.tensors().items(), *written), f"call {cls.name}")

    def compute_out(make_plan: Callable[[Op], CallPlan], args: Any, kwargs: dict[str, Any]) -> None:
        """Compute the op into the caller's outputs by a plan."""
        outputs, options = pop_outputs(kwargs)
        op = cls(*args, **kwargs)
        plan = make_plan(op)
        check_outputs(op, plan.outputs, outputs)
        check_no_gradients(op, outputs)
        for name, t in op.tensors().items() if cls.accumulates else ():
            if t.data_ptr() == outputs[0].data_ptr() != 0:
                raise ValueError(f"{cls.name}_out: out must not lie where {name} does")
        # Autograd may have saved an output for a backward pass, and is informed only here.
        increment_version(outputs)
        with torch.no_grad():
            plan.compute_into(op, outputs, **options)

    def call_out(*args: Any, **kwargs: Any) -> None:
        compute_out(cls.cached_plan, args, kwargs)

    def fake_out(*args: Any, **kwargs: Any) -> None:
        """Check the arguments and the outputs without computing."""
        outputs, _ = pop_outputs(kwargs)
        op = cls(*args, **kwargs)
        op.check()
        check_outputs(op, op.outputs(), outputs)
        check_no_gradients(op, outputs)

    _define(cls.name, functional_schema, call, fake, cls.__doc__)
    out_doc = f"``{cls.name}``, written into the caller's tensors.\n\n    {cls.__doc__}"
    _define(f"{cls.name}_out", out_schema, call_out, fake_out, out_doc)
    OUT_FORMS[getattr(torch.ops.cute_kernels, f"{cls.name}_out").default] = compute_out
    register_autograd(
        cls.name, cls.backward or not_differentiable(cls.name), cls.setup_context, _LIBRARY
    )
    cls.fast_call = staticmethod(_fast_call(cls))
    return cls


def register_inplace(cls: type[Op]) -> type[Op]:
    """Register an op that writes the arguments that ``written`` names (class decorator)."""
    remedy = "call it under torch.no_grad()"

    def call(*args: Any, **kwargs: Any) -> None:
        """Compute the op in place."""
        op = cls(*args, **kwargs)
        plan = op.cached_plan()
        arguments = [getattr(op, name) for name in cls.written]
        outputs = [t for arg in arguments for t in (arg if isinstance(arg, list) else [arg])]
        refuse_derivatives(cls.name, op.tensors().items(), remedy)
        # Autograd may have saved an output for a backward pass, and is informed only here.
        increment_version(outputs)
        with torch.no_grad():
            plan.compute_into(op, outputs)

    def fake(*args: Any, **kwargs: Any) -> None:
        op = cls(*args, **kwargs)
        op.check()
        refuse_derivatives(cls.name, op.tensors().items(), remedy)

    _define(cls.name, f"{cls.name}({_schema_arguments(cls)}) -> ()", call, fake, cls.__doc__)
    dispatched = getattr(torch.ops.cute_kernels, cls.name).default

    def call_dispatched(*args: Any, **kwargs: Any) -> None:
        """Call the op. Its overload is no function, so ``help`` would describe its class."""
        dispatched(*args, **kwargs)

    cls.fast_call = staticmethod(_described(call_dispatched, cls))
    return cls


def _define(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    doc: str | None,
) -> None:
    """Define one op in the library, with its implementation, its fake and its docstring."""
    skip_dynamo(implementation)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cute_kernels::{name}", fake, lib=_LIBRARY)
    getattr(torch.ops.cute_kernels, name).__doc__ = doc


def skip_dynamo(function: Any) -> None:
    """Make Dynamo run a function as it is, also in a frame that Dynamo leaves to Python.

    Otherwise Dynamo would trace the checks, caches and launches inside, down to the kernel
    compiler.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def _fast_call(cls: type[Op]) -> Callable[..., Any]:
    """Return the op as a function that skips the dispatcher if nothing observes the call.

    These calls still go through the dispatcher: traced and compiled ones, those with tensor
    subclasses, dispatch modes, transforms or forward-mode AD, profiled ones, and calls with
    operands that require gradients or have no data.
    """
    dispatched = getattr(torch.ops.cute_kernels, cls.name).default
    OPS_BY_OVERLOAD[dispatched] = cls
    has_offs, returns_list = cls.has_offs, cls.returns_list
    #: Orders of arguments, by the number of positional ones and the names of the others.
    orders: dict[tuple[Any, ...], tuple[_Order, list[Any]]] = {}

    def fast_call(*args: Any, **kwargs: Any) -> Any:
        """Call the op, without the dispatcher if nothing observes the call."""
        if kwargs:
            if torch.compiler.is_compiling():  # Dynamo cannot trace dataclasses.fields.
                return dispatched(*args, **kwargs)
            call = (len(args), *kwargs)
            if call not in orders:
                orders[call] = _argument_order(cls, len(args), tuple(kwargs))
            order, defaults = orders[call]
            args = order((*args, *kwargs.values(), *defaults))
        if needs_dispatcher(args):
            return dispatched(*args)
        choice = chosen_backend()
        key, op = plan_key(cls, choice, args), cls(*args)
        plan = PLANS.get(key) or PLANS.add(key, op.new_plan(choice))
        if has_offs:
            op.check_values()
        outputs = plan.compute(op)
        return outputs if returns_list else outputs[0]

    return _described(fast_call, cls)


def _described(function: Any, cls: type[Op]) -> Callable[..., Any]:
    """Return the function with the name, the signature and the docstring of an op."""
    function.__name__ = function.__qualname__ = cls.name
    function.__doc__ = cls.__doc__
    function.__module__ = "cute_kernels.ops"
    result = "None" if cls.written else "list[Tensor]" if cls.returns_list else "Tensor"
    function.__signature__ = inspect.signature(cls).replace(return_annotation=result)
    return function


#: Returns the arguments of a call in the order of an op's fields, from args, kwargs and defaults.
_Order: TypeAlias = "Callable[[tuple[Any, ...]], tuple[Any, ...]]"


def _argument_order(cls: type[Op], count: int, names: Sequence[str]) -> tuple[_Order, list[Any]]:
    """Return how to order the arguments of calls, without trailing defaults; and the defaults.

    Args:
        cls: The op.
        count: Number of positional arguments.
        names: Names of the keyword arguments.

    Raises:
        TypeError: An argument is unknown, missing or given twice.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    positions = {field.name: i for i, field in enumerate(fields)}
    # Indices into (*args, *kwargs.values(), *defaults).
    indices = [*range(count), *range(count + len(names), len(fields) + len(names))]
    num_positions = count
    for i, name in enumerate(names):
        position = positions.get(name, -1)
        if position < count:
            reason = "an unexpected argument" if position < 0 else "two values for argument"
            hint = did_you_mean(name, positions) if position < 0 else ""
            raise TypeError(f"{cls.name}() got {reason} {name!r}{hint}")
        indices[position] = count + i
        num_positions = max(num_positions, position + 1)
    for field, index in zip(fields, indices, strict=False):
        if index >= count + len(names) and field.default is dataclasses.MISSING:
            raise TypeError(f"{cls.name}() is missing argument {field.name!r}")
    defaults = [field.default for field in fields[count:]]
    if num_positions == 1:
        return (lambda values: (values[indices[0]],)), defaults
    return operator.itemgetter(*indices[:num_positions]), defaults
