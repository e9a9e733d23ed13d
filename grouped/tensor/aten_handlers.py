"""Handlers of PyTorch's ops for a ``GroupedTensor``, whose docstring states the rule."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from cute_kernels import ops
from cute_kernels.ops.derivatives import register_autograd

from .base import NO_MEMORY
from .collectives import Flat
from .dispatch import HANDLERS, handler
from .grouped_tensor import GroupedTensor
from .lost_updates import adds_update, snapshot, warn_if_lost
from .shapes import flat_shapes

aten = torch.ops.aten
#: Alternatives to ops that a GroupedTensor refuses.
_ALTERNATIVES = {
    "member(g) and unbind() take groups out": (
        "select",
        "slice",
        "index",
        "split",
        "split_with_sizes",
        "unbind",
        "narrow",
        "gather",
        "index_select",
        "take",
        "masked_select",
        "chunk",
    ),
    "grouped.grouped_gemm multiplies it, with transpose_b=True along its other dimension": (
        "linear",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "matmul",
        "einsum",
        "_grouped_mm",
        "t",
        "mT",
        "mH",
        "numpy_T",
        "transpose",
        "permute",
        "swapaxes",
        "movedim",
    ),
}
_ALTERNATIVE_BY_OP = {op: text for text, names in _ALTERNATIVES.items() for op in names}

# A compiled graph contains these ops as they are. Their handlers run when the graph is lowered to
# plain tensors, so only handlers need the plain tensors while tracing.
_LIBRARY = torch.library.Library("grouped", "DEF")
_LIBRARY.define("dequantize(Tensor x, ScalarType? dtype, str? direction) -> Tensor")


def not_differentiable(ctx: Any, *grads: Any) -> Any:
    """Raise, as the backward pass of an op that has no derivative."""
    raise RuntimeError("a product of GroupedTensors has no derivative; train through grouped.nn")


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad.to(ctx.dtype), None, None


def _save_dtype(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


register_autograd("dequantize", _straight_through, _save_dtype, _LIBRARY)


@handler(torch.ops.grouped.dequantize.default)
def _dequantize(
    func: Any, x: GroupedTensor, dtype: torch.dtype | None, direction: str | None
) -> Tensor:
    """Decode one direction of a GroupedTensor."""
    if x._is_empty:  # A rank's part may have no groups.
        return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    x = x.unpack()
    if direction is None:
        direction = "rowwise" if x.rowwise is not None else "columnwise"
    copy = x.rowwise if direction == "rowwise" else x.columnwise
    if copy is None:
        raise RuntimeError(f"this GroupedTensor has no {direction} copy: {x!r}")
    codes, scales = copy.operand
    return ops.grouped_dequantize(
        codes,
        scales,
        x.format.text,
        x.shape[-2] if x.member_shapes is None else x.shape[0],
        dtype or x.dtype,
        x.offs,
        direction == "columnwise",
        flat_shapes(x.member_shapes),
    )


# ---- handlers of aten ops


@handler(aten.detach.default, aten.alias.default)
def _detach(func: Any, x: GroupedTensor) -> GroupedTensor:
    return x._apply_inner(lambda t: t)


@handler(aten.view.default, aten._unsafe_view.default, aten.expand.default)
def _same_shape(func: Any, x: GroupedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    if list(size) == [-1] and x.dim() > 1:
        return Flat([x])
    if len(size) != x.dim() or any(w not in (-1, s) for w, s in zip(size, x.shape, strict=True)):
        raise TypeError(
            f"{func} to {tuple(size)} does not work on a GroupedTensor of shape {tuple(x.shape)}; "
            "decode it first with .dequantize()"
        )
    return x._apply_inner(lambda t: t)


@handler(aten.view.dtype)
def _reinterpret(func: Any, x: GroupedTensor, dtype: torch.dtype) -> NoReturn:
    raise TypeError(f"{func} does not work on a GroupedTensor: {NO_MEMORY}")


def _with_groups(
    x: GroupedTensor, groups: int, function: Callable[[Tensor], Tensor]
) -> GroupedTensor:
    """Return a tensor of another number of groups around a function of each plain tensor."""
    inner = {name: function(t) for name, t in x._inner().items()}
    return x._rewrap(inner, shape=(groups, *x.shape[1:]))


def _check_group_dim(func: Any, x: GroupedTensor, dim: int) -> None:
    """Raise unless ``dim`` is the dimension of uniform groups: others share blocks and scales."""
    if x.grouping != "uniform" or dim % x.dim():
        _refuse(func)


@handler(aten.slice.Tensor)
def _slice(
    func: Any,
    x: GroupedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> GroupedTensor:
    """Return groups [start, end) of a uniform tensor, as views."""
    start, end, _ = slice(start, end).indices(x.shape[dim])
    if step == 1 and (start, end) == (0, x.shape[dim]):
        return x._apply_inner(lambda t: t)
    if step != 1:
        _refuse(func)  # Kernels need groups without gaps.
    _check_group_dim(func, x, dim)
    end = max(start, end)
    return _with_groups(x, end - start, lambda t: t[start:end])


@handler(aten.narrow.default, aten.chunk.default)
def _decomposed(func: Any, x: GroupedTensor, *args: Any, **kwargs: Any) -> Any:
    # Under inference_mode these ops arrive undecomposed.
    return func.decompose(x, *args, **kwargs)


@handler(aten.split.Tensor, aten.split_with_sizes.default)
def _split(
    func: Any, x: GroupedTensor, sizes: int | Sequence[int], dim: int = 0
) -> list[GroupedTensor]:
    """Split a uniform tensor into tensors of whole groups, as views."""
    _check_group_dim(func, x, dim)
    groups = x.shape[0]
    if isinstance(sizes, int):
        sizes = [min(sizes, groups - start) for start in range(0, groups, max(sizes, 1))] or [0]
    ends = itertools.accumulate(sizes)
    return [_slice(func, x, 0, end - size, end) for size, end in zip(sizes, ends, strict=True)]


@handler(aten.cat.default)
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Concatenate uniform tensors of one format, direction, dtype and member shape."""
    grouped = [x for x in tensors if isinstance(x, GroupedTensor)]
    model = grouped[0]
    _check_group_dim(func, model, dim)
    kind = (*model.__tensor_flatten__(), model.shape[1:])
    is_alike = all((*x.__tensor_flatten__(), x.shape[1:]) == kind for x in grouped)
    if len(grouped) < len(tensors) or not is_alike:
        raise TypeError(
            "torch.cat needs GroupedTensors of one format, direction, dtype and member shape, "
            f"got {tensors!r}"
        )
    inner = {name: _concatenate([getattr(x, name) for x in grouped]) for name in model._inner()}
    return model._rewrap(inner, shape=(sum(len(x) for x in grouped), *model.shape[1:]))


def _empty(t: Tensor, device: Any = None, groups: int | None = None) -> Tensor:
    """Return an empty tensor with the strides of ``t``."""
    shape = t.shape if groups is None else (groups, *t.shape[1:])
    return torch.empty_strided(shape, t.stride(), dtype=t.dtype, device=device or t.device)


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate plain tensors, with the strides of the first one."""
    out = _empty(tensors[0], groups=sum(map(len, tensors)))
    for rows, t in zip(out.split([len(t) for t in tensors]), tensors, strict=True):
        rows.copy_(t)
    return out


@handler(aten.constant_pad_nd.default)
def _pad(func: Any, x: GroupedTensor, pad: Sequence[int], value: float = 0) -> Any:
    if x.grouping != "uniform" or len(pad) != 2 * x.dim() or any(pad[:-2]) or min(pad) < 0 or value:
        _refuse(func)
    before, after = (
        _new_zeros(aten.new_zeros.default, x, (count, *x.shape[1:])) for count in pad[-2:]
    )
    return _cat(aten.cat.default, [before, x, after])


@handler(aten.as_strided.default)
def _strided_view(
    func: Any,
    x: GroupedTensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> GroupedTensor:
    if (tuple(size), tuple(stride), offset or 0) != (tuple(x.shape), x.stride(), 0):
        _refuse(func)
    return x._apply_inner(lambda t: t)


@handler(aten.clone.default)
def _clone(func: Any, x: GroupedTensor, **kwargs: Any) -> GroupedTensor:
    return x._apply_inner(lambda t: t.clone(memory_format=torch.preserve_format))


@handler(aten._to_copy.default)
def _to_copy(func: Any, x: GroupedTensor, **kwargs: Any) -> GroupedTensor:
    """Move a GroupedTensor to a device, or change the dtype that it decodes to."""
    dtype = kwargs.get("dtype") or x.dtype
    ops.checks.check_dtype("dtype", dtype, ops.checks.INPUT_DTYPES)
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
    return x._apply_inner(lambda t: t.to(device, non_blocking=non_blocking, copy=True), dtype)


@handler(aten.empty_like.default)
def _empty_like(func: Any, x: GroupedTensor, **kwargs: Any) -> Any:
    # Unlike similar functions it makes a tensor that a collective or a copy fills with groups.
    if x.grouping != "uniform" or kwargs.get("dtype") not in (None, x.dtype):
        return _like(func, x, **kwargs)
    return x._apply_inner(lambda t: _empty(t, kwargs.get("device")))


@handler(
    *(getattr(aten, f"{name}_like").default for name in ("zeros", "ones", "full", "rand", "randn"))
)
def _like(func: Any, x: GroupedTensor, *args: Any, **kwargs: Any) -> Tensor:
    return func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args, **kwargs)


@handler(aten.new_empty.default)
def _new_empty(func: Any, x: GroupedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    # The staging of torch.distributed.checkpoint asks for an empty tensor of this shape on the CPU
    # and then sets each attribute of this one on it. On a plain tensor they would have no effect,
    # and it would store uninitialized memory.
    if tuple(size) == tuple(x.shape) and kwargs.get("device") is not None:
        device, dtype = torch.device(kwargs["device"]), kwargs.get("dtype") or x.dtype
        if dtype in ops.checks.INPUT_DTYPES:
            return x._apply_inner(lambda t: _empty(t, device), dtype)
    return _new(func, x, size, **kwargs)


@handler(aten.is_pinned.default)
def _is_pinned(func: Any, x: GroupedTensor, *args: Any, **kwargs: Any) -> bool:
    return all(func(t, *args, **kwargs) for t in x._inner().values())


@handler(aten.new_zeros.default)
def _new_zeros(func: Any, x: GroupedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    # FSDP pads its shards with it: groups of the same shape whose values are zeros.
    if (
        x.grouping == "uniform"
        and tuple(size[1:]) == tuple(x.shape[1:])
        and kwargs.get("dtype") in (None, x.dtype)
    ):
        return _with_groups(x, size[0], lambda t: _empty(t, kwargs.get("device"), size[0]).zero_())
    return _new(func, x, size, **kwargs)


@handler(aten.new_empty_strided.default, aten.new_ones.default, aten.new_full.default)
def _new(func: Any, x: GroupedTensor, *args: Any, **kwargs: Any) -> Tensor:
    return func(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)


@handler(aten.copy_.default)
def _copy_(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, GroupedTensor):
        target._copy_from(source)
        return target
    dense = source.dequantize() if isinstance(source, GroupedTensor) else source
    return target.copy_(dense, non_blocking)


_ARITHMETIC = ("add", "sub", "mul", "div", "neg", "abs", "lerp", "pow")
#: Functional ops that optimizers, nn.init and clipping apply to parameters; results are plain.
_DECODING = {
    *(getattr(aten, name) for name in _ARITHMETIC),
    *(getattr(aten, f"_foreach_{name}") for name in (*_ARITHMETIC, "norm")),
    aten.rsub,
    aten.where,
    aten.linalg_vector_norm,
    aten.isfinite,
    aten.isnan,
    aten.isinf,
    aten.eq,
    aten.ne,
    aten.lt,
    aten.le,
    aten.gt,
    aten.ge,
    aten.equal,
}
#: Ops with the name of an in-place op that change the shape.
_RESHAPING = (
    "as_strided_",
    "resize_",
    "resize_as_",
    "set_",
    "squeeze_",
    "t_",
    "transpose_",
    "unsqueeze_",
)


@handler(aten.baddbmm.default)
def _add_product(func: Any, x: Tensor, *factors: Tensor, **kwargs: Any) -> Tensor:
    # PEFT's LoRA for stacked experts: the weight plus a product of plain matrices.
    if not isinstance(x, GroupedTensor) or any(isinstance(t, GroupedTensor) for t in factors):
        _refuse(func)
    return func(x.dequantize(), *factors, **kwargs)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _decodes(func: Any) -> bool:
    """Return True if ``func`` runs on decoded values: arithmetic, or in place in the same shape."""
    if not any(map(_writes, func._schema.arguments)):
        return func.overloadpacket in _DECODING
    name: str = func._schema.name.split("::")[1]
    return name.endswith("_") and name not in _RESHAPING


def _any_other(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op without a handler on decoded values, or raise.

    Ops that are defined later have a handler by name.
    """
    if (named_handler := HANDLERS.get(func._schema.name)) is not None:
        return named_handler(func, *args, **kwargs)
    if _decodes(func):
        return _decode_compute_encode(func, args, kwargs)
    _refuse(func)


def _refuse(func: Any) -> NoReturn:
    """Raise TypeError for an op, and name an alternative."""
    alternative = _ALTERNATIVE_BY_OP.get(func._schema.name.split("::")[1])
    advice = f": {alternative}; or decode it" if alternative else "; decode it"
    raise TypeError(f"{func} does not work on a GroupedTensor{advice} first with .dequantize()")


HANDLERS[None] = _any_other


def _decode_compute_encode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on decoded operands and quantize its outputs into the same storage.

    Arguments are matched to the schema by name. Operands that ``func`` returns come back as the
    GroupedTensors that they were.
    """
    schema, name = func._schema.arguments, func._schema.name.split("::")[1]
    named = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    dense: dict[int, Tensor] = {}

    def decode(x: GroupedTensor) -> Tensor:
        if id(x) not in dense:
            dense[id(x)] = x.dequantize()
        return dense[id(x)]

    decoded = tree_map_only(GroupedTensor, decode, named)
    operands = dict(decoded)
    positional = [decoded.pop(a.name) for a in schema if not a.kwarg_only and a.name in decoded]
    result = func(*positional, **decoded)
    owners: dict[int, GroupedTensor] = {}
    for argument in schema:
        value = named.get(argument.name)
        if not _writes(argument):
            continue
        for i, x in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if not isinstance(x, GroupedTensor):
                continue
            values, is_update = dense[id(x)], adds_update(name)
            before = snapshot(x) if is_update else None
            x._quantize_into(values, x._offs)
            if is_update:
                warn_if_lost(x, before, name, operands, i, values)
            owners[id(values)] = x
    return tree_map(lambda t: owners.get(id(t), t), result)
