"""Accumulation of parameter gradients into ``main_grad``, and their delay.

This is the protocol of Megatron-LM and TransformerEngine. ``main_grad`` of a parameter is a buffer,
usually fp32, in which the gradients of several microbatches are summed. The product that computes a
gradient adds it there. ``param.grad_added_to_main_grad`` tells the hooks of a data-parallel wrapper
about it. These hooks still expect a tensor in ``param.grad``, and drop it.
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
    "gradients outside of traces and transforms"
)


class WgradAccumulator:
    """Options of a layer for the gradients of its parameters, and its pending gradients.

    Args:
        fuse: True writes the gradients of the weight into ``main_grad``.
        delay: True keeps gradients pending until ``run_oldest``.

    Attributes:
        hooks: Functions that run after the pending gradients have been computed.
    """

    def __init__(self, fuse: bool, delay: bool) -> None:
        self.hooks: list[Callable[[], object]] = []
        self._fuse, self._delay = fuse, delay
        self._stored: deque[StoredGradients] = deque()
        if delay:
            _delaying.add(self)
            _watch_optimizers()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has other parameters.
        return {**self.__dict__, "hooks": [], "_stored": deque()}

    @property
    def active(self) -> bool:
        """True if autograd does not accumulate the gradients itself."""
        return self._fuse or self._delay

    def check_eager(self, *, sharded: bool) -> None:
        """Raise RuntimeError if only autograd can accumulate the gradients.

        Args:
            sharded: True if parameters are sharded.
        """
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
            raise RuntimeError(EAGER_ONLY)
        if sharded:
            raise RuntimeError(
                "fuse_wgrad_accumulation and delay_wgrad are not for sharded parameters, whose "
                "gradients FSDP takes itself"
            )

    def begin_call(
        self, weights: dict[str, Tensor], biases: dict[str, Tensor], overwrite: bool
    ) -> "ParameterGradients":
        """Return the accumulator of one call. See ``ParameterGradients`` for the arguments."""
        return ParameterGradients(
            weights, biases, self._fuse, overwrite, self._stored if self._delay else None
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._delay:
            _delaying.add(self)
            _watch_optimizers()

    @property
    def pending(self) -> list[Tensor]:
        """Parameters whose gradients are pending until ``backward_dw``."""
        accumulators = {id(stored.accumulator): stored.accumulator for stored in self._stored}
        return [
            p
            for accumulator in accumulators.values()
            for p in (*accumulator.weights.values(), *accumulator.biases.values())
        ]

    def run_oldest(self, wanted: bool) -> None:
        """Compute the gradients that are pending longest, and run the hooks.

        Gradients stay pending if ``main_grad`` does not match.

        Args:
            wanted: True raises RuntimeError if no gradients are pending.
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


#: Accumulators with ``delay_wgrad``.
_delaying: weakref.WeakSet[WgradAccumulator] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_warn_if_pending)


def _warn_if_pending(optimizer: Optimizer, *_: Any) -> None:
    """Warn if an optimizer steps over parameters whose gradients are pending.

    The step would skip these parameters, or use old gradients.
    """
    pending = {
        id(p) for accumulator in _delaying if accumulator._stored for p in accumulator.pending
    }
    if not pending:
        return
    count = sum(id(p) in pending for group in optimizer.param_groups for p in group["params"])
    if count:
        warnings.warn(
            f"{type(optimizer).__name__}.step() without the gradients of {count} parameters of "
            "layers with delay_wgrad=True: call backward_dw() of these layers after each backward "
            "pass, before the step",
            stacklevel=4,
        )


@dataclasses.dataclass(frozen=True)
class ParameterGradients:
    """Accumulator of the parameter gradients of one call of a layer.

    It implements ``grouped.functional.linear_call.WeightGradientAccumulator``.

    Attributes:
        weights: Parameters by name. They are one (G, N, K), or one (N, K) per group.
        biases: Parameters by name. They are one (G, N), or one (N,) per group.
        fuse: True writes the gradient of the weight into ``main_grad``.
        overwrite: True overwrites ``main_grad`` instead of adding to it.
        store: Queue of pending gradients. None accumulates them at once.
    """

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    fuse: bool
    overwrite: bool
    store: "deque[StoredGradients] | None"

    @property
    def anchor(self) -> Tensor | None:
        """Empty tensor that makes the output require a gradient if the parameters are detached.

        Pending gradients require detached parameters: otherwise each backward pass would run the
        hooks of the parameters, with or without a gradient. None if gradients are not delayed.
        """
        if self.store is None:
            return None
        return torch.empty(0, device=next(iter(self.weights.values())).device, requires_grad=True)

    @property
    def wanted(self) -> tuple[bool, bool]:
        """True for each of weight and bias if its gradient is needed."""
        weight, bias = (
            any(p.requires_grad for p in named.values()) for named in (self.weights, self.biases)
        )
        return weight, bias

    def check(self) -> None:
        """Raise if ``main_grad`` of a parameter is missing or does not match."""
        if self.fuse and self.store is None:
            self._main_grads()

    def take(
        self, call: LinearCall, wgrad: WgradOperands | None, dbias: Tensor | None
    ) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """Accumulate the gradients of one backward pass, or keep them pending.

        Args:
            call: Metadata of the call.
            wgrad: Operands of the product that computes the weight's gradient, or None.
            dbias: (G, N) gradient of the bias, or None.

        Returns:
            The gradients that autograd gets for each parameter of the weight, and for the bias.
        """
        if self.store is not None:
            self.store.append(StoredGradients(self, call, wgrad, dbias))
            return [None] * len(self.weights), None
        return self.weight_gradients(call, wgrad), dbias

    def weight_gradients(
        self, call: LinearCall, wgrad: WgradOperands | None
    ) -> list[Tensor | None]:
        """Return the gradient of each parameter of the weight, or zeros if it was written."""
        needs = [p.requires_grad for p in self.weights.values()]
        if wgrad is None or not any(needs):
            return [None] * len(needs)
        if not self.fuse:
            return call.split(call.weight_gradient(wgrad), needs)
        self._write(call, wgrad)
        return [_mark_as_added(p) if p.requires_grad else None for p in self.weights.values()]

    def _write(self, call: LinearCall, wgrad: WgradOperands) -> None:
        """Write the gradient of the weight into the buffers ``main_grad``, or add it to them."""
        main_grads = self._main_grads()
        overwrites = [
            self.overwrite or getattr(p, "overwrite_main_grad", False)
            for p in self.weights.values()
        ]
        buffer = _join_consecutive(main_grads)
        if buffer is not None and len(set(overwrites)) == 1:
            call.weight_gradient(wgrad, buffer, accumulate=not overwrites[0])
            # One product wrote all buffers, which may have separate version counters.
            increment_version([m for m in main_grads if m is not None])
            return
        # Frozen parameters have no buffer: their gradients are computed and dropped.
        targets = [m for m in main_grads if m is not None]
        initial = [
            torch.zeros_like(targets[0]) if m is None or is_overwritten else m
            for m, is_overwritten in zip(main_grads, overwrites, strict=True)
        ]
        sums = call.weight_gradient(wgrad, torch.stack(initial), accumulate=not all(overwrites))
        torch._foreach_copy_(
            targets, [t for t, m in zip(sums.unbind(), main_grads, strict=True) if m is not None]
        )

    def _main_grads(self) -> list[Tensor | None]:
        return [
            _main_grad(name, p) if p.requires_grad else None for name, p in self.weights.items()
        ]


@dataclasses.dataclass(frozen=True)
class StoredGradients:
    """The gradients of one backward pass, pending until ``backward_dw``.

    Attributes:
        accumulator: The accumulator of the call.
        call: Metadata of the call.
        wgrad: Operands of the product that computes the weight's gradient, or None.
        dbias: (G, N) gradient of the bias, or None.
    """

    accumulator: ParameterGradients
    call: LinearCall
    wgrad: WgradOperands | None
    dbias: Tensor | None

    def check(self) -> None:
        """Raise if the weight's gradient cannot be written into ``main_grad``."""
        if self.accumulator.fuse and self.wgrad is not None:
            self.accumulator._main_grads()

    def accumulate(self) -> None:
        """Compute the gradients. Autograd adds them to the parameters and runs their hooks."""
        weights, biases = self.accumulator.weights, self.accumulator.biases
        with torch.enable_grad():
            end: Tensor = _Accumulate.apply(self, *weights.values(), *biases.values())
        if end.requires_grad:
            end.backward(torch.empty_like(end))


class _Accumulate(torch.autograd.Function):
    """An empty result, whose backward pass gives parameters their stored gradients."""

    @staticmethod
    def forward(ctx: Any, stored: StoredGradients, *parameters: Tensor) -> Tensor:
        ctx.stored = stored
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the parameters of weight and bias."""
        stored: StoredGradients = ctx.stored
        accumulator = stored.accumulator
        biases: list[Tensor | None] = [None] * len(accumulator.biases)
        if stored.dbias is not None:
            biases = list(stored.dbias.unbind() if stored.call.discrete else [stored.dbias])
        return None, *accumulator.weight_gradients(stored.call, stored.wgrad), *biases


def _main_grad(name: str, parameter: Tensor) -> Tensor:
    """Return ``main_grad`` of a parameter.

    Raises:
        RuntimeError: It is missing.
        TypeError: It is not a plain tensor, or its dtype is not supported.
        ValueError: It has another shape or device, or is not contiguous.
    """
    shape, dtypes = tuple(parameter.shape), sorted({torch.float32, parameter.dtype}, key=str)
    rule = (
        f"fuse_wgrad_accumulation writes the gradient of {name} into {name}.main_grad, a "
        f"contiguous tensor of shape {shape} and dtype {' or '.join(map(str, dtypes))} on "
        f"{parameter.device}"
    )
    buffer: Any = getattr(parameter, "main_grad", None)
    if buffer is None:
        raise RuntimeError(f"{name}.main_grad is missing: {rule}")
    is_plain = isinstance(buffer, Tensor) and not is_traceable_wrapper_subclass(buffer)
    if not is_plain or buffer.dtype not in dtypes:
        kind = buffer.dtype if is_plain else type(buffer).__name__
        raise TypeError(f"{name}.main_grad has the wrong type: {rule}; got {kind}")
    if (
        tuple(buffer.shape) != shape
        or buffer.device != parameter.device
        or not buffer.is_contiguous()
    ):
        got = f"shape {tuple(buffer.shape)} with strides {buffer.stride()} on {buffer.device}"
        raise ValueError(f"{name}.main_grad does not fit: {rule}; got {got}")
    return buffer


def _mark_as_added(parameter: Any) -> Tensor:
    """Tell hooks that the gradient is in ``main_grad`` and return zeros for ``.grad``.

    Code that adds ``.grad`` to ``main_grad`` anyway then adds nothing.
    """
    parameter.grad_added_to_main_grad = True
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _join_consecutive(buffers: Sequence[Tensor | None]) -> Tensor | None:
    """Return one tensor (G, N, K) over buffers (N, K) that are consecutive in one storage.

    They are consecutive in Megatron-LM's buffer of gradients. Return None if they are not. A single
    buffer (G, N, K) is returned as it is.
    """
    start = buffers[0]
    if start is None or start.dim() == 3:
        return start
    for g, buffer in enumerate(buffers):
        if (
            buffer is None
            or buffer.dtype != start.dtype
            or buffer.untyped_storage()._cdata != start.untyped_storage()._cdata
            or buffer.storage_offset() != start.storage_offset() + g * start.numel()
        ):
            return None
    return start.as_strided((len(buffers), *start.shape), (start.numel(), *start.stride()))
