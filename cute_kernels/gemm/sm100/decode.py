"""B as codes beside a plain A: how they get into shared memory, and the warps that decode them.

A stage of codes is 128 long along K and becomes two stages of what is multiplied, rows of 128
bytes in the order of the tensor core's swizzle. Two teams of four warps decode one each. A lane
has a row, reads 16 bytes of it at a time and writes what they stand for: the swizzles of both keep
eight rows apart, so neither takes turns at a bank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass._mlir.dialects import nvvm

from cute_kernels.device.codecs.values import values_of
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.memory import load_shared, store_shared
from cute_kernels.device.ptx import bits_as_f32
from cute_kernels.gemm.loader import LoadWarp
from cute_kernels.gemm.scheduler import WorkTile
from cute_kernels.gemm.sm100.config import K_BLOCKS
from cute_kernels.layout.shapes import PIECE_K, SF_TILE_BYTES, SF_TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.scheduler import TileReader
    from cute_kernels.gemm.sm100.config import Sm100GemmConfig
    from cute_kernels.gemm.sm100.storage import Stages
    from cute_kernels.gemm.sm100.warp_schedule import WarpSchedule

__all__ = ["CodesLoadWarp", "DecodeWarps"]

#: Stages of what is multiplied for one of codes, and elements of K of one.
_HALVES = 2
_HALF_K = PIECE_K // _HALVES
#: Bytes that a lane reads or writes at a time, and of a row of what is multiplied.
_CHUNK_BYTES, _ROW_BYTES = 16, 128


class CodesLoadWarp(LoadWarp):
    """The load warp of codes and their block scales."""

    def num_k_tiles(self, tile: WorkTile) -> Int32:
        """Stages of a tile."""
        return (tile.k_blocks + (_HALVES * K_BLOCKS - 1)) // (_HALVES * K_BLOCKS)


class DecodeWarps:
    """The warps that decode.

    Args:
        config: the kernel's configuration.
        warps: which warps those are.
        shared: the stages.
        squares: fp32 scales of squares, (blocks along rows, along K, G); None without.
        cta: number of this CTA among those that share a tile.
        tiles: the tile records.
        codes_pipeline: the stages of codes.
        ab_pipeline: the stages of what is multiplied.
    """

    def __init__(
        self,
        config: Sm100GemmConfig,
        warps: WarpSchedule,
        shared: Stages,
        squares: cute.Tensor | None,
        cta: Int32,
        tiles: TileReader,
        codes_pipeline: pipeline.PipelineTmaAsync,
        ab_pipeline: pipeline.PipelineTmaUmma,
    ):
        self.config = config
        self.squares = squares
        self.cta = cta
        self.tiles = tiles
        self.codes_pipeline = codes_pipeline
        self.ab_pipeline = ab_pipeline
        kind, rows = config.b_kind, config.decoded_rows
        assert kind.fmt is not None
        self.values = values_of(kind.fmt, config.operand)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - warps.first_decode_warp_id
        self.team = warp // warps.team_warps
        warp, lane = warp % warps.team_warps, cute.arch.lane_idx()
        #: Each warp has 32 rows, and as many chunks of each as there are warps for all rows.
        row_groups = rows // WARP_SIZE
        sharers = warps.team_warps // row_groups
        self.chunk_k = _CHUNK_BYTES * 8 // kind.bits
        self.chunks = _HALF_K // self.chunk_k // sharers
        self.first_chunk = warp // row_groups * self.chunks
        self.is_shared = sharers > 1
        self.row_group = warp % row_groups
        row = self.row_group * WARP_SIZE + lane
        #: Addresses of the row's first chunk; those of others have other bits where it has none.
        width = config.codes_row_bytes
        swizzle = row * width // _ROW_BYTES % (width // _CHUNK_BYTES)
        self.codes_at = shared.codes.iterator.toint() + row * width + swizzle * _CHUNK_BYTES
        side = 0 if config.tile.swap_ab else 1
        target = (shared.m, shared.n)[side].iterator.toint()
        self.target_at = target + row * _ROW_BYTES + row % 8 * _CHUNK_BYTES
        self.target_bytes = config.element_stage_bytes[side]
        self.scales_at = Int32(0)
        self.codes_bytes = rows * width
        self.scales_bytes = config.codes_stage_bytes - self.codes_bytes
        if shared.codes_scales is not None:
            self.scales_at = shared.codes_scales.iterator.toint()
            self.scales_at += row * 4 if kind.has_row_scales else lane * 16 + self.row_group * 4

    @cute.jit
    def run(self) -> None:
        tile_state = self.tiles.new_state()
        codes_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.codes_pipeline.num_stages
        )
        ab_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.ab_pipeline.num_stages
        )
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            first_row = tile.m_row if cutlass.const_expr(self.config.tile.swap_ab) else tile.n_row
            first_row += self.cta * self.config.decoded_rows
            halves = (tile.k_blocks + (K_BLOCKS - 1)) >> (K_BLOCKS.bit_length() - 1)
            count = (halves + (_HALVES - 1)) // _HALVES
            square = self.square(tile, first_row, Int32(0), count)
            for at in cutlass.range(count, unroll=1):
                following = self.square(tile, first_row, at + 1, count)
                self.codes_pipeline.consumer_wait(codes_state)
                for half in cutlass.range_constexpr(_HALVES):
                    if at * _HALVES + half < halves:
                        if self.team == half:
                            self.ab_pipeline.sync_object_empty.wait(ab_state.index, ab_state.phase)
                            self.decode(codes_state.index, half, ab_state.index, first_row, square)
                            self.hand_over(ab_state)
                        ab_state.advance()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    self.codes_pipeline.sync_object_empty.arrive(codes_state.index, None)
                codes_state.advance()
                square = following
            tile, tile_state = self.tiles.next(tile_state)

    @cute.jit
    def square(self, tile: WorkTile, first_row: Int32, at: Int32, count: Int32) -> Float32:
        """The scale of the square of a tile's ``at``-th stage of codes; 1 where there is none."""
        scale = Float32(1.0)
        if cutlass.const_expr(self.squares is not None):
            block = first_row // SF_TILE_ROWS
            if at < count and block < self.squares.shape[0]:
                scale = self.squares[block, at, tile.group]
        return scale

    def hand_over(self, state: pipeline.PipelineState) -> None:
        """Tell the MMA warp of the first CTA that this warp's part of a stage is there."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            barrier = self.ab_pipeline.sync_object_full.get_barrier(state.index)
            if self.config.tile.num_ctas == 1:
                cute.arch.mbarrier_arrive(barrier)
            else:
                scope = nvvm.MemScopeKind.CLUSTER
                cute.arch.mbarrier_arrive(barrier, Int32(0), scope=scope)

    def decode(
        self, codes_stage: Int32, half: int, stage: Int32, first_row: Int32, square: Float32
    ) -> None:
        """Decode this warp's part of half a stage of codes into a stage.

        Args:
            codes_stage: the stage of codes.
            half: which half.
            stage: the stage of what is multiplied.
            first_row: the first row of B in this CTA.
            square: the scale of all of it, where one square has it.
        """
        word = self.scales(codes_stage, half, first_row)
        source = self.codes_at + codes_stage * self.codes_bytes
        target = self.target_at + stage * self.target_bytes
        per_chunk = _HALF_K // self.chunk_k
        words_of_chunk = self.chunk_k // 8
        for i in range(self.chunks):
            chunk = self.first_chunk + i if self.is_shared else i
            at = source ^ ((half * per_chunk + chunk) * _CHUNK_BYTES)
            words = load_shared(at, 4)
            values = self.chunk_values(words, word, half, i, square)
            for j in range(words_of_chunk):
                place = target ^ ((chunk * words_of_chunk + j) * _CHUNK_BYTES)
                store_shared(place, values[4 * j : 4 * j + 4])

    def scales(self, codes_stage: Int32, half: int, first_row: Int32) -> Any:
        """The word of this lane's block scales of half a stage; None without.

        Scales of a byte have those of the warp's first chunk lowest.
        """
        config, kind = self.config, self.config.b_kind
        if not config.codes_scales:
            return None
        at = self.scales_at + codes_stage * self.scales_bytes
        if kind.has_row_scales:
            return load_shared(at, 1)[0]
        if config.decoded_rows < SF_TILE_ROWS:
            at += first_row % SF_TILE_ROWS // WARP_SIZE * 4
        word = load_shared(at + half * _HALF_K // kind.scale_tile_k * SF_TILE_BYTES, 1)[0]
        if self.is_shared:
            word = word >> (self.first_chunk * self.chunk_k // kind.sf_vec_size * 8)
        return word

    def chunk_values(self, words: Any, word: Any, half: int, i: int, square: Float32) -> Any:
        """The values of the warp's ``i``-th chunk of half a stage."""
        kind = self.config.b_kind
        if kind.has_row_scales:
            return self.values.values(words, square if word is None else bits_as_f32(word))
        if word is None:
            return self.values.values(words, None)
        vec_size = kind.sf_vec_size
        blocks = max(1, self.chunk_k // vec_size)
        first = (half * _HALF_K % kind.scale_tile_k + i * self.chunk_k) // vec_size
        each, out = len(words) // blocks, []
        for block in range(blocks):
            factor = self.values.factor(word, first + block)
            out += self.values.values(words[block * each : (block + 1) * each], factor)
        return out
