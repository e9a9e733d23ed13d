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
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from ..capability import require
from ..formats import Format, parse
from ..host.settings import warn_once
from ..layout.buffers import BufferSpec
from ..layout.shapes import PITCH_ALIGNMENT
from ..records import check_kind
from ..runtime.backend import Backend, chosen_backend, resolve_backend
from ..runtime.launch import Launcher, launcher
from ..runtime.plan import INERT, PlanCache, plan_key
from .checks import EndRowChecks, check_end_rows_of
from .derivatives import not_differentiable, refuse_derivatives, register_autograd

#: How Inductor's code allocates on the current device: 0.8 us on the host of an H200, where
#: ``torch.empty_strided`` takes 1.4 and ``torch.empty`` 2.3. Unlike them it leaves the memory as it
#: is in deterministic mode, too.
_empty_strided_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
#: ``torch.cuda.current_device`` without a look at whether CUDA is there; builds for CPUs have none.
_get_device: Any = getattr(torch._C, "_cuda_getDevice", None)

_profiler_enabled = torch._C._autograd._profiler_enabled
#: Classes of tensors that no call has to go to the dispatcher for.
PLAIN = frozenset({Tensor, torch.nn.Parameter})
#: Ops by what the dispatcher calls.
FUNCTIONAL: dict[Any, type[Op]] = {}
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

#: Classes of arguments by their annotations.
_KINDS = {kind.__name__: kind for kind in (Tensor, bool, int, float, str)} | {
    "torch.dtype": torch.dtype
}


#: Computes an op into its outputs: (op, outputs, **options). Holds no tensors.
Runner: TypeAlias = "Callable[..., None]"


class Allocator:
    """Makes fresh tensors again and again, with all that is known about them worked out once.

    Their ``zeroed`` is not looked at.
    """

    def __init__(self, specs: Iterable[BufferSpec], device: torch.device) -> None:
        meta = torch.device("meta")
        self._buffers = [(tuple(s.shape), s.allocate(meta, False).stride(), s.dtype) for s in specs]
        self._device = device
        self._cuda_index = device.index if device.type == "cuda" else None

    def make(self) -> list[Tensor]:
        """The tensors, in the order of the specs."""
        # A mode sees what goes through the dispatcher.
        is_cuda = self._cuda_index is not None and not torch._C._len_torch_dispatch_stack()
        # There are tensors on the device, so that CUDA has been initialized.
        if (
            is_cuda
            and _empty_strided_cuda
            and (_get_device or torch.cuda.current_device)() == self._cuda_index
        ):
            return [_empty_strided_cuda(*b) for b in self._buffers]
        device = self._device
        return [torch.empty_strided(b[0], b[1], dtype=b[2], device=device) for b in self._buffers]


class _Plan:
    """What the metadata of a call decides: the outputs, and ``run``, what computes them.

    If ``zeroed``, fresh outputs are zeroed before, whatever their specs say; if ``fills_fresh``,
    ``run`` takes ``fresh=True`` and then writes the zeros that the specs ask for.
    """

    def __init__(
        self,
        op: Op,
        outputs: Iterable[BufferSpec],
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
            i for i, s in enumerate(self.outputs) if zeroed or s.zeroed and not fills_fresh
        ]

    def compute(self, op: Op) -> list[Tensor]:
        outputs = self._allocator.make()
        for i in self._zeroed:
            outputs[i].zero_()
        self.run(op, outputs, **self.options)
        return outputs

    def compute_into(self, op: Op, given: Sequence[Tensor], **options: bool) -> None:
        """Write given outputs; those that kernels cannot write, by way of copies."""
        buffers = [
            t if _is_writable(t, s, op.alignment) else _copy(t, s)
            for t, s in zip(given, self.outputs, strict=True)
        ]
        self.run(op, buffers, **options)
        for tensor, buffer in zip(given, buffers, strict=True):
            if tensor is not buffer:
                tensor.copy_(buffer)


def _is_writable(given: Tensor, spec: BufferSpec, alignment: int) -> bool:
    """Whether kernels can write an output where it is; a dense copy of a padded one may not do."""
    pitch_fits = spec.pitch is None or given.stride(-2) * given.itemsize % PITCH_ALIGNMENT == 0
    return pitch_fits and given.data_ptr() % alignment == 0


def _copy(given: Tensor, spec: BufferSpec) -> Tensor:
    """A copy that kernels can write; it has what they leave alone, too."""
    return spec.allocate(given.device, False).copy_(given)


_plans: PlanCache[Any] = PlanCache()


def forget_plans() -> None:
    """Decide anew what runs each call; for settings that are no argument of an op."""
    _plans.clear()


class Op(abc.ABC):
    """Base of all ops; subclasses are dataclasses."""

    #: Name under ``torch.ops.cute_kernels``.
    name: ClassVar[str]
    #: Name of the argument of the ``_out`` form that is written.
    out_name: ClassVar[str] = "out"
    #: Arguments that an op writes, which has them for its outputs (``register_inplace``).
    written: ClassVar[tuple[str, ...]] = ()
    #: Whether there is a list of outputs, instead of one.
    returns_list: ClassVar[bool] = False
    #: Whether the ``_out`` form takes ``accumulate``.
    accumulates: ClassVar[bool] = False
    #: Bytes to which its kernels ask outputs to be aligned.
    alignment: ClassVar[int] = 32
    #: Whether its kernels write the zeros that ``BufferSpec.zeroed`` asks for, when told that the
    #: output is fresh.
    fills_fresh: ClassVar[bool] = False
    #: For differentiable ops: what to save, and the gradients of the inputs.
    setup_context: ClassVar[Callable[..., None] | None] = None
    backward: ClassVar[Callable[..., Any] | None] = None
    #: ``offs``, the end rows of groups, is an argument.
    takes_offs: ClassVar[bool] = False
    #: The functional op, without the dispatcher where nothing observes the call.
    invoke: ClassVar[Callable[..., Any]]

    @property
    def device(self) -> torch.device:
        """Device of the op's operands: that of the first one."""
        first: Tensor = next(iter(vars(self).values()))
        return first.device

    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments that are given, those of lists too, by name."""
        found: dict[str, Tensor] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                found[field.name] = value
            elif isinstance(value, (list, tuple)):
                tensors = ((i, t) for i, t in enumerate(value) if isinstance(t, Tensor))
                found |= {f"{field.name}[{i}]": t for i, t in tensors}
        return found

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ValueError or TypeError for arguments that break a rule."""

    @property
    def num_rows(self) -> int:
        """Rows that ``offs`` cuts into groups."""
        first: Tensor = next(iter(vars(self).values()))
        return first.shape[0]

    def check_values(self) -> None:
        """Raise ValueError for values of CPU tensors that break a rule, in each call: a plan does
        not depend on them.
        """
        offs: Tensor | None = getattr(self, "offs", None)
        if offs is not None and (offs.is_cpu or EndRowChecks.recorder is not None):
            check_end_rows_of(offs, self.num_rows, next(iter(vars(self))))

    @abc.abstractmethod
    def outputs(self) -> Sequence[BufferSpec]:
        """What the op writes."""

    @abc.abstractmethod
    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        """Compute into ``outputs`` with the reference backend.

        Args:
            outputs: buffers of zeros, or what the caller gave.
            **options: ``tensor_core`` of the backend, and ``accumulate``.
        """

    def capability(self) -> tuple[str, Format | None]:
        """The op and format under which the capability table lists this call."""
        return self.name, None

    def kernels(self, launch: Launcher) -> Runner:
        """What runs calls with this metadata on kernels; for ops that the table lists with some."""
        raise AssertionError(f"the capability table lists kernels that {self.name} does not have")

    def require(self, backend: Backend) -> None:
        """Raise UnsupportedError if the backend does not run this call."""
        require(*self.capability(), backend.arch)

    def plan(
        self, backend: Backend, through: Callable[[Launcher], Any] = lambda launch: launch
    ) -> _Plan:
        """Check the arguments and decide what runs, the same for all calls with this metadata,
        ``through`` a launcher.
        """
        self.check()
        self.require(backend)
        if backend.arch == "reference":
            reference = functools.partial(_run_reference, tensor_core=backend.tensor_core)
            return _Plan(self, self.outputs(), reference, zeroed=True)
        run = self.kernels(through(launcher(backend, self.device)))
        return _Plan(self, self.outputs(), run, fills_fresh=self.fills_fresh)

    def cached_plan(self) -> _Plan:
        """``plan``, from the cache if a call with the same metadata went before."""
        choice = chosen_backend()
        key = plan_key(type(self), choice, vars(self).values())
        plan: _Plan = _plans.get(key) or _plans.add(key, self._new_plan(choice))
        if self.takes_offs:
            self.check_values()
        return plan

    def _check_types(self) -> None:
        """Raise TypeError for what the dispatcher refuses, which may not see the call, and for no
        tensor.
        """
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, (kind, _, optional) = getattr(self, field.name), str(field.type).partition(" | ")
            if kind in _KINDS and not (optional and value is None):
                check_kind(_KINDS[kind], **{field.name: value})

    def _new_plan(self, choice: Any) -> _Plan:
        self._check_types()
        if self.device.type == "meta":
            # There is nothing to compute, and no backend that would.
            self.check()
            return _Plan(self, self.outputs(), _run_nothing)
        return self.plan(resolve_backend(choice, self.device))


class OfFormat(Op):
    """An op of tensors of one format, whose text is an argument."""

    format: str

    @property
    def record(self) -> Format:
        """The format."""
        return parse(self.format)

    def capability(self) -> tuple[str, Format | None]:
        """The op of this format."""
        return self.name, self.record


def _run_nothing(op: Op, outputs: Sequence[Tensor | None], **options: Any) -> None:
    """Leave outputs that have no data as they are."""


#: Its half is subnormal: zero on a thread that flushes such numbers.
_SMALLEST_NORMAL = sys.float_info.min


def _run_reference(op: Op, outputs: Sequence[Tensor], **options: Any) -> None:
    # Turning it off here would not reach threads that torch made meanwhile, which inherit it.
    if _SMALLEST_NORMAL * 0.5 == 0.0 and op.device.type == "cpu":
        warn_once(
            "this thread flushes subnormal numbers to zero (torch.set_flush_denormal, or a library "
            "built with -ffast-math): the reference backend is not exact for numbers near zero"
        )
    # Autocast would run the fp32 products inside in bf16.
    with torch.autocast(op.device.type, enabled=False):
        op.run_reference(outputs, **options)


def check_outputs(op: Op, specs: Sequence[BufferSpec], given: Sequence[Tensor]) -> None:
    """What the caller gives to be written must be what ``specs`` say."""
    if len(given) != len(specs):
        shapes = ", ".join(str(tuple(spec.shape)) for spec in specs)
        raise ValueError(
            f"{op.name}_out: {op.out_name} must be {len(specs)} tensors, of shapes {shapes}; got {len(given)}"
        )
    for i, (spec, tensor) in enumerate(zip(specs, given, strict=True)):
        name = f"{op.out_name}[{i}]" if op.returns_list else op.out_name
        if tensor.dtype != spec.dtype:
            raise TypeError(f"{op.name}_out: {name} must be {spec.dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != tuple(spec.shape):
            raise ValueError(
                f"{op.name}_out: {name} must have shape {tuple(spec.shape)}, got {tuple(tensor.shape)}"
            )
        # Functionalization may hand over a dense copy of a padded output: any pitch will do.
        pitch = spec.pitch and max(tensor.stride(-2), spec.shape[-1])
        if tensor.numel() and tensor.stride() != spec._replace(pitch=pitch).strides:
            raise ValueError(
                f"{op.name}_out: {name} must be row-major with strides {spec.strides}, got {tensor.stride()}"
            )
        if tensor.device != op.device:
            raise ValueError(f"{op.name}_out: {name} must be on {op.device}, got {tensor.device}")


def _arguments(cls: type[Op]) -> str:
    parts = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        kind = _SCHEMA_TYPES[str(field.type)]
        if field.name in cls.written:
            kind = kind.replace(
                "Tensor", f"Tensor({chr(ord('a') + cls.written.index(field.name))}!)"
            )
        default = field.default
        shown = f'"{default}"' if isinstance(default, str) else default
        parts.append(
            f"{kind} {field.name}" + (f"={shown}" if default is not dataclasses.MISSING else "")
        )
    return ", ".join(parts)


def _schema(cls: type[Op]) -> tuple[str, str]:
    arguments, many = _arguments(cls), "[]" if cls.returns_list else ""
    flag = ", bool accumulate=False" if cls.accumulates else ""
    return (
        f"{cls.name}({arguments}) -> Tensor{many}",
        f"{cls.name}_out({arguments}, *, Tensor(o!){many} {cls.out_name}{flag}) -> ()",
    )


def register(cls: type[Op]) -> type[Op]:
    """Class decorator: register the functional and the ``_out`` form of an op, and their fakes."""
    functional, out = _schema(cls)
    cls.takes_offs = any(field.name == "offs" for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    def result(outputs: list[Tensor]) -> Tensor | list[Tensor]:
        return outputs if cls.returns_list else outputs[0]

    def call(*args: Any, **kwargs: Any) -> Tensor | list[Tensor]:
        op = cls(*args, **kwargs)
        return result(op.cached_plan().compute(op))

    def fake(*args: Any, **kwargs: Any) -> Tensor | list[Tensor]:
        op = cls(*args, **kwargs)
        op.check()
        return result([s.allocate(op.device, False) for s in op.outputs()])

    def split(kwargs: dict[str, Any]) -> tuple[list[Tensor], dict[str, bool]]:
        options = {k: kwargs.pop(k) for k in ("accumulate",) if k in kwargs}
        out = kwargs.pop(cls.out_name)
        return out if cls.returns_list else [out], options

    def refuse(op: Op, outputs: list[Tensor]) -> None:
        written = ((cls.out_name, out) for out in outputs)
        refuse_derivatives(f"{cls.name}_out", (*op.tensors().items(), *written), f"call {cls.name}")

    def call_out(*args: Any, **kwargs: Any) -> None:
        outputs, options = split(kwargs)
        op = cls(*args, **kwargs)
        plan = op.cached_plan()
        check_outputs(op, plan.outputs, outputs)
        refuse(op, outputs)
        for name, t in op.tensors().items() if cls.accumulates else ():
            if t.data_ptr() == outputs[0].data_ptr() != 0:
                raise ValueError(f"{cls.name}_out: out must not lie where {name} does")
        # Nothing else tells autograd, which may hold an output for a backward pass.
        increment_version(outputs)
        with torch.no_grad():
            plan.compute_into(op, outputs, **options)

    def fake_out(*args: Any, **kwargs: Any) -> None:
        outputs, _ = split(kwargs)
        op = cls(*args, **kwargs)
        op.check()
        check_outputs(op, op.outputs(), outputs)
        refuse(op, outputs)

    _define(cls.name, functional, call, fake, cls.__doc__)
    into = f"``{cls.name}``, written into given tensors.\n\n    {cls.__doc__}"
    _define(f"{cls.name}_out", out, call_out, fake_out, into)
    register_autograd(
        cls.name, cls.backward or not_differentiable(cls.name), cls.setup_context, _LIBRARY
    )
    cls.invoke = staticmethod(_invoker(cls))
    return cls


def register_inplace(cls: type[Op]) -> type[Op]:
    """Class decorator: register an op that writes those of its arguments that ``written`` names."""
    remedy = "call it under torch.no_grad()"

    def call(*args: Any, **kwargs: Any) -> None:
        op = cls(*args, **kwargs)
        plan = op.cached_plan()
        held = [getattr(op, name) for name in cls.written]
        outputs = [t for one in held for t in (one if isinstance(one, list) else [one])]
        refuse_derivatives(cls.name, op.tensors().items(), remedy)
        # Nothing else tells autograd, which may hold an output for a backward pass.
        increment_version(outputs)
        with torch.no_grad():
            plan.compute_into(op, outputs)

    def fake(*args: Any, **kwargs: Any) -> None:
        op = cls(*args, **kwargs)
        op.check()
        refuse_derivatives(cls.name, op.tensors().items(), remedy)

    _define(cls.name, f"{cls.name}({_arguments(cls)}) -> ()", call, fake, cls.__doc__)
    cls.invoke = staticmethod(getattr(torch.ops.cute_kernels, cls.name).default)
    return cls


def _define(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    meta: Callable[..., Any],
    doc: str | None,
) -> None:
    keep_dynamo_out(implementation)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cute_kernels::{name}", meta, lib=_LIBRARY)
    getattr(torch.ops.cute_kernels, name).__doc__ = doc


def keep_dynamo_out(function: Any) -> None:
    """Have the code of an op run as it is where Dynamo left the frame that calls it to Python.

    Else it would trace that code, checks, caches and launches, down to the compiler of kernels.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def _invoker(cls: type[Op]) -> Callable[..., Any]:
    """The op without the dispatcher, whose Python boundary costs more than a launch.

    Calls that something else must see go through the dispatcher after all: traced and compiled
    ones, tensor subclasses, dispatch modes, transforms, forward-mode AD, profiled ones, and
    operands that require gradients or have no data.
    """
    dispatched = getattr(torch.ops.cute_kernels, cls.name).default
    FUNCTIONAL[dispatched], takes_offs = cls, cls.takes_offs

    def invoke(*args: Any) -> Any:
        if is_observed(args):
            return dispatched(*args)
        choice = chosen_backend()
        key, op = plan_key(cls, choice, args), cls(*args)
        plan = _plans.get(key) or _plans.add(key, op._new_plan(choice))
        if takes_offs:
            op.check_values()
        outputs = plan.compute(op)
        return outputs if cls.returns_list else outputs[0]

    invoke.__name__ = invoke.__qualname__ = cls.name
    invoke.__doc__ = cls.__doc__
    return invoke


def is_observed(args: Sequence[Any], plain: frozenset[type] = PLAIN) -> bool:
    """Whether something must see a call with these arguments, tensors or lists of some.

    Then it must go to the dispatcher; the callee takes tensors of ``plain`` classes without.
    """
    return is_any_observed() or is_any_watched(args, plain, torch.is_grad_enabled())


def is_any_observed() -> bool:
    """Whether something must see all calls."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
        or forward_ad._current_level >= 0
        # The dispatcher is what names an op to a profiler.
        or _profiler_enabled()
    )


def is_any_watched(args: Sequence[Any], plain: frozenset[type], gradients: bool) -> bool:
    """Whether an argument requires a gradient, if those are on, or is a tensor of another class."""
    for a in args:
        kind = type(a)
        if kind in INERT:
            continue
        if kind in plain:
            if gradients and a.requires_grad:
                return True
        elif isinstance(a, (list, tuple)):
            if is_any_watched(a, plain, gradients):
                return True
        elif isinstance(a, Tensor):
            return True
    return False
