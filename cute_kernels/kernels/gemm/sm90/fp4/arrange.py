"""Plain activations in the order in which the GEMM contracts them with NVFP4 weights.

The order is that of ``expand``. A warp handles a row, a quad of lanes 128 elements of it. For each
``p`` and ``w`` lane j of a quad reads elements ``8 w`` to ``8 w + 7`` of block ``2 j + p``, and
lane q writes elements q and q + 4 of all four.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import GroupCursor
from cute_kernels.device.launch import DSL_TYPES, GridKernel, compact, env_stream
from cute_kernels.device.memory import load_global_if, store_global, transpose_four
from cute_kernels.device.ptx import asm, select
from cute_kernels.layout.shapes import DECODED_CHUNK_K

from ...common.problem import N_ALIGN
from .config import ArrangeConfig

_ROWS = 8
_QUAD = 4
#: Chunks of 128 elements that a warp handles at once, one per quad.
_CHUNKS = WARP_SIZE // _QUAD
_VECTOR_BYTES = 16


class ArrangeKernel(GridKernel):
    """The pass of one configuration. See the module's docstring."""

    ctas_per_sm, num_threads = 8, WARP_SIZE * _ROWS

    def __init__(self, config: ArrangeConfig):
        self.config = config

    @staticmethod
    def fake_args(config: ArrangeConfig) -> tuple[Any, ...]:
        """Return the fake arguments for compilation."""
        dtype = DSL_TYPES[config.dtype]
        rows, depth, pitch = (cute.sym_int(divisibility=d) for d in (1, N_ALIGN, N_ALIGN))
        wide = cute.sym_int(divisibility=DECODED_CHUNK_K)
        tokens = cute.sym_int() if config.gathered else rows
        return (
            make_fake_tensor(dtype, (tokens, depth), (pitch, 1), assumed_align=_VECTOR_BYTES),
            compact(Int32, rows, align=4) if config.gathered else None,
            compact(Int32, cute.sym_int(), align=4),
            compact(dtype, rows, wide, align=_VECTOR_BYTES),
            Int32(1),
            env_stream(),
        )

    @cute.kernel
    def kernel(
        self, x: cute.Tensor, index: cute.Tensor | None, offs: cute.Tensor, out: cute.Tensor
    ) -> None:
        """Rearrange rows for the GEMM.

        K of ``out`` is padded to a multiple of 128; rows of the tail are not written.

        Args:
            x: (rows, K), fp16 or bf16; (tokens, K) if gathered.
            index: (rows,) int32, the token of each row, if gathered. None otherwise. A row whose
                index is out of range becomes zeros.
            offs: (G,) int32 end rows.
            out: (rows, padded K) of the dtype of ``x``, written.
        """
        rows, wide = out.shape
        end_row = GroupCursor(offs, offs.shape[0], rows, Int32(0)).end_row()
        spans = (wide + (_CHUNKS * DECODED_CHUNK_K - 1)) // (_CHUNKS * DECODED_CHUNK_K)
        items = (end_row + (_ROWS - 1)) // _ROWS * spans
        block, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for item in cutlass.range(block, items, step, unroll=1):
            row = item // spans * _ROWS + cute.arch.warp_idx()
            if row < end_row:
                token, depth = row, x.shape[1]
                if const_expr(self.config.gathered):
                    token = index[row]
                    is_there = (token >= 0) & (token < x.shape[0])
                    token, depth = (
                        select(is_there, token, Int32(0)),
                        select(is_there, depth, Int32(0)),
                    )
                self.arrange(x, out, token, depth, row, item % spans)

    @cute.jit
    def arrange(
        self, x: cute.Tensor, out: cute.Tensor, token: Int32, depth: Int32, row: Int32, span: Int32
    ) -> None:
        """Write row ``row`` of ``out``: the first ``depth`` elements of a token, then zeros."""
        lane = cute.arch.lane_idx()
        quad_lane = lane % _QUAD
        first_element = (span * _CHUNKS + lane // _QUAD) * DECODED_CHUNK_K
        source = x.iterator.toint() + Int64(token) * x.stride[0] * 2
        target = out.iterator.toint() + Int64(row) * out.shape[1] * 2
        for eight in cutlass.range_constexpr(4):
            # Elements 8 w .. 8 w + 7 of block 2 j + p.
            element = first_element + quad_lane * 32 + eight * 8
            words = load_global_if(source + element * 2, _VECTOR_BYTES, element, depth)
            # Elements q and q + 4 for each lane q, then lane j's for this one from all j.
            pairs = [
                asm(f"prmt.b32 $0, $1, $2, {('0x5410', '0x7632')[q % 2]};", [Uint32], operands)
                for q, operands in ((q, [words[q // 2], words[2 + q // 2]]) for q in range(_QUAD))
            ]
            values = transpose_four(pairs, 1)
            if first_element < out.shape[1]:
                store_global(target + (first_element + eight * 32 + quad_lane * 8) * 2, values)
