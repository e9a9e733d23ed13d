"""A quantized weight that outlives a call, with what it was made from."""

import functools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..functional.operands import QuantizedOperand
from ..functional.rank_sums import SummedGradient
from ..recipes import Recipe
from ..tensor.dtensor_parts import local_part
from ..tensor.grouped_tensor import GroupedTensor

_PLAIN = (Tensor, nn.Parameter)
#: Attribute of a tensor of which a quantized copy was kept: a dict without items, which any file
#: may hold.
_MARK = "_kept_mark"


def can_keep(sources: Sequence[Tensor]) -> bool:
    """Whether a change of these weights would be seen, and a copy of them outlive this call.

    Not so while something traces or transforms the call, and not for weights made under
    ``inference_mode``, which count no versions.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
        return False
    return all(
        (type(t) in _PLAIN or type(local_part(t)) in _PLAIN) and not t.is_inference()
        for t in sources
    )


def is_static(sources: Sequence[Tensor]) -> bool:
    """Whether calls may read a copy of these weights though nobody said so.

    They are parameters, and the call is not captured or traced to be replayed after they change.
    """
    for t in sources:
        # Asking for the class first is five times as fast.
        if type(t) is not nn.Parameter and not isinstance(t, nn.Parameter):
            return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return False
    return not is_captured(sources[0])


def is_captured(weight: Tensor) -> bool:
    """Tell whether the call is being captured into a CUDA graph."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def warn_if_captured(weight: Tensor, recipe: Recipe) -> None:
    """Warn, once for each recipe, if a CUDA graph is being captured that would quantize ``weight``
    at each replay.
    """
    if (
        not torch.compiler.is_compiling()
        and is_captured(weight)
        and not isinstance(weight, GroupedTensor)
    ):
        _warn_of_captured_quantization(recipe)


@functools.cache
def _warn_of_captured_quantization(recipe: Recipe) -> None:
    warnings.warn(
        f"a CUDA graph that is being captured quantizes weights for {recipe}, and each replay will do so again. Call "
        "grouped.prepare(model) before the capture: it quantizes them once, in place",
        stacklevel=3,
    )


def local(t: Any, group: str | None = None) -> Tensor:
    """This rank's part of a DTensor, differentiable; else the tensor.

    Gradients are summed over ``group``, if given.
    """
    if type(t) in _PLAIN or not hasattr(t, "_local_tensor"):
        return t
    part: Tensor = t.to_local()
    return part if group is None or not part.requires_grad else SummedGradient.apply(part, group)


def lookup(module: nn.Module, name: str) -> Any:
    """``getattr``, which finds a parameter half a microsecond later, when it has looked everywhere
    else.
    """
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


class KeptWeight:
    """Quantized copies of a weight, of the format of a recipe.

    A change of the weight is seen on the host, without reading it: it is another tensor, has
    another storage (``.data = ...``), or was written in place, which its version counts. Writes
    through ``.data`` count no version, in all of PyTorch, and are not seen; nor do PyTorch's
    optimizers with ``fused=True``, after whose steps those of kept weights are counted here.

    Its sources are the parameters that it consists of, and those that it was gathered from: FSDP
    gathers into one tensor again and again without counting a version.
    """

    def __init__(
        self, sources: Sequence[Tensor], recipe: Recipe, quantized: QuantizedOperand
    ) -> None:
        self.quantized = quantized
        self._recipe = recipe
        # Weak: a replaced weight is not kept alive. A weakly held storage is no other's address.
        # The references are to a mark on each tensor, for torch.utils.swap_tensors refuses tensors
        # that have some themselves, and swaps marks.
        self._marks = [weakref.ref(t.__dict__.setdefault(_MARK, OrderedDict())) for t in sources]
        parts = [local_part(t) for t in sources]
        self._storages = [StorageWeakRef(part.untyped_storage()) for part in parts]
        self._views = [_view(part) for part in parts]
        self._versions = [
            (t._version, part._version) for t, part in zip(sources, parts, strict=True)
        ]
        _alive.add(self)
        _watch_optimizers()

    @classmethod
    def of(
        cls, sources: Sequence[Tensor], recipe: Recipe, quantized: QuantizedOperand
    ) -> "KeptWeight | None":
        """The copies, unless they are no tensors with data of their own (fake ones, say)."""
        if any(type(t) is not Tensor for t in quantized.tensors()):
            return None
        return cls(sources, recipe, quantized)

    @property
    def has_columnwise(self) -> bool:
        """Whether the copy that the gradient of the input reads is kept."""
        return self.quantized.columnwise is not None

    def change(self, sources: Sequence[Tensor], recipe: Recipe) -> str | None:
        """What differs from the weight that was quantized; None if nothing does."""
        if recipe is not self._recipe and _weight_options(recipe) != _weight_options(self._recipe):
            return f"the recipe is {recipe}, and was {self._recipe}"
        if len(sources) != len(self._marks):
            return "it is another tensor"
        for i, t in enumerate(sources):
            mark = self._marks[i]()
            if mark is None or t.__dict__.get(_MARK) is not mark:
                return "it is another tensor"
            part = t if type(t) in _PLAIN else local_part(t)
            if (
                part.untyped_storage()._cdata != self._storages[i].cdata
                or _view(part) != self._views[i]
            ):
                return "its data is another tensor (.data = ...)"
            if (t._version, part._version) != self._versions[i]:
                return "it was written in place"
        return None


_alive: weakref.WeakSet[KeptWeight] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_count_fused_step)


def _count_fused_step(optimizer: Optimizer, *_: Any) -> None:
    groups = [group["params"] for group in optimizer.param_groups if group.get("fused")]
    written = [p for params in groups for p in params if p.requires_grad and _MARK in p.__dict__]
    by_mark = {id(p.__dict__[_MARK]): p for p in written}
    for kept in _alive if written else ():
        increment_version(
            [by_mark[id(mark)] for ref in kept._marks if id(mark := ref()) in by_mark]
        )


def _weight_options(recipe: Recipe) -> tuple[object, ...]:
    return recipe.weight, recipe.propagate_nonfinite


def _view(t: Tensor) -> tuple[object, ...]:
    return t.storage_offset(), t.dtype, t.shape, t.stride()
