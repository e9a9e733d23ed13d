"""Fake tensors that stand for a grouped GEMM's arguments when it is compiled.

Extents that must agree at run time share one symbol; the compiled function checks them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_kernels.gemm.config import N_ALIGN
from cute_kernels.gemm.operands import DSL_TYPES
from cute_kernels.layout.shapes import PITCH_ALIGNMENT, SF_TILE_BYTES, TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.config import GemmConfig

__all__ = ["fake_arguments"]


def _compact(dtype: Any, *shape: Any, align: int = PITCH_ALIGNMENT) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def _pitched(dtype: Any, *shape: Any) -> Any:
    """A tensor whose last mode is contiguous and whose other strides are whole 16 bytes."""
    divisibility = PITCH_ALIGNMENT * 8 // dtype.width
    strides = [cute.sym_int64(divisibility=divisibility) for _ in shape[:-1]]
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=PITCH_ALIGNMENT)


def _scale_tiles(*lead: Any) -> Any:
    return _compact(cutlass.Uint8, *lead, cute.sym_int(), cute.sym_int(), SF_TILE_BYTES)


class _FakeArguments:
    """The arguments of one configuration over common symbols."""

    def __init__(self, config: GemmConfig):
        self.config = config
        self.is_ragged_k = config.grouping == "k_grouped"
        self.groups, self.rows = cute.sym_int(), cute.sym_int()
        # Contiguous extents of plain operands and of outputs are whole vectors.
        self.m = cute.sym_int(divisibility=1 if config.kind.is_block_scaled else N_ALIGN)
        self.n, self.k = (cute.sym_int(divisibility=N_ALIGN) for _ in range(2))

    def codes(self) -> tuple[Any, Any]:
        """Codes of quantized operands."""
        uint8 = cutlass.Uint8
        if self.is_ragged_k:
            width = cute.sym_int(divisibility=TILE_ROWS // 2)
            return _pitched(uint8, self.m, width), _pitched(uint8, self.n, width)
        # A columnwise copy is padded along K, so B may be wider than A.
        width = cute.sym_int(divisibility=N_ALIGN)
        return _pitched(uint8, self.rows, self.k), _pitched(uint8, self.groups, self.n, width)

    def expanded(self, dtype: str) -> Any:
        """The operand beside codes that comes as values."""
        rows = self.n if self.is_ragged_k else self.rows
        return _pitched(DSL_TYPES[dtype], rows, cute.sym_int(divisibility=TILE_ROWS))

    def matrices(self) -> tuple[Any, Any]:
        """Plain operands."""
        dtype = DSL_TYPES[self.config.operand]
        if self.is_ragged_k:
            return _pitched(dtype, self.rows, self.m), _pitched(dtype, self.rows, self.n)
        b = (self.k, self.n) if self.config.transpose_b else (self.n, self.k)
        return _pitched(dtype, self.rows, self.k), _pitched(dtype, self.groups, *b)

    def per_group(self) -> Any:
        """(G,) fp32."""
        return _compact(cutlass.Float32, self.groups, align=4)

    def out(self) -> Any:
        """The output."""
        dtype = DSL_TYPES[self.config.out_dtype]
        if self.is_ragged_k:
            return _pitched(dtype, self.groups, self.m, self.n)
        return _pitched(dtype, self.rows, self.n)


def fake_arguments(config: GemmConfig) -> tuple[Any, ...]:
    """Stand-ins for the arguments of ``GroupedGemmKernel.__call__``."""
    fake = _FakeArguments(config)
    a_scales = a_amax = b_scales = b_amax = bias = None
    if config.kind.is_block_scaled:
        a, b = fake.codes()
        a_scales = _scale_tiles()
        b_scales = _scale_tiles() if fake.is_ragged_k else _scale_tiles(fake.groups)
        a_amax = b_amax = fake.per_group()
        if config.row_scaled:
            a_amax = _compact(cutlass.Float32, fake.rows, align=4)
        if config.expanded == "a":
            a, a_scales = fake.expanded(config.multiplied), None
        if config.expanded == "b":
            b, b_scales = fake.expanded(config.multiplied), None
        if config.activations is not None:
            a_amax = None
    else:
        a, b = fake.matrices()
    if config.bias_dtype is not None:
        bias = _compact(DSL_TYPES[config.bias_dtype], fake.groups, fake.n)
    offs = _compact(cutlass.Int32, fake.groups, align=4)
    alpha = fake.per_group() if config.has_alpha else None
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return (
        *(a, a_scales, a_amax, b, b_scales, b_amax),
        *(offs, bias, alpha, fake.out(), Int32(1), stream),
    )
