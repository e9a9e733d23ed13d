"""Where the gradients of a layer's parameters go: into ``main_grad``, and not before they are due.

The protocol of Megatron-LM and TransformerEngine. A parameter's ``main_grad`` is a buffer, usually
fp32, that the gradients of several microbatches add up in; the product that makes a gradient writes
there. ``param.grad_added_to_main_grad`` tells the hooks of a data-parallel wrapper so: those want a
tensor in ``param.grad`` all the same, and drop it.
"""

import dataclasses
import functools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..functional.linear_call import LinearCall
from ..functional.operands import WgradOperands

EAGER_ONLY = (
    "a layer with fuse_wgrad_accumulation or delay_wgrad trains in eager mode only: it writes "
    "gradients where no trace and no transform sees it"
)


class Wgrads:
    """What a layer was told about the gradients of its parameters, and those that wait.

    With ``fuse`` the weight's are written into ``main_grad``, with ``delay`` they wait until they
    are asked for; ``hooks`` run after those were computed.
    """

    def __init__(self, fuse: bool, delay: bool) -> None:
        self.hooks: list[Callable[[], object]] = []
        self._fuse, self._delay = fuse, delay
        self._stored: deque[StoredGradients] = deque()
        if delay:
            _waiting_somewhere.add(self)
            _watch_optimizers()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has other parameters.
        return {**self.__dict__, "hooks": [], "_stored": deque()}

    @property
    def active(self) -> bool:
        """Whether gradients go another way than autograd's."""
        return self._fuse or self._delay

    def check_eager(self, *, sharded: bool) -> None:
        """Raise where gradients cannot go another way."""
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
            raise RuntimeError(EAGER_ONLY)
        if sharded:
            raise RuntimeError(
                "fuse_wgrad_accumulation and delay_wgrad are not for sharded parameters, whose gradients FSDP takes itself"
            )

    def begin_call(
        self, weights: dict[str, Tensor], biases: dict[str, Tensor], overwrite: bool
    ) -> "ParameterGradients":
        """What takes the gradients of one call: see ``ParameterGradients``."""
        return ParameterGradients(
            weights, biases, self._fuse, overwrite, self._stored if self._delay else None
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._delay:
            _waiting_somewhere.add(self)
            _watch_optimizers()

    @property
    def waiting(self) -> list[Tensor]:
        """Parameters whose gradients wait for ``backward_dw``."""
        sinks = {id(stored.sink): stored.sink for stored in self._stored}
        return [
            p for sink in sinks.values() for p in (*sink.weights.values(), *sink.biases.values())
        ]

    def run_oldest(self, wanted: bool) -> None:
        """Compute the gradients that wait longest; that there are none is an error if ``wanted``.

        If ``main_grad`` does not fit they go on waiting.
        """
        if not self._delay:
            raise RuntimeError("backward_dw is for layers that were made with delay_wgrad=True")
        if not self._stored:
            if wanted:
                raise RuntimeError(
                    "backward_dw has nothing to compute: call it once after each backward pass"
                )
            return
        self._stored[0].check()
        self._stored.popleft().accumulate()
        for hook in self.hooks:
            hook()


#: Layers with ``delay_wgrad``.
_waiting_somewhere: weakref.WeakSet[Wgrads] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_warn_of_waiting)


def _warn_of_waiting(optimizer: Optimizer, *_: Any) -> None:
    """Warn if an optimizer steps over parameters whose gradients wait: it passes over them or uses
    old ones.
    """
    waiting = {id(p) for wgrads in _waiting_somewhere if wgrads._stored for p in wgrads.waiting}
    if not waiting:
        return
    count = sum(id(p) in waiting for group in optimizer.param_groups for p in group["params"])
    if count:
        warnings.warn(
            f"{type(optimizer).__name__}.step() without the gradients of {count} parameters of layers with delay_wgrad=True: "
            "call backward_dw() of these layers after each backward pass, before the step",
            stacklevel=4,
        )


@dataclasses.dataclass(frozen=True)
class ParameterGradients:
    """What happens to the gradients of the parameters of one call of a layer.

    ``weights`` are the parameter that the weight consists of, or that of each group, by name,
    ``biases`` likewise. With ``fuse`` the weight's gradient is written into ``main_grad``, which
    drops what that held with ``overwrite``. Gradients wait in ``store`` until they are asked for;
    None if they are due at once.
    """

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    fuse: bool
    overwrite: bool
    store: "deque[StoredGradients] | None"

    @property
    def anchor(self) -> Tensor | None:
        """What makes the output require a gradient where the parameters are cut off.

        Gradients that wait must not reach them: hooks of parameters run in any backward pass that
        does, with a gradient or without.
        """
        if self.store is None:
            return None
        return torch.empty(0, device=next(iter(self.weights.values())).device, requires_grad=True)

    @property
    def wanted(self) -> tuple[bool, bool]:
        """Whether the gradients of weight and bias are wanted."""
        weight, bias = (
            any(p.requires_grad for p in named.values()) for named in (self.weights, self.biases)
        )
        return weight, bias

    def check(self) -> None:
        """Raise if ``main_grad`` of a parameter is missing or does not fit."""
        if self.fuse and self.store is None:
            self._main_grads()

    def take(
        self, call: LinearCall, wgrad: WgradOperands | None, dbias: Tensor | None
    ) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """Handle the gradients of one backward pass; returns what autograd gets in their place."""
        if self.store is not None:
            self.store.append(StoredGradients(self, call, wgrad, dbias))
            return [None] * len(self.weights), None
        return self.of_weights(call, wgrad), dbias

    def of_weights(self, call: LinearCall, wgrad: WgradOperands | None) -> list[Tensor | None]:
        """The gradient of each parameter of the weight, or zeros in its place if it is written."""
        needs = [p.requires_grad for p in self.weights.values()]
        if wgrad is None or not any(needs):
            return [None] * len(needs)
        if not self.fuse:
            return call.split(call.weight_gradient(wgrad), needs)
        self._write(call, wgrad)
        return [_mark_as_added(p) if p.requires_grad else None for p in self.weights.values()]

    def _write(self, call: LinearCall, wgrad: WgradOperands) -> None:
        main_grads = self._main_grads()
        fresh = [
            self.overwrite or getattr(p, "overwrite_main_grad", False)
            for p in self.weights.values()
        ]
        together = _together(main_grads)
        if together is not None and len(set(fresh)) == 1:
            call.weight_gradient(wgrad, together, accumulate=not fresh[0])
            # One product wrote them all; their versions may be counted apart.
            increment_version([m for m in main_grads if m is not None])
            return
        # Of frozen parameters nothing is added, and nothing is kept.
        held = [m for m in main_grads if m is not None]
        before = [
            torch.zeros_like(held[0]) if m is None or is_fresh else m
            for m, is_fresh in zip(main_grads, fresh, strict=True)
        ]
        buffer = call.weight_gradient(wgrad, torch.stack(before), accumulate=not all(fresh))
        torch._foreach_copy_(
            held, [t for t, m in zip(buffer.unbind(), main_grads, strict=True) if m is not None]
        )

    def _main_grads(self) -> list[Tensor | None]:
        return [
            _main_grad(name, p) if p.requires_grad else None for name, p in self.weights.items()
        ]


@dataclasses.dataclass(frozen=True)
class StoredGradients:
    """The gradients of one backward pass, waiting for ``backward_dw``."""

    sink: ParameterGradients
    call: LinearCall
    wgrad: WgradOperands | None
    dbias: Tensor | None

    def check(self) -> None:
        """Raise if the weight's gradient is to be written where it does not fit."""
        if self.sink.fuse and self.wgrad is not None:
            self.sink._main_grads()

    def accumulate(self) -> None:
        """Compute them and have autograd add them to the parameters, hooks and all."""
        parameters = (*self.sink.weights.values(), *self.sink.biases.values())
        with torch.enable_grad():
            end: Tensor = _Accumulate.apply(self, *parameters)
        if end.requires_grad:
            end.backward(torch.empty_like(end))


class _Accumulate(torch.autograd.Function):
    """A result without elements, whose backward pass gives parameters their stored gradients."""

    @staticmethod
    def forward(ctx: Any, stored: StoredGradients, *parameters: Tensor) -> Tensor:
        ctx.stored = stored
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        stored: StoredGradients = ctx.stored
        biases: list[Tensor | None] = [None] * len(stored.sink.biases)
        if stored.dbias is not None:
            biases = list(stored.dbias.unbind() if stored.call.discrete else [stored.dbias])
        return None, *stored.sink.of_weights(stored.call, stored.wgrad), *biases


def _main_grad(name: str, parameter: Tensor) -> Tensor:
    shape, dtypes = tuple(parameter.shape), sorted({torch.float32, parameter.dtype}, key=str)
    rule = (
        f"fuse_wgrad_accumulation writes the gradient of {name} into {name}.main_grad, a "
        f"contiguous tensor of shape {shape} and dtype {' or '.join(map(str, dtypes))} on "
        f"{parameter.device}"
    )
    held: Any = getattr(parameter, "main_grad", None)
    if held is None:
        raise RuntimeError(f"{name}.main_grad is missing: {rule}")
    is_plain = isinstance(held, Tensor) and not is_traceable_wrapper_subclass(held)
    if not is_plain or held.dtype not in dtypes:
        kind = held.dtype if is_plain else type(held).__name__
        raise TypeError(f"{name}.main_grad has the wrong type: {rule}; got {kind}")
    if tuple(held.shape) != shape or held.device != parameter.device or not held.is_contiguous():
        got = f"shape {tuple(held.shape)} with strides {held.stride()} on {held.device}"
        raise ValueError(f"{name}.main_grad does not fit: {rule}; got {got}")
    return held


def _mark_as_added(parameter: Any) -> Tensor:
    """Tell hooks that the gradient is in ``main_grad``; returns what they find in ``.grad``.

    Zeros: whoever adds them all the same adds nothing.
    """
    parameter.grad_added_to_main_grad = True
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _together(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor (G, N, K) over parts that lie one after the other; None if they do not.

    In Megatron-LM's buffer of gradients they do.
    """
    first = parts[0]
    if first is None or first.dim() == 3:
        return first
    for g, part in enumerate(parts):
        if (
            part is None
            or part.dtype != first.dtype
            or part.untyped_storage()._cdata != first.untyped_storage()._cdata
            or part.storage_offset() != first.storage_offset() + g * first.numel()
        ):
            return None
    return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))
