"""``GroupedTensor``: the quantized members of all groups in one tensor that PyTorch can hold.

A wrapper subclass: it has the shape and dtype of the tensor that was quantized. Its data are the
plain tensors of ``cute_kernels``. It can be a parameter, be copied, saved and loaded, updated in
place by an optimizer, and passed to a compiled function. Products of grouped tensors are not
differentiable; ``dequantize()`` is, and ``grouped.nn`` trains. ``aten_handlers`` has what PyTorch's
ops do with one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from cute_kernels import prepack
from cute_kernels.formats import Format, parse

from .base import Context, GroupedTensorBase, inner_names
from .dispatch import HANDLERS
from .gather import gather_inputs, wrap_gathered
from .interchange import Layout, join_parts, split_parts
from .members import QuantizedCopy
from .offsets import Offsets, parse_offs
from .seeds import draw_seed
from .shapes import MemberShapes, Shapes, flat_shapes, parse_shapes
from .validation import check_is_tensor, check_parts, package_version, saved_format


class GroupedTensor(GroupedTensorBase):
    """A quantized grouped tensor; make one with ``grouped.quantize``.

    Its shape is (T, K), ragged, if it has ``offs``; (capacity,) if its groups have ``shapes`` of
    their own; else (G, N, K), uniform.

    One rule for arithmetic: functions that optimizers, ``nn.init`` and clipping apply to parameters
    decode; all others raise TypeError and name ``dequantize()``.

    - In place (``add_``, ``mul_``, ``copy_``, ``normal_``, ``torch._foreach_*_``, fused
      optimizers): decode, compute, quantize into the same storage, return self. A format whose
      scales the caller gives (delayed FP8) quantizes with the scales of the tensor: values beyond
      them saturate, and ``amax`` becomes that of the new values. ``copy_`` of a tensor of the same
      format copies its bytes, scales included. An update that changes no byte warns on a CPU. On a
      GPU bytes are not compared, and the first update warns that this may happen.
    - Out of place, with a plain tensor as the result: ``+ - * / **``, ``neg``, ``abs``, ``lerp``,
      ``where``, comparisons, ``isfinite``, ``isnan``, ``isinf``, ``torch.equal``, vector norms, and
      the ``torch._foreach_*`` forms of arithmetic and norm.
    - Raise: products of matrices, other functions and reductions, indexing, and changes of shape.

    Groups of a uniform tensor are cut and joined as rows of any tensor: ``x[1:3]``, ``narrow``,
    ``split`` and ``chunk`` share its storage, ``torch.cat`` copies. So DDP, FSDP2, DTensor along
    the groups, distributed checkpoints and collectives that move data handle it, by its bytes; see
    ``docs/guide/distributed.md``. ``zeros_like`` and similar functions return plain tensors, as
    gradients and optimizer states are; but ``empty_like`` and ``new_zeros`` of whole groups of a
    uniform tensor return GroupedTensors.

    Attributes:
        format: Format record. It has everything that a reader of the bytes needs.
        prepacked: True if the codes have the bit order of ``prepack``.
    """

    def __new__(
        cls,
        shape: Sequence[int] | Tensor,
        dtype: torch.dtype | None = None,
        fmt: Format | None = None,
        offs: Tensor | None = None,
        rowwise: QuantizedCopy | None = None,
        columnwise: QuantizedCopy | None = None,
        requires_grad: bool = False,
        *,
        prepacked: bool = False,
        shapes: Shapes | None = None,
    ) -> GroupedTensor:
        """Wrap the plain tensors of one or both directions, as read from a file.

        ``GroupedTensor(x, requires_grad=...)`` of a GroupedTensor alone is ``nn.Parameter(x,
        requires_grad)``: libraries that move parameters, such as accelerate, make the new one with
        the class of the old one.

        Args:
            shape: (T, K) with ``offs``, (capacity,) with ``shapes``, else (G, N, K).
            dtype: Data type that it decodes to: bf16, fp16 or fp32.
            fmt: The format.
            offs: (G,) int32. End rows of a ragged tensor. Optional.
            rowwise: Buffers of the copy with blocks along K. Optional.
            columnwise: Buffers of the copy with blocks along rows, or None. Vectors that both
                directions share, as in FP8, are the same tensors in both.
            requires_grad: See ``torch.tensor``.
            prepacked: True if the codes have the bit order of ``prepack``.
            shapes: (m, n) of each group. See ``grouped.quantize``.

        Raises:
            TypeError: A dtype is not that of the format.
            ValueError: Shapes or devices do not match, or there is no direction.
            cute_kernels.UnsupportedError: The format is not built yet.
        """
        if isinstance(shape, Tensor):
            return _make_parameter(shape, requires_grad)
        if dtype is None or fmt is None:
            raise TypeError(
                "dtype and fmt are missing; grouped.quantize makes a GroupedTensor of a plain "
                "tensor"
            )
        members = None if shapes is None else parse_shapes(shapes)
        check_parts(shape, dtype, fmt, offs, rowwise, columnwise, prepacked, members)
        self = cls._wrap(shape, dtype, fmt, offs, rowwise, columnwise, prepacked, members)
        self.requires_grad_(requires_grad)
        return self

    @classmethod
    def _wrap(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        fmt: Format,
        offs: Tensor | None,
        rowwise: QuantizedCopy | None,
        columnwise: QuantizedCopy | None,
        prepacked: bool = False,
        shapes: MemberShapes | None = None,
    ) -> GroupedTensor:
        """Wrap plain tensors unchecked: those that ops or PyTorch made from checked ones."""
        any_copy = rowwise or columnwise
        if any_copy is None:
            raise ValueError("rowwise and columnwise are both None: a GroupedTensor holds data")
        self: GroupedTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=any_copy.codes.device
        )
        inner: dict[str, Tensor | None] = {"_offs": offs}
        for is_columnwise, copy in ((False, rowwise), (True, columnwise)):
            if copy is not None:
                names = (f"_{name}" for name in fmt.buffer_names(is_columnwise))
                inner |= zip(names, copy, strict=True)
        self._set_inner(fmt, prepacked, shapes, inner)
        return self

    # ---- interchange with plain tensors

    @classmethod
    def from_parts(
        cls,
        fmt: Format,
        codes: Tensor,
        scales: Tensor | None = None,
        amax: Tensor | None = None,
        *,
        global_scale: Tensor | None = None,
        scale: Tensor | None = None,
        offs: Offsets | None = None,
        layout: Layout = "linear",
        dtype: torch.dtype = torch.bfloat16,
    ) -> GroupedTensor:
        """Make a tensor with a rowwise copy from codes and scales, as checkpoints store them.

        Args:
            fmt: The format.
            codes: (G, N, K) FP8, or (G, N, K / 2) with two E2M1 codes per byte, the even column in
                the low nibble. With ``offs`` (T, K) or (T, K / 2). Not copied if the strides are
                those of ``quantize``.
            scales: Block scales. In the layout ``"linear"`` (G, N, ceil(K / block)), or (T,
                ceil(K / block)), with one scale for every row: scales of 16x16 and 32x32 blocks
                are repeated. For ``FP8Block((128, 128))`` (G, ceil(N / 128), ceil(K / 128)).
                Scales of one byte may be uint8. In ``"tiles"`` the buffer ``rowwise.scales``.
            amax: Amax of NVFP4, from which its global scale follows: (G,) fp32, or (T,) or (G, N)
                if row-scaled. One number for all is accepted, too. Recorded amax of FP8, by default
                computed from the codes.
            global_scale: Factor of codes times block scales, instead of ``amax``: ModelOpt's
                ``weight_scale_2``, the reciprocal of compressed-tensors' ``weight_global_scale``.
                For NVFP4 it is stored as the nearest amax. Values differ in the last bits of fp32
                at most. FP8 requires it: its ``scale_inv``.
            scale: Factor that elements of FP8 were multiplied by, by default 1 / ``global_scale``.
            offs: (G,). End rows of a ragged tensor. See ``grouped.quantize``.
            layout: ``"linear"`` or ``"tiles"``.
            dtype: Data type that it decodes to: bf16, fp16 or fp32.

        Raises:
            TypeError: A dtype is not that of the format.
            ValueError: Shapes, devices or parts do not match the format or each other.
            cute_kernels.UnsupportedError: The format is not built yet.
        """
        check_is_tensor("codes", codes)
        if offs is not None:
            end_rows = parse_offs(offs, codes.shape[0], codes.device)
            offs = end_rows.clone() if end_rows is offs else end_rows
        level = {"amax": amax, "global_scale": global_scale, "scale": scale}
        shape, rowwise = join_parts(fmt, codes, scales, level, offs, layout)
        return cls(shape, dtype, fmt, offs, rowwise, None)

    def to_parts(
        self, layout: Layout = "linear", *, global_scale: bool = False
    ) -> dict[str, Tensor]:
        """Return the rowwise copy as plain tensors, by the names that ``from_parts`` takes.

        ``GroupedTensor.from_parts(q.format, **q.to_parts(layout), layout=layout, dtype=q.dtype)``
        has the bytes of ``q``. Prepacked codes are unpacked. Tensors whose layout changes are new.
        The others share the memory of this tensor.

        Args:
            layout: Layout of the scales. In ``"linear"`` scales of the tail of a capacity buffer
                are zeros.
            global_scale: Return the global scale of NVFP4 as ``global_scale`` instead of ``amax``.

        Raises:
            ValueError: The groups have ``shapes``, there is no rowwise copy, or the scales have no
                such layout.
        """
        copy = self.unpack().rowwise
        if copy is None or self._shapes is not None:
            raise ValueError(
                f"to_parts needs the rowwise copy of a ragged or uniform tensor, got {self!r}"
            )
        return split_parts(self.format, self.shape, self._offs, copy, layout, global_scale)

    @property
    def data(self) -> GroupedTensor:
        """The same storage without autograd's history.

        Assigning another GroupedTensor of this shape gives this one the other's plain tensors,
        format, directions, dtype and device, as in ``weight.data = weight.data.prepack()``.

        Raises:
            TypeError: A plain tensor is assigned: ``copy_`` quantizes one.
            ValueError: A tensor of another shape is assigned.
        """
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Replace the plain tensors by those of another GroupedTensor."""
        if not isinstance(value, GroupedTensor):
            raise TypeError(
                f".data of a GroupedTensor must be a GroupedTensor, got {type(value).__name__}; "
                "copy_() quantizes into the existing storage, grouped.quantize makes a new one"
            )
        if value.shape != self.shape:
            raise ValueError(
                f".data must keep the shape {tuple(self.shape)}, got {tuple(value.shape)}"
            )
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._set_inner(value.format, value.prepacked, value._shapes, value._inner())
        # A backward pass that saved the old values must not use the new ones.
        increment_version(self)

    # ---- values

    def dequantize(self, dtype: torch.dtype | None = None, direction: str | None = None) -> Tensor:
        """Decode to a plain tensor of this shape; rows of the tail are zeros.

        Its gradient with respect to a parameter is the identity: the gradient of the decoded
        values. The columnwise copy of ``NVFP4(hadamard=True)`` gives the values before the
        transform, which is undone in fp32.

        Args:
            dtype: Bf16, fp16 or fp32; this tensor's dtype by default. Values are rounded once.
            direction: Copy to decode; the rowwise one by default if there is one.
        """
        if direction not in (None, "rowwise", "columnwise"):
            raise ValueError(f"direction must be 'rowwise' or 'columnwise', got {direction!r}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        return torch.ops.grouped.dequantize(self, dtype, direction)

    def __matmul__(self, operand: Any) -> Tensor:
        raise TypeError(
            "@ does not work on a GroupedTensor: use grouped.grouped_gemm, or decode it first "
            "with .dequantize()"
        )

    __rmatmul__ = __matmul__

    # ---- FSDP2

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return what FSDP2 gathers of this shard: codes, scales and amaxes as they are.

        FSDP2 calls it.

        Args:
            mesh: Mesh of the ranks that have shards.
            outer_size: Shape of the whole parameter, (G, N, K).
            outer_stride: Not used.
            module: Not used.
            mp_policy: Not used.

        Raises:
            ValueError: The number of groups is not a multiple of the size of the mesh.
        """
        return gather_inputs(self, mesh.size(), outer_size[0]), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[GroupedTensor, tuple[Tensor, ...]] | None:
        """Return the parameter of all groups around the tensors that FSDP2 gathered.

        FSDP2 calls it.

        Args:
            outputs: Gathered tensors, in the order of ``fsdp_pre_all_gather``.
            metadata: Not used.
            param_dtype: Dtype of the parameter and of its gradient.
            out: Parameter around memory that FSDP2 has filled again, or None the first time.
        """
        # FSDP gathers into the same memory again, which the tensors of ``out`` view.
        if out is not None:
            return None
        # With a single rank FSDP2 passes on the first tensor only; this shard has all of them.
        missing = gather_inputs(self, 1, len(self))[len(outputs) :]
        return wrap_gathered(self, [*outputs, *missing], param_dtype), outputs

    # ---- PyTorch's protocol of wrapper subclasses

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: Context,
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> GroupedTensor:
        fmt, dtype, prepacked, shapes = context
        return GroupedTensor._wrap(
            outer_size, dtype, fmt, inner.get("_offs"), *_copies(fmt, inner), prepacked, shapes
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload[Any, Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return HANDLERS.get(func, HANDLERS[None])(func, *args, **(kwargs or {}))

    def _quantize_into(
        self,
        x: Tensor,
        offs: Tensor | None,
        amax: Tensor | None = None,
        scale: Tensor | None = None,
        seed: Tensor | None = None,
        activation: str | None = None,
        update: dict[str, Any] | None = None,
    ) -> None:
        """Quantize into this tensor's storage.

        Args:
            x: Values of this shape. Or the input of ``activation``, or the master of ``update``.
            offs: (G,). End rows of ``x``.
            amax: (G,) fp32. Amaxes to use instead of computing them.
            scale: (G,) fp32. Scales for formats whose scales the caller gives. By default those of
                this tensor.
            seed: (2,) int64 for stochastic formats. Drawn by default.
            activation: Text of an activation that is applied to ``x``.
            update: Arguments of ``adamw_quantize``, which updates ``x`` first.
        """
        if self._is_empty:
            return
        copies = (self.rowwise, self.columnwise)
        has_rowwise, has_columnwise = (copy is not None for copy in copies)
        names = [*self.format.buffer_names(False)] if has_rowwise else []
        if has_columnwise:
            names += self.format.buffer_names(True)
        buffers = [getattr(self, f"_{name}") for name in dict.fromkeys(names)]
        if scale is None and self.format.has_given_scale:
            present_scale: Tensor = self._scale  # type: ignore[attr-defined]
            scale = present_scale.clone()
        if seed is None:
            seed = draw_seed(self.format, x.device)
        if update is not None:
            torch.ops.cute_kernels.adamw_quantize(
                master=x,
                scale=scale,
                seed=seed,
                rowwise=has_rowwise,
                columnwise=has_columnwise,
                format=self.format.text,
                out=buffers,
                **update,
            )
        else:
            torch.ops.cute_kernels.grouped_quantize_out(
                x,
                self.format.text,
                offs,
                amax,
                has_rowwise,
                has_columnwise,
                scale,
                seed,
                activation,
                flat_shapes(self._shapes),
                out=buffers,
            )
        if self.prepacked:
            for copy in copies:
                if copy is not None:
                    copy.codes.copy_(prepack(copy.codes))
        if offs is not None and self._offs is not None and offs is not self._offs:
            self._offs.copy_(offs)
            increment_version(self._offs)
        # The flat op counted the write to the plain tensors; this wrapper may be saved, too.
        increment_version(self)

    def _copy_from(self, source: Tensor) -> None:
        """Copy the bytes of a tensor of the same format, or quantize other values."""
        shapes = source._shapes if isinstance(source, GroupedTensor) else None
        if shapes is not None and shapes != self._shapes:
            raise ValueError(f"copy_ needs a source of equal shapes, got {source!r} for {self!r}")
        if isinstance(source, GroupedTensor) and self._has_same_layout(source):
            for name, t in self._inner().items():
                t.copy_(getattr(source, name))
            # PyTorch counts the write to the wrapper, but not to its plain tensors.
            increment_version([self, *self._inner().values()])
            return
        dense = source.dequantize() if isinstance(source, GroupedTensor) else source
        dense = dense.detach().to(self.device, self.dtype)
        self._quantize_into(dense.expand(self.shape), self._offs)

    def _has_same_layout(self, source: GroupedTensor) -> bool:
        """Return True if ``source`` has all plain tensors of this one, in the same layout."""
        return (
            source._shapes == self._shapes
            and (source.format, source.prepacked) == (self.format, self.prepacked)
            and source.shape == self.shape
            and source.num_groups == self.num_groups
            and self._inner().keys() <= source._inner().keys()
            and (self._offs is None) == (source._offs is None)
        )

    # ---- pickling

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Codes as bytes: PyTorch does not read tensors of FP8 that ``pickle`` wrote.
        inner = {
            name: t.view(torch.uint8) if name.startswith("_codes") else t
            for name, t in self._inner().items()
        }
        return _rebuild, (
            tuple(self.shape),
            self.dtype,
            self.format.name,
            self._saved_fields(),
            inner,
            self.requires_grad,
            getattr(self, "_is_param", False),
            package_version(),
        )

    def _saved_fields(self) -> dict[str, Any]:
        """Return what files store beside the plain tensors; without shapes as in older versions."""
        fields = dataclasses.asdict(self.format)  # type: ignore[call-overload]
        fields["prepacked"] = self.prepacked
        return fields if self._shapes is None else {**fields, "shapes": self._shapes}


def _make_parameter(x: Tensor, requires_grad: bool) -> GroupedTensor:
    """Return ``nn.Parameter(x)`` of a GroupedTensor."""
    if not isinstance(x, GroupedTensor):
        raise TypeError(
            f"a GroupedTensor cannot be made of a plain tensor of shape {tuple(x.shape)} alone: "
            "grouped.quantize makes one. "
            "Where a library offloaded a plain weight before it was quantized, offload the model "
            "again"
        )
    parameter: Any = torch.nn.Parameter(x, requires_grad=requires_grad)
    return parameter


def _copies(
    fmt: Format, inner: dict[str, Tensor]
) -> tuple[QuantizedCopy | None, QuantizedCopy | None]:
    """Return the rowwise and the columnwise copy, from plain tensors by attribute name."""

    def copy(columnwise: bool) -> QuantizedCopy | None:
        names = [f"_{name}" for name in fmt.buffer_names(columnwise)]
        if names[0] not in inner:
            return None
        return QuantizedCopy(fmt, [inner[name] for name in names])

    return copy(columnwise=False), copy(columnwise=True)


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
    """Rebuild a pickled tensor. Files contain calls of this function: see ``__reduce_ex__``."""
    fields = dict(fields)
    prepacked, shapes = fields.pop("prepacked", False), fields.pop("shapes", None)
    fmt = saved_format(format_name, fields, written_by)
    unknown = sorted(inner.keys() - set(inner_names(fmt.text))) + [f"{item!r}" for item in more]
    if unknown:
        raise ValueError(
            f"a GroupedTensor has no field {', '.join(unknown)}: the file was written by "
            f"grouped-kernels {written_by}, this is {package_version()}"
        )
    inner = {
        name: t.view(fmt.element.dtype)
        if name.startswith("_codes") and t.dtype == torch.uint8
        else t
        for name, t in inner.items()
    }
    rowwise, columnwise = _copies(fmt, inner)
    self = GroupedTensor(
        shape,
        dtype,
        fmt,
        inner.get("_offs"),
        rowwise,
        columnwise,
        requires_grad,
        prepacked=prepacked,
        shapes=shapes,
    )
    if is_parameter:
        self._is_param = True
    return self


# Files contain these names. Release 0.1.0 writes ``grouped.tensor``, and reads no other module.
GroupedTensor.__module__ = _rebuild.__module__ = "grouped.tensor"
torch.serialization.add_safe_globals([_rebuild])


def assemble(
    shape: Sequence[int],
    dtype: torch.dtype,
    text: str,
    offs: Tensor | None,
    buffers: Sequence[Tensor],
    rowwise: bool,
    columnwise: bool,
    shapes: MemberShapes | None = None,
) -> GroupedTensor:
    """Make a tensor from the outputs of the quantize op. A compiled graph calls it as one node.

    It takes the text of the format, since a node cannot take a record that compiled code makes.
    """
    fmt = parse(text)
    names: list[str] = []
    for is_included, is_columnwise in ((rowwise, False), (columnwise, True)):
        names += fmt.buffer_names(is_columnwise) if is_included else ()
    inner = {f"_{n}": t for n, t in zip(dict.fromkeys(names), buffers, strict=True)}
    if shapes is not None:
        # The context cannot contain symbols, which sizes are while tracing: make them constants.
        shapes = tuple((int(m), int(n)) for m, n in shapes)
    return GroupedTensor._wrap(shape, dtype, fmt, offs, *_copies(fmt, inner), shapes=shapes)
