"""The rowwise copy token by token: each is read and converted once, and written to all of its rows.

Where rows share nothing, those of one token have equal codes and scales, and lie one in each of its
k groups. A team has a token as in ``rows`` a row. Its scales go out from shared memory, a word a
store and not a sector: on an H200 that is a third of the time in FP8Block and more than half in
NVFP4 (perf/results/quantize_h200.md).
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64, const_expr, cute

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import Grouping, group_start
from cute_kernels.device.launch import compact
from cute_kernels.device.memory import (
    bulk_load,
    load_shared,
    store_global,
    store_global_past_l1,
    store_shared,
    wait_each,
)
from cute_kernels.device.scales import row_scales_at
from cute_kernels.layout.shapes import SF_TILE_BYTES
from cute_kernels.layout.slots import TILE_ROWS

from .config import TokensConfig
from .row_quantizer import Lane, Output, RowsQuantizer, SharedMemory, row_address
from .row_values import RowValuesQuantizer

#: Bytes that a warp keeps of a row: where its codes begin and where its scales do, 0 if there is
#: none.
_PLACE = 16


class TokensQuantizer(RowsQuantizer):
    """Persistent quantizer by tokens, see the module."""

    def __init__(self, config: TokensConfig):
        super().__init__(config)
        self.table_words = config.num_compute_warps * WARP_SIZE * _PLACE // 4

    @classmethod
    def fake_args(cls, config: TokensConfig) -> tuple[Any, ...]:
        """Those of rows, with the rows of each token (T, k) for the index."""
        x, _, *rest = super().fake_args(config)
        return (x, compact(Int32, x.shape[0], cute.sym_int(), align=4), *rest)

    @cute.jit
    def load(
        self,
        x: cute.Tensor,
        index: cute.Tensor,
        offs: cute.Tensor | None,
        team: Int32,
        shared: SharedMemory,
    ) -> None:
        """The loader: a lane starts the copies of its team's tokens."""
        stage, phase, row_bytes = Int32(0), Int32(1), self.row_bytes(x)
        token, step = self.tokens(team)
        while token < x.shape[0]:
            slot = team * self.config.num_stages + stage
            bar = shared.full + slot
            wait_each(shared.empty + slot, phase)
            cute.arch.mbarrier_arrive_and_expect_tx(bar, row_bytes)
            source = x.iterator.toint() + Int64(token) * row_bytes
            bulk_load(shared.rows.toint() + slot * self.stage_bytes, source, row_bytes, bar)
            stage, phase = self.next_stage(stage, phase)
            token += step

    def tokens(self, team: Int32) -> tuple[Int32, Int32]:
        """The first token of a team, and how far the next one is: few tokens are of many CTAs."""
        ctas = cute.arch.grid_dim()[0]
        return team * ctas + cute.arch.block_idx()[0], ctas * self.config.num_teams

    @cute.jit
    def compute(
        self,
        index: cute.Tensor,
        offs: cute.Tensor | None,
        out: Output,
        lane: Lane,
        shared: SharedMemory,
    ) -> None:
        """A team's tokens: rows to codes, and both to all rows of the token."""
        config, top_k = self.config, index.shape[1]
        groups = Grouping(offs, offs.shape[0], out.codes.shape[0], Int32(0))
        if const_expr(self.writes_scales):
            if const_expr(self.is_tiled):
                self.clear_scale_padding(lane)
            self.clear_other_slots(groups, out.scales, lane)
        stage, phase, parity = Int32(0), Int32(0), Int32(0)
        token, step = self.tokens(lane.team)
        while token < index.shape[0]:
            slot = lane.team * config.num_stages + stage
            cute.arch.mbarrier_wait(shared.full + slot, phase)
            words, a = self.load_row(shared.rows.toint() + slot * self.stage_bytes, lane)
            self.release(shared.empty + slot)
            stage, phase = self.next_stage(stage, phase)
            level, g = self.codec.zero_level(), Float32(0.0)
            if const_expr(config.computes_amax):
                g = self.row_amax(a, lane, parity, shared)
                level = self.codec.global_scale(g)
                parity ^= 1
            for first in cutlass.range(0, top_k, WARP_SIZE, unroll=1):
                some = lane._replace(
                    places=shared.packets.toint() + lane.warp * (WARP_SIZE * _PLACE),
                    num_places=cutlass.min(top_k - first, Int32(WARP_SIZE)),
                )
                row = self.find(index, groups, out, token, first, some)
                if const_expr(config.computes_amax):
                    if row >= 0 and lane.lane < WARP_SIZE:
                        out.amax[row] = g
                self.write_row(words, a, level, Int64(0), Boolean(True), lane.staged, some)
                if const_expr(self.writes_scales):
                    self.sync_team(lane.team)
                    self.write_token_scales(out.scales, some)
                    self.sync_team(lane.team)
                # The next places take the room of these.
                cute.arch.sync_warp()
            token += step

    @cute.jit
    def find(
        self,
        index: cute.Tensor,
        groups: Grouping,
        out: Output,
        token: Int32,
        first: Int32,
        lane: Lane,
    ) -> Int32:
        """Note where each of a warp's rows of the token goes; gives that of this lane, -1 for none."""
        k = first + cute.arch.lane_idx()
        row, codes_at, scales_at = Int32(-1), Int64(0), Int64(0)
        if k < index.shape[1]:
            row = index[token, k]
            if row < 0 or row >= groups.last_row():
                row = Int32(-1)
            else:
                codes_at = row_address(out.codes, row)
                if const_expr(self.writes_scales):
                    group, _ = groups.holding(row, Int32(0))
                    start = group_start(groups.offs, group, groups.num_rows)
                    slot = row - start + (start // TILE_ROWS + group) * TILE_ROWS
                    scales_at = self.slot_address(out.scales, slot)
        words = [Uint32(at >> shift) for at in (codes_at, scales_at) for shift in (0, 32)]
        store_shared(lane.places + cute.arch.lane_idx() * _PLACE, words)
        cute.arch.sync_warp()
        return row

    @cute.jit
    def put(self, at: Int64, words: list[Uint32], lane: Lane) -> None:
        """Store words ``at`` bytes behind the beginning of each row of the token."""
        for i in cutlass.range(lane.num_places, unroll=4):
            to = _address(load_shared(lane.places + i * _PLACE, 2))
            if to != 0:
                store_global_past_l1(to + at, words)

    # ---- scales

    def slot_address(self, scales: cute.Tensor, slot: Int32) -> Int64:
        """Where the first scales of a slot's row are."""
        return (
            row_scales_at(scales, slot)
            if self.is_tiled
            else scales.iterator.toint() + Int64(slot) * 4
        )

    def word_pitch(self, scales: cute.Tensor) -> Int64:
        """Bytes from one word of a row's scales to the next."""
        return Int64(SF_TILE_BYTES if self.is_tiled else scales.shape[len(scales.shape) - 1] * 4)

    @cute.jit
    def write_token_scales(self, scales: cute.Tensor, lane: Lane) -> None:
        """A token's scales to the slots of its rows, a word a lane."""
        for j in cutlass.range(lane.lane, self.scale_words(lane), self.team_threads, unroll=1):
            word, after = load_shared(lane.staged + j * 4, 1), Int64(j) * self.word_pitch(scales)
            for i in cutlass.range(lane.num_places, unroll=4):
                to = _address(load_shared(lane.places + (i * _PLACE + _PLACE // 2), 2))
                if to != 0:
                    store_global(to + after, word)

    @cute.jit
    def clear_other_slots(self, groups: Grouping, scales: cute.Tensor, lane: Lane) -> None:
        """Zero the scales of rows that the last tile of a group has beside those of the group."""
        warps, words = self.config.num_compute_warps, self.scale_words(lane)
        warp = cute.arch.block_idx()[0] * warps + lane.warp
        for item in cutlass.range(
            warp, groups.num_groups * words, cute.arch.grid_dim()[0] * warps, unroll=1
        ):
            group = item // words
            tile, start, end = groups.span(group)
            count = cutlass.max(end - start, Int32(0))
            last = (count + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
            for row in cutlass.range(count + cute.arch.lane_idx(), last, WARP_SIZE, unroll=1):
                to = self.slot_address(scales, tile * TILE_ROWS + row)
                store_global(
                    to + Int64(item - group * words) * self.word_pitch(scales), [Uint32(0)]
                )


class TokenValuesQuantizer(TokensQuantizer, RowValuesQuantizer):
    """The same to values."""


def _address(words: list[Uint32]) -> Int64:
    """An address of its two halves."""
    low, high = (Uint64(word) for word in words)
    return Int64(high << 32 | low)
