"""Fake tensors that stand for the buffers of quantized tensors when a kernel is compiled.

Extents that must be equal at run time share one symbol; the compiled function checks them.
"""

from typing import Any

from cutlass import Float8E4M3FN, Float8E5M2, Float16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.device.launch import DSL_TYPES, compact
from cute_kernels.formats import parse
from cute_kernels.layout.shapes import DECODED_CHUNK_K, PITCH_ALIGNMENT, SF_TILE_BYTES, scale_tiles
from cute_kernels.layout.slots import TILE_ROWS

from .config import K_MULTIPLE
from .global_scales import GLOBAL_SCALE_BUFFERS
from .prologue import Prologue

#: 32-byte vector stores; torch aligns its allocations to 64 bytes or more.
_ALIGN = 32
#: DSL type of a buffer of codes, by element type.
_CODE_DTYPES = {"e2m1": Uint8, "e4m3": Float8E4M3FN, "e5m2": Float8E5M2}


def _compact(dtype: Any, *shape: Any) -> Any:
    return compact(dtype, *shape, align=_ALIGN)


class FakeBuffers:
    """Fake buffers of one quantized tensor, with shared symbols.

    Args:
        dtype: Data type of the plain tensor.
        grouping: ``"ragged"`` or ``"uniform"``.
        format: Canonical text of the format. None if only the plain tensor is needed.
    """

    def __init__(self, dtype: str, grouping: str, format: str | None = None):
        self.dtype = dtype
        self.uniform = grouping == "uniform"
        self.fmt = None if format is None else parse(format)
        self.rows = cute.sym_int()
        self.groups = cute.sym_int()
        self.rows_per_group = cute.sym_int()
        multiple = K_MULTIPLE if self.fmt is None else self.fmt.k_multiple
        self.cols = cute.sym_int(divisibility=multiple)
        self.slot_tiles = cute.sym_int()
        self.scale_tiles = cute.sym_int()
        #: Leading dimensions of buffers with one matrix per uniform group.
        self.lead = (self.groups,) if self.uniform else ()

    def x(self, prologue: Prologue | None = None) -> Any:
        """Return the input, (T, K) or (G, N, K). Its width and dtype follow from the prologue."""
        if prologue is None:
            return self._plain(self.dtype, self.cols)
        wide = cute.sym_int(divisibility=2 * K_MULTIPLE) if prologue.is_gated else self.cols
        if prologue.gathered:
            return _compact(DSL_TYPES[prologue.dtype], cute.sym_int(), wide)
        return self._plain(prologue.dtype, wide)

    def index(self, prologue: Prologue | None) -> Any:
        """Return (T,) int32 rows of the input, or None if the prologue does not gather."""
        return (
            compact(Int32, self.rows, align=4)
            if prologue is not None and prologue.gathered
            else None
        )

    def _plain(self, dtype: str, cols: Any) -> Any:
        """Return a plain tensor with ``cols`` columns."""
        lead = (self.groups, self.rows_per_group) if self.uniform else (self.rows,)
        return _compact(DSL_TYPES[dtype], *lead, cols)

    def offs(self) -> Any:
        """Return (G,) int32 end rows, or None if groups are uniform."""
        return None if self.uniform else compact(Int32, self.groups, align=4)

    def global_scale(self, per_row: bool = False) -> Any:
        """Return (G,) or (T,) fp32 global scales, or None if the format has none."""
        if self.fmt is not None and self.fmt.global_scale is None:
            return None
        # Uniform groups have G * N rows; no symbol says that.
        extent = (cute.sym_int() if self.uniform else self.rows) if per_row else self.groups
        return compact(Float32, extent, align=4)

    def seed(self) -> Any:
        """Return the (2,) int64 seed of stochastic rounding."""
        return compact(Int64, 2, align=8)

    def global_scale_outputs(self) -> tuple[Any, ...]:
        """Return (G,) fp32 scale_inv, scale and amax.

        Each is None if the format does not store it. The amax is an output only if the caller gives
        scales.
        """
        global_scale = self.fmt.global_scale
        stored = () if global_scale is None else global_scale.buffers
        has_output = [name in stored for name in GLOBAL_SCALE_BUFFERS] + [self.fmt.has_given_scale]
        return tuple(self.global_scale() if is_output else None for is_output in has_output)

    def codes(self) -> Any:
        """Return the rowwise codes, (T, K) or (G, N, K), with a padded pitch."""
        width = self.cols
        if self.fmt.element.per_byte > 1:
            width = cute.sym_int(divisibility=self._bytes(self.fmt.k_multiple))
        return self._pitched(self.rows_per_group if self.uniform else self.rows, width)

    def _pitched(self, rows: Any, width: Any) -> Any:
        """Return codes whose rows have an aligned pitch of their own."""
        stride = [cute.sym_int64(divisibility=PITCH_ALIGNMENT) for _ in (rows, *self.lead)]
        return make_fake_tensor(
            self._code_dtype(), (*self.lead, rows, width), (*stride[::-1], 1), assumed_align=_ALIGN
        )

    def values(self) -> Any:
        """Return fp16 values, (T, K rounded up to a multiple of 128)."""
        return _compact(Float16, self.rows, cute.sym_int(divisibility=DECODED_CHUNK_K))

    def scales(self) -> Any:
        """Return the rowwise block scales, with the group as a first dimension if uniform.

        Returns:
            (tiles, tiles along K, 512) uint8; or MN-major fp32, (blocks along K, P), of square
            blocks (P / block, blocks); or None if blocks have no scales.
        """
        if self.fmt.scale is None:
            return None
        if not self.fmt.has_scale_tiles:
            return self._mn_major(cute.sym_int(), cute.sym_int(divisibility=TILE_ROWS))
        return self._scale_bytes(self.slot_tiles, self.scale_tiles)

    def codes_t(self) -> Any:
        """Return the columnwise codes, ([G,] K, P), or ([G,] P, K) if not transposed."""
        slots = cute.sym_int(divisibility=self._bytes(TILE_ROWS))
        if self.fmt.columnwise == "transposed":
            return _compact(self._code_dtype(), *self.lead, self.cols, slots)
        return self._pitched(slots, self.cols)

    def scales_t(self) -> Any:
        """Return the columnwise block scales, with the group as a first dimension if uniform.

        Returns:
            (ceil(K / 128), tiles along P, 512) uint8; or MN-major fp32, (P / block, K); or None.
        """
        if self.fmt.scale is None:
            return None
        if not self.fmt.has_scale_tiles:
            return self._mn_major(cute.sym_int(), self.cols)
        along_rows = scale_tiles(TILE_ROWS, self.fmt.scale.vec_size)
        column_tiles, block_tiles = cute.sym_int(), cute.sym_int(divisibility=along_rows)
        return self._scale_bytes(column_tiles, block_tiles)

    def _mn_major(self, blocks: Any, count: Any) -> Any:
        """Return fp32 scales, ``blocks`` rows of ``count``.

        Square blocks have a width of their own.
        """
        width = cute.sym_int() if self.fmt.is_2d else count
        return _compact(Float32, *self.lead, blocks, width)

    def _scale_bytes(self, *tiles: Any) -> Any:
        """Return scale tiles."""
        return _compact(Uint8, *self.lead, *tiles, SF_TILE_BYTES)

    def _bytes(self, elements: int) -> int:
        """Return the bytes of the codes of ``elements`` elements."""
        return elements * self.fmt.element.bits // 8

    def _code_dtype(self) -> Any:
        """Return the DSL type of the codes."""
        return _CODE_DTYPES[self.fmt.element.name]
