"""Fake tensors that stand for a grouped GEMM's arguments when it is compiled.

Extents that must agree at run time share one symbol; the compiled function checks them.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_kernels.gemm.config import N_ALIGN, GemmConfig
from cute_kernels.shapes import PITCH_ALIGNMENT, SF_TILE_BYTES, TILE_ROWS

__all__ = ["fake_arguments"]

_DSL_TYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
}


def _compact(dtype: Any, *shape: Any, align: int = PITCH_ALIGNMENT) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def _pitched(dtype: Any, *shape: Any) -> Any:
    """A tensor whose last mode is contiguous and whose other strides are whole 16 bytes."""
    divisibility = PITCH_ALIGNMENT * 8 // dtype.width
    strides = [cute.sym_int64(divisibility=divisibility) for _ in shape[:-1]]
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=PITCH_ALIGNMENT)


def fake_arguments(config: GemmConfig) -> tuple[Any, ...]:
    """Stand-ins for the arguments of ``GroupedGemmKernel.__call__``."""
    groups, rows = cute.sym_int(), cute.sym_int()
    n = cute.sym_int(divisibility=N_ALIGN)
    per_group = _compact(cutlass.Float32, groups, align=4)
    out_type = _DSL_TYPES[config.out_dtype]
    codes_k = cute.sym_int(divisibility=config.kind.sf_vec_size * config.kind.bits // 8)
    if config.grouping == "m_grouped":
        a = _pitched(cutlass.Uint8, rows, codes_k)
        # A columnwise copy is padded along K, so it may be wider than A.
        b = _pitched(cutlass.Uint8, groups, n, cute.sym_int(divisibility=8))
        b_scales = _compact(cutlass.Uint8, groups, cute.sym_int(), cute.sym_int(), SF_TILE_BYTES)
        out = _pitched(out_type, rows, n)
        amax_a = _compact(cutlass.Float32, rows if config.row_scaled else groups, align=4)
    else:
        m, width = cute.sym_int(), cute.sym_int(divisibility=TILE_ROWS // 2)
        a, b = _pitched(cutlass.Uint8, m, width), _pitched(cutlass.Uint8, n, width)
        b_scales = _compact(cutlass.Uint8, cute.sym_int(), cute.sym_int(), SF_TILE_BYTES)
        out = _pitched(out_type, groups, m, n)
        amax_a = per_group
    bias = _compact(_DSL_TYPES[config.bias_dtype], groups, n) if config.bias_dtype else None
    return (
        a,
        _compact(cutlass.Uint8, cute.sym_int(), cute.sym_int(), SF_TILE_BYTES),
        amax_a,
        b,
        b_scales,
        per_group,
        _compact(cutlass.Int32, groups, align=4),
        bias,
        per_group if config.has_alpha else None,
        out,
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
