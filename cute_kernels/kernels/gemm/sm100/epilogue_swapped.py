"""The epilogue of tiles with swapped operands: accumulator rows are columns of the output.

The arithmetic is that of ``epilogue``. A warp owns 32 columns of the output and handles 32 rows at
a time. Tensor memory gives each thread pairs of neighbouring rows, in the fragments of an 8x8
matrix, so that rows are rescaled two at a time. ``stmatrix`` transposes them on their way into
shared memory. Blocks whose rows all belong to the group leave by TMA where ``swap_partial`` has
tiles of many rows. From other blocks, and before an activation, lanes store vectors of the rows
that the group has.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, pipeline, range_constexpr
from cutlass.cute.nvgpu import tcgen05

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.launch import DSL_TYPES
from cute_kernels.device.memory import load_shared
from cute_kernels.device.ptx import asm_volatile

from ..common.activation_epilogue import Window, store_activated
from ..common.output_store import EpilogueTensors, OutputStore, out_offset, vector_at
from ..common.scheduler import WorkTile
from .accumulators import AccReader
from .config import SWAPPED_BLOCK, Sm100GemmConfig
from .epilogue import pairwise
from .quantize_epilogue import StagedRows

_CHUNK_BYTES = 16
#: Rows and columns of a fragment, and of those the rows and columns of a block.
_FRAGMENT = 8
_FRAGMENTS = SWAPPED_BLOCK // _FRAGMENT


class SwappedEpilogue:
    """Epilogue of tiles whose operands are swapped.

    Args:
        config: Configuration of the kernel.
        tensors: Tensors of the epilogue.
        staged: Blocks of all warps in shared memory.
        block_store: TMA store of the blocks. None if none leave by TMA. Then a warp has one block,
            otherwise it uses two in turn.
        acc: Accumulators in tensor memory, (MMA, MMA_M, MMA_N, STAGE).
        cta_row: First row of operand M of this CTA in the tile.
        acc_pipeline: Pipeline of the accumulators.
    """

    def __init__(
        self,
        config: Sm100GemmConfig,
        tensors: EpilogueTensors,
        staged: cute.Pointer,
        block_store: OutputStore | None,
        acc: cute.Tensor,
        cta_row: Int32,
        acc_pipeline: pipeline.PipelineUmmaAsync,
    ):
        self.config = config
        self.tensors = tensors
        self.out_type = DSL_TYPES[config.out_dtype]
        load = tcgen05.Ld16x256bOp(tcgen05.Repetition(_FRAGMENTS))
        self.acc = AccReader(config, acc, SWAPPED_BLOCK, load, acc_pipeline)
        self.lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.warp_col = cta_row + warp * WARP_SIZE
        self.staged = staged.toint() + warp * (config.staged_bytes // 4)
        self.block_store = block_store
        #: ``chunks`` is the number of 16-byte chunks per staged row. They are swizzled so that
        #: eight rows use all banks.
        self.row_bytes = SWAPPED_BLOCK * self.out_type.width // 8
        self.chunks = self.row_bytes // _CHUNK_BYTES
        self.block_bytes = SWAPPED_BLOCK * self.row_bytes
        self.first_slot = warp * (config.staged_bytes // 4 // self.block_bytes)
        if config.result is not None:
            self.quantized = StagedRows(config, tensors, self.staged + self.block_bytes)

    @cute.jit
    def finish(self, tile: WorkTile, acc_state: pipeline.PipelineState) -> None:
        """Rescale and store a tile."""
        config = self.config
        row, col, sf_row = tile.n_row, tile.m_row, tile.n_sf_row
        if const_expr(config.tile.swap_partial):
            row, col, sf_row = tile.m_row, tile.n_row, tile.m_sf_row
            # TMA may still read blocks of the previous tile from the same memory.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        col += self.warp_col
        rows = cutlass.min(tile.rows, config.tile.n)
        num_blocks = (rows + (SWAPPED_BLOCK - 1)) >> 5
        # Factors are loaded while the previous block is waited for and stored.
        first_row = self.acc.block_at(Int32(0), num_blocks, acc_state) * SWAPPED_BLOCK
        factor = self.load_factor(tile.group, row + first_row, rows - first_row)
        biases = self.load_biases(tile.group, col)
        if const_expr(config.result is not None):
            global_scale = self.quantized.global_scale(tile.group)
            # Wait until amaxes of the previous tile have been read.
            self.quantized.sync()
        self.acc.wait(acc_state)
        for step in cutlass.range(num_blocks, unroll=1):
            first_row = self.acc.block_at(step, num_blocks, acc_state) * SWAPPED_BLOCK
            factors = self.exchange(factor)
            if step + 1 < num_blocks:
                next_row = self.acc.block_at(step + 1, num_blocks, acc_state) * SWAPPED_BLOCK
                factor = self.load_factor(tile.group, row + next_row, rows - next_row)
            if const_expr(self.block_store is not None):
                # All lanes wait for this before they write: there is a barrier in between.
                cute.arch.cp_async_bulk_wait_group(1, read=True)
            values = self.acc.read(step, num_blocks, acc_state)
            self.rescale(values, factors, biases)
            if const_expr(config.accumulate):
                self.add_output(values, tile.group, row + first_row, rows - first_row, col)
            slot = step % 2 if const_expr(self.block_store is not None) else Int32(0)
            block = self.staged + slot * self.block_bytes
            self.stage(values, block)
            if const_expr(config.result is not None):
                cute.arch.sync_warp()
                vectors = [
                    load_shared(self.chunk_at(block, self.lane, i), 4) for i in range(self.chunks)
                ]
                lane_row = first_row + self.lane
                self.quantized.store(
                    vectors,
                    row + lane_row,
                    sf_row + lane_row,
                    rows - lane_row,
                    col,
                    step,
                    global_scale,
                )
            elif const_expr(self.block_store is None):
                cute.arch.sync_warp()
                self.store(block, tile.group, row + first_row, rows - first_row, col)
            elif rows - first_row >= SWAPPED_BLOCK:
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                self.block_store.copy(self.first_slot + slot, row + first_row, col, 0)
                cute.arch.cp_async_bulk_commit_group()
            else:
                cute.arch.sync_warp()
                self.store(block, tile.group, row + first_row, rows - first_row, col)
        if const_expr(config.result is not None):
            if tile.rows <= config.tile.n:
                self.quantized.finish(sf_row, num_blocks * SWAPPED_BLOCK, rows, col)
        if const_expr(self.block_store is not None):
            # The next tile may stage blocks of another size in the same memory.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def fragment_row(self) -> Int32:
        """Return this thread's first row in a fragment."""
        return self.lane % 4 * 2

    @cute.jit
    def load_biases(self, group: Int32, col: Int32) -> cute.Tensor | None:
        """Return the biases of this thread's columns, or None without a bias."""
        bias = self.tensors.bias
        if const_expr(bias is None):
            return None
        out = cute.make_rmem_tensor(_FRAGMENTS, Float32)
        out.fill(0.0)
        for i in range_constexpr(_FRAGMENTS):
            index = col + i * _FRAGMENT + self.lane // 4
            if index < bias.shape[1]:
                if const_expr(self.config.interleaves_halves):
                    index = index // 2 + index % 2 * (bias.shape[1] // 2)
                out[i] = bias[group, index].to(Float32)
        return out

    @cute.jit
    def load_factor(self, group: Int32, row: Int32, rows: Int32) -> Float32:
        """Return the factor of one row of a block per lane; 1 without."""
        factor = Float32(1.0)
        if const_expr(self.tensors.has_factor):
            if self.lane < rows:
                amax_index = row + self.lane if const_expr(self.config.row_scaled) else group
                factor = self.tensors.factor(self.config, group, amax_index)
        return factor

    @cute.jit
    def exchange(self, factor: Float32) -> cute.Tensor | None:
        """Return the factors of this thread's rows, two per fragment, from other lanes."""
        if const_expr(not self.tensors.has_factor):
            return None
        cute.arch.sync_warp()
        out = cute.make_rmem_tensor(2 * _FRAGMENTS, Float32)
        for i in range_constexpr(2 * _FRAGMENTS):
            source = self.fragment_row() + (i // 2 * _FRAGMENT + i % 2)
            out[i] = cute.arch.shuffle_sync(factor, source)
        return out

    def rescale(
        self, values: cute.Tensor, factors: cute.Tensor | None, biases: cute.Tensor | None
    ) -> None:
        """Multiply values by factors and add biases, in place."""
        terms = cute.make_rmem_tensor(2, Float32)
        for i in range(0, cute.size(values), 2):
            pair = cute.make_tensor(values.iterator + i, cute.make_layout(2))
            col_part, row_part = _fragment_of(i)
            if factors is not None:
                for j in range(2):
                    terms[j] = factors[2 * row_part + j]
                pairwise(cute.arch.mul_packed_f32x2, pair, terms)
            if biases is not None:
                terms.fill(biases[col_part])
                pairwise(cute.arch.add_packed_f32x2, pair, terms)

    @cute.jit
    def add_output(
        self, values: cute.Tensor, group: Int32, row: Int32, rows: Int32, col: Int32
    ) -> None:
        """Add the old output in ``rows`` rows from ``row`` on."""
        out = self.tensors.out
        terms = cute.make_rmem_tensor(cute.size(values), Float32)
        terms.fill(0.0)
        for i in range_constexpr(cute.size(values)):
            col_part, row_part = _fragment_of(i)
            at_row = row_part * _FRAGMENT + self.fragment_row() + i % 2
            at_col = col + col_part * _FRAGMENT + self.lane // 4
            if at_row < rows and at_col < out.shape[2]:
                offset = out_offset(self.config, out, group, row + at_row, at_col)
                element = cute.make_tensor(out.iterator + offset, cute.make_layout(1))
                terms[i] = element[0].to(Float32)
        pairwise(cute.arch.add_packed_f32x2, values, terms)

    def chunk_at(self, block: Int32, row: Int32, chunk: Int32 | int) -> Int32:
        """Return the address of 16 bytes of a row of a staged block, swizzled as for TMA."""
        swizzle = row % 8 if self.chunks == 8 else row // 2 % 4
        return block + row * self.row_bytes + (chunk ^ swizzle) * _CHUNK_BYTES

    def rounded(self, values: cute.Tensor, i: int) -> cute.Tensor:
        """Return elements ``i`` and ``i + 1`` in the output's type, in one register if it fits."""
        out = cute.make_rmem_tensor(2, self.out_type)
        pair = cute.make_tensor(values.iterator + i, cute.make_layout(2))
        out.store(pair.load().to(self.out_type))
        return out

    @cute.jit
    def stage(self, values: cute.Tensor, block: Int32) -> None:
        """Write a block into shared memory at ``block``, rounded and transposed."""
        if const_expr(self.out_type.width == 16):
            for row_part in range_constexpr(_FRAGMENTS):
                # Lanes 8 i to 8 i + 7 address the rows of the fragment of columns 8 i to 8 i + 7.
                address = self.chunk_at(block, row_part * _FRAGMENT + self.lane % 8, self.lane // 8)
                fragments = [
                    cute.recast_tensor(self.rounded(values, _index(col_part, row_part)), Uint32)[0]
                    for col_part in range(_FRAGMENTS)
                ]
                asm_volatile(
                    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
                    (address, *fragments),
                )
        else:
            for i in range_constexpr(cute.size(values)):
                col_part, row_part = _fragment_of(i)
                row = row_part * _FRAGMENT + self.fragment_row() + i % 2
                # A fragment is two chunks wide.
                chunk = col_part * 2 + self.lane // 16
                address = self.chunk_at(block, row, chunk) + self.lane // 4 % 4 * 4
                pointer = cute.make_ptr(self.out_type, address, cute.AddressSpace.smem)
                cute.make_tensor(pointer, cute.make_layout(1))[0] = values[i]

    @cute.jit
    def store(self, block: Int32, group: Int32, row: Int32, rows: Int32, col: Int32) -> None:
        """Store the ``rows`` rows of a staged block that the group has, from ``row`` on."""
        out, per_chunk = self.tensors.out, _CHUNK_BYTES * 8 // self.out_type.width
        rows_at_once = WARP_SIZE // self.chunks
        lane_row, chunk = self.lane // self.chunks, self.lane % self.chunks
        col += chunk * per_chunk
        offset = out_offset(self.config, out, group, row + lane_row, col)
        vector = cute.make_layout(per_chunk)
        if const_expr(self.config.activation is not None):
            window = Window.locate(
                self.config, self.tensors, group, row + lane_row, col, rows - lane_row
            )
            positions = [(i, 0) for i in range(0, SWAPPED_BLOCK, rows_at_once)]
            vectors = [
                load_shared(self.chunk_at(block, lane_row + i, chunk), 4) for i, _ in positions
            ]
            for i in range_constexpr(0, len(positions), 2):
                store_activated(self.config, vectors[i : i + 2], window, positions[i : i + 2])
        elif col < out.shape[2]:
            for i in range_constexpr(SWAPPED_BLOCK // rows_at_once):
                block_row = lane_row + i * rows_at_once
                if block_row < rows:
                    pointer = cute.make_ptr(
                        self.out_type,
                        self.chunk_at(block, block_row, chunk),
                        cute.AddressSpace.smem,
                        assumed_align=_CHUNK_BYTES,
                    )
                    here = offset + Int64(i * rows_at_once) * out.stride[1]
                    target = vector_at(out, here, per_chunk)
                    cute.autovec_copy(cute.make_tensor(pointer, vector), target)


def _fragment_of(i: int) -> tuple[int, int]:
    """Return the fragments, by column and by row of the output, of a thread's ``i``-th element."""
    # A load covers 16 rows of the accumulator: two times eight for every fragment of columns.
    return i // (4 * _FRAGMENTS) * 2 + i // 2 % 2, i // 4 % _FRAGMENTS


def _index(col_part: int, row_part: int) -> int:
    """Return the index of the first element of a pair of fragments, see ``_fragment_of``."""
    return col_part // 2 * (4 * _FRAGMENTS) + row_part * 4 + col_part % 2 * 2
