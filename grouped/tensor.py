"""``GroupedTensor``: the quantized members of all groups in one tensor that PyTorch can hold.

A wrapper subclass: it has the shape and dtype of what was quantized, and its data are the plain
tensors of ``cute_kernels``. It can be a parameter, be copied, saved and loaded, updated in place by
an optimizer, and passed to a compiled function. Products of grouped tensors are not differentiable;
``dequantize()`` is, and ``grouped.nn`` trains.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map, tree_map_only

from cute_kernels import ops, prepack, unpack
from cute_kernels.formats import Format
from cute_kernels.ops.derivatives import register_autograd
from grouped.members import GroupedMember, GroupSpan, QuantizedCopy, group_spans, member, nvfp4
from grouped.updates import adds_update, snapshot, warn_if_lost
from grouped.validation import check_parts, saved_format, version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

__all__ = ["GroupedTensor"]

aten = torch.ops.aten
#: Attributes that hold the plain tensors, in the order of the quantize op's outputs.
_INNER = ("_codes", "_scales", "_amax", "_codes_t", "_scales_t", "_amax_t", "_offs")
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


class GroupedTensor(Tensor):
    """A quantized grouped tensor; make one with ``grouped.quantize``.

    Its shape is (T, K), ragged, when it has ``offs``, and (G, N, K) when it has none.

    One rule for arithmetic: what optimizers, ``nn.init`` and clipping apply to parameters decodes,
    everything else raises TypeError and names ``dequantize()``.

    - In place (``add_``, ``mul_``, ``copy_``, ``normal_``, ``torch._foreach_*_``, fused
      optimizers): decode, compute, quantize into the same storage, return self. An update that
      changes no byte warns on a CPU; on a GPU, where nobody may look, the first one says that it
      might.
    - Out of place, with a plain tensor as the result: ``+ - * / **``, ``neg``, ``abs``, ``lerp``,
      ``where``, comparisons, ``isfinite``, ``isnan``, ``isinf``, ``torch.equal``, vector norms, and
      the ``torch._foreach_*`` forms of arithmetic and norm.
    - Raise: products of matrices, other functions and reductions, indexing, and changes of shape.

    ``zeros_like`` and its kin are plain, as gradients and optimizer states are.

    Attributes:
        format: the format record; every fact that a reader of the bytes needs.
        offs: (G,) int32 end rows, or None when uniform.
        num_groups: G.
        rowwise: the copy with blocks along K, or None.
        columnwise: the copy with blocks along the rows of each group, or None.
        amax: second level of the rowwise copy, or of the columnwise one if that is all there is.
    """

    format: Format
    _codes: Tensor | None
    _scales: Tensor | None
    _amax: Tensor | None
    _codes_t: Tensor | None
    _scales_t: Tensor | None
    _amax_t: Tensor | None
    _offs: Tensor | None

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        fmt: Format,
        offs: Tensor | None,
        rowwise: QuantizedCopy | None,
        columnwise: QuantizedCopy | None,
        requires_grad: bool = False,
    ) -> GroupedTensor:
        """Wrap the plain tensors of one or both directions.

        Raises:
            TypeError: a dtype that is not what the format has.
            ValueError: shapes or devices that do not fit each other, or there is no direction.
            cute_kernels.UnsupportedError: a format that is not built yet.
        """
        if rowwise is None and columnwise is None:
            raise ValueError("rowwise and columnwise are both None: a GroupedTensor holds data")
        check_parts(shape, dtype, fmt, offs, rowwise, columnwise)
        self = cls._of(shape, dtype, fmt, offs, rowwise, columnwise)
        self.requires_grad_(requires_grad)
        return self

    @classmethod
    def _of(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        fmt: Format,
        offs: Tensor | None,
        rowwise: QuantizedCopy | None,
        columnwise: QuantizedCopy | None,
    ) -> GroupedTensor:
        """The same, unchecked: for parts that ops or PyTorch made from checked ones."""
        held = rowwise or columnwise
        if held is None:
            raise ValueError("rowwise and columnwise are both None: a GroupedTensor holds data")
        self: GroupedTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=held.codes.device
        )
        self.format = fmt
        self._codes, self._scales, self._amax = rowwise or (None,) * 3
        self._codes_t, self._scales_t, self._amax_t = columnwise or (None,) * 3
        self._offs = offs
        return self

    # ------------------------------------------------------------------ what it holds

    @property
    def offs(self) -> Tensor | None:
        """(G,) int32 end row of each group, on the device; None when uniform."""
        return self._offs

    @property
    def num_groups(self) -> int:
        """G."""
        return self.shape[0] if self._offs is None else self._offs.shape[0]

    @property
    def rowwise(self) -> QuantizedCopy | None:
        """The copy with blocks along K."""
        return _copy_of(self._codes, self._scales, self._amax)

    @property
    def columnwise(self) -> QuantizedCopy | None:
        """The copy with blocks along the rows of each group."""
        return _copy_of(self._codes_t, self._scales_t, self._amax_t)

    @property
    def amax(self) -> Tensor:  # type: ignore[override]
        """Second level of the rowwise copy, or of the columnwise one if that is all there is."""
        return self._first_copy().amax

    def _first_copy(self) -> QuantizedCopy:
        """The rowwise copy, or the columnwise one if that is all there is."""
        held = self.rowwise or self.columnwise
        if held is None:
            raise RuntimeError("this GroupedTensor holds neither a rowwise nor a columnwise copy")
        return held

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all plain tensors that it holds, those of ``offs`` among them.

        ``element_size()`` and ``itemsize`` stay those of ``dtype``, what an element decodes to: one
        of four bits and its share of a scale is no whole number of bytes, and PyTorch's own sums
        over parameters take them from the dtype.
        """
        return sum(t.nbytes for t in self._inner().values())

    @property
    def data(self) -> GroupedTensor:  # type: ignore[override]
        """The same storage without autograd's history.

        Assigning another GroupedTensor of this shape makes this one hold what that one holds, with
        its format, directions, dtype and device, as ``weight.data = weight.data.prepack()``.

        Raises:
            TypeError: a plain tensor is assigned: ``copy_`` quantizes one.
            ValueError: a tensor of another shape is assigned.
        """
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, GroupedTensor):
            raise TypeError(
                f".data of a GroupedTensor must be a GroupedTensor, got {type(other).__name__}; "
                "copy_() quantizes into the storage that is there, grouped.quantize makes a new one"
            )
        if other.shape != self.shape:
            raise ValueError(
                f".data must keep the shape {tuple(self.shape)}, got {tuple(other.shape)}"
            )
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.format = other.format
        for name in _INNER:
            setattr(self, name, getattr(other, name))
        # A backward pass that was to read the old values must not take the new ones for them.
        increment_version(self)

    def dequantize(  # type: ignore[override]
        self, dtype: torch.dtype | None = None, direction: str | None = None
    ) -> Tensor:
        """Decode to a plain tensor of this shape; rows of the tail are zeros.

        Its gradient with respect to a parameter is the identity: that of the decoded values.

        Args:
            dtype: bf16, fp16 or fp32; this tensor's dtype by default. One rounding.
            direction: which copy to decode; the rowwise one by default if there is one.
        """
        if direction not in (None, "rowwise", "columnwise"):
            raise ValueError(f"direction must be 'rowwise' or 'columnwise', got {direction!r}")
        out: Tensor = torch.ops.grouped.dequantize(self, dtype, direction)
        return out

    def prepack(self) -> GroupedTensor:
        """The same weights with their codes in the order that sm_90a multiplies fastest.

        Values, shapes and sizes stay, and so do the bits of products with quantized activations.
        Once, when weights are loaded: other architectures and W4A16 do not take them, and other ops
        undo it first.

        Raises:
            ValueError: this tensor is ragged or row-scaled, and so no weight.
        """
        if self._offs is not None:
            raise ValueError(f"only uniform weights can be prepacked, got {self!r}")
        return self._reordered(True)

    def unpack(self) -> GroupedTensor:
        """This tensor with codes in the order of the layout contract: undoes ``prepack``."""
        return self._reordered(False)

    def _reordered(self, prepacked: bool) -> GroupedTensor:
        fmt = dataclasses.replace(nvfp4(self.format), prepacked=prepacked)
        if fmt == self.format:
            return self
        change = prepack if prepacked else unpack
        rowwise, columnwise = (
            held and held._replace(codes=change(held.codes))
            for held in (self.rowwise, self.columnwise)
        )
        return GroupedTensor._of(self.shape, self.dtype, fmt, self._offs, rowwise, columnwise)

    def member(self, group: int) -> GroupedMember:
        """Codes and linear scales of one group, for people and tests.

        Reads ``offs`` on the host, so on a GPU it synchronizes.

        Raises:
            IndexError: ``group`` is not in [-G, G).
            RuntimeError: the stream is being captured into a CUDA graph.
        """
        if not -self.num_groups <= group < self.num_groups:
            raise IndexError(f"group must be in [0, {self.num_groups}), got {group}")
        return self._member(group_spans(self._offs, self.shape)[group])

    def unbind(self, dim: int = 0) -> tuple[GroupedMember, ...]:  # type: ignore[override]
        """All members in order; reads ``offs`` on the host once, as ``member`` does."""
        if dim != 0:
            raise ValueError(f"dim must be 0, the groups, got {dim}")
        return tuple(map(self._member, group_spans(self._offs, self.shape)))

    def _member(self, span: GroupSpan) -> GroupedMember:
        x = self.unpack()
        return member(span, nvfp4(x.format), x.shape[-1], x.rowwise, x.columnwise)

    def __matmul__(self, other: Any) -> Tensor:
        raise TypeError(
            "@ does not work on a GroupedTensor: use grouped.grouped_gemm, or decode it "
            "first with .dequantize()"
        )

    __rmatmul__ = __matmul__

    def share_memory_(self) -> GroupedTensor:  # type: ignore[override]
        """Move the plain tensors to shared memory; returns self."""
        self._apply_inner(Tensor.share_memory_)
        return self

    def is_shared(self) -> bool:
        """Whether the plain tensors are in shared memory."""
        return bool(self._first_copy().codes.is_shared())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = [d for d in ("rowwise", "columnwise") if getattr(self, d) is not None]
        kind = "uniform" if self._offs is None else "ragged"
        return (
            f"GroupedTensor({tuple(self.shape)}, {kind}, num_groups={self.num_groups}, "
            f"format={self.format}, {' + '.join(held)}, dtype={self.dtype}, device={self.device})"
        )

    # ------------------------------------------------------------------ how PyTorch handles it

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Format, torch.dtype]]:
        return list(self._inner()), (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[Format, torch.dtype],
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> GroupedTensor:
        fmt, dtype = context
        parts = [inner.get(name) for name in _INNER]
        return GroupedTensor._of(
            outer_size, dtype, fmt, parts[6], _copy_of(*parts[:3]), _copy_of(*parts[3:6])
        )

    def _inner(self) -> dict[str, Tensor]:
        """The plain tensors that it holds, by attribute."""
        return {n: getattr(self, n) for n in _INNER if getattr(self, n) is not None}

    def _apply_inner(
        self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> GroupedTensor:
        """The same tensor over ``function`` of the plain tensors."""
        inner = {name: function(t) for name, t in self._inner().items()}
        context = (self.format, dtype or self.dtype)
        return self.__tensor_unflatten__(inner, context, self.shape, self.stride())

    def _quantize_into(self, x: Tensor, offs: Tensor | None, amax: Tensor | None = None) -> None:
        """Quantize ``x``, of this shape and cut at ``offs``, into this tensor's storage."""
        fmt = nvfp4(self.format)
        names = ("out_codes", "out_scales", "out_amax", "out_codes_t", "out_scales_t", "out_amax_t")
        outs = {name: getattr(self, inner) for name, inner in zip(names, _INNER[:6], strict=True)}
        torch.ops.cute_kernels.grouped_quantize_nvfp4_out(
            x,
            offs,
            amax,
            fmt.row_scaled,
            fmt.is_2d,
            self._codes is not None,
            self._codes_t is not None,
            **outs,
        )
        if fmt.prepacked:
            for codes in (self._codes, self._codes_t):
                if codes is not None:
                    codes.copy_(prepack(codes))
        if offs is not None and self._offs is not None and offs is not self._offs:
            self._offs.copy_(offs)
            increment_version(self._offs)
        # The flat op told autograd of the plain tensors; what holds them may be saved, too.
        increment_version(self)

    def _copy_from(self, source: Tensor) -> None:
        same_bytes = (
            isinstance(source, GroupedTensor)
            and source.format == self.format
            and source.shape == self.shape
            and source.num_groups == self.num_groups
            and all(
                (getattr(self, name) is None or getattr(source, name) is not None)
                for name in _INNER
            )
            and (self._offs is None) == (source._offs is None)
        )
        if same_bytes:
            for name, held in self._inner().items():
                held.copy_(getattr(source, name))
            # PyTorch counts the write to the wrapper, but not what it does inside.
            increment_version([self, *self._inner().values()])
            return
        dense = source.dequantize() if isinstance(source, GroupedTensor) else source
        dense = dense.detach().to(self.device, self.dtype)
        self._quantize_into(dense.expand(self.shape), self._offs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload[Any, Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        known = _HANDLERS.get(func)
        if known is not None:
            return known(func, *args, **kwargs)
        if _decodes(func):
            return _decode_compute_encode(func, args, kwargs)
        instead = _INSTEAD.get(func._schema.name.split("::")[1])
        raise TypeError(
            f"{func} does not work on a GroupedTensor"
            + (f": {instead}; or decode it" if instead else "; decode it")
            + " first with .dequantize()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        fields = dataclasses.asdict(self.format)
        inner = self._inner()
        is_parameter = getattr(self, "_is_param", False)
        return _rebuild, (
            tuple(self.shape),
            self.dtype,
            self.format.name,
            fields,
            inner,
            self.requires_grad,
            is_parameter,
            version(),
        )


def _copy_of(
    codes: Tensor | None, scales: Tensor | None, amax: Tensor | None
) -> QuantizedCopy | None:
    if codes is None or scales is None or amax is None:
        return None
    return QuantizedCopy(codes, scales, amax)


def _rebuild(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    format_name: str,
    fields: dict[str, Any],
    inner: dict[str, Tensor],
    requires_grad: bool,
    is_parameter: bool,
    written_by: str = "0.1.0 or older",
    *more: object,
) -> GroupedTensor:
    """Make a tensor from what ``torch.save`` wrote."""
    fmt = saved_format(format_name, fields, written_by)
    unknown = sorted(inner.keys() - set(_INNER)) + [f"{item!r}" for item in more]
    if unknown:
        raise ValueError(
            f"a GroupedTensor has no field {', '.join(unknown)}: the file was written by "
            f"grouped-kernels {written_by}, this is {version()}"
        )
    *parts, offs = (inner.get(name) for name in _INNER)
    copies = _copy_of(*parts[:3]), _copy_of(*parts[3:])
    self = GroupedTensor(shape, dtype, fmt, offs, *copies, requires_grad)
    if is_parameter:
        self._is_param = True  # type: ignore[attr-defined]
    return self


torch.serialization.add_safe_globals([_rebuild])


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def assemble(
    shape: Sequence[int],
    dtype: torch.dtype,
    fmt: Format,
    offs: Tensor | None,
    parts: Sequence[Tensor],
    rowwise: bool,
    columnwise: bool,
) -> GroupedTensor:
    """Make a tensor from the outputs of the quantize op; a compiled graph calls it as one node."""
    first = QuantizedCopy(*parts[:3]) if rowwise else None
    second = QuantizedCopy(*parts[3:]) if columnwise else None
    if torch._C._functorch.is_batchedtensor(parts[0 if rowwise else 3]):
        raise TypeError(
            "vmap over grouped.quantize: a GroupedTensor has its groups as the batch; stack x to "
            "(G, N, K), or call quantize on all rows with offs, outside of vmap"
        )
    return GroupedTensor._of(shape, dtype, fmt, offs, first, second)


# ------------------------------------------------------------------------ ops on grouped tensors

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


def handler(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: what an op does when an argument is a GroupedTensor."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _HANDLERS.update(dict.fromkeys(ops, function))
        return function

    return register


_HANDLERS: dict[Any, Callable[..., Any]] = {}


@handler(torch.ops.grouped.dequantize.default)
def _dequantize(
    func: Any, x: GroupedTensor, dtype: torch.dtype | None, direction: str | None
) -> Tensor:
    x = x.unpack()
    if direction is None:
        direction = "rowwise" if x.rowwise is not None else "columnwise"
    held = x.rowwise if direction == "rowwise" else x.columnwise
    if held is None:
        raise RuntimeError(f"this GroupedTensor has no {direction} copy: {x!r}")
    fmt = nvfp4(x.format)
    out: Tensor = ops.grouped_dequantize_nvfp4(
        *held,
        x.offs,
        x.shape[-2],
        dtype or x.dtype,
        direction == "rowwise" and fmt.row_scaled,
        direction == "columnwise",
    )
    return out


# -------------------------------------------------------------------------- handlers of aten ops


@handler(aten.detach.default, aten.alias.default)
def _detach(func: Any, x: GroupedTensor) -> GroupedTensor:
    return x._apply_inner(lambda t: t)


@handler(aten.view.default, aten._unsafe_view.default, aten.expand.default)
def _same_shape(func: Any, x: GroupedTensor, size: Sequence[int], **kwargs: Any) -> GroupedTensor:
    same = len(size) == x.dim() and all(w in (-1, s) for w, s in zip(size, x.shape, strict=True))
    if not same:
        raise TypeError(
            f"{func} to {tuple(size)} does not work on a GroupedTensor of shape {tuple(x.shape)}; "
            "decode it first with .dequantize()"
        )
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


@handler(
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
)
def _like(func: Any, x: GroupedTensor, *args: Any, **kwargs: Any) -> Tensor:
    plain = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out: Tensor = func(plain, *args, **kwargs)
    return out


@handler(aten.new_empty.default)
def _new_empty(func: Any, x: GroupedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    # The staging of torch.distributed.checkpoint asks for an empty tensor of this shape on the CPU
    # and then sets each attribute of this one on it. On a plain tensor they would have no effect,
    # and it would store what happens to be in memory.
    if tuple(size) == tuple(x.shape) and kwargs.get("device") is not None:
        device, dtype = torch.device(kwargs["device"]), kwargs.get("dtype") or x.dtype
        if dtype in ops.checks.INPUT_DTYPES:
            return x._apply_inner(
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device),
                dtype,
            )
    plain: Tensor = _new(func, x, size, **kwargs)
    return plain


@handler(aten.is_pinned.default)
def _is_pinned(func: Any, x: GroupedTensor, *args: Any, **kwargs: Any) -> bool:
    return all(func(t, *args, **kwargs) for t in x._inner().values())


@handler(
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
def _new(func: Any, x: GroupedTensor, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = func(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)
    return out


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


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _decodes(func: Any) -> bool:
    """Whether ``func`` runs on decoded values: arithmetic, or in place without a new shape."""
    if not any(map(_writes, func._schema.arguments)):
        return func.overloadpacket in _DECODING
    name: str = func._schema.name.split("::")[1]
    return name.endswith("_") and name not in _RESHAPING


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
