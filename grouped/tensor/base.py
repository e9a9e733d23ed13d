"""Data and metadata of a ``GroupedTensor``: its plain tensors, its format and its groups."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor

from cute_kernels import prepack, unpack
from cute_kernels.formats import Format, parse

from .members import GroupedMember, QuantizedCopy, group_spans, member, shaped_members
from .shapes import MemberShapes, shape_tensors

#: Metadata of a tensor beside its plain tensors: format, dtype, prepacked, member shapes.
Context: TypeAlias = "tuple[Format, torch.dtype, bool, MemberShapes | None]"
T = TypeVar("T", bound="GroupedTensorBase")
#: Message for requests of the memory of a GroupedTensor, and alternatives.
NO_MEMORY = (
    "a GroupedTensor has no memory of its own: its bytes are several plain tensors. To write it, "
    "use torch.save, "
    "grouped.checkpoint.save, or safetensors with to_parts(), which GroupedTensor.from_parts "
    "undoes; accelerate offloads "
    "it to the CPU (cpu_offload), not to disk. Its values as a plain tensor are .dequantize()"
)
#: Number of groups whose shapes ``repr`` shows.
_MAX_SHOWN_SHAPES = 4


@functools.cache
def inner_names(format_text: str) -> tuple[str, ...]:
    """Return the attributes that hold the plain tensors: the format's buffers, and offs."""
    fmt = parse(format_text)
    names = (*fmt.buffer_names(columnwise=False), *fmt.buffer_names(columnwise=True), "offs")
    return tuple(dict.fromkeys(f"_{name}" for name in names))


class GroupedTensorBase(Tensor):
    """Plain tensors of a quantized grouped tensor, and the metadata that says how to read them.

    Attributes:
        format: Format record; it has everything that a reader of the bytes needs.
        prepacked: True if the codes have the bit order of ``prepack``.
    """

    format: Format
    prepacked: bool
    _offs: Tensor | None
    _shapes: MemberShapes | None
    _shape_tensors: tuple[Tensor, Tensor] | None
    #: Names of the attributes that hold plain tensors.
    _names: tuple[str, ...]
    #: Everything but metadata of the plain tensors that decides how kernels read them.
    _layout: tuple[str | bool, ...]

    def _set_inner(
        self, fmt: Format, prepacked: bool, shapes: MemberShapes | None, inner: dict[str, Any]
    ) -> None:
        """Set the format, the shapes of the groups, and the plain tensors by attribute name."""
        self.format, self.prepacked = fmt, prepacked
        self._shapes, self._shape_tensors = shapes, None
        for name in inner_names(fmt.text):
            setattr(self, name, inner.get(name))
        # Store both, since each call of a layer reads them.
        self._names = tuple(name for name in inner_names(fmt.text) if inner.get(name) is not None)
        self._layout = (fmt.text, prepacked, *self._names)

    def _inner(self) -> dict[str, Tensor]:
        """Return the plain tensors by attribute name."""
        # Attributes of tensors take three times as long as a dict.
        attributes = self.__dict__
        return {name: attributes[name] for name in attributes["_names"]}

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        return list(self._inner()), (self.format, self.dtype, self.prepacked, self._shapes)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: Context,
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> Any:
        raise NotImplementedError

    def _rewrap(
        self: T,
        inner: dict[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
        prepacked: bool | None = None,
    ) -> T:
        """Return a tensor with the metadata of this one around other plain tensors."""
        is_prepacked = self.prepacked if prepacked is None else prepacked
        context = (self.format, dtype or self.dtype, is_prepacked, self._shapes)
        size = self.shape if shape is None else shape
        return self.__tensor_unflatten__(inner, context, size, ())

    def _apply_inner(
        self: T, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> T:
        """Return the tensor around the results of a function of each plain tensor."""
        return self._rewrap({name: function(t) for name, t in self._inner().items()}, dtype=dtype)

    # ---- groups

    @property
    def offs(self) -> Tensor | None:
        """(G,) int32 end row of each group, on the device, or None when it is not ragged."""
        return self._offs

    @property
    def grouping(self) -> Literal["uniform", "ragged", "shapes"]:
        """Kind of grouping: by the first dimension, by ``offs`` or by ``shapes``."""
        if self._shapes is not None:
            return "shapes"
        return "uniform" if self._offs is None else "ragged"

    @property
    def member_shapes(self) -> MemberShapes | None:
        """Shapes (m, n) of the groups, on the host. None if the groups have no own shapes."""
        return self._shapes

    @property
    def shapes(self) -> Tensor | None:
        """(G, 2) int64 ``member_shapes``, on the device; read-only."""
        return None if self._shapes is None else self._device_shapes(self._shapes)[0]

    @property
    def element_offsets(self) -> Tensor | None:
        """(G + 1,) int64 on the device: first element of each group with ``shapes``, and the end.

        Counted in elements of the decoded tensor; read-only.
        """
        return None if self._shapes is None else self._device_shapes(self._shapes)[1]

    def _device_shapes(self, shapes: MemberShapes) -> tuple[Tensor, Tensor]:
        if self._shape_tensors is None:
            tensors = shape_tensors(shapes, self.device)
            if type(tensors[0]) is not Tensor:
                return tensors  # Fake tensors must not outlive their mode.
            self._shape_tensors = tensors
        return self._shape_tensors

    @property
    def num_groups(self) -> int:
        """Number of groups, G."""
        if self._shapes is not None:
            return len(self._shapes)
        return self.shape[0] if self._offs is None else self._offs.shape[0]

    @property
    def _is_empty(self) -> bool:
        """True for a uniform tensor without groups: a rank's part of few groups."""
        groups = self.shape[0]
        return self.grouping == "uniform" and type(groups) is int and groups == 0

    # ---- copies

    @property
    def rowwise(self) -> QuantizedCopy | None:
        """Copy with blocks along K, or None if there is none."""
        return self._copy(columnwise=False)

    @property
    def columnwise(self) -> QuantizedCopy | None:
        """Copy with blocks along the rows of each group, or None if there is none."""
        return self._copy(columnwise=True)

    def _copy(self, columnwise: bool) -> QuantizedCopy | None:
        codes, *scales = (getattr(self, f"_{n}") for n in self.format.buffer_names(columnwise))
        return None if codes is None else QuantizedCopy(self.format, [codes, *scales])

    @property
    def amax(self) -> Tensor | None:  # type: ignore[override]
        """Amaxes of the rowwise copy, or of the columnwise one, or None if the format has none.

        (G,) fp32, or one per row if row-scaled. The global scales follow from them. The name hides
        the method ``torch.Tensor.amax``: call ``dequantize().amax()`` for that reduction.
        """
        copy = self.rowwise or self.columnwise
        return getattr(copy, "amax", None)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all plain tensors, ``offs`` included.

        ``element_size()`` and ``itemsize`` are those of ``dtype``, the decoded element: four bits
        and a share of a scale are no whole number of bytes, and PyTorch's sums over parameters take
        the size from the dtype.
        """
        return sum(t.nbytes for t in self._inner().values())

    def _stable_hash_for_caching(self) -> str:
        """Return a hash of everything that a graph depends on, equal in all processes.

        PyTorch's cache of compiled graphs calls it.
        """
        inner = [
            (name, t.dtype, t.device, *map(str, (*t.shape, *t.stride())))
            for name, t in self._inner().items()
        ]
        metadata = (
            tuple(map(str, self.shape)),
            self.dtype,
            self.format.text,
            self.prepacked,
            self._shapes,
        )
        text = repr((metadata, self.requires_grad, inner))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        directions = [d for d in ("rowwise", "columnwise") if getattr(self, d) is not None]
        kind: str = self.grouping
        if self._shapes is not None:
            shown = ", ".join(map(str, self._shapes[:_MAX_SHOWN_SHAPES]))
            kind = f"shapes=[{shown}{', ...' * (self.num_groups > _MAX_SHOWN_SHAPES)}]"
        return (
            f"GroupedTensor({tuple(self.shape)}, {kind}, num_groups={self.num_groups}, "
            f"format={self.format}, {' + '.join(directions)}{', prepacked' * self.prepacked}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    # ---- weights and members

    def prepack(self: T) -> T:
        """Return the same weights with their codes in the order that sm_90a multiplies fastest.

        Values, shapes and sizes stay, and so do the bits of products with quantized activations.
        Call it once, when weights are loaded. Other architectures and W4A16 do not accept such
        weights, and other ops undo it first.

        Raises:
            ValueError: This tensor is not uniform or is row-scaled, and so no weight; or its codes
                do not share bytes.
        """
        if self.grouping != "uniform":
            raise ValueError(f"only uniform weights can be prepacked, got {self!r}")
        level = self.format.global_scale
        if self.format.element.per_byte == 1 or (level is not None and level.per == "row"):
            raise ValueError(f"{self.format} cannot be combined with prepacked")
        return self if self.prepacked else self._reordered(prepack)

    def unpack(self: T) -> T:
        """Return this tensor with codes in the order of the layout contract: undo ``prepack``."""
        return self._reordered(unpack) if self.prepacked else self

    def _reordered(self: T, reorder: Callable[[Tensor], Tensor]) -> T:
        """Return the tensor with its codes in the other bit order."""
        inner = {
            name: reorder(t) if name.startswith("_codes") else t
            for name, t in self._inner().items()
        }
        return self._rewrap(inner, prepacked=not self.prepacked)

    def member(self, group: int) -> GroupedMember:
        """Return codes and linear scales of one group, for people and tests.

        Reads ``offs`` on the host, so on a GPU it synchronizes.

        Raises:
            IndexError: ``group`` is not in [-G, G).
            RuntimeError: The stream is being captured into a CUDA graph.
        """
        if not -self.num_groups <= group < self.num_groups:
            raise IndexError(f"group must be in [0, {self.num_groups}), got {group}")
        return self._members([group])[0]

    def unbind(self, dim: int = 0) -> tuple[GroupedMember, ...]:  # type: ignore[override]
        """Return all members in order; reads ``offs`` on the host once, as ``member`` does."""
        if dim != 0:
            raise ValueError(f"dim must be 0, the groups, got {dim}")
        return self._members(range(self.num_groups))

    def _members(self, groups: Sequence[int]) -> tuple[GroupedMember, ...]:
        """Return members by their group numbers."""
        x = self.unpack()
        fmt, copies = x.format, (x.rowwise, x.columnwise)
        if x._shapes is not None:
            return tuple(shaped_members(groups, fmt, x._shapes, *copies))
        spans = group_spans(x._offs, x.shape)
        return tuple(member(spans[group], fmt, x.shape[-1], *copies) for group in groups)

    # ---- memory

    def share_memory_(self: T) -> T:
        """Move the plain tensors to shared memory and return self."""
        self._apply_inner(Tensor.share_memory_)
        return self

    def is_shared(self) -> bool:
        """Return True if the plain tensors are in shared memory."""
        return all(t.is_shared() for t in self._inner().values())

    def storage(self) -> NoReturn:
        """Raise: there is no storage of all bytes. safetensors asks for it."""
        raise TypeError(NO_MEMORY)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise, as PyTorch does for subclasses. accelerate asks for it to offload to disk."""
        raise RuntimeError(NO_MEMORY)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(NO_MEMORY)  # PyTorch would return a null pointer.

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        raise AttributeError(NO_MEMORY)  # PyTorch would return a null pointer.
