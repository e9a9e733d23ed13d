"""Fake tensors that stand for the buffers of the layout contract when a kernel is compiled.

Extents that must agree at run time share one symbol; the compiled function checks them.
"""

from typing import Any

from cutlass import Float8E4M3FN, Float8E5M2, Float16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.device.launch import DSL_TYPES, compact
from cute_kernels.formats import parse
from cute_kernels.layout.shapes import PIECE_K, PITCH_ALIGNMENT, SF_TILE_BYTES, scale_tiles
from cute_kernels.layout.slots import TILE_ROWS

from .config import K_MULTIPLE
from .global_scales import GLOBAL_SCALE_BUFFERS
from .prologue import Prologue

#: 32-byte vector stores; torch aligns its allocations to 64 bytes or more.
_ALIGN = 32
#: The type of a buffer of codes, by element.
_CODE_DTYPES = {"e2m1": Uint8, "e4m3": Float8E4M3FN, "e5m2": Float8E5M2}


def _compact(dtype: Any, *shape: Any) -> Any:
    return compact(dtype, *shape, align=_ALIGN)


class FakeBuffers:
    """The buffers of one quantization with shared symbols, made on demand; without a format only
    the plain side.
    """

    def __init__(self, dtype: str, grouping: str, format: str | None = None):
        self.dtype = dtype
        self.uniform = grouping == "uniform"
        self.fmt = None if format is None else parse(format)
        self.rows = cute.sym_int()
        self.groups = cute.sym_int()
        self.rows_each = cute.sym_int()
        multiple = K_MULTIPLE if self.fmt is None else self.fmt.k_multiple
        self.cols = cute.sym_int(divisibility=multiple)
        self.slot_tiles = cute.sym_int()
        self.scale_tiles = cute.sym_int()
        #: The first dimension of what uniform groups have one each of.
        self.lead = (self.groups,) if self.uniform else ()

    def x(self, prologue: Prologue | None = None) -> Any:
        """(T, K), or (G, N, K); as wide as a prologue asks."""
        if prologue is None:
            return self._plain(self.dtype, self.cols)
        wide = cute.sym_int(divisibility=2 * K_MULTIPLE) if prologue.is_gated else self.cols
        if prologue.gathered:
            return _compact(DSL_TYPES[prologue.dtype], cute.sym_int(), wide)
        return self._plain(prologue.dtype, wide)

    def index(self, prologue: Prologue | None) -> Any:
        """(T,) int32 rows, None if a prologue takes none."""
        return (
            compact(Int32, self.rows, align=4)
            if prologue is not None and prologue.gathered
            else None
        )

    def _plain(self, dtype: str, cols: Any) -> Any:
        lead = (self.groups, self.rows_each) if self.uniform else (self.rows,)
        return _compact(DSL_TYPES[dtype], *lead, cols)

    def offs(self) -> Any:
        return None if self.uniform else compact(Int32, self.groups, align=4)

    def level(self, per_row: bool = False) -> Any:
        """(G,) fp32, or one a row; None if the format has no second level."""
        if self.fmt is not None and self.fmt.global_scale is None:
            return None
        # Uniform groups have G * N rows; no symbol says that.
        extent = (cute.sym_int() if self.uniform else self.rows) if per_row else self.groups
        return compact(Float32, extent, align=4)

    def seed(self) -> Any:
        return compact(Int64, 2, align=8)

    def results(self) -> tuple[Any, ...]:
        """(G,) fp32 scale_inv, scale and amax, None each where the format does not keep it.

        The amax is a result where scales are given.
        """
        level = self.fmt.global_scale
        kept = () if level is None else level.buffers
        made = [name in kept for name in GLOBAL_SCALE_BUFFERS] + [self.fmt.has_given_scale]
        return tuple(self.level() if is_made else None for is_made in made)

    def codes(self) -> Any:
        """The rowwise copy: (T, K) or (G, N, K) codes, of padded pitch."""
        width = self.cols
        if self.fmt.element.per_byte > 1:
            width = cute.sym_int(divisibility=self._bytes(self.fmt.k_multiple))
        return self._pitched(self.rows_each if self.uniform else self.rows, width)

    def _pitched(self, rows: Any, width: Any) -> Any:
        stride = [cute.sym_int64(divisibility=PITCH_ALIGNMENT) for _ in (rows, *self.lead)]
        return make_fake_tensor(
            self._code_dtype(), (*self.lead, rows, width), (*stride[::-1], 1), assumed_align=_ALIGN
        )

    def values(self) -> Any:
        """(T, K up to a multiple of 128) fp16."""
        return _compact(Float16, self.rows, cute.sym_int(divisibility=PIECE_K))

    def scales(self) -> Any:
        """(tiles, tiles along K, 512) uint8; or MN-major fp32, (blocks along K, P); or None.

        With the group first when uniform. Of square blocks MN-major ones are (P / block, blocks).
        """
        if self.fmt.scale is None:
            return None
        if not self.fmt.has_scale_tiles:
            return self._mn_major(cute.sym_int(), cute.sym_int(divisibility=TILE_ROWS))
        return self._scale_bytes(self.slot_tiles, self.scale_tiles)

    def codes_t(self) -> Any:
        """The columnwise copy: (K, P) or (G, K, P) codes, or untransposed (P, K) or (G, P, K)."""
        slots = cute.sym_int(divisibility=self._bytes(TILE_ROWS))
        if self.fmt.columnwise == "transposed":
            return _compact(self._code_dtype(), *self.lead, self.cols, slots)
        return self._pitched(slots, self.cols)

    def scales_t(self) -> Any:
        """(ceil(K/128), tiles along P, 512) uint8; or MN-major fp32, (P / block, K); or None; else
        as ``scales``.
        """
        if self.fmt.scale is None:
            return None
        if not self.fmt.has_scale_tiles:
            return self._mn_major(cute.sym_int(), self.cols)
        along_rows = scale_tiles(TILE_ROWS, self.fmt.scale.vec_size)
        column_tiles, block_tiles = cute.sym_int(), cute.sym_int(divisibility=along_rows)
        return self._scale_bytes(column_tiles, block_tiles)

    def _mn_major(self, blocks: Any, along: Any) -> Any:
        """fp32 scales of blocks, as many as ``along``; of square blocks in two dimensions."""
        width = cute.sym_int() if self.fmt.is_2d else along
        return _compact(Float32, *self.lead, blocks, width)

    def _scale_bytes(self, *tiles: Any) -> Any:
        return _compact(Uint8, *self.lead, *tiles, SF_TILE_BYTES)

    def _bytes(self, elements: int) -> int:
        return elements * self.fmt.element.bits // 8

    def _code_dtype(self) -> Any:
        return _CODE_DTYPES[self.fmt.element.name]
