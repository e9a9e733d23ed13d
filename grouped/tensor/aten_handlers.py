"""What PyTorch's ops do with a ``GroupedTensor``; ``GroupedTensor`` states the rule."""

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
#: What to do instead of an op that a GroupedTensor refuses.
_ALTERNATIVES = {
    "member(g) and unbind() take groups out": (
        *("select", "slice", "index", "split", "split_with_sizes", "unbind", "narrow", "gather"),
        *("index_select", "take", "masked_select", "chunk"),
    ),
    "grouped.grouped_gemm multiplies it, with transpose_b=True along its other dimension": (
        *("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum", "_grouped_mm"),
        *("t", "mT", "mH", "numpy_T", "transpose", "permute", "swapaxes", "movedim"),
    ),
}
_INSTEAD = {op: text for text, ops_ in _ALTERNATIVES.items() for op in ops_}

# A compiled graph holds these ops as they are. Their handlers run when the graph is lowered to
# plain tensors, so nothing outside a handler needs to look inside a tensor while tracing.
_LIBRARY = torch.library.Library("grouped", "DEF")
_LIBRARY.define("dequantize(Tensor x, ScalarType? dtype, str? direction) -> Tensor")


def not_differentiable(ctx: Any, *grads: Any) -> Any:
    """Backward pass of an op that has none."""
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
    if x._is_empty:
        return torch.empty(
            x.shape, dtype=dtype or x.dtype, device=x.device
        )  # A rank's part may have no groups.
    x = x.unpack()
    if direction is None:
        direction = "rowwise" if x.rowwise is not None else "columnwise"
    held = x.rowwise if direction == "rowwise" else x.columnwise
    if held is None:
        raise RuntimeError(f"this GroupedTensor has no {direction} copy: {x!r}")
    return ops.grouped_dequantize(
        *held.operand,
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


def _regrouped(x: GroupedTensor, groups: int, change: Callable[[Tensor], Tensor]) -> GroupedTensor:
    names, context = x.__tensor_flatten__()
    inner = {name: change(getattr(x, name)) for name in names}
    return GroupedTensor.__tensor_unflatten__(inner, context, (groups, *x.shape[1:]), ())


def _needs_groups(func: Any, x: GroupedTensor, dim: int) -> None:
    """Raise unless ``dim`` is that of the groups, all of one shape: others share blocks and scales."""
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
    first, last, _ = slice(start, end).indices(x.shape[dim])
    if step == 1 and (first, last) == (0, x.shape[dim]):
        return x._apply_inner(lambda t: t)
    if step != 1:
        _refuse(func)  # Kernels want groups without gaps.
    _needs_groups(func, x, dim)
    last = max(first, last)
    return _regrouped(x, last - first, lambda t: t[first:last])


@handler(aten.narrow.default, aten.chunk.default)
def _decomposed(func: Any, x: GroupedTensor, *args: Any, **kwargs: Any) -> Any:
    # As they come under inference_mode.
    return func.decompose(x, *args, **kwargs)


@handler(aten.split.Tensor, aten.split_with_sizes.default)
def _split(
    func: Any, x: GroupedTensor, sizes: int | Sequence[int], dim: int = 0
) -> list[GroupedTensor]:
    _needs_groups(func, x, dim)
    groups = x.shape[0]
    if isinstance(sizes, int):
        sizes = [min(sizes, groups - first) for first in range(0, groups, max(sizes, 1))] or [0]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(func, x, 0, end - size, end) for size, end in zip(sizes, ends, strict=True)]


@handler(aten.cat.default)
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    grouped = [x for x in tensors if isinstance(x, GroupedTensor)]
    first = grouped[0]
    _needs_groups(func, first, dim)
    _, context = first.__tensor_flatten__()
    parts = [x._inner() for x in grouped]
    same = all(
        x.__tensor_flatten__()[1] == context and x.shape[1:] == first.shape[1:] for x in grouped
    )
    if len(grouped) < len(tensors) or not same or any(p.keys() != parts[0].keys() for p in parts):
        raise TypeError(
            f"torch.cat needs GroupedTensors of one format, direction, dtype and member shape, got {tensors!r}"
        )
    inner = {name: _joined([p[name] for p in parts]) for name in parts[0]}
    return GroupedTensor.__tensor_unflatten__(
        inner, context, (sum(len(x) for x in grouped), *first.shape[1:]), ()
    )


def _empty(t: Tensor, device: Any = None, groups: int | None = None) -> Tensor:
    """As ``t``, with the pitch of its rows."""
    shape = t.shape if groups is None else (groups, *t.shape[1:])
    return torch.empty_strided(shape, t.stride(), dtype=t.dtype, device=device or t.device)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    out = _empty(parts[0], groups=sum(map(len, parts)))
    for piece, t in zip(out.split([len(t) for t in parts]), parts, strict=True):
        piece.copy_(t)
    return out


@handler(aten.constant_pad_nd.default)
def _pad(func: Any, x: GroupedTensor, pad: Sequence[int], value: float = 0) -> Any:
    if x.grouping != "uniform" or len(pad) != 2 * x.dim() or any(pad[:-2]) or min(pad) < 0 or value:
        _refuse(func)
    more = [_new_zeros(aten.new_zeros.default, x, (count, *x.shape[1:])) for count in pad[-2:]]
    return _cat(aten.cat.default, [more[0], x, more[1]])


@handler(aten.as_strided.default)
def _as_strided(
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
    dtype = kwargs.get("dtype") or x.dtype
    ops.checks.check_dtype("dtype", dtype, ops.checks.INPUT_DTYPES)
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
    return x._apply_inner(lambda t: t.to(device, non_blocking=non_blocking, copy=True), dtype)


@handler(aten.empty_like.default)
def _empty_like(func: Any, x: GroupedTensor, **kwargs: Any) -> Any:
    # Unlike its kin it makes what will be filled with one such as this: by a collective, a copy.
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
    # and it would store what happens to be in memory.
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
    # What FSDP pads its shards with: groups of the same shape whose values are zeros.
    if (
        x.grouping == "uniform"
        and tuple(size[1:]) == tuple(x.shape[1:])
        and kwargs.get("dtype") in (None, x.dtype)
    ):
        return _regrouped(x, size[0], lambda t: _empty(t, kwargs.get("device"), size[0]).zero_())
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
#: Functional ops that optimizers, nn.init and clipping apply to parameters; the result is plain.
_DECODING = {
    *(getattr(aten, name) for name in _ARITHMETIC),
    *(getattr(aten, f"_foreach_{name}") for name in (*_ARITHMETIC, "norm")),
    *(aten.rsub, aten.where, aten.linalg_vector_norm, aten.isfinite, aten.isnan, aten.isinf),
    *(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.equal),
}
#: Ops with an in-place name that change more than values.
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
    # PEFT's LoRA of a stack of experts: the weight plus a product of plain matrices.
    if not isinstance(x, GroupedTensor) or any(isinstance(t, GroupedTensor) for t in factors):
        _refuse(func)
    return func(x.dequantize(), *factors, **kwargs)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _decodes(func: Any) -> bool:
    """Whether ``func`` runs on decoded values: arithmetic, or in place without a new shape."""
    if not any(map(_writes, func._schema.arguments)):
        return func.overloadpacket in _DECODING
    name: str = func._schema.name.split("::")[1]
    return name.endswith("_") and name not in _RESHAPING


def _any_other(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What has no handler of its own: decode, or raise; ops that are defined later have one by
    name.
    """
    if (known := HANDLERS.get(func._schema.name)) is not None:
        return known(func, *args, **kwargs)
    if _decodes(func):
        return _decode_compute_encode(func, args, kwargs)
    _refuse(func)


def _refuse(func: Any) -> NoReturn:
    instead = _INSTEAD.get(func._schema.name.split("::")[1])
    raise TypeError(
        f"{func} does not work on a GroupedTensor"
        + (f": {instead}; or decode it" if instead else "; decode it")
        + " first with .dequantize()"
    )


HANDLERS[None] = _any_other


def _decode_compute_encode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on decoded operands and quantize what it wrote into the same storage.

    Arguments are matched to the schema by name, and those that ``func`` returns come back as the
    grouped tensors they were.
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
            values, watched = dense[id(x)], adds_update(name)
            before = snapshot(x) if watched else None
            x._quantize_into(values, x._offs)
            if watched:
                warn_if_lost(x, before, name, operands, i, values)
            owners[id(values)] = x
    return tree_map(lambda t: owners.get(id(t), t), result)
