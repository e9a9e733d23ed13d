"""The state of delayed scaling, which a layer keeps from one step to the next."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.delayed_scaling import delayed_scaling_update, reduce_amaxes
from ..functional.operands import Scaling
from ..recipes import ROLES, FP8Delayed, Recipe
from ..tensor.validation import check_size


class DelayedScaling(nn.Module):
    """Scales of a grouped linear layer under ``FP8Delayed``, and the amaxes that determine them.

    A ``GroupedLinear`` has one as ``scaling``. For ``grouped.linear`` create one per layer, and
    call ``update()`` once per step.

    **Recording of amaxes.** A call in ``train()`` mode with gradients enabled casts with the
    current scales, forward and backward: a backward pass uses the scales of its forward pass. When
    the gradients are computed, the amaxes of the input, the weight and the output's gradient raise
    row 0 of the histories. A call that needs no gradients raises it at once. Row 0 is a maximum, so
    the order of microbatches does not matter. Under ``eval()`` and ``torch.no_grad()`` nothing
    changes.

    **Update of scales.** ``update`` rolls the histories and computes the next scales of all roles.
    ``GroupedLinear`` calls it before it quantizes anything, at the first call of a step. This is a
    call in ``train()`` mode with gradients enabled and ``is_first_microbatch`` None or True. So the
    amaxes of a step determine the scales of the next step. Without amaxes in between, an update
    changes nothing. With several microbatches per step, mark the first one: a call with None is a
    step by itself.

    **Recomputation.** ``torch.utils.checkpoint(use_reentrant=False)`` runs the forward pass again
    inside the backward pass. This run updates nothing, and casts with the current scales, which are
    the scales of the step. The reentrant form raises, because its first forward pass runs under
    ``no_grad``. Compiled code cannot detect a recomputation: the update in it changes nothing if
    the gradients of a step are computed in the order of its microbatches.

    **Start of groups.** A scale of 0 marks a group that has no scale yet. An operand then uses the
    scale of its own amax, as under ``FP8Current``, in each call until an update has an amax of the
    group. All groups start like this; with ``recipe.initial_scale="one"`` scales start as ones. The
    device decides, and no call waits for it. Each call computes the amax of its operand until all
    groups of the role have a scale. ``poll`` checks on the host whether they have one. ``update``
    calls ``poll`` in eager mode. A CUDA graph that was captured before still computes the amaxes,
    and so does compiled code until ``poll`` is called between steps.

    **Infinite amaxes.** With ``recipe.propagate_nonfinite`` an amax that is infinite is not
    recorded. ``torch.amp.GradScaler`` skips the step of this amax, and the scale would not change
    while the history has it.

    All buffers are fp32, are in the state dict, and stay fp32 when the layer is cast. They have one
    slot per group, for single and discrete parameters. A weight that is a GroupedTensor has its own
    scales, and the slots of ``weight`` are unused. If an older state dict has a scale of 1 and no
    amax, the group starts as the recipe says. State dicts of other recipes lack the buffers. They
    load with ``load_state_dict(..., strict=False)``, in either direction. If another recipe is set
    as ``layer.recipe``, the state is unused.

    Args:
        recipe: Formats, length of the histories, and algorithm of the scales. ``history_length`` is
            TransformerEngine's ``amax_history_len``, and ``algorithm`` its ``amax_compute_algo``.
        num_groups: G. The number of groups.
        device: Device of the buffers.

    Attributes:
        input_scale: (G,) fp32. The scale of each group's input. It starts as zeros, or as ones
            under ``initial_scale="one"``. Other roles have the same form.
        input_amax_history: (L, G) fp32. It starts as zeros. Row 0 has the amaxes of the current
            step, and row L - 1 the newest earlier ones. ``weight_amax_history`` and
            ``grad_output_amax_history`` have the same form.

    Raises:
        TypeError: ``recipe`` is not an FP8Delayed.
        ValueError: ``num_groups`` is not positive.
    """

    #: True for each role if a group may have no scale yet, as far as the host knows.
    _may_be_zero: Sequence[bool] = (True,) * len(ROLES)
    _flag_reader: "_FlagReader | None" = None

    def __init__(
        self, recipe: FP8Delayed, num_groups: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if not isinstance(recipe, FP8Delayed):
            raise TypeError(f"recipe must be a grouped.recipes.FP8Delayed, got {recipe!r}")
        check_size("num_groups", num_groups)
        self.recipe = recipe
        self.num_groups = num_groups
        factory: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self._mark_groups_unscaled()
        for role in ROLES:
            self.register_buffer(
                f"{role}_scale", torch.full((num_groups,), self._initial, **factory)
            )
            self.register_buffer(
                f"{role}_amax_history", torch.zeros(recipe.history_length, num_groups, **factory)
            )

    @property
    def _initial(self) -> float:
        return 0.0 if self.recipe.initial_scale == "current" else 1.0

    def scale(self, role: str) -> Tensor:
        """Return the (G,) fp32 factors of a role. A group without a factor has 0.

        Args:
            role: ``"input"``, ``"weight"`` or ``"grad_output"``.
        """
        return getattr(self, f"{role}_scale")

    def amax_history(self, role: str) -> Tensor:
        """Return the amaxes (L, G) of a role. Row 0 is the current step, row L - 1 the newest.

        Args:
            role: ``"input"``, ``"weight"`` or ``"grad_output"``.
        """
        return getattr(self, f"{role}_amax_history")

    @torch.no_grad()
    def reset(self) -> None:
        """Reset all amaxes and scales to their initial values."""
        self._mark_groups_unscaled()
        for role in ROLES:
            self.scale(role).fill_(self._initial)
            self.amax_history(role).zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Compute the next scales of all roles from the amaxes of the step. Call it once per step.

        With ``recipe.amax_group`` one all-reduce reduces the amaxes of all roles first.
        """
        recipe = self.recipe
        if recipe.amax_group is not None:
            latest = torch.stack([self.amax_history(role)[0] for role in ROLES])
            latest = reduce_amaxes(latest.flatten(), recipe.amax_group).view_as(latest)
            for role, amax in zip(ROLES, latest.unbind(), strict=True):
                self.amax_history(role)[0] = amax
        for role in ROLES:
            delayed_scaling_update(
                self.amax_history(role),
                self.scale(role),
                getattr(recipe, role),
                margin=recipe.margin,
                algorithm=recipe.algorithm,
                skip_nonfinite=recipe.propagate_nonfinite,
            )
        if not torch.compiler.is_compiling():
            self.poll()

    def _mark_groups_unscaled(self) -> None:
        """Assume on the host that groups have no scales yet."""
        self._may_be_zero = [self._initial == 0] * len(ROLES)
        self._flag_reader = None

    @torch.no_grad()
    def poll(self) -> None:
        """Check for which roles all groups have scales. Later calls compute no amaxes for them.

        On a GPU it does not wait: one call starts a copy to the host, and a later call reads it.
        """
        if not any(self._may_be_zero):
            return
        scales = [self.scale(role) for role in ROLES]
        # During a capture of the stream, events must not be queried either.
        if not _is_readable(scales):
            return
        if self._flag_reader is None:
            self._flag_reader = _FlagReader(torch.stack(scales).eq(0).any(1))
            if scales[0].is_cuda:
                return
        flags = self._flag_reader.read()
        if flags is not None:
            self._may_be_zero, self._flag_reader = flags, None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the buffers, and reset groups that have no amax yet."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._mark_groups_unscaled()
        with torch.no_grad():
            for role in ROLES:
                is_new = ~self.amax_history(role).bool().any(0)
                scale = self.scale(role)
                scale.masked_fill_(is_new & ((scale == 0) | (scale == 1)), self._initial)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_flag_reader": None}

    def call_scaling(self, recipe: Recipe, num_groups: int) -> Scaling:
        """Return the scales of a call, and the rows that record its amaxes.

        Args:
            recipe: The recipe of the call.
            num_groups: G. The number of its groups.

        Raises:
            ValueError: The state has another recipe or number of groups.
            RuntimeError: The call is transformed by ``torch.func``.
        """
        is_same = recipe is self.recipe or recipe == self.recipe
        if not is_same or num_groups != self.num_groups:
            raise ValueError(
                f"scaling was made for {self.num_groups} groups and {self.recipe}, not for "
                f"{num_groups} groups and {recipe}"
            )
        scales = [self.scale(role) for role in ROLES]
        if not self._records_amaxes():
            return Scaling(scales, None, self._may_be_zero)
        return Scaling(scales, [self.amax_history(role)[0] for role in ROLES], self._may_be_zero)

    def begin(self, is_first_microbatch: bool | None) -> None:
        """Update the scales if a call of the layer is the first of a step.

        Args:
            is_first_microbatch: Argument of the call. False says that it is not the first.
        """
        if is_first_microbatch is not False and self._records_amaxes() and not _is_recomputed():
            self.update()

    def _records_amaxes(self) -> bool:
        """Return True if a call now records amaxes. Raise RuntimeError under ``torch.func``."""
        if not (self.training and torch.is_grad_enabled()):
            return False
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack():
            raise RuntimeError(
                "torch.func would lose the amaxes of delayed scaling: call eval() on the layer, "
                "whose scales then stay, or train it by backward()"
            )
        return True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DelayedScaling":
        """Move the buffers, which stay fp32."""

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self

    def extra_repr(self) -> str:
        """Return the number of groups and options of the recipe for ``repr``."""
        recipe = self.recipe
        return (
            f"num_groups={self.num_groups}, history_length={recipe.history_length}, "
            f"margin={recipe.margin}, algorithm={recipe.algorithm}"
        )


class _FlagReader:
    """Copy of flags from a device to the host, without waiting.

    Args:
        flags: (n,) bool, on any device.
    """

    def __init__(self, flags: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._flags = flags
        if flags.is_cuda:
            # The default device may be a GPU, whose memory cannot be pinned.
            self._flags = torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
            self._flags.copy_(flags, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[bool] | None:
        """Return the flags, or None if the copy is not complete."""
        return None if self._event is not None and not self._event.query() else self._flags.tolist()


def _is_readable(tensors: list[Tensor]) -> bool:
    """Return True if values may be copied to the host: no tensor is fake, no stream is captured."""
    if any(type(t) is not Tensor or t.is_meta for t in tensors):
        return False
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def _is_recomputed() -> bool:
    """Return True if activation checkpointing runs this forward pass inside a backward pass.

    Raises:
        RuntimeError: The checkpointing is reentrant: the first forward pass ran under ``no_grad``.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    # Non-reentrant checkpointing packs the tensors that the second forward pass saves.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        raise RuntimeError(
            "a layer with delayed scaling runs inside a backward pass: under reentrant activation "
            "checkpointing the first forward is under no_grad, so its scales would never be "
            "updated; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )
    return True
