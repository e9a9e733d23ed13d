"""The output, and the factors and terms that are applied on the way to it.

The factors are folded first, ``f = fl(fl(amax_a * c) * fl(amax_b * c))`` with ``c`` the factor of
the operands' global scale, 1/2688 for NVFP4, times alpha if there is one. Then each element is
``cast(fl(fl(fl(acc * f) + bias) + out))``. Every product and sum is rounded by itself. An
activation is applied to the cast element, so that its bits are those of a kernel that reads it from
memory.
"""

from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from .config import GemmConfig
from .loader import TmaSource
from .problem import GemmArguments
from .views import output_view

#: Bytes that a thread stores at once.
VECTOR_BYTES = 16


class EpilogueTensors(NamedTuple):
    """Tensors that the epilogue reads and writes. Tensors that a product does not have are None.

    Attributes:
        out: (T, N) as (1, T, N), or (G, M, N) of a k_grouped product, with rows of any pitch.
        amax_a: (G,) or (T,) fp32. The amaxes that stand for the global scale of A.
        amax_b: (G,) fp32.
        alpha: (G,) fp32.
        bias: (G, N).
        z: Stored preactivation, (1, T, N).
        scales: Block scales of a quantized output.
        global_scale: (G,) fp32. The amaxes to which block scales of the output are relative.
    """

    out: cute.Tensor
    amax_a: cute.Tensor | None
    amax_b: cute.Tensor | None
    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    z: cute.Tensor | None = None
    scales: cute.Tensor | None = None
    global_scale: cute.Tensor | None = None

    @classmethod
    def from_arguments(cls, x: GemmArguments) -> "EpilogueTensors":
        """Return the tensors among a kernel's arguments."""
        z = None if x.z is None else output_view(x.z)
        return cls(
            output_view(x.out),
            x.a_amax,
            x.b_amax,
            x.alpha,
            x.bias,
            z,
            x.out_scales,
            x.out_global_scale,
        )

    @cute.jit
    def factor(self, config: GemmConfig, group: Int32, index: Int32) -> Float32:
        """Return the f of the module for a group; ``index`` is that of A's amax, a row or group."""
        factor = Float32(1.0)
        if const_expr(self.amax_b is not None):
            factor = self.amax_b[group] * Float32(config.b_kind.global_scale_factor)
        if const_expr(self.amax_a is not None):
            factor = (self.amax_a[index] * Float32(config.kind.global_scale_factor)) * factor
        if const_expr(self.alpha is not None):
            factor = factor * self.alpha[group]
        return factor

    def columns(self, config: GemmConfig) -> Int32:
        """Return the columns of the output, in elements of the result."""
        return self.out.shape[2] * config.per_element

    @property
    def has_factor(self) -> bool:
        """True if accumulators are multiplied by a factor."""
        return self.amax_b is not None or self.alpha is not None


class OutputStore(NamedTuple):
    """TMA stores of blocks of rows, staged as (rows, columns, stages) of all warps.

    Coordinates are (rows, N, G or 1). The last one is the half if columns have two halves.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor
    shared: cute.Tensor

    @cute.jit
    def copy(self, slot: Int32, row: Int32, col: Int32, group: Any) -> None:
        """Store the block in ``slot`` from (``row``, ``col``) on, clipped to the output."""
        origin = cute.domain_offset((row, col, group), self.tensor)
        shape = tuple(cute.size(self.shared, mode=[i]) for i in range(2))
        target = cute.local_tile(origin, shape, (0, 0, 0))
        source, target = cpasync.tma_partition(
            self.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.shared, 0, 2),
            cute.group_modes(target, 0, 2),
        )
        cute.copy(self.atom, source[None, slot], target)


def store_source(out: cute.Tensor, staged: Any, halves: int = 1) -> TmaSource:
    """Return the TMA store of one block of ``out``.

    Args:
        out: (G, rows, N).
        staged: Layout of the staged blocks.
        halves: 2 if the columns are two halves, which become the last coordinate instead of G.

    Returns:
        The copy, and its coordinates (rows, N, G or halves).
    """
    groups, rows, cols = out.shape
    last_stride, *stride = out.stride
    if halves > 1:
        groups, cols = halves, cols // halves
        last_stride = cute.assume(Int64(cols), VECTOR_BYTES * 8 // out.element_type.width)
    tensor = cute.make_tensor(
        out.iterator, cute.make_layout((rows, cols, groups), stride=(*stride, last_stride))
    )
    block = cute.slice_(staged, (None, None, 0))
    shape = tuple(cute.size(staged, mode=[i]) for i in range(2))
    return TmaSource(
        *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, block, shape)
    )


def vector_at(tensor: cute.Tensor, offset: Int64, size: int) -> cute.Tensor:
    """Return ``size`` elements of ``tensor`` from element ``offset`` on, aligned to 16 bytes."""
    width = tensor.element_type.width // 8
    address = tensor.iterator.toint() + offset * width
    align = min(VECTOR_BYTES, size * width)
    pointer = cute.make_ptr(
        tensor.element_type, address, cute.AddressSpace.gmem, assumed_align=align
    )
    return cute.make_tensor(pointer, cute.make_layout(size))


def out_offset(config: GemmConfig, out: cute.Tensor, group: Int32, row: Int32, col: Int32) -> Int64:
    """Return the offset of an element in ``out``, (1, T, N) or (G, M, N), in elements."""
    offset = Int64(row) * out.stride[1] + col
    if config.grouping == "k_grouped":
        offset += Int64(group) * out.stride[0]
    return offset
