"""The base class of all ops: one description of arguments, outputs, checks and computation."""

from __future__ import annotations

import abc
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ptx_emulator.host.settings import warn_once

from ..capability import require
from ..formats import Format, parse
from ..layout.buffers import BufferSpec
from ..records import check_kind
from ..runtime.backend import Backend, Choice, chosen_backend, resolve_backend
from ..runtime.launch import Launcher, launcher
from ..runtime.plan_cache import PLANS, plan_key
from .checks import EndRowChecks, check_end_rows_of
from .plan import CallPlan, Runner

#: Builds the runner of an op on kernels, from the metadata of one call.
Launchable = Callable[..., Runner]
L = TypeVar("L", bound=Launchable)

#: Classes of arguments by their annotations.
_KINDS = {kind.__name__: kind for kind in (Tensor, bool, int, float, str)} | {
    "torch.dtype": torch.dtype
}
#: Builders of runners by op class; the ``launcher`` module beside each op fills it.
_BUILDERS: dict[type[Op], Launchable] = {}
_SMALLEST_NORMAL = sys.float_info.min


class Op(abc.ABC):
    """Base class of all ops. A subclass is a dataclass whose fields are the op's arguments.

    It declares its outputs (``outputs``), checks its arguments (``check``) and computes on the
    reference backend (``run_reference``). The builder that ``launched_by`` registers computes it on
    kernels.
    """

    #: Name under ``torch.ops.cute_kernels``.
    name: ClassVar[str]
    #: Name of the output argument of the ``_out`` form.
    out_name: ClassVar[str] = "out"
    #: Names of the arguments that the op writes in place (``register_inplace``).
    written: ClassVar[tuple[str, ...]] = ()
    #: True if the op returns a list of tensors instead of one tensor.
    returns_list: ClassVar[bool] = False
    #: True if the ``_out`` form accepts ``accumulate``.
    accumulates: ClassVar[bool] = False
    #: Bytes to which kernels expect outputs to be aligned.
    alignment: ClassVar[int] = 32
    #: True if kernels write the zeros that ``BufferSpec.zeroed`` asks for when the output is fresh.
    fills_fresh: ClassVar[bool] = False
    #: For differentiable ops: the function that saves tensors, and the gradients of the inputs.
    setup_context: ClassVar[Callable[..., None] | None] = None
    backward: ClassVar[Callable[..., Any] | None] = None
    #: True if ``offs``, the end rows of groups, is an argument.
    has_offs: ClassVar[bool] = False
    #: The functional op, which skips the dispatcher if nothing observes the call.
    fast_call: ClassVar[Callable[..., Any]]

    @property
    def device(self) -> torch.device:
        """Device of the first operand."""
        operand: Tensor = next(iter(vars(self).values()))
        return operand.device

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensor arguments that are not None by name, those in lists as ``name[i]``."""
        tensors: dict[str, Tensor] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                tensors[field.name] = value
            elif isinstance(value, (list, tuple)):
                elements = ((i, t) for i, t in enumerate(value) if isinstance(t, Tensor))
                tensors |= {f"{field.name}[{i}]": t for i, t in elements}
        return tensors

    @abc.abstractmethod
    def check(self) -> None:
        """Raise ValueError or TypeError for invalid arguments."""

    @property
    def num_rows(self) -> int:
        """Number of rows that ``offs`` divides into groups."""
        operand: Tensor = next(iter(vars(self).values()))
        return operand.shape[0]

    def check_values(self) -> None:
        """Raise ValueError for invalid values of CPU tensors.

        This runs in every call, since a plan does not depend on values.
        """
        offs: Tensor | None = getattr(self, "offs", None)
        if offs is not None and (offs.is_cpu or EndRowChecks.recorder is not None):
            check_end_rows_of(offs, self.num_rows, next(iter(vars(self))))

    @abc.abstractmethod
    def outputs(self) -> Sequence[BufferSpec]:
        """Return the specs of the outputs."""

    @abc.abstractmethod
    def run_reference(self, outputs: Sequence[Tensor], **options: Any) -> None:
        """Compute into ``outputs`` with the reference backend.

        Args:
            outputs: Buffers of zeros, or the caller's tensors.
            **options: ``tensor_core`` of the backend, and ``accumulate``.
        """

    def capability(self) -> tuple[str, Format | None]:
        """Return the op and format under which the capability table lists this call."""
        return self.name, None

    def build_runner(self, launch: Launcher) -> Runner:
        """Build the function that runs calls with this metadata on kernels.

        The builder is the one that ``launched_by`` registered for this class or its nearest base.
        """
        return builder_of(type(self))(self, launch)

    def require(self, backend: Backend) -> None:
        """Raise UnsupportedError if the backend does not run this call."""
        require(*self.capability(), backend.arch)

    def plan(
        self, backend: Backend, wrap_launcher: Callable[[Launcher], Any] = lambda launch: launch
    ) -> CallPlan:
        """Check the arguments and choose kernels, equally for all calls with this metadata.

        Args:
            backend: Where the call runs.
            wrap_launcher: Applied to the launcher, for instance to record launches.
        """
        self.check()
        self.require(backend)
        if backend.arch == "reference":
            reference = functools.partial(_run_reference, tensor_core=backend.tensor_core)
            return self._plan(reference, zeroed=True)
        run = self.build_runner(wrap_launcher(launcher(backend, self.device)))
        return self._plan(run, fills_fresh=self.fills_fresh)

    def cached_plan(self) -> CallPlan:
        """Return the plan of an earlier call with the same metadata, or make one."""
        choice = chosen_backend()
        key = plan_key(type(self), choice, vars(self).values())
        plan: CallPlan = PLANS.get(key) or PLANS.add(key, self.new_plan(choice))
        if self.has_offs:
            self.check_values()
        return plan

    def new_plan(self, choice: Choice) -> CallPlan:
        """Make the plan of a call, on the backend that ``choice`` resolves to for its device."""
        self._check_types()
        if self.device.type == "meta":
            # Meta tensors have no data, and no backend.
            self.check()
            return self._plan(_run_nothing)
        return self.plan(resolve_backend(choice, self.device))

    def _plan(self, run: Runner, *, zeroed: bool = False, fills_fresh: bool = False) -> CallPlan:
        return CallPlan(
            self.device,
            self.alignment,
            self.outputs(),
            run,
            zeroed=zeroed,
            fills_fresh=fills_fresh,
        )

    def _check_types(self) -> None:
        """Raise TypeError for arguments of a wrong type.

        The dispatcher would refuse them, but a fast call does not go through it.
        """
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, (kind, _, optional) = getattr(self, field.name), str(field.type).partition(" | ")
            if kind in _KINDS and not (optional and value is None):
                check_kind(_KINDS[kind], **{field.name: value})


class FormatOp(Op):
    """Base class of ops on tensors of one format, whose text is an argument."""

    format: str

    @property
    def record(self) -> Format:
        """The parsed format."""
        return parse(self.format)

    def capability(self) -> tuple[str, Format | None]:
        """Return the op and its format."""
        return self.name, self.record


def launched_by(cls: type[Op]) -> Callable[[L], L]:
    """Register the decorated function as the builder of an op's runner.

    The function has the form ``build(op, launch: Launcher, ...) -> Runner``. It reads the metadata
    of ``op``, chooses and compiles kernels, and returns the function that launches them.
    """

    def register_builder(build: L) -> L:
        _BUILDERS[cls] = build
        return build

    return register_builder


def builder_of(cls: type[Op]) -> Launchable:
    """Return the builder that ``launched_by`` registered for an op class or its nearest base."""
    for base in cls.__mro__:
        if base in _BUILDERS:
            return _BUILDERS[base]
    raise AssertionError(f"the capability table lists kernels that {cls.name} does not have")


def _run_nothing(op: Op, outputs: Sequence[Tensor | None], **options: Any) -> None:
    """Leave outputs that have no data as they are."""


def _run_reference(op: Op, outputs: Sequence[Tensor], **options: Any) -> None:
    # Half of the smallest normal number is zero if this thread flushes subnormal numbers. Switching
    # that off here would not reach the threads that torch has started, which inherit it.
    if _SMALLEST_NORMAL * 0.5 == 0.0 and op.device.type == "cpu":
        warn_once(
            "this thread flushes subnormal numbers to zero (torch.set_flush_denormal, or a library "
            "built with -ffast-math): the reference backend is not exact for numbers near zero"
        )
    # Autocast would run the fp32 products inside in bf16.
    with torch.autocast(op.device.type, enabled=False):
        op.run_reference(outputs, **options)
