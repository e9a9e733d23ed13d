"""Fake tensors that stand for a grouped GEMM's arguments when it is compiled.

Extents that must agree at run time share one symbol. The compiled function checks them.
"""

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.device.launch import DSL_TYPES, compact
from cute_kernels.layout.shapes import DECODED_CHUNK_K, PITCH_ALIGNMENT, SF_TILE_BYTES
from cute_kernels.layout.slots import TILE_ROWS

from .config import GemmConfig
from .operand_kinds import OperandKind, operand_of
from .problem import N_ALIGN, GemmArguments
from .views import codes_type


def _compact(dtype: Any, *shape: Any, align: int = PITCH_ALIGNMENT) -> Any:
    return compact(dtype, *shape, align=align)


def _pitched(dtype: Any, *shape: Any) -> Any:
    """Return a tensor with a contiguous last mode and other strides of whole 16 bytes."""
    divisibility = PITCH_ALIGNMENT * 8 // dtype.width
    strides = [cute.sym_int64(divisibility=divisibility) for _ in shape[:-1]]
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=PITCH_ALIGNMENT)


def _scale_tiles(*lead: Any) -> Any:
    """Return tiles of block scales, (*lead, row tiles, K tiles, 512) uint8."""
    return _compact(cutlass.Uint8, *lead, cute.sym_int(), cute.sym_int(), SF_TILE_BYTES)


class FakeArguments:
    """The arguments of one configuration over common symbols."""

    def __init__(self, config: GemmConfig):
        self.config = config
        self.out_kind = None if config.result is None else operand_of(config.result)
        self.is_k_grouped = config.grouping == "k_grouped"
        self.groups, self.rows = cute.sym_int(), cute.sym_int()
        # Rows of the tensor from which rows are gathered.
        self.tokens = cute.sym_int() if config.gathered else self.rows
        # Contiguous extents of operands and of outputs are multiples of a vector.
        is_aligned = config.mn_major[0] or config.loads_row_scales
        self.m = cute.sym_int(divisibility=N_ALIGN if is_aligned else 1)
        self.n, self.k = (cute.sym_int(divisibility=N_ALIGN) for _ in range(2))

    def operands(self) -> tuple[Any, Any]:
        """Return A and B: codes of quantized operands, values of plain ones."""
        config = self.config
        a, b = (codes_type(kind) for kind in (config.kind, config.b_kind))
        if self.is_k_grouped and config.kind.fmt is None:
            return _pitched(a, self.rows, self.m), _pitched(b, self.tokens, self.n)
        if self.is_k_grouped:
            width = cute.sym_int(divisibility=TILE_ROWS * config.kind.bits // a.width)
            turn = 1 if config.kind.is_transposed else -1
            return _pitched(a, *(self.m, width)[::turn]), _pitched(b, *(self.n, width)[::turn])
        depth = self.k
        if config.b_kind.fmt is not None:
            # A columnwise copy is padded along K, so B may be wider than A.
            depth = cute.sym_int(divisibility=N_ALIGN)
        rows = (depth, self.n) if config.transpose_b else (self.n, depth)
        return _pitched(a, self.tokens, self.k), _pitched(b, self.groups, *rows)

    def scales(self) -> tuple[Any, Any]:
        # Rows of slots, or columns of a columnwise copy.
        """Return the block scales of A and B, if any."""
        rows = [cute.sym_int(divisibility=N_ALIGN) for _ in range(2)]
        lead = (self.groups,)
        if self.is_k_grouped:
            rows, lead = [self.m, self.n], ()
        return self._scales(self.config.kind, rows[0]), self._scales(
            self.config.b_kind, rows[1], *lead
        )

    def _scales(self, kind: OperandKind, rows: Any, *lead: Any) -> Any:
        """Return the block scales of an operand with ``rows`` rows."""
        if not kind.is_block_scaled:
            return None
        if kind.has_row_scales and not self.config.reads_scale_tiles:
            return self._row_scales(kind, rows, *lead)
        return _scale_tiles(*lead)

    def _row_scales(self, kind: OperandKind, rows: Any, *lead: Any) -> Any:
        """Return fp32 block scales of rows or squares.

        They are (blocks along K, rows), or for squares (blocks along rows, blocks along K) of any
        strides.
        """
        if not kind.has_squares:
            return _compact(cutlass.Float32, *lead, cute.sym_int(), rows)
        shape = *lead, cute.sym_int(), cute.sym_int()
        return make_fake_tensor(
            cutlass.Float32, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4
        )

    def expanded(self, dtype: str) -> Any:
        """Return values to multiply by codes, with K padded to whole chunks of 128."""
        rows = self.n if self.is_k_grouped else self.rows
        return _pitched(DSL_TYPES[dtype], rows, cute.sym_int(divisibility=DECODED_CHUNK_K))

    def per_group(self) -> Any:
        """Return (G,) fp32."""
        return _compact(cutlass.Float32, self.groups, align=4)

    def out_scales(self) -> Any:
        """Return the block scales of a quantized output, if any."""
        kind = self.out_kind
        if kind is None or not kind.has_row_scales:
            return kind and _scale_tiles()
        return self._row_scales(kind, cute.sym_int(divisibility=TILE_ROWS))

    def out(self) -> Any:
        """Return the output: values, or codes of a quantized result."""
        kind = self.out_kind
        dtype = DSL_TYPES[self.config.out_dtype] if kind is None else codes_type(kind)
        if self.is_k_grouped:
            return _pitched(dtype, self.groups, self.m, self.n)
        has_n = kind is None and not self.config.is_gated
        return _pitched(dtype, self.rows, self.n if has_n else cute.sym_int(divisibility=N_ALIGN))

    def arguments(self) -> GemmArguments:
        """Return all arguments of the kernel."""
        config = self.config
        bias = None
        a, b = self.operands()
        a_scales, b_scales = self.scales()
        a_amax, b_amax = (
            None if kind.global_scale_factor is None else self.per_group()
            for kind in (config.kind, config.b_kind)
        )
        if config.row_scaled:
            a_amax = _compact(cutlass.Float32, self.rows, align=4)
        if config.bias_dtype is not None:
            bias = _compact(DSL_TYPES[config.bias_dtype], self.groups, self.n)
        return GemmArguments(
            a=a,
            a_scales=a_scales,
            a_amax=a_amax,
            b=b,
            b_scales=b_scales,
            b_amax=b_amax,
            offs=_compact(cutlass.Int32, self.groups, align=4),
            rows=_compact(cutlass.Int32, self.rows, align=4) if config.gathered else None,
            bias=bias,
            alpha=self.per_group() if config.has_alpha else None,
            out=self.out(),
            num_sms=Int32(1),
            z=_pitched(DSL_TYPES[config.out_dtype], self.rows, self.n)
            if config.stores_preactivation
            else None,
            out_scales=self.out_scales(),
            counter=_compact(cutlass.Int32, 1, align=4) if config.uses_dynamic_scheduling else None,
            out_global_scale=self.per_group()
            if self.out_kind and self.out_kind.global_scale_factor is not None
            else None,
        )
