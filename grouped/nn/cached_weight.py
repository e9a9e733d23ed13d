"""A quantized weight that is cached between calls, until its sources change."""

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
#: Attribute of a tensor whose quantized copy is cached. Its value is an empty dict, which every
#: file format can store.
_MARK = "_kept_mark"


def can_cache(sources: Sequence[Tensor]) -> bool:
    """Return True if a copy of these weights can be cached and changes can be detected.

    A copy cannot outlive a traced or transformed call. Weights created under ``inference_mode``
    count no versions.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
        return False
    return all(
        (type(t) in _PLAIN or type(local_part(t)) in _PLAIN) and not t.is_inference()
        for t in sources
    )


def is_static(sources: Sequence[Tensor]) -> bool:
    """Return True if calls may cache these weights without ``is_first_microbatch``.

    They must be parameters. The call must not be captured or traced, since a replay would not see
    changes.
    """
    for t in sources:
        # Comparing the class first is five times as fast.
        if type(t) is not nn.Parameter and not isinstance(t, nn.Parameter):
            return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return False
    return not is_captured(sources[0])


def is_captured(weight: Tensor) -> bool:
    """Return True if the call is being captured into a CUDA graph."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def warn_if_captured(weight: Tensor, recipe: Recipe) -> None:
    """Warn once per recipe if a captured CUDA graph would quantize ``weight`` at each replay."""
    if (
        not torch.compiler.is_compiling()
        and is_captured(weight)
        and not isinstance(weight, GroupedTensor)
    ):
        _warn_of_captured_quantization(recipe)


@functools.cache
def _warn_of_captured_quantization(recipe: Recipe) -> None:
    warnings.warn(
        f"a CUDA graph that is being captured quantizes weights for {recipe}, and each replay will "
        "do so again. Call grouped.prepare(model) before the capture: it quantizes them once, in "
        "place",
        stacklevel=3,
    )


def local(t: Any, group: str | None = None) -> Tensor:
    """Return this rank's part of a DTensor, differentiable, or a plain tensor unchanged.

    Args:
        t: A tensor or a DTensor.
        group: Name of a process group over which gradients are summed. None sums nothing.
    """
    if type(t) in _PLAIN or not hasattr(t, "_local_tensor"):
        return t
    shard: Tensor = t.to_local()
    if group is None or not shard.requires_grad:
        return shard
    return SummedGradient.apply(shard, group)


def lookup(module: nn.Module, name: str) -> Any:
    """Return a parameter or attribute of a module.

    For a parameter this saves the half microsecond that ``getattr`` spends on other look-ups.
    """
    parameter = module._parameters.get(name)
    return getattr(module, name) if parameter is None else parameter


class CachedQuantizedWeight:
    """Quantized copies of a weight in the format of a recipe.

    Changes of the weight are detected on the host, without reading values. The weight may be
    another tensor, have another storage (``.data = ...``), or be written in place, which its
    version counts. PyTorch counts no version for writes through ``.data``, and these are not
    detected. PyTorch's optimizers with ``fused=True`` count none either. After their steps this
    module counts versions of cached weights.

    The sources are the parameters of the weight, and the shards from which they were gathered: FSDP
    gathers repeatedly into one tensor without counting a version.
    """

    def __init__(
        self, sources: Sequence[Tensor], recipe: Recipe, quantized: QuantizedOperand
    ) -> None:
        self.quantized = quantized
        self._recipe = recipe
        # Weak references do not keep a replaced weight alive, and the address of a weakly
        # referenced storage is not reused. They point to a mark on each tensor, because
        # torch.utils.swap_tensors rejects tensors with weak references, but swaps their marks.
        self._marks = [weakref.ref(t.__dict__.setdefault(_MARK, OrderedDict())) for t in sources]
        shards = [local_part(t) for t in sources]
        self._storages = [StorageWeakRef(shard.untyped_storage()) for shard in shards]
        self._views = [_view(shard) for shard in shards]
        self._versions = [
            (t._version, shard._version) for t, shard in zip(sources, shards, strict=True)
        ]
        _alive.add(self)
        _watch_optimizers()

    @classmethod
    def create(
        cls, sources: Sequence[Tensor], recipe: Recipe, quantized: QuantizedOperand
    ) -> "CachedQuantizedWeight | None":
        """Return the cached weight, or None if the copies are not plain tensors (fake ones)."""
        if any(type(t) is not Tensor for t in quantized.tensors()):
            return None
        return cls(sources, recipe, quantized)

    @property
    def has_columnwise(self) -> bool:
        """True if the columnwise copy, for the gradient of the input, is cached."""
        return self.quantized.columnwise is not None

    def change(self, sources: Sequence[Tensor], recipe: Recipe) -> str | None:
        """Return a description of what changed since the quantization, or None."""
        if recipe is not self._recipe and _weight_options(recipe) != _weight_options(self._recipe):
            return f"the recipe is {recipe}, and was {self._recipe}"
        if len(sources) != len(self._marks):
            return "it is another tensor"
        for i, t in enumerate(sources):
            mark = self._marks[i]()
            if mark is None or t.__dict__.get(_MARK) is not mark:
                return "it is another tensor"
            shard = t if type(t) in _PLAIN else local_part(t)
            if (
                shard.untyped_storage()._cdata != self._storages[i].cdata
                or _view(shard) != self._views[i]
            ):
                return "its data is another tensor (.data = ...)"
            if (t._version, shard._version) != self._versions[i]:
                return "it was written in place"
        return None


_alive: weakref.WeakSet[CachedQuantizedWeight] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_count_fused_step)


def _count_fused_step(optimizer: Optimizer, *_: Any) -> None:
    """Increment the versions of cached weights that a fused optimizer step has written."""
    groups = [group["params"] for group in optimizer.param_groups if group.get("fused")]
    written = [p for params in groups for p in params if p.requires_grad and _MARK in p.__dict__]
    marked = {id(p.__dict__[_MARK]): p for p in written}
    for cached in _alive if written else ():
        increment_version(
            [marked[id(mark)] for ref in cached._marks if id(mark := ref()) in marked]
        )


def _weight_options(recipe: Recipe) -> tuple[object, ...]:
    return recipe.weight, recipe.propagate_nonfinite


def _view(t: Tensor) -> tuple[object, ...]:
    return t.storage_offset(), t.dtype, t.shape, t.stride()
