"""The warps that decode codes that no instruction multiplies by the other operand.

A stage of codes is 128 long along K and becomes two stages of elements: rows of 128 bytes in the
order of the tensor core's swizzle. Two teams of four warps decode one stage of elements each. A
lane has a row, reads 16 bytes of it at a time and writes their values. The swizzles of both keep
eight rows apart, so that neither has bank conflicts.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline, range_constexpr
from cutlass._mlir.dialects import nvvm

from cute_kernels.device.codecs.values import values_of
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.memory import load_shared, store_shared
from cute_kernels.device.ptx import bits_as_f32
from cute_kernels.layout.shapes import DECODED_CHUNK_K, SF_TILE_BYTES, SF_TILE_ROWS

from ..common.scheduler import TileReader, WorkTile
from .config import CODES_STAGES, K_BLOCKS, DecodedOperand, Sm100GemmConfig
from .storage import Stages
from .warp_schedule import WarpSchedule

#: Elements of K of one of the two stages that a stage of codes becomes.
_HALF_K = DECODED_CHUNK_K // CODES_STAGES
#: Bytes that a lane reads or writes at a time, and bytes of a row of elements.
_CHUNK_BYTES, _ROW_BYTES = 16, 128


class _LaneDecoder:
    """Decoder of a lane's row of one operand.

    ``squares`` are scales (blocks along rows, blocks along K, G or 1), if any.
    """

    def __init__(
        self,
        config: Sm100GemmConfig,
        codes: DecodedOperand,
        shared: Stages,
        squares: cute.Tensor | None,
        cta: Int32,
        warp: Int32,
        team_warps: int,
    ):
        self.codes = codes
        self.squares = squares
        self.kind, lane = codes.kind, cute.arch.lane_idx()
        assert self.kind.fmt is not None and config.decoded_to is not None
        self.values = values_of(self.kind.fmt, config.decoded_to.name)
        self.is_m = codes.side == "m"
        self.is_uniform = self.is_m == config.tile.swap_ab
        self.cta_row = cta * codes.rows
        self.interleaves_halves = codes.interleaves_halves
        #: Each warp has 32 rows, and warps with the same rows share the chunks of each.
        row_groups = codes.rows // WARP_SIZE
        self.sharers = team_warps // row_groups
        self.chunk_k = _CHUNK_BYTES * 8 // self.kind.bits
        self.chunks = _HALF_K // self.chunk_k // self.sharers
        self.first_chunk = warp // row_groups * self.chunks
        row_group = warp % row_groups
        self.row = row = row_group * WARP_SIZE + lane
        #: Addresses of the row's first chunk. An XOR with its offset gives that of another chunk.
        width = codes.row_bytes
        swizzle = row * width // _ROW_BYTES % (width // _CHUNK_BYTES)
        name = f"{codes.side}_codes"
        source = getattr(shared, name).iterator.toint()
        self.codes_at = source + row * width + swizzle * _CHUNK_BYTES
        target = getattr(shared, codes.side).iterator.toint()
        self.target_at = target + row * _ROW_BYTES + row % 8 * _CHUNK_BYTES
        self.target_bytes = config.element_stage_bytes[0 if self.is_m else 1]
        self.scales_at = Int32(0)
        if codes.scales:
            self.scales_at = getattr(shared, f"{name}_scales").iterator.toint()
            self.scales_at += row * 4 if self.kind.has_row_scales else lane * 16 + row_group * 4

    def first_row(self, tile: WorkTile) -> Int32:
        """Return the first row in this CTA, in the order of the block scales."""
        return (tile.m_sf_row if self.is_m else tile.n_sf_row) + self.cta_row

    @cute.jit
    def square(self, tile: WorkTile, index: Int32, count: Int32) -> Float32:
        """Return the scale of the square in stage ``index`` of a tile's codes. 1 if absent."""
        scale = Float32(1.0)
        if const_expr(self.squares is not None):
            row, half_offset = self.first_row(tile) + self.row, Int32(0)
            if const_expr(self.interleaves_halves):
                row, half_offset = row // 2, row % 2 * (self.squares.shape[0] // 2)
            block = row // SF_TILE_ROWS + half_offset
            group = tile.group if const_expr(self.is_uniform) else Int32(0)
            if index < count and block < self.squares.shape[0]:
                scale = self.squares[block, index, group]
        return scale

    def decode(
        self, codes_stage: Int32, half: int, stage: Int32, tile: WorkTile, square: Float32
    ) -> None:
        """Decode this lane's chunks of half a stage of codes into a stage of elements.

        ``square`` is the scale of all of them if they share one.
        """
        word = self.scales(codes_stage, half, tile)
        source = self.codes_at + codes_stage * (self.codes.rows * self.codes.row_bytes)
        target = self.target_at + stage * self.target_bytes
        words_of_chunk = self.chunk_k // 8
        for i in range(self.chunks):
            chunk = self.first_chunk + i if self.sharers > 1 else i
            address = source ^ ((half * (_HALF_K // self.chunk_k) + chunk) * _CHUNK_BYTES)
            values = self.chunk_values(load_shared(address, 4), word, half, i, square)
            for j in range(words_of_chunk):
                target_address = target ^ ((chunk * words_of_chunk + j) * _CHUNK_BYTES)
                store_shared(target_address, values[4 * j : 4 * j + 4])

    def scales(self, codes_stage: Int32, half: int, tile: WorkTile) -> Any:
        """Return the word of this lane's block scales of half a stage, if any.

        If scales are bytes, those of the warp's first chunk are in the lowest bytes.
        """
        kind = self.kind
        if not self.codes.scales:
            return None
        address = self.scales_at + codes_stage * self.codes.scale_bytes
        if kind.has_row_scales:
            return load_shared(address, 1)[0]
        if self.codes.rows < SF_TILE_ROWS:
            address += self.first_row(tile) % SF_TILE_ROWS // WARP_SIZE * 4
        word = load_shared(address + half * _HALF_K // kind.scale_tile_k * SF_TILE_BYTES, 1)[0]
        if self.sharers > 1:
            word = word >> (self.first_chunk * self.chunk_k // kind.sf_vec_size * 8)
        return word

    def chunk_values(self, words: Any, word: Any, half: int, i: int, square: Float32) -> Any:
        """Return the values of the warp's ``i``-th chunk of half a stage."""
        kind, values = self.kind, self.values.values
        if kind.has_row_scales:
            return values(words, square if word is None else bits_as_f32(word))
        if word is None:
            return values(words, None)
        blocks = max(1, self.chunk_k // kind.sf_vec_size)
        first_block = (half * _HALF_K % kind.scale_tile_k + i * self.chunk_k) // kind.sf_vec_size
        words_per_block, out = len(words) // blocks, []
        for block in range(blocks):
            factor = self.values.factor(word, first_block + block)
            out += values(words[block * words_per_block : (block + 1) * words_per_block], factor)
        return out


class DecodeWarps:
    """The warps that decode; ``squares`` are as in ``_LaneDecoder``, for operands M and N."""

    def __init__(
        self,
        config: Sm100GemmConfig,
        warps: WarpSchedule,
        shared: Stages,
        squares: tuple[cute.Tensor | None, ...],
        cta: Int32,
        tiles: TileReader,
        codes_pipeline: pipeline.PipelineTmaAsync,
        ab_pipeline: pipeline.PipelineTmaUmma,
    ):
        self.num_ctas = config.tile.num_ctas
        self.tiles = tiles
        self.codes_pipeline = codes_pipeline
        self.ab_pipeline = ab_pipeline
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - warps.first_decode_warp_id
        self.team = warp // warps.team_warps
        position = (cta, warp % warps.team_warps, warps.team_warps)
        self.sides = [
            _LaneDecoder(config, codes, shared, squares[0 if codes.side == "m" else 1], *position)
            for codes in config.codes
        ]

    @cute.jit
    def run(self) -> None:
        """Decode the stages of all tiles of this CTA."""
        tile_state = self.tiles.new_state()
        codes_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.codes_pipeline.num_stages
        )
        ab_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.ab_pipeline.num_stages
        )
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            halves = (tile.k_blocks + (K_BLOCKS - 1)) >> (K_BLOCKS.bit_length() - 1)
            count = (halves + (CODES_STAGES - 1)) // CODES_STAGES
            squares = [side.square(tile, Int32(0), count) for side in self.sides]
            for index in cutlass.range(count, unroll=1):
                # They are loaded while the previous ones are used.
                following = [side.square(tile, index + 1, count) for side in self.sides]
                self.codes_pipeline.consumer_wait(codes_state)
                for half in range_constexpr(CODES_STAGES):
                    if index * CODES_STAGES + half < halves:
                        if self.team == half:
                            self.ab_pipeline.sync_object_empty.wait(ab_state.index, ab_state.phase)
                            for side, square in zip(self.sides, squares, strict=True):
                                side.decode(codes_state.index, half, ab_state.index, tile, square)
                            self.hand_over(ab_state)
                        ab_state.advance()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    self.codes_pipeline.sync_object_empty.arrive(codes_state.index, None)
                codes_state.advance()
                squares = following
            tile, tile_state = self.tiles.next(tile_state)

    def hand_over(self, state: pipeline.PipelineState) -> None:
        """Tell the MMA warp of the first CTA that this warp has written its rows of a stage."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            barrier = self.ab_pipeline.sync_object_full.get_barrier(state.index)
            if self.num_ctas == 1:
                cute.arch.mbarrier_arrive(barrier)
            else:
                scope = nvvm.MemScopeKind.CLUSTER
                cute.arch.mbarrier_arrive(barrier, Int32(0), scope=scope)
