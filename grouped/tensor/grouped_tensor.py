"""``GroupedTensor``: the quantized members of all groups in one tensor that PyTorch can hold.

A wrapper subclass: it has the shape and dtype of what was quantized, and its data are the plain
tensors of ``cute_kernels``. It can be a parameter, be copied, saved and loaded, updated in place by
an optimizer, and passed to a compiled function. Products of grouped tensors are not differentiable;
``dequantize()`` is, and ``grouped.nn`` trains. What ops of PyTorch do with one: ``handlers``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from cute_kernels import prepack, unpack
from cute_kernels.formats import Format, parse

from .dtensor_parts import gathered, gathered_inputs
from .interchange import Layout, joined_parts, split_parts
from .members import GroupedMember, QuantizedCopy, group_spans, member, shaped_members
from .offsets import Offsets, as_offs
from .seeds import draw_seed
from .shapes import MemberShapes, Shapes, as_shapes, flat_shapes, shape_tensors
from .validation import check_is_tensor, check_parts, saved_format, version

#: What a tensor is beside the plain tensors that it holds.
Context: TypeAlias = "tuple[Format, torch.dtype, bool, MemberShapes | None]"
#: Why a GroupedTensor cannot be given away as memory, and ways out.
NO_MEMORY = (
    "a GroupedTensor has no memory of its own: its bytes are several plain tensors. To write it, use torch.save, "
    "grouped.checkpoint.save, or safetensors with to_parts(), which GroupedTensor.from_parts undoes; accelerate offloads "
    "it to the CPU (cpu_offload), not to disk. Its values as a plain tensor are .dequantize()"
)
#: Groups whose shapes its text names.
_MOST_SHOWN = 4


@functools.cache
def _inner_names(format_text: str) -> tuple[str, ...]:
    """Attributes that hold the plain tensors: the format's buffers, and offs."""
    fmt = parse(format_text)
    names = (*fmt.buffer_names(columnwise=False), *fmt.buffer_names(columnwise=True), "offs")
    return tuple(dict.fromkeys(f"_{name}" for name in names))


class GroupedTensor(Tensor):
    """A quantized grouped tensor; make one with ``grouped.quantize``.

    Its shape is (T, K), ragged, when it has ``offs``; (capacity,) when its groups have ``shapes``
    of their own; and (G, N, K), uniform, when it has neither.

    One rule for arithmetic: what optimizers, ``nn.init`` and clipping apply to parameters decodes,
    everything else raises TypeError and names ``dequantize()``.

    - In place (``add_``, ``mul_``, ``copy_``, ``normal_``, ``torch._foreach_*_``, fused
      optimizers): decode, compute, quantize into the same storage, return self. A format that takes
      its scales from the caller (delayed FP8) quantizes with those that the tensor has: values
      beyond them saturate, and ``amax`` is the new values'. ``copy_`` of a tensor of the same
      format takes over its bytes, scales among them. An update that changes no byte warns on a CPU;
      on a GPU, where nobody may look, the first one says that it might.
    - Out of place, with a plain tensor as the result: ``+ - * / **``, ``neg``, ``abs``, ``lerp``,
      ``where``, comparisons, ``isfinite``, ``isnan``, ``isinf``, ``torch.equal``, vector norms, and
      the ``torch._foreach_*`` forms of arithmetic and norm.
    - Raise: products of matrices, other functions and reductions, indexing, and changes of shape.

    Groups of a uniform tensor are cut and joined as rows of any tensor: ``x[1:3]``, ``narrow``,
    ``split`` and ``chunk`` share its storage, ``torch.cat`` copies. So DDP, FSDP2, DTensor along
    the groups, distributed checkpoints and collectives that move data handle it, by its bytes;
    ``docs/distributed.md``. ``zeros_like`` and its kin are plain, as gradients and optimizer states
    are, but ``empty_like`` and ``new_zeros`` of whole groups of a uniform tensor are what it is.

    Attributes:
        format: the format record; every fact that a reader of the bytes needs.
        prepacked: the codes have the order of bits of ``prepack``.
    """

    format: Format
    prepacked: bool
    _offs: Tensor | None
    _shapes: MemberShapes | None
    _shape_tensors: tuple[Tensor, Tensor] | None
    #: Attributes that hold plain tensors; and these with what else decides how kernels read them.
    _names: tuple[str, ...]
    _layout: tuple[str | bool, ...]

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
        requires_grad)``: libraries that move parameters, such as accelerate, make the new one by
        the class of the old one.

        Args:
            shape: (T, K) with ``offs``, (capacity,) with ``shapes``, else (G, N, K).
            dtype: bf16, fp16 or fp32, what it decodes to.
            fmt: the format.
            offs: (G,) int32 end rows of a ragged tensor, or None.
            rowwise: the buffers of the copy with blocks along K, or None.
            columnwise: those of the copy with blocks along rows, or None. Vectors that both
                directions share, those of FP8, are the same tensors in both.
            requires_grad: as of ``torch.tensor``.
            prepacked: whether the codes have the order of bits of ``prepack``.
            shapes: (m, n) of each group, as of ``grouped.quantize``.

        Raises:
            TypeError: a dtype that is not what the format has.
            ValueError: shapes or devices that do not fit each other, or there is no direction.
            cute_kernels.UnsupportedError: a format that is not built yet.
        """
        if isinstance(shape, Tensor):
            return _as_parameter(shape, requires_grad)
        if dtype is None or fmt is None:
            raise TypeError(
                "dtype and fmt are missing; grouped.quantize makes a GroupedTensor of a plain tensor"
            )
        members = None if shapes is None else as_shapes(shapes)
        check_parts(shape, dtype, fmt, offs, rowwise, columnwise, prepacked, members)
        self = cls._of(shape, dtype, fmt, offs, rowwise, columnwise, prepacked, members)
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
        prepacked: bool = False,
        shapes: MemberShapes | None = None,
    ) -> GroupedTensor:
        """The same, unchecked: for parts that ops or PyTorch made from checked ones."""
        held = rowwise or columnwise
        if held is None:
            raise ValueError("rowwise and columnwise are both None: a GroupedTensor holds data")
        self: GroupedTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=held.codes.device
        )
        inner: dict[str, Tensor | None] = {"_offs": offs}
        for is_columnwise, copy in ((False, rowwise), (True, columnwise)):
            if copy is not None:
                inner |= zip(
                    (f"_{name}" for name in fmt.buffer_names(is_columnwise)), copy, strict=True
                )
        self._hold(fmt, prepacked, shapes, inner)
        return self

    def _hold(
        self, fmt: Format, prepacked: bool, shapes: MemberShapes | None, inner: dict[str, Any]
    ) -> None:
        self.format, self.prepacked = fmt, prepacked
        self._shapes, self._shape_tensors = shapes, None
        for name in _inner_names(fmt.text):
            setattr(self, name, inner.get(name))
        # Each call of a layer asks for both.
        self._names = tuple(name for name in _inner_names(fmt.text) if inner.get(name) is not None)
        self._layout = (fmt.text, prepacked, *self._names)

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
        """The rowwise copy of a tensor from codes and scales, as checkpoints have them.

        Args:
            fmt: the format.
            codes: (G, N, K) FP8 or (G, N, K / 2) of two E2M1 codes a byte, the even column in
                the low nibble; with ``offs`` (T, K) or (T, K / 2). Held as they are if
                their rows lie as ``quantize`` lays them, else copied.
            scales: block scales. In the layout ``"linear"`` (G, N, ceil(K / block)), or (T,
                ceil(K / block)), with one scale for every row, those of 16x16 and 32x32
                blocks repeated; of ``FP8Block((128, 128))`` (G, ceil(N / 128), ceil(K /
                128)). Scales of one byte may be uint8. In ``"tiles"`` the buffer that
                ``rowwise.scales`` is.
            amax: second level of NVFP4: (G,) fp32, of a row-scaled format (T,) or (G, N); one
                number for all is taken, too. Of FP8 what the tensor records, by default
                made from the codes.
            global_scale: what codes times scales are multiplied by, in place of ``amax``:
                ModelOpt's ``weight_scale_2``, the reciprocal of compressed-tensors'
                ``weight_global_scale``. Of NVFP4 it is held as the nearest amax, for values
                that are the same but for the last bits of fp32. FP8 needs it: its
                ``scale_inv``.
            scale: what elements of FP8 were multiplied by, by default 1 / ``global_scale``.
            offs: (G,) end rows of a ragged tensor, as of ``grouped.quantize``.
            layout: ``"linear"`` or ``"tiles"``.
            dtype: bf16, fp16 or fp32, what it decodes to.

        Raises:
            TypeError: a dtype that is not what the format has.
            ValueError: shapes, devices or parts that do not fit the format or each other.
            cute_kernels.UnsupportedError: a format that is not built yet.
        """
        check_is_tensor("codes", codes)
        if offs is not None:
            ends = as_offs(offs, codes.shape[0], codes.device)
            offs = ends.clone() if ends is offs else ends
        second = {"amax": amax, "global_scale": global_scale, "scale": scale}
        shape, rowwise = joined_parts(fmt, codes, scales, second, offs, layout)
        return cls(shape, dtype, fmt, offs, rowwise, None)

    def to_parts(
        self, layout: Layout = "linear", *, global_scale: bool = False
    ) -> dict[str, Tensor]:
        """The rowwise copy as plain tensors by the names of ``from_parts``, which undoes it.

        ``GroupedTensor.from_parts(q.format, **q.to_parts(layout), layout=layout, dtype=q.dtype)``
        has the bytes of ``q``, prepacked ones in the order of the layout contract. Tensors that lie
        in another order than asked for are fresh, the others are those that this one holds.

        Args:
            layout: of the scales. Those of the tail of a capacity buffer are zeros in
                ``"linear"``.
            global_scale: the second level of NVFP4 as ``global_scale`` instead of ``amax``.

        Raises:
            ValueError: groups that have ``shapes``, no rowwise copy, or scales that have no
                such layout.
        """
        held = self.unpack().rowwise
        if held is None or self._shapes is not None:
            raise ValueError(
                f"to_parts is of the rowwise copy of ragged and uniform tensors, got {self!r}"
            )
        return split_parts(self.format, self.shape, self._offs, held, layout, global_scale)

    # ---- what it holds

    @property
    def offs(self) -> Tensor | None:
        """(G,) int32 end row of each group, on the device; None when it is not ragged."""
        return self._offs

    @property
    def grouping(self) -> Literal["uniform", "ragged", "shapes"]:
        """What cuts it into groups: its first dimension, ``offs`` or ``shapes``."""
        if self._shapes is not None:
            return "shapes"
        return "uniform" if self._offs is None else "ragged"

    @property
    def member_shapes(self) -> MemberShapes | None:
        """(m, n) of each group that has a shape of its own, on the host; None for other groups."""
        return self._shapes

    @property
    def shapes(self) -> Tensor | None:
        """(G, 2) int64 ``member_shapes``, on the device; not to be written."""
        return None if self._shapes is None else self._on_device(self._shapes)[0]

    @property
    def element_offsets(self) -> Tensor | None:
        """(G + 1,) int64, on the device: where groups that have ``shapes`` start and the last ends.

        In elements of the decoded tensor. Not to be written.
        """
        return None if self._shapes is None else self._on_device(self._shapes)[1]

    def _on_device(self, shapes: MemberShapes) -> tuple[Tensor, Tensor]:
        if self._shape_tensors is None:
            made = shape_tensors(shapes, self.device)
            if type(made[0]) is not Tensor:
                return made  # Fake ones, which must not outlive their mode.
            self._shape_tensors = made
        return self._shape_tensors

    @property
    def num_groups(self) -> int:
        """G."""
        if self._shapes is not None:
            return len(self._shapes)
        return self.shape[0] if self._offs is None else self._offs.shape[0]

    @property
    def _is_empty(self) -> bool:
        """Uniform without groups: a rank's part of few groups."""
        groups = self.shape[0]
        return self.grouping == "uniform" and type(groups) is int and groups == 0

    @property
    def rowwise(self) -> QuantizedCopy | None:
        """The copy with blocks along K; None if it is not held."""
        return self._copy(columnwise=False)

    @property
    def columnwise(self) -> QuantizedCopy | None:
        """The copy with blocks along the rows of each group; None if it is not held."""
        return self._copy(columnwise=True)

    def _copy(self, columnwise: bool) -> QuantizedCopy | None:
        codes, *rest = (getattr(self, f"_{n}") for n in self.format.buffer_names(columnwise))
        return None if codes is None else QuantizedCopy(self.format, [codes, *rest])

    @property
    def amax(self) -> Tensor | None:  # type: ignore[override]
        """Amaxes of the rowwise copy, or of the columnwise one; None if the format keeps none."""
        held = self.rowwise or self.columnwise
        return getattr(held, "amax", None)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all plain tensors that it holds, those of ``offs`` among them.

        ``element_size()`` and ``itemsize`` stay those of ``dtype``, what an element decodes to: one
        of four bits and its share of a scale is no whole number of bytes, and PyTorch's own sums
        over parameters take them from the dtype.
        """
        return sum(t.nbytes for t in self._inner().values())

    def _stable_hash_for_caching(self) -> str:
        # What PyTorch's cache of compiled graphs asks for: all that a graph depends on, in any
        # process.
        inner = [
            (name, t.dtype, t.device, *map(str, (*t.shape, *t.stride())))
            for name, t in self._inner().items()
        ]
        facts = (
            tuple(map(str, self.shape)),
            self.dtype,
            self.format.text,
            self.prepacked,
            self._shapes,
        )
        return hashlib.blake2b(
            repr((facts, self.requires_grad, inner)).encode(), digest_size=16
        ).hexdigest()

    @property
    def data(self) -> GroupedTensor:
        """The same storage without autograd's history.

        Assigning another GroupedTensor of this shape makes this one hold what that one holds, with
        its format, directions, dtype and device, as ``weight.data = weight.data.prepack()``.

        Raises:
            TypeError: a plain tensor is assigned: ``copy_`` quantizes one.
            ValueError: a tensor of another shape is assigned.
        """
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

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
        self._hold(other.format, other.prepacked, other._shapes, other._inner())
        # A backward pass that was to read the old values must not take the new ones for them.
        increment_version(self)

    def dequantize(self, dtype: torch.dtype | None = None, direction: str | None = None) -> Tensor:
        """Decode to a plain tensor of this shape; rows of the tail are zeros.

        Its gradient with respect to a parameter is the identity: that of the decoded values. The
        columnwise copy of ``NVFP4(hadamard=True)`` gives the values before the transform, which is
        undone in fp32.

        Args:
            dtype: bf16, fp16 or fp32; this tensor's dtype by default. One rounding.
            direction: which copy to decode; the rowwise one by default if there is one.
        """
        if direction not in (None, "rowwise", "columnwise"):
            raise ValueError(f"direction must be 'rowwise' or 'columnwise', got {direction!r}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        return torch.ops.grouped.dequantize(self, dtype, direction)

    def prepack(self) -> GroupedTensor:
        """The same weights with their codes in the order that sm_90a multiplies fastest.

        Values, shapes and sizes stay, and so do the bits of products with quantized activations.
        Once, when weights are loaded: other architectures and W4A16 do not take them, and other ops
        undo it first.

        Raises:
            ValueError: this tensor is not uniform or row-scaled, and so no weight; or its codes
                do not share bytes.
        """
        if self.grouping != "uniform":
            raise ValueError(f"only uniform weights can be prepacked, got {self!r}")
        level = self.format.global_scale
        if self.format.element.per_byte == 1 or (level is not None and level.per == "row"):
            raise ValueError(f"{self.format} cannot be combined with prepacked")
        return self if self.prepacked else self._reordered(prepack)

    def unpack(self) -> GroupedTensor:
        """This tensor with codes in the order of the layout contract: undoes ``prepack``."""
        return self._reordered(unpack) if self.prepacked else self

    def _reordered(self, change: Callable[[Tensor], Tensor]) -> GroupedTensor:
        rowwise, columnwise = (
            held and held._replace(codes=change(held.codes))
            for held in (self.rowwise, self.columnwise)
        )
        return GroupedTensor._of(
            *(self.shape, self.dtype, self.format, self._offs, rowwise, columnwise),
            prepacked=not self.prepacked,
        )

    def member(self, group: int) -> GroupedMember:
        """Codes and linear scales of one group, for people and tests.

        Reads ``offs`` on the host, so on a GPU it synchronizes.

        Raises:
            IndexError: ``group`` is not in [-G, G).
            RuntimeError: the stream is being captured into a CUDA graph.
        """
        if not -self.num_groups <= group < self.num_groups:
            raise IndexError(f"group must be in [0, {self.num_groups}), got {group}")
        return self._members([group])[0]

    def unbind(self, dim: int = 0) -> tuple[GroupedMember, ...]:  # type: ignore[override]
        """All members in order; reads ``offs`` on the host once, as ``member`` does."""
        if dim != 0:
            raise ValueError(f"dim must be 0, the groups, got {dim}")
        return self._members(range(self.num_groups))

    def _members(self, groups: Sequence[int]) -> tuple[GroupedMember, ...]:
        x = self.unpack()
        fmt, copies = x.format, (x.rowwise, x.columnwise)
        if x._shapes is not None:
            return tuple(shaped_members(groups, fmt, x._shapes, *copies))
        spans = group_spans(x._offs, x.shape)
        return tuple(member(spans[group], fmt, x.shape[-1], *copies) for group in groups)

    def __matmul__(self, other: Any) -> Tensor:
        raise TypeError(
            "@ does not work on a GroupedTensor: use grouped.grouped_gemm, or decode it first with .dequantize()"
        )

    __rmatmul__ = __matmul__

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """What FSDP2 gathers of this shard: codes, scales and amaxes as they are.

        Raises:
            ValueError: the mesh does not divide the number of groups.
        """
        return gathered_inputs(self, mesh.size(), outer_size[0]), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[GroupedTensor, tuple[Tensor, ...]] | None:
        """The parameter of all groups over what FSDP2 gathered; as of plain ones its gradient has
        ``param_dtype``.
        """
        # FSDP gathers into the same memory again, which ``out`` consists of.
        if out is not None:
            return None
        # Of a single rank it passes on the first tensor alone; this one has them all.
        rest = gathered_inputs(self, 1, len(self))[len(outputs) :]
        return gathered(self, [*outputs, *rest], param_dtype), outputs

    def share_memory_(self) -> GroupedTensor:
        """Move the plain tensors to shared memory; returns self."""
        self._apply_inner(Tensor.share_memory_)
        return self

    def is_shared(self) -> bool:
        """Whether the plain tensors are in shared memory."""
        return all(t.is_shared() for t in self._inner().values())

    def storage(self) -> NoReturn:
        """Raise: there is no storage of all bytes. safetensors asks for it."""
        raise TypeError(NO_MEMORY)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise, as PyTorch does for subclasses. accelerate asks for it to offload to disk."""
        raise RuntimeError(NO_MEMORY)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(NO_MEMORY)  # PyTorch gives a null pointer away.

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        raise AttributeError(NO_MEMORY)  # Likewise.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = [d for d in ("rowwise", "columnwise") if getattr(self, d) is not None]
        kind: str = self.grouping
        if self._shapes is not None:
            kind = f"shapes=[{', '.join(map(str, self._shapes[:_MOST_SHOWN]))}{', ...' * (self.num_groups > _MOST_SHOWN)}]"
        return (
            f"GroupedTensor({tuple(self.shape)}, {kind}, num_groups={self.num_groups}, "
            f"format={self.format}, {' + '.join(held)}{', prepacked' * self.prepacked}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    # ---- how PyTorch handles it

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        return list(self._inner()), (self.format, self.dtype, self.prepacked, self._shapes)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: Context,
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> GroupedTensor:
        fmt, dtype, prepacked, shapes = context
        return GroupedTensor._of(
            outer_size, dtype, fmt, inner.get("_offs"), *_copies(fmt, inner), prepacked, shapes
        )

    def _inner(self) -> dict[str, Tensor]:
        attributes = self.__dict__  # Read once: attributes of tensors take three times as long.
        return {name: attributes[name] for name in attributes["_names"]}

    def _apply_inner(
        self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> GroupedTensor:
        inner = {name: function(t) for name, t in self._inner().items()}
        context = (self.format, dtype or self.dtype, self.prepacked, self._shapes)
        return self.__tensor_unflatten__(inner, context, self.shape, self.stride())

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
        """Quantize ``x``, or what an activation or an ``update`` by AdamW makes of it, into this
        tensor's storage.

        What is quantized has this shape and is cut at ``offs``. Where the format takes scales and
        none is given, with those that this tensor has; where it is stochastic and no seed is given,
        by one that is drawn.
        """
        if self._is_empty:
            return
        copies = (self.rowwise, self.columnwise)
        directions = [copy is not None for copy in copies]
        held = zip((False, True), directions, strict=True)
        names = [n for way, is_held in held if is_held for n in self.format.buffer_names(way)]
        inner = [getattr(self, f"_{name}") for name in dict.fromkeys(names)]
        if scale is None and self.format.has_given_scale:
            held_scale: Tensor = self._scale  # type: ignore[attr-defined]
            scale = held_scale.clone()
        if seed is None:
            seed = draw_seed(self.format, x.device)
        if update is not None:
            made = dict(
                zip(("rowwise", "columnwise"), directions, strict=True),
                format=self.format.text,
                out=inner,
            )
            torch.ops.cute_kernels.adamw_quantize(
                master=x, scale=scale, seed=seed, **made, **update
            )
        else:
            given = (scale, seed, activation, flat_shapes(self._shapes))
            torch.ops.cute_kernels.grouped_quantize_out(
                *(x, self.format.text, offs, amax, *directions, *given), out=inner
            )
        if self.prepacked:
            for copy in copies:
                if copy is not None:
                    copy.codes.copy_(prepack(copy.codes))
        if offs is not None and self._offs is not None and offs is not self._offs:
            self._offs.copy_(offs)
            increment_version(self._offs)
        # The flat op told autograd of the plain tensors; what holds them may be saved, too.
        increment_version(self)

    def _copy_from(self, source: Tensor) -> None:
        shapes = source._shapes if isinstance(source, GroupedTensor) else None
        if shapes is not None and shapes != self._shapes:
            raise ValueError(f"copy_ needs a source of equal shapes, got {source!r} for {self!r}")
        same_bytes = (
            isinstance(source, GroupedTensor)
            and shapes == self._shapes
            and (source.format, source.prepacked) == (self.format, self.prepacked)
            and source.shape == self.shape
            and source.num_groups == self.num_groups
            and self._inner().keys() <= source._inner().keys()
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
        return HANDLERS.get(func, HANDLERS[None])(func, *args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Bytes of codes: ``pickle`` writes tensors of FP8 that PyTorch then does not read.
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
            version(),
        )

    def _saved_fields(self) -> dict[str, Any]:
        """What files hold beside the plain tensors; without shapes as older versions read it."""
        fields = dataclasses.asdict(self.format)  # type: ignore[call-overload]
        fields["prepacked"] = self.prepacked
        return fields if self._shapes is None else {**fields, "shapes": self._shapes}


def _as_parameter(x: Tensor, requires_grad: bool) -> GroupedTensor:
    if not isinstance(x, GroupedTensor):
        raise TypeError(
            f"a GroupedTensor cannot be made of a plain tensor of shape {tuple(x.shape)} alone: grouped.quantize makes one. "
            "Where a library offloaded a plain weight before it was quantized, offload the model again"
        )
    parameter: Any = torch.nn.Parameter(x, requires_grad=requires_grad)
    return parameter


def _copies(
    fmt: Format, inner: dict[str, Tensor]
) -> tuple[QuantizedCopy | None, QuantizedCopy | None]:

    def copy(columnwise: bool) -> QuantizedCopy | None:
        names = [f"_{name}" for name in fmt.buffer_names(columnwise)]
        return (
            None if names[0] not in inner else QuantizedCopy(fmt, [inner[name] for name in names])
        )

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
    fields = dict(fields)
    prepacked, shapes = fields.pop("prepacked", False), fields.pop("shapes", None)
    fmt = saved_format(format_name, fields, written_by)
    unknown = sorted(inner.keys() - set(_inner_names(fmt.text))) + [f"{item!r}" for item in more]
    if unknown:
        raise ValueError(
            f"a GroupedTensor has no field {', '.join(unknown)}: the file was written by "
            f"grouped-kernels {written_by}, this is {version()}"
        )
    inner = {
        name: t.view(fmt.element.dtype)
        if name.startswith("_codes") and t.dtype == torch.uint8
        else t
        for name, t in inner.items()
    }
    self = GroupedTensor(
        *(shape, dtype, fmt, inner.get("_offs"), *_copies(fmt, inner), requires_grad),
        prepacked=prepacked,
        shapes=shapes,
    )
    if is_parameter:
        self._is_param = True
    return self


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
    """Make a tensor from the outputs of the quantize op; a compiled graph calls it as one node.

    It takes the format's text, for a node cannot be given a record that the compiled code makes.
    """
    fmt = parse(text)
    names: list[str] = []
    for is_asked, is_columnwise in ((rowwise, False), (columnwise, True)):
        names += fmt.buffer_names(is_columnwise) if is_asked else ()
    inner = {f"_{n}": t for n, t in zip(dict.fromkeys(names), buffers, strict=True)}
    if shapes is not None:
        # Symbols while tracing, of which the context cannot consist: this makes them constants.
        shapes = tuple((int(m), int(n)) for m, n in shapes)
    return GroupedTensor._of(shape, dtype, fmt, offs, *_copies(fmt, inner), shapes=shapes)


#: What ops do with a GroupedTensor: (op, *args, **kwargs) -> result. None stands for all others.
HANDLERS: dict[Any, Callable[..., Any]] = {}


def handler(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: what an op does when an argument is a GroupedTensor."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(ops, function))
        return function

    return register
