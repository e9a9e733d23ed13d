"""Fake tensors that stand for the buffers of the layout contract when a kernel is compiled.

Extents that must agree at run time share one symbol; the compiled function checks them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cutlass import BFloat16, Float16, Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_kernels.formats import NVFP4
from cute_kernels.layout.shapes import PIECE_K, PITCH_ALIGNMENT, SF_TILE_BYTES

__all__ = ["FakeBuffers", "dsl_dtype", "env_stream"]

#: 32-byte vector stores; torch aligns its allocations to 64 bytes or more.
_ALIGN = 32


_DSL_DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}


def dsl_dtype(name: str) -> Any:
    """The DSL type of a dtype name."""
    return _DSL_DTYPES[name]


def env_stream() -> Any:
    """The stream that is current when the compiled function is called."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


def _compact(dtype: Any, *shape: Any) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=_ALIGN)


@dataclasses.dataclass
class FakeBuffers:
    """The buffers of one quantization with shared symbols, made on demand."""

    dtype: str
    uniform: bool

    def __post_init__(self) -> None:
        self.rows = cute.sym_int()
        self.groups = cute.sym_int()
        self.rows_each = cute.sym_int()
        self.cols = cute.sym_int(divisibility=NVFP4.sf_vec_size)
        self.slot_tiles = cute.sym_int()
        self.scale_tiles = cute.sym_int()

    def x(self) -> Any:
        """(T, K), or (G, N, K)."""
        lead = (self.groups, self.rows_each) if self.uniform else (self.rows,)
        return _compact(dsl_dtype(self.dtype), *lead, self.cols)

    def offs(self) -> Any:
        """(G,) int32, or None."""
        if self.uniform:
            return None
        return make_fake_compact_tensor(Int32, (self.groups,), assumed_align=4)

    def amax(self, per_row: bool = False) -> Any:
        """(G,) fp32, or one a row."""
        # Uniform groups have G * N rows; no symbol says that.
        extent = (cute.sym_int() if self.uniform else self.rows) if per_row else self.groups
        return make_fake_compact_tensor(Float32, (extent,), assumed_align=4)

    def codes(self) -> Any:
        """(T, K/2) or (G, N, K/2) uint8 of padded pitch."""
        half = cute.sym_int(divisibility=NVFP4.sf_vec_size // 2)
        pitch = cute.sym_int64(divisibility=PITCH_ALIGNMENT)
        shape: tuple[Any, ...] = (self.rows, half)
        stride: tuple[Any, ...] = (pitch, 1)
        if self.uniform:
            shape = (self.groups, self.rows_each, half)
            stride = (cute.sym_int64(divisibility=PITCH_ALIGNMENT), pitch, 1)
        return make_fake_tensor(Uint8, shape, stride, assumed_align=_ALIGN)

    def values(self) -> Any:
        """(T, K up to a multiple of 128) fp16."""
        wide = cute.sym_int(divisibility=PIECE_K)
        return _compact(Float16, self.rows, wide)

    def scales(self) -> Any:
        """(tiles, ceil(K/64), 512) uint8, with the group first when uniform."""
        lead = (self.groups,) if self.uniform else ()
        return _compact(Uint8, *lead, self.slot_tiles, self.scale_tiles, SF_TILE_BYTES)

    def codes_t(self) -> Any:
        """(K, 64 * tiles) or (G, K, 64 * tiles) uint8."""
        lead = (self.groups,) if self.uniform else ()
        return _compact(Uint8, *lead, self.cols, cute.sym_int(divisibility=64))

    def scales_t(self) -> Any:
        """(ceil(K/128), 2 * tiles, 512) uint8, with the group first when uniform."""
        lead = (self.groups,) if self.uniform else ()
        column_tiles, block_tiles = cute.sym_int(), cute.sym_int(divisibility=2)
        return _compact(Uint8, *lead, column_tiles, block_tiles, SF_TILE_BYTES)
