"""The state of delayed scaling: what a layer carries from one step to the next."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.delayed_scaling import delayed_scaling_update, reduce_amaxes
from ..functional.operands import Scaling
from ..recipes import ROLES, FP8Delayed, Recipe
from ..tensor.validation import check_size


class DelayedScaling(nn.Module):
    """The scales of a grouped linear layer under ``FP8Delayed``, and the amaxes they follow from.

    A ``GroupedLinear`` has one as ``scaling``. For ``grouped.linear`` make one a layer, keep it,
    and call ``update()`` once a step.

    **When amaxes count.** A call in ``train()`` mode with gradients enabled casts with the scales
    as they are, forward and backward: a backward pass has those of its forward. When its gradients
    are computed, the largest magnitudes of its input, its weight and its output's gradient raise
    row 0 of the histories; a call that needs no gradients raises it at once. Largest is largest:
    the order of microbatches does not matter. Under ``eval()`` and ``torch.no_grad()`` nothing
    changes.

    **When scales change.** ``update`` rolls the histories and makes the next scales, for all roles
    at once. ``GroupedLinear`` calls it before it quantizes anything, at the first call of a step:
    one in ``train()`` mode with gradients enabled and ``is_first_microbatch`` None or True. So a
    step's amaxes decide the scales of the next one, and where no amaxes came in between it changes
    nothing. For several microbatches a step, say which is the first: a call with None is a step of
    its own.

    **Recomputation.** ``torch.utils.checkpoint(use_reentrant=False)`` runs the forward again inside
    the backward pass; that is no call: it updates nothing, and casts with the scales that there are
    then, which are those of the step. The reentrant form raises: its first forward is under
    ``no_grad``. In compiled code nobody can tell: the update in a recomputation changes nothing
    where gradients of a step are computed in the order of its microbatches, the first one first.

    **How groups begin.** A scale of 0 says that a group has none yet: then an operand takes that of
    its own amax, as under ``FP8Current``, in each call until an update has seen the group. So begin
    all groups; with ``recipe.initial_scale="one"`` scales begin as ones. The device decides, and no
    call waits for it. Until all groups of a role have begun, each call asks for the amax of its
    operand; ``poll`` learns that they have. ``update`` calls it in eager mode. A CUDA graph that
    was captured before keeps asking, and so does compiled code until somebody calls ``poll``
    between steps.

    **What is not finite.** With ``recipe.propagate_nonfinite`` an amax that is infinite is not
    recorded: the step that saw it is one that ``torch.amp.GradScaler`` skips, and the scale would
    rest as long as the history holds it.

    Buffers, all fp32, in the state dict, and fp32 whatever dtype the layer is cast to:
    ``{role}_scale`` (G,), first zeros, or ones under ``initial_scale="one"``, and
    ``{role}_amax_history`` (L, G), first zeros, for ``input``, ``weight`` and ``grad_output``. One
    slot a group, for single and discrete parameters alike. A weight that is a GroupedTensor has its
    own scales, and the slots of ``weight`` rest. Where an older state dict has a scale of 1 and no
    amax, a group begins as the recipe says. State dicts of other recipes lack the buffers: with
    ``load_state_dict(..., strict=False)`` they load, in either direction. Under another recipe, set
    as ``layer.recipe``, the state rests.

    Args:
        recipe: formats, length of the histories (``history_length``, TransformerEngine's
            ``amax_history_len``) and how scales follow from them (``algorithm``, its
            ``amax_compute_algo``).
        num_groups: G.
        device: device of the buffers.

    Raises:
        TypeError: ``recipe`` is no FP8Delayed.
        ValueError: ``num_groups`` is not positive.
    """

    #: Of each role whether a group may have no scale yet, as far as the host knows.
    _may_be_zero: Sequence[bool] = (True,) * len(ROLES)
    _word: "_Word | None" = None

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
        self._begin_again()
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
        """(G,) what a role is multiplied by before it is rounded; 0 where a group has not begun."""
        return getattr(self, f"{role}_scale")

    def amax_history(self, role: str) -> Tensor:
        """(L, G) amaxes of a role: those of the present step in row 0, the newest in row L - 1."""
        return getattr(self, f"{role}_amax_history")

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all amaxes and scales: groups begin again."""
        self._begin_again()
        for role in ROLES:
            self.scale(role).fill_(self._initial)
            self.amax_history(role).zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Make the next scales of all roles from the amaxes of the step; once a step.

        With ``recipe.amax_group`` the amaxes of all roles are reduced in one all-reduce first.
        """
        recipe = self.recipe
        if recipe.amax_group is not None:
            latest = torch.stack([self.amax_history(role)[0] for role in ROLES])
            latest = reduce_amaxes(latest.flatten(), recipe.amax_group).view_as(latest)
            for role, amax in zip(ROLES, latest.unbind(), strict=True):
                self.amax_history(role)[0] = amax
        for role in ROLES:
            delayed_scaling_update(
                *(self.amax_history(role), self.scale(role), getattr(recipe, role)),
                margin=recipe.margin,
                algorithm=recipe.algorithm,
                skip_nonfinite=recipe.propagate_nonfinite,
            )
        if not torch.compiler.is_compiling():
            self.poll()

    def _begin_again(self) -> None:
        self._may_be_zero = [self._initial == 0] * len(ROLES)
        self._word = None

    @torch.no_grad()
    def poll(self) -> None:
        """Learn for which roles all groups have begun, so that later calls ask for no amaxes.

        On a GPU nothing waits: one call sends for the answer, and a later one finds it.
        """
        if not any(self._may_be_zero):
            return
        scales = [self.scale(role) for role in ROLES]
        # While a stream is captured an event must not be asked either.
        if not _is_readable(scales):
            return
        if self._word is None:
            self._word = _Word(torch.stack(scales).eq(0).any(1))
            if scales[0].is_cuda:
                return
        found = self._word.read()
        if found is not None:
            self._may_be_zero, self._word = found, None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._begin_again()
        with torch.no_grad():
            for role in ROLES:
                is_new = ~self.amax_history(role).bool().any(0)
                scale = self.scale(role)
                scale.masked_fill_(is_new & ((scale == 0) | (scale == 1)), self._initial)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_word": None}

    def call_scaling(self, recipe: Recipe, num_groups: int) -> Scaling:
        """The scales of a call, and where its amaxes go if they count.

        Args:
            recipe: the recipe of the call.
            num_groups: its groups.
        """
        is_same = recipe is self.recipe or recipe == self.recipe
        if not is_same or num_groups != self.num_groups:
            raise ValueError(
                f"scaling was made for {self.num_groups} groups and {self.recipe}, not for {num_groups} groups and {recipe}"
            )
        scales = [self.scale(role) for role in ROLES]
        if not self._counts():
            return Scaling(scales, None, self._may_be_zero)
        return Scaling(scales, [self.amax_history(role)[0] for role in ROLES], self._may_be_zero)

    def begin(self, is_first_microbatch: bool | None) -> None:
        """Update the scales if a call of a layer is the first of a step."""
        if is_first_microbatch is not False and self._counts() and not _is_recomputed():
            self.update()

    def _counts(self) -> bool:
        if not (self.training and torch.is_grad_enabled()):
            return False
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack():
            raise RuntimeError(
                "torch.func would lose the amaxes of delayed scaling: call eval() on the layer, "
                "whose scales then stay, or train it by backward()"
            )
        return True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DelayedScaling":
        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self

    def extra_repr(self) -> str:
        """Groups, and how scales follow."""
        recipe = self.recipe
        return (
            f"num_groups={self.num_groups}, history_length={recipe.history_length}, "
            f"margin={recipe.margin}, algorithm={recipe.algorithm}"
        )


class _Word:
    """Flags (n,) on their way from a device to the host.

    Args:
        flags: bool, on any device.
    """

    def __init__(self, flags: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._flags = flags
        if flags.is_cuda:
            self._flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            self._flags.copy_(flags, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[bool] | None:
        """The flags; None if they are not there yet."""
        return None if self._event is not None and not self._event.query() else self._flags.tolist()


def _is_readable(tensors: list[Tensor]) -> bool:
    """True if values may be copied to the host here: none is fake, and no stream is captured."""
    if any(type(t) is not Tensor or t.is_meta for t in tensors):
        return False
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def _is_recomputed() -> bool:
    """Whether this forward is that of activation checkpointing, inside a backward pass.

    Raises:
        RuntimeError: it is, and the one that it repeats ran under ``no_grad``.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    # Checkpointing that is not reentrant packs what the second forward saves; the other does not.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        raise RuntimeError(
            "a layer with delayed scaling runs inside a backward pass: under reentrant activation "
            "checkpointing the first forward is under no_grad, so its scales would never be "
            "updated; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )
    return True
