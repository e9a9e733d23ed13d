"""Registers every op in two forms, from one description.

An op is a dataclass whose fields are its arguments. It says what outputs it has (``outputs``),
checks its arguments (``check``) and computes (``run``). From that come the functional op
``torch.ops.cute_kernels.name``, which allocates its outputs, the ``name_out`` op, which writes
into given ones, and the fakes of both. All four share ``check`` and ``outputs``, so they cannot
drift.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from cute_kernels.capability import require
from cute_kernels.layout.shapes import PITCH_ALIGNMENT
from cute_kernels.ops.derivatives import not_differentiable, refuse_derivatives, register_autograd
from cute_kernels.runtime.backend import chosen_backend, resolve_backend
from cute_kernels.runtime.launch import launcher
from cute_kernels.runtime.plan import PlanCache, plan_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cute_kernels.formats import Format
    from cute_kernels.runtime.backend import Backend
    from cute_kernels.runtime.launch import Launcher

__all__ = ["Allocator", "Op", "OutputSpec", "forget_plans", "is_observed", "register", "sole"]

#: How Inductor's code allocates on the current device: 0.8 us on the host of an H200, where
#: ``torch.empty_strided`` takes 1.4 and ``torch.empty`` 2.3. Unlike them it leaves the memory as it
#: is in deterministic mode, too.
_empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_LIBRARY = torch.library.Library("cute_kernels", "DEF")
_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "bool": "bool",
    "int": "SymInt",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
}


class OutputSpec(NamedTuple):
    """One output of an op.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        pitch: elements from one row to the next; None if contiguous.
        zeroed: a fresh one reads as zeros wherever the op does not write. Elsewhere what is not
            written is unspecified (the reference backend gives zeros there, too).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pitch: int | None = None
    zeroed: bool = False

    @property
    def strides(self) -> tuple[int, ...]:
        """Row-major strides, with rows ``pitch`` apart."""
        strides = [1]
        for i, size in enumerate(reversed(self.shape[1:])):
            strides.append(strides[-1] * size if i or self.pitch is None else self.pitch)
        return tuple(reversed(strides))

    def allocate(self, device: torch.device, zeroed: bool) -> Tensor:
        """A fresh tensor, of zeros if ``zeroed``."""
        if self.pitch is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return out.zero_() if zeroed else out


T = TypeVar("T")


def sole(outputs: Sequence[T | None]) -> T:
    """The first output, or its spec, of an op whose first output is always asked for."""
    return cast("T", outputs[0])


#: Computes an op into its outputs: (op, outputs, **options). Holds no tensors.
Runner: TypeAlias = "Callable[..., None]"


class Allocator:
    """Makes fresh tensors again and again, with all that is known about them worked out once.

    Args:
        specs: the tensors; their ``zeroed`` is not looked at.
        device: where they are made.
    """

    def __init__(self, specs: Iterable[OutputSpec | None], device: torch.device) -> None:
        meta = torch.device("meta")
        self._buffers = [
            s and (tuple(s.shape), s.allocate(meta, False).stride(), s.dtype) for s in specs
        ]
        self._device = device
        self._cuda_index = device.index if device.type == "cuda" else None

    def make(self) -> list[Tensor | None]:
        """The tensors; None where the spec is None."""
        is_cuda = self._cuda_index is not None and _empty_strided_cuda is not None
        if is_cuda and torch.cuda.current_device() == self._cuda_index:
            return [b and _empty_strided_cuda(*b) for b in self._buffers]
        device = self._device
        return [
            b and torch.empty_strided(b[0], b[1], dtype=b[2], device=device) for b in self._buffers
        ]


class _Plan:
    """What the metadata of a call decides.

    Attributes:
        outputs: the outputs.
        run: what computes them.
        options: options of ``run`` for fresh outputs.

    Args:
        op: a call.
        outputs: the outputs.
        run: what computes them.
        zeroed: fresh outputs are zeroed before, whatever their specs say.
        fills_fresh: ``run`` takes ``fresh=True`` and then writes the zeros that the specs ask for.
    """

    def __init__(
        self,
        op: Op,
        outputs: Iterable[OutputSpec | None],
        run: Runner,
        *,
        zeroed: bool = False,
        fills_fresh: bool = False,
    ) -> None:
        self.outputs = tuple(outputs)
        self.run = run
        self.options = {"fresh": True} if fills_fresh else {}
        self._allocator = Allocator(self.outputs, op.device)
        self._zeroed = [
            i
            for i, s in enumerate(self.outputs)
            if s is not None and (zeroed or s.zeroed and not fills_fresh)
        ]

    def compute(self, op: Op) -> list[Tensor | None]:
        """Fresh outputs of ``op``."""
        outputs = self._allocator.make()
        for i in self._zeroed:
            outputs[i].zero_()  # type: ignore[union-attr]
        self.run(op, outputs, **self.options)
        return outputs

    def compute_into(self, op: Op, given: Sequence[Tensor | None], **options: bool) -> None:
        """Write given outputs; those that kernels cannot write, by way of copies."""
        buffers = [
            t if t is None or s is None or _is_writable(t, s, op.alignment) else _copy(t, s)
            for t, s in zip(given, self.outputs, strict=True)
        ]
        self.run(op, buffers, **options)
        for tensor, buffer in zip(given, buffers, strict=True):
            if tensor is not None and buffer is not None and tensor is not buffer:
                tensor.copy_(buffer)


def _is_writable(given: Tensor, spec: OutputSpec, alignment: int) -> bool:
    """Whether kernels can write an output where it is; a dense copy of a padded one may not do."""
    pitch_fits = spec.pitch is None or given.stride(-2) * given.itemsize % PITCH_ALIGNMENT == 0
    return pitch_fits and given.data_ptr() % alignment == 0


def _copy(given: Tensor, spec: OutputSpec) -> Tensor:
    """A copy that kernels can write; it has what they leave alone, too."""
    return spec.allocate(given.device, False).copy_(given)


_plans: PlanCache[_Plan] = PlanCache()


def forget_plans() -> None:
    """Decide anew what runs each call; for settings that are no argument of an op."""
    _plans.clear()


class Op(abc.ABC):
    """Base of all ops; subclasses are dataclasses."""

    #: Name under ``torch.ops.cute_kernels``.
    name: ClassVar[str]
    #: Names of the outputs, in order.
    output_names: ClassVar[tuple[str, ...]]
    #: Whether the ``_out`` form takes ``accumulate``.
    accumulates: ClassVar[bool] = False
    #: Bytes to which its kernels ask outputs to be aligned.
    alignment: ClassVar[int] = 32
    #: Whether its kernels write the zeros that ``OutputSpec.zeroed`` asks for, when told that the
    #: output is fresh.
    fills_fresh: ClassVar[bool] = False
    #: For differentiable ops: what to save, and the gradients of the inputs.
    setup_context: ClassVar[Callable[..., None] | None] = None
    backward: ClassVar[Callable[..., Any] | None] = None
    #: The functional op, without the dispatcher where nothing observes the call. What was not asked
    #: for may be None.
    invoke: ClassVar[Callable[..., Any]]

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Device of the op's operands."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments that are given, by name."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = {field.name: getattr(self, field.name) for field in fields}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ValueError or TypeError for arguments that break a rule."""

    @abc.abstractmethod
    def outputs(self) -> Sequence[OutputSpec | None]:
        """What the op writes; None for an output that was not asked for."""

    @abc.abstractmethod
    def run_reference(self, outputs: Sequence[Tensor | None], **options: Any) -> None:
        """Compute into ``outputs`` with the reference backend.

        Args:
            outputs: buffers of zeros, or what the caller gave.
            **options: ``tensor_core`` of the backend, and ``accumulate``.
        """

    @abc.abstractmethod
    def capability(self) -> tuple[str, Format | None]:
        """The op and format under which the capability table lists this call."""

    def kernels(self, launch: Launcher) -> Runner:
        """What runs calls with this metadata on kernels; for ops that the table lists with some."""
        raise AssertionError(f"the capability table lists kernels that {self.name} does not have")

    def require(self, backend: Backend) -> None:
        """Raise UnsupportedError if the backend does not run this call."""
        require(*self.capability(), backend.arch)

    def plan(self, backend: Backend) -> _Plan:
        """Check the arguments and decide what runs; the same for every call with this metadata."""
        self.check()
        self.require(backend)
        if backend.arch == "reference":
            reference = functools.partial(_run_reference, tensor_core=backend.tensor_core)
            return _Plan(self, self.outputs(), reference, zeroed=True)
        run = self.kernels(launcher(backend, self.device))
        return _Plan(self, self.outputs(), run, fills_fresh=self.fills_fresh)

    def cached_plan(self) -> _Plan:
        """``plan``, from the cache if a call with the same metadata went before."""
        choice = chosen_backend()
        key = plan_key(type(self), choice, vars(self).values())
        return _plans.get(key) or _plans.add(key, self.plan(resolve_backend(choice, self.device)))


def _run_reference(op: Op, outputs: Sequence[Tensor | None], **options: Any) -> None:
    # Autocast would run the fp32 products inside in bf16.
    with torch.autocast(op.device.type, enabled=False):
        op.run_reference(outputs, **options)


def _check_outputs(
    op: Op, specs: Sequence[OutputSpec | None], given: Sequence[Tensor | None]
) -> None:
    for name, spec, tensor in zip(op.output_names, specs, given, strict=True):
        if spec is None:
            if tensor is not None:
                raise ValueError(f"{op.name}_out: {name} is given but was not asked for")
            continue
        if tensor is None:
            raise ValueError(f"{op.name}_out: {name} is missing, of shape {tuple(spec.shape)}")
        if tensor.dtype != spec.dtype:
            raise TypeError(f"{op.name}_out: {name} must be {spec.dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != tuple(spec.shape):
            raise ValueError(
                f"{op.name}_out: {name} must have shape {tuple(spec.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
        # Functionalization may hand over a dense copy of a padded output: any pitch will do.
        pitch = spec.pitch and max(tensor.stride(-2), spec.shape[-1])
        if tensor.numel() and tensor.stride() != spec._replace(pitch=pitch).strides:
            raise ValueError(
                f"{op.name}_out: {name} must be row-major with strides {spec.strides}, "
                f"got {tensor.stride()}"
            )
        if tensor.device != op.device:
            raise ValueError(f"{op.name}_out: {name} must be on {op.device}, got {tensor.device}")


def _unwrap(device: torch.device, outputs: Sequence[Tensor | None]) -> Tensor | tuple[Tensor, ...]:
    """What a functional op returns: an empty tensor for each output that was not asked for."""
    given = tuple(
        torch.empty(0, dtype=torch.uint8, device=device) if t is None else t for t in outputs
    )
    return given[0] if len(given) == 1 else given


def _schema(cls: type[Op]) -> tuple[str, str]:
    parts = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        text = f"{_SCHEMA_TYPES[str(field.type)]} {field.name}"
        if field.default is not dataclasses.MISSING:
            text += f"={field.default}"
        parts.append(text)
    arguments = ", ".join(parts)
    results = ", ".join("Tensor" for _ in cls.output_names)
    outs = ", ".join(f"Tensor(o{i}!)? {name}=None" for i, name in enumerate(cls.output_names))
    flag = ", bool accumulate=False" if cls.accumulates else ""
    if len(cls.output_names) > 1:
        results = f"({results})"
    return (
        f"{cls.name}({arguments}) -> {results}",
        f"{cls.name}_out({arguments}, *, {outs}{flag}) -> ()",
    )


def register(cls: type[Op]) -> type[Op]:
    """Class decorator: register the functional and the ``_out`` form of an op, and their fakes."""
    functional, out = _schema(cls)

    def call(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        op = cls(*args, **kwargs)
        return _unwrap(op.device, op.cached_plan().compute(op))

    def fake(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        op = cls(*args, **kwargs)
        op.check()
        return _unwrap(op.device, [s and s.allocate(op.device, False) for s in op.outputs()])

    def split(kwargs: dict[str, Any]) -> tuple[list[Tensor | None], dict[str, bool]]:
        options = {k: kwargs.pop(k) for k in ("accumulate",) if k in kwargs}
        return [kwargs.pop(name, None) for name in cls.output_names], options

    def refuse(op: Op, outputs: list[Tensor | None]) -> None:
        named = (*vars(op).items(), *zip(cls.output_names, outputs, strict=True))
        refuse_derivatives(f"{cls.name}_out", named, f"call {cls.name}")

    def call_out(*args: Any, **kwargs: Any) -> None:
        outputs, options = split(kwargs)
        op = cls(*args, **kwargs)
        plan = op.cached_plan()
        _check_outputs(op, plan.outputs, outputs)
        refuse(op, outputs)
        # Nothing else tells autograd, which may hold an output for a backward pass.
        increment_version([t for t in outputs if t is not None])
        with torch.no_grad():
            plan.compute_into(op, outputs, **options)

    def fake_out(*args: Any, **kwargs: Any) -> None:
        outputs, _ = split(kwargs)
        op = cls(*args, **kwargs)
        op.check()
        _check_outputs(op, op.outputs(), outputs)
        refuse(op, outputs)

    pairs: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any]], ...] = (
        (cls.name, functional, call, fake),
        (f"{cls.name}_out", out, call_out, fake_out),
    )
    for name, schema, implementation, meta in pairs:
        _keep_dynamo_out(implementation)
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cute_kernels::{name}", meta, lib=_LIBRARY)
    getattr(torch.ops.cute_kernels, cls.name).__doc__ = cls.__doc__
    getattr(
        torch.ops.cute_kernels, f"{cls.name}_out"
    ).__doc__ = f"``{cls.name}``, written into given tensors.\n\n    {cls.__doc__}"
    register_autograd(
        cls.name, cls.backward or not_differentiable(cls.name), cls.setup_context, _LIBRARY
    )
    cls.invoke = staticmethod(_invoker(cls))
    return cls


def _keep_dynamo_out(function: Any) -> None:
    """Have the code of an op run as it is where Dynamo left the frame that calls it to Python.

    Else it would trace that code, checks, caches and launches, down to the compiler of kernels.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(skip, skip)
        frames.set_code_exec_strategy(function.__code__, strategy)


def _invoker(cls: type[Op]) -> Callable[..., Any]:
    """The op without the dispatcher, whose Python boundary costs more than a launch.

    Calls that something else must see go through the dispatcher after all: traced and compiled
    ones, tensor subclasses, dispatch modes, transforms, forward-mode AD, and operands that require
    gradients or have no data.
    """
    dispatched = getattr(torch.ops.cute_kernels, cls.name).default

    def invoke(*args: Any) -> Any:
        if is_observed(args):
            return dispatched(*args)
        choice = chosen_backend()
        key, op = plan_key(cls, choice, args), cls(*args)
        plan = _plans.get(key)
        if plan is None:
            if any(isinstance(a, Tensor) and a.is_meta for a in args):
                return dispatched(*args)
            plan = _plans.add(key, op.plan(resolve_backend(choice, op.device)))
        outputs = plan.compute(op)
        return outputs[0] if len(outputs) == 1 else outputs

    invoke.__name__ = invoke.__qualname__ = cls.name
    invoke.__doc__ = cls.__doc__
    return invoke


def is_observed(args: tuple[Any, ...], plain: frozenset[type] = _PLAIN) -> bool:
    """Whether something must see a call with these arguments, so it must go to the dispatcher.

    Args:
        args: the arguments.
        plain: classes of tensors that the callee takes without the dispatcher.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
        or forward_ad._current_level >= 0
    ):
        return True
    watches = torch.is_grad_enabled()
    for a in args:
        if type(a) in plain:
            if watches and a.requires_grad:
                return True
        elif isinstance(a, Tensor):
            return True
    return False
